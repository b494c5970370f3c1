"""Hashes of words, of runs of words and of characters, made for whole blocks of texts at once; equal in any process.

Every hash is a sum of products of 64-bit numbers modulo 2**64, so that numpy makes those of a block without a loop
over its texts. They are no cryptographic hashes: what they find is compared again where it matters.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]
Positions = NDArray[np.int64]

_UNSPACED = re.compile(r"([\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff])")
"""Characters of scripts that are written without spaces, each of which counts as a word."""

_NO_WORD = re.compile(r"[\W_]+")
_WORD = re.compile(r"[^\x00-/:-`{-\x7f]+")
_OUTER = " .?!,;:'\"“”‘’"
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def normalise(text: str) -> str:
    """Return a text as it is compared when only form may differ.

    NFKC, case folded, runs of white space as one space, without punctuation of sentences and quotes at its ends. Signs
    within stay: ``12+34`` and ``12-34`` are two questions.
    """
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text).casefold()
    else:
        text = text.lower()
    return " ".join(text.split()).strip(_OUTER)


def words_of(text: str) -> list[str]:
    """Return the words that `word_hashes` sees: runs of letters and digits, case folded."""
    return _WORD.findall(_spaced(text))


def _spaced(text: str) -> str:
    """Return a text in which everything that is no part of a word is ASCII."""
    if text.isascii():
        return text.lower()
    return _NO_WORD.sub(" ", _UNSPACED.sub(r" \1 ", unicodedata.normalize("NFKC", text).casefold()))


def _table(of: str) -> NDArray[np.bool_]:
    known = np.zeros(256, np.bool_)
    known[list(of.encode())] = True
    return known


_DIGITS = _table("0123456789")
_WORD_BYTES = _table("0123456789abcdefghijklmnopqrstuvwxyz")
_WORD_BYTES[128:] = True


def mix(values: Hashes) -> Hashes:
    """Return 64-bit numbers whose bits all depend on all bits of those given (the finaliser of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


_OF_BYTE: Hashes = mix(np.arange(1, 257, dtype=np.uint64) * _MULTIPLIER)


def _powers(count: int) -> Hashes:
    return np.cumprod(np.full(count, _MULTIPLIER, np.uint64), dtype=np.uint64)


@dataclass(frozen=True)
class HashedWords:
    """The words of a block of texts.

    Attributes:
        hashes: (words,) uint64, one text after the other.
        starts: (texts + 1,) int64; the words of text i are ``hashes[starts[i]:starts[i + 1]]``.
    """

    hashes: Hashes
    starts: Positions

    def grams(self, length: int) -> tuple[Hashes, Positions]:
        """Return the hash of every run of ``length`` words within one text, and at which word it begins."""
        count = len(self.hashes) - length + 1
        if count < 1:
            return np.empty(0, np.uint64), np.empty(0, np.int64)
        grams = np.zeros(count, np.uint64)
        for place, power in enumerate(_powers(length)):
            grams += self.hashes[place : place + count] * power
        first = np.arange(count)
        ends = np.repeat(self.starts[1:], np.diff(self.starts))  # of the text that a word stands in
        within = first + length <= ends[:count]
        return mix(grams[within]), first[within]


def word_hashes(texts: Sequence[str]) -> HashedWords:
    """Return the hashes of the words of texts; see `words_of`."""
    buffer, begins = _buffer([_spaced(text) for text in texts])
    return _runs(buffer, begins, _WORD_BYTES)


def number_hashes(buffer: NDArray[np.uint8], begins: Positions) -> Hashes:
    """Return one hash a text over the numbers in it, whatever their order: (texts,) uint64, 0 where there are none."""
    runs = _runs(buffer, begins, _DIGITS)
    return _sums(mix(runs.hashes), runs.starts)


def _buffer(texts: Sequence[str]) -> tuple[NDArray[np.uint8], Positions]:
    """Return texts as bytes, a line feed after each, and where each begins (one position more than texts)."""
    pieces = [text.encode("utf-8", "surrogatepass") for text in texts]
    begins = np.zeros(len(pieces) + 1, np.int64)
    np.cumsum([len(piece) + 1 for piece in pieces], out=begins[1:])
    return np.frombuffer(b"\n".join([*pieces, b""]), np.uint8), begins


def _runs(buffer: NDArray[np.uint8], begins: Positions, table: NDArray[np.bool_]) -> HashedWords:
    """Return the hash of every run of bytes that are in the table."""
    inside = np.zeros(len(buffer) + 2, np.int8)
    inside[1:-1] = table[buffer]
    edges = np.flatnonzero(np.diff(inside))
    first, end = edges[::2], edges[1::2]
    if len(first) == 0:
        return HashedWords(np.empty(0, np.uint64), np.zeros(len(begins), np.int64))
    lengths = end - first
    offsets = np.cumsum(lengths) - lengths
    place = np.arange(int(lengths.sum()))
    within = place - np.repeat(offsets, lengths)
    products = _OF_BYTE[buffer[place + np.repeat(first - offsets, lengths)]] * _powers(int(lengths.max()))[within]
    hashes = mix(np.add.reduceat(products, offsets))
    return HashedWords(hashes, np.searchsorted(first, begins).astype(np.int64))


def _sums(values: Hashes, starts: Positions) -> Hashes:
    """Return the sum of each text's values; 0 for texts without one."""
    totals = np.zeros(len(starts) - 1, np.uint64)
    filled = np.flatnonzero(np.diff(starts))
    if len(filled):
        totals[filled] = np.add.reduceat(values, starts[filled])
    return totals


def character_shingles(texts: Sequence[str], length: int) -> tuple[Hashes, Positions, Hashes]:
    """Return the shingles of texts that were brought to one form already.

    Args:
        texts: the texts.
        length: bytes of a shingle.

    Returns:
        The hash of every run of ``length`` bytes within one text, one text after the other; where each text's begin
        (one more than texts); and the hash over the numbers in each text, see `number_hashes`.
    """
    buffer, begins = _buffer(texts)
    numbers = number_hashes(buffer, begins)
    counts = np.maximum(np.diff(begins) - length, 0)  # a text's line feed is no part of it
    starts = np.zeros(len(begins), np.int64)
    np.cumsum(counts, out=starts[1:])
    if starts[-1] == 0:
        return np.empty(0, np.uint64), starts, numbers
    coded = _OF_BYTE[buffer]
    count = len(buffer) - length + 1
    rolling = np.zeros(count, np.uint64)
    for place, power in enumerate(_powers(length)):
        rolling += coded[place : place + count] * power
    where = np.arange(int(starts[-1])) + np.repeat(begins[:-1] - starts[:-1], counts)
    return mix(rolling[where]), starts, numbers


def in_pieces(text: str, size: int, shared: int) -> Iterator[str]:
    """Yield a text in pieces of at most ``size`` characters, each beginning ``shared`` before the end of the last."""
    if len(text) <= size:
        yield text
        return
    for begin in range(0, len(text) - shared, size - shared):
        yield text[begin : begin + size]


def texts_in(value: Any) -> Iterator[str]:
    """Yield every text in plain data, depth first and in its order: a row's columns, its turns, its tool calls."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from texts_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts_in(inner)
