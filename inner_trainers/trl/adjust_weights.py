"""Adjustments of the weights: keep them, go back to good ones, and which of an adapter's projections train."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from ..adjustments import Adjustment
from .live import Handler, LiveRound


class TakeSnapshot:
    """Keeps the trained tensors on the CPU until others are kept; a rollback goes to them."""

    def refusal(self, live: LiveRound, adjustment: Adjustment) -> str | None:
        """Refuse where no step has changed the weights."""
        return _nothing_new(live)

    def apply(self, live: LiveRound, adjustment: Adjustment) -> None:
        """Copy them; what is not finite is not kept, and the report says so."""
        if not live.rescue.keep(live.step, live.trainer):
            live.meter.flags.append(
                f"snapshot: the weights after step {live.step} are not finite, so they were not kept; a rollback goes "
                "to those that were good before"
            )


class RollBack:
    """Puts good weights back and clears the optimiser's state; steps, rates, settings and data go on."""

    def refusal(self, live: LiveRound, adjustment: Adjustment) -> str | None:
        """Refuse where no step has changed the weights."""
        return _nothing_new(live)

    def apply(self, live: LiveRound, adjustment: Adjustment) -> str:
        """Put them back; return which, as the adjustment does not say."""
        return f"to {live.rescue.roll_back(live.step, live.trainer)}"


class FreezeAdapters:
    """Lets the down-projections A of every LoRA adapter have no gradient, or have one again.

    What has no gradient does not move: neither the optimiser's momentum nor weight decay reaches it, and it is no part
    of the gradient's norm. Only the gradient is taken away: PEFT marks the projections as trainable again whenever a
    reference model is read with the adapters switched off.

    Args:
        freeze: whether to take the gradient away, or to give it back.
    """

    def __init__(self, freeze: bool) -> None:
        self._freeze = freeze

    def refusal(self, live: LiveRound, adjustment: Adjustment) -> str | None:
        """Refuse without adapters, and where it is so already."""
        if live.now.lora_rank == 0:
            return "the round trains full weights; it needs a lora_rank above 0"
        if bool(live.frozen) == self._freeze:
            return "the adapters' down-projections are " + ("frozen already" if self._freeze else "not frozen")
        return None

    def apply(self, live: LiveRound, adjustment: Adjustment) -> None:
        """Freeze or unfreeze them."""
        if self._freeze:
            live.frozen = [p.register_post_accumulate_grad_hook(_drop) for p in _down_projections(live.trainer)]
            return
        for handle in live.frozen:
            handle.remove()
        live.frozen = []


def _nothing_new(live: LiveRound) -> str | None:
    if live.step == 0:
        return "no step was taken yet"
    if live.rescue.settled == live.step:
        return "no step was taken since the last snapshot or rollback"
    return None


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _down_projections(trainer: Any) -> Iterator[torch.nn.Parameter]:
    """Yield the A of every adapter that trains, of the policy's and of its critic's."""
    from peft.tuners.lora import LoraLayer

    for model in (trainer.model, getattr(trainer, "critic", None)):
        for module in () if model is None else model.modules():
            if isinstance(module, LoraLayer):
                yield from module.lora_A.parameters()


HANDLERS: Mapping[str, Handler] = MappingProxyType(
    {
        "snapshot": TakeSnapshot(),
        "rollback": RollBack(),
        "lora_freeze": FreezeAdapters(True),
        "lora_unfreeze": FreezeAdapters(False),
    }
)
