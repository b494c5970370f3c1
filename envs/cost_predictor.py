"""`CostPredictor`: what a recipe will cost before it runs, fitted to finished rounds, with intervals and errors."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..inner_trainers.base import UNITS, RoundReport
from ..inner_trainers.files import write_atomically
from ..inner_trainers.recipe import Recipe
from .cost_estimate import CostEstimate, Estimate, fits_memory
from .cost_features import LINEAR, NAMES, bounds_of, references_of, row_of
from .cost_fit import TIMED, Fitted, fit_quantities
from .cost_rounds import EVALUATION, QUANTITIES, TRAINING, CostFacts, CostRound, CostRounds, KnownCosts

if TYPE_CHECKING:
    from .search import Search

FORMAT = 1
_WIDEST = math.log(1e6)
"""Half widths end here: what is wider says nothing."""
_BOUND = "upper bound, no rounds yet"
_PACKAGES = ("numpy", "torch", "transformers", "trl")


@dataclass(frozen=True)
class PredictorError:
    """How far predictions were from rounds that they were not fitted to.

    Attributes:
        quantity: entry of `QUANTITIES`.
        algorithm: whose rounds; ``"all"`` for all together.
        grouping: what was left out together: ``"recipe"`` (all seeds and instances of one recipe: is a new recipe
            foreseen?) or ``"instance"`` (all rounds on one task: is a new task?).
        rounds: how many.
        groups: how many recipes or instances the folds were made of.
        median: median of abs(predicted - measured) / measured.
        p90: 90th percentile of the same.
    """

    quantity: str
    algorithm: str
    grouping: str
    rounds: int
    groups: int
    median: float
    p90: float


@dataclass(frozen=True)
class _Plan:
    """The models of all quantities for one algorithm, as two matrices.

    Attributes:
        quantities: those that were fitted.
        references: where in `references_of` each finds what it is relative to.
        how: how each is made.
        weights: ``(q, d)``; times the features, plus ``levels``, it is the logarithm relative to the reference.
        levels: ``(q,)``; linear quantities are this sum times their ``units``.
        roots: ``(k, d)``; times the features, less ``offsets``, squared and summed from ``starts`` on, it is the doubt.
        offsets: ``(k,)``.
        starts: ``(q,)`` first row of each quantity in ``roots``.
        half_widths: ``(q,)``.
    """

    quantities: tuple[str, ...]
    references: tuple[int, ...]
    how: tuple[str, ...]
    weights: np.ndarray
    levels: np.ndarray
    units: tuple[float, ...]
    roots: np.ndarray
    offsets: np.ndarray
    starts: np.ndarray
    half_widths: np.ndarray


class CostPredictor:
    """Predicts a round's train tokens, FLOPs, seconds and peak memory, and what its evaluation costs.

    Each quantity is what the trainer's bound allows, times a factor whose logarithm is linear in what the recipe asks
    for; memory is linear itself. Slopes are shared between algorithms and each algorithm's own are drawn to them (ridge
    regression). With no round it is the bound; the more rounds, the more they decide. `docs/cost.md` has the errors.

    Args:
        rounds: finished rounds; see `CostRounds`.
        machine: the machine whose seconds count; None for the one most rounds ran on. Seconds of others are left out,
            for they are not comparable.

    Attributes:
        rounds: those it was fitted to.
        left_out: reason -> how many rounds nothing was learnt from.
        machine: the machine its seconds are of; None without any.
        errors: cross-validated errors, empty until there are two recipes.
        versions: versions of the packages that decide what a round costs, where it was made.
    """

    def __init__(self, rounds: CostRounds | Iterable[CostRound] = (), machine: str | None = None) -> None:
        given = rounds if isinstance(rounds, CostRounds) else CostRounds(list(rounds))
        self.rounds: tuple[CostRound, ...] = tuple(given.kept)
        self.left_out: Counter[str] = Counter(given.left_out)
        timed = Counter(r.machine for r in self.rounds if any(r.whole(name) for name in TIMED))
        if machine is None and timed:
            machine = min(timed, key=lambda name: (-timed[name], name))
        self.machine = machine
        self._elsewhere = sum(timed.values()) - timed.get(machine or "", 0)
        self.versions = _versions()
        self._sources = tuple(sorted({name for r in self.rounds for name in r.recipe.mix}))
        self._fitted, self._overhead = fit_quantities(self.rounds, machine, self._sources)
        self.errors: tuple[PredictorError, ...] = tuple(self._errors())
        self._plans: dict[tuple[str, str], _Plan] = {}

    @classmethod
    def fit(cls, rounds: CostRounds | Iterable[CostRound], machine: str | None = None) -> CostPredictor:
        """Return the predictor of some rounds; see the class."""
        return cls(rounds, machine)

    @classmethod
    def from_search(cls, search: Search) -> CostPredictor:
        """Return the predictor of the rounds that a search has finished."""
        return cls(CostRounds.of_search(search))

    @classmethod
    def from_reports(cls, reports: Iterable[RoundReport], facts: CostFacts) -> CostPredictor:
        """Return the predictor of finished rounds of one task."""
        return cls(CostRounds.of_reports(reports, facts))

    def predict(self, facts: KnownCosts, recipe: Recipe) -> CostEstimate:
        """Return what the whole of a recipe's round will cost on a task; a round that the budget cuts costs less.

        Raises:
            ValueError: the recipe cannot run on the task.
        """
        return self._estimate(facts, recipe, facts.step_bound(recipe))

    def predict_batch(self, facts: KnownCosts, recipes: Sequence[Recipe]) -> dict[str, np.ndarray]:
        """Return the estimates of many recipes as arrays.

        Returns:
            entry of `QUANTITIES` -> ``(n, 3)`` float64: value, low and high; NaN where nothing is known.

        Raises:
            ValueError: a recipe cannot run on the task.
        """
        found = {name: np.full((len(recipes), 3), np.nan) for name in QUANTITIES}
        by_plan: dict[str, list[int]] = {}
        for index, recipe in enumerate(recipes):
            by_plan.setdefault(recipe.algorithm, []).append(index)
        for algorithm, indices in by_plan.items():
            plan, ignored = self._plan(algorithm, facts.machine), facts.ignored(algorithm)
            bounds = [facts.step_bound(recipes[i]) for i in indices]
            after, asked = facts.evaluation_bound, [recipes[i] for i in indices]
            pairs = list(zip(asked, bounds, strict=True))
            most = np.array([bounds_of(recipe, bound, after) for recipe, bound in pairs])
            most[most <= 0] = np.nan
            for column, name in enumerate(QUANTITIES):
                found[name][indices] = most[:, column, None] * np.array([1.0, 0.0, 1.0])
            if not plan.quantities:
                continue
            rows = np.array([row_of(r, b, facts.parameters, ignored, self._sources) for r, b in pairs])
            references = np.array([references_of(recipe, bound, after, self._overhead) for recipe, bound in pairs])
            middles = rows @ plan.weights.T + plan.levels
            doubts = np.add.reduceat((rows @ plan.roots.T - plan.offsets) ** 2, plan.starts, axis=1)
            widths = np.minimum(plan.half_widths * np.sqrt(1.0 + doubts), _WIDEST)
            for place, name in enumerate(plan.quantities):
                limit = np.nan_to_num(most[:, QUANTITIES.index(name)], nan=np.inf)
                middle, width, reference = middles[:, place], widths[:, place], references[:, plan.references[place]]
                if name in LINEAR:
                    ends = np.maximum([middle, middle - width, middle + width], 0.0) * plan.units[place]
                else:
                    ends = np.exp([middle, middle - width, middle + width])
                values = np.minimum(ends * reference, limit).T
                found[name][indices] = np.where((reference > 0)[:, None], values, found[name][indices])
        return found

    def save(self, path: Path) -> None:
        """Write the rounds it was fitted to, as JSON; `load` fits them again, to the same predictor."""
        data = {
            "format": FORMAT,
            "versions": self.versions,
            "machine": self.machine,
            "rounds": len(self.rounds),
            "left_out": dict(self.left_out),
            "kept": [r.to_dict() for r in self.rounds],
        }
        write_atomically(path, json.dumps(data, allow_nan=False).encode())

    @classmethod
    def load(cls, path: Path) -> CostPredictor:
        """Return the predictor that `save` wrote.

        Raises:
            ValueError: the file is missing or not one of `save`, of another format, or damaged.
        """
        where = f"cost predictor {path}"
        try:
            data = json.loads(path.read_bytes())
        except OSError as error:
            raise ValueError(f"{where}: it cannot be read ({error.strerror}).") from error
        except ValueError as error:
            raise ValueError(f"{where}: it is no JSON ({error}); save it again with CostPredictor.save.") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"{where}: expected format {FORMAT}, got {found!r}; save it again with this version.")
        try:
            kept = [CostRound.from_dict(entry) for entry in data["kept"]]
            left = Counter({str(reason): int(count) for reason, count in data["left_out"].items()})
            versions = {str(name): str(text) for name, text in data["versions"].items()}
            counted, machine = data["rounds"], data["machine"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{where}: a round in it cannot be read ({type(error).__name__}: {error}).") from error
        if counted != len(kept):
            raise ValueError(f"{where}: it says {counted} rounds and holds {len(kept)}; it was cut or edited.")
        predictor = cls(CostRounds(kept, left), None if machine is None else str(machine))
        predictor.versions = versions
        return predictor

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know of the rounds: those left out, other machines, other versions."""
        notes = [f"{count} rounds left out: {reason}" for reason, count in sorted(self.left_out.items())]
        if self._elsewhere:
            notes.append(f"seconds of {self._elsewhere} rounds on other machines than {self.machine} left out")
        here = _versions()
        notes += [
            f"fitted to rounds of {name} {text}, here is {here.get(name, 'none')}: seconds and memory may differ"
            for name, text in self.versions.items()
            if here.get(name) != text
        ]
        return tuple(notes)

    def _estimate(self, facts: KnownCosts, recipe: Recipe, bound: Mapping[str, float]) -> CostEstimate:
        plan = self._plan(recipe.algorithm, facts.machine)
        most = bounds_of(recipe, bound, facts.evaluation_bound)
        found = {name: Estimate(v, 0.0, v, _BOUND, False) for name, v in zip(QUANTITIES, most, strict=True) if v > 0}
        if plan.quantities:
            row = np.array(row_of(recipe, bound, facts.parameters, facts.ignored(recipe.algorithm), self._sources))
            references = references_of(recipe, bound, facts.evaluation_bound, self._overhead)
            doubts = np.add.reduceat((plan.roots.dot(row) - plan.offsets) ** 2, plan.starts)
            widths = np.minimum(plan.half_widths * np.sqrt(1.0 + doubts), _WIDEST)
            middles = plan.weights.dot(row) + plan.levels
            values, factors = np.exp(middles).tolist(), np.exp(widths).tolist()
            for place, name in enumerate(plan.quantities):
                reference = references[plan.references[place]]
                if reference <= 0:
                    continue
                limit, how = found[name].high if name in found else math.inf, plan.how[place]
                if name in LINEAR:
                    unit, middle, width = plan.units[place] * reference, float(middles[place]), float(widths[place])
                    ends = [unit * max(end, 0.0) for end in (middle, middle - width, middle + width)]
                else:
                    value, factor = values[place] * reference, factors[place]
                    ends = [value, value / factor, value * factor]
                found[name] = Estimate(min(ends[0], limit), min(ends[1], limit), min(ends[2], limit), how, True)
        return CostEstimate(
            {name: found[name] for name in TRAINING if name in found},
            {unit: found[name] for unit, name in zip(UNITS, EVALUATION, strict=True) if name in found},
        )

    def _plan(self, algorithm: str, machine: str) -> _Plan:
        key = (algorithm, machine)
        if key not in self._plans:
            self._plans[key] = self._made_plan(algorithm, machine)
        return self._plans[key]

    def _made_plan(self, algorithm: str, machine: str) -> _Plan:
        width = len(NAMES) + len(self._sources)
        quantities = tuple(self._fitted)
        weights, levels, units = np.zeros((len(quantities), width)), np.zeros(len(quantities)), [0.0] * len(quantities)
        roots: list[np.ndarray] = []
        offsets, starts, half_widths, references, how = [], [], [], [], []
        for place, (quantity, fitted) in enumerate(self._fitted.items()):
            columns, model = list(fitted.columns), fitted.model
            own = model.weights_of(algorithm)
            weights[place, columns] = own / fitted.scale
            levels[place] = (1.0 if quantity in LINEAR else fitted.level) - float(own @ fitted.centre)
            units[place] = fitted.level
            name = algorithm if algorithm in model.algorithms else ""
            root = np.zeros((len(columns), width))
            root[:, columns] = np.linalg.cholesky(model.covariances[name]).T / fitted.scale
            starts.append(sum(len(root) for root in roots))
            roots.append(root)
            offsets.append(root[:, columns] @ (fitted.centre * fitted.scale))
            half_widths.append(model.half_widths[name])
            references.append(QUANTITIES.index(quantity) + (0 if fitted.bounded else len(QUANTITIES)))
            how.append(self._how(quantity, fitted, algorithm, machine))
        return _Plan(
            quantities=quantities,
            references=tuple(references),
            how=tuple(how),
            weights=weights,
            levels=levels,
            units=tuple(units),
            roots=np.concatenate(roots) if roots else np.zeros((0, width)),
            offsets=np.concatenate(offsets) if offsets else np.zeros(0),
            starts=np.array(starts, dtype=np.intp),
            half_widths=np.array(half_widths),
        )

    def _how(self, quantity: str, fitted: Fitted, algorithm: str, machine: str) -> str:
        total, own = len(fitted.algorithms), fitted.algorithms.count(algorithm)
        how = f"fitted to {total} round{'s' if total > 1 else ''}"
        if own < total:
            how += f", {own or 'none'} of {algorithm}"
        if not fitted.model.residuals:
            how += ", interval assumed"
        if quantity in TIMED and self.machine != machine:
            how += f", on {self.machine}, not here"
        return how

    def _errors(self) -> Iterable[PredictorError]:
        for quantity, fitted in self._fitted.items():
            labels = np.array(fitted.algorithms)
            for residuals, errors in zip(fitted.model.residuals, fitted.errors, strict=True):
                for name in (*fitted.model.algorithms, "all"):
                    mine = errors if name == "all" else errors[labels == name]
                    median, p90 = (float(np.quantile(mine, q)) for q in (0.5, 0.9))
                    yield PredictorError(quantity, name, residuals.grouping, len(mine), residuals.groups, median, p90)


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue  # a trainer of one's own may need none of them
    return found


__all__ = ["CostEstimate", "CostPredictor", "Estimate", "PredictorError", "fits_memory"]
