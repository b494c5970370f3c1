"""Advantages and value losses against Stable-Baselines3 and figures worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer

from posttrain_gym.inner_trainers.trl.gae import (
    clipped_value_losses,
    explained_variance,
    generalised_advantages,
    token_rewards,
    whitened,
)

LENGTHS = (7, 1, 4, 6, 2)


def of_lengths(lengths: tuple[int, ...]) -> torch.Tensor:
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


def by_sb3(rewards: np.ndarray, values: np.ndarray, gamma: float, gae_lambda: float) -> tuple[np.ndarray, np.ndarray]:
    """Return advantages and returns of one episode that ends at its last step."""
    box = spaces.Box(0.0, 1.0, (1,))
    buffer = RolloutBuffer(len(rewards), box, box, device="cpu", gae_lambda=gae_lambda, gamma=gamma)
    nothing = np.zeros((1, 1), np.float32)
    for step, (reward, value) in enumerate(zip(rewards, values, strict=True)):
        starts = np.array([step == 0], np.float32)
        buffer.add(nothing, nothing, np.array([reward]), starts, torch.tensor([value]), torch.zeros(1))
    # the value after the end is not 0 here: a terminal step must not look at it
    buffer.compute_returns_and_advantage(torch.tensor([123.0]), np.array([True]))
    return buffer.advantages[:, 0], buffer.returns[:, 0]


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("gae_lambda", [0.0, 0.3, 0.95, 1.0])
def test_it_is_stable_baselines3s_estimate(gamma: float, gae_lambda: float) -> None:
    rng = np.random.default_rng(7)
    mask = of_lengths(LENGTHS)
    rewards = torch.tensor(rng.normal(size=mask.shape), dtype=torch.float32)
    values = torch.tensor(rng.normal(size=mask.shape), dtype=torch.float32)  # padding holds numbers too
    found = generalised_advantages(rewards, values, mask, gamma, gae_lambda)
    for row, length in enumerate(LENGTHS):
        advantages, returns = by_sb3(rewards[row, :length].numpy(), values[row, :length].numpy(), gamma, gae_lambda)
        np.testing.assert_allclose(found[row, :length].numpy(), advantages, atol=1e-6)
        np.testing.assert_allclose((found + values)[row, :length].numpy(), returns, atol=1e-6)
        assert not found[row, length:].any()


def test_the_score_falls_on_the_last_token_the_policy_chose() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]])
    rewards = token_rewards(torch.tensor([0.5, -1.0, 2.0, 9.0]), mask)
    assert rewards.tolist() == [[0, 0.5, 0, 0], [0, 0, 0, -1], [0, 0, 2, 0], [0, 0, 0, 0]]


def test_without_critic_and_discount_every_token_has_its_completions_reward() -> None:
    mask = of_lengths(LENGTHS)
    scores = torch.tensor([0.25, 1.0, -2.0, 0.0, 3.0])
    found = generalised_advantages(token_rewards(scores, mask), torch.zeros(mask.shape), mask, 1.0, 1.0)
    assert torch.equal(found, scores[:, None] * mask)


def test_a_discount_counts_tokens_from_the_end() -> None:
    mask = of_lengths((3, 2))
    found = generalised_advantages(token_rewards(torch.tensor([8.0, 4.0]), mask), torch.zeros(2, 3), mask, 0.5, 1.0)
    assert found.tolist() == [[2.0, 4.0, 8.0], [2.0, 4.0, 0.0]]


def test_a_tools_tokens_are_no_time_steps() -> None:
    """The same numbers with a tool's tokens in between give the same advantages, whatever stands at those tokens."""
    mask = torch.tensor([[1, 1, 0, 0, 1, 1]])
    rewards, values = torch.randn(1, 6), torch.randn(1, 6)
    chosen = mask > 0
    dense = torch.ones(1, 4, dtype=torch.long)
    expected = generalised_advantages(rewards[chosen][None], values[chosen][None], dense, 0.9, 0.7)
    found = generalised_advantages(rewards, values, mask, 0.9, 0.7)
    assert torch.equal(found[chosen], expected[0])
    assert found[~chosen].tolist() == [0.0, 0.0]


def test_whitening_sees_the_chosen_tokens_alone() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]])
    advantages = torch.tensor([[1.0, 2.0, 99.0], [3.0, -99.0, 99.0], [4.0, 5.0, 6.0]])
    found = whitened(advantages, mask)
    expected = (np.arange(1, 7) - 3.5) / np.arange(1, 7).std()
    np.testing.assert_allclose(found[mask > 0].numpy(), expected, atol=1e-6)
    assert not found[mask == 0].any()


@pytest.mark.parametrize("value", [0.0, 0.3, 1.0, -7.1])
def test_equal_advantages_whiten_to_nothing(value: float) -> None:
    mask = of_lengths(LENGTHS)
    assert float(whitened(torch.full(mask.shape, value) * mask, mask).abs().max()) < 0.02
    assert not whitened(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.long)).any()


@pytest.mark.parametrize(
    ("value", "expected", "slope"),
    [
        (0.1, 0.5 * 0.9**2, -0.9),  # inside the range: plain squared error
        (0.5, 0.5 * 0.8**2, 0.0),  # beyond it toward the return: no push on
        (-0.5, 0.5 * 1.5**2, -1.5),  # beyond it away from the return: pushed back
    ],
)
def test_the_value_loss_is_the_larger_of_the_two(value: float, expected: float, slope: float) -> None:
    at = torch.tensor(value, requires_grad=True)
    loss = clipped_value_losses(at, torch.tensor(0.0), torch.tensor(1.0), 0.2)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(expected, abs=1e-7)
    assert at.grad is not None and float(at.grad) == pytest.approx(slope, abs=1e-7)


def test_explained_variance_by_hand() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])
    returns = torch.tensor([[0.0, 1.0, 50.0], [2.0, 3.0, -50.0]])
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(torch.zeros(2, 3), returns, mask) == 0.0
    assert explained_variance(returns + 5.0, returns, mask) == pytest.approx(1.0)  # a constant shift explains all
    assert explained_variance(0.5 * returns, returns, mask) == pytest.approx(0.75)
    assert math.isnan(explained_variance(torch.zeros(2, 3), torch.ones(2, 3), mask))
