"""A market that is generated: log prices with regimes, changing volatility and jumps; windows of it as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

STEPS = 6000
WINDOW = 32
HORIZON = 5
"""Steps ahead whose direction and volatility are asked."""

FEATURES = 2 * WINDOW + 3

REGIMES = (
    ("bull", 0.0009, 0.006),
    ("bear", -0.0011, 0.010),
    ("turbulent", 0.0, 0.022),
)
"""Name, drift and volatility of a step's log return."""

STAY = 0.985
"""Probability that a regime lasts one more step."""

SPLITS = {"train": (0.0, 0.6), "validation": (0.62, 0.79), "test": (0.81, 1.0)}
"""Shares of the series, in time order. The gaps are longer than a window with its horizon, so no step is in two."""


@dataclass(frozen=True)
class Windows:
    """Windows of one split; row i ends at one step, and its targets lie after it.

    Attributes:
        features: ``(n, FEATURES)`` float32.
        level: ``(n,)`` the next log price, less the window's mean, over the window's spread.
        direction: ``(n,)`` 1 where the price is higher after `HORIZON` steps, else 0.
        volatility: ``(n,)`` logarithm of the realised volatility of the next `HORIZON` steps, over the window's.
        last: ``(n,)`` the window's last log price in the units of ``level``: what persistence would forecast.
    """

    features: torch.Tensor
    level: torch.Tensor
    direction: torch.Tensor
    volatility: torch.Tensor
    last: torch.Tensor

    def __len__(self) -> int:
        return len(self.features)


def log_prices(seed: int) -> NDArray[np.float64]:
    """Return ``(STEPS + 1,)`` log prices: a Markov chain of regimes, volatility that clusters, and rare jumps."""
    rng = np.random.default_rng([77_001, seed])
    returns = np.empty(STEPS)
    regime, shock = int(rng.integers(len(REGIMES))), 0.0
    for step in range(STEPS):
        if rng.random() > STAY:
            regime = int(rng.choice([other for other in range(len(REGIMES)) if other != regime]))
        _, drift, spread = REGIMES[regime]
        spread *= np.sqrt(0.6 + 0.4 * min(shock * shock, 9.0))  # a large move makes the next ones larger
        shock = rng.standard_normal()
        jump = rng.normal(0.0, 0.04) if rng.random() < 0.004 else 0.0
        returns[step] = drift + spread * shock + jump
    return np.concatenate([[0.0], np.cumsum(returns)])


def windows(seed: int, split: str) -> Windows:
    """Return the windows of one split of the series of a seed.

    Args:
        seed: of the series.
        split: a key of `SPLITS`.
    """
    prices = log_prices(seed)
    first, last = (int(share * STEPS) for share in SPLITS[split])
    ends = np.arange(first + WINDOW, last - HORIZON)
    past = np.stack([prices[end - WINDOW : end + 1] for end in ends])  # (n, WINDOW + 1)
    moves = np.diff(past, axis=1)  # (n, WINDOW)
    spread = past.std(axis=1) + 1e-6
    daily = moves.std(axis=1) + 1e-6
    centred = (past - past.mean(axis=1, keepdims=True)) / spread[:, None]
    extra = np.stack(
        [
            np.log(daily / 0.01),
            np.log((moves[:, -8:].std(axis=1) + 1e-6) / daily),
            moves.mean(axis=1) / daily,
        ],
        axis=1,
    )
    features = np.concatenate([centred[:, 1:], np.clip(moves / daily[:, None], -5, 5), extra], axis=1)
    ahead = np.stack([prices[end + 1 : end + 1 + HORIZON] for end in ends])
    future = np.diff(np.concatenate([past[:, -1:], ahead], axis=1), axis=1)
    level = (ahead[:, 0] - past.mean(axis=1)) / spread
    volatility = np.log((np.sqrt((future**2).mean(axis=1)) + 1e-6) / daily)
    arrays = (features, level, ahead[:, -1] > past[:, -1], volatility, centred[:, -1])
    return Windows(*(torch.from_numpy(np.asarray(array, np.float32)) for array in arrays))
