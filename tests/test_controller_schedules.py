"""Schedules set the rate of each step exactly, and move the KL coefficient to a target."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from posttrain_gym.inner_trainers.adjustments import CATALOGUE_NAMES, Adjustment
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.testing import ScriptedTask, ScriptedTrainer, TinyTask
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer
from posttrain_gym.meta_policies.controllers.base import Controller
from posttrain_gym.meta_policies.controllers.catalogue import make_controller
from posttrain_gym.meta_policies.controllers.decision_log import DecisionLog
from posttrain_gym.meta_policies.controllers.drive import drive_round
from posttrain_gym.meta_policies.controllers.log_reader import read_log
from posttrain_gym.meta_policies.controllers.schedules import SCHEDULES, AdaptiveKL, LearningRateSchedule
from tests.control_states import state
from tests.trl_fixtures import *  # noqa: F403
from tests.trl_rounds import equal, grpo, sft, trained

RATES = {
    "constant": [1e-3] * 10,
    "linear": [1e-3, 9e-4, 8e-4, 7e-4, 6e-4, 5e-4, 4e-4, 3e-4, 2e-4, 1e-4],
    "cosine": [5e-4 * (1 + math.cos(math.pi * done / 10)) for done in range(10)],
    "warmup_stable_decay": [5e-4, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 7.5e-4, 5e-4, 2.5e-4],
}
SETTINGS: dict[str, dict[str, Any]] = {"warmup_stable_decay": {"warmup": 0.2, "decay": 0.3}}


def rates_of(name: str, trainer: Any, task: Any, recipe: Recipe, interval: int = 1, **settings: Any) -> list[float]:
    session = trainer.begin(task, recipe, trainer.base(task), 3)
    try:
        drive_round(session, recipe, make_controller(f"schedule:{name}", **settings), interval=interval)
        report, _ = session.result()
    finally:
        session.close()
    assert report.failure is None and report.ended == "finished"
    return [row["learning_rate"] for row in report.curves]


@pytest.mark.parametrize("name", RATES)
@pytest.mark.parametrize("own", ["constant", "linear"])
def test_every_step_uses_the_schedules_rate_whatever_the_recipe_says(name: str, own: str) -> None:
    recipe = Recipe("sft", {"left": 1.0}, steps=10, learning_rate=1e-3, schedule=own)
    task = ScriptedTask()
    assert rates_of(name, ScriptedTrainer(), task, recipe, **SETTINGS.get(name, {})) == pytest.approx(
        RATES[name], rel=1e-12
    )


@pytest.mark.parametrize("name", RATES)
def test_a_real_round_uses_the_schedules_rates(name: str, trainer: TrlTrainer, task: TinyTask) -> None:
    recipe = sft(steps=10, learning_rate=1e-3)
    assert rates_of(name, trainer, task, recipe, **SETTINGS.get(name, {})) == pytest.approx(RATES[name], rel=1e-9)


def test_a_schedule_trains_what_the_recipes_own_schedule_does(trainer: TrlTrainer, task: TinyTask) -> None:
    own = trained(trainer, task, sft(schedule="linear"))
    session = trainer.begin(task, sft(), trainer.base(task), 3)
    drive_round(session, sft(), make_controller("schedule:linear"))
    report, checkpoint = session.result()
    assert report.failure is None and checkpoint is not None
    for name, value in own.items():
        assert abs(value - checkpoint.weights[name]).max() < 1e-6
    session = trainer.begin(task, sft(), trainer.base(task), 3)
    drive_round(session, sft(), make_controller("schedule:constant"))
    _, checkpoint = session.result()
    assert checkpoint is not None and equal(checkpoint.weights, trained(trainer, task, sft()))


def test_between_two_looks_the_last_rate_stays() -> None:
    recipe = Recipe("sft", {"left": 1.0}, steps=10, learning_rate=1e-3)
    got = rates_of("linear", ScriptedTrainer(), ScriptedTask(), recipe, interval=4)
    assert got == pytest.approx([1e-3] * 4 + [6e-4] * 4 + [2e-4] * 2, rel=1e-12)


def test_a_rate_of_zero_cannot_be_scaled_and_is_left() -> None:
    made = make_controller("schedule:constant")
    made.begin(Recipe("sft", {"a": 1.0}, steps=10, learning_rate=1e-3), ("a",))
    decision = made.decide(state(3, 10, settings={"learning_rate": 0.0}))
    assert decision.chosen.adjustment == Adjustment()


@pytest.mark.parametrize(
    ("name", "divergences", "coefficients"),
    [
        # target 0.1: 0.1 -> no change; clip(3 - 1) = 0.2 -> × 1.02; clip(-0.5) = -0.2 -> × 0.98; 0.11 -> × 1.01
        ("adaptive_kl", [0.1, 0.3, 0.05, 0.11, None], [1.0, 1.02, 1.02 * 0.98, 1.02 * 0.98 * 1.01, 1.02 * 0.98 * 1.01]),
        ("adaptive_kl_doubling", [0.1, 0.16, 0.2, 0.05, 0.07, None], [1.0, 2.0, 4.0, 2.0, 2.0, 2.0]),
    ],
)
def test_the_kl_coefficient_goes_to_its_target(
    name: str, divergences: list[float | None], coefficients: list[float]
) -> None:
    made, coefficient, got = make_controller(f"schedule:{name}", target=0.1), 1.0, []
    made.begin(Recipe("grpo", {"a": 1.0}, kl_coef=1.0), ("a",))
    for step, kl in enumerate(divergences, start=1):
        adjustment = made.decide(state(step, kl=kl)).chosen.adjustment
        assert adjustment.kind in ("none", "kl_scale")
        coefficient *= adjustment.number if adjustment.kind == "kl_scale" else 1.0
        got.append(coefficient)
    assert got == pytest.approx(coefficients, rel=1e-12)


def test_the_kl_coefficient_of_a_real_round_is_moved(trainer: TrlTrainer, task: TinyTask, tmp_path: Path) -> None:
    recipe = grpo(steps=5, kl_coef=0.1)
    session = trainer.begin(task, recipe, trainer.base(task), 3)
    with DecisionLog(tmp_path) as log:
        drive_round(session, recipe, make_controller("schedule:adaptive_kl_doubling", target=1e-7), log=log)
    report, _ = session.result()
    assert report.failure is None and report.flags == ()
    (logged,) = read_log(tmp_path)
    # the first step has not moved from the start yet: its KL is 0, and the coefficient is halved; later ones have
    assert logged.decisions[0].state.signals.values["kl"] == pytest.approx(0.0, abs=1e-9)
    seen = [decision.state.settings["kl_coef"] for decision in logged.decisions]
    assert seen == pytest.approx([0.1, 0.05, 0.1, 0.2], rel=1e-12)


def test_a_masked_kl_coefficient_is_left_alone() -> None:
    made = make_controller("schedule:adaptive_kl")
    legal = [not name.startswith("kl_") for name in CATALOGUE_NAMES]
    decision = made.decide(state(kl=3.0, legal=legal))
    assert decision.chosen.action == 0
    assert decision.held_back == {"schedule:adaptive_kl": "masked: cannot be applied now"}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_a_controller_that_says_what_it_is(name: str) -> None:
    made = make_controller(f"schedule:{name}")
    assert isinstance(made, Controller) and isinstance(made, LearningRateSchedule | AdaptiveKL)
    assert made.name == f"schedule:{name}" == made.describe()["controller"]


@pytest.mark.parametrize(
    ("name", "settings", "problem"),
    [
        ("warmup_stable_decay", {"warmup": 0.6, "decay": 0.5}, r"warmup, decay: together at most 1, got 0\.6 \+ 0\.5"),
        ("warmup_stable_decay", {"warmup": -0.1}, r"warmup: expected a number in \[0, 1\], got -0\.1"),
        ("adaptive_kl", {"target": 0}, r"target: expected a number in \(0, 1000\], got 0"),
        ("cosine", {"target": 1}, r"controller 'schedule:cosine': unknown setting 'target'"),
    ],
)
def test_a_setting_outside_its_range_is_refused(name: str, settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        make_controller(f"schedule:{name}", **settings)
