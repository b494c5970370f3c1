"""Rows of a data set on the hub, streamed when the hub can be reached; no code of a data set is ever run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ..messages import first_line
from .errors import DataError
from .raw_row import RawRow

_NAME = re.compile(r"(?P<name>[^@:]+)(?:@(?P<revision>[^:]+))?(?::(?P<split>.+))?")


def hub_rows(name: str) -> Iterator[RawRow]:
    """Yield the rows of ``org/name``, ``org/name@revision`` or ``org/name@revision:split``; the split is train.

    Raises:
        DataError: the hub cannot be reached, or has no such data set.
    """
    import datasets

    found = _NAME.fullmatch(name)
    assert found is not None  # any name matches
    split = found["split"] or "train"
    try:
        rows: Any = datasets.load_dataset(found["name"], split=split, revision=found["revision"], streaming=True)
        iterator = iter(rows)
        first = next(iterator, None)
    except Exception as error:  # the library raises many types for one fact
        raise DataError(
            name,
            f"no file has this name, and the hub's data set cannot be read ({first_line(error, 200)}). Name a file, or "
            "download the data set's files and name their folder.",
        ) from error
    number = 0
    while first is not None:
        number += 1
        yield RawRow(number, None, dict(first), None, None)
        first = next(iterator, None)
    if number == 0:
        raise DataError(name, f"split {split!r} holds no rows.")
