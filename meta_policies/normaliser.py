"""Running means of observations and rewards as plain data, so that a saved policy sees what it was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


class Normaliser:
    """Scales observations as SB3's `VecNormalize` did when the policy was saved.

    Args:
        statistics: key of the observation (``""`` for an observation without keys) -> ``mean``, ``var`` and ``count``;
            keys without are passed on as they are.
        clip: bound of what is scaled.
        epsilon: added to variances.
        reward: ``mean``, ``var`` and ``count`` of discounted returns; kept so that training can go on.
    """

    def __init__(
        self,
        statistics: Mapping[str, Mapping[str, Any]],
        clip: float = 10.0,
        epsilon: float = 1e-8,
        reward: Mapping[str, Any] | None = None,
    ) -> None:
        self.statistics = {key: _arrays(entry) for key, entry in statistics.items()}
        self.clip, self.epsilon = float(clip), float(epsilon)
        self.reward = None if reward is None else dict(reward)

    @classmethod
    def of(cls, vector: Any) -> Normaliser:
        """Return the statistics of a `VecNormalize` as they are now."""
        statistics: dict[str, Any] = {}
        if vector.norm_obs:
            means = vector.obs_rms if isinstance(vector.obs_rms, dict) else {"": vector.obs_rms}
            statistics = {key: _plain(running) for key, running in means.items()}
        reward = _plain(vector.ret_rms) if vector.norm_reward else None
        return cls(statistics, vector.clip_obs, vector.epsilon, reward)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            "statistics": {
                key: {name: np.asarray(value).tolist() for name, value in entry.items()}
                for key, entry in self.statistics.items()
            },
            "clip": self.clip,
            "epsilon": self.epsilon,
            "reward": self.reward,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Normaliser:
        """Read `to_dict` back."""
        return cls(data["statistics"], data["clip"], data["epsilon"], data["reward"])

    def __call__(self, observation: Any) -> Any:
        """Return an observation, or a batch of them, scaled and clipped to float32."""
        if isinstance(observation, Mapping):
            return {key: self._scaled(key, value) for key, value in observation.items()}
        return self._scaled("", observation)

    def _scaled(self, key: str, value: Any) -> Any:
        if key not in self.statistics:
            return value
        entry = self.statistics[key]
        scaled = (np.asarray(value) - entry["mean"]) / np.sqrt(entry["var"] + self.epsilon)
        return np.clip(scaled, -self.clip, self.clip).astype(np.float32)


def _plain(running: Any) -> dict[str, Any]:
    return {"mean": running.mean.tolist(), "var": running.var.tolist(), "count": float(running.count)}


def _arrays(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {"mean": np.asarray(entry["mean"]), "var": np.asarray(entry["var"]), "count": float(entry["count"])}
