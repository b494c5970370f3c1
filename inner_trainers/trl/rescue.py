"""Decides what a round does about a fault, keeps the weights that takes, and remembers what was done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..base import Failure
from ..fault_policy import RETRY_FACTOR, FaultPolicy
from .snapshots import Snapshots, clear_optimizer


class Rescue:
    """The responses of one round, which `FaultPolicy` describes, and the weights that adjustments keep and put back.

    Args:
        policy: which response fits which fault.
        start: the weights the round starts from, by name.

    Attributes:
        rescued: faults after which the round went on or ended with earlier weights.
        history: what was done about each, for `checkpoint_id`.
        rolled_back_to: steps that the weights have had with which the round ends; None when those are its last.
        settled: optimiser steps that were done when an adjustment last kept weights or put some back; None for never.
    """

    def __init__(self, policy: FaultPolicy, start: Mapping[str, torch.Tensor]) -> None:
        self._policy = policy
        self._snapshots = Snapshots(start)
        self._retries = 0
        self.rescued: list[Failure] = []
        self.history: list[str] = []
        self._flags: list[str] = []
        self.rolled_back_to: int | None = None
        self.settled: int | None = None

    def before_update(self, step: int, trainer: Any) -> None:
        """Keep the weights that optimiser step ``step`` (from 1) is about to change."""
        if step == 1:
            self._snapshots.begin(trainer)
        if self._policy.keeps_weights:
            self._snapshots.take(step - 1, trainer)

    def step_was_fine(self) -> None:
        """Call the weights good that the step's loss was computed from."""
        self._snapshots.confirm()

    def keep(self, step: int, trainer: Any) -> bool:
        """Keep the weights after ``step`` steps until others are asked to be kept; return whether they are finite.

        They are what `roll_back` goes to as soon as the next step was fine; those that are not finite are not kept.
        """
        kept = self._snapshots.keep(step, trainer)
        if kept:
            self.settled = step
        return kept

    def roll_back(self, step: int, trainer: Any) -> int:
        """Put good weights back and let the optimiser begin anew; return after how many steps they were the round's.

        The first there are: those that were asked to be kept, those the fault policy keeps, those of the start.
        """
        restored = self._snapshots.restore(trainer, self._snapshots.last_good)
        clear_optimizer(trainer)
        self.settled = step
        return restored

    def let_go(self) -> None:
        """Free the weights that were kept; the round is over."""
        self._snapshots = Snapshots({})

    def respond(self, fault: Failure, steps_left: int, unwound: bool) -> str:
        """Return ``"stop"``, ``"rollback"`` or ``"retry"``, and note the latter two.

        Args:
            fault: what happened.
            steps_left: optimiser steps that are left to do.
            unwound: whether training has ended, so that it cannot go on.
        """
        self._snapshots.drop_unconfirmed()
        response = self._policy.response(fault.kind, self._retries, unwound or steps_left <= 0)
        good = self._snapshots.good
        if good is None or (response == "rollback" and good.step == 0):
            return "stop"
        if response == "stop":
            return response
        self.rescued.append(fault)
        self.history.append(f"{response} at {fault.step} to {good.step}: {fault.kind}")
        if response == "retry":
            self._retries += 1
            done = f"went on from the weights after step {good.step} with {RETRY_FACTOR:g} times the learning rate"
        else:
            self.rolled_back_to = good.step
            done = f"ended with the weights after step {good.step}"
        self._flags.append(f"rescued from {fault.kind}: {fault.evidence}; the round {done}")
        return response

    def told(self, failed: bool) -> list[str]:
        """Return a sentence for each rescue; one that came to nothing, because the round failed, is left out."""
        return self._flags[: self._retries] if failed else list(self._flags)

    def restore(self, trainer: Any) -> None:
        """Put the last good weights back into the model."""
        self._snapshots.restore(trainer)

    def restart(self, trainer: Any) -> None:
        """Put the last good weights back, and let the optimiser begin anew."""
        self.restore(trainer)
        clear_optimizer(trainer)
