"""`posttrain-gym replay` shows from the log alone what was changed in a round, when, and why."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from posttrain_gym.experiments.cli import app
from posttrain_gym.experiments.plots import plot_round
from posttrain_gym.experiments.progress import console
from posttrain_gym.experiments.replay import read_stories
from posttrain_gym.inner_trainers.adjustments import Adjustment
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.testing import ScriptedTask, ScriptedTrainer
from posttrain_gym.meta_policies.controllers.base import Candidate, Decision, nothing
from posttrain_gym.meta_policies.controllers.catalogue import make_controller
from posttrain_gym.meta_policies.controllers.decision_log import DecisionLog
from posttrain_gym.meta_policies.controllers.drive import drive_round
from posttrain_gym.meta_policies.controllers.rules import RulesController, RuleSet
from tests.control_states import rule

RECIPE = Recipe("sft", {"left": 1.0}, steps=20, learning_rate=1e-3)
RULES = RuleSet(
    "two",
    (
        rule("too fast", "step == 14", "lr_half", reason="the loss [rises] for $5", priority=1),
        rule("slower still", "step >= 14", "lr_down", at_most=1),
    ),
)


def log_round(folder: Path, controller: Any = None, end: bool = True, level: str = "signals") -> None:
    trainer, task = ScriptedTrainer(), ScriptedTask()
    session = trainer.begin(task, RECIPE, trainer.base(task), 0)
    with DecisionLog(folder, level, horizon=3) as log:
        drive_round(session, RECIPE, controller or RulesController(RULES), log=log)
        report, _ = session.result()
        if end:
            log.end(report)


def replay(*arguments: object, columns: int = 80) -> str:
    console.width = columns  # a console that was made where COLUMNS is set, as in a worker, keeps to that
    result = CliRunner().invoke(app, ["replay", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def test_a_person_sees_when_the_rate_fell_and_why(tmp_path: Path) -> None:
    log_round(tmp_path)
    narrow, text = replay(tmp_path), replay(tmp_path, columns=120)
    assert max(len(line) for line in narrow.splitlines() if re.match(r" *(step|\d+) ", line)) <= 80
    assert "sft, 20 steps, rules:two after each step; finished after 20 steps" in text
    assert "learning rate 0.001 -> 0.0004; 2 adjustments in 19 decisions" in text
    words = " ".join(text.split())
    assert re.search(r"14 lr_half 0\.001 -> 0\.0005 too fast: the loss \[rises\] for \$5", words)
    assert re.search(r"15 lr_down 0\.0005 -> 0\.0004 slower still: because of slower still", words)
    assert "held back: slower still, lower priority than 'too fast' (1 time, step 14)" in words
    assert "held back: slower still, done 1 times, as often as allowed (4 times, steps 16 to 19)" in words
    assert "flag: scripted: nothing was trained" in words


def test_signals_are_shown_when_asked(tmp_path: Path) -> None:
    log_round(tmp_path)
    assert "(z " not in replay(tmp_path)
    assert re.search(r"loss 0\.0714 \(z [+-]\d\.\d\)", replay(tmp_path, "--signals", columns=120))


def test_json_has_the_curve_and_the_changes(tmp_path: Path) -> None:
    log_round(tmp_path)
    (data,) = json.loads(replay(tmp_path, "--json"))
    assert data["objective"] == "loss" and data["controller"] == "rules:two" and data["end"]["ended"] == "finished"
    assert data["curve"] == [[step, pytest.approx(1 / step)] for step in range(1, 21)]
    assert data["learning_rates"] == [
        [step, pytest.approx(1e-3 if step <= 14 else 5e-4 if step == 15 else 4e-4)] for step in range(1, 21)
    ]
    first, second = data["changes"]
    assert (first["first_step"], first["what"], first["by"], first["count"]) == (14, "lr_half", "too fast", 1)
    assert (first["learning_rate_before"], first["learning_rate_after"]) == (1e-3, pytest.approx(5e-4))
    assert first["effect"]["steps_after"] == 3 and first["effect"]["others"] == 1
    assert first["effect"]["change"] == pytest.approx(
        sum(1 / s for s in (15, 16, 17)) / 3 - sum(1 / s for s in (12, 13, 14)) / 3
    )
    assert first["signals"]["loss"]["value"] == pytest.approx(1 / 14)
    assert second["what"] == "lr_down"


def test_changes_of_a_kind_in_a_row_are_one_line(tmp_path: Path) -> None:
    log_round(tmp_path, make_controller("schedule:linear"))
    (story,) = read_stories(tmp_path)
    (change,) = story.changes
    assert (change.first, change.last, change.count, change.what) == (1, 19, 19, "lr_scale")
    assert change.rate_before == 1e-3 and change.rate_after == pytest.approx(5e-5)
    assert "1–19 lr_scale ×19 0.001 -> 5e-05 schedule:linear" in " ".join(replay(tmp_path).split())


def test_a_log_without_its_end_is_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    log_round(tmp_path, end=False, level="decisions")
    path = tmp_path / "decisions.jsonl"
    path.write_bytes(path.read_bytes()[:-40])  # killed while it wrote
    text = replay(tmp_path)
    assert "the log does not say how it ended" in text and "lr_half" in text
    (story,) = read_stories(tmp_path)
    assert [step for step, _ in story.curve] == list(range(1, 19))


def test_a_controller_that_failed_is_told(tmp_path: Path) -> None:
    class Fails:
        name = "mine"

        def begin(self, *arguments: Any) -> None:
            pass

        def decide(self, state: Any) -> Any:
            raise RuntimeError("out of ideas")

        def describe(self) -> dict[str, Any]:
            return {}

    log_round(tmp_path, Fails(), end=False)
    assert "flag: the controller failed after step 1: RuntimeError: out of ideas" in " ".join(replay(tmp_path).split())
    (data,) = json.loads(replay(tmp_path, "--json"))
    assert data["controller_failure"] == {"step": 1, "problem": "RuntimeError: out of ideas"}


def test_each_round_of_a_log_or_one_of_them(tmp_path: Path) -> None:
    log_round(tmp_path)
    log_round(tmp_path, make_controller("none"))
    assert replay(tmp_path).count("20 steps,") == 2
    assert "none after each step" in replay(tmp_path, "--round", 2) and "rules:two" not in replay(
        tmp_path, "--round", 2
    )
    with pytest.raises(ValueError, match="--round: the log holds rounds 1 to 2, got 3"):
        replay(tmp_path, "--round", 3)
    with pytest.raises(ValueError, match=r"no decisions\.jsonl there"):
        replay(tmp_path / "nowhere")


def test_the_plot_marks_each_change_and_gives_its_reason(tmp_path: Path) -> None:
    log_round(tmp_path / "log")
    assert f"plot: {tmp_path / 'plot.png'}" in "".join(
        replay(tmp_path / "log", "--plot", tmp_path / "plot.png").split("\n")
    )
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    (story,) = read_stories(tmp_path / "log")
    figure = plot_round(story, tmp_path / "again.png")
    top, bottom = figure.axes
    (loss,) = [line for line in top.lines if line.get_gid() == "objective"]
    (rate,) = [line for line in bottom.lines if line.get_gid() == "rate"]
    assert np.asarray(loss.get_ydata()).tolist() == [pytest.approx(1 / step) for step in range(1, 21)]
    assert np.asarray(rate.get_ydata()).tolist()[13:16] == [pytest.approx(rate) for rate in (1e-3, 5e-4, 4e-4)]
    marks = [line.get_xdata()[0] for line in top.lines if line.get_gid() is None]  # type: ignore[index]
    assert marks == [14.5, 15.5]  # between the step that was seen and the one that is changed
    notes = [text.get_text() for text in figure.texts]
    assert notes[0] == r"1  step 14  lr_half  (too fast: the loss [rises] for \$5)"
    assert notes[1].startswith("2  step 15  lr_down  (slower still: ")


def test_a_log_of_many_changes_lists_the_first(tmp_path: Path) -> None:
    up_and_down = RuleSet(
        "many",
        tuple(rule(f"r{n}", f"step == {n}", "lr_down" if n % 2 else "grad_clip_down") for n in range(1, 20)),
    )
    for _ in range(2):
        log_round(tmp_path, RulesController(up_and_down))
    story = read_stories(tmp_path)[0]
    assert len(story.changes) == 19
    object.__setattr__(story, "changes", story.changes * 2)
    notes = [text.get_text() for text in plot_round(story, tmp_path / "plot.png").texts]
    assert len(notes) == 25 and notes[-1] == "and 14 more"


def test_a_log_without_loss_or_reward_cannot_be_plotted(tmp_path: Path) -> None:
    with DecisionLog(tmp_path) as log:
        log.begin(RECIPE, ("left",), "x", {}, 1)
    (story,) = read_stories(tmp_path)
    assert story.summary == "loss not known; 0 adjustments in 0 decisions"
    with pytest.raises(ValueError, match="shows neither loss nor reward"):
        plot_round(story, tmp_path / "plot.png")


class KlOnSft:
    """A controller whose own adjustment the session refuses."""

    name = "kl on sft"

    def begin(self, recipe: Any, sources: Any) -> None:
        pass

    def decide(self, state: Any) -> Decision:
        if state.step in (3, 5):
            return Decision(Candidate(None, Adjustment("kl_scale", 1.7), "mine", "why not"))
        return Decision(nothing(self.name))

    def describe(self) -> dict[str, Any]:
        return {}


def test_refusals_rounds_and_failures_are_shown(tmp_path: Path) -> None:
    log_round(tmp_path, KlOnSft())
    trainer, task = ScriptedTrainer(faults={0: [1.0, 2.0, float("nan")]}), ScriptedTask()
    session = trainer.begin(task, RECIPE, trainer.base(task), 0)
    with DecisionLog(tmp_path, horizon=3) as log:
        drive_round(session, RECIPE, make_controller("none"), log=log)
        log.end(session.result()[0])
    text = " ".join(replay(tmp_path, columns=200).split())
    assert "round 1 of 2: sft, 20 steps, kl on sft after each step" in text
    assert re.search(r"refused: kl_scale 1\.7 after step 3: .+ \(2 times\)", text)
    assert "round 2 of 2: sft, 20 steps, none after each step; failed after 3 steps (diverged: the loss was nan" in text
    assert "(means of the first and the last" in text


def test_a_log_cannot_drive_the_terminal(tmp_path: Path) -> None:
    log_round(tmp_path, RulesController(RuleSet("x", (rule("a\x1b[31m", "step == 4", "lr_half", reason="\x07bell"),))))
    text = replay(tmp_path, columns=120)
    assert "\x1b" not in text and "\x07" not in text
    assert r"a\x1b[31m" in text and r"\x07bell" in text
