"""Adjusted sessions end cleanly whatever happens to them, leave nothing behind, and never touch their caller."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

from posttrain_gym.envs.in_loop import InLoopEnv
from posttrain_gym.inner_trainers.adjustments import KINDS, Adjustment, catalogue_index
from posttrain_gym.inner_trainers.evaluation import Evaluator
from posttrain_gym.inner_trainers.testing import TinyTask
from posttrain_gym.inner_trainers.trl import executor
from posttrain_gym.inner_trainers.trl.memory import memory_in_use
from posttrain_gym.inner_trainers.trl.session import TrlSession
from posttrain_gym.inner_trainers.trl.sft import MeteredSFTTrainer
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer
from tests.trl_fixtures import *  # noqa: F403
from tests.trl_rounds import equal, graded, grpo, sft

HALF, KEEP, BACK = Adjustment("lr_scale", 0.5), Adjustment("snapshot"), Adjustment("rollback")


def workers() -> int:
    return sum(thread.name == "posttrain-round" for thread in threading.enumerate())


# Ends ----------------------------------------------------------------------------------------------------------------


def ended(how: str, trainer: TrlTrainer, task: TinyTask, monkeypatch: pytest.MonkeyPatch) -> TrlSession:
    session = trainer.begin(task, sft(), trainer.base(task), 3)
    session.advance(2)
    if how == "close":
        session.close()
    elif how == "result":
        session.result()
    elif how == "stop":
        session.apply(Adjustment("stop"))
    elif how == "finish":
        session.advance()
    else:
        monkeypatch.setattr(MeteredSFTTrainer, "compute_loss", lambda *_, **__: 1 / 0)
        session.advance(1)
    return session


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("close", r"ended \(stopped\) at step 2"),
        ("result", r"ended \(stopped\) at step 2"),
        ("stop", r"ended \(stopped\) at step 2"),
        ("finish", r"ended \(finished\) at step 4"),
        ("fail", r"ended \(failed\) at step 2"),
    ],
)
def test_an_adjustment_after_the_end_is_refused_with_the_end_and_the_step(
    how: str, said: str, trainer: TrlTrainer, task: TinyTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = ended(how, trainer, task, monkeypatch)
    settings = dict(session.settings)
    for kind in ("none", "stop", "lr_scale", "snapshot", "rollback", "grad_clip_scale"):
        assert session.refusal(Adjustment(kind, None if KINDS[kind].low is None else 1.0)) is not None
        with pytest.raises(ValueError, match=rf"adjustment '{kind}': the round has {said}\."):
            session.apply(Adjustment(kind, None if KINDS[kind].low is None else 1.0))
    session.close()
    assert session.settings == settings
    assert session.result()[0].adjustments == (((2, Adjustment("stop")),) if how == "stop" else ())
    assert workers() == 0


def test_a_round_can_be_stopped_and_adjusted_before_its_first_step(trainer: TrlTrainer, task: TinyTask) -> None:
    session = trainer.begin(task, sft(), trainer.base(task), 3)
    session.apply(HALF)
    assert session.settings["learning_rate"] == 5e-3
    session.apply(Adjustment("stop"))
    assert session.done
    report, checkpoint = session.result()
    assert checkpoint is None and report.failure is not None
    assert (report.failure.kind, report.steps) == ("no_steps", 0)
    assert report.adjustments == ((0, HALF), (0, Adjustment("stop")))


class _Raises:
    def refusal(self, live: Any, adjustment: Adjustment) -> str | None:
        return None

    def apply(self, live: Any, adjustment: Adjustment) -> str | None:
        raise MemoryError("told to")


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("then", ["close", "result", "go on"])
def test_an_adjustment_that_raises_leaves_a_round_that_can_be_ended(
    started: bool,
    then: str,
    trainer: TrlTrainer,
    task: TinyTask,
    monkeypatch: pytest.MonkeyPatch,
    live_models: Callable[[], int],
) -> None:
    monkeypatch.setattr(executor, "HANDLERS", MappingProxyType({**executor.HANDLERS, "snapshot": _Raises()}))
    session = trainer.begin(task, sft(), trainer.base(task), 3)
    if started:
        session.advance(1)
    with pytest.raises(MemoryError, match="told to"):
        session.apply(KEEP)
    assert not session.done
    if then == "go on":
        session.advance()
    if then == "close":
        session.close()
    report, checkpoint = session.result()
    session.close()
    assert report.adjustments == ()
    assert (checkpoint is None) == (then == "close" or (then == "result" and not started))
    assert (workers(), live_models()) == (0, 0)


def test_an_exception_in_a_step_after_an_adjustment_leaves_nothing(
    trainer: TrlTrainer, task: TinyTask, monkeypatch: pytest.MonkeyPatch, live_models: Callable[[], int]
) -> None:
    session = trainer.begin(task, sft(lora_rank=2), trainer.base(task), 3)
    session.advance(1)
    for kind in ("snapshot", "lora_freeze", "lr_scale"):
        session.apply(Adjustment(kind, None if KINDS[kind].low is None else 1.0))
    monkeypatch.setattr(MeteredSFTTrainer, "compute_loss", lambda *_, **__: 1 / 0)
    session.advance()
    assert (session.done, session.step) == (True, 1)
    report, checkpoint = session.result()
    assert checkpoint is None and report.failure is not None
    assert (report.failure.kind, report.failure.step) == ("trainer_raised", 2)
    assert [step for step, _ in report.adjustments] == [1, 1, 1]
    assert (workers(), live_models()) == (0, 0)


@pytest.mark.slow
def test_two_hundred_sessions_leave_no_thread_no_model_and_no_memory(
    trainer: TrlTrainer, task: TinyTask, live_models: Callable[[], int]
) -> None:
    base, cpu = trainer.base(task), torch.device("cpu")

    def one(number: int) -> None:
        recipe = grpo(batch_size=4) if number % 20 == 19 else sft(batch_size=2, lora_rank=number % 5 // 4)
        session = trainer.begin(task, recipe, base, number)
        if number % 3:
            session.advance(1)
            session.apply(HALF)
            session.apply(KEEP)
        if number % 3 == 2:
            session.advance(1)
            session.apply(BACK)
        if number % 2:
            session.result()
        session.close()
        assert (workers(), live_models()) == (0, 0)

    for number in range(40):  # what is loaded and cached once
        one(number)
    threads, before = threading.active_count(), memory_in_use(cpu)
    for number in range(200):
        one(number)
    gc.enable()
    gc.collect()
    assert threading.active_count() == threads
    after = memory_in_use(cpu)
    assert before is not None and after is not None
    assert after - before < 24e6  # one leaked trainer per session, with its tiny model, would take about 60 MB


class Impatient(threading.Event):
    """Raises `KeyboardInterrupt` in its first two waits, and lets the step go on in the third."""

    def __init__(self, hold: threading.Event) -> None:
        super().__init__()
        self._hold, self._waits = hold, 0

    def wait(self, timeout: float | None = None) -> bool:
        self._waits += 1
        if self._waits <= 2:
            raise KeyboardInterrupt
        self._hold.set()
        return super().wait(timeout)


def test_a_step_that_was_interrupted_twice_ends_before_anything_else_happens(
    trainer: TrlTrainer, task: TinyTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, hold, inside = MeteredSFTTrainer.compute_loss, threading.Event(), [0, 0]

    def held(self: Any, *args: Any, **kwargs: Any) -> Any:
        inside[0] += 1
        inside[1] = max(inside)
        hold.wait(30)
        loss = original(self, *args, **kwargs)
        inside[0] -= 1
        return loss

    session = trainer.begin(task, sft(), trainer.base(task), 3)
    monkeypatch.setattr(MeteredSFTTrainer, "compute_loss", held)
    session._worker.parked = Impatient(hold)
    with pytest.raises(KeyboardInterrupt):
        session.advance()
    said = "step 1 was interrupted and is still running; call advance to let it finish"
    assert session.refusal(HALF) == said
    with pytest.raises(ValueError, match=f"adjustment 'lr_scale': {said}"):
        session.apply(HALF)
    session.advance(1)
    assert not session._worker.running
    assert 1 <= session.step <= 2
    session.apply(HALF)
    session.advance()
    report, checkpoint = session.result()
    assert (report.ended, report.steps, report.failure, inside[1]) == ("finished", 4, None, 1)
    assert checkpoint is not None
    assert workers() == 0


# Callers -------------------------------------------------------------------------------------------------------------


def through_the_catalogue(session: TrlSession) -> Any:
    """Adjust what copies, restores and hooks tensors, and return the weights."""
    session.advance(1)
    session.apply(KEEP)
    session.apply(Adjustment("lora_freeze"))
    session.advance(1)
    session.apply(BACK)
    session.apply(Adjustment("grad_clip_scale", 0.5))
    session.apply(Adjustment("lora_unfreeze"))
    session.advance()
    report, checkpoint = session.result()
    assert report.failure is None and checkpoint is not None
    return checkpoint.weights


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_caller_without_gradients_changes_nothing(
    mode: Callable[[], Any], trainer: TrlTrainer, task: TinyTask
) -> None:
    recipe = sft(lora_rank=2)
    plain = through_the_catalogue(trainer.begin(task, recipe, trainer.base(task), 3))
    with mode():
        other = through_the_catalogue(trainer.begin(task, recipe, trainer.base(task), 3))
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert equal(plain, other)
    assert not any(value.is_inference() for value in other.values())


def test_a_session_may_change_hands_between_threads(trainer: TrlTrainer, task: TinyTask) -> None:
    recipe = grpo(num_iterations=2)

    def acts() -> list[Callable[[TrlSession], Any]]:
        cooler = Adjustment("temperature_scale", 0.5)
        return [
            lambda s: s.advance(1),
            lambda s: s.apply(cooler),
            lambda s: s.advance(1),
            lambda s: s.apply(KEEP),
            lambda s: s.advance(),
        ]

    made = []
    for apart in (False, True):
        session = trainer.begin(task, recipe, trainer.base(task), 3)
        for act in acts():
            if apart:
                thread = threading.Thread(target=act, args=(session,))
                thread.start()
                thread.join()
            else:
                act(session)
        report, checkpoint = session.result()
        assert report.failure is None and checkpoint is not None
        made.append((checkpoint.id, checkpoint.weights))
    assert made[0][0] == made[1][0]
    assert equal(made[0][1], made[1][1])


def test_the_callers_random_numbers_are_its_own(trainer: TrlTrainer, task: TinyTask) -> None:
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index]
    session = trainer.begin(task, grpo(lora_rank=2), trainer.base(task), 3)
    session.advance(1)
    for kind in ("snapshot", "temperature_scale", "lora_freeze", "kl_scale", "entropy_scale", "lr_scale"):
        session.apply(Adjustment(kind, None if kind in ("snapshot", "lora_freeze") else 1.5))
    session.advance(1)
    session.apply(BACK)
    session.advance()
    session.result()
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]  # type: ignore[index]
    assert torch.equal(torch.get_rng_state(), states[2])


@pytest.mark.slow
def test_workers_in_other_processes_drive_sessions_alike(task: TinyTask) -> None:
    """And a worker that is closed in the middle of a round ends."""

    def make() -> InLoopEnv:
        quick = TrlTrainer(Evaluator(seeds=(0,), samples_per_seed=1, k=1))
        return InLoopEnv(task, recipe=sft(steps=6), trainer=quick, interval=2)

    actions = [catalogue_index(name) for name in ("lr_half", "snapshot", "rollback", "none")]
    seen = []
    vectors: list[Any] = [DummyVecEnv([make]), SubprocVecEnv([make], start_method="spawn")]
    for vector in vectors:
        vector.seed(3)
        rows: list[Any] = [vector.reset()]
        for action in actions:  # the fourth begins the second round
            observation, rewards, dones, infos = vector.step(np.array([action]))
            rows.append({**observation, "rewards": rewards.astype(np.float32), "dones": dones})
        seen.append((rows, repr(infos[0].get("settings"))))
        vector.close()
    for first, second in zip(seen[0][0], seen[1][0], strict=True):
        assert first.keys() == second.keys()
        assert [name for name in first if not np.array_equal(first[name], second[name])] == []
    assert seen[0][1] == seen[1][1]


def test_two_threads_do_not_advance_one_session(folder: Path) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def slow(row: Any, completion: str) -> float:
        inside.set()
        assert go_on.wait(60)
        return graded(row, completion)

    task = TinyTask(folder, verifier=slow)
    trainer = TrlTrainer()
    session = trainer.begin(task, grpo(steps=2), trainer.base(task), 3)
    other = threading.Thread(target=session.advance)
    other.start()
    assert inside.wait(60)
    for call in (session.advance, lambda: session.apply(Adjustment("stop"))):
        with pytest.raises(RuntimeError, match="another thread is advancing or adjusting this session"):
            call()
    go_on.set()
    other.join()
    report, checkpoint = session.result()
    assert (report.ended, report.steps) == ("finished", 2) and checkpoint is not None


def test_what_is_no_adjustment_is_refused(trainer: TrlTrainer, task: TinyTask) -> None:
    session = trainer.begin(task, sft(), trainer.base(task), 3)
    try:
        for value in (None, "lr_half", 7):
            for call in (session.refusal, session.apply):
                with pytest.raises(ValueError, match="expected an Adjustment, for example"):
                    call(value)  # type: ignore[arg-type]
    finally:
        session.close()
