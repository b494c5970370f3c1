"""The forms that rows of post-training data have, and how a row of each becomes one that tasks train on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..messages import did_you_mean
from ..tasks.rows import ROW_COLUMNS, check_columns
from ..tasks.turns import check_turns


@dataclass(frozen=True)
class Format:
    """One form of rows, as TRL's trainers take them.

    Attributes:
        name: what messages and tables call it.
        columns: the columns that a row must have; the others are passed over, those of ``prompts`` kept.
        kind: the kind of rows that it becomes, a key of `ROW_COLUMNS`; empty where it cannot become one.
        summary: one line for tables.
    """

    name: str
    columns: tuple[str, ...]
    kind: str
    summary: str

    def convert(self, row: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the row as tasks train on it; values are those of the row, never rewritten.

        Args:
            row: column -> value.
            where: names the row in messages.

        Raises:
            ValueError: the row is not of this form, or not well formed.
        """
        if not self.kind:
            raise ValueError(f"{where}: {_UNPAIRED}")
        converted = _CONVERTERS[self.name](row, where)
        check_columns(where, self.kind, converted)
        return converted


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        form.name: form
        for form in (
            Format("messages", ("messages",), "demonstrations", "conversations: a list of turns with role and content"),
            Format(
                "sharegpt", ("conversations",), "demonstrations", "conversations with from and value, as ShareGPT has"
            ),
            Format("preferences", ("chosen", "rejected"), "preferences", "a better and a worse answer, prompt or not"),
            Format("unpaired", ("prompt", "completion", "label"), "", "single answers marked good or bad"),
            Format("prompt-completion", ("prompt", "completion"), "demonstrations", "a prompt and its answer"),
            Format("text", ("text",), "text", "raw text"),
            Format("prompts", ("prompt",), "prompts", "a prompt, with the columns that a verifier reads"),
        )
    }
)
"""Forms by name; of several that fit a row the first one holds."""

KIND_FORMATS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {kind: tuple(form.name for form in FORMATS.values() if form.kind == kind) for kind in ROW_COLUMNS}
)
"""Kind of rows -> the forms that become it."""

_ALIASES = {
    "instruction": "prompt",
    "question": "prompt",
    "query": "prompt",
    "input": "prompt",
    "output": "completion",
    "response": "completion",
    "answer": "completion",
    "content": "text",
    "dialogue": "messages",
    "conversation": "messages",
}
_UNPAIRED = (
    "it has prompt, completion and label: single answers marked good or bad. Rounds of kto train on pairs here, so "
    "write rows with prompt, chosen and rejected (a good and a bad answer of one prompt each)."
)
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}


def detect_format(columns: Collection[str], where: str, kind: str | None = None) -> Format:
    """Return the form of rows with these columns.

    Args:
        columns: names of the columns.
        where: names the data in messages.
        kind: the kind of rows that is wanted; None for what the columns say.

    Raises:
        ValueError: no form fits, or none that becomes the kind; says which columns there are and which are wanted.
    """
    if kind is not None and kind not in ROW_COLUMNS:
        raise ValueError(f"{where}: unknown kind {kind!r}.{did_you_mean(kind, ROW_COLUMNS)}")
    have = set(columns)
    for form in FORMATS.values():
        if have.issuperset(form.columns) and kind in (None, form.kind):
            return form
    found = ", ".join(sorted(have)) or "none"
    wanted = [form for form in FORMATS.values() if form.kind and kind in (None, form.kind)]
    asked = "; or ".join(" and ".join(form.columns) for form in wanted)
    near = {new: old for old, new in _ALIASES.items() if old in have and new not in have}
    hint = ""
    if near:
        renames = ", ".join(f"{new}: {old}" for new, old in near.items())
        hint = f" If they are called otherwise, say so: columns {{{renames}}}."
    what = f"{kind} rows have" if kind else "rows have"
    raise ValueError(f"{where}: {what} {asked}; the columns here are {found}.{hint}")


def renamed(row: Mapping[str, Any], columns: Mapping[str, str] | None, where: str) -> dict[str, Any]:
    """Return a row with columns renamed.

    Args:
        row: column -> value.
        columns: new name -> name in the row; others keep theirs.
        where: names the row in messages.

    Raises:
        ValueError: a column that is not there, or two of one name.
    """
    if not columns:
        return dict(row)
    for new, old in columns.items():
        if old not in row:
            raise ValueError(f"{where}: there is no column {old!r}, which is to be {new!r}.{did_you_mean(old, row)}")
    moved = {old for old in columns.values() if old not in columns}
    left = {name: value for name, value in row.items() if name not in moved}
    for new, old in columns.items():
        if new in left and new not in columns.values() and new != old:
            raise ValueError(f"{where}: column {old!r} is to be {new!r}, and there is one of that name; rename both.")
    return {**left, **{new: row[old] for new, old in columns.items()}}


