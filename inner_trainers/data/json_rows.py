"""Rows of JSON: one object a line, or one array of objects, read in pieces and with their types kept."""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from ..messages import first_line
from .bytes_in import TRUNCATED
from .errors import DataError
from .raw_row import RawRow

LONGEST_LINE = 256 << 20
"""Bytes of a line, or of an object in an array, that are read at most."""

_CHUNK = 1 << 20
_BLANK = " \t\r\n"

Report = Callable[[DataError], None]


def json_lines(path: Path, file: IO[bytes], report: Report) -> Iterator[RawRow]:
    """Yield the rows of JSONL: each line an object; empty lines are passed over.

    Args:
        path: names the file in messages.
        file: its bytes.
        report: is given the error of each row that is none; may raise it.

    Raises:
        DataError: the file is cut, or a line is longer than `LONGEST_LINE`.
    """
    number = line = 0
    try:
        while raw := file.readline(LONGEST_LINE + 1):
            line += 1
            if len(raw) > LONGEST_LINE:
                raise DataError(
                    path,
                    f"the line is longer than {LONGEST_LINE >> 20} MiB; is it JSON with one object a line?",
                    line=line,
                )
            if line == 1:
                raw = _without_mark(path, raw)
            stripped = raw.strip()
            if not stripped:
                continue
            number += 1
            try:
                value = decode_object(stripped, path, line)
            except DataError as error:
                report(error)
                continue
            yield RawRow(number, line, value, raw, path)
    except TRUNCATED as error:
        raise DataError(path, damaged(number, error), line=line + 1) from error


def damaged(rows: int, error: BaseException) -> str:
    """Return the sentence about compressed data that ends early."""
    return (
        f"the compressed data is cut or damaged after {rows} whole rows ({first_line(error)}); copy or download the "
        "file again."
    )


def decode_object(raw: bytes, path: Path, line: int) -> dict[str, Any]:
    """Return the object that the bytes of one line hold.

    Raises:
        DataError: no UTF-8, no JSON, no object, a key twice, or a number that JSON has no form for.
    """
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise DataError(path, no_utf8(raw, error.start), line=line) from None
    try:
        value = _DECODER.decode(text)
    except _ValueRefused as error:
        raise DataError(path, str(error), line=line) from None
    except json.JSONDecodeError as error:
        raise DataError(path, _no_json(text, error), line=line) from None
    except RecursionError:
        raise DataError(path, "it is nested too deeply to be a row.", line=line) from None
    except ValueError as error:  # Python's limit on the digits of a whole number
        raise DataError(
            path, f"a number cannot be read ({first_line(error, 120)}); write it as text.", line=line
        ) from None
    if not isinstance(value, dict):
        raise DataError(path, f"expected an object with columns, {{…}}, got {_shown(value)}.", line=line)
    return value


def no_utf8(raw: bytes, position: int) -> str:
    """Return the sentence about bytes that are not UTF-8, with what they look like."""
    guess = "Latin-1 or Windows-1252" if raw[position] >= 0xA0 else "Windows-1252 or another code page"
    around = raw[max(0, position - 10) : position + 6].decode("latin-1")
    return (
        f"byte {position + 1} (0x{raw[position]:02x}) is not UTF-8; near {around!r} it looks like {guess}. Convert the "
        "file: `iconv -f WINDOWS-1252 -t UTF-8 IN > OUT`, after a look at which encoding it really has."
    )


def _without_mark(path: Path, raw: bytes) -> bytes:
    """Return a file's first bytes without the byte order mark of UTF-8; other marks are refused."""
    if raw.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(path, "it is UTF-16 or UTF-32; convert it: `iconv -f UTF-16 -t UTF-8 IN > OUT`.", line=1)
    return raw.removeprefix(codecs.BOM_UTF8)


def json_array(path: Path, file: IO[bytes], report: Report) -> Iterator[RawRow]:
    """Yield the rows of one array of objects, read in pieces; `json_lines` tells of the arguments."""
    reader = _ArrayReader(path, file)
    number = 0
    try:
        reader.open()
        while (element := reader.next()) is not None:
            number += 1
            line, value = element
            if isinstance(value, dict):
                yield RawRow(number, line, value, None, path)
            else:
                report(DataError(path, f"expected an object with columns, {{…}}, got {_shown(value)}.", line=line))
    except TRUNCATED as error:
        raise DataError(path, damaged(number, error)) from error


