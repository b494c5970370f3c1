"""The learning rate of each optimiser step of a round: its schedule, times what adjustments have made of it."""

from __future__ import annotations

from dataclasses import replace

from .recipe import Recipe


class LearningRates:
    """What each step is asked to use.

    Args:
        recipe: peak, schedule, warm-up and steps.

    Attributes:
        factor: what adjustments have multiplied the rate of every later step by.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe, self._began = recipe, 0
        self.factor = 1.0

    def at(self, step: int) -> float:
        """Return the rate of optimiser step ``step``, from 1."""
        return self._recipe.learning_rate_at(step - self._began) * self.factor

    def scale(self, factor: float) -> None:
        """Multiply the rate of every later step."""
        self.factor *= factor

    def restart(self, done: int) -> None:
        """Let the schedule begin anew after ``done`` steps, over the steps that are left, with its warm-up."""
        left = self._recipe.steps - (done - self._began)
        warmup = min(self._recipe.warmup_steps, max(0, left - 1))
        self._recipe, self._began = replace(self._recipe, steps=left, warmup_steps=warmup), done
