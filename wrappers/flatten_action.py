"""`FlattenAction`: the whole action as one `Box(-1, 1)`, for PPO, A2C, SAC, TD3 and RecurrentPPO."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from ..envs.decision_space import STOP
from ..inner_trainers.adjustments import STOP_ROUND
from ..inner_trainers.messages import require_number
from ..inner_trainers.recipe import STARTS, Recipe
from .checks import adjustment_choices, base_env, chooses_recipe, require_finite_box


class FlattenAction(gym.ActionWrapper[dict[str, np.ndarray], np.ndarray, Any], gym.utils.RecordConstructorArgs):
    """Maps ``(d,)`` float32 in [-1, 1] to an action.

    The coordinates are, in order: one preference per algorithm choice (``stop`` first), one per start, one per source
    of the mix, one per parameter (log-scaled where the space says so). The largest preference among the *legal*
    choices wins, so no action of this space is ever illegal; a batch too dear for what is left becomes the largest that
    can be paid, see `PostTrainingEnv.step`. ``stop`` wins only when its preference exceeds that of
    every other legal choice by ``stop_reluctance`` or more: with reluctance 0 an untrained policy would end a third of
    its episodes at each step.

    In `PostTrain/Full-v0` one preference per adjustment follows; in `PostTrain/InLoop-v0` there are these alone. The
    largest among the legal ones wins; the adjustment ``stop``, which ends the round, is held back like the other.

    `reset` with a seed seeds this action space too.

    Args:
        env: the recipe environment, wrapped or not.
        stop_reluctance: taken from the preference for ``stop``, in [0, 2].
    """

    def __init__(self, env: gym.Env[dict[str, np.ndarray], dict[str, Any]], stop_reluctance: float = 1.0) -> None:
        self._reluctance = require_number("stop_reluctance", stop_reluctance, low=0, high=2)
        gym.utils.RecordConstructorArgs.__init__(self, stop_reluctance=stop_reluctance)
        gym.ActionWrapper.__init__(self, env)
        base = base_env(env)
        self._space, self._chooses_recipe, self._adjustments = (
            base.space,
            chooses_recipe(base),
            adjustment_choices(base),
        )
        self._sizes: tuple[int, ...] = ()
        if self._chooses_recipe:
            self._sizes = (
                1 + len(self._space.algorithms),
                len(STARTS),
                len(self._space.sources),
                len(self._space.parameters),
            )
        self.action_space = gym.spaces.Box(-1.0, 1.0, (sum(self._sizes) + self._adjustments,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Start a search; see `PostTrainingEnv.reset`."""
        if seed is not None:
            self.action_space.seed(seed)
        return super().reset(seed=seed, options=options)

    def action(self, action: np.ndarray) -> Any:
        """Return the environment's action.

        Raises:
            ValueError: the wrong shape, or values that are not finite or outside [-1, 1].
        """
        values = require_finite_box(action, (sum(self._sizes) + self._adjustments,))
        masks = base_env(self.env).choice_masks()
        chosen: dict[str, Any] = {}
        if self._adjustments:
            preferences = values[sum(self._sizes) :]
            chosen["adjustment"] = self._preferred(preferences, masks["adjustment"], STOP_ROUND)
            if not self._chooses_recipe:
                return chosen["adjustment"]
        algorithms, starts, mix, parameters = np.split(values[: sum(self._sizes)], np.cumsum(self._sizes)[:-1])
        return {
            **chosen,
            "algorithm": self._preferred(algorithms, masks["algorithm"], STOP),
            "mix": mix.astype(np.float32),
            "parameters": parameters.astype(np.float32),
            "start": int(np.argmax(starts)),
        }

    def _preferred(self, preferences: np.ndarray, legal: np.ndarray, stop: int) -> int:
        """Return the legal choice of the largest preference, ``stop`` being held back."""
        preferences = preferences.copy()
        preferences[stop] -= self._reluctance
        preferences[~legal] = -np.inf
        return int(np.argmax(preferences))

    def encode_recipe(self, recipe: Recipe | None) -> np.ndarray:
        """Return the action of a recipe (None is ``stop``): preference 1 for its choices, -1 for the others."""
        action = base_env(self.env).encode_recipe(recipe)
        flat = -np.ones(sum(self._sizes) + self._adjustments, np.float32)
        flat[action["algorithm"]] = 1.0
        flat[self._sizes[0] + action["start"]] = 1.0
        offset = self._sizes[0] + self._sizes[1]
        flat[offset : offset + self._sizes[2]] = action["mix"]
        flat[offset + self._sizes[2] : sum(self._sizes)] = action["parameters"]
        if self._adjustments:
            flat[sum(self._sizes) + action["adjustment"]] = 1.0
        return flat
