"""Hashes of words and characters are those of the plain definitions, for whole blocks of texts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain_gym.inner_trainers.data.shingles import (
    character_shingles,
    in_pieces,
    normalise,
    texts_in,
    word_hashes,
    words_of,
)

TEXTS = st.lists(st.text(alphabet="ab1 .-é中\n\ud800", max_size=12), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("  What is\t12+34?\n", "what is 12+34"),
        ("What is 12-34?", "what is 12-34"),
        ("“Straße”", "strasse"),
        ("ﬁne ①", "fine 1"),
        ("r:abc=", "r:abc="),
        ("...", ""),
    ],
)
def test_normalise_keeps_the_signs_within(text: str, form: str) -> None:
    assert normalise(text) == form


def test_words_are_runs_of_letters_and_digits() -> None:
    assert words_of("Don't stop—it's 7.50, “Éa” 中文!") == ["don", "t", "stop", "it", "s", "7", "50", "éa", "中", "文"]


@settings(deadline=None)
@given(TEXTS, st.integers(1, 4))
def test_grams_tell_runs_of_words_apart(texts: list[str], length: int) -> None:
    hashed = word_hashes(texts)
    words = [words_of(text) for text in texts]
    assert np.diff(hashed.starts).tolist() == [len(of) for of in words]
    grams, places = hashed.grams(length)
    expected = [
        (tuple(of[i : i + length]), int(start) + i)
        for of, start in zip(words, hashed.starts, strict=False)
        for i in range(len(of) - length + 1)
    ]
    assert places.tolist() == [place for _, place in expected]
    seen: dict[int, tuple[str, ...]] = {}
    for gram, (run, _) in zip(grams.tolist(), expected, strict=True):
        assert seen.setdefault(gram, run) == run
    assert len(seen) == len({run for run, _ in expected})


@settings(deadline=None)
@given(TEXTS, st.integers(1, 5))
def test_shingles_are_every_run_of_bytes_within_a_text(texts: list[str], length: int) -> None:
    shingles, starts, _ = character_shingles(texts, length)
    runs = []
    for text, first, end in zip(texts, starts, starts[1:], strict=False):
        coded = text.encode("utf-8", "surrogatepass")
        mine = [coded[i : i + length] for i in range(len(coded) - length + 1)]
        assert end - first == len(mine)
        runs += mine
    assert len(set(zip(shingles.tolist(), runs, strict=True))) == len(set(runs)) == len(set(shingles.tolist()))


def test_numbers_are_hashed_whatever_their_order() -> None:
    _, _, numbers = character_shingles(["12 and 7", "7, then 12", "1 and 27", "none", "12 and 12", "12"], 3)
    assert numbers[0] == numbers[1]
    assert numbers[3] == 0
    assert len(set(numbers.tolist())) == 5


def test_hashes_are_equal_in_any_process() -> None:
    assert word_hashes(["abc"]).hashes.tolist() == [602819805956682081]


def test_pieces_overlap_and_lose_nothing() -> None:
    pieces = list(in_pieces("abcdefghij", 4, 2))
    assert pieces == ["abcd", "cdef", "efgh", "ghij"]
    assert list(in_pieces("abc", 4, 2)) == ["abc"]


def test_texts_of_a_row_are_found_at_any_depth() -> None:
    row = {"prompt": "a", "n": 3, "messages": [{"role": "user", "content": "b"}, {"content": None}], "t": ("c",)}
    assert list(texts_in(row)) == ["a", "user", "b", "c"]
