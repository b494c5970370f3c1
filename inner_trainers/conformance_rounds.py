"""Makes the rounds of `TrainerConformance`, and holds what they report to the rules that hold of every round."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from .adjustments import Adjustment
from .base import CAUSES, Checkpoint, InnerTrainer, Limit, RoundReport, Scorecard
from .conformance_rules import ended, hold
from .recipe import Recipe
from .tasks import InnerTask, resolve_task

ENDED = ("finished", "budget", "stopped", "rolled_back", "failed")


@dataclass(frozen=True)
class _Round:
    report: RoundReport
    checkpoint: Checkpoint | None


class ConformanceRounds:
    """What is tested: a trainer on a task, with one recipe.

    Attributes:
        trainer: the trainer, or a class or function that makes it; None for the task's own.
        task: what it trains on: an object, a class or a name that `resolve_task` takes.
        recipe: fields of the recipe; those that are left out are chosen: ``sft``, or else the first algorithm that some
            source can be used with, and those sources in equal parts.
        steps: optimiser steps of a whole round, at least 3.
    """

    trainer: Any = None
    task: Any = None
    recipe: Mapping[str, Any] = {}
    steps: int = 4

    def the_task(self) -> InnerTask:
        """Return the task, made once per class."""
        made: dict[str, Any] = self._made()
        if "task" not in made:
            family = resolve_task(type(self).task)
            made["task"] = family.instance(family.train_seeds[0])
        task: InnerTask = made["task"]
        return task

    def the_trainer(self) -> InnerTrainer:
        """Return the trainer, made once per class."""
        made = self._made()
        if "trainer" not in made:
            given: Any = vars(type(self)).get("trainer", type(self).trainer)
            given = given.__func__ if isinstance(given, staticmethod) else given
            if given is None:
                given = self.the_task().trainer()
            made["trainer"] = given() if isinstance(given, type) or not hasattr(given, "begin") else given
        trainer: InnerTrainer = made["trainer"]
        return trainer

    def the_recipe(self, **changes: Any) -> Recipe:
        """Return the recipe of the rounds, with some fields changed."""
        trainer, task, given = self.the_trainer(), self.the_task(), dict(type(self).recipe)
        usable = {name: trainer.usable_sources(task, name) for name in trainer.algorithms}
        if "algorithm" not in given:
            names = [name for name in trainer.algorithms if usable[name]]
            hold(names, "no algorithm can use any source of the task, so no round can be trained")
            given["algorithm"] = "sft" if "sft" in names else names[0]  # what samples may find no signal
        if "mix" not in given:
            sources = usable.get(given["algorithm"], ())
            hold(sources, f"no source of the task can be used with {given['algorithm']!r}")
            given["mix"] = {source: 1 / len(sources) for source in sources}
        fields_of = {"start": "base", **task.recipe_defaults(), **given, "steps": self.steps, **changes}
        return Recipe.from_dict(fields_of)

    def _made(self) -> dict[str, Any]:
        """Return what was made for this very class."""
        if "_kept" not in vars(type(self)):
            type(self)._kept = {}  # type: ignore[attr-defined]
        made: dict[str, Any] = vars(type(self))["_kept"]
        return made

    def _begin(self, start: Checkpoint | None = None, seed: int = 0, limit: Limit | None = None, **changes: Any) -> Any:
        trainer, task = self.the_trainer(), self.the_task()
        start = trainer.base(task) if start is None else start
        return trainer.begin(task, self.the_recipe(**changes), start, seed, limit)

    def _round(
        self,
        start: Checkpoint | None = None,
        seed: int = 0,
        limit: Limit | None = None,
        pause: int | None = None,
        changes: Mapping[str, Any] | None = None,
    ) -> _Round:
        """Train a whole round and hold its report to the rules."""
        session = self._begin(start, seed, limit, **(changes or {}))
        try:
            for _ in range(self.steps):
                if not session.done:
                    session.advance(pause)
            report, checkpoint = session.result()
        finally:
            session.close()
        self._check_report(report, checkpoint, self.the_recipe(**(changes or {})), seed)
        return _Round(report, checkpoint)

    def _trained(self) -> Checkpoint:
        """Return the checkpoint of a whole round from the base."""
        done = self._round()
        hold(done.checkpoint is not None, f"a round must return a checkpoint, but it ended {ended(done.report)}")
        assert done.checkpoint is not None
        return done.checkpoint

    def _check_report(self, report: RoundReport, made: Checkpoint | None, recipe: Recipe, seed: int = 0) -> None:
        hold(report.recipe == recipe, f"the report's recipe is not the one that was asked: {report.recipe}")
        hold(report.seed == seed, f"the report's seed is {report.seed}, asked was {seed}")
        hold(report.ended in ENDED, f"ended must be one of {', '.join(ENDED)}, got {report.ended!r}")
        hold(report.checkpoint == (None if made is None else made.id), "report and checkpoint have other ids")
        hold(report.scorecard is None, "the report of a session has no scorecard until it is evaluated")
        failed = report.failure is not None
        hold(
            failed == (report.ended == "failed"),
            f"a failure and ended='failed' go together, got {report.failure} and {report.ended!r}",
        )
        hold(failed == (made is None), "a failed round has no checkpoint, every other has one")
        if report.failure is not None:
            cause = report.failure.cause
            hold(cause in CAUSES, f"a failure's cause must be one of {', '.join(CAUSES)}, got {cause!r}")
            hold(report.failure.kind and report.failure.evidence, "a failure must name its kind and its evidence")
        again = RoundReport.from_dict(json.loads(json.dumps(report.to_dict())))
        told = [f.name for f in fields(RoundReport) if f.compare and f.name != "curves"]
        lost = [name for name in told if getattr(again, name) != getattr(report, name)]
        hold(not lost, f"the report does not come back from JSON as it was: {', '.join(lost)}")

    def _check_scorecard(self, card: Scorecard, split: str) -> None:
        weights = self.the_task().built.benchmark.weights
        hold(card.split == split, f"the scorecard's split is {card.split!r}, asked was {split!r}")
        hold(set(card.dimensions) == set(weights), f"scored are {sorted(card.dimensions)}, weighted {sorted(weights)}")
        for name, entry in card.dimensions.items():
            well = all(0 <= getattr(entry, one) <= 1 for one in ("mean", "pass_at_1", "pass_at_k", "format_rate"))
            hold(well and entry.standard_error >= 0, f"dimension {name!r} has a figure outside [0, 1]: {entry}")
        mean = math.fsum(weights[name] * entry.mean for name, entry in card.dimensions.items())
        hold(abs(card.score - mean) < 1e-6, f"score {card.score} is not the weighted mean of dimensions, {mean}")

    def _check_applied(self, session: Any, adjustment: Adjustment, before: Mapping[str, float]) -> None:
        after = dict(session.settings)
        if adjustment.kind == "stop":
            session.advance(1)
            hold(session.done and session.step == 1, "stop must end the round after the step that is done")
            hold(session.result()[0].ended == "stopped", "a stopped round has ended 'stopped'")
            return
        if adjustment.kind == "lr_scale" and "learning_rate" in before:
            wanted = before["learning_rate"] * adjustment.number
            hold(
                math.isclose(after["learning_rate"], wanted),
                f"{adjustment} made the learning rate {after['learning_rate']:g}, expected {wanted:g}",
            )
            used = session.advance(1).get("learning_rate")
            hold(
                used is None or math.isclose(used, wanted),
                f"after {adjustment} the next step used the learning rate {used:g}, expected {wanted:g}",
            )
        bad = [name for name, value in after.items() if not math.isfinite(value)]
        hold(not bad, f"after {adjustment} settings are not finite: {bad}")
        session.advance()
        report, checkpoint = session.result()
        self._check_report(report, checkpoint, self.the_recipe())
        told = [applied for _, applied in report.adjustments]
        hold(
            adjustment.kind == "none" or adjustment in told, f"{adjustment} was applied, but the report does not say so"
        )
