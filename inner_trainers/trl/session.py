"""Runs a TRL trainer on a worker thread that is parked between optimiser steps.

Exactly one of the two threads runs at any time, so a parked round may be read and changed without locks. The
global random number generators are swapped at each hand-over: what the caller draws never moves the round, and the
round never moves the caller.
"""

from __future__ import annotations

import gc
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PrinterCallback, TrainerCallback

from ..base import Checkpoint, Cost, Failure, Limit, RoundReport, checkpoint_id
from ..faults import FaultWatch, failure_from_exception
from ..messages import require_integer
from ..recipe import Adjustment, Recipe
from .adapters import stack
from .models import copy_weights, trainable_tensors


@dataclass
class Meter:
    """What the trainer counts while it trains; read while it is parked.

    Attributes:
        losses: raw loss of each forward pass since the last optimiser step.
        trained_tokens: tokens that went forward and backward, once for each model that they went through.
        generated_tokens: tokens sampled.
        scored_tokens: tokens that went forward only.
        teacher_tokens: those of the scored tokens that a teacher read.
        supervised_tokens: tokens that carried a loss.
        sequences: training sequences.
        extra: further values of the step that is running, put into its curve row and cleared.
        flags: sentences for the report.
    """

    losses: list[float] = field(default_factory=list)
    trained_tokens: int = 0
    generated_tokens: int = 0
    scored_tokens: int = 0
    teacher_tokens: int = 0
    supervised_tokens: int = 0
    sequences: int = 0
    extra: dict[str, float] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)


