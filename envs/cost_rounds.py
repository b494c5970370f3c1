"""What the cost predictor learns from: finished rounds as `CostRound`, read from searches, journals and files."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ..inner_trainers.base import UNITS, Cost, RoundReport
from ..inner_trainers.recipe import Recipe
from ..inner_trainers.telemetry import machine_name
from .decision_space import COSTLY_KNOBS

if TYPE_CHECKING:
    from ..inner_trainers.base import InnerTrainer
    from ..inner_trainers.tasks.base import InnerTask
    from .search import Search

TRAINING = (*UNITS, "peak_memory_bytes")
"""Quantities of a round's training: ``"train_tokens"``, ``"flops"``, ``"device_seconds"``, ``"peak_memory_bytes"``."""
EVALUATION = tuple(f"evaluation_{unit}" for unit in UNITS)
"""Quantities of the evaluation after it."""
QUANTITIES = (*TRAINING, *EVALUATION)
UNKNOWN_MACHINE = "a machine that was not recorded"
_PRICED = (*COSTLY_KNOBS, "num_generations", "num_iterations", "critic")
"""Recipe fields that decide the bound of a step, beside the algorithm and the sources."""
_COST_FREE = frozenset(
    ("none", "stop", "snapshot", "rollback", "lr_scale", "lr_restart", "grad_clip_scale", "gamma_add", "log_less")
)
"""Adjustments after which a step costs what it did before."""


CostTask: TypeAlias = "tuple[InnerTask, InnerTrainer]"


@dataclass(frozen=True)
class CostRound:
    """What one finished round cost, with what was known before it ran.

    Attributes:
        recipe: what was asked.
        instance: content hash of its task.
        parameters: of the task's model.
        ignored: recipe fields that its algorithm ignores.
        steps: optimiser steps done, ≥ 1.
        step_bound: unit -> the most one step could cost.
        evaluation_bound: unit -> the most its evaluation could cost.
        measured: entry of `QUANTITIES` -> what was measured, of the steps done; those not measured are left out.
        machine: where it ran.
    """

    recipe: Recipe
    instance: str
    parameters: float
    ignored: tuple[str, ...]
    steps: int
    step_bound: Mapping[str, float]
    evaluation_bound: Mapping[str, float]
    measured: Mapping[str, float]
    machine: str = UNKNOWN_MACHINE

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: steps below 1, or a number that is negative or not finite.
        """
        if self.steps < 1:
            raise ValueError(f"steps: expected at least 1, got {self.steps!r}.")
        numbers = {"parameters": self.parameters, **self.measured}
        for values in (numbers, self.step_bound, self.evaluation_bound):
            for name, value in values.items():
                if not (math.isfinite(value) and value >= 0):
                    raise ValueError(f"{name}: expected a number of at least 0, got {value!r}.")

    def whole(self, quantity: str) -> float | None:
        """Return a quantity of the whole round: cost per step done times steps asked; None when not measured."""
        value = self.measured.get(quantity)
        if value is None or value <= 0:
            return None
        return value * self.recipe.steps / self.steps if quantity in UNITS else value

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__}
        kept = {name: dict(value) if isinstance(value, Mapping) else value for name, value in data.items()}
        return {**kept, "recipe": self.recipe.to_dict(), "ignored": list(self.ignored)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CostRound:
        """Read `to_dict` back.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: the data is no such round.
        """
        tables = {
            name: {str(key): float(value) for key, value in data[name].items()}
            for name in ("step_bound", "evaluation_bound", "measured")
        }
        return cls(
            recipe=Recipe.from_dict(data["recipe"]),
            instance=str(data["instance"]),
            parameters=float(data["parameters"]),
            ignored=tuple(map(str, data["ignored"])),
            steps=int(data["steps"]),
            machine=str(data["machine"]),
            **tables,
        )


class KnownCosts(Protocol):
    """What the predictor asks of a task: `CostFacts`, or whatever has these."""

    @property
    def machine(self) -> str:
        """Where the round will run."""

    @property
    def parameters(self) -> float:
        """Parameters of the task's model."""

    @property
    def evaluation_bound(self) -> Mapping[str, float]:
        """Unit -> the most an evaluation can cost."""

    def step_bound(self, recipe: Recipe) -> Mapping[str, float]:
        """Return unit -> the most one step can cost."""

    def ignored(self, algorithm: str) -> tuple[str, ...]:
        """Return the recipe fields that an algorithm ignores."""


