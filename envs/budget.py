"""The one place where budget is charged: `Budget`, a hard limit, and `BudgetLedger`, what is left of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..inner_trainers.base import UNITS, Cost, Limit
from ..inner_trainers.messages import did_you_mean, require_integer, require_number


@dataclass(frozen=True)
class Budget:
    """What one search may spend.

    Attributes:
        limit: hard limit on training, generation and evaluation together, in ``unit``; > 0.
        unit: ``"train_tokens"`` (a generated or scored token counts a third), ``"flops"`` or ``"device_seconds"``.
        max_rounds: rounds at most, in [1, 100000].
        patience: the search ends after this many rounds in a row without a new best, in [1, 100000].
    """

    limit: float = 200_000
    unit: str = "train_tokens"
    max_rounds: int = 8
    patience: int = 4

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: a limit that is no positive finite number, an unknown unit, rounds or patience below 1.
        """
        require_number("budget.limit", self.limit, low=0, low_open=True)
        if self.unit not in UNITS:
            raise ValueError(f"budget.unit: unknown {self.unit!r}.{did_you_mean(str(self.unit), UNITS)}")
        require_integer("budget.max_rounds", self.max_rounds, low=1, high=100_000)
        require_integer("budget.patience", self.patience, low=1, high=100_000)

    @classmethod
    def from_any(cls, value: Budget | Mapping[str, Any] | float | None) -> Budget:
        """Return a budget from a budget, a mapping of its fields, a limit, or None for the default.

        Raises:
            ValueError: an unknown key, or a value outside its range.
        """
        if value is None:
            return cls()
        if isinstance(value, Budget):
            return value
        if isinstance(value, Mapping):
            known = [f.name for f in fields(cls)]
            for key in value:
                if key not in known:
                    raise ValueError(f"budget: unknown key {key!r}.{did_you_mean(str(key), known)}")
            return cls(**value)
        return cls(limit=require_number("budget.limit", value, low=0, low_open=True))


class BudgetLedger:
    """Counts what a search has spent; every charge goes through `settle`."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.spent = 0.0
        self.entries: list[tuple[str, float]] = []

    @property
    def left(self) -> float:
        """What is left of the limit, never below 0."""
        return max(0.0, self.budget.limit - self.spent)

    def can_pay(self, training: Cost, evaluation: Cost) -> bool:
        """Return whether both fit in what is left; nothing fits in nothing, even where no cost is known ahead."""
        unit = self.budget.unit
        if self.left <= 0 or evaluation.in_unit(unit) > self.left:
            return False
        return training.in_unit(unit) <= self.reserve(evaluation).amount

    def reserve(self, evaluation: Cost) -> Limit:
        """Return the limit on training that leaves enough for ``evaluation`` afterwards."""
        return Limit(self.budget.unit, max(0.0, self.left - evaluation.in_unit(self.budget.unit)))

    def settle(self, purpose: str, cost: Cost) -> float:
        """Charge ``cost``; return the amount in the budget's unit."""
        amount = cost.in_unit(self.budget.unit)
        self.spent += amount
        self.entries.append((purpose, amount))
        return amount
