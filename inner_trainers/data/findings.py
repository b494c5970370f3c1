"""What an inspection of data tells: findings with their places, and the report that holds them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

SEVERITIES = ("note", "warning", "error")
"""From the mildest; an error says that the data cannot be used as it is, or that scores made with it would be wrong."""

SHOWN = 10
"""Rows that a finding names."""


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Attributes:
        severity: one of `SEVERITIES`.
        kind: short name, for scripts: ``over_long``, ``malformed``, ``duplicates``, …
        text: what was found, with its count, in words.
        advice: what to do.
        count: rows concerned; 0 where it is about the whole file.
        rows: numbers of the first of them, from 1.
        lines: their lines, where the file has lines.
    """

    severity: str
    kind: str
    text: str
    advice: str
    count: int = 0
    rows: tuple[int, ...] = ()
    lines: tuple[int, ...] = ()

    def __str__(self) -> str:
        places = (
            f" (rows {', '.join(map(str, self.rows))}{', …' if self.count > len(self.rows) else ''})"
            if self.rows
            else ""
        )
        if self.rows and self.lines and self.lines != self.rows:
            places = (
                places[:-1]
                + f"; lines {', '.join(map(str, self.lines))}{', …' if self.count > len(self.lines) else ''})"
            )
        return f"{self.text}{places}. {self.advice}"


@dataclass(frozen=True)
class Lengths:
    """How long rows are.

    Attributes:
        part: ``prompt``, ``completion``, ``whole``, ``chosen`` or ``rejected``.
        unit: ``tokens`` or ``characters``.
        counts: rows in each bin.
        edges: bounds of the bins, one more than counts.
        mean: mean length.
        quantiles: share of the rows -> length.
        longest: the longest that was measured.
        measured: rows that were measured.
        sampled: whether they are a uniform sample of all rows.
    """

    part: str
    unit: str
    counts: tuple[int, ...]
    edges: tuple[float, ...]
    mean: float
    quantiles: Mapping[str, float]
    longest: int
    measured: int
    sampled: bool


@dataclass
class FileReport:
    """What was found in one file.

    Attributes:
        path: the file.
        format: how it is stored; see `reading.FILE_FORMATS`.
        form: the form of its rows; see `formats.FORMATS`. Empty when none fits.
        kind: the kind of rows that it becomes; empty when none.
        rows: rows, those that cannot be read too.
        bytes: bytes on disk.
        content_hash: hash of its bytes.
        columns: column -> type -> rows that have it.
        findings: what was found, the gravest first.
        lengths: how long rows are.
        supervised_share: tokens that carry a loss over all tokens; None without a model, or where rows are prompts.
        languages: language or script -> estimated share of the rows.
        verifier: what the verifier said to a sample; empty without one.
        skipped: what was not looked at, and why.
        drop: row number -> kind of the finding for which a repair leaves it out.
        seconds: how long it took.
    """

    path: str
    format: str
    form: str = ""
    kind: str = ""
    rows: int = 0
    bytes: int = 0
    content_hash: str = ""
    columns: dict[str, dict[str, int]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    lengths: list[Lengths] = field(default_factory=list)
    supervised_share: float | None = None
    languages: dict[str, float] = field(default_factory=dict)
    verifier: dict[str, Any] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    drop: dict[int, str] = field(default_factory=dict, repr=False)
    seconds: float = 0.0

    def add(self, finding: Finding | None) -> None:
        """Add a finding; the gravest stand first."""
        if finding is not None:
            self.findings.append(finding)
            self.findings.sort(key=lambda each: -SEVERITIES.index(each.severity))

    def worst(self) -> str:
        """Return the gravest severity found; empty when nothing was."""
        return max((each.severity for each in self.findings), key=SEVERITIES.index, default="")

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        data = asdict(self)
        del data["drop"]
        return data


class Places:
    """Row numbers and lines of the rows that a finding is about; all numbers are kept, in four bytes each."""

    def __init__(self) -> None:
        self.rows = array("L")
        self._lines: list[int] = []

    def add(self, number: int, line: int | None) -> None:
        """Take in a row."""
        if line is not None and len(self._lines) < SHOWN:
            self._lines.append(line)
        self.rows.append(number)

    def __len__(self) -> int:
        return len(self.rows)

    def finding(self, severity: str, kind: str, text: str, advice: str) -> Finding | None:
        """Return the finding about these rows; None when there are none."""
        if not self.rows:
            return None
        return Finding(severity, kind, text, advice, len(self.rows), tuple(self.rows[:SHOWN]), tuple(self._lines))


class LineIndex:
    """Lines of rows, for findings that are made once all rows were seen."""

    def __init__(self) -> None:
        self._numbers, self._lines = array("L"), array("L")

    def add(self, number: int, line: int | None) -> None:
        """Take in a row."""
        if line is not None:
            self._numbers.append(number)
            self._lines.append(line)

    def places(self, rows: Iterable[int]) -> Places:
        """Return rows with their lines."""
        import numpy as np

        numbers, lines = np.array(self._numbers), np.array(self._lines)
        found = Places()
        for number in rows:
            line = None
            if len(found) < SHOWN and len(numbers):
                at = int(np.searchsorted(numbers, number))
                line = int(lines[at]) if at < len(numbers) and numbers[at] == number else None
            found.add(int(number), line)
        return found
