"""Supervised fine-tuning on rows of token ids with TRL's `SFTTrainer`; only labelled tokens carry a loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import datasets
import torch
from trl import SFTConfig, SFTTrainer

from .answer_scores import AnswerScores
from .context import RoundContext
from .live_batches import LiveBatches, NumberedCollator
from .live_data import LiveRows, Row
from .metering import MeteredTrainer
from .models import hold_to_device, training_arguments
from .packing import PackCollator, packed_columns
from .row_pools import ROW_NUMBER


class MeteredSFTTrainer(LiveBatches, MeteredTrainer, SFTTrainer):  # type: ignore[misc]
    """`SFTTrainer` that counts the tokens it trains on, and notes each row's mean negative log-likelihood."""

    scores: AnswerScores | None = None

    def compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], **kwargs: Any) -> Any:
        """Count, then compute TRL's loss unchanged."""
        packed = inputs.pop("tokens", None)
        attention_mask = inputs.get("attention_mask")
        tokens = packed if packed is not None else attention_mask.sum() if attention_mask is not None else None
        self.meter.trained_tokens += inputs["input_ids"].numel() if tokens is None else int(tokens)
        self.meter.sequences += len(inputs["input_ids"])
        self.meter.supervised_tokens += int((inputs["labels"][:, 1:] != -100).sum())  # nothing predicts a first token
        loss = super().compute_loss(model, inputs, **kwargs)
        if self.scores is not None and self.scores.policy is not None:
            self.note_losses(-self.scores.policy, self.scores.tokens)
        return loss


def build_trainer(context: RoundContext) -> Any:
    """Return the trainer for a recipe whose demonstrations are drawn."""
    return drawn_trainer(context, context.loss)


def drawn_trainer(context: RoundContext, loss: str = "nll") -> Any:
    """Return a trainer on the drawn rows, which may change while it trains, or on packs of them, which may not."""
    if context.packs:
        trainer = supervised_trainer(context, packed_columns(context.tokenised, context.packs), loss)
        trainer.rows_fixed = "rows are packed before the round begins"
        return trainer
    examples = row_examples(context, context.draw)
    columns = {name: [example[name] for example in examples] for name in ("input_ids", "labels", ROW_NUMBER)}
    trainer = supervised_trainer(context, columns, loss)
    trainer.follow(LiveRows(context.pools, context.seed, grouped=False), lambda rows: row_examples(context, rows))
    trainer.data_collator = NumberedCollator(trainer.data_collator)
    trainer.scores = AnswerScores.of(trainer.model)
    return trainer


def row_examples(context: RoundContext, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return rows as TRL's collator takes them, each with its number."""
    pools = context.pools
    return [
        {
            "input_ids": pools.tokenised(pool).input_ids[index],
            "labels": pools.tokenised(pool).labels[index],
            ROW_NUMBER: pools.number(pool, index),
        }
        for pool, index in rows
    ]


def supervised_trainer(
    context: RoundContext,
    columns: Mapping[str, list[Any]],
    loss: str = "nll",
    kind: type[MeteredSFTTrainer] = MeteredSFTTrainer,
) -> Any:
    """Return a trainer on rows in training order.

    Args:
        context: the round.
        columns: ``input_ids`` and ``labels`` of each row; packs have ``seq_lengths`` too, rows of pools their numbers.
        loss: ``"nll"``, the negative log-likelihood, or ``"dft"``.
        kind: class of the trainer.
    """
    packed = "seq_lengths" in columns
    trainer = kind(
        model=context.model,
        args=hold_to_device(
            SFTConfig(
                **training_arguments(context.recipe, context.seed, context.precision, context.device),
                max_length=context.recipe.max_length,
                loss_type=loss,
                dataset_kwargs={"skip_prepare_dataset": True},
            ),
            context.device,
        ),
        data_collator=PackCollator(context.tokenizer.pad_token_id) if packed else None,
        train_dataset=datasets.Dataset.from_dict(dict(columns)),
        processing_class=context.tokenizer,
        peft_config=context.peft_config(),
    )
    trainer.meter = context.meter
    return trainer