class CostFacts:
    """What is known of a recipe's cost on one task before any round: bounds, the model's size, the machine.

    Args:
        task: the instance.
        trainer: who trains on it, and bounds what that costs.
        machine: where it will run; None for `machine_name`.

    Attributes:
        instance: the task's content hash.
        parameters: of its model.
        evaluation_bound: unit -> the most an evaluation can cost.
    """

    def __init__(self, task: InnerTask, trainer: InnerTrainer, machine: str | None = None) -> None:
        self._task, self._trainer = task, trainer
        self.machine = machine_name() if machine is None else machine
        self.instance = task.built.content_hash
        self.parameters = float(trainer.parameters(task))
        self.evaluation_bound = _amounts(trainer.evaluation_cost_bound(task, "validation"))
        self._bounds: dict[Any, Mapping[str, float]] = {}
        self._ignored: dict[str, tuple[str, ...]] = {}

    def step_bound(self, recipe: Recipe) -> Mapping[str, float]:
        """Return unit -> the most one step can cost; asked of the trainer once for recipes whose steps cost the same.

        Raises:
            ValueError: the recipe cannot run on the task.
        """
        used = tuple([name for name, weight in recipe.mix.items() if weight > 0])
        key = (recipe.algorithm, used, *[getattr(recipe, name) for name in _PRICED])
        bound = self._bounds.get(key)
        if bound is None:
            bound = self._bounds[key] = _amounts(self._trainer.step_cost_bound(self._task, recipe))
        return bound

    def ignored(self, algorithm: str) -> tuple[str, ...]:
        """Return the recipe fields that an algorithm ignores."""
        if algorithm not in self._ignored:
            self._ignored[algorithm] = tuple(self._trainer.ignored_settings(algorithm))
        return self._ignored[algorithm]

    def round_of(self, report: RoundReport) -> CostRound:
        """Return a finished round of this task as the predictor learns from it.

        Raises:
            ValueError: it has nothing to learn from; see `left_out`.
        """
        reason = left_out(report)
        if reason is not None:
            raise ValueError(f"round: it is left out: {reason}.")
        measured = {**_amounts(report.training_cost)}
        measured["device_seconds"] = report.training_cost.device_seconds or report.wall_seconds
        if report.peak_memory_bytes is not None and (report.failure is None or report.failure.kind != "oom"):
            measured["peak_memory_bytes"] = float(report.peak_memory_bytes)
        for unit, amount in _amounts(report.evaluation_cost).items():
            measured[f"evaluation_{unit}"] = amount
        card = report.telemetry.get("card")
        on_card = isinstance(card, str) and str(report.telemetry.get("device", "cpu")) != "cpu"
        return CostRound(
            recipe=report.recipe,
            instance=self.instance,
            parameters=self.parameters,
            ignored=self.ignored(report.recipe.algorithm),
            steps=report.steps,
            step_bound=self.step_bound(report.recipe),
            evaluation_bound=self.evaluation_bound,
            measured={name: amount for name, amount in measured.items() if amount > 0},
            machine=f"{self.machine}, {card}" if on_card else self.machine,
        )


