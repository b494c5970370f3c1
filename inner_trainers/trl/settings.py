"""Compares what a TRL trainer really holds with what the recipe asked for."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
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
    if "temperature" in reads:
        for what, used in _temperatures(trainer):
            different += _difference(f"temperature of {what}", recipe.temperature, used)
    if recipe.entropy_coef and "entropy_coef" in reads and not trainer._entropy_bonus_enabled:
        different.append(f"the trainer used no entropy bonus, asked for entropy_coef {recipe.entropy_coef!r}")
    return different


def samplers(trainer: Any) -> Iterator[Any]:
    """Yield what a trainer samples with: the library's own configuration, or vLLM's, or both."""
    for name in ("generation_config", "vllm_generation"):
        if getattr(trainer, name, None) is not None:
            yield getattr(trainer, name)


def fused_temperature(model: Any) -> Any:
    """Return the cell in which a model's fused output head keeps its temperature; None when it has no such head.

    The library fixes the temperature when it builds the head. Building another one would lose what accelerate has
    wrapped around the model's forward pass since: its mixed precision.
    """
    forward = (model.get_base_model() if hasattr(model, "get_base_model") else model).__dict__.get("forward")
    while forward is not None:
        function = getattr(forward, "__func__", forward)
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        if "temperature" in names:
            return function.__closure__[names.index("temperature")]
        forward = getattr(function, "__wrapped__", None)
    return None


def fused_temperatures(trainer: Any) -> Iterator[Any]:
    """Yield the cell of the policy's fused head, and of its reference's, where there are such heads."""
    for model in (trainer.model, getattr(trainer, "ref_model", None)):
        cell = None if model is None else fused_temperature(model)
        if cell is not None:
            yield cell


def _temperatures(trainer: Any) -> Iterator[tuple[str, Any]]:
    sampling = list(samplers(trainer))
    for sampler in sampling:
        yield "sampling", sampler.temperature
    for cell in fused_temperatures(trainer) if sampling else ():  # rows that were sampled before have a plain loss
        yield "the loss", cell.cell_contents


def _difference(name: str, asked: Any, used: Any) -> list[str]:
    if isinstance(used, int | float) and math.isclose(used, asked, rel_tol=1e-9):
        return []
    return [f"the trainer used {name} {used!r}, asked for {asked!r}"]
