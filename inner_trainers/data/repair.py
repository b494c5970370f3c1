"""Writes a repaired copy of a file, and the list of what was changed; never in place, and whole or not at all."""

from __future__ import annotations

import bz2
import csv
import gzip
import hashlib
import json
import lzma
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from .arrow_rows import record_batches
from .bytes_in import TRUNCATED, opened
from .errors import DataError
from .inspection import FileInspection
from .json_rows import LONGEST_LINE, damaged, decode_object
from .mending import mended_row
from .reading import DataFile, format_of, open_data

CHANGES = ".changes.jsonl"
"""What is added to the name of a repaired copy for the list of its changes."""

_MARK = b"\xef\xbb\xbf"
_REASONS = {
    "malformed": "it cannot be read",
    "form": "it has not the form of the first row, or is not well formed",
    "empty": "what is to be learned is empty",
    "cut": "it keeps nothing to learn at this max_length",
    "duplicate": "an earlier row is equal to it",
    "identical": "both sides of the preference are equal",
    "overlap": "it holds an item of the benchmark",
    "line_ends": "carriage returns became line feeds",
    "byte_order_mark": "a byte order mark was taken out",
    "tool_arguments": "arguments of tool calls became objects",
}

Changed = Callable[[int, int | None, str, str, bytes, str], None]
"""Is told row, line, what was done, the check, the bytes before, and why."""


def repair(inspection: FileInspection, target: str | Path, *, force: bool = False) -> dict[str, int]:
    """Write a copy of a file without the rows that its inspection drops, and with what can be mended mended.

    Rows that are left alone are the same bytes in JSONL. Beside the copy stands ``TARGET.changes.jsonl`` with a line
    for each change: ``row``, ``line``, ``what`` (``"dropped"`` or ``"changed"``), ``check``, ``before`` (SHA-256 of the
    row's bytes, or of its JSON where a format has no lines) and ``reason``.

    Args:
        inspection: what `inspect_data` says of the file.
        target: the copy; compressed when its name ends in .gz, .bz2 or .xz, and of the file's own format.
        force: whether a file that is there may be replaced.

    Returns:
        ``rows`` written, and changes by check.

    Raises:
        ValueError: the target is the file itself, or there already; the file changed since its inspection; it is no
            single file; nothing would be left.
    """
    data, target = open_data(inspection.path), Path(target).expanduser()
    source = _single(data)
    changes = target.with_name(target.name + CHANGES)
    _require_free(source, target, changes, force)
    if data.content_hash != inspection.content_hash:
        raise DataError(source, "it changed since it was inspected; inspect it again.")
    counts: Counter[str] = Counter()
    with _whole(target) as out, _whole(changes) as log:

        def changed(row: int, line: int | None, what: str, check: str, before: bytes, reason: str) -> None:
            counts[check] += 1
            entry = {
                "row": row,
                "line": line,
                "what": what,
                "check": check,
                "before": hashlib.sha256(before).hexdigest(),
                "reason": reason,
            }
            log.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")

        copy = _COPIES[data.format]
        rows = copy(source, out, target, inspection.dropped, changed)
        if rows == 0:
            raise DataError(source, "no row would be left, so nothing is written; look at the findings first.")
    return {"rows": rows, **dict(counts)}


def _single(data: DataFile) -> Path:
    if len(data.files) != 1 or data.format == "hub":
        what = "a data set of the hub" if data.format == "hub" else f"{len(data.files)} files"
        raise DataError(data.path, f"it is {what}, and a copy is written of one file; name each by itself.")
    return data.files[0]


def _require_free(source: Path, target: Path, changes: Path, force: bool) -> None:
    for path in (target, changes):
        if path.exists() and path.samefile(source):
            raise ValueError(f"--fix: {path} is the file itself, which is never changed in place; name another.")
        if path.is_dir():
            raise ValueError(f"--fix: {path} is a folder; name a file.")
        if path.exists() and not force:
            raise ValueError(f"--fix: {path} is there already; name another, or give --force to replace it.")
    if not target.parent.is_dir():
        raise ValueError(f"--fix: there is no folder {target.parent}; make it first.")


@contextmanager
def _whole(path: Path) -> Iterator[IO[bytes]]:
    """Write a file that appears when the block ends well, and not at all otherwise."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with temporary.open("wb") as raw, ExitStack() as stack:
            yield _packed(path, raw, stack)
            stack.close()
            raw.flush()
            os.fsync(raw.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _packed(path: Path, raw: IO[bytes], stack: ExitStack) -> Any:
    if path.suffix == ".gz":
        return stack.enter_context(gzip.GzipFile(fileobj=raw, filename="", mode="wb", mtime=0))
    if path.suffix == ".bz2":
        return stack.enter_context(bz2.BZ2File(raw, "wb"))
    if path.suffix == ".xz":
        return stack.enter_context(lzma.LZMAFile(raw, "wb"))
    return raw


def _json_lines(source: Path, out: IO[bytes], target: Path, dropped: dict[int, str], changed: Changed) -> int:
    number = line = written = 0
    with opened(source) as file:
        try:
            while raw := file.readline(LONGEST_LINE + 1):
                line += 1
                before = raw
                if line == 1 and raw.startswith(_MARK):
                    raw = raw.removeprefix(_MARK)
                    changed(1, 1, "changed", "byte_order_mark", before, _REASONS["byte_order_mark"])
                stripped = raw.strip()
                if not stripped:
                    continue
                number += 1
                try:
                    value = decode_object(stripped, source, line)
                except DataError as error:
                    changed(number, line, "dropped", "malformed", before, error.problem)
                    continue
                if number in dropped:
                    check = dropped[number]
                    changed(number, line, "dropped", check, before, _REASONS[check])
                    continue
                value, done = mended_row(value)
                for check in done:
                    changed(number, line, "changed", check, before, _REASONS[check])
                if done:
                    raw = _json(value) + b"\n"
                elif raw.endswith(b"\r\n"):
                    changed(number, line, "changed", "line_ends", before, "the line's CRLF became a line feed")
                    raw = raw[:-2] + b"\n"
                out.write(raw if raw.endswith(b"\n") else raw + b"\n")
                written += 1
        except TRUNCATED as error:
            raise DataError(source, damaged(number, error), line=line + 1) from error
    return written


def _kept(
    source: Path, dropped: dict[int, str], changed: Changed, mend: bool = True
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and value of the rows that stay, mended."""
    data, bad = DataFile(source, format_of(source), (source,)), _Dropped(changed)
    for row in data.rows(bad):
        before = _json(row.value)
        if row.number in dropped:
            check = dropped[row.number]
            changed(row.number, row.line, "dropped", check, before, _REASONS[check])
            continue
        value, done = mended_row(row.value) if mend else (row.value, ())
        for check in done:
            changed(row.number, row.line, "changed", check, before, _REASONS[check])
        yield row.number, value


