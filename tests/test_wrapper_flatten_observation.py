"""The flat observation holds the same numbers as Gymnasium's, with names and the bounds of each."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import FlattenObservation as GymnasiumFlattenObservation
from stable_baselines3.common.env_checker import check_env as check_env_sb3

from posttrain_gym.inner_trainers.testing import ScriptedFamily
from posttrain_gym.wrappers import FlattenAction, FlattenObservation, MaskedObservation

from .scripted_env import make, recipe_action


@pytest.mark.parametrize("name", ["PostTrain/Recipe-v0", "PostTrain/Full-v0"])
def test_it_gives_the_numbers_of_gymnasiums_own(name: str) -> None:
    made = [gym.make(name, task=ScriptedFamily()) for _ in range(2)]
    ours, theirs = FlattenObservation(made[0]), GymnasiumFlattenObservation(made[1])
    assert np.array_equal(ours.reset(seed=1)[0], theirs.reset(seed=1)[0])
    space: Any = ours.observation_space
    reference: Any = theirs.observation_space
    assert np.array_equal(space.low, reference.low) and np.array_equal(space.high, reference.high)
    assert space.dtype == np.float32 == ours.reset(seed=1)[0].dtype
    action = ours.unwrapped.encode_recipe(ours.unwrapped.space.recipe("sft"))  # type: ignore[attr-defined]
    assert np.array_equal(ours.step(action)[0], theirs.step(action)[0])


def test_each_number_has_its_name() -> None:
    env = FlattenObservation(make())
    env.reset(seed=0)
    flat, *_ = env.step(recipe_action(make(), steps=10))
    nested = env.unwrapped._observation()  # type: ignore[attr-defined]
    assert len(env.feature_names) == len(set(env.feature_names)) == len(flat)
    for name, value in zip(env.feature_names, flat, strict=True):
        key, _, index = name.rstrip("]").partition("[")
        assert nested[key][tuple(map(int, index.split(",")))] == value
    assert "history[3,0]" in env.feature_names


def test_some_keys_alone() -> None:
    env = FlattenObservation(MaskedObservation(make()), keys=["budget", "action_mask"])
    flat, _ = env.reset(seed=0)
    assert env.feature_names == (*[f"action_mask[{i}]" for i in range(6)], "budget[0]", "budget[1]", "budget[2]")
    assert flat.tolist()[:6] == [1.0] * 6
    with pytest.raises(ValueError, match=r"the observation has no 'budgets'. Did you mean 'budget'"):
        FlattenObservation(make(), keys=["budgets"])
    with pytest.raises(ValueError, match="at least one key"):
        FlattenObservation(make(), keys=[])
    with pytest.raises(ValueError, match="expected a Dict observation of boxes"):
        FlattenObservation(gym.make("CartPole-v1"))


def test_contract_and_spec() -> None:
    env = FlattenObservation(FlattenAction(gym.make("PostTrain/Recipe-v0", task=ScriptedFamily())), keys=["scores"])
    check_env(env, skip_render_check=True)
    check_env_sb3(env)
    assert env.spec is not None
    again = gym.make(env.spec)
    assert again.observation_space == env.observation_space
    assert np.array_equal(env.get_wrapper_attr("action_masks")(), again.get_wrapper_attr("action_masks")())
