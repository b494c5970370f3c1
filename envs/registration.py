"""Registers the environment ids with Gymnasium."""

from __future__ import annotations

import gymnasium as gym

RECIPE_ID = "PostTrain/Recipe-v0"
IN_LOOP_ID = "PostTrain/InLoop-v0"
FULL_ID = "PostTrain/Full-v0"

_ENTRY_POINTS = {
    RECIPE_ID: "posttrain_gym.envs.post_training:PostTrainingEnv",
    IN_LOOP_ID: "posttrain_gym.envs.in_loop:InLoopEnv",
    FULL_ID: "posttrain_gym.envs.full:FullEnv",
}


def register() -> None:
    """Register every id of this package once."""
    for name, entry_point in _ENTRY_POINTS.items():
        if name not in gym.registry:
            gym.register(id=name, entry_point=entry_point)
