"""Weights that adjustments keep and put back, and that a fault policy keeps beside them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from posttrain_gym.inner_trainers.adjustments import Adjustment
from posttrain_gym.inner_trainers.base import Checkpoint
from posttrain_gym.inner_trainers.fault_policy import FaultPolicy
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.testing import TinyTask
from posttrain_gym.inner_trainers.trl.session import TrlSession
from posttrain_gym.inner_trainers.trl.sft import MeteredSFTTrainer
from posttrain_gym.inner_trainers.trl.snapshots import Snapshots
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer
from tests.trl_fixtures import *  # noqa: F403
from tests.trl_rounds import grpo, sft, trained

KEEP, BACK = Adjustment("snapshot"), Adjustment("rollback")


def weights_now(session: TrlSession) -> list[torch.Tensor]:
    groups = session._trainer.optimizer.param_groups
    return [parameter.detach().clone() for group in groups for parameter in group["params"]]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def stacked(trainer: TrlTrainer, task: TinyTask) -> Checkpoint:
    recipe = sft(lora_rank=2, lora_adapter="stack", learning_rate=3e-2)
    return Checkpoint("stacked", trained(trainer, task, recipe), 1)


@pytest.mark.parametrize(
    "recipe",
    [
        sft(),
        sft(lora_rank=2),
        grpo(algorithm="ppo", critic="head"),
        grpo(algorithm="ppo", critic="model"),
        grpo(algorithm="ppo", critic="model", lora_rank=2),
    ],
    ids=["full", "lora", "head", "model", "model-lora"],
)
@pytest.mark.parametrize("on_stack", [False, True], ids=["base", "stacked"])
def test_without_a_snapshot_the_round_goes_back_to_its_start(
    recipe: Recipe, on_stack: bool, trainer: TrlTrainer, task: TinyTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters and critics too; of what the start's checkpoint holds nothing is copied meanwhile."""
    start = stacked(trainer, task) if on_stack else trainer.base(task)
    kept: list[Any] = []
    begin = Snapshots.begin

    def noting(self: Snapshots, trainer: Any) -> None:
        groups = trainer.optimizer.param_groups
        kept.append([p.detach().clone() for group in groups for p in group["params"]])
        begin(self, trainer)
        assert self._beginning is not None
        kept.append(sum(tensor.numel() for tensor in self._beginning.tensors if tensor is not None))

    monkeypatch.setattr(Snapshots, "begin", noting)
    session = trainer.begin(task, recipe, start, 3)
    session.advance(2)
    assert not same(weights_now(session), kept[0])
    session.apply(BACK)
    assert same(weights_now(session), kept[0])
    assert session._trainer.optimizer.state == {}
    session.advance()
    report, checkpoint = session.result()
    assert report.failure is None and checkpoint is not None
    if not recipe.lora_rank:
        assert kept[1] == (33 if recipe.algorithm == "ppo" else 0)  # a value head: 32 weights and a bias


def test_a_round_goes_on_after_a_rollback_as_from_the_weights_it_went_back_to(
    trainer: TrlTrainer, task: TinyTask
) -> None:
    """Plain gradient steps would be the same; with a fresh optimiser the update equals that of a first step."""
    session = trainer.begin(task, sft(), trainer.base(task), 3)
    session.advance(1)
    session.apply(KEEP)
    after_one = weights_now(session)
    session.advance(1)
    session.apply(BACK)
    assert same(weights_now(session), after_one)
    before = [tensor.clone() for tensor in after_one]
    row = session.advance(1)
    assert row["step"] == 3.0
    moved = weights_now(session)
    # Adam's first step moves every entry that has a gradient by the learning rate
    largest = max(float((new - old).abs().max()) for new, old in zip(moved, before, strict=True))
    assert largest == pytest.approx(1e-2, rel=1e-3)
    session.close()


def test_the_last_snapshot_counts_and_is_one_copy(trainer: TrlTrainer, task: TinyTask) -> None:
    session = trainer.begin(task, sft(steps=6), trainer.base(task), 3)
    states = []
    for _ in range(3):
        session.advance(1)
        session.apply(KEEP)
        states.append(weights_now(session))
    session.advance(1)
    session.apply(BACK)
    assert same(weights_now(session), states[2])
    session.advance(1)
    session.apply(BACK)  # it is still there
    assert same(weights_now(session), states[2])
    snapshots = session._rescue._snapshots
    assert snapshots._put_by is None and snapshots.good is None and snapshots.kept is not None
    assert sum(tensor.numel() for tensor in snapshots.kept.tensors if tensor is not None) == sum(
        tensor.numel() for tensor in states[0]
    )
    report, _ = session.result()
    assert session._rescue._snapshots.kept is None  # freed with the round
    assert [(step, adjustment.kind) for step, adjustment in report.adjustments] == [
        (1, "snapshot"),
        (2, "snapshot"),
        (3, "snapshot"),
        (4, "rollback"),
        (5, "rollback"),
    ]


