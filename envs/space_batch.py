"""Decision spaces on arrays: many actions decoded, masked and encoded at once, each as the scalar methods would."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..inner_trainers.recipe import STARTS, Recipe
from .space_compiler import EPOCHS

if TYPE_CHECKING:
    from .decision_space import DecisionSpace


@dataclass(frozen=True)
class RecipeBatch:
    """Recipes as columns.

    Attributes:
        algorithm: ``(n,)`` int64: 0 is ``stop``, ``i + 1`` is algorithm ``i``.
        start: ``(n,)`` int64 positions in base, best, latest.
        mix: ``(n, sources)`` float64 weights.
        values: knob -> ``(n,)`` values; positions of the choices where they are names, -1 for the field's default.
        steps: ``(n,)`` int64 that ``epochs`` come to; None where steps are a knob or fixed.
    """

    algorithm: np.ndarray
    start: np.ndarray
    mix: np.ndarray
    values: Mapping[str, np.ndarray]
    steps: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.algorithm)

    def recipe(self, space: DecisionSpace, row: int) -> Recipe | None:
        """Return one row as a recipe of ``space``; None for ``stop``."""
        choice = int(self.algorithm[row])
        if choice == 0:
            return None
        slots = [int(self.start[row]), *self.mix[row].tolist(), *[v[row].item() for v in self.values.values()]]
        return space.recipe_of_slots(space.algorithms[choice - 1], slots)


def decode_batch(space: DecisionSpace, actions: Mapping[str, np.ndarray]) -> RecipeBatch:
    """Return the recipes of ``n`` actions, equal to `DecisionSpace.decode` of each.

    Args:
        space: the space.
        actions: ``algorithm (n,)``, ``mix (n, sources)``, ``parameters (n, knobs)`` and ``start (n,)``.
    """
    choices = np.asarray(actions["algorithm"], np.int64)
    count = len(choices)
    asked_starts = np.asarray(actions["start"], np.int64)
    weights = (np.asarray(actions["mix"], np.float64) + 1.0) / 2.0
    coordinates = np.asarray(actions["parameters"])
    decoded = [p.decode_many(coordinates[:, k]) for k, p in enumerate(space.parameters.values())]
    starts, mix = np.zeros(count, np.int64), np.zeros((count, len(space.sources)))
    values = {name: np.zeros(count, column.dtype) for name, column in zip(space.parameters, decoded, strict=True)}
    steps = np.zeros(count, np.int64) if EPOCHS in space.parameters else None
    for position, algorithm in enumerate(space.algorithms):
        rows = np.flatnonzero(choices == position + 1)
        if not len(rows):
            continue
        plan = space.plan(algorithm)
        own = plan.starts_many(asked_starts[rows])
        mixed = plan.mix_many(weights[rows], own)
        columns: list[Any] = [own, *np.ascontiguousarray(mixed.T), *[column[rows] for column in decoded]]
        plan.decide_many(columns, len(rows))
        starts[rows] = columns[0]
        first = 1 + len(space.sources)
        for place in range(len(space.sources)):
            mix[rows, place] = columns[1 + place]
        for name, column in zip(values, columns[first:], strict=True):
            if np.result_type(values[name], column) != values[name].dtype:
                values[name] = values[name].astype(np.result_type(values[name], column))
            values[name][rows] = column
        if steps is not None:
            if plan.steps is None:
                raise ValueError("epochs: how many steps they are depends on the task; bind the space to one first.")
            steps[rows] = plan.steps.run(columns)
    return RecipeBatch(choices, starts, mix, values, steps)


def encode_batch(space: DecisionSpace, batch: RecipeBatch) -> dict[str, np.ndarray]:
    """Return the actions of recipes, equal to `DecisionSpace.encode` of each; recipes are not checked."""
    parameters = np.zeros((len(batch), len(space.parameters)), np.float32)
    stops = batch.algorithm == 0
    for place, (name, parameter) in enumerate(space.parameters.items()):
        used = space.used_many(name, batch)
        if used.all():
            parameters[:, place] = parameter.encode_many(batch.values[name])
        elif used.any():
            parameters[used, place] = parameter.encode_many(batch.values[name][used])
    mix = (2.0 * batch.mix - 1.0).astype(np.float32)
    mix[stops] = 0.0
    starts = np.where(stops, 0, batch.start)
    return {"algorithm": batch.algorithm, "mix": mix, "parameters": parameters, "start": starts}


def mask_batch(space: DecisionSpace, payable: np.ndarray) -> np.ndarray:
    """Return ``(n, 1 + algorithms + 3)`` bool: `PostTrainingEnv.action_masks` of ``n`` searches on one task.

    Args:
        space: the space.
        payable: ``(n, algorithms)`` bool: what each search's budget pays.
    """
    legal = payable & np.array([space.problems[name] is None for name in space.algorithms])
    masks = np.ones((len(payable), 1 + len(space.algorithms) + len(STARTS)), bool)
    masks[:, 1 : 1 + len(space.algorithms)] = legal
    starts = np.array([space.start_mask([name]) for name in space.algorithms])  # (algorithms, 3)
    some = legal.any(axis=1, keepdims=True)
    masks[:, 1 + len(space.algorithms) :] = np.where(some, legal @ starts, space.start_mask([]))
    return masks
