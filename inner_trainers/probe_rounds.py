"""The rounds of a probe: real short rounds through the `InnerTrainer` protocol, paid from one limit, with peaks."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from .base import Checkpoint, Cost, Failure, InnerTrainer, Limit, RoundReport
from .fault_kinds import failure
from .faults import failure_from_exception
from .recipe import Recipe
from .tasks.base import InnerTask

RunRound = Callable[[Recipe, Limit | None], RoundReport]
"""Runs one round of a probe; a search puts one here that looks into its journal first."""


class ProbeRounds:
    """Runs the rounds of one probe from one checkpoint and adds up what they cost.

    Args:
        trainer: who trains.
        task: what it trains on.
        start: the checkpoint that every round starts from.
        seed: the trainer's seed, the same in every round: equal rows, so that rounds can be compared step by step.
        limit: what all rounds together may cost; None for any amount.
        run: runs a round; None for `run_round`.

    Attributes:
        cost: cost of the rounds so far.
    """

    def __init__(
        self,
        trainer: InnerTrainer,
        task: InnerTask,
        start: Checkpoint,
        seed: int,
        limit: Limit | None = None,
        run: RunRound | None = None,
    ) -> None:
        self._trainer, self._task, self._start, self._seed = trainer, task, start, seed
        self._limit, self._run = limit, run
        self._dearest_step = 0.0
        self.cost = Cost()

    def pays(self, recipe: Recipe) -> bool:
        """Return whether what is left of the limit pays the whole round when each of its steps costs the most it can.

        Where nothing bounds a step ahead, as in device-seconds, the dearest step so far stands for it.
        """
        left = self._left()
        if left is None:
            return True
        bound = self._trainer.step_cost_bound(self._task, recipe).in_unit(left.unit) or self._dearest_step
        return left.amount > 0 and recipe.steps * bound <= left.amount

    def run(self, recipe: Recipe) -> RoundReport:
        """Run one round and count its cost; what goes wrong is in its report."""
        left = self._left()
        if self._run is None:
            report = run_round(self._trainer, self._task, self._start, self._seed, recipe, left)
        else:
            report = self._run(recipe, left)
        self.cost += report.training_cost
        if left is not None:
            step = report.training_cost.in_unit(left.unit) / max(1, report.steps)
            self._dearest_step = max(self._dearest_step, step)
        return report

    def _left(self) -> Limit | None:
        if self._limit is None:
            return None
        spent = self.cost.in_unit(self._limit.unit)
        return Limit(self._limit.unit, max(0.0, self._limit.amount - spent))


def run_round(
    trainer: InnerTrainer, task: InnerTask, start: Checkpoint, seed: int, recipe: Recipe, limit: Limit | None
) -> RoundReport:
    """Train one round, throw its weights away and return its report, with the true peak of memory.

    On CUDA the peak is the trainer's own; else it is the most that was resident in this process while the round ran,
    activations included, where the system tells.
    """
    peak = ResidentPeak()
    try:
        session = trainer.begin(task, recipe, start, seed, limit)
    except ValueError as error:
        return _failed(recipe, start, seed, failure("rows_refused", 0, str(error)[:300]))
    except Exception as error:
        return _failed(recipe, start, seed, failure_from_exception(error, 0))
    try:
        session.advance()
        report, _ = session.result()
    finally:
        session.close()
    if trains_on_cuda(trainer):
        return report
    known = [bytes_used for bytes_used in (report.peak_memory_bytes, peak.bytes()) if bytes_used is not None]
    return replace(report, peak_memory_bytes=max(known, default=None))


def trains_on_cuda(trainer: InnerTrainer) -> bool:
    """Return whether the trainer's fingerprint names a CUDA device."""
    return str(trainer.fingerprint.get("device", "")).startswith("cuda")


def memory_to_hold_to(trainer: InnerTrainer) -> int | None:
    """Return the bytes that a round may have in use where nothing else is said; None where the device itself says."""
    return None if trains_on_cuda(trainer) else memory_within_reach()


def _failed(recipe: Recipe, start: Checkpoint, seed: int, fault: Failure) -> RoundReport:
    return RoundReport(
        recipe=recipe, start=start.id, seed=seed, checkpoint=None, steps=0, ended="failed", failure=fault
    )


class ResidentPeak:
    """The most memory that was resident in this process since it was made, as Linux counts it; None elsewhere."""

    def __init__(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the kernel's high-water mark begins anew
            self._begun = True
        except OSError:
            self._begun = False

    def bytes(self) -> int | None:
        """Return the peak in bytes."""
        return _status_bytes("VmHWM") if self._begun else None


def memory_within_reach() -> int | None:
    """Return the bytes that this process may hold: what is resident now and what the system can still give."""
    resident = _status_bytes("VmRSS")
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    except OSError:
        return None
    if resident is None or found is None:
        return None
    available = int(found.group(1)) * 1024
    for most, used in _CONTROL_GROUP_FILES:
        try:
            available = min(available, int(Path(most).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return resident + max(0, available)


_CONTROL_GROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Limit and use of a container's memory, in versions 2 and 1 of Linux's control groups."""


def _status_bytes(name: str) -> int | None:
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    except OSError:
        return None
    return None if found is None else int(found.group(1)) * 1024
