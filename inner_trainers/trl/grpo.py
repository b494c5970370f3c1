"""Group-relative policy optimisation on verifiable prompts with TRL's `GRPOTrainer`."""

from __future__ import annotations

from trl import GRPOConfig, GRPOTrainer

from .context import RoundContext
from .models import hold_to_device, training_arguments
from .on_policy import MeteredRollouts, made_ready, prompt_dataset, reward_function


class MeteredGRPOTrainer(MeteredRollouts, GRPOTrainer):  # type: ignore[misc]
    """`GRPOTrainer` that counts tokens and takes its reference weights from memory."""


def build_trainer(context: RoundContext) -> GRPOTrainer:
    """Return the trainer for a recipe whose prompts are drawn."""
    recipe = context.recipe
    trainer = MeteredGRPOTrainer(
        model=context.model,
        reward_funcs=[reward_function(context)],
        args=hold_to_device(
            GRPOConfig(
                **training_arguments(recipe, context.seed, context.precision, context.device),
                num_generations=recipe.num_generations,
                num_iterations=recipe.num_iterations,
                **context.sampling_arguments(),
                loss_type=context.loss,
                entropy_coef=recipe.entropy_coef,
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
