"""LoRA adapters as weights: merged into the model, or stacked on the weights a round started from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

Weights = Mapping[str, torch.Tensor]

PREFIX = "stacked_lora"
"""First part of the name of a stacked adapter's factor: ``stacked_lora.NUMBER.left.WEIGHT`` or ``….right.WEIGHT``."""


class Update(NamedTuple):
    """One low-rank change of one weight: ``weight + left @ right``.

    Attributes:
        name: the weight.
        left: (rows of the weight, rank).
        right: (rank, columns of the weight).
    """

    name: str
    left: torch.Tensor
    right: torch.Tensor


def unstack(weights: Weights) -> tuple[dict[str, torch.Tensor], list[Update]]:
    """Return the weights below every adapter, and the adapters' updates in the order they were trained.

    Raises:
        ValueError: a factor without its other half, or an update of a weight that is missing or has another shape.
    """
    plain: dict[str, torch.Tensor] = {}
    halves: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
    for name, value in weights.items():
        if name.startswith(f"{PREFIX}."):
            _, position, side, weight = name.split(".", 3)
            halves.setdefault((int(position), weight), {})[side] = value
        else:
            plain[name] = value
    updates = []
    for (number, name), factors in sorted(halves.items(), key=lambda entry: entry[0][0]):
        target = plain.get(name)
        if factors.keys() != {"left", "right"} or target is None:
            raise ValueError(
                f"stacked adapter {number}: expected both factors and the weight {name!r} below them, "
                f"got {', '.join(sorted(factors))}{'' if target is not None else ' and no such weight'}."
            )
        left, right = factors["left"], factors["right"]
        if target.shape != (left.shape[0], right.shape[1]):
            raise ValueError(
                f"stacked adapter {number}: weight {name!r} has shape {tuple(target.shape)}, "
                f"its factors {tuple(left.shape)} and {tuple(right.shape)}."
            )
        updates.append(Update(name, left, right))
    return plain, updates


def merge(weights: Weights) -> dict[str, torch.Tensor]:
    """Return plain weights: every stacked adapter is added; weights without one are the same tensors."""
    plain, updates = unstack(weights)
    for update in updates:
        plain[update.name] = plain[update.name] + update.left @ update.right
    return plain


def stack(start: Weights, model: Any) -> dict[str, torch.Tensor]:
    """Return ``start``, the same tensors, with the adapter of a trained PEFT model on top as CPU copies.

    The scale α/r is in the left factor, so that the weights need no description beside them.
    """
    number = 1 + max((int(name.split(".", 2)[1]) for name in start if name.startswith(f"{PREFIX}.")), default=-1)
    stacked = dict(start)
    for update in trained_updates(model):
        stacked[f"{PREFIX}.{number}.left.{update.name}"] = update.left.detach().to("cpu", copy=True).contiguous()
        stacked[f"{PREFIX}.{number}.right.{update.name}"] = update.right.detach().to("cpu", copy=True).contiguous()
    return stacked


def trained_updates(model: Any) -> Iterator[Update]:
    """Yield the updates of a PEFT model's active adapter, in the model's order."""
    from peft.tuners.lora import LoraLayer

    adapter = model.active_adapter
    for name, module in model.get_base_model().named_modules():
        if isinstance(module, LoraLayer) and adapter in module.lora_A:
            into, out = module.lora_A[adapter].weight, module.lora_B[adapter].weight * module.scaling[adapter]
            # GPT-2's linear layers hold their weight as (inputs, outputs)
            left, right = (into.T, out.T) if getattr(module, "fan_in_fan_out", False) else (out, into)
            yield Update(f"{name}.weight", left, right)
