"""Mean and spread of one signal over a sliding window of steps, at any of which it may be absent."""

from __future__ import annotations

import math
from collections import deque

LARGEST = 1e100
"""Values are clipped to this size, so that no square overflows."""

CANCELLED = 1e-4
"""Share of its largest size since they were last exact at which moments are computed anew.

A sum of squares that shrinks by subtraction keeps the rounding errors of its largest size: at this share, 12 of a
float's 16 digits are left. So a jump that leaves the window leaves nothing behind, and no sum goes negative.
"""


NO_SPREAD = 1e-12
"""A standard deviation up to this share of the mean's size is rounding."""


class SlidingMoments:
    """The mean and the variance of the values of the last ``window`` steps.

    Values enter by Welford's update and leave by its reverse, all as differences from one of them; where that would
    lose digits, see `CANCELLED`, the moments are computed from the window itself.

    Args:
        window: steps that are looked back on, at least 1.

    Attributes:
        count: values in the window.
    """

    __slots__ = ("_largest", "_mean", "_origin", "_squares", "_steps", "_values", "_window", "count")

    def __init__(self, window: int) -> None:
        self._window = window
        self._values: deque[float] = deque()
        self._steps: deque[int] = deque()
        self._origin = self._mean = 0.0  # the mean is that of the differences from the origin
        self._squares = self._largest = 0.0  # the largest since the moments were exact
        self.count = 0

    @property
    def mean(self) -> float:
        """Mean; 0 without any values."""
        return self._origin + self._mean if self.count else 0.0

    @property
    def variance(self) -> float:
        """Population variance; 0 without any values, and to the last bit where all are equal."""
        return self._squares / self.count if self.count else 0.0

    def push(self, step: int, value: float) -> float:
        """Add the value of a step and return its z-score; steps without a value need no call.

        Args:
            step: the step, later than all before; it ends the window.
            value: a finite number.

        Returns:
            How many standard deviations the value lies from the mean, both of the window with it; 0 where all of the
            window is equal.
        """
        held = value if -LARGEST <= value <= LARGEST else math.copysign(LARGEST, value)
        oldest = step - self._window
        while self.count and self._steps[0] <= oldest:
            self._drop_oldest()
        if self.count == 0:
            self._origin, self._mean, self._squares, self._largest = held, 0.0, 0.0, 0.0
        self._values.append(held)
        self._steps.append(step)
        self.count = count = self.count + 1
        number = held - self._origin
        delta = number - self._mean
        self._mean = mean = self._mean + delta / count
        squares = self._squares + delta * (number - mean)
        if squares >= CANCELLED * self._largest:
            self._squares = squares
            if squares > self._largest:
                self._largest = squares
        else:
            self._compute()
            squares, mean, number = self._squares, self._mean, held - self._origin
        spread = math.sqrt(squares / count)
        return 0.0 if spread <= NO_SPREAD * abs(self._origin + mean) else (number - mean) / spread

    def _drop_oldest(self) -> None:
        self._steps.popleft()
        number = self._values.popleft() - self._origin
        self.count -= 1
        if self.count:
            delta = number - self._mean
            self._mean -= delta / self.count
            self._squares -= delta * (number - self._mean)

    def _compute(self) -> None:
        """Compute the moments from the window, whose oldest value becomes the origin."""
        self._origin = self._values[0]
        numbers = [value - self._origin for value in self._values]
        self._mean = math.fsum(numbers) / self.count
        self._squares = self._largest = math.fsum((number - self._mean) ** 2 for number in numbers)
