"""How often a policy net may do what: no more often, and no sooner again, than the logs it learned from did."""

from __future__ import annotations

from collections.abc import Mapping

from ...inner_trainers.adjustments import catalogue_index
from ...inner_trainers.messages import require_integer


class Limits:
    """Counts what was done in one round, and says what may not be done yet or any more.

    A net that was cloned from a few dozen rounds meets states it has not seen, above all those its own adjustments
    lead to; without limits it may take one step after another in the same direction until the round is lost.

    Args:
        limits: catalogue name -> (optimiser steps until it may be done again, times per round); other entries have
            no limits.

    Raises:
        ValueError: an unknown name, or numbers that are no whole numbers of at least 0.
    """

    def __init__(self, limits: Mapping[str, tuple[int, int]]) -> None:
        self._limits = {catalogue_index(name): numbers for name, numbers in checked_limits(limits).items()}
        self._done: dict[int, tuple[int, int]] = {}

    def begin(self) -> None:
        """Forget the last round."""
        self._done = {}

    def note(self, action: int, step: int) -> None:
        """Count an entry that was done after ``step`` steps."""
        if action in self._limits:
            self._done[action] = (step, self._done.get(action, (0, 0))[1] + 1)

    def blocked(self, step: int) -> list[int]:
        """Return the entries that may not be done after ``step`` steps."""
        return [
            action
            for action, (last, times) in self._done.items()
            if step - last < self._limits[action][0] or times >= self._limits[action][1]
        ]


def checked_limits(limits: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Return limits as plain numbers, in the catalogue's order.

    Raises:
        ValueError: an unknown name, or numbers that are no whole numbers of at least 0.
    """
    checked = {}
    for name in sorted(limits, key=catalogue_index):
        rest, times = limits[name]
        checked[name] = (
            require_integer(f"limits.{name}: steps", rest, low=0, high=100_000),
            require_integer(f"limits.{name}: times", times, low=1, high=100_000),
        )
    return checked
