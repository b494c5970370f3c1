"""Where a round runs and what is left of it: devices, memory, threads, interrupts."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.testing import TinyTask
from posttrain_gym.inner_trainers.trl.models import (
    hold_to_device,
    resolve_device,
    resolve_precision,
)
from posttrain_gym.inner_trainers.trl.sft import MeteredSFTTrainer
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer
from tests.trl_fixtures import *  # noqa: F403
from tests.trl_rounds import Weights, by_hand, equal, grpo, run, sft, stopped_after, trained

# Precision and device (B11) ------------------------------------------------------------------------------------------


def test_half_precision_on_a_cpu_is_refused_and_auto_is_full() -> None:
    cpu = torch.device("cpu")
    assert resolve_precision("auto", cpu) == "fp32"
    assert resolve_precision("fp32", cpu) == "fp32"
    for precision in ("bf16", "fp16"):
        with pytest.raises(ValueError, match=rf"precision: '{precision}' needs a CUDA device, this run is on cpu"):
            TrlTrainer(device="cpu", precision=precision)
    with pytest.raises(ValueError, match="precision: unknown 'float16'; expected one of auto, fp32, bf16, fp16"):
        TrlTrainer(device="cpu", precision="float16")


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "meta", "mps", "", 7, None])
def test_an_unknown_device_is_refused(device: Any) -> None:
    with pytest.raises(ValueError, match="device: "):
        resolve_device(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_is_refused_where_there_is_none() -> None:
    assert resolve_device("auto") == torch.device("cpu")
    for device in ("cuda", "cuda:0", "cuda:3"):
        with pytest.raises(ValueError, match=f"device: '{device}' was asked for, but no CUDA device is visible"):
            TrlTrainer(device=device)


def test_a_card_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ValueError, match="device: 'cuda:2' was asked for, but 2 CUDA devices are visible"):
        resolve_device("cuda:2")


def test_training_is_held_to_the_card_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    arguments = by_hand("sft")
    assert arguments.device == torch.device("cpu")
    assert hold_to_device(arguments, torch.device("cpu")) is arguments
    assert chosen == []
    hold_to_device(arguments, torch.device("cuda:1"))
    assert (arguments.device, arguments.n_gpu, arguments.train_batch_size) == (torch.device("cuda:1"), 1, 8)
    assert arguments.distributed_state.device == torch.device("cuda:1")
    assert chosen == [torch.device("cuda:1")]
    assert by_hand("sft").device == torch.device("cpu")  # the next round starts afresh


def test_training_arguments_on_a_cpu_are_full_precision(trainer: TrlTrainer, task: TinyTask) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA")
    session = trainer.begin(task, sft(), trainer.base(task), 0)
    arguments = session._trainer.args
    assert (arguments.bf16, arguments.fp16, arguments.use_cpu) == (False, False, True)
    assert arguments.gradient_checkpointing is False
    assert {p.dtype for p in session._trainer.model.parameters()} == {torch.float32}
    session.close()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("recipe", [sft(), grpo(kl_coef=0.1)], ids=["sft", "grpo"])
def test_a_round_on_a_real_card(recipe: Recipe, precision: str, task: TinyTask) -> None:
    trainer = TrlTrainer(device="cuda", precision=precision)
    weights = trained(trainer, task, recipe)
    assert {value.device.type for value in weights.values()} == {"cpu"}
    assert not equal(weights, trainer.base(task).weights)
    before = torch.cuda.memory_allocated()
    for _ in range(4):
        trained(trainer, task, recipe)
    assert torch.cuda.memory_allocated() <= 1.05 * before


# Memory (B09) --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recipe",
    [sft(), sft(lora_rank=2), grpo(), grpo(kl_coef=0.1), grpo(lora_rank=2, kl_coef=0.1)],
    ids=["sft", "sft-lora", "grpo", "grpo-kl", "grpo-lora-kl"],
)
def test_no_model_outlives_its_round(
    recipe: Recipe, trainer: TrlTrainer, task: TinyTask, live_models: Callable[[], int]
) -> None:
    start = trainer.base(task)
    for _ in range(5):
        report, checkpoint = run(trainer, task, recipe, start)
        assert report.failure is None
        assert live_models() == 0
        assert checkpoint is not None
        start = checkpoint
    session = trainer.begin(task, recipe, start, 0)
    session.advance(1)
    assert live_models() >= 1
    session.close()
    assert live_models() == 0


# Closing and interrupting --------------------------------------------------------------------------------------------


def workers() -> int:
    return sum(thread.name == "posttrain-round" for thread in threading.enumerate())


def test_close_at_any_moment_leaves_no_thread(
    trainer: TrlTrainer, task: TinyTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, frozen, before = trainer.base(task), gc.get_freeze_count(), threading.active_count()
    for number in range(30):
        session = trainer.begin(task, sft() if number % 3 else grpo(), base, number)
        steps = number % 5
        if steps:
            session.advance(steps)
            assert workers() == (0 if steps == 4 else 1)
        assert gc.get_freeze_count() == frozen
        session.close()
        assert workers() == 0
        session.close()
        assert session.done
        report, checkpoint = session.result()
        assert (report.steps, checkpoint) == (steps, None)
        assert session.advance() == (dict(report.curves[-1]) if steps else {})
    assert threading.active_count() == before
    assert gc.get_freeze_count() == frozen


def test_objects_that_the_caller_froze_stay_frozen(trainer: TrlTrainer, task: TinyTask) -> None:
    base = trainer.base(task)
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        session = trainer.begin(task, sft(), base, 0)
        session.advance(1)
        session.close()
        assert frozen * 0.9 < gc.get_freeze_count() <= frozen  # frozen objects may still die by reference count
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("then", ["go on", "close", "result"])
def test_an_interrupt_lets_the_step_finish_and_nothing_else_runs(
    then: str,
    trainer: TrlTrainer,
    task: TinyTask,
    sft_weights: Weights,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = trainer.begin(task, sft(), trainer.base(task), 3)
    original, calls = MeteredSFTTrainer.compute_loss, [0]

    def interrupting(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)  # lets the caller's thread meet it within this step
        return original(self, *args, **kwargs)

    monkeypatch.setattr(MeteredSFTTrainer, "compute_loss", interrupting)
    torch.manual_seed(11)
    state = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        session.advance()
    assert session.step == 2
    assert torch.equal(torch.get_rng_state(), state)
    if then == "close":
        session.close()
        assert session.result()[1] is None
    elif then == "result":
        report, checkpoint = session.result()
        assert (report.ended, report.steps) == ("stopped", 2)
        assert checkpoint is not None
        assert equal(checkpoint.weights, stopped_after(2, trainer, task))
    else:
        session.advance()
        report, checkpoint = session.result()
        assert (report.ended, report.steps) == ("finished", 4)
        assert checkpoint is not None
        assert equal(checkpoint.weights, sft_weights)
    assert workers() == 0


def test_two_interrupts_leave_a_worker_that_close_waits_for(
    trainer: TrlTrainer, task: TinyTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = trainer.begin(task, sft(), trainer.base(task), 3)
    original, hold, waits = MeteredSFTTrainer.compute_loss, threading.Event(), [0]
    arrived = threading.Event()

    def held(self: Any, *args: Any, **kwargs: Any) -> Any:
        arrived.set()
        hold.wait()
        torch.rand(100)
        return original(self, *args, **kwargs)

    class Impatient(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits[0] += 1
            if waits[0] <= 2:
                raise KeyboardInterrupt
            hold.set()
            return super().wait(timeout)

    monkeypatch.setattr(MeteredSFTTrainer, "compute_loss", held)
    session._worker.parked = Impatient()
    with pytest.raises(KeyboardInterrupt):
        session.advance()
    assert workers() == 1
    assert arrived.wait(10)  # what it drew on the way there, it drew before the state is read
    state = torch.get_rng_state()
    session.close()
    assert workers() == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert session.result()[0].steps <= 1


@pytest.mark.parametrize("recipe", [sft(), grpo()], ids=["sft", "grpo"])
@pytest.mark.parametrize("steps", [0, 2, 4])
def test_a_session_goes_with_its_last_reference(
    recipe: Recipe, steps: int, trainer: TrlTrainer, task: TinyTask
) -> None:
    """It holds the weights of its checkpoint, so waiting for the cycle collector would let memory grow by rounds."""
    gc.collect()
    gc.disable()
    try:
        session = trainer.begin(task, recipe, trainer.base(task), 3)
        if steps:
            session.advance(steps)
            session.result()
        else:
            session.close()
        gone = weakref.ref(session)
        del session
        assert gone() is None
    finally:
        gc.enable()
