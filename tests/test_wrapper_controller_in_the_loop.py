"""A controller inside recipe steps changes nothing while it does nothing, and acts as `drive_round` lets it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from posttrain_gym.inner_trainers.adjustments import CATALOGUE_NAMES, Adjustment
from posttrain_gym.inner_trainers.control import Candidate, ControlState, Decision, catalogue_candidate, nothing
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.testing import ScriptedFamily
from posttrain_gym.meta_policies.controllers.drive import drive_round
from posttrain_gym.wrappers import ControllerInTheLoop, DiscretizeAction

from .scripted_env import AMPLE, make, recipe_action

LOWER = next(i for i, name in enumerate(CATALOGUE_NAMES) if name.startswith("lr_") and i > 0)
RULES = "posttrain_gym.meta_policies.controllers.catalogue:make_controller:rules"


class Scripted:
    """Does one thing at one step; nothing otherwise."""

    name = "scripted"

    def __init__(self, at: int = -1, does: Any = LOWER) -> None:
        self._at, self._does = at, does

    def begin(self, recipe: Recipe, sources: Sequence[str]) -> None:
        self.sources = tuple(sources)

    def decide(self, state: ControlState) -> Decision:
        if state.step != self._at:
            return Decision(nothing(self.name))
        if callable(self._does):
            return self._does()  # type: ignore[no-any-return]
        candidate = catalogue_candidate(self._does, self.sources, self.name, "on time")
        assert candidate is not None
        return Decision(candidate)

    def describe(self) -> Mapping[str, Any]:
        return {}


def controlled(controller: Any, interval: int = 5, **settings: Any) -> Any:
    return ControllerInTheLoop(make(**{"budget": AMPLE, "reuse": False, **settings}), controller, interval)


def test_a_controller_that_does_nothing_changes_nothing() -> None:
    env, plain = controlled(Scripted()), make(budget=AMPLE, reuse=False)
    for made in (env, plain):
        made.reset(seed=1)
    for algorithm in ("sft", "grpo"):
        action = recipe_action(plain, algorithm, steps=22)
        observation, reward, terminated, truncated, info = env.step(action)
        expected = plain.step(action)
        assert (reward, terminated, truncated) == expected[1:4]
        assert all(np.array_equal(observation[key], value) for key, value in expected[0].items())
        assert info["controller"] == {"name": "scripted", "looks": 4, "applied": 0, "failure": None}
        assert info["round"].pop("adjustments") == []
        del info["controller"]
        assert info.keys() == expected[4].keys()
        assert info["round"] == expected[4]["round"]
    assert np.array_equal(env.action_masks(), plain.action_masks())


def test_what_it_decides_is_what_drive_round_applies() -> None:
    env = controlled(Scripted(at=10))
    env.reset(seed=1)
    action = recipe_action(env.unwrapped, "sft", steps=30)
    info = env.step(action)[4]
    search = env.unwrapped.search
    report = search.outcomes[-1].report
    session = env.unwrapped.trainer.begin(search.task, report.recipe, search.weights_of("base"), report.seed)
    try:
        driven = drive_round(session, report.recipe, Scripted(at=10), interval=5)
        expected, _ = session.result()
    finally:
        session.close()
    assert report.adjustments == expected.adjustments
    assert [step for step, _ in report.adjustments] == [10]
    assert info["controller"] == {"name": "scripted", "looks": driven.looks, "applied": 1, "failure": None}
    assert report.curves == expected.curves
    rates = [row["learning_rate"] for row in report.curves]
    assert rates[9] != rates[10]


@pytest.mark.parametrize(
    ("does", "failure"),
    [
        (lambda: 1 / 0, "ZeroDivisionError"),
        (lambda: None, "decide returned NoneType"),
        (lambda: Decision(Candidate(None, Adjustment("mix_toward", 0.1, "nowhere"), "x", "y")), "was refused"),
    ],
)
def test_a_controller_that_fails_is_given_up_and_the_round_goes_on(does: Any, failure: str) -> None:
    env = controlled(Scripted(at=10, does=does))
    env.reset(seed=1)
    info = env.step(recipe_action(env.unwrapped, "sft", steps=30))[4]
    assert failure in info["controller"]["failure"]
    assert info["round"]["steps"] == 30
    assert info["round"]["failure"] is None
    assert any("went on unadjusted" in flag for flag in info["round"]["flags"])


def test_a_restarted_run_repeats_its_decisions_from_the_journal(tmp_path: Path) -> None:
    seen = []
    for _ in range(2):
        env = controlled(Scripted(at=10), journal=tmp_path)
        env.reset(seed=1)
        result = env.step(recipe_action(env.unwrapped, "sft", steps=30))
        seen.append((result[1], result[4]["round"], result[4]["replayed"]))
        env.close()
    assert seen[0][:2] == seen[1][:2]
    assert (seen[0][2], seen[1][2]) == (False, True)


def test_outside_a_step_the_environment_is_its_own() -> None:
    env = controlled(Scripted(at=10))
    env.reset(seed=1)
    env.unwrapped.step(recipe_action(env.unwrapped, "sft", steps=30))
    assert env.unwrapped.search.outcomes[-1].report.adjustments == ()


def test_contract_and_spec() -> None:
    made = gym.make("PostTrain/Recipe-v0", task=ScriptedFamily(), render_mode="ansi")
    env: Any = ControllerInTheLoop(DiscretizeAction(made, 4), RULES, interval=3)
    check_env(env)
    env.reset(seed=0)
    assert env.spec is not None
    again: Any = gym.make(env.spec)
    assert isinstance(again, ControllerInTheLoop)
    assert (again.controller.name, again._saved_kwargs["interval"]) == (env.controller.name, 3)
    assert np.array_equal(env.get_wrapper_attr("action_masks")(), DiscretizeAction(made, 4).action_masks())


@pytest.mark.parametrize("given", ["rules", "os:getcwd", "no_such_module:x", 3, "posttrain_gym:nothing"])
def test_what_is_no_controller_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="controller: "):
        controlled(given)


def test_environments_that_adjust_themselves_are_refused() -> None:
    full = gym.make("PostTrain/Full-v0", task=ScriptedFamily())
    with pytest.raises(ValueError, match="FullEnv adjusts rounds by its own actions; wrap PostTrain/Recipe-v0"):
        ControllerInTheLoop(full, Scripted())
