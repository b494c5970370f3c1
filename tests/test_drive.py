"""A controller drives a round: its adjustments arrive, its failures leave the round alone, nothing is done after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from posttrain_gym.inner_trainers.adjustments import Adjustment, catalogue_index
from posttrain_gym.inner_trainers.base import Limit, RoundReport
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.signals import Signals
from posttrain_gym.inner_trainers.testing import ScriptedTask, ScriptedTrainer, TinyTask
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer
from posttrain_gym.meta_policies.controllers.base import Candidate, ControlState, Decision, nothing
from posttrain_gym.meta_policies.controllers.catalogue import make_controller
from posttrain_gym.meta_policies.controllers.decision_log import DecisionLog
from posttrain_gym.meta_policies.controllers.drive import Driven, LegalNow, OpeningController, SettingsNow, drive_round
from posttrain_gym.meta_policies.controllers.log_reader import read_log
from posttrain_gym.meta_policies.controllers.rules import Rule, RulesController, RuleSet
from tests.control_states import rule
from tests.trl_fixtures import *  # noqa: F403
from tests.trl_rounds import Weights, equal, sft, trained

RECIPE = Recipe("sft", {"left": 1.0}, steps=10, learning_rate=1e-3)
HALF = catalogue_index("lr_half")


class Does:
    """A controller that does what a function says."""

    name = "test"

    def __init__(self, decide: Callable[[ControlState], Any]) -> None:
        self._decide = decide
        self.steps: list[int] = []
        self.states: list[ControlState] = []
        self.settings: list[dict[str, float]] = []

    def begin(self, recipe: Recipe, sources: Sequence[str]) -> None:
        self.begun = (recipe, tuple(sources))

    def decide(self, state: ControlState) -> Decision:
        self.steps.append(state.step)
        self.states.append(state)
        self.settings.append(dict(state.settings))
        decision: Decision = self._decide(state)
        return decision

    def describe(self) -> Mapping[str, Any]:
        return {"controller": self.name}


def half_at(*steps: int) -> Callable[[ControlState], Decision]:
    half = Candidate(HALF, Adjustment("lr_scale", 0.5), "test", "why not")
    return lambda state: Decision(half if state.step in steps else nothing("test"))


def driven(
    controller: Any, recipe: Recipe = RECIPE, *, faults: Any = None, limit: Limit | None = None, **kwargs: Any
) -> tuple[Driven, RoundReport]:
    trainer, task = ScriptedTrainer(faults={0: faults} if faults is not None else None), ScriptedTask()
    session = trainer.begin(task, recipe, trainer.base(task), 0, limit)
    done = drive_round(session, recipe, controller, **kwargs)
    assert session.done
    return done, session.result()[0]


def rates(report: RoundReport) -> list[float]:
    return [row["learning_rate"] for row in report.curves]


# What is done


def test_the_learning_rate_rule_gives_the_exact_rates(trainer: TrlTrainer, task: TinyTask) -> None:
    # a linear schedule from 1e-3 over 10 steps, halved after step 5
    recipe = sft(steps=10, learning_rate=1e-3, schedule="linear")
    rules = RuleSet("halve", (Rule("half way", "progress >= 0.5", "lr_half", "half way there", at_most=1),))
    session = trainer.begin(task, recipe, trainer.base(task), 3)
    drive_round(session, recipe, RulesController(rules))
    report, checkpoint = session.result()
    assert report.failure is None and report.flags == ()
    expected = [1e-3, 9e-4, 8e-4, 7e-4, 6e-4, 2.5e-4, 2e-4, 1.5e-4, 1e-4, 5e-5]
    assert rates(report) == pytest.approx(expected, rel=1e-9)
    assert report.adjustments == ((5, Adjustment("lr_scale", 0.5)),)
    assert checkpoint is not None and not equal(checkpoint.weights, trained(trainer, task, recipe))


def test_a_scripted_round_takes_the_same_way() -> None:
    done, report = driven(Does(half_at(5, 7)))
    assert rates(report) == [1e-3] * 5 + [5e-4] * 2 + [2.5e-4] * 3
    assert (done.looks, done.applied, done.refused, done.failure) == (9, 2, 0, None)
    assert done.decide_seconds > 0 and done.apply_seconds > 0


@pytest.mark.parametrize("interval", [1, 3, 4, 20])
@pytest.mark.parametrize("logged", [False, True])
def test_a_controller_is_asked_after_each_interval_and_not_at_the_end(
    tmp_path: Path, interval: int, logged: bool
) -> None:
    made = Does(half_at())
    log = DecisionLog(tmp_path) if logged else None
    driven(made, interval=interval, log=log)
    assert made.steps == list(range(interval, 10, interval))
    assert made.begun == (RECIPE, ("left",))
    if log is not None:
        log.close()


def test_a_state_holds_what_the_session_shows(trainer: TrlTrainer, task: TinyTask) -> None:
    made = Does(half_at(2))
    recipe = sft(mix={"good": 0.5, "bad": 0.5})
    session = trainer.begin(task, recipe, trainer.base(task), 3)
    drive_round(session, recipe, made)
    report, _ = session.result()
    assert [state.step for state in made.states] == [1, 2, 3]
    assert made.states[0].sources == ("bad", "good") and made.states[0].steps == 4
    for state in made.states:
        assert state.signals.step == state.step
        assert state.signals.values["loss"] == pytest.approx(report.curves[state.step - 1]["loss"])
        assert state.settings["mix.bad"] == 0.5
    assert [state.settings["learning_rate"] for state in made.states] == pytest.approx([1e-2, 1e-2, 5e-3])
    assert made.settings == [dict(state.settings) for state in made.states]
    with pytest.raises(RuntimeError, match="legality can be looked up only while the round is parked"):
        made.states[0].legal[HALF]


def test_legality_is_looked_up_once_and_only_when_asked() -> None:
    asked: list[str] = []

    class Session:
        def refusal(self, adjustment: Adjustment) -> str | None:
            asked.append(str(adjustment))
            return "no" if adjustment.kind == "stop" else None

    adjustments = [Adjustment(), Adjustment("stop"), None]
    legal = LegalNow(Session(), adjustments)  # type: ignore[arg-type]
    assert (legal[1], legal[1], legal[-1], len(legal)) == (False, False, False, 3)
    assert asked == ["stop"]
    assert list(legal) == legal[:] == [True, False, False]
    assert asked == ["stop", "none"]
    legal.round_goes_on()
    assert list(legal) == [True, False, False]  # what was looked up stays


def test_settings_are_those_of_the_states_step_or_none_at_all() -> None:
    class Session:
        settings = {"learning_rate": 1.0}

    read, unread = SettingsNow(Session()), SettingsNow(Session())  # type: ignore[arg-type]
    assert (read["learning_rate"], read.get("gamma"), len(read), list(read)) == (1.0, None, 1, ["learning_rate"])
    for settings in (read, unread):
        settings.round_goes_on()
    assert dict(read) == {"learning_rate": 1.0}
    with pytest.raises(RuntimeError, match="settings can be looked up only while the round is parked"):
        dict(unread)


def test_a_round_can_be_stopped() -> None:
    stop = Candidate(catalogue_index("stop"), Adjustment("stop"), "test", "enough")
    made = Does(lambda state: Decision(stop if state.step == 4 else nothing("test")))
    done, report = driven(made)
    assert (report.ended, report.steps, made.steps, done.failure) == ("stopped", 4, [1, 2, 3, 4], None)


# What changes nothing


@pytest.mark.parametrize("name", ["none", "rules", "log only"])
def test_a_controller_that_does_nothing_leaves_every_bit(
    tmp_path: Path, trainer: TrlTrainer, task: TinyTask, sft_weights: Weights, name: str
) -> None:
    always = RuleSet("always", (rule("a", "step >= 1", "lr_half"), rule("b", "step >= 1", "stop", priority=9)))
    made = RulesController(always, log_only=True) if name == "log only" else make_controller(name, **_quiet(name))
    session = trainer.begin(task, sft(), trainer.base(task), 3)
    with DecisionLog(tmp_path, "timings") as log:
        done = drive_round(session, sft(), made, log=log)
    report, checkpoint = session.result()
    assert report.failure is None and checkpoint is not None
    assert equal(checkpoint.weights, sft_weights)
    assert report.adjustments == () and done.applied == 0 and done.looks == 3
    plain = trainer.begin(task, sft(), trainer.base(task), 3)
    plain.advance()
    assert plain.result()[0].checkpoint == report.checkpoint
    if name == "log only":
        (logged,) = read_log(tmp_path)
        assert [d.reason for d in logged.decisions] == ["log only: 'b' would have done stop"] * 3
        assert not any(d.applied for d in logged.decisions) and logged.effects == []


def _quiet(name: str) -> dict[str, Any]:
    return {"log_only": True} if name == "rules" else {}


# What goes wrong


def fails(state: ControlState) -> Decision:
    raise KeyError("a\nb")


def illegal(state: ControlState) -> Decision:
    index = catalogue_index("mix_toward_3")
    return Decision(Candidate(index, Adjustment("mix_toward", 0.2, "x"), "test", ""))


@pytest.mark.parametrize(
    ("decide", "problem"),
    [
        (fails, r"KeyError: 'a\nb'"),
        (lambda state: None, "decide returned NoneType, expected a Decision"),
        (lambda state: nothing("test"), "decide returned Candidate, expected a Decision"),
        (lambda state: Decision(Adjustment()), "the chosen candidate is Adjustment("),  # type: ignore[arg-type]
        (lambda state: Decision(Candidate(99, Adjustment(), "t", "")), "the chosen action is 99, the catalogue has 37"),
        (lambda state: Decision(Candidate(-1, Adjustment(), "t", "")), "the chosen action is -1, the catalogue has 37"),
        (lambda state: Decision(Candidate(HALF, Adjustment(), "t", "")), "action lr_half stands for lr_scale 0.5, got"),
        (
            lambda state: Decision(Candidate(0, Adjustment(), "t", "", "high")),  # type: ignore[arg-type]
            "the confidence of 't' is 'high', expected a number in",
        ),
        (
            lambda state: Decision(Candidate(0, Adjustment(), "t", 7)),  # type: ignore[arg-type]
            "by and reason of a candidate must be text, got 't' and 7",
        ),
        (illegal, "action mix_toward_3 stands for None, got mix_toward 0.2 x"),
        (
            lambda state: Decision(Candidate(catalogue_index("kl_up"), Adjustment("kl_scale", 1.5), "t", "")),
            "it chose kl_up, which cannot be applied now",
        ),
        (lambda state: Decision(nothing("t"), flags="abc"), "flags and candidates must be tuples"),  # type: ignore[arg-type]
        (lambda state: Decision(nothing("t"), ("x",)), "candidates must be Candidates, got ('x',)"),  # type: ignore[arg-type]
        (lambda state: Decision(nothing("t"), held_back="x"), "held_back must be a mapping, got 'x'"),  # type: ignore[arg-type]
    ],
)
def test_a_controller_that_fails_leaves_the_round_unadjusted_and_is_flagged_once(
    tmp_path: Path, decide: Callable[[ControlState], Any], problem: str
) -> None:
    made = Does(lambda state: half_at(2)(state) if state.step < 4 else decide(state))
    with DecisionLog(tmp_path) as log:
        done, report = driven(made, log=log)
    assert report.ended == "finished" and rates(report) == [1e-3] * 2 + [5e-4] * 8
    assert made.steps == [1, 2, 3, 4]  # not asked again
    (flag,) = report.flags[1:]
    assert flag.startswith(f"controller 'test' failed after step 4: {problem}")
    assert flag.endswith("; the round goes on unadjusted") and "\n" not in flag
    assert done.failure is not None and done.failure.startswith(problem)
    (logged,) = read_log(tmp_path)
    assert logged.failure == (4, done.failure) and len(logged.decisions) == 3


def test_a_controller_that_cannot_begin_is_flagged_once_too(tmp_path: Path) -> None:
    class Broken(Does):
        def begin(self, recipe: Recipe, sources: Sequence[str]) -> None:
            raise RuntimeError("no net")

    made = Broken(half_at(1))
    done, report = driven(made)
    assert rates(report) == [1e-3] * 10 and made.steps == []
    assert report.flags[1:] == (
        "controller 'test' failed after step 0: RuntimeError: no net; the round goes on unadjusted",
    )
    assert done.failure == "RuntimeError: no net"


def test_an_interrupt_goes_through() -> None:
    def interrupted(state: ControlState) -> Decision:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        driven(Does(interrupted))


def test_an_adjustment_outside_the_catalogue_that_is_refused_is_flagged_once(tmp_path: Path) -> None:
    kl = Candidate(None, Adjustment("kl_scale", 1.2), "test", "hold it")
    with DecisionLog(tmp_path) as log:
        done, report = driven(Does(lambda state: Decision(kl)), log=log)
    assert (done.applied, done.refused, done.failure) == (0, 9, None)
    (flag,) = report.flags[1:]
    assert flag.startswith("controller: kl_scale 1.2 by 'test' was refused: ")
    (logged,) = read_log(tmp_path)
    assert len(logged.decisions) == 9 and not any(decision.applied for decision in logged.decisions)
    assert all(decision.refused for decision in logged.decisions) and logged.effects == []


def test_nothing_is_tried_after_the_round_ended() -> None:
    made = Does(half_at(*range(1, 20)))
    done, report = driven(made, faults=[1.0, 0.9, float("nan")])
    assert report.ended == "failed" and made.steps == [1, 2] and done.applied == 2
    assert report.adjustments == ((1, Adjustment("lr_scale", 0.5)), (2, Adjustment("lr_scale", 0.5)))
    made = Does(half_at(*range(1, 20)))
    cost = ScriptedTrainer().step_cost_bound(ScriptedTask(), RECIPE).trained_tokens
    _, report = driven(made, limit=Limit("train_tokens", 3 * cost))
    assert report.ended == "budget" and made.steps == [1, 2]
    made = Does(half_at(1))
    _, report = driven(made, limit=Limit("train_tokens", 0))
    assert made.steps == [] and report.steps == 0


def test_flags_of_decisions_are_in_the_report_once() -> None:
    made = Does(lambda state: Decision(nothing("test"), flags=("look here", f"odd {state.step % 2}")))
    _, report = driven(made)
    assert report.flags[1:] == ("look here", "odd 1", "odd 0")


def test_a_log_that_cannot_be_written_does_not_end_the_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with DecisionLog(tmp_path) as log:
        monkeypatch.setattr(log, "decision", full)
        done, report = driven(Does(half_at(2)), log=log)
    assert rates(report) == [1e-3] * 2 + [5e-4] * 8 and done.applied == 1
    assert report.flags[1:] == ("the decision log ends after step 1: OSError: [Errno 28] No space left on device",)


def test_facts_that_are_no_json_cost_the_log_alone(tmp_path: Path) -> None:
    circle: dict[str, Any] = {}
    circle["self"] = circle

    class Circular(Does):
        def describe(self) -> Mapping[str, Any]:
            return circle

    with DecisionLog(tmp_path) as log:
        _, report = driven(Circular(half_at(2)), log=log)
    assert rates(report) == [1e-3] * 2 + [5e-4] * 8
    assert report.flags[1].startswith("the decision log ends after step 0: RecursionError")


@pytest.mark.parametrize("interval", [0, -1, 1.5, True, "2"])
def test_an_interval_is_a_whole_number_of_steps(interval: Any) -> None:
    with pytest.raises(ValueError, match=r"interval: expected an integer in \[1, 100000\]"):
        driven(Does(half_at()), interval=interval)


# Before the first step


def test_a_controller_may_open_the_round(trainer: TrlTrainer, task: TinyTask, tmp_path: Path) -> None:
    class Opens(Does):
        def opening(self, settings: Mapping[str, float]) -> Candidate | None:
            self.opened_at = settings["learning_rate"]
            return Candidate(HALF, Adjustment("lr_scale", 0.5), "test", "carefully")

    made = Opens(half_at(2))
    assert isinstance(made, OpeningController) and not isinstance(Does(half_at()), OpeningController)
    session = trainer.begin(task, sft(), trainer.base(task), 3)
    with DecisionLog(tmp_path) as log:
        drive_round(session, sft(), made, log=log)
    report, _ = session.result()
    assert made.opened_at == 1e-2
    assert rates(report) == pytest.approx([5e-3, 5e-3, 2.5e-3, 2.5e-3])
    (logged,) = read_log(tmp_path)
    assert [(d.step, d.chosen) for d in logged.decisions][:2] == [(0, "lr_half"), (1, "none")]


def test_a_session_that_stands_still_is_not_waited_for() -> None:
    class Stuck:
        done, step = False, 0
        signals, settings = Signals(), dict[str, float]()

        def advance(self, steps: int | None = None) -> Mapping[str, float]:
            return {}

    with pytest.raises(RuntimeError, match="took no step after step 0 and is not done"):
        drive_round(Stuck(), RECIPE, make_controller("none"))  # type: ignore[arg-type]
