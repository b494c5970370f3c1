"""Statistics for few-run comparisons: interquartile mean, bootstrap intervals, probability of improvement.

The definitions are those of Agarwal et al. (2021), "Deep Reinforcement Learning at the Edge of the Statistical
Precipice", as their package rliable computes them. rliable 1.2 itself does not import beside pandas 3.

Two shapes of scores are accepted everywhere:

- a numpy array ``(n_runs, n_tasks, ...)``, the same number of runs on every task;
- any other sequence: one array of runs for each task, of any lengths (a nested list is read this way too).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray: TypeAlias = NDArray[np.float64]
Scores: TypeAlias = FloatArray | Sequence[ArrayLike]
Statistic: TypeAlias = Callable[[Scores], float | FloatArray]
PairStatistic: TypeAlias = Callable[[Scores, Scores], float]


def interquartile_mean(scores: Scores) -> float:
    """The interquartile mean is the mean of all scores, runs and tasks pooled, after a quarter is cut from each end.

    The number cut from each end is rounded down, as in ``scipy.stats.trim_mean(scores, 0.25, axis=None)``: three
    scores or fewer give the plain mean.
    """
    values = np.sort(_pooled(scores))
    cut = values.size // 4
    return float(values[cut : values.size - cut].mean())


def mean_of_task_means(scores: Scores) -> float:
    """The mean over tasks of each task's mean weighs every task the same, however many runs it has."""
    if isinstance(scores, np.ndarray):  # as many runs on every task: the plain mean
        return float(_pooled(scores).mean())
    return float(np.mean([values.mean() for values in _by_task(scores)]))


def optimality_gap(scores: Scores, target: float = 1.0) -> float:
    """The optimality gap is how far the scores fall short of ``target`` on average; a score above counts as equal."""
    return float(target - np.minimum(_pooled(scores), target).mean())


def performance_profile(scores: Scores, thresholds: ArrayLike) -> FloatArray:
    """A performance profile is the share of runs, all tasks pooled, that score strictly above each threshold.

    Returns:
        ``(n_thresholds,)`` float64 in [0, 1].
    """
    values = np.sort(_pooled(scores))
    levels = np.atleast_1d(np.asarray(thresholds, dtype=np.float64))
    below_or_at = np.searchsorted(values, levels, side="right")
    return np.asarray(1.0 - below_or_at / values.size, dtype=np.float64)


def probability_of_improvement(x: Scores, y: Scores) -> float:
    """The probability of improvement is P(X > Y) + P(X = Y) / 2 over all pairs of runs, averaged over tasks.

    Per task it is the Mann-Whitney U statistic of X divided by the number of pairs.

    Raises:
        ValueError: ``x`` and ``y`` do not have the same number of tasks.
    """
    x_tasks, y_tasks = _by_task(x), _by_task(y)
    if len(x_tasks) != len(y_tasks):
        raise ValueError(f"x and y must hold the same tasks, got {len(x_tasks)} and {len(y_tasks)} tasks.")
    wins = [np.sign(a[:, None] - b[None, :]).mean() for a, b in zip(x_tasks, y_tasks, strict=True)]
    return float(0.5 + 0.5 * np.mean(wins))


def bootstrap_samples(
    scores: Scores,
    statistic: Statistic,
    *,
    resamples: int = 2000,
    seed: int = 0,
    resample_tasks: bool = False,
) -> FloatArray:
    """Each bootstrap sample is the statistic of scores whose runs were redrawn, with replacement, within each task.

    Args:
        scores: an array ``(n_runs, n_tasks, ...)`` or one array of runs per task.
        statistic: takes redrawn scores of the same shape as ``scores``; returns a number or an array.
        resamples: how many samples to draw.
        seed: seed of the draws.
        resample_tasks: whether the tasks are redrawn too, with replacement, before their runs.

    Returns:
        ``(resamples, ...)`` float64, one statistic per row.
    """
    _check_resamples(resamples)
    checked = _checked(scores)
    generator = np.random.default_rng(seed)
    return np.asarray(
        [statistic(_redrawn(checked, generator, _task_picks(checked, generator, resample_tasks)))
         for _ in range(resamples)],
        dtype=np.float64,
    )  # fmt: skip


