"""Log-probabilities of whole answers, taken from the passes that a trainer makes anyway."""

from __future__ import annotations

import time
from typing import Any

import torch


class AnswerScores:
    """A forward hook that keeps, per row, the summed log-probability that TRL's fused head found for its labels.

    Nothing is computed again and nothing of the vocabulary's size is held: the head returns (B, T) log-probabilities.

    Attributes:
        policy: (B,), of the last pass that takes part in the gradient; None before one.
        tokens: (B,), how many labels each of them sums over.
        reference: (B,), of the last pass without a gradient: the reference's, as it is scored last; None without.
        seconds: what keeping them has taken so far.
    """

    def __init__(self) -> None:
        self.policy: torch.Tensor | None = None
        self.tokens: torch.Tensor | None = None
        self.reference: torch.Tensor | None = None
        self.seconds = 0.0

    @classmethod
    def of(cls, *models: Any) -> AnswerScores:
        """Return scores that follow the passes of all the models; None among them is left out."""
        scores = cls()
        for model in models:
            if model is not None:
                model.register_forward_hook(scores)
        return scores

    def __call__(self, module: Any, arguments: Any, outputs: Any) -> None:
        """Keep the scores of one pass."""
        found = getattr(outputs, "log_probs", None)
        if found is None:
            return
        began = time.perf_counter()
        if torch.is_grad_enabled():
            self.policy = found.detach().sum(dim=1)
            self.tokens = outputs.label_mask.sum(dim=1)
        else:
            self.reference = found.sum(dim=1)
        self.seconds += time.perf_counter() - began
