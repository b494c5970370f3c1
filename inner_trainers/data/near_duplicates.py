"""Finds rows that are nearly the same text, in one pass over files of any length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .shingles import Hashes, Positions, character_shingles, mix

SHINGLE = 5
"""Bytes of a shingle; shorter texts are compared as a whole."""

BANDS, ROWS = 16, 4
"""Two texts whose shingles overlap by the share s meet in a band with probability 1 - (1 - s**ROWS)**BANDS."""

LONGEST = 200_000
"""Characters of a text that are looked at."""

_NONE = np.uint16(0xFFFF)
_BLOCK = 1 << 19  # shingles hashed at once: what fits into a processor's cache


@dataclass(frozen=True)
class NearPair:
    """Two texts that are nearly the same.

    Attributes:
        first: place of the earlier text, from 0 in the order of `NearDuplicates.add`.
        second: place of the later one.
        similarity: estimated share of their shingles that both have, in [0, 1]; the estimate's standard error is at
            most 0.07, and 0.05 at 0.8.
    """

    first: int
    second: int
    similarity: float


def shared_shingles(left: str, right: str) -> float:
    """Return the share of shingles that two texts have in common (Jaccard's index), in [0, 1]."""
    a, b = (
        {bytes_[i : i + SHINGLE] for i in range(max(1, len(bytes_) - SHINGLE + 1))}
        for bytes_ in (_form(text).encode("utf-8", "surrogatepass") for text in (left, right))
    )
    return len(a & b) / len(a | b)


def _form(text: str) -> str:
    return " ".join(text[:LONGEST].lower().split())


class NearDuplicates:
    """Estimates which texts are nearly the same with MinHash and locality-sensitive hashing (Broder 1997).

    Two texts are near duplicates when they share at least ``threshold`` of their runs of `SHINGLE` bytes, case and
    white space aside, and hold the same numbers: "What is 12 + 7?" and "What is 12 + 8?" are two questions. Texts that
    are equal, case and white space aside, are near duplicates too. About 150 bytes a text are kept.

    Args:
        threshold: smallest share, in (0, 1].
    """

    def __init__(self, threshold: float = 0.8) -> None:
        self.threshold = threshold
        count = BANDS * ROWS
        seeds = mix(np.arange(1, 2 * count + 1, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95))
        self._factors = (seeds[:count] >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
        self._masks = (seeds[count:] >> np.uint64(32)).astype(np.uint32)
        self._least: list[NDArray[np.uint16]] = []
        self._numbers: list[Hashes] = []
        self._wholes: list[Hashes] = []

    def add(self, texts: Sequence[str]) -> None:
        """Take in the next texts."""
        forms = [_form(text) for text in texts]
        hashes, starts, numbers = character_shingles(forms, SHINGLE)
        self._numbers.append(numbers)
        self._least.append(self._minima(hashes, starts))
        self._wholes.append(_wholes(forms, hashes, starts))

    def pairs(self) -> list[NearPair]:
        """Return each near duplicate with the earliest text that it is near to, in the order of the later ones.

        Texts of which one is near to another are a group; each later text of a group comes once.
        """
        if not self._least:
            return []
        least = np.concatenate(self._least)  # (texts, BANDS * ROWS)
        self._least = [least]
        numbers, wholes = np.concatenate(self._numbers), np.concatenate(self._wholes)
        found: dict[int, tuple[int, float]] = {}
        equal_first, equal_later = _same(mix(wholes) + numbers)
        for earlier, later in zip(equal_first.tolist(), equal_later.tolist(), strict=True):
            found[later] = (earlier, 1.0)
        distinct = (least != _NONE).any(axis=1)
        distinct[equal_later] = False
        places = np.flatnonzero(distinct)
        bands = least.view(np.uint64)  # (texts, BANDS): four numbers of 16 bits in one
        for band in range(BANDS):
            firsts, laters = _same(mix(bands[places, band]) + numbers[places])
            for begin in range(0, len(firsts), 1 << 16):
                a, b = places[firsts[begin : begin + (1 << 16)]], places[laters[begin : begin + (1 << 16)]]
                alike = (least[a] == least[b]).mean(axis=1)
                near = alike >= self.threshold
                for i, j, share in zip(a[near].tolist(), b[near].tolist(), alike[near].tolist(), strict=True):
                    if j not in found or share > found[j][1]:
                        found[j] = (i, share)
        return [NearPair(first, later, share) for later, (first, share) in sorted(found.items())]

    def _minima(self, hashes: Hashes, starts: Positions) -> NDArray[np.uint16]:
        """Return, of each of `BANDS` * `ROWS` hash functions, 16 bits of its least value over each text's shingles."""
        texts = len(starts) - 1
        least = np.full((texts, BANDS * ROWS), _NONE, np.uint16)
        narrow = (hashes >> np.uint64(32)).astype(np.uint32)
        begin = 0
        while begin < texts:
            end = max(begin + 1, int(np.searchsorted(starts, starts[begin] + _BLOCK, side="right")) - 1)
            filled = begin + np.flatnonzero(np.diff(starts[begin : end + 1]))
            if len(filled):
                block = narrow[starts[begin] : starts[end]]
                at = starts[filled] - starts[begin]
                values = np.empty_like(block)  # one buffer: a new one for each function costs more than the hashing
                for column, (mask, factor) in enumerate(zip(self._masks, self._factors, strict=True)):
                    np.bitwise_xor(block, mask, out=values)
                    np.multiply(values, factor, out=values)
                    smallest = np.minimum.reduceat(values, at)
                    # the least of many values has zeros in front, so the bits are taken from all of it
                    least[filled, column] = (smallest * np.uint32(0x9E3779B1)) >> np.uint32(16)
            begin = end
        return least


def _wholes(forms: Sequence[str], hashes: Hashes, starts: Positions) -> Hashes:
    """Return one hash a text over all of it; of short texts, which have no shingle, over their characters."""
    totals = np.zeros(len(forms), np.uint64)
    counts = np.diff(starts)
    filled = np.flatnonzero(counts)
    if len(filled):
        # the place counts: texts with the same shingles in another order are not equal
        place = (np.arange(1, len(hashes) + 1) - np.repeat(starts[:-1], counts)).astype(
            np.uint64
        )  # from 1: mix(0) is 0
        totals[filled] = np.add.reduceat(hashes * mix(place), starts[filled])
    for i in np.flatnonzero(counts == 0).tolist():
        totals[i] = int.from_bytes(forms[i].encode("utf-8", "surrogatepass")[: SHINGLE + 2], "little")
    return totals


def _same(keys: Hashes) -> tuple[Positions, Positions]:
    """Return (earliest, later) places of equal keys, for every later one."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    new = np.ones(len(keys), np.bool_)
    new[1:] = ordered[1:] != ordered[:-1]
    heads = order[np.flatnonzero(new)][np.cumsum(new) - 1]
    return heads[~new], order[~new]
