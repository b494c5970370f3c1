"""Mean and spread of many signals at once over a sliding window, where any of them may be absent at any step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LARGEST = 1e100
"""Values are clipped to this size, so that no square overflows."""


class SlidingMoments:
    """Means and variances of the last ``window`` rows.

    No row is ever subtracted, so sums of squares cannot go negative, and a jump that has left the window leaves nothing
    behind. The window is a queue made of two stacks: rows enter the moments of its newer part by Welford's update;
    when the older part is used up, the moments of every suffix of the newer rows take its place, and a row leaves by a
    step to the next suffix. The moments of both parts are joined as Chan et al. (1983) do. The cost of a row does not
    depend on the window, but for one in ``window`` rows, which costs some ten times as much.

    Args:
        width: values of a row.
        window: rows that are looked back on, at least 1.
    """

    def __init__(self, width: int, window: int) -> None:
        self._width, self._window = width, window
        self._rows = np.zeros((window, width))  # the newer part, NaN where absent
        self._newest = np.zeros(width)  # the last value that was there
        self._older = np.zeros((0, 3, width))  # moments of the suffixes of the older part, the longest first
        self._gone = 0  # suffixes that are no longer wanted
        self._forget_newer()

    def _forget_newer(self) -> None:
        self._held = 0
        self._count, self._mean, self._squares = np.zeros((3, self._width))

    def push(self, row: Array) -> tuple[Array, Array, Array]:
        """Add a row, let the oldest go when the window is full, and return the window's moments.

        Args:
            row: (width,) values, NaN where absent. They count as at most `LARGEST` in size.

        Returns:
            Count, mean and population variance of the values that are there, (width,) each; 0 where there are none.
        """
        older = len(self._older) - self._gone
        if self._held + older == self._window:
            if older == 0:
                self._older, self._gone = _suffix_moments(self._rows[: self._held], self._newest), 0
                self._forget_newer()
            self._gone += 1
        row = np.minimum(np.maximum(row, -LARGEST), LARGEST)  # keeps NaN
        self._rows[self._held] = row
        self._held += 1
        present = row == row
        np.copyto(self._newest, row, where=present)
        delta = np.where(present, row, self._mean) - self._mean
        before = self._count
        self._count = before + present
        shift = delta / np.maximum(self._count, 1.0)
        self._mean = self._mean + shift
        self._squares = self._squares + delta * shift * before
        return self._moments()

    def _moments(self) -> tuple[Array, Array, Array]:
        """Join the two parts."""
        if self._gone == len(self._older):
            return self._count, self._mean, self._squares / np.maximum(self._count, 1.0)
        count, mean, squares = self._older[self._gone]
        both = count + self._count
        divisor = np.maximum(both, 1.0)
        delta = self._mean - mean
        shift = delta * (self._count / divisor)
        return both, mean + shift, (squares + self._squares + delta * shift * count) / divisor


def _suffix_moments(rows: Array, newest: Array) -> Array:
    """Return count, mean and sum of squared deviations of ``rows[i:]`` for each i: (n, 3, width).

    Args:
        rows: (n, width), NaN where absent.
        newest: (width,) the newest value of each column. All suffixes hold it, so sums of differences from it are as
            exact as the spread of a suffix asks for, whatever jumps came before.
    """
    backward = rows[::-1]
    present = backward == backward
    difference = np.where(present, backward - newest, 0.0)
    count = np.cumsum(present, axis=0, dtype=np.float64)
    mean = np.cumsum(difference, axis=0) / np.maximum(count, 1.0)
    before = np.vstack([np.zeros_like(newest), mean[:-1]])
    # Welford's update for all rows at once: the square of a value's distance from the mean before it
    squares = np.where(present, difference - before, 0.0) ** 2 * (1.0 - 1.0 / np.maximum(count, 1.0))
    moments = np.stack([count, np.where(count > 0, mean + newest, 0.0), np.cumsum(squares, axis=0)], axis=1)
    return np.ascontiguousarray(moments[::-1])
