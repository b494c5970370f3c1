"""The mask in the observation is the mask of the layer below, at every step."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common.env_checker import check_env as check_env_sb3

from posttrain_gym.inner_trainers.testing import ScriptedFamily
from posttrain_gym.wrappers import DiscretizeAction, FlattenObservation, MaskedObservation

from .scripted_env import make, recipe_action


def masked(**settings: Any) -> Any:
    return MaskedObservation(DiscretizeAction(make(**settings), 3))


def test_it_shows_the_mask_of_the_action_wrapper_as_the_budget_goes() -> None:
    env = masked(budget={"limit": 3_000, "max_rounds": 20, "patience": 20})
    observation, _ = env.reset(seed=0)
    masks = []
    over = False
    while not over:
        mask = env.get_wrapper_attr("action_masks")()
        assert np.array_equal(observation["action_mask"], mask.astype(np.float32))
        assert observation["action_mask"].dtype == np.float32
        assert env.observation_space.contains(observation)
        masks.append(mask)
        action = env.get_wrapper_attr("encode_recipe")(env.unwrapped.space.recipe("sft", steps=10))
        observation, _, over, _, _ = env.step(action)
    assert observation["action_mask"][:3].tolist() == [1.0, 0.0, 0.0]  # `stop` alone is left
    assert not all(np.array_equal(mask, masks[0]) for mask in [*masks, observation["action_mask"].astype(bool)])


def test_nothing_else_changes() -> None:
    env, plain = MaskedObservation(make()), make()
    for made in (env, plain):
        made.reset(seed=4)
    action = recipe_action(plain, steps=10)
    ours, theirs = env.step(action), plain.step(action)
    assert ours[1:4] == theirs[1:4]
    assert ours[4].keys() == theirs[4].keys()
    assert all(np.array_equal(ours[0][key], theirs[0][key]) for key in theirs[0])


def test_contract_and_spec() -> None:
    env = MaskedObservation(DiscretizeAction(gym.make("PostTrain/Recipe-v0", task=ScriptedFamily()), 4))
    check_env(env, skip_render_check=True)
    check_env_sb3(env)
    assert env.spec is not None
    again = gym.make(env.spec)
    assert again.observation_space == env.observation_space


def test_where_it_does_not_fit_it_is_refused() -> None:
    with pytest.raises(ValueError, match="has 'action_mask' already"):
        MaskedObservation(masked())
    with pytest.raises(ValueError, match="put it below what flattens"):
        MaskedObservation(FlattenObservation(make()))
    with pytest.raises(ValueError, match="expected a Dict observation"):
        MaskedObservation(gym.make("CartPole-v1"))
