"""Fixed heuristics with SB3's `predict`: the baselines every learned policy must beat.

A heuristic sees the observation only; it acts in whatever action space the environment's wrappers show, through the
environment's `encode_recipe`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from ..envs.decision_space import DecisionSpace
from ..envs.post_training import PostTrainingEnv
from ..inner_trainers.recipe import Recipe


@dataclass(frozen=True)
class View:
    """What heuristics read from one observation.

    Attributes:
        rounds: rounds done in this episode.
        last_recipe: ``DecisionSpace.to_vector`` of the last round's recipe; zeros before the first.
        last_algorithm: algorithm of the last round; None before the first.
        last_gain: score of the last round's checkpoint minus the best before it, in [-1, 1].
        last_failed: whether the last round failed.
        legal: algorithms that are legal now; all of them when no mask was given.
    """

    rounds: int
    last_recipe: np.ndarray
    last_algorithm: str | None
    last_gain: float
    last_failed: bool
    legal: tuple[str, ...]


class RecipePolicy(ABC):
    """A policy that chooses a recipe (or None to stop) from a `View`.

    Args:
        env: the environment it will act in; only its spaces and `encode_recipe` are used.
        seed: seed of its own random numbers.
    """

    def __init__(self, env: gym.Env[Any, Any], seed: int = 0) -> None:
        base = env.unwrapped
        if not isinstance(base, PostTrainingEnv):
            raise ValueError(f"policy: expected a PostTrain environment, got {type(base).__name__}.")
        self._env = base
        self._max_rounds = base.budget.max_rounds
        self._encode: Callable[[Recipe | None], Any] = env.get_wrapper_attr("encode_recipe")
        self.rng = np.random.default_rng(seed)

    @property
    def space(self) -> DecisionSpace:
        """What may be tried on the task of the running episode."""
        return self._env.space

    @abstractmethod
    def choose(self, view: View) -> Recipe | None:
        """Return the next recipe, or None to stop."""

    def predict(
        self,
        observation: Mapping[str, np.ndarray],
        state: tuple[np.ndarray, ...] | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
        action_masks: np.ndarray | None = None,
    ) -> tuple[Any, tuple[np.ndarray, ...] | None]:
        """Return ``(action, state)``; a batch of observations gives an array of actions.

        Args:
            observation: one observation, or a batch with a leading axis.
            state: passed through; heuristics keep none.
            episode_start: unused.
            deterministic: unused.
            action_masks: the environment's mask, or one per observation of the batch.
        """
        batched = np.asarray(observation["budget"]).ndim == 2
        if not batched:
            return self._encode(self.choose(self._view(observation, action_masks))), state
        actions = []
        for index in range(len(observation["budget"])):
            single = {name: values[index] for name, values in observation.items()}
            mask = None if action_masks is None else np.asarray(action_masks)[index]
            actions.append(self._encode(self.choose(self._view(single, mask))))
        return np.stack(actions), state

    def _view(self, observation: Mapping[str, np.ndarray], mask: np.ndarray | None) -> View:
        algorithms = self.space.algorithms
        last = observation["last"]
        one_hot = last[: len(algorithms)]
        width = self.space.width
        legal = algorithms
        if mask is not None:
            legal = tuple(name for name, on in zip(algorithms, mask[1 : 1 + len(algorithms)], strict=True) if on)
        return View(
            rounds=round((1.0 - float(observation["budget"][1])) * self._max_rounds),
            last_recipe=last[:width],
            last_algorithm=algorithms[int(np.argmax(one_hot))] if one_hot.any() else None,
            last_gain=float(last[width]),
            last_failed=bool(last[width + 3] > 0.5),
            legal=legal,
        )


class RandomPolicy(RecipePolicy):
    """Draws a uniformly random legal recipe each round and never stops by itself."""

    def choose(self, view: View) -> Recipe | None:
        """Return a random recipe."""
        return self.space.random_recipe(self.rng, view.legal) if view.legal else None


class FixedPolicy(RecipePolicy):
    """Repeats one named recipe, each time from the best checkpoint.

    Args:
        env: the environment it will act in.
        seed: unused.
        recipe: the recipe; None for ``default_recipe(env)``.
    """

    def __init__(self, env: gym.Env[Any, Any], seed: int = 0, recipe: Recipe | None = None) -> None:
        super().__init__(env, seed)
        self.recipe = recipe if recipe is not None else default_recipe(self.space)
        self.space.encode(self.recipe)  # a recipe outside the space is refused now, not at the first step

    def choose(self, view: View) -> Recipe | None:
        """Return the recipe while it is legal."""
        return self.recipe if self.recipe.algorithm in view.legal else None


class ShortlistPolicy(RecipePolicy):
    """Plays a list of recipes in order, then stops.

    Args:
        env: the environment it will act in.
        seed: unused.
        recipes: the list; None for the recipes that were best on average over meta-train instances, when a list
            was measured for these sources, else SFT and GRPO at two rates each. Each stands there once: the policy
            knows its place in the list by the last recipe it played.
    """

    def __init__(self, env: gym.Env[Any, Any], seed: int = 0, recipes: Sequence[Recipe] | None = None) -> None:
        from .shortlist import default_shortlist

        super().__init__(env, seed)
        self.recipes = tuple(recipes if recipes is not None else default_shortlist(self.space))
        for position, recipe in enumerate(self.recipes):
            self.space.encode(recipe)
            if recipe in self.recipes[:position]:
                raise ValueError(f"recipes: entry {position} repeats an earlier one: {recipe}.")

    def choose(self, view: View) -> Recipe | None:
        """Return the next recipe of the list that is legal."""
        upcoming = self.recipes[self._next(view) :]
        return next((recipe for recipe in upcoming if recipe.algorithm in view.legal), None)

    def _next(self, view: View) -> int:
        """Return the position after the last round's recipe; illegal ones before it were passed over, not played."""
        if view.rounds == 0:
            return 0
        for position, recipe in enumerate(self.recipes):
            if np.allclose(self.space.to_vector(recipe), view.last_recipe, atol=1e-6):
                return position + 1
        return view.rounds


class GreedySftThenGrpoPolicy(RecipePolicy):
    """Repeats SFT from the best checkpoint while it gains, then GRPO until a round fails to gain."""

    def choose(self, view: View) -> Recipe | None:
        """Return SFT first, GRPO after SFT stopped gaining, None after GRPO stopped gaining."""
        gained = view.last_gain > 0 and not view.last_failed
        if view.last_algorithm is None:
            candidates = ["sft", "grpo"]
        elif view.last_algorithm == "sft":
            candidates = ["sft", "grpo"] if gained else ["grpo"]
        else:
            candidates = ["grpo"] if gained else []
        chosen = next((name for name in candidates if name in view.legal), None)
        return None if chosen is None else self.space.recipe(chosen)


def default_recipe(space: DecisionSpace) -> Recipe:
    """Return what most people try first: SFT over an even mix, every knob in the middle of its range."""
    return space.recipe("sft" if "sft" in space.algorithms else space.algorithms[0])


HEURISTICS: Mapping[str, type[RecipePolicy]] = {
    "fixed": FixedPolicy,
    "greedy-sft-then-grpo": GreedySftThenGrpoPolicy,
    "random": RandomPolicy,
    "shortlist": ShortlistPolicy,
}
"""Heuristics by name; to add one, subclass `RecipePolicy` and list it here."""
