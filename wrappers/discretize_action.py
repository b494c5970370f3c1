"""`DiscretizeAction`: the whole action as a `MultiDiscrete` with masks, for MaskablePPO."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from ..envs.decision_space import Parameter
from ..inner_trainers.messages import require_integer
from ..inner_trainers.recipe import STARTS, Recipe
from .checks import adjustment_choices, base_env, chooses_recipe


class DiscretizeAction(
    gym.ActionWrapper[dict[str, np.ndarray], np.ndarray, dict[str, Any]], gym.utils.RecordConstructorArgs
):
    """Maps a `MultiDiscrete` to an action.

    The heads are, in order: the algorithm choice (0 is ``stop``), the start, a level per source and a bin per
    parameter. Levels are relative weights: level ``i`` of ``mix_levels`` weighs ``i``, and all levels 0 mean equal
    shares. Bins are spread evenly over a knob's scale; a knob with choices has a bin per choice.

    A bin is masked while the budget pays no step with its value (a batch too large for what is left); one bin of each
    knob always stays legal. Where bins are too dear together, `PostTrainingEnv.step` takes the largest batch that can
    be paid.

    In `PostTrain/Full-v0` a last head chooses the adjustment; while a round runs every other head has one legal
    choice, its first. `PostTrain/InLoop-v0` needs no such wrapper: its action is a `Discrete` with masks already.

    `reset` with a seed seeds this action space too.

    Args:
        env: the environment, wrapped or not.
        bins: bins of each continuous knob, in [2, 1000].
        mix_levels: levels per source, in [2, 100].

    Raises:
        ValueError: a number outside its range, or an environment whose action is discrete already.
    """

    def __init__(self, env: gym.Env[dict[str, np.ndarray], dict[str, Any]], bins: int = 5, mix_levels: int = 3) -> None:
        require_integer("bins", bins, low=2, high=1000)
        require_integer("mix_levels", mix_levels, low=2, high=100)
        gym.utils.RecordConstructorArgs.__init__(self, bins=bins, mix_levels=mix_levels)
        gym.ActionWrapper.__init__(self, env)
        base = base_env(env)
        if not chooses_recipe(base):
            raise ValueError(
                f"DiscretizeAction: the action of {type(base).__name__} is a Discrete already; leave the wrapper out."
            )
        self._space, self._adjustments = base.space, adjustment_choices(base)
        self._levels = mix_levels
        self._bins = [len(p.choices) if p.choices else bins for p in self._space.parameters.values()]
        heads = [1 + len(self._space.algorithms), len(STARTS), *[mix_levels] * len(self._space.sources), *self._bins]
        if self._adjustments:
            heads.append(self._adjustments)
        self._heads = np.array(heads, np.int64)
        self.action_space = gym.spaces.MultiDiscrete(self._heads)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Start a search; see `PostTrainingEnv.reset`."""
        if seed is not None:
            self.action_space.seed(seed)
        return super().reset(seed=seed, options=options)

    def action(self, action: np.ndarray) -> dict[str, Any]:
        """Return the recipe action.

        Raises:
            ValueError: the wrong shape, a number that is no integer, or a choice outside its head.
        """
        try:
            values = np.asarray(action)
        except ValueError:  # rows of unequal length
            raise ValueError(f"action: expected {len(self._heads)} integers, got {action!r}.") from None
        if values.shape != self._heads.shape or values.dtype.kind not in "iu":
            raise ValueError(f"action: expected {len(self._heads)} integers, got shape {values.shape}, {values.dtype}.")
        if (values < 0).any() or (values >= self._heads).any():
            raise ValueError(f"action: expected choices below {self._heads.tolist()}, got {values.tolist()}.")
        sources, bins = len(self._space.sources), len(self._bins)
        levels = values[2 : 2 + sources].astype(np.float64)
        mix, parameters = self._coordinates(int(values[0]), levels, values[2 + sources : 2 + sources + bins])
        adjustment = {"adjustment": int(values[-1])} if self._adjustments else {}
        return {
            **adjustment,
            "algorithm": int(values[0]),
            "mix": mix,
            "parameters": parameters,
            "start": int(values[1]),
        }

    def _coordinates(self, choice: int, levels: np.ndarray, bins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        usable = np.ones(len(levels), bool)
        if choice > 0:
            names = self._space.usable[self._space.algorithms[choice - 1]]
            usable = np.array([name in names for name in self._space.sources]) | (not names)
        levels = np.where(usable, levels, 0.0)
        if levels.sum() == 0:
            levels = usable.astype(np.float64)
        mix = 2.0 * levels / levels.sum() - 1.0
        parameters = [
            coordinate_of(p, int(b), n)
            for b, n, p in zip(bins, self._bins, self._space.parameters.values(), strict=True)
        ]
        return mix.astype(np.float32), np.array(parameters, np.float32)

    def action_masks(self) -> np.ndarray:
        """Return ``(sum of heads,)`` bool in sb3-contrib's order; levels are legal whenever a recipe is asked for."""
        base = base_env(self.env)
        bins = [
            base.knob_mask(name, [p.decode(coordinate_of(p, b, n)) for b in range(n)])
            for n, (name, p) in zip(self._bins, self._space.parameters.items(), strict=True)
        ]
        masks = base.choice_masks()
        level = np.full(self._levels, True) if base.asks_for_recipe else np.arange(self._levels) < 1
        adjustment = [masks["adjustment"]] if self._adjustments else []
        parts = [masks["algorithm"], masks["start"], *[level] * len(self._space.sources), *bins, *adjustment]
        return np.concatenate(parts)

    def encode_recipe(self, recipe: Recipe | None) -> np.ndarray:
        """Return the nearest action of a recipe (None is ``stop``): mix and continuous knobs go to the grid."""
        action = base_env(self.env).encode_recipe(recipe)
        weights = (action["mix"] + 1.0) / 2.0
        top = max(float(weights.max()), 1e-9)
        levels = np.rint(weights / top * (self._levels - 1)).astype(np.int64)
        bins = [
            min(int((c + 1) / 2 * n), n - 1) if p.choices else round(float(c + 1) / 2 * (n - 1))
            for c, n, p in zip(action["parameters"], self._bins, self._space.parameters.values(), strict=True)
        ]
        adjustment = [action["adjustment"]] if self._adjustments else []
        return np.array([action["algorithm"], action["start"], *levels, *bins, *adjustment], np.int64)


def coordinate_of(parameter: Parameter, index: int, bins: int) -> float:
    """Return the middle of a choice's bin, or a point of an even grid that reaches both ends."""
    return (2 * index + 1) / bins - 1.0 if parameter.choices else 2 * index / (bins - 1) - 1.0
