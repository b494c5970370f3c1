"""The decision log: each decision on disk before the next step, effects once seen, damage named by its line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from posttrain_gym.inner_trainers.adjustments import CATALOGUE_NAMES, Adjustment
from posttrain_gym.inner_trainers.base import RoundReport
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.signals import Signals
from posttrain_gym.inner_trainers.testing import ScriptedTask, ScriptedTrainer
from posttrain_gym.meta_policies.controllers.base import Candidate, Decision, nothing
from posttrain_gym.meta_policies.controllers.decision_log import LEVELS, DecisionLog
from posttrain_gym.meta_policies.controllers.drive import drive_round
from posttrain_gym.meta_policies.controllers.log_reader import RoundLog, read_log
from posttrain_gym.meta_policies.controllers.rules import RulesController, RuleSet
from tests.control_states import ALL, rule, state

RECIPE = Recipe("sft", {"left": 1.0}, steps=12, learning_rate=1e-3)
RULES = RuleSet(
    "two",
    (
        rule("at four", "step == 4", "lr_half", priority=2),
        rule("from three on", "step >= 3", "lr_up", at_most=1, cooldown=100),
        rule("masked", "step == 2", "kl_up"),
    ),
)


def logged(
    folder: Path, level: str = "decisions", rules: RuleSet = RULES, **kwargs: Any
) -> tuple[RoundLog, RoundReport]:
    """Return the log and the report of one scripted round."""
    trainer, task = ScriptedTrainer(), ScriptedTask()
    session = trainer.begin(task, RECIPE, trainer.base(task), 0)
    with DecisionLog(folder, level, **kwargs) as log:
        drive_round(session, RECIPE, RulesController(rules), log=log)
        report, _ = session.result()
        log.end(report)
    return read_log(folder)[-1], report


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_decision_is_a_row_that_reads_back(tmp_path: Path) -> None:
    log, report = logged(tmp_path, horizon=3)
    assert (log.recipe, log.sources, log.controller, log.interval, log.horizon) == (
        RECIPE,
        ("left",),
        "rules:two",
        1,
        3,
    )
    assert log.facts == {"controller": "rules", **RULES.to_dict()}
    assert [decision.step for decision in log.decisions] == list(range(1, 12))
    assert [(d.step, d.chosen, d.by) for d in log.decisions if d.applied] == [(3, "lr_up", "from three on")]
    assert log.decisions[3].held_back == {
        "at four": "damped: would undo what 'from three on' did; waits until step 23",
        "from three on": "done 1 times, as often as allowed",
    }
    assert log.decisions[3].flags == (
        "rules 'from three on' and 'at four' undo each other; at step 4 the second is held back until step 23, and for "
        "longer each time",
    )
    second = log.decisions[1]
    assert second.held_back == {"masked": "masked: cannot be applied now"} and second.chosen == "none"
    assert [candidate.what for candidate in second.candidates] == ["kl_up"]
    third = log.decisions[2]
    assert (third.reason, third.adjustment, third.refused) == (
        "because of from three on",
        Adjustment("lr_scale", 1.25),
        None,
    )
    assert third.learning_rate == 1e-3 and third.state.settings["learning_rate"] == 1e-3  # before it was applied
    assert log.decisions[3].learning_rate == pytest.approx(1.25e-3)
    assert third.state.signals.values["loss"] == pytest.approx(1 / 3)
    assert third.state.signals.values["reward"] is None and len(third.state.signals.values) == len(Signals().values)
    assert third.state.legal[CATALOGUE_NAMES.index("lr_up")] is True
    assert third.state.legal[CATALOGUE_NAMES.index("kl_up")] is False and len(third.state.legal) == len(ALL)
    assert log.end is not None and log.end["ended"] == "finished" and log.end["steps"] == 12
    assert log.end["flags"] == list(report.flags)
    assert log.steps == [] and log.timings == {}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["decisions.jsonl"]


def test_each_level_has_what_the_one_before_has(tmp_path: Path) -> None:
    for level in LEVELS:
        logged(tmp_path / level, level)
    files = {level: sorted(path.stem for path in (tmp_path / level).iterdir()) for level in LEVELS}
    assert files == {
        "decisions": ["decisions"],
        "signals": ["decisions", "signals"],
        "timings": ["decisions", "signals", "timings"],
    }
    (log,) = read_log(tmp_path / "timings")
    assert [step.step for step in log.steps] == list(range(1, 13))  # the last step too, at which nothing is decided
    assert log.steps[1].values["loss"] == 0.5 and log.steps[1].learning_rate == 1e-3
    assert sorted(log.timings) == list(range(1, 13))
    assert {"advance", "decide", "apply", "log"} <= log.timings[3].keys()
    assert log.timings[12].keys() >= {"advance"} and all(value >= 0 for value in log.timings[3].values())
    rows = [lines(tmp_path / level / "decisions.jsonl") for level in LEVELS]
    assert rows[0] == rows[1] == rows[2]


def test_an_effect_is_a_row_of_its_own_once_enough_steps_have_passed(tmp_path: Path) -> None:
    rules = RuleSet("one", (rule("a", "step == 4 or step == 10", "lr_half"), rule("b", "step == 5", "lr_half")))
    log, _ = logged(tmp_path, rules=rules, horizon=3)
    first, second, last = log.effects
    # a scripted loss is 1 / step
    assert (first.step, first.what, first.by, first.objective) == (4, "lr_half", "a", "loss")
    assert first.before == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3)
    assert first.after == pytest.approx((1 / 5 + 1 / 6 + 1 / 7) / 3)
    assert first.before is not None and first.after is not None
    assert first.change == pytest.approx(first.after - first.before) and first.better is True
    assert (first.steps_before, first.steps_after, first.others) == (3, 3, 1)
    assert (second.step, second.others) == (5, 1)
    assert (last.step, last.steps_after, last.others) == (10, 2, 0)  # the round ended first
    order = [(row["row"], row.get("step")) for row in lines(tmp_path / "decisions.jsonl")]
    assert order.index(("effect", 4)) == order.index(("decision", 7)) - 1  # after step 7, before its decision


def test_an_effect_is_of_the_reward_where_there_is_one(tmp_path: Path) -> None:
    change = Candidate(None, Adjustment("lr_scale", 0.9), "x", "y")
    with DecisionLog(tmp_path, horizon=2) as log:
        log.begin(RECIPE, ("left",), "x", {}, 1)
        for step, reward in enumerate([0.0, 0.5, 0.25, 0.25], start=1):
            seen = state(step, loss=1.0, reward=reward)
            log.step(step, seen.signals, 1e-3)
            log.remember(seen)
            log.decision(seen, Decision(change if step == 2 else nothing("x")))
        log.finish()
    (effect,) = read_log(tmp_path)[0].effects
    assert (effect.objective, effect.before, effect.after, effect.change) == ("reward", 0.25, 0.25, 0.0)
    assert effect.better is False and effect.what == "lr_scale 0.9"


def test_what_is_not_finite_stands_as_text_and_reads_back(tmp_path: Path) -> None:
    with DecisionLog(tmp_path) as log:
        log.begin(RECIPE, ("left",), "x", {"odd": {1}, "bad": float("inf")}, 1)
        seen = state(1, loss=float("nan"), grad_norm=float("inf"), settings={"learning_rate": float("-inf")})
        log.remember(seen)
        log.decision(seen, Decision(nothing("x")))
    text = (tmp_path / "decisions.jsonl").read_text()
    assert '"loss": "nan"' in text and "NaN" not in text and "Infinity" not in text
    (logged,) = read_log(tmp_path)
    (decision,) = logged.decisions
    assert str(decision.state.signals.values["loss"]) == "nan"
    assert decision.state.signals.values["grad_norm"] == float("inf")
    assert decision.state.settings == {"learning_rate": float("-inf")}
    assert logged.facts == {"odd": [1], "bad": "inf"}


def test_a_killed_process_leaves_every_row(tmp_path: Path) -> None:
    code = """
