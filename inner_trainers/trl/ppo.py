"""Proximal policy optimisation with a critic on verifiable prompts, built on TRL's `GRPOTrainer`.

TRL has no PPO trainer. What its GRPO trainer does is used unchanged: sampling, rewards, the clipped surrogate, the
entropy bonus. What it takes for advantages is replaced: one completion per prompt, judged token by token against the
critic's values. The KL divergence to the starting checkpoint lowers each token's reward and is no part of the loss.
"""

from __future__ import annotations

from typing import Any

import torch
from trl import GRPOConfig, GRPOTrainer

from .context import RoundContext
from .gae import clipped_value_losses, explained_variance, generalised_advantages, token_rewards, whitened
from .models import hold_to_device, training_arguments
from .on_policy import MeteredRollouts, follow_prompts, policy_mask, prompt_dataset, reward_function
from .value import ValueHead, ValueModel, chosen_in, hidden_states_noted, trunk_of


class PPOConfig(GRPOConfig):  # type: ignore[misc]
    """`GRPOConfig` for one completion per prompt; ``num_generations`` is ignored."""

    def __post_init__(self) -> None:
        """Check as GRPO does, then take groups of one."""
        # GRPO refuses groups of one, whose advantages would all be 0; here nothing compares completions. The checks,
        # which also work out the size of a sampled batch, see every completion beside a twin that is then taken away.
        self.per_device_train_batch_size *= 2
        self.num_generations = 2
        super().__post_init__()
        self.per_device_train_batch_size //= 2
        self.generation_batch_size //= 2
        self.num_generations = 1


