"""Compiles the trees of constraints into closures that take single values and arrays alike.

A closure reads a list of slots: the start, the weight of each source, the value of each knob (the position of the
choice where choices are names). What is known before (the algorithm, the task's facts) is folded into it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .constraints import Node

Slots = Sequence[Any]
COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class UnknownFactError(Exception):
    """A fact that is not known would be needed."""


@dataclass(frozen=True)
class Program:
    """A compiled part.

    Attributes:
        run: slots -> value.
        needs: names of the slots that are read.
        constant: its value when it reads none.
    """

    run: Callable[[Slots], Any]
    needs: frozenset[str] = frozenset()
    constant: Any = None

    @classmethod
    def of(cls, value: Any) -> Program:
        """Return the program that gives a constant."""
        return cls(lambda slots: value, frozenset(), value)

    @property
    def fixed(self) -> bool:
        """Whether it reads no slot."""
        return not self.needs


@dataclass(frozen=True)
class Scope:
    """What names mean.

    Attributes:
        name: name -> its program; raises `UnknownFactError` for a fact that is not known, KeyError for no such name.
        position: (variable, text) -> the number that the text is among the variable's values, or the text itself for a
            variable that holds text; -1 for none.
    """

    name: Callable[[str], Program]
    position: Callable[[str, str], Any]


def truth(node: Node, scope: Scope, unknown: bool) -> Program:
    """Return the program of something true or false.

    Args:
        node: the part.
        scope: what names mean.
        unknown: what a comparison is taken for that needs an unknown fact.
    """
    if node.kind in ("and", "or"):
        decides = node.kind == "or"
        parts = []
        for part in node.parts:
            program = truth(part, scope, unknown)
            if program.fixed:
                if bool(program.constant) is decides:
                    return Program.of(decides)
                continue
            parts.append(program)
        if not parts:
            return Program.of(not decides)
        return _joined(operator.or_ if decides else operator.and_, parts)
    if node.kind == "not":
        inner = truth(node.parts[0], scope, not unknown)
        if inner.fixed:
            return Program.of(not inner.constant)
        run = inner.run
        return Program(lambda slots: run(slots) ^ True, inner.needs)
    try:
        if node.kind == "in":
            return _within(node, scope)
        if node.kind == "compare":
            left, right = _pair(node.parts[0], node.parts[1], scope)
            return _folded(COMPARE[str(node.value)], left, right)
        return _folded(operator.ne, number(node, scope), Program.of(0))
    except UnknownFactError:
        return Program.of(unknown)


def number(node: Node, scope: Scope) -> Program:
    """Return the program of a number.

    Raises:
        UnknownFactError: it needs a fact that is not known.
    """
    if node.kind == "number":
        return Program.of(node.value)
    if node.kind == "name":
        return scope.name(str(node.value))
    if node.kind == "text":
        return Program.of(node.value)
    parts = [number(part, scope) for part in node.parts]
    if node.kind == "negative":
        return _folded(operator.sub, Program.of(0.0), parts[0])
    if node.kind == "extreme":
        least = node.value == "min"
        result = parts[0]
        for part in parts[1:]:
            result = _folded(_lesser if least else _greater, result, part)
        return result
    return _folded(_quotient if node.value == "/" else _ARITHMETIC[str(node.value)], parts[0], parts[1])


def _pair(left: Node, right: Node, scope: Scope) -> tuple[Program, Program]:
    """Return both sides of a comparison; text beside a variable becomes what the variable holds for it."""
    if left.kind in ("name", "text") and not _is_variable(left, scope):
        second = number(right, scope)
        return Program.of(_text_beside(right, left, scope)), second
    first = number(left, scope)
    if right.kind in ("name", "text") and not _is_variable(right, scope):
        return first, Program.of(_text_beside(left, right, scope))
    return first, number(right, scope)


def _text_beside(variable: Node, text: Node, scope: Scope) -> Any:
    return scope.position(str(variable.value), str(text.value))


def _is_variable(node: Node, scope: Scope) -> bool:
    if node.kind == "text":
        return False
    try:
        scope.name(str(node.value))
    except KeyError:
        return False
    except UnknownFactError:
        return True
    return True


def _within(node: Node, scope: Scope) -> Program:
    parts = []
    for item in node.parts[1:]:
        left, right = _pair(node.parts[0], item, scope)
        program = _folded(operator.eq, left, right)
        if program.fixed:
            if program.constant:
                return Program.of(True)
            continue
        parts.append(program)
    return _joined(operator.or_, parts) if parts else Program.of(False)


def _joined(join: Callable[[Any, Any], Any], parts: list[Program]) -> Program:
    if len(parts) == 1:
        return parts[0]
    runs = [part.run for part in parts]
    needs = frozenset().union(*(part.needs for part in parts))
    if len(runs) == 2:
        first, second = runs
        return Program(lambda slots: join(first(slots), second(slots)), needs)

    def run(slots: Slots) -> Any:
        result = runs[0](slots)
        for other in runs[1:]:
            result = join(result, other(slots))
        return result

    return Program(run, needs)


def _folded(operation: Callable[[Any, Any], Any], left: Program, right: Program) -> Program:
    if left.fixed and right.fixed:
        return Program.of(operation(left.constant, right.constant))
    first, second = left.run, right.run
    if right.fixed:
        value = right.constant
        return Program(lambda slots: operation(first(slots), value), left.needs)
    return Program(lambda slots: operation(first(slots), second(slots)), left.needs | right.needs)


def _quotient(first: Any, second: Any) -> Any:
    """Return the quotient; NaN, with which every comparison is false, where the divisor is 0."""
    if isinstance(first, np.ndarray) or isinstance(second, np.ndarray):
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(np.equal(second, 0), np.nan, np.divide(first, second))
    return first / second if second else math.nan


def _lesser(first: Any, second: Any) -> Any:
    if isinstance(first, np.ndarray) or isinstance(second, np.ndarray):
        return np.minimum(first, second)
    return min(first, second)


def _greater(first: Any, second: Any) -> Any:
    if isinstance(first, np.ndarray) or isinstance(second, np.ndarray):
        return np.maximum(first, second)
    return max(first, second)
