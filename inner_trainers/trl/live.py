"""What adjustments can reach of a running round, and the shape of what carries them out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ..adjustments import Adjustment
from ..base import Cost
from ..rates import LearningRates
from ..recipe import Recipe
from .algorithms import AlgorithmSpec
from .metering import Meter
from .rescue import Rescue


class StepNotPaidError(Exception):
    """Unwinds a round whose step has to be done again, which its budget does not pay for."""


@dataclass
class LiveRound:
    """A running round while its worker is parked.

    Attributes:
        spec: its algorithm.
        asked: the recipe it began with.
        now: the recipe whose settings are in force for the next step.
        rates: the learning rate of each step.
        rescue: keeps the last good weights.
        meter: what the trainer counts.
        step_bound: returns the most that one step of a recipe can cost.
        pays: returns whether what is left of the budget pays one step of a recipe; None for no budget.
        trainer: the TRL trainer; None until it is built, and after the round.
        started: whether the worker was started: before that the trainer has neither optimiser nor schedule.
        step: optimiser steps done.
        frozen: what takes the gradient of each frozen tensor away; empty when all that can train do.
        unchecked: whether a setting has changed since what the trainer holds was compared with ``now``.
    """

    spec: AlgorithmSpec
    asked: Recipe
    now: Recipe
    rates: LearningRates
    rescue: Rescue
    meter: Meter
    step_bound: Callable[[Recipe], Cost]
    pays: Callable[[Recipe], bool] | None = None
    trainer: Any = None
    started: bool = False
    step: int = 0
    frozen: list[Any] = field(default_factory=list)
    unchecked: bool = False

    def change(self, **settings: Any) -> None:
        """Put settings in force."""
        self.now = replace(self.now, **settings)
        self.unchecked = True


class Handler(Protocol):
    """Carries out one kind of adjustment."""

    def refusal(self, live: LiveRound, adjustment: Adjustment) -> str | None:
        """Return why it cannot be applied now, as a sentence without the adjustment's name; None when it can."""

    def apply(self, live: LiveRound, adjustment: Adjustment) -> str | None:
        """Change the round from the next step on; called only when there is no refusal.

        Returns:
            What decides the weights and is not in the adjustment itself, for the checkpoint's id; None for nothing.
        """
