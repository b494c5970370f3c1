"""Conditions are parsed by a whitelist, read signals three-valued, and say where they are wrong."""

from __future__ import annotations

import ast
import operator
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain_gym.meta_policies.controllers.closures import View
from posttrain_gym.meta_policies.controllers.expressions import Condition, ConditionError
from tests.control_states import SETTINGS, state


def check(text: str, constants: dict[str, float] | None = None, **kwargs: Any) -> bool | None:
    """Return what the condition comes to; that it `holds` must agree with it."""
    condition = Condition(text, constants)
    view = View(condition.needs).look(state(**kwargs))
    truth = condition.check(view)
    assert condition.holds(view) is (truth is True)
    return truth


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("loss > 2", True),
        ("loss > 3", False),
        ("loss >= 3 and grad_norm < 2", True),
        ("loss > 3 or grad_norm == 1.5", True),
        ("not loss > 3", True),
        ("loss != 3 or not (grad_norm <= 1.5)", False),
        ("0 < grad_norm < loss < 4", True),
        ("0 < grad_norm < 1 < loss", False),
        ("loss - 2 * grad_norm == 0", True),
        ("-loss / 2 < -1.4", True),
        ("+loss == 3", True),
        ("abs(0 - loss) == 3 and min(loss, grad_norm, 2) == 1.5 and max(loss, grad_norm) == 3", True),
        ("z.grad_norm > 3", True),
        ("z.loss > 0", False),
        ("setting.learning_rate == 0.001", True),
        ("setting.mix.code == 0.25", True),
        ("step == 60 and steps == 100 and progress >= 0.6", True),
        ("loss > 0.5 * limit", True),
        ("present(loss) and not present(kl)", True),
        ("present(setting.kl_coef) or present(z.kl)", False),
        ("  loss\n   > 2  ", True),
        ("loss > 1_0e-1", True),
    ],
)
def test_a_condition_means_what_it_says(text: str, expected: bool) -> None:
    got = check(
        text,
        {"limit": 5.0},
        step=60,
        loss=3.0,
        grad_norm=1.5,
        z={"grad_norm": 3.5},
        settings={**SETTINGS, "mix.code": 0.25},
    )
    assert got is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kl > 0", None),
        ("kl < 0", None),
        ("kl == 0", None),
        ("not kl > 0", None),
        ("z.kl > -1", None),  # the z-score of what is absent is 0, but not a measured 0
        ("setting.kl_coef >= 0", None),
        ("kl + 1 > 0", None),
        ("0 < kl < 1", None),
        ("0 < loss < kl", None),
        ("5 < loss < kl", False),
        ("abs(kl) >= 0", None),
        ("max(kl, loss) > 0", None),
        ("kl > 0 and loss > 3", False),
        ("loss > 3 and kl > 0", False),
        ("kl > 0 and loss > 2", None),
        ("kl > 0 or loss > 2", True),
        ("loss > 2 or kl > 0", True),
        ("kl > 0 or loss > 3", None),
        ("not (kl > 0 and loss > 3)", True),
    ],
)
def test_what_is_absent_makes_a_condition_unknown_and_never_stands_for_0(text: str, expected: bool | None) -> None:
    assert check(text, loss=3.0) is expected


def test_mean_and_change_are_over_the_last_values_that_were_there() -> None:
    mean, change = Condition("mean(loss, 3) == 4"), Condition("change(loss, 2) == -3")
    view = View({**mean.needs, **change.needs})
    assert mean.needs == {"loss": 3} and change.needs == {"loss": 4}
    seen = []
    for loss in (8.0, 6.0, None, 4.0, 2.0, 6.0):
        view.look(state(loss=loss))
        seen.append((mean.check(view), change.check(view)))
    # (8, 6, 4, 2): the mean of the last three is 4, that of the last two 4 less than of the two before
    assert seen == [(None, None), (None, None), (None, None), (False, None), (True, False), (True, False)]
    assert Condition("change(loss, 2) == -1").check(view) is True  # (2 + 6) / 2 - (6 + 4) / 2
    for loss in range(1000):
        view.look(state(loss=float(loss)))
    assert Condition("mean(loss, 3) == 998").check(view) is True
    assert len(view.recent["loss"]) <= 8  # bounded, however long the round


def test_first_is_over_the_first_values_that_were_there() -> None:
    condition = Condition("loss > 1.5 * first(loss, 2)")
    assert condition.needs == {"loss": 2}
    view = View(condition.needs)
    seen = []
    for loss in (None, 3.0, 1.0, 3.0, 4.0):
        seen.append(condition.check(view.look(state(loss=loss))))
    assert seen == [None, None, False, False, True]  # the first two are 3 and 1: 1.5 times their mean is 3
    for _ in range(1000):
        view.look(state(loss=9.0))
    assert view.earliest["loss"] == [3.0, 1.0]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("loss / grad_norm > 1", "division by zero in loss / grad_norm"),
        ("1 / (loss - loss) > 1", "division by zero"),
        ("loss * 1e308 * 10 > 1", "is inf"),
        ("reward > 0", "reward is nan"),
        ("loss > 1 and kl / 0 > 1", "division by zero in kl / 0"),
    ],
)
def test_what_comes_to_no_number_is_an_arithmetic_error(text: str, problem: str) -> None:
    with pytest.raises(ArithmeticError, match=problem):
        check(text, loss=3.0, grad_norm=0.0, kl=1.0, reward=float("nan"))


