"""Rows of CSV and TSV: every cell stays the text it is."""

from __future__ import annotations

import codecs
import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from .bytes_in import TRUNCATED
from .errors import DataError
from .json_rows import Report, damaged, no_utf8
from .raw_row import RawRow


def csv_rows(path: Path, file: IO[bytes], report: Report, separator: str = "") -> Iterator[RawRow]:
    """Yield the rows below the header; cells are text, whatever they look like: ``007`` stays ``"007"``.

    Line ends within quoted cells become line feeds. A row of another length than the header is reported.

    Args:
        path: names the file in messages.
        file: its bytes.
        report: is given the error of each row that is none; may raise it.
        separator: between cells; empty for the one of comma, semicolon and tab that the header has.

    Raises:
        DataError: no UTF-8, no header, or one with a name twice; the file is cut.
    """
    number = 0
    try:
        start = file.readline()
        if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise DataError(path, "it is UTF-16 or UTF-32; convert it: `iconv -f UTF-16 -t UTF-8 IN > OUT`.", line=1)
        lines = _Lines(path, start.removeprefix(codecs.BOM_UTF8), file)
        first = next(lines, "")
        separator = separator or next((mark for mark in (",", "\t", ";") if mark in first), ",")
        csv.field_size_limit(sys.maxsize)
        cells = csv.reader(_again(first, lines), delimiter=separator, strict=True)
        try:
            header = next(cells, [])
        except csv.Error as error:
            raise DataError(path, f"no CSV: {error}; is every cell of the header closed?", line=1) from None
        _check_header(path, header)
        while True:
            line = cells.line_num + 1
            try:
                row = next(cells, None)
            except csv.Error as error:
                raise DataError(
                    path, f"no CSV: {error}; is a quote within a cell written twice, and every cell closed?", line=line
                ) from None
            if row is None:
                return
            if not row:
                continue
            number += 1
            if len(row) != len(header):
                report(DataError(path, f"{len(row)} cells where the header names {len(header)}.", line=line))
                continue
            yield RawRow(number, line, dict(zip(header, row, strict=True)), None, path)
    except TRUNCATED as error:
        raise DataError(path, damaged(number, error)) from error


def _check_header(path: Path, header: list[str]) -> None:
    if not header:
        raise DataError(path, "it holds no rows.")
    for name in header:
        if not name.strip():
            raise DataError(path, f"the header has a column without a name: {header}.", line=1)
        if header.count(name) > 1:
            raise DataError(path, f"the header names column {name!r} twice; rename one.", line=1)


class _Lines:
    """The lines of a file as text with one kind of line end."""

    def __init__(self, path: Path, start: bytes, file: IO[bytes]) -> None:
        self._path, self._start, self._file, self._number = path, start, file, 0

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        raw = self._start or self._file.readline()
        self._start = b""
        if not raw:
            raise StopIteration
        self._number += 1
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            raise DataError(self._path, no_utf8(raw, error.start), line=self._number) from None
        return text[:-2] + "\n" if text.endswith("\r\n") else text


def _again(first: str, lines: _Lines) -> Iterator[str]:
    if first:
        yield first
    yield from lines
