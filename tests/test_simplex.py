"""Mixes are projected exactly onto the bounded simplex, one at a time and in rows, and rounded within their bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq

from posttrain_gym.envs.simplex import (
    MIX_GRID,
    bounds_problem,
    grid_counts,
    grid_counts_many,
    project_to_bounds,
    project_to_bounds_many,
)


@settings(max_examples=500, deadline=None)
@given(seed=st.integers(0, 2**31 - 1), count=st.integers(1, 7))
def test_the_projection_is_the_nearest_point(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    while True:
        low = np.round(rng.uniform(0, 1 / count, count), 3)
        high = np.round(np.minimum(1, low + rng.uniform(0, 1, count)), 3)
        if low.sum() <= 1 <= high.sum():
            break
    weights = rng.uniform(-0.5, 1.5, (6, count))
    many = project_to_bounds_many(weights, low, high)
    counts = grid_counts_many(many)
    for row in range(6):
        one = np.array(project_to_bounds(weights[row].tolist(), low.tolist(), high.tolist()))
        assert np.allclose(one, many[row], atol=1e-12)
        assert one.sum() == pytest.approx(1.0, abs=1e-9)
        assert (one >= low - 1e-12).all() and (one <= high + 1e-12).all()

        def excess(shift: float, row: int = row) -> float:
            return float(np.clip(weights[row] - shift, low, high).sum() - 1)

        if excess(-3) * excess(3) < 0:  # the shift that the optimality conditions ask for, found another way
            shift = brentq(excess, -3, 3, xtol=1e-15)
            assert np.allclose(np.clip(weights[row] - shift, low, high), one, atol=1e-9)
        rounded = grid_counts(one.tolist())
        assert rounded == counts[row].tolist()
        assert sum(rounded) == MIX_GRID
        assert (np.array(rounded) >= np.rint(low * MIX_GRID)).all()
        assert (np.array(rounded) <= np.rint(high * MIX_GRID)).all()


def test_by_hand() -> None:
    low, high = [0.1, 0.1, 0.2], [0.5, 0.4, 0.6]
    assert project_to_bounds([1.0, 0.0, 0.0], low, high) == pytest.approx([0.5, 0.25, 0.25])
    assert project_to_bounds([0.3, 0.3, 0.4], low, high) == pytest.approx([0.3, 0.3, 0.4])
    assert project_to_bounds([0.5], [1.0], [1.0]) == [1.0]
    assert bounds_problem({"a": (0.1, 0.5), "b": (0.1, 0.4)}) == (
        "the upper bounds a 0.5 + b 0.4 = 0.9 cannot reach 1; raise them by 0.1 in all."
    )
    assert bounds_problem({"a": (0.1, 0.5), "b": (0.1, 0.5)}) is None
