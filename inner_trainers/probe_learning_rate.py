"""Finds the learning rates that work by trying them in short real rounds: a range test."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from typing import Any

from .base import Checkpoint, Cost, Failure, InnerTrainer, Limit, RoundReport
from .messages import require_integer, require_number
from .probe_rounds import ProbeRounds, RunRound
from .recipe import Recipe
from .tasks.base import InnerTask

CONTROL_SHARE = 1e-3
"""The control's learning rate as a share of the lowest one: what the start itself would have shown on the same rows."""

CONFIDENCE = 0.975
"""One-sided confidence of Student's t test on paired steps with which a difference is beyond noise."""

LEAST_SHARE = 0.1
"""A rate whose gain is a smaller share of the best rate's is too low to be suggested, however certain the gain is."""

CHOSEN_FALL = 0.1
"""Nats per token by which better answers may become less likely in preference training: about a tenth."""

_CHOSEN = "chosen_log_probability"


@dataclass(frozen=True)
class RatePoint:
    """What one learning rate did.

    Attributes:
        learning_rate: the rate.
        signal: mean of the signal over the second half of the steps; None when it has no finite value there.
        gain: how much better that is than the control on the same steps, in the signal's unit; None without a signal.
        error: standard error of ``gain`` over paired steps.
        verdict: ``"learns"`` (better than the control beyond noise), ``"flat"``, ``"hurts"`` or ``"failed"``.
        failure: the fault that it met, rescued ones too; None without.
        cost: what it cost.
    """

    learning_rate: float
    signal: float | None
    gain: float | None
    error: float | None
    verdict: str
    failure: Failure | None
    cost: Cost


@dataclass(frozen=True)
class LearningRateProbe:
    """The outcome of `learning_rate_probe`.

    Attributes:
        signal: what was compared: ``"loss"`` or ``"reward"``.
        control: mean of the signal at a rate too low to learn, over the second half of the steps; None without.
        points: the rates that were tried, ascending.
        suggested_range: lowest and highest rate that work; None when the probe cannot tell.
        suggested_rate: the rate to begin with; None when the probe cannot tell.
        hurts_from: lowest tried rate from which on every one hurts or fails; None when there is none.
        notes: sentences a person should read.
        faults: every fault that was met, in order.
        cost: total cost, the control's included.
    """

    signal: str
    control: float | None
    points: tuple[RatePoint, ...]
    suggested_range: tuple[float, float] | None
    suggested_rate: float | None
    hurts_from: float | None
    notes: tuple[str, ...]
    faults: tuple[Failure, ...]
    cost: Cost

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {**asdict(self), "suggested_range": self.suggested_range and list(self.suggested_range)}


