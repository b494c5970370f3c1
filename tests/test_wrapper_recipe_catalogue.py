"""A choice of the catalogue is its recipe; what cannot be played now is masked."""

from __future__ import annotations

import json
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common.env_checker import check_env as check_env_sb3

from posttrain_gym.inner_trainers.testing import ScriptedFamily
from posttrain_gym.wrappers import FlattenAction, RecipeCatalogue

from .scripted_env import AMPLE, make


def catalogue(recipes: Any = None, **settings: Any) -> Any:
    return RecipeCatalogue(make(**{"budget": AMPLE, **settings}), recipes)


def test_every_entry_plays_its_recipe() -> None:
    env = catalogue()
    env.reset(seed=0)
    assert len(env.names) == len(env.recipes) == 12  # two algorithms, two starts, three rates
    assert env.names[0] == "grpo from best at a low rate"
    for choice, recipe in enumerate(env.recipes.values(), start=1):
        info = env.step(choice)[4]
        assert info["round"]["recipe"] == recipe.to_dict()
        assert env.encode_recipe(recipe) == choice
        assert info["round"]["failure"] is None
    assert env.action_space.n == 13
    assert env.step(0)[2]  # `stop`


def test_own_recipes_by_name_survive_the_spec_as_json() -> None:
    base = gym.make("PostTrain/Recipe-v0", task="posttrain_gym.inner_trainers.testing:ScriptedFamily")
    space = base.unwrapped.space  # type: ignore[attr-defined]
    env: Any = RecipeCatalogue(base, {"a": space.recipe("sft", steps=11), "b": space.recipe("grpo").to_dict()})
    assert env.names == ("a", "b")
    recorded = json.loads(json.dumps(env._saved_kwargs))
    again = RecipeCatalogue(base, **recorded)
    assert again.recipes == env.recipes
    rebuilt: Any = gym.make(env.spec)
    assert rebuilt.recipes == env.recipes
    listed = RecipeCatalogue(base, [space.recipe("sft")])
    assert listed.names == ("recipe 1",)


def test_masks_follow_the_budget() -> None:
    env = catalogue(budget={"limit": 3_000, "max_rounds": 30, "patience": 30})
    env.reset(seed=0)
    assert env.action_masks().all()
    over = False
    illegal = 0
    while not over:
        mask = env.action_masks()
        assert mask[0]
        choices = np.flatnonzero(mask[1:]) + 1
        if not len(choices):
            break
        _, _, over, _, info = env.step(int(choices[0]))
        failure = info["round"]["failure"]
        illegal += failure is not None and failure["kind"] in ("refused", "unaffordable", "no_data")
    assert illegal == 0
    assert env.action_masks().tolist() == [True] + [False] * 12


@pytest.mark.parametrize(
    ("recipes", "message"),
    [
        ([], "expected at least one recipe"),
        ("sft", "expected recipes by name or in a list, got str"),
        ([3], "'recipe 1': expected a Recipe or a mapping"),
        ([{"algorithm": "sft"}], "'recipe 1': recipe: key 'mix' is missing"),
        ([{"algorithm": "sfd", "mix": {"left": 1.0}}], "'sfd' is not in the decision space. Did you mean 'sft'"),
        ([{"algorithm": "sft", "mix": {"left": 1.0}, "steps": 1000}], "'recipe 1' is not in the decision space: steps"),
    ],
)
def test_bad_catalogues_are_refused(recipes: Any, message: str) -> None:
    with pytest.raises(ValueError, match="recipes: ") as caught:
        catalogue(recipes)
    assert message in str(caught.value)


def test_equal_recipes_and_strangers_are_refused() -> None:
    env = catalogue()
    recipe = env.unwrapped.space.recipe("sft", steps=11)
    with pytest.raises(ValueError, match="'b' and 'a' are equal"):
        catalogue({"a": recipe, "b": recipe})
    with pytest.raises(ValueError, match="it is not among the 12 of the catalogue"):
        env.encode_recipe(recipe)
    env.reset(seed=0)
    for action in (13, -1, 1.5, True):
        with pytest.raises(ValueError, match="action: expected an integer"):
            env.step(action)


def test_a_task_whose_constraints_leave_an_entry_out_masks_it() -> None:
    from dataclasses import replace

    base = make(budget=AMPLE)
    env: Any = RecipeCatalogue(
        base, {"short": base.space.recipe("sft", steps=11), "long": base.space.recipe("sft", steps=40)}
    )
    base.space = replace(base.space, constraints=("steps <= 12",))
    env.reset(seed=0)
    assert env.action_masks().tolist() == [True, True, False]
    assert env.step(2)[4]["round"]["recipe"]["steps"] == 12  # played all the same: the nearest that is allowed


def test_contract() -> None:
    env = RecipeCatalogue(gym.make("PostTrain/Recipe-v0", task=ScriptedFamily()))
    check_env(env, skip_render_check=True)
    check_env_sb3(env)
    with pytest.raises(ValueError, match="FullEnv also takes adjustments"):
        RecipeCatalogue(gym.make("PostTrain/Full-v0", task=ScriptedFamily()))
    assert FlattenAction(gym.make("PostTrain/Recipe-v0", task=ScriptedFamily()))  # for comparison: it fits there
