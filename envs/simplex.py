"""Mixes of sources: the probability simplex with a lower and an upper bound per weight, and its grid of 1/1000."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..inner_trainers.messages import require_number

MIX_GRID = 1000
"""Mix weights are multiples of 1 / MIX_GRID."""

_BELOW_GRID = 1e-4
"""By how much of a grid step a float32 coordinate may fall short of its grid point."""


def project_to_simplex(weights: np.ndarray) -> np.ndarray:
    """Return the point of the probability simplex nearest to ``weights`` (Euclidean; Duchi et al. 2008).

    Args:
        weights: ``(n,)`` finite.

    Returns:
        ``(n,)`` float64 >= 0 that sum to 1; ``weights`` itself when it already is on the simplex.
    """
    return np.array(
        project_to_bounds(np.asarray(weights, np.float64).tolist(), [0.0] * len(weights), [1.0] * len(weights))
    )


def project_to_bounds(weights: Sequence[float], low: Sequence[float], high: Sequence[float]) -> list[float]:
    """Return the point nearest to ``weights`` (Euclidean) with ``low <= w <= high`` that sums to 1.

    That point is ``clip(weights - t, low, high)`` for the one shift ``t`` at which the sum is 1. The sum falls
    piecewise linearly in ``t`` with a kink where a weight meets a bound, so the piece is found among the kinks and
    solved exactly (Helgason, Kennington and Lall 1980); nothing is iterated.

    Args:
        weights: n numbers, finite.
        low: n lower bounds, whose sum is at most 1.
        high: n upper bounds, whose sum is at least 1.
    """
    count = range(len(weights))
    kinks = sorted([weights[i] - low[i] for i in count] + [weights[i] - high[i] for i in count])

    def total(shift: float) -> float:
        return sum([min(high[i], max(low[i], weights[i] - shift)) for i in count])

    first, last = 0, len(kinks) - 1  # total(kinks[first]) >= 1 >= total(kinks[last]), up to rounding
    while last - first > 1:
        middle = (first + last) // 2
        if total(kinks[middle]) >= 1.0:
            first = middle
        else:
            last = middle
    free = 0
    rest = 1.0
    at = (kinks[first] + kinks[last]) / 2
    for i in count:
        moved = weights[i] - at
        if moved <= low[i]:
            rest -= low[i]
        elif moved >= high[i]:
            rest -= high[i]
        else:
            free += 1
            rest -= weights[i]
    shift = -rest / free if free else at
    return [min(high[i], max(low[i], weights[i] - shift)) for i in count]


def project_to_bounds_many(weights: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return `project_to_bounds` of each row.

    Args:
        weights: ``(m, n)`` finite.
        low: ``(n,)`` lower bounds.
        high: ``(n,)`` upper bounds.

    Returns:
        ``(m, n)`` float64.
    """
    weights = np.asarray(weights, np.float64)
    kinks = np.sort(np.concatenate([weights - low, weights - high], axis=1), axis=1)  # (m, 2n)
    rows = np.arange(len(weights))
    first = np.zeros(len(weights), np.int64)
    last = np.full(len(weights), kinks.shape[1] - 1)
    for _ in range(int(np.ceil(np.log2(max(2, kinks.shape[1] - 1))))):
        middle = (first + last) // 2
        reaches = np.clip(weights - kinks[rows, middle, None], low, high).sum(axis=1) >= 1.0
        open_ = last - first > 1
        first = np.where(open_ & reaches, middle, first)
        last = np.where(open_ & ~reaches, middle, last)
    at = (kinks[rows, first] + kinks[rows, last]) / 2
    moved = weights - at[:, None]
    below, above = moved <= low, moved >= high
    free = ~(below | above)
    rest = 1.0 - np.where(below, low, np.where(above, high, weights)).sum(axis=1)
    count = free.sum(axis=1)
    shift = np.where(count > 0, -rest / np.maximum(count, 1), at)
    result: np.ndarray = np.clip(weights - shift[:, None], low, high)
    return result


def on_simplex_grid(weights: np.ndarray, grid: int) -> np.ndarray:
    """Round simplex weights to multiples of ``1 / grid`` that still sum to 1 (largest remainder).

    Bounds that lie on the grid stay kept: no weight moves past the grid point above or below it.
    """
    return np.array(grid_counts(np.asarray(weights, np.float64).tolist(), grid)) / grid


def grid_counts(weights: Sequence[float], grid: int = MIX_GRID) -> list[int]:
    """Return simplex weights as whole counts of ``1 / grid`` that sum to ``grid`` (largest remainder)."""
    counts = [int(weight * grid + _BELOW_GRID) for weight in weights]
    missing = grid - sum(counts)
    if missing > 0:
        remainders = [counts[i] - weights[i] * grid for i in range(len(counts))]
        for index in sorted(range(len(counts)), key=remainders.__getitem__)[:missing]:
            counts[index] += 1
    return counts


def grid_counts_many(weights: np.ndarray, grid: int = MIX_GRID) -> np.ndarray:
    """Return `grid_counts` of each row of ``(m, n)`` weights, as ``(m, n)`` int64."""
    exact = weights * grid
    counts = np.floor(exact + _BELOW_GRID).astype(np.int64)
    missing = grid - counts.sum(axis=1)
    places = np.argsort(counts - exact, axis=1, kind="stable")
    ranks = np.empty_like(places)
    np.put_along_axis(ranks, places, np.broadcast_to(np.arange(weights.shape[1]), places.shape), axis=1)
    result: np.ndarray = counts + (ranks < missing[:, None])
    return result


def check_bounds(bounds: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """Return bounds of mix weights as given, checked.

    Raises:
        ValueError: a bound outside [0, 1] or off the grid, low above high, or bounds whose sums leave out 1; the
            message shows the arithmetic.
    """
    checked = {}
    for name, pair in bounds.items():
        low, high = (require_number(f"data_mix.{name}", bound, low=0, high=1) for bound in pair)
        for bound in (low, high):
            if abs(bound * MIX_GRID - round(bound * MIX_GRID)) > 1e-9:
                raise ValueError(
                    f"data_mix.{name}: {bound:g} is no multiple of 1/{MIX_GRID}, on whose grid weights are; "
                    f"write {round(bound, 3):g}."
                )
        if low > high:
            raise ValueError(f"data_mix.{name}: the lower bound {low:g} is above the upper bound {high:g}.")
        checked[name] = (low, high)
    problem = bounds_problem(checked)
    if problem is not None:
        raise ValueError(f"data_mix: {problem}")
    return checked


def bounds_problem(bounds: Mapping[str, tuple[float, float]]) -> str | None:
    """Return why no weights within the bounds sum to 1, with the arithmetic; None when some do."""
    lows = sum(round(low * MIX_GRID) for low, _ in bounds.values())
    highs = sum(round(high * MIX_GRID) for _, high in bounds.values())
    if lows > MIX_GRID:
        shown = " + ".join(f"{name} {low:g}" for name, (low, _) in bounds.items() if low > 0)
        return (
            f"the lower bounds {shown} = {lows / MIX_GRID:g} are above 1; "
            f"lower them by {(lows - MIX_GRID) / MIX_GRID:g} in all."
        )
    if highs < MIX_GRID:
        shown = " + ".join(f"{name} {high:g}" for name, (_, high) in bounds.items()) or "none"
        return (
            f"the upper bounds {shown} = {highs / MIX_GRID:g} cannot reach 1; "
            f"raise them by {(MIX_GRID - highs) / MIX_GRID:g} in all."
        )
    return None
