"""Group-relative policy optimisation on verifiable prompts with TRL's `GRPOTrainer`."""

from __future__ import annotations

import math
import reprlib
from typing import Any

import datasets
import torch
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from ..faults import RewardFault
from .context import RoundContext
from .models import hold_to_device, training_arguments
from .session import Meter, MeteredTrainer


class MeteredGRPOTrainer(MeteredTrainer, GRPOTrainer):  # type: ignore[misc]
    """`GRPOTrainer` that counts tokens and takes its reference weights from memory.

    Sampled and scored tokens are counted when they are made, so a rollout whose verifier raises is charged too.
    """

    def keep_close_to(self, reference: Any, kl_coef: float) -> None:
        """Penalise the KL divergence to ``reference``.

        TRL loads its reference model from the path in the model's config, which for a round that starts from
        trained weights would be other weights than the round's start.
        """
        reference.requires_grad_(False)
        add_fused_lm_head(reference, temperature=self.temperature)
        self.ref_model = self.accelerator.prepare_model(reference, evaluation_mode=True)
        self.beta = kl_coef

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        sampled = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        self.meter.scored_tokens += sum(map(len, prompt_ids))  # the prompts' forward pass before sampling
        self.meter.generated_tokens += sum(map(len, sampled[0]))
        self._rollout_tokens = sum(map(len, prompt_ids)) + sum(map(len, sampled[0]))
        return sampled

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        if self.beta:
            self.meter.scored_tokens += self._rollout_tokens  # the reference's log-probabilities, taken by now
        return super()._calculate_rewards(*args, **kwargs)

    def _compute_loss(self, model: Any, inputs: dict[str, torch.Tensor]) -> Any:
        prompt, completion = int(inputs["prompt_mask"].sum()), int(inputs["completion_mask"].sum())
        self.meter.sequences += len(inputs["prompt_ids"])
        self.meter.trained_tokens += prompt + completion
        self.meter.supervised_tokens += completion
        return super()._compute_loss(model, inputs)


def build_trainer(context: RoundContext) -> tuple[GRPOTrainer, Meter]:
    """Return the trainer for a recipe whose prompts are drawn, with the meter it fills."""
    recipe = context.recipe
    names = sorted(context.sources)
    trainer = MeteredGRPOTrainer(
        model=context.model,
        reward_funcs=[_reward_function(context, names)],
        args=hold_to_device(
            GRPOConfig(
                **training_arguments(recipe, context.seed, context.precision, context.device),
                num_generations=recipe.num_generations,
                max_completion_length=context.task.built.benchmark.max_new_tokens,
                temperature=recipe.temperature,
                beta=recipe.kl_coef if recipe.lora_rank else 0.0,
            ),
            context.device,
        ),
        train_dataset=datasets.Dataset.from_dict(
            {
                "prompt": [context.row(source, index, "prompts")["prompt"] for source, index in context.draw],
                "source_index": [names.index(source) for source, _ in context.draw],
                "row_index": [index for _, index in context.draw],
            }
        ),
        processing_class=context.tokenizer,
        peft_config=context.peft_config(),
    )
    if recipe.kl_coef > 0 and not recipe.lora_rank:
        trainer.keep_close_to(context.reference(), recipe.kl_coef)
    trainer.meter = Meter()
    return trainer, trainer.meter


def _reward_function(context: RoundContext, names: list[str]) -> Any:
    def verified(completions: list[str], source_index: list[int], row_index: list[int], **_: Any) -> list[float]:
        rewards = []
        for completion, source_number, index in zip(completions, source_index, row_index, strict=True):
            source = context.sources[names[source_number]]
            row = source.rows["prompts"][index]
            assert source.verifier is not None  # `Source` refuses prompts without one
            where = f"the verifier of source {source.name!r}, prompts row {index + 1},"
            try:
                reward = source.verifier(row, completion)
            except (Exception, SystemExit) as error:  # answers that are run as code may call `exit`
                raise RewardFault(f"{where} raised {type(error).__name__}: {error}") from error
            number = _finite_number(reward)
            if number is None:
                raise RewardFault(f"{where} returned {reprlib.repr(reward)}; expected a finite number")
            rewards.append(number)
        return rewards

    return verified


def _finite_number(value: Any) -> float | None:
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # a NumPy or torch scalar
        value = value.item()
    if not isinstance(value, bool | int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
