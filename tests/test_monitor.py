"""The monitor: sliding moments against NumPy, z-scores, the loss's trend, sparsity, values that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from posttrain_gym.inner_trainers.monitor import (
    SLOPE_STEPS,
    SMOOTHING,
    LossTrend,
    Monitor,
    reward_sparsity,
)
from posttrain_gym.inner_trainers.signals import SIGNALS, WINDOW, Z_LIMIT, Signals
from posttrain_gym.inner_trainers.sliding_moments import LARGEST, SlidingMoments

INDEX = {name: index for index, name in enumerate(SIGNALS)}


# Sliding moments -----------------------------------------------------------------------------------------------------


def nasty(rng: np.random.Generator, count: int) -> np.ndarray:
    """One column per kind of difficulty, with NaN for absent."""
    jumps = rng.normal(size=count)
    jumps[rng.random(count) < 0.01] = 1e9
    spikes = rng.normal(size=count)
    spikes[::997] = -1e30
    steps = np.repeat(rng.choice([0.0, 1e9, -1e-9, 5.0], size=-(-count // 150)), 150)[:count]
    columns = [
        rng.normal(size=count),
        1e9 + rng.normal(size=count),
        -1e9 + 1e-3 * rng.normal(size=count),
        np.full(count, 0.1),
        np.full(count, 1e9 + 0.1),
        jumps,
        spikes,
        steps,
        np.exp(rng.normal(scale=20.0, size=count)),
        np.cumsum(rng.normal(size=count)),
        np.full(count, np.nan),
        np.where(rng.random(count) < 0.9, np.nan, 1e9 + rng.normal(size=count)),
        np.where(rng.random(count) < 0.5, np.nan, rng.choice([0.0, 1e12], size=count)),
    ]
    return np.stack(columns, axis=1)


@pytest.mark.parametrize("window", [1, 2, 7, WINDOW])
def test_moments_equal_numpy_on_nasty_values(window: int) -> None:
    """Means within 1e-12 of the largest value, standard deviations within 1e-8 of themselves and 1e-13 of it."""
    count = 10_000 if window == WINDOW else 1_000
    for column in nasty(np.random.default_rng(window), count).T:
        moments = SlidingMoments(window)
        for step, value in enumerate(column.tolist()):
            if math.isnan(value):
                continue
            score = moments.push(step, value)
            assert moments.variance >= 0
            if step >= 1_000 and step % 7:  # the reference is slow
                continue
            seen = column[max(0, step - window + 1) : step + 1]
            seen = seen[~np.isnan(seen)]
            largest, spread = np.abs(seen).max(), seen.std()
            assert moments.count == len(seen)
            assert abs(moments.mean - seen.mean()) <= 1e-12 * largest, step
            assert abs(math.sqrt(moments.variance) - spread) <= 1e-8 * spread + 1e-13 * largest, step
            if spread > 1e-6 * largest:
                assert score == pytest.approx((value - seen.mean()) / spread, abs=1e-6), step


@pytest.mark.parametrize("value", [0.1, 1e9 + 0.1, -1e-300, 0.0])
def test_a_constant_has_no_spread_to_the_last_bit(value: float) -> None:
    moments = SlidingMoments(20)
    for step in range(100):
        assert moments.push(step, value) == 0.0
        assert (moments.mean, moments.variance) == (value, 0.0)


@pytest.mark.parametrize("jump", [1e9, -1e30, 1e300])
def test_a_jump_that_has_left_the_window_leaves_nothing_behind(jump: float) -> None:
    rng = np.random.default_rng(0)
    clean, jumped = SlidingMoments(10), SlidingMoments(10)
    for step in range(60):
        value = rng.normal()
        left, right = clean.push(step, value), jumped.push(step, jump if step == 13 else value)
        if step >= 13 + 10:
            assert right == pytest.approx(left, rel=1e-9)
            assert (jumped.mean, jumped.variance) == pytest.approx((clean.mean, clean.variance), rel=1e-9)


def test_values_leave_with_their_step_whether_or_not_others_came() -> None:
    moments = SlidingMoments(10)
    moments.push(1, 5.0)
    moments.push(10, 7.0)
    assert (moments.count, moments.mean, moments.variance) == (2, 6.0, 1.0)
    moments.push(11, 9.0)
    assert (moments.count, moments.mean, moments.variance) == (2, 8.0, 1.0)
    moments.push(99, 3.0)
    assert (moments.count, moments.mean, moments.variance) == (1, 3.0, 0.0)


def test_values_beyond_the_largest_do_not_overflow() -> None:
    moments = SlidingMoments(4)
    for step, value in enumerate((1e308, -1e308, 1.0)):
        assert math.isfinite(moments.push(step, value))
    assert moments.mean == pytest.approx(0.0, abs=LARGEST * 1e-15)
    assert moments.variance == pytest.approx(2 / 3 * LARGEST**2)


# Z-scores ------------------------------------------------------------------------------------------------------------


def test_z_scores_are_those_of_the_window() -> None:
    rng = np.random.default_rng(1)
    losses = rng.normal(3.0, 0.5, size=3 * WINDOW)
    monitor = Monitor()
    for step, loss in enumerate(losses.tolist(), start=1):
        signals = monitor.observe(step, {"loss": loss})
        window = losses[max(0, step - WINDOW) : step]
        expected = 0.0 if step == 1 else (loss - window.mean()) / window.std()
        assert signals.step == step
        assert signals.values["loss"] == loss
        assert signals.z["loss"] == pytest.approx(np.clip(expected, -Z_LIMIT, Z_LIMIT), abs=1e-9)
    assert monitor.signals is signals


def test_scores_are_clipped_and_finite_from_the_first_step() -> None:
    monitor = Monitor()
    assert monitor.observe(1, {"loss": 1e9}).z["loss"] == 0.0
    for step in range(2, 100):
        monitor.observe(step, {"loss": 1.0 + 1e-3 * (step % 2), "grad_norm": 2.0})
    assert monitor.signals.z["grad_norm"] == 0.0  # all equal
    assert monitor.observe(100, {"loss": 1.0, "grad_norm": 1e30}).z["grad_norm"] == Z_LIMIT
    assert monitor.observe(101, {"grad_norm": -1e30}).z["grad_norm"] == -Z_LIMIT


def test_what_is_absent_neither_counts_nor_appears_as_zero() -> None:
    monitor = Monitor()
    monitor.observe(1, {"reward": 10.0})
    for step in range(2, 50):
        signals = monitor.observe(step, {"loss": 1.0, "reward": None})
        assert signals.values["reward"] is None and signals.z["reward"] == 0.0
    assert monitor.observe(50, {"reward": 12.0}).z["reward"] == pytest.approx(1.0)  # mean 11, deviation 1
    assert signals.values.keys() == SIGNALS.keys() == signals.z.keys()


def test_before_the_first_step_everything_is_absent() -> None:
    signals = Monitor().signals
    assert signals == Signals()
    assert set(signals.values.values()) == {None} and set(signals.z.values()) == {0.0}
    assert not signals.vector().any() and not signals.presence().any()


def test_curves_become_signals_by_name_and_sources_by_slot() -> None:
    row = {
        "step": 1.0,
        "loss": 1.0,
        "grad_norm": 2.0,
        "learning_rate": 1e-3,
        "kl": 0.25,
        "clip_ratio/region_mean": 0.5,
        "clip_ratio/low_mean": 0.125,
        "completions/mean_length": 3.0,
        "completions/clipped_ratio": 0.75,
        "loss/b": 5.0,
        "loss/a": 4.0,
        "reward/f": 6.0,
        "loss_slope": 99.0,
        "unknown": 7.0,
    }
    signals = Monitor(["f", "b", "a", "c", "e"]).observe(1, row)  # e is in no slot, f neither
    assert {name: value for name, value in signals.values.items() if value is not None} == {
        "grad_norm": 2.0,
        "loss": 1.0,
        "loss_source_1": 4.0,
        "loss_source_2": 5.0,
        "kl": 0.25,
        "clip_ratio": 0.5,
        "completion_length": 3.0,
        "completion_truncated": 0.75,
    }
    assert Monitor(on_policy=False).observe(1, row).values["kl"] is None


# Not finite ----------------------------------------------------------------------------------------------------------


def test_values_that_are_not_finite_are_named_and_poison_nothing() -> None:
    """A loss that is NaN at step 3, infinite at step 5 and 1e9 at step 7, and an array of another type."""
    losses: dict[int, Any] = {3: math.nan, 5: math.inf, 7: 1e9, 9: np.array([1.0, 2.0]), 10: np.array(1.5)}
    clean, monitor = Monitor(), Monitor()
    for step in range(1, 501):
        loss = losses.get(step, 1.0 + 0.1 * (step % 3))
        signals = monitor.observe(step, {"loss": loss, "grad_norm": np.float64(step), "reward": -math.inf})
        if step not in losses:
            clean.observe(step, {"loss": loss})
        vector, presence = signals.vector(), signals.presence()
        assert vector.dtype == presence.dtype == np.float32
        assert vector.shape == presence.shape == (len(SIGNALS),)
        assert np.isfinite(vector).all() and (np.abs(vector) <= 1.0).all()
        assert signals.broken == (("loss", "reward") if step in (3, 5, 9) else ("reward",))
        assert (signals.values["loss"] is None) == (step in (3, 5, 9))
        assert presence[INDEX["loss"]] == (step not in (3, 5, 9)) and presence[INDEX["reward"]] == 0.0
        assert type(signals.values["grad_norm"]) is float
        if step == 7:
            assert signals.z["loss"] == pytest.approx(2.0)  # the one far value of the 5 that were finite
    assert monitor.signals.z["loss"] == pytest.approx(clean.signals.z["loss"], abs=1e-9)


def test_a_vector_holds_nothing_that_a_clock_decides() -> None:
    monitor = Monitor()
    for step in range(1, 4):
        signals = monitor.observe(step, {"loss": float(step), "step_seconds": float(step), "utilisation": 0.5})
    clocked = [index for name, index in INDEX.items() if SIGNALS[name].clocked]
    assert len(clocked) == 4
    assert signals.z["step_seconds"] == pytest.approx(1.2247449)
    assert signals.values["step_seconds"] == 3.0
    assert not signals.vector()[clocked].any() and not signals.presence()[clocked].any()
    assert signals.vector()[INDEX["loss"]] == pytest.approx(1.2247449 / Z_LIMIT)
    assert signals.presence()[INDEX["loss"]] == 1.0
    assert signals.vector(clocked=True)[clocked].tolist() == pytest.approx([1.2247449 / Z_LIMIT, 0.0, 0.0, 0.0])
    assert signals.presence(clocked=True)[clocked].tolist() == [1.0, 0.0, 0.0, 1.0]


# The loss's trend ----------------------------------------------------------------------------------------------------


def smoothed(losses: list[float]) -> list[float]:
    values = [losses[0]]
    for loss in losses[1:]:
        values.append(values[-1] + SMOOTHING * (loss - values[-1]))
    return values


def test_the_slope_is_the_least_squares_line_through_the_smoothed_loss() -> None:
    losses = np.random.default_rng(0).normal(size=40).tolist()
    trend = LossTrend()
    assert trend.observe(losses[0]) == (None, None)
    for count in range(2, 41):
        slope, _ = trend.observe(losses[count - 1])
        fitted = smoothed(losses[:count])[-SLOPE_STEPS:]
        assert slope == pytest.approx(np.polyfit(range(len(fitted)), fitted, 1)[0], abs=1e-12)


@pytest.mark.parametrize(
    ("loss", "sign"),
    [(lambda t: 0.5 * t**2, 1.0), (lambda t: -(t**2), -1.0), (lambda t: 100.0 * math.exp(-0.1 * t), 1.0)],
)
def test_curvature_is_the_change_of_the_slope(loss: Callable[[float], float], sign: float) -> None:
    trend, slopes = LossTrend(), []
    assert trend.observe(loss(0.0)) == (None, None)
    for t in range(1, 60):
        slope, curvature = trend.observe(loss(float(t)))
        assert slope is not None
        slopes.append(slope)
        assert (curvature is None) == (t < 3)
        if curvature is not None:
            assert curvature == pytest.approx((slopes[-1] - slopes[-3]) / 2)
    assert curvature is not None
    assert math.copysign(1.0, curvature) == sign
    if sign == -1.0:
        assert curvature == pytest.approx(-2.0, rel=1e-3)  # the second derivative, once the average has settled


def test_a_loss_that_jitters_has_no_curvature() -> None:
    trend = LossTrend()
    found = [trend.observe(1.0 + (step % 2)) for step in range(100)]
    assert {curvature for _, curvature in found[60:]} == {None}
    assert LossTrend().observe(1.0) == (None, None)
    flat = LossTrend()
    assert [flat.observe(0.1) for _ in range(5)][-1] == (0.0, None)


def test_losses_near_the_largest_float_do_not_break_the_trend() -> None:
    monitor = Monitor()
    for step, loss in enumerate((1e308, -1e308, 1e308, 1.0, 1.0, 1.0), start=1):
        signals = monitor.observe(step, {"loss": loss})
        assert all(math.isfinite(score) for score in signals.z.values())
        assert signals.values["loss_slope"] is None or math.isfinite(signals.values["loss_slope"])


# Sparsity ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "share"),
    [
        ([0.0, 0.0, 0.0, 0.0], 1.0),
        ([1.0, 0.0, 0.0, 0.0], 0.75),
        ([1.0, 1.0, 1.0, 1.0], 0.0),
        ([-1.0, -1.0, -1.0, -1.0], 1.0),  # a penalty that every completion gets
        ([-1.0, 0.0, 0.0, 0.0], 0.75),
        ([-1.0, 1.0, 0.0, 0.0], 0.5),
        ([-0.1, -0.1, -0.1, 1.0], 0.75),  # a penalty that is small beside the reward
        ([-0.5, 0.0, 1.0, 0.0], 0.5),  # just decisive
        ([-0.49, 0.0, 1.0, 0.0], 0.75),  # just not
        ([-0.1, -0.1, -0.1, -1.0], 0.75),
        ([-0.1, 0.0], 0.5),
        ([-2.0], 1.0),
        ([2.0], 0.0),
    ],
)
def test_sparsity_counts_rewards_that_carry_information(rewards: list[float], share: float) -> None:
    assert reward_sparsity(rewards) == share


def test_no_rewards_have_no_sparsity() -> None:
    assert reward_sparsity([]) is None
