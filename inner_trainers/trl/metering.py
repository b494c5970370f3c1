"""What a trainer counts while it trains, for costs, checks and curves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Meter:
    """What the trainer counts while it trains; read while it is parked.

    Attributes:
        losses: raw loss of each forward pass since the last optimiser step.
        trained_tokens: tokens that went forward and backward, once for each model that they went through.
        generated_tokens: tokens sampled.
        scored_tokens: tokens that went forward only.
        teacher_tokens: those of the scored tokens that a teacher read.
        supervised_tokens: tokens that carried a loss.
        sequences: training sequences.
        extra: further values of the step that is running, put into its curve row and cleared.
        flags: sentences for the report.
        history: what made the round's weights others than those of the whole round, for `checkpoint_id`.
    """

    losses: list[float] = field(default_factory=list)
    trained_tokens: int = 0
    generated_tokens: int = 0
    scored_tokens: int = 0
    teacher_tokens: int = 0
    supervised_tokens: int = 0
    sequences: int = 0
    extra: dict[str, float] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    history: list[str] = field(default_factory=list)


class MeteredTrainer:
    """Mixin that reports the raw loss of every forward pass, before any logging filter sees it."""

    meter: Meter

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the pass and note its loss."""
        loss: torch.Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self.meter.losses.append(float(loss))
        return loss