def spoil(monkeypatch: pytest.MonkeyPatch, *passes: int) -> None:
    original, calls = MeteredSFTTrainer.compute_loss, [0]

    def spoilt(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return original(self, *args, **kwargs) * (math.nan if calls[0] in passes else 1.0)

    monkeypatch.setattr(MeteredSFTTrainer, "compute_loss", spoilt)


def test_a_snapshot_that_the_next_step_shows_to_be_bad_is_not_gone_back_to(
    task: TinyTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, 3)
    trainer = TrlTrainer(fault_policy=FaultPolicy({"diverged": "retry"}))
    session = trainer.begin(task, sft(steps=6), trainer.base(task), 3)
    session.advance(1)
    session.apply(KEEP)
    good = weights_now(session)
    session.advance(1)
    session.apply(KEEP)  # step 3 computes its loss from these: NaN
    session.advance(2)
    session.apply(BACK)
    assert same(weights_now(session), good)
    session.advance()
    report, checkpoint = session.result()
    assert report.failure is None and checkpoint is not None
    assert [fault.step for fault in report.rescued] == [3]


def test_without_a_snapshot_the_weights_that_the_fault_policy_keeps_come_first(task: TinyTask) -> None:
    trainer = TrlTrainer(fault_policy=FaultPolicy({"diverged": "rollback"}))
    session = trainer.begin(task, sft(), trainer.base(task), 3)
    session.advance(1)
    confirmed = weights_now(session)
    session.advance(1)  # was fine, so what it was computed from was good
    session.apply(BACK)
    assert same(weights_now(session), confirmed)
    session.close()


def test_weights_that_are_not_finite_are_not_kept(trainer: TrlTrainer, task: TinyTask) -> None:
    session = trainer.begin(task, sft(), trainer.base(task), 3)
    session.advance(1)
    session.apply(KEEP)
    good = weights_now(session)
    session.advance(1)
    parameter = session._trainer.optimizer.param_groups[0]["params"][0]
    with torch.no_grad():
        parameter.view(-1)[0] = math.inf
    session.apply(KEEP)
    session.apply(BACK)  # nothing was kept since the last step
    assert same(weights_now(session), good)
    session.advance()
    report, checkpoint = session.result()
    assert report.failure is None and checkpoint is not None
    said = "snapshot: the weights after step 2 are not finite, so they were not kept; a rollback goes to those that"
    assert sum(flag.startswith(said) for flag in report.flags) == 1


def test_a_fault_policy_still_rolls_a_round_back_after_adjustments(
    task: TinyTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Freezing half of an adapter in between changes nothing about which tensors are kept and put back."""
    spoil(monkeypatch, 5)
    trainer = TrlTrainer(fault_policy=FaultPolicy({"diverged": "rollback"}))
    session = trainer.begin(task, sft(steps=6, lora_rank=2), trainer.base(task), 3)
    session.advance(2)
    session.apply(Adjustment("lora_freeze"))
    session.advance(1)
    good = weights_now(session)
    session.apply(Adjustment("lora_unfreeze"))
    session.advance(1)
    restored: list[bool] = []
    restore = Snapshots.restore

    def noting(self: Snapshots, *args: Any) -> int:
        step = restore(self, *args)
        restored.append(same(weights_now(session), good))
        return step

    monkeypatch.setattr(Snapshots, "restore", noting)
    session.advance()
    report, checkpoint = session.result()
    assert report.failure is None and checkpoint is not None
    assert (report.ended, report.rolled_back_to, restored) == ("rolled_back", 3, [True])


def test_nothing_is_copied_of_a_round_that_nobody_adjusts(
    trainer: TrlTrainer, task: TinyTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("copied")

    monkeypatch.setattr(Snapshots, "_copies", refuse)
    session = trainer.begin(task, sft(), trainer.base(task), 3)
    session.advance()
    assert session._rescue._snapshots.last_good.tensors == (None,) * len(weights_now(session))
    assert session.result()[0].failure is None


def test_adapters_frozen_before_the_first_step_can_be_unfrozen(
    trainer: TrlTrainer, task: TinyTask, live_models: Callable[[], int]
) -> None:
    session = trainer.begin(task, sft(lora_rank=2), trainer.base(task), 3)
    session.apply(Adjustment("lora_freeze"))

    def down() -> list[torch.Tensor]:
        named = session._trainer.model.named_parameters()
        return [parameter.detach().clone() for name, parameter in named if "lora_A" in name]

    first = down()
    session.advance(2)
    assert same(down(), first)
    session.apply(Adjustment("lora_unfreeze"))
    session.advance(1)
    assert not same(down(), first)
    assert session.result()[0].failure is None
    assert live_models() == 0
