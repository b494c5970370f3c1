"""What a larger batch is foreseen to take of memory: exact lines through the peaks, refusals with the arithmetic."""

from __future__ import annotations

import pytest

from posttrain_gym.inner_trainers.memory_model import MARGIN, MemoryModel


def model(level: int | None, **peaks: int) -> MemoryModel:
    made = MemoryModel()
    made.level = level
    for name, peak in peaks.items():
        made.observe(int(name[1:]), peak)
    return made


def test_before_a_peak_was_seen_nothing_is_foreseen_and_nothing_refused() -> None:
    empty = model(100)
    assert empty.foreseen(8) is None and empty.refusal(8, 1) is None and empty.peaks == {}


def test_with_one_size_all_above_the_level_grows_in_proportion() -> None:
    one = model(1000, b8=1800)
    assert [one.foreseen(size) for size in (8, 10, 16)] == [1800, 2000, 2600]
    assert one.foreseen(4) == 1800  # a smaller batch is never promised to take less than what was seen
    assert model(None, b8=800).foreseen(10) == 1000  # without a level, all of it
    assert model(5000, b8=1800).foreseen(16) == 1800  # what was freed since is no growth


def test_with_two_sizes_it_is_the_line_through_them() -> None:
    two = model(1000, b8=1800, b10=1900)
    assert [two.foreseen(size) for size in (10, 12, 20)] == [1900, 2000, 2400]


def test_with_more_it_is_least_squares_and_never_below_a_peak_or_falling() -> None:
    # sizes 2, 4, 6 with peaks 100, 180, 170: slope 70 / 4 = 17.5 around (4, 150)
    three = model(0, b2=100, b4=180, b6=170)
    assert three.foreseen(8) == 220 and three.foreseen(6) == 185 and three.foreseen(5) == 180
    falling = model(0, b2=300, b4=200)
    assert falling.foreseen(100) == 300


def test_a_peak_is_the_largest_of_its_size_and_smaller_batches_than_the_largest_tell_nothing() -> None:
    seen = model(0, b8=100)
    seen.observe(8, 90)
    seen.observe(10, 150)
    seen.observe(8, 400)  # memory that the larger batch had and the process kept
    assert seen.peaks == {8: 100, 10: 150}


def test_growth_is_refused_where_it_passes_the_limit_with_the_margin_on_what_is_added() -> None:
    one = model(1_000_000_000, b8=1_800_000_000)  # 10 takes 2.0 GB: 0.2 GB more, 0.22 GB with the margin
    assert MARGIN == 0.1
    assert one.refusal(10, 2_020_000_000) is None and one.refusal(10, None) is None
    assert one.refusal(10, 2_019_999_999) == (
        "a batch of 10 would take about 2 GB (1 GB before training, 1.8 GB at 8), with a margin of 10% of the growth "
        "2.02 GB, above the 2.02 GB there may be in use"
    )
    small = model(None, b8=18_000_000).refusal(16, 30_000_000)
    assert small is not None and small.startswith("a batch of 16 would take about 36 MB (18 MB at 8), ")


@pytest.mark.parametrize("limit", [1, 1799])
def test_what_is_above_the_limit_already_may_not_grow(limit: int) -> None:
    assert model(1000, b8=1800).refusal(9, limit) is not None
