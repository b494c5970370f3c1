"""`run-recipe --controller`: a recipe under a controller, its decision log, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from posttrain_gym.experiments.cli import main
from posttrain_gym.experiments.run_recipe import Control, run_recipe
from posttrain_gym.meta_policies.controllers.log_reader import read_log

SCRIPTED = "posttrain_gym.inner_trainers.testing:ScriptedFamily"
RULES = """
rules:
  - name: halve twice
    when: step >= 3
    action: lr_half
    cooldown: 4
    at_most: 2
    reason: to see it done
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text("algorithm: sft\nmix: {left: 1.0}\nsteps: 12\nlearning_rate: 1e-3\n")
    return path


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "rules.yaml"
    path.write_text(RULES)
    return path


def run(recipe: Path, control: Control | None = None) -> dict[str, Any]:
    return run_recipe(recipe, SCRIPTED, 0, 0, None, control=control)


def test_the_controller_adjusts_the_round_and_its_log_says_when(recipe: Path, rules: Path, tmp_path: Path) -> None:
    result = run(recipe, Control(f"rules:{rules}", log=tmp_path / "log"))
    halved = {"kind": "lr_scale", "value": 0.5}
    assert result["control"] == {
        "controller": "rules:rules",
        "interval": 1,
        "log": str(tmp_path / "log"),
        "decisions": 11,
        "applied": 2,
        "refused": 0,
        "failure": None,
        "adjustments": [[3, halved], [7, halved]],
    }
    (logged,) = read_log(tmp_path / "log")
    assert [(d.step, d.chosen) for d in logged.decisions if d.chosen != "none"] == [(3, "lr_half"), (7, "lr_half")]
    assert sorted(path.name for path in (tmp_path / "log").iterdir()) == ["decisions.jsonl"]


def test_an_interval_is_kept_and_a_level_adds_its_files(recipe: Path, rules: Path, tmp_path: Path) -> None:
    result = run(recipe, Control(f"rules:{rules}", 5, tmp_path / "log", "timings"))
    assert result["control"]["decisions"] == 2  # after steps 5 and 10
    assert [step for step, _ in result["control"]["adjustments"]] == [5, 10]
    names = ["decisions.jsonl", "signals.jsonl", "timings.jsonl"]
    assert sorted(path.name for path in (tmp_path / "log").iterdir()) == names


def test_without_a_controller_nothing_is_said_of_one(recipe: Path) -> None:
    plain, idle = run(recipe), run(recipe, Control("none"))
    assert "control" not in plain
    assert idle.pop("control")["applied"] == 0
    assert idle["scores"] == plain["scores"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--interval", "2"), "--interval: it is about a controller; name one with --controller"),
        (("--log", "somewhere"), "--log: it is about a controller"),
        (("--log-level", "signals"), "--log-level: it is about a controller"),
        (("--controller", "rulez"), "Did you mean 'rules'"),
        (("--controller", "rules:no.yaml"), "no.yaml: no such file"),
        (("--controller", "schedule:cosinus"), "Did you mean 'cosine'"),
        (("--controller", "rules", "--interval", "0"), "interval: expected an integer in [1, 100000], got 0"),
        (("--controller", "rules", "--log", "recipe.yaml"), "recipe.yaml is a file; expected a folder"),
        (("--controller", "rules", "--log-level", "signals"), "--log-level: there is no log; name its folder"),
        (("--controller", "rules", "--log", "log", "--log-level", "signal"), "Did you mean 'signals'"),
    ],
)
def test_bad_input_is_one_clear_error(
    options: tuple[str, ...],
    expected: str,
    recipe: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(recipe.parent)
    monkeypatch.setattr(sys, "argv", ["posttrain-gym", "run-recipe", "recipe.yaml", "--task", SCRIPTED, *options])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert expected in " ".join(capsys.readouterr().err.split())
    assert not (recipe.parent / "log").exists()  # nothing is begun


def test_the_command_prints_what_was_done_and_how_to_replay_it(
    recipe: Path, rules: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(recipe.parent)
    command = ["run-recipe", "recipe.yaml", "--task", SCRIPTED, "--controller", "rules:rules.yaml", "--log", "my log"]
    monkeypatch.setattr(sys, "path", list(sys.path))
    for arguments in (command, [*command, "--json"], ["replay", "my log", "--json"]):
        monkeypatch.setattr(sys, "argv", ["posttrain-gym", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 0
    shown, _, printed = capsys.readouterr().out.partition("\n{")
    assert "control  rules:rules: 11 decisions, 2 adjustments" in shown
    assert "lr_scale 0.5 after step 3, lr_scale 0.5 after step 7" in shown
    assert "replay   posttrain-gym replay 'my log'" in shown
    result, end = json.JSONDecoder().raw_decode("{" + printed)
    assert result["control"]["applied"] == 2
    assert len(json.loads(("{" + printed)[end:])) == 2  # both rounds are in the log