class MeteredTrainer:
    """Mixin that reports the raw loss of every forward pass, before any logging filter sees it."""

    meter: Meter

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the pass and note its loss."""
        loss: torch.Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self.meter.losses.append(float(loss))
        return loss


class _SessionClosedError(BaseException):
    """Unwinds the worker when the session is closed mid-round; not an `Exception`, so no trainer code catches it."""


class TrlSession:
    """One running round; see `TrainingSession` for the contract."""

    def __init__(
        self,
        *,
        build: Callable[[], tuple[Any, Meter]],
        recipe: Recipe,
        start: Checkpoint,
        seed: int,
        round_id: str,
        flops: Callable[[Meter], float],
        step_bound: Cost,
        limit: Limit | None,
        watch: FaultWatch,
        torch_threads: int | None,
        flags: tuple[str, ...] = (),
        rows_without_supervision: int = 0,
    ) -> None:
        self._recipe, self._start, self._seed, self._round_id = recipe, start, seed, round_id
        self._flops, self._bound, self._limit, self._watch = flops, step_bound, limit, watch
        self._torch_threads = torch_threads
        self._flags, self._rows_without_supervision = list(flags), rows_without_supervision
        self._resume, self._parked = threading.Semaphore(0), threading.Event()
        self._quota, self._running, self._closing, self._worker_ended = 0, False, False, False
        self._failure: Failure | None = None
        self._error: BaseException | None = None
        self._ended: str | None = None
        self._curves: list[dict[str, float]] = []
        self._rates_used: list[float] = []
        self._rates_asked: list[float] = []
        self._rate_factors: list[float] = []
        self._rate_factor = 1.0
        self._slowest_step = self._step_began = 0.0
        self._froze = False
        self._wall_seconds = 0.0
        self._result: tuple[RoundReport, Checkpoint | None] | None = None
        self._thread: threading.Thread | None = None
        self._trainer: Any = None
        self._meter = Meter()
        self._rng = _random_state()
        began = time.perf_counter()
        with self._worker_random_state(), trainable_tensors():
            try:
                self._trainer, self._meter = build()
                self._trainer.remove_callback(PrinterCallback)
                self._trainer.add_callback(_ParkingCallback(self))
            except Exception as error:
                self._fail(failure_from_exception(error, 0))
        self._wall_seconds += time.perf_counter() - began
        if self._ended is None and self._would_pass_limit():
            self._ended = "budget"

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
        meter = self._meter
        return Cost(
            meter.trained_tokens,
            meter.generated_tokens,
            meter.scored_tokens,
            self._flops(meter),
            self._wall_seconds,
        )

    def advance(self, steps: int | None = None) -> Mapping[str, float]:
        """Take up to ``steps`` optimiser steps (all that are left when None); return the last step's curve row."""
        quota = self._recipe.steps if steps is None else require_integer("steps", steps, low=1, high=2**31)
        if not self.done:
            self._quota = quota
            self._hand_over()
        return self._curves[-1] if self._curves else {}

    def apply(self, adjustment: Adjustment) -> None:
        """Change the round from the next step on.

        Raises:
            ValueError: the round has ended.
        """
        if self.done:
            raise ValueError(
                f"adjustment {adjustment.kind!r}: the round has ended ({self._ended}) at step {self.step}."
            )
        if adjustment.kind == "stop":
            self._ended = "stopped"
        elif adjustment.kind == "lr_scale":
            self._scale_learning_rate(adjustment.value)

    def result(self) -> tuple[RoundReport, Checkpoint | None]:
        """Close the session; return its report (without scorecard) and the checkpoint, None after a failure."""
        if self._result is None:
            if self._ended is None:
                self._ended = "stopped"
            with trainable_tensors():
                weights = self._final_weights() if self._failure is None else None
            self._release()
            # a step that uses a batch of completions again says nothing of its groups
            spread = [row["groups_without_spread"] for row in self._curves if "groups_without_spread" in row]
            if spread and all(share == 1.0 for share in spread):
                self._flags.append(
                    f"no signal: in all {self.step} steps the completions of every prompt had equal rewards, so "
                    "nothing was learned; the task is too hard or too easy here, or the verifier is constant"
                )
            checkpoint = None
            if weights is not None:
                made = checkpoint_id(self._round_id, self._recipe.steps, self._rate_factors[: self.step])
                checkpoint = Checkpoint(made, weights, self._start.depth + 1)
            self._result = (self._report(checkpoint), checkpoint)
        return self._result

    def close(self) -> None:
        """End training now and free everything it holds."""
        if self._result is None:
            if self._ended is None:
                self._ended = "stopped"
            self._release()
            self._result = (self._report(None), None)

    # The worker's side ------------------------------------------------------------------------------------------

    def _work(self) -> None:
        if self._torch_threads is not None:
            torch.set_num_threads(self._torch_threads)
        # `train` begins with a full garbage collection, a quarter of a second in a process that has TRL loaded. What
        # exists now is set aside for that moment; `on_train_begin` takes it back.
        self._froze = gc.get_freeze_count() == 0
        if self._froze:
            gc.freeze()
        try:
            self._trainer.train()
        except _SessionClosedError:
            pass
        except BaseException as error:  # a `SystemExit` too would otherwise end the thread without a word
            self._error = error
        finally:
            self._thaw()
            self._worker_ended = True
            self._parked.set()

    def _thaw(self) -> None:
        if self._froze:
            self._froze = False
            gc.unfreeze()

    def _step_done(self, logs: Mapping[str, Any]) -> bool:
        """Note a finished step; return whether training should stop. Called by the callback on the worker."""
        losses, self._meter.losses = self._meter.losses, []
        loss = sum(losses) if losses else math.nan  # one bad pass of an accumulated step shows
        grad_norm = logs.get("grad_norm")
        row = {"step": float(self.step + 1), "loss": loss, "learning_rate": self._rates_used[-1]}
        row.update({_curve_name(k): float(v) for k, v in logs.items() if _is_curve(k, v)})
        row.update(self._meter.extra)
        self._meter.extra.clear()
        self._curves.append(row)
        self._slowest_step = max(self._slowest_step, time.perf_counter() - self._step_began)
        self._step_began = time.perf_counter()
        failure = self._watch.observe(
            self.step, loss, None if grad_norm is None else float(grad_norm), row.get("groups_without_spread")
        )
        if failure is not None:
            self._fail(failure)
            return True
        if self.step >= self._recipe.steps:
            self._ended = "finished"
            return True
        if self._would_pass_limit():
            self._ended = "budget"
            return True
        self._quota -= 1
        if self._quota <= 0:
            self._parked.set()
            self._resume.acquire()
            self._step_began = time.perf_counter()
            if self._closing:
                raise _SessionClosedError
        return False

    # The caller's side ------------------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        began = self._step_began = time.perf_counter()
        try:
            with self._worker_random_state():
                self._parked.clear()
                self._running = True
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name="posttrain-round", daemon=True)
                    self._thread.start()
                else:
                    self._resume.release()
                try:
                    self._parked.wait()
                except BaseException:  # Ctrl-C: the worker finishes its step first, so that again one thread runs
                    self._quota = 0
                    self._parked.wait()  # a second Ctrl-C gets through; `_release` waits then
                    raise
                finally:
                    self._running = not self._parked.is_set()
        finally:
            self._wall_seconds += time.perf_counter() - began
            if not self._running:
                self._note_end()

    def _note_end(self) -> None:
        """Label the end of a worker that ended by itself."""
        if self._error is not None:
            self._fail(failure_from_exception(self._error, self.step + 1))
            self._error = None  # its traceback holds the model
        elif self._worker_ended and self._ended is None:
            self._fail(
                Failure("environment", "stopped_early", self.step, f"training ended after {self.step} steps by itself")
            )

    def _would_pass_limit(self) -> bool:
        if self._limit is None:
            return False
        unit = self._limit.unit
        next_step = self._slowest_step if unit == "device_seconds" else self._bound.in_unit(unit)
        spent = self._wall_seconds if unit == "device_seconds" else self.cost.in_unit(unit)
        if unit == "device_seconds" and self._running:
            spent += time.perf_counter() - self._hand_over_began
        return spent + next_step > self._limit.amount

    def _note_rate(self, rate: float) -> None:
        """Note the rate a step is about to use, beside the one it was asked to. Called on the worker."""
        self._rates_used.append(rate)
        self._rates_asked.append(self._recipe.learning_rate_at(len(self._rates_used)) * self._rate_factor)
        self._rate_factors.append(self._rate_factor)

    def _setting_not_used(self) -> Failure | None:
        """Return a failure when a step used another learning rate or batch than it was asked to."""
        for step, (used, asked) in enumerate(zip(self._rates_used, self._rates_asked, strict=True), start=1):
            if not math.isclose(used, asked, rel_tol=1e-6, abs_tol=1e-15):
                evidence = f"step {step} used learning rate {used:g}, asked for {asked:g}"
                return Failure("environment", "setting_not_used", step, evidence)
        asked_sequences = self.step * self._recipe.batch_size * self._recipe.gradient_accumulation
        if self._meter.sequences != asked_sequences:
            evidence = f"{self._meter.sequences} sequences were trained on, asked for {asked_sequences}"
            return Failure("environment", "setting_not_used", self.step, evidence)
        return None

    def _scale_learning_rate(self, factor: float) -> None:
        self._rate_factor *= factor
        scheduler, optimizer = self._trainer.lr_scheduler, self._trainer.optimizer
        if scheduler is None or self._thread is None:  # nothing is built before the first step: the peak itself moves
            self._trainer.args.learning_rate *= factor
            return
        base = getattr(scheduler, "scheduler", scheduler)  # accelerate wraps it
        base.base_lrs = [rate * factor for rate in base.base_lrs]
        for group in getattr(optimizer, "optimizer", optimizer).param_groups:
            group["lr"] = group["lr"] * factor

    def _fail(self, failure: Failure) -> None:
        self._failure, self._ended = failure, "failed"

    def _final_weights(self) -> dict[str, torch.Tensor] | None:
        if self.step == 0:
            kind = "budget_too_small" if self._ended == "budget" else "no_steps"
            cause = "resources" if self._ended == "budget" else "environment"
            self._fail(Failure(cause, kind, 0, "no optimiser step was taken"))
            return None
        if self._meter.supervised_tokens == 0:
            self._fail(Failure("data", "nothing_supervised", self.step, "no token carried a loss in the whole round"))
            return None
        not_used = self._setting_not_used()
        if not_used is not None:
            self._fail(not_used)
            return None
        model = self._trainer.model
        if hasattr(model, "merge_and_unload") and self._recipe.lora_adapter == "stack":
            weights = stack(self._start.weights, model)
        else:
            weights = copy_weights(model.merge_and_unload() if hasattr(model, "merge_and_unload") else model)
        broken = [name for name, value in weights.items() if not bool(torch.isfinite(value).all())]
        if broken:
            self._fail(
                Failure("hyperparameter", "diverged", self.step, f"{len(broken)} weights are not finite: {broken[0]}")
            )
            return None
        return weights

    def _release(self) -> None:
        if self._thread is not None:
            if self._running:  # the caller was interrupted while the worker ran: wait until it parks or ends
                self._quota = 0
                with caller_random_state_kept():
                    self._parked.wait()
                self._running = False
            self._closing = True
            self._resume.release()
            self._thread.join()
            self._thread = self._error = None
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            _take_apart(trainer)
            del trainer
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            gc.collect()
            torch.cuda.empty_cache()

    def _report(self, checkpoint: Checkpoint | None) -> RoundReport:
        return RoundReport(
            recipe=self._recipe,
            start=self._start.id,
            seed=self._seed,
            checkpoint=None if checkpoint is None else checkpoint.id,
            steps=self.step,
            ended=self._ended or "stopped",
            supervised_tokens=self._meter.supervised_tokens,
            rows_without_supervision=self._rows_without_supervision,
            training_cost=self.cost,
            failure=self._failure,
            curves=tuple(self._curves),
            flags=(*self._flags, *self._meter.flags),
            wall_seconds=self._wall_seconds,
        )

    @contextmanager
    def _worker_random_state(self) -> Iterator[None]:
        caller = _random_state()
        _restore_random_state(self._rng)
        self._hand_over_began = time.perf_counter()
        try:
            yield
        finally:
            if not self._running:
                self._rng = _random_state()
            _restore_random_state(caller)


