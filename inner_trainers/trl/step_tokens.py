"""The most tokens that one optimiser step of an algorithm can cost, from the longest sequences that it can meet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..recipe import Recipe


@dataclass(frozen=True)
class Lengths:
    """The longest sequences of a round's sources, in tokens.

    Attributes:
        prompt: longest prompt; 0 for algorithms that train on whole rows.
        completion: longest completion that is sampled; in a conversation, longest assistant turn.
        row: longest training row at the recipe's ``max_length``; for preferences the longer side.
        turns: most assistant turns of a sampled conversation.
        tool_turn: most tokens between two of them.
    """

    prompt: int
    completion: int
    row: int
    turns: int = 1
    tool_turn: int = 0

    @property
    def generated(self) -> int:
        """Most tokens that are sampled in one conversation."""
        return self.turns * self.completion

    @property
    def whole(self) -> int:
        """Length of the longest prompt with everything after it."""
        return self.prompt + self.generated + (self.turns - 1) * self.tool_turn

    @property
    def read(self) -> int:
        """Most tokens that are read before the turns of one conversation: each turn reads all that is before it."""
        before = self.turns * (self.turns - 1) // 2
        return self.turns * self.prompt + before * (self.completion + self.tool_turn)


@dataclass(frozen=True)
class StepTokens:
    """The most tokens of one optimiser step: trained, sampled, scored by the model itself, scored by a teacher."""

    trained: int = 0
    generated: int = 0
    scored: int = 0
    teacher: int = 0


def _sequences(recipe: Recipe) -> int:
    return recipe.batch_size * recipe.gradient_accumulation


def whole_rows(recipe: Recipe, lengths: Lengths) -> StepTokens:
    """Return the bound of training on rows as they are; packed rows fill `max_length`."""
    row = recipe.max_length if recipe.packing else lengths.row
    return StepTokens(trained=_sequences(recipe) * row)


def pairs(recipe: Recipe, lengths: Lengths) -> StepTokens:
    """Return the bound of DPO: both sides of each pair, by the model and by its reference."""
    both_sides = 2 * _sequences(recipe) * lengths.row
    return StepTokens(trained=both_sides, scored=both_sides)


def unpaired(recipe: Recipe, lengths: Lengths) -> StepTokens:
    """Return the bound of KTO: one side of each pair, and mismatched partners."""
    tokens = _sequences(recipe) * lengths.row
    # the reference reads each row and its mismatched partner, the policy the partner without training on it
    return StepTokens(trained=tokens, scored=3 * tokens)


def policy_gradient(recipe: Recipe, lengths: Lengths) -> StepTokens:
    """Return the bound of GRPO."""
    sequences, whole = _sequences(recipe), lengths.whole
    scored = lengths.read + (whole if recipe.kl_coef else 0) + (whole if recipe.num_iterations > 1 else 0)
    # completions are sampled once for `num_iterations` steps: the first of them costs the most
    return StepTokens(sequences * whole, sequences * lengths.generated, sequences * scored)


def leave_one_out(recipe: Recipe, lengths: Lengths) -> StepTokens:
    """Return the bound of RLOO."""
    sequences, whole = _sequences(recipe), lengths.whole
    # the policy's own log-probabilities are always read before the first update
    scored = lengths.read + whole + (whole if recipe.kl_coef else 0)
    return StepTokens(sequences * whole, sequences * lengths.generated, sequences * scored)


def actor_critic(recipe: Recipe, lengths: Lengths) -> StepTokens:
    """Return the bound of PPO."""
    sequences, whole = _sequences(recipe), lengths.whole
    models = 2 if recipe.critic == "model" else 1
    # old log-probabilities and the values of a head come out of one pass
    policy_read = recipe.critic == "head" or recipe.kl_coef > 0 or recipe.num_iterations > 1
    passes = policy_read + (recipe.kl_coef > 0) + (recipe.critic == "model")
    return StepTokens(
        trained=models * sequences * whole,
        generated=sequences * lengths.generated,
        scored=sequences * (lengths.read + passes * whole),
    )


def rejection_sampling(recipe: Recipe, lengths: Lengths) -> StepTokens:
    """Return the bound of rejection-sampling fine-tuning, its sampling spread over the steps."""
    sequences = _sequences(recipe)
    return StepTokens(
        trained=sequences * (lengths.whole + 1),  # a completion that was cut is trained on with an end token
        generated=sequences * lengths.generated,
        scored=sequences * lengths.read,
    )


def taught(recipe: Recipe, lengths: Lengths) -> StepTokens:
    """Return the bound of distillation."""
    sequences, whole = _sequences(recipe), lengths.whole
    return StepTokens(
        trained=sequences * whole,
        generated=sequences * lengths.generated,
        scored=sequences * lengths.read,
        teacher=sequences * whole,
    )
