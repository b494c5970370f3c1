"""On random spaces every action decodes to a legal recipe, encoding inverts it, and arrays agree with one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from posttrain_gym.envs.decision_space import DecisionSpace
from posttrain_gym.inner_trainers.recipe import STARTS, Recipe

from .random_spaces import random_space

SPACES = 60
ACTIONS = 170
"""10,200 random actions in all."""


def columns_of(space: DecisionSpace, seed: int, count: int = ACTIONS) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    sampler = space.action_space()
    sampler.seed(seed)
    actions = [dict(sampler.sample()) for _ in range(count)]
    return actions, {key: np.array([action[key] for action in actions]) for key in actions[0]}


def require_legal(space: DecisionSpace, recipe: Recipe) -> None:
    """Checks a recipe from outside: its fields, its mix, its start, its groups and every constraint."""
    assert Recipe.from_dict(recipe.to_dict()) == recipe  # passes every check of a recipe
    assert abs(sum(recipe.mix.values()) - 1) < 1e-9
    if space.problems[recipe.algorithm] is not None:
        return
    assert recipe.start in space.starts
    assert set(recipe.mix) <= set(space.usable[recipe.algorithm])
    for name, (low, high) in space.mix_bounds.items():
        if name in space.usable[recipe.algorithm]:
            assert low - 1e-9 <= recipe.mix.get(name, 0.0) <= high + 1e-9
    assert space.facts is not None
    if recipe.algorithm in space.facts.grouped:
        assert recipe.num_generations >= 2
        assert recipe.batch_size * recipe.gradient_accumulation % recipe.num_generations == 0
    for text in space.constraints:
        assert HOLDS[text](recipe, space), (text, recipe)


HOLDS: dict[str, Any] = {
    "if base_model_size < 3B then exclude ppo": lambda r, s: s.facts.base_model_size >= 3e9 or r.algorithm != "ppo",
    "if algorithm == dpo then learning_rate <= 2e-5": lambda r, s: r.algorithm != "dpo" or r.learning_rate <= 2e-5,
    "if lora_rank == 0 then learning_rate < 1e-4": lambda r, s: r.lora_rank != 0 or r.learning_rate < 1e-4,
    "batch_size * gradient_accumulation <= 96": lambda r, s: r.batch_size * r.gradient_accumulation <= 96,
    "batch_size * gradient_accumulation >= 20": lambda r, s: r.batch_size * r.gradient_accumulation >= 20,
    "if mix.math > 0.4 then kl_coef >= 0.05": lambda r, s: (
        r.mix.get("math", 0) <= 0.4 or r.kl_coef >= 0.05 or not uses(r, s, "kl_coef")
    ),
    "if algorithm == grpo then mix.web <= 0.2": lambda r, s: r.algorithm != "grpo" or r.mix.get("web", 0) <= 0.2,
    "if start == base then mix.math >= 0.3": lambda r, s: r.start != "base" or r.mix.get("math", 0) >= 0.3 - 1e-9,
    "if algorithm == sft then exclude latest": lambda r, s: r.algorithm != "sft" or r.start != "latest",
    "schedule != linear or packing == false": lambda r, s: (
        r.schedule != "linear" or not r.packing or not uses(r, s, "schedule", "packing")
    ),
    "steps >= warmup_steps * 2": lambda r, s: r.steps >= r.warmup_steps * 2,
    "if device == cpu then batch_size <= 64": lambda r, s: s.facts.device != "cpu" or r.batch_size <= 64,
    "if rows.web < 100 then exclude web": lambda r, s: s.facts.rows["web"] >= 100 or "web" not in r.mix,
    "temperature in [0.7, 1.0]": lambda r, s: r.temperature in (0.7, 1.0) or not uses(r, s, "temperature"),
    "kl_coef * temperature <= 0.3": lambda r, s: (
        r.kl_coef * r.temperature <= 0.3 or not uses(r, s, "kl_coef", "temperature")
    ),
    "if gradient_accumulation > 2 then exclude rft": lambda r, s: r.gradient_accumulation <= 2 or r.algorithm != "rft",
}


USES: dict[str, Any] = {
    "kl_coef": lambda r: r.algorithm in ("grpo", "ppo"),
    "packing": lambda r: r.algorithm == "sft",
    "schedule": lambda r: r.lora_rank > 0,
    "temperature": lambda r: r.algorithm not in ("sft", "dpo") and r.batch_size > 10,
}


def uses(recipe: Recipe, space: DecisionSpace, *names: str) -> bool:
    """Whether all of these knobs are used; a constraint asks nothing of one that is not."""
    return all(USES[name](recipe) for name in names if name in space.conditions)


@pytest.mark.parametrize("seed", range(SPACES))
def test_actions_of_random_spaces(seed: int) -> None:
    space = random_space(seed)
    actions, columns = columns_of(space, seed)
    batch = space.decode_batch(columns)
    encoded = space.encode_batch(batch)
    for row, action in enumerate(actions):
        recipe = space.decode(action)
        assert batch.recipe(space, row) == recipe
        single = space.encode(recipe)
        assert space.action_space().contains({**single, "algorithm": np.int64(single["algorithm"])})
        columned = {key: values[row] for key, values in encoded.items()}
        assert space.decode(columned) == recipe
        if "epochs" not in space.parameters:  # few rows make several epochs the same steps
            assert all(np.allclose(columned[key], value, atol=1e-6) for key, value in single.items())
        if recipe is not None:
            require_legal(space, recipe)
            assert space.decode(single) == recipe


@pytest.mark.parametrize("seed", range(SPACES))
def test_random_recipes_of_random_spaces_are_encoded_and_decoded(seed: int) -> None:
    space = random_space(seed)
    rng = np.random.default_rng(seed)
    legal = [name for name, problem in space.problems.items() if problem is None]
    for _ in range(ACTIONS):
        recipe = space.random_recipe(rng, legal)
        require_legal(space, recipe)
        assert space.decode(space.encode(recipe)) == recipe
        assert np.isfinite(space.to_vector(recipe)).all()
        assert np.abs(space.to_vector(recipe)).max() <= 1.0 + 1e-6


def test_masks_of_many_searches_are_those_of_each() -> None:
    for seed in range(SPACES):
        space = random_space(seed)
        payable = np.random.default_rng(seed).random((16, len(space.algorithms))) < 0.5
        many = space.mask_batch(payable)
        for row, pays in enumerate(payable):
            names = [name for name, pay in zip(space.algorithms, pays, strict=True) if pay]
            assert np.array_equal(many[row], space.action_mask(names))
        assert many[:, 0].all()  # `stop`
        assert many[:, -len(STARTS) :].any(axis=1).all()
