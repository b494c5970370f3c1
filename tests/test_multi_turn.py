"""The user's scripted turns are played in evaluations, judged over all of the assistant's turns, and paid for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import posttrain_gym.inner_trainers.sampling as sampling
from posttrain_gym.inner_trainers.benchmarks.verifiers import make_verifier
from posttrain_gym.inner_trainers.chat import ChatFormat
from posttrain_gym.inner_trainers.evaluation import Evaluator
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.tasks.base import Benchmark, Chat, Item
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer

from .chat_rounds import LINES, ChatTask, chat_tokenizer, write_chat_checkpoint

FOLLOW_UPS = ("Sure?", "Really?")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_checkpoint(tmp_path_factory.mktemp("chat") / "model")


def seen_turns(benchmark: Benchmark) -> tuple[Benchmark, list[tuple[str, tuple[str, ...]]]]:
    seen: list[tuple[str, tuple[str, ...]]] = []

    def score_turns(item: Item, turns: Sequence[str]) -> float:
        seen.append((item.prompt, tuple(turns)))
        return len(set(turns)) / len(turns)

    return replace(benchmark, score_turns=score_turns), seen


class TalkTask(ChatTask):
    """Items of which some have follow-ups; the test decides which and what scores them."""

    made: Benchmark

    def benchmark(self) -> Benchmark:
        return self.made


def talk(folder: Path, chat: Chat | None, follow_ups: Sequence[str] = FOLLOW_UPS, **more: Any) -> TalkTask:
    task = TalkTask(folder, chat=chat)
    vars(task)["_chat"] = chat  # None too, which stands for the default
    plain = ChatTask.benchmark(task)
    task.made = replace(
        plain,
        validation=[
            replace(item, follow_ups=tuple(follow_ups)) if i % 2 else item for i, item in enumerate(plain.validation)
        ],
        **more,
    )
    return task


def scripted(monkeypatch: pytest.MonkeyPatch, answer: str, tokenizer: Any, end: bool = True) -> list[list[str]]:
    """Let the model say ``answer`` to everything; return the conversations it was given, call by call."""
    calls: list[list[str]] = []

    def sample(model: Any, sequences: Sequence[Sequence[int]], samples: int, *rest: Any, **more: Any) -> Any:
        calls.append([tokenizer.decode(list(ids)) for ids in sequences])
        ids = tokenizer(text=answer, add_special_tokens=False)["input_ids"] + ([tokenizer.eos_token_id] if end else [])
        return [[list(ids) for _ in range(samples)] for _ in sequences]

    monkeypatch.setattr(sampling, "_sample_turns", sample)
    return calls


def completions(monkeypatch: pytest.MonkeyPatch, folder: Path, chat: Chat, follow_ups: Any, **more: Any) -> Any:
    trainer = TrlTrainer(evaluator=Evaluator(seeds=(0,), samples_per_seed=1, k=1))
    resident = trainer._load(ChatTask(folder, chat=chat))
    tokenizer = resident.model.tokenizer
    calls = scripted(monkeypatch, more.pop("answer", "ok"), tokenizer, **more)
    drawn = sampling.sample_completions(
        resident.model.template,
        tokenizer,
        ["one", "two"],
        samples=1,
        max_new_tokens=8,
        temperature=1.0,
        seed=0,
        chat=resident.rows.chat,
        follow_ups=follow_ups,
    )
    return drawn, calls


def test_turns_are_played_as_scripted(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    drawn, calls = completions(monkeypatch, folder, Chat(), [(), FOLLOW_UPS])
    assert calls == [
        ["<user>one<assistant>", "<user>two<assistant>"],
        ["<user>two<assistant>ok<eos><user>Sure?<assistant>"],
        ["<user>two<assistant>ok<eos><user>Sure?<assistant>ok<eos><user>Really?<assistant>"],
    ]
    assert drawn.turns == [[["ok"]], [["ok", "ok", "ok"]]]
    assert drawn.texts == [["ok"], ["ok"]]
    assert drawn.generated_tokens == 4 * 3
    assert (drawn.empty, drawn.clipped) == (0, 0)


def test_a_turn_that_was_cut_is_closed_before_the_user_goes_on(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    drawn, calls = completions(monkeypatch, folder, Chat(), [(), ("Sure?",)], end=False)
    assert calls[1] == ["<user>two<assistant>ok<eos><user>Sure?<assistant>"]
    assert drawn.turns == [[["ok"]], [["ok", "ok"]]]
    assert drawn.clipped == 2


def test_tools_are_answered_between_the_users_turns(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    asked: list[str] = []

    def tool(text: str) -> str | None:
        asked.append(text)
        return "7" if len(asked) == 1 else None

    chat = Chat(tool=tool, max_turns=2)
    drawn, calls = completions(monkeypatch, folder, chat, [("Sure?",), ()])
    assert "<tool>7<assistant>" in calls[1][0]
    assert calls[-1][0].endswith("<user>Sure?<assistant>")
    assert drawn.turns is not None
    assert [len(turns) for turns in (drawn.turns[0][0], drawn.turns[1][0])] == [2, 1]


def test_without_follow_ups_nothing_changes(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    drawn, calls = completions(monkeypatch, folder, Chat(), [(), ()])
    assert (drawn.turns, len(calls)) == (None, 1)


def test_what_the_template_writes_after_a_turn_is_kept() -> None:
    chat = ChatFormat(chat_tokenizer(LINES), Chat(), "tiny")
    assert chat._tokenizer.decode(chat.user_turn("Sure?")) == "\n<user>Sure?\n<assistant>"


def test_the_scorer_sees_all_turns_of_items_that_have_them(folder: Path) -> None:
    task = talk(folder, Chat())
    task.made, seen = seen_turns(task.made)
    trainer = TrlTrainer(evaluator=Evaluator(seeds=(0, 1), samples_per_seed=2, k=2))
    card, cost = trainer.evaluate(task, trainer.base(task), "validation")
    several = [item for item in task.made.validation if item.follow_ups]
    assert len(seen) == len(several) * 4
    assert {len(turns) for _, turns in seen} == {3}
    assert {prompt for prompt, _ in seen} == {item.prompt for item in several}
    bound = trainer.evaluation_cost_bound(task, "validation")
    assert cost.generated_tokens <= bound.generated_tokens
    assert cost.scored_tokens <= bound.scored_tokens
    again = TrlTrainer(evaluator=trainer.evaluator).evaluate(task, trainer.base(task), "validation")[0]
    assert again == card


def test_the_bound_is_met_by_a_model_that_never_ends(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    task = talk(folder, Chat())
    trainer = TrlTrainer(evaluator=Evaluator(seeds=(0,), samples_per_seed=3, k=3))
    tokenizer = trainer._load(task).model.tokenizer
    scripted(monkeypatch, "x" * task.made.max_new_tokens, tokenizer, end=False)
    _, cost = trainer.evaluate(task, trainer.base(task), "validation")
    bound = trainer.evaluation_cost_bound(task, "validation")
    assert cost.generated_tokens == bound.generated_tokens
    assert 0.8 * bound.scored_tokens < cost.scored_tokens <= bound.scored_tokens


def test_follow_ups_need_a_chat_and_count_in_the_hash(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"item .* has follow_ups, so the task must say how turns are written"):
        _ = talk(folder, None).built
    hashes = {talk(folder, Chat(), said).built.content_hash for said in ((), ("Sure?",), ("Really?",))}
    assert len(hashes) == 3


def test_conversations_longer_than_the_positions_are_refused(folder: Path) -> None:
    # a turn of n letters is <eos>, <user>, n letters, <assistant>; after each of the user's turns come 8 new tokens
    task = talk(folder, Chat(), ("s" * 300,))
    trainer = TrlTrainer(evaluator=Evaluator(seeds=(0,), samples_per_seed=1, k=1))
    with pytest.raises(ValueError, match=r"with its 1 follow_ups the conversation can grow to \d+ tokens, .* 256 pos"):
        trainer.evaluate(task, trainer.base(task), "validation")
    assert trainer.evaluate(task, trainer.base(task), "test")[0].items == len(task.made.test)
    with pytest.raises(ValueError, match="lower the benchmark's max_new_tokens"):
        trainer.begin(task, Recipe("sft", {"talk": 1.0}, steps=1), trainer.base(task), 0)


def test_consistency_is_a_verifier_of_such_items(folder: Path) -> None:
    verifier: Any = make_verifier("consistency", extract="whole", require_correct=False)
    task = talk(folder, Chat(), score_turns=lambda item, turns: verifier.score_turns(item.data, turns))
    trainer = TrlTrainer(evaluator=Evaluator(seeds=(0,), samples_per_seed=1, k=1))
    card, _ = trainer.evaluate(task, trainer.base(task), "validation")
    assert 0.0 <= card.score <= 1.0
