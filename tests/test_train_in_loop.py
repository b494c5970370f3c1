"""Meta-training where rounds are adjusted while they run: resumed runs, settings, what the command line refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from posttrain_gym.envs.full import FullEnv
from posttrain_gym.envs.in_loop import InLoopEnv
from posttrain_gym.experiments.settings import EnvSettings, InLoopSettings, in_loop_settings
from posttrain_gym.experiments.train import RoundEvent, TrainSettings, train
from tests.adjustable_env import RECIPE
from tests.test_train import BUDGET, SCRIPTED, policy_weights

IN_LOOP = InLoopSettings("in-loop", RECIPE, interval=4, shaping=True)


def settings(rounds: int, in_loop: InLoopSettings = IN_LOOP, algo: str = "maskable_ppo") -> TrainSettings:
    return TrainSettings(EnvSettings(task=SCRIPTED, budget=BUDGET, in_loop=in_loop), algo, rounds, 1, seed=3)


@pytest.mark.parametrize("in_loop", [IN_LOOP, InLoopSettings("full", interval=10)], ids=["in-loop", "full"])
def test_a_resumed_run_gives_the_policy_of_an_unbroken_one(tmp_path: Path, in_loop: InLoopSettings) -> None:
    whole, rows = train(settings(32, in_loop), tmp_path / "whole")
    train(settings(16, in_loop), tmp_path / "broken")
    events: list[RoundEvent] = []
    resumed, again = train(settings(32, in_loop), tmp_path / "broken", resume=True, on_round=events.append)
    assert events[0].replayed and not events[-1].replayed
    assert again == rows and rows
    expected, got = policy_weights(whole), policy_weights(resumed)
    assert all(np.array_equal(expected[name], got[name]) for name in expected)
    if in_loop is IN_LOOP:
        assert "step 8/20" in events[0].describe() and "begins" not in events[0].describe()
    else:
        assert any("begins: " in event.describe() for event in events)


def test_settings_build_the_environment_and_leave_older_runs_alone(tmp_path: Path) -> None:
    assert "in_loop" not in EnvSettings(task=SCRIPTED).to_dict()
    stored = settings(8).environment.to_dict()["in_loop"]
    assert stored == {"kind": "in-loop", "recipe": RECIPE, "interval": 4, "shaping": True}
    env = settings(8).environment.build().unwrapped
    assert isinstance(env, InLoopEnv) and env.recipe.to_dict()["steps"] == 20
    full = EnvSettings(task=SCRIPTED, in_loop=InLoopSettings("full")).build().unwrapped
    assert isinstance(full, FullEnv)
    train(settings(8), tmp_path)
    other = settings(8, InLoopSettings("in-loop", {**RECIPE, "steps": 21}, interval=4, shaping=True))
    with pytest.raises(ValueError, match=r"in_loop\.recipe\.steps: 20 there, 21 now"):
        train(other, tmp_path, resume=True)


@pytest.mark.parametrize(
    ("kind", "recipe", "shaping", "message"),
    [
        ("inloop", None, False, "--env: unknown 'inloop'. Did you mean 'in-loop'"),
        ("in-loop", None, False, "--recipe: --env in-loop adjusts rounds of one recipe; name its"),
        ("full", Path("r.yaml"), False, "--recipe: with --env full the policy chooses recipes"),
        ("recipe", None, True, "--shaping: rounds of --env recipe are not paused"),
        ("in-loop", Path("no-such.yaml"), False, "recipe no-such.yaml: no such file"),
    ],
)
def test_options_that_do_not_fit_are_refused(kind: str, recipe: Path | None, shaping: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        in_loop_settings(kind, recipe, 5, shaping)


def test_the_recipe_environment_needs_no_such_settings(tmp_path: Path) -> None:
    assert in_loop_settings("recipe", None, 5, False) is None
    file = tmp_path / "r.yaml"
    file.write_text("algorithm: sft\nmix: {left: 1.0}\n")
    given = in_loop_settings("in-loop", file, 7, True)
    assert given is not None and given.recipe is not None
    assert (given.kind, given.recipe["mix"], given.interval, given.shaping) == ("in-loop", {"left": 1.0}, 7, True)
