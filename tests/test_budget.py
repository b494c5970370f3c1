"""The ledger charges what it is told, and a search never spends more than its limit plus one optimiser step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain_gym.envs.budget import Budget, BudgetLedger
from posttrain_gym.envs.post_training import PostTrainingEnv
from posttrain_gym.inner_trainers.base import Checkpoint, Cost, Limit, Scorecard
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.tasks import InnerTask
from posttrain_gym.inner_trainers.testing import ScriptedFamily, ScriptedTrainer


@pytest.mark.parametrize(
    ("unit", "amount"), [("train_tokens", 90 + (30 + 15) / 3), ("flops", 1e9), ("device_seconds", 2.5)]
)
def test_settle_charges_in_the_budgets_unit(unit: str, amount: float) -> None:
    ledger = BudgetLedger(Budget(limit=2e9, unit=unit))
    cost = Cost(trained_tokens=90, generated_tokens=30, scored_tokens=15, flops=1e9, device_seconds=2.5)
    assert ledger.settle("round 1", cost) == amount
    assert (ledger.spent, ledger.left) == (amount, 2e9 - amount)
    assert ledger.entries == [("round 1", amount)]


def test_reserve_leaves_the_evaluation() -> None:
    ledger = BudgetLedger(Budget(limit=1000))
    ledger.settle("evaluation of the base checkpoint", Cost(generated_tokens=300))
    assert ledger.reserve(Cost(generated_tokens=300)) == Limit("train_tokens", 800.0)
    ledger.settle("round 1", Cost(trained_tokens=850))
    assert ledger.reserve(Cost(generated_tokens=300)) == Limit("train_tokens", 0.0)
    ledger.settle("round 2", Cost(trained_tokens=100))
    assert (ledger.spent, ledger.left) == (1050.0, 0.0)


def test_nothing_can_be_paid_from_nothing() -> None:
    ledger = BudgetLedger(Budget(limit=1, unit="device_seconds"))
    assert ledger.can_pay(Cost(), Cost())  # seconds are not known ahead
    assert ledger.can_pay(Cost(), Cost(device_seconds=1.0))
    assert not ledger.can_pay(Cost(), Cost(device_seconds=1.001))
    assert ledger.can_pay(Cost(device_seconds=0.25), Cost(device_seconds=0.75))
    assert not ledger.can_pay(Cost(device_seconds=0.26), Cost(device_seconds=0.75))
    ledger.settle("round 1", Cost(device_seconds=1.5))
    assert not ledger.can_pay(Cost(), Cost())


def test_a_budget_comes_from_a_number_a_mapping_or_a_budget() -> None:
    assert Budget.from_any(None) == Budget(200_000, "train_tokens", 8, 4)
    assert Budget.from_any(1000) == Budget(1000.0)
    assert Budget.from_any(np.float64(1000)) == Budget(1000.0)
    assert Budget.from_any({"limit": 5, "unit": "flops", "patience": 2}) == Budget(5, "flops", 8, 2)
    budget = Budget(7)
    assert Budget.from_any(budget) is budget


@pytest.mark.parametrize("limit", [0, -1, math.nan, math.inf, -math.inf, "1000", True, None, [1000]])
def test_a_limit_that_is_no_positive_number_is_refused(limit: Any) -> None:
    for refused in (Budget, lambda limit: Budget.from_any({"limit": limit})):
        with pytest.raises(ValueError, match=r"budget\.limit: expected a number"):
            refused(limit=limit)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"unit": "token"}, "budget.unit: unknown 'token'. Did you mean 'train_tokens'"),
        ({"unit": 3}, "budget.unit: unknown 3"),
        ({"max_rounds": 0}, r"budget.max_rounds: expected an integer in \[1, 100000\], got 0"),
        ({"max_rounds": 2.0}, "budget.max_rounds: expected an integer"),
        ({"patience": True}, "budget.patience: expected an integer"),
        ({"rounds": 3}, "budget: unknown key 'rounds'. Did you mean 'max_rounds'"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Budget.from_any(settings)


@settings(max_examples=60, deadline=None)
@given(
    limit=st.floats(100, 60_000),  # an evaluation costs 100
    unit=st.sampled_from(["train_tokens", "flops"]),
    rounds=st.integers(1, 12),
    seed=st.integers(0, 10_000),
)
def test_a_search_never_spends_more_than_its_limit(limit: float, unit: str, rounds: int, seed: int) -> None:
    scale = 6000.0 if unit == "flops" else 1.0  # the scripted model has 1000 parameters
    budget = {"limit": limit * scale, "unit": unit, "max_rounds": rounds, "patience": rounds}
    env = PostTrainingEnv(ScriptedFamily(), budget=budget)
    env.reset(seed=seed)
    base = env.search.ledger.spent
    total = base
    while env.search.ended() is None:
        legal = np.flatnonzero(env.action_masks()[1:3])
        action = {**env.action_space.sample(), "algorithm": 1 + int(legal[seed % len(legal)])}
        info = env.step(action)[4]
        total += info["round"]["charged"]
    ledger = env.search.ledger
    assert ledger.spent == math.fsum(amount for _, amount in ledger.entries) == pytest.approx(total)
    assert ledger.entries[0] == ("evaluation of the base checkpoint", base)
    # counted units: a round is cut before the step that could pass the limit, so there is no overshoot at all
    assert ledger.spent <= max(budget["limit"], base) * (1 + 1e-12)  # type: ignore[call-overload]


class TimedTrainer(ScriptedTrainer):
    """Says how long its steps and evaluations took, on a clock that only they move."""

    step, evaluation = 1.0, 4.0

    def step_cost_bound(self, task: InnerTask, recipe: Recipe) -> Cost:
        return Cost(device_seconds=self.step)

    def evaluation_cost_bound(self, task: InnerTask, split: str) -> Cost:
        return Cost()  # not known ahead

    def evaluate(self, task: InnerTask, checkpoint: Checkpoint, split: str) -> tuple[Scorecard, Cost]:
        return super().evaluate(task, checkpoint, split)[0], Cost(device_seconds=self.evaluation)


@pytest.mark.parametrize("limit", [20.0, 20.5, 31.0, 47.3])
def test_seconds_keep_back_what_the_last_evaluation_took(limit: float) -> None:
    budget = {"limit": limit, "unit": "device_seconds", "max_rounds": 50, "patience": 50}
    env = PostTrainingEnv(ScriptedFamily(), trainer=TimedTrainer(), budget=budget, reuse=False)
    env.reset(seed=0)
    assert env.search.ledger.spent == 4.0
    while env.search.closed() is None:
        env.step(env.encode_recipe(env.space.recipe("sft", steps=10)))
    assert env.search.outcomes[0].report.steps == min(10, int(limit - 8))
    assert limit - 5 < env.search.ledger.spent <= limit  # each step's seconds are known here; else one step more


def test_seconds_run_out() -> None:
    env = PostTrainingEnv(
        ScriptedFamily(), budget={"limit": 1e-9, "unit": "device_seconds", "max_rounds": 50, "patience": 50}
    )
    env.reset(seed=0)
    env.search.ledger.settle("round 1", Cost(device_seconds=1.0))
    assert env.search.ended() == "budget"
    assert env.action_masks().tolist()[:3] == [True, False, False]
