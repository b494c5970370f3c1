"""Adjustments of the optimiser: learning rate, its schedule, the norm gradients are clipped to."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ..adjustments import Adjustment
from .live import Handler, LiveRound


class ScaleLearningRate:
    """Multiplies the learning rate of every later step."""

    def refusal(self, live: LiveRound, adjustment: Adjustment) -> str | None:
        """Return None: every round has a learning rate."""
        return None

    def apply(self, live: LiveRound, adjustment: Adjustment) -> None:
        """Scale it."""
        scale_learning_rate(live, adjustment.number)


def scale_learning_rate(live: LiveRound, factor: float) -> None:
    """Multiply the rate of every later step; composes with the schedule."""
    live.rates.scale(factor)
    trainer = live.trainer
    scheduler, optimizer = trainer.lr_scheduler, trainer.optimizer
    if scheduler is None or not live.started:
        # nothing is built before the first step: the peak itself moves
        trainer.args.learning_rate *= factor
        return
    base = getattr(scheduler, "scheduler", scheduler)  # accelerate wraps it
    base.base_lrs = [rate * factor for rate in base.base_lrs]
    for group in getattr(optimizer, "optimizer", optimizer).param_groups:
        group["lr"] = group["lr"] * factor


HANDLERS: Mapping[str, Handler] = MappingProxyType({"lr_scale": ScaleLearningRate()})
