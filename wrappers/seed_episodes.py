"""`SeedEpisodes`: each episode has a seed of its own from one stream, whoever calls `reset`."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from ..inner_trainers.messages import require_integer


class SeedEpisodes(gym.Wrapper[Any, Any, Any, Any], gym.utils.RecordConstructorArgs):
    """Gives each `reset` without a seed the next one of a stream, so that episode ``k`` of a seed is always the same.

    The seed of episode ``k`` is drawn by NumPy's `SeedSequence` from ``(seed, k)``: streams of different seeds are
    independent, and what was played before does not move it. A `reset` with a seed of its own plays that one and starts
    the stream at episode 0 again, as learning algorithms seed their environments once, at the beginning.
    ``info["episode_seed"]`` has the seed of the running episode.

    Args:
        env: any environment.
        seed: of the stream, in [0, 2**63).

    Raises:
        ValueError: a seed outside its range.
    """

    def __init__(self, env: gym.Env[Any, Any], seed: int) -> None:
        self._seed = require_integer("seed", seed, low=0, high=2**63 - 1)
        gym.utils.RecordConstructorArgs.__init__(self, seed=self._seed)
        gym.Wrapper.__init__(self, env)
        self._episode = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode with the next seed of the stream, or with the one given."""
        if seed is None:
            used = int(np.random.SeedSequence([self._seed, self._episode]).generate_state(1)[0])
            self._episode += 1
        else:
            used, self._episode = seed, 0
        observation, info = self.env.reset(seed=used, options=options)
        info["episode_seed"] = used
        return observation, info
