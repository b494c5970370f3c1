"""Turns a person's file into a `Source` of a task, and splits rows so that equal ones never stand on both sides."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..messages import require_integer, require_number
from ..tasks.base import Source
from ..tasks.rows import Row, canonical, check_columns
from .errors import DataError
from .formats import Format, detect_format, renamed
from .reading import DataFile, RawRow, open_data

if TYPE_CHECKING:
    from ..benchmarks.verifiers import Verifier

HELD_PER_BYTE = 4
"""Bytes of memory that rows take for each byte of an uncompressed file, about."""

_PACKED_SHARE = 6  # bytes of text for each byte of a compressed or columnar file, about
_JSON_NAMES = {str: "string", int: "int", float: "float", bool: "bool", list: "list", dict: "object"}


def read_source(
    name: str,
    where: str | Path,
    *,
    kind: str | None = None,
    columns: Mapping[str, str] | None = None,
    verifier: Verifier | Callable[[Row, str], float] | None = None,
    verifier_version: str = "",
    max_rows: int | None = None,
    seed: int = 0,
) -> Source:
    """Read a data source of a task from a file, a folder, a pattern or a hub name; see `open_data`.

    With a verifier, rows that have a prompt are offered as ``prompts`` too, beside what else they are: rows with
    ``prompt``, ``completion`` and ``answer`` can be shown and asked.

    Args:
        name: what recipes call the source.
        where: what holds the rows.
        kind: the kind of rows that is wanted; None for what the columns say, see `formats.FORMATS`.
        columns: new name -> name in the file, for columns that are called otherwise: ``{"prompt": "question"}``.
        verifier: one of `benchmarks.verifiers`, whose version and columns are then known, or any function of a row and
            a completion.
        verifier_version: names the behaviour of a function; see `Source`.
        max_rows: takes a uniform sample of so many rows, in the order of the file, in one pass; None takes all.
        seed: decides the sample.

    Raises:
        DataError: a row cannot be read or used (says file, line and what to do), a column mixes types, or the rows
            would not fit into memory.
        ValueError: a setting outside its range.
    """
    data = open_data(where)
    if max_rows is None:
        _require_memory(data)
    else:
        require_integer("max_rows", max_rows, low=1, high=1_000_000_000)
    require_integer("seed", seed, low=0, high=2**63 - 1)
    score: Any = getattr(verifier, "score", verifier)
    check = getattr(verifier, "check_row", None)
    version = verifier_version or getattr(verifier, "version", "")
    raw_rows = list(data.rows()) if max_rows is None else _sampled(data, max_rows, seed)
    form: Format | None = None
    rows: dict[str, list[Row]] = {}
    for raw in raw_rows:
        place = place_of(data, raw)
        try:
            row = renamed(raw.value, columns, place)
            if form is None:
                form = detect_format(row, place, kind)
            converted = form.convert(row, place) if set(form.columns) <= row.keys() else _missing(form, row, place)
            rows.setdefault(form.kind, []).append(converted)
            if score is not None and form.kind != "text" and "prompt" in converted:
                asked = {**row, "prompt": converted["prompt"]}
                check_columns(place, "prompts", asked)
                if check is not None:
                    _checked(check, asked, place)
                if form.kind != "prompts":
                    rows.setdefault("prompts", []).append(asked)
                else:
                    rows["prompts"][-1] = asked
        except DataError:
            raise
        except ValueError as error:
            raise DataError(
                raw.path or data.path,
                str(error).removeprefix(place).lstrip(":, "),
                line=raw.line,
                row=raw.number,
            ) from None
    assert form is not None  # files without rows are refused when they are read
    if "prompts" in rows:
        _refuse_mixed_types(data, rows["prompts"])
    if "prompts" in rows and score is None:
        raise DataError(
            data.path,
            "its rows are prompts alone, which a verifier must judge; name one, or a column with the answer: columns "
            "{completion: …}.",
        )
    return Source(name, rows, score if "prompts" in rows else None, version if "prompts" in rows else "")


def place_of(data: DataFile, raw: RawRow) -> str:
    """Return how messages name a row: its file, and its line where there are lines."""
    path = raw.path or data.path
    return f"{path}, line {raw.line}" if raw.line is not None else f"{path}, row {raw.number}"


def split_rows(rows: Sequence[Row], held_out: float, seed: int) -> tuple[list[Row], list[Row]]:
    """Split rows so that equal ones stand on one side together; both sides keep the order of the rows.

    Args:
        rows: the rows.
        held_out: share of the rows that the second side gets, in (0, 1); at most that many, rounded, as whole groups of
            equal rows, and one group at least.
        seed: decides which.

    Returns:
        The rows to train on, and those held out.

    Raises:
        ValueError: fewer than two different rows, or a share outside its range.
    """
    if require_number("held_out", held_out, low=0, high=1, low_open=True) == 1:
        raise ValueError("held_out: expected a share below 1, which leaves something to train on.")
    require_integer("seed", seed, low=0, high=2**63 - 1)
    groups: dict[bytes, list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(canonical(dict(row)), []).append(place)
    if len(groups) < 2:
        raise ValueError(f"split_rows: {len(rows)} rows, {len(groups)} distinct; a split needs two different rows.")
    wanted = max(1, round(held_out * len(rows)))
    order = np.random.default_rng(seed).permutation(len(groups))
    every: list[list[int]] = list(groups.values())
    taken: set[int] = set()
    for group in (every[i] for i in order.tolist()):
        if len(taken) + len(group) <= wanted:
            taken.update(group)
    if not taken:
        taken.update(sorted(every, key=len)[0])
    train = [row for place, row in enumerate(rows) if place not in taken]
    if not train:
        raise ValueError(f"split_rows: held_out {held_out} leaves nothing to train on; lower it.")
    return train, [row for place, row in enumerate(rows) if place in taken]


def without_repeats(rows: Sequence[Row]) -> list[Row]:
    """Return each different row once, where it first stands."""
    first: dict[bytes, Row] = {}
    for row in rows:
        first.setdefault(canonical(dict(row)), row)
    return list(first.values())


def mixed_types(rows: Sequence[Row], column: str) -> dict[str, list[int]]:
    """Return type -> numbers of the rows (from 1) that have it in a column, for columns of more than one type.

    Whole numbers and fractions are both numbers; null is no type.
    """
    found: dict[str, list[int]] = {}
    for number, row in enumerate(rows, start=1):
        value = row.get(column)
        if value is not None:
            found.setdefault(_JSON_NAMES.get(type(value), type(value).__name__), []).append(number)
    return found if len(found.keys() - {"int", "float"}) + bool(found.keys() & {"int", "float"}) > 1 else {}


def _refuse_mixed_types(data: DataFile, rows: Sequence[Row]) -> None:
    for column in dict.fromkeys(name for row in rows for name in row):
        found = mixed_types(rows, column)
        if found:
            counts = " and ".join(f"{name} ({len(numbers)})" for name, numbers in sorted(found.items()))
            places = ", ".join(f"row {numbers[0]} is {name}" for name, numbers in sorted(found.items()))
            raise DataError(
                data.path,
                f"{column} mixes {counts}: {places}. A verifier would compare text with numbers; write all of them as "
                'text ("7", "007" and "7.50" stay apart) or all as numbers.',
                column=column,
            )


def _missing(form: Format, row: Mapping[str, Any], place: str) -> dict[str, Any]:
    missing = [name for name in form.columns if name not in row]
    raise ValueError(
        f"{place}: the rows before are of the form {form.name} ({', '.join(form.columns)}), this one has no "
        f"{' and no '.join(missing)}; its columns are {', '.join(row) or 'none'}."
    )


def _checked(check: Callable[[Row], None], row: Row, place: str) -> None:
    try:
        check(row)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def _sampled(data: DataFile, count: int, seed: int) -> Collection[RawRow]:
    """Return a uniform sample of rows in their order (Vitter's algorithm R)."""
    rng = np.random.default_rng([seed, count])
    kept: list[RawRow] = []
    draws: list[float] = []
    for place, raw in enumerate(data.rows()):
        if place < count:
            kept.append(raw)
            continue
        if not draws:
            draws = rng.random(4096).tolist()
        at = int(draws.pop() * (place + 1))
        if at < count:
            kept[at] = raw
    return sorted(kept, key=lambda raw: raw.number)


def _require_memory(data: DataFile) -> None:
    """Refuse rows that would not fit into the memory that is free."""
    if not data.files:
        return
    text = sum(path.stat().st_size * _text_per_byte(data, path) for path in data.files)
    free = available_memory()
    if text * HELD_PER_BYTE <= free:
        return
    sizes = []
    for raw in data.rows():
        sizes.append(len(str(raw.value)))
        if len(sizes) == 1000:
            break
    most = int(0.5 * free / HELD_PER_BYTE / max(1.0, float(np.mean(sizes))))
    raise DataError(
        data.path,
        f"its rows would take about {text * HELD_PER_BYTE / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} GiB are "
        f"free; take a sample of them: max_rows {max(1, most)} or fewer.",
    )


def _text_per_byte(data: DataFile, path: Path) -> int:
    packed = data.format in ("parquet", "arrow") or path.suffix in (".gz", ".bz2", ".xz")
    return _PACKED_SHARE if packed else 1


def available_memory() -> float:
    """Return the bytes of memory that are free or can be freed at once."""
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return float(line.split()[1]) * 1024
    except OSError:
        pass
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


__all__ = ["available_memory", "mixed_types", "place_of", "read_source", "split_rows", "without_repeats"]
