"""One round: trains on a worker that is parked between optimiser steps, and reports what came of it."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback

from ..adjustments import Adjustment, require_adjustment
from ..base import Checkpoint, Cost, Failure, Limit, RoundReport, checkpoint_id
from ..fault_kinds import failure
from ..fault_policy import RETRY_FACTOR
from ..faults import FaultWatch, MemoryLimitError, failure_from_exception
from ..messages import require_integer
from ..monitor import Monitor
from ..rates import LearningRates
from ..recipe import Recipe
from ..signals import Signals
from ..telemetry import RoundTelemetry
from .adapters import stack
from .adjust_optimizer import scale_learning_rate
from .algorithms import AlgorithmSpec
from .curves import completion_flags, curve_values
from .executor import Executor
from .hardware import HardwareWatch
from .live import LiveRound, StepNotPaidError
from .memory import forget_peak, peak_memory, take_apart
from .metering import Meter
from .models import copy_weights, trainable_tensors
from .rescue import Rescue
from .settings_watch import SettingsWatch
from .worker import Worker


class TrlSession:
    """One running round; see `TrainingSession` for the contract."""

    def __init__(
        self,
        *,
        build: Callable[[], Any],
        meter: Meter,
        recipe: Recipe,
        start: Checkpoint,
        seed: int,
        round_id: str,
        flops: Callable[[Meter], float],
        first_bound: Cost,
        step_bound: Callable[[Recipe], Cost],
        limit: Limit | None,
        watch: FaultWatch,
        torch_threads: int | None,
        device: torch.device,
        spec: AlgorithmSpec,
        flags: tuple[str, ...] = (),
        rows_without_supervision: int = 0,
    ) -> None:
        self._recipe, self._start, self._seed, self._round_id = recipe, start, seed, round_id
        self._flops, self._limit, self._watch = flops, limit, watch
        self._first_bound, self._bound, self._bounded = first_bound, step_bound(recipe), recipe
        self._device = device
        self._policy = watch.policy
        self._rescue = Rescue(self._policy, start.weights)
        self._flags, self._rows_without_supervision = list(flags), rows_without_supervision
        self._quota = 0
        self._failure: Failure | None = None
        self._ended: str | None = None
        self._curves: list[dict[str, float]] = []
        self._slowest_step = self._step_began = 0.0
        self._memory_used: int | None = None
        self._peak_memory: int | None = None
        self._wall_seconds = 0.0
        self._result: tuple[RoundReport, Checkpoint | None] | None = None
        self._meter = meter
        self._live = LiveRound(
            spec=spec,
            asked=recipe,
            now=recipe,
            rates=LearningRates(recipe),
            rescue=self._rescue,
            meter=meter,
            step_bound=step_bound,
            pays=None if limit is None else lambda now: not self._passes_limit(step_bound(now)),
        )
        self._executor = Executor(self._live)
        self._settings_watch = SettingsWatch(self._live)
        self._turn = threading.Lock()
        self._worker = Worker(self._train, self._hurry, torch_threads)
        self._telemetry = RoundTelemetry(device)
        self._monitor = Monitor(sorted(recipe.mix), on_policy=spec.on_policy)
        self._hardware = HardwareWatch(device, self._telemetry)
        forget_peak(device)
        began = time.perf_counter()
        if self._would_pass_limit():
            self._ended = "budget"
            return
        with self._worker.own_random_state(), trainable_tensors():
            try:
                self._trainer = build()
                self._trainer.remove_callback(PrinterCallback)
                self._trainer.add_callback(_ParkingCallback(self))
                if getattr(self._trainer, "live_rows", None) is not None:
                    self._trainer.live_rows.begin(self._live, self._policy.max_memory_bytes, device)
            except Exception as error:
                self._fail(failure_from_exception(error, 0))
        self._wall_seconds += time.perf_counter() - began
        if self._ended is None and self._would_pass_limit():
            self._ended = "budget"

    @property
    def _trainer(self) -> Any:
        return self._live.trainer

    @_trainer.setter
    def _trainer(self, trainer: Any) -> None:
        self._live.trainer = trainer

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

    @property
    def signals(self) -> Signals:
        """What the last optimiser step showed; all absent before the first."""
        return self._monitor.signals

    @property
    def own_seconds(self) -> Mapping[str, float]:
        """What of the last step was spent on ``"gradients"`` beyond clipping them, and on the ``"monitor"``."""
        return dict(self._meter.own_seconds)

    @property
    def settings(self) -> Mapping[str, float]:
        """Settings in force for the next step; see `TrainingSession.settings`."""
        return self._executor.settings()

    def advance(self, steps: int | None = None) -> Mapping[str, float]:
        """Take up to ``steps`` optimiser steps (all that are left when None); return the last step's curve row."""
        quota = self._recipe.steps if steps is None else require_integer("steps", steps, low=1, high=2**31)
        with self._one_caller("advance"):
            if not self.done:
                self._quota = quota
                if self._seconds_left() == 0:
                    self._pass_time_limit("before its next step")
                elif self._would_pass_limit():  # an adjustment may have made the next step dearer
                    self._ended = "budget"
                else:
                    self._hand_over()
            return self._curves[-1] if self._curves else {}

    @contextmanager
    def _one_caller(self, what: str) -> Iterator[None]:
        """Refuse the block while another thread is in one.

        Raises:
            RuntimeError: it is.
        """
        if not self._turn.acquire(blocking=False):
            raise RuntimeError(f"{what}: another thread is advancing or adjusting this session; one at a time may.")
        try:
            yield
        finally:
            self._turn.release()

    def refusal(self, adjustment: Adjustment) -> str | None:
        """Return why the adjustment cannot be applied now, as a sentence; None when it can.

        Raises:
            ValueError: it is no `Adjustment`.
        """
        require_adjustment(adjustment)
        if self.done:
            return f"the round has ended ({self._ended}) at step {self.step}"
        if self._worker.running:
            return f"step {self.step + 1} was interrupted and is still running; call advance to let it finish"
        return None if adjustment.kind == "stop" else self._executor.refusal(adjustment)

    def apply(self, adjustment: Adjustment) -> None:
        """Change the round from the next step on.

        Raises:
            ValueError: `refusal` has a reason, or it is no `Adjustment`.
            RuntimeError: another thread is advancing or adjusting the session.
        """
        with self._one_caller("apply"):
            reason = self.refusal(adjustment)
            if reason is not None:
                raise ValueError(f"adjustment {adjustment.kind!r}: {reason}.")
            if adjustment.kind == "stop":
                self._ended = "stopped"
                self._executor.note(adjustment)
                return
            with trainable_tensors():  # what is copied here is trained with on the worker
                self._executor.apply(adjustment)

    def flag(self, sentence: str) -> None:
        """Add a sentence to the flags of the round's report; one that is there already is not repeated."""
        if sentence not in self._flags:
            self._flags.append(sentence)

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
                factors = self._settings_watch.factors[: self.step]
                history = [*self._meter.history, *self._rescue.history, *self._executor.history()]
                made = checkpoint_id(self._round_id, self._recipe.steps, factors, history)
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

    def _train(self) -> None:
        trainer = self._trainer
        try:
            trainer.train()
        finally:
            if self._worker.given_up:  # else the caller still needs its weights
                take_apart(trainer)

    def _hurry(self) -> None:
        self._quota = 0

    def _step_done(self, logs: Mapping[str, Any]) -> bool:
        """Note a finished step; return whether training should stop. Called by the callback on the worker."""
        seconds = time.perf_counter() - self._step_began
        loss = self._meter.take_loss()
        grad_norm = logs.get("grad_norm")
        row = {"step": float(self.step + 1), "loss": loss, "learning_rate": self._settings_watch.rates[-1]}
        row.update(curve_values(logs))
        row.update(self._meter.extra)
        self._meter.extra.clear()
        self._curves.append(row)
        self._live.step = self.step
        self._settings_watch.step_done()
        self._slowest_step = max(self._slowest_step, seconds)
        self._step_began = time.perf_counter()
        self._note_memory()
        self._observe(row, seconds)
        fault = self._watch.observe(
            self.step,
            loss,
            None if grad_norm is None else float(grad_norm),
            row.get("groups_without_spread"),
            reward=row.get("reward"),
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
            self._worker.park()
            self._step_began = time.perf_counter()
        return False

    def _observe(self, row: Mapping[str, float], seconds: float) -> None:
        """Let the monitor see a finished step. Called on the worker."""
        began, meter = time.perf_counter(), self._meter
        hardware = self._hardware.read(seconds, meter.trained_tokens + meter.generated_tokens, self._memory_used)
        self._monitor.observe(self.step, {**row, **meter.measured, **hardware})
        meter.measured.clear()
        meter.own_seconds["monitor"] = time.perf_counter() - began

    # The caller's side ------------------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        if not self._worker.started:
            self._telemetry.start()
        began = self._step_began = time.perf_counter()
        self._live.started = True
        in_time = True
        try:
            in_time = self._worker.hand_over(self._seconds_left(), self._policy.grace_seconds)
        finally:
            self._wall_seconds += time.perf_counter() - began
            if self._worker.given_up:
                self._leave_to_worker()
            elif not in_time and self._ended is None:  # else it was late, but came to its own end
                self._pass_time_limit("in a step; its worker unwound when it was asked to")
            elif not self._worker.running:
                self._note_end()

    def _seconds_left(self) -> float | None:
        """Return how long the round may still train; None when no limit is set."""
        most = self._policy.max_round_seconds
        return None if most is None else max(0.0, most - self._wall_seconds)

    def _leave_to_worker(self) -> None:
        """Keep copies of what a worker that was given up may still touch when it wakes."""
        meter = self._meter
        self._meter = replace(
            meter,
            losses=list(meter.losses),
            extra=dict(meter.extra),
            measured=dict(meter.measured),
            own_seconds=dict(meter.own_seconds),
            flags=list(meter.flags),
            history=list(meter.history),
        )
        self._curves, self._settings_watch = list(self._curves), self._settings_watch.detached()
        self._trainer = None
        self._pass_time_limit(
            f"in a step; its worker did not answer within {self._policy.grace_seconds:g} seconds and was given up, "
            "its memory returns when it ends"
        )

    def _pass_time_limit(self, where: str) -> None:
        evidence = f"the round passed {self._policy.max_round_seconds:g} seconds {where}"
        self._end_by(failure("time_limit", self.step + 1, evidence))

    def _note_end(self) -> None:
        """Label the end of a worker that ended by itself."""
        if self._worker.error is not None:
            error, self._worker.error = self._worker.error, None  # its traceback holds the model
            if isinstance(error, StepNotPaidError):
                self._ended = "budget"
            else:
                self._end_by(failure_from_exception(error, self.step + 1))
        elif self._worker.ended and self._ended is None:
            self._end_by(failure("stopped_early", self.step, f"training ended after {self.step} steps by itself"))

    def _would_pass_limit(self) -> bool:
        if self._limit is None:
            return False
        if self._live.now is not self._bounded:
            self._bounded, self._bound = self._live.now, self._live.step_bound(self._live.now)
        bounds = (self._bound,) if self._worker.started else (self._bound, self._first_bound)
        return any(self._passes_limit(bound) for bound in bounds)

    def _passes_limit(self, bound: Cost) -> bool:
        """Return whether a step that costs at most ``bound`` could pass the limit."""
        if self._limit is None:
            return False
        unit = self._limit.unit
        next_step = self._slowest_step if unit == "device_seconds" else bound.in_unit(unit)
        spent = self._wall_seconds if unit == "device_seconds" else self.cost.in_unit(unit)
        if unit == "device_seconds" and self._worker.running:
            spent += time.perf_counter() - self._worker.began
        return spent + next_step > self._limit.amount

    def _fail(self, fault: Failure) -> None:
        self._failure, self._ended = fault, "failed"

    def _end_by(self, fault: Failure) -> None:
        """End a round that cannot go on after a fault: with earlier weights where the policy says so, else failed."""
        if not self._worker.given_up and self._rescue.respond(fault, 0, unwound=True) == "rollback":
            self._ended = "rolled_back"
        else:
            self._fail(fault)

    def _goes_on_after(self, fault: Failure) -> bool:
        """Respond to a fault that the last step showed; return whether training goes on. Called on the worker."""
        response = self._rescue.respond(fault, self._recipe.steps - self.step, unwound=False)
        if response == "retry":
            self._rescue.restart(self._trainer)
            scale_learning_rate(self._live, RETRY_FACTOR)
        elif response == "rollback":
            self._ended = "rolled_back"
        else:
            self._fail(fault)
        return response == "retry"

    def _before_update(self, rate: float) -> None:
        """Note the rate of the step that is about to be taken, and the weights it starts from. Called on the worker."""
        self._settings_watch.before_update(rate)
        self._note_memory()
        self._rescue.before_update(len(self._settings_watch.rates), self._trainer)

    def _note_memory(self) -> None:
        """Note the memory in use; called on the worker between passes.

        Raises:
            MemoryLimitError: it is more than the policy allows.
        """
        self._worker.require_not_given_up()
        used, most = peak_memory(self._device), self._policy.max_memory_bytes
        if used is None:
            return
        self._memory_used, self._peak_memory = used, max(used, self._peak_memory or 0)
        if most is not None and used > most:
            raise MemoryLimitError(f"{used} bytes of memory were in use, above {most}")

    def _final_weights(self) -> dict[str, torch.Tensor] | None:
        """Return the weights with which the round ends; None when it failed."""
        fault = self._fault_of_round()
        if fault is not None:
            self._fail(fault)
            return None
        if self._rescue.rolled_back_to is None:
            # looked at before adapters are merged into the weights below them, which cannot be undone
            fault = self._not_finite(dict(self._trainer.model.named_parameters()))
            if fault is not None:
                self._end_by(fault)
                if self._failure is not None:
                    return None
        if self._rescue.rolled_back_to is not None:
            self._rescue.restore(self._trainer)
        weights = self._model_weights()
        fault = self._not_finite(weights)
        if fault is not None:
            self._fail(fault)
            return None
        return weights

    def _fault_of_round(self) -> Failure | None:
        """Return what is wrong with the round as a whole: no steps, nothing learned from, or other settings."""
        if self.step == 0:
            kind = "budget_too_small" if self._ended == "budget" else "no_steps"
            return failure(kind, 0, "no optimiser step was taken")
        if self._meter.supervised_tokens == 0:
            return failure("nothing_supervised", self.step, "no token carried a loss in the whole round")
        fault = self._settings_watch.fault()
        if fault is None and self._ended in ("finished", "budget"):  # one that was stopped might have met signal later
            fault = self._watch.round_ended(self.step)
        return fault

    def weights_now(self) -> dict[str, torch.Tensor]:
        """Return copies of the weights after the steps so far, an adapter stacked on those below; changes nothing.

        Raises:
            ValueError: the round has ended, or has not taken a step.
        """
        if self.done or self.step == 0:
            raise ValueError(f"weights_now: no round is parked between two steps (step {self.step}, {self._ended}).")
        model = self._trainer.model
        return stack(self._start.weights, model) if hasattr(model, "merge_and_unload") else copy_weights(model)

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
        self._worker.close()
        self._live.pays = None  # it refers to this session: a cycle
        self._rescue.let_go()
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
            adjustments=tuple(self._executor.applied),
            flags=(*self._flags, *self._rescue.told(self._failure is not None), *self._meter.flags),
            wall_seconds=self._wall_seconds,
            peak_memory_bytes=self._peak_memory,
            telemetry=self._telemetry.finish(),
        )


class _ParkingCallback(TrainerCallback):  # type: ignore[misc]
    """Tells the session about each step, at the one moment when its logs are complete and the next has not begun."""

    def __init__(self, session: TrlSession) -> None:
        self._session = session

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give the collector back what was set aside while training was set up."""
        self._session._worker.give_back_garbage()
        self._session._note_memory()
        self._session._step_began = time.perf_counter()  # what came before is no part of the first step

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