@pytest.mark.parametrize(
    ("text", "column", "problem"),
    [
        ("z.grad_nrm > 3", 1, r"unknown signal 'grad_nrm' after z\. Did you mean 'grad_norm'\?"),
        ("loss > 1 and los_slope > 0", 14, r"unknown signal 'los_slope'\. Did you mean 'loss_slope'\?"),
        ("learning_rate > 1", 1, r"unknown signal 'learning_rate'\. A setting is read as setting\.learning_rate"),
        ("setting.learning_rte > 1", 1, r"unknown setting 'learning_rte'\. Did you mean 'learning_rate'\?"),
        ("loss.real > 1", 1, "only z.SIGNAL, setting.NAME and setting.mix.SOURCE have a dot"),
        ("z > 1", 1, "z needs a name after it, for example z.grad_norm"),
        ("means(loss, 3) > 1", 1, r"unknown function 'means'\. Did you mean 'mean'\?"),
        ("mean(z.loss, 3) > 1", 6, "is about a signal's raw value"),
        ("mean(loss, 0) > 1", 12, r"n must be a whole number in \[1, 200\]"),
        ("change(loss, 101) > 1", 14, r"n must be a whole number in \[1, 100\]"),
        ("mean(loss, 2.5) > 1", 12, "n must be a whole number"),
        ("mean(loss) > 1", 1, r"expected mean\(NAME, n\)"),
        ("max(loss) > 1", 1, r"expected max\(x, y\)"),
        ("loss", 1, "a number where a condition is expected"),
        ("loss > 1 and grad_norm", 14, "a number where a condition is expected"),
        ("(loss > 1) + 1 > 0", 2, "a condition where a number is expected"),
        ("loss > (1 < 2)", 9, "a condition where a number is expected"),
        ("present(loss) > 0", 1, r"present\(\.\.\.\) is a condition"),
        ("loss = 1", 6, "one `=` compares nothing; write `==`"),
        ("loss > 1 && kl > 1", 11, "write `and` and `or` in words"),
        ("loss >", 7, "the condition ends too early"),
        ("", 1, "the condition is empty"),
        ("loss ** 2 > 1", 9, r"cannot have a power \(\*\*\)"),
        ("loss % 2 > 1", 8, r"cannot have a remainder"),
        ("loss if kl > 1 else kl > 2", 1, "cannot have an if-else"),
        ("(lambda: 1)() > 0", 1, "only these can be called"),
        ("loss > True", 8, "expected a number, got True"),
        ("loss > 1j", 8, "expected a number, got 1j"),
        ("loss > 1e999", 8, "the number is too large"),
        ("loss > 'a'", 8, "has no meaning in a condition"),
        ("loss > 1 # or not", 10, "'#' has no meaning in a condition"),
        ("ℓoss > 1", 1, "'ℓ' has no meaning in a condition"),
        ("loss[0] > 1", 5, r"'\[' has no meaning in a condition"),
        ("loss is 1", 1, "cannot have is; compare with =="),
        ("__import__(loss) > 1", 1, "unknown function '__import__'"),
        ("loss.__class__ > 1", 1, "only z.SIGNAL"),
    ],
)
def test_an_error_points_at_the_character(text: str, column: int, problem: str) -> None:
    with pytest.raises(ConditionError, match=problem) as caught:
        Condition(text)
    assert str(caught.value).startswith(f"character {column}: ")
    shown, caret = str(caught.value).splitlines()[-2:]
    assert shown == f"  {text}" and caret == " " * (column + 1) + "^"


@pytest.mark.parametrize(
    "text",
    [
        "loss > 1 and " * 100 + "loss > 1",
        "(" * 240 + "loss > 1" + ")" * 240,
        "not " * 120 + "loss > 1",
        "-" * 480 + "loss > 1",
        "loss" + " + 1" * 100 + " > 1",
        "9" * 490 + " > 1",
        "loss > " + "abs(" * 60 + "loss" + ")" * 60,
        "loss > 1\x00",
    ],
)
def test_a_hostile_text_is_refused_at_once(text: str) -> None:
    clock = time.perf_counter()
    with pytest.raises(ConditionError):
        Condition(text)
    assert time.perf_counter() - clock < 1.0


@pytest.mark.parametrize("text", [None, 3, True, ["loss > 1"]])
def test_a_condition_is_text(text: Any) -> None:
    with pytest.raises(ValueError, match="expected a condition such as"):
        Condition(text)


