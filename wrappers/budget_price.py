"""`BudgetPrice`: another price of budget in the reward."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from ..envs.reward import RewardSettings
from ..inner_trainers.messages import require_number
from .checks import base_env


class BudgetPrice(gym.Wrapper[Any, Any, Any, Any], gym.utils.RecordConstructorArgs):
    """Takes the environment's price of budget out of the reward and puts another in.

    A step that brings what was spent from ``a`` to ``b``, as shares of the limit, costs ``price * (b ** exponent - a **
    exponent)``. With exponent 1 that is the environment's own way; above 1 the first spending is cheap and the last is
    dear. The evaluation of the base checkpoint, spent before the first decision, is counted in ``a`` and never priced,
    and a round that is answered from memory spends nothing. A round over several steps is priced when it is settled.

    Args:
        env: a PostTrain environment, wrapped or not.
        price: reward taken for spending the whole budget, in [0, 100].
        exponent: shape of the price, in [0.1, 10].

    Raises:
        ValueError: another environment, or a number outside its range.
    """

    def __init__(self, env: gym.Env[Any, Any], price: float, exponent: float = 1.0) -> None:
        gym.utils.RecordConstructorArgs.__init__(self, price=price, exponent=exponent)
        gym.Wrapper.__init__(self, env)
        base_env(env)
        self._price = RewardSettings(price=price).price
        self._exponent = require_number("exponent", exponent, low=0.1, high=10)
        self._spent = 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start a search; ``info["price"]`` is the price in use."""
        observation, info = self.env.reset(seed=seed, options=options)
        self._spent = self._share()
        info["price"] = self._price
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take one step; the reward has this price instead of the environment's."""
        base = base_env(self.env)
        rounds = len(base.search.outcomes)
        observation, reward, terminated, truncated, info = self.env.step(action)
        if len(base.search.outcomes) > rounds:
            before, self._spent = self._spent, self._share()
            own = base.reward_settings.price * (self._spent - before)
            reward += own - self._price * (self._spent**self._exponent - before**self._exponent)
        info["price"] = self._price
        return observation, reward, terminated, truncated, info

    def _share(self) -> float:
        """Return what was spent, as a share of the limit."""
        base = base_env(self.env)
        return base.search.ledger.spent / base.budget.limit
