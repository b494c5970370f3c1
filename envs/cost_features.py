"""What the cost predictor reads of a recipe: its features, and the bounds that its costs are relative to."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from ..inner_trainers.base import UNITS
from ..inner_trainers.recipe import Recipe
from .cost_rounds import EVALUATION

_FLAGS = ("log iterations", "packing", "adapters", "critic model", "KL")
NAMES = ("one", *_FLAGS, "log learning rate", "log generations", "tokens at once", "parameters")
"""All features in order; the weights of the sources come after them."""
FEATURES: Mapping[str, tuple[str, ...]] = {
    "train_tokens": (*_FLAGS, "log learning rate", "mix"),
    "flops": (*_FLAGS, "log learning rate", "mix"),
    "device_seconds": (*_FLAGS, "log generations"),
    "peak_memory_bytes": (*_FLAGS, "tokens at once", "parameters"),
    **dict.fromkeys(EVALUATION, ()),
}
"""What each quantity is regressed on, beside a constant; chosen by cross-validation, see `make_cost_predictor`."""
SCALED = ("tokens at once", "parameters")
"""Features that are measured in their own mean."""
LINEAR = ("peak_memory_bytes",)
"""Quantities that are a sum of what is always there and what grows; all others are products, linear in logarithms."""


def row_of(
    recipe: Recipe, bound: Mapping[str, float], parameters: float, ignored: Collection[str], sources: Sequence[str]
) -> list[float]:
    """Return a recipe's features: `NAMES`, then the weight of each of ``sources``; what is ignored counts as 0."""
    mix = recipe.mix
    return [
        1.0,
        0.0 if "num_iterations" in ignored else math.log(recipe.num_iterations),
        float(recipe.packing and "packing" not in ignored),
        float(recipe.lora_rank > 0 and "lora_rank" not in ignored),
        float(recipe.critic == "model" and "critic" not in ignored),
        float(recipe.kl_coef > 0 and "kl_coef" not in ignored),
        math.log(recipe.learning_rate),
        0.0 if "num_generations" in ignored else math.log(recipe.num_generations),
        bound["train_tokens"] / recipe.gradient_accumulation,
        parameters,
        *[mix.get(name, 0.0) for name in sources],
    ]


def bounds_of(recipe: Recipe, bound: Mapping[str, float], evaluation: Mapping[str, float]) -> list[float]:
    """Return the most of each of `QUANTITIES` that a round may cost; 0 where nothing bounds it."""
    return [*[bound[unit] * recipe.steps for unit in UNITS], 0.0, *[evaluation[unit] for unit in UNITS]]


def references_of(
    recipe: Recipe, bound: Mapping[str, float], evaluation: Mapping[str, float], overhead: float
) -> list[float]:
    """Return what each of `QUANTITIES` is relative to: the bounds, then what serves where there are none.

    A forward and backward pass takes as long as ``overhead`` FLOPs beside its own, and building the trainer about as
    long as a step.
    """
    steps, passes = recipe.steps, recipe.gradient_accumulation
    sequences = float(recipe.batch_size * passes)
    flops, after = bound["flops"], evaluation["flops"]
    return [
        bound["train_tokens"] * steps,
        flops * steps,
        (flops + overhead * passes) * (steps + 1) if flops > 0 else 0.0,
        1.0,
        evaluation["train_tokens"],
        after,
        after,
        sequences * steps,
        sequences * steps,
        sequences * (steps + 1),
        1.0,
        1.0,
        1.0,
        1.0,
    ]
