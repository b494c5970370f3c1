"""Adjustments of the optimiser: learning rate, its schedule, the norm gradients are clipped to."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..adjustments import Adjustment
from ..recipe import number_range
from .live import Handler, LiveRound


def refused_number(name: str, value: float) -> str | None:
    """Return why ``value`` cannot be what a recipe field becomes; None when it can."""
    low, high, low_open = number_range(name)
    if (low < value if low_open else low <= value) and value <= high:
        return None
    return f"{name} would become {value:g}, outside {'(' if low_open else '['}{low:g}, {high:g}]"


class ScaleLearningRate:
    """Multiplies the learning rate of every later step."""

    def refusal(self, live: LiveRound, adjustment: Adjustment) -> str | None:
        """Refuse a peak that no recipe may have."""
        return refused_number("learning_rate", live.rates.peak * adjustment.number)

    def apply(self, live: LiveRound, adjustment: Adjustment) -> None:
        """Scale it."""
        scale_learning_rate(live, adjustment.number)


class RestartSchedule:
    """Lets the schedule begin anew over the steps that are left."""

    def refusal(self, live: LiveRound, adjustment: Adjustment) -> str | None:
        """Refuse where the next step would get the same rate: before the first, twice, or with a flat schedule."""
        if live.step == 0:
            return "the schedule has not begun"
        if live.rates.restart_changes_next(live.step):
            return None
        return "the next step has the rate with which the schedule would begin anew"

    def apply(self, live: LiveRound, adjustment: Adjustment) -> None:
        """Restart it."""
        rates = live.rates
        rates.restart(live.step)
        scheduler = _scheduler(live.trainer)
        # the library's own lambdas know neither the new beginning nor the new end; their argument is the steps done
        scheduler.lr_lambdas = [lambda done: rates.scheduled(done + 1)] * len(scheduler.lr_lambdas)
        scheduler.base_lrs = [rates.factor] * len(scheduler.base_lrs)
        _use_now(scheduler)


class ScaleGradientClip:
    """Multiplies the norm that gradients are clipped to."""

    def refusal(self, live: LiveRound, adjustment: Adjustment) -> str | None:
        """Refuse a norm that no recipe may have, and a factor of 1."""
        if adjustment.number == 1:
            return "a factor of 1 changes nothing"
        return refused_number("max_grad_norm", live.now.max_grad_norm * adjustment.number)

    def apply(self, live: LiveRound, adjustment: Adjustment) -> None:
        """Scale it; the library reads it at every step."""
        norm = live.now.max_grad_norm * adjustment.number
        live.trainer.args.max_grad_norm = norm
        live.change(max_grad_norm=norm)


def scale_learning_rate(live: LiveRound, factor: float) -> None:
    """Multiply the rate of every later step; composes with the schedule."""
    live.rates.scale(factor)
    if live.trainer.lr_scheduler is None or not live.started:
        # nothing is built before the first step: the peak itself moves
        live.trainer.args.learning_rate *= factor
        return
    scheduler = _scheduler(live.trainer)
    scheduler.base_lrs = [rate * factor for rate in scheduler.base_lrs]
    _use_now(scheduler)


def _scheduler(trainer: Any) -> Any:
    return getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)  # accelerate wraps it


def _use_now(scheduler: Any) -> None:
    """Give the optimiser the rate of its next step, as the scheduler itself will for the later ones."""
    groups = scheduler.optimizer.param_groups
    for group, base, shape in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
        group["lr"] = base * shape(scheduler.last_epoch)


HANDLERS: Mapping[str, Handler] = MappingProxyType(
    {
        "lr_scale": ScaleLearningRate(),
        "lr_restart": RestartSchedule(),
        "grad_clip_scale": ScaleGradientClip(),
    }
)
