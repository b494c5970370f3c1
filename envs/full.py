"""`FullEnv`: an action chooses a recipe while no round runs, and adjusts the round while one does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from ..inner_trainers.recipe import STARTS
from ..inner_trainers.tasks import InnerTask, TaskFamily
from .adjustable import AdjustableEnv, adjustment_space, one_legal


class FullEnv(AdjustableEnv):
    """Search over recipes whose rounds are adjusted while they run: both halves of the decision in one episode.

    The action space is that of `PostTrain/Recipe-v0` with ``adjustment``, an index into the catalogue of 37, beside it.
    While no round runs (``phase`` 0) the recipe is read: the step begins its round and takes the first ``interval``
    optimiser steps; algorithm 0 ends the search. While one runs (``phase`` 1) ``adjustment`` is read, applied, and the
    next ``interval`` steps are taken. The half that is not read is ignored; its mask has exactly one legal choice.

    A round that has ended is settled in the same step, with the reward of `PostTrain/Recipe-v0`; other steps get 0,
    unless rewards are shaped (see `AdjustableEnv`). Terminated: as `PostTrain/Recipe-v0`, never while a round runs.

    Args:
        task: a built-in family's name, ``module:Class``, an `InnerTask` or a `TaskFamily`.
        **settings: the arguments of `AdjustableEnv`. Equal rounds are not answered from memory, as what is decided
            while they run is not known when they begin.
    """

    def __init__(self, task: str | InnerTask | TaskFamily = "letters", **settings: Any) -> None:
        super().__init__(task, **settings)
        spaces = {**self.space.action_space().spaces, "adjustment": adjustment_space()}
        self.action_space = gym.spaces.Dict(dict(sorted(spaces.items())))

    def step(self, action: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        """Begin a round, or adjust the one that runs, and take the next ``interval`` optimiser steps.

        Raises:
            ValueError: an action outside the space, an adjustment that is refused (with ``illegal="raise"``), or the
                episode is over; nothing is trained or charged.
        """
        search = self.search
        reason = search.closed() if self._running is None else None
        if reason is not None:
            raise ValueError(f"step: the episode is over ({reason}); call reset().")
        self._check_action(action)
        if self._running is not None:
            shaped = self._adjust(action["adjustment"], "action['adjustment']")
        else:
            recipe = self.space.decode(action)
            if recipe is None:
                search.stopped = True
                self._refused, self._applied = False, None
                return self._observation(), 0.0, True, False, self._info(None)
            shaped = self._begin(search.fitted(recipe))
        outcome, reward = self._finished()
        over = outcome is not None and search.closed() is not None
        return self._observation(), reward + shaped, over, False, self._info(outcome)

    def choice_masks(self) -> dict[str, np.ndarray]:
        """Return the legal choices of ``adjustment``, ``algorithm`` and ``start``; one each in the half not in use."""
        masks = {"adjustment": self.adjustment_mask(), **super().choice_masks()}
        if self._running is not None:
            masks["algorithm"] = one_legal(1 + len(self.space.algorithms))
            masks["start"] = one_legal(len(STARTS))
        return masks

    def knob_mask(self, name: str, values: Sequence[float]) -> np.ndarray:
        """Return ``(len(values),)`` bool as `PostTrainingEnv.knob_mask`; the first alone while a round runs."""
        if self._running is not None:
            return one_legal(len(values))
        return super().knob_mask(name, values)

    def encode_adjustment(self, index: int) -> dict[str, Any]:
        """Return the action that applies an entry of the catalogue to the running round."""
        return {**self.space.encode(None), "adjustment": index}

    def encode_recipe(self, recipe: Any) -> dict[str, Any]:
        """Return the action of a recipe (None is ``stop``)."""
        return {**super().encode_recipe(recipe), "adjustment": 0}
