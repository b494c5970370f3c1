"""Fits each quantity that the cost predictor foresees to the rounds that tell it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .cost_features import FEATURES, LINEAR, NAMES, SCALED, references_of, row_of
from .cost_model import CostModel, fit_model
from .cost_rounds import QUANTITIES, CostRound

TIMED = ("device_seconds", "evaluation_device_seconds")
"""Quantities that a clock decides."""
_ASSUMED = {"device_seconds": 0.5, "evaluation_device_seconds": 0.5}
"""Standard deviations of the residuals before any round was seen, in natural logarithms; 0.25 for the others."""
_SLOPE, _CONSTANT = 0.3, 1.0
"""Standard deviations of slopes, and of the constant around the mean, before any round was seen."""
_OVERHEADS = (0.0, 0.0625, 0.125, 0.25, 0.5, 1.0)
"""Overheads of a pass that are tried, in FLOPs of the median pass; the fourth until there are `_ENOUGH_RECIPES`."""
_ENOUGH_RECIPES = 10


@dataclass(frozen=True)
class Fitted:
    """One quantity's model with what it needs of a recipe.

    Attributes:
        model: fitted to scaled and centred features and to centred targets.
        columns: which of all features it reads; the first is the constant.
        scale: what each of them was divided by.
        centre: what was then taken from it.
        level: what was taken from the targets; of a linear quantity, what they were divided by.
        bounded: whether targets are relative to the trainer's bound.
        algorithms: of each round it was fitted to.
        errors: for each grouping of the model, each round's relative error when it was left out.
    """

    model: CostModel
    columns: tuple[int, ...]
    scale: np.ndarray
    centre: np.ndarray
    level: float
    bounded: bool
    algorithms: tuple[str, ...]
    errors: tuple[np.ndarray, ...]


def fit_quantities(
    rounds: Sequence[CostRound], machine: str | None, sources: Sequence[str]
) -> tuple[dict[str, Fitted], float]:
    """Return each quantity that some round tells, fitted, and the overhead of a pass in FLOPs.

    Args:
        rounds: finished rounds.
        machine: the machine whose seconds count.
        sources: all sources of their mixes, sorted.
    """
    rows = [row_of(r.recipe, r.step_bound, r.parameters, r.ignored, sources) for r in rounds]
    found: dict[str, Fitted] = {}
    chosen = 0.0
    for quantity in QUANTITIES:
        data = _Data.of(quantity, rounds, rows, machine)
        if data is None:
            continue
        if quantity == "device_seconds":
            chosen = data.best_overhead()
        found[quantity] = data.fitted(chosen)
    return found, chosen


@dataclass(frozen=True)
class _Data:
    """The rounds that tell one quantity.

    Attributes:
        quantity: entry of `QUANTITIES`.
        rounds: n rounds.
        wholes: ``(n,)`` the quantity of each, all its steps.
        features: ``(n, k)`` what it is regressed on, scaled and centred.
        columns: which of all features these are.
        scale: ``(k,)`` what they were divided by.
        centre: ``(k,)`` what was then taken from them.
    """

    quantity: str
    rounds: Sequence[CostRound]
    wholes: np.ndarray
    features: np.ndarray
    columns: tuple[int, ...]
    scale: np.ndarray
    centre: np.ndarray

    @classmethod
    def of(
        cls, quantity: str, rounds: Sequence[CostRound], rows: Sequence[Sequence[float]], machine: str | None
    ) -> _Data | None:
        """Return the data of a quantity; None when no round tells it."""
        told = [
            (r, row, whole)
            for r, row in zip(rounds, rows, strict=True)
            if (whole := r.whole(quantity)) is not None and (quantity not in TIMED or r.machine == machine)
        ]
        if not told:
            return None
        columns = tuple(i for i, name in enumerate(NAMES) if name in ("one", *FEATURES[quantity]))
        if "mix" in FEATURES[quantity]:
            columns += tuple(range(len(NAMES), len(rows[0])))
        features = np.array([[row[i] for i in columns] for _, row, _ in told])
        scaled = [i < len(NAMES) and NAMES[i] in SCALED for i in columns]
        scale = np.where(scaled, np.maximum(features.mean(axis=0), 1e-12), 1.0)
        centre = (features / scale).mean(axis=0)
        centre[0] = 0.0  # the constant stays 1
        wholes = np.array([whole for _, _, whole in told])
        return cls(quantity, [r for r, _, _ in told], wholes, features / scale - centre, columns, scale, centre)

    @property
    def _recipes(self) -> list[str]:
        return [r.recipe.training_hash(r.ignored) for r in self.rounds]

    def fitted(self, overhead: float) -> Fitted:
        """Return the fit with an overhead of a pass."""
        which, linear = QUANTITIES.index(self.quantity), self.quantity in LINEAR
        references = np.array(
            [references_of(r.recipe, r.step_bound, r.evaluation_bound, overhead) for r in self.rounds]
        )
        bounded = bool((references[:, which] > 0).all())
        ratios = self.wholes / references[:, which if bounded else which + len(QUANTITIES)]
        level = float(ratios.mean() if linear else np.log(ratios).mean())
        deviations = np.full(len(self.columns), _SLOPE)
        deviations[0] = _CONSTANT
        algorithms = tuple(r.recipe.algorithm for r in self.rounds)
        model = fit_model(
            self.features,
            ratios / level - 1.0 if linear else np.log(ratios) - level,
            algorithms,
            {"recipe": self._recipes, "instance": [r.instance for r in self.rounds]},
            deviations,
            _ASSUMED.get(self.quantity, 0.25),
        )
        errors = tuple(
            np.abs(found.values) * level / ratios if linear else np.abs(np.expm1(-found.values))
            for found in model.residuals
        )
        return Fitted(model, self.columns, self.scale, self.centre, level, bounded, algorithms, errors)

    def best_overhead(self) -> float:
        """Return the overhead with which left-out rounds are foreseen best."""
        passes = float(np.median([r.step_bound["flops"] / r.recipe.gradient_accumulation for r in self.rounds]))
        if len(set(self._recipes)) < _ENOUGH_RECIPES:
            return _OVERHEADS[3] * passes

        def loss(overhead: float) -> float:
            return math.fsum(float(np.abs(found.values).mean()) for found in self.fitted(overhead).model.residuals)

        return min((share * passes for share in _OVERHEADS), key=loss)
