"""Rounds are cut at their limit, and every token and operation is counted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from posttrain_gym.inner_trainers.base import Cost, Limit
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.testing import TinyTask
from posttrain_gym.inner_trainers.trl import session as session_module
from posttrain_gym.inner_trainers.trl import worker as worker_module
from posttrain_gym.inner_trainers.trl.data import draw_mix
from posttrain_gym.inner_trainers.trl.models import LoadedModel
from posttrain_gym.inner_trainers.trl.sft import MeteredSFTTrainer
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer, lora_parameters
from tests.trl_fixtures import *  # noqa: F403
from tests.trl_rounds import ROW, equal, graded, grpo, run, sft, stopped_after

# Budget limits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "steps"),
    [(48, 1), (95, 1), (96, 2), (3 * 48 + 47, 3), (4 * 48, 4), (1e9, 4)],
)
@pytest.mark.parametrize("unit", ["train_tokens", "flops"])
def test_no_step_is_taken_that_could_pass_the_limit(
    limit: float, steps: int, unit: str, trainer: TrlTrainer, task: TinyTask
) -> None:
    per_token = 1 if unit == "train_tokens" else 6 * trainer.parameters(task)
    bound = trainer.step_cost_bound(task, sft())
    assert bound == Cost(trained_tokens=8 * ROW, flops=6.0 * trainer.parameters(task) * 8 * ROW)
    report, checkpoint = run(trainer, task, sft(), limit=Limit(unit, limit * per_token))
    assert report.steps == steps
    assert report.ended == ("finished" if limit == 1e9 or steps == 4 else "budget")
    assert report.training_cost.in_unit(unit) == steps * 8 * ROW * per_token <= limit * per_token
    assert checkpoint is not None
    assert equal(checkpoint.weights, stopped_after(steps, trainer, task))


@pytest.mark.parametrize("recipe", [sft(), grpo(), grpo(kl_coef=0.1), sft(lora_rank=2)])
@pytest.mark.parametrize("unit", ["train_tokens", "flops"])
def test_uneven_steps_stay_below_the_limit(
    recipe: Recipe, unit: str, trainer: TrlTrainer, folder: Path, task: TinyTask
) -> None:
    rows = [{"prompt": "abc="[:n], "completion": "abcdefgh"[: 2 * n]} for n in (1, 2, 3, 4)]
    uneven = TinyTask(folder, rows=rows, verifier=graded)
    bound = trainer.step_cost_bound(uneven, recipe).in_unit(unit)
    full, _ = run(trainer, uneven, recipe)
    amount = 0.6 * full.training_cost.in_unit(unit)
    report, _ = run(trainer, uneven, recipe, limit=Limit(unit, amount))
    spent = report.training_cost.in_unit(unit)
    assert (report.ended, report.failure) == ("budget", None)
    assert spent <= amount < spent + bound


@pytest.mark.parametrize("unit", ["train_tokens", "flops"])
@pytest.mark.parametrize("recipe", [sft(), grpo()], ids=["sft", "grpo"])
def test_a_limit_below_one_step_costs_nothing(
    recipe: Recipe, unit: str, trainer: TrlTrainer, task: TinyTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = trainer.step_cost_bound(task, recipe).in_unit(unit)

    def refuse(*_: Any) -> Any:
        raise AssertionError("a model was made")

    with monkeypatch.context() as patched:
        patched.setattr(LoadedModel, "with_weights", refuse)
        report, checkpoint = run(trainer, task, recipe, limit=Limit(unit, bound * 0.999))
    assert report.failure is not None
    assert (report.failure.cause, report.failure.kind, report.failure.step) == ("resources", "budget_too_small", 0)
    assert (report.ended, report.steps, checkpoint) == ("failed", 0, None)
    assert (report.training_cost.in_unit("train_tokens"), report.training_cost.flops) == (0.0, 0.0)
    report, _ = run(trainer, task, recipe, limit=Limit(unit, bound))
    assert report.steps >= 1


@pytest.mark.parametrize(("limit", "steps"), [(5, 1), (10, 1), (19, 1), (20, 2), (35, 3), (1000, 4)])
@pytest.mark.parametrize("stride", [1, 100])
def test_seconds_overshoot_by_the_first_step_at_most(
    limit: float, steps: int, stride: int, trainer: TrlTrainer, task: TinyTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    original = MeteredSFTTrainer.compute_loss

    def ten_seconds(self: Any, *args: Any, **kwargs: Any) -> Any:
        now[0] += 10.0
        return original(self, *args, **kwargs)

    monkeypatch.setattr(MeteredSFTTrainer, "compute_loss", ten_seconds)
    for module in (session_module, worker_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    session = trainer.begin(task, sft(), trainer.base(task), 3, Limit("device_seconds", limit))
    while not session.done:
        session.advance(stride)
        now[0] += 500.0  # the caller's own time is not the round's
    report, _ = session.result()
    assert (report.steps, report.training_cost.device_seconds) == (steps, 10.0 * steps)
    assert report.wall_seconds == 10.0 * steps
    assert report.training_cost.device_seconds <= max(limit, 10.0)


# Cost ----------------------------------------------------------------------------------------------------------------


def test_sft_trains_on_exactly_the_drawn_rows(trainer: TrlTrainer, folder: Path) -> None:
    rows = [{"prompt": "abcd"[:n] + "=", "completion": "h" * (n * n)} for n in (1, 2, 3)]
    lengths = [n + 1 + n * n + 1 for n in (1, 2, 3)]
    supervised = [n * n + 1 for n in (1, 2, 3)]
    task = TinyTask(folder, rows=rows)
    draw = [index for _, index in draw_mix({"good": 3}, {"good": 1.0}, 4 * 8, 3)]
    report, _ = run(trainer, task, sft(batch_size=4, gradient_accumulation=2))
    assert report.training_cost.trained_tokens == sum(lengths[i] for i in draw)
    assert report.supervised_tokens == sum(supervised[i] for i in draw)
    assert (report.training_cost.generated_tokens, report.training_cost.scored_tokens) == (0, 0)
    assert report.training_cost.flops == 6.0 * trainer.parameters(task) * sum(lengths[i] for i in draw)
    assert trainer.step_cost_bound(task, sft(batch_size=4, gradient_accumulation=2)).trained_tokens == 8 * 14


@pytest.mark.parametrize(
    "recipe",
    [grpo(), grpo(kl_coef=0.1), grpo(batch_size=4, gradient_accumulation=2), grpo(lora_rank=2, kl_coef=0.1)],
    ids=["plain", "kl", "accumulated", "lora-kl"],
)
def test_grpo_counts_what_trl_counts(recipe: Recipe, trainer: TrlTrainer, task: TinyTask) -> None:
    session = trainer.begin(task, recipe, trainer.base(task), 3)
    session.advance()
    logs = [entry for entry in session._trainer.state.log_history if "loss" in entry]
    report, _ = session.result()
    prompts = 4 * 8 * 4  # steps x completions x prompt tokens
    completions = round(sum(entry["completions/mean_length"] * 8 for entry in logs))
    cost = report.training_cost
    assert cost.trained_tokens == logs[-1]["num_tokens"] == prompts + completions
    assert cost.generated_tokens == report.supervised_tokens == completions
    assert cost.scored_tokens == prompts + (prompts + completions if recipe.kl_coef else 0)
    n = trainer.parameters(task)
    resident = trainer._load(task)
    per_token = 4 * n + 6 * lora_parameters(resident.model.template, 2) if recipe.lora_rank else 6 * n
    assert cost.flops == per_token * cost.trained_tokens + 2 * n * (cost.generated_tokens + cost.scored_tokens)


def test_the_number_of_parameters_counts_tied_weights_once(trainer: TrlTrainer, task: TinyTask) -> None:
    vocabulary, hidden, inner, layers = 3 + 20, 32, 48, 2
    by_layer = 4 * hidden * hidden + 3 * hidden * inner + 2 * hidden
    assert trainer.parameters(task) == vocabulary * hidden + layers * by_layer + hidden
    assert sum(value.numel() for value in trainer.base(task).weights.values()) == trainer.parameters(task)
