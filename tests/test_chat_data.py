"""Rows of turns as a task holds them: what is refused and how, what templates are given, repeats and leaks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from posttrain_gym.inner_trainers.chat import ChatFormat
from posttrain_gym.inner_trainers.evaluation import Evaluator
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.tasks.base import Chat, InnerTask, Source
from posttrain_gym.inner_trainers.tasks.rows import distinct_rows
from posttrain_gym.inner_trainers.tasks.turns import plain_turns
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer
from tests.chat_rounds import LINES, ChatTask, chat_tokenizer, said, write_chat_checkpoint

ASK, ANSWER = said("user", "q"), said("assistant", "a")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_checkpoint(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def trainer() -> TrlTrainer:
    return TrlTrainer(Evaluator(seeds=(0,), samples_per_seed=2, k=2))


def demonstrations(*conversations: Any) -> Source:
    return Source("s", {"demonstrations": [{"messages": turns} for turns in conversations]})


# Turns that are refused, with source, row and turn --------------------------------------------------------------------


CALL = {"name": "f", "arguments": {"city": "Graz"}}


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ("hello", "messages must be a list of turns with role and content, got 'hello'."),
        ([], "messages must be a list of turns with role and content, got []."),
        ([ASK, "a"], "turn 2: expected role and content, got 'a'."),
        (
            [ASK, said("asistant", "a")],
            "turn 2: unknown role 'asistant'. Did you mean 'assistant'? Known: assistant, system, tool, user.",
        ),
        (
            [ASK, said("assistant", None)],
            "turn 2 (assistant): content is null and there is no tool call; write the text, or drop the row.",
        ),
        (
            [said("user", None), ANSWER],
            "turn 1 (user): content is null and there is no tool call; write the text, or drop the row.",
        ),
        ([ASK, {"role": "assistant", "content": 7}], "turn 2 (assistant): content must be text, got 7."),
        ([ASK, {"role": "assistant", "content": [1]}], "turn 2 (assistant): content must be text, got [1]."),
        ([ASK, said("system", "s"), ANSWER], "turn 2: a system turn can only be the first."),
        ([ANSWER, ASK, ANSWER], "the first turn after the system's must be the user's, got assistant."),
        ([said("system", "s"), ANSWER], "the first turn after the system's must be the user's, got assistant."),
        (
            [ASK, ANSWER, ASK],
            "turn 3: the last turn must be the assistant's, which is what is learned, got user; "
            "leave out what follows it.",
        ),
        (
            [said("user", "q", tool_calls=[CALL]), ANSWER],
            "turn 1 (user): only the assistant calls tools; take tool_calls out.",
        ),
        ([ASK, said("assistant", None, tool_calls=CALL)], f"turn 2: tool_calls must be a list, got {CALL!r}."),
        (
            [ASK, said("assistant", None, tool_calls=["f"])],
            "turn 2: a tool call must have a name and arguments, got 'f'.",
        ),
        (
            [ASK, said("assistant", None, tool_calls=[{"arguments": {}}])],
            "turn 2: a tool call must name its function, got {'arguments': {}}.",
        ),
        (
            [ASK, said("assistant", None, tool_calls=[{"name": "f", "arguments": "{city: Graz}"}])],
            "turn 2: the arguments of 'f' are text that is no JSON (Expecting property name enclosed in double quotes: "
            "line 1 column 2 (char 1)): '{city: Graz}'.",
        ),
        (
            [ASK, said("assistant", None, tool_calls=[{"function": {"name": "f", "arguments": "[1]"}}])],
            "turn 2: the arguments of 'f' must be an object, got [1].",
        ),
    ],
)
def test_a_source_names_row_and_turn(turns: Any, message: str) -> None:
    where = "source 's', demonstrations row 2"
    with pytest.raises(ValueError) as caught:
        demonstrations([ASK, ANSWER], turns)
    assert str(caught.value) == f"{where}{', ' if message.startswith('turn') else ': '}{message}"


def test_a_row_has_either_messages_or_prompt_and_completion() -> None:
    with pytest.raises(ValueError) as caught:
        Source("s", {"demonstrations": [{"messages": [ASK, ANSWER], "prompt": "q"}]})
    assert str(caught.value) == "source 's', demonstrations row 1: it has messages and prompt; keep one of the two."


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ([ASK, ANSWER], "column 'chosen': an answer is the assistant's one turn, got user, assistant."),
        (
            [ANSWER, said("tool", "3"), ANSWER],
            "column 'chosen': an answer is the assistant's one turn, got assistant, tool, assistant.",
        ),
        (
            [said("assistant", None)],
            "column 'chosen', turn 1 (assistant): content is null and there is no tool call; "
            "write the text, or drop the row.",
        ),
        (3, "column 'chosen' must be text, got 3 (int)."),
    ],
)
def test_an_answer_of_a_pair_is_text_or_the_assistants_one_turn(chosen: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Source("s", {"preferences": [{"prompt": "q", "chosen": chosen, "rejected": "b"}]})
    separator = ": " if "must be text" in message else ", "
    assert str(caught.value) == f"source 's', preferences row 1{separator}{message}"


def test_turns_need_a_task_that_says_how_they_are_written(folder: Path) -> None:
    class Silent(ChatTask):
        def chat(self) -> Chat | None:
            return None

    with pytest.raises(ValueError) as caught:
        _ = Silent(folder, [{"prompt": "q", "completion": "a"}, {"messages": [ASK, ANSWER]}]).built
    assert str(caught.value) == (
        "task 'chatty': source 'talk', demonstrations row 2 holds turns, so the task must say how they are written; "
        "return Chat() from `chat()` for the template saved with the tokenizer."
    )
    assert Silent(folder).built.chat is None


# A01: rows that are cut -----------------------------------------------------------------------------------------------


def test_turns_that_keep_nothing_of_the_assistant_are_counted_and_named(trainer: TrlTrainer, folder: Path) -> None:
    long = [{"messages": [said("user", "q" * 60), said("assistant", f"{i}")]} for i in range(3)]
    short = [{"messages": [said("user", "q"), said("assistant", f"{i}")]} for i in range(5)]
    task = ChatTask(folder, long + short)
    recipe = Recipe("sft", {"talk": 1.0}, steps=5, batch_size=1, max_length=20)
    session = trainer.begin(task, recipe, trainer.base(task), 0)
    session.advance()
    report = session.result()[0]
    assert (report.failure, report.rows_without_supervision, report.supervised_tokens) == (None, 3, 5 * 2)
    assert report.flags == ("3 of 8 rows of source 'talk' keep no completion token at max_length 20: rows 1, 2, 3",)
    with pytest.raises(ValueError) as caught:
        trainer.begin(ChatTask(folder, long), recipe, trainer.base(task), 0)
    smallest = len("q" * 60) + 2 + 1  # the user's and the assistant's role token, and one token of the answer
    assert str(caught.value) == (
        "max_length: at 20 all 3 rows of source 'talk' keep no completion token; "
        f"the smallest max_length that works is {smallest}."
    )


# A07: values of other types -------------------------------------------------------------------------------------------


def test_numbers_are_refused_and_digits_stay_apart_as_text() -> None:
    rows: list[dict[str, Any]] = [{"prompt": p, "completion": c} for p, c in (("a", "007"), ("b", "7.50"), ("c", 7))]
    with pytest.raises(ValueError) as caught:
        Source("s", {"demonstrations": rows})
    assert str(caught.value) == "source 's', demonstrations row 3: column 'completion' must be text, got 7 (int)."
    kept = Source("s", {"demonstrations": [*rows[:2], {"prompt": "c", "completion": "7"}]}).rows["demonstrations"]
    assert [row["completion"] for row in kept] == ["007", "7.50", "7"]


# A09: tool calls ------------------------------------------------------------------------------------------------------


def calling(name: str, arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [ASK, said("assistant", None, tool_calls=[call]), said("tool", "ok"), ANSWER]


def test_a_call_keeps_its_own_keys_and_null_is_no_word() -> None:
    rows: Sequence[Any] = [
        calling("f", {"city": "Graz"}),
        calling("g", {"zone": "UTC"}),
        calling("f", '{"city": "Graz"}'),
    ]
    source = demonstrations(*rows)
    tokenizer = chat_tokenizer(LINES)
    encoded = ChatFormat(tokenizer, Chat(), "m").encode([r["messages"] for r in source.rows["demonstrations"]], "rows")
    texts = [tokenizer.decode(ids) for ids, _ in encoded]
    shape = "<user>q\n<assistant>{}<eos>\n<tool>ok\n<assistant>a<eos>\n"
    assert texts[0] == texts[2] == shape.format('f{"city": "Graz"}')
    assert texts[1] == shape.format('g{"zone": "UTC"}')
    assert encoded[0] == encoded[2]
    own = [tokenizer.decode([i for i in labels if i != -100]) for _, labels in encoded]
    assert own[0] == 'f{"city": "Graz"}<eos>a<eos>'
    flat = [ASK, said("assistant", None, tool_calls=[{"name": "f", "arguments": '{"city": "Graz"}'}])]
    assert tokenizer.decode(ChatFormat(tokenizer, Chat(), "m").encode([flat], "rows")[0][0]).count("city") == 1


def test_what_templates_are_given_leaves_the_row_as_it_is() -> None:
    row = calling("f", '{"city": "Graz"}')
    plain = plain_turns(row)
    assert plain[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"city": "Graz"}}}],
    }
    assert row == calling("f", '{"city": "Graz"}')


def test_calls_reach_training_without_foreign_keys(trainer: TrlTrainer, tmp_path: Path) -> None:
    """A table of rows would give every call the keys of all; only token ids reach one."""
    task = ChatTask(
        write_chat_checkpoint(tmp_path, LINES),
        [{"messages": calling("f", {"city": "Graz"})}, {"messages": calling("g", {"zone": "UTC"})}],
    )
    session = trainer.begin(task, Recipe("sft", {"talk": 1.0}, steps=1, batch_size=2), trainer.base(task), 0)
    table = session._trainer.train_dataset
    tokenizer = session._trainer.processing_class
    assert set(table.column_names) == {"input_ids", "labels", "row_number"}
    shown = sorted(tokenizer.decode(ids) for ids in table["input_ids"])
    assert ['{"city": "Graz"}' in text for text in shown] == [True, False]
    assert ['{"zone": "UTC"}' in text for text in shown] == [False, True]
    assert not any(word in text for text in shown for word in ("null", "None"))
    session.close()


# A11: rows that repeat, and rows that leak ----------------------------------------------------------------------------


def test_repeated_rows_are_counted_once_where_a_person_sees_it(trainer: TrlTrainer, folder: Path) -> None:
    rows = [{"messages": [said("user", f"{i}"), said("assistant", "a")]} for i in (1, 2, 3, 1, 5, 6, 7, 1, 9, 10)]
    assert distinct_rows(rows) == 8
    task = ChatTask(folder, rows)
    for algorithm, flags in (("sft", ("source 'talk': 10 demonstrations rows, 8 distinct",)), ("grpo", ())):
        recipe = Recipe(algorithm, {"talk": 1.0}, steps=1, batch_size=4, num_generations=4)
        session = trainer.begin(task, recipe, trainer.base(task), 0)
        session.advance()
        assert tuple(flag for flag in session.result()[0].flags if "distinct" in flag) == flags


def test_a_conversation_that_asks_a_benchmark_question_is_taken_out(folder: Path) -> None:
    asked_later = [ASK, ANSWER, said("user", "t1?"), ANSWER]
    answered = [ASK, said("assistant", "v1?")]  # what the assistant says is no prompt
    rows = [{"messages": turns} for turns in ([said("user", "v1?"), ANSWER], asked_later, answered)]
    built = ChatTask(folder, [*rows, {"prompt": "v22?", "completion": "a"}]).built
    assert built.leaked == {"talk": 3}
    assert [row["messages"] for row in built.sources["talk"].rows["demonstrations"]] == [answered]


def test_an_edited_turn_changes_the_content_hash(folder: Path) -> None:
    def content(turns: Any) -> str:
        task: InnerTask = ChatTask(folder, [{"messages": turns}])
        return task.built.content_hash

    same = [content([ASK, ANSWER]), content([dict(reversed(ASK.items())), ANSWER])]
    assert len(set(same)) == 1
    others = [[ASK, said("assistant", "b")], [ASK, ANSWER, ASK, ANSWER], [said("user", "r"), ANSWER]]
    assert len({same[0], *map(content, others)}) == 4