class _ArrayReader:
    """Reads the elements of a JSON array one by one, holding little more than the longest of them."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path, self._file = path, file
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._at, self._line, self._ended = "", 0, 1, False
        self._first = True

    def open(self) -> None:
        """Pass over the opening bracket."""
        self._pass(_BLANK)
        if self._peek() != "[":
            raise DataError(self._path, "expected an array of objects, [{…}, …].", line=self._line)
        self._at += 1

    def next(self) -> tuple[int, Any] | None:
        """Return the next element and the line it begins in; None at the end."""
        self._pass(_BLANK)
        mark = self._peek()
        if mark == "]":
            self._at += 1
            self._pass(_BLANK)
            if self._peek():
                raise DataError(self._path, "something follows the array's closing bracket.", line=self._line)
            return None
        if not self._first:
            if mark != ",":
                raise DataError(
                    self._path,
                    f"expected a comma or the closing bracket, got {repr(mark) if mark else 'the end'}.",
                    line=self._line,
                )
            self._at += 1
            self._pass(_BLANK)
        self._first = False
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
                break
            except _ValueRefused as error:
                raise DataError(self._path, str(error), line=self._line) from None
            except json.JSONDecodeError as error:
                if self._ended or len(self._text) - self._at > LONGEST_LINE:
                    raise DataError(
                        self._path,
                        f"{error.msg} ({'the file ends within the array' if self._ended else 'too long'}).",
                        line=self._line + self._text.count("\n", self._at, error.pos),
                    ) from None
                if error.pos < len(self._text) - 64 and error.msg != "Unterminated string starting at":
                    raise DataError(
                        self._path, f"{error.msg}.", line=self._line + self._text.count("\n", self._at, error.pos)
                    ) from None
                self._more(max(_CHUNK, len(self._text) - self._at))
            except RecursionError:
                raise DataError(self._path, "it is nested too deeply to be a row.", line=self._line) from None
        line = self._line
        self._line += self._text.count("\n", self._at, end)
        self._at = end
        return line, value

    def _peek(self) -> str:
        while self._at >= len(self._text) and not self._ended:
            self._more(_CHUNK)
        return self._text[self._at] if self._at < len(self._text) else ""

    def _pass(self, characters: str) -> None:
        while (mark := self._peek()) and mark in characters:
            self._line += mark == "\n"
            self._at += 1

    def _more(self, count: int) -> None:
        raw = self._file.read(count)
        self._ended = not raw
        try:
            text = self._decoder.decode(raw, final=self._ended)
        except UnicodeDecodeError as error:
            line = self._line + self._text.count("\n", self._at) + error.object[: error.start].count(b"\n")
            raise DataError(self._path, no_utf8(error.object, error.start), line=line) from None
        self._text, self._at = self._text[self._at :] + text, 0


class _ValueRefused(Exception):
    """A value that JSON has no form for, or a key that stands twice."""


def _distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise _ValueRefused(f"key {twice!r} stands twice in one object, so one of its values would be lost; keep one.")
    return value


def _no_constant(name: str) -> Any:
    raise _ValueRefused(f"{name} is no JSON; write null, or leave the row out.")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise _ValueRefused(f"the number {text[:40]} is beyond what a float can hold; write it as text.")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_distinct_keys, parse_constant=_no_constant, parse_float=_finite)


def _no_json(text: str, error: json.JSONDecodeError) -> str:
    place = f"{error.msg} at character {error.pos + 1}"
    if text[error.pos : error.pos + 1] == "'" or text[:2] in ("{'", "['"):
        return f"no JSON: {place}; it looks like a Python literal: JSON has double quotes, null, true and false."
    if error.msg.startswith("Extra data"):
        return (
            f"no JSON: more than one value in the line, the second at character {error.pos + 1}; put each on its own."
        )
    if text in ("{", "[") or (error.pos >= len(text) and text[0] in "{["):
        return (
            f"no JSON: {place}, the line ends within the value. Each object must stand on one line; `jq -c . IN > OUT` "
            "writes it so."
        )
    return f"no JSON: {place}, near {text[max(0, error.pos - 15) : error.pos + 15]!r}."


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"