def stratified_bootstrap_interval(
    scores: Scores,
    statistic: Statistic,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """The stratified bootstrap interval holds the tasks fixed and redraws runs with replacement within each task.

    It answers "what if the same tasks were run with other seeds?" and is rliable's ``StratifiedBootstrap`` with
    percentile limits. Two limits of it a reader must be told:

    - With one run per task there is nothing to redraw: both ends equal the statistic. Use
      `task_bootstrap_interval` there.
    - With n runs per task its width is about ``sqrt((n - 1) / n)`` of the right one, whatever the number of tasks:
      71% with two runs, 89% with five.

    Returns:
        ``(low, high)``.
    """
    return _limits(bootstrap_samples(scores, statistic, resamples=resamples, seed=seed), confidence)


def task_bootstrap_interval(
    scores: Scores,
    statistic: Statistic,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """The task bootstrap interval redraws the tasks with replacement, and the runs within each drawn task.

    It answers "what if other tasks of this kind had been drawn?" (rliable's ``task_bootstrap=True``). With one task
    and one run both ends equal the statistic.

    Returns:
        ``(low, high)``.
    """
    samples = bootstrap_samples(scores, statistic, resamples=resamples, seed=seed, resample_tasks=True)
    return _limits(samples, confidence)


def two_sample_bootstrap_interval(
    x: Scores,
    y: Scores,
    statistic: PairStatistic = probability_of_improvement,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
    *,
    resample_tasks: bool = False,
) -> tuple[float, float]:
    """The two-sample interval redraws the runs of ``x`` and of ``y`` independently within each task.

    This is rliable's ``StratifiedIndependentBootstrap``. With ``resample_tasks`` both sides keep the same drawn
    tasks, so a task is never compared with another.

    Returns:
        ``(low, high)``.
    """
    _check_resamples(resamples)
    x_checked, y_checked = _checked(x), _checked(y)
    generator = np.random.default_rng(seed)
    samples = []
    for _ in range(resamples):
        picks = _task_picks(x_checked, generator, resample_tasks)
        samples.append(statistic(_redrawn(x_checked, generator, picks), _redrawn(y_checked, generator, picks)))
    return _limits(np.asarray(samples, dtype=np.float64), confidence)


def _task_picks(scores: Scores, generator: np.random.Generator, resample_tasks: bool) -> NDArray[np.intp]:
    """Returns the indices of the tasks of one bootstrap sample, ``(n_tasks,)``."""
    n_tasks = scores.shape[1] if isinstance(scores, np.ndarray) else len(scores)
    if resample_tasks:
        return generator.integers(n_tasks, size=n_tasks, dtype=np.intp)
    return np.arange(n_tasks, dtype=np.intp)


def _redrawn(scores: Scores, generator: np.random.Generator, picks: NDArray[np.intp]) -> Scores:
    """Returns one bootstrap sample, in the form of ``scores``: runs are drawn independently for each picked task."""
    if isinstance(scores, np.ndarray):
        n_runs = scores.shape[0]
        runs = generator.integers(n_runs, size=(n_runs, picks.size))
        redrawn: FloatArray = scores[runs, picks]  # (n_runs, n_tasks, ...)
        return redrawn
    tasks = [np.asarray(scores[pick], dtype=np.float64) for pick in picks]
    return [values[generator.integers(values.shape[0], size=values.shape[0])] for values in tasks]


def _limits(samples: FloatArray, confidence: float) -> tuple[float, float]:
    """Returns the percentile limits of one-dimensional bootstrap samples."""
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence: expected a number between 0 and 1, got {confidence!r}.")
    if samples.ndim != 1:
        raise ValueError(
            f"an interval needs a statistic that returns one number, got shape {samples.shape[1:]}; "
            "use bootstrap_samples for a statistic that returns an array."
        )
    low, high = np.quantile(samples, [(1.0 - confidence) / 2.0, (1.0 + confidence) / 2.0])
    return float(low), float(high)


def _check_resamples(resamples: int) -> None:
    """Raises unless at least one bootstrap sample is asked for."""
    if resamples < 1:
        raise ValueError(f"resamples: expected at least 1, got {resamples}.")


def _by_task(scores: Scores) -> list[FloatArray]:
    """Returns one array of runs per task."""
    checked = _checked(scores)
    if isinstance(checked, np.ndarray):
        return [checked[:, task] for task in range(checked.shape[1])]
    return [np.asarray(values, dtype=np.float64) for values in checked]


def _pooled(scores: Scores) -> FloatArray:
    """Returns every score, all runs of all tasks, ``(n_scores,)``; a flat array passes as it is."""
    if isinstance(scores, np.ndarray):
        values = np.asarray(scores, dtype=np.float64).ravel()
    else:
        tasks = [np.asarray(task, dtype=np.float64).ravel() for task in scores]
        values = np.concatenate(tasks) if tasks else np.empty(0)
    if values.size == 0 or not np.isfinite(values).all():
        raise ValueError(f"scores: expected at least one score and only finite ones, got {values.tolist()}.")
    return values


def _checked(scores: Scores) -> Scores:
    """Returns the scores as float64 after checking that every task has runs and every score is finite."""
    _pooled(scores)
    if isinstance(scores, np.ndarray):
        if scores.ndim < 2:
            raise ValueError(f"scores: expected an array (n_runs, n_tasks, ...), got shape {scores.shape}.")
        return np.asarray(scores, dtype=np.float64)
    tasks = [np.asarray(task, dtype=np.float64) for task in scores]
    empty = [index for index, values in enumerate(tasks) if values.ndim == 0 or values.shape[0] == 0]
    if empty:
        raise ValueError(f"scores: expected an array of runs for every task, tasks {empty} have none.")
    return tasks
