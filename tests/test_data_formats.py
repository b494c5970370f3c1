"""Forms of rows are told by their columns; a row of each becomes what tasks train on, or says why it cannot."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain_gym.inner_trainers.data.formats import FORMATS, detect_format, renamed

USER = {"role": "user", "content": "Name a prime."}
SEVEN = {"role": "assistant", "content": "7"}
EIGHT = {"role": "assistant", "content": "8"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"city": "Graz"}}]}


def convert(row: dict[str, Any], kind: str | None = None) -> tuple[str, dict[str, Any]]:
    form = detect_format(row, "a.jsonl, line 3", kind)
    return form.kind, form.convert(row, "a.jsonl, line 3")


@pytest.mark.parametrize(
    ("row", "kind", "converted"),
    [
        ({"text": "x", "id": 1}, "text", {"text": "x"}),
        ({"prompt": "a", "completion": "b", "id": 1}, "demonstrations", {"prompt": "a", "completion": "b"}),
        ({"messages": [USER, SEVEN], "id": 1}, "demonstrations", {"messages": [USER, SEVEN]}),
        ({"prompt": [USER], "completion": [SEVEN]}, "demonstrations", {"messages": [USER, SEVEN]}),
        ({"prompt": "Name a prime.", "completion": [SEVEN]}, "demonstrations", {"messages": [USER, SEVEN]}),
        (
            {"conversations": [{"from": "human", "value": "Name a prime."}, {"from": "gpt", "value": "7"}]},
            "demonstrations",
            {"messages": [USER, SEVEN]},
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 2},
            "preferences",
            {"prompt": "a", "chosen": "b", "rejected": "c"},
        ),
        (
            {"prompt": [USER], "chosen": [SEVEN], "rejected": [EIGHT]},
            "preferences",
            {"prompt": "Name a prime.", "chosen": [SEVEN], "rejected": [EIGHT]},
        ),
        (
            {"chosen": [USER, SEVEN], "rejected": [USER, EIGHT]},
            "preferences",
            {"prompt": "Name a prime.", "chosen": [SEVEN], "rejected": [EIGHT]},
        ),
        (
            {"chosen": "The sky is blue.", "rejected": "The sky is green."},
            "preferences",
            {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
        ),
        ({"prompt": "a", "answer": 7}, "prompts", {"prompt": "a", "answer": 7}),
        ({"prompt": [USER], "answer": "7"}, "prompts", {"prompt": "Name a prime.", "answer": "7"}),
        ({"messages": [USER, CALL]}, "demonstrations", {"messages": [USER, CALL]}),
    ],
)
def test_rows_of_every_form(row: dict[str, Any], kind: str, converted: dict[str, Any]) -> None:
    assert convert(row) == (kind, converted)


def test_a_kind_can_be_asked_for() -> None:
    assert convert({"prompt": "a", "completion": "b"}, "prompts") == ("prompts", {"prompt": "a", "completion": "b"})
    with pytest.raises(ValueError, match="rows have chosen and rejected; the columns here are completion, prompt"):
        convert({"prompt": "a", "completion": "b"}, "preferences")
    with pytest.raises(ValueError, match=r"unknown kind 'prompt'\. Did you mean 'prompts'"):
        convert({"prompt": "a"}, "prompt")


def test_unknown_columns_are_listed_with_renames() -> None:
    with pytest.raises(ValueError) as error:
        convert({"instruction": "a", "output": "b"})
    assert "the columns here are instruction, output." in str(error.value)
    assert "columns {prompt: instruction, completion: output}" in str(error.value)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a", "completion": "b", "label": True}, "good or bad"),
        ({"prompt": "a", "completion": None}, "column 'completion' must be text, got None"),
        ({"prompt": "a", "completion": 7}, "got 7 (int)"),
        ({"prompt": [USER, SEVEN, USER], "completion": [EIGHT]}, "its prompt holds an assistant's turn"),
        ({"prompt": [USER, SEVEN, USER], "answer": "x"}, "prompts are one text here"),
        ({"messages": [USER, SEVEN], "tools": [{"name": "f"}]}, "column 'tools'"),
        ({"messages": "x"}, "must be a list of turns"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "turn 2 (assistant): content is null"),
        ({"messages": [SEVEN]}, "must be the user's"),
        ({"conversations": [{"from": "martian", "value": "x"}]}, "unknown speaker 'martian'"),
        ({"conversations": [{"who": "gpt"}]}, "turn 1: expected from and value"),
        ({"chosen": "abc", "rejected": "xyz"}, "no common beginning"),
        ({"text": "\ud800"}, "lone surrogate"),
    ],
)
def test_rows_that_cannot_be_used_say_why(row: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as error:
        convert(row)
    assert str(error.value).startswith("a.jsonl, line 3")
    assert said in str(error.value)


def test_tool_call_arguments_render_the_same_as_object_and_as_text() -> None:
    from posttrain_gym.inner_trainers.tasks.turns import plain_turns

    text = {**CALL, "tool_calls": [{"name": "f", "arguments": '{"city": "Graz"}'}]}
    rows = [convert({"messages": [USER, turn]})[1]["messages"] for turn in (CALL, text)]
    assert plain_turns(rows[0]) == plain_turns(rows[1])
    assert plain_turns(rows[0])[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"name": "f", "arguments": {"city": "Graz"}}],
    }


def test_columns_are_renamed() -> None:
    row = {"question": "a", "answer": "b", "id": 1}
    assert renamed(row, {"prompt": "question"}, "x") == {"answer": "b", "id": 1, "prompt": "a"}
    assert renamed({"a": 1, "b": 2}, {"a": "b", "b": "a"}, "x") == {"a": 2, "b": 1}
    assert renamed(row, None, "x") == row
    with pytest.raises(ValueError, match=r"no column 'qestion', which is to be 'prompt'\. Did you mean 'question'"):
        renamed(row, {"prompt": "qestion"}, "x")
    with pytest.raises(ValueError, match="column 'answer' is to be 'id', and there is one of that name"):
        renamed(row, {"id": "answer"}, "x")


def test_every_form_is_found_by_its_own_columns() -> None:
    for form in FORMATS.values():
        assert detect_format(form.columns, "x") == form
