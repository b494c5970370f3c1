"""Advantages and value losses of completions: per token, on masked sequences of different lengths."""

from __future__ import annotations

import torch


def token_rewards(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the rewards of each token: a completion's score at its last token, else 0.

    Args:
        scores: (B,) one score per completion.
        mask: (B, T) of 0 and 1; 1 where the policy chose the token.

    Returns:
        (B, T) float; a row without any chosen token is 0 throughout.
    """
    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    last = (mask * positions).argmax(dim=1, keepdim=True)  # (B, 1)
    rewards = torch.zeros(mask.shape, dtype=scores.dtype, device=mask.device)
    return rewards.scatter(1, last, scores[:, None]) * mask


def generalised_advantages(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, gae_lambda: float
) -> torch.Tensor:
    """Return generalised advantage estimates (Schulman et al. 2016): (B, T), 0 where the mask is 0.

    A row is one episode that ends at its last chosen token; a completion that was cut at the length limit ends there
    too, since the limit is part of the task and its reward is final. Tokens that the policy did not choose are no time
    steps: the token before them is followed by the token after them.

    Args:
        rewards: (B, T) reward of each token.
        values: (B, T) value of the state in which each token was chosen.
        mask: (B, T) of 0 and 1; 1 where the policy chose the token.
        gamma: discount per token, in [0, 1].
        gae_lambda: λ, in [0, 1].
    """
    advantages = torch.zeros_like(values)
    advantage = next_value = values.new_zeros(len(values))
    for column in reversed(range(values.shape[1])):
        chosen, value = mask[:, column] > 0, values[:, column]
        surprise = rewards[:, column] + gamma * next_value - value
        advantage = torch.where(chosen, surprise + gamma * gae_lambda * advantage, advantage)
        next_value = torch.where(chosen, value, next_value)
        advantages[:, column] = torch.where(chosen, advantage, torch.zeros_like(advantage))
    return advantages


def whitened(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return advantages of mean 0 and standard deviation 1 over the chosen tokens, 0 elsewhere: (B, T).

    Advantages that are all equal become 0.
    """
    chosen = advantages[mask > 0]
    if chosen.numel() == 0:
        return torch.zeros_like(advantages)
    # equal advantages differ from their mean by rounding, which a smaller constant would blow up to 1
    spread = torch.sqrt(chosen.var(correction=0) + 1e-8)
    return (advantages - chosen.mean()) / spread * mask


def clipped_value_losses(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip_range: float
) -> torch.Tensor:
    """Return the value loss of each token, any shape: half the larger squared error of the value and its clipped twin.

    The twin is moved at most ``clip_range`` from the old value, so a value that has moved further toward its return is
    not pushed on (Schulman et al. 2017, as in the paper's code).
    """
    near = old_values + (values - old_values).clamp(-clip_range, clip_range)
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)


def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> float:
    """Return 1 − Var(returns − values) / Var(returns) over the chosen tokens; NaN when the returns do not vary."""
    chosen = mask > 0
    spread = returns[chosen].var(correction=0)
    if float(spread) == 0.0:
        return float("nan")
    return float(1.0 - (returns - values)[chosen].var(correction=0) / spread)
