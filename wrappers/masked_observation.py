"""`MaskedObservation`: the mask of legal actions as part of the observation, for algorithms that take none."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

KEY = "action_mask"


class MaskedObservation(gym.Wrapper[dict[str, np.ndarray], Any, Any, Any], gym.utils.RecordConstructorArgs):
    """Adds ``action_mask`` to a Dict observation: 1 for each legal choice of the layer below, 0 for the others.

    It is a float32 `Box` in [0, 1], which SB3's networks, normalisers and replay buffers take like any other entry. Put
    it above the action wrapper, whose mask it then shows. What is illegal can still be played; the environment says
    what becomes of it. `action_masks` stays reachable.

    Args:
        env: an environment with a Dict observation and `action_masks`.

    Raises:
        ValueError: no Dict observation, one that has the key already, or no mask.
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        gym.utils.RecordConstructorArgs.__init__(self)
        gym.Wrapper.__init__(self, env)
        below = env.observation_space
        if not isinstance(below, gym.spaces.Dict):
            raise ValueError(
                f"MaskedObservation: expected a Dict observation, got {below}; put it below what flattens."
            )
        if KEY in below.spaces:
            raise ValueError(f"MaskedObservation: the observation has {KEY!r} already.")
        if not env.has_wrapper_attr("action_masks"):
            raise ValueError("MaskedObservation: the environment has no action_masks.")
        width = len(self.action_masks())
        self.observation_space: Any = gym.spaces.Dict(
            {**below.spaces, KEY: gym.spaces.Box(0.0, 1.0, (width,), np.float32)}
        )

    def action_masks(self) -> np.ndarray:
        """Return the mask of the layer below, bool."""
        return np.asarray(self.env.get_wrapper_attr("action_masks")(), dtype=bool)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Start a search; see `PostTrainingEnv.reset`."""
        observation, info = self.env.reset(seed=seed, options=options)
        return self._masked(observation), info

    def step(self, action: Any) -> tuple[dict[str, np.ndarray], Any, bool, bool, dict[str, Any]]:
        """Take one step; see the environment."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._masked(observation), reward, terminated, truncated, info

    def _masked(self, observation: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {**observation, KEY: self.action_masks().astype(np.float32)}
