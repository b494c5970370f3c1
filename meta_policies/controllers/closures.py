"""What compiled conditions are made of: closures that read one look at a round, and that look."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .base import ControlState

Number = Callable[["View"], "float | None"]
Truth = Callable[["View"], "bool | None"]
Holds = Callable[["View"], bool]


class UndefinedError(ArithmeticError):
    """A condition came to no finite number: it is unknown at this step."""


class View:
    """What conditions read at one look, with the values that `mean`, `change` and `first` need.

    Args:
        needs: signal -> how many recent values are kept, and how many of the first.
    """

    __slots__ = ("_kept", "earliest", "progress", "recent", "settings", "step", "steps", "values", "z")

    def __init__(self, needs: Mapping[str, int] | None = None) -> None:
        self.recent: dict[str, list[float]] = {name: [] for name in needs or {}}
        self.earliest: dict[str, list[float]] = {name: [] for name in needs or {}}
        self._kept = [(name, n, self.recent[name], self.earliest[name]) for name, n in (needs or {}).items()]
        self.values: Mapping[str, float | None] = {}
        self.z: Mapping[str, float] = {}
        self.settings: Mapping[str, float] = {}
        self.step = self.steps = self.progress = 0.0

    def look(self, state: ControlState) -> View:
        """Take in one state and return itself."""
        values = self.values = state.signals.values
        self.z, self.settings = state.signals.z, state.settings
        self.step, self.steps = float(state.step), float(state.steps)
        self.progress = state.step / state.steps
        for name, kept, recent, earliest in self._kept:
            value = values.get(name)
            if value is not None and math.isfinite(value):
                recent.append(value)
                if len(earliest) < kept:
                    earliest.append(value)
                if len(recent) > 2 * kept:  # cut now and then: deleting from the front of a list moves the rest
                    del recent[:-kept]
        return self


def all_of(parts: Sequence[Truth]) -> Truth:
    """Return and, three-valued."""

    def check(view: View) -> bool | None:
        result: bool | None = True
        for part in parts:
            value = part(view)
            if value is False:
                return False
            if value is None:
                result = None
        return result

    return check


def any_of(parts: Sequence[Truth]) -> Truth:
    """Return or, three-valued."""

    def check(view: View) -> bool | None:
        result: bool | None = False
        for part in parts:
            value = part(view)
            if value is True:
                return True
            if value is None:
                result = None
        return result

    return check


def negation(part: Truth) -> Truth:
    """Return not, three-valued."""

    def check(view: View) -> bool | None:
        value = part(view)
        return None if value is None else not value

    return check


def comparison(symbol: Callable[[Any, Any], bool], left: Number, right: Number) -> Truth:
    """Return a comparison of two numbers."""

    def check(view: View) -> bool | None:
        first = left(view)
        if first is None:
            return None
        second = right(view)
        return None if second is None else symbol(first, second)

    return check


def all_hold(parts: Sequence[Holds]) -> Holds:
    """Return whether all are true, up to the first that is not."""
    if len(parts) == 2:
        first, second = parts
        return lambda view: first(view) and second(view)

    def holds(view: View) -> bool:
        for part in parts:  # noqa: SIM110 - `all` would build a generator
            if not part(view):
                return False
        return True

    return holds


def any_holds(parts: Sequence[Holds]) -> Holds:
    """Return whether one is true, up to the first that is."""
    return lambda view: any(part(view) for part in parts)


def comparison_holds(symbol: Callable[[Any, Any], bool], left: Number, right: Number) -> Holds:
    """Return whether a comparison of two numbers is true."""

    def holds(view: View) -> bool:
        first = left(view)
        if first is None:
            return False
        second = right(view)
        return second is not None and symbol(first, second)

    return holds


def comparison_with_constant_holds(symbol: Callable[[Any, Any], bool], left: Number, value: float) -> Holds:
    """Return whether a comparison with a constant is true."""

    def holds(view: View) -> bool:
        first = left(view)
        return first is not None and symbol(first, value)

    return holds


def signal_comparison_holds(symbol: Callable[[Any, Any], bool], name: str, value: float) -> Holds:
    """Return whether a comparison of a signal's raw value with a constant is true."""

    def holds(view: View) -> bool:
        first = view.values.get(name)
        if first is None:
            return False
        if not math.isfinite(first):
            raise UndefinedError(f"{name} is {first}")
        return symbol(first, value)

    return holds


def multiple(factor: float, inner: Number, shown: str) -> Number:
    """Return a number times a constant."""

    def calculate(view: View) -> float | None:
        value = inner(view)
        if value is None:
            return None
        value *= factor
        if not math.isfinite(value):
            raise UndefinedError(f"{shown} is {value}")
        return value

    return calculate


def constant(value: float) -> Number:
    """Return a constant."""
    return lambda view: value


def raw_signal(name: str) -> Number:
    """Return a signal's raw value."""

    def read(view: View) -> float | None:
        value = view.values.get(name)
        if value is not None and not math.isfinite(value):
            raise UndefinedError(f"{name} is {value}")
        return value

    return read


def z_score(name: str) -> Number:
    """Return a signal's z-score, None where the signal is absent."""
    return lambda view: None if view.values.get(name) is None else view.z.get(name)


def negated(inner: Number) -> Number:
    """Return a number with the other sign."""
    return lambda view: None if (value := inner(view)) is None else -value


def arithmetic(symbol: Callable[[Any, Any], Any], left: Number, right: Number, shown: str) -> Number:
    """Return a sum, difference, product or quotient; ``shown`` is how messages call it."""

    def calculate(view: View) -> float | None:
        first = left(view)
        if first is None:
            return None
        second = right(view)
        if second is None:
            return None
        if symbol is operator.truediv and second == 0:
            raise ZeroDivisionError(f"division by zero in {shown}")
        value: float = symbol(first, second)
        if not math.isfinite(value):
            raise UndefinedError(f"{shown} is {value}")
        return value

    return calculate


def extreme(pick: Callable[..., float], terms: Sequence[Number]) -> Number:
    """Return the least or greatest of some numbers."""

    def calculate(view: View) -> float | None:
        values = []
        for term in terms:
            value = term(view)
            if value is None:
                return None
            values.append(value)
        return pick(values)

    return calculate


def mean_of_last(name: str, n: int) -> Number:
    """Return the mean of a signal's last ``n`` values."""

    def calculate(view: View) -> float | None:
        recent = view.recent[name]
        return None if len(recent) < n else math.fsum(recent[-n:]) / n

    return calculate


def mean_of_first(name: str, n: int) -> Number:
    """Return the mean of a signal's first ``n`` values."""

    def calculate(view: View) -> float | None:
        earliest = view.earliest[name]
        return None if len(earliest) < n else math.fsum(earliest[:n]) / n

    return calculate


def change_of_mean(name: str, n: int) -> Number:
    """Return the mean of a signal's last ``n`` values less that of the ``n`` before."""

    def calculate(view: View) -> float | None:
        recent = view.recent[name]
        if len(recent) < 2 * n:
            return None
        return (math.fsum(recent[-n:]) - math.fsum(recent[-2 * n : -n])) / n

    return calculate
