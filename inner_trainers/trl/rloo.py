"""REINFORCE with a leave-one-out baseline on verifiable prompts with TRL's `RLOOTrainer`."""

from __future__ import annotations

from trl import RLOOConfig, RLOOTrainer

from .context import RoundContext
from .models import hold_to_device, training_arguments
from .on_policy import MeteredRollouts, made_ready, prompt_dataset, reward_function


class MeteredRLOOTrainer(MeteredRollouts, RLOOTrainer):  # type: ignore[misc]
    """`RLOOTrainer` that counts tokens and takes its reference weights from memory.

    Its probability ratio is that of a whole completion, and the KL divergence to the reference lowers the reward.
    """


def build_trainer(context: RoundContext) -> RLOOTrainer:
    """Return the trainer for a recipe whose prompts are drawn."""
    recipe = context.recipe
    trainer = MeteredRLOOTrainer(
        model=context.model,
        reward_funcs=[reward_function(context)],
        args=hold_to_device(
            RLOOConfig(
                **training_arguments(recipe, context.seed, context.precision, context.device),
                num_generations=recipe.num_generations,
                num_iterations=recipe.num_iterations,
                **context.sampling_arguments(),
                epsilon=recipe.clip_range,
                beta=recipe.kl_coef if recipe.lora_rank else 0.0,
            ),
            context.device,
        ),
        train_dataset=prompt_dataset(context),
        processing_class=context.tokenizer,
        peft_config=context.peft_config(),
    )
    return made_ready(trainer, context)
