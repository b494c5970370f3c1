"""Inspects files of rows before a budget is spent on them: one pass over each, in blocks, then files and benchmark.

`inspect_data` returns an `Inspection`; the parts look at rows (`inspection_rows`), characters (`inspection_texts`),
tokens (`inspection_tokens`) and verifiers (`inspection_rewards`), and `repair` writes a copy without what was found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..base_models import model_folder
from ..messages import did_you_mean, require_integer, require_number
from ..recipe import Recipe
from ..tasks.base import Chat
from ..tasks.contamination import asked
from ..tasks.rows import ROW_COLUMNS
from ..trl.algorithms import ALGORITHMS
from .bytes_in import first_bytes
from .formats import detect_format
from .inspection_findings import SEVERITIES, DataFinding, Places, listed
from .inspection_lengths import LengthChecks, Sample
from .inspection_rewards import Judge, read_judge, try_judge
from .inspection_rows import MalformedRows, ReadRow, RowChecks
from .inspection_texts import languages_of, scripts_of
from .near_duplicates import NearDuplicates
from .overlap import BenchmarkOverlap, Overlap
from .reading import DataFile, open_data

SAMPLE_ROWS = 10_000
"""Rows of a file whose tokens are counted, unless all are asked for."""

SMALL_SAMPLE = 2_000
"""Rows whose scripts and languages are estimated."""

_BLOCK = 1024
_TELL_EVERY = 50_000

Progress = Callable[[str, int], None]
"""Is told the file that is read, and how many rows of it were."""


def silent(path: str, rows: int) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class InspectionSettings:
    """What data is inspected for.

    Attributes:
        model: a built-in model, a folder or a hub name; empty to count characters in place of tokens.
        algorithm: what will train on it; empty for whatever the form of the rows allows.
        max_length: where rows are cut, in tokens, in [2, 1048576]; None for the default of recipes.
        columns: new name -> name in the files.
        verifier: what judges completions, see `read_judge`; empty for none.
        benchmark: (name, prompt) of each item of the benchmark, in its order.
        chat: how the task's prompts become turns; None for plain text, unless rows hold turns.
        exact: whether the tokens of every row are counted.
        sample_rows: rows whose tokens are counted otherwise, at least 1.
        near_duplicates: whether nearly equal rows are looked for.
        call_seconds: time limit of one call of the verifier.
        seed: decides the sample.
    """

    model: str = ""
    algorithm: str = ""
    max_length: int | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    verifier: str = ""
    benchmark: Sequence[tuple[str, str]] = ()
    chat: Chat | None = None
    exact: bool = False
    sample_rows: int = SAMPLE_ROWS
    near_duplicates: bool = True
    call_seconds: float = 5.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check every setting.

        Raises:
            ValueError: an unknown algorithm, or a number outside its range.
        """
        if self.algorithm and self.algorithm not in ALGORITHMS:
            raise ValueError(f"--algorithm: unknown {self.algorithm!r}.{did_you_mean(self.algorithm, ALGORITHMS)}")
        if self.max_length is not None:
            require_integer("--max-length", self.max_length, low=2, high=1_048_576)
        require_integer("--sample-rows", self.sample_rows, low=1, high=100_000_000)
        require_integer("--seed", self.seed, low=0, high=2**63 - 1)
        require_number("--call-seconds", self.call_seconds, low=0, high=86_400, low_open=True)

    @property
    def kind(self) -> str | None:
        """The kind of rows that the algorithm trains on; None without one."""
        return ALGORITHMS[self.algorithm].rows if self.algorithm else None

    @property
    def limit(self) -> int:
        """Where rows are cut, in tokens."""
        return Recipe.max_length if self.max_length is None else self.max_length


