"""`FlattenObservation`: the observation as one named row of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from ..inner_trainers.messages import did_you_mean


class FlattenObservation(
    gym.ObservationWrapper[np.ndarray, Any, dict[str, np.ndarray]], gym.utils.RecordConstructorArgs
):
    """Joins the entries of a Dict observation, in the order of their keys, into one float32 `Box` with their bounds.

    Gymnasium's own `FlattenObservation` flattens these observations to the same numbers. This one also says what each
    is (`feature_names`, such as ``budget[0]`` or ``history[2,7]``; `docs/environment.md` tells what stands there) and
    can keep some of the keys only.

    Args:
        env: an environment with a Dict observation of boxes.
        keys: the keys to keep; None for all.

    Attributes:
        feature_names: a name per number.

    Raises:
        ValueError: no Dict observation of boxes, or an unknown key.
    """

    def __init__(self, env: gym.Env[Any, Any], keys: Sequence[str] | None = None) -> None:
        gym.utils.RecordConstructorArgs.__init__(self, keys=None if keys is None else list(keys))
        gym.ObservationWrapper.__init__(self, env)
        below = env.observation_space
        if not isinstance(below, gym.spaces.Dict) or not all(
            isinstance(space, gym.spaces.Box) for space in below.spaces.values()
        ):
            raise ValueError(f"FlattenObservation: expected a Dict observation of boxes, got {below}.")
        for key in keys or ():
            if key not in below.spaces:
                raise ValueError(f"keys: the observation has no {key!r}.{did_you_mean(str(key), below.spaces)}")
        if keys is not None and not keys:
            raise ValueError("keys: expected at least one key, or None for all.")
        self._keys = [key for key in below.spaces if keys is None or key in keys]
        boxes: list[Any] = [below.spaces[key] for key in self._keys]
        self.feature_names = tuple(
            f"{key}[{','.join(map(str, index))}]"
            for key, box in zip(self._keys, boxes, strict=True)
            for index in np.ndindex(box.shape)
        )
        low, high = (np.concatenate([getattr(box, side).ravel() for box in boxes]) for side in ("low", "high"))
        self.observation_space = gym.spaces.Box(low.astype(np.float32), high.astype(np.float32), dtype=np.float32)

    def observation(self, observation: dict[str, np.ndarray]) -> np.ndarray:
        """Return ``(len(feature_names),)`` float32."""
        return np.concatenate([np.asarray(observation[key], np.float32).ravel() for key in self._keys])
