"""The rows of a source: what each kind must hold, which leak a benchmark's prompts, and how many are different."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .turns import check_turns, user_texts

Row = Mapping[str, Any]

ROW_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "demonstrations": ("prompt", "completion"),
    "preferences": ("prompt", "chosen", "rejected"),
    "prompts": ("prompt",),
    "records": (),
    "text": ("text",),
}
"""Kinds of training rows, with the columns each must have. ``prompts`` rows also need the source's verifier.
``records`` hold whatever a trainer of the task's own reads; those of language models never do.

A demonstrations row may have ``messages`` in place of prompt and completion, and ``chosen`` and ``rejected`` may be a
list with the assistant's turn in place of text, when the task says how turns are written (`InnerTask.chat`).
"""


def check_columns(where: str, kind: str, row: Row) -> None:
    """Refuse a row without the columns of its kind.

    Args:
        where: names the row in the message.
        kind: a key of `ROW_COLUMNS`.
        row: the row.

    Raises:
        ValueError: a column is missing, of another type, or holds a turn that is not well formed.
    """
    if kind == "demonstrations" and "messages" in row:
        both = [column for column in ROW_COLUMNS[kind] if column in row]
        if both:
            raise ValueError(f"{where}: it has messages and {' and '.join(both)}; keep one of the two.")
        check_turns(where, row["messages"])
        return
    for column in ROW_COLUMNS[kind]:
        value = row.get(column)
        if column in ("chosen", "rejected") and isinstance(value, Sequence) and not isinstance(value, str):
            check_turns(f"{where}, column {column!r}", value, answer_only=True)
        elif not isinstance(value, str):
            raise ValueError(f"{where}: column {column!r} must be text, got {value!r} ({type(value).__name__}).")
        elif not _is_unicode(value):
            raise ValueError(f"{where}: column {column!r} holds a lone surrogate, which is no text; decode it anew.")


def _is_unicode(text: str) -> bool:
    """Whether a tokenizer can take it: text that was decoded wrongly may hold halves of characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def has_turns(kind: str, row: Row) -> bool:
    """Return whether a row holds turns in place of text."""
    return kind in ("demonstrations", "preferences") and not all(
        isinstance(row.get(column), str) for column in ROW_COLUMNS[kind]
    )


def leaks(kind: str, row: Row, held_out: set[str]) -> bool:
    """Return whether a row asks a held-out prompt; raw text does when one stands anywhere in it."""
    if kind == "text":
        return any(prompt in row["text"] for prompt in held_out)
    if "messages" in row and kind == "demonstrations":
        return not held_out.isdisjoint(user_texts(row["messages"]))
    return row.get("prompt") in held_out


def distinct_rows(rows: Sequence[Row]) -> int:
    """Return how many different rows there are."""
    return len({canonical(dict(row)) for row in rows})


def canonical(value: Any) -> bytes:
    """Return the same bytes for equal plain data, in any process.

    Raises:
        ValueError: an object that shows as a memory address.
    """
    return json.dumps(value, sort_keys=True, default=_plain).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))  # their own order differs between processes
    if f" at {hex(id(value))}" in str(value):
        raise ValueError(
            f"task data: a {type(value).__name__} cannot be hashed, because it shows as a memory address; "
            "keep plain values in rows and items, or give its class a __repr__."
        )
    return str(value)
