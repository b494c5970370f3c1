"""Good weights of a running round: copies on the CPU of what its optimiser trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .adapters import unstack
from .models import load_weights


@dataclass(frozen=True)
class Snapshot:
    """Trained tensors as they were after ``step`` optimiser steps, in the optimiser's order.

    None stands for a tensor that the checkpoint holds from which the round started.
    """

    step: int
    tensors: tuple[torch.Tensor | None, ...]


class Snapshots:
    """Keeps the weights a round began with, those of its last fine step, and those it was asked to keep.

    A step's loss tells about the weights before its update. So what is copied is called good only once the next step
    was seen to be fine, and is dropped when that step showed a fault. Of the start, only what it does not hold is
    copied: adapters and critics. Besides that at most four copies exist, two of each kind, and none that nobody asked
    for.

    Args:
        start: the weights the round starts from, by name.

    Attributes:
        good: the last weights that `take` copied and a step confirmed.
        kept: the last weights that `keep` copied and a step confirmed.
    """

    def __init__(self, start: Mapping[str, torch.Tensor]) -> None:
        self._start = start
        self._beginning: Snapshot | None = None
        self._taken: Snapshot | None = None
        self._put_by: Snapshot | None = None
        self.good: Snapshot | None = None
        self.kept: Snapshot | None = None

    def begin(self, trainer: Any) -> None:
        """Note the tensors the round begins with, before its first update."""
        self._beginning = Snapshot(0, self._initial(trainer))

    def take(self, step: int, trainer: Any) -> None:
        """Copy the trained tensors, which have had ``step`` steps; those of a round's start are good anyway."""
        self._taken = Snapshot(step, self._copies(trainer)) if step else self._beginning
        if step == 0:
            self.good, self._taken = self._taken, None

    def keep(self, step: int, trainer: Any) -> bool:
        """Copy the trained tensors because somebody asked; return whether they are finite: others are not kept."""
        copies = self._copies(trainer)
        if not all(bool(torch.isfinite(tensor).all()) for tensor in copies):
            return False
        self._put_by = Snapshot(step, copies)
        return True

    def confirm(self) -> None:
        """Call what was copied last good: the step that used it was fine."""
        if self._taken is not None:
            self.good, self._taken = self._taken, None
        if self._put_by is not None:
            self.kept, self._put_by = self._put_by, None

    def drop_unconfirmed(self) -> None:
        """Forget what somebody asked to keep since the last fine step: the step that used it was not."""
        self._put_by = None

    @property
    def last_good(self) -> Snapshot:
        """What to go back to: what somebody asked to keep, else the last good weights, else the round's beginning.

        Raises:
            ValueError: no step was begun yet.
        """
        for snapshot in (self.kept, self.good, self._beginning):
            if snapshot is not None:
                return snapshot
        raise ValueError("no step of the round was begun yet; expected at least one.")

    def restore(self, trainer: Any, snapshot: Snapshot | None = None) -> int:
        """Put weights back into the model, the last good ones by default; return after how many steps they were so.

        Raises:
            ValueError: no weights were confirmed yet.
        """
        snapshot = self.good if snapshot is None else snapshot
        if snapshot is None:
            raise ValueError("no step of the round was fine yet; expected a confirmed snapshot.")
        if any(tensor is None for tensor in snapshot.tensors):
            for module in _begun_from_start(trainer):
                load_weights(module, self._start)
        with torch.no_grad():
            for parameter, kept in zip(_trained(trainer.optimizer), snapshot.tensors, strict=True):
                if kept is not None:
                    parameter.copy_(kept)
        return snapshot.step

    def _copies(self, trainer: Any) -> tuple[torch.Tensor, ...]:
        return tuple(parameter.detach().to("cpu", copy=True) for parameter in _trained(trainer.optimizer))

    def _initial(self, trainer: Any) -> tuple[torch.Tensor | None, ...]:
        held = unstack(self._start)[0]
        from_start = {
            id(parameter)
            for module in _begun_from_start(trainer)
            for name, parameter in module.named_parameters()
            if name in held
        }
        return tuple(
            None if id(parameter) in from_start else parameter.detach().to("cpu", copy=True)
            for parameter in _trained(trainer.optimizer)
        )


def clear_optimizer(trainer: Any) -> None:
    """Forget what the optimiser has gathered, and completions that were sampled by weights that are gone."""
    optimizer = trainer.optimizer
    getattr(optimizer, "optimizer", optimizer).state.clear()
    drop_completions(trainer)


def drop_completions(trainer: Any) -> None:
    """Let the next step sample completions instead of using those that are left of the last batch."""
    if getattr(trainer, "_buffered_inputs", None) is not None:
        trainer._buffered_inputs = None


def _begun_from_start(trainer: Any) -> Iterator[torch.nn.Module]:
    """Yield the modules that held the start's weights, by its names, before the first step; none with adapters."""
    for module in (trainer.model, getattr(getattr(trainer, "critic", None), "model", None)):
        if module is not None and not hasattr(module, "get_base_model"):
            yield module


def _trained(optimizer: Any) -> Sequence[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
