"""What every action wrapper checks of its input."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from ..envs.post_training import PostTrainingEnv


def base_env(env: gym.Env[Any, Any]) -> PostTrainingEnv:
    """Return the recipe environment below the wrappers.

    Raises:
        ValueError: another environment.
    """
    base = env.unwrapped
    if not isinstance(base, PostTrainingEnv):
        raise ValueError(f"this wrapper needs a PostTrain environment, got {type(base).__name__}.")
    return base


def adjustment_choices(base: PostTrainingEnv) -> int:
    """Return the number of adjustments that an action chooses from; 0 where rounds cannot be adjusted."""
    if not base.in_loop:
        return 0
    space: Any = base.action_space
    return int((space.spaces["adjustment"] if chooses_recipe(base) else space).n)


def chooses_recipe(base: PostTrainingEnv) -> bool:
    """Return whether an action names a recipe; where it is one adjustment alone, it does not."""
    return isinstance(base.action_space, gym.spaces.Dict)


def require_finite_box(action: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return the action as float64.

    Raises:
        ValueError: no numbers, the wrong shape, or values that are not finite or outside [-1, 1].
    """
    try:
        values = np.asarray(action, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"action: expected {shape[0]} numbers, got {action!r}.") from None
    if values.shape != shape:
        raise ValueError(f"action: expected shape {shape}, got {values.shape}.")
    if not (np.abs(values) <= 1.0 + 1e-6).all():  # NaN is not
        raise ValueError(f"action: expected finite values in [-1, 1], got {values.tolist()}.")
    return np.clip(values, -1.0, 1.0)
