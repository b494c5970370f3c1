"""The reward: gain of the best checkpoint, minus its price in budget, minus a penalty for failure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..inner_trainers.messages import require_number

MIN_HEADROOM = 1e-2
"""Headroom below which a gain is no longer divided further: a base score above 0.99."""


@dataclass(frozen=True)
class RewardSettings:
    """Weights of the reward.

    Attributes:
        price: reward taken for spending the whole budget, in [0, 100].
        failure_penalty: reward taken for a failed round, in [0, 100].
    """

    price: float = 0.1
    failure_penalty: float = 0.1

    def __post_init__(self) -> None:
        """Check the ranges; raises `ValueError` outside them."""
        require_number("price", self.price, low=0, high=100)
        require_number("failure_penalty", self.failure_penalty, low=0, high=100)


def round_reward(
    best_before: Any, best_after: Any, base: Any, cost_fraction: Any, failed: Any, settings: RewardSettings
) -> np.ndarray:
    """Return the reward of a batch of rounds; finite for finite inputs.

    ``(best_after - best_before) / max(1 - base, MIN_HEADROOM) - price * cost_fraction - failure_penalty * failed``

    Args:
        best_before: ``(n,)`` best validation score before the round, in [0, 1].
        best_after: ``(n,)`` best validation score after it, in [0, 1].
        base: ``(n,)`` score of the base checkpoint, in [0, 1].
        cost_fraction: ``(n,)`` cost of the round over the whole budget, >= 0.
        failed: ``(n,)`` bool.
        settings: price and penalty.

    Returns:
        ``(n,)`` float64.
    """
    headroom = np.maximum(1.0 - np.asarray(base, dtype=np.float64), MIN_HEADROOM)
    gain = (np.asarray(best_after, dtype=np.float64) - np.asarray(best_before, dtype=np.float64)) / headroom
    price = settings.price * np.asarray(cost_fraction, dtype=np.float64)
    penalty = settings.failure_penalty * np.asarray(failed, dtype=np.float64)
    result: np.ndarray = gain - price - penalty
    return result