class PPOTrainer(MeteredRollouts, GRPOTrainer):  # type: ignore[misc]
    """PPO on completions: generalised advantages, clipped policy and value losses.

    The critic is trained by the policy's optimiser and clipped with the policy's gradient. It is no part of
    ``model``, so a checkpoint never holds it, and each round starts with a new one.

    Attributes:
        critic: a `ValueHead` on the policy's trunk, whose forward pass it shares and which its gradient reaches; a
            `ValueModel`; or None. Set before training begins.
        kl_coef: weight of the penalty ``kl_coef · (log π − log π_ref)`` in each token's reward; above 0 only after
            `keep_close_to`.
        gamma: discount per token.
        gae_lambda: λ of the advantages. These three are read for each sampled batch.
        vf_coef: weight of the value loss.
        clip_range_vf: how far a value may move from its old one. These two are read at each step.
    """

    critic: ValueHead | ValueModel | None = None
    kl_coef = 0.0
    gamma = 1.0
    gae_lambda = 0.95
    vf_coef = 0.5
    clip_range_vf = 0.2

    def keep_close_to(self, reference: Any, kl_coef: float) -> None:
        """Penalise the KL divergence to ``reference`` in the rewards; None is the model with its adapters off."""
        if reference is not None:
            super().keep_close_to(reference, kl_coef)
        self.kl_coef = kl_coef
        self.beta = 0.0  # the library's own penalty belongs to the loss

    # Advantages -------------------------------------------------------------------------------------------------

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        rewards = super()._calculate_rewards(*args, **kwargs)
        self._scores = rewards.sum(dim=1)  # (B,), one reward function
        return rewards

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not isinstance(self.critic, ValueHead):
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
            )
        with hidden_states_noted(self.accelerator.unwrap_model(model)) as states:
            result = super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
            )
        self._values = chosen_in(self.critic, torch.cat(states), logits_to_keep)
        return result

    def _with_advantages(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the sampled batch with per-token advantages, and with returns and old values for the critic."""
        mask = policy_mask(batch)
        with torch.no_grad():
            values, divergence = self._old_values_and_divergence(batch)
        rewards = token_rewards(self._scores, mask) - self.kl_coef * divergence * mask
        advantages = generalised_advantages(rewards, values, mask, self.gamma, self.gae_lambda)
        returns = advantages + values
        chosen = mask > 0
        metrics = self._metrics["train"]
        del metrics["frac_reward_zero_std"]  # groups of one never have spread
        metrics["advantage_std"].append(float(advantages[chosen].std(correction=0)))
        metrics["returns_mean"].append(float(returns[chosen].mean()))
        if self.kl_coef:
            metrics["kl"].append(float(divergence[chosen].mean()))
        if self.critic is not None:
            metrics["explained_variance"].append(explained_variance(values, returns, mask))
            batch |= {"old_values": values, "returns": returns}
        return batch | {"advantages": whitened(advantages, mask)}

    def _old_values_and_divergence(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values of the states before the first update, and log π − log π_ref: (B, T) each.

        Log-probabilities and the value head's values come out of one pass, which the library has made already when
        the batch will be used more than once.
        """
        ids, attention, completion = _whole(batch)
        log_probabilities: Any = batch.get("old_per_token_logps")
        if log_probabilities is None and (self.kl_coef or isinstance(self.critic, ValueHead)):
            log_probabilities = self._log_probabilities(self.model, ids, attention, completion)
        values = torch.zeros(batch["completion_ids"].shape, device=ids.device)
        if isinstance(self.critic, ValueHead):
            values = self._values
        elif self.critic is not None:
            self.meter.scored_tokens += int(attention.sum())
            size = self.args.per_device_train_batch_size
            chunks = zip(ids.split(size), attention.split(size), strict=True)
            values = torch.cat([self._value_model_values(i, a, completion) for i, a in chunks])
        divergence = torch.zeros_like(values)
        if self.kl_coef:
            if self.ref_model is not None:
                reference = self._log_probabilities(self.ref_model, ids, attention, completion)
            else:
                with self.accelerator.unwrap_model(self.model).disable_adapter():
                    reference = self._log_probabilities(self.model, ids, attention, completion)
            divergence = log_probabilities - reference
        return values, divergence

    def _log_probabilities(
        self, model: Any, ids: torch.Tensor, attention: torch.Tensor, completion: int
    ) -> torch.Tensor:
        size = self.args.per_device_train_batch_size
        found: torch.Tensor = self._get_per_token_logps_and_entropies(
            model, ids, attention, completion, batch_size=size
        )[0]
        return found

    def _value_model_values(self, ids: torch.Tensor, attention: torch.Tensor, completion: int) -> torch.Tensor:
        assert isinstance(self.critic, ValueModel)
        with self.accelerator.autocast():
            values: torch.Tensor = self.critic(ids, attention, completion)
        return values

    # Updates ----------------------------------------------------------------------------------------------------

    def _compute_loss(self, model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = super()._compute_loss(model, inputs)
        if self.critic is None:
            return loss
        ids, attention, completion = _whole(inputs)
        if isinstance(self.critic, ValueHead):
            values = self._values  # of the pass that has just given the log-probabilities
        else:
            self.meter.trained_tokens += int(attention.sum())
            values = self._value_model_values(ids, attention, completion)
        losses = clipped_value_losses(values, inputs["old_values"], inputs["returns"], self.clip_range_vf)
        # as the policy's loss: a mean over all tokens of the optimiser step, of which this pass may be a part
        value_loss = (losses * policy_mask(inputs)).sum() / inputs["num_items_in_batch"].clamp(min=1)
        passes = self.current_gradient_accumulation_steps
        self._metrics["train"]["value_loss"].append(float(value_loss.detach()) * passes)
        return loss + self.vf_coef * value_loss

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the pass; the first of an optimiser step clears the critic's gradient, as the library the model's."""
        if self.critic is not None and self._step % self.current_gradient_accumulation_steps == 0:
            self.critic.zero_grad()
        return super().training_step(*args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Return one optimiser over the policy and the critic."""
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(*args, **kwargs)
        if is_new and self.critic is not None:
            decayed = set(self.get_decay_parameter_names(self.critic))
            for decays in (True, False):
                parameters = [
                    parameter
                    for name, parameter in self.critic.named_parameters()
                    if parameter.requires_grad and (name in decayed) == decays
                ]
                weight_decay = self.args.weight_decay if decays else 0.0
                optimizer.add_param_group({"params": parameters, "weight_decay": weight_decay})
        return optimizer

    def _clipped_parameters(self, model: Any) -> list[tuple[str, torch.nn.Parameter]]:
        critic = [] if self.critic is None else self.critic.named_parameters()
        return [*super()._clipped_parameters(model), *((f"critic.{name}", tensor) for name, tensor in critic)]

    def _clipped_by_library(self, model: Any) -> Any:
        if self.critic is None:
            return super()._clipped_by_library(model)
        both = [*model.parameters(), *self.critic.parameters()]
        return self.accelerator.clip_grad_norm_(both, self.args.max_grad_norm)


def _whole(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return prompts with completions, their attention mask, (B, P + T) each, and T."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    return ids, attention, batch["completion_ids"].shape[1]


def build_trainer(context: RoundContext) -> PPOTrainer:
    """Return the trainer for a recipe whose prompts are drawn."""
    recipe = context.recipe
    trainer = PPOTrainer(
        model=context.model,
        reward_funcs=[reward_function(context)],
        args=hold_to_device(
            PPOConfig(
                **training_arguments(recipe, context.seed, context.precision, context.device),
                num_iterations=recipe.num_iterations,
                **context.sampling_arguments(),
                loss_type="dapo",  # with one's own advantages: the mean over all tokens of an optimiser step
                scale_rewards="none",
                entropy_coef=recipe.entropy_coef,
                epsilon=recipe.clip_range,
                beta=0.0,
            ),
            context.device,
        ),
        train_dataset=prompt_dataset(context),
        processing_class=context.tokenizer,
        peft_config=context.peft_config(),
    )
    if recipe.kl_coef > 0:
        trainer.keep_close_to(None if recipe.lora_rank else context.reference(), recipe.kl_coef)
    trainer.critic = _critic(context, trainer)
    trainer.gamma, trainer.gae_lambda = recipe.gamma, recipe.gae_lambda
    trainer.vf_coef, trainer.clip_range_vf = recipe.vf_coef, recipe.clip_range_vf
    trainer.converse(context.chat)
    trainer.meter = context.meter
    follow_prompts(trainer, context)
    return trainer


def _critic(context: RoundContext, trainer: PPOTrainer) -> ValueHead | ValueModel | None:
    """Return the recipe's critic. A value model has LoRA adapters of the policy's rank when the policy has."""
    if context.recipe.critic == "none":
        return None
    if context.recipe.critic == "head":
        return ValueHead(trunk_of(trainer.model).config.hidden_size).to(context.device)
    model = context.reference().requires_grad_(True)
    adapters = context.peft_config()
    if adapters is not None:
        from peft import get_peft_model

        model = get_peft_model(model, adapters).eval()
    return ValueModel(model)
