"""One row as a file holds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple


class RawRow(NamedTuple):
    """One row, with its types as stored.

    Attributes:
        number: its number in the file, from 1; rows that cannot be read count.
        line: the line it begins in, from 1; None where a format has no lines.
        value: column -> value.
        raw: the bytes of its line, the line's end included and a byte order mark left out; None where a format has no
            lines of one row each.
        path: the file it stands in; None for what is no file.
    """

    number: int
    line: int | None
    value: dict[str, Any]
    raw: bytes | None
    path: Path | None
