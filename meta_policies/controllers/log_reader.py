"""Reads the decision log of a folder back: rounds, their decisions, effects, signals and timings."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ...inner_trainers.adjustments import CATALOGUE_NAMES, Adjustment
from ...inner_trainers.recipe import Recipe
from ...inner_trainers.signals import SIGNALS, Signals
from .base import ControlState
from .decision_log import FORMAT, LEVELS

_T = TypeVar("_T")


@dataclass(frozen=True)
class LoggedCandidate:
    """Something that was thought of.

    Attributes:
        what: name of the catalogue entry, or the adjustment in words.
        by: which rule, net or schedule proposed it.
        reason: why.
        confidence: in [0, 1].
    """

    what: str
    by: str
    reason: str
    confidence: float


@dataclass(frozen=True)
class LoggedDecision:
    """One decision.

    Attributes:
        state: what the controller saw; step 0 for what a schedule did before the first step.
        chosen: name of the catalogue entry, or the adjustment in words.
        adjustment: what was chosen.
        by: who decided.
        reason: why.
        confidence: in [0, 1].
        candidates: everything that was thought of.
        held_back: by -> why it was not chosen.
        learning_rate: rate that the last step used; None before the first.
        flags: sentences for a person.
        refused: why the session refused it; None when it did not.
    """

    state: ControlState
    chosen: str
    adjustment: Adjustment
    by: str
    reason: str
    confidence: float
    candidates: tuple[LoggedCandidate, ...]
    held_back: Mapping[str, str]
    learning_rate: float | None
    flags: tuple[str, ...] = ()
    refused: str | None = None

    @property
    def step(self) -> int:
        """Optimiser steps done then."""
        return self.state.step

    @property
    def applied(self) -> bool:
        """Whether it changed the round."""
        return self.adjustment.kind != "none" and self.refused is None


@dataclass(frozen=True)
class LoggedEffect:
    """What came after an adjustment.

    Attributes:
        step: optimiser steps done when it was applied.
        what: the adjustment in words.
        by: who decided.
        objective: ``"reward"`` or ``"loss"``.
        before: mean over up to `horizon` steps before; None when there are none.
        after: the same after it.
        change: ``after - before``.
        better: whether the reward rose or the loss fell.
        steps_before: steps in ``before``.
        steps_after: steps in ``after``.
        others: other adjustments whose spans overlap with it, so that the change may be theirs.
    """

    step: int
    what: str
    by: str
    objective: str
    before: float | None
    after: float | None
    change: float | None
    better: bool | None
    steps_before: int
    steps_after: int
    others: int


@dataclass(frozen=True)
class LoggedStep:
    """The raw signals of one step: level ``signals``.

    Attributes:
        step: the step, from 1.
        learning_rate: rate it used.
        values: signal -> value, of those that are there.
        broken: signals whose value was not finite.
    """

    step: int
    learning_rate: float | None
    values: Mapping[str, float]
    broken: tuple[str, ...] = ()


@dataclass
class RoundLog:
    """One round of a log.

    Attributes:
        recipe: what the round was asked to do.
        sources: its sources, sorted.
        controller: the controller's name.
        facts: what the controller says about itself.
        interval: steps between two decisions.
        horizon: steps of an effect.
        decisions: in order, ``none`` too.
        effects: in the order they were complete.
        failure: (step, why) when the controller was given up.
        end: how the round ended (``ended``, ``steps``, ``failure``, ...); None when the log has no word of it.
        steps: raw signals, when the log has them.
        timings: step -> where its time went, in seconds, when the log has them.
    """

    recipe: Recipe
    sources: tuple[str, ...]
    controller: str
    facts: Mapping[str, Any]
    interval: int
    horizon: int
    decisions: list[LoggedDecision] = field(default_factory=list)
    effects: list[LoggedEffect] = field(default_factory=list)
    failure: tuple[int, str] | None = None
    end: Mapping[str, Any] | None = None
    steps: list[LoggedStep] = field(default_factory=list)
    timings: dict[int, Mapping[str, float]] = field(default_factory=dict)


def read_log(folder: str | Path) -> list[RoundLog]:
    """Return the rounds of a folder that `DecisionLog` wrote, in order.

    A last line that was cut is left out.

    Raises:
        ValueError: no log there, or a line that is none of a log; names file and line.
    """
    folder = Path(folder)
    path = folder / f"{LEVELS[0]}.jsonl"
    if not path.is_file():
        raise ValueError(f"log {folder}: no {path.name} there; expected the folder that a decision log was written to.")
    rounds: list[RoundLog] = []
    for number, row in _rows(path):
        _taken(path, number, partial(_take, rounds, row))
    for name, take in (("signals", _take_signals), ("timings", _take_timings)):
        path = folder / f"{name}.jsonl"
        if path.is_file():
            for number, row in _rows(path):
                _taken(path, number, partial(take, rounds, row))
    return rounds


def _rows(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return the numbered rows of a file's whole lines."""
    rows = []
    whole = path.read_bytes().rpartition(b"\n")[0]
    for number, line in enumerate(whole.split(b"\n") if whole else [], start=1):
        try:
            row = json.loads(line)
        except ValueError as error:  # bad UTF-8 too
            raise ValueError(f"{path}, line {number}: not JSON ({error}); the file was changed or damaged.") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: expected an object, got {type(row).__name__}.")
        rows.append((number, row))
    return rows


