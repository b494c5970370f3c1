"""Runs a TRL trainer on a worker thread that is parked between optimiser steps.

Exactly one of the two threads runs at any time, so a parked round may be read and changed without locks. The
global random number generators are swapped at each hand-over: what the caller draws never moves the round, and the
round never moves the caller.

The one exception is a worker that passed its time limit and does not answer: the session gives it up and keeps
copies of what both could touch. When such a worker wakes it unwinds, and then frees its trainer.
"""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback

from ..base import Checkpoint, Cost, Failure, Limit, RoundReport, checkpoint_id
from ..fault_kinds import failure
from ..fault_policy import RETRY_FACTOR
from ..faults import FaultWatch, MemoryLimitError, failure_from_exception
from ..messages import require_integer
from ..recipe import Adjustment, Recipe
from ..time_limit import InterruptedAtLimitError, interrupt
from .adapters import stack
from .curves import completion_flags, curve_values
from .memory import forget_peak, peak_memory, take_apart
from .models import copy_weights, trainable_tensors
from .random_state import caller_random_state_kept, random_state, restore_random_state
from .rescue import Rescue
from .settings import settings_not_used


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
        device: torch.device,
        reads: Collection[str],
        flags: tuple[str, ...] = (),
        rows_without_supervision: int = 0,
    ) -> None:
        self._recipe, self._start, self._seed, self._round_id = recipe, start, seed, round_id
        self._flops, self._bound, self._limit, self._watch = flops, step_bound, limit, watch
        self._torch_threads, self._device, self._reads = torch_threads, device, reads
        self._policy = watch.policy
        self._rescue = Rescue(self._policy, start.weights)
        self._flags, self._rows_without_supervision = list(flags), rows_without_supervision
        self._resume, self._parked = threading.Semaphore(0), threading.Event()
        self._quota, self._running, self._closing, self._worker_ended = 0, False, False, False
        self._hand_over_lock, self._given_up = threading.Lock(), False
        self._failure: Failure | None = None
        self._error: BaseException | None = None
        self._ended: str | None = None
        self._curves: list[dict[str, float]] = []
        self._rates_used: list[float] = []
        self._rates_asked: list[float] = []
        self._rate_factors: list[float] = []
        self._rate_factor = 1.0
        self._sequences_done = 0  # not those of a step that an exception ended
        self._slowest_step = self._step_began = 0.0
        self._froze = False
        self._peak_memory: int | None = None
        self._wall_seconds = 0.0
        self._result: tuple[RoundReport, Checkpoint | None] | None = None
        self._thread: threading.Thread | None = None
        self._trainer: Any = None
        self._meter = Meter()
        self._rng = random_state()
        forget_peak(device)
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
            if self._seconds_left() == 0:
                self._pass_time_limit("before its next step")
            else:
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
            self._flags.extend(completion_flags(self._curves))
            checkpoint = None
            if weights is not None:
                factors = self._rate_factors[: self.step]
                made = checkpoint_id(self._round_id, self._recipe.steps, factors, self._rescue.history)
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
        trainer = self._trainer
        try:
            trainer.train()
        except (_SessionClosedError, InterruptedAtLimitError):
            pass
        except BaseException as error:  # a `SystemExit` too would otherwise end the thread without a word
            if not self._given_up:
                self._error = error
        finally:
            self._thaw()
            with self._hand_over_lock:
                self._worker_ended = True
                given_up = self._given_up
                self._parked.set()
            if given_up:
                take_apart(trainer)

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
        row.update(curve_values(logs))
        row.update(self._meter.extra)
        self._meter.extra.clear()
        self._curves.append(row)
        self._sequences_done = self._meter.sequences
        self._slowest_step = max(self._slowest_step, time.perf_counter() - self._step_began)
        self._step_began = time.perf_counter()
        self._note_memory()
        fault = self._watch.observe(
            self.step,
            loss,
            None if grad_norm is None else float(grad_norm),
            row.get("groups_without_spread"),
            reward_spread=logs.get("rewards/verified/std"),
            kl=row.get("kl"),
            chosen_log_probability=row.get("chosen_log_probability"),
        )
        if fault is None:
            self._rescue.step_was_fine()
        elif not self._goes_on_after(fault):
            return True
        if self.step >= self._recipe.steps:
            self._ended = "finished"
            return True
        if self._would_pass_limit():
            self._ended = "budget"
            return True
        self._quota -= 1
        if self._quota <= 0:
            with self._hand_over_lock:
                self._require_not_given_up()
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
                    self._parked.wait(self._seconds_left())
                except BaseException:  # Ctrl-C: the worker finishes its step first, so that again one thread runs
                    self._quota = 0
                    self._parked.wait(self._seconds_left())  # a second Ctrl-C gets through
                    raise
                finally:
                    self._running = not self._parked.is_set()
                    if self._running and self._is_late():
                        self._interrupt()
        finally:
            self._wall_seconds += time.perf_counter() - began
            if not self._running:
                self._note_end()

    def _seconds_left(self) -> float | None:
        """Return how long the round may still train; None when no limit is set."""
        most = self._policy.max_round_seconds
        if most is None:
            return None
        running = time.perf_counter() - self._hand_over_began if self._running else 0.0
        return max(0.0, most - self._wall_seconds - running)

    def _is_late(self) -> bool:
        left = self._seconds_left()
        return left is not None and left < 0.01  # waiting may end a moment early

    def _interrupt(self) -> None:
        """End a worker whose time is over, or give it up."""
        assert self._thread is not None
        answered = interrupt(self._thread, self._parked.is_set, self._policy.grace_seconds)
        with self._hand_over_lock:
            answered = answered or self._parked.is_set()
            self._given_up = not answered
        self._running = False
        if answered:
            self._error = None  # whatever the interruption was turned into
            self._pass_time_limit("in a step; its worker unwound when it was asked to")
            return
        # The worker goes on holding these when it wakes; the session's are copies from now on.
        meter = self._meter
        self._meter = replace(meter, losses=list(meter.losses), extra=dict(meter.extra), flags=list(meter.flags))
        self._curves, self._rate_factors = list(self._curves), list(self._rate_factors)
        self._rates_used, self._rates_asked = list(self._rates_used), list(self._rates_asked)
        self._thaw()
        self._trainer = self._thread = None
        self._pass_time_limit(
            f"in a step; its worker did not answer within {self._policy.grace_seconds:g} seconds and was given up, "
            "its memory returns when it ends"
        )

    def _pass_time_limit(self, where: str) -> None:
        evidence = f"the round passed {self._policy.max_round_seconds:g} seconds {where}"
        self._end_by(failure("time_limit", self.step + 1, evidence))

    def _note_end(self) -> None:
        """Label the end of a worker that ended by itself."""
        if self._error is not None:
            fault = failure_from_exception(self._error, self.step + 1)
            self._error = None  # its traceback holds the model
            self._end_by(fault)
        elif self._worker_ended and self._ended is None:
            self._end_by(failure("stopped_early", self.step, f"training ended after {self.step} steps by itself"))

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
                return failure("setting_not_used", step, evidence)
        asked_sequences = self.step * self._recipe.batch_size * self._recipe.gradient_accumulation
        if self._sequences_done != asked_sequences:
            evidence = f"{self._sequences_done} sequences were trained on, asked for {asked_sequences}"
            return failure("setting_not_used", self.step, evidence)
        different = settings_not_used(self._trainer, self._recipe, self._reads)
        return failure("setting_not_used", self.step, "; ".join(different)) if different else None

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

    def _fail(self, fault: Failure) -> None:
        self._failure, self._ended = fault, "failed"

    def _end_by(self, fault: Failure) -> None:
        """End a round that cannot go on after a fault: with earlier weights where the policy says so, else failed."""
        if not self._given_up and self._rescue.respond(fault, 0, unwound=True) == "rollback":
            self._ended = "rolled_back"
        else:
            self._fail(fault)

    def _goes_on_after(self, fault: Failure) -> bool:
        """Respond to a fault that the last step showed; return whether training goes on. Called on the worker."""
        response = self._rescue.respond(fault, self._recipe.steps - self.step, unwound=False)
        if response == "retry":
            self._rescue.restart(self._trainer)
            self._scale_learning_rate(RETRY_FACTOR)
        elif response == "rollback":
            self._ended = "rolled_back"
        else:
            self._fail(fault)
        return response == "retry"

    def _before_update(self, rate: float) -> None:
        """Note the rate of the step that is about to be taken, and the weights it starts from. Called on the worker."""
        self._note_rate(rate)
        self._note_memory()
        self._rescue.before_update(len(self._rates_used), self._trainer)

    def _note_memory(self) -> None:
        """Note the memory in use; called on the worker between passes.

        Raises:
            MemoryLimitError: it is more than the policy allows.
        """
        self._require_not_given_up()
        used, most = peak_memory(self._device), self._policy.max_memory_bytes
        if used is None:
            return
        self._peak_memory = max(used, self._peak_memory or 0)
        if most is not None and used > most:
            raise MemoryLimitError(f"{used} bytes of memory were in use, above {most}")

    def _require_not_given_up(self) -> None:
        if self._given_up:
            raise _SessionClosedError

    def _final_weights(self) -> dict[str, torch.Tensor] | None:
        fault = self._fault_of_round()
        if fault is not None:
            self._fail(fault)
            return None
        if self._rescue.rolled_back_to is not None:
            self._rescue.restore(self._trainer)
        weights = self._model_weights()
        fault = self._not_finite(weights)
        if fault is None:
            return weights
        self._end_by(fault)
        if self._failure is not None:
            return None
        self._rescue.restore(self._trainer)
        return self._model_weights()

    def _fault_of_round(self) -> Failure | None:
        """Return what is wrong with the round as a whole: no steps, nothing learned from, or other settings."""
        if self.step == 0:
            kind = "budget_too_small" if self._ended == "budget" else "no_steps"
            return failure(kind, 0, "no optimiser step was taken")
        if self._meter.supervised_tokens == 0:
            return failure("nothing_supervised", self.step, "no token carried a loss in the whole round")
        return self._setting_not_used() or self._watch.round_ended(self.step)

    def _model_weights(self) -> dict[str, torch.Tensor]:
        model = self._trainer.model
        if hasattr(model, "merge_and_unload") and self._recipe.lora_adapter == "stack":
            return stack(self._start.weights, model)
        return copy_weights(model.merge_and_unload() if hasattr(model, "merge_and_unload") else model)

    def _not_finite(self, weights: Mapping[str, torch.Tensor]) -> Failure | None:
        broken = [name for name, value in weights.items() if not bool(torch.isfinite(value).all())]
        if not broken:
            return None
        return failure("diverged", self.step, f"{len(broken)} weights are not finite: {broken[0]}")

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
            take_apart(trainer)
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
            rescued=tuple(self._rescue.rescued) if self._failure is None else (),
            rolled_back_to=self._rescue.rolled_back_to if self._failure is None else None,
            curves=tuple(self._curves),
            flags=(*self._flags, *self._rescue.flags, *self._meter.flags),
            wall_seconds=self._wall_seconds,
            peak_memory_bytes=self._peak_memory,
        )

    @contextmanager
    def _worker_random_state(self) -> Iterator[None]:
        caller = random_state()
        restore_random_state(self._rng)
        self._hand_over_began = time.perf_counter()
        try:
            yield
        finally:
            if not self._running:
                self._rng = random_state()
            restore_random_state(caller)


class _ParkingCallback(TrainerCallback):  # type: ignore[misc]
    """Tells the session about each step, at the one moment when its logs are complete and the next has not begun."""

    def __init__(self, session: TrlSession) -> None:
        self._session = session

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give the collector back what was set aside while training was set up."""
        self._session._thaw()
        self._session._note_memory()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the learning rate that this step really uses."""
        self._session._before_update(float(kwargs["optimizer"].param_groups[0]["lr"]))

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the memory after a pass of an accumulated step."""
        self._session._note_memory()

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
        """Hand a finished step to the session; the closing summary of a run is no step."""
        if logs is not None and "loss" in logs and self._session._step_done(logs):
            control.should_training_stop = True
        return control
