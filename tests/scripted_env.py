"""Scripted environments and their actions, for the tests of the environment."""

from __future__ import annotations

from typing import Any

from posttrain_gym.envs.post_training import PostTrainingEnv
from posttrain_gym.inner_trainers.testing import ScriptedFamily

AMPLE = {"limit": 1e7, "max_rounds": 100, "patience": 100}


def make(**settings: Any) -> PostTrainingEnv:
    """Returns a scripted environment without Gymnasium's own wrappers."""
    return PostTrainingEnv(**{"task": ScriptedFamily(), **settings})


def recipe_action(env: PostTrainingEnv, algorithm: str = "sft", **settings: Any) -> dict[str, Any]:
    return env.encode_recipe(env.space.recipe(algorithm, **settings))
