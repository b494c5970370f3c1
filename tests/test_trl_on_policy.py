"""GRPO and RLOO rounds equal TRL's own bit for bit; reused batches, tools and counts of what samples completions."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer, RLOOConfig, RLOOTrainer

from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.testing import TinyTask
from posttrain_gym.inner_trainers.trl.algorithms import ALGORITHMS
from posttrain_gym.inner_trainers.trl.data import draw_mix
from posttrain_gym.inner_trainers.trl.grpo import MeteredGRPOTrainer
from posttrain_gym.inner_trainers.trl.on_policy import MeteredRollouts
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer
from tests.trl_fixtures import *  # noqa: F403
from tests.trl_rounds import by_hand, equal, graded, grpo, run, trained


def rloo(**changes: Any) -> Recipe:
    return grpo(**{"algorithm": "rloo", **changes})


def rloo_by_hand(**changes: Any) -> RLOOConfig:
    plain = by_hand("grpo")
    names = ("output_dir", "max_steps", "per_device_train_batch_size", "learning_rate", "lr_scheduler_type", "seed")
    settings = {name: getattr(plain, name) for name in (*names, "num_generations")}
    quiet = {"bf16": False, "use_cpu": True, "gradient_checkpointing": False, "report_to": [], "save_strategy": "no"}
    return RLOOConfig(**{**settings, **quiet, "disable_tqdm": True, "beta": 0.0, **changes})


def sampled_batches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """Return a list that fills with the batches that rounds sample."""
    batches: list[dict[str, torch.Tensor]] = []

    def noted(self: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        batches.append(dict(batch))
        return batch

    monkeypatch.setattr(MeteredRollouts, "_with_advantages", noted)
    return batches


# Equal to TRL, bit for bit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"loss": "dapo"}, {"loss_type": "dapo"}),
        ({"loss": "dr_grpo"}, {"loss_type": "dr_grpo"}),
        ({"loss": "grpo"}, {"loss_type": "grpo"}),
        ({"loss": "bnpo"}, {"loss_type": "bnpo"}),
        ({"entropy_coef": 0.1}, {"entropy_coef": 0.1}),
        ({"num_iterations": 2}, {"num_iterations": 2}),
        ({"num_iterations": 3, "clip_range": 0.01}, {"num_iterations": 3, "epsilon": 0.01}),
        (
            {"num_iterations": 2, "batch_size": 4, "gradient_accumulation": 2, "kl_coef": 0.2, "loss": "bnpo"},
            {
                "num_iterations": 2,
                "per_device_train_batch_size": 4,
                "gradient_accumulation_steps": 2,
                "beta": 0.2,
                "loss_type": "bnpo",
            },
        ),
    ],
    ids=str,
)
def test_a_grpo_round_is_trls_own_run(
    ours: dict[str, Any], theirs: dict[str, Any], trainer: TrlTrainer, task: TinyTask, folder: Path
) -> None:
    recipe = grpo(**ours)
    arguments = by_hand("grpo", max_completion_length=4, temperature=1.0, **theirs)
    _assert_equal_to(GRPOTrainer, arguments, recipe, trainer, task, folder)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"kl_coef": 0.5}, {"beta": 0.5}),
        ({"num_iterations": 3, "clip_range": 0.01}, {"num_iterations": 3, "epsilon": 0.01}),
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
    ids=str,
)
def test_an_rloo_round_is_trls_own_run(
    ours: dict[str, Any], theirs: dict[str, Any], trainer: TrlTrainer, task: TinyTask, folder: Path
) -> None:
    recipe = rloo(**ours)
    arguments = rloo_by_hand(**{"max_completion_length": 4, "temperature": 1.0, **theirs})
    _assert_equal_to(RLOOTrainer, arguments, recipe, trainer, task, folder)


def _assert_equal_to(
    kind: Any, arguments: Any, recipe: Recipe, trainer: TrlTrainer, task: TinyTask, folder: Path
) -> None:
    rows = task.built.sources["good"].rows["prompts"]
    batches = -(-recipe.steps // recipe.num_iterations)
    per_batch = recipe.batch_size * recipe.gradient_accumulation // recipe.num_generations
    draw = draw_mix({"good": len(rows)}, {"good": 1.0}, batches * per_batch, 3)
    reference = kind(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [graded({}, completion) for completion in completions],
        args=arguments,
        train_dataset=datasets.Dataset.from_list([dict(rows[index]) for _, index in draw]),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    reference.train()
    weights = trained(trainer, task, recipe)
    state = reference.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in weights.items())
    assert not equal(weights, trainer.base(task).weights)


@pytest.mark.parametrize(
    ("recipe", "change"),
    [
        (grpo(), {"loss": "dr_grpo"}),
        (grpo(), {"loss": "bnpo"}),
        (grpo(), {"loss": "grpo"}),
        (grpo(), {"entropy_coef": 0.1}),
        (grpo(), {"num_iterations": 2}),
        (grpo(num_iterations=4), {"clip_range": 1e-6}),
        (rloo(), {"kl_coef": 0.5}),
        (rloo(), {"num_iterations": 2}),
        (rloo(), {"temperature": 0.5}),
        (rloo(), {"num_generations": 2}),
        (rloo(num_iterations=4), {"clip_range": 10.0}),  # a whole completion's ratio leaves the default at once
    ],
    ids=lambda value: value.algorithm if isinstance(value, Recipe) else str(value),
)
def test_every_field_that_it_reads_changes_the_round(
    recipe: Recipe, change: dict[str, Any], trainer: TrlTrainer, task: TinyTask
) -> None:
    if change == {"loss": "bnpo"}:  # differs from dapo only where passes of unequal length are accumulated
        recipe = grpo(batch_size=4, gradient_accumulation=2, steps=8)
    other = Recipe.from_dict({**recipe.to_dict(), **change})
    assert not equal(trained(trainer, task, other), trained(trainer, task, recipe))


@pytest.mark.parametrize(
    "changes",
    [{}, {"algorithm": "rloo"}, *({"algorithm": "ppo", "critic": critic} for critic in ("head", "model", "none"))],
    ids=str,
)
def test_a_round_raises_what_it_is_rewarded_for(changes: dict[str, Any], trainer: TrlTrainer, folder: Path) -> None:
    letters = TinyTask(folder, verifier=lambda row, text: text.count("a") / 4)
    report, _ = run(trainer, letters, grpo(steps=40, batch_size=32, learning_rate=5e-3, **changes))
    rewards = [row["reward"] for row in report.curves]
    assert max(rewards[:3]) < 0.2  # 20 letters are equally likely
    assert min(rewards[-3:]) > 0.9


# Batches used again --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "ppo"])
@pytest.mark.parametrize(("steps", "iterations", "batches"), [(4, 1, 4), (4, 2, 2), (5, 2, 3), (2, 3, 1), (4, 64, 1)])
def test_each_drawn_prompt_is_sampled_once(
    algorithm: str,
    steps: int,
    iterations: int,
    batches: int,
    trainer: TrlTrainer,
    task: TinyTask,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    original = MeteredRollouts._generate_single_turn

    def noted(self: Any, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        seen.extend(self.processing_class.batch_decode(prompt_ids))
        return original(self, prompt_ids, *args, **kwargs)

    monkeypatch.setattr(MeteredRollouts, "_generate_single_turn", noted)
    recipe = grpo(algorithm=algorithm, steps=steps, num_iterations=iterations, gradient_accumulation=2, batch_size=4)
    report, _ = run(trainer, task, recipe)
    assert (report.steps, report.ended) == (steps, "finished")
    rows = task.built.sources["good"].rows["prompts"]
    spec = ALGORITHMS[algorithm]
    assert spec.rows_per_round(recipe) == batches * (8 if algorithm == "ppo" else 2)
    draw = draw_mix({"good": len(rows)}, {"good": 1.0}, spec.rows_per_round(recipe), 3)
    copies = 1 if algorithm == "ppo" else 4
    assert Counter(seen) == Counter(rows[index]["prompt"] for _, index in draw for _ in range(copies))


@pytest.mark.parametrize(
    "recipe", [grpo(num_iterations=2, steps=5), rloo(num_iterations=2, steps=5, kl_coef=0.1)], ids=["grpo", "rloo"]
)
def test_a_step_that_uses_a_batch_again_shows_its_reward(recipe: Recipe, trainer: TrlTrainer, task: TinyTask) -> None:
    report, _ = run(trainer, task, recipe)
    rows = report.curves
    for name in ("reward", "reward_std", "completions/mean_length"):
        values = [row[name] for row in rows]
        assert values[0] == values[1] and values[2] == values[3]
    assert len({row["reward"] for row in rows}) > 1
    # of its groups it says nothing: a gradient of exactly 0 is no fault when every ratio is clipped
    assert ["groups_without_spread" in row for row in rows] == [True, False, True, False, True]
    assert rows[1]["clip_ratio/region_mean"] >= 0.0
    assert all({"loss", "grad_norm", "entropy"} <= row.keys() for row in rows)


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
@pytest.mark.parametrize("verifier", [lambda row, text: 0.0, lambda row, text: float(row["answer"] > "d")])
def test_no_signal_is_seen_when_batches_are_used_again(
    algorithm: str, verifier: Any, trainer: TrlTrainer, folder: Path
) -> None:
    """Rewards that differ between prompts alone are none: completions are compared with those of the same prompt."""
    report, _ = run(trainer, TinyTask(folder, verifier=verifier), grpo(algorithm=algorithm, num_iterations=2))
    assert report.failure is not None and report.failure.kind == "no_signal"


@pytest.mark.parametrize(
    ("recipe", "passes"),
    [
        (grpo(), 0),
        (grpo(kl_coef=0.1), 1),
        (grpo(num_iterations=2), 1),
        (grpo(num_iterations=3, kl_coef=0.1), 2),
        (rloo(), 1),
        (rloo(kl_coef=0.1), 2),
        (rloo(num_iterations=2), 1),
        (rloo(lora_rank=2, kl_coef=0.1), 2),
    ],
    ids=lambda value: value.algorithm if isinstance(value, Recipe) else str(value),
)
def test_what_is_read_without_training_is_counted(
    recipe: Recipe, passes: int, trainer: TrlTrainer, task: TinyTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = sampled_batches(monkeypatch)
    report, _ = run(trainer, task, recipe)
    prompts = sum(int(batch["prompt_mask"].sum()) for batch in batches)
    completions = sum(int(batch["completion_mask"].sum()) for batch in batches)
    used = [batches[step // recipe.num_iterations] for step in range(4)]
    cost = report.training_cost
    assert cost.generated_tokens == completions
    assert cost.scored_tokens == prompts + passes * (prompts + completions)
    assert report.supervised_tokens == sum(int(batch["completion_mask"].sum()) for batch in used)
    assert cost.trained_tokens == report.supervised_tokens + 4 * 8 * 4
    bound = trainer.step_cost_bound(task, recipe)
    lengths = 8 * (4 + 4)
    assert (bound.trained_tokens, bound.generated_tokens) == (lengths, 32)
    assert bound.scored_tokens == 8 * 4 + passes * lengths
    assert cost.flops <= bound.times(4).flops


def test_a_tools_tokens_are_trained_through_but_not_supervised(
    trainer: TrlTrainer, task: TinyTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = MeteredGRPOTrainer._generate
    marked = [0]

    def with_a_tool(self: Any, prompts: Any) -> Any:
        ids, completions, _, *rest = original(self, prompts)
        masks = [[1, 0, 0, 1][: len(completion)] for completion in completions]
        marked[0] += sum(mask.count(0) for mask in masks)
        return (ids, completions, masks, *rest)

    monkeypatch.setattr(MeteredGRPOTrainer, "_generate", with_a_tool)
    report, _ = run(trainer, task, grpo())
    cost = report.training_cost
    assert marked[0] > 0
    assert report.supervised_tokens == cost.generated_tokens - marked[0]
    assert cost.trained_tokens == cost.generated_tokens + 4 * 8 * 4
