"""Wording that every layer's errors share: the did-you-mean and number checks."""

from __future__ import annotations

import difflib
import math
import operator
import traceback
from collections.abc import Iterable
from pathlib import Path


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` plus the known names, ready to end an error message."""
    names = sorted(str(name) for name in known)
    close = difflib.get_close_matches(str(given), names, n=1, cutoff=0.5)
    close = close or [name for name in names if name.lower() == str(given).lower()]
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{hint} Known: {', '.join(names) if names else 'none'}."


def require_number(
    name: str,
    value: object,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    low_open: bool = False,
) -> float:
    """Return ``value`` as a float, or raise ``ValueError`` naming the setting and its range.

    Args:
        name: the setting, as the user spells it.
        value: what was given; booleans, strings and NaN are refused.
        low: smallest allowed value.
        high: largest allowed value.
        low_open: whether ``low`` itself is refused.

    Raises:
        ValueError: not a finite number, or outside the range.
    """
    bracket = "(" if low_open else "["
    wanted = f"a number in {bracket}{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, int | float):
        if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
            return require_number(name, value.item(), low=low, high=high, low_open=low_open)
        raise ValueError(f"{name}: expected {wanted}, got {value!r} ({type(value).__name__}).")
    try:
        number = float(value) + 0.0  # -0.0 becomes 0.0: equal settings must have equal hashes
    except OverflowError:  # an int beyond the largest float
        number = math.inf
    if not math.isfinite(number) or number < low or number > high or (low_open and number == low):
        raise ValueError(f"{name}: expected {wanted}, got {value!r}.")
    return number


def require_integer(name: str, value: object, *, low: int, high: int) -> int:
    """Return ``value`` as an int, or raise ``ValueError`` naming the setting and its range."""
    try:
        # `operator.index` where `int` would cut: arrays and tensors have `__index__` whatever they hold
        number = None if isinstance(value, bool) or _holds_truth(value) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None:
        raise ValueError(f"{name}: expected an integer in [{low}, {high}], got {value!r} ({type(value).__name__}).")
    if not low <= number <= high:
        raise ValueError(f"{name}: expected an integer in [{low}, {high}], got {number}.")
    return number


def _holds_truth(value: object) -> bool:
    """Whether an array or tensor holds a boolean, which `operator.index` takes for 0 or 1."""
    return str(getattr(value, "dtype", "")) in ("bool", "torch.bool")


def first_line(error: BaseException, limit: int = 300) -> str:
    """Return ``"Type: message"``, the first line only; an exception without a message gives its type alone."""
    try:
        text = str(error).strip()
    except Exception:  # a person's exception may fail to say what it is
        text = ""
    return f"{type(error).__name__}: {text.splitlines()[0]}"[:limit] if text else type(error).__name__


def where_raised(error: BaseException) -> str:
    """Return an exception in one line, with the file and line that raised it: ``KeyError: 'x' (task.py, line 12)``."""
    text = first_line(error, 200)
    if isinstance(error, SyntaxError) and error.filename:
        return f"{text} ({Path(error.filename).name}, line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else text
