"""Supervised fine-tuning on rows of token ids with TRL's `SFTTrainer`; only labelled tokens carry a loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import datasets
import torch
from trl import SFTConfig, SFTTrainer

from .context import RoundContext
from .metering import MeteredTrainer
from .models import hold_to_device, training_arguments
from .packing import PackCollator, packed_columns


class MeteredSFTTrainer(MeteredTrainer, SFTTrainer):  # type: ignore[misc]
    """`SFTTrainer` that counts the tokens it trains on."""

    def compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], **kwargs: Any) -> Any:
        """Count, then compute TRL's loss unchanged."""
        packed = inputs.pop("tokens", None)
        attention_mask = inputs.get("attention_mask")
        tokens = packed if packed is not None else attention_mask.sum() if attention_mask is not None else None
        self.meter.trained_tokens += inputs["input_ids"].numel() if tokens is None else int(tokens)
        self.meter.sequences += len(inputs["input_ids"])
        self.meter.supervised_tokens += int((inputs["labels"][:, 1:] != -100).sum())  # nothing predicts a first token
        return super().compute_loss(model, inputs, **kwargs)


def build_trainer(context: RoundContext) -> Any:
    """Return the trainer for a recipe whose demonstrations are drawn."""
    return supervised_trainer(context, drawn_columns(context), loss=context.loss)


def drawn_columns(context: RoundContext) -> dict[str, list[list[int]]]:
    """Return the drawn rows, or packs of them, in training order."""
    if context.packs:
        return packed_columns(context.tokenised, context.packs)
    rows = [(context.tokenised[pool], index) for pool, index in context.draw]
    return {
        "input_ids": [tokenised.input_ids[index] for tokenised, index in rows],
        "labels": [tokenised.labels[index] for tokenised, index in rows],
    }


def supervised_trainer(
    context: RoundContext,
    columns: Mapping[str, list[list[int]]],
    loss: str = "nll",
    kind: type[MeteredSFTTrainer] = MeteredSFTTrainer,
) -> Any:
    """Return a trainer on rows in training order.

    Args:
        context: the round.
        columns: ``input_ids`` and ``labels`` of each row; packs have ``seq_lengths`` too.
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
