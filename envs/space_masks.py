"""What of a decision space is legal head by head, and what is still legal once some of a decision is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..inner_trainers.messages import did_you_mean
from ..inner_trainers.recipe import STARTS
from .decision_plan import DecisionPlan, Knob

if TYPE_CHECKING:
    from .decision_space import DecisionSpace


class SpaceMasks:
    """Masks of one space; each is computed once.

    Args:
        space: the space, bound to a task or not.
    """

    def __init__(self, space: DecisionSpace) -> None:
        self._space = space
        self._starts: dict[tuple[str, ...], np.ndarray] = {}
        self._knobs: dict[Any, np.ndarray] = {}

    def starts(self, algorithms: Sequence[str]) -> np.ndarray:
        """Return ``(3,)`` bool: the starts that some of the algorithms can have; all allowed ones for none."""
        key = tuple(algorithms)
        if key not in self._starts:
            allowed = {start for name in key for start in self._plan(name).starts}
            names = [STARTS[start] for start in allowed] or self._space.starts
            self._starts[key] = np.array([name in names for name in STARTS])
        return self._starts[key].copy()

    def knob(self, name: str, values: Sequence[Any], algorithms: Sequence[str]) -> np.ndarray:
        """Return ``(len(values),)`` bool: the values that some of the algorithms can have, whatever else is chosen.

        What other settings would have to fit is left to the repair of `DecisionSpace.decode`, or to `DecisionOrder`.
        At least one is legal: where no algorithm uses the knob, the one nearest to what it then is.
        """
        key = (name, tuple(values), tuple(algorithms))
        if key not in self._knobs:
            legal = np.zeros(len(values), bool)
            for algorithm in algorithms:
                legal |= self._alone(name, values, algorithm)
            if not legal.any():
                legal[self._nearest_unused(name, values)] = True
            self._knobs[key] = legal
        return self._knobs[key].copy()

    def _plan(self, algorithm: str) -> DecisionPlan:
        return self._space.plan(algorithm)

    def _alone(self, name: str, values: Sequence[Any], algorithm: str) -> np.ndarray:
        plan = self._plan(algorithm)
        knob = next(k for k in plan.knobs if k.name == name)
        if knob.never:
            return np.zeros(len(values), bool)
        options = np.array([_slot_value(knob, value) for value in values])
        legal = np.ones(len(values), bool)
        for refused in knob.refused:
            legal &= options != refused
        slots: list[Any] = [None] * (knob.slot + 1)
        slots[knob.slot] = options
        for check in knob.checks:
            if check.holds.needs == {name}:
                legal &= np.asarray(check.holds.run(slots), bool)
        return legal

    def _nearest_unused(self, name: str, values: Sequence[Any]) -> int:
        """Return the position of the value that a knob has where it is not used, or nearly."""
        unused = self._space.unused_value(name)
        if unused in values:
            return list(values).index(unused)
        if isinstance(unused, str):
            return 0
        return int(np.argmin([abs(float(value) - float(unused)) for value in values]))


class DecisionOrder:
    """One decision made step by step: the algorithm, the start, the mix, then its knobs; each step's choices are exact.

    A choice is legal when the choices before it and some of those after it can be a legal recipe together.

    Args:
        space: the space.
        algorithm: the algorithm that was chosen.

    Raises:
        ValueError: an algorithm that is unknown or not legal.
    """

    def __init__(self, space: DecisionSpace, algorithm: str) -> None:
        problem = space.problems.get(algorithm, f"unknown.{did_you_mean(algorithm, space.algorithms)}")
        if problem is not None:
            raise ValueError(f"algorithm: {algorithm!r} is not legal here: {problem}.")
        self._space, self._plan = space, space.plan(algorithm)
        self._knobs = {knob.name: knob for knob in self._plan.knobs}
        self._start = self._plan.starts[0]
        self._weights = self._plan.mix([0.5] * len(space.sources), self._start)
        self._chosen: dict[int, Any] = {}

    @property
    def knobs(self) -> tuple[str, ...]:
        """The knobs in the order in which they are decided."""
        return tuple(self._knobs)

    def legal_starts(self) -> np.ndarray:
        """Return ``(3,)`` bool."""
        legal = np.zeros(len(STARTS), bool)
        for start in self._plan.starts:
            bounds = self._plan.mix_bounds(start)
            if not isinstance(bounds, str):
                weights = self._plan.mix([0.5] * len(self._space.sources), start)
                legal[start] = self._completable(start, weights, {})
        return legal

    def choose_start(self, name: str) -> None:
        """Decide the starting checkpoint."""
        self._start = STARTS.index(name)
        self._weights = self._plan.mix([0.5] * len(self._space.sources), self._start)

    def choose_mix(self, weights: Mapping[str, float]) -> dict[str, float]:
        """Decide the mix; return the legal one that it becomes: the nearest within the bounds."""
        asked = [weights.get(name, 0.0) for name in self._space.sources]
        self._weights = self._plan.mix(asked, self._start)
        return dict(zip(self._space.sources, self._weights, strict=True))

    def uses(self, knob: str) -> bool:
        """Return whether the algorithm uses a knob, given what was decided before."""
        return self._plan.used(self._knobs[knob], self._slots())

    def legal_values(self, knob: str, values: Sequence[Any]) -> np.ndarray:
        """Return ``(len(values),)`` bool: those with which the rest of the decision can be legal."""
        found = self._knobs[knob]
        legal = np.zeros(len(values), bool)
        for place, value in enumerate(values):
            chosen = {**self._chosen, found.slot: _slot_value(found, value)}
            legal[place] = self._completable(self._start, self._weights, chosen)
        return legal

    def nearest_legal(self, knob: str) -> Any:
        """Return the value nearest to a knob's middle with which the rest of the decision can be legal.

        Raises:
            ValueError: none was found near.
        """
        found = self._knobs[knob]
        middle = found.parameter.decode(0.0)
        slots = self._slots()
        slots[found.slot] = _slot_value(found, middle)
        for value in found.candidates(slots):
            if self._completable(self._start, self._weights, {**self._chosen, found.slot: value}):
                return found.parameter.choices[value] if found.parameter.named else value
        raise ValueError(f"{knob}: no value near {middle!r} fits what was chosen before.")

    def choose(self, knob: str, value: Any) -> None:
        """Decide a knob."""
        found = self._knobs[knob]
        self._chosen[found.slot] = _slot_value(found, value)

    def _slots(self) -> list[Any]:
        slots: list[Any] = [self._start, *self._weights, *[None] * len(self._knobs)]
        for slot, value in self._chosen.items():
            slots[slot] = value
        return slots

    def _completable(self, start: int, weights: Sequence[float], chosen: Mapping[int, Any]) -> bool:
        return self._plan.completable([start, *weights, *[None] * len(self._knobs)], chosen)


def _slot_value(knob: Knob, value: Any) -> Any:
    if knob.parameter.named:
        return knob.parameter.choices.index(value) if value in knob.parameter.choices else -1
    return value
