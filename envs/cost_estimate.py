"""What a round is predicted to cost: a value, an interval and how it was made, per quantity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..inner_trainers.base import UNITS
from ..inner_trainers.messages import did_you_mean


class Estimate(NamedTuple):
    """One predicted quantity.

    Attributes:
        value: the median of what it may be, in its own unit.
        low: 90 % of such rounds lie between this and ``high``.
        high: never above what the trainer's bound allows.
        how: how it was made: what it was fitted to, or that it is a bound.
        fitted: whether rounds stand behind it; else ``value`` and ``high`` are the bound and ``low`` is 0.
    """

    value: float
    low: float
    high: float
    how: str
    fitted: bool


@dataclass(frozen=True, slots=True)
class CostEstimate:
    """What one round will cost.

    Attributes:
        training: unit or ``"peak_memory_bytes"`` -> estimate for the optimiser steps and their rollouts; what nothing
            says anything about is left out.
        evaluation: unit -> estimate for the evaluation after them.
    """

    training: Mapping[str, Estimate]
    evaluation: Mapping[str, Estimate]

    def total(self, unit: str) -> Estimate | None:
        """Return training and evaluation together, in a budget's unit; None when one of them is not known.

        The ends of the interval are added, as if both erred together: it is no narrower than it should be.

        Raises:
            ValueError: an unknown unit.
        """
        if unit not in UNITS:
            raise ValueError(f"unit: nothing is counted in {unit!r}.{did_you_mean(unit, UNITS)}")
        parts = [self.training.get(unit), self.evaluation.get(unit)]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        how = known[0].how if known[0].how == known[1].how else f"{known[0].how}; evaluation: {known[1].how}"
        return Estimate(
            value=sum(part.value for part in known),
            low=sum(part.low for part in known),
            high=sum(part.high for part in known),
            how=how,
            fitted=all(part.fitted for part in known),
        )

    @property
    def peak_memory_bytes(self) -> Estimate | None:
        """The most memory in use, as `RoundReport.peak_memory_bytes` counts it; None when no round tells."""
        return self.training.get("peak_memory_bytes")

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        parts = {"training": self.training, "evaluation": self.evaluation}
        return {part: {name: e._asdict() for name, e in found.items()} for part, found in parts.items()}


def fits_memory(estimate: CostEstimate, memory_bytes: float) -> bool:
    """Return whether the predicted peak fits: the upper end of its interval, for memory that runs out loses a round.

    Where no round has told a peak, nothing is known and the answer is True.
    """
    peak = estimate.peak_memory_bytes
    return peak is None or peak.high <= memory_bytes