def learning_rate_probe(
    trainer: InnerTrainer,
    task: InnerTask,
    recipe: Recipe,
    start: Checkpoint,
    seed: int,
    *,
    low: float = 3e-5,
    high: float = 3e-2,
    points: int = 7,
    steps_per_point: int = 20,
    limit: Limit | None = None,
    run: RunRound | None = None,
) -> LearningRateProbe:
    """Try log-spaced learning rates in short rounds from one checkpoint and suggest a range: a range test.

    The idea is Smith's (2017, "Cyclical Learning Rates for Training Neural Networks"): the useful range begins where
    the loss first falls and ends where it gets worse again. Here each rate has a round of its own, and every round has
    the same rows in the same order, so that a rate is compared step by step with a control that learns nothing, and
    the noise of the rows cancels out. The second half of the steps counts. The suggested range reaches from the lowest
    rate with at least `LEAST_SHARE` of the best rate's gain to the highest that is not worse than the best one beyond
    noise; the suggested rate is the lowest that is not worse than the best one beyond noise.

    What is compared is the loss; the reward where the curves have one, as the size of a policy-gradient loss says
    nothing. A preference loss keeps falling while the better answers die out: there the loss says which rates learn,
    the log-probability of the better answers which of them is best, and a rate at which it falls by more than
    `CHOSEN_FALL` hurts. All of it says how well the rows are learned, not whether they are good rows.

    The first rate that fails ends the probe: higher ones would too.

    Args:
        trainer: who trains.
        task: what it trains on.
        recipe: what is asked; its steps, learning rate, schedule and warm-up are replaced.
        start: the checkpoint that every round starts from.
        seed: the trainer's seed.
        low: lowest rate, > 0.
        high: highest rate, above ``low``.
        points: number of rates, in [2, 100].
        steps_per_point: optimiser steps of each, in [4, 100000]; with fewer, less is beyond noise.
        limit: what all rounds together may cost; the probe ends before the round that it may not pay.
        run: runs a round; None for `run_round`.

    Raises:
        ValueError: a setting outside its range, or a recipe that cannot run on the task.
    """
    if recipe.loss == "dft":
        raise ValueError(
            "loss: a rate cannot be judged by the loss 'dft', which falls to 0 as well when the answers die out; probe "
            "with loss 'nll', whose best rates are near."
        )
    low = require_number("low", low, low=0, high=1e6, low_open=True)
    high = require_number("high", high, low=low, high=1e6, low_open=True)
    count = require_integer("points", points, low=2, high=100)
    steps = require_integer("steps_per_point", steps_per_point, low=4, high=100_000)
    asked = replace(recipe, steps=steps, schedule="constant", warmup_steps=0)
    trainer.check(task, asked)
    rounds = ProbeRounds(trainer, task, start, seed, limit, run)
    reports: list[RoundReport] = []
    notes: list[str] = []
    rates = [_rounded(low * CONTROL_SHARE), *(_log_spaced(low, high, index / (count - 1)) for index in range(count))]
    for rate in rates:
        tried = replace(asked, learning_rate=rate)
        if not rounds.pays(tried):
            notes.append(f"the budget does not pay the round at {rate:.3g}, so it and higher rates were not tried")
            break
        report = rounds.run(tried)
        reports.append(report)
        if report.ended == "budget":
            notes.append(f"the budget ended the round at {rate:.3g}, so higher rates were not tried")
        if report.ended != "finished" or report.rescued:
            break
    return _judged(reports, notes, rounds.cost)


def _log_spaced(low: float, high: float, share: float) -> float:
    """Return the value at a share of the way from ``low`` to ``high`` on a log scale."""
    return min(high, max(low, _rounded(low * (high / low) ** share)))


def _rounded(rate: float) -> float:
    return float(f"{rate:.3e}")


def _judged(reports: Sequence[RoundReport], notes: Sequence[str], cost: Cost) -> LearningRateProbe:
    """Return what the rounds show, the control first."""
    signal = "reward" if any("reward" in row for report in reports for row in report.curves) else "loss"
    faults = tuple(fault for report in reports for fault in (report.failure, *report.rescued) if fault is not None)
    control, tried = reports[:1], reports[1:]
    points = tuple(_point(signal, report, control[0]) for report in tried)
    hurting = len(list(takewhile(lambda point: point.verdict in ("hurts", "failed"), reversed(points))))
    usable = points[: len(points) - hurting]
    said = list(notes)
    span, rate = None, None
    reason = _cannot_compare(signal, control, points)
    if reason is None:
        learned = [point for point in usable if point.verdict == "learns"]
        if learned:
            span, rate = _suggestion(signal, usable, tried, control[0])
            said += _open_ends(span, points, hurting)
        else:
            reason = (
                f"cannot tell: at no rate was the {signal} better than the control's beyond noise; "
                "try higher rates, more steps or larger batches"
            )
    if reason is not None:
        said.insert(0, reason)
    for report in tried:
        fault = _fault(report)
        if fault is not None:
            at = f"at {report.recipe.learning_rate:.3g} the round met {fault.kind} in step {fault.step}"
            said.append(f"{at}, so higher rates were not tried")
    return LearningRateProbe(
        signal=signal,
        control=_level(signal, control[0]) if control else None,
        points=points,
        suggested_range=span,
        suggested_rate=rate,
        hurts_from=points[-hurting].learning_rate if hurting else None,
        notes=tuple(said),
        faults=faults,
        cost=cost,
    )


def _fault(report: RoundReport) -> Failure | None:
    """Return the fault of a round; one that was rescued counts, for the rate that was asked for met it."""
    return report.rescued[0] if report.failure is None and report.rescued else report.failure


def _cannot_compare(signal: str, control: Sequence[RoundReport], points: Sequence[RatePoint]) -> str | None:
    """Return why the rounds say nothing about rates; None when they do."""
    if not control:
        return "cannot tell: the budget pays no round"
    fault = _fault(control[0])
    if fault is not None:
        return f"cannot tell: already the control, which learns nothing, met {fault.kind} ({fault.evidence})"
    if _level(signal, control[0]) is None:
        return f"cannot tell: the control's curve has no finite {signal}"
    return None if points else "cannot tell: no rate was tried"


