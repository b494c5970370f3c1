"""What training rows and benchmark items have in common: rows that ask an item, items that stand in rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..data.overlap import BenchmarkOverlap
from ..data.shingles import texts_in
from .rows import Row, leaks
from .turns import user_texts

if TYPE_CHECKING:
    from .base import Benchmark, Item, Source

_BLOCK = 2048


@dataclass(frozen=True)
class ContaminatedItem:
    """One benchmark item of which a run of words stands in training rows.

    Attributes:
        split: ``"validation"`` or ``"test"``.
        dimension: the item's dimension.
        prompt: the item's prompt.
        source: the first source that has the words.
        kind: the kind of its rows.
        row: number of the first such row among those of its kind, from 1, as the task gives them.
        shared: the words.
    """

    split: str
    dimension: str
    prompt: str
    source: str
    kind: str
    row: int
    shared: str


@dataclass(frozen=True)
class Separated:
    """Sources and benchmark without what they had in common.

    Attributes:
        sources: the sources without rows that ask a benchmark prompt, in whatever form.
        benchmark: the benchmark without items of which a run of words stands in the rows that are left.
        leaked: source name -> rows that were taken out.
        contaminated: the items that were taken out, in the benchmark's order.
    """

    sources: Sequence[Source]
    benchmark: Benchmark
    leaked: Mapping[str, int]
    contaminated: tuple[ContaminatedItem, ...]


def separate(name: str, sources: Sequence[Source], benchmark: Benchmark) -> Separated:
    """Take rows that ask an item's prompt out of the sources, and items that stand in other rows out of the benchmark.

    A row asks a prompt when it is equal to it, up to case, white space, Unicode form and outer punctuation; raw text
    does when the prompt stands in it. An item stands in a row when they share 13 words in a row, or all of 8 to 12;
    see `overlap.BenchmarkOverlap` for what is boilerplate.

    Args:
        name: names the task in messages.
        sources: each name once.
        benchmark: what a checkpoint will be scored on.

    Raises:
        ValueError: a dimension of a split would be left without items.
    """
    items = [(split, item) for split in ("validation", "test") for item in benchmark.items(split)]
    held_out = {item.prompt for _, item in items}
    overlap = BenchmarkOverlap([item.prompt for _, item in items])
    places: list[tuple[Source, str, int]] = []  # of each row
    dropped: set[int] = set()
    block: list[tuple[int, Sequence[str], str]] = []
    for source, kind, index, row in _rows(sources):
        number = len(places)
        places.append((source, kind, index))
        if leaks(kind, row, held_out):
            dropped.add(number)
            continue
        block.append((number, asked(row), "\n".join(texts_in(dict(row)))))
        if len(block) == _BLOCK:
            overlap.add(block)
            block = []
    overlap.add(block)
    found = overlap.found()
    dropped |= {one.row for one in found if one.how != "words"}
    first: dict[int, ContaminatedItem] = {}
    for one in found:
        if one.row not in dropped and one.item not in first:
            (split, item), (source, kind, index) = items[one.item], places[one.row]
            first[one.item] = ContaminatedItem(
                split, item.dimension, item.prompt, source.name, kind, index + 1, one.shared
            )
    leaked: dict[str, int] = {}
    for number in dropped:
        leaked[places[number][0].name] = leaked.get(places[number][0].name, 0) + 1
    return Separated(
        sources=_without(sources, places, dropped),
        benchmark=_clean(name, benchmark, items, first),
        leaked={source.name: leaked[source.name] for source in sources if source.name in leaked},
        contaminated=tuple(first[place] for place in sorted(first)),
    )


def asked(row: Row) -> list[str]:
    """Return what a row asks: its prompt, or what the user says turn by turn; nothing of raw text."""
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        return [prompt]
    turns = row.get("messages") if prompt is None else prompt
    return user_texts(turns) if isinstance(turns, list | tuple) else []


def _rows(sources: Sequence[Source]) -> Iterator[tuple[Source, str, int, Row]]:
    for source in sources:
        for kind, rows in source.rows.items():
            for index, row in enumerate(rows):
                yield source, kind, index, row


def _without(
    sources: Sequence[Source], places: Sequence[tuple[Source, str, int]], dropped: set[int]
) -> Sequence[Source]:
    """Return the sources without some rows; those of which none is dropped are returned themselves."""
    if not dropped:
        return sources
    gone = {(places[number][0].name, places[number][1], places[number][2]) for number in dropped}
    kept = []
    for source in sources:
        if all(name != source.name for name, _, _ in gone):
            kept.append(source)
            continue
        rows = {
            kind: [row for index, row in enumerate(of) if (source.name, kind, index) not in gone]
            for kind, of in source.rows.items()
        }
        kept.append(replace(source, rows={kind: of for kind, of in rows.items() if of}))
    return kept


def _clean(
    name: str, benchmark: Benchmark, items: Sequence[tuple[str, Item]], found: Mapping[int, ContaminatedItem]
) -> Benchmark:
    """Return the benchmark without the items found; itself when there are none."""
    if not found:
        return benchmark
    kept: dict[str, list[Item]] = {"validation": [], "test": []}
    for place, (split, item) in enumerate(items):
        if place not in found:
            kept[split].append(item)
    for split, left in kept.items():
        for dimension in benchmark.dimensions:
            if all(item.dimension != dimension for item in left):
                one = next(i for i in found.values() if (i.split, i.dimension) == (split, dimension))
                raise ValueError(
                    f"task {name!r}: every {split} item of dimension {dimension!r} stands in training rows, so nothing "
                    f"could be credited; for example {one.prompt!r} in source {one.source!r}, {one.kind} row "
                    f"{one.row}: {one.shared!r}. Take those rows out, or other items."
                )
    return replace(benchmark, validation=kept["validation"], test=kept["test"])
