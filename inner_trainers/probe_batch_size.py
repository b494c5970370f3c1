"""Finds the largest batch that fits into memory by taking one optimiser step at each size that is tried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .base import Checkpoint, Cost, Failure, InnerTrainer, Limit
from .fault_kinds import failure
from .messages import require_integer
from .probe_rounds import ProbeRounds, RunRound, memory_to_hold_to, trains_on_cuda
from .recipe import Recipe
from .tasks.base import InnerTask

CANDIDATES = tuple(base << exponent for exponent in range(11) for base in (2, 3))
"""Batch sizes that are tried by default: 2, 3, 4, 6, 8, 12 and so on to 3072."""

HEADROOM = (0.5, 0.8)
"""The share of the largest batch that fits which is proposed: other batches have longer rows."""

_TOO_LARGE = ("oom", "memory_limit")


@dataclass(frozen=True)
class BatchSizePoint:
    """What one batch size did.

    Attributes:
        batch_size: sequences per device and forward pass.
        fits: whether an optimiser step was done within the limit.
        peak_memory_bytes: peak of its round, or the one that was foreseen; None when unknown.
        seconds: device-seconds of its step; 0 when none was taken.
        foreseen: whether the size was not tried, because the peaks of smaller ones already foretell that it will not
            fit: in a process whose memory runs out there is nobody left to say so.
        failure: the fault that it met; None without.
        cost: what it cost.
    """

    batch_size: int
    fits: bool
    peak_memory_bytes: int | None
    seconds: float
    foreseen: bool
    failure: Failure | None
    cost: Cost


@dataclass(frozen=True)
class BatchSizeProbe:
    """The outcome of `batch_size_probe`.

    Attributes:
        points: the sizes in the order they were tried.
        largest: largest size that fits; None when none does.
        proposed: size to use, with `HEADROOM` where the candidates have one there; None when none fits.
        memory_bytes: the limit that was held to; None for the device's own.
        limit_found: whether a larger candidate did not fit.
        notes: sentences a person should read.
        faults: every fault that was met, in order.
        cost: total cost.
    """

    points: tuple[BatchSizePoint, ...]
    largest: int | None
    proposed: int | None
    memory_bytes: int | None
    limit_found: bool
    notes: tuple[str, ...]
    faults: tuple[Failure, ...]
    cost: Cost

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return asdict(self)


def batch_size_probe(
    trainer: InnerTrainer,
    task: InnerTask,
    recipe: Recipe,
    start: Checkpoint,
    seed: int,
    *,
    candidates: Sequence[int] = CANDIDATES,
    memory_bytes: int | None = None,
    limit: Limit | None = None,
    run: RunRound | None = None,
) -> BatchSizeProbe:
    """Find the largest batch that fits, by doubling, then by bisection, and propose 50 to 80 % of it.

    Each size takes one real optimiser step; a size that runs out of memory is data, and its memory is given back.
    On a CUDA device the device says what fits. Elsewhere the limit is ``memory_bytes``, else the memory that the
    system can give, and a size is not tried when the line through the peaks of the two largest that fit passes it.

    Args:
        trainer: who trains.
        task: what it trains on.
        recipe: what is asked; its steps, batch size and warm-up are replaced.
        start: the checkpoint that every step starts from.
        seed: the trainer's seed.
        candidates: batch sizes; those that cannot run, as groups of completions do not divide them, are left out.
        memory_bytes: most memory in use, of the CUDA device that trains or else resident in the process; None for
            what there is.
        limit: what all steps together may cost; the probe ends before the step that it may not pay.
        run: runs a round; None for `run_round`.

    Raises:
        ValueError: a setting outside its range, or no candidate that can run.
    """
    sizes = _runnable(trainer, task, recipe, candidates)
    if memory_bytes is not None:
        memory_bytes = require_integer("memory_bytes", memory_bytes, low=1, high=2**63)
    else:
        memory_bytes = memory_to_hold_to(trainer)
    foresees = not trains_on_cuda(trainer)
    search = _Search(ProbeRounds(trainer, task, start, seed, limit, run), recipe, memory_bytes, foresees)
    search.over(sizes)
    return search.outcome(sizes)


def _one_step(recipe: Recipe, batch_size: int) -> Recipe:
    return replace(recipe, batch_size=batch_size, steps=1, warmup_steps=0)


def _runnable(trainer: InnerTrainer, task: InnerTask, recipe: Recipe, candidates: Sequence[int]) -> list[int]:
    """Return the candidates that the trainer does not refuse, ascending."""
    if not candidates:
        raise ValueError("candidates: expected at least one batch size, got none.")
    runnable, refusal = [], ""
    for size in sorted(set(candidates)):
        try:
            trainer.check(task, _one_step(recipe, size))
            runnable.append(size)
        except ValueError as error:
            refusal = str(error)
    if not runnable:
        raise ValueError(f"candidates: the recipe runs at none of {sorted(set(candidates))}; {refusal}")
    return runnable


class _Search:
    """The sizes that were tried, and what they say of those that were not."""

    def __init__(self, rounds: ProbeRounds, recipe: Recipe, memory_bytes: int | None, foresees: bool) -> None:
        self._rounds, self._recipe = rounds, recipe
        self._memory_bytes, self._foresees = memory_bytes, foresees
        self._points: list[BatchSizePoint] = []
        self._notes: list[str] = []

    def over(self, sizes: Sequence[int]) -> None:
        """Try sizes: each time the first that is at least double, then the middle of those between."""
        below, above = -1, len(sizes)  # the largest index that fits, the smallest that does not
        while below + 1 < above:
            if above < len(sizes):
                index = (below + above) // 2
            else:
                doubled = 2 * sizes[below] if below >= 0 else 0
                index = next((i for i in range(below + 1, above) if sizes[i] >= doubled), above - 1)
            point = self._try(sizes[index])
            if point is None:
                return
            self._points.append(point)
            below, above = (index, above) if point.fits else (below, index)

    def _try(self, size: int) -> BatchSizePoint | None:
        """Return what came of one size; None when the budget does not pay it."""
        foreseen, most = self._foreseen_peak(size), self._memory_bytes
        if foreseen is not None and most is not None and foreseen > most:
            evidence = f"about {foreseen} bytes would be in use, above {most}"
            return BatchSizePoint(size, False, foreseen, 0.0, True, failure("memory_limit", 0, evidence), Cost())
        recipe = _one_step(self._recipe, size)
        if not self._rounds.pays(recipe):
            self._notes.append(f"the budget does not pay a step of batch {size}, so the search ended there")
            return None
        report = self._rounds.run(recipe)
        fault, peak = report.failure, report.peak_memory_bytes
        if fault is None and report.rescued:
            fault = report.rescued[0]
        if most is not None and peak is not None and peak > most and (fault is None or fault.kind not in _TOO_LARGE):
            fault = failure("memory_limit", 1, f"{peak} bytes of memory were in use, above {most}")
        # a step that was done fits, whatever else was wrong with it
        fits = report.steps > 0 and (fault is None or fault.kind not in _TOO_LARGE)
        if not fits and fault is not None and fault.kind not in _TOO_LARGE:
            self._notes.append(f"batch {size} failed for another reason than memory: {fault.kind} ({fault.evidence})")
        cost = report.training_cost
        return BatchSizePoint(size, fits, peak, cost.device_seconds, False, fault, cost)

    def _foreseen_peak(self, size: int) -> int | None:
        fitting = sorted((p.batch_size, p.peak_memory_bytes) for p in self._points if p.fits and p.peak_memory_bytes)
        if not self._foresees or len(fitting) < 2:
            return None
        (smaller, lower), (larger, upper) = fitting[-2:]
        per_sequence = max(0.0, (upper - lower) / (larger - smaller))
        return round(upper + per_sequence * (size - larger))

    def outcome(self, sizes: Sequence[int]) -> BatchSizeProbe:
        """Return what was found."""
        largest = max((point.batch_size for point in self._points if point.fits), default=None)
        limit_found = any(not point.fits for point in self._points)
        notes = list(self._notes)
        if largest is None:
            notes.append("no candidate fits" if self._points else "the budget pays no step")
        elif not limit_found and largest == sizes[-1]:
            notes.append(f"the largest candidate, {largest}, fits: larger batches may fit too")
        proposed = None if largest is None else _proposed(sizes, largest)
        if largest is not None and proposed is not None and not HEADROOM[0] * largest <= proposed:
            notes.append(f"no candidate lies at 50 to 80 % of {largest}: the next smaller one is proposed")
        if largest is not None and proposed == largest:
            notes.append(f"there is no smaller candidate than {largest}: it is proposed without headroom")
        if self._memory_bytes is not None and self._foresees and any(p.peak_memory_bytes is None for p in self._points):
            notes.append("memory in use is unknown on this system, so only a step that fails tells that it is too much")
        return BatchSizeProbe(
            points=tuple(self._points),
            largest=largest,
            proposed=proposed,
            memory_bytes=self._memory_bytes,
            limit_found=limit_found,
            notes=tuple(notes),
            faults=tuple(point.failure for point in self._points if point.failure is not None),
            cost=self._rounds.cost,
        )


def _proposed(sizes: Sequence[int], largest: int) -> int:
    """Return the largest candidate of at most 80 % of the largest that fits; where there is none, the smallest."""
    return max((size for size in sizes if size <= HEADROOM[1] * largest), default=min(sizes))
