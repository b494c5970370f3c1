"""Direct preference optimisation on pairs of a better and a worse answer with TRL's `DPOTrainer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
import torch
from torch.nn.functional import logsigmoid
from trl import DPOConfig, DPOTrainer

from .context import RoundContext
from .live_data import Row
from .metered_preferences import MeteredPreferences
from .models import hold_to_device, training_arguments
from .preferences import TokenisedPairs
from .row_pools import ROW_NUMBER


class MeteredDPOTrainer(MeteredPreferences, DPOTrainer):  # type: ignore[misc]
    """`DPOTrainer` that counts the tokens of both sides, and notes each pair's loss."""

    beta: float
    loss_types: list[str]

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
        self._note_pair_losses(inputs["completion_mask"])
        return loss

    def _note_pair_losses(self, completion_mask: torch.Tensor) -> None:
        """Note each pair's loss; a part that the library means over the tokens of a batch is the pair's own mean."""
        scores = self.scores
        if scores is None or scores.policy is None or scores.reference is None or scores.tokens is None:
            return
        chosen, rejected = (scores.policy - scores.reference).chunk(2)
        losses = torch.zeros_like(chosen)
        for kind in self.loss_types:
            if kind == "sigmoid":
                losses = losses - logsigmoid(self.beta * (chosen - rejected))
            elif kind == "ipo":
                better, worse = completion_mask.sum(dim=1).clamp(min=1).chunk(2)
                losses = losses + (chosen / better - rejected / worse - 1 / (2 * self.beta)) ** 2
            else:  # "sft"
                losses = losses - scores.policy.chunk(2)[0] / scores.tokens.chunk(2)[0].clamp(min=1)
        self.note_losses(losses)


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
    trainer.follow_pairs(context, lambda rows: pair_examples(context, rows))
    return trainer


def pair_dataset(context: RoundContext) -> datasets.Dataset:
    """Return the drawn pairs as a data set."""
    examples = pair_examples(context, context.draw)
    return datasets.Dataset.from_dict({name: [example[name] for example in examples] for name in examples[0]})


def pair_examples(context: RoundContext, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return pairs as TRL's collator takes them: token ids of the prompt and of both answers, and the row's number."""
    examples = []
    for pool, index in rows:
        pairs: TokenisedPairs = context.pools.tokenised(pool)
        prompt = pairs.shared_prompt(index)
        examples.append(
            {
                "prompt_ids": pairs.chosen[index][:prompt],
                "chosen_ids": pairs.chosen[index][prompt:],
                "rejected_ids": pairs.rejected[index][prompt:],
                ROW_NUMBER: context.pools.number(pool, index),
            }
        )
    return examples