def _point(signal: str, report: RoundReport, control: RoundReport) -> RatePoint:
    fault = _fault(report)
    better = _improvements(signal, report, control)
    gain, error = _mean_and_error(better)
    if fault is not None and fault.cause == "hyperparameter":
        verdict = "failed"
    elif report.ended != "finished":
        verdict = "flat"  # it was cut or broke down for a reason that is none of the rate's
    elif _beyond_noise([-value for value in better]) or _better_answers_die_out(report, control):
        verdict = "hurts"
    else:
        verdict = "learns" if _beyond_noise(better) else "flat"
    return RatePoint(
        report.recipe.learning_rate, _level(signal, report), gain, error, verdict, fault, report.training_cost
    )


def _better_answers_die_out(report: RoundReport, control: RoundReport) -> bool:
    falls = _improvements(_CHOSEN, control, report)
    mean, _ = _mean_and_error(falls)
    return mean is not None and mean > CHOSEN_FALL and _beyond_noise(falls)


def _suggestion(
    signal: str, usable: Sequence[RatePoint], reports: Sequence[RoundReport], control: RoundReport
) -> tuple[tuple[float, float], float]:
    """Return range and rate from points of which at least one learns and above which all hurt."""
    learned = [index for index, point in enumerate(usable) if point.verdict == "learns"]
    ranking = _CHOSEN if _level(_CHOSEN, control) is not None else signal

    def rank(index: int) -> float:
        mean, _ = _mean_and_error(_improvements(ranking, reports[index], control))
        return -math.inf if mean is None else mean

    best = max(learned, key=rank)

    def as_good(index: int) -> bool:
        return index in learned and not _beyond_noise(_improvements(ranking, reports[best], reports[index]))

    least = LEAST_SHARE * _gain(usable[best])
    lower = [i for i in takewhile(lambda i: i in learned and _gain(usable[i]) >= least, range(best, -1, -1))]
    upper = [best, *takewhile(as_good, range(best + 1, len(usable)))]
    rate = min(index for index in lower if as_good(index))
    return (usable[lower[-1]].learning_rate, usable[upper[-1]].learning_rate), usable[rate].learning_rate


def _gain(point: RatePoint) -> float:
    return -math.inf if point.gain is None else point.gain


def _open_ends(span: tuple[float, float], points: Sequence[RatePoint], hurting: int) -> list[str]:
    notes = []
    if span[0] == points[0].learning_rate:
        notes.append(f"the lowest rate, {span[0]:.3g}, learns already: lower ones may work too")
    if span[1] == points[-1].learning_rate and not hurting:
        notes.append(f"no rate up to {span[1]:.3g} hurts: higher ones may work too")
    return notes


def _later_half(report: RoundReport) -> dict[int, Mapping[str, float]]:
    return {index: row for index, row in enumerate(report.curves) if index >= report.recipe.steps // 2}


def _values(name: str, report: RoundReport) -> dict[int, float]:
    """Return step -> value in the second half, where it is a finite number."""
    rows = _later_half(report)
    return {index: row[name] for index, row in rows.items() if math.isfinite(row.get(name, math.nan))}


def _level(name: str, report: RoundReport) -> float | None:
    values = _values(name, report)
    return statistics.fmean(values.values()) if values else None


def _improvements(name: str, report: RoundReport, reference: RoundReport) -> list[float]:
    """Return by how much each step was better than the same step of another round."""
    theirs = _values(name, reference)
    sign = -1.0 if name == "loss" else 1.0
    return [sign * (value - theirs[index]) for index, value in _values(name, report).items() if index in theirs]


def _mean_and_error(values: Sequence[float]) -> tuple[float | None, float | None]:
    if len(values) < 2:
        return (values[0] if values else None), None
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def _beyond_noise(values: Sequence[float]) -> bool:
    """Return whether the mean of paired differences is above 0 by Student's t test, one-sided at `CONFIDENCE`."""
    mean, error = _mean_and_error(values)
    if mean is None or error is None:
        return False
    from scipy.stats import t as student

    return mean > float(student.ppf(CONFIDENCE, len(values) - 1)) * error
