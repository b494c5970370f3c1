"""The monitor of a round: turns the raw values of each optimiser step into `Signals`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from .adjustments import SOURCE_SLOTS
from .signals import SIGNALS, WINDOW, Z_LIMIT, Signals
from .sliding_moments import SlidingMoments

SMOOTHING = 0.2
"""Weight of the newest loss in the smoothed loss, an exponential moving average that begins with the first loss."""

SLOPE_STEPS = 10
"""Values of the smoothed loss that its slope is fitted to."""

DECISIVE = 0.5
"""A negative reward is decisive at this share of the largest size among its step's rewards, or beyond."""

_CURVES = {
    "clip_ratio/region_mean": "clip_ratio",
    "completions/mean_length": "completion_length",
    "completions/clipped_ratio": "completion_truncated",
}
"""Curve -> signal, where their names differ."""

_DERIVED = ("loss_slope", "loss_curvature")


class Monitor:
    """Reads the signals of one round, one optimiser step at a time.

    A z-score is ``(value - mean) / standard deviation`` over the last `WINDOW` steps, this one too: 0 at a signal's
    first value and where all were equal. Values that are absent or not finite do not enter the window, so they move
    no later score.

    A scripted round needs no more than ``Monitor(sources)`` and, after each step, ``observe(step, row)`` with its curve
    row; what the row does not hold is absent.

    Args:
        sources: the sources of the round's mix, whose first `SOURCE_SLOTS` in sorted order have signals of their own.
        on_policy: whether the round's loss is a policy gradient. The KL estimate of other algorithms is one of whole
            answers, which is another quantity: it is absent.

    Attributes:
        signals: what the last step showed; all absent before the first.
    """

    def __init__(self, sources: Sequence[str] = (), *, on_policy: bool = True) -> None:
        self._names = {name: name for name in SIGNALS if name not in (*_DERIVED, *_CURVES.values())} | _CURVES
        for slot, source in enumerate(sorted(sources)[:SOURCE_SLOTS], start=1):
            self._names |= {f"loss/{source}": f"loss_source_{slot}", f"reward/{source}": f"reward_source_{slot}"}
        if not on_policy:
            del self._names["kl"]
        self._moments = {name: SlidingMoments(WINDOW) for name in SIGNALS}
        self._trend = LossTrend()
        self.signals = Signals()

    def observe(self, step: int, row: Mapping[str, Any]) -> Signals:
        """Read one step and return its signals.

        Args:
            step: optimiser steps done.
            row: what was measured, by the names of curves and of `SIGNALS`; None, or no entry, where nothing was. What
                is no finite number is broken.
        """
        values: dict[str, float | None] = dict.fromkeys(SIGNALS)
        scores, broken = dict.fromkeys(SIGNALS, 0.0), []
        names = self._names
        for curve, raw in row.items():
            name = names.get(curve)
            if name is None or raw is None:
                continue
            number = raw if type(raw) is float else _number(raw)
            if math.isfinite(number):
                values[name], scores[name] = number, self._score(name, step, number)
            else:
                broken.append(name)
        loss = values["loss"]
        if loss is not None:
            for name, derived in zip(_DERIVED, self._trend.observe(loss), strict=True):
                if derived is not None:
                    values[name], scores[name] = derived, self._score(name, step, derived)
        self.signals = Signals(step, values, scores, tuple(broken))
        return self.signals

    def _score(self, name: str, step: int, value: float) -> float:
        score = self._moments[name].push(step, value)
        return score if -Z_LIMIT <= score <= Z_LIMIT else math.copysign(Z_LIMIT, score)


class LossTrend:
    """Slope and curvature of the smoothed loss.

    The loss is smoothed by an exponential moving average (`SMOOTHING`); its slope is that of the least-squares line
    through the last `SLOPE_STEPS` smoothed values, of which there must be two. Losses that are not finite are left out.
    """

    def __init__(self) -> None:
        self._smooth: deque[float] = deque(maxlen=SLOPE_STEPS)
        self._slopes: deque[float] = deque(maxlen=3)

    def observe(self, loss: float) -> tuple[float | None, float | None]:
        """Return the slope, in loss per step, and how much it changes per step.

        The change is that over the last three slopes, divided by 2; None unless all three have one sign, so that a
        loss that only jitters has no curvature.
        """
        last = self._smooth[-1] if self._smooth else loss
        self._smooth.append(last + (SMOOTHING * loss - SMOOTHING * last))
        if len(self._smooth) < 2:
            return None, None
        newest = self._smooth[-1]  # the weights sum to 0; differences keep a loss of 1e9 exact
        pairs = zip(_LINE[len(self._smooth)], self._smooth, strict=True)
        slope = sum(weight * (value - newest) for weight, value in pairs)
        if not math.isfinite(slope):  # losses near the largest float
            self._slopes.clear()
            return None, None
        self._slopes.append(slope)
        if len(self._slopes) == 3 and (min(self._slopes) > 0 or max(self._slopes) < 0):
            return slope, (slope - self._slopes[0]) / 2
        return slope, None


def _line(count: int) -> tuple[float, ...]:
    """Return the weights whose sum of products with ``count`` values is their least-squares slope."""
    middle = (count - 1) / 2
    spread = sum((position - middle) ** 2 for position in range(count))
    return tuple((position - middle) / spread for position in range(count)) if spread else (0.0,)


_LINE = [_line(count) for count in range(SLOPE_STEPS + 1)]


def reward_sparsity(rewards: Sequence[float]) -> float | None:
    """Return the share of a step's rewards that carry no information; None when there are none.

    A positive reward does, and so does a decisive negative one: the step's rewards differ, and it is at most
    ``-DECISIVE`` times the largest size among them. Zeros do not, nor does a penalty that every completion gets, nor
    one that is small beside the other rewards.
    """
    if not rewards:
        return None
    limit = -DECISIVE * max(map(abs, rewards)) if min(rewards) < max(rewards) else -math.inf
    informative = sum(reward > 0 or (reward < 0 and reward <= limit) for reward in rewards)
    return 1.0 - informative / len(rewards)


def _number(value: Any) -> float:
    """Return a number as a float, NaN for what is none."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
