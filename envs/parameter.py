"""One knob of a recipe and its coordinate in [-1, 1]: ranges, scales, choices; single values and arrays of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..inner_trainers.messages import did_you_mean, require_number

SCALES = ("linear", "log")
SIGNIFICANT_DIGITS = 4
"""Digits that the values of a continuous knob have."""

Value = float | int | bool | str


@dataclass(frozen=True)
class Parameter:
    """One knob of the recipe, mapped to a coordinate in [-1, 1].

    Attributes:
        low: smallest value.
        high: largest value.
        scale: ``"linear"`` or ``"log"``.
        integer: whether values are rounded to integers.
        choices: the only values there are: numbers or truth values in ascending order, or names in any order; ``low``,
            ``high`` and ``scale`` are then unused.
    """

    low: float = 0.0
    high: float = 1.0
    scale: str = "linear"
    integer: bool = False
    choices: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        """Check the range.

        Raises:
            ValueError: an empty range, a log scale that touches 0, or choices out of order.
        """
        if self.choices:
            object.__setattr__(self, "choices", tuple(self.choices))
            names = sum(isinstance(choice, str) for choice in self.choices)
            if names not in (0, len(self.choices)):
                raise ValueError(f"parameter: choices must be names or numbers, not both, got {self.choices}.")
            if names and len(set(self.choices)) < names:
                raise ValueError(f"parameter: choices must not repeat, got {self.choices}.")
            if not names:
                for choice in self.choices:
                    if not isinstance(choice, bool):
                        require_number("parameter.choices", choice)
                if list(self.choices) != sorted(set(self.choices)):
                    raise ValueError(f"parameter: choices must ascend without repeats, got {self.choices}.")
            return
        require_number("parameter.low", self.low)
        require_number("parameter.high", self.high)
        if self.scale not in SCALES:
            raise ValueError(f"parameter.scale: unknown {self.scale!r}.{did_you_mean(self.scale, SCALES)}")
        if self.low >= self.high:
            raise ValueError(f"parameter: low must be below high, got [{self.low}, {self.high}].")
        if self.scale == "log" and self.low <= 0:
            raise ValueError(f"parameter: a log scale needs low > 0, got {self.low}.")

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types: the choices, or the range and its scale."""
        if self.choices:
            return {"choices": list(self.choices)}
        return {"low": self.low, "high": self.high, "scale": self.scale, "integer": self.integer}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Parameter:
        """Read `to_dict` back.

        Raises:
            ValueError: an unknown key, or what the parameter itself refuses.
        """
        known = [entry.name for entry in fields(cls)]
        for key in data:
            if key not in known:
                raise ValueError(f"parameter: unknown key {key!r}.{did_you_mean(str(key), known)}")
        return cls(**{**data, "choices": tuple(data.get("choices", ()))})

    @cached_property
    def named(self) -> bool:
        """Whether its choices are names."""
        return bool(self.choices) and isinstance(self.choices[0], str)

    @cached_property
    def _span(self) -> float:
        """Natural logarithm of high over low, or high less low."""
        return math.log(self.high / self.low) if self.scale == "log" else self.high - self.low

    @cached_property
    def _positions(self) -> dict[Any, int]:
        return {choice: index for index, choice in enumerate(self.choices)}

    @cached_property
    def _choice_array(self) -> np.ndarray:
        return np.arange(len(self.choices)) if self.named else np.array(self.choices)

    def narrowed(self, low: float, high: float) -> Parameter:
        """Return this knob within ``low`` and ``high`` too, as a probe suggests; one value becomes a single choice.

        Raises:
            ValueError: none of its values is in that range.
        """
        if self.choices:
            kept = tuple(choice for choice in self.choices if low <= choice <= high)
            if not kept:
                raise ValueError(f"parameter: none of the choices {list(self.choices)} is in [{low:g}, {high:g}].")
            return Parameter(choices=kept)
        below, above = max(self.low, low), min(self.high, high)
        if self.integer:
            below, above = math.ceil(below), math.floor(above)
        if below > above:
            raise ValueError(
                f"parameter: [{self.low:g}, {self.high:g}] and [{low:g}, {high:g}] have no value in common."
            )
        return Parameter(choices=(below,)) if below == above else replace(self, low=below, high=above)

    def decode(self, coordinate: float) -> Any:
        """Return the value at a coordinate in [-1, 1], on the grid: integers, choices, or 4 significant digits."""
        share = (min(1.0, max(-1.0, coordinate)) + 1.0) / 2.0
        if self.choices:
            return self.choices[min(int(share * len(self.choices)), len(self.choices) - 1)]
        value = self.low * math.exp(self._span * share) if self.scale == "log" else self.low + self._span * share
        if self.integer:
            return int(min(self.high, max(self.low, round(value))))
        return min(self.high, max(self.low, _rounded(value)))

    def decode_many(self, coordinates: np.ndarray) -> np.ndarray:
        """Return `decode` of each coordinate; where choices are names, their positions.

        Args:
            coordinates: ``(n,)`` in [-1, 1].

        Returns:
            ``(n,)`` float64, int64 or bool.
        """
        share = (np.clip(coordinates, -1.0, 1.0).astype(np.float64) + 1.0) / 2.0
        if self.choices:
            count = len(self.choices)
            result: np.ndarray = self._choice_array[np.minimum((share * count).astype(np.int64), count - 1)]
            return result
        value = self.low * np.exp(self._span * share) if self.scale == "log" else self.low + self._span * share
        if self.integer:
            result = np.clip(np.rint(value), self.low, self.high).astype(np.int64)
            return result
        result = np.clip(_rounded_many(value), self.low, self.high)
        return result

    def values(self) -> Sequence[Any]:
        """Return every value on the grid of a knob with choices or integers; nothing for a continuous one."""
        if self.choices:
            return self.choices
        return range(math.ceil(self.low), math.floor(self.high) + 1) if self.integer else ()

    def on_grid(self, value: float) -> Any:
        """Return the grid value nearest to a number within the range, for a knob without choices."""
        number = round(value) if self.integer else _rounded(value)
        return type(number)(min(self.high, max(self.low, number)))

    def encode(self, value: Any) -> float:
        """Return the coordinate of a value; `decode` gives the value back when it lies on the grid.

        Raises:
            ValueError: a value that is not among the choices or outside the range.
        """
        if self.choices:
            position = self._positions.get(value)
            if position is None:
                raise ValueError(f"{value!r} is not among the choices {list(self.choices)}")
            return (2 * position + 1) / len(self.choices) - 1.0
        if not self.low <= value <= self.high:
            raise ValueError(f"{value!r} is outside [{self.low:g}, {self.high:g}]")
        share = (math.log(value / self.low) if self.scale == "log" else value - self.low) / self._span
        return 2.0 * share - 1.0

    def encode_many(self, values: np.ndarray) -> np.ndarray:
        """Return `encode` of each value as `decode_many` gives them, ``(n,)`` float64; values are not checked."""
        result: np.ndarray
        if self.named:
            result = (2 * values + 1) / len(self.choices) - 1.0
        elif self.choices:
            result = (2 * np.searchsorted(self._choice_array, values) + 1) / len(self.choices) - 1.0
        else:
            share = (np.log(values / self.low) if self.scale == "log" else values - self.low) / self._span
            result = 2.0 * share - 1.0
        return result


def _rounded(value: float) -> float:
    """Return the double nearest to a number of 4 significant digits; `_rounded_many` does the same arithmetic."""
    if value == 0.0:
        return 0.0
    exponent = SIGNIFICANT_DIGITS - 1 - math.floor(math.log10(abs(value)))
    # A quotient of whole numbers below 2**53 and 10**22 is rounded once, so it is what reading the decimal gives.
    if exponent >= 0:
        power = 10.0**exponent
        return round(value * power) / power
    power = 10.0**-exponent
    return round(value / power) * power


def _rounded_many(values: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        magnitude = np.floor(np.log10(np.abs(values)))
    exponents = SIGNIFICANT_DIGITS - 1 - np.where(np.isfinite(magnitude), magnitude, 0.0)
    powers = np.power(10.0, np.abs(exponents))
    up = exponents >= 0
    whole = np.rint(np.where(up, values * powers, values / powers))
    result: np.ndarray = np.where(up, whole / powers, whole * powers)
    return result
