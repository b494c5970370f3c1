"""Shows from its decision log what a controller did to a round, and why: `posttrain-gym replay`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..meta_policies.controllers.log_reader import LoggedDecision, LoggedEffect, RoundLog, read_log
from .progress import plain

if TYPE_CHECKING:
    from rich.table import Table

ENDS = 10
"""Steps over which the begin and the end of a curve are taken."""
SHOWN_SIGNALS = 6


@dataclass(frozen=True)
class Change:
    """One adjustment, or several in a row that one rule, net or schedule made alike.

    Attributes:
        first: optimiser steps done at the first of them.
        last: the same at the last.
        count: how many.
        what: catalogue name, or the adjustment in words; of several outside the catalogue the kind.
        by: who decided.
        reason: why, at the first of them.
        rate_before: learning rate the next step would have used before the first.
        rate_after: learning rate of the step after the last; None when there was none.
        effect: what came after the last; None when too little did.
        signals: (name, value, z-score) seen at the first, the most unusual ones first.
    """

    first: int
    last: int
    count: int
    what: str
    by: str
    reason: str
    rate_before: float | None
    rate_after: float | None
    effect: LoggedEffect | None
    signals: tuple[tuple[str, float, float], ...] = ()

    @property
    def steps(self) -> str:
        """The step, or the span of steps."""
        return str(self.first) if self.first == self.last else f"{self.first}–{self.last}"


@dataclass(frozen=True)
class RoundStory:
    """What a log tells of one round.

    Attributes:
        log: the log itself.
        objective: ``"reward"`` or ``"loss"``.
        curve: (step, objective), where it was there.
        rates: (step, learning rate it used).
        changes: what was done, in order.
        held_back: (by, why, how many times, first step, last step), the most frequent first.
        flags: sentences a person should read.
    """

    log: RoundLog
    objective: str
    curve: list[tuple[int, float]] = field(default_factory=list)
    rates: list[tuple[int, float]] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    held_back: list[tuple[str, str, int, int, int]] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)

    @property
    def heading(self) -> str:
        """Algorithm, length, controller and end, in a line."""
        log, recipe = self.log, self.log.recipe
        looks = "after each step" if log.interval == 1 else f"every {log.interval} steps"
        ended = "the log does not say how it ended"
        if log.end is not None:
            ended = f"{log.end['ended']} after {log.end['steps']} steps"
            failure = log.end.get("failure")
            if failure:
                ended += f" ({failure['kind']}: {failure['evidence']})"
        return f"{recipe.algorithm}, {recipe.steps} steps, {log.controller} {looks}; {ended}"

    @property
    def summary(self) -> str:
        """Objective and learning rate at both ends, in a line."""
        values = [value for _, value in self.curve]
        parts = [f"{self.objective} {_ends(values, 3)}"]
        if len(values) > 3:
            parts[0] += f" (means of the first and the last {_at_ends(values)} steps logged)"
        if self.rates:
            parts.append(f"learning rate {self.rates[0][1]:.3g} -> {self.rates[-1][1]:.3g}")
        count = sum(change.count for change in self.changes)
        parts.append(f"{count} {'adjustment' if count == 1 else 'adjustments'} in {len(self.log.decisions)} decisions")
        return "; ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        log = self.log
        return {
            "recipe": log.recipe.to_dict(),
            "controller": log.controller,
            "interval": log.interval,
            "end": log.end,
            "controller_failure": None if log.failure is None else {"step": log.failure[0], "problem": log.failure[1]},
            "objective": self.objective,
            "curve": [[step, _number(value)] for step, value in self.curve],
            "learning_rates": [[step, _number(value)] for step, value in self.rates],
            "changes": [
                {
                    "first_step": change.first,
                    "last_step": change.last,
                    "count": change.count,
                    "what": change.what,
                    "by": change.by,
                    "reason": change.reason,
                    "learning_rate_before": change.rate_before,
                    "learning_rate_after": change.rate_after,
                    "effect": None if change.effect is None else vars(change.effect),
                    "signals": {name: {"value": _number(v), "z": _number(z)} for name, v, z in change.signals},
                }
                for change in self.changes
            ],
            "held_back": [
                {"by": by, "why": why, "times": times, "first_step": first, "last_step": last}
                for by, why, times, first, last in self.held_back
            ],
            "flags": self.flags,
        }


def read_stories(folder: Path, number: int | None = None) -> list[RoundStory]:
    """Return what a folder's decision log tells of its rounds.

    Args:
        folder: where a `DecisionLog` was written.
        number: the round, from 1; None for all.

    Raises:
        ValueError: no log there, a damaged one, or no such round.
    """
    rounds = read_log(folder)
    if not rounds:
        raise ValueError(f"log {folder}: it holds no round yet.")
    if number is None:
        return [_story(log) for log in rounds]
    if not 1 <= number <= len(rounds):
        raise ValueError(f"--round: the log holds rounds 1 to {len(rounds)}, got {number}.")
    return [_story(rounds[number - 1])]


def _story(log: RoundLog) -> RoundStory:
    seen: dict[int, Mapping[str, float | None]] = {}
    used: dict[int, float] = {}
    for decision in log.decisions:
        if decision.step > 0:
            seen[decision.step] = decision.state.signals.values
            if decision.learning_rate is not None:
                used[decision.step] = decision.learning_rate
    for step in log.steps:
        seen[step.step] = step.values
        if step.learning_rate is not None:
            used[step.step] = step.learning_rate
    objective = "reward" if any(values.get("reward") is not None for values in seen.values()) else "loss"
    curve = []
    for number, values in sorted(seen.items()):
        value = values.get(objective)
        if value is not None:
            curve.append((number, value))
    flags = [str(flag) for flag in (log.end or {}).get("flags", ())]
    flags += [flag for decision in log.decisions for flag in decision.flags if flag not in flags]
    if log.failure is not None and not any(log.failure[1] in flag for flag in flags):
        flags.append(f"the controller failed after step {log.failure[0]}: {log.failure[1]}")
    return RoundStory(
        log, objective, curve, sorted(used.items()), _changes(log, used), _held_back(log.decisions), flags
    )


def _changes(log: RoundLog, used: Mapping[int, float]) -> list[Change]:
    effects = {(effect.step, effect.what): effect for effect in log.effects}
    groups: list[list[LoggedDecision]] = []
    previous = None
    for decision in log.decisions:
        alike = previous is not None and previous.applied and _look_alike(previous, decision)
        if decision.applied and alike and groups:
            groups[-1].append(decision)
        elif decision.applied:
            groups.append([decision])
        previous = decision
    changes = []
    for group in groups:
        first, last = group[0], group[-1]
        alone = len({decision.chosen for decision in group}) == 1
        changes.append(
            Change(
                first=first.step,
                last=last.step,
                count=len(group),
                what=first.chosen if alone else first.adjustment.kind,
                by=first.by,
                reason=first.reason,
                rate_before=first.state.settings.get("learning_rate"),
                rate_after=_rate_after(last, used),
                effect=effects.get((last.step, last.chosen)),
                signals=_signals(first),
            )
        )
    return changes


def _look_alike(left: LoggedDecision, right: LoggedDecision) -> bool:
    return left.by == right.by and left.adjustment.kind == right.adjustment.kind


def _rate_after(decision: LoggedDecision, used: Mapping[int, float]) -> float | None:
    rate = used.get(decision.step + 1)
    if rate is None and decision.adjustment.kind == "lr_scale" and "learning_rate" in decision.state.settings:
        rate = decision.state.settings["learning_rate"] * decision.adjustment.number
    return rate


def _signals(decision: LoggedDecision) -> tuple[tuple[str, float, float], ...]:
    signals = decision.state.signals
    there = [(name, value, signals.z.get(name, 0.0)) for name, value in signals.values.items() if value is not None]
    return tuple(sorted(there, key=lambda entry: -abs(entry[2]))[:SHOWN_SIGNALS])


def _held_back(decisions: Sequence[LoggedDecision]) -> list[tuple[str, str, int, int, int]]:
    spans: dict[tuple[str, str], list[int]] = {}
    for decision in decisions:
        for by, why in decision.held_back.items():
            spans.setdefault((by, why.partition(":")[0]), []).append(decision.step)
    rows = [(by, why, len(steps), steps[0], steps[-1]) for (by, why), steps in spans.items()]
    return sorted(rows, key=lambda row: -row[2])


# What is printed ------------------------------------------------------------------------------------------------------


def changes_table(story: RoundStory, signals: bool = False) -> Table:
    """Return the table of what was done; with the signals seen when asked."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1))
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("change", overflow="fold", max_width=18)
    table.add_column("next rate", no_wrap=True)
    table.add_column("why", overflow="fold", ratio=1)
    table.add_column(f"{story.objective}*", no_wrap=True)
    told: set[tuple[str, str]] = set()
    for change in story.changes:
        why = f"[bold]{plain(change.by)}[/]"
        if (change.by, change.reason) not in told:
            told.add((change.by, change.reason))
            why += f": {plain(change.reason)}"
        if signals:
            why += "".join(f"\n[dim]{plain(line)}[/]" for line in _signal_lines(change))
        what = change.what if change.count == 1 else f"{change.what} ×{change.count}"
        table.add_row(change.steps, plain(what), _rates(change), why, _effect(change.effect))
    return table


