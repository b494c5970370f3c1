"""Rows that ask a benchmark item are taken out; items whose words stand in other rows earn no credit and are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

import posttrain_gym  # noqa: F401 - registers the environments
from posttrain_gym.inner_trainers.tasks import Benchmark, InnerTask, Item, Source
from posttrain_gym.inner_trainers.testing import ScriptedTrainer

STORY = "the old miller counted his nine white geese by the frozen river before the sun went down"
TALE = "a young sailor painted seven small boats in green and yellow while rain fell on the quiet harbour"


class Stories(InnerTask):
    name = "stories"

    def __init__(self, *sources: Source, more: tuple[Item, ...] = ()) -> None:
        self._sources, self._more = sources, more

    def base_checkpoint(self) -> Path:
        return Path("none")

    def sources(self) -> list[Source]:
        return list(self._sources)

    def benchmark(self) -> Benchmark:
        validation = [Item(f"{STORY}. How many geese?", "counting"), Item("2+2=", "sums")]
        test = [Item(f"{TALE}. How many boats?", "counting"), Item("2+3=", "sums"), *self._more]
        return Benchmark({"counting": 0.5, "sums": 0.5}, validation, test, score=lambda item, text: 0.0)


def demonstrations(*rows: tuple[str, str]) -> dict[str, list[dict[str, Any]]]:
    return {"demonstrations": [{"prompt": prompt, "completion": completion} for prompt, completion in rows]}


def test_a_row_that_asks_an_item_in_another_form_is_taken_out() -> None:
    rows = demonstrations(("  2+2= ", "4"), ("2-2=", "0"), (f"{TALE.upper()}. How  many boats", "7"))
    built = Stories(Source("own", rows)).built
    assert [row["prompt"] for row in built.sources["own"].rows["demonstrations"]] == ["2-2="]
    assert built.leaked == {"own": 2}
    assert built.contaminated == ()
    assert len(built.benchmark.test) == 2
    assert built.flags == ("rows were taken out because they ask a benchmark prompt: own 2",)


def test_the_users_turns_are_what_a_conversation_asks() -> None:
    turns = [{"role": "user", "content": "2+2= "}, {"role": "assistant", "content": "4"}]

    class Chatting(Stories):
        def chat(self) -> Any:
            from posttrain_gym.inner_trainers.tasks import Chat

            return Chat()

    rows: dict[str, list[dict[str, Any]]] = {
        "demonstrations": [{"messages": turns}, demonstrations(("1", "2+2="))["demonstrations"][0]]
    }
    assert Chatting(Source("own", rows)).built.leaked == {"own": 1}


def test_an_item_that_stands_in_a_row_is_not_credited() -> None:
    text = {"text": [{"text": "Nothing here."}, {"text": f"Once upon a time {STORY.title()}, they say."}]}
    extra = Item("Name a colour of the sea.", "counting")
    task = Stories(Source("books", text), Source("own", demonstrations(("a", "b"))), more=(extra,))

    with pytest.raises(
        ValueError, match="every validation item of dimension 'counting' stands in training rows"
    ) as error:
        _ = task.built
    assert (
        "source 'books', text row 2: 'the old miller counted his nine white geese by the frozen river before'"
        in str(error.value)
    )

    text = {"text": [{"text": "Nothing here."}, {"text": f"Once upon a time {TALE}, they say."}]}
    task = Stories(Source("books", text), Source("own", demonstrations(("a", "b"))), more=(extra,))
    built = task.built
    assert [item.prompt for item in built.benchmark.test] == ["2+3=", extra.prompt]
    assert len(built.benchmark.validation) == 2
    (item,) = built.contaminated
    assert (item.split, item.dimension, item.source, item.kind, item.row) == ("test", "counting", "books", "text", 2)
    assert item.prompt == f"{TALE}. How many boats?"
    assert item.shared == "a young sailor painted seven small boats in green and yellow while rain"
    assert built.leaked == {}
    assert built.flags[0].startswith("1 benchmark items are not scored because a run of their words stands in training")
    clean = Stories(Source("books", {"text": [{"text": "Nothing here."}]}), more=(extra,)).built
    assert clean.content_hash != built.content_hash
    assert clean.flags == ()


def test_what_was_taken_out_is_told_at_reset() -> None:
    class Scripted(Stories):
        def trainer(self) -> Any:
            return ScriptedTrainer()

        def benchmark(self) -> Benchmark:
            items = [Item("1", "x"), Item("2", "y")]
            return Benchmark({"x": 0.5, "y": 0.5}, items, [Item("3", "x"), Item("4", "y")], lambda item, text: 0.0)

    rows = {**demonstrations(("1.", "x"), ("5", "y")), "prompts": [{"prompt": "6"}]}
    env = gym.make("PostTrain/Recipe-v0", task=Scripted(Source("own", rows, lambda row, text: 0.0)))
    assert env.reset(seed=0)[1]["flags"] == ["rows were taken out because they ask a benchmark prompt: own 1"]


def test_a_row_that_is_taken_out_does_not_contaminate() -> None:
    built = Stories(Source("own", demonstrations((f"{TALE}. How many boats?", TALE), ("a", "b")))).built
    assert built.leaked == {"own": 1}
    assert built.contaminated == ()


def test_a_source_of_leaked_rows_alone_keeps_no_kind() -> None:
    built = Stories(
        Source("own", {**demonstrations(("2+2=", "4")), "text": [{"text": "so 2+3=5"}, {"text": "x"}]})
    ).built
    assert {kind: len(rows) for kind, rows in built.sources["own"].rows.items()} == {"text": 1}
    assert built.leaked == {"own": 2}