def left_out(report: RoundReport) -> str | None:
    """Return why nothing of a round's cost can be learnt, in two or three words; None when something can.

    Left out are rounds that were answered and not trained, that took no step, of which steps were done again, and
    those adjusted so that later steps cost something else. A round that was cut or failed counts by what its steps
    cost.
    """
    if report.cached:
        return "answered from memory"
    if report.recorded:
        return "modelled, not trained"
    if report.steps < 1:
        return "no step done"
    if report.rescued:
        return "steps done again"
    for _, adjustment in report.adjustments:
        if adjustment.kind in _COST_FREE or (adjustment.kind == "kl_scale" and report.recipe.kl_coef > 0):
            continue
        return f"adjusted by {adjustment.kind}"
    return None


@dataclass
class CostRounds:
    """Rounds to fit a predictor to, and why others were left out.

    Attributes:
        kept: the rounds.
        left_out: reason -> how many rounds.
    """

    kept: list[CostRound] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)

    def add(self, report: RoundReport, facts: CostFacts) -> None:
        """Take in a finished round, or count why not."""
        reason = left_out(report)
        if reason is None:
            try:
                self.kept.append(facts.round_of(report))
            except ValueError:
                reason = "its recipe cannot run on this task"
        if reason is not None:
            self.left_out[reason] += 1

    @classmethod
    def of_reports(cls, reports: Iterable[RoundReport], facts: CostFacts) -> CostRounds:
        """Return the rounds among reports of one task."""
        rounds = cls()
        for report in reports:
            rounds.add(report, facts)
        return rounds

    @classmethod
    def of_search(cls, search: Search) -> CostRounds:
        """Return the rounds that a search has finished; those that its journal answered ran on an unknown machine."""
        here = CostFacts(search.task, search.trainer)
        elsewhere = CostFacts(search.task, search.trainer, UNKNOWN_MACHINE)
        rounds = cls()
        for outcome in search.outcomes:
            rounds.add(outcome.report, elsewhere if outcome.replayed else here)
        return rounds


def _amounts(cost: Cost) -> dict[str, float]:
    return {unit: float(cost.in_unit(unit)) for unit in UNITS}


def read_reports(path: Path) -> Iterator[tuple[RoundReport, Mapping[str, Any]]]:
    """Return the rounds of a journal's folder or of a `RoundFile`, each with the entry that holds it.

    A last line without its line break, as a write that was cut leaves it, is passed over.

    Raises:
        ValueError: no such file, a folder without such files, nothing in them that is a round, or a line that is
            damaged; names file and line.
    """
    if not path.exists():
        raise ValueError(
            f"rounds {path}: no such file or folder; `Journal` and `RecordRounds` write rounds-NAME.jsonl."
        )
    files = sorted(path.glob("rounds-*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"rounds {path}: the folder holds no rounds-NAME.jsonl; was the run given a journal?")
    found = 0
    for file in files:
        lines = file.read_bytes().split(b"\n")
        for number, line in enumerate(lines[:-1], start=1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
                report = RoundReport.from_dict(entry["report"]) if "report" in entry else None
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                problem = f"{type(error).__name__}: {error}"
                raise ValueError(f"rounds {file}, line {number}: no round ({problem}); leave it out.") from error
            if report is not None:
                found += 1
                yield report, entry
    if not found:
        raise ValueError(f"rounds {path}: no finished round is in it; expected one per line.")


def rounds_of_file(path: Path, task_of: Callable[[Mapping[str, Any]], CostTask | None]) -> CostRounds:
    """Return the rounds of a journal's folder or of a `RoundFile`, each on the machine that its entry names.

    Args:
        path: as `read_reports`.
        task_of: the entry of a round -> task and trainer; None for a task that is not there.

    Raises:
        ValueError: as `read_reports`.
    """
    rounds, known = CostRounds(), {}
    for report, entry in read_reports(path):
        found = task_of(entry)
        if found is None:
            rounds.left_out["of another task"] += 1
            continue
        machine = str(entry.get("machine") or entry.get("facts", {}).get("machine") or UNKNOWN_MACHINE)
        key = (id(found[0]), machine)
        if key not in known:
            known[key] = CostFacts(*found, machine)
        rounds.add(report, known[key])
    return rounds