@dataclass
class FileInspection:
    """What is known of one file.

    Attributes:
        path: as it was given.
        file_format: one of `reading.FILE_FORMATS`.
        content_hash: of its bytes.
        rows: rows in it, malformed ones included.
        malformed: rows that cannot be read.
        distinct: different rows among those that a round could train on.
        form: the form of its rows, a key of `formats.FORMATS`; empty when there is none.
        kind: the kind of rows that they become; empty when there is none.
        algorithms: the algorithms that train on that kind.
        columns: column -> type -> rows.
        lengths: what is told of lengths: ``unit``, ``rows`` counted, whether they are a ``sample``, and of ``prompt``,
            ``completion`` and ``whole`` a summary with a histogram.
        supervised_share: share of the tokens that carry a loss, of rows that are trained on; None when unknown.
        scripts: script -> share of the letters, estimated on a sample.
        languages: language -> share of the texts, estimated on a sample.
        rewards: what the verifier gives on a sample.
        findings: what is wrong.
        dropped: row -> why a repair leaves it out.
    """

    path: str
    file_format: str
    content_hash: str
    rows: int = 0
    malformed: int = 0
    distinct: int = 0
    form: str = ""
    kind: str = ""
    algorithms: tuple[str, ...] = ()
    columns: dict[str, dict[str, int]] = field(default_factory=dict)
    lengths: dict[str, Any] = field(default_factory=dict)
    supervised_share: float | None = None
    scripts: dict[str, float] = field(default_factory=dict)
    languages: dict[str, float] = field(default_factory=dict)
    rewards: dict[str, Any] = field(default_factory=dict)
    findings: list[DataFinding] = field(default_factory=list)
    dropped: dict[int, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types, the rows that a repair leaves out as a count for each reason."""
        known = {name: value for name, value in vars(self).items() if name not in ("findings", "dropped")}
        reasons = list(self.dropped.values())
        return {
            **known,
            "algorithms": list(self.algorithms),
            "findings": [finding.to_dict() for finding in self.findings],
            "repair_drops": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
        }


@dataclass(frozen=True)
class Inspection:
    """What an inspection of files found.

    Attributes:
        settings: what they were inspected for.
        files: the files, in the order given.
    """

    settings: InspectionSettings
    files: tuple[FileInspection, ...]

    @property
    def findings(self) -> list[DataFinding]:
        """All findings, those of the first file first."""
        return [finding for file in self.files for finding in file.findings]

    def count(self, severity: str) -> int:
        """Return how many findings have a severity."""
        return sum(finding.severity == severity for finding in self.findings)

    def fails(self, fail_on: str) -> bool:
        """Return whether a finding is at least as severe as one of `SEVERITIES`."""
        grave = SEVERITIES[: SEVERITIES.index(fail_on) + 1]
        return any(finding.severity in grave for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            "model": self.settings.model,
            "algorithm": self.settings.algorithm,
            "max_length": self.settings.limit,
            **{f"{severity}s": self.count(severity) for severity in SEVERITIES},
            "files": [file.to_dict() for file in self.files],
        }


def inspect_data(
    files: Sequence[str | Path], settings: InspectionSettings | None = None, progress: Progress = silent
) -> Inspection:
    """Inspect files, each by itself and against those before it.

    Args:
        files: what `open_data` opens.
        settings: what for.
        progress: is told how far it is.

    Raises:
        DataError: a file cannot be read, or not to its end.
        ValueError: a model or verifier that cannot be had.
    """
    settings = InspectionSettings() if settings is None else settings
    opened = [open_data(file) for file in files]
    judge = read_judge(settings.verifier) if settings.verifier else None
    folder = model_folder(settings.model) if settings.model else None
    known: list[tuple[FileInspection, RowChecks]] = []
    for data in opened:
        found, checks = _FilePass(data, settings, folder, judge, progress).run()
        for earlier, others in known:
            found.findings += _shared_rows(earlier, others, found, checks)
        known.append((found, checks))
    return Inspection(settings, tuple(found for found, _ in known))


class _FilePass:
    """One pass over one file."""

    def __init__(
        self,
        data: DataFile,
        settings: InspectionSettings,
        folder: Path | None,
        judge: Judge | None,
        progress: Progress,
    ) -> None:
        self._data, self._settings, self._folder, self._judge = data, settings, folder, judge
        self._path, self._progress = str(data.path), progress
        self._checks = RowChecks(self._path, settings.kind, settings.columns, mixed=settings.chat is not None)
        self._sample = Sample(settings.sample_rows, settings.seed)
        self._near = NearDuplicates() if settings.near_duplicates else None
        self._overlap = BenchmarkOverlap([prompt for _, prompt in settings.benchmark]) if settings.benchmark else None
        self._lengths: LengthChecks | None = None
        self._standing: list[Overlap] = []  # raw texts in which an item stands

    def run(self) -> tuple[FileInspection, RowChecks]:
        """Read the file and return what is known of it."""
        checks, bad = self._checks, MalformedRows()
        block: list[ReadRow] = []
        for count, raw in enumerate(self._data.rows(bad), start=1):
            row = checks.take(raw)
            if row is not None:
                block.append(row)
                if len(block) == _BLOCK:
                    self._flush(block)
                    block = []
            if count % _TELL_EVERY == 0:
                self._progress(self._path, count)
        if block:
            self._flush(block)
        found = FileInspection(self._path, self._data.format, self._data.content_hash)
        found.rows, found.malformed = checks.rows + bad.total, bad.total
        found.columns = checks.columns
        found.distinct = len(np.unique(checks.digests))
        if checks.form is not None:
            found.form, found.kind = checks.form.name, checks.form.kind
            found.algorithms = trained_by(found.kind)
        found.findings += self._of_the_file(bad)
        found.findings += checks.findings()
        self._finish(found)
        found.dropped = {**checks.refused, **checks.places.dropped}
        found.findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
        return found, checks

    def _flush(self, block: Sequence[ReadRow]) -> None:
        form = self._checks.form
        assert form is not None  # a row was converted
        if self._lengths is None and form.kind:
            self._lengths = LengthChecks(self._path, form.kind, self._settings, self._folder)
        self._sample.add(block)
        if self._lengths is not None:
            self._lengths.add(block)
        if self._near is not None:
            self._near.add([row.text for row in block])
        if self._overlap is not None:
            self._overlap.add([(row.index, asked(row.row), row.text) for row in block])
            if form.kind == "text":  # tasks leave out raw text in which an item stands, however short
                for row in block:
                    item = next(
                        (i for i, (_, prompt) in enumerate(self._settings.benchmark) if prompt in row.text), None
                    )
                    if item is not None:
                        self._standing.append(Overlap(row.index, item, "exact", self._settings.benchmark[item][1]))

    def _finish(self, found: FileInspection) -> None:
        rows, places = self._sample.rows(), self._checks.places
        if self._lengths is not None:
            found.lengths, found.supervised_share, more = self._lengths.finish(rows, places)
            found.findings += more
        few = rows[:: max(1, len(rows) // SMALL_SAMPLE)][:SMALL_SAMPLE]
        found.scripts = scripts_of(row.text for row in few)
        found.languages = languages_of(row.text for row in few) if found.scripts.get("Latin", 0) >= 0.5 else {}
        if self._near is not None:
            found.findings += self._near_findings()
        if self._overlap is not None:
            found.findings += self._overlap_findings(self._overlap)
        if self._judge is not None and rows:
            found.rewards, more = try_judge(self._judge, rows, self._path, self._settings.call_seconds)
            found.findings += more
        elif self._settings.algorithm and found.kind == "prompts" and not self._settings.verifier:
            found.findings.append(
                self._whole(
                    "note",
                    "skipped",
                    "no verifier was tried",
                    f"{self._settings.algorithm} needs one; name "
                    "it with --verifier to see what it gives on these rows.",
                )
            )

    def _of_the_file(self, bad: MalformedRows) -> list[DataFinding]:
        found = []
        if self._data.files and self._data.format in ("jsonl", "json", "csv"):
            marked = [file for file in self._data.files if first_bytes(file).startswith(b"\xef\xbb\xbf")]
            if marked:
                found.append(
                    self._whole(
                        "note",
                        "byte_order_mark",
                        "it begins with a byte order mark",
                        "It is left out here; other readers fail on it or make it part of the first column. `--fix` "
                        "writes none.",
                    )
                )
        if bad.total:
            reasons = list(dict.fromkeys(error.problem for error in bad))[:3]
            told = " ".join(f"({number}) {reason}" for number, reason in enumerate(reasons, start=1))
            found.append(
                bad.places.finding(
                    "error",
                    "malformed",
                    self._path,
                    f"{bad.total} of {self._checks.rows + bad.total} rows cannot be read",
                    told if len(reasons) > 1 else reasons[0],
                )
            )
        form, algorithm = self._checks.form, self._settings.algorithm
        if form is None and self._checks.rows:
            able = self._able()
            found.append(
                self._whole(
                    "error",
                    "algorithm" if algorithm else "form",
                    self._checks.form_error.rstrip("."),
                    (f"{algorithm} cannot train on these rows; algorithms that can: {able}." if algorithm else ""),
                )
            )
        elif form is not None and not form.kind:
            found.append(
                self._whole("error", "algorithm", f"its rows have the form {form.name}", form_refusal(form.name))
            )
        return found

    def _able(self) -> str:
        """Return the algorithms that could train on the columns of the file."""
        names = list(self._checks.columns)
        renamed = {old: new for new, old in self._settings.columns.items()}
        names = [renamed.get(name, name) for name in names]
        able: list[str] = []
        for kind in ROW_COLUMNS:
            try:
                detect_format(names, self._path, kind)
            except ValueError:
                continue
            able += trained_by(kind)
        return ", ".join(sorted(set(able))) or "none"

    def _near_findings(self) -> list[DataFinding]:
        assert self._near is not None
        digests, places = self._checks.digests, self._checks.places
        pairs = [pair for pair in self._near.pairs() if digests[pair.first] != digests[pair.second]]
        if not pairs:
            return []
        first = pairs[0]
        a, b = places.numbers[first.first], places.numbers[first.second]
        return [
            places.at([pair.second for pair in pairs]).finding(
                "warning" if len(pairs) > 0.01 * len(places) else "note",
                "near_duplicate",
                self._path,
                f"{len(pairs)} rows are nearly the text of an earlier row (row {b} of row {a}, an estimated "
                f"{first.similarity:.0%} of their shingles)",
                "Look at some; drop those that teach nothing new. `--fix` leaves them.",
            )
        ]

    def _overlap_findings(self, overlap: BenchmarkOverlap) -> list[DataFinding]:
        found, places = [], self._checks.places
        by_way: dict[str, list[Overlap]] = {}
        standing = {one.row for one in self._standing}
        for one in [*self._standing, *(one for one in overlap.found() if one.row not in standing)]:
            by_way.setdefault(one.how, []).append(one)
        told = {
            "exact": "ask or hold an item of the benchmark word for word",
            "normalised": "ask an item of the benchmark in another form",
            "words": "hold a run of words of an item of the benchmark",
        }
        for how, ones in by_way.items():
            rows = list(dict.fromkeys(one.row for one in ones))
            places.drop(rows, "overlap")
            shown = "; ".join(
                f"row {places.numbers[one.row]} and {self._settings.benchmark[one.item][0]}: {one.shared[:160]!r}"
                for one in ones[:3]
            )
            found.append(
                places.at(rows).finding(
                    "error",
                    "overlap",
                    self._path,
                    f"{len(rows)} rows {told[how]} ({shown}{'; …' if len(ones) > 3 else ''})",
                    "A score on those items says nothing; drop the rows, or take other items.",
                )
            )
        return found

    def _whole(self, severity: str, check: str, problem: str, remedy: str) -> DataFinding:
        return DataFinding(severity, check, self._path, problem, remedy)


def trained_by(kind: str) -> tuple[str, ...]:
    """Return the algorithms that train on a kind of rows."""
    return tuple(name for name, spec in ALGORITHMS.items() if spec.rows == kind)


def form_refusal(form: str) -> str:
    """Return why rows of a form that becomes no kind cannot be used."""
    from .formats import FORMATS

    try:
        FORMATS[form].convert({}, "")
    except ValueError as error:
        return str(error).removeprefix(": ")
    return ""


def _shared_rows(
    earlier: FileInspection, others: RowChecks, found: FileInspection, checks: RowChecks
) -> Iterable[DataFinding]:
    """Return what a file has in common with one before it: whole rows, and prompts with other answers."""
    same = np.flatnonzero(np.isin(checks.digests, others.digests))
    if len(same):
        yield checks.places.at(same).finding(
            "warning",
            "leak",
            found.path,
            f"{len(same)} of {len(checks.places)} rows stand in {earlier.path} too{_first_twin(same, checks, others)}",
            "If one of the two is held out, its score is not of unseen rows; split by distinct row.",
        )
    if len(checks.prompts) == len(checks.digests) and len(others.prompts):
        asking = np.isin(checks.prompts, others.prompts)
        asking[same] = False
        also = np.flatnonzero(asking)
        if len(also):
            yield checks.places.at(also).finding(
                "note",
                "leak",
                found.path,
                f"{len(also)} further rows ask a prompt that {earlier.path} asks too",
                "If one of the two is held out, drop those rows from the other.",
            )


def _first_twin(same: Any, checks: RowChecks, others: RowChecks) -> str:
    first = int(same[0])
    twin = int(np.flatnonzero(others.digests == checks.digests[first])[0])
    return f" (row {checks.places.numbers[first]} is its row {others.places.numbers[twin]})"


__all__ = [
    "DataFinding",
    "FileInspection",
    "Inspection",
    "InspectionSettings",
    "Places",
    "inspect_data",
    "listed",
    "trained_by",
]
