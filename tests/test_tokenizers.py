"""Tokenizers as people have them: beginning and end tokens come once, templates come from one of two places."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

from posttrain_gym.inner_trainers.evaluation import Evaluator
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.tasks.base import Benchmark, Chat, Item, Source
from posttrain_gym.inner_trainers.testing import TinyTask, write_tiny_checkpoint
from posttrain_gym.inner_trainers.trl.algorithms import ALGORITHMS
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer
from tests.trl_fixtures import no_worker_left  # noqa: F401
from tests.trl_rounds import EveryKind, equal, graded, run, sft


def test_a_beginning_token_comes_once_in_every_sequence(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path, adds_bos=True)
    task, trainer = EveryKind(folder, folder, graded), TrlTrainer()
    resident = trainer._load(task)
    tokenizer = resident.model.tokenizer
    a, zero, equals, end, begin = (tokenizer.convert_tokens_to_ids(t) for t in ("a", "0", "=", "<eos>", "<bos>"))
    prompt = [begin, a, a, zero, equals]
    rows = resident.rows.tokenised(ALGORITHMS["sft"], "good")
    assert rows.input_ids[0] == [*prompt, a, end]
    assert rows.labels[0] == [-100] * 5 + [a, end]
    pairs = resident.rows.tokenised(ALGORITHMS["dpo"], "good")
    h = tokenizer.convert_tokens_to_ids("h")
    assert (pairs.chosen[0], pairs.rejected[0]) == ([*prompt, a, end], [*prompt, h, h, end])
    assert (pairs.chosen_prompt[0], pairs.rejected_prompt[0]) == (5, 5)
    assert resident.rows.prompt_ids(["aa0="]) == [prompt]
    for algorithm, trained in (("sft", 7), ("dpo", 7 + 8)):
        recipe = Recipe(algorithm, {"good": 1.0}, steps=2, batch_size=8, learning_rate=1e-3)
        report, _ = run(trainer, task, recipe)
        assert report.failure is None
        assert report.training_cost.trained_tokens == 2 * 8 * trained
    report, _ = run(trainer, task, Recipe("grpo", {"good": 1.0}, steps=1, batch_size=8, num_generations=4))
    assert report.failure is None
    assert report.training_cost.trained_tokens == 8 * 5 + report.training_cost.generated_tokens


class Bytes(TinyTask):
    """A task whose characters are bytes."""

    name = "bytes"

    def sources(self) -> list[Source]:
        rows = [{"prompt": f"{letter}é=", "completion": letter} for letter in "abcdefgh"]
        pairs = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "no"} for row in rows]
        kinds: dict[str, Any] = {"demonstrations": rows, "preferences": pairs, "prompts": rows}
        return [Source("good", kinds, graded)]

    def benchmark(self) -> Benchmark:
        return Benchmark({"x": 1.0}, [Item("aß=", "x")], [Item("bß=", "x")], lambda item, text: 0.0, max_new_tokens=3)


@pytest.mark.filterwarnings("ignore:This sequence already has")
def test_a_tokenizer_written_in_python_that_ends_every_text(tmp_path: Path) -> None:
    """ByT5's has no fast version, adds an end token to every text, and no beginning."""
    tokenizer = ByT5Tokenizer(extra_ids=0)
    tokenizer.save_pretrained(tmp_path)
    config = LlamaConfig.from_pretrained(write_tiny_checkpoint(tmp_path / "sizes"), vocab_size=len(tokenizer))
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    shutil.rmtree(tmp_path / "sizes")
    task, trainer = Bytes(tmp_path), TrlTrainer(Evaluator(seeds=(0,), samples_per_seed=2, k=2))
    resident = trainer._load(task)
    assert not resident.model.tokenizer.is_fast
    end = tokenizer.eos_token_id
    assert tokenizer("a")["input_ids"] == [97 + 3, end]
    assert resident.rows.prompt_ids(["aé="]) == [[97 + 3, 0xC3 + 3, 0xA9 + 3, ord("=") + 3]]
    card, _ = trainer.evaluate(task, trainer.base(task), "validation")
    assert card.samples == 2
    for algorithm, per_row in (("sft", 6), ("dpo", 6 + 7), ("grpo", None)):
        recipe = Recipe(algorithm, {"good": 1.0}, steps=1, batch_size=4, num_generations=4)
        report, _ = run(trainer, task, recipe)
        assert report.failure is None, report.failure
        cost = report.training_cost
        assert cost.trained_tokens == (4 * per_row if per_row else 4 * 4 + cost.generated_tokens)


class Told(TinyTask):
    """The tiny task as turns."""

    def __init__(self, folder: Path, chat: Chat) -> None:
        super().__init__(folder)
        self._chat = chat

    def chat(self) -> Chat:
        return self._chat


TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'user' %}>{% else %}<eos>{% endif %}{% endfor %}"


def test_both_ways_out_of_a_missing_template_lead_to_the_same_round(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "model")
    with pytest.raises(ValueError) as caught:
        TrlTrainer().check(Told(folder, Chat()), sft())
    said = str(caught.value)
    assert str(folder) in said
    assert "Either set tokenizer.chat_template and save the tokenizer" in said
    assert "state one in Chat.template of the task" in said
    _, stated = run(TrlTrainer(), Told(folder, Chat(template=TEMPLATE)), sft())
    saved = shutil.copytree(folder, tmp_path / "saved")
    tokenizer = AutoTokenizer.from_pretrained(saved)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(saved)
    assert (saved / "chat_template.jinja").is_file()
    _, kept = run(TrlTrainer(), Told(saved, Chat()), sft())
    assert stated is not None and kept is not None
    assert equal(stated.weights, kept.weights)
    hashes = {
        Told(folder, chat).built.content_hash for chat in (Chat(template=TEMPLATE), Chat(template=TEMPLATE + " "))
    }
    assert len(hashes) == 2  # a stated template is stored with the task
