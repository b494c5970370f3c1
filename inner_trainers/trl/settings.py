"""Compares what a TRL trainer really holds with what the recipe asked for."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from ..recipe import Recipe

_ALWAYS = {
    "steps": "max_steps",
    "batch_size": "per_device_train_batch_size",
    "gradient_accumulation": "gradient_accumulation_steps",
    "max_grad_norm": "max_grad_norm",
    "weight_decay": "weight_decay",
}
"""Recipe field -> attribute of the training arguments, for every algorithm."""

_WHERE_READ = {
    "num_generations": ("num_generations",),
    "temperature": ("temperature",),
    "num_iterations": ("num_iterations",),
    "beta": ("beta",),
    "kl_coef": ("kl_coef", "beta"),
    "clip_range": ("epsilon_low", "epsilon"),
    "entropy_coef": ("entropy_coef",),
    "vf_coef": ("vf_coef",),
    "clip_range_vf": ("clip_range_vf",),
    "gamma": ("gamma",),
    "gae_lambda": ("gae_lambda",),
}
"""Recipe field -> names under which the trainer, or else its arguments, hold it, for algorithms that read the field."""


def settings_not_used(trainer: Any, recipe: Recipe, reads: Collection[str]) -> list[str]:
    """Return a sentence for each setting that did not reach the trainer.

    Args:
        trainer: the TRL trainer.
        recipe: what was asked.
        reads: the optional recipe fields that the algorithm reads.
    """
    different = []
    for name, argument in _ALWAYS.items():
        different += _difference(name, getattr(recipe, name), getattr(trainer.args, argument))
    for name, held_as in _WHERE_READ.items():
        if name not in reads:
            continue
        for holder, attribute in ((h, a) for h in (trainer, trainer.args) for a in held_as):
            if hasattr(holder, attribute):
                different += _difference(name, getattr(recipe, name), getattr(holder, attribute))
                break
    return different


def _difference(name: str, asked: Any, used: Any) -> list[str]:
    if isinstance(used, int | float) and math.isclose(used, asked, rel_tol=1e-9):
        return []
    return [f"the trainer used {name} {used!r}, asked for {asked!r}"]