_NUMBERS = st.recursive(
    st.sampled_from(["loss", "kl", "reward", "z.loss", "z.kl", "setting.gamma", "step", "limit"])
    | st.integers(-3, 3).map(str),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda parts: f"({' '.join(parts)})"),
        st.tuples(inner, inner).map(lambda pair: f"min({pair[0]}, max({pair[1]}, 1))"),
        inner.map(lambda text: f"abs(-{text})"),
    ),
    max_leaves=5,
)
_CONDITIONS = st.recursive(
    st.tuples(_NUMBERS, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), _NUMBERS).map(" ".join)
    | st.sampled_from(["present(kl)", "mean(loss, 2) > 0", "0 < kl < loss", "change(kl, 1) >= 0"]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(lambda parts: f"({' '.join(parts)})"),
        inner.map(lambda text: f"not ({text})"),
    ),
    max_leaves=5,
)


@settings(max_examples=100, deadline=None)
@given(_CONDITIONS, st.sampled_from([None, -2.0, 0.0, 0.5]), st.sampled_from([None, 0.0, 3.0]))
def test_what_holds_is_what_is_true_with_three_values(text: str, kl: float | None, loss: float | None) -> None:
    if len(text) > 500:
        return
    condition = Condition(text, {"limit": 0.5})
    view = View(condition.needs)
    values = {"kl": kl, "loss": loss, "reward": 1.0}
    for step in (1, 2, 3):
        view.look(state(step, kl=kl, loss=loss, reward=1.0))
    try:
        truth, expected = condition.check(view), _truth_by_python(text, values)
    except ArithmeticError:
        return  # what stops early may not meet what has no value
    assert truth is expected
    assert condition.holds(view) is (truth is True)


def _truth_by_python(text: str, values: dict[str, float | None]) -> bool | None:
    """Return what the condition comes to when each comparison is worked out on the syntax tree by other means."""

    def number(node: ast.AST) -> float | None:
        if isinstance(node, ast.Constant):
            return float(node.value)  # type: ignore[arg-type]
        if isinstance(node, ast.Name):
            return {"limit": 0.5, "step": 3.0}.get(node.id, values.get(node.id))
        if isinstance(node, ast.Attribute):
            head = ast.unparse(node.value)
            if head == "z":
                return None if values[node.attr] is None else 0.0
            return SETTINGS.get(node.attr)
        if isinstance(node, ast.UnaryOp):
            inner = number(node.operand)
            return None if inner is None else -inner
        if isinstance(node, ast.BinOp):
            pair = [number(node.left), number(node.right)]
            if pair[0] is None or pair[1] is None:
                return None
            symbol = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "truediv"}[type(node.op)]
            return float(getattr(operator, symbol)(*pair))
        assert isinstance(node, ast.Call)
        name = ast.unparse(node.func)
        if name in ("mean", "change"):  # the values are the same at each look
            value = values[ast.unparse(node.args[0])]
            return None if value is None else value if name == "mean" else 0.0
        terms = [number(argument) for argument in node.args]
        known = [term for term in terms if term is not None]
        if len(known) < len(terms):
            return None
        return min(known) if name == "min" else max(known) if name == "max" else abs(known[0])

    def truth(node: ast.AST) -> bool | None:
        if isinstance(node, ast.BoolOp):
            parts = [truth(value) for value in node.values]
            decisive = isinstance(node.op, ast.Or)
            return decisive if decisive in parts else None if None in parts else not decisive
        if isinstance(node, ast.UnaryOp):
            inner = truth(node.operand)
            return None if inner is None else not inner
        if isinstance(node, ast.Call):
            return values["kl"] is not None
        assert isinstance(node, ast.Compare)
        terms = [number(term) for term in (node.left, *node.comparators)]
        parts = []
        for symbol, left, right in zip(node.ops, terms, terms[1:], strict=False):
            names = {"Lt": "lt", "LtE": "le", "Gt": "gt", "GtE": "ge", "Eq": "eq", "NotEq": "ne"}
            known = left is not None and right is not None
            parts.append(bool(getattr(operator, names[type(symbol).__name__])(left, right)) if known else None)
        return False if False in parts else None if None in parts else True

    return truth(ast.parse(text, mode="eval").body)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="lossklz.mean(),3 <>=!+-*/andortif[]{}#'\\\n", max_size=40))
def test_any_text_is_read_or_refused_with_a_place(text: str) -> None:
    try:
        Condition(text)
    except ConditionError as error:
        assert 0 <= error.column <= len(text) and "\n  " in str(error)


def test_settings_and_signals_are_read_at_each_look() -> None:
    condition = Condition("setting.learning_rate > 0.5 and loss > 1")
    view = View(condition.needs)
    assert condition.check(view.look(state(loss=2.0))) is False
    assert condition.check(view.look(state(loss=2.0, settings={"learning_rate": 0.6}))) is True
    assert SETTINGS["learning_rate"] == 1e-3
