"""What the algorithms that sample completions share: counting rollouts, verified rewards, prompts as a data set."""

from __future__ import annotations

import math
import reprlib
from typing import Any

import datasets
import torch
from trl.trainer.utils import add_fused_lm_head

from ..faults import RewardFault
from ..tasks.base import Source
from .context import RoundContext
from .session import MeteredTrainer


class MeteredRollouts(MeteredTrainer):
    """Mixin over TRL's group-sampling trainers that counts tokens and takes reference weights from memory.

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
        sampled = super()._generate_single_turn(prompt_ids, *args, **kwargs)  # type: ignore[misc]
        self.meter.scored_tokens += sum(map(len, prompt_ids))  # the prompts' forward pass before sampling
        self.meter.generated_tokens += sum(map(len, sampled[0]))
        self._rollout_tokens = sum(map(len, prompt_ids)) + sum(map(len, sampled[0]))
        return sampled

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        if self.beta:
            self.meter.scored_tokens += self._rollout_tokens  # the reference's log-probabilities, taken by now
        return super()._calculate_rewards(*args, **kwargs)  # type: ignore[misc]

    def _compute_loss(self, model: Any, inputs: dict[str, torch.Tensor]) -> Any:
        prompt, completion = int(inputs["prompt_mask"].sum()), int(inputs["completion_mask"].sum())
        self.meter.sequences += len(inputs["prompt_ids"])
        self.meter.trained_tokens += prompt + completion
        self.meter.supervised_tokens += completion
        return super()._compute_loss(model, inputs)  # type: ignore[misc]


def prompt_dataset(context: RoundContext) -> datasets.Dataset:
    """Return the drawn prompts as TRL takes them, each with where it came from."""
    names = sorted(context.sources)
    return datasets.Dataset.from_dict(
        {
            "prompt": [context.row(source, index, "prompts")["prompt"] for source, index in context.draw],
            "source_index": [names.index(source) for source, _ in context.draw],
            "row_index": [index for _, index in context.draw],
        }
    )


def reward_function(context: RoundContext) -> Any:
    """Return the reward function TRL calls: each completion goes to the verifier of its prompt's source."""
    names = sorted(context.sources)

    def verified(completions: list[str], source_index: list[int], row_index: list[int], **_: Any) -> list[float]:
        return [
            verified_reward(context.sources[names[number]], index, completion)
            for completion, number, index in zip(completions, source_index, row_index, strict=True)
        ]

    return verified


def verified_reward(source: Source, index: int, completion: str) -> float:
    """Return the verifier's reward for a completion of one prompt.

    Raises:
        RewardFault: the verifier raised, or returned something that is no finite number.
    """
    assert source.verifier is not None  # `Source` refuses prompts without one
    where = f"the verifier of source {source.name!r}, prompts row {index + 1},"
    try:
        reward = source.verifier(source.rows["prompts"][index], completion)
    except (Exception, SystemExit) as error:  # answers that are run as code may call `exit`
        raise RewardFault(f"{where} raised {type(error).__name__}: {error}") from error
    number = _finite_number(reward)
    if number is None:
        raise RewardFault(f"{where} returned {reprlib.repr(reward)}; expected a finite number")
    return number


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
