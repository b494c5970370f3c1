"""Kahneman-Tversky optimisation on single answers marked good or bad with TRL's `KTOTrainer`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import datasets
import torch
from trl import KTOConfig, KTOTrainer

from .context import RoundContext
from .live_data import Row
from .metered_preferences import MeteredPreferences
from .models import hold_to_device, training_arguments
from .preferences import TokenisedPairs
from .row_pools import ROW_NUMBER


class MeteredKTOTrainer(MeteredPreferences, KTOTrainer):  # type: ignore[misc]
    """`KTOTrainer` that counts tokens, those of the KL estimate too, and notes each answer's loss."""

    beta: float

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
        scores = self.scores
        if scores is not None and scores.policy is not None and scores.reference is not None:
            side = inputs["label"].to(scores.policy.dtype) * 2 - 1  # 1 for a good answer, -1 for a bad one
            above = scores.policy - scores.reference - self._metrics["train"]["kl"][-1]
            self.note_losses(1 - torch.sigmoid(self.beta * side * above))
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
    live = AnswerSides()  # the loader's rows have sides of their own
    trainer.follow_pairs(context, lambda rows: answer_examples(context, rows, live))
    return trainer


def answer_dataset(context: RoundContext) -> datasets.Dataset:
    """Return one marked answer of each drawn pair, batch by batch, as a data set."""
    size, sides = context.recipe.batch_size, AnswerSides()
    batches = (context.draw[first : first + size] for first in range(0, len(context.draw), size))
    examples = [example for batch in batches for example in answer_examples(context, batch, sides)]
    return datasets.Dataset.from_dict({name: [example[name] for example in examples] for name in examples[0]})


def answer_examples(context: RoundContext, batch: Sequence[Row], sides: AnswerSides) -> list[dict[str, Any]]:
    """Return one marked answer of each pair of a batch, with the mismatched one of the KL divergence's estimate.

    Within a batch each prompt gets the answer of the prompt before it, the first that of the last.
    """
    examples: list[dict[str, Any]] = []
    for (pool, index), good in zip(batch, sides.next(batch), strict=True):
        pairs: TokenisedPairs = context.pools.tokenised(pool)
        ids = (pairs.chosen if good else pairs.rejected)[index]
        prompt = (pairs.chosen_prompt if good else pairs.rejected_prompt)[index]
        examples.append(
            {
                "prompt_ids": ids[:prompt],
                "completion_ids": ids[prompt:],
                "label": good,
                ROW_NUMBER: context.pools.number(pool, index),
            }
        )
    for example, before in zip(examples, [examples[-1], *examples[:-1]], strict=True):
        example["KL_completion_ids"] = before["completion_ids"]
    return examples


class AnswerSides:
    """Decides for each pair of one batch after another whether its better side is shown.

    Half of every batch is good (of an odd batch, one more or less by turns), and within that a pair shows the side it
    has shown less often.
    """

    def __init__(self) -> None:
        self._shown: Counter[Hashable] = Counter()  # times good minus times bad
        self._balance = 0

    def next(self, batch: Sequence[Hashable]) -> list[bool]:
        """Return for each pair of a batch whether its better side is shown."""
        shown = self._shown
        good_count = (len(batch) + (self._balance <= 0)) // 2
        good = set(sorted(range(len(batch)), key=lambda i: (shown[batch[i]], i % 2, i))[:good_count])
        for position, pair in enumerate(batch):
            shown[pair] += 1 if position in good else -1
        self._balance += 2 * good_count - len(batch)
        return [position in good for position in range(len(batch))]


def balanced_sides(draw: Sequence[Hashable], batch_size: int) -> list[bool]:
    """Return for each drawn pair whether its better side is shown; see `AnswerSides`."""
    sides = AnswerSides()
    return [side for first in range(0, len(draw), batch_size) for side in sides.next(draw[first : first + batch_size])]