import os, sys
from posttrain_gym.meta_policies.controllers.base import Decision, nothing
from posttrain_gym.meta_policies.controllers.decision_log import DecisionLog
from tests.control_states import state
from tests.test_decision_log import RECIPE
log = DecisionLog(sys.argv[1], "signals")
log.begin(RECIPE, ("left",), "x", {}, 1)
for step in range(1, 6):
    seen = state(step, loss=1.0)
    log.step(step, seen.signals, 1e-3)
    log.remember(seen)
    log.decision(seen, Decision(nothing("x")))
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=120).returncode == 9
    (log,) = read_log(tmp_path)
    assert [decision.step for decision in log.decisions] == [1, 2, 3, 4, 5]
    assert [step.step for step in log.steps] == [1, 2, 3, 4, 5]
    assert log.end is None


def test_a_cut_line_is_left_out_and_set_aside_when_the_log_goes_on(tmp_path: Path) -> None:
    logged(tmp_path, "signals")
    path = tmp_path / "decisions.jsonl"
    raw = path.read_bytes()
    ends = [index + 1 for index, byte in enumerate(raw) if byte == 10]
    for size in range(ends[1], ends[3] + 1, 37):  # cut anywhere within two rows
        path.write_bytes(raw[:size])
        whole = sum(end <= size for end in ends)
        (log,) = read_log(tmp_path)
        assert len(log.decisions) == whole - 1
    cut = raw[: ends[2] + 25]
    path.write_bytes(cut)
    log, _ = logged(tmp_path, "signals")
    first, second = read_log(tmp_path)
    assert len(first.decisions) == 2 and len(second.decisions) == 11
    assert (tmp_path / "decisions.damaged").read_bytes() == cut[ends[2] :] + b"\n"
    assert [len(entry.steps) for entry in (first, second)] == [12, 12]
    assert log.decisions == second.decisions


