"""Checks of rows without a model: their form, empty fields, sides of preferences, rows that repeat or contradict."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..tasks.rows import canonical
from .findings import FileReport, Finding, LineIndex, Places
from .formats import Format
from .near_duplicates import NearDuplicates
from .shingles import texts_in

Checked = tuple[int, int | None, Mapping[str, Any]]
"""Number, line and converted row."""

_NAMES = {str: "string", int: "int", float: "float", bool: "bool", list: "list", dict: "object", type(None): "null"}


class ColumnTypes:
    """Counts the types of every column."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[type, int]] = {}
        self._first: dict[tuple[str, str], tuple[int, int | None]] = {}

    def add(self, number: int, line: int | None, row: Mapping[str, Any]) -> None:
        """Take in a row as it is stored."""
        for name, value in row.items():
            counts = self._counts.setdefault(name, {})
            kind = type(value)
            if kind in counts:
                counts[kind] += 1
            else:
                counts[kind] = 1
                self._first[name, _NAMES.get(kind, kind.__name__)] = number, line

    def report(self, report: FileReport) -> None:
        """Write columns, and a finding for each whose values have several types."""
        for name, counts in self._counts.items():
            named = {_NAMES.get(kind, kind.__name__): count for kind, count in counts.items()}
            missing = report.rows - sum(named.values())
            report.columns[name] = {**named, **({"missing": missing} if missing > 0 else {})}
            plain = {kind: count for kind, count in named.items() if kind != "null"}
            if len(plain) > 1 and not plain.keys() <= {"int", "float"}:
                listed = " and ".join(f"{kind} ({count})" for kind, count in sorted(plain.items()))
                places = Places()
                for kind in sorted(plain):
                    places.add(*self._first[name, kind])
                report.add(
                    Finding(
                        "warning",
                        "mixed_types",
                        f"column {name!r} mixes {listed}",
                        'Write all as text, or all as numbers; a verifier would take 7 and "7" for different answers.',
                        sum(plain.values()),
                        tuple(places.rows),
                        tuple(each[1] for each in (self._first[name, kind] for kind in sorted(plain)) if each[1]),
                    )
                )


