"""What an optimiser step of a recipe can cost at most, held against what the ledger has left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..inner_trainers.base import Cost, InnerTrainer
from ..inner_trainers.recipe import Recipe
from ..inner_trainers.tasks.base import InnerTask
from .budget import BudgetLedger
from .decision_space import COSTLY_KNOBS, DecisionSpace


class Prices:
    """Answers whether the budget pays one step and the evaluation after it.

    Args:
        trainer: who bounds the costs.
        task: what is trained on.
        space: what may be tried.
        sources: algorithm -> its usable sources.
        ledger: what is left.

    Attributes:
        evaluation_bound: the most one evaluation can cost, without seconds.
        evaluation_seconds: seconds that the last evaluation took.
    """

    def __init__(
        self,
        trainer: InnerTrainer,
        task: InnerTask,
        space: DecisionSpace,
        sources: Mapping[str, tuple[str, ...]],
        ledger: BudgetLedger,
    ) -> None:
        self._trainer, self._task, self._space, self._sources, self._ledger = trainer, task, space, sources, ledger
        self._bounds: dict[Any, Cost] = {}
        self.evaluation_bound = trainer.evaluation_cost_bound(task, "validation")
        self.evaluation_seconds = 0.0

    def evaluation(self) -> Cost:
        """Return what is kept back for the next evaluation: the most it can cost, in seconds what the last one took."""
        return replace(self.evaluation_bound, device_seconds=self.evaluation_seconds)

    def pays(self, recipe: Recipe) -> bool:
        """Return whether a step of the recipe can be paid; True where the recipe is refused for another reason."""
        try:
            bound = self._step(recipe)
        except ValueError:
            return True
        return self._ledger.can_pay(bound, self.evaluation())

    def pays_cheapest(self, algorithm: str, *held: tuple[str, Any]) -> bool:
        """Return whether the algorithm's cheapest step can be paid, with some knobs ``held`` at a value."""
        return self._ledger.can_pay(self.cheapest_step(algorithm, *held), self.evaluation())

    def fitted(self, recipe: Recipe) -> Recipe:
        """Return the recipe, or with the largest batch of which a step can be paid, the other knobs lowered if needed.

        Where nothing helps the recipe is returned as it is.
        """
        for cheaper in (recipe, *self._space.cheaper_recipes(recipe)):
            found = self._space.with_largest_batch(cheaper, self.pays)
            if found is not None:
                return found
        return recipe

    def cheapest_step(self, algorithm: str, *held: tuple[str, Any]) -> Cost:
        """Return the bound of the algorithm's cheapest step on a mix of all its sources, with some knobs ``held``."""
        key = (algorithm, held)
        if key not in self._bounds:
            recipes = self._space.cheapest_recipes(algorithm, self._sources[algorithm], **dict(held))
            unit = self._ledger.budget.unit
            self._bounds[key] = min(map(self._step, recipes), key=lambda cost: cost.in_unit(unit))
        return self._bounds[key]

    def _step(self, recipe: Recipe) -> Cost:
        used = tuple(name for name, weight in recipe.mix.items() if weight > 0)
        key = (recipe.algorithm, used, *(getattr(recipe, name) for name in (*COSTLY_KNOBS, "num_generations")))
        if key not in self._bounds:
            self._bounds[key] = self._trainer.step_cost_bound(self._task, recipe)
        return self._bounds[key]
