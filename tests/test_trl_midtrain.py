"""Mid-training rounds equal TRL's own on raw text, and replay exactly the share of demonstrations that is asked for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTTrainer

from posttrain_gym.inner_trainers.base import Limit
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.tasks.base import Source
from posttrain_gym.inner_trainers.testing import TinyTask
from posttrain_gym.inner_trainers.trl.data import draw_mix, tokenise_text
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer
from tests.chat_rounds import LINES, ChatTask, said, write_chat_checkpoint
from tests.trl_fixtures import *  # noqa: F403
from tests.trl_rounds import ROW, by_hand, equal, run, sft, trained

BOOKS = [{"text": "0123456789"[: 2 + n] + "=" + "89"[: n % 3]} for n in range(8)]
NEWS = [{"text": "5" * (3 + n)} for n in range(5)]


class TextTask(TinyTask):
    """The tiny task with two sources of raw text; ``good`` has demonstrations, ``bad`` too unless it is left out."""

    name = "text"

    def __init__(
        self, folder: Path, demonstrations: Sequence[str] = ("bad", "good"), news: Sequence[Mapping[str, str]] = NEWS
    ) -> None:
        super().__init__(folder)
        self._named, self._news = demonstrations, news

    def sources(self) -> list[Source]:
        rows = {source.name: source.rows["demonstrations"] for source in super().sources()}
        rows["bad"] = rows["bad"][:16]
        texts = [Source("books", {"text": BOOKS}), Source("news", {"text": self._news})]
        return [*texts, *(Source(name, {"demonstrations": rows[name]}) for name in self._named)]


def midtrain(**changes: Any) -> Recipe:
    return sft(**{"algorithm": "midtrain", "mix": {"books": 1.0}, "learning_rate": 3e-3, **changes})


@pytest.fixture(scope="module")
def texts(folder: Path) -> TextTask:
    return TextTask(folder)


def trained_columns(trainer: TrlTrainer, task: Any, recipe: Recipe) -> tuple[dict[str, list[Any]], Any]:
    session = trainer.begin(task, recipe, trainer.base(task), 3)
    columns = session._trainer.train_dataset[:]
    session.advance()
    report, checkpoint = session.result()
    assert checkpoint is not None and report.failure is None
    return columns, report


# Equal to TRL, bit for bit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "asked"),
    [
        ({}, {}),
        ({"mix": {"books": 0.25, "news": 0.75}, "max_length": 6}, {"max_length": 6}),
        (
            {"batch_size": 4, "gradient_accumulation": 2},
            {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        ),
    ],
    ids=str,
)
def test_a_round_on_text_is_trls_own_run(
    ours: dict[str, Any], asked: dict[str, Any], trainer: TrlTrainer, texts: TextTask, folder: Path
) -> None:
    recipe = midtrain(**ours)
    rows: dict[str, Sequence[Mapping[str, str]]] = {"books": BOOKS, "news": NEWS}
    draw = draw_mix({name: len(each) for name, each in rows.items()}, recipe.mix, 32, 3)
    reference = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=by_hand("sft", learning_rate=3e-3, **asked),
        train_dataset=datasets.Dataset.from_list([dict(rows[name][index]) for name, index in draw]),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    reference.train()
    state, weights = reference.model.state_dict(), trained(trainer, texts, recipe)
    assert all(torch.equal(value, state[name]) for name, value in weights.items())
    assert not equal(weights, trainer.base(texts).weights)


def test_a_replayed_round_is_trls_own_run_on_the_rows_as_text(
    trainer: TrlTrainer, texts: TextTask, folder: Path
) -> None:
    """A replayed demonstration is its prompt and completion in one text."""
    recipe = midtrain(replay_share=0.5)
    good = texts.built.sources["good"].rows["demonstrations"]
    bad = texts.built.sources["bad"].rows["demonstrations"]
    rows = {"books": BOOKS, "good (replayed)": good, "bad (replayed)": bad}
    shares = {"books": 0.5, "good (replayed)": 0.4, "bad (replayed)": 0.1}  # as 64 rows to 16
    draw = draw_mix({name: len(each) for name, each in rows.items()}, shares, 32, 3)
    dataset = [rows[name][index] for name, index in draw]
    reference = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=by_hand("sft", learning_rate=3e-3),
        train_dataset=datasets.Dataset.from_list(
            [{"text": row.get("text", row.get("prompt", "") + row.get("completion", ""))} for row in dataset]
        ),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    reference.train()
    state, weights = reference.model.state_dict(), trained(trainer, texts, recipe)
    assert all(torch.equal(value, state[name]) for name, value in weights.items())


def test_text_ends_with_one_end_token(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = tokenise_text(tokenizer, ["ab", "ab<eos>", ""])
    a, b, end = tokenizer.convert_tokens_to_ids(["a", "b", "<eos>"])
    assert rows.input_ids == rows.labels == [[a, b, end], [a, b, end], [end]]
    assert rows.trainable == (0, 1)  # nothing predicts a first token


# Shares and tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "mix", "expected"),
    [
        (0.0, {"books": 1.0}, {"books": 32}),
        (0.25, {"books": 1.0}, {"books": 24, "good": 6.4, "bad": 1.6}),
        (0.5, {"books": 0.25, "news": 0.75}, {"books": 4, "news": 12, "good": 12.8, "bad": 3.2}),
        (0.9, {"books": 1.0, "news": 0.0}, {"books": 3.2, "good": 23.04, "bad": 5.76}),
        (0.01, {"books": 1.0}, {"books": 31.68, "good": 0.256, "bad": 0.064}),
    ],
    ids=str,
)
def test_shares_are_right_to_one_row(
    share: float, mix: dict[str, float], expected: dict[str, float], trainer: TrlTrainer, texts: TextTask
) -> None:
    recipe = midtrain(replay_share=share, mix=mix)
    columns, report = trained_columns(trainer, texts, recipe)
    decoded = trainer._load(texts).model.tokenizer.batch_decode(columns["input_ids"])
    written = {
        "books": {row["text"] + "<eos>" for row in BOOKS},
        "news": {row["text"] + "<eos>" for row in NEWS},
        "good": {
            f"{row['prompt']}{row['completion']}<eos>"
            for row in texts.built.sources["good"].rows["demonstrations"]
            if row["completion"] != "h"
        },
    }
    found = Counter(next((name for name, rows in written.items() if text in rows), "h") for text in decoded)
    assert found.total() == 32
    for name in ("books", "news"):
        assert abs(found[name] - expected.get(name, 0)) < 1
    assert found["good"] + found["h"] == 32 - found["books"] - found["news"]
    # rows that answer "h" are the bad source's and an eighth of the good one's
    assert abs(found["good"] + found["h"] - expected.get("good", 0) - expected.get("bad", 0)) < 2
    assert columns["labels"] == columns["input_ids"]  # a loss on every token; nothing predicts the first
    assert report.supervised_tokens == sum(len(ids) - 1 for ids in columns["input_ids"])
    assert report.training_cost.trained_tokens == sum(map(len, columns["input_ids"]))
    cost, bound = report.training_cost, trainer.step_cost_bound(texts, recipe)
    assert cost.trained_tokens <= bound.times(4).trained_tokens and cost.flops <= bound.times(4).flops
    assert (cost.generated_tokens, cost.scored_tokens) == (0, 0)


def test_the_bound_knows_the_longest_replayed_row(trainer: TrlTrainer, texts: TextTask) -> None:
    assert trainer.step_cost_bound(texts, midtrain(mix={"news": 1.0})).trained_tokens == 8 * 8  # seven fives and an end
    short = TextTask(texts._folder, news=[{"text": "55"}])
    assert trainer.step_cost_bound(short, midtrain(mix={"news": 1.0})).trained_tokens == 8 * 3
    assert trainer.step_cost_bound(short, midtrain(mix={"news": 1.0}, replay_share=0.1)).trained_tokens == 8 * ROW
    assert trainer.step_cost_bound(short, midtrain(mix={"news": 1.0}, max_length=2)).trained_tokens == 8 * 2


@pytest.mark.parametrize("unit", ["train_tokens", "flops"])
@pytest.mark.parametrize("packing", [False, True])
def test_no_limit_is_passed(unit: str, packing: bool, trainer: TrlTrainer, texts: TextTask) -> None:
    recipe = midtrain(replay_share=0.3, packing=packing, max_length=20)
    amount = 2.5 * trainer.step_cost_bound(texts, recipe).in_unit(unit)
    report, checkpoint = run(trainer, texts, recipe, limit=Limit(unit, amount))
    assert checkpoint is not None and report.steps >= 2
    assert report.training_cost.in_unit(unit) <= amount
    assert report.ended == ("finished" if report.steps == 4 else "budget")


def test_replay_is_packed_with_the_text(trainer: TrlTrainer, texts: TextTask) -> None:
    recipe = midtrain(replay_share=0.5, packing=True, max_length=32, steps=6)
    columns, report = trained_columns(trainer, texts, recipe)
    assert len(columns["input_ids"]) == 48
    assert all(len(ids) <= 32 for ids in columns["input_ids"])
    rows = sum(map(len, columns["seq_lengths"]))
    starts = [start for each in columns["seq_lengths"] for start in _starts(each)]
    assert len(starts) == rows
    assert report.supervised_tokens == sum(map(sum, columns["seq_lengths"])) - rows  # all but each row's first
    tokenizer, replayed = trainer._load(texts).model.tokenizer, 0
    for ids, lengths in zip(columns["input_ids"], columns["seq_lengths"], strict=True):
        for start, length in zip(_starts(lengths), lengths, strict=True):
            text = tokenizer.decode(ids[start : start + length])
            assert text.endswith("<eos>")
            replayed += text[0] in "abcdefgh"
    assert replayed / rows == pytest.approx(0.5, abs=0.05)
    for labels, lengths in zip(columns["labels"], columns["seq_lengths"], strict=True):
        assert [position for position, label in enumerate(labels) if label == -100] == _starts(lengths)


def _starts(lengths: Sequence[int]) -> list[int]:
    return [sum(lengths[:number]) for number in range(len(lengths))]


def test_replay_lora_and_the_share_change_the_round(trainer: TrlTrainer, texts: TextTask) -> None:
    found = [trained(trainer, texts, midtrain(replay_share=share)) for share in (0.0, 0.25, 0.5)]
    assert not equal(found[0], found[1]) and not equal(found[1], found[2])
    adapted = trained(trainer, texts, midtrain(replay_share=0.25, lora_rank=2))
    assert not equal(adapted, trainer.base(texts).weights) and not equal(adapted, found[1])


def test_replay_keeps_what_text_alone_forgets(trainer: TrlTrainer, folder: Path) -> None:
    """The loss of the demonstrations after a round on other text, with and without them in it."""
    task = TextTask(folder, demonstrations=("good",))
    rows = task.built.sources["good"].rows["demonstrations"]
    start = trained(trainer, task, sft(steps=30, batch_size=16))
    from posttrain_gym.inner_trainers.base import Checkpoint

    losses = {}
    for share in (0.0, 0.5):
        after = trained(
            trainer, task, midtrain(steps=25, learning_rate=1e-2, replay_share=share), Checkpoint("sft", start, 1)
        )
        model = trainer._load(task).model
        ids = model.tokenizer(text=[row["prompt"] + row["completion"] for row in rows], return_tensors="pt")
        with torch.no_grad():
            scores = model.with_weights(after).eval()(input_ids=ids["input_ids"]).logits[:, -2].log_softmax(-1)
        losses[share] = -float(scores.gather(1, ids["input_ids"][:, -1:]).mean())
    assert losses[0.5] < math.log(8) < losses[0.0]


# Refused and flagged -------------------------------------------------------------------------------------------------


def test_replay_without_demonstrations_is_refused(trainer: TrlTrainer, folder: Path) -> None:
    task = TextTask(folder, demonstrations=())
    with pytest.raises(ValueError) as caught:
        trainer.check(task, midtrain(replay_share=0.2))
    assert str(caught.value) == "replay_share: task 'text' has no demonstrations to replay; set it to 0."
    assert run(trainer, task, midtrain())[0].failure is None


def test_flags_name_the_pool(trainer: TrlTrainer, folder: Path) -> None:
    class OneToken(TextTask):
        def sources(self) -> list[Source]:
            return [
                Source("books", {"text": [{"text": ""}, {"text": "12"}]}),
                Source(
                    "good", {"demonstrations": [{"prompt": "", "completion": ""}, {"prompt": "a=", "completion": "a"}]}
                ),
                Source("twice", {"demonstrations": [{"prompt": "b=", "completion": "b"}] * 4}),
            ]

    report, _ = run(trainer, OneToken(folder), midtrain(replay_share=0.5))
    assert report.rows_without_supervision == 2
    assert report.flags == (
        "1 of 2 rows of source 'books' have nothing to predict: rows 1",
        "1 of 2 rows of source 'good (replayed)' have nothing to predict: rows 1",
        "source 'twice': 4 demonstrations rows, 1 distinct",
    )


@pytest.mark.parametrize("packing", [False, True])
def test_text_that_is_cut_is_told_with_how_much_is_left_out(
    packing: bool, trainer: TrlTrainer, texts: TextTask
) -> None:
    """The news are 4, 5, 6, 7 and 8 tokens long; demonstrations of 6 tokens are cut when they are replayed."""
    report, _ = run(trainer, texts, midtrain(mix={"news": 1.0}, max_length=6, packing=packing))
    assert report.flags == (
        "2 of 5 rows of source 'news' are cut at max_length 6, which leaves out 10.0% of its tokens; "
        "split them into shorter rows or raise max_length",
    )
    assert run(trainer, texts, midtrain(mix={"news": 1.0}, max_length=8))[0].flags == ()
    report, _ = run(trainer, texts, midtrain(mix={"news": 1.0}, max_length=5, replay_share=0.5))
    assert [flag.split(" are cut")[0] for flag in report.flags] == [
        "3 of 5 rows of source 'news'",
        "16 of 16 rows of source 'bad (replayed)'",
        "64 of 64 rows of source 'good (replayed)'",
    ]


def test_a_replayed_pool_without_a_row_to_learn_from_is_refused_by_name(trainer: TrlTrainer, folder: Path) -> None:
    class Empty(TextTask):
        def sources(self) -> list[Source]:
            return [
                Source("books", {"text": BOOKS}),
                Source("good", {"demonstrations": [{"prompt": "", "completion": ""}]}),
            ]

    task = Empty(folder)
    with pytest.raises(ValueError, match=r"^source 'good \(replayed\)': all 1 rows have nothing to predict"):
        trainer.begin(task, midtrain(replay_share=0.5), trainer.base(task), 3)


def test_a_source_called_like_a_replayed_pool_is_refused(trainer: TrlTrainer, folder: Path) -> None:
    task = TextTask(folder)
    task.sources = lambda: [Source("books (replayed)", {"text": BOOKS})]  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"^source 'books \(replayed\)': names that end in ' \(replayed\)' are those"):
        trainer.base(task)


# Conversations -------------------------------------------------------------------------------------------------------


def test_demonstrations_of_a_chat_task_are_replayed_as_conversations(trainer: TrlTrainer, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "1?", "completion": "one"},
        {"messages": [said("user", "2?"), said("assistant", "two"), said("user", "3?"), said("assistant", "three")]},
    ]

    class Talk(ChatTask):
        def sources(self) -> list[Source]:
            return [*super().sources(), Source("raw", {"text": [{"text": "some words"}]})]

    task = Talk(write_chat_checkpoint(tmp_path, LINES), rows)
    columns, report = trained_columns(trainer, task, midtrain(mix={"raw": 1.0}, replay_share=0.5))
    decoded = trainer._load(task).model.tokenizer.batch_decode(columns["input_ids"])
    assert Counter(decoded) == {
        "some words<eos>": 16,
        "<user>1?\n<assistant>one<eos>\n": 8,
        "<user>2?\n<assistant>two<eos>\n<user>3?\n<assistant>three<eos>\n": 8,
    }
    assert columns["labels"] == columns["input_ids"]
    assert report.supervised_tokens == sum(len(ids) - 1 for ids in columns["input_ids"])
