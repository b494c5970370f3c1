"""Drives one round with a controller: advance, look, decide, apply, until the round is done."""

from __future__ import annotations

import numbers
import operator
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, overload, runtime_checkable

from ...inner_trainers.adjustments import CATALOGUE, NONE, Adjustment
from ...inner_trainers.base import TrainingSession
from ...inner_trainers.messages import first_line, require_integer
from ...inner_trainers.recipe import Recipe
from .base import Candidate, Controller, ControlState, Decision
from .decision_log import DecisionLog


@runtime_checkable
class OpeningController(Protocol):
    """A controller that also has a say before the first step, when there are no signals yet."""

    def opening(self, settings: Mapping[str, float]) -> Candidate | None:
        """Return what to do before the first step, called after `Controller.begin`; None for nothing.

        Args:
            settings: those in force for the first step.
        """


@dataclass
class Driven:
    """What came of driving a round.

    Attributes:
        looks: times the controller was asked.
        applied: adjustments that were applied.
        refused: adjustments that the session refused.
        decide_seconds: time in the controller, with the legality it looked up; a clock decides it.
        apply_seconds: time in applying.
        failure: why the controller was not asked any more, in words; None when it did not fail.
    """

    looks: int = 0
    applied: int = 0
    refused: int = 0
    decide_seconds: float = 0.0
    apply_seconds: float = 0.0
    failure: str | None = None


class LegalNow(Sequence[bool]):
    """Which catalogue entries can be applied now, each looked up when it is asked for.

    Raises:
        RuntimeError: on reading, after the round has gone on, an entry that was not looked up before.
    """

    __slots__ = ("_adjustments", "_known", "_session")

    def __init__(self, session: TrainingSession, adjustments: Sequence[Adjustment | None]) -> None:
        self._session: TrainingSession | None = session
        self._adjustments = adjustments
        self._known: list[bool | None] = [None] * len(adjustments)

    def __len__(self) -> int:
        return len(self._adjustments)

    @overload
    def __getitem__(self, index: int) -> bool: ...

    @overload
    def __getitem__(self, index: slice) -> list[bool]: ...

    def __getitem__(self, index: int | slice) -> bool | list[bool]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        known = self._known[index]
        if known is None:
            if self._session is None:
                raise RuntimeError("legality can be looked up only while the round is parked at the state's step.")
            adjustment = self._adjustments[index]
            known = adjustment is not None and self._session.refusal(adjustment) is None
            self._known[index] = known
        return known

    def round_goes_on(self) -> None:
        """Look nothing up from now on: the answer would be about another step."""
        self._session = None


class SettingsNow(Mapping[str, float]):
    """The settings in force, put together when one is asked for.

    Raises:
        RuntimeError: on reading, after the round has gone on, when none was read before.
    """

    __slots__ = ("_known", "_session")

    def __init__(self, session: TrainingSession) -> None:
        self._session: TrainingSession | None = session
        self._known: Mapping[str, float] | None = None

    def _settings(self) -> Mapping[str, float]:
        if self._known is None:
            if self._session is None:
                raise RuntimeError("settings can be looked up only while the round is parked at the state's step.")
            self._known = self._session.settings
        return self._known

    def __getitem__(self, name: str) -> float:
        return self._settings()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._settings())

    def __len__(self) -> int:
        return len(self._settings())

    def round_goes_on(self) -> None:
        """Look nothing up from now on: the answer would be about another step."""
        self._session = None


def drive_round(
    session: TrainingSession,
    recipe: Recipe,
    controller: Controller,
    *,
    sources: Sequence[str] | None = None,
    interval: int = 1,
    log: DecisionLog | None = None,
) -> Driven:
    """Take a round's steps to its end, and let a controller adjust it between them.

    A controller that raises, or whose decision is none or illegal, is not asked again: the round goes on unadjusted and
    its report is flagged once. Nothing is asked or applied once the round is done. An interrupt is not caught.

    Args:
        session: the round, as `InnerTrainer.begin` returned it; it is done when this returns, and not closed.
        recipe: what the round was asked to do.
        controller: what decides.
        sources: the sources that the catalogue's slots count; None for those of the recipe's mix. Sorted here.
        interval: steps between two decisions, in [1, 100000].
        log: where each decision is written down; None for nowhere. With one, the round is parked after every step, for
            its signals; that changes nothing about it.

    Raises:
        ValueError: an interval outside its range.
    """
    interval = require_integer("interval", interval, low=1, high=100_000)
    return _Drive(session, recipe, controller, sorted(recipe.mix if sources is None else sources), interval, log).run()


