"""One search over recipes on one task: checkpoints, scores, ledger; runs rounds and writes each down.

The environment is a thin face over this class, so tools that know no Gymnasium can search by the same rules.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..inner_trainers.base import Checkpoint, Cost, Failure, InnerTrainer, RoundReport, Scorecard, round_id
from ..inner_trainers.faults import failure_from_exception
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
        # Neither holds weights: those of base, best and latest are in `checkpoints`, any others can be made again.
        self._answers: dict[str, RoundReport] = {}
        self._made_by: dict[str, tuple[Checkpoint, Recipe, int]] = {}
        self._evaluation_bound = trainer.evaluation_cost_bound(task, "validation")
        base = trainer.base(task)
        self.checkpoints: dict[str, Checkpoint] = dict.fromkeys(STARTS, base)
        scorecard, cost = self._evaluate_base(base)
        self.scorecards: dict[str, Scorecard] = dict.fromkeys(STARTS, scorecard)
        self.ledger.settle("evaluation of the base checkpoint", cost)
        self._cheapest = self._cheapest_rounds()
        self.available = {name: name in self._cheapest for name in space.algorithms}

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
            ValueError: the search has ended, or the recipe is not in its space.
            JournalMismatchError: the journal holds another run.
        """
        reason = self.ended()
        if reason is not None:
            raise ValueError(f"the search has ended ({reason}); start a new one.")
        self.space.encode(recipe)
        start = self.checkpoints[recipe.start]
        failure = self._refusal(recipe)
        if failure is not None:
            return self._settle(_failed_report(recipe, start, self._seed_from(start), failure), None, replayed=False)
        return self._run_legal(recipe, start)

    def _refusal(self, recipe: Recipe) -> Failure | None:
        """Return why the round cannot run, found before anything is loaded or charged; None when it can."""
        if not self.available[recipe.algorithm]:
            evidence = f"no source of the space has the rows {recipe.algorithm} trains on"
            return Failure("algorithm_mismatch", "no_data", 0, evidence)
        cheapest = self._cheapest[recipe.algorithm]
        if not self.ledger.can_pay(cheapest):
            unit = self.ledger.budget.unit
            evidence = f"{self.ledger.left:g} {unit} are left, one step and its evaluation can cost "
            return Failure("resources", "unaffordable", 0, f"{evidence}{cheapest.in_unit(unit):g}")
        try:
            self.trainer.check(self.task, recipe)
        except ValueError as error:
            return Failure("hyperparameter", "refused", 0, str(error)[:300])
        return None

    def weights_of(self, name: str) -> Checkpoint:
        """Return ``"base"``, ``"best"`` or ``"latest"`` with its weights, made again where a restart lost them."""
        return self._with_weights(self.checkpoints[name])

    def _run_legal(self, recipe: Recipe, start: Checkpoint) -> Outcome:
        seed = self._seed_from(start)
        key = round_id(self.task, start, recipe, seed)
        if self._reuse and key in self._answers:
            report = self._answers[key]
            free = replace(report, cached=True, training_cost=Cost(), evaluation_cost=Cost(), wall_seconds=0.0)
            return self._settle(free, _without_weights(report, start), replayed=False)
        written = self._written_down(key)
        if written is not None:
            report, made = written, _without_weights(written, start)
        else:
            report, made = self._train(recipe, self._with_weights(start), seed)
            self._write_down(key, report, made)
        if made is not None:
            self._made_by[made.id] = (_unloaded(start), recipe, seed)
        if report.ended == "finished" or (report.failure is not None and report.failure.cause in _REPEATABLE):
            self._answers[key] = report
        outcome = self._settle(report, made, replayed=written is not None)
        if self._journal is not None and written is None:
            # Only now: while a journal is read back, its folder holds the weights of rounds that are still to come.
            self._journal.keep_only([checkpoint.id for checkpoint in self.checkpoints.values()])
        return outcome

    def _settle(self, report: RoundReport, checkpoint: Checkpoint | None, replayed: bool) -> Outcome:
        best_before = self.scorecards["best"].score
        charged = self.ledger.settle(f"round {self.rounds + 1}", report.cost)
        improved = False
        if checkpoint is not None and report.scorecard is not None:
            if checkpoint.weights is None:
                checkpoint = self._in_memory(checkpoint)
            self.checkpoints["latest"], self.scorecards["latest"] = checkpoint, report.scorecard
            improved = report.scorecard.score > best_before
            if improved:
                self.checkpoints["best"], self.scorecards["best"] = checkpoint, report.scorecard
        outcome = Outcome(report, charged, best_before, self.scorecards["best"].score, improved, replayed)
        self.outcomes.append(outcome)
        return outcome

    def _seed_from(self, start: Checkpoint) -> int:
        return (self.seed + start.depth) % 2**31

    def _train(self, recipe: Recipe, start: Checkpoint, seed: int) -> tuple[RoundReport, Checkpoint | None]:
        limit = self.ledger.reserve(self._evaluation_bound)
        try:
            session = self.trainer.begin(self.task, recipe, start, seed, limit)
        except ValueError as error:  # what `check` cannot see before rows are tokenised
            return _failed_report(recipe, start, seed, Failure("data", "refused", 0, str(error)[:300])), None
        except Exception as error:
            _LOG.warning("a round could not begin", exc_info=True)
            return _failed_report(recipe, start, seed, failure_from_exception(error, 0)), None
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
            _require_finite(scorecard)
        except Exception as error:
            _LOG.warning("evaluation failed", exc_info=True)
            failure = failure_from_exception(error, report.steps)
            if failure.kind == "trainer_raised":
                failure = replace(failure, kind="evaluation_raised")
            return replace(report, failure=failure, ended="failed", checkpoint=None), None
        flags = report.flags + _completion_flags(scorecard)
        return replace(report, scorecard=scorecard, evaluation_cost=cost, flags=flags), checkpoint

    def _evaluate_base(self, base: Checkpoint) -> tuple[Scorecard, Cost]:
        key = f"{self._episode}.base"
        # The limit decides where rounds are cut, the evaluation what they score: neither is part of a round's id.
        budget = self.ledger.budget
        content = {
            "task": self.task.built.content_hash,
            "seed": self.seed,
            "budget": [budget.unit, budget.limit],
            "evaluation_bound": vars(self._evaluation_bound),
        }
        entry = None if self._journal is None else self._journal.entry(key)
        if entry is not None:
            if {name: entry.get(name) for name in content} != content:
                raise JournalMismatchError(_mismatch(self._journal, key))
            return Scorecard.from_dict(entry["scorecard"]), Cost(**entry["cost"])
        scorecard, cost = self.trainer.evaluate(self.task, base, "validation")
        _require_finite(scorecard)
        if self._journal is not None:
            self._journal.append(key, {**content, "scorecard": scorecard.to_dict(), "cost": vars(cost)})
        return scorecard, cost

    def _written_down(self, key: str) -> RoundReport | None:
        name = f"{self._episode}.{self.rounds}"
        entry = None if self._journal is None else self._journal.entry(name)
        if entry is None:
            return None
        if entry.get("round_id") != key:
            raise JournalMismatchError(_mismatch(self._journal, name))
        return RoundReport.from_dict(entry["report"])

    def _write_down(self, key: str, report: RoundReport, made: Checkpoint | None) -> None:
        if self._journal is None:
            return
        if made is not None:
            self._journal.save_weights(made)
        payload: dict[str, Any] = {"round_id": key, "episode": self._episode, "round": self.rounds}
        payload["instance"] = self.task.facts()
        self._journal.append(f"{self._episode}.{self.rounds}", {**payload, "report": report.to_dict()})

    def _in_memory(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint as base, best or latest hold it, with their weights; itself when none does."""
        for held in self.checkpoints.values():
            if held.id == checkpoint.id and held.weights is not None:
                return held
        return checkpoint

    def _with_weights(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint with weights: from memory, from disk, or by repeating the round that made it."""
        checkpoint = self._in_memory(checkpoint)
        if checkpoint.weights is not None:
            return checkpoint
        weights = None if self._journal is None else self._journal.weights(checkpoint.id)
        loaded = replace(checkpoint, weights=self._make_again(checkpoint) if weights is None else weights)
        for name, held in self.checkpoints.items():
            if held.id == loaded.id:
                self.checkpoints[name] = loaded
                if weights is None and self._journal is not None:
                    self._journal.save_weights(loaded)
        return loaded

    def _make_again(self, checkpoint: Checkpoint) -> Any:
        _LOG.warning("the weights of checkpoint %s were not kept; its round is repeated", checkpoint.id)
        parent, recipe, seed = self._made_by[checkpoint.id]
        steps = next(o.report.steps for o in self.outcomes if o.report.checkpoint == checkpoint.id)
        session = self.trainer.begin(self.task, recipe, self._with_weights(parent), seed, None)
        try:
            session.advance(steps)
            report, made = session.result()
        finally:
            session.close()
        if made is None:
            reason = "" if report.failure is None else f" ({report.failure.evidence})"
            raise RuntimeError(f"the round that made checkpoint {checkpoint.id} failed when it was repeated{reason}.")
        return made.weights

    def _cheapest_rounds(self) -> dict[str, Cost]:
        """Return for each algorithm that has data the bound of one step of the smallest batch, with its evaluation."""
        available = dict(zip(self.trainer.algorithms, self.trainer.available(self.task), strict=True))
        unit = self.ledger.budget.unit
        cheapest = {}
        for algorithm, recipes in self.space.cheapest_recipes.items():
            usable = self.trainer.usable_sources(self.task, algorithm) if available.get(algorithm, False) else ()
            bounds = [self.trainer.step_cost_bound(self.task, recipes[name]) for name in recipes if name in usable]
            if bounds:
                cheapest[algorithm] = min(bounds, key=lambda cost: cost.in_unit(unit)) + self._evaluation_bound
        return cheapest


_REPEATABLE = ("hyperparameter", "data")
"""Causes of failure that an equal round meets again; other rounds may succeed at a second try."""


def _unloaded(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint without its weights; the base keeps them, nothing could make them again."""
    return checkpoint if checkpoint.id == "base" else replace(checkpoint, weights=None)


def _without_weights(report: RoundReport, start: Checkpoint) -> Checkpoint | None:
    return None if report.checkpoint is None else Checkpoint(report.checkpoint, None, start.depth + 1)


def _require_finite(scorecard: Scorecard) -> None:
    if not (math.isfinite(scorecard.score) and math.isfinite(scorecard.standard_error)):
        raise ValueError(f"evaluation: {scorecard.score} ± {scorecard.standard_error} is no finite score.")


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
