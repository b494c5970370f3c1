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
from .closures import (
    Holds,
    Number,
    Truth,
    View,
    all_hold,
    all_of,
    any_holds,
    any_of,
    arithmetic,
    change_of_mean,
    comparison,
    comparison_holds,
    comparison_with_constant_holds,
    constant,
    extreme,
    mean_of_first,
    mean_of_last,
    multiple,
    negated,
    negation,
    raw_signal,
    signal_comparison_holds,
    z_score,
)

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


class Condition:
    """A compiled condition.

    Args:
        text: the condition.
        constants: names that stand for numbers.

    Attributes:
        text: as given, without surrounding blanks.
        needs: signal -> how many recent values a `View` has to keep for it.
        holds: returns whether it is true at a view; raises as `check`, but looks no further than it has to.

    Raises:
        ConditionError: it cannot be read; says where.
    """

    def __init__(self, text: str, constants: Mapping[str, float] | None = None) -> None:
        if not isinstance(text, str):
            raise ValueError(f"expected a condition such as 'z.grad_norm > 3', got {text!r}.")
        self.text = re.sub(r"\s", " ", text).strip()
        compiler = _Compiler(self.text, constants or {})
        self._check, self.holds = compiler.condition()
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

    def condition(self) -> tuple[Truth, Holds]:
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
        return self._truth(body, 1), self._holds(body, 1)

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

    def _truth(self, node: ast.expr, depth: int) -> Truth:
        self._deep(node, depth)
        if isinstance(node, ast.BoolOp):
            parts = tuple(self._truth(value, depth + 1) for value in node.values)
            return all_of(parts) if isinstance(node.op, ast.And) else any_of(parts)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return negation(self._truth(node.operand, depth + 1))
        if isinstance(node, ast.Compare):
            return self._comparison(node, depth)
        if isinstance(node, ast.Call) and self._function(node) == "present":
            return self._present(node)
        self._number(node, depth)  # says what is wrong with it, if something is
        raise self._error(node, "a number where a condition is expected; compare it with something.")

    def _comparison(self, node: ast.Compare, depth: int) -> Truth:
        for symbol in node.ops:
            if type(symbol) not in _COMPARE:
                raise self._refused(symbol, node)
        pairs = tuple(comparison(*pair) for pair in self._pairs(node, depth))
        return pairs[0] if len(pairs) == 1 else all_of(pairs)

    def _pairs(self, node: ast.Compare, depth: int) -> list[tuple[Callable[[Any, Any], bool], Number, Number]]:
        terms = [self._number(term, depth + 1) for term in (node.left, *node.comparators)]
        symbols = [_COMPARE[type(symbol)] for symbol in node.ops]
        return list(zip(symbols, terms, terms[1:], strict=False))

    def _holds(self, node: ast.expr, depth: int) -> Holds:
        """Return what says whether an expression is true, without telling false from unknown.

        A rule asks no more than that, between two steps of training, when nothing of it is in the processor's caches:
        the fewer closures are called, the better.
        """
        if isinstance(node, ast.BoolOp):
            parts = tuple(self._holds(value, depth + 1) for value in node.values)
            return all_hold(parts) if isinstance(node.op, ast.And) else any_holds(parts)
        if isinstance(node, ast.Compare):
            pairs = tuple(self._pair_holds(node, depth))
            return pairs[0] if len(pairs) == 1 else all_hold(pairs)
        truth = self._truth(node, depth)
        return lambda view: truth(view) is True

    def _pair_holds(self, node: ast.Compare, depth: int) -> list[Holds]:
        terms = [node.left, *node.comparators]
        holds = []
        for (symbol, left, right), first, second in zip(self._pairs(node, depth), terms, terms[1:], strict=False):
            value = self._value(second)
            if value is None:
                holds.append(comparison_holds(symbol, left, right))
            elif isinstance(first, ast.Name) and first.id in SIGNALS:
                holds.append(signal_comparison_holds(symbol, first.id, value))
            else:
                holds.append(comparison_with_constant_holds(symbol, left, value))
        return holds

    def _value(self, node: ast.expr) -> float | None:
        """Return the number that a part of the text stands for; None when it depends on what is seen."""
        if isinstance(node, ast.Constant):
            return self._literal(node)
        if isinstance(node, ast.Name) and node.id in self._constants:
            return float(self._constants[node.id])
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            inner = self._value(node.operand)
            return None if inner is None else -inner
        return None

    def _present(self, node: ast.Call) -> Truth:
        (argument,) = self._arguments(node, 1, "present(NAME)")
        if isinstance(argument, ast.Attribute):
            kind, name = self._dotted(argument)
            if kind == "setting":
                return lambda view: name in view.settings
        else:
            name = self._signal(argument, "present(NAME)")
        return lambda view: view.values.get(name) is not None

    # Numbers ------------------------------------------------------------------------------------------------------

    def _number(self, node: ast.expr, depth: int) -> Number:
        self._deep(node, depth)
        if isinstance(node, ast.Constant):
            return constant(self._literal(node))
        if isinstance(node, ast.Name):
            return self._name(node)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            inner = self._number(node.operand, depth + 1)
            return inner if isinstance(node.op, ast.UAdd) else negated(inner)
        if isinstance(node, ast.BinOp):
            if type(node.op) not in _ARITHMETIC:
                raise self._refused(node.op, node.right)
            left, right = self._number(node.left, depth + 1), self._number(node.right, depth + 1)
            value = self._value(node.left)
            if value is not None and isinstance(node.op, ast.Mult):
                return multiple(value, right, ast.unparse(node))
            return arithmetic(_ARITHMETIC[type(node.op)], left, right, ast.unparse(node))
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

    def _name(self, node: ast.Name) -> Number:
        name = node.id
        if name in SIGNALS:
            return raw_signal(name)
        if name in STATE_NAMES:
            return operator.attrgetter(name)
        if name in self._constants:
            return constant(float(self._constants[name]))
        if name in ("z", "setting"):
            raise self._error(node, f"{name} needs a name after it, for example {name}.{_EXAMPLES[name]}.")
        if name in FUNCTIONS:
            raise self._error(node, f"{name} is a function; write {name}(...).")
        known = [*SIGNALS, *STATE_NAMES, *self._constants]
        hint = f" A setting is read as setting.{name}." if name in SETTINGS else did_you_mean(name, known)
        raise self._error(node, f"unknown signal {name!r}.{hint}")

    def _attribute(self, node: ast.Attribute) -> Number:
        kind, name = self._dotted(node)
        if kind == "z":
            return z_score(name)
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

    def _call(self, node: ast.Call, depth: int) -> Number:
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
        return extreme(min if function == "min" else max, terms)

    def _over_recent(self, node: ast.Call, function: str) -> Number:
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
        return {"mean": mean_of_last, "change": change_of_mean, "first": mean_of_first}[function](name, n)

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
