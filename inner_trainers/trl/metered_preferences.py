"""What DPO and KTO share: rows that are tokenised already, and how likely the better answers are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import datasets
import torch

from .answer_scores import AnswerScores
from .context import RoundContext
from .live_batches import LiveBatches, NumberedCollator
from .live_data import LiveRows, Row
from .metering import MeteredTrainer

CHOSEN_LOG_PROBABILITY = "chosen_log_probability"
"""Curve: mean log-probability of a token of the better answers, in nats. Both sides may fall while the margin grows."""


class MeteredPreferences(LiveBatches, MeteredTrainer):
    """Mixin over TRL's preference trainers that takes rows as token ids and notes the better answers' likelihood."""

    _metrics: dict[str, dict[str, list[float]]]
    _noted_sum: float
    _noted_tokens: int
    scores: AnswerScores | None = None

    def follow_pairs(self, context: RoundContext, examples: Callable[[Sequence[Row]], list[dict[str, Any]]]) -> None:
        """Let the pairs change while the round runs, and note the loss of each."""
        trainer: Any = self
        self.follow(LiveRows(context.pools, context.seed, grouped=False), examples)
        self.data_collator = NumberedCollator(self.data_collator)
        self.scores = AnswerScores.of(trainer.model, trainer.ref_model)

    def _prepare_dataset(self, dataset: datasets.Dataset, *args: Any) -> datasets.Dataset:
        return dataset  # the library's own way maps the rows several times, most of what building a trainer costs

    def _note_chosen(self, completion_mask: torch.Tensor) -> None:
        """Note the likelihood that the pass just found; ``completion_mask`` is that of the better answers alone."""
        if CHOSEN_LOG_PROBABILITY not in self.meter.extra:  # the first pass of a step
            self._noted_sum, self._noted_tokens = 0.0, 0
        tokens = int(completion_mask[:, 1:].sum())
        if tokens:
            self._noted_sum += self._metrics["train"]["logps/chosen"][-1] * len(completion_mask)
            self._noted_tokens += tokens
            self.meter.extra[CHOSEN_LOG_PROBABILITY] = self._noted_sum / self._noted_tokens
