"""Rows of Parquet and Arrow files, read in batches: values as stored, without keys that the format itself made up."""

from __future__ import annotations

import contextlib
import datetime
import decimal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..messages import first_line
from .bytes_in import require_unchanged, state_of
from .errors import DataError
from .raw_row import RawRow

BATCH = 1024


def parquet_rows(path: Path) -> Iterator[RawRow]:
    """Yield the rows of a Parquet file.

    Raises:
        DataError: it is cut or damaged, changed while it was read, or has a column of bytes, one name
            for two columns, or a value that Python cannot hold.
    """
    import pyarrow
    from pyarrow import parquet

    before = state_of(path)
    try:
        with parquet.ParquetFile(path) as file:
            _check_columns(path, file.schema_arrow)
            yield from _rows(path, file.iter_batches(batch_size=BATCH))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(path, f"it is no whole Parquet file ({first_line(error, 200)}); copy it again.") from error
    require_unchanged(path, before)


def arrow_rows(path: Path) -> Iterator[RawRow]:
    """Yield the rows of an Arrow file, in the stream format that `datasets` writes or the random-access one.

    Raises:
        DataError: as `parquet_rows`.
    """
    import pyarrow

    before = state_of(path)
    try:
        with record_batches(path) as (schema, batches):
            _check_columns(path, schema)
            yield from _rows(path, (part for batch in batches for part in _slices(batch)))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(path, f"it is no whole Arrow file ({first_line(error, 200)}); copy it again.") from error
    require_unchanged(path, before)


@contextlib.contextmanager
def record_batches(path: Path) -> Iterator[tuple[Any, Iterable[Any]]]:
    """Open an Arrow file of either format; gives its schema and its batches, to be used within the block."""
    import pyarrow
    from pyarrow import ipc

    with pyarrow.memory_map(str(path)) as source:
        try:
            stream = ipc.open_stream(source)
        except pyarrow.ArrowInvalid:
            file = ipc.open_file(source)
            yield file.schema, (file.get_batch(place) for place in range(file.num_record_batches))
            return
        yield stream.schema, stream


def _slices(batch: Any) -> Iterator[Any]:
    for begin in range(0, batch.num_rows, BATCH):
        yield batch.slice(begin, BATCH)


def _check_columns(path: Path, schema: Any) -> None:
    from pyarrow import types

    for name in schema.names:
        if schema.names.count(name) > 1:
            raise DataError(path, "two columns have this name, so one would be lost; rename one.", column=name)
    for field in schema:
        if types.is_binary(field.type) or types.is_large_binary(field.type) or types.is_fixed_size_binary(field.type):
            raise DataError(
                path, f"it holds bytes ({field.type}); write text, or leave the column out.", column=field.name
            )


def _rows(path: Path, batches: Iterator[Any]) -> Iterator[RawRow]:
    number = 0
    for batch in batches:
        for row in _python_rows(batch, path, number):
            number += 1
            yield RawRow(
                number, None, {name: _plain(value, path, number, name) for name, value in row.items()}, None, path
            )


def _python_rows(batch: Any, path: Path, before: int) -> list[dict[str, Any]]:
    """Return the rows of a batch; a value that Python has no form for is named by row and column."""
    import pyarrow
    from pyarrow import types

    for column in batch.columns:  # damaged offsets would make the process read foreign memory
        try:
            column.validate(full=True)
        except pyarrow.ArrowInvalid as error:
            flat = types.is_string(column.type) or types.is_large_string(column.type)
            if not (flat and "UTF8" in str(error)):  # that has its offsets checked, and is located below
                raise
    try:
        found: list[dict[str, Any]] = batch.to_pylist()
        return found
    except (ValueError, OverflowError, KeyError) as whole:  # no UTF-8, a date beyond year 9999, an unknown time zone
        for place in range(batch.num_rows):
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                try:
                    column[place].as_py()
                except (ValueError, OverflowError, KeyError) as error:
                    raise DataError(
                        path,
                        f"a value of type {column.type} cannot be read ({first_line(error, 120)}); write it as text "
                        "in UTF-8, or leave the column out.",
                        row=before + place + 1,
                        column=name,
                    ) from error
        raise DataError(path, f"rows cannot be read ({first_line(whole, 120)}); write the file again.") from whole


def _plain(value: Any, path: Path, row: int, column: str) -> Any:
    """Return a stored value as plain data.

    A struct has every key that some row has, null where a row has it not, so null entries of structs are left out: a
    tool call keeps its own arguments alone.
    """
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, dict):
        return {key: _plain(inner, path, row, column) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        if value and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):  # a map
            keys = [str(key) for key, _ in value]
            for key in keys:
                if keys.count(key) > 1:
                    raise DataError(
                        path,
                        f"key {key!r} stands twice in one map, so one of its values would be lost; keep one.",
                        row=row,
                        column=column,
                    )
            return {str(key): _plain(inner, path, row, column) for key, inner in value}
        return [_plain(inner, path, row, column) for inner in value]
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    raise DataError(path, f"a value of type {type(value).__name__} is neither text nor number.", row=row, column=column)
