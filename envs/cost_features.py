"""What the cost predictor reads of a recipe: its features, and the bounds that its costs are relative to."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from ..inner_trainers.base import UNITS
from ..inner_trainers.recipe import Recipe
from .cost_rounds import EVALUATION

_FLAGS = ("log iterations", "packing", "adapters", "critic model", "KL")
_SHAPE = ("log steps", "log sequences", "log accumulation", "log generations", "log tokens per sequence")
FEATURES: Mapping[str, tuple[str, ...]] = {
    "train_tokens": (*_FLAGS, "log learning rate", "mix"),
    "flops": (*_FLAGS, "log learning rate", "mix"),
    "device_seconds": (*_FLAGS, *_SHAPE, "log parameters"),
    "peak_memory_bytes": (*_FLAGS, "log tokens at once", "log parameters"),
    **dict.fromkeys(EVALUATION, ()),
}
"""What each quantity is regressed on, beside a constant; chosen by cross-validation, see `make_cost_predictor`."""
NAMES = ("one", *_FLAGS, "log learning rate", *_SHAPE, "log tokens at once", "log parameters")
"""All features in order; the weights of the sources come after them."""


def row_of(
    recipe: Recipe, bound: Mapping[str, float], parameters: float, ignored: Collection[str], sources: Sequence[str]
) -> list[float]:
    """Return a recipe's features: `NAMES`, then the weight of each of ``sources``; what is ignored counts as 0."""
    sequences = recipe.batch_size * recipe.gradient_accumulation
    tokens = max(bound["train_tokens"], 1.0)
    mix = recipe.mix
    return [
        1.0,
        0.0 if "num_iterations" in ignored else math.log(recipe.num_iterations),
        float(recipe.packing and "packing" not in ignored),
        float(recipe.lora_rank > 0 and "lora_rank" not in ignored),
        float(recipe.critic == "model" and "critic" not in ignored),
        float(recipe.kl_coef > 0 and "kl_coef" not in ignored),
        math.log(recipe.learning_rate),
        math.log(recipe.steps),
        math.log(sequences),
        math.log(recipe.gradient_accumulation),
        0.0 if "num_generations" in ignored else math.log(recipe.num_generations),
        math.log(tokens / sequences),
        math.log(tokens / recipe.gradient_accumulation),
        math.log(max(parameters, 1.0)),
        *[mix.get(name, 0.0) for name in sources],
    ]


def bounds_of(recipe: Recipe, bound: Mapping[str, float], evaluation: Mapping[str, float]) -> list[float]:
    """Return the most of each of `QUANTITIES` that a round may cost; 0 where nothing bounds it."""
    return [*[bound[unit] * recipe.steps for unit in UNITS], 0.0, *[evaluation[unit] for unit in UNITS]]


def references_of(recipe: Recipe, bound: Mapping[str, float], evaluation: Mapping[str, float]) -> list[float]:
    """Return what each of `QUANTITIES` is regressed relative to: the bounds, then what serves where there are none."""
    steps = recipe.steps
    free = float(recipe.batch_size * recipe.gradient_accumulation * steps)
    flops, after = bound["flops"], evaluation["flops"]
    return [
        bound["train_tokens"] * steps,
        flops * steps,
        flops * steps,
        1.0,
        evaluation["train_tokens"],
        after,
        after,
        free,
        free,
        free,
        1.0,
        1.0,
        1.0,
        1.0,
    ]
