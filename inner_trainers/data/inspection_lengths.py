"""Lengths of rows: which lose what is to be learned, a uniform sample, and the histogram of what was counted."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .inspection_findings import DataFinding, Places, RowPlaces
from .inspection_rows import ReadRow
from .inspection_tokens import NEVER, CountedRows, RowCounter, stacked

if TYPE_CHECKING:
    from .inspection import InspectionSettings

BINS = 20
"""Bars of a histogram, at most."""

SAMPLE_CHARACTERS = 64_000_000
"""Characters that a sample holds at most; a sample of very long rows gets fewer of them."""

_BLOCK = 512
_LOST = {
    "demonstrations": "keep no completion token",
    "preferences": "keep no token in which their sides differ",
    "text": "keep nothing to predict",
}
_NEVER = {
    "demonstrations": "have nothing to predict",
    "preferences": "have an empty side or two equal ones",
    "text": "have nothing to predict",
}


class Sample:
    """A uniform sample of rows without replacement, taken in one pass: the rows with the least of random numbers.

    Args:
        count: rows of it.
        seed: decides which.
    """

    def __init__(self, count: int, seed: int) -> None:
        self._count, self._rng = count, np.random.default_rng([seed, 7])
        self._heap: list[tuple[float, int, ReadRow]] = []
        self._characters = 0
        self.seen = 0

    def add(self, rows: Sequence[ReadRow]) -> None:
        """Take in the next rows."""
        self.seen += len(rows)
        for row, draw in zip(rows, self._rng.random(len(rows)).tolist(), strict=True):
            if len(self._heap) < self._count:
                heapq.heappush(self._heap, (-draw, row.index, row))
            elif -draw > self._heap[0][0]:
                self._characters -= len(heapq.heapreplace(self._heap, (-draw, row.index, row))[2].text)
            else:
                continue
            self._characters += len(row.text)
            while self._characters > SAMPLE_CHARACTERS and len(self._heap) > 1:
                self._characters -= len(heapq.heappop(self._heap)[2].text)
                self._count = len(self._heap)

    def rows(self) -> list[ReadRow]:
        """Return the sample, in the order of the file."""
        return [row for _, _, row in sorted(self._heap, key=lambda entry: entry[1])]


class LengthChecks:
    """Counts rows against a length limit, each for sure, and lengths on a sample or on every row.

    Args:
        path: names the file in findings.
        kind: the kind of its rows.
        settings: what is asked.
        folder: the model's folder; None to count characters.
    """

    def __init__(self, path: str, kind: str, settings: InspectionSettings, folder: Path | None) -> None:
        self._path, self._kind, self._settings, self._folder = path, kind, settings, folder
        self._counter: RowCounter | None = None
        self._findings: list[DataFinding] = []
        self._started = False
        self._counted: list[tuple[NDArray[np.int64], CountedRows]] = []  # indices of rows, their tokens
        self._lost: list[int] = []
        self._never: list[int] = []
        self._needed: int | None = None  # smallest length that works, of rows that were counted
        self._sure = 0  # rows that keep something, by their bytes
        self._reasons: dict[str, Places] = {}
        self._refused: set[int] = set()

    def add(self, rows: Sequence[ReadRow]) -> None:
        """Look at the next rows."""
        if not self._started:
            self._start(rows)
        counter = self._counter
        if counter is None:
            return
        if self._settings.exact:
            unsure = list(rows)
        else:
            unsure = [row for row in rows if not counter.surely_learns(row.row)]
            self._sure += len(rows) - len(unsure)
        for begin in range(0, len(unsure), _BLOCK):
            part = unsure[begin : begin + _BLOCK]
            indices, counts = self._count(part)
            self._judge(indices, counts)
            if self._settings.exact:
                self._counted.append((indices, counts))

    def finish(
        self, sample: Sequence[ReadRow], places: RowPlaces
    ) -> tuple[dict[str, Any], float | None, list[DataFinding]]:
        """Return lengths, the supervised share of the tokens, and what was found."""
        counter, found = self._counter, list(self._findings)
        if counter is None:
            if self._folder is None:
                found.append(
                    DataFinding(
                        "note",
                        "skipped",
                        self._path,
                        "without --model, lengths are in characters, and neither max_length nor chat templates are "
                        "looked at",
                        "Name the model that will be trained.",
                    )
                )
            return _characters(sample, len(places)), None, found
        if not self._settings.exact:
            for begin in range(0, len(sample), _BLOCK):
                self._counted.append(self._count(sample[begin : begin + _BLOCK]))
        for reason, where in self._reasons.items():
            remedy = "Mend the row, or the template."
            found.append(where.finding("error", "template", self._path, reason.rstrip("."), remedy))
        counts = stacked([counted for _, counted in self._counted]) if self._counted else None
        if counts is None or not len(counts.whole):
            return {}, None, found
        found += self._lost_findings(places)
        everything = len(counts.whole) + len(self._refused) >= len(places)
        found += self._long_findings(counter, counts, everything, len(places))
        if not everything:
            chat = ", and the chat template" if counter.chat is not None else ""
            found.append(
                DataFinding(
                    "note",
                    "sampled",
                    self._path,
                    f"token lengths{chat} were looked at on a uniform sample of {len(counts.whole)} of {len(places)} "
                    f"rows; which rows keep something to learn was judged for every row, of {self._sure} by their "
                    "bytes",
                    "`--exact` counts the tokens of all.",
                )
            )
        lengths = {"unit": "tokens", "rows": len(counts.whole), "sample": not everything}
        for name in ("prompt", "completion", "whole"):
            values = getattr(counts, name)
            if self._kind != "prompts" or name == "prompt":
                lengths[name] = summary_of(values)
        kept = int(counts.kept.sum())
        share = float(counts.supervised.sum() / kept) if kept and self._kind != "prompts" else None
        return lengths, share, found

    def _start(self, rows: Sequence[ReadRow]) -> None:
        self._started = True
        if self._folder is None:
            return
        first = rows[0].row
        turns = "messages" in first or isinstance(first.get("chosen"), list)
        try:
            self._counter = RowCounter(
                self._folder, self._settings.model, self._kind, self._settings.limit, self._settings.chat, turns
            )
        except ValueError as error:
            if "chat template" not in str(error):
                raise
            self._findings.append(
                DataFinding("error", "template", self._path, str(error).rstrip("."), "", 0, (rows[0].number,))
            )

    def _count(self, rows: Sequence[ReadRow]) -> tuple[NDArray[np.int64], CountedRows]:
        """Return the indices and tokens of rows, without those that the chat template refuses."""
        assert self._counter is not None
        try:
            counts = self._counter.count([row.row for row in rows], "the file")
            return np.fromiter((row.index for row in rows), np.int64), counts
        except ValueError:
            pass
        kept, parts = [], []
        for row in rows:
            try:
                parts.append(self._counter.count([row.row], "row"))
                kept.append(row.index)
            except ValueError as error:
                if row.index not in self._refused:
                    self._refused.add(row.index)
                    reason = str(error).removeprefix("row row 1").lstrip(":, ")
                    self._reasons.setdefault(reason if len(self._reasons) < _BLOCK else "others", Places()).add(
                        row.number, row.line
                    )
        empty = np.empty(0, np.int64)
        return np.array(kept, np.int64), stacked(parts) if parts else CountedRows(*[empty] * 6)

    def _judge(self, indices: NDArray[np.int64], counts: CountedRows) -> None:
        if self._kind == "prompts" or not len(indices):
            return
        ever = counts.needed != NEVER
        self._never += indices[~ever].tolist()
        self._lost += indices[ever & (counts.needed > self._settings.limit)].tolist()
        self._sure += int((ever & (counts.needed <= self._settings.limit)).sum()) if self._settings.exact else 0
        if ever.any():
            least = int(counts.needed[ever].min())
            self._needed = least if self._needed is None else min(self._needed, least)

    def _lost_findings(self, places: RowPlaces) -> list[DataFinding]:
        found, limit, rows = [], self._settings.limit, len(places)
        if self._never:
            places.drop(self._never, "cut")
            problem = f"{len(self._never)} of {rows} rows {_NEVER[self._kind]}"
            found.append(places.at(self._never).finding("error", "cut", self._path, problem, "Drop them."))
        if self._lost:
            places.drop(self._lost, "cut")
            problem = f"{len(self._lost)} of {rows} rows {_LOST[self._kind]} at max_length {limit}"
            if len(self._lost) + len(self._never) + len(self._refused) == rows:
                remedy = f"The smallest max_length that works is {self._needed}."
                problem = f"all {rows} rows {_LOST[self._kind]} at max_length {limit}"
                found.append(places.at(self._lost).finding("error", "cut", self._path, problem, remedy))
            else:
                remedy = "Rounds leave them out and say so; raise max_length, or drop them."
                found.append(places.at(self._lost).finding("warning", "cut", self._path, problem, remedy))
        return found

    def _long_findings(
        self, counter: RowCounter, counts: CountedRows, everything: bool, rows: int
    ) -> list[DataFinding]:
        found = []
        limit, positions = self._settings.limit, counter.positions
        of = f"{len(counts.whole)} rows" if everything else f"the {len(counts.whole)} rows of the sample"
        longer = int((counts.whole > limit).sum())
        if longer and self._kind != "prompts":
            problem = f"{longer} of {of} are longer than max_length {limit} and are cut at their end"
            remedy = f"The longest has {int(counts.whole.max())} tokens."
            found.append(DataFinding("note", "length", self._path, problem, remedy))
        used = counts.whole if self._kind == "prompts" else np.minimum(counts.whole, limit)
        if positions is not None and int((used > positions).sum()):
            problem = f"{int((used > positions).sum())} of {of} are longer than the {positions} positions of the model"
            remedy = f"Set max_length to {positions} or less, or shorten the rows."
            found.append(DataFinding("error", "length", self._path, problem, remedy))
        return found


def summary_of(values: NDArray[np.int64]) -> dict[str, Any]:
    """Return least, median, mean, 95th and 99th percentile and greatest of lengths, with a histogram.

    Bars are of equal, whole width; ``edges`` has one entry more than ``counts``, and a bar counts lengths from its edge
    up to the next, which belongs to the next bar.
    """
    least, greatest = int(values.min()), int(values.max())
    width = max(1, -(-(greatest - least + 1) // BINS))
    edges = np.arange(least, greatest + width + 1, width)
    edges = edges[: int(np.searchsorted(edges, greatest, side="right")) + 1]
    counts, _ = np.histogram(values, bins=[*edges[:-1].tolist(), float(edges[-1])])
    return {
        "least": least,
        "median": float(np.median(values)),
        "mean": float(values.mean()),
        "p95": float(np.percentile(values, 95)),
        "p99": float(np.percentile(values, 99)),
        "greatest": greatest,
        "edges": edges.tolist(),
        "counts": counts.tolist(),
    }


def _characters(sample: Sequence[ReadRow], rows: int) -> dict[str, Any]:
    """Return the lengths of texts in characters, and of whole rows in words."""
    if not sample:
        return {}
    found: dict[str, Any] = {"unit": "characters", "rows": len(sample), "sample": len(sample) < rows}
    for name, columns in (("prompt", ("prompt",)), ("completion", ("completion", "chosen"))):
        values = [len(row.row[column]) for row in sample for column in columns if isinstance(row.row.get(column), str)]
        if values:
            found[name] = summary_of(np.array(values, np.int64))
    found["whole"] = summary_of(np.array([len(row.text) for row in sample], np.int64))
    found["words"] = summary_of(np.array([len(row.text.split()) for row in sample], np.int64))
    return found
