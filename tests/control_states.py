"""States, rules and a scripted round for the tests of in-loop controllers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain_gym.inner_trainers.adjustments import CATALOGUE
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.signals import SIGNALS, Signals
from posttrain_gym.meta_policies.controllers.base import ControlState
from posttrain_gym.meta_policies.controllers.rules import Rule, RulesController, RuleSet

SETTINGS = {"learning_rate": 1e-3, "learning_rate_factor": 1.0, "batch_size": 8.0, "max_grad_norm": 1.0}
ALL = (True,) * len(CATALOGUE)


def state(
    step: int = 1,
    steps: int = 100,
    *,
    z: Mapping[str, float] | None = None,
    settings: Mapping[str, float] = SETTINGS,
    sources: Sequence[str] = ("code", "math"),
    legal: Sequence[bool] = ALL,
    **values: float | None,
) -> ControlState:
    """Return a state in which only the named signals are there."""
    signals = Signals(step, {**dict.fromkeys(SIGNALS), **values}, {**dict.fromkeys(SIGNALS, 0.0), **(z or {})})
    return ControlState(step, steps, signals, settings, sources, legal)


def rule(name: str = "r", when: str = "loss > 1", action: Any = "lr_down", **settings: Any) -> Rule:
    return Rule(name, when, action, **{"reason": f"because of {name}", "cooldown": 0, **settings})


def controller(*rules: Rule, algorithm: str = "sft", log_only: bool | None = None, **settings: Any) -> RulesController:
    """Return a controller that has begun a round of 100 steps on two sources."""
    made = RulesController(RuleSet("test", rules, **settings), log_only)
    made.begin(Recipe(algorithm, {"code": 0.5, "math": 0.5}, steps=100), ("code", "math"))
    return made
