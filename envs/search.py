"""One search over recipes on one task: checkpoints, scores, ledger; runs rounds and writes each down.

The environment is a thin face over this class, so tools that know no Gymnasium can search by the same rules.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..inner_trainers.base import Checkpoint, Cost, Failure, InnerTrainer, Limit, RoundReport, Scorecard, round_id
from ..inner_trainers.evaluation import completion_flags
from ..inner_trainers.fault_kinds import FAULTS, failure
from ..inner_trainers.faults import failure_from_exception
from ..inner_trainers.probe_rounds import memory_to_hold_to, run_round
from ..inner_trainers.probes import BatchSizeProbe, LearningRateProbe, batch_size_probe, learning_rate_probe
from ..inner_trainers.recipe import STARTS, Recipe
from ..inner_trainers.tasks.base import InnerTask
from .budget import Budget, BudgetLedger
from .decision_space import COSTLY_KNOBS, DecisionSpace
from .journal import Journal
from .probe_log import ProbeLog

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
        reuse: whether an equal round of this search is answered from memory at cost 0. The weights of every finished
            round are then kept, in memory and in the journal's folder; else those of base, best and latest alone.

    Attributes:
        checkpoints: ``"base"``, ``"best"`` and ``"latest"`` -> checkpoint; `weights_of` has their weights.
        scorecards: the same names -> validation scorecard.
        ledger: what was spent.
        outcomes: every round so far.
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
        self.probes: list[LearningRateProbe | BatchSizeProbe] = []
        self.stopped = False
        self._journal, self._episode, self._reuse = journal, episode, reuse
        self._fingerprint = json.loads(json.dumps(dict(trainer.fingerprint)))
        self._answers: dict[str, RoundReport] = {}
        # id -> id of the start, recipe, seed, steps, limit
        self._made_by: dict[str, tuple[str, Recipe, int, int, Limit | None]] = {}
        self._bounds: dict[Any, Cost] = {}
        self._sources = {name: self._usable_sources(name) for name in space.algorithms}
        self.available = {name: bool(sources) for name, sources in self._sources.items()}
        if not any(self.available.values()):
            raise ValueError(_nothing_to_train_on(task, space))
        self._evaluation_bound = trainer.evaluation_cost_bound(task, "validation")
        self._evaluation_seconds = 0.0
        base = trainer.base(task)
        self._kept: dict[str, Checkpoint] = {base.id: base}  # checkpoints with their weights
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
        return {name: there and self._pays_cheapest(name) for name, there in self.available.items()}

    def pays_with(self, knob: str, value: Any) -> bool:
        """Return whether the budget pays a step of some legal algorithm with a knob at a value, the others cheapest."""
        return any(legal and self._pays_cheapest(name, (knob, value)) for name, legal in self.legal().items())

    def fitted(self, recipe: Recipe) -> Recipe:
        """Return the recipe; where the budget cannot pay one step of it, with the largest batch that it can.

        Where no batch of the space is small enough, the other knobs that change a step's cost are lowered too. A recipe
        of an algorithm that is not legal is returned as it is.
        """
        if self._pays(recipe) or not self.legal()[recipe.algorithm]:
            return recipe
        for cheaper in (recipe, *self.space.cheaper_recipes(recipe)):
            found = self.space.with_largest_batch(cheaper, self._pays)
            if found is not None:
                return found
        return recipe

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
        reason = self.closed()
        if reason is not None:
            raise ValueError(f"the search has ended ({reason}); start a new one.")
        self.space.encode(recipe)
        start = self.checkpoints[recipe.start]
        refusal = self._refusal(recipe)
        if refusal is not None:
            return self._settle(_failed_report(recipe, start, self._seed_from(start), refusal), None, replayed=False)
        return self._run_legal(recipe, start)

    def probe_learning_rate(self, recipe: Recipe, **settings: Any) -> LearningRateProbe:
        """Return what short rounds at several learning rates show; they are charged, and no checkpoint comes of them.

        What the evaluation of a round can cost is kept back.

        Args:
            recipe: what is asked; it need not be in the space, whose range the probe may narrow.
            **settings: ``low``, ``high``, ``points`` and ``steps_per_point`` of `learning_rate_probe`.

        Raises:
            ValueError: the search is closed, or a setting or recipe that `learning_rate_probe` refuses.
            JournalMismatchError: the journal holds another run.
        """
        found = learning_rate_probe(**self._probed("learning rate", recipe), **settings)
        self.probes.append(found)
        return found

    def probe_batch_size(self, recipe: Recipe, *, memory_bytes: int | None = None, **settings: Any) -> BatchSizeProbe:
        """Return which batches fit into memory; the steps are charged, and no checkpoint comes of them.

        Where the limit is what the system can give, a restarted search keeps to the one that was written down.

        Args:
            recipe: what is asked; it need not be in the space, whose batches the probe may narrow.
            memory_bytes: see `batch_size_probe`.
            **settings: ``candidates`` of `batch_size_probe`.

        Raises:
            ValueError: the search is closed, or a setting or recipe that `batch_size_probe` refuses.
            JournalMismatchError: the journal holds another run.
        """
        written = None if self._journal is None else self._journal.entry(f"{self._probe_key()}.0")
        if memory_bytes is None:
            memory_bytes = memory_to_hold_to(self.trainer) if written is None else written.get("memory_bytes")
        common = self._probed("batch size", recipe, memory_bytes=memory_bytes)
        found = batch_size_probe(**common, memory_bytes=memory_bytes, **settings)
        self.probes.append(found)
        return found

    def _probe_key(self) -> str:
        return f"{self._episode}.probe{len(self.probes)}"

    def _probed(self, what: str, recipe: Recipe, **facts: Any) -> dict[str, Any]:
        """Return what every probe is given: the checkpoint, what it may cost, and rounds that are written down."""
        reason = self.closed()
        if reason is not None:
            raise ValueError(f"the search has ended ({reason}); start a new one.")
        start = self.checkpoints[recipe.start]
        seed = self._seed_from(start)

        def content(tried: Recipe) -> dict[str, Any]:
            ignored = self.trainer.ignored_settings(tried.algorithm)
            identity = round_id(self.task, start, tried, seed, ignored)
            return {"probe": what, "round": self.rounds, "round_id": identity, "trainer": self._fingerprint}

        def train(tried: Recipe, limit: Limit | None) -> RoundReport:
            return run_round(self.trainer, self.task, self._with_weights(start), seed, tried, limit)

        log = ProbeLog(
            key=self._probe_key(),
            purpose=f"{what} probe",
            ledger=self.ledger,
            journal=self._journal,
            lookup=self._entry,
            content=content,
            train=train,
            facts=facts,
        )
        limit = self.ledger.reserve(self._evaluation_cost())
        common = {"trainer": self.trainer, "task": self.task, "recipe": recipe, "start": start, "seed": seed}
        return {**common, "limit": limit, "run": log.run}

    def _refusal(self, recipe: Recipe) -> Failure | None:
        """Return why the round cannot run, found before anything is loaded or charged; None when it can."""
        if not self.available[recipe.algorithm]:
            evidence = f"no source of the space has the rows {recipe.algorithm} trains on"
            return failure("no_data", 0, evidence)
        if not self._pays_cheapest(recipe.algorithm):
            unit = self.ledger.budget.unit
            cheapest = self._cheapest_step(recipe.algorithm) + self._evaluation_cost()
            evidence = f"{self.ledger.left:g} {unit} are left, one step and its evaluation can cost "
            return failure("unaffordable", 0, f"{evidence}{cheapest.in_unit(unit):g}")
        try:
            self.trainer.check(self.task, recipe)
        except ValueError as error:
            return failure("refused", 0, str(error)[:300])
        return None

    def weights_of(self, name: str) -> Checkpoint:
        """Return ``"base"``, ``"best"`` or ``"latest"`` with its weights, made again where a restart lost them."""
        return self._with_weights(self.checkpoints[name])

    def _run_legal(self, recipe: Recipe, start: Checkpoint) -> Outcome:
        seed = self._seed_from(start)
        key = round_id(self.task, start, recipe, seed, self.trainer.ignored_settings(recipe.algorithm))
        if self._reuse and key in self._answers:
            answer = replace(self._answers[key], recipe=recipe, cached=True, wall_seconds=0.0)
            free = replace(answer, training_cost=Cost(), evaluation_cost=Cost())
            return self._settle(free, _without_weights(answer, start), replayed=False)
        # What a round samples may follow from its limit; one in seconds would end a repeated round elsewhere.
        limit = None if self.ledger.budget.unit == "device_seconds" else self.ledger.reserve(self._evaluation_cost())
        written = self._written_down(key)
        if written is not None:
            report, made = written, _without_weights(written, start)
        else:
            report, made = self._train(recipe, self._with_weights(start), seed)
            self._write_down(key, report, made)
        if made is not None:
            steps = report.steps if report.rolled_back_to is None else report.rolled_back_to
            self._made_by[made.id] = (start.id, recipe, seed, steps, limit)
            if made.weights is not None:
                self._kept[made.id] = made
        if report.ended == "finished" or (report.failure is not None and report.failure.cause in _REPEATABLE):
            self._answers[key] = report
        outcome = self._settle(report, made, replayed=written is not None)
        self._drop_weights()
        if self._journal is not None and written is None:
            # Only now: while a journal is read back, its folder holds the weights of rounds that are still to come.
            self._journal.keep_only(self._startable())
        return outcome

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
        self._evaluation_seconds = seconds or self._evaluation_seconds
        return self.ledger.settle(purpose, cost)

    def _seed_from(self, start: Checkpoint) -> int:
        return (self.seed + start.depth) % 2**31

    def _train(self, recipe: Recipe, start: Checkpoint, seed: int) -> tuple[RoundReport, Checkpoint | None]:
        limit = self.ledger.reserve(self._evaluation_cost())
        try:
            session = self.trainer.begin(self.task, recipe, start, seed, limit)
        except ValueError as error:  # what `check` cannot see before rows are tokenised
            return _failed_report(recipe, start, seed, failure("rows_refused", 0, str(error)[:300])), None
        except Exception as error:
            _LOG.warning("a round could not begin", exc_info=True)
            return _failed_report(recipe, start, seed, failure_from_exception(error, 0)), None
        try:
            session.advance()
            report, checkpoint = session.result()
        finally:
            session.close()
        return (report, None) if checkpoint is None else self._evaluated(report, checkpoint)

    def _evaluated(self, report: RoundReport, checkpoint: Checkpoint) -> tuple[RoundReport, Checkpoint | None]:
        began = time.perf_counter()
        # What an evaluation that raised has used is not known: it is charged the most it can have been.
        cost = self._evaluation_bound
        try:
            scorecard, cost = self.trainer.evaluate(self.task, checkpoint, "validation")
            _require_finite(scorecard)
        except Exception as error:
            _LOG.warning("evaluation failed", exc_info=True)
            fault = failure_from_exception(error, report.steps)
            if fault.kind == "trainer_raised":
                fault = replace(fault, kind="evaluation_raised", cause=FAULTS["evaluation_raised"].cause)
            if cost is self._evaluation_bound:
                cost = replace(cost, device_seconds=time.perf_counter() - began)
            return replace(report, failure=fault, ended="failed", checkpoint=None, evaluation_cost=cost), None
        flags = report.flags + completion_flags(scorecard)
        return replace(report, scorecard=scorecard, evaluation_cost=cost, flags=flags), checkpoint

    def _evaluate_base(self, base: Checkpoint) -> tuple[Scorecard, Cost]:
        key = f"{self._episode}.base"
        # The limit decides where rounds are cut, the evaluation what they score: neither is part of a round's id.
        budget = self.ledger.budget
        content = {
            "task": self.task.built.content_hash,
            "seed": self.seed,
            "budget": [budget.unit, budget.limit],
            "trainer": self._fingerprint,
        }
        entry = self._entry(key, content)
        if entry is not None:
            return Scorecard.from_dict(entry["scorecard"]), Cost(**entry["cost"])
        scorecard, cost = self.trainer.evaluate(self.task, base, "validation")
        _require_finite(scorecard)
        if self._journal is not None:
            self._journal.append(key, {**content, "scorecard": scorecard.to_dict(), "cost": asdict(cost)})
        return scorecard, cost

    def _entry(self, key: str, content: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the journal's entry of a key; None when there is none.

        Raises:
            JournalMismatchError: it was written for other ``content``.
        """
        entry = None if self._journal is None else self._journal.entry(key)
        if entry is not None and {name: entry.get(name) for name in content} != dict(content):
            raise JournalMismatchError(_mismatch(self._journal, key))
        return entry

    def _written_down(self, key: str) -> RoundReport | None:
        entry = self._entry(f"{self._episode}.{self.rounds}", {"round_id": key, "trainer": self._fingerprint})
        return None if entry is None else RoundReport.from_dict(entry["report"])

    def _write_down(self, key: str, report: RoundReport, made: Checkpoint | None) -> None:
        if self._journal is None:
            return
        if made is not None:
            self._journal.save_weights(made)
        payload: dict[str, Any] = {"round_id": key, "episode": self._episode, "round": self.rounds}
        payload["trainer"] = self._fingerprint
        payload["instance"] = self.task.facts()
        self._journal.append(f"{self._episode}.{self.rounds}", {**payload, "report": report.to_dict()})

    def _startable(self) -> set[str]:
        """Return the ids of the checkpoints that a later round can start from: now, or after a round is reused."""
        ids = {checkpoint.id for checkpoint in self.checkpoints.values()}
        if self._reuse:
            ids.update(report.checkpoint for report in self._answers.values() if report.checkpoint is not None)
        return ids

    def _drop_weights(self) -> None:
        startable = self._startable()
        self._kept = {name: kept for name, kept in self._kept.items() if name in startable or name == "base"}

    def _with_weights(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint with weights: from memory, from disk, or by repeating the round that made it."""
        if checkpoint.id not in self._kept:
            weights = None if self._journal is None else self._journal.weights(checkpoint.id)
            loaded = replace(checkpoint, weights=self._make_again(checkpoint) if weights is None else weights)
            if weights is None and self._journal is not None:
                self._journal.save_weights(loaded)
            self._kept[checkpoint.id] = loaded
        return self._kept[checkpoint.id]

    def _make_again(self, checkpoint: Checkpoint) -> Any:
        """Return the weights of a checkpoint of a journal that lost them; the round was charged when it first ran."""
        _LOG.warning("the weights of checkpoint %s were not kept; its round is repeated", checkpoint.id)
        parent, recipe, seed, steps, limit = self._made_by[checkpoint.id]
        start = self._with_weights(Checkpoint(parent, None, checkpoint.depth - 1))
        session = self.trainer.begin(self.task, recipe, start, seed, limit)
        try:
            session.advance(steps)
            report, made = session.result()
        finally:
            session.close()
        if made is None:
            reason = "" if report.failure is None else f" ({report.failure.evidence})"
            raise RuntimeError(f"the round that made checkpoint {checkpoint.id} failed when it was repeated{reason}.")
        return made.weights

    def _usable_sources(self, algorithm: str) -> tuple[str, ...]:
        """Return the sources of the space that have the algorithm's rows on this task."""
        if algorithm not in self.trainer.algorithms:
            return ()
        there = self.trainer.usable_sources(self.task, algorithm)
        # A space made from another instance may know of no source: that one lacked a teacher, say.
        return tuple(name for name in self.space.usable[algorithm] or self.space.sources if name in there)

    def _evaluation_cost(self) -> Cost:
        """Return what is kept back for the next evaluation: the most it can cost, in seconds what the last one took."""
        return replace(self._evaluation_bound, device_seconds=self._evaluation_seconds)

    def _pays(self, recipe: Recipe) -> bool:
        try:
            bound = self._step_bound(recipe)
        except ValueError:  # it is refused for another reason than its price
            return True
        return self.ledger.can_pay(bound, self._evaluation_cost())

    def _pays_cheapest(self, algorithm: str, held: tuple[str, Any] | None = None) -> bool:
        return self.ledger.can_pay(self._cheapest_step(algorithm, held), self._evaluation_cost())

    def _cheapest_step(self, algorithm: str, held: tuple[str, Any] | None = None) -> Cost:
        """Return the bound of the algorithm's cheapest step on a mix of all its sources, with one knob ``held``."""
        key = (algorithm, held)
        if key not in self._bounds:
            knobs = {} if held is None else {held[0]: held[1]}
            recipes = self.space.cheapest_recipes(algorithm, self._sources[algorithm], **knobs)
            unit = self.ledger.budget.unit
            self._bounds[key] = min(map(self._step_bound, recipes), key=lambda cost: cost.in_unit(unit))
        return self._bounds[key]

    def _step_bound(self, recipe: Recipe) -> Cost:
        used = tuple(name for name, weight in recipe.mix.items() if weight > 0)
        key = (recipe.algorithm, used, *(getattr(recipe, name) for name in (*COSTLY_KNOBS, "num_generations")))
        if key not in self._bounds:
            self._bounds[key] = self.trainer.step_cost_bound(self.task, recipe)
        return self._bounds[key]


_REPEATABLE = ("hyperparameter", "data", "algorithm_mismatch")
"""Causes of failure that an equal round meets again; other rounds may succeed at a second try.

What an equal round samples and how it is rewarded follows from its seed, so one without a signal has none again.
"""


def _without_weights(report: RoundReport, start: Checkpoint) -> Checkpoint | None:
    return None if report.checkpoint is None else Checkpoint(report.checkpoint, None, start.depth + 1)


def _require_finite(scorecard: Scorecard) -> None:
    if not (math.isfinite(scorecard.score) and math.isfinite(scorecard.standard_error)):
        raise ValueError(f"evaluation: {scorecard.score} ± {scorecard.standard_error} is no finite score.")


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


def _mismatch(journal: Journal | None, key: str) -> str:
    path = None if journal is None else journal.path
    return (
        f"{path}, entry {key}: it was written by a run with another task, seed, trainer or settings than this one. "
        "Resume with the settings the folder was made with, or use a new folder."
    )
