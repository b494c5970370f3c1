"""What a trainer counts while it trains, for costs, checks and curves."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from .gradients import GradientMeter


@dataclass
class Meter:
    """What the trainer counts while it trains; read while it is parked.

    Attributes:
        losses: raw loss of each forward pass since the last optimiser step; scalars that are still on the device.
        trained_tokens: tokens that went forward and backward, once for each model that they went through.
        generated_tokens: tokens sampled.
        scored_tokens: tokens that went forward only.
        teacher_tokens: those of the scored tokens that a teacher read.
        supervised_tokens: tokens that carried a loss.
        sequences: training sequences.
        extra: further values of the step that is running, put into its curve row and cleared.
        measured: the same for the monitor alone: they are no part of a curve.
        detail: whether to measure exactly and per source, at every step; the curve row then holds what was measured.
        own_seconds: what measuring took of the last step, by part.
        flags: sentences for the report.
        history: what made the round's weights others than those of the whole round, for `checkpoint_id`.
    """

    losses: list[torch.Tensor] = field(default_factory=list)
    trained_tokens: int = 0
    generated_tokens: int = 0
    scored_tokens: int = 0
    teacher_tokens: int = 0
    supervised_tokens: int = 0
    sequences: int = 0
    extra: dict[str, float] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)
    detail: bool = False
    own_seconds: dict[str, float] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    history: list[str] = field(default_factory=list)

    def take_loss(self) -> float:
        """Return the sum of the passes' losses, NaN without any, and forget them.

        One bad pass of an accumulated step shows. Called once the step's loss was logged, when the device has no work
        left that reading could wait for.
        """
        losses, self.losses = self.losses, []
        return sum(torch.stack(losses).tolist()) if losses else math.nan


class MeteredTrainer:
    """Mixin that reports the raw loss of every forward pass, before any logging filter sees it, and the gradient."""

    meter: Meter
    accelerator: Any
    args: Any
    _gradients: GradientMeter | None = None

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the pass and note its loss."""
        loss: torch.Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self.meter.losses.append(loss.detach())
        return loss

    def _clip_grad_norm(self, model: Any) -> Any:
        if self._gradients is None:
            self._gradients = GradientMeter(self._clipped_parameters(model))
        norm = self._gradients.clip(self.accelerator, self.args.max_grad_norm, self.meter.detail)
        return self._clipped_by_library(model) if norm is None else norm

    def _clipped_parameters(self, model: Any) -> list[tuple[str, torch.nn.Parameter]]:
        """Return the names and tensors whose gradients are clipped together, in the library's order."""
        return list(model.named_parameters())

    def _clipped_by_library(self, model: Any) -> Any:
        """Clip without measuring."""
        return super()._clip_grad_norm(model)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log; of an optimiser step, report the gradient first."""
        if "loss" in logs and self._gradients is not None:
            signals, norms = self._gradients.read()
            self.meter.measured |= signals
            self.meter.own_seconds["gradients"] = self._gradients.seconds
            if self.meter.detail:
                self.meter.extra |= signals | {f"grad_norm/{name}": norm for name, norm in norms.items()}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]
