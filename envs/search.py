"""One search over recipes on one task: checkpoints, scores, ledger; begins rounds, finishes them, settles each.

The environment is a thin face over this class, so tools that know no Gymnasium can search by the same rules.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..inner_trainers.base import (
    Checkpoint,
    Cost,
    Failure,
    InnerTrainer,
    RoundReport,
    Scorecard,
    round_id,
)
from ..inner_trainers.fault_kinds import failure
from ..inner_trainers.faults import failure_from_exception
from ..inner_trainers.recipe import STARTS, Recipe
from ..inner_trainers.tasks.base import InnerTask
from .budget import Budget, BudgetLedger
from .decision_space import COSTLY_KNOBS, DecisionSpace
from .journal import Journal
from .prices import Prices
from .records import JournalMismatchError, Origin, Records
from .running import RunningRound, SteeredSession, Steering, WrittenRound
from .scoring import Scoring
from .search_probes import ProbedSearch

_LOG = logging.getLogger(__name__)


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


class Search(ProbedSearch):
    """State of one search; `run` does one round, `begin` and `finish` are its halves.

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
        reuse: whether an equal round of this search is answered from memory at cost 0. The weights of every finished
            round are then kept, in memory and in the journal's folder; else those of base, best and latest alone.

    Attributes:
        checkpoints: ``"base"``, ``"best"`` and ``"latest"`` -> checkpoint; `weights_of` has their weights.
        scorecards: the same names -> validation scorecard.
        ledger: what was spent.
        outcomes: every round so far.
        records: journal entries and weights of its rounds.
        running: the round that was begun with pauses and is not finished; None for none.
        probes: what every probe so far has shown.
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
    ) -> None:
        self.task, self.trainer, self.space, self.seed = task, trainer, space, seed
        self.ledger = BudgetLedger(budget)
        self.outcomes: list[Outcome] = []
        self.probes = []
        self.stopped = False
        self.running: RunningRound | None = None
        self._journal, self._episode, self._reuse = journal, episode, reuse
        self._answers: dict[str, RoundReport] = {}
        self._sources = {name: self._usable_sources(name) for name in space.algorithms}
        self.available = {n: bool(found) and space.problems[n] is None for n, found in self._sources.items()}
        if not any(self._sources.values()):
            raise ValueError(_nothing_to_train_on(task, space))
        if not any(self.available.values()):
            shown = "; ".join(f"{name}: {why}" for name, why in space.problems.items() if why is not None)
            raise ValueError(f"task {task.name!r}: the decision space leaves no algorithm that can run; {shown}.")
        self._prices = Prices(trainer, task, space, self._sources, self.ledger)
        self._scoring = Scoring(trainer, task, self._prices)
        base = trainer.base(task)
        self.records = Records(trainer, task, base, journal, episode)
        self.checkpoints: dict[str, Checkpoint] = dict.fromkeys(STARTS, base)
        scorecard, cost = self._evaluate_base(base)
        self.scorecards: dict[str, Scorecard] = dict.fromkeys(STARTS, scorecard)
        self._settle_cost("evaluation of the base checkpoint", cost)
        self.legal()  # a price that cannot be asked for is an error now, not in a round

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
        """Return for each algorithm whether the task has its data and the budget pays one step and its evaluation.

        The step is the cheapest that a mix of all its sources allows.
        """
        return {name: there and self._prices.pays_cheapest(name) for name, there in self.available.items()}

    def pays_with(self, knob: str, value: Any) -> bool:
        """Return whether the budget pays a step of some legal algorithm with a knob at a value, the others cheapest."""
        return any(legal and self._prices.pays_cheapest(name, (knob, value)) for name, legal in self.legal().items())

    def pays_choices(self, algorithm: str, held: Mapping[str, Any]) -> bool:
        """Return whether the budget pays a step of an algorithm with some knobs at values, the others cheapest."""
        costly = tuple((name, value) for name, value in held.items() if name in COSTLY_KNOBS)
        return self.legal()[algorithm] and self._prices.pays_cheapest(algorithm, *costly)

    def fitted(self, recipe: Recipe) -> Recipe:
        """Return the recipe; where the budget cannot pay one step of it, with the largest batch that it can.

        Where no batch of the space is small enough, the other knobs that change a step's cost are lowered too. A recipe
        of an algorithm that is not legal is returned as it is.
        """
        if self._prices.pays(recipe) or not self.legal()[recipe.algorithm]:
            return recipe
        return self._prices.fitted(recipe)

    def ended(self, legal: Mapping[str, bool] | None = None) -> str | None:
        """Return why no further round may run (``"stop"``, ``"rounds"``, ``"patience"``, ``"budget"``), or None.

        Args:
            legal: what `legal` has just returned, where the caller has it.
        """
        budget = self.ledger.budget
        if self.stopped:
            return "stop"
        if self.rounds >= budget.max_rounds:
            return "rounds"
        if self.rounds_without_best >= budget.patience:
            return "patience"
        if not any((self.legal() if legal is None else legal).values()):
            return "budget"
        return None

    def closed(self) -> str | None:
        """Return the reason as `ended`, once a round or ``stop`` came to it; None while one more may be asked for.

        A search whose budget pays no round at all has ended before it began. It still takes one request, so that it
        can be played like any other: `run` then answers with a failure that costs nothing.
        """
        return self.ended() if self.stopped or self.outcomes else None

    def run(self, recipe: Recipe) -> Outcome:
        """Run one round to its evaluated end. A failure inside the round is an outcome, not an exception.

        Raises:
            ValueError: the search is closed, or the recipe is not in its space.
            JournalMismatchError: the journal holds another run.
        """
        return self.finish(self.begin(recipe))

    def begin(self, recipe: Recipe, steering: Steering | None = None) -> RunningRound:
        """Begin a round, parked before its first step; `finish` ends it.

        Args:
            recipe: what is asked.
            steering: how it is paused for adjustments; None for a round that is not, which an equal earlier one may
                answer. A steered round is always trained, or taken from the journal with its decisions.

        Raises:
            ValueError: the search is closed, a steered round is running, or the recipe is not in its space.
            JournalMismatchError: the journal holds another run.
        """
        reason = self.closed()
        if reason is not None:
            raise ValueError(f"the search has ended ({reason}); start a new one.")
        if self.running is not None:
            raise ValueError("a round is running; finish it before the next begins.")
        self.space.encode(recipe)
        start = self.checkpoints[recipe.start]
        refusal = self._refusal(recipe)
        if refusal is not None:
            running = RunningRound(recipe, start, self._seed_from(start))
            running.answer, running.origin = (_failed_report(recipe, start, running.seed, refusal), None), "refused"
            return running
        running = self._begin_legal(recipe, start, steering)
        if running.steered is not None:
            self.running = running
        return running

    def finish(self, running: RunningRound) -> Outcome:
        """Take the steps that are left of a round, evaluate its checkpoint, settle it and write it down."""
        self.running = None
        if running.origin == "refused":
            assert running.answer is not None  # that is what was refused
            return self._settle(running.answer[0], None, replayed=False)
        if running.origin == "cached":
            assert running.answer is not None
            return self._settle(*running.answer, replayed=False)
        report, made = self._trained(running) if running.answer is None else running.answer
        if running.origin == "trained":
            self._write_down(running, report, made)
        if made is not None:
            steps = report.steps if report.rolled_back_to is None else report.rolled_back_to
            self.records.made_by[made.id] = Origin(
                running.start.id,
                running.recipe,
                running.seed,
                steps,
                running.limit,
                report.adjustments,
                report.rolled_back_to is not None,
            )
            if made.weights is not None:
                self.records.kept[made.id] = made
        finished = report.ended == "finished" and not report.adjustments
        if finished or (report.failure is not None and report.failure.cause in _REPEATABLE and not report.adjustments):
            self._answers[running.key] = report
        outcome = self._settle(report, made, replayed=running.origin == "written")
        # Only now: while a journal is read back, its folder holds the weights of rounds that are still to come.
        self.records.keep_only(self._startable(), in_journal=running.origin == "trained")
        return outcome

    def close(self) -> None:
        """End the round that is running, if one is; nothing of it is kept."""
        running, self.running = self.running, None
        if running is not None:
            running.close()

    def _refusal(self, recipe: Recipe) -> Failure | None:
        """Return why the round cannot run, found before anything is loaded or charged; None when it can."""
        problem = self.space.problems[recipe.algorithm]
        if problem is not None:
            return failure("refused", 0, f"the decision space leaves {recipe.algorithm} out: {problem}"[:300])
        if not self.available[recipe.algorithm]:
            evidence = f"no source of the space has the rows {recipe.algorithm} trains on"
            return failure("no_data", 0, evidence)
        if not self._prices.pays_cheapest(recipe.algorithm):
            unit = self.ledger.budget.unit
            cheapest = self._prices.cheapest_step(recipe.algorithm) + self._prices.evaluation()
            evidence = f"{self.ledger.left:g} {unit} are left, one step and its evaluation can cost "
            return failure("unaffordable", 0, f"{evidence}{cheapest.in_unit(unit):g}")
        try:
            self.trainer.check(self.task, recipe)
        except ValueError as error:
            return failure("refused", 0, str(error)[:300])
        return None

    def weights_of(self, name: str) -> Checkpoint:
        """Return ``"base"``, ``"best"`` or ``"latest"`` with its weights, made again where a restart lost them."""
        return self.records.with_weights(self.checkpoints[name])

    def _begin_legal(self, recipe: Recipe, start: Checkpoint, steering: Steering | None) -> RunningRound:
        seed = self._seed_from(start)
        key = round_id(self.task, start, recipe, seed, self.trainer.ignored_settings(recipe.algorithm))
        quick_evaluations, quick_cost = self._quick_evaluations(recipe, steering)
        limit = self.ledger.reserve(self._prices.evaluation() + quick_cost)
        # What a round samples may follow from its limit; one in seconds would end a repeated round elsewhere.
        running = RunningRound(recipe, start, seed, key, None if limit.unit == "device_seconds" else limit)
        if steering is None and self._reuse and key in self._answers:
            answer = replace(self._answers[key], recipe=recipe, cached=True, wall_seconds=0.0)
            free = replace(answer, training_cost=Cost(), evaluation_cost=Cost())
            running.answer, running.origin = (free, _without_weights(answer, start)), "cached"
            return running
        if steering is not None:
            running.steering, running.charge = steering, self._charge_quick
        name = self.records.round_key(self.rounds)
        entry = self.records.entry(name, self._content(running))
        if entry is not None:
            report = RoundReport.from_dict(entry["report"])
            running.answer, running.origin = (report, _without_weights(report, start)), "written"
            if steering is not None and entry["trace"]:
                running.steered = WrittenRound(entry["trace"], lambda why: self.records.mismatch(name, why))
            return running
        try:
            session = self.trainer.begin(self.task, recipe, self.records.with_weights(start), seed, limit)
        except ValueError as error:  # what `check` cannot see before rows are tokenised
            fault = failure("rows_refused", 0, str(error)[:300])
        except Exception as error:
            _LOG.warning("a round could not begin", exc_info=True)
            fault = failure_from_exception(error, 0)
        else:
            running.session = session
            if steering is not None:
                quick = self._scoring.quick(steering.quick_items, quick_evaluations) if quick_evaluations else None
                running.steered = SteeredSession(session, running.sources, steering, quick)
            return running
        running.answer = _failed_report(recipe, start, seed, fault), None
        return running

    def _quick_evaluations(self, recipe: Recipe, steering: Steering | None) -> tuple[int, Cost]:
        """Return how many quick evaluations a round may have, and what they can cost: half of what is left at most."""
        if steering is None or not steering.quick_items:
            return 0, Cost()
        bound, unit = self._scoring.quick_bound(steering.quick_items), self.ledger.budget.unit
        each, half = bound.in_unit(unit), self.ledger.reserve(self._prices.evaluation()).amount / 2
        most = steering.pauses(recipe.steps)
        count = most if each == 0 else min(most, int(half // each))
        return count, bound.times(count)

    def _charge_quick(self, cost: Cost) -> float:
        return self.ledger.settle(f"quick evaluation in round {self.rounds + 1}", cost)

    def _content(self, running: RunningRound) -> dict[str, Any]:
        """Return what must be equal for a round to be the one that was written down."""
        steering = None if running.steering is None else asdict(running.steering)
        return {"round_id": running.key, "trainer": self.records.fingerprint, "steering": steering}

    def _settle(self, report: RoundReport, checkpoint: Checkpoint | None, replayed: bool) -> Outcome:
        best_before = self.scorecards["best"].score
        charged = self._settle_cost(f"round {self.rounds + 1}", report.cost, report.evaluation_cost.device_seconds)
        improved = False
        if checkpoint is not None and report.scorecard is not None:
            checkpoint = replace(checkpoint, weights=None)
            self.checkpoints["latest"], self.scorecards["latest"] = checkpoint, report.scorecard
            improved = report.scorecard.score > best_before
            if improved:
                self.checkpoints["best"], self.scorecards["best"] = checkpoint, report.scorecard
        outcome = Outcome(report, charged, best_before, self.scorecards["best"].score, improved, replayed)
        self.outcomes.append(outcome)
        return outcome

    def _settle_cost(self, purpose: str, cost: Cost, evaluation_seconds: float | None = None) -> float:
        seconds = cost.device_seconds if evaluation_seconds is None else evaluation_seconds
        self._prices.evaluation_seconds = seconds or self._prices.evaluation_seconds
        return self.ledger.settle(purpose, cost)

    def _seed_from(self, start: Checkpoint) -> int:
        return (self.seed + start.depth) % 2**31

    def _trained(self, running: RunningRound) -> tuple[RoundReport, Checkpoint | None]:
        session = running.session
        assert session is not None  # there was no answer without it
        try:
            if not session.done:
                session.advance()
            report, checkpoint = session.result()
        finally:
            session.close()
        return (report, None) if checkpoint is None else self._scoring.evaluated(report, checkpoint)

    def _evaluate_base(self, base: Checkpoint) -> tuple[Scorecard, Cost]:
        key = f"{self._episode}.base"
        # The limit decides where rounds are cut, the evaluation what they score: neither is part of a round's id.
        budget = self.ledger.budget
        content = {
            "task": self.task.built.content_hash,
            "seed": self.seed,
            "budget": [budget.unit, budget.limit],
            "trainer": self.records.fingerprint,
        }
        entry = self.records.entry(key, content)
        if entry is not None:
            return Scorecard.from_dict(entry["scorecard"]), Cost(**entry["cost"])
        scorecard, cost = self._scoring.base(base)
        self.records.append(key, {**content, "scorecard": scorecard.to_dict(), "cost": asdict(cost)})
        return scorecard, cost

    def _write_down(self, running: RunningRound, report: RoundReport, made: Checkpoint | None) -> None:
        if self._journal is None:
            return
        content = self._content(running)
        if running.steering is None:
            del content["steering"]  # an entry without one is of a round that was not paused
        else:
            content["trace"] = running.trace()
        self.records.write_round(self.rounds, made, {**content, "report": report.to_dict()})

    def _startable(self) -> set[str]:
        """Return the ids of the checkpoints that a later round can start from: now, or after a round is reused."""
        ids = {checkpoint.id for checkpoint in self.checkpoints.values()}
        if self._reuse:
            ids.update(report.checkpoint for report in self._answers.values() if report.checkpoint is not None)
        return ids

    def _usable_sources(self, algorithm: str) -> tuple[str, ...]:
        """Return the sources of the space that have the algorithm's rows on this task."""
        if algorithm not in self.trainer.algorithms:
            return ()
        there = self.trainer.usable_sources(self.task, algorithm)
        # A space made from another instance may know of no source: that one lacked a teacher, say.
        return tuple(name for name in self.space.usable[algorithm] or self.space.sources if name in there)


_REPEATABLE = ("hyperparameter", "data", "algorithm_mismatch")
"""Causes of failure that an equal round meets again; other rounds may succeed at a second try.

What an equal round samples and how it is rewarded follows from its seed, so one without a signal has none again.
"""


def _without_weights(report: RoundReport, start: Checkpoint) -> Checkpoint | None:
    return None if report.checkpoint is None else Checkpoint(report.checkpoint, None, start.depth + 1)


def _nothing_to_train_on(task: InnerTask, space: DecisionSpace) -> str:
    kinds = {name: sorted(source.rows) for name, source in task.built.sources.items()}
    removed = sum(task.built.leaked.values())
    leaked = f" {removed} rows were removed because they repeat a benchmark prompt." if removed else ""
    return (
        f"task {task.name!r}: no source has rows that {' or '.join(space.algorithms)} trains on; "
        f"sources and their kinds of rows: {kinds}.{leaked}"
    )


def _failed_report(recipe: Recipe, start: Checkpoint, seed: int, fault: Failure) -> RoundReport:
    return RoundReport(
        recipe=recipe, start=start.id, seed=seed, checkpoint=None, steps=0, ended="failed", failure=fault
    )


__all__ = ["JournalMismatchError", "Outcome", "Search"]