class _ParkingCallback(TrainerCallback):  # type: ignore[misc]
    """Tells the session about each step, at the one moment when its logs are complete and the next has not begun."""

    def __init__(self, session: TrlSession) -> None:
        self._session = session

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give the collector back what was set aside while training was set up."""
        self._session._thaw()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the learning rate that this step really uses."""
        self._session._note_rate(float(kwargs["optimizer"].param_groups[0]["lr"]))

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
        """Hand a finished step to the session; the closing summary of a run is no step."""
        if logs is not None and "loss" in logs and self._session._step_done(logs):
            control.should_training_stop = True
        return control


_HIDDEN_LOGS = ("epoch", "num_tokens", "step_time", "learning_rate", "loss")
_CURVE_NAMES = {
    "frac_reward_zero_std": "groups_without_spread",
    "rewards/margins": "reward_margin",  # of the better answer over the worse one, implicit in the log-probabilities
    "rewards/accuracies": "reward_accuracy",
}


def _is_curve(name: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    hidden = name in _HIDDEN_LOGS or name.startswith(("rewards/", "sampling/", "profiling/", "completions/min"))
    return name in _CURVE_NAMES or not hidden


def _curve_name(name: str) -> str:
    return _CURVE_NAMES.get(name, name)


def _take_apart(trainer: Any) -> None:
    """Cut the references between a trainer's parts, so that its memory goes without waiting for the cycle collector."""
    for model in (trainer.model, getattr(trainer, "ref_model", None)):
        for module in () if model is None else model.modules():
            module.__dict__.pop("forward", None)  # TRL's fused head is a method bound to the model: a cycle
            for parameter in module.parameters(recurse=False):
                parameter.grad = None
    accelerator = getattr(trainer, "accelerator", None)
    for held in ("_models", "_optimizers", "_schedulers", "_dataloaders"):  # `free_memory` would also run the collector
        if hasattr(accelerator, held):
            setattr(accelerator, held, [])
    optimizer = getattr(trainer, "optimizer", None)
    inner = getattr(optimizer, "optimizer", optimizer)
    if inner is not None:
        inner.state.clear()
        inner.param_groups.clear()
    for name in vars(trainer):
        trainer.__dict__[name] = None


@contextmanager
def caller_random_state_kept() -> Iterator[None]:
    """Leave the global random number generators as they were, whatever the block draws."""
    state = _random_state()
    try:
        yield
    finally:
        _restore_random_state(state)


def _random_state() -> tuple[Any, ...]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def _restore_random_state(state: tuple[Any, ...]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
    if state[3] is not None:
        torch.cuda.set_rng_state_all(state[3])
