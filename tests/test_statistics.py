"""The statistics agree with hand-worked cases, with SciPy and with the definitions of Agarwal et al. (2021)."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats

from posttrain_gym.experiments.statistics import (
    bootstrap_samples,
    interquartile_mean,
    mean_of_task_means,
    optimality_gap,
    performance_profile,
    probability_of_improvement,
    stratified_bootstrap_interval,
    task_bootstrap_interval,
    two_sample_bootstrap_interval,
)


def test_interquartile_mean_by_hand() -> None:
    scores = np.array([[100.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, -90.0]])
    # sorted: -90 2 | 3 4 5 6 | 7 100
    assert interquartile_mean(scores) == 4.5
    assert interquartile_mean(np.array([[1.0], [2.0], [9.0]])) == 4.0  # three scores: nothing is cut


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (5, 3), (4, 7), (10, 10)])
def test_interquartile_mean_is_scipys_trimmed_mean(shape: tuple[int, int]) -> None:
    scores = np.random.default_rng(3).normal(size=shape)
    assert interquartile_mean(scores) == pytest.approx(scipy.stats.trim_mean(scores, 0.25, axis=None), abs=1e-14)


def test_mean_weighs_tasks_the_same() -> None:
    assert mean_of_task_means([[0.0, 0.0, 0.0], [1.0]]) == 0.5
    scores = np.random.default_rng(0).random((4, 3))
    assert mean_of_task_means(scores) == pytest.approx(mean_of_task_means(list(scores.T)), abs=1e-15)


def test_probability_of_improvement_by_hand() -> None:
    x = np.array([[1.0, 0.0], [3.0, 0.0]])
    y = np.array([[2.0, 0.0], [1.0, 0.0]])
    # task 0: 1>2 no, 1=1 half, 3>2, 3>1 -> 2.5 of 4; task 1: all equal -> half
    assert probability_of_improvement(x, y) == (0.625 + 0.5) / 2
    assert probability_of_improvement(y, x) == 1.0 - probability_of_improvement(x, y)
    assert probability_of_improvement([[2.0], [1.0, 1.0]], [[1.0, 1.0, 3.0], [0.0]]) == (2 / 3 + 1.0) / 2


def test_probability_of_improvement_is_mann_whitneys_u_over_pairs() -> None:
    generator = np.random.default_rng(1)
    x, y = generator.integers(0, 4, size=(6, 3)), generator.integers(0, 4, size=(5, 3))
    wanted = [scipy.stats.mannwhitneyu(x[:, task], y[:, task]).statistic / 30 for task in range(3)]
    assert probability_of_improvement(x.astype(float), y.astype(float)) == pytest.approx(np.mean(wanted))


def test_probability_of_improvement_needs_the_same_tasks() -> None:
    with pytest.raises(ValueError, match="2 and 3 tasks"):
        probability_of_improvement(np.zeros((2, 2)), np.zeros((2, 3)))


def test_performance_profile_and_optimality_gap_by_hand() -> None:
    scores = np.array([[0.0, 0.5], [0.5, 1.5]])
    assert performance_profile(scores, [-1.0, 0.0, 0.5, 1.0, 2.0]).tolist() == [1.0, 0.75, 0.25, 0.25, 0.0]
    assert optimality_gap(scores) == 1.0 - (0.0 + 0.5 + 0.5 + 1.0) / 4
    assert optimality_gap(scores, target=0.5) == 0.5 - 1.5 / 4


def test_interval_agrees_with_scipy_on_one_task() -> None:
    runs = np.random.default_rng(5).exponential(size=12)
    ours = stratified_bootstrap_interval(runs[:, None], mean_of_task_means, resamples=20_000, seed=1)
    scipys = scipy.stats.bootstrap(
        (runs,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(2)
    ).confidence_interval
    assert ours == pytest.approx((scipys.low, scipys.high), abs=0.02)


def test_bootstrap_variance_is_the_closed_form() -> None:
    # Var* of the mean over T tasks of n runs is the sum of the tasks' population variances / (n T^2).
    scores = np.random.default_rng(6).normal(size=(4, 3)) * np.array([1.0, 2.0, 3.0])
    fixed = bootstrap_samples(scores, mean_of_task_means, resamples=8000, seed=0)
    assert fixed.var() == pytest.approx(scores.var(axis=0).sum() / (4 * 9), rel=0.06)
    # With tasks drawn too: (variance of the task means + mean within-task variance / n) / T.
    drawn = bootstrap_samples(scores, mean_of_task_means, resamples=8000, seed=0, resample_tasks=True)
    wanted = (scores.mean(axis=0).var() + scores.var(axis=0).mean() / 4) / 3
    assert drawn.var() == pytest.approx(wanted, rel=0.06)


def test_interval_enumerated_by_hand() -> None:
    # Two runs 0 and 1 on one task: the mean of a resample is 0, 0.5 or 1 with chances 1/4, 1/2, 1/4.
    two = np.array([[0.0], [1.0]])
    samples = bootstrap_samples(two, mean_of_task_means, resamples=4000, seed=4)
    shares = [float(np.mean(samples == value)) for value in (0.0, 0.5, 1.0)]
    assert shares == pytest.approx([0.25, 0.5, 0.25], abs=0.03)
    assert stratified_bootstrap_interval(two, mean_of_task_means) == (0.0, 1.0)
    assert stratified_bootstrap_interval(two, mean_of_task_means, confidence=0.4) == (0.5, 0.5)


def test_coverage_is_near_nominal_with_enough_runs() -> None:
    generator = np.random.default_rng(7)
    task_means = np.array([0.0, 0.4])
    covered = 0
    for repetition in range(200):
        scores = generator.normal(size=(20, 2)) + task_means
        low, high = stratified_bootstrap_interval(scores, mean_of_task_means, resamples=200, seed=repetition)
        covered += low <= task_means.mean() <= high
    assert 0.88 <= covered / 200 <= 0.99


def test_runs_are_drawn_independently_in_each_task() -> None:
    # The tasks are mirror images: drawing whole rows would always give mean zero.
    scores = np.array([[-1.0, 1.0], [1.0, -1.0], [3.0, -3.0]])
    low, high = stratified_bootstrap_interval(scores, mean_of_task_means)
    assert low < -0.5 and high > 0.5


def test_one_run_per_task_has_no_stratified_interval_but_a_task_interval() -> None:
    scores = np.array([[0.1, 0.5, 0.9]])
    assert stratified_bootstrap_interval(scores, mean_of_task_means) == (0.5, 0.5)
    low, high = task_bootstrap_interval(scores, mean_of_task_means)
    assert 0.1 <= low < 0.5 < high <= 0.9
    assert task_bootstrap_interval(np.array([[0.3]]), mean_of_task_means) == (0.3, 0.3)


def test_ragged_scores_are_resampled_within_their_task() -> None:
    ragged = [np.array([1.0]), np.array([2.0, 4.0, 6.0])]
    samples = bootstrap_samples(ragged, mean_of_task_means, resamples=500)
    assert samples.min() >= 1.5 and samples.max() <= 3.5
    assert len(set(samples.tolist())) == 7  # the sums of three draws from 2, 4, 6
    low, high = stratified_bootstrap_interval(ragged, interquartile_mean)
    assert low < interquartile_mean(ragged) < high


def test_intervals_repeat_with_the_seed() -> None:
    scores = np.random.default_rng(8).random((5, 3))
    first = stratified_bootstrap_interval(scores, interquartile_mean, seed=0)
    assert first == stratified_bootstrap_interval(scores, interquartile_mean, seed=0)
    assert first != stratified_bootstrap_interval(scores, interquartile_mean, seed=1)


def test_array_valued_statistics_give_one_row_per_sample() -> None:
    scores = np.random.default_rng(9).random((5, 3))
    thresholds = [0.2, 0.5, 0.8]
    samples = bootstrap_samples(scores, lambda drawn: performance_profile(drawn, thresholds), resamples=50)
    assert samples.shape == (50, 3)
    assert np.all(np.diff(samples, axis=1) <= 0)
    with pytest.raises(ValueError, match="bootstrap_samples"):
        stratified_bootstrap_interval(scores, lambda drawn: performance_profile(drawn, thresholds))


def test_two_sample_interval_holds_the_estimate_and_keeps_tasks_together() -> None:
    generator = np.random.default_rng(10)
    y = generator.normal(size=(8, 3)) + np.array([0.0, 100.0, 200.0])
    x = y + 0.3
    low, high = two_sample_bootstrap_interval(x, y, resamples=500)
    assert 0.0 < low < probability_of_improvement(x, y) < high < 1.0
    # Were tasks mixed up, a task at 0 would meet one at 200 and the probability would leave {1}.
    assert two_sample_bootstrap_interval(y + 20.0, y, resamples=200, resample_tasks=True) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (np.array([[1.0, np.nan]]), "finite"),
        (np.empty((0, 3)), "at least one"),
        ([[1.0], []], r"tasks \[1\] have none"),
        (np.array([1.0, 2.0]), r"n_runs, n_tasks"),
    ],
)
def test_bad_scores_are_refused(scores: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stratified_bootstrap_interval(scores, mean_of_task_means)


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match="confidence"):
        stratified_bootstrap_interval(np.zeros((2, 2)), mean_of_task_means, confidence=95)
    with pytest.raises(ValueError, match="resamples"):
        stratified_bootstrap_interval(np.zeros((2, 2)), mean_of_task_means, resamples=0)
