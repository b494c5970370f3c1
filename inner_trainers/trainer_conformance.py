"""`TrainerConformance`: the contract of `InnerTrainer` as tests, for whoever brings a trainer of their own."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from typing import Any

from .adjustments import CATALOGUE, Adjustment
from .base import UNITS, InnerTrainer, Limit, QuickEvaluator, round_id
from .conformance_rounds import ConformanceRounds
from .conformance_rules import digest, ended, hold, hold_within, must_refuse
from .messages import where_raised
from .recipe import Recipe
from .tasks import InnerTask


class TrainerConformance(ConformanceRounds):
    """Tests of an `InnerTrainer`, to be inherited by a test class: ``class TestMine(TrainerConformance): ...``.

    About sixty rounds are begun, most of them for one step, so bring a task on which they are short. What to set is
    told in `ConformanceRounds`: ``trainer``, ``task``, ``recipe``, ``steps``.
    """

    # What it says of itself -----------------------------------------------------------------------------------------

    def test_it_has_every_part(self) -> None:
        """Methods and attributes of the protocol are there, and ``recorded`` is a truth value."""
        trainer = self.the_trainer()
        parts = sorted({"recorded", *(name for name in vars(InnerTrainer) if not name.startswith("_"))})
        missing = [part for part in parts if not hasattr(trainer, part)]
        hold(not missing, f"{type(trainer).__name__} lacks {', '.join(missing)}; see InnerTrainer")
        hold(isinstance(trainer.recorded, bool), f"recorded must be True or False, got {trainer.recorded!r}")

    def test_algorithms_are_named(self) -> None:
        """Algorithms are distinct names in a fixed order, and what each ignores are fields of a recipe."""
        trainer = self.the_trainer()
        names = trainer.algorithms
        well = isinstance(names, tuple) and names and all(isinstance(name, str) and name for name in names)
        hold(well, f"algorithms must be a tuple of names, got {names!r}")
        hold(len(set(names)) == len(names), f"algorithms names one twice: {names}")
        hold(trainer.algorithms == names, "algorithms are others when asked again")
        known = {field.name for field in fields(Recipe) if field.init}
        for name in names:
            foreign = set(trainer.ignored_settings(name)) - known
            hold(not foreign, f"ignored_settings({name!r}) has what is no field of a recipe: {sorted(foreign)}")
            unread = {"algorithm", "mix", "steps"} & set(trainer.ignored_settings(name))
            hold(not unread, f"ignored_settings({name!r}) has {sorted(unread)}, which every round reads")

    def test_fingerprint_is_plain(self) -> None:
        """The fingerprint is JSON and the same again, as a journal compares it."""
        one, other = self.the_trainer().fingerprint, self.the_trainer().fingerprint
        try:
            text = json.dumps(dict(one), sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise AssertionError(f"fingerprint must be plain JSON types: {error}") from None
        hold(text == json.dumps(dict(other), sort_keys=True), "fingerprint is another when asked again")

    def test_usable_sources_are_the_tasks(self) -> None:
        """Usable sources are sorted names of the task's sources."""
        trainer, task = self.the_trainer(), self.the_task()
        for name in trainer.algorithms:
            usable = list(trainer.usable_sources(task, name))
            hold(usable == sorted(usable), f"usable_sources for {name!r} must be sorted, got {usable}")
            foreign = set(usable) - set(task.built.sources)
            hold(not foreign, f"usable_sources for {name!r} names what the task does not have: {sorted(foreign)}")

    def test_base_is_the_base(self) -> None:
        """The base checkpoint has the id ``base`` and depth 0, and the number of parameters is one."""
        base = self.the_trainer().base(self.the_task())
        is_base = (base.id, base.depth) == ("base", 0)
        hold(is_base, f"base must have id 'base' and depth 0, got {base.id!r} and {base.depth}")
        count = self.the_trainer().parameters(self.the_task())
        hold(isinstance(count, int) and count > 0, f"parameters must be a positive integer, got {count!r}")

    def test_impossible_recipes_are_refused(self) -> None:
        """Unknown algorithms and sources are refused by ``check`` and by ``begin``, with their name."""
        trainer, task = self.the_trainer(), self.the_task()
        for name, recipe in (
            ("no-such-algorithm", replace(self.the_recipe(), algorithm="no-such-algorithm")),
            ("no-such-source", replace(self.the_recipe(), mix={"no-such-source": 1.0})),
        ):
            for what, refuse in (
                ("check", partial(trainer.check, task, recipe)),
                ("begin", partial(trainer.begin, task, recipe, trainer.base(task), 0)),
            ):
                try:
                    refuse()
                except ValueError as error:
                    hold(name in str(error), f"{what} refuses {name!r} without naming it: {error}")
                except Exception as error:
                    raise AssertionError(
                        f"{what} must refuse {name!r} with ValueError, got {where_raised(error)}"
                    ) from None
                else:
                    raise AssertionError(f"{what} accepts a recipe with {name!r}, which there is not")

    # Rounds ---------------------------------------------------------------------------------------------------------

    def test_it_begins_parked(self) -> None:
        """A round begins before its first step: nothing done, nothing trained, no signal, settings in force."""
        session = self._begin()
        try:
            hold(session.step == 0 and not session.done, f"begin must park before step 1, got step {session.step}")
            hold(session.cost.trained_tokens == 0, f"{session.cost.trained_tokens} tokens are trained before any step")
            hold(session.signals.step == 0, f"signals are of step {session.signals.step} before any step")
            rate = session.settings.get("learning_rate")
            wanted = self.the_recipe().learning_rate_at(1)
            hold(rate is None or math.isclose(rate, wanted), f"settings say learning rate {rate}, the recipe {wanted}")
        finally:
            session.close()

    def test_advance_takes_the_steps_asked(self) -> None:
        """``advance(1)`` takes one step, ``advance()`` the rest, and then there is none."""
        session = self._begin()
        try:
            row = session.advance(1)
            hold(session.step == 1, f"advance(1) took {session.step} steps")
            hold(row.get("step") == 1, f"advance must return the last step's curve row, with step 1, got {dict(row)}")
            session.advance()
            hold(session.done, "advance() without a number must take all steps, but the round is not done")
            hold(session.step == self.steps, f"the recipe has {self.steps} steps, {session.step} were taken")
            session.advance(5)
            hold(session.step == self.steps, "advance takes steps beyond the recipe's")
            report, checkpoint = session.result()
        finally:
            session.close()
        self._check_report(report, checkpoint, self.the_recipe())
        hold(report.ended == "finished", f"a round with all its steps has ended 'finished', got {ended(report)}")
        steps = [row.get("step") for row in report.curves]
        hold(steps == [float(i + 1) for i in range(self.steps)], f"curves must have a row per step, got steps {steps}")

    def test_cost_only_grows(self) -> None:
        """Cost never falls, is within the bound, and the report has what the session had."""
        trainer, task, recipe = self.the_trainer(), self.the_task(), self.the_recipe()
        bound = trainer.step_cost_bound(task, recipe)
        hold(
            any(bound.in_unit(unit) > 0 for unit in UNITS),
            "step_cost_bound is zero in every unit: rounds would be free",
        )
        session = self._begin()
        try:
            before = session.cost
            while not session.done and session.step < self.steps:
                session.advance(1)
                for unit in UNITS:
                    old, new = before.in_unit(unit), session.cost.in_unit(unit)
                    hold(new >= old, f"cost fell from {old:g} to {new:g} {unit} at step {session.step}")
                before = session.cost
                hold_within(before, bound.times(session.step), f"{session.step} steps", "step_cost_bound")
            report, _ = session.result()
        finally:
            session.close()
        for unit in ("train_tokens", "flops"):
            told, had = report.training_cost.in_unit(unit), before.in_unit(unit)
            hold(math.isclose(told, had, rel_tol=1e-9), f"the report says {told:g} {unit}, the session had {had:g}")

    def test_limit_is_never_passed(self) -> None:
        """What a limit pays is trained and no more; one that pays no step trains none."""
        trainer, task, recipe = self.the_trainer(), self.the_task(), self.the_recipe()
        bound = trainer.step_cost_bound(task, recipe)
        for unit in ("train_tokens", "flops"):
            price = bound.in_unit(unit)
            if price <= 0:
                continue
            for paid in (2, 0):
                limit = Limit(unit, price * (paid + 0.5))
                report = self._round(limit=limit).report
                spent = report.training_cost.in_unit(unit)
                hold(spent <= limit.amount, f"a limit of {limit.amount:g} {unit} was passed: {spent:g}")
                hold(
                    report.steps >= min(paid, self.steps),
                    f"a limit that pays {paid} steps at their highest price saw {report.steps}",
                )
                if paid == 0:
                    hold(report.steps == 0, f"a limit that may not pay one step saw {report.steps}")
                elif report.steps < self.steps:
                    hold(report.ended == "budget", f"a round cut at its limit has ended 'budget', got {ended(report)}")

    def test_close_is_idempotent(self) -> None:
        """``close`` can be called at any moment and again; then the round is done."""
        for steps in (0, 1):
            session = self._begin()
            if steps:
                session.advance(steps)
            session.close()
            session.close()
            hold(session.done, f"a round closed after {steps} steps is not done")
            hold(session.step == steps, f"a round closed after {steps} steps says {session.step}")
        session = self._begin()
        session.advance()
        session.result()
        session.close()
        session.close()

    def test_rounds_repeat(self) -> None:
        """The same seed gives the same curves, checkpoint and scores, wherever the round pauses."""
        one, other = self._round(), self._round(pause=1)
        for name in ("curves", "checkpoint", "steps", "ended", "supervised_tokens"):
            a, b = getattr(one.report, name), getattr(other.report, name)
            hold(a == b, f"{name} differ between two rounds of one seed, the second with a pause at each step")
        hold(digest(one.checkpoint) == digest(other.checkpoint), "weights differ between two rounds of one seed")

    def test_checkpoints_are_named(self) -> None:
        """A finished round's checkpoint is called after the round, so that equal rounds are recognised."""
        trainer, task, recipe = self.the_trainer(), self.the_task(), self.the_recipe()
        base, made = trainer.base(task), self._trained()
        wanted = round_id(task, base, recipe, 0, trainer.ignored_settings(recipe.algorithm))
        hold(
            made.id == wanted,
            f"the checkpoint of a finished round must be called {wanted} (base.round_id), got {made.id}",
        )
        hold(made.depth == 1, f"a round from the base makes depth 1, got {made.depth}")
        later = self._round(start=made).checkpoint
        hold(later is not None and later.depth == 2, "a round from a checkpoint of depth 1 makes one of depth 2")
        hold(later is not None and later.id != made.id, "rounds from other weights must have other checkpoint ids")

    def test_checkpoints_are_left_alone(self) -> None:
        """Later rounds and evaluations change no checkpoint, the base least of all."""
        trainer, task = self.the_trainer(), self.the_task()
        base, made = trainer.base(task), self._trained()
        before = digest(base), digest(made)
        self._round(start=made, seed=1)
        self._round(seed=2)
        trainer.evaluate(task, made, "validation")
        for name, old, checkpoint in zip(("the base", "a made"), before, (base, made), strict=True):
            hold(digest(checkpoint) == old, f"the weights of {name} checkpoint changed while later rounds trained")
        hold(digest(trainer.base(task)) == before[0], "base() gives other weights after rounds were trained")

    def test_recorded_is_honest(self) -> None:
        """Reports say whether they are recorded as the trainer does; a trainer that trains changes weights."""
        trainer, task = self.the_trainer(), self.the_task()
        done = self._round()
        hold(
            done.report.recorded == trainer.recorded,
            f"the trainer says recorded={trainer.recorded}, its report {done.report.recorded}",
        )
        changed = digest(done.checkpoint) != digest(trainer.base(task))
        hold(trainer.recorded or changed, f"recorded is False, but {self.steps} steps changed no weight")

    def test_failures_are_labelled(self) -> None:
        """A learning rate that no training stands, and a limit that pays nothing, end in reports, not in exceptions."""
        self._round(changes={"learning_rate": 1e6, "schedule": "constant"})
        report = self._round(limit=Limit("flops", 0.0)).report
        hold(report.steps == 0 or report.training_cost.flops == 0, "a limit of nothing was passed")

    # Adjustments ----------------------------------------------------------------------------------------------------

    def test_adjustments_are_applied_or_refused(self) -> None:
        """Each adjustment of the catalogue is refused with a sentence, or applied; refusing changes nothing."""
        sources = sorted(self.the_recipe().mix)
        for entry in CATALOGUE:
            adjustment = entry.adjustment(sources)
            if adjustment is None:
                continue
            session = self._begin()
            try:
                session.advance(1)
                before = dict(session.settings)
                reason = session.refusal(adjustment)
                well = reason is None or (isinstance(reason, str) and reason.strip())
                hold(well, f"refusal({adjustment}) must be None or a sentence, got {reason!r}")
                hold(dict(session.settings) == before, f"refusal({adjustment}) changed the settings")
                if reason is not None:
                    must_refuse(session, adjustment, f"{adjustment} is refused ({reason})")
                    hold(dict(session.settings) == before, f"{adjustment} was refused and changed the settings")
                    continue
                session.apply(adjustment)
                self._check_applied(session, adjustment, before)
            finally:
                session.close()

    def test_what_is_no_adjustment_is_refused(self) -> None:
        """Whatever is no `Adjustment` is refused with ValueError, and so is every change to a round that has ended."""
        session = self._begin()
        try:
            wrong: Any
            for wrong in ("lr_half", {"kind": "lr_scale", "value": 0.5}, None, 0.5):
                must_refuse(session, wrong, f"{wrong!r} is no Adjustment")
            session.advance()
            later = Adjustment("lr_scale", 0.5)
            hold(session.refusal(later), "refusal of a change to a round that has ended must be a sentence")
            must_refuse(session, later, "the round has ended")
        finally:
            session.close()

    # Evaluation -----------------------------------------------------------------------------------------------------

    def test_evaluation_repeats(self) -> None:
        """A checkpoint is scored the same again, on every dimension, within [0, 1] and the bound of its cost."""
        trainer, task = self.the_trainer(), self.the_task()
        for checkpoint in (trainer.base(task), self._trained()):
            for split in ("validation", "test"):
                one, cost = trainer.evaluate(task, checkpoint, split)
                other, _ = trainer.evaluate(task, checkpoint, split)
                hold(one == other, f"the {split} scorecard of checkpoint {checkpoint.id!r} is another when made again")
                self._check_scorecard(one, split)
                bound = trainer.evaluation_cost_bound(task, split)
                hold_within(cost, bound, f"evaluation on {split}", "evaluation_cost_bound")

    def test_quick_scores_change_nothing(self) -> None:
        """Where there are quick evaluations: they repeat, are in [0, 1], and leave the round as it was."""
        trainer, task = self.the_trainer(), self.the_task()
        if not isinstance(trainer, QuickEvaluator):
            return
        session = self._begin()
        try:
            session.advance(1)
            one, cost = trainer.quick_score(task, session, 2)
            other, _ = trainer.quick_score(task, session, 2)
            hold(one == other and 0 <= one <= 1, f"quick scores of one parked round are {one} and {other}")
            hold_within(cost, trainer.quick_cost_bound(task, 2), "a quick evaluation", "quick_cost_bound")
            session.advance()
            report, checkpoint = session.result()
        finally:
            session.close()
        whole = self._round()
        hold(report.curves == whole.report.curves, "a quick evaluation changed the curves of the round")
        hold(digest(checkpoint) == digest(whole.checkpoint), "a quick evaluation changed the weights of the round")


def trainer_findings(trainer: InnerTrainer, task: InnerTask) -> Iterator[tuple[str, str]]:
    """Yield (test, what is wrong) for each test of `TrainerConformance` that a trainer fails on a task."""

    class Checked(TrainerConformance):
        pass

    Checked.trainer, Checked.task = trainer, task
    for name in [name for name in vars(TrainerConformance) if name.startswith("test_")]:
        where = f"{type(trainer).__name__}, {name.removeprefix('test_').replace('_', ' ')}"
        try:
            getattr(Checked(), name)()
        except AssertionError as error:
            yield where, f"{error}."
        except Exception as error:  # whatever a person's trainer raises
            yield where, f"it raised {where_raised(error)}."
