"""The last good weights of a running round: copies on the CPU of what its optimiser trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .adapters import unstack


@dataclass(frozen=True)
class Snapshot:
    """Trained tensors as they were after ``step`` optimiser steps, in the optimiser's order."""

    step: int
    tensors: tuple[torch.Tensor, ...]


class Snapshots:
    """Keeps the weights that the last step with a fine loss was computed from.

    A step's loss tells about the weights before its update. `take` copies them then, and `confirm` calls the copy
    good once the step was seen to be fine. At most two copies exist; the weights a round starts from are not copied.

    Args:
        start: the weights the round starts from, by name.
    """

    def __init__(self, start: Mapping[str, torch.Tensor]) -> None:
        # stacked adapters make the model hold other tensors than those below them
        self._start = {} if unstack(start)[1] else start
        self._taken: Snapshot | None = None
        self.good: Snapshot | None = None

    def take(self, step: int, trainer: Any) -> None:
        """Copy the trained tensors, which have had ``step`` steps; those of a round's start are good anyway."""
        self._taken = Snapshot(step, self._copies(trainer) if step else self._initial(trainer))
        if step == 0:
            self.confirm()

    def confirm(self) -> None:
        """Call what was taken last good: the step that used it was fine."""
        if self._taken is not None:
            self.good, self._taken = self._taken, None

    def restore(self, trainer: Any) -> int:
        """Put the last good weights into the model; return after how many steps they were the round's.

        Raises:
            ValueError: no weights were confirmed yet.
        """
        if self.good is None:
            raise ValueError("no step of the round was fine yet; expected a confirmed snapshot.")
        with torch.no_grad():
            for parameter, kept in zip(_trained(trainer.optimizer), self.good.tensors, strict=True):
                parameter.copy_(kept)
        return self.good.step

    def _copies(self, trainer: Any) -> tuple[torch.Tensor, ...]:
        return tuple(parameter.detach().to("cpu", copy=True) for parameter in _trained(trainer.optimizer))

    def _initial(self, trainer: Any) -> tuple[torch.Tensor, ...]:
        names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
        return tuple(
            self._start[name]
            if (name := names.get(id(parameter), "")) in self._start
            else parameter.detach().to("cpu", copy=True)  # adapters and critics begin with values of their own
            for parameter in _trained(trainer.optimizer)
        )


def clear_optimizer(trainer: Any) -> None:
    """Forget what the optimiser has gathered, and completions that were sampled by weights that are gone."""
    optimizer = trainer.optimizer
    getattr(optimizer, "optimizer", optimizer).state.clear()
    if getattr(trainer, "_buffered_inputs", None) is not None:
        trainer._buffered_inputs = None


def _trained(optimizer: Any) -> Sequence[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad]