def story_lines(story: RoundStory) -> list[str]:
    """Return what stands under the table: what its last column means, what was held back, and the flags."""
    lines = []
    if any(change.effect is not None for change in story.changes):
        n = story.log.horizon
        lines.append(
            f"* mean of up to {n} steps after less that of up to {n} before, as many as there were; (+n) counts other "
            "adjustments in these steps, which may have caused it"
        )
    for by, why, times, first, last in story.held_back:
        when = f"step {first}" if times == 1 else f"steps {first} to {last}"
        lines.append(f"held back: {by}, {why} ({times} {'time' if times == 1 else 'times'}, {when})")
    refused: dict[tuple[str, str], list[int]] = {}
    for decision in story.log.decisions:
        if decision.refused is not None:
            refused.setdefault((decision.chosen, decision.refused), []).append(decision.step)
    for (what, why), steps in refused.items():
        often = "1 time" if len(steps) == 1 else f"{len(steps)} times"
        lines.append(f"refused: {what} after step {steps[0]}: {why} ({often})")
    return lines + [f"flag: {flag}" for flag in story.flags]


def _signal_lines(change: Change) -> list[str]:
    return [f"{name} {value:.3g} (z {z:+.1f})" for name, value, z in change.signals]


def _rates(change: Change) -> str:
    before, after = change.rate_before, change.rate_after
    if before is None or after is None:
        return ""
    return f"{before:.2g}" if math.isclose(before, after, rel_tol=1e-6) else f"{before:.2g} -> {after:.2g}"


def _effect(effect: LoggedEffect | None) -> str:
    if effect is None or effect.change is None or effect.before is None:
        return ""
    colour = "green" if effect.better else "red"
    return f"[{colour}]{effect.change:+.3g}[/]" + (f" (+{effect.others})" if effect.others else "")


def _ends(values: Sequence[float], digits: int) -> str:
    if not values:
        return "not known"
    half = _at_ends(values)
    begin, end = math.fsum(values[:half]) / half, math.fsum(values[-half:]) / half
    return f"{begin:.{digits}g} -> {end:.{digits}g}"


def _at_ends(values: Sequence[float]) -> int:
    return max(1, min(ENDS, len(values) // 2))


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
