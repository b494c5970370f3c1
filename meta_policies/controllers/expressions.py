"""Conditions over signals, such as ``z.grad_norm > 3 and loss_slope > 0``: parsed, checked and compiled into closures.

The text goes through Python's parser and then through a whitelist of node types; nothing of it is ever executed. What a
condition can say:

- numbers, the rule file's constants, ``step``, ``steps``, ``progress`` (steps done over all steps, in (0, 1]);
- a signal's raw value (``grad_norm``), its z-score (``z.grad_norm``), a setting in force for the next step
  (``setting.learning_rate``, ``setting.mix.NAME``);
- ``+ - * /``, comparisons (chains too: ``0 < kl < 1``), ``and``, ``or``, ``not``, parentheses;
- ``abs(x)``, ``min(x, y, ...)``, ``max(x, y, ...)``;
- ``present(NAME)``: whether the signal (or ``setting.NAME``) is there;
- ``mean(NAME, n)``: mean of the signal's last ``n`` values that were there, one from each look;
- ``change(NAME, n)``: mean of the last ``n`` values less the mean of the ``n`` before them;
- ``first(NAME, n)``: mean of the signal's first ``n`` values in the round, to hold later ones against.

A condition is true, false or unknown. What is absent makes a comparison unknown; ``not`` unknown is unknown; ``and``
and ``or`` follow Kleene (1952): false and unknown is false, true or unknown is true.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from ...inner_trainers.messages import did_you_mean
from ...inner_trainers.recipe import Recipe
from ...inner_trainers.signals import SIGNALS, WINDOW
from .base import ControlState

MAX_LENGTH = 500
"""Characters of a condition."""
MAX_DEPTH = 32
"""Parts within parts of a condition."""
SETTINGS: tuple[str, ...] = ("learning_rate_factor", *(f.name for f in fields(Recipe) if f.type in ("int", "float")))
"""Names after ``setting.``; ``setting.mix.NAME`` is the weight of a source."""
STATE_NAMES = ("step", "steps", "progress")
FUNCTIONS = ("abs", "min", "max", "present", "mean", "change", "first")
RESERVED: frozenset[str] = frozenset({*SIGNALS, *STATE_NAMES, *FUNCTIONS, "z", "setting", "mix"})
"""Names that a constant cannot have."""

_Number = Callable[["View"], "float | None"]
_Truth = Callable[["View"], "bool | None"]
_COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_REFUSED = {
    ast.Pow: "a power (**); multiply instead",
    ast.Mod: "a remainder (%)",
    ast.FloorDiv: "a whole division (//); use /",
    ast.NamedExpr: "an assignment (:=); compare with ==",
    ast.Lambda: "a lambda",
    ast.IfExp: "an if-else; use and, or",
    ast.Subscript: "an index ([])",
    ast.List: "a list",
    ast.Tuple: "a tuple",
    ast.JoinedStr: "text",
    ast.In: "in; compare with ==",
    ast.NotIn: "not in; compare with !=",
    ast.Is: "is; compare with ==",
    ast.IsNot: "is not; compare with !=",
}


class ConditionError(ValueError):
    """A condition that cannot be read; the message ends with the text and a caret under the place."""

    def __init__(self, text: str, column: int, problem: str) -> None:
        self.column, self.problem = column, problem
        super().__init__(f"character {column + 1}: {problem}\n  {text}\n  {' ' * column}^")


class UndefinedError(ArithmeticError):
    """A condition came to no finite number: it is unknown at this step."""


class View:
    """What conditions read at one look, with the values that `mean`, `change` and `first` need.

    Args:
        needs: signal -> how many recent values are kept, and how many of the first.
    """

    __slots__ = ("_needs", "earliest", "progress", "recent", "settings", "step", "steps", "values", "z")

    def __init__(self, needs: Mapping[str, int] | None = None) -> None:
        self._needs = tuple((needs or {}).items())
        self.recent: dict[str, list[float]] = {name: [] for name, _ in self._needs}
        self.earliest: dict[str, list[float]] = {name: [] for name, _ in self._needs}
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
        for name, kept in self._needs:
            value = values.get(name)
            if value is not None and math.isfinite(value):
                recent = self.recent[name]
                recent.append(value)
                if len(self.earliest[name]) < kept:
                    self.earliest[name].append(value)
                if len(recent) > 2 * kept:  # cut now and then: deleting from the front of a list moves the rest
                    del recent[:-kept]
        return self


class Condition:
    """A compiled condition.

    Args:
        text: the condition.
        constants: names that stand for numbers.

    Attributes:
        text: as given, without surrounding blanks.
        needs: signal -> how many recent values a `View` has to keep for it.

    Raises:
        ConditionError: it cannot be read; says where.
    """

    def __init__(self, text: str, constants: Mapping[str, float] | None = None) -> None:
        if not isinstance(text, str):
            raise ValueError(f"expected a condition such as 'z.grad_norm > 3', got {text!r}.")
        self.text = re.sub(r"\s", " ", text).strip()
        compiler = _Compiler(self.text, constants or {})
        self._check = compiler.condition()
        self.needs: Mapping[str, int] = compiler.needs

    def check(self, view: View) -> bool | None:
        """Return whether it holds; None when that is unknown.

        Raises:
            ArithmeticError: a division by zero, or a value that is not finite; it is then unknown too.
        """
        return self._check(view)

    def __repr__(self) -> str:
        return f"Condition({self.text!r})"


class _Compiler:
    """Turns one text into a closure."""

    def __init__(self, text: str, constants: Mapping[str, float]) -> None:
        self._text, self._constants = text, constants
        self.needs: dict[str, int] = {}

    def condition(self) -> _Truth:
        text = self._text
        if not text:
            raise ConditionError(text, 0, "the condition is empty; write for example 'z.grad_norm > 3'.")
        if len(text) > MAX_LENGTH:
            raise ConditionError(
                text[:60], 59, f"{len(text)} characters, at most {MAX_LENGTH} are read; make two rules of it."
            )
        for column, character in enumerate(text):
            if not " " <= character <= "~" or (character in "#\\;'\"`$@!?{}[]" and text[column : column + 2] != "!="):
                raise ConditionError(text, column, f"{character!r} has no meaning in a condition.")
        try:
            body = ast.parse(text, mode="eval").body
        except SyntaxError as error:
            column = min(error.offset - 1, len(text)) if error.offset else len(text)  # 0 stands for the end
            raise ConditionError(text, column, self._syntax(str(error.msg), column)) from None
        except (ValueError, MemoryError, RecursionError):
            raise ConditionError(text, 0, "too deeply nested to be read; make two rules of it.") from None
        return self._truth(body, 1)

    def _syntax(self, message: str, column: int) -> str:
        if re.search(r"&&|\|\|", self._text):
            return "write `and` and `or` in words."
        if re.search(r"(?<![=!<>])=(?!=)", self._text):
            return "one `=` compares nothing; write `==`."
        if column >= len(self._text):
            return "the condition ends too early."
        return f"not readable ({message})."

    def _error(self, node: ast.AST, problem: str) -> ConditionError:
        return ConditionError(self._text, getattr(node, "col_offset", 0), problem)

    def _refused(self, node: ast.AST, at: ast.AST | None = None) -> ConditionError:
        what = _REFUSED.get(type(node), f"{type(node).__name__}")
        return self._error(node if at is None else at, f"a condition cannot have {what}.")

    def _deep(self, node: ast.AST, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise self._error(node, f"more than {MAX_DEPTH} parts within parts; make two rules of it.")

    # Conditions ---------------------------------------------------------------------------------------------------

    def _truth(self, node: ast.expr, depth: int) -> _Truth:
        self._deep(node, depth)
        if isinstance(node, ast.BoolOp):
            parts = tuple(self._truth(value, depth + 1) for value in node.values)
            return _all(parts) if isinstance(node.op, ast.And) else _any(parts)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return _not(self._truth(node.operand, depth + 1))
        if isinstance(node, ast.Compare):
            return self._comparison(node, depth)
        if isinstance(node, ast.Call) and self._function(node) == "present":
            return self._present(node)
        self._number(node, depth)  # says what is wrong with it, if something is
        raise self._error(node, "a number where a condition is expected; compare it with something.")

    def _comparison(self, node: ast.Compare, depth: int) -> _Truth:
        for symbol in node.ops:
            if type(symbol) not in _COMPARE:
                raise self._refused(symbol, node)
        terms = [self._number(term, depth + 1) for term in (node.left, *node.comparators)]
        pairs = tuple(
            _compare(_COMPARE[type(symbol)], left, right)
            for symbol, left, right in zip(node.ops, terms, terms[1:], strict=False)
        )
        return pairs[0] if len(pairs) == 1 else _all(pairs)

    def _present(self, node: ast.Call) -> _Truth:
        (argument,) = self._arguments(node, 1, "present(NAME)")
        if isinstance(argument, ast.Attribute):
            kind, name = self._dotted(argument)
            if kind == "setting":
                return lambda view: name in view.settings
        else:
            name = self._signal(argument, "present(NAME)")
        return lambda view: view.values.get(name) is not None

    # Numbers ------------------------------------------------------------------------------------------------------

    def _number(self, node: ast.expr, depth: int) -> _Number:
        self._deep(node, depth)
        if isinstance(node, ast.Constant):
            return _constant(self._literal(node))
        if isinstance(node, ast.Name):
            return self._name(node)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            inner = self._number(node.operand, depth + 1)
            return inner if isinstance(node.op, ast.UAdd) else _negated(inner)
        if isinstance(node, ast.BinOp):
            if type(node.op) not in _ARITHMETIC:
                raise self._refused(node.op, node.right)
            left, right = self._number(node.left, depth + 1), self._number(node.right, depth + 1)
            return _arithmetic(_ARITHMETIC[type(node.op)], left, right, ast.unparse(node))
        if isinstance(node, ast.Call):
            return self._call(node, depth)
        if isinstance(node, ast.BoolOp | ast.Compare | ast.UnaryOp):
            raise self._error(node, "a condition where a number is expected; mind the parentheses.")
        raise self._refused(node)

    def _literal(self, node: ast.Constant) -> float:
        value = node.value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._error(node, f"expected a number, got {value!r}.")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self._error(node, "the number is too large.")
        return number

    def _name(self, node: ast.Name) -> _Number:
        name = node.id
        if name in SIGNALS:
            return _raw(name)
        if name in STATE_NAMES:
            return operator.attrgetter(name)
        if name in self._constants:
            return _constant(float(self._constants[name]))
        if name in ("z", "setting"):
            raise self._error(node, f"{name} needs a name after it, for example {name}.{_EXAMPLES[name]}.")
        if name in FUNCTIONS:
            raise self._error(node, f"{name} is a function; write {name}(...).")
        known = [*SIGNALS, *STATE_NAMES, *self._constants]
        hint = f" A setting is read as setting.{name}." if name in SETTINGS else did_you_mean(name, known)
        raise self._error(node, f"unknown signal {name!r}.{hint}")

    def _attribute(self, node: ast.Attribute) -> _Number:
        kind, name = self._dotted(node)
        if kind == "z":
            return _z(name)
        return lambda view: view.settings.get(name)

    def _dotted(self, node: ast.Attribute) -> tuple[str, str]:
        """Return ``("z", signal)`` or ``("setting", name)``."""
        name, at = node.attr, node.value
        if isinstance(at, ast.Attribute) and at.attr == "mix" and isinstance(at.value, ast.Name):
            name, at = f"mix.{name}", at.value
        head = at.id if isinstance(at, ast.Name) else ""
        if head == "z":
            if name not in SIGNALS:
                raise self._error(node, f"unknown signal {name!r} after z.{did_you_mean(name, SIGNALS)}")
        elif head == "setting":
            if name not in SETTINGS and not name.startswith("mix."):
                raise self._error(node, f"unknown setting {name!r}.{did_you_mean(name, SETTINGS)}")
        else:
            raise self._error(node, "only z.SIGNAL, setting.NAME and setting.mix.SOURCE have a dot.")
        return head, name

    def _call(self, node: ast.Call, depth: int) -> _Number:
        function = self._function(node)
        if function == "present":
            raise self._error(node, "present(...) is a condition, not a number.")
        if function in ("mean", "change", "first"):
            return self._over_recent(node, function)
        if function == "abs":
            (argument,) = self._arguments(node, 1, "abs(x)")
            inner = self._number(argument, depth + 1)
            return lambda view: None if (value := inner(view)) is None else abs(value)
        arguments = self._arguments(node, None, f"{function}(x, y)")
        terms = tuple(self._number(argument, depth + 1) for argument in arguments)
        return _extreme(min if function == "min" else max, terms)

    def _over_recent(self, node: ast.Call, function: str) -> _Number:
        usage = f"{function}(NAME, n)"
        signal, length = self._arguments(node, 2, usage)
        name = self._signal(signal, usage)
        number = self._constants.get(length.id) if isinstance(length, ast.Name) else None
        if isinstance(length, ast.Constant):
            number = self._literal(length)
        most = WINDOW // 2 if function == "change" else WINDOW
        if number is None or number != int(number) or not 1 <= number <= most:
            raise self._error(length, f"{usage}: n must be a whole number in [1, {most}].")
        n = int(number)
        kept = 2 * n if function == "change" else n
        self.needs[name] = max(kept, self.needs.get(name, 0))
        return {"mean": _mean, "change": _change, "first": _first}[function](name, n)

    def _function(self, node: ast.Call) -> str:
        if not isinstance(node.func, ast.Name):
            raise self._error(node, f"only these can be called: {', '.join(FUNCTIONS)}.")
        if node.func.id not in FUNCTIONS:
            raise self._error(node, f"unknown function {node.func.id!r}.{did_you_mean(node.func.id, FUNCTIONS)}")
        return node.func.id

    def _arguments(self, node: ast.Call, count: int | None, usage: str) -> Sequence[ast.expr]:
        wrong = len(node.args) < 2 if count is None else len(node.args) != count
        if wrong or node.keywords or any(isinstance(argument, ast.Starred) for argument in node.args):
            raise self._error(node, f"expected {usage}.")
        return node.args

    def _signal(self, node: ast.expr, usage: str) -> str:
        if not isinstance(node, ast.Name):
            raise self._error(node, f"{usage} is about a signal's raw value: name one, without z. or arithmetic.")
        if node.id not in SIGNALS:
            raise self._error(node, f"unknown signal {node.id!r}.{did_you_mean(node.id, SIGNALS)}")
        return node.id


_EXAMPLES = {"z": "grad_norm", "setting": "learning_rate"}


def _all(parts: Sequence[_Truth]) -> _Truth:
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


def _any(parts: Sequence[_Truth]) -> _Truth:
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


def _not(part: _Truth) -> _Truth:
    def check(view: View) -> bool | None:
        value = part(view)
        return None if value is None else not value

    return check


def _compare(symbol: Callable[[Any, Any], bool], left: _Number, right: _Number) -> _Truth:
    def check(view: View) -> bool | None:
        first = left(view)
        if first is None:
            return None
        second = right(view)
        return None if second is None else symbol(first, second)

    return check


def _constant(value: float) -> _Number:
    return lambda view: value


def _raw(name: str) -> _Number:
    def read(view: View) -> float | None:
        value = view.values.get(name)
        if value is not None and not math.isfinite(value):
            raise UndefinedError(f"{name} is {value}")
        return value

    return read


def _z(name: str) -> _Number:
    return lambda view: None if view.values.get(name) is None else view.z.get(name)


def _negated(inner: _Number) -> _Number:
    return lambda view: None if (value := inner(view)) is None else -value


def _arithmetic(symbol: Callable[[Any, Any], Any], left: _Number, right: _Number, shown: str) -> _Number:
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


def _extreme(pick: Callable[..., float], terms: Sequence[_Number]) -> _Number:
    def calculate(view: View) -> float | None:
        values = []
        for term in terms:
            value = term(view)
            if value is None:
                return None
            values.append(value)
        return pick(values)

    return calculate


def _mean(name: str, n: int) -> _Number:
    def calculate(view: View) -> float | None:
        recent = view.recent[name]
        return None if len(recent) < n else math.fsum(recent[-n:]) / n

    return calculate


def _first(name: str, n: int) -> _Number:
    def calculate(view: View) -> float | None:
        earliest = view.earliest[name]
        return None if len(earliest) < n else math.fsum(earliest[:n]) / n

    return calculate


def _change(name: str, n: int) -> _Number:
    def calculate(view: View) -> float | None:
        recent = view.recent[name]
        if len(recent) < 2 * n:
            return None
        return (math.fsum(recent[-n:]) - math.fsum(recent[-2 * n : -n])) / n

    return calculate
