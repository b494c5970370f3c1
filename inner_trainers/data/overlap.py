"""Finds training rows that repeat benchmark items: the whole prompt, the prompt in another form, or a run of words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .shingles import HashedWords, Hashes, in_pieces, normalise, word_hashes, words_of

LONGEST_RUN, SHORTEST_RUN = 13, 8
"""Words of a run that counts as overlap; an item with fewer words counts as one run, down to the second number."""

PHRASE = 5
"""Words of a phrase by which boilerplate is known."""

SHARED_BY_ITEMS = 3
"""A phrase that more items than this, and more than `COMMON_SHARE` of them, have in common is boilerplate."""

SHARED_BY_ROWS = 20
"""A run that more different rows than this, and more than `COMMON_SHARE` of all rows, have in common is boilerplate."""

COMMON_SHARE = 0.05

_PIECE, _PIECES_SHARE = 1_000_000, 4_000  # characters hashed at once, and that two pieces of a text have in common


@dataclass(frozen=True)
class Overlap:
    """One row that repeats one item.

    Attributes:
        row: the number that `BenchmarkOverlap.add` was given for the row.
        item: place of the item among the prompts, from 0.
        how: ``"exact"`` (the row asks the item's prompt), ``"normalised"`` (the same but for case, Unicode form, white
            space and outer punctuation) or ``"words"`` (a run of words of the item stands somewhere in the row).
        shared: the text that both have, as the row has it; of a run, its words.
    """

    row: int
    item: int
    how: str
    shared: str


class BenchmarkOverlap:
    """Compares rows with the prompts of a benchmark, in one pass over the rows.

    Runs have 13 words, as in Brown et al. (2020), who also let short items down to 8 words count as a whole; shorter
    items are found by their whole prompt alone. Words that many items share (an instruction, a few-shot head) are
    boilerplate, and so are those that many different rows share with an item (the template of a data set): a run counts
    when at least 8 of its words are none.

    Args:
        prompts: the benchmark's prompts, validation and test.
    """

    def __init__(self, prompts: Sequence[str]) -> None:
        self._prompts = list(prompts)
        self._exact = _first_places(self._prompts)
        forms = [normalise(prompt) for prompt in self._prompts]
        self._normalised = {form: i for form, i in _first_places(forms).items() if form}
        self._twins = _places(forms)
        self._places: list[list[tuple[int, int]]] = []  # run -> (item, word) of each of its places
        self._lengths: list[int] = []  # run -> words
        self._own: list[NDArray[np.bool_]] = []  # item -> whether each of its words is no boilerplate
        self._known: dict[int, tuple[Hashes, int]] = {}  # words of a run -> sorted hashes, and the first one's run
        self._text: dict[int, str] = {}  # run -> its words, once a row has it
        self._index()
        self._whole: list[Overlap] = []
        self._patterns: dict[tuple[int, ...], int] = {}
        self._rows: list[tuple[int, int]] = []  # row number, pattern
        self._different: dict[int, int] = {}  # run -> different rows that have it
        self._seen: set[int] = set()
        self._count = 0

    def add(self, rows: Iterable[tuple[int, Sequence[str], str]]) -> None:
        """Compare the next rows.

        Args:
            rows: of each row a number of the caller's, what it asks (its prompt, or what the user says turn by turn),
                and its whole text.
        """
        block = list(rows)
        self._count += len(block)
        pieces: list[str] = []
        owners: list[int] = []
        for place, (number, asked, text) in enumerate(block):
            self._compare_wholes(number, asked)
            if self._known:
                for piece in in_pieces(text, _PIECE, _PIECES_SHARE):
                    pieces.append(piece)
                    owners.append(place)
        if not pieces:
            return
        runs_in: dict[int, set[int]] = {}
        words = word_hashes(pieces)
        for length, (known, first) in self._known.items():
            grams, places = words.grams(length)
            at = np.searchsorted(known, grams)
            at[at == len(known)] = 0
            for hit in np.flatnonzero(known[at] == grams).tolist():
                run = first + int(at[hit])
                source = int(np.searchsorted(words.starts, places[hit], side="right")) - 1
                runs_in.setdefault(owners[source], set()).add(run)
                if run not in self._text:
                    begin = int(places[hit] - words.starts[source])
                    self._text[run] = " ".join(words_of(pieces[source])[begin : begin + length])
        for place, runs in sorted(runs_in.items()):
            number, _, text = block[place]
            pattern = self._patterns.setdefault(tuple(sorted(runs)), len(self._patterns))
            self._rows.append((number, pattern))
            fingerprint = hash(normalise(text))
            if fingerprint not in self._seen:
                self._seen.add(fingerprint)
                for run in runs:
                    self._different[run] = self._different.get(run, 0) + 1

    def found(self) -> list[Overlap]:
        """Return every overlap, in the order of the rows; of a row and an item the plainest alone."""
        best: dict[tuple[int, int], Overlap] = {}
        for overlap in self._whole:
            best.setdefault((overlap.row, overlap.item), overlap)
        own = self._own_words()
        patterns = [self._meant(pattern, own) for pattern in self._patterns]
        for number, pattern in self._rows:
            for item, run in patterns[pattern].items():
                best.setdefault((number, item), Overlap(number, item, "words", self._text[run]))
        return sorted(best.values(), key=lambda overlap: (overlap.row, overlap.item))

    def _compare_wholes(self, number: int, asked: Sequence[str]) -> None:
        for text in asked:
            exact = self._exact.get(text)
            if exact is not None:
                self._whole.append(Overlap(number, exact, "exact", text))
            form = normalise(text)
            if form in self._normalised:
                for item in self._twins[form]:
                    if item != exact:
                        self._whole.append(Overlap(number, item, "normalised", text))

    def _meant(self, pattern: tuple[int, ...], own: list[NDArray[np.bool_]]) -> dict[int, int]:
        """Return item -> the first run that a row shares with it in words of the item's own."""
        found: dict[int, tuple[int, int]] = {}  # item -> place in it, run
        for run in pattern:
            for item, begin in self._places[run]:
                if _enough(own[item][begin : begin + self._lengths[run]]):
                    found[item] = min(found.get(item, (begin, run)), (begin, run))
        return {item: run for item, (_, run) in found.items()}

    def _own_words(self) -> list[NDArray[np.bool_]]:
        """Return of each item which words are its own, those aside that many different rows share with it."""
        own = [words.copy() for words in self._own]
        common = max(SHARED_BY_ROWS, COMMON_SHARE * self._count)
        for run, count in self._different.items():
            if count > common:
                for item, begin in self._places[run]:
                    own[item][begin : begin + self._lengths[run]] = False
        return own

    def _index(self) -> None:
        """List the runs of every item, boilerplate of the benchmark aside."""
        words = word_hashes(self._prompts)
        counts = np.diff(words.starts)
        self._own = [np.ones(count, np.bool_) for count in counts.tolist()]
        common = max(SHARED_BY_ITEMS, COMMON_SHARE * len(self._prompts))
        for _, places in _grouped(words, PHRASE):
            if len({item for item, _ in places}) > common:
                for item, begin in places:
                    self._own[item][begin : begin + PHRASE] = False
        for length in range(SHORTEST_RUN, LONGEST_RUN + 1):
            kept: list[int] = []
            for gram, places in _grouped(words, length):
                wanted = [
                    (item, begin)
                    for item, begin in places
                    if (counts[item] == length or (length == LONGEST_RUN and counts[item] > length))
                    and _enough(self._own[item][begin : begin + length])
                ]
                if wanted:
                    kept.append(gram)
                    self._places.append(wanted)
                    self._lengths.append(length)
            if kept:
                self._known[length] = np.array(kept, np.uint64), len(self._places) - len(kept)


def _grouped(words: HashedWords, length: int) -> list[tuple[int, list[tuple[int, int]]]]:
    """Return every run of words with its places (text, word within it), in the order of their hashes."""
    grams, places = words.grams(length)
    owners = np.searchsorted(words.starts, places, side="right") - 1
    within = places - words.starts[owners]
    grouped: dict[int, list[tuple[int, int]]] = {}
    for gram, owner, place in zip(grams.tolist(), owners.tolist(), within.tolist(), strict=True):
        grouped.setdefault(gram, []).append((owner, place))
    return sorted(grouped.items())


def _enough(own: NDArray[np.bool_]) -> bool:
    return int(own.sum()) >= SHORTEST_RUN


def _first_places(texts: Sequence[str]) -> dict[str, int]:
    places: dict[str, int] = {}
    for place, text in enumerate(texts):
        places.setdefault(text, place)
    return places


def _places(texts: Sequence[str]) -> dict[str, list[int]]:
    places: dict[str, list[int]] = {}
    for place, text in enumerate(texts):
        places.setdefault(text, []).append(place)
    return places