def _messages(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    _refuse_tools(row, where)
    return {"messages": row["messages"]}


def _sharegpt(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    _refuse_tools(row, where)
    said = row["conversations"]
    if not isinstance(said, list) or not said:
        raise ValueError(
            f"{where}, column 'conversations': expected a list of turns with from and value, got {said!r}."
        )
    turns = []
    for number, turn in enumerate(said, start=1):
        if isinstance(turn, Mapping) and "role" in turn:
            turns.append(dict(turn))
            continue
        if not isinstance(turn, Mapping) or not turn.keys() >= {"from", "value"}:
            raise ValueError(f"{where}, turn {number}: expected from and value, got {turn!r}.")
        role = _SHAREGPT_ROLES.get(str(turn["from"]))
        if role is None:
            raise ValueError(
                f"{where}, turn {number}: unknown speaker {turn['from']!r}."
                f"{did_you_mean(str(turn['from']), _SHAREGPT_ROLES)}"
            )
        turns.append({"role": role, "content": turn["value"]})
    return {"messages": turns}


def _prompt_completion(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    prompt, completion = row["prompt"], row["completion"]
    if not isinstance(prompt, list) and not isinstance(completion, list):
        return {"prompt": prompt, "completion": completion}
    _refuse_tools(row, where)
    before = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    after = completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]
    whole = [*before, *after]
    check_turns(where, whole)
    if any(turn["role"] == "assistant" for turn in before):
        raise ValueError(
            f"{where}: its prompt holds an assistant's turn, which is not to be learned, and conversations are learned "
            "from every assistant turn here; write a row of its own for each answer, or use messages to learn them all."
        )
    return {"messages": whole}


def _preferences(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    _refuse_tools(row, where)
    chosen, rejected = row["chosen"], row["rejected"]
    prompt = row.get("prompt")
    if prompt is None:
        prompt, chosen, rejected = _shared_prompt(chosen, rejected, where)
    return {"prompt": prompt_text(prompt, where), "chosen": chosen, "rejected": rejected}


def _text(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    return {"text": row["text"]}


def _prompts(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    return {**row, "prompt": prompt_text(row["prompt"], where)}


def prompt_text(prompt: Any, where: str) -> Any:
    """Return a prompt as text; of one given as turns, what the user says in the only one.

    Raises:
        ValueError: several turns, which have no form as one text.
    """
    if not isinstance(prompt, list):
        return prompt
    if len(prompt) == 1 and isinstance(prompt[0], Mapping) and prompt[0].get("role") == "user":
        return prompt[0].get("content")
    roles = [turn.get("role") if isinstance(turn, Mapping) else turn for turn in prompt]
    raise ValueError(
        f"{where}: its prompt has the turns {roles}, and prompts are one text here. A system turn that all rows share "
        "belongs into the task's chat (Chat.system); earlier turns have to stand in the text."
    )


def _shared_prompt(chosen: Any, rejected: Any, where: str) -> tuple[Any, Any, Any]:
    """Split off what both sides begin with, as TRL does for rows without a prompt."""
    if isinstance(chosen, list) and isinstance(rejected, list):
        shared = sum(
            1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
        )
        shared = min(shared, len(chosen) - 1, len(rejected) - 1)
        if shared > 0:
            return chosen[:shared], chosen[shared:], rejected[shared:]
    elif isinstance(chosen, str) and isinstance(rejected, str):
        shared = next(
            (i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b),
            min(len(chosen), len(rejected)),
        )
        if shared and chosen[shared - 1] == " ":  # a space belongs to the word after it
            shared -= 1
        if shared:
            return chosen[:shared], chosen[shared:], rejected[shared:]
    raise ValueError(
        f"{where}: it has no prompt, and chosen and rejected have no common beginning; add a column prompt."
    )


def _refuse_tools(row: Mapping[str, Any], where: str) -> None:
    if row.get("tools"):
        raise ValueError(
            f"{where}, column 'tools': descriptions of tools are not written into prompts here; put them into the "
            "system turn, and leave the column out."
        )


_CONVERTERS: Mapping[str, Callable[[Mapping[str, Any], str], dict[str, Any]]] = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "preferences": _preferences,
    "prompt-completion": _prompt_completion,
    "text": _text,
    "prompts": _prompts,
}
