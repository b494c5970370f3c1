"""`RecipeCatalogue`: the action is one of a list of named recipes, for algorithms that take a `Discrete`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np

from ..envs.decision_space import DecisionSpace
from ..envs.space_compiler import EPOCHS
from ..inner_trainers.messages import did_you_mean, require_integer
from ..inner_trainers.recipe import Recipe
from .checks import adjustment_choices, base_env, chooses_recipe

_RATES = {"low": -0.5, "middle": 0.0, "high": 0.5}
"""Coordinates of the learning rates of the default catalogue."""


class RecipeCatalogue(gym.ActionWrapper[dict[str, np.ndarray], int, dict[str, Any]], gym.utils.RecordConstructorArgs):
    """Maps `Discrete(1 + n)` to an action: 0 is ``stop``, ``i`` the ``i``-th recipe of a list.

    A recipe is masked where its algorithm is not legal now, where the running task's constraints leave it out, or where
    the budget pays no step of it; ``stop`` is always legal. What is played all the same becomes the nearest recipe that
    the constraints allow, or, where the batch alone is too dear, the largest that can be paid; one whose algorithm is
    not legal is a failed round at cost 0.

    Args:
        env: `PostTrain/Recipe-v0`, wrapped or not.
        recipes: recipes, or mappings of their fields, by name or in a list; None for a default list: each algorithm of
            the space from the best checkpoint and from the base, at three learning rates where that is a knob.

    Attributes:
        names: a name per recipe.

    Raises:
        ValueError: another environment, no recipe, two that are equal, or one that is not in the space.
    """

    def __init__(
        self,
        env: gym.Env[dict[str, np.ndarray], dict[str, Any]],
        recipes: Mapping[str, Any] | Sequence[Any] | None = None,
    ) -> None:
        base = base_env(env)
        if not chooses_recipe(base) or adjustment_choices(base):
            raise ValueError(
                f"RecipeCatalogue: {type(base).__name__} also takes adjustments; wrap PostTrain/Recipe-v0."
            )
        chosen = default_catalogue(base.space) if recipes is None else _named(recipes)
        if not chosen:
            raise ValueError("recipes: expected at least one recipe.")
        seen: dict[Recipe, str] = {}
        for name, recipe in chosen.items():
            if recipe in seen:
                raise ValueError(f"recipes: {name!r} and {seen[recipe]!r} are equal; name each recipe once.")
            seen[recipe] = name
        self._recipes = tuple(chosen.values())
        self.names = tuple(chosen)
        given = {
            name: recipe.to_dict() for name, recipe in chosen.items()
        }  # a default list, too, is the same elsewhere
        gym.utils.RecordConstructorArgs.__init__(self, recipes=given)
        gym.ActionWrapper.__init__(self, env)
        anywhere = replace(base.space, facts=None)  # what this task alone leaves out is masked
        for name, recipe in chosen.items():
            self._require_in_space(anywhere, name, recipe)
        self.action_space: Any = gym.spaces.Discrete(1 + len(self._recipes))

    @property
    def recipes(self) -> Mapping[str, Recipe]:
        """The recipes by name."""
        return dict(zip(self.names, self._recipes, strict=True))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Start a search; see `PostTrainingEnv.reset`."""
        if seed is not None:
            self.action_space.seed(seed)
        return super().reset(seed=seed, options=options)

    def action(self, action: Any) -> dict[str, Any]:
        """Return the recipe's action; of one that this task's constraints leave out, the nearest that they allow.

        Raises:
            ValueError: no integer, or none of the list.
        """
        choice = require_integer("action", action, low=0, high=len(self._recipes))
        base = base_env(self.env)
        if choice == 0:
            return base.encode_recipe(None)
        recipe = self._recipes[choice - 1]
        if _allowed(base.space, recipe):
            return base.encode_recipe(recipe)
        return base.encode_recipe(base.space.nearest(recipe))

    def action_masks(self) -> np.ndarray:
        """Return ``(1 + n,)`` bool: ``stop`` and the recipes that can be played now."""
        base = base_env(self.env)
        algorithms = base.choice_masks()["algorithm"]
        position = {name: place for place, name in enumerate(base.space.algorithms, start=1)}
        legal = [
            bool(algorithms[position[recipe.algorithm]]) and _allowed(base.space, recipe) and base.pays(recipe)
            for recipe in self._recipes
        ]
        return np.array([True, *legal])

    def encode_recipe(self, recipe: Recipe | None) -> int:
        """Return the action of a recipe (None is ``stop``).

        Raises:
            ValueError: it is not in the catalogue.
        """
        if recipe is None:
            return 0
        if recipe not in self._recipes:
            raise ValueError(f"recipe: it is not among the {len(self._recipes)} of the catalogue: {recipe}.")
        return 1 + self._recipes.index(recipe)

    def _require_in_space(self, space: DecisionSpace, name: str, recipe: Recipe) -> None:
        if recipe.algorithm not in space.algorithms:
            hint = did_you_mean(recipe.algorithm, space.algorithms)
            raise ValueError(f"recipes: {name!r}: algorithm {recipe.algorithm!r} is not in the decision space.{hint}")
        if EPOCHS in space.parameters:
            return  # what steps they come to depends on the task
        try:
            space.encode(recipe)
        except ValueError as error:
            raise ValueError(f"recipes: {name!r} is not in the decision space: {error}") from error


def default_catalogue(space: DecisionSpace) -> dict[str, Recipe]:
    """Return recipes of a space by name: its algorithms, from best and base, at three learning rates."""
    found: dict[str, Recipe] = {}
    for algorithm in space.algorithms:
        if space.problems[algorithm] is not None:
            continue
        for start in ("best", "base"):
            if start not in space.starts:
                continue
            for word, coordinate in _RATES.items() if "learning_rate" in space.parameters else [("", 0.0)]:
                rates = {} if not word else {"learning_rate": space.parameters["learning_rate"].decode(coordinate)}
                recipe = space.nearest_recipe(algorithm, start=start, **rates)
                name = " ".join(part for part in (algorithm, "from", start, word and f"at a {word} rate") if part)
                if recipe not in found.values():
                    found[name] = recipe
    return found


def _named(recipes: Mapping[str, Any] | Sequence[Any]) -> dict[str, Recipe]:
    if isinstance(recipes, Mapping):
        return {str(name): _recipe(str(name), entry) for name, entry in recipes.items()}
    if isinstance(recipes, str | bytes) or not isinstance(recipes, Sequence):
        raise ValueError(f"recipes: expected recipes by name or in a list, got {type(recipes).__name__}.")
    return {f"recipe {number}": _recipe(f"recipe {number}", entry) for number, entry in enumerate(recipes, start=1)}


def _recipe(name: str, entry: Any) -> Recipe:
    if isinstance(entry, Recipe):
        return entry
    if not isinstance(entry, Mapping):
        raise ValueError(f"recipes: {name!r}: expected a Recipe or a mapping of its fields, got {entry!r}.")
    try:
        return Recipe.from_dict(entry)
    except (ValueError, TypeError) as error:
        raise ValueError(f"recipes: {name!r}: {error}") from error


def _allowed(space: DecisionSpace, recipe: Recipe) -> bool:
    if space.problems[recipe.algorithm] is not None:
        return False
    try:
        space.encode(recipe)
    except ValueError:
        return False
    return True
