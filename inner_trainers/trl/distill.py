"""On-policy distillation from the task's teacher with TRL's `DistillationTrainer`.

The model samples completions of prompts, and at each of their tokens its distribution over the vocabulary is drawn
toward the teacher's. No reward is asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from trl import DistillationConfig, DistillationTrainer

from ..chat import ChatFormat
from ..tokens import without_added_end
from .context import RoundContext
from .live_batches import LiveBatches
from .metering import MeteredTrainer
from .models import hold_to_device, training_arguments
from .on_policy import follow_prompts, prompt_dataset

DIVERGENCES = {"reverse_kl": 1.0, "forward_kl": 0.0, "jsd": 0.5}
"""Loss variant -> the library's β, which moves from KL(teacher ‖ model) at 0 to KL(model ‖ teacher) at 1."""


class MeteredDistillationTrainer(LiveBatches, MeteredTrainer, DistillationTrainer):  # type: ignore[misc]
    """`DistillationTrainer` that counts tokens, the teacher's too, and takes its teacher from memory."""

    chat: ChatFormat | None = None

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        if self.chat is None:
            ids, *rest = super()._tokenize_prompts(prompts)
            return without_added_end(self.processing_class, prompts, ids), *rest
        return self.chat.prompts(prompts), None, {}

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        completion_ids = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        self.meter.scored_tokens += sum(map(len, prompt_ids))  # the prompts' forward pass before sampling
        self.meter.generated_tokens += sum(map(len, completion_ids))
        return completion_ids

    def _compute_loss(self, unwrapped_student: Any, inputs: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        supervised = int(inputs["completion_mask"].sum())
        tokens = int(inputs["prompt_mask"].sum()) + supervised
        self.meter.sequences += len(inputs["prompt_ids"])
        self.meter.trained_tokens += tokens
        self.meter.scored_tokens += tokens
        self.meter.teacher_tokens += tokens
        self.meter.supervised_tokens += supervised
        return super()._compute_loss(unwrapped_student, inputs, *args, **kwargs)


def build_trainer(context: RoundContext) -> DistillationTrainer:
    """Return the trainer for a recipe whose prompts are drawn."""
    trainer = MeteredDistillationTrainer(
        model=context.model,
        teacher_model=context.teacher(),
        args=hold_to_device(
            DistillationConfig(
                **training_arguments(context.recipe, context.seed, context.precision, context.device),
                **context.sampling_arguments(),
                beta=DIVERGENCES[context.loss],
            ),
            context.device,
        ),
        train_dataset=prompt_dataset(context),
        processing_class=context.tokenizer,
        peft_config=context.peft_config(),
    )
    trainer.chat = context.chat
    trainer.meter = context.meter
    follow_prompts(trainer, context)
    return trainer
