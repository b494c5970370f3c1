"""Opens a person's rows, whatever holds them: `open_data` returns a `DataFile` that streams them with types kept."""

from __future__ import annotations

import glob
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .arrow_rows import arrow_rows, parquet_rows
from .bytes_in import TRUNCATED, compression_of, first_bytes, hash_of, opened
from .csv_rows import csv_rows
from .errors import DataError
from .json_rows import Report, damaged, json_array, json_lines
from .raw_row import RawRow

FILE_FORMATS = ("jsonl", "json", "csv", "parquet", "arrow", "hub")
"""What a `DataFile` can be: lines of JSON, one JSON array, CSV or TSV, Parquet, Arrow, a data set of the hub."""

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
"""Ends of names that a folder's data files have, before those of compression."""

_PACKED = (".gz", ".bz2", ".xz")
_HUB_NAME = re.compile(r"(?:hub:)?[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?:@[\w./-]+)?(?::[\w.-]+)?")


@dataclass(frozen=True)
class DataFile:
    """Rows on disk or on the hub; nothing of them is held in memory.

    Attributes:
        path: what it was opened by.
        format: one of `FILE_FORMATS`.
        files: the files that hold the rows, in the order they are read.
    """

    path: Path | str
    format: str
    files: tuple[Path, ...]

    def rows(self, bad: list[DataError] | None = None) -> Iterator[RawRow]:
        """Stream the rows; several files are read one after the other, and rows are numbered through.

        Args:
            bad: takes the error of each row that cannot be read, which is passed over; None raises the first.

        Raises:
            DataError: a row cannot be read and ``bad`` is None; a file is empty, cut, no UTF-8 beyond single rows, or
                changed while it was read.
        """
        if self.format == "hub":
            from .hub import hub_rows

            yield from hub_rows(str(self.path))
            return
        refused = 0

        def report(error: DataError) -> None:
            nonlocal refused
            refused += 1
            if bad is None:
                raise error
            bad.append(error)

        before = 0  # rows of the files before
        for path in self.files:
            good, refused = 0, 0
            for row in self._of(path, report):
                good += 1
                yield row._replace(number=before + row.number) if before else row
            if good + refused == 0:
                raise DataError(path, "it holds no rows.")
            before += good + refused

    @cached_property
    def content_hash(self) -> str:
        """16 hex digits over the bytes of the files, in their order; of a hub's data set over its name.

        Raises:
            DataError: a file cannot be read.
        """
        if self.format == "hub":
            return hashlib.sha256(str(self.path).encode()).hexdigest()[:16]
        return hashlib.sha256(b"".join(map(hash_of, self.files))).hexdigest()[:16]

    def _of(self, path: Path, report: Report) -> Iterator[RawRow]:
        if self.format == "parquet":
            yield from parquet_rows(path)
        elif self.format == "arrow":
            yield from arrow_rows(path)
        else:
            with opened(path) as file:
                if self.format == "csv":
                    yield from csv_rows(path, file, report, "\t" if _suffix(path) == ".tsv" else "")
                else:
                    yield from (json_lines if self.format == "jsonl" else json_array)(path, file, report)


def open_data(where: str | Path) -> DataFile:
    """Return the rows behind a path: a file, a folder of files, a pattern such as ``data/*.jsonl``, or a hub name.

    The format follows from a file's first bytes where they tell, and else from its name. A folder is what `datasets`
    saved (``save_to_disk``), or holds data files of one format, which are read in the order of their names.

    Raises:
        DataError: nothing is there, or nothing that can be read.
    """
    path = Path(where).expanduser()
    text = str(where)
    if path.is_dir():
        return _folder(path)
    if not path.exists() and glob.has_magic(text):
        found = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
        files = [file for file in found if file.is_file()]
        if not files:
            raise DataError(where, "no file has a name of this pattern.")
        return _several(where, files)
    if not path.exists() and not path.is_symlink() and (text.startswith("hub:") or _looks_like_hub(path, text)):
        return DataFile(text.removeprefix("hub:"), "hub", ())
    return DataFile(path, format_of(path), (path,))


def format_of(path: Path) -> str:
    """Return the format of a file, one of `FILE_FORMATS`.

    Raises:
        DataError: it is missing, no regular file, or something that cannot be read.
    """
    start = first_bytes(path)
    if start.startswith(b"PAR1"):
        return "parquet"
    if start.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return "arrow"
    compressed = compression_of(path)
    suffix = _suffix(path)
    if suffix in (".parquet", ".arrow") and not compressed:
        if not start:
            raise DataError(path, "it is empty.")
        raise DataError(path, f"it is called {suffix} but does not begin as such a file; is the download whole?")
    if suffix in (".csv", ".tsv"):
        return "csv"
    try:
        with opened(path) as file:
            head = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    except TRUNCATED as error:
        raise DataError(path, damaged(0, error)) from error
    if head.startswith(b"["):
        return "json"
    if suffix in (".jsonl", ".ndjson", ".json") or head.startswith(b"{") or not head:
        return "jsonl"
    known = ", ".join(SUFFIXES)
    raise DataError(
        path, f"its format cannot be told: it begins with {head[:20]!r}, and its name does not end in one of {known}."
    )


def _folder(path: Path) -> DataFile:
    if (path / "dataset_dict.json").is_file():
        splits = sorted(entry.name for entry in path.iterdir() if (entry / "state.json").is_file())
        names = ", ".join(str(path / split) for split in splits)
        raise DataError(path, f"it holds several splits; name one of them: {names or 'none is there'}.")
    if (path / "state.json").is_file():
        return DataFile(path, "arrow", _saved_files(path))
    files = sorted(
        entry
        for entry in path.iterdir()
        if entry.is_file() and not entry.name.startswith(".") and _suffix(entry) in SUFFIXES
    )
    if not files:
        inside = sorted(entry.name for entry in path.iterdir())
        shown = ", ".join(inside[:8]) + (", …" if len(inside) > 8 else "")
        raise DataError(
            path,
            f"it is a folder without data files (it holds: {shown or 'nothing'}); name a file, or a folder with files "
            f"that end in {', '.join(SUFFIXES)}.",
        )
    return _several(path, files)


def _saved_files(path: Path) -> tuple[Path, ...]:
    """Return the files of a folder that ``Dataset.save_to_disk`` wrote, in their order."""
    import json

    try:
        listed = json.loads((path / "state.json").read_bytes())["_data_files"]
        files = tuple(path / Path(entry["filename"]).name for entry in listed)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            path / "state.json", "it does not list data files as datasets writes them; save the set again."
        ) from error
    if not files:
        raise DataError(path, "it holds no rows.")
    return files


def _several(where: str | Path, files: list[Path]) -> DataFile:
    formats = {format_of(file): file for file in files}
    if len(formats) > 1:
        shown = ", ".join(f"{file.name} is {name}" for name, file in sorted(formats.items()))
        raise DataError(where, f"its files have several formats ({shown}); name those of one format.")
    return DataFile(where, next(iter(formats)), tuple(files))


def _suffix(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    while suffixes and suffixes[-1] in _PACKED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _looks_like_hub(path: Path, text: str) -> bool:
    return _HUB_NAME.fullmatch(text) is not None and not _suffix(path) and not path.parent.is_dir()


__all__ = ["FILE_FORMATS", "DataError", "DataFile", "RawRow", "format_of", "open_data"]
