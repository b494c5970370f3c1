"""A round or an evaluation that hangs is ended or given up; what it leaves behind harms nobody."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from posttrain_gym.envs.post_training import PostTrainingEnv
from posttrain_gym.inner_trainers.base import Checkpoint
from posttrain_gym.inner_trainers.fault_policy import FaultPolicy
from posttrain_gym.inner_trainers.tasks.base import Benchmark, Item
from posttrain_gym.inner_trainers.testing import TinyTask
from posttrain_gym.inner_trainers.time_limit import TimeLimitError
from posttrain_gym.inner_trainers.trl.random_state import random_state
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer
from tests.trl_fixtures import *  # noqa: F403
from tests.trl_rounds import Weights, equal, graded, grpo, run, sft, trained

SECONDS = 1.0
"""Limit of the rounds here: several times what their steps take."""


def limited(grace_seconds: float = 5.0, responses: Mapping[str, str] | None = None, **settings: Any) -> TrlTrainer:
    settings = {"max_round_seconds": SECONDS, **settings}
    return TrlTrainer(fault_policy=FaultPolicy(responses or {}, grace_seconds=grace_seconds, **settings))


def looping(from_call: int, asleep: Callable[[], None] | None = None) -> Callable[[Mapping[str, Any], str], float]:
    """Return a verifier that never returns from one of its calls on: it loops in Python, or waits in ``asleep``."""
    calls = [0]

    def verifier(row: Mapping[str, Any], completion: str) -> float:
        calls[0] += 1
        if calls[0] >= from_call:
            if asleep is not None:
                asleep()
            while asleep is None:
                pass
            random.random(), np.random.rand(), torch.rand(1)  # what an abandoned worker must not get to
        return graded(row, completion)

    return verifier


def same(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    return (
        left[0] == right[0]
        and all(np.array_equal(a, b) for a, b in zip(left[1], right[1], strict=True))
        and torch.equal(left[2], right[2])
    )


def wait_for_workers() -> None:
    for thread in threading.enumerate():
        if thread.name in ("posttrain-round", "posttrain-limited"):
            thread.join(10)
            assert not thread.is_alive()


def test_a_limit_that_is_not_reached_changes_nothing(task: TinyTask, sft_weights: Weights) -> None:
    assert equal(trained(limited(max_round_seconds=600.0), task, sft()), sft_weights)


def test_a_verifier_that_loops_is_ended(
    folder: Path, trainer: TrlTrainer, task: TinyTask, sft_weights: Weights, live_models: Callable[[], int]
) -> None:
    before = random_state()
    began = time.perf_counter()
    report, checkpoint = run(limited(), TinyTask(folder, verifier=looping(11)), grpo())
    assert time.perf_counter() - began < SECONDS + 4
    assert same(before, random_state())
    assert checkpoint is None and report.failure is not None
    assert (report.failure.cause, report.failure.kind, report.failure.step) == ("resources", "time_limit", 2)
    assert report.failure.evidence == ("the round passed 1 seconds in a step; its worker unwound when it was asked to")
    assert (report.ended, report.steps) == ("failed", 1)
    assert report.wall_seconds >= SECONDS
    assert live_models() == 0
    assert equal(trained(trainer, task, sft()), sft_weights)


def test_a_round_that_is_late_can_be_rolled_back(folder: Path, trainer: TrlTrainer, task: TinyTask) -> None:
    session = trainer.begin(task, grpo(), trainer.base(task), 3)
    session.advance(1)
    _, good = session.result()
    slow = limited(responses={"time_limit": "rollback"})
    report, checkpoint = run(slow, TinyTask(folder, verifier=looping(17)), grpo())
    assert checkpoint is not None and good is not None
    assert (report.ended, report.steps, report.rolled_back_to) == ("rolled_back", 2, 1)
    assert [(fault.kind, fault.step) for fault in report.rescued] == [("time_limit", 3)]
    assert equal(checkpoint.weights, good.weights)


@pytest.mark.parametrize("response", ["stop", "rollback"])
def test_a_verifier_that_is_blocked_is_given_up(
    response: str,
    folder: Path,
    trainer: TrlTrainer,
    task: TinyTask,
    sft_weights: Weights,
    live_models: Callable[[], int],
) -> None:
    began, blocked = time.perf_counter(), threading.Event()

    def sleep() -> None:
        blocked.set()
        threading.Event().wait(3)

    before = random_state()
    slow = limited(grace_seconds=0.2, responses={"time_limit": response})
    report, checkpoint = run(slow, TinyTask(folder, verifier=looping(17, sleep)), grpo())
    assert blocked.is_set()
    assert time.perf_counter() - began < 3  # the caller has its answer while the verifier sleeps
    assert same(before, random_state())
    assert checkpoint is None and report.failure is not None
    assert (report.failure.cause, report.failure.kind, report.failure.step) == ("resources", "time_limit", 3)
    assert report.failure.evidence == (
        "the round passed 1 seconds in a step; its worker did not answer within 0.2 seconds and was given up, "
        "its memory returns when it ends"
    )
    assert (report.steps, len(report.curves), report.rescued) == (2, 2, ())
    written = report.to_dict()
    assert live_models() == 1
    # a later round of the same trainer is not touched by the worker that sleeps, nor when it wakes
    assert equal(trained(slow, task, sft()), sft_weights)
    before = random_state()
    wait_for_workers()
    assert same(before, random_state())
    assert report.to_dict() == written
    assert live_models() == 0


def test_time_between_calls_is_not_the_rounds(task: TinyTask, sft_weights: Weights) -> None:
    trainer = limited(max_round_seconds=20.0)
    session = trainer.begin(task, sft(), trainer.base(task), 3)
    session.advance(2)
    session._wall_seconds = 0.0
    time.sleep(0.05)
    assert session._wall_seconds == 0.0
    session.advance()
    _, checkpoint = session.result()
    assert checkpoint is not None
    assert equal(checkpoint.weights, sft_weights)


def test_a_round_whose_time_is_over_takes_no_further_step(task: TinyTask) -> None:
    trainer = limited(max_round_seconds=20.0)
    session = trainer.begin(task, sft(), trainer.base(task), 3)
    session.advance(2)
    session._wall_seconds = 20.0
    session.advance()
    report, _ = session.result()
    assert report.failure is not None and report.steps == 2
    assert report.failure.evidence == "the round passed 20 seconds before its next step"


# Evaluation ----------------------------------------------------------------------------------------------------------


class Slow(TinyTask):
    """A tiny task whose scorer can be told to loop or to sleep."""

    act: Callable[[], None] | None = None

    def benchmark(self) -> Benchmark:
        plain = super().benchmark()

        def score(item: Item, text: str) -> float:
            if self.act is not None:
                self.act()
            return plain.score(item, text)

        return Benchmark(plain.weights, plain.validation, plain.test, score, max_new_tokens=plain.max_new_tokens)


def loop() -> None:
    while True:
        pass


@pytest.mark.parametrize(
    ("act", "ended"), [(loop, True), (lambda: threading.Event().wait(1.5), False)], ids=["loops", "sleeps"]
)
def test_an_evaluation_that_hangs_is_ended(act: Callable[[], None], ended: bool, folder: Path) -> None:
    task = Slow(folder)
    trainer = limited(grace_seconds=5.0 if ended else 0.1, max_evaluation_seconds=0.6)
    base = trainer.base(task)
    moved = Checkpoint("moved", {name: value * 0.5 for name, value in base.weights.items()})
    right, _ = trainer.evaluate(task, moved, "validation")
    before = random_state()
    task.act = act
    with pytest.raises(
        TimeLimitError, match=r"evaluation on validation took longer than 0\.6 seconds; its thread"
    ) as e:
        trainer.evaluate(task, moved, "validation")
    assert e.value.ended is ended
    assert same(before, random_state())
    task.act = None
    assert trainer.evaluate(task, moved, "validation")[0] == right
    wait_for_workers()
    assert trainer.evaluate(task, moved, "validation")[0] == right


def test_a_search_charges_an_evaluation_that_hangs_what_it_can_cost(folder: Path) -> None:
    task = Slow(folder, verifier=graded)
    trainer = limited(max_evaluation_seconds=1.0, max_round_seconds=600.0)
    env = PostTrainingEnv(task, trainer=trainer)
    env.reset(seed=0)
    task.act = loop
    outcome = env.search.run(env.space.recipe("sft", steps=10))
    assert outcome.report.failure is not None
    assert (outcome.report.failure.cause, outcome.report.failure.kind) == ("resources", "time_limit")
    bound = trainer.evaluation_cost_bound(task, "validation")
    assert outcome.report.evaluation_cost.flops == bound.flops > 0
    assert outcome.report.evaluation_cost.device_seconds >= 1.0
    env.close()