def _taken(path: Path, number: int, take: Callable[[], _T]) -> _T:
    try:
        return take()
    except KeyError as error:
        raise ValueError(f"{path}, line {number}: key {error} is missing; the file was changed or damaged.") from None
    except (ValueError, TypeError, AttributeError, IndexError, OverflowError) as error:
        raise ValueError(f"{path}, line {number}: {error}") from None


def _take(rounds: list[RoundLog], row: Mapping[str, Any]) -> None:
    kind = row["row"]
    if kind == "round":
        rounds.append(_round(row))
        return
    if not rounds:
        raise ValueError(f"a {kind} row before the first round row.")
    current = rounds[-1]
    if kind == "decision":
        current.decisions.append(_decision(current, row))
    elif kind == "effect":
        current.effects.append(LoggedEffect(**{k: v for k, v in row.items() if k not in ("row", "round")}))
    elif kind == "failed":
        current.failure = (int(row["step"]), str(row["problem"]))
    elif kind == "end":
        current.end = {k: v for k, v in row.items() if k not in ("row", "round")}
    else:
        raise ValueError(f"unknown row {kind!r}; this version writes round, decision, effect, failed and end rows.")


def _round(row: Mapping[str, Any]) -> RoundLog:
    if row["format"] != FORMAT:
        raise ValueError(f"format {row['format']!r}, this version reads {FORMAT}; use the version that wrote it.")
    if row["catalogue"] != list(CATALOGUE_NAMES):
        raise ValueError("it was written for another catalogue of adjustments; use the version that wrote it.")
    return RoundLog(
        recipe=Recipe.from_dict(row["recipe"]),
        sources=tuple(row["sources"]),
        controller=str(row["controller"]),
        facts=dict(row["facts"]),
        interval=int(row["interval"]),
        horizon=int(row["horizon"]),
    )


def _decision(current: RoundLog, row: Mapping[str, Any]) -> LoggedDecision:
    step, rate = int(row["step"]), row["learning_rate"]
    signals = Signals(
        step,
        {**dict.fromkeys(SIGNALS), **_numbers(row["values"])},
        {**dict.fromkeys(SIGNALS, 0.0), **_numbers(row["z"])},
        tuple(row.get("broken", ())),
    )
    mask = row["mask"]
    if len(mask) != len(CATALOGUE_NAMES) or set(mask) - {"0", "1"}:
        raise ValueError(f"mask: expected {len(CATALOGUE_NAMES)} times 0 or 1, got {mask!r}.")
    legal = tuple(bit == "1" for bit in mask)
    settings = _numbers(row["settings"])
    return LoggedDecision(
        state=ControlState(step, current.recipe.steps, signals, settings, current.sources, legal),
        chosen=str(row["chosen"]),
        adjustment=Adjustment.from_dict(row["adjustment"]),
        by=str(row["by"]),
        reason=str(row["reason"]),
        confidence=float(row["confidence"]),
        candidates=tuple(LoggedCandidate(**entry) for entry in row["candidates"]),
        held_back=dict(row["held_back"]),
        learning_rate=None if rate is None else float(rate),
        flags=tuple(row.get("flags", ())),
        refused=row.get("refused"),
    )


def _take_signals(rounds: list[RoundLog], row: Mapping[str, Any]) -> None:
    rate = row["learning_rate"]
    step = LoggedStep(
        int(row["step"]),
        None if rate is None else float(rate),
        _numbers(row["values"]),
        tuple(row.get("broken", ())),
    )
    rounds[row["round"]].steps.append(step)


def _take_timings(rounds: list[RoundLog], row: Mapping[str, Any]) -> None:
    seconds = {name: float(value) for name, value in row.items() if name not in ("row", "round", "step")}
    rounds[row["round"]].timings[int(row["step"])] = seconds


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(value) for name, value in values.items()}
