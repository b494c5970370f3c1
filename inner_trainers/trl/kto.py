"""Kahneman-Tversky optimisation on single answers marked good or bad with TRL's `KTOTrainer`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import datasets
import torch
from trl import KTOConfig, KTOTrainer

from .context import RoundContext
from .metered_preferences import MeteredPreferences
from .models import hold_to_device, training_arguments
from .preferences import TokenisedPairs


class MeteredKTOTrainer(MeteredPreferences, KTOTrainer):  # type: ignore[misc]
    """`KTOTrainer` that counts tokens, those of the KL estimate too."""

    def compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], **kwargs: Any) -> Any:
        """Count, then compute TRL's loss unchanged."""
        tokens = int(inputs["attention_mask"].sum())
        mismatched = int(inputs["KL_attention_mask"].sum())
        self.meter.trained_tokens += tokens
        self.meter.scored_tokens += tokens + 2 * mismatched  # the reference reads both, the policy the mismatched
        self.meter.sequences += len(inputs["input_ids"])
        self.meter.supervised_tokens += int(inputs["completion_mask"][:, 1:].sum())
        loss = super().compute_loss(model, inputs, **kwargs)
        self._note_chosen(inputs["completion_mask"][inputs["label"]])
        return loss


def build_trainer(context: RoundContext) -> KTOTrainer:
    """Return the trainer for a recipe whose pairs are drawn."""
    recipe = context.recipe
    trainer = MeteredKTOTrainer(
        model=context.model,
        # without one the library scores with the adapter switched off, which is the model the round started from
        ref_model=None if recipe.lora_rank else context.reference().requires_grad_(False),
        args=hold_to_device(
            KTOConfig(
                **training_arguments(recipe, context.seed, context.precision, context.device),
                max_length=recipe.max_length,
                beta=recipe.beta,
            ),
            context.device,
        ),
        train_dataset=answer_dataset(context),
        processing_class=context.tokenizer,
        peft_config=context.peft_config(),
    )
    trainer.meter = context.meter
    return trainer


def answer_dataset(context: RoundContext) -> datasets.Dataset:
    """Return one marked answer of each drawn pair, and the mismatched answer that the KL divergence is estimated from.

    Within a batch each prompt gets the answer of the prompt before it, the first that of the last.
    """
    size = context.recipe.batch_size
    labels = balanced_sides(context.draw, size)
    prompts, answers = [], []
    for (pool, index), good in zip(context.draw, labels, strict=True):
        pairs: TokenisedPairs = context.tokenised[pool]
        ids = (pairs.chosen if good else pairs.rejected)[index]
        prompt = (pairs.chosen_prompt if good else pairs.rejected_prompt)[index]
        prompts.append(ids[:prompt])
        answers.append(ids[prompt:])
    mismatched: list[list[int]] = []
    for first in range(0, len(answers), size):
        batch = answers[first : first + size]
        mismatched += [batch[-1], *batch[:-1]]
    return datasets.Dataset.from_dict(
        {"prompt_ids": prompts, "completion_ids": answers, "KL_completion_ids": mismatched, "label": labels}
    )


def balanced_sides(draw: Sequence[Hashable], batch_size: int) -> list[bool]:
    """Return for each drawn pair whether its better side is shown.

    Half of every batch is good (of an odd batch, one more or less by turns), and within that a pair shows the side it
    has shown less often.
    """
    shown: Counter[Hashable] = Counter()  # times good minus times bad
    balance = 0
    sides: list[bool] = []
    for first in range(0, len(draw), batch_size):
        batch = draw[first : first + batch_size]
        good_count = (len(batch) + (balance <= 0)) // 2
        good = set(sorted(range(len(batch)), key=lambda i: (shown[batch[i]], i % 2, i))[:good_count])
        for position, pair in enumerate(batch):
            shown[pair] += 1 if position in good else -1
            sides.append(position in good)
        balance += 2 * good_count - len(batch)
    return sides
