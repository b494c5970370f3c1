"""Supervised fine-tuning on demonstrations with TRL's `SFTTrainer`; only completion tokens carry a loss."""

from __future__ import annotations

from typing import Any

import datasets
import torch
from trl import SFTConfig, SFTTrainer

from .context import RoundContext
from .models import hold_to_device, training_arguments
from .session import Meter, MeteredTrainer


class MeteredSFTTrainer(MeteredTrainer, SFTTrainer):  # type: ignore[misc]
    """`SFTTrainer` that counts the tokens it trains on."""

    def compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], **kwargs: Any) -> Any:
        """Count, then compute TRL's loss unchanged."""
        attention_mask = inputs.get("attention_mask")
        tokens = inputs["input_ids"].numel() if attention_mask is None else int(attention_mask.sum())
        self.meter.trained_tokens += tokens
        self.meter.sequences += len(inputs["input_ids"])
        self.meter.supervised_tokens += int((inputs["labels"][:, 1:] != -100).sum())  # nothing predicts a first token
        return super().compute_loss(model, inputs, **kwargs)


def build_trainer(context: RoundContext) -> tuple[SFTTrainer, Meter]:
    """Return the trainer for a recipe whose rows are drawn, with the meter it fills."""
    rows = [(context.tokenised[source], index) for source, index in context.draw]
    trainer = MeteredSFTTrainer(
        model=context.model,
        args=hold_to_device(
            SFTConfig(
                **training_arguments(context.recipe, context.seed, context.precision, context.device),
                max_length=context.recipe.max_length,
                dataset_kwargs={"skip_prepare_dataset": True},
            ),
            context.device,
        ),
        train_dataset=datasets.Dataset.from_dict(
            {
                "input_ids": [tokenised.input_ids[index] for tokenised, index in rows],
                "labels": [tokenised.labels[index] for tokenised, index in rows],
            }
        ),
        processing_class=context.tokenizer,
        peft_config=context.peft_config(),
    )
    trainer.meter = Meter()
    return trainer, trainer.meter
