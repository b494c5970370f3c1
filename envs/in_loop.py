"""`InLoopEnv`: a recipe is given; one step adjusts its running round and takes the next optimiser steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..inner_trainers.recipe import Recipe
from ..inner_trainers.recipe_file import load_recipe
from ..inner_trainers.tasks import InnerTask, TaskFamily
from .adjustable import AdjustableEnv, adjustment_space
from .budget import Budget
from .decision_space import DecisionSpace


class InLoopEnv(AdjustableEnv):
    """One round of a given recipe as an episode; an action is one of the 37 adjustments of the catalogue.

    `reset` draws an instance, evaluates its base checkpoint, begins the round and takes its first ``interval``
    optimiser steps, so that signals are there before the first choice. Each step applies one adjustment (0 is ``none``)
    and takes the next ``interval``. The episode is terminated when the round has ended: all its steps are done, the
    budget is spent, it was stopped, it failed or was rolled back. Its checkpoint is then evaluated and the reward of
    `PostTrain/Recipe-v0` is given; before that the reward is 0, unless it is shaped (see `AdjustableEnv`). A round that
    ended within its first steps is settled by the first step, whatever its action.

    `docs/environment.md` has the table of every observation entry.

    Args:
        task: a built-in family's name, ``module:Class``, an `InnerTask` or a `TaskFamily`.
        recipe: what every round is asked: a `Recipe`, a mapping of its fields, or a YAML or JSON file.
        budget: as in `PostTrainingEnv`; there is one round, so ``max_rounds`` and ``patience`` are 1.
        **settings: the arguments of `AdjustableEnv`; ``space`` follows from the recipe.

    Raises:
        ValueError: a recipe that is none, or that cannot run on the first instance.
    """

    def __init__(
        self,
        task: str | InnerTask | TaskFamily = "letters",
        *,
        recipe: Recipe | Mapping[str, Any] | str | Path | None = None,
        budget: Budget | Mapping[str, Any] | float | None = None,
        **settings: Any,
    ) -> None:
        self._asked = as_recipe(recipe)
        if "space" in settings:
            raise ValueError("space: it follows from the recipe; leave it out.")
        super().__init__(task, budget=replace(Budget.from_any(budget), max_rounds=1, patience=1), **settings)
        self.action_space = adjustment_space()

    @property
    def recipe(self) -> Recipe:
        """What every round is asked; settings that its algorithm ignores have their defaults."""
        return self._asked

    def _space_of(self, first: InnerTask) -> DecisionSpace:
        self.trainer.check(first, self._asked)
        self._asked = _without_ignored(self._asked, self.trainer.ignored_settings(self._asked.algorithm))
        return space_of_recipe(self._asked, tuple(first.built.sources), first, self.trainer)

    def _search_began(self) -> None:
        super()._search_began()
        self._begin(self._asked)

    def step(self, action: Any) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        """Apply one adjustment and take the next ``interval`` optimiser steps.

        Raises:
            ValueError: an action outside the space, one that is refused (with ``illegal="raise"``), or the episode is
                over; nothing is trained or charged.
        """
        search = self.search
        if self._running is None:
            raise ValueError(f"step: the episode is over ({search.ended()}); call reset().")
        shaped = self._adjust(action, "action")
        outcome, reward = self._finished()
        return self._observation(), reward + shaped, outcome is not None, False, self._info(outcome)

    def choice_masks(self) -> dict[str, np.ndarray]:
        """Return the legal adjustments, under the key ``adjustment``."""
        return {"adjustment": self.adjustment_mask()}

    def action_masks(self) -> np.ndarray:
        """Return ``(37,)`` bool: the adjustments that can be applied now; see `adjustment_mask`."""
        return self.adjustment_mask()

    def encode_recipe(self, recipe: Recipe | None) -> Any:
        """Refuse: the recipe is given.

        Raises:
            ValueError: always.
        """
        raise ValueError("recipe: this environment is given its recipe; an action is an adjustment.")


def as_recipe(recipe: Recipe | Mapping[str, Any] | str | Path | None) -> Recipe:
    """Return a recipe from a recipe, a mapping of its fields, or a file.

    Raises:
        ValueError: none of these, or what they refuse.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str | Path):
        return load_recipe(Path(recipe))
    if isinstance(recipe, Mapping):
        try:
            return Recipe.from_dict(recipe)
        except TypeError as error:
            raise ValueError(f"recipe: {error}") from error
    raise ValueError(f"recipe: expected a Recipe, a mapping of its fields or the name of a file, got {recipe!r}.")


def _without_ignored(recipe: Recipe, ignored: tuple[str, ...]) -> Recipe:
    """Return the recipe with the default wherever its algorithm ignores a setting; the training is the same."""
    defaults = {f.name: f.default for f in fields(Recipe) if f.name in ignored}
    return replace(recipe, **defaults)  # type: ignore[arg-type]  # by name, so mypy sees any field


def space_of_recipe(recipe: Recipe, sources: tuple[str, ...], task: InnerTask, trainer: Any) -> DecisionSpace:
    """Return the decision space that holds one recipe: nothing but the mix is free, every knob is fixed.

    A number of generations that the algorithm ignores is no part of it, as it need not divide the batch.
    """
    knobs = {name: value for name, value in recipe.to_dict().items() if name not in ("algorithm", "mix", "start")}
    if "num_generations" in trainer.ignored_settings(recipe.algorithm):
        del knobs["num_generations"]
    usable = {recipe.algorithm: trainer.usable_sources(task, recipe.algorithm)}
    return DecisionSpace((recipe.algorithm,), sources, usable, {}, knobs)


__all__ = ["InLoopEnv", "as_recipe", "space_of_recipe"]
