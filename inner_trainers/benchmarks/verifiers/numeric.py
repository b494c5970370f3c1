"""Compares numbers by value: plain ones by themselves, everything else through math-verify."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

from ...messages import require_number
from .base import Versioned, require_bool, require_columns
from .extraction import LONGEST, NUMBER, Extraction, last_number

LONGEST_NUMBER = 400
"""Characters of a number that are compared; a longer one is no answer."""

LARGEST_EXPONENT = 400
"""Powers of ten that are written out; numbers beyond are no answers."""

LONGEST_EXPRESSION = 120
"""Characters of an expression that is given to math-verify; a longer one is no answer."""

_PLAIN = re.compile(r"[-+−]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?(?:[eE][-+]?\d+)?")
_FRACTION = re.compile(r"([-+−]?\d+)\s*/\s*(\d+)")
_UNBOUNDED = re.compile(
    r"(?:\^|\*\*)\s*\{?\s*\(?\s*-?\d{3,}|(?:\^|\*\*).*(?:\^|\*\*)|!|[)}\]]\s*(?:\^|\*\*)\s*\{?\s*\(?\s*-?\d{2,}"
    r"|\\(?:binom|choose|sum|prod|int|iint|oint|lim|Gamma|zeta|bmod|pmod)\b|mod\b"
)
"""Powers of powers, factorials, large exponents, sums and the like: evaluating them may not end."""

_WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}|\binf|\\infty|oo\b")
_NUMBER_AT_ALL = re.compile(r"\d|\\pi\b|(?<![A-Za-z\\])e(?![A-Za-z])")
_DEEPEST = 8
"""Brackets within brackets of an expression that is read."""
_LEADS_ON = re.compile(r"(?<![\w.])[-+−]?\d{1,20}(?:\.\d{1,20})?\s{0,2}(?:/|\^|\*\*)\s{0,2}$")
"""What stands before a number that is a denominator or an exponent."""

_UNIT = re.compile(r"(?<=\d)\s*(?:%|°|[A-Za-z]{1,12}\.?)$")


@dataclass(frozen=True)
class Numeric(Versioned):
    """Right when the extracted number equals the row's ``answer`` within a tolerance.

    Equality is that of values: ``7``, ``007``, ``7.0`` and ``14/2`` are one answer (`Exact` keeps them apart).
    Plain numbers and fractions are compared exactly; what is neither (LaTeX, roots, percentages) goes through
    math-verify, on bounded text. NaN, infinities, truth values and powers too large to write out are never right.

    Attributes:
        tolerance: largest difference that counts as equal, at least 0.
        relative: largest difference as a share of the right answer, in [0, 1].
        extract: how the number is found, see `Extraction`.
        percent: whether ``50 %`` is 0.5; else the sign is taken for a unit and left out.
        units: whether a unit after the number is passed over.
        latex: whether expressions go through math-verify; else only plain numbers and fractions can be right.
        answer: the column with the right answer: a number, or text that is one.
    """

    tolerance: float = 0.0
    relative: float = 0.0
    extract: str = "last_number"
    percent: bool = False
    units: bool = True
    latex: bool = True
    answer: str = "answer"
    _extraction: Extraction = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: a setting outside its range, or an unknown way to extract.
        """
        object.__setattr__(self, "tolerance", require_number("tolerance", self.tolerance, low=0, high=1e300))
        object.__setattr__(self, "relative", require_number("relative", self.relative, low=0, high=1))
        for name in ("percent", "units", "latex"):
            require_bool(name, getattr(self, name))
        object.__setattr__(self, "_extraction", Extraction(self.extract))

    @property
    def columns(self) -> tuple[str, ...]:
        """The column with the answer."""
        return (self.answer,)

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Refuse a row whose answer is no number; see `Verifier.check_row`."""
        require_columns(row, self.columns)
        if self._value(row[self.answer]) is None and self._parsed(row[self.answer]) is None:
            raise ValueError(
                f"column {self.answer!r} must be a number, or text that is one, got {row[self.answer]!r}; answers that "
                "are words compare with the verifier exact."
            )

    def score(self, row: Mapping[str, Any], completion: str) -> float:
        """Return 1.0 for an equal number, else 0.0."""
        found = self._found(completion)
        if not found:
            return 0.0
        right, given = self._value(row[self.answer]), self._value(found)
        if right is not None and given is not None:
            return float(self._near(right, given))
        return float(self._equal_expressions(row[self.answer], found))

    def well_formed(self, row: Mapping[str, Any], completion: str) -> bool:
        """Return whether the completion is a number and nothing else, as far as the extraction sees."""
        found = self._found(completion)
        return bool(found) and self._value(found) is not None

    def _found(self, completion: str) -> str | None:
        """Return the number in a completion; the last one comes with its denominator, exponent or percent sign."""
        if self.extract == "last_number":
            return last_expression(completion[-LONGEST:])
        return self._extraction(completion)

    def _near(self, right: Fraction, given: Fraction) -> bool:
        allowed = max(Fraction(self.tolerance), Fraction(self.relative) * abs(right))
        return abs(right - given) <= allowed

    def _value(self, number: object) -> Fraction | None:
        """Return the exact value of a plain number or fraction; None for anything else."""
        if isinstance(number, bool) or number is None:
            return None
        if isinstance(number, int):
            return Fraction(number)
        if isinstance(number, float):
            return Fraction(repr(number)) if abs(number) < 1e300 else None  # NaN compares false
        text = str(number).strip().strip("$").strip()
        if len(text) > LONGEST_NUMBER:
            return None
        factor = Fraction(1)
        if text.endswith(("%", "\\%")):
            text, factor = text.rstrip("\\%").strip(), Fraction(1, 100) if self.percent else factor
        elif self.units:
            text = _UNIT.sub("", text)
        text = text.rstrip(".") if text.endswith(".") and text.count(".") == 1 else text
        quotient = _FRACTION.fullmatch(text)
        if quotient is not None and int(quotient[2]) != 0:
            return Fraction(int(quotient[1].replace("−", "-")), int(quotient[2])) * factor
        if not text or not any(mark.isdigit() for mark in text) or _PLAIN.fullmatch(text) is None:
            return None
        plain = text.replace("−", "-").replace(",", "")
        exponent = re.search(r"[eE]([-+]?\d+)$", plain)
        if exponent is not None and (len(exponent[1]) > 5 or abs(int(exponent[1])) > LARGEST_EXPONENT):
            return None
        try:
            return Fraction(Decimal(plain)) * factor
        except (InvalidOperation, ValueError):
            return None

    def _parsed(self, text: object) -> list[Any] | None:
        """Return what math-verify reads in an expression; None when it reads nothing, or the text is out of bounds."""
        if not self.latex or not isinstance(text, str) or not text.strip() or len(text) > LONGEST_EXPRESSION:
            return None
        # of words, the parser makes products of their letters, so that "dog" would equal "god"
        if _UNBOUNDED.search(text) or _WORDS.search(text) or not _NUMBER_AT_ALL.search(text) or _depth(text) > _DEEPEST:
            return None
        math_verify = _math_verify()
        wrapped = text if "$" in text or "\\boxed" in text else f"${text}$"
        try:
            # no timeout of its own: it is built on signals, which only the main thread gets
            parsed = math_verify.parse(wrapped, parsing_timeout=None)
            return list(parsed) or list(math_verify.parse(text, parsing_timeout=None)) or None
        except Exception:  # it parses what a model wrote, and raises what its parser raises
            return None

    def _equal_expressions(self, right: object, given: str) -> bool:
        expected, found = self._parsed(str(right)), self._parsed(given)
        if not expected or not found:
            return False
        try:
            if _math_verify().verify(expected, found, timeout_seconds=None):
                return True
            values = [float(side[0].evalf()) for side in (expected, found)]
        except Exception:
            return False
        if not all(abs(value) < 1e300 for value in values):
            return False
        return (self.tolerance > 0 or self.relative > 0) and self._near(*(Fraction(repr(value)) for value in values))


def _depth(text: str) -> int:
    depth = deepest = 0
    for mark in text:
        depth += (mark in "({[") - (mark in ")}]")
        deepest = max(deepest, depth)
    return deepest


def last_expression(text: str) -> str | None:
    """Return the last number of a text with what belongs to it: a fraction, a power, a percent sign."""
    found = None
    for match in NUMBER.finditer(text):
        found = match
    if found is None:
        return None
    before = _LEADS_ON.search(text[max(0, found.start() - 60) : found.start()])
    percent = re.match(r"\s{0,2}\\?%", text[found.end() : found.end() + 4])
    number = last_number(text) if before is None else before.group() + found.group()
    return f"{number}%" if percent else number


def _math_verify() -> Any:
    try:
        import math_verify
    except ModuleNotFoundError as error:
        raise ImportError(
            "numeric: expressions are compared with math-verify, which is not installed; run "
            "`pip install 'posttrain-gym[benchmarks]'`, or set latex to false for plain numbers."
        ) from error
    for part in ("parser", "grader"):  # each warns that it has no timeout; the text is bounded here instead
        logging.getLogger(f"math_verify.{part}").setLevel(logging.ERROR)
    return math_verify
