"""Registers the environment ids with Gymnasium."""

from __future__ import annotations

import gymnasium as gym

RECIPE_ID = "PostTrain/Recipe-v0"


def register() -> None:
    """Register every id of this package once."""
    if RECIPE_ID not in gym.registry:
        gym.register(id=RECIPE_ID, entry_point="posttrain_gym.envs.post_training:PostTrainingEnv")
