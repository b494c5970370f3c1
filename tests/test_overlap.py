"""Overlap of rows with a benchmark: whole prompts, other forms, runs of words; boilerplate is none."""

from __future__ import annotations

import numpy as np

from posttrain_gym.inner_trainers.data.overlap import BenchmarkOverlap, Overlap

HEAD = "You are a helpful assistant and must answer every single question below with one word only please"


def sentence(words: int, seed: int) -> str:
    rng = np.random.default_rng(seed)
    return " ".join("".join(map(chr, rng.integers(97, 123, 6))) for _ in range(words))


def overlaps(prompts: list[str], rows: list[tuple[list[str], str]]) -> list[Overlap]:
    overlap = BenchmarkOverlap(prompts)
    overlap.add((i, asked, text) for i, (asked, text) in enumerate(rows, start=1))
    return overlap.found()


def test_the_three_ways() -> None:
    prompts = ["12+34=", sentence(20, 1), sentence(9, 2), sentence(7, 3)]
    words = prompts[1].split()
    rows = [
        (["12+34="], "12+34=46"),
        (["  12+34= "], "12+34=46"),
        (["12-34="], "12-34=-22"),
        (["x"], "said: " + " ".join(words[4:17]).upper() + "!"),  # 13 words of 20
        (["x"], "said: " + " ".join(words[4:16])),  # 12
        (["x"], "so " + prompts[2].replace(" ", ", ") + " it is"),  # all of nine
        (["x"], "so " + prompts[3] + " it is"),  # all of seven: too short to tell
    ]
    assert overlaps(prompts, rows) == [
        Overlap(1, 0, "exact", "12+34="),
        Overlap(2, 0, "normalised", "  12+34= "),
        Overlap(4, 1, "words", " ".join(words[4:17])),
        Overlap(6, 2, "words", prompts[2]),
    ]


def test_the_plainest_way_is_told_once() -> None:
    prompt = sentence(20, 1)
    assert overlaps([prompt], [([prompt], prompt + " yes")]) == [Overlap(1, 0, "exact", prompt)]


def test_a_prompt_that_stands_twice_is_found_twice() -> None:
    found = overlaps(["Name a prime.", "name a prime"], [(["Name a prime."], "")])
    assert [(overlap.item, overlap.how) for overlap in found] == [(0, "exact"), (1, "normalised")]


def test_a_head_that_items_share_is_boilerplate_even_with_a_word_of_an_item() -> None:
    prompts = [f"{HEAD}: {sentence(15, seed)}" for seed in range(40)]
    own = prompts[7].split()[17:]
    rows = [
        (["x"], f"{HEAD}: {sentence(15, 900)}"),
        (["x"], f"{HEAD}: {' '.join(own[:5])}"),  # 13 words and more, five of them the item's own
        (["x"], f"{HEAD}: {' '.join(own[:9])}"),
    ]
    found = overlaps(prompts, rows)
    assert [(overlap.row, overlap.item) for overlap in found] == [(3, 7)]


def test_a_passage_that_few_items_share_is_no_boilerplate() -> None:
    passage = sentence(30, 5)
    prompts = [f"{passage} Question {seed}: {sentence(6, seed)}" for seed in range(3)]
    prompts += [sentence(20, 100 + seed) for seed in range(10)]
    found = overlaps(prompts, [(["x"], passage)])
    assert [overlap.item for overlap in found] == [0, 1, 2]


def test_a_template_that_many_different_rows_share_is_boilerplate() -> None:
    template = sentence(14, 6)
    prompts = [f"{template} {sentence(10, 7)}", sentence(20, 8)]
    rows = [(["x"], f"{template} {sentence(5, 1000 + i)}") for i in range(200)]
    assert overlaps(prompts, rows) == []
    assert [overlap.row for overlap in overlaps(prompts, [*rows, (["x"], prompts[0])])] == [201]
    # the same leaked row many times over is still one
    leaked = [(["x"], "look " + prompts[1])] * 200
    assert len(overlaps(prompts, [*rows, *leaked])) == 200


def test_a_run_deep_in_a_long_text_is_found_across_pieces() -> None:
    prompt = sentence(20, 9)
    filler = "lorem ipsum " * 90_000
    for cut in (999_950, 1_000_000 - 70, 1_000_010):
        text = filler[:cut] + " " + prompt + " " + filler
        assert [overlap.item for overlap in overlaps([prompt], [(["x"], text)])] == [0]


def test_rows_and_prompts_without_words() -> None:
    assert overlaps(["", "?", sentence(20, 1)], [([], ""), (["…"], "…"), (["\ud800"], "\ud800 \x00")]) == []
    assert overlaps([], [(["a"], "a")]) == []


def test_blocks_do_not_matter() -> None:
    prompts = [sentence(20, seed) for seed in range(5)]
    rows = [(i, ["x"], f"{sentence(3, 50 + i)} {prompts[i % 5]}") for i in range(30)]
    whole, parts = BenchmarkOverlap(prompts), BenchmarkOverlap(prompts)
    whole.add(rows)
    for row in rows:
        parts.add([row])
    assert whole.found() == parts.found()
    assert len(whole.found()) == 30