class _Dropped(list[DataError]):
    """Writes each row that cannot be read into the list of changes."""

    def __init__(self, changed: Changed) -> None:
        super().__init__()
        self._changed = changed

    def append(self, error: DataError) -> None:
        self._changed(error.row or 0, error.line, "dropped", "malformed", b"", error.problem)


def _json_array(source: Path, out: IO[bytes], target: Path, dropped: dict[int, str], changed: Changed) -> int:
    _note_mark(source, changed)
    written = 0
    for _, value in _kept(source, dropped, changed):
        out.write((b",\n" if written else b"[\n") + _json(value))
        written += 1
    out.write(b"\n]\n")
    return written


def _csv(source: Path, out: IO[bytes], target: Path, dropped: dict[int, str], changed: Changed) -> int:
    import io

    _note_mark(source, changed)
    _note_line_ends(source, changed)
    separator, written = _separator(source), 0
    for _, value in _kept(source, dropped, changed):
        text = io.StringIO()
        writer = csv.writer(text, delimiter=separator, lineterminator="\n")
        if not written:
            writer.writerow(value)
        writer.writerow(value.values())
        out.write(text.getvalue().encode())
        written += 1
    return written


def _separator(source: Path) -> str:
    if ".tsv" in [suffix.lower() for suffix in source.suffixes]:
        return "\t"
    with opened(source) as file:
        first = file.readline().decode()
    return next((mark for mark in (",", "\t", ";") if mark in first), ",")


def _note_mark(source: Path, changed: Changed) -> None:
    with opened(source) as file:
        start = file.read(3)
    if start == _MARK:
        changed(0, 1, "changed", "byte_order_mark", start, _REASONS["byte_order_mark"])


def _note_line_ends(source: Path, changed: Changed) -> None:
    with opened(source) as file:
        first = file.readline()
    if first.endswith(b"\r\n"):
        changed(0, 1, "changed", "line_ends", first, "the lines' CRLF became line feeds")


def _parquet(source: Path, out: IO[bytes], target: Path, dropped: dict[int, str], changed: Changed) -> int:
    from pyarrow import parquet

    with parquet.ParquetFile(source) as file:
        schema = file.schema_arrow
        with parquet.ParquetWriter(out, schema) as writer:
            return _columnar(file.iter_batches(batch_size=1024), writer.write_batch, dropped, changed)


def _arrow(source: Path, out: IO[bytes], target: Path, dropped: dict[int, str], changed: Changed) -> int:
    from pyarrow import ipc

    with record_batches(source) as (schema, batches), ipc.new_stream(out, schema) as writer:
        return _columnar(batches, writer.write_batch, dropped, changed)


def _columnar(batches: Any, write: Callable[[Any], None], dropped: dict[int, str], changed: Changed) -> int:
    """Copy record batches without some rows; carriage returns and marks in text columns are mended."""
    import pyarrow

    number = written = 0
    for batch in batches:
        keep, mended, columns = [], False, [column.to_pylist() for column in batch.columns]
        names = batch.schema.names
        for i in range(batch.num_rows):
            number += 1
            row = {name: values[i] for name, values in zip(names, columns, strict=True)}
            if number in dropped:
                check = dropped[number]
                changed(number, None, "dropped", check, _json(row), _REASONS[check])
                continue
            keep.append(i)
            value, done = mended_row(row)
            if done and "tool_arguments" not in done:  # text cannot become an object in a typed column
                mended = True
                for check in done:
                    changed(number, None, "changed", check, _json(row), _REASONS[check])
                for name, values in zip(names, columns, strict=True):
                    values[i] = value[name]
        if mended:
            arrays = [
                pyarrow.array([values[i] for i in keep], field.type)
                for values, field in zip(columns, batch.schema, strict=True)
            ]
            batch = pyarrow.RecordBatch.from_arrays(arrays, schema=batch.schema)
        elif len(keep) < batch.num_rows:
            batch = batch.take(pyarrow.array(keep, pyarrow.int64()))
        if keep:
            write(batch)
            written += len(keep)
    return written


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass")


_COPIES: dict[str, Callable[[Path, IO[bytes], Path, dict[int, str], Changed], int]] = {
    "jsonl": _json_lines,
    "json": _json_array,
    "csv": _csv,
    "parquet": _parquet,
    "arrow": _arrow,
}
