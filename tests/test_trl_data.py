"""What a round starts from and trains on: rows, the draw of the mix, checkpoints on the disk."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain_gym.inner_trainers.evaluation import Evaluator
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.tasks.base import Source
from posttrain_gym.inner_trainers.testing import TinyTask, write_tiny_checkpoint
from posttrain_gym.inner_trainers.trl import data as data_module
from posttrain_gym.inner_trainers.trl.data import draw_mix, tokenise_demonstrations
from posttrain_gym.inner_trainers.trl.models import load_weights
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer
from tests.trl_fixtures import *  # noqa: F403
from tests.trl_rounds import EveryKind, equal, grpo, run, sft

# End tokens (B07) and lengths (A01) ----------------------------------------------------------------------------------


def test_a_tokenizer_that_pads_with_its_end_token_still_learns_to_end(trainer: TrlTrainer, tmp_path: Path) -> None:
    rows = [{"prompt": "g=", "completion": "a"}, {"prompt": "g=", "completion": "abcdef"}]
    task = TinyTask(write_tiny_checkpoint(tmp_path, pad_is_eos=True), rows=rows)
    session = trainer.begin(task, sft(batch_size=2, steps=1), trainer.base(task), 0)
    tokenizer = session._trainer.processing_class
    end = tokenizer.eos_token_id
    assert tokenizer.pad_token_id == end
    batch = next(iter(session._trainer.get_train_dataloader()))
    labels = sorted(batch["labels"].tolist(), key=lambda row: row.count(-100))
    a, b, c, d, e, f = tokenizer.convert_tokens_to_ids(list("abcdef"))
    assert labels == [
        [-100, -100, a, b, c, d, e, f, end],
        [-100, -100, a, end, -100, -100, -100, -100, -100],
    ]
    session.advance()
    assert session.result()[0].supervised_tokens == 7 + 2


CUT = [{"prompt": "a" * 60, "completion": "abc"}] * 3 + [{"prompt": "a", "completion": f"{i}bc"} for i in range(4, 9)]


def test_rows_without_a_completion_token_are_counted_named_and_left_out(trainer: TrlTrainer, folder: Path) -> None:
    task = TinyTask(folder, rows=CUT)
    recipe = sft(max_length=20, batch_size=1, steps=10)
    session = trainer.begin(task, recipe, trainer.base(task), 0)
    rows = session._trainer.train_dataset["input_ids"]
    tokenizer = session._trainer.processing_class
    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
    assert sorted(texts) == sorted([f"a{i}bc" for i in range(4, 9)] * 2)
    session.advance()
    report, checkpoint = session.result()
    assert report.rows_without_supervision == 3
    cut = "3 of 8 rows of source 'good' keep no completion token at max_length 20: rows 1, 2, 3"
    assert report.flags == (cut, "source 'good': 8 demonstrations rows, 6 distinct")
    assert (report.ended, report.failure, report.supervised_tokens) == ("finished", None, 10 * 4)
    assert report.training_cost.trained_tokens == 10 * 5
    assert checkpoint is not None


def test_a_source_without_any_trainable_row_is_refused_with_the_way_out(trainer: TrlTrainer, folder: Path) -> None:
    task = TinyTask(folder, rows=CUT[:3])
    base = trainer.base(task)
    message = (
        "max_length: at 20 all 3 rows of source 'good' keep no completion token; "
        "the smallest max_length that works is 61."
    )
    for mix in ({"good": 1.0}, {"good": 0.5, "bad": 0.5}):  # another source's rows do not make up for it
        with pytest.raises(ValueError) as caught:
            trainer.begin(task, sft(max_length=20, mix=mix), base, 0)
        assert str(caught.value) == message
    with pytest.raises(ValueError, match="max_length: at 60 all 3 rows"):
        trainer.begin(task, sft(max_length=60), base, 0)
    report, _ = run(trainer, task, sft(max_length=61, batch_size=2, steps=2))
    repeated = "source 'good': 3 demonstrations rows, 1 distinct"
    assert (report.failure, report.supervised_tokens, report.flags) == (None, 4, (repeated,))


def test_rows_that_teach_nothing_at_any_length(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [{"prompt": "", "completion": "a"}, {"prompt": "a", "completion": ""}, {"prompt": "", "completion": ""}]
    tokenised = tokenise_demonstrations(tokenizer, rows).cut(8)
    # the end token is a completion token too; the first token of a row has nothing before it that could predict it
    assert (tokenised.trainable, tokenised.unsupervised, tokenised.smallest_max_length) == ((0, 1), (3,), 2)
    tokenizer.eos_token = None
    tokenised = tokenise_demonstrations(tokenizer, rows).cut(8)
    assert (tokenised.trainable, tokenised.unsupervised, tokenised.smallest_max_length) == ((), (1, 2, 3), None)


def test_a_completion_that_brings_its_own_end_token_gets_no_second(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [{"prompt": "a=", "completion": "b<eos>"}, {"prompt": "a=", "completion": "b"}]
    tokenised = tokenise_demonstrations(tokenizer, rows).cut(8)
    assert tokenised.input_ids[0] == tokenised.input_ids[1]
    assert tokenised.input_ids[0].count(tokenizer.eos_token_id) == 1


def test_a_prompt_without_tokens_is_refused(trainer: TrlTrainer, folder: Path) -> None:
    class Empty(TinyTask):
        def sources(self) -> Any:
            bad, good = super().sources()
            rows = [{**row, "prompt": "" if i == 4 else row["prompt"]} for i, row in enumerate(good.rows["prompts"])]
            return [bad, Source("good", {"prompts": rows}, good.verifier)]

    task = Empty(folder)
    with pytest.raises(ValueError, match="source 'good', prompts row 5: the prompt has no tokens to continue"):
        trainer.begin(task, grpo(), trainer.base(task), 0)


# Drawing the mix -----------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_draw_meets_its_shares_and_repeats_no_row_too_soon(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=5, unique=True))
    parts = data.draw(st.lists(st.integers(0, 20), min_size=len(names), max_size=len(names)).filter(any))
    mix = {name: part / sum(parts) for name, part in zip(names, parts, strict=True)}
    sizes = {name: data.draw(st.integers(1, 12)) for name in names}
    count, seed = data.draw(st.integers(1, 60)), data.draw(st.integers(0, 2**32 - 1))
    drawn = draw_mix(sizes, mix, count, seed)
    assert len(drawn) == count
    assert drawn == draw_mix(sizes, dict(reversed(mix.items())), count, seed)
    for name in names:
        indices = [index for source, index in drawn if source == name]
        assert abs(len(indices) - mix[name] * count) < 1 + 1e-9
        if mix[name] == 0:
            assert indices == []
        times = [indices.count(i) for i in range(sizes[name])]
        assert len(indices) == sum(times)
        assert max(times) - min(times) <= 1


@pytest.mark.parametrize("excess", [6e-6, -6e-6])
def test_a_mix_that_sums_to_one_within_its_tolerance_draws_the_exact_count(excess: float) -> None:
    mix = {"a": 0.5 + excess, "b": 0.5 + excess / 2}
    assert len(draw_mix({"a": 700, "b": 900}, mix, 800_001, 0)) == 800_001


def test_other_seeds_draw_other_rows() -> None:
    draws = {tuple(draw_mix({"a": 50, "b": 50}, {"a": 0.5, "b": 0.5}, 20, seed)) for seed in range(20)}
    assert len(draws) == 20


# Checkpoints and the disk --------------------------------------------------------------------------------------------


def truncate(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def pickled(folder: Path) -> None:
    torch.save(AutoModelForCausalLM.from_pretrained(folder).state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "truncated": truncate,
    "no-config": lambda folder: (folder / "config.json").unlink(),
    "broken-config": lambda folder: (folder / "config.json").write_text("{"),
    "no-weights": lambda folder: (folder / "model.safetensors").unlink(),
    "empty-weights": lambda folder: (folder / "model.safetensors").write_bytes(b""),
    "no-tokenizer": lambda folder: list(map(os.unlink, folder.glob("tokenizer*"))),
    "pickle-only": pickled,
    "remote-code": lambda folder: (folder / "config.json").write_text(
        '{"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}'
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_name(damage: str, trainer: TrlTrainer, tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "model")
    DAMAGES[damage](folder)
    with pytest.raises(ValueError, match=f"base checkpoint: {folder} "):
        trainer.base(TinyTask(folder))


def test_a_loader_that_fails_without_a_message(
    trainer: TrlTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(ValueError, match=r"cannot be loaded \(AssertionError\)"):
        trainer.base(TinyTask(write_tiny_checkpoint(tmp_path, seed=7)))  # unknown yet: an equal one would be resident


def test_a_folder_that_was_rewritten_is_loaded_anew(trainer: TrlTrainer, tmp_path: Path) -> None:
    first = trainer.base(TinyTask(write_tiny_checkpoint(tmp_path, seed=0)))
    kept = tmp_path / "model.safetensors"
    stamp = kept.stat()
    again = trainer.base(TinyTask(tmp_path))
    assert again.weights is first.weights  # resident: not read twice
    write_tiny_checkpoint(tmp_path, seed=1)
    os.utime(kept, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert kept.stat().st_size == stamp.st_size
    second = trainer.base(TinyTask(tmp_path))
    assert not equal(second.weights, first.weights)
    trainer.base(TinyTask(write_tiny_checkpoint(tmp_path / "other")))
    assert equal(trainer.base(TinyTask(tmp_path)).weights, second.weights)


def test_a_second_episode_on_an_instance_tokenises_and_scores_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, counts = TrlTrainer(Evaluator(seeds=(0,), samples_per_seed=1, k=1)), {"rows": 0, "scored": 0}
    tokenise, evaluate = data_module.tokenise_demonstrations, Evaluator.evaluate

    def counted_rows(*args: Any) -> Any:
        counts["rows"] += 1
        return tokenise(*args)

    def counted_scores(self: Evaluator, *args: Any, **more: Any) -> Any:
        counts["scored"] += 1
        return evaluate(self, *args, **more)

    monkeypatch.setattr(data_module, "tokenise_demonstrations", counted_rows)
    monkeypatch.setattr(Evaluator, "evaluate", counted_scores)

    def episode(letter: str) -> tuple[int, int]:
        task = TinyTask(folder, rows=[{"prompt": f"{a}00=", "completion": letter} for a in "abcd"])  # a new object
        trainer.evaluate(task, trainer.base(task), "validation")
        for max_length in (1024, 6, 5):
            assert trainer.step_cost_bound(task, sft(max_length=max_length)).trained_tokens == 8 * min(6, max_length)
        return counts["rows"], counts["scored"]

    assert [episode("a"), episode("a"), episode("b"), episode("a")] == [(1, 1), (1, 1), (2, 2), (2, 2)]
    for number in range(8):
        episode(str(number))
    assert len(trainer._residents) == 8  # and no more
    assert episode("7") == (10, 10)
    assert episode("a") == (11, 11)  # the longest unused was let go


def test_no_telemetry_even_where_the_hub_library_came_first() -> None:
    code = (
        "import huggingface_hub.constants as c; assert not c.HF_HUB_DISABLE_TELEMETRY\n"
        "import posttrain_gym.inner_trainers.trl.models\nprint(c.HF_HUB_DISABLE_TELEMETRY)"
    )
    hidden = ("HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY", "DO_NOT_TRACK")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_weights_of_another_model_are_refused(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    own = {name: value.clone() for name, value in model.state_dict().items()}
    norm = "model.norm.weight"
    for weights, message in (
        ({**own, norm: torch.ones(33)}, f"1 foreign \\(for example \\['{norm}'\\]\\), 0 missing"),
        ({**own, "model.extra": torch.ones(1)}, "1 foreign \\(for example \\['model.extra'\\]\\), 0 missing"),
        ({k: v for k, v in own.items() if k != norm}, f"0 foreign .*1 missing \\(for example \\['{norm}'\\]\\)"),
        ({}, "0 foreign"),
    ):
        with pytest.raises(ValueError, match=f"weights do not fit the model: {message}"):
            load_weights(model, {name: value * 2 for name, value in weights.items()})
        assert equal(model.state_dict(), own)  # nothing was half loaded
    load_weights(model, {name: value * 2 for name, value in own.items() if name != "lm_head.weight"})  # tied
    assert torch.equal(model.lm_head.weight, own["lm_head.weight"] * 2)


def test_a_round_writes_nothing_to_disk(
    trainer: TrlTrainer, task: TinyTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("temporary", "here", "home"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    for recipe in (sft(), sft(lora_rank=2), grpo(kl_coef=0.1)):
        report, checkpoint = run(trainer, task, recipe)
        assert report.failure is None
        assert checkpoint is not None
        trainer.evaluate(task, checkpoint, "validation")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def damaged_copy(folder: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Return a copy of a checkpoint folder whose weights were changed; the file itself stays sound."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    change(weights)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_a_checkpoint_that_lacks_a_tensor_is_refused(folder: Path, tmp_path: Path) -> None:
    """The library fills the gap with random numbers and only warns."""
    bad = damaged_copy(folder, tmp_path / "bad", lambda weights: weights.pop("model.norm.weight"))
    with pytest.raises(ValueError, match=r"bad does not fit .*: missing keys model\.norm\.weight \(1 in all\)"):
        TrlTrainer().base(TinyTask(bad))


def test_a_checkpoint_with_a_foreign_tensor_is_refused(folder: Path, tmp_path: Path) -> None:
    bad = damaged_copy(folder, tmp_path / "bad", lambda weights: weights.update({"model.extra": torch.zeros(2)}))
    with pytest.raises(ValueError, match=r"unexpected keys model\.extra"):
        TrlTrainer().base(TinyTask(bad))


def test_a_checkpoint_with_nan_weights_is_refused(folder: Path, tmp_path: Path) -> None:
    bad = damaged_copy(folder, tmp_path / "bad", lambda weights: weights["model.norm.weight"].fill_(float("nan")))
    with pytest.raises(ValueError, match=r"bad holds weights that are not finite .*, for example model\.norm\.weight"):
        TrlTrainer().base(TinyTask(bad))


@pytest.mark.parametrize("algorithm", ["sft", "midtrain", "dpo", "kto", "grpo", "rloo", "ppo", "rft", "distill"])
def test_an_end_token_that_the_tokenizer_adds_changes_nothing(algorithm: str, tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    def verifier(row: Any, text: str) -> float:
        return float(sum(map(ord, text)) % 2)

    teacher = write_tiny_checkpoint(tmp_path / "teacher", seed=1)
    recipe = Recipe(algorithm, {"good": 1.0}, steps=2, batch_size=8, num_generations=4, learning_rate=1e-2)
    found = []
    for name in ("plain", "ending"):
        folder = write_tiny_checkpoint(tmp_path / name)
        if name == "ending":
            tokenizer = AutoTokenizer.from_pretrained(folder)
            ends = ("<eos>", tokenizer.eos_token_id)
            tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A <eos>", special_tokens=[ends])
            tokenizer.save_pretrained(folder)
            assert AutoTokenizer.from_pretrained(folder)("ab")["input_ids"][-1] == tokenizer.eos_token_id
        trainer, task = TrlTrainer(), EveryKind(folder, teacher, verifier)
        report, checkpoint = run(trainer, task, recipe)
        assert report.failure is None, report.failure
        assert checkpoint is not None
        found.append((report, checkpoint.weights, trainer.step_cost_bound(task, recipe)))
    (report, weights, bound), (other, others, other_bound) = found
    assert report.supervised_tokens == other.supervised_tokens
    assert report.training_cost.trained_tokens == other.training_cost.trained_tokens
    assert bound == other_bound
    assert equal(weights, others)
