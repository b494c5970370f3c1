"""Which signals each algorithm's rounds have, that they are right, and that measuring them changes no weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from posttrain_gym.inner_trainers.adjustments import Adjustment
from posttrain_gym.inner_trainers.signals import SIGNALS, Signals
from posttrain_gym.inner_trainers.telemetry import RoundTelemetry
from posttrain_gym.inner_trainers.testing import TinyTask, write_tiny_checkpoint
from posttrain_gym.inner_trainers.trl import memory
from posttrain_gym.inner_trainers.trl.hardware import HardwareWatch
from posttrain_gym.inner_trainers.trl.memory import memory_in_use, memory_total
from posttrain_gym.inner_trainers.trl.metering import Meter
from posttrain_gym.inner_trainers.trl.session import TrlSession
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer
from tests.adjusted_rounds import SOURCES, FourSources
from tests.adjusted_rounds import recipe as recipe_of
from tests.trl_fixtures import *  # noqa: F403
from tests.trl_rounds import Weights, equal, grpo, sft

EVERY = {"grad_norm", "grad_norm_ratio", "grad_variance", "grad_cosine", "grad_clip_ratio", "loss", "loss_slope"}
HARDWARE = {"step_seconds", "tokens_per_second", "memory_share"}
SUPERVISED = {"entropy"}
PAIRS = {"chosen_log_probability", "reward_margin", "entropy"}
SAMPLED = {"completion_length", "completion_truncated", "entropy"}
REWARDED = {*SAMPLED, "reward", "reward_std", "reward_sparsity", "clip_ratio"}
GROUPED = {*REWARDED, "groups_without_spread"}


@pytest.fixture(scope="module")
def four(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> FourSources:
    teacher = write_tiny_checkpoint(tmp_path_factory.mktemp("teacher"), seed=1)
    return FourSources(folder, teacher)


def stepped(trainer: TrlTrainer, task: TinyTask, recipe: Any, **kwargs: Any) -> tuple[TrlSession, list[Signals]]:
    """Return a closed session and the signals of its steps, one by one."""
    session = trainer.begin(task, recipe, trainer.base(task), 3, **kwargs)
    assert isinstance(session, TrlSession)
    found = [session.signals]
    while not session.done:
        session.advance(1)
        found.append(session.signals)
    report, _ = session.result()
    assert report.failure is None, report.failure
    return session, found


def there(signals: Signals) -> set[str]:
    return {name for name, value in signals.values.items() if value is not None}


@pytest.mark.parametrize(
    ("algorithm", "changes", "expected"),
    [
        ("sft", {}, SUPERVISED),
        ("sft", {"gradient_accumulation": 2, "batch_size": 4}, SUPERVISED),
        ("sft", {"lora_rank": 2}, SUPERVISED),
        ("midtrain", {}, SUPERVISED),
        ("rft", {}, SUPERVISED),
        ("dpo", {}, PAIRS),
        ("kto", {}, PAIRS),
        ("distill", {}, SAMPLED),
        ("grpo", {}, GROUPED),
        ("grpo", {"kl_coef": 0.1}, {*GROUPED, "kl"}),
        ("grpo", {"lora_rank": 2, "kl_coef": 0.1}, {*GROUPED, "kl"}),
        ("rloo", {"kl_coef": 0.1}, {*GROUPED, "kl"}),
        ("ppo", {"kl_coef": 0.1, "critic": "head"}, {*REWARDED, "kl"}),
        ("ppo", {"critic": "none"}, REWARDED),
    ],
)
def test_the_signals_of_each_algorithm(
    algorithm: str, changes: dict[str, Any], expected: set[str], trainer: TrlTrainer, four: FourSources
) -> None:
    session, found = stepped(trainer, four, recipe_of(algorithm, steps=3, **changes))
    assert found[0] == Signals()
    first, last = found[1], found[-1]
    sometimes = {"loss_curvature", "reward_margin", *(name for name in SIGNALS if "_source_" in name)}
    assert there(last) - sometimes == (EVERY | HARDWARE | expected) - sometimes
    assert there(first) - sometimes == (EVERY - {"grad_cosine", "loss_slope"} | HARDWARE | expected) - sometimes
    assert ("reward_margin" in expected) == any("reward_margin" in there(signals) for signals in found)
    assert last.broken == ()
    assert last.step == 3
    row = session.result()[0].curves[-1]
    for signal, curve in (
        ("loss", "loss"),
        ("grad_norm", "grad_norm"),
        ("entropy", "entropy"),
        ("reward", "reward"),
        ("completion_length", "completions/mean_length"),
        ("completion_truncated", "completions/clipped_ratio"),
        ("clip_ratio", "clip_ratio/region_mean"),
    ):
        assert last.values[signal] == row.get(curve)
    values = last.values
    assert values["grad_norm_ratio"] is not None and values["grad_norm_ratio"] >= 1
    assert values["grad_cosine"] is not None and -1 <= values["grad_cosine"] <= 1
    norm, most = row["grad_norm"], session.result()[0].recipe.max_grad_norm
    assert values["grad_clip_ratio"] == pytest.approx(min(1.0, most / (norm + 1e-6)))
    # nothing that a clock decides is in a curve, nor what a sample of a gradient says
    assert not set(row) & {*HARDWARE, "grad_cosine", "grad_variance"}
    assert not any(name.startswith("grad_norm/") for name in row)


def test_measuring_moves_no_bit(
    trainer: TrlTrainer, task: TinyTask, sft_weights: Weights, grpo_weights: Weights
) -> None:
    for recipe, expected in ((sft(), sft_weights), (grpo(), grpo_weights)):
        session = trainer.begin(task, recipe, trainer.base(task), 3)
        session.advance(1)
        session.apply(Adjustment("log_more"))
        session.advance(2)
        session.apply(Adjustment("log_less"))
        session.advance()
        report, checkpoint = session.result()
        assert checkpoint is not None
        assert equal(checkpoint.weights, expected)
        plain = trainer.begin(task, recipe, trainer.base(task), 3)
        plain.advance()
        again = plain.result()[1]
        assert again is not None
        assert again.id == checkpoint.id  # what is measured is no part of the id
        assert [adjustment.kind for _, adjustment in report.adjustments] == ["log_more", "log_less"]


def gradients_of(session: TrlSession) -> list[dict[str, torch.Tensor]]:
    """Return a list that grows by a copy of the gradient of each step, before it is clipped."""
    trainer, seen = session._live.trainer, []
    original = trainer._clip_grad_norm

    def noted(model: Any) -> Any:
        seen.append({n: p.grad.clone() for n, p in trainer._clipped_parameters(model) if p.grad is not None})
        return original(model)

    trainer._clip_grad_norm = noted
    return seen


@pytest.mark.parametrize(
    "changes",
    [{}, {"gradient_accumulation": 2, "batch_size": 4}, {"lora_rank": 2}, {"max_grad_norm": 0.1}],
    ids=["plain", "accumulated", "adapters", "clipped"],
)
def test_log_more_measures_every_entry(changes: Mapping[str, Any], trainer: TrlTrainer, task: TinyTask) -> None:
    session = trainer.begin(task, sft(**changes), trainer.base(task), 3)
    assert isinstance(session, TrlSession)
    seen = gradients_of(session)
    session.apply(Adjustment("log_more"))
    for step in range(1, 5):
        row = session.advance(1)
        gradient, signals = seen[-1], session.signals
        norms = {name: float(torch.linalg.vector_norm(entries)) for name, entries in gradient.items()}
        shown = {name.removeprefix("grad_norm/"): norm for name, norm in row.items() if name.startswith("grad_norm/")}
        assert shown == norms
        flat = torch.cat([entries.flatten() for entries in gradient.values()]).double().numpy()
        above = [norm for norm in norms.values() if norm > 0]
        assert signals.values["grad_norm_ratio"] == row["grad_norm_ratio"] == max(above) / min(above)
        assert signals.values["grad_variance"] == row["grad_variance"] == pytest.approx(flat.var(), rel=1e-5)
        norm = float(np.linalg.norm(flat))
        assert row["grad_norm"] == pytest.approx(norm, rel=1e-6)
        assert signals.values["grad_clip_ratio"] == row["grad_clip_ratio"]
        assert row["grad_clip_ratio"] == pytest.approx(min(1.0, sft(**changes).max_grad_norm / norm), rel=1e-5)
        if step > 1:
            before = torch.cat([entries.flatten() for entries in seen[-2].values()]).double().numpy()
            cosine = before @ flat / np.linalg.norm(before) / norm
            assert signals.values["grad_cosine"] == row["grad_cosine"] == pytest.approx(cosine, abs=1e-5)
    session.close()


def test_log_less_goes_back_to_the_sample(trainer: TrlTrainer, task: TinyTask) -> None:
    session = trainer.begin(task, sft(), trainer.base(task), 3)
    assert session.refusal(Adjustment("log_less")) == "gradients are measured on a sample already"
    session.apply(Adjustment("log_more"))
    assert session.refusal(Adjustment("log_more")) == "everything is measured exactly already"
    with pytest.raises(ValueError, match=r"^adjustment 'log_more': everything is measured exactly already\.$"):
        session.apply(Adjustment("log_more"))
    assert any(name.startswith("grad_norm/") for name in session.advance(1))
    session.apply(Adjustment("log_less"))
    assert not any(name.startswith("grad_") and name != "grad_norm" for name in session.advance(1))
    assert session.signals.values["grad_cosine"] is None  # the sample begins anew
    session.advance(1)
    assert session.signals.values["grad_cosine"] is not None
    session.close()


def test_the_critics_gradient_is_measured_with_the_policys(trainer: TrlTrainer, task: TinyTask) -> None:
    session = trainer.begin(task, recipe_of("ppo", mix={"good": 1.0}, critic="head"), trainer.base(task), 3)
    assert isinstance(session, TrlSession)
    seen = gradients_of(session)
    session.apply(Adjustment("log_more"))
    row = session.advance(1)
    shown = {name.removeprefix("grad_norm/") for name in row if name.startswith("grad_norm/")}
    assert shown == seen[0].keys()
    assert any(name.startswith("critic.") for name in shown)
    assert row["grad_norm"] == pytest.approx(math.sqrt(sum(float((g**2).sum()) for g in seen[0].values())), rel=1e-5)
    session.close()


def test_a_batch_that_is_used_again_shows_its_sparsity_again(trainer: TrlTrainer, folder: Path) -> None:
    def penal(row: Mapping[str, Any], completion: str) -> float:
        return -1.0 if len(completion) % 2 else 0.5

    session = trainer.begin(TinyTask(folder, verifier=penal), grpo(num_iterations=2), trainer.base(TinyTask(folder)), 3)
    rows = [session.advance(1) for _ in range(4)]
    assert all(0.0 <= row["reward_sparsity"] <= 1.0 for row in rows)
    assert rows[0]["reward_sparsity"] == rows[1]["reward_sparsity"]
    assert rows[2]["reward_sparsity"] == rows[3]["reward_sparsity"]
    assert rows[0]["reward_sparsity"] == 0.0  # half a point, or a penalty that is decisive
    session.close()


@pytest.mark.parametrize(("reward", "sparsity"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0)])
def test_a_constant_reward_informs_only_when_it_is_positive(
    reward: float, sparsity: float, trainer: TrlTrainer, folder: Path
) -> None:
    constant = TinyTask(folder, verifier=lambda row, text: reward)
    session = trainer.begin(constant, grpo(), trainer.base(constant), 3)
    session.advance(1)
    assert session.signals.values["reward_sparsity"] == sparsity
    assert session.signals.values["groups_without_spread"] == 1.0
    session.close()


def test_sources_have_signals_by_slot(trainer: TrlTrainer, four: FourSources) -> None:
    mix = dict.fromkeys(SOURCES[1:3], 0.5)
    _, found = stepped(trainer, four, recipe_of("grpo", steps=2, batch_size=16, mix=mix))
    by_source = {name for name in there(found[-1]) if name.startswith("reward_source_")}
    assert by_source == {"reward_source_1", "reward_source_2"}


def test_a_loss_that_is_not_finite_is_broken(
    trainer: TrlTrainer, task: TinyTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = trainer.begin(task, sft(steps=5), trainer.base(task), 3)
    assert isinstance(session, TrlSession)
    live = session._live.trainer
    original = live.compute_loss
    calls: list[None] = []

    def ruined(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        loss = original(*args, **kwargs)
        return loss * math.nan if len(calls) == 3 else loss

    monkeypatch.setattr(live, "compute_loss", ruined)
    session.advance()
    assert session.result()[0].failure is not None
    signals = session.signals  # a closed session still tells
    assert signals.step == 3
    assert set(signals.broken) == {"loss", "grad_norm", "grad_norm_ratio", "grad_variance", "grad_clip_ratio"}
    vector = signals.vector()
    assert vector.dtype == np.float32 and np.isfinite(vector).all() and (np.abs(vector) <= 1).all()


def test_signals_are_equal_in_equal_rounds_but_for_the_clock(trainer: TrlTrainer, task: TinyTask) -> None:
    runs = [stepped(trainer, task, grpo(kl_coef=0.1))[1] for _ in range(2)]
    clocked = {name for name, kind in SIGNALS.items() if kind.clocked}
    for one, other in zip(*runs, strict=True):
        assert {k: v for k, v in one.values.items() if k not in clocked} == {
            k: v for k, v in other.values.items() if k not in clocked
        }
        assert np.array_equal(one.vector(), other.vector())
        assert np.array_equal(one.presence(), other.presence())


def test_nothing_of_a_closed_round_is_held(trainer: TrlTrainer, task: TinyTask, live_models: Any) -> None:
    session = trainer.begin(task, sft(), trainer.base(task), 3)
    session.apply(Adjustment("log_more"))
    session.advance(2)
    session.close()
    assert live_models() == 0


# Losses and hardware -------------------------------------------------------------------------------------------------


def test_losses_stay_where_they_are_until_they_are_read() -> None:
    meter = Meter()
    assert math.isnan(meter.take_loss())
    passes = [torch.tensor(0.1), torch.tensor(0.2), torch.tensor(0.3)]
    meter.losses.extend(passes)
    assert meter.take_loss() == sum(map(float, passes))
    assert meter.losses == []
    meter.losses.append(torch.tensor(math.nan))
    assert math.isnan(meter.take_loss())


def test_what_measuring_took_is_told(trainer: TrlTrainer, task: TinyTask) -> None:
    session = trainer.begin(task, sft(), trainer.base(task), 3)
    assert isinstance(session, TrlSession)
    assert session.own_seconds == {}
    session.advance(1)
    told = session.own_seconds
    session.close()
    assert told.keys() == {"gradients", "monitor", "rows"}
    assert all(seconds > 0 for seconds in told.values())


def test_hardware_is_read_from_what_is_known() -> None:
    telemetry: Any = SimpleNamespace(utilisation_now=None)
    watch = HardwareWatch(torch.device("cpu"), telemetry)
    total = memory_total(torch.device("cpu"))
    assert total is not None
    assert watch.read(0.5, 100, total // 2) == {
        "step_seconds": 0.5,
        "tokens_per_second": 200.0,
        "memory_share": pytest.approx(0.5),
        "utilisation": None,
    }
    telemetry.utilisation_now = 0.75
    found = watch.read(0.25, 150, None)
    assert (found["tokens_per_second"], found["memory_share"], found["utilisation"]) == (200.0, None, 0.75)
    assert watch.read(0.0, 150, None)["tokens_per_second"] is None
    assert RoundTelemetry("cpu").utilisation_now is None


def test_memory_is_held_against_the_least_of_machine_and_containers(tmp_path: Path) -> None:
    used, total = memory_in_use(torch.device("cpu")), memory_total(torch.device("cpu"))
    assert used is not None and total is not None and 0 < used < total
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "memory/c/d").mkdir(parents=True)
    (tmp_path / "a/memory.max").write_text("4096\n")
    (tmp_path / "a/b/memory.max").write_text("max\n")
    (tmp_path / "memory/c/memory.limit_in_bytes").write_text("8192\n")
    assert memory._group_limits(["0::/a/b"], tmp_path) == [4096]
    assert memory._group_limits(["5:cpu:/c", "4:memory:/c/d"], tmp_path) == [8192]
    assert memory._group_limits(["0::/", "4:memory:/elsewhere"], tmp_path) == []
