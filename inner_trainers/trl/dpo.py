"""Direct preference optimisation on pairs of a better and a worse answer with TRL's `DPOTrainer`."""

from __future__ import annotations

from typing import Any

import datasets
import torch
from trl import DPOConfig, DPOTrainer

from .context import RoundContext
from .metered_preferences import MeteredPreferences
from .models import hold_to_device, training_arguments
from .preferences import TokenisedPairs


class MeteredDPOTrainer(MeteredPreferences, DPOTrainer):  # type: ignore[misc]
    """`DPOTrainer` that counts the tokens of both sides."""

    def compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], **kwargs: Any) -> Any:
        """Count, then compute TRL's loss unchanged."""
        tokens = int(inputs["attention_mask"].sum())
        self.meter.trained_tokens += tokens
        self.meter.scored_tokens += tokens  # by the reference
        pairs = len(inputs["input_ids"]) // 2  # the better answers, then the worse ones
        self.meter.sequences += pairs
        self.meter.supervised_tokens += int(inputs["completion_mask"][:, 1:].sum())
        loss = super().compute_loss(model, inputs, **kwargs)
        self._note_chosen(inputs["completion_mask"][:pairs])
        return loss


def build_trainer(context: RoundContext) -> DPOTrainer:
    """Return the trainer for a recipe whose pairs are drawn."""
    recipe = context.recipe
    trainer = MeteredDPOTrainer(
        model=context.model,
        # without one the library scores with the adapter switched off, which is the model the round started from
        ref_model=None if recipe.lora_rank else context.reference().requires_grad_(False),
        args=hold_to_device(
            DPOConfig(
                **training_arguments(recipe, context.seed, context.precision, context.device),
                max_length=recipe.max_length,
                beta=recipe.beta,
                loss_type=context.loss.split("+"),
            ),
            context.device,
        ),
        train_dataset=pair_dataset(context),
        processing_class=context.tokenizer,
        peft_config=context.peft_config(),
    )
    trainer.meter = context.meter
    return trainer


def pair_dataset(context: RoundContext) -> datasets.Dataset:
    """Return the drawn pairs as TRL's collator takes them: token ids of the prompt and of both answers."""
    columns: dict[str, list[list[int]]] = {"prompt_ids": [], "chosen_ids": [], "rejected_ids": []}
    for pool, index in context.draw:
        pairs: TokenisedPairs = context.tokenised[pool]
        prompt = pairs.shared_prompt(index)
        columns["prompt_ids"].append(pairs.chosen[index][:prompt])
        columns["chosen_ids"].append(pairs.chosen[index][prompt:])
        columns["rejected_ids"].append(pairs.rejected[index][prompt:])
    return datasets.Dataset.from_dict(columns)
