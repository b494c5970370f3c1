"""What an inspection of data reports: findings in words, with counts, rows, lines and what to do about them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

SEVERITIES = ("error", "warning", "note")
"""An error makes a round fail or its figures wrong; a warning may; a note is something to know."""

INSPECTIONS: Mapping[str, str] = MappingProxyType(
    {
        "malformed": "every row can be read",
        "form": "every row has the form that the first one has, and is well formed",
        "algorithm": "the algorithm can train on rows of this form",
        "types": "no column mixes types",
        "empty": "no row has an empty text where something is to be learned",
        "template": "the model's chat template writes every conversation",
        "cut": "every row keeps something to learn at this max_length",
        "length": "rows fit max_length and the model's positions",
        "duplicate": "no row stands there twice",
        "near_duplicate": "no two rows are nearly the same text",
        "contradiction": "no two rows contradict each other",
        "identical": "the sides of a preference differ",
        "leak": "no row of one file stands in another",
        "overlap": "no row holds an item of the benchmark",
        "verifier": "the verifier tells right from wrong on the file's own rows",
        "byte_order_mark": "the file begins with its first row",
        "line_ends": "lines and texts end in line feeds alone",
        "replacement": "no character was lost in an earlier conversion",
        "mojibake": "no text was decoded with the wrong codec",
        "control": "no text holds control characters",
        "zero_width": "no text holds characters that cannot be seen",
        "tool_arguments": "arguments of tool calls are objects",
        "sampled": "what was judged on a sample",
        "skipped": "what was not looked at, and why",
    }
)
"""Inspections by name: what holds of data in which nothing is found."""

REPAIRED = (
    "malformed",
    "form",
    "empty",
    "cut",
    "duplicate",
    "identical",
    "overlap",
    "byte_order_mark",
    "line_ends",
    "tool_arguments",
)
"""Inspections whose findings `repair` mends or drops; of a repaired copy they find nothing."""

SHOWN = 10
"""Rows that a finding names."""


@dataclass(frozen=True)
class DataFinding:
    """One thing that an inspection found.

    Attributes:
        severity: one of `SEVERITIES`.
        check: a key of `INSPECTIONS`.
        path: the file.
        problem: what is wrong, as a sentence with the values that show it.
        remedy: what to do about it.
        count: how many rows it is about; 0 when it is about the whole file.
        rows: numbers of the first `SHOWN` of them, from 1.
        lines: the lines they begin in, from 1; empty where a format has none.
    """

    severity: str
    check: str
    path: str
    problem: str
    remedy: str = ""
    count: int = 0
    rows: tuple[int, ...] = ()
    lines: tuple[int, ...] = ()

    def __str__(self) -> str:
        places = listed("row", self.rows, self.count)
        if self.lines:
            lines = listed("line", self.lines, self.count)
            places = f"{places} ({lines})" if places else lines
        told = f"{self.severity}: {self.path}: {self.problem}" + (f": {places}" if places else "")
        return f"{told}. {self.remedy}".rstrip()

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {**asdict(self), "rows": list(self.rows), "lines": list(self.lines)}


def listed(what: str, numbers: tuple[int, ...], count: int) -> str:
    """Return ``rows 1, 4, 8`` or ``rows 1, 2, …``; empty when there are none."""
    if not numbers:
        return ""
    more = ", …" if count > len(numbers) else ""
    return f"{what}{'s' if len(numbers) > 1 or more else ''} {', '.join(map(str, numbers))}{more}"


class Places:
    """How many rows something is true of, and which are the first."""

    def __init__(self) -> None:
        self.count = 0
        self.rows: list[int] = []
        self.lines: list[int] = []

    def add(self, row: int | None, line: int | None) -> None:
        """Take in one more row."""
        self.count += 1
        if self.count <= SHOWN:
            if row is not None:
                self.rows.append(row)
            if line is not None:
                self.lines.append(line)

    def finding(self, severity: str, check: str, path: str, problem: str, remedy: str = "") -> DataFinding:
        """Return the finding about these rows."""
        rows, lines = tuple(sorted(self.rows)), tuple(sorted(self.lines))
        return DataFinding(severity, check, path, problem, remedy, self.count, rows, lines)


class RowPlaces:
    """Number and line of every row that could be read, 16 bytes each, and which of them a repair leaves out."""

    def __init__(self) -> None:
        self.numbers = array("q")
        self.lines = array("q")
        self.dropped: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.numbers)

    def add(self, number: int, line: int | None) -> None:
        """Take in the next row."""
        self.numbers.append(number)
        self.lines.append(0 if line is None else line)

    def at(self, indices: Any) -> Places:
        """Return the places of rows given by index, in rising order."""
        found = Places()
        for index in indices[:SHOWN]:
            found.add(self.numbers[int(index)], self.lines[int(index)] or None)
        found.count = len(indices)
        return found

    def drop(self, indices: Any, check: str) -> None:
        """Note that a repair leaves rows out, for the first reason that was given."""
        for index in indices:
            self.dropped.setdefault(self.numbers[int(index)], check)
