"""A linear model of a logarithm, its slopes shared between algorithms, with intervals from grouped cross-validation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

NOISES = (0.03, 0.1, 0.3, 1.0)
"""Residuals that are tried, in natural logarithms: the smaller, the less slopes are held to zero."""
FOLDS = 10
INTERVAL = 0.9
"""Share of rounds that intervals are made to hold."""
_OWN = 0.5
"""Standard deviation of an algorithm's own weights around the shared ones, as a share of the prior's."""
_PRIOR_WEIGHT = 3.0
"""Recipes that the assumed residual counts as, beside those that were measured."""
_POOL_WEIGHT = 3.0
"""Residuals of all algorithms that count among those of one."""


@dataclass(frozen=True)
class Residuals:
    """Out-of-fold residuals of one way to make folds.

    Attributes:
        grouping: what a fold never splits, for example ``"recipe"``.
        groups: how many there were.
        values: ``(n,)`` measured minus predicted, in natural logarithms.
        spreads: ``(n,)`` by what factor the doubt about the weights widens the residual's scale; at least 1.
    """

    grouping: str
    groups: int
    values: np.ndarray
    spreads: np.ndarray


@dataclass(frozen=True)
class CostModel:
    """A fitted model; `fit_model` makes it.

    Attributes:
        algorithms: those that were fitted, sorted.
        shared: ``(d,)`` weights of an algorithm that was not.
        weights: algorithm -> ``(d,)`` weights.
        covariances: algorithm -> ``(d, d)`` doubt about them, in units of the squared residual; ``""`` for others.
        half_widths: algorithm -> half width of the interval of a recipe in the middle of the data, in natural
            logarithms, by which the root of 1 plus the doubt is multiplied; ``""`` for others.
        residuals: one entry per grouping with at least two groups; empty when there is none.
        noise: the chosen entry of `NOISES`.
    """

    algorithms: tuple[str, ...]
    shared: np.ndarray
    weights: Mapping[str, np.ndarray]
    covariances: Mapping[str, np.ndarray]
    half_widths: Mapping[str, float]
    residuals: tuple[Residuals, ...]
    noise: float

    def weights_of(self, algorithm: str) -> np.ndarray:
        """Return the weights of an algorithm, the shared ones where it was not fitted."""
        return self.weights.get(algorithm, self.shared)


def fit_model(
    features: np.ndarray,
    targets: np.ndarray,
    algorithms: Sequence[str],
    groupings: Mapping[str, Sequence[str]],
    deviations: np.ndarray,
    assumed: float,
) -> CostModel:
    """Fit by ridge regression; the strength of the penalty is what predicts left-out groups best.

    Args:
        features: ``(n, d)`` float64, the first column 1, the others centred. n ≥ 1.
        targets: ``(n,)`` natural logarithms, whose mean is about 0.
        algorithms: n names.
        groupings: name of a grouping -> n labels; rounds of one label are left out together.
        deviations: ``(d,)`` standard deviations of the shared weights before any round was seen; > 0.
        assumed: standard deviation of the residual before any round was seen; > 0.
    """
    names = tuple(sorted(set(algorithms)))
    design = _Design(features, targets, np.array([names.index(name) for name in algorithms]), deviations, len(names))
    folds = {name: _folds(labels) for name, labels in groupings.items() if len(set(labels)) > 1}
    noise = _chosen_noise(design, folds, assumed)
    residuals = tuple(
        Residuals(name, len(set(groupings[name])), *design.left_out(which, noise)) for name, which in folds.items()
    )
    weights, covariance = design.solved(design.gram, design.moments, noise)
    width, own = features.shape[1], (deviations * _OWN / noise) ** 2
    blocks = {name: slice((i + 1) * width, (i + 2) * width) for i, name in enumerate(names)}
    shared = slice(0, width)
    covariances = {"": covariance[shared, shared] + np.diag(own)}
    for name, block in blocks.items():
        cross = covariance[shared, block]
        covariances[name] = covariance[shared, shared] + cross + cross.T + covariance[block, block]
    labels = np.asarray(algorithms)
    half_widths = {"": _half_width(residuals, np.ones(len(targets), bool), assumed)}
    half_widths |= {name: _half_width(residuals, labels == name, assumed) for name in names}
    return CostModel(
        algorithms=names,
        shared=weights[shared],
        weights={name: weights[shared] + weights[block] for name, block in blocks.items()},
        covariances=covariances,
        half_widths=half_widths,
        residuals=residuals,
        noise=noise,
    )


class _Design:
    """The least-squares problem: shared weights first, then each algorithm's own."""

    def __init__(
        self, features: np.ndarray, targets: np.ndarray, codes: np.ndarray, deviations: np.ndarray, algorithms: int
    ) -> None:
        count, width = features.shape
        self._rows = np.zeros((count, width * (algorithms + 1)))
        self._rows[:, :width] = features
        for code in range(algorithms):
            mine = codes == code
            self._rows[mine, width * (code + 1) : width * (code + 2)] = features[mine]
        self._targets = targets
        self._penalty = np.concatenate([deviations, np.tile(deviations * _OWN, algorithms)]) ** -2.0
        self.gram = self._rows.T @ self._rows
        self.moments = self._rows.T @ targets

    def solved(self, gram: np.ndarray, moments: np.ndarray, noise: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the weights and their covariance in units of the squared noise."""
        inverse = np.linalg.inv(gram + np.diag(noise**2 * self._penalty))
        return inverse @ moments, inverse

    def left_out(self, folds: np.ndarray, noise: float) -> tuple[np.ndarray, np.ndarray]:
        """Return each round's residual when its fold is left out, and the factor of its doubt."""
        values, spreads = np.empty(len(folds)), np.empty(len(folds))
        for fold in range(int(folds.max()) + 1):
            mine = folds == fold
            rows, targets = self._rows[mine], self._targets[mine]
            weights, inverse = self.solved(self.gram - rows.T @ rows, self.moments - rows.T @ targets, noise)
            values[mine] = targets - rows @ weights
            spreads[mine] = np.sqrt(1.0 + np.einsum("nd,de,ne->n", rows, inverse, rows))
        return values, spreads


def _folds(labels: Sequence[str]) -> np.ndarray:
    """Return the fold of each round: groups are dealt in turn, the largest first, to at most `FOLDS` folds."""
    names, counts = np.unique(np.asarray(labels), return_counts=True)
    order = sorted(range(len(names)), key=lambda i: (-int(counts[i]), str(names[i])))
    fold = {str(names[i]): place % FOLDS for place, i in enumerate(order)}
    return np.array([fold[label] for label in labels])


def _chosen_noise(design: _Design, folds: Mapping[str, np.ndarray], assumed: float) -> float:
    """Return the noise with the smallest mean absolute residual over all groupings; without any, the nearest."""
    if not folds:
        return min(NOISES, key=lambda noise: abs(math.log(noise / assumed)))
    losses = [sum(float(np.abs(design.left_out(f, noise)[0]).mean()) for f in folds.values()) for noise in NOISES]
    return NOISES[int(np.argmin(losses))]


def _half_width(residuals: tuple[Residuals, ...], mine: np.ndarray, assumed: float) -> float:
    """Return the half width of the interval of a recipe whose weights are certain, the widest of all groupings.

    The scale of an algorithm's residuals is drawn to that of all, and both to the assumed one, as if that had been
    seen in a few recipes; Student's factor then allows for how few groups there were.
    """
    widths = []
    distinct = max((found.groups for found in residuals), default=0)
    for found in residuals:
        squared = (found.values / found.spreads) ** 2
        pooled = (_PRIOR_WEIGHT * assumed**2 + distinct * _robust_square(squared)) / (_PRIOR_WEIGHT + distinct)
        count = int(mine.sum())
        own = _robust_square(squared[mine]) if count else 0.0
        square = (_POOL_WEIGHT * pooled + count * own) / (_POOL_WEIGHT + count)
        widths.append(student_quantile(_PRIOR_WEIGHT + found.groups - 1) * square**0.5)
    return float(max(widths, default=student_quantile(_PRIOR_WEIGHT) * assumed))


def _robust_square(squared: np.ndarray) -> float:
    """Return the squared scale whose normal interval holds 90 % of the residuals; never below their mean square / 4."""
    return float(max(np.quantile(squared, INTERVAL) / _NORMAL**2, squared.mean() / 4))


_NORMAL = 1.6448536269514722
"""95 % quantile of the standard normal distribution: a two-sided interval of 90 %."""


def student_quantile(degrees: float) -> float:
    """Return the 95 % quantile of Student's t by the expansion of Cornish and Fisher; within 1 % from 3 degrees on."""
    z, d = _NORMAL, degrees
    return float(
        z
        + (z**3 + z) / (4 * d)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * d**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * d**3)
    )
