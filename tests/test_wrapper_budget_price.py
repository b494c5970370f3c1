"""The price in the reward is the one asked for, to the last digit, and is taken once."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import pytest
from gymnasium.utils.env_checker import check_env

from posttrain_gym.inner_trainers.testing import ScriptedFamily
from posttrain_gym.wrappers import BudgetPrice, DiscretizeAction

from .scripted_env import AMPLE, make, recipe_action


@pytest.mark.parametrize(("price", "exponent"), [(0.0, 1.0), (0.1, 1.0), (2.0, 1.0), (2.0, 2.0), (3.0, 0.5)])
def test_rewards_by_hand(price: float, exponent: float) -> None:
    budget = {"limit": 40_000, "max_rounds": 9, "patience": 9}
    env = BudgetPrice(make(budget=budget, price=0.3, failure_penalty=0.0), price, exponent)
    free = make(budget=budget, price=0.0, failure_penalty=0.0)
    _, info = env.reset(seed=2)
    free.reset(seed=2)
    assert info["price"] == price
    spent = env.unwrapped.search.ledger.spent / 40_000  # type: ignore[attr-defined]
    assert spent > 0  # the base's evaluation, which is not priced
    for steps in (10, 30, 30):  # the last is answered from memory, for nothing
        action = recipe_action(free, "sft", steps=steps, start="base")
        reward = float(env.step(action)[1])
        gain = free.step(action)[1]
        now = env.unwrapped.search.ledger.spent / 40_000  # type: ignore[attr-defined]
        assert reward == pytest.approx(gain - price * (now**exponent - spent**exponent), abs=1e-12)
        if steps == 10:
            assert now > spent
        spent = now
    assert env.unwrapped.search.outcomes[-1].report.cached  # type: ignore[attr-defined]


def test_a_round_over_several_steps_is_priced_when_it_is_settled() -> None:
    settings: dict[str, Any] = {"task": ScriptedFamily(), "budget": AMPLE, "interval": 5}
    env = BudgetPrice(gym.make("PostTrain/Full-v0", price=0.5, **settings), 0.0)
    free = gym.make("PostTrain/Full-v0", price=0.0, **settings)
    env.reset(seed=3)
    free.reset(seed=3)
    base: Any = free.unwrapped
    action = base.encode_recipe(base.space.recipe("sft", steps=17))
    for _ in range(4):
        assert env.step(action)[1] == pytest.approx(free.step(action)[1], abs=1e-12)
        action = base.encode_adjustment(0)
    assert len(base.search.outcomes) == 1


@pytest.mark.parametrize(
    ("price", "exponent", "message"), [(-1, 1, "price"), (1, 0, "exponent"), (float("nan"), 1, "price")]
)
def test_numbers_outside_their_range_are_refused(price: float, exponent: float, message: str) -> None:
    with pytest.raises(ValueError, match=f"{message}: expected a number"):
        BudgetPrice(make(), price, exponent)


def test_contract_and_spec() -> None:
    env: Any = BudgetPrice(DiscretizeAction(gym.make("PostTrain/Recipe-v0", task=ScriptedFamily())), 0.7, exponent=2)
    check_env(env, skip_render_check=True)
    again: Any = gym.make(env.spec)
    assert again._saved_kwargs == {"price": 0.7, "exponent": 2}
    assert again.get_wrapper_attr("action_masks")().all()
