"""A round of a `LoopTrainer`: steps, limits, adjustments, signals, faults and checkpoints of a training loop."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .adjustments import Adjustment, require_adjustment
from .base import Checkpoint, Cost, Failure, Limit, RoundReport, checkpoint_id, round_id
from .fault_kinds import failure
from .faults import FaultWatch, failure_from_exception
from .loop import LoopSettings
from .mixes import mix_refusal, shifted_mix
from .monitor import Monitor
from .rates import LearningRates
from .recipe import Recipe
from .signals import Signals
from .trl.random_state import random_state, restore_random_state

if TYPE_CHECKING:
    from .loop import Loop, LoopTrainer
    from .tasks.base import InnerTask

_SCALED = {
    "batch_scale": "batch_size",
    "grad_clip_scale": "max_grad_norm",
    "kl_scale": "kl_coef",
    "entropy_scale": "entropy_coef",
    "temperature_scale": "temperature",
}
_FROM_ZERO = 0.01
"""What a coefficient of 0 is taken for when it is scaled."""

_CLASSES = 2
"""Outcomes whose uniform guess is the loss of knowing nothing, for the fault watch."""


class LoopSession:
    """A round that is running; satisfies `TrainingSession`. It runs on the caller's thread.

    The global random number generators are the round's own while a step runs, seeded at its begin, and the caller's
    otherwise, so that rounds that are interleaved do not disturb each other.
    """

    def __init__(
        self, trainer: LoopTrainer, task: InnerTask, recipe: Recipe, start: Checkpoint, seed: int, limit: Limit | None
    ) -> None:
        self._trainer, self._task, self._recipe, self._start, self._seed = trainer, task, recipe, start, seed
        self._limit, self._now = limit, recipe
        self._rates = LearningRates(recipe)
        self._monitor = Monitor(tuple(recipe.mix), on_policy=trainer.on_policy)
        self._watch = FaultWatch(_CLASSES, trainer.on_policy, trainer.fault_policy)
        self._curves: list[dict[str, float]] = []
        self._factors: list[float] = []
        self._applied: list[tuple[int, Adjustment]] = []
        self._flags: list[str] = []
        self._cost, self._seconds, self._samples = Cost(), 0.0, 0
        self._ended: str | None = None
        self._failure: Failure | None = None
        self._outcome: tuple[RoundReport, Checkpoint | None] | None = None
        self._loop: Loop | None = None
        self._random = random_state()
        with _Exchanged(self):
            _seed_everything(seed)
            self._loop = trainer.build(task, recipe, start.weights, seed)
            self._snapshot: Any = self._loop.weights()
        self._check_limit()

    # Reading ----------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Optimiser steps done."""
        return len(self._curves)

    @property
    def done(self) -> bool:
        """Whether no further step will be taken."""
        return self._ended is not None

    @property
    def cost(self) -> Cost:
        """Training cost so far."""
        return replace(self._cost, device_seconds=self._seconds)

    @property
    def signals(self) -> Signals:
        """What the last step showed."""
        return self._monitor.signals

    @property
    def settings(self) -> Mapping[str, float]:
        """Settings in force for the next step: what the algorithm reads, and the mix."""
        read = self._trainer.reads.get(self._recipe.algorithm, ())
        named = {name: getattr(self._now, name) for name in ("batch_size", *sorted(read))}
        numbers = {n: float(v) for n, v in named.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        return {
            **numbers,
            "learning_rate": self._rates.at(self.step + 1),
            "learning_rate_factor": self._rates.factor,
            **{f"mix.{name}": weight for name, weight in self._now.mix.items()},
        }

    # Running ----------------------------------------------------------------------------------------------------

    def advance(self, steps: int | None = None) -> Mapping[str, float]:
        """Take up to ``steps`` optimiser steps, all that are left when None; return the last step's curve row."""
        target = self._recipe.steps if steps is None else min(self._recipe.steps, self.step + steps)
        with _Exchanged(self):
            while not self.done and self.step < target:
                self._take_step()
        return self._curves[-1] if self._curves else {}

    def _take_step(self) -> None:
        assert self._loop is not None  # there until the round is over
        number = self.step + 1
        rate = self._rates.at(number)
        began = time.perf_counter()
        try:
            taken = self._loop.step(LoopSettings(self._now, rate))
        except Exception as error:  # whatever an author's loop raises is a round that failed
            self._seconds += time.perf_counter() - began
            self._failure, self._ended = failure_from_exception(error, number), "failed"
            return
        seconds = time.perf_counter() - began
        self._seconds += seconds
        self._cost = self._cost + replace(taken.cost, device_seconds=0.0)
        self._samples += taken.samples
        metrics = {name: float(value) for name, value in taken.metrics.items() if value is not None}
        row = {"step": float(number), "loss": float(taken.loss), **metrics, "learning_rate": rate}
        self._curves.append(row)
        self._factors.append(self._rates.factor)
        self._monitor.observe(number, {**row, "step_seconds": seconds})
        fault = self._watch.observe(
            number,
            row["loss"],
            metrics.get("grad_norm"),
            reward=metrics.get("reward"),
            reward_spread=metrics.get("reward_std"),
            kl=metrics.get("kl"),
        )
        if fault is not None:
            self._failure, self._ended = fault, "failed"
        elif number >= self._recipe.steps:
            self._ended = "finished"
        else:
            self._check_limit()

    def _check_limit(self) -> None:
        """End the round before a step that could pass the limit; in seconds, after the first that did."""
        if self._limit is None or self.done:
            return
        spent = self.cost.in_unit(self._limit.unit)
        bound = self._trainer.step_cost_bound(self._task, self._now).in_unit(self._limit.unit)
        if spent + bound > self._limit.amount or (bound == 0 and spent >= self._limit.amount):
            self._ended = "budget"

    # Adjusting --------------------------------------------------------------------------------------------------

    def refusal(self, adjustment: Adjustment) -> str | None:
        """Return why the adjustment cannot be applied now; None when it can."""
        require_adjustment(adjustment)
        if self.done:
            return f"the round has ended ({self._ended}) at step {self.step}"
        kind = adjustment.kind
        if kind in ("none", "stop"):
            return None
        if kind not in self._trainer.adjustments:
            return f"{self._recipe.algorithm} has nothing that {kind} could change"
        if kind in ("mix_toward", "mix_away"):
            usable = self._trainer.usable_sources(self._task, self._recipe.algorithm)
            return mix_refusal(self._now.mix, adjustment, usable, self._recipe.algorithm)
        if kind == "lr_restart":
            return None if self._rates.restart_changes_next(self.step) else "the schedule stands at its beginning"
        try:
            changed = self._changed(adjustment)
        except ValueError as error:
            return str(error).rstrip(".")
        if kind == "batch_scale" and changed == self._now and adjustment.number != 1.0:
            return "no other size is legal"
        return None

    def apply(self, adjustment: Adjustment) -> None:
        """Change the round from the next step on.

        Raises:
            ValueError: `refusal` has a reason.
        """
        reason = self.refusal(adjustment)
        if reason is not None:
            raise ValueError(f"adjustment {adjustment.kind!r}: {reason}.")
        kind = adjustment.kind
        if kind == "none":
            return
        assert self._loop is not None
        self._applied.append((self.step, adjustment))
        if kind == "stop":
            self._ended = "stopped"
        elif kind == "lr_scale":
            self._rates.scale(adjustment.number)
        elif kind == "lr_restart":
            self._rates.restart(self.step)
        elif kind == "snapshot":
            self._snapshot = self._loop.weights()
        elif kind == "rollback":
            with _Exchanged(self):
                self._loop.load(self._snapshot)
        else:
            self._now = self._changed(adjustment)
            self._check_limit()

    def _changed(self, adjustment: Adjustment) -> Recipe:
        """Return the recipe in force after an adjustment; itself for kinds that are about something else.

        Raises:
            ValueError: a setting would leave the range it has in a recipe.
        """
        kind, now = adjustment.kind, self._now
        changed: dict[str, Any] = {}
        if kind == "batch_scale":
            size = round(now.batch_size * adjustment.number)
            if size == now.batch_size and adjustment.number != 1.0:
                size += 1 if adjustment.number > 1 else -1
            changed = {"batch_size": max(1, size)}
        elif kind in _SCALED:
            name = _SCALED[kind]
            changed = {name: (getattr(now, name) or _FROM_ZERO) * adjustment.number}
        elif kind == "gamma_add":
            changed = {"gamma": now.gamma + adjustment.number}
        elif kind in ("mix_toward", "mix_away"):
            changed = {"mix": shifted_mix(now.mix, adjustment)}
        elif kind == "mix_reset":
            changed = {"mix": self._recipe.mix}
        return replace(now, **changed) if changed else now

    # Ending -----------------------------------------------------------------------------------------------------

    def flag(self, sentence: str) -> None:
        """Add a sentence to the report's flags; one that is there already is not repeated."""
        if sentence not in self._flags:
            self._flags.append(sentence)

    def result(self) -> tuple[RoundReport, Checkpoint | None]:
        """Close the session; return its report and the checkpoint, None after a failure."""
        if self._outcome is None:
            self._outcome = self._finish()
            self.close()
        return self._outcome

    def _finish(self) -> tuple[RoundReport, Checkpoint | None]:
        ended = self._ended or "stopped"
        if self.step == 0 and self._failure is None:
            self._failure, ended = failure("budget_too_small", 0, "no optimiser step was taken"), "failed"
        elif self._failure is None and self._samples == 0:
            self._failure, ended = failure("nothing_supervised", self.step, "no sample carried a loss"), "failed"
        checkpoint = None
        if self._failure is None and self._loop is not None:
            weights = self._loop.weights()
            if all_finite(weights):
                ignored = self._trainer.ignored_settings(self._recipe.algorithm)
                whole = round_id(self._task, self._start, self._recipe, self._seed, ignored)
                made = checkpoint_id(whole, self._recipe.steps, self._factors, self._history())
                checkpoint = Checkpoint(made, weights, self._start.depth + 1)
            else:
                self._failure, ended = (
                    failure("diverged", self.step, "weights are not finite after the last step"),
                    "failed",
                )
        self._ended = ended
        report = RoundReport(
            recipe=self._recipe,
            start=self._start.id,
            seed=self._seed,
            checkpoint=None if checkpoint is None else checkpoint.id,
            steps=self.step,
            ended=ended,
            supervised_tokens=self._samples,
            training_cost=self.cost,
            failure=self._failure,
            curves=tuple(self._curves),
            adjustments=tuple(self._applied),
            flags=(*self._task.built.flags, *self._flags),
            wall_seconds=self._seconds,
        )
        return report, checkpoint

    def close(self) -> None:
        """End training now and free everything it holds."""
        self._ended = self._ended or "stopped"
        if self._loop is not None:
            self._loop.close()
            self._loop = None
        self._snapshot = None

    def _history(self) -> list[str]:
        """Return what made the weights others than those of the whole round, besides its learning rates."""
        return [
            f"{adjustment} after {step}"
            for step, adjustment in self._applied
            if adjustment.changes_weights
            and adjustment.kind not in ("lr_scale", "stop")
            and (step < self.step or adjustment.kind == "rollback")
        ]


class _Exchanged:
    """Puts the round's random state in force for a block, and the caller's back after it."""

    def __init__(self, session: LoopSession) -> None:
        self._session = session

    def __enter__(self) -> None:
        self._callers = random_state()
        restore_random_state(self._session._random)

    def __exit__(self, *_: object) -> None:
        self._session._random = random_state()
        restore_random_state(self._callers)


def _seed_everything(seed: int) -> None:
    import random

    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def all_finite(weights: Any) -> bool:
    """Return whether every number in arrays, tensors and plain containers of them is finite."""
    import numpy as np
    import torch

    if isinstance(weights, Mapping):
        return all(all_finite(value) for value in weights.values())
    if isinstance(weights, list | tuple):
        return all(all_finite(value) for value in weights)
    if isinstance(weights, torch.Tensor):
        return bool(torch.isfinite(weights).all()) if weights.is_floating_point() else True
    if isinstance(weights, np.ndarray):
        return bool(np.isfinite(weights).all()) if weights.dtype.kind == "f" else True
    return math.isfinite(weights) if isinstance(weights, float) else True