class _Drive:
    """One round being driven."""

    def __init__(
        self,
        session: TrainingSession,
        recipe: Recipe,
        controller: Controller,
        sources: Sequence[str],
        interval: int,
        log: DecisionLog | None,
    ) -> None:
        self._session, self._recipe, self._controller = session, recipe, controller
        self._sources, self._interval, self._log = tuple(sources), interval, log
        self._catalogue = [entry.adjustment(self._sources) for entry in CATALOGUE]
        self._flagged: set[str] = set()
        self._asked = True
        self._done = Driven()

    def run(self) -> Driven:
        session = self._session
        self._begin()
        began = session.step
        stride = self._interval if self._log is None else 1
        while not session.done:
            before, clock = session.step, time.perf_counter()
            row = session.advance(stride)
            advanced = time.perf_counter() - clock
            step = session.step
            if step == before and not session.done:
                raise RuntimeError(f"the session took no step after step {step} and is not done.")
            if step > before and self._log is not None:
                self._write("step", step, session.signals, row.get("learning_rate"))
            if session.done or not self._asked or (step - began) % self._interval:
                self._write("timings", step, self._times(advanced))
            else:
                self._look(advanced)
        self._write("finish")
        return self._done

    def _begin(self) -> None:
        """Tell the controller and the log of the round, and let the controller open it."""
        candidate: Candidate | None = None
        name, facts = type(self._controller).__name__, {}
        try:
            name = self._controller.name
            self._controller.begin(self._recipe, self._sources)
            facts = dict(self._controller.describe())
            if isinstance(self._controller, OpeningController) and not self._session.done:
                candidate = self._controller.opening(self._session.settings)
        except Exception as error:
            self._give_up(first_line(error))
        self._write("begin", self._recipe, self._sources, name, facts, self._interval)
        if candidate is not None and self._session.step == 0:
            state = self._state()
            decision = Decision(candidate, (candidate,))
            problem = self._problem(decision, state)
            if problem is None:
                self._carry_out(state, decision, {})
            else:
                self._give_up(problem)

    def _state(self) -> ControlState:
        session = self._session
        return ControlState(
            step=session.step,
            steps=self._recipe.steps,
            signals=session.signals,
            settings=SettingsNow(session),
            sources=self._sources,
            legal=LegalNow(session, self._catalogue),
        )

    def _look(self, advanced: float) -> None:
        clock = time.perf_counter()
        state = self._state()
        decision: Decision | None = None
        problem: str | None
        try:
            decision = self._controller.decide(state)
            problem = self._problem(decision, state)
        except Exception as error:
            problem = first_line(error)
        decided = time.perf_counter() - clock
        self._done.looks += 1
        self._done.decide_seconds += decided
        times = {**self._times(advanced), "decide": decided}
        if problem is not None or decision is None:
            self._give_up(str(problem))
            self._write("failed", state.step, str(problem))
            self._write("timings", state.step, times)
            return
        for sentence in decision.flags:
            self._flag(str(sentence))
        self._carry_out(state, decision, times)

    def _carry_out(self, state: ControlState, decision: Decision, times: dict[str, float]) -> None:
        clock = time.perf_counter()
        if self._log is not None:
            self._write("remember", state)  # mask and settings as they were when it was decided on
        for lazy in (state.legal, state.settings):
            if isinstance(lazy, LegalNow | SettingsNow):
                lazy.round_goes_on()
        looked_up = time.perf_counter()
        chosen = decision.chosen
        refused = None
        if chosen.adjustment.kind != "none":
            refused = self._apply(chosen)
        applied = time.perf_counter() - looked_up
        self._done.apply_seconds += applied
        self._write("decision", state, decision, refused)
        written = time.perf_counter() - clock - applied
        self._write("timings", state.step, {**times, "apply": applied, "log": written})

    def _apply(self, chosen: Candidate) -> str | None:
        """Apply an adjustment; return why the session refused it, None when it did not."""
        refused = self._session.refusal(chosen.adjustment)
        if refused is None:
            try:
                self._session.apply(chosen.adjustment)
            except ValueError as error:
                refused = first_line(error)
        if refused is None:
            self._done.applied += 1
        else:
            self._done.refused += 1
            self._flag(f"controller: {chosen.adjustment} by {chosen.by!r} was refused: {refused}")
        return refused

    def _problem(self, decision: object, state: ControlState) -> str | None:
        """Return what is wrong with a decision; None when it can be carried out."""
        if not isinstance(decision, Decision):
            return f"decide returned {type(decision).__name__}, expected a Decision"
        chosen = decision.chosen
        if not isinstance(chosen, Candidate) or not isinstance(chosen.adjustment, Adjustment):
            return f"the chosen candidate is {chosen!r}, expected a Candidate with an Adjustment"
        if not isinstance(decision.flags, tuple | list) or not isinstance(decision.candidates, tuple | list):
            return "flags and candidates must be tuples"
        if not all(isinstance(candidate, Candidate) for candidate in decision.candidates):
            return f"candidates must be Candidates, got {decision.candidates!r}"
        for candidate in (chosen, *decision.candidates):
            sure = candidate.confidence
            if isinstance(sure, bool) or not isinstance(sure, numbers.Real) or not 0 <= sure <= 1:
                return f"the confidence of {candidate.by!r} is {sure!r}, expected a number in [0, 1]"
            if not isinstance(candidate.by, str) or not isinstance(candidate.reason, str):
                return f"by and reason of a candidate must be text, got {candidate.by!r} and {candidate.reason!r}"
        if not isinstance(decision.held_back, Mapping):
            return f"held_back must be a mapping, got {decision.held_back!r}"
        if chosen.action is None:
            return None
        try:
            action = operator.index(chosen.action)
        except TypeError:
            return f"the chosen action is {chosen.action!r}, expected an index into the catalogue"
        if not 0 <= action < len(CATALOGUE):
            return f"the chosen action is {action}, the catalogue has {len(CATALOGUE)} entries"
        name = CATALOGUE[action].name
        if chosen.adjustment != self._catalogue[action]:
            return f"action {name} stands for {self._catalogue[action]}, got {chosen.adjustment}"
        if action != NONE and not state.legal[action]:
            return f"it chose {name}, which cannot be applied now"
        return None

    def _give_up(self, problem: str) -> None:
        """Go on without the controller."""
        self._asked = False
        self._done.failure = problem
        try:
            name = str(self._controller.name)
        except Exception:
            name = type(self._controller).__name__
        self._flag(
            f"controller {name!r} failed after step {self._session.step}: {problem}; the round goes on unadjusted"
        )

    def _flag(self, sentence: str) -> None:
        if sentence not in self._flagged:
            self._flagged.add(sentence)
            self._session.flag(sentence)

    def _times(self, advanced: float) -> dict[str, float]:
        """Return where the last step's time went so far, in seconds; the parts a session tells lie in ``advance``."""
        if self._log is None or self._log.level != "timings":
            return {}
        return {"advance": advanced, **getattr(self._session, "own_seconds", {})}

    def _write(self, what: str, *arguments: object) -> None:
        """Write to the log; one that cannot be written any more is given up, not the round."""
        if self._log is None:
            return
        try:
            getattr(self._log, what)(*arguments)
        except Exception as error:  # a full disk, or facts of a person's controller that are no JSON
            self._log = None
            self._flag(f"the decision log ends after step {self._session.step}: {first_line(error)}")
