"""Real rounds equal TRL's own bit for bit, at the learning rates that were asked for, LoRA and KL included."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer, SFTTrainer

from posttrain_gym.inner_trainers.adjustments import Adjustment
from posttrain_gym.inner_trainers.base import Checkpoint, InnerTrainer, Limit, RoundReport, round_id
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.testing import TinyTask
from posttrain_gym.inner_trainers.trl.data import draw_mix
from posttrain_gym.inner_trainers.trl.session import TrlSession
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer, lora_parameters
from tests.trl_fixtures import *  # noqa: F403
from tests.trl_rounds import ROW, Weights, by_hand, equal, graded, grpo, run, sft, stopped_after, trained


def test_it_satisfies_the_protocol(trainer: TrlTrainer, task: TinyTask) -> None:
    assert isinstance(trainer, InnerTrainer)
    assert trainer.algorithms == ("distill", "dpo", "grpo", "kto", "midtrain", "ppo", "rft", "rloo", "sft")
    assert "temperature" in trainer.ignored_settings("sft") and "temperature" not in trainer.ignored_settings("grpo")
    assert set(trainer.ignored_settings("ppo")).isdisjoint({"gamma", "gae_lambda", "critic", "vf_coef"})
    assert json.loads(json.dumps(trainer.fingerprint)) == trainer.fingerprint
    assert trainer.fingerprint["precision"] == ("bf16" if torch.cuda.is_available() else "fp32")
    assert trainer.usable_sources(task, "grpo") == ("good",)
    assert trainer.usable_sources(task, "sft") == ("bad", "good")
    with pytest.raises(ValueError, match=r"unknown 'grop'. Did you mean 'grpo'\?"):
        trainer.usable_sources(task, "grop")


def test_the_session_type_is_what_begin_returns(trainer: TrlTrainer, task: TinyTask) -> None:
    session = trainer.begin(task, sft(), trainer.base(task), 3)
    assert isinstance(session, TrlSession)
    assert (session.step, session.done, session.cost.trained_tokens) == (0, False, 0)
    row = session.advance(1)
    assert (row["step"], session.step, session.cost.trained_tokens) == (1.0, 1, 8 * ROW)
    session.close()


# Equal to TRL, bit for bit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        (
            {"schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1, "max_grad_norm": 0.2, "max_length": 5},
            {
                "lr_scheduler_type": "cosine",
                "warmup_steps": 2,
                "weight_decay": 0.1,
                "max_grad_norm": 0.2,
                "max_length": 5,
            },
        ),
        (
            {"batch_size": 4, "gradient_accumulation": 2, "mix": {"good": 0.75, "bad": 0.25}},
            {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        ),
    ],
)
def test_an_sft_round_is_trls_own_run(
    ours: dict[str, Any], theirs: dict[str, Any], trainer: TrlTrainer, task: TinyTask, folder: Path
) -> None:
    recipe = sft(**ours)
    rows = {name: source.rows["demonstrations"] for name, source in task.built.sources.items()}
    draw = draw_mix({name: len(r) for name, r in rows.items()}, recipe.mix, 32, 3)
    reference = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=by_hand("sft", **theirs),
        train_dataset=datasets.Dataset.from_list([dict(rows[name][index]) for name, index in draw]),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    reference.train()
    weights = trained(trainer, task, recipe)
    state = reference.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in weights.items())
    assert not equal(weights, trainer.base(task).weights)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"kl_coef": 0.5}, {"beta": 0.5}),
        (
            {"batch_size": 4, "gradient_accumulation": 2, "temperature": 0.7, "num_generations": 8},
            {
                "per_device_train_batch_size": 4,
                "gradient_accumulation_steps": 2,
                "temperature": 0.7,
                "num_generations": 8,
            },
        ),
    ],
)
def test_a_grpo_round_is_trls_own_run(
    ours: dict[str, Any], theirs: dict[str, Any], trainer: TrlTrainer, task: TinyTask, folder: Path
) -> None:
    recipe = grpo(**ours)
    rows = task.built.sources["good"].rows["prompts"]
    draw = draw_mix({"good": len(rows)}, {"good": 1.0}, 32 // recipe.num_generations, 3)
    reference = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [graded({}, completion) for completion in completions],
        args=by_hand("grpo", max_completion_length=4, temperature=1.0, **theirs)
        if "temperature" not in theirs
        else by_hand("grpo", max_completion_length=4, **theirs),
        train_dataset=datasets.Dataset.from_list([dict(rows[index]) for _, index in draw]),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    reference.train()
    weights = trained(trainer, task, recipe)
    state = reference.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in weights.items())
    assert not equal(weights, trainer.base(task).weights)


@pytest.mark.parametrize("recipe", [sft(), grpo()], ids=["sft", "grpo"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_the_caller_does_between_steps_moves_nothing(
    recipe: Recipe, mode: Callable[[], Any], trainer: TrlTrainer, task: TinyTask, request: pytest.FixtureRequest
) -> None:
    session = trainer.begin(task, recipe, trainer.base(task), 3)
    with mode():
        while not session.done:
            session.advance(1)
            torch.rand(5), np.random.rand(5), random.random()
            torch.manual_seed(session.step)
        _, checkpoint = session.result()
    assert checkpoint is not None
    assert equal(checkpoint.weights, request.getfixturevalue(f"{recipe.algorithm}_weights"))


@pytest.mark.parametrize("recipe", [sft(), grpo(lora_rank=2)], ids=["sft", "grpo"])
def test_a_caller_in_inference_mode_may_do_all_of_it(recipe: Recipe, task: TinyTask, trainer: TrlTrainer) -> None:
    expected = trained(trainer, task, recipe)
    with torch.inference_mode():
        fresh = TrlTrainer()
        card, _ = fresh.evaluate(task, fresh.base(task), "validation")
        weights = trained(fresh, task, recipe)
        fresh.evaluate(task, Checkpoint("x", weights), "validation")
    assert equal(weights, expected)
    assert equal(trained(fresh, task, recipe), expected)  # what was loaded then can still be trained
    assert card == trainer.evaluate(task, trainer.base(task), "validation")[0]


@pytest.mark.parametrize("recipe", [sft(), grpo()], ids=["sft", "grpo"])
def test_a_round_leaves_the_callers_generators_alone(recipe: Recipe, trainer: TrlTrainer, task: TinyTask) -> None:
    def states() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state(legacy=False)["state"], torch.get_rng_state().tolist()

    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    before = states()
    session = trainer.begin(task, recipe, trainer.base(task), 3)
    assert str(states()) == str(before)
    session.advance(1)
    assert str(states()) == str(before)
    _, checkpoint = session.result()
    assert checkpoint is not None
    trainer.evaluate(task, checkpoint, "validation")
    assert str(states()) == str(before)


def test_two_rounds_may_take_turns(
    trainer: TrlTrainer, task: TinyTask, sft_weights: Weights, grpo_weights: Weights
) -> None:
    base = trainer.base(task)
    one, two = trainer.begin(task, sft(), base, 3), trainer.begin(task, grpo(), base, 3)
    while not (one.done and two.done):
        one.advance(1), two.advance(1)
    for session, expected in ((one, sft_weights), (two, grpo_weights)):
        checkpoint = session.result()[1]
        assert checkpoint is not None
        assert equal(checkpoint.weights, expected)


def test_seed_start_and_history(
    trainer: TrlTrainer, task: TinyTask, sft_weights: Weights, grpo_weights: Weights
) -> None:
    assert not equal(trained(trainer, task, sft(), seed=4), sft_weights)
    report, after = run(trainer, task, sft(), Checkpoint("other", sft_weights, 1))
    assert after is not None
    assert (after.depth, report.start) == (2, "other")
    assert not equal(after.weights, sft_weights)
    trainer.evaluate(task, after, "validation")  # leaves these weights in the resident model
    assert equal(trained(trainer, task, sft()), sft_weights)
    assert equal(trained(trainer, task, grpo()), grpo_weights)


@pytest.mark.parametrize("seed", [-1, 2**32, 0.5, True])
def test_a_seed_that_numpy_would_refuse_late_is_refused_first(seed: Any, trainer: TrlTrainer, task: TinyTask) -> None:
    with pytest.raises(ValueError, match=r"seed: expected an integer in \[0, 4294967295\]"):
        trainer.begin(task, sft(), trainer.base(task), seed)


# Learning rates and adjustments (C01) --------------------------------------------------------------------------------


def rates(report: RoundReport) -> list[float]:
    return [row["learning_rate"] for row in report.curves]


def test_a_halved_rate_is_used_from_the_next_step_and_composes_with_the_schedule(
    trainer: TrlTrainer, task: TinyTask
) -> None:
    recipe = sft(learning_rate=1e-3, schedule="linear", steps=10)
    finals = {}
    for name, adjustment in (("none", None), ("nothing", Adjustment()), ("half", Adjustment("lr_scale", 0.5))):
        session = trainer.begin(task, recipe, trainer.base(task), 3)
        session.advance(5)
        if adjustment is not None:
            session.apply(adjustment)
        used: list[float] = []
        while not session.done:
            session.advance(1)
            used.append(session._trainer.optimizer.param_groups[0]["lr"])
        report, checkpoint = session.result()
        assert checkpoint is not None
        finals[name] = checkpoint.weights, rates(report)
        with pytest.raises(ValueError, match=r"'lr_scale': the round has ended \(finished\) at step 10"):
            session.apply(Adjustment("lr_scale", 0.5))
    first = [1e-3, 9e-4, 8e-4, 7e-4, 6e-4]
    assert finals["none"][1] == pytest.approx([*first, 5e-4, 4e-4, 3e-4, 2e-4, 1e-4], rel=1e-9)
    assert finals["half"][1] == pytest.approx([*first, 2.5e-4, 2.0e-4, 1.5e-4, 1.0e-4, 5.0e-5], rel=1e-9)
    assert equal(finals["nothing"][0], finals["none"][0])
    assert not equal(finals["half"][0], finals["none"][0])


def test_the_rate_in_the_curve_is_the_rate_of_the_update(trainer: TrlTrainer, task: TinyTask) -> None:
    """Without moments, AdamW's first update is the learning rate times the gradient's sign."""
    for recipe in (sft(steps=1, learning_rate=2e-4), sft(steps=1, learning_rate=1e-4)):
        session = trainer.begin(task, recipe, trainer.base(task), 3)
        if recipe.learning_rate == 1e-4:
            session.apply(Adjustment("lr_scale", 2.0))
        session.advance()
        report, checkpoint = session.result()
        assert checkpoint is not None
        assert rates(report) == pytest.approx([2e-4], rel=1e-9)
        name = "model.layers.0.mlp.up_proj.weight"
        moved = (checkpoint.weights[name] - trainer.base(task).weights[name]).abs()
        assert float(moved.max()) == pytest.approx(2e-4, rel=1e-3)


def test_adjustments_before_the_first_step_and_twice(trainer: TrlTrainer, task: TinyTask) -> None:
    session = trainer.begin(task, sft(learning_rate=4e-3), trainer.base(task), 3)
    session.apply(Adjustment("lr_scale", 0.5))
    session.apply(Adjustment("lr_scale", 0.5))
    session.advance()
    report, checkpoint = session.result()
    assert rates(report) == [1e-3] * 4
    assert checkpoint is not None
    assert equal(checkpoint.weights, trained(trainer, task, sft(learning_rate=1e-3)))


def test_other_weights_have_other_ids_and_equal_weights_equal_ones(trainer: TrlTrainer, task: TinyTask) -> None:
    """A round that was adjusted, stopped or cut is not the checkpoint of the whole round."""

    def made(*adjustments: tuple[int, Adjustment], limit: Limit | None = None) -> tuple[str, Weights]:
        session = trainer.begin(task, sft(), trainer.base(task), 3, limit)
        for step, adjustment in adjustments:
            while session.step < step:
                session.advance(1)
            session.apply(adjustment)
        session.advance()
        report, checkpoint = session.result()
        assert checkpoint is not None and report.checkpoint == checkpoint.id
        return checkpoint.id, checkpoint.weights

    half, stop = Adjustment("lr_scale", 0.5), Adjustment("stop")
    step_bound = trainer.step_cost_bound(task, sft()).trained_tokens
    whole = made()
    assert whole[0] == round_id(task, trainer.base(task), sft(), 3, trainer.ignored_settings("sft"))
    cut = made(limit=Limit("train_tokens", 2 * step_bound))
    different = [whole, made((0, half)), made((2, half)), made((2, half), (3, half)), made((1, stop)), cut]
    assert len({name for name, _ in different}) == len(different)
    same = [(whole, made((2, Adjustment("lr_scale", 1.0)))), (whole, made((1, Adjustment()))), (cut, made((2, stop)))]
    for left, right in [*same, (cut, made((2, half), (2, stop)))]:  # a rate that no step used
        assert left[0] == right[0] and equal(left[1], right[1])


def test_what_an_algorithm_ignores_changes_no_round(trainer: TrlTrainer, task: TinyTask) -> None:
    numbers = ("beta", "clip_range", "clip_range_vf", "entropy_coef", "gae_lambda", "gamma", "kl_coef", "min_reward")
    changes: dict[str, Any] = {name: 0.125 for name in (*numbers, "replay_share", "temperature", "vf_coef")}
    changes |= {"num_generations": 2, "num_iterations": 2, "max_length": 512, "packing": True, "critic": "model"}
    for base in (sft(), grpo()):
        report, checkpoint = run(trainer, task, base)
        assert checkpoint is not None
        ignored = trainer.ignored_settings(base.algorithm)
        assert ignored
        for name in set(ignored) - {"loss"}:  # another loss is refused
            other, again = run(trainer, task, Recipe.from_dict({**base.to_dict(), name: changes[name]}))
            assert again is not None and equal(again.weights, checkpoint.weights)
            assert (other.checkpoint, other.curves[-1]["loss"]) == (report.checkpoint, report.curves[-1]["loss"])


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0, 1 / 2, 1, 1, 1]),
        ("linear", [0, 1 / 2, 1, 2 / 3, 1 / 3]),
        ("cosine", [0, 1 / 2, 1, 3 / 4, 1 / 4]),
    ],
)
def test_every_schedule_warms_up(schedule: str, expected: list[float], trainer: TrlTrainer, task: TinyTask) -> None:
    report, _ = run(trainer, task, sft(schedule=schedule, warmup_steps=2, steps=5, learning_rate=1e-3))
    assert rates(report) == pytest.approx([1e-3 * share for share in expected], rel=1e-9, abs=1e-18)


def test_stop_ends_the_round_after_the_step_that_is_done(trainer: TrlTrainer, task: TinyTask) -> None:
    session = trainer.begin(task, sft(), trainer.base(task), 3)
    session.advance(2)
    session.apply(Adjustment("stop"))
    assert session.done
    assert session.advance()["step"] == 2.0
    for adjustment in (Adjustment(), Adjustment("stop"), Adjustment("lr_scale", 2.0)):
        with pytest.raises(ValueError, match=r"has ended \(stopped\) at step 2"):
            session.apply(adjustment)
    report, checkpoint = session.result()
    assert (report.ended, report.steps, report.failure) == ("stopped", 2, None)
    assert checkpoint is not None
    assert equal(checkpoint.weights, stopped_after(2, trainer, task))
    assert session.result() == (report, checkpoint)


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "2"])
def test_advance_counts_whole_steps(steps: Any, trainer: TrlTrainer, task: TinyTask) -> None:
    session = trainer.begin(task, sft(), trainer.base(task), 3)
    with pytest.raises(ValueError, match="steps: expected an integer in"):
        session.advance(steps)
    session.close()


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_the_rate_asked_for_is_the_one_the_library_uses(task: TinyTask, schedule: str, warmup: int) -> None:
    """The formula of `Recipe.learning_rate_at` against what the optimiser held at each step."""
    trainer = TrlTrainer()
    recipe = Recipe("sft", {"good": 1.0}, steps=8, learning_rate=1e-3, schedule=schedule, warmup_steps=warmup)
    session = trainer.begin(task, recipe, trainer.base(task), 0)
    session.advance()
    report, checkpoint = session.result()
    assert checkpoint is not None
    used = [row["learning_rate"] for row in report.curves]
    assert used == pytest.approx([recipe.learning_rate_at(step) for step in range(1, 9)], rel=1e-9, abs=1e-15)


# LoRA and KL ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [sft(lora_rank=3), grpo(lora_rank=3)], ids=["sft", "grpo"])
def test_lora_trains_adapters_and_hands_out_merged_weights(recipe: Recipe, trainer: TrlTrainer, task: TinyTask) -> None:
    base = trainer.base(task)
    session = trainer.begin(task, recipe, base, 3)
    session.advance()
    adapted = session._trainer.model
    by_hand = 2 * 3 * (4 * (32 + 32) + 3 * (32 + 48))  # layers x rank x (in + out)
    resident = trainer._load(task)
    assert lora_parameters(resident.model.template, 3) == by_hand
    assert sum(p.numel() for p in adapted.parameters() if p.requires_grad) == by_hand
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        expected = adapted.eval()(input_ids=ids).logits / (recipe.temperature if recipe.algorithm == "grpo" else 1)
    report, checkpoint = session.result()
    cost, n = report.training_cost, trainer.parameters(task)
    assert cost.flops == (4 * n + 6 * by_hand) * cost.trained_tokens + 2 * n * (
        cost.generated_tokens + cost.scored_tokens
    )
    assert checkpoint is not None
    assert checkpoint.weights.keys() == base.weights.keys()
    for name, value in checkpoint.weights.items():
        assert torch.equal(value, base.weights[name]) == (not name.endswith("_proj.weight"))
    with torch.no_grad():
        merged = resident.model.with_weights(checkpoint.weights).eval()(input_ids=ids).logits
        before = resident.model.with_weights(base.weights).eval()(input_ids=ids).logits
    torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-5)
    assert float((merged - before).abs().max()) > 1e-4


@pytest.mark.parametrize("rank", [0, 3])
def test_kl_is_measured_from_the_weights_the_round_started_with(
    rank: int, trainer: TrlTrainer, task: TinyTask, sft_weights: Weights
) -> None:
    start = Checkpoint("sft", sft_weights, 1)  # far from what TRL would load from the model's folder
    plain, _ = run(trainer, task, grpo(lora_rank=rank), start)
    assert "kl" not in plain.curves[0]
    finals = {}
    for kl_coef in (0.0, 0.1, 10.0):
        report, checkpoint = run(trainer, task, grpo(lora_rank=rank, kl_coef=kl_coef), start)
        assert checkpoint is not None
        finals[kl_coef] = checkpoint.weights
        if kl_coef:
            assert report.curves[0]["kl"] == pytest.approx(0.0, abs=1e-5)
            assert report.curves[-1]["kl"] > 1e-6
    assert not equal(finals[0.0], finals[0.1])

    def distance(weights: Weights) -> float:
        return math.sqrt(sum(float(((weights[name] - sft_weights[name]) ** 2).sum()) for name in weights))

    assert distance(finals[10.0]) < distance(finals[0.0])
