"""One search over recipes on one task: checkpoints, scores, ledger; runs rounds and writes each down.

The environment is a thin face over this class, so tools that know no Gymnasium can search by the same rules.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..inner_trainers.base import Checkpoint, Cost, Failure, InnerTrainer, RoundReport, Scorecard, round_id
from ..inner_trainers.messages import did_you_mean
from ..inner_trainers.recipe import STARTS, Recipe
from ..inner_trainers.tasks.base import InnerTask
from .budget import Budget, BudgetLedger
from .decision_space import DecisionSpace
from .journal import Journal

_LOG = logging.getLogger(__name__)


class JournalMismatchError(ValueError):
    """A journal holds another run's rounds: the repeated decision differs from the one written down."""


@dataclass(frozen=True)
class Outcome:
    """What one round changed.

    Attributes:
        report: the round's record, evaluated.
        charged: amount charged, in the budget's unit.
        best_before: best validation score before the round.
        best_after: best validation score after it.
        improved: whether the round made a new best checkpoint.
        replayed: whether the journal answered instead of training.
    """

    report: RoundReport
    charged: float
    best_before: float
    best_after: float
    improved: bool
    replayed: bool = False


class Search:
    """State of one search; `run` does one round.

    Args:
        task: what to improve.
        trainer: who trains and evaluates.
        space: what may be tried.
        budget: what may be spent.
        seed: decides every seed of the search's rounds. A round's seed is ``seed`` plus the depth of its starting
            checkpoint, so the same recipe from the same checkpoint is the same round, and a continued checkpoint sees
            new data.
        journal: where finished rounds are written and looked up; None for nowhere.
        episode: number of the search in the journal.
        reuse: whether an equal round of this search is answered from memory at cost 0.
        on_step: called after each optimiser step with (round number from 1, curve row).

    Attributes:
        checkpoints: ``"base"``, ``"best"`` and ``"latest"`` -> checkpoint.
        scorecards: the same names -> validation scorecard.
        ledger: what was spent.
        outcomes: every round so far.
    """

    def __init__(
        self,
        task: InnerTask,
        trainer: InnerTrainer,
        space: DecisionSpace,
        budget: Budget,
        seed: int,
        *,
        journal: Journal | None = None,
        episode: int = 0,
        reuse: bool = True,
        on_step: Callable[[int, Mapping[str, float]], None] | None = None,
    ) -> None:
        self.task, self.trainer, self.space, self.seed = task, trainer, space, seed
        self.ledger = BudgetLedger(budget)
        self.outcomes: list[Outcome] = []
        self.stopped = False
        self._journal, self._episode, self._reuse, self._on_step = journal, episode, reuse, on_step
        self._finished: dict[str, tuple[RoundReport, Checkpoint]] = {}
        self._made_by: dict[str, tuple[Checkpoint, Recipe, int]] = {}
        self._evaluation_bound = trainer.evaluation_cost_bound(task, "validation")
        base = trainer.base(task)
        self.checkpoints: dict[str, Checkpoint] = dict.fromkeys(STARTS, base)
        scorecard, cost = self._evaluate_base(base)
        self.scorecards: dict[str, Scorecard] = dict.fromkeys(STARTS, scorecard)
        self.ledger.settle("evaluation of the base checkpoint", cost)
        available = dict(zip(trainer.algorithms, trainer.available(task), strict=True))
        self.available = {name: available.get(name, False) for name in space.algorithms}
        self._cheapest = {name: self._cheapest_round(name) for name, there in self.available.items() if there}

    @property
    def rounds(self) -> int:
        """Rounds done."""
        return len(self.outcomes)

    @property
    def rounds_without_best(self) -> int:
        """Rounds in a row, up to now, that made no new best."""
        count = 0
        for outcome in reversed(self.outcomes):
            if outcome.improved:
                break
            count += 1
        return count

    def legal(self) -> dict[str, bool]:
        """Return for each algorithm whether the task has its data and the budget pays one step and its evaluation."""
        return {name: there and self.ledger.can_pay(self._cheapest[name]) for name, there in self.available.items()}

    def ended(self) -> str | None:
        """Return why no further round may run (``"stop"``, ``"rounds"``, ``"patience"``, ``"budget"``), or None."""
        budget = self.ledger.budget
        if self.stopped:
            return "stop"
        if self.rounds >= budget.max_rounds:
            return "rounds"
        if self.rounds_without_best >= budget.patience:
            return "patience"
        if not any(self.legal().values()):
            return "budget"
        return None

    def run(self, recipe: Recipe) -> Outcome:
        """Run one round to its evaluated end. A failure inside the round is an outcome, not an exception.

        Raises:
            ValueError: the search has ended, or the recipe cannot run on this task.
            JournalMismatchError: the journal holds another run.
        """
        reason = self.ended()
        if reason is not None:
            raise ValueError(f"the search has ended ({reason}); start a new one.")
        if recipe.start not in self.checkpoints:
            raise ValueError(f"start: unknown {recipe.start!r}.{did_you_mean(recipe.start, self.checkpoints)}")
        if self.legal().get(recipe.algorithm, True):
            self.trainer.check(self.task, recipe)
            return self._run_legal(recipe)
        there = self.available[recipe.algorithm]
        cause, kind = ("resources", "unaffordable") if there else ("algorithm_mismatch", "no_data")
        evidence = (
            f"{self.ledger.left:g} {self.ledger.budget.unit} are left, one step and its evaluation can cost "
            f"{self._cheapest[recipe.algorithm].in_unit(self.ledger.budget.unit):g}"
            if there
            else f"no source has the rows {recipe.algorithm} trains on"
        )
        start = self.checkpoints[recipe.start]
        refused = _failed_report(recipe, start, self._seed_from(start), Failure(cause, kind, 0, evidence))
        return self._settle(refused, None, replayed=False)

    def weights_of(self, name: str) -> Checkpoint:
        """Return ``"base"``, ``"best"`` or ``"latest"`` with its weights in memory, made again where a restart lost them."""
        checkpoint = self._with_weights(self.checkpoints[name])
        self.checkpoints[name] = checkpoint
        return checkpoint

    def _run_legal(self, recipe: Recipe) -> Outcome:
        start = self.checkpoints[recipe.start]
        seed = self._seed_from(start)
        key = round_id(self.task, start, recipe, seed)
        if self._reuse and key in self._finished:
            report, checkpoint = self._finished[key]
            free = replace(report, cached=True, training_cost=Cost(), evaluation_cost=Cost(), wall_seconds=0.0)
            return self._settle(free, checkpoint, replayed=False)
        written = self._written_down(key, start)
        if written is not None:
            report, made = written
        else:
            start = self._with_weights(start)
            report, made = self._train(recipe, start, seed)
            self._write_down(key, report, made)
        if made is not None:
            self._made_by[made.id] = (start, recipe, seed)
            if report.ended == "finished":
                self._finished[key] = (report, made)
        return self._settle(report, made, replayed=written is not None)

    def _settle(self, report: RoundReport, checkpoint: Checkpoint | None, replayed: bool) -> Outcome:
        best_before = self.scorecards["best"].score
        charged = self.ledger.settle(f"round {self.rounds + 1}", report.cost)
        improved = False
        if checkpoint is not None and report.scorecard is not None:
            self.checkpoints["latest"], self.scorecards["latest"] = checkpoint, report.scorecard
            improved = report.scorecard.score > best_before
            if improved:
                self.checkpoints["best"], self.scorecards["best"] = checkpoint, report.scorecard
        outcome = Outcome(report, charged, best_before, self.scorecards["best"].score, improved, replayed)
        self.outcomes.append(outcome)
        if self._journal is not None and not replayed:
            self._journal.keep_only([checkpoint.id for checkpoint in self.checkpoints.values()])
        return outcome

    def _seed_from(self, start: Checkpoint) -> int:
        return (self.seed + start.depth) % 2**31

    def _train(self, recipe: Recipe, start: Checkpoint, seed: int) -> tuple[RoundReport, Checkpoint | None]:
        limit = self.ledger.reserve(self._evaluation_bound)
        try:
            session = self.trainer.begin(self.task, recipe, start, seed, limit)
        except ValueError as error:  # what `check` cannot see before rows are tokenised
            return _failed_report(recipe, start, seed, Failure("data", "refused", 0, str(error))), None
        try:
            if self._on_step is None:
                session.advance()
            else:
                while not session.done:
                    self._on_step(self.rounds + 1, session.advance(1))
            report, checkpoint = session.result()
        finally:
            session.close()
        if checkpoint is None:
            return report, None
        try:
            scorecard, cost = self.trainer.evaluate(self.task, checkpoint, "validation")
        except Exception as error:
            _LOG.warning("evaluation failed", exc_info=True)
            evidence = f"{type(error).__name__}: {error}"[:300]
            failure = Failure("environment", "evaluation_raised", report.steps, evidence)
            return replace(report, failure=failure, ended="failed", checkpoint=None), None
        flags = report.flags + _completion_flags(scorecard)
        return replace(report, scorecard=scorecard, evaluation_cost=cost, flags=flags), checkpoint

    def _evaluate_base(self, base: Checkpoint) -> tuple[Scorecard, Cost]:
        key = f"{self._episode}.base"
        content = {"task": self.task.built.content_hash, "seed": self.seed}
        entry = None if self._journal is None else self._journal.entry(key)
        if entry is not None:
            if {name: entry.get(name) for name in content} != content:
                raise JournalMismatchError(_mismatch(self._journal, key))
            return Scorecard.from_dict(entry["scorecard"]), Cost(**entry["cost"])
        scorecard, cost = self.trainer.evaluate(self.task, base, "validation")
        if self._journal is not None:
            self._journal.append(key, {**content, "scorecard": scorecard.to_dict(), "cost": vars(cost)})
        return scorecard, cost

    def _written_down(self, key: str, start: Checkpoint) -> tuple[RoundReport, Checkpoint | None] | None:
        name = f"{self._episode}.{self.rounds}"
        entry = None if self._journal is None else self._journal.entry(name)
        if entry is None:
            return None
        if entry.get("round_id") != key:
            raise JournalMismatchError(_mismatch(self._journal, name))
        report = RoundReport.from_dict(entry["report"])
        made = None if report.checkpoint is None else Checkpoint(report.checkpoint, None, start.depth + 1)
        return report, made

    def _write_down(self, key: str, report: RoundReport, made: Checkpoint | None) -> None:
        if self._journal is None:
            return
        if made is not None:
            self._journal.save_weights(made)
        payload: dict[str, Any] = {"round_id": key, "episode": self._episode, "round": self.rounds}
        payload["instance"] = self.task.facts()
        self._journal.append(f"{self._episode}.{self.rounds}", {**payload, "report": report.to_dict()})

    def _with_weights(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint with weights: from disk, or by repeating the round that made it."""
        if checkpoint.weights is not None:
            return checkpoint
        weights = None if self._journal is None else self._journal.weights(checkpoint.id)
        if weights is None:
            parent, recipe, seed = self._made_by[checkpoint.id]
            _LOG.warning("the weights of checkpoint %s are not on disk; its round is repeated", checkpoint.id)
            session = self.trainer.begin(self.task, recipe, self._with_weights(parent), seed, None)
            steps = next(o.report.steps for o in self.outcomes if o.report.checkpoint == checkpoint.id)
            session.advance(steps)
            _, made = session.result()
            if made is None:
                raise RuntimeError(f"the round that made checkpoint {checkpoint.id} failed when it was repeated.")
            weights = made.weights
        return replace(checkpoint, weights=weights)

    def _cheapest_round(self, algorithm: str) -> Cost:
        """Return the bound of one step of the smallest batch, with its evaluation."""
        settings: dict[str, Any] = {}
        if "batch_size" in self.space.parameters:
            settings["batch_size"] = self.space.parameters["batch_size"].decode(-1.0)
        bounds = [
            self.trainer.step_cost_bound(self.task, self.space.recipe(algorithm, mix={name: 1.0}, **settings))
            for name in self.space.usable[algorithm]
            if name in self.trainer.usable_sources(self.task, algorithm)
        ]
        unit = self.ledger.budget.unit
        return min(bounds, key=lambda cost: cost.in_unit(unit)) + self._evaluation_bound


def _failed_report(recipe: Recipe, start: Checkpoint, seed: int, failure: Failure) -> RoundReport:
    return RoundReport(
        recipe=recipe, start=start.id, seed=seed, checkpoint=None, steps=0, ended="failed", failure=failure
    )


def _completion_flags(scorecard: Scorecard) -> tuple[str, ...]:
    flags = []
    if scorecard.empty_share == 1.0:
        flags.append(
            "100 % of the evaluated completions are empty: the model ends at once; check that its generation settings "
            "do not list the padding token among the end tokens"
        )
    if scorecard.clipped_share == 1.0:
        flags.append(
            "100 % of the evaluated completions reach the length limit: the model never ends; check the end token in "
            "the training rows, or raise max_new_tokens"
        )
    return tuple(flags)


def _mismatch(journal: Journal | None, key: str) -> str:
    path = None if journal is None else journal.path
    return (
        f"{path}, entry {key}: it was written by a run with another task, seed or settings than this one. "
        "Resume with the settings the folder was made with, or use a new folder."
    )
