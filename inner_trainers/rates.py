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

    @property
    def peak(self) -> float:
        """The schedule's highest rate, times what adjustments have made of it."""
        return self._recipe.learning_rate * self.factor

    def at(self, step: int) -> float:
        """Return the rate of optimiser step ``step``, from 1."""
        return self.scheduled(step) * self.factor

    def scheduled(self, step: int) -> float:
        """Return what the schedule alone gives optimiser step ``step``, from 1."""
        return self._recipe.learning_rate_at(step - self._began)

    def scale(self, factor: float) -> None:
        """Multiply the rate of every later step."""
        self.factor *= factor

    def restart_changes_next(self, done: int) -> bool:
        """Return whether `restart` after ``done`` steps would give the next step another rate."""
        _, warmup = self._after_restart(done)
        return self.scheduled(done + 1) != (0.0 if warmup else self._recipe.learning_rate)

    def restart(self, done: int) -> None:
        """Let the schedule begin anew after ``done`` steps, over the steps that are left, with its warm-up."""
        left, warmup = self._after_restart(done)
        self._recipe, self._began = replace(self._recipe, steps=left, warmup_steps=warmup), done

    def _after_restart(self, done: int) -> tuple[int, int]:
        """Return the steps that are left after ``done``, and how many of them a warm-up would take."""
        left = self._recipe.steps - (done - self._began)
        return left, min(self._recipe.warmup_steps, max(0, left - 1))