class FormChecks:
    """What is wrong with single rows of one form, and between rows: repeats, contradictions, near repeats."""

    def __init__(self, form: Format, near: bool = True) -> None:
        self.form = form
        self._empty: dict[str, Places] = {}
        self._identical = Places()
        self._digests, self._numbers = array("q"), array("L")
        self._asked, self._said, self._other = array("q"), array("q"), array("q")
        self._near = NearDuplicates() if near else None
        self.lines = LineIndex()

    def add(self, block: Sequence[Checked]) -> None:
        """Take in converted rows."""
        texts = []
        for number, line, row in block:
            self.lines.add(number, line)
            self._numbers.append(number)
            self._digests.append(_digest(row))
            self._look(number, line, row)
            texts.append("\n".join(texts_in(dict(row))))
        if self._near is not None:
            self._near.add(texts)

    def _look(self, number: int, line: int | None, row: Mapping[str, Any]) -> None:
        kind = self.form.kind
        prompt = row.get("prompt")
        if isinstance(prompt, str) and not prompt.strip():
            self._empty.setdefault("prompt", Places()).add(number, line)
        if kind == "preferences":
            sides = [_side(row[name]) for name in ("chosen", "rejected")]
            for name, side in zip(("chosen", "rejected"), sides, strict=True):
                if not side.strip():
                    self._empty.setdefault(name, Places()).add(number, line)
            if sides[0] == sides[1]:
                self._identical.add(number, line)
            self._asked.append(hash(prompt))
            self._said.append(hash(sides[0]))
            self._other.append(hash(sides[1]))
        elif kind == "demonstrations":
            completion = row.get("completion")
            if completion is None:
                turns = row["messages"]
                asked = canonical(turns[:-1])
                completion = turns[-1].get("content") or ("call" if turns[-1].get("tool_calls") else "")
                if any(turn["role"] == "user" and not str(turn.get("content") or "").strip() for turn in turns):
                    self._empty.setdefault("a user's turn", Places()).add(number, line)
                self._asked.append(hash(asked))
            else:
                self._asked.append(hash(prompt))
            if not completion.strip():
                self._empty.setdefault("completion", Places()).add(number, line)
            self._said.append(hash(completion))
        elif kind == "text" and not row["text"].strip():
            self._empty.setdefault("text", Places()).add(number, line)

    def report(self, report: FileReport) -> None:
        """Write the findings, and which rows a repair leaves out."""
        for name, places in self._empty.items():
            report.add(
                places.finding(
                    "error",
                    "empty",
                    f"{len(places)} of {report.rows} rows have an empty {name}",
                    "Fill it in, or drop them.",
                )
            )
            _drop(report, places.rows, "empty")
        report.add(
            self._identical.finding(
                "error",
                "identical_sides",
                f"{len(self._identical)} of {report.rows} rows have equal chosen and rejected sides",
                "There is no preference to learn; drop them.",
            )
        )
        _drop(report, self._identical.rows, "identical_sides")
        numbers, digests = np.array(self._numbers), np.array(self._digests)
        self._repeats(report, numbers, digests)
        if self.form.kind == "preferences":
            self._contradictions(report, numbers)
        elif self.form.kind == "demonstrations":
            self._several_answers(report, numbers)
        if self._near is None:
            report.skipped.append("near duplicates: asked to leave them out")
        else:
            self._near_repeats(report, numbers, digests)

    def digests(self) -> tuple[Any, Any]:
        """Return (rows,) numbers, and (rows,) hashes of the rows, for comparison with another file in this process."""
        return np.array(self._numbers), np.array(self._digests)

    def _repeats(self, report: FileReport, numbers: Any, digests: Any) -> None:
        _, first = np.unique(digests, return_index=True)
        later = np.ones(len(digests), np.bool_)
        later[first] = False
        if later.any():
            places = self.lines.places(numbers[later].tolist())
            report.add(
                places.finding(
                    "warning",
                    "duplicates",
                    f"{len(digests)} rows, {len(first)} distinct",
                    "Drop the repeats, or split by distinct row (`split_rows`): none may be trained on and held out.",
                )
            )
            _drop(report, places.rows, "duplicates")

    def _contradictions(self, report: FileReport, numbers: Any) -> None:
        asked, said, other = (np.array(each).view(np.uint64) for each in (self._asked, self._said, self._other))
        factor = np.uint64(0x9E3779B97F4A7C15)
        forward = (asked * factor + said) * factor + other
        backward = (asked * factor + other) * factor + said
        against = np.isin(forward, backward) & (said != other)
        places = self.lines.places(numbers[against].tolist())
        report.add(
            places.finding(
                "warning",
                "contradictory_pairs",
                f"{len(places)} rows prefer what another row of the same prompt rejects",
                "Decide which side is better, and drop the other row.",
            )
        )

    def _several_answers(self, report: FileReport, numbers: Any) -> None:
        asked, said = np.array(self._asked), np.array(self._said)
        order = np.lexsort((said, asked))
        same = asked[order][1:] == asked[order][:-1]
        other = same & (said[order][1:] != said[order][:-1])
        concerned = np.zeros(len(asked), np.bool_)
        concerned[order[1:][other]] = True
        concerned[order[:-1][other]] = True
        places = self.lines.places(numbers[concerned].tolist())
        report.add(
            places.finding(
                "note",
                "several_answers",
                f"{len(places)} rows ask what another row asks, and answer otherwise",
                "That is right for open questions, and noise where one answer is right.",
            )
        )

    def _near_repeats(self, report: FileReport, numbers: Any, digests: Any) -> None:
        assert self._near is not None
        pairs = [pair for pair in self._near.pairs() if digests[pair.first] != digests[pair.second]]
        places = self.lines.places([int(numbers[pair.second]) for pair in pairs])
        example = ""
        if pairs:
            first = pairs[0]
            alike = f"about {first.similarity:.0%} alike"
            example = f", for example rows {numbers[first.first]} and {numbers[first.second]} ({alike})"
        report.add(
            places.finding(
                "note",
                "near_duplicates",
                f"about {len(places)} rows are nearly an earlier one{example}",
                "Look at some; a model learns little from the second, and a split between them leaks.",
            )
        )


def against_others(reports: Sequence[tuple[FileReport, FormChecks]]) -> None:
    """Add to each report which of its rows stand in an earlier file too."""
    for place, (report, checks) in enumerate(reports):
        numbers, digests = checks.digests()
        for earlier, others in reports[:place]:
            both = np.isin(digests, others.digests()[1])
            places = checks.lines.places(numbers[both].tolist())
            report.add(
                places.finding(
                    "error",
                    "rows_of_another_file",
                    f"{len(places)} of {report.rows} rows stand in {earlier.path} too",
                    "If one of them is held out, its score would be that of memory; drop them from one.",
                )
            )


def _digest(row: Mapping[str, Any]) -> int:
    values = tuple(row.values())
    if all(isinstance(value, str) for value in values):
        return hash(values)
    return hash(canonical(dict(row)))


def _side(answer: Any) -> str:
    return answer if isinstance(answer, str) else str(answer[0].get("content") or "")


def _drop(report: FileReport, rows: Iterable[int], kind: str) -> None:
    for number in rows:
        report.drop.setdefault(int(number), kind)
