"""Near duplicates: which texts are, how well the estimate holds to Jaccard's index, and what is none."""

from __future__ import annotations

import numpy as np
import pytest

from posttrain_gym.inner_trainers.data.near_duplicates import NearDuplicates, shared_shingles


def texts(count: int, words: int = 18, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    vocabulary = ["".join(map(chr, rng.integers(97, 123, rng.integers(2, 9)))) for _ in range(3000)]
    return [" ".join(vocabulary[i] for i in rng.integers(0, 3000, words)) for _ in range(count)]


def found(*blocks: list[str], threshold: float = 0.8) -> dict[int, tuple[int, float]]:
    near = NearDuplicates(threshold)
    for block in blocks:
        near.add(block)
    return {pair.second: (pair.first, pair.similarity) for pair in near.pairs()}


def test_shared_shingles_is_jaccards_index() -> None:
    assert shared_shingles("abcdef", "abcdef") == 1
    assert shared_shingles("abcdef", "bcdefg") == pytest.approx(1 / 3)  # abcde bcdef | bcdef cdefg
    assert shared_shingles("AB  c", "ab c") == 1
    assert shared_shingles("", "ab") == 0


def test_copies_with_one_other_word_are_found_and_others_are_not() -> None:
    originals = texts(3000)
    copies = []
    for text in originals[:1000]:
        words = text.split()
        words[5] = "zz"
        copies.append(" ".join(words))
    pairs = found(originals, copies)
    assert all(second >= 3000 and pairs[second][0] == second - 3000 for second in pairs)
    truth = {3000 + i: shared_shingles(originals[i], copies[i]) for i in range(1000)}
    errors = [pairs[i][1] - truth[i] for i in pairs]
    clear = [i for i, share in truth.items() if share >= 0.9]
    assert sum(i in pairs for i in clear) >= 0.97 * len(clear) > 0
    assert np.std(errors) < 0.07


def test_the_estimate_holds_to_jaccards_index() -> None:
    originals = texts(800, seed=3)
    copies = [text[: len(text) * 9 // 10] + " other end" for text in originals]
    pairs = found(originals, copies, threshold=0.5)
    assert len(pairs) == 800
    errors = [pairs[800 + i][1] - shared_shingles(originals[i], copies[i]) for i in range(800)]
    assert abs(np.mean(errors)) < 0.03
    assert np.std(errors) < 0.07


def test_case_and_white_space_do_not_count_and_numbers_do() -> None:
    pairs = found(
        ["What is 12 + 7, my dear friend?", "what is  12 + 7, my dear friend?\n", "What is 12 + 8, my dear friend?"],
        ["ab", "ab", "abc", "AB"],
    )
    assert pairs == {1: (0, 1.0), 4: (3, 1.0), 6: (3, 1.0)}


def test_the_same_shingles_in_another_order_are_not_equal() -> None:
    pairs = found(["abababababab", "ababababababab"])
    assert pairs[1][0] == 0  # near: the same two shingles
    assert found(["ab cd ef gh", "ef gh ab cd"]) == {}


def test_blocks_do_not_matter() -> None:
    originals = texts(200) + texts(50)
    assert found(originals) == found(originals[:7], originals[7:100], originals[100:])
    assert len(found(originals)) == 50


def test_no_text_and_empty_texts() -> None:
    assert NearDuplicates().pairs() == []
    assert found(["", "", " "]) == {1: (0, 1.0), 2: (0, 1.0)}


def test_texts_of_one_shingle_and_texts_that_differ_in_the_first_alone_are_not_equal() -> None:
    near = NearDuplicates(threshold=1.0)
    near.add(["abcde", "vwxyz", "a" + "bcdefghij" * 3, "z" + "bcdefghij" * 3])
    assert near.pairs() == []