def test_a_log_that_was_cut_anywhere_loads_its_whole_lines_and_goes_on(tmp_path: Path) -> None:
    with DecisionLog(tmp_path) as log:
        log.begin(RECIPE, ("left",), "x", {}, 1)
        log.failed(1, "first")
        log.failed(2, "second")
    path, aside = tmp_path / "decisions.jsonl", tmp_path / "decisions.damaged"
    raw = path.read_bytes()
    ends = [index + 1 for index, byte in enumerate(raw) if byte == 10]
    near_ends = [end + offset for end in ends for offset in (-1, 0, 1) if end + offset <= len(raw)]
    for size in sorted({*range(0, len(raw), 9), *near_ends}):
        path.write_bytes(raw[:size])
        rounds = read_log(tmp_path)
        whole = sum(end <= size for end in ends)
        assert [entry.failure for entry in rounds] == [[], [None], [(1, "first")], [(2, "second")]][whole]
        if size % 5 == 0 or size in near_ends:
            aside.unlink(missing_ok=True)
            with DecisionLog(tmp_path) as log:
                log.begin(RECIPE, ("left",), "y", {}, 1)
            assert [entry.controller for entry in read_log(tmp_path)] == (["x", "y"] if whole else ["y"])
            kept = ends[whole - 1] if whole else 0
            assert (aside.read_bytes() if aside.exists() else b"") == (raw[kept:size] + b"\n" if size > kept else b"")


@pytest.mark.parametrize(
    ("line", "change", "problem"),
    [
        (3, lambda row: "{not json", r"line 3: not JSON"),
        (3, lambda row: "[1]", r"line 3: expected an object, got list"),
        (3, lambda row: "\udcff", r"line 3: not JSON"),
        (3, lambda row: json.dumps({k: v for k, v in row.items() if k != "mask"}), r"line 3: key 'mask' is missing"),
        (3, lambda row: json.dumps({**row, "mask": "01"}), r"line 3: mask: expected 37 times 0 or 1, got '01'"),
        (3, lambda row: json.dumps({**row, "row": "desicion"}), r"line 3: unknown row 'desicion'"),
        (3, lambda row: json.dumps({**row, "adjustment": {"kind": "x"}}), r"line 3: adjustment: 'x' cannot be applied"),
        (3, lambda row: json.dumps({**row, "values": {"loss": "high"}}), r"line 3: could not convert string to float"),
        (1, lambda row: json.dumps({**row, "format": 2}), r"line 1: format 2, this version reads 1"),
        (1, lambda row: json.dumps({**row, "catalogue": ["none"]}), r"line 1: it was written for another catalogue"),
        (1, lambda row: json.dumps({**row, "row": "decision"}), r"line 1: a decision row before the first round row"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: int, change: Any, problem: str) -> None:
    logged(tmp_path)
    path = tmp_path / "decisions.jsonl"
    rows = path.read_text().splitlines()
    rows[line - 1] = change(json.loads(rows[line - 1]))
    path.write_bytes("".join(f"{row}\n" for row in rows).encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=problem) as caught:
        read_log(tmp_path)
    assert str(caught.value).startswith(str(path))


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no decisions\.jsonl there; expected the folder"):
        read_log(tmp_path)
    with pytest.raises(ValueError, match=r"level: unknown 'signal'\. Did you mean 'signals'\?"):
        DecisionLog(tmp_path, "signal")
    with pytest.raises(ValueError, match=r"horizon: expected an integer in \[1, 10000\], got 0"):
        DecisionLog(tmp_path, horizon=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file is a file; expected the name of a folder"):
        DecisionLog(tmp_path / "file")


def test_one_log_at_a_time_writes_to_a_folder(tmp_path: Path) -> None:
    with DecisionLog(tmp_path), pytest.raises(ValueError, match="another log is writing to"):
        DecisionLog(tmp_path)
    DecisionLog(tmp_path).close()  # let go of
    program = (
        "import sys; from posttrain_gym.meta_policies.controllers.decision_log import DecisionLog; "
        "DecisionLog(sys.argv[1])"
    )
    with DecisionLog(tmp_path):
        done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 1 and "another log is writing to" in done.stderr


def test_a_full_disk_costs_the_log_not_the_round(tmp_path: Path) -> None:
    """In a process of its own, whose files may have 2,000 bytes."""
    program = """
import resource, signal, sys
from posttrain_gym.inner_trainers.testing import ScriptedTask, ScriptedTrainer
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.meta_policies.controllers.catalogue import make_controller
from posttrain_gym.meta_policies.controllers.decision_log import DecisionLog
from posttrain_gym.meta_policies.controllers.drive import drive_round
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
trainer, task, recipe = ScriptedTrainer(), ScriptedTask(), Recipe("sft", {"left": 1.0}, steps=12)
session = trainer.begin(task, recipe, trainer.base(task), 0)
with DecisionLog(sys.argv[1]) as log:
    drive_round(session, recipe, make_controller("rules"), log=log)
    report, checkpoint = session.result()
    log.end(report)
print(report.steps, checkpoint is not None, [flag for flag in report.flags if "log" in flag])
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("12 True ['the decision log ends after step")
    assert "it does not say how the round ended" in done.stderr
