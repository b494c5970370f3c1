"""Looks at rows one by one: their columns, form, empty texts and characters, and a digest of each for what repeats."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..tasks.rows import canonical, has_turns
from .errors import DataError
from .formats import Format, detect_format, renamed
from .inspection_findings import DataFinding, Places, RowPlaces
from .inspection_texts import TextChecks
from .mending import mended_row
from .raw_row import RawRow
from .shingles import texts_in

_JSON_NAMES = {
    str: "string",
    int: "int",
    float: "float",
    bool: "bool",
    list: "list",
    dict: "object",
    type(None): "null",
}
_MOST_SHAPES = 4096
_MOST_REASONS = 12
_VALUES = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[\[{].*[\]}]|\d+", re.S)

Digests = NDArray[np.int64]


@dataclass(frozen=True)
class ReadRow:
    """One row that a round could train on.

    Attributes:
        index: its place among such rows of the file, from 0.
        number: its number in the file, from 1.
        line: the line it begins in; None where there are none.
        row: the row as tasks train on it.
        text: all of its texts, a line each.
        value: the row as the file holds it, columns renamed.
    """

    index: int
    number: int
    line: int | None
    row: Mapping[str, Any]
    text: str
    value: Mapping[str, Any]


class MalformedRows(list[DataError]):
    """Counts the rows that cannot be read, and keeps the errors of the first alone."""

    kept = 1000

    def __init__(self) -> None:
        super().__init__()
        self.places = Places()

    @property
    def total(self) -> int:
        """Rows that cannot be read."""
        return self.places.count

    def append(self, error: DataError) -> None:
        """Take in one more."""
        self.places.add(error.row, error.line)
        if len(self) < self.kept:
            super().append(error)


class RowChecks:
    """One pass over the rows of a file.

    Args:
        path: names the file in findings.
        kind: the kind of rows that is wanted; None for what the columns of the first row say.
        columns: new name -> name in the file.
        mixed: whether some rows may hold turns and others text, as those of a task may that says how turns are written.

    Attributes:
        form: the form of the rows; None before the first.
        places: number and line of every row that has it.
        rows: rows that could be read, of whatever form.
    """

    def __init__(self, path: str, kind: str | None, columns: Mapping[str, str] | None, mixed: bool = False) -> None:
        self.path, self._kind, self._columns, self._mixed = path, kind, columns, mixed
        self._turns: bool | None = None  # whether the first row holds turns
        self.form: Format | None = None
        self.form_error = ""
        self.places = RowPlaces()
        self.rows = 0
        self.refused: dict[int, str] = {}  # row -> check, of rows without the form
        self._texts = TextChecks()
        self._shapes: dict[tuple[tuple[str, ...], tuple[type, ...]], list[int]] = {}
        self._types: dict[str, dict[str, list[int]]] = {}  # column -> type -> rows, first row, its line
        self._reasons: dict[str, tuple[str, Places]] = {}
        self._empty: dict[str, Places] = {}
        self._identical = Places()
        self._line_ends = Places()
        self._mended: dict[str, Places] = {}
        self._digests, self._prompts, self._swapped = array("q"), array("q"), array("q")

    def take(self, raw: RawRow) -> ReadRow | None:
        """Look at the next row; return it when a round could train on it."""
        self.rows += 1
        value, number, line = raw.value, raw.number, raw.line
        shape = (tuple(value), tuple(map(type, value.values())))
        seen = self._shapes.get(shape)
        if seen is None:
            self._new_shape(shape, number, line or 0)
        else:
            seen[0] += 1
        if raw.raw is not None and raw.raw.endswith(b"\r\n"):
            self._line_ends.add(number, line)
        text = "\n".join(texts_in(value))
        self._texts.take(text, number, line)
        if "\r" in text or "\ufeff" in text or ("messages" in value or "chosen" in value):
            value, done = mended_row(value)
            for check in done:
                self._mended.setdefault(check, Places()).add(number, line)
        converted = self._converted(value, number, line, halves=not text.isascii() and not _is_unicode(text))
        if converted is None:
            return None
        value, row = converted
        self._look_for_empty(row, number, line)
        self._digest(row)
        self.places.add(number, line)
        return ReadRow(len(self.places) - 1, number, line, row, text, value)

    @property
    def columns(self) -> dict[str, dict[str, int]]:
        """Column -> type -> rows; ``"missing"`` counts rows without the column."""
        self._fold()
        found = {}
        for column, types in self._types.items():
            counts = {name: counted[0] for name, counted in types.items()}
            missing = self.rows - sum(counts.values())
            found[column] = {**counts, "missing": missing} if missing else counts
        return found

    @property
    def digests(self) -> Digests:
        """One number a row, equal for equal rows."""
        return np.frombuffer(self._digests, np.int64) if self._digests else np.empty(0, np.int64)

    @property
    def prompts(self) -> Digests:
        """One number a row, equal for equal prompts; empty for raw text."""
        return np.frombuffer(self._prompts, np.int64) if self._prompts else np.empty(0, np.int64)

    def findings(self) -> list[DataFinding]:
        """Return what was found in the rows, one by one and among each other."""
        found = [places.finding("error", "form", self.path, reason) for reason, places in self._reasons.values()]
        if self._line_ends.count:
            found.append(
                self._line_ends.finding(
                    "note",
                    "line_ends",
                    self.path,
                    f"{self._line_ends.count} lines end in CRLF, as Windows writes them",
                    "Nothing of it reaches the texts; `--fix` writes line feeds.",
                )
            )
        if "tool_arguments" in self._mended:
            places = self._mended["tool_arguments"]
            found.append(
                places.finding(
                    "note",
                    "tool_arguments",
                    self.path,
                    f"{places.count} rows hold arguments of tool calls as text",
                    "They are trained on as the objects that they say; `--fix` writes them so.",
                )
            )
        found += self._type_findings()
        for column, places in self._empty.items():
            learned = column != "prompt" or (self.form is not None and self.form.kind == "prompts")
            found.append(
                places.finding(
                    "error" if learned else "warning",
                    "empty",
                    self.path,
                    f"{places.count} of {self.rows} rows have an empty {column}",
                    "Fill them in, or drop the rows.",
                )
            )
        if self._identical.count:
            found.append(
                self._identical.finding(
                    "error",
                    "identical",
                    self.path,
                    f"{self._identical.count} of {self.rows} rows prefer an answer to the same answer",
                    "Nothing can be learned from them; drop them.",
                )
            )
        return [*found, *self._texts.findings(self.path, self.rows), *self._repeats()]

    def _repeats(self) -> list[DataFinding]:
        digests, found = self.digests, []
        if not len(digests):
            return []
        _, first, counts = np.unique(digests, return_index=True, return_counts=True)
        if len(first) < len(digests):
            repeated = np.flatnonzero(np.isin(digests, digests[first[counts > 1]]))
            is_first = np.zeros(len(digests), np.bool_)
            is_first[first] = True
            self.places.drop(repeated[~is_first[repeated]].tolist(), "duplicate")
            found.append(
                self.places.at(repeated).finding(
                    "warning",
                    "duplicate",
                    self.path,
                    f"{len(digests)} rows, {len(first)} distinct; {len(repeated)} rows are equal to another",
                    "Drop the repeats, or weigh the source instead; split by distinct row.",
                )
            )
        if len(self._swapped):
            swapped = np.frombuffer(self._swapped, np.int64)
            against = np.flatnonzero(np.isin(digests, swapped) & (digests != swapped))
            if len(against):
                found.append(
                    self.places.at(against).finding(
                        "warning",
                        "contradiction",
                        self.path,
                        f"{len(against)} rows contradict each other: the answer that one prefers another rejects",
                        "Keep one of each pair, or neither.",
                    )
                )
        elif len(self._prompts) and self.form is not None and self.form.kind in ("demonstrations", "prompts"):
            several = self._several_answers()
            if len(several):
                what = "completions" if self.form.kind == "demonstrations" else "answers"
                found.append(
                    self.places.at(several).finding(
                        "note",
                        "contradiction",
                        self.path,
                        f"{len(several)} rows ask a prompt that other rows ask too, with other {what}",
                        "That is right where several answers are; else keep one.",
                    )
                )
        return found

    def _several_answers(self) -> NDArray[np.int64]:
        """Return the indices of rows whose prompt stands in rows that are not equal to them."""
        prompts, digests = self.prompts, self.digests
        _, first, back = np.unique(prompts, return_index=True, return_inverse=True)
        differs = digests != digests[first[back]]
        several = np.zeros(len(first), np.bool_)
        several[back[differs]] = True
        return np.flatnonzero(several[back])

    def _converted(
        self, value: dict[str, Any], number: int, line: int | None, halves: bool
    ) -> tuple[dict[str, Any], Mapping[str, Any]] | None:
        """Return the row with its columns renamed, and as tasks train on it; None when it has not the form."""
        place = f"row {number}"
        try:
            row = renamed(value, self._columns, place) if self._columns else value
            if self.form is None:
                if self.form_error:
                    return None
                try:
                    self.form = detect_format(row, place, self._kind)
                except ValueError as error:
                    self.form_error = str(error).removeprefix(place).lstrip(":, ")
                    return None
            missing = [name for name in self.form.columns if name not in row]
            if missing:
                raise ValueError(
                    f"{place}: the first row has the form {self.form.name}, this one no {' and no '.join(missing)}"
                )
            converted = self.form.convert(row, place) if self.form.kind else row
            if halves and not _is_unicode("\n".join(texts_in(dict(converted)))):
                raise ValueError(f"{place}: a text holds a lone surrogate, which is no text; decode it anew")
            turns = has_turns(self.form.kind, converted)
            if self._turns is None:
                self._turns = turns
            if turns != self._turns and not self._mixed:
                first, this = ("turns", "text") if self._turns else ("text", "turns")
                raise ValueError(f"{place}: the first row holds {first}, this one {this}; write all of them in one way")
            return row, converted
        except ValueError as error:
            reason = str(error).removeprefix(place).lstrip(":, ").rstrip(".")
            key = _VALUES.sub("", reason)[:200]
            if key not in self._reasons and len(self._reasons) >= _MOST_REASONS:
                key = "others"
            self._reasons.setdefault(key, (reason[:400], Places()))[1].add(number, line)
            self.refused[number] = "form"
            return None

    def _look_for_empty(self, row: Mapping[str, Any], number: int, line: int | None) -> None:
        empty = [name for name in _learned(row) if not _said(row[name])]
        for name in empty:
            self._empty.setdefault(name, Places()).add(number, line)
        drop = [name for name in empty if name != "prompt" or (self.form is not None and self.form.kind == "prompts")]
        if drop:
            self.places.dropped.setdefault(number, "empty")
        if "chosen" in row and not empty and row["chosen"] == row["rejected"]:
            self._identical.add(number, line)
            self.places.dropped.setdefault(number, "identical")

    def _digest(self, row: Mapping[str, Any]) -> None:
        values = tuple(row.values())
        if all(type(value) is str for value in values):
            self._digests.append(hash((tuple(row), values)))
        else:
            self._digests.append(_of_bytes(canonical(dict(row))))
        if "chosen" in row:
            if type(row["chosen"]) is str and type(row["rejected"]) is str:
                self._swapped.append(hash((tuple(row), (row["prompt"], row["rejected"], row["chosen"]))))
            else:
                turned = {**row, "chosen": row["rejected"], "rejected": row["chosen"]}
                self._swapped.append(_of_bytes(canonical(turned)))
        if "prompt" in row:
            self._prompts.append(hash(row["prompt"]))
        elif "messages" in row:
            self._prompts.append(_of_bytes(canonical(row["messages"][:-1])))

    def _new_shape(self, shape: tuple[tuple[str, ...], tuple[type, ...]], number: int, line: int) -> None:
        if len(self._shapes) >= _MOST_SHAPES:
            self._fold()
        self._shapes[shape] = [1, number, line]

    def _fold(self) -> None:
        """Count the columns of the shapes seen so far."""
        for (names, types), (count, number, line) in self._shapes.items():
            for name, kind in zip(names, types, strict=True):
                if name not in self._types and len(self._types) >= _MOST_SHAPES:
                    continue
                known = self._types.setdefault(name, {}).setdefault(
                    _JSON_NAMES.get(kind, kind.__name__), [0, number, line]
                )
                known[0] += count
        self._shapes.clear()

    def _type_findings(self) -> list[DataFinding]:
        self._fold()
        found = []
        asked = self.form is not None and self.form.kind == "prompts"
        for column, types in self._types.items():
            real = {name: counted for name, counted in types.items() if name != "null"}
            if len({"number" if name in ("int", "float") else name for name in real}) < 2:
                continue
            counts = " and ".join(f"{name} ({counted[0]})" for name, counted in sorted(real.items()))
            places = Places()
            for counted in sorted(real.values(), key=lambda each: each[1]):
                places.add(counted[1], counted[2] or None)
            places.count = sum(counted[0] for counted in real.values())
            found.append(
                places.finding(
                    "error" if asked else "warning",
                    "types",
                    self.path,
                    f"{column} mixes {counts}; the first of each",
                    "Write all of them in one way."
                    if real.keys() & {"list", "object"}
                    else 'Write all of them as text ("7", "007" and "7.50" stay apart) or all as numbers.',
                )
            )
        return found


def _learned(row: Mapping[str, Any]) -> Iterable[str]:
    return (name for name in ("prompt", "completion", "chosen", "rejected", "text", "messages") if name in row)


def _said(value: Any) -> bool:
    """Return whether a text, or the last of some turns, says something."""
    if isinstance(value, str):
        return bool(value) and not value.isspace()
    if isinstance(value, list) and value and isinstance(value[-1], Mapping):
        return bool(value[-1].get("tool_calls")) or bool((value[-1].get("content") or "").strip())
    return True


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _of_bytes(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)
