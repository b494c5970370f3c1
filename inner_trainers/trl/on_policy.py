"""What the algorithms that sample completions share: counting rollouts, verified rewards, prompts as a data set."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import datasets
import torch
from trl.trainer.utils import add_fused_lm_head

from ..chat import ChatFormat
from ..conversations import Conversation, carry_on
from ..faults import RewardFault
from ..messages import first_line
from ..monitor import reward_sparsity
from ..printed import prints_kept
from ..tasks.base import Source
from ..tokens import without_added_end
from .algorithms import ALGORITHMS
from .context import RoundContext
from .live_batches import LiveBatches
from .live_data import LiveRows, Row
from .metering import MeteredTrainer
from .row_pools import ROW_NUMBER

LARGEST_REWARD = 1e6
"""Largest size of a reward; far beyond it, 32-bit sums and differences of rewards say nothing."""


class MeteredRollouts(LiveBatches, MeteredTrainer):
    """Mixin over TRL's group-sampling trainers that counts tokens and takes reference weights from memory.

    Sampled and scored tokens are counted when they are made, so a rollout whose verifier raises is charged too.
    """

    accelerator: Any
    processing_class: Any
    temperature: float
    num_generations: int
    max_completion_length: int
    rollout_func: Any
    _metrics: dict[str, dict[str, list[float]]]
    _batch_metrics: dict[str, list[float]]
    _chat: ChatFormat | None = None

    def converse(self, chat: ChatFormat | None) -> None:
        """Write prompts as turns, and go on after a tool's answers; None leaves prompts as text to continue."""
        self._chat = chat
        if chat is not None and chat.uses_tool:
            self.rollout_func = self._sample_conversations
            self.max_completion_length *= chat.chat.max_turns  # only the loss `dr_grpo` reads it from here on

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        if self._chat is None:
            ids, *rest = super()._tokenize_prompts(prompts)  # type: ignore[misc]
            return without_added_end(self.processing_class, prompts, ids), *rest
        return self._chat.prompts(prompts), None, {}

    @staticmethod
    def _sample_conversations(prompts: list[str], trainer: MeteredRollouts) -> dict[str, Any]:
        """Return what the library takes from a rollout function: what the model did not sample has mask 0."""
        chat = trainer._chat
        assert chat is not None

        def sample(sequences: list[list[int]]) -> list[list[int]]:
            turns: list[list[int]] = trainer._generate_single_turn(sequences, None, {}, trainer.num_generations)[0]
            return turns

        conversations = [Conversation(ids) for ids in chat.prompts(prompts)]
        for conversation, turn in zip(conversations, sample([c.prompt for c in conversations]), strict=True):
            conversation.add_turn(turn)
        carry_on(chat, conversations, sample)
        return {
            "prompt_ids": [conversation.prompt for conversation in conversations],
            "completion_ids": [conversation.tokens for conversation in conversations],
            "logprobs": None,
            "env_mask": [conversation.chosen for conversation in conversations],
            "last_turn": [chat.text(conversation.last_turn) for conversation in conversations],
        }

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
        completion_ids = sampled[0] if isinstance(sampled, tuple) else sampled  # RLOO returns the ids alone
        self.meter.generated_tokens += sum(map(len, completion_ids))
        return sampled

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if not torch.is_grad_enabled():  # log-probabilities of the reference, or of the policy before an update
            self.meter.scored_tokens += int(attention_mask.sum())
        return super()._get_per_token_logps_and_entropies(  # type: ignore[misc]
            model, input_ids, attention_mask, *args, **kwargs
        )

    def _calculate_rewards(self, inputs: list[dict[str, Any]], *args: Any, **kwargs: Any) -> Any:
        """Return TRL's rewards, (B, reward functions), and note each source's mean and how hard each prompt was."""
        rewards = super()._calculate_rewards(inputs, *args, **kwargs)  # type: ignore[misc]
        rows, totals = self.live_rows, rewards.sum(dim=1).tolist()
        sparsity = reward_sparsity(totals)
        if sparsity is not None:
            self._metrics["train"]["reward_sparsity"].append(sparsity)
        if rows is not None:
            numbers = [prompt[ROW_NUMBER] for prompt in inputs]
            for name, mean in rows.pools.means(numbers, totals).items():
                self._metrics["train"][f"reward/{name}"].append(mean)
            size = self.num_generations  # 1 where nothing compares completions; those of one prompt stand together
            groups = (totals[first : first + size] for first in range(0, len(totals), size))
            rows.grade(numbers[::size], [1.0 - sum(group) / size for group in groups])
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = self._with_advantages(super()._generate_and_score_completions(inputs))  # type: ignore[misc]
        # The step that samples a batch starts with empty metrics, so these are the batch's own. What faults are found
        # by is left out: a later step's gradient may be 0 without any fault, when every ratio is clipped.
        self._batch_metrics = {
            name: list(values)
            for name, values in self._metrics["train"].items()
            if name != "frac_reward_zero_std" and not name.startswith("rewards/")
        }
        return batch

    def _with_advantages(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the sampled batch as it is; for algorithms that replace what the library took for advantages."""
        return batch

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log a step; one that uses a batch again (``num_iterations``) shows that batch's rewards and lengths."""
        metrics = self._metrics["train"]
        if "loss" in logs and "reward" not in metrics:
            metrics.update({name: list(values) for name, values in self._batch_metrics.items() if name not in metrics})
        super().log(logs, *args, **kwargs)

    def _compute_loss(self, model: Any, inputs: dict[str, torch.Tensor]) -> Any:
        completion_mask = inputs["completion_mask"]
        self.meter.sequences += len(inputs["prompt_ids"])
        self.meter.trained_tokens += int(inputs["prompt_mask"].sum()) + int(completion_mask.sum())
        self.meter.supervised_tokens += int(policy_mask(inputs).sum())
        return super()._compute_loss(model, inputs)  # type: ignore[misc]


def made_ready(trainer: Any, context: RoundContext) -> Any:
    """Return a group-sampling trainer with what its constructor does not take: reference, conversations, meter."""
    if context.recipe.kl_coef > 0 and not context.recipe.lora_rank:
        trainer.keep_close_to(context.reference(), context.recipe.kl_coef)
    trainer.converse(context.chat)
    trainer.meter = context.meter
    follow_prompts(trainer, context)
    return trainer


def follow_prompts(trainer: LiveBatches, context: RoundContext) -> None:
    """Let the prompts of a trainer that samples change while it trains."""
    grouped = ALGORITHMS[context.recipe.algorithm].grouped
    trainer.follow(LiveRows(context.pools, context.seed, grouped), lambda rows: prompt_examples(context, rows))


def policy_mask(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return which completion tokens the policy chose: (B, T) of 0 and 1, without padding and a tool's tokens."""
    mask = batch["completion_mask"]
    return mask if "tool_mask" not in batch else mask * batch["tool_mask"]


def prompt_dataset(context: RoundContext) -> datasets.Dataset:
    """Return the drawn prompts as TRL takes them, each with its number."""
    examples = prompt_examples(context, context.draw)
    return datasets.Dataset.from_dict({name: [example[name] for example in examples] for name in examples[0]})


def prompt_examples(context: RoundContext, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return prompts as TRL takes them, each with its number."""
    pools = context.pools
    return [
        {"prompt": pools.source(name).rows["prompts"][index]["prompt"], ROW_NUMBER: pools.number(name, index)}
        for name, index in rows
    ]


def reward_function(context: RoundContext) -> Any:
    """Return the reward function TRL calls: each completion goes to the verifier of its prompt's source."""
    pools = context.pools

    def verified(
        completions: list[str], row_number: list[int], last_turn: list[str] | None = None, **_: Any
    ) -> list[float]:
        answers = completions if last_turn is None else last_turn  # of a conversation, only how it ended
        rows = [pools.row(number) for number in row_number]
        return [
            verified_reward(pools.source(name), index, answer, context.meter.flags)
            for answer, (name, index) in zip(answers, rows, strict=True)
        ]

    return verified


def verified_reward(source: Source, index: int, completion: str, flags: list[str]) -> float:
    """Return the verifier's reward for a completion of one prompt.

    Args:
        source: the prompt's source.
        index: place of the row among its prompts.
        completion: what is judged.
        flags: is told once that the verifier prints; what it prints is not shown.

    Raises:
        RewardFault: the verifier raised, or returned something that is no finite number.
    """
    assert source.verifier is not None  # `Source` refuses prompts without one
    where = f"the verifier of source {source.name!r}, prompts row {index + 1},"
    try:
        # a verifier that could change the row would change the task under its content hash
        with prints_kept() as printed:
            reward = source.verifier(MappingProxyType(source.rows["prompts"][index]), completion)
    except (Exception, SystemExit, KeyboardInterrupt, GeneratorExit) as error:
        # answers that are run as code may call `exit`, or worse; a person's Ctrl-C reaches the main thread alone
        raise RewardFault(f"{where} raised {first_line(error)}") from error
    if printed:
        told = f"the verifier of source {source.name!r} prints, which is not shown"
        if not any(flag.startswith(told) for flag in flags):
            flags.append(f"{told}; the first line: {printed.first!r}")
    number = _finite_number(reward)
    if number is None:
        raise RewardFault(f"{where} returned {reprlib.repr(reward)}; expected a finite number")
    if abs(number) > LARGEST_REWARD:
        raise RewardFault(
            f"{where} returned {number:g}; expected a number in [-{LARGEST_REWARD:g}, {LARGEST_REWARD:g}]"
        )
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
