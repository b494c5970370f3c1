"""Rules switch on and off, take turns, hold back what fights, and change nothing when they only log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posttrain_gym.inner_trainers.adjustments import CATALOGUE_NAMES, KINDS, Adjustment, catalogue_index
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.meta_policies.controllers.base import Controller, Decision
from posttrain_gym.meta_policies.controllers.catalogue import make_controller
from posttrain_gym.meta_policies.controllers.damping import Damping, direction_of
from posttrain_gym.meta_policies.controllers.rule_file import load_rules, parse_rules, shipped_rule_sets
from posttrain_gym.meta_policies.controllers.rules import Rule, RulesController, RuleSet
from tests.control_states import ALL, controller, rule, state

LINES = """\
name: mine
constants:
  limit: 1e-1
rules:
  - name: first
    when: kl > limit
    action: lr_half
    reason: too far
"""


def chosen(made: RulesController, losses: list[float | None], **kwargs: Any) -> list[str]:
    """Return what is chosen at each step when the loss goes like this."""
    return [made.decide(state(step, loss=loss, **kwargs)).chosen.by for step, loss in enumerate(losses, start=1)]


# When a rule asks


def test_a_rule_asks_while_its_condition_holds() -> None:
    assert chosen(controller(rule()), [1, 2, 2, 1, 2]) == ["rules:test", "r", "r", "rules:test", "r"]


def test_agree_is_a_number_of_looks_in_a_row() -> None:
    losses: list[float | None] = [2, 2, 1, 2, 2, 2, 2, None, 2, 2, 2]  # what is unknown does not agree
    got = [by == "r" for by in chosen(controller(rule(agree=3)), losses)]
    assert got == [False] * 5 + [True, True] + [False] * 3 + [True]


def test_hysteresis_has_an_off_threshold_of_its_own() -> None:
    made = controller(rule(when="loss > 3", until="loss < 1"))
    got = [by == "r" for by in chosen(made, [2, 4, 2, 1.5, None, 1, 0.5, 2, 3, 3.5])]
    assert got == [False, True, True, True, True, True, False, False, False, True]


def test_a_cooldown_counts_steps_and_says_how_many_are_left() -> None:
    made = controller(rule(cooldown=3))
    assert chosen(made, [2] * 5) == ["r", "rules:test", "rules:test", "r", "rules:test"]
    assert made.decide(state(6, loss=2)).held_back == {"r": "cooldown: 1 more steps"}
    assert made.decide(state(16, loss=2)).chosen.by == "r"  # with an interval of 10 steps


def test_at_most_is_per_round() -> None:
    made = controller(rule(at_most=2))
    assert chosen(made, [2] * 3) == ["r", "r", "rules:test"]
    assert made.decide(state(4, loss=2)).held_back == {"r": "done 2 times, as often as allowed"}
    made.begin(Recipe("sft", {"math": 1.0}), ("math",))
    assert chosen(made, [2] * 3) == ["r", "r", "rules:test"]


def test_a_rule_is_for_its_algorithms() -> None:
    only = rule(algorithms=("grpo", "rloo"))
    assert chosen(controller(only), [2]) == ["rules:test"]
    assert chosen(controller(only, algorithm="grpo"), [2]) == ["r"]


# Which one is done


def test_priority_then_confidence_then_the_order_decides() -> None:
    rules = [
        rule("low", priority=1),
        rule("unsure", priority=5, confidence=0.4),
        rule("sure", priority=5, confidence=0.9),
        rule("later", priority=5, confidence=0.9, action="lr_half"),
    ]
    decision = controller(*rules).decide(state(loss=2))
    assert decision.chosen.by == "sure"
    assert [candidate.by for candidate in decision.candidates] == ["sure", "later", "unsure", "low"]
    assert decision.held_back == {name: "lower priority than 'sure'" for name in ("later", "unsure", "low")}
    assert decision.chosen.reason == "because of sure" and decision.chosen.confidence == 0.9
    assert decision.chosen.adjustment == Adjustment("lr_scale", 0.8)
    assert decision.chosen.action == catalogue_index("lr_down")


def test_what_is_masked_makes_way_for_the_next() -> None:
    made = controller(rule("first", action="kl_up", priority=1), rule("second"), rule("third", action="mix_toward_3"))
    legal = [name != "kl_up" for name in CATALOGUE_NAMES]
    decision = made.decide(state(loss=2, legal=legal))
    assert decision.chosen.by == "second"
    assert decision.held_back == {
        "first": "masked: cannot be applied now",
        "third": "masked: the round has no such source",
    }
    decision = made.decide(state(2, loss=2, legal=[index == 0 for index in range(len(ALL))]))
    assert decision.chosen.action == 0 and len(decision.held_back) == 3


def test_an_adjustment_outside_the_catalogue_goes_by_its_kinds_mask() -> None:
    made = controller(
        rule("a", action=Adjustment("lr_scale", 0.7)), rule("b", action=Adjustment("mix_toward", 0.3, "x"))
    )
    decision = made.decide(state(loss=2))
    assert decision.chosen.action is None and decision.chosen.adjustment == Adjustment("lr_scale", 0.7)
    assert decision.held_back == {"b": "masked: the round has no such source"}
    legal = [not name.startswith("lr_") for name in CATALOGUE_NAMES]
    assert made.decide(state(2, loss=2, legal=legal)).held_back["a"] == "masked: cannot be applied now"


# Fights


def test_rules_that_undo_each_other_are_damped_and_flagged_once() -> None:
    up, down = rule("up", "loss > 1", "lr_up"), rule("down", "loss < 1", "lr_down")
    made = controller(up, down, damping=4)
    decisions = [made.decide(state(step, loss=2.0 if step % 2 else 0.0)) for step in range(1, 101)]
    done = [(step, d.chosen.by) for step, d in enumerate(decisions, start=1) if d.chosen.adjustment.kind != "none"]
    # "up" is done at every other step, which is within the 4 steps that "down" has to wait after each of them
    assert done == [(step, "up") for step in range(1, 101, 2)]
    assert decisions[1].held_back == {"down": "damped: would undo what 'up' did; waits until step 5"}
    flags = [flag for d in decisions for flag in d.flags]
    assert flags == [
        "rules 'up' and 'down' undo each other; at step 2 the second is held back until step 5, and for longer each "
        "time"
    ]


def test_the_wait_doubles_with_each_turn() -> None:
    up, down = rule("up", "loss > 1", "lr_up", cooldown=1000), rule("down", "loss > 1", "lr_down", cooldown=1000)
    damping = Damping(4)
    damping.did("lr_scale", 1, 10, "up", False)
    waits = []
    direction = -1
    for _ in range(4):
        until, _ = damping.waits("lr_scale", direction, 10, False) or (0, "")
        waits.append(until)
        assert damping.waits("lr_scale", direction, until, False) is None
        damping.did("lr_scale", direction, until, "x", False)
        direction = -direction
    assert waits == [14, 22, 38, 70]  # 4, 8, 16 and 32 steps
    made = controller(up, down, damping=4)
    got = [made.decide(state(step, loss=2)).chosen.by for step in (1, 2, 3, 4, 5)]
    assert got == ["up", "rules:test", "rules:test", "rules:test", "down"]


def test_danger_does_not_wait_but_what_it_stopped_does() -> None:
    up, half = rule("up", "loss < 1", "lr_up"), rule("stop it", "loss > 1", "lr_half", danger=True)
    made = controller(up, half, damping=4)
    assert chosen(made, [0, 2, 0, 0]) == ["up", "stop it", "rules:test", "rules:test"]
    decision = made.decide(state(5, loss=0))
    assert decision.held_back == {"up": "damped: would undo what 'stop it' did; waits until step 10"}  # 2 + 4 · 2
    assert made.decide(state(10, loss=0)).chosen.by == "up"


@pytest.mark.parametrize(
    ("adjustment", "direction"),
    [
        (Adjustment("lr_scale", 0.5), ("lr_scale", -1)),
        (Adjustment("batch_scale", 1.25), ("batch_scale", 1)),
        (Adjustment("gamma_add", -0.01), ("gamma_add", -1)),
        (Adjustment("mix_away", 0.2, "math"), ("mix math", -1)),
        (Adjustment("mix_toward", 0.2, "math"), ("mix math", 1)),
        (Adjustment("lora_freeze"), ("lora", -1)),
        (Adjustment("log_more"), ("log", 1)),
        (Adjustment("rollback"), None),
        (Adjustment("lr_scale", 1.0), None),
    ],
)
def test_what_undoes_what(adjustment: Adjustment, direction: tuple[str, int] | None) -> None:
    assert direction_of(adjustment) == direction


# Trouble


def test_a_division_by_zero_is_unknown_at_that_step_and_said_once() -> None:
    made = controller(rule("quotient", "1 / grad_norm > 1", priority=1), rule("other"))
    first = made.decide(state(1, loss=2, grad_norm=0.0))
    assert first.chosen.by == "other"
    assert first.flags == (
        "rule 'quotient': its condition came to no number at step 1 (division by zero in 1 / grad_norm) and counts as "
        "unknown there",
    )
    assert made.decide(state(2, loss=2, grad_norm=0.0)).flags == ()
    assert made.decide(state(3, loss=2, grad_norm=0.5)).chosen.by == "quotient"
    until = controller(rule("stays", "loss > 1", until="1 / loss < 0"))
    assert chosen(until, [2, 0, 0]) == ["stays"] * 3


def test_log_only_says_what_it_would_do_and_does_nothing() -> None:
    rules = (rule("a", cooldown=2), rule("b", "loss > 1", "lr_up", priority=-1))
    made, quiet = controller(*rules), controller(*rules, log_only=True)
    for step in range(1, 6):
        seen = state(step, loss=2)
        real, said = made.decide(seen), quiet.decide(seen)
        assert said.chosen.action == 0 and said.chosen.adjustment == Adjustment()
        assert said.candidates == real.candidates
        if real.chosen.action:
            assert said.held_back == {**real.held_back, real.chosen.by: "log only"}
            assert said.chosen.reason == f"log only: {real.chosen.by!r} would have done lr_down"
        else:
            assert said.held_back == real.held_back


def test_equal_states_give_equal_decisions_after_begin() -> None:
    made = controller(rule("a", agree=2, cooldown=3), rule("b", "change(loss, 2) > 0", "lr_up"))
    losses: list[float | None] = [2, 3, 1, 4, None, 2, 5, 0, 3]

    def decisions() -> list[Decision]:
        made.begin(Recipe("sft", {"math": 1.0}), ("math",))
        return [made.decide(state(step, loss=loss)) for step, loss in enumerate(losses, start=1)]

    assert decisions() == decisions()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"name": ""}, "name: expected words, got ''"),
        ({"reason": "  "}, "reason: expected words"),
        ({"action": "lr_dwn"}, r"action: unknown adjustment 'lr_dwn'. Did you mean 'lr_down'\?"),
        ({"action": 7}, "action: expected the name of an adjustment, got 7"),
        ({"priority": 1.5}, "priority: expected an integer"),
        ({"confidence": 1.1}, r"confidence: expected a number in \[0, 1\], got 1.1"),
        ({"cooldown": -1}, r"cooldown: expected an integer in \[0, 100000\], got -1"),
        ({"agree": 0}, "agree: expected an integer"),
        ({"at_most": 0}, "at_most: expected an integer"),
        ({"algorithms": "sft"}, "algorithms: expected a list of names, got 'sft'"),
        ({"algorithms": ("grop",)}, r"algorithms: unknown 'grop'. Did you mean 'grpo'\?"),
        ({"danger": 1}, "danger: expected true or false, got 1"),
    ],
)
def test_a_rule_with_a_wrong_field_is_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        rule(**settings)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"name": 5}, "name: expected words, got 5"),
        ({"rules": ()}, "rules: expected between 1 and 100, got 0"),
        ({"rules": (rule("a"), rule("a"))}, "rules: two are called 'a'"),
        ({"rules": (rule("a", "lss > 1"),)}, "rule 'a': when: character 1: unknown signal 'lss'"),
        ({"rules": (rule("a", until="lss > 1"),)}, "rule 'a': until: character 1"),
        ({"constants": {"loss": 1.0}}, "constants: 'loss' means something else in conditions"),
        ({"constants": {"a b": 1.0}}, "constants: a name has letters"),
        ({"constants": {"a": float("nan")}}, "constants.a: expected a number"),
        ({"damping": -1}, "damping: expected an integer"),
        ({"log_only": "yes"}, "log_only: expected true or false"),
    ],
)
def test_a_rule_set_that_does_not_fit_together_is_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        RuleSet(**{"name": "test", "rules": (rule(),), **settings})


# Files


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        LINES
        + """\
    until: kl < limit / 2
    priority: 3
    cooldown: 4
    agree: 2
    confidence: 5e-1
    at_most: 6
    algorithms: [grpo]
    danger: true
  - {name: second, when: loss > 1, action: {kind: kl_scale, value: 1.2}, reason: why}
damping: 7
log_only: true
"""
    )
    assert load_rules(path) == RuleSet(
        "mine",
        (
            Rule("first", "kl > limit", "lr_half", "too far", "kl < limit / 2", 3, 0.5, 4, 2, 6, ("grpo",), True),
            Rule("second", "loss > 1", Adjustment("kl_scale", 1.2), "why"),
        ),
        {"limit": 0.1},
        7,
        True,
    )
    json = tmp_path / "named_by_its_file.json"
    json.write_text('{"rules": [{"name": "a", "when": "loss > 1", "action": "stop", "reason": "b"}]}')
    assert load_rules(json) == RuleSet("named_by_its_file", (Rule("a", "loss > 1", "stop", "b"),))


def test_a_rule_set_is_written_as_it_is_read() -> None:
    rules = parse_rules(LINES, "mine.yaml")
    assert rules.to_dict() == {
        "name": "mine",
        "constants": {"limit": 0.1},
        "damping": 20,
        "log_only": False,
        "rules": [{"name": "first", "when": "kl > limit", "action": "lr_half", "reason": "too far"}],
    }


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (LINES + "    whn: kl > 1\n", r"line 9, rule 'first', whn: unknown key 'whn'. Did you mean 'when'\?"),
        (
            LINES + "    reason: again\n",
            r"line 9, column 5: key 'reason' is there twice in rules\[0\], first in line 8; leave one out",
        ),
        (LINES + "nme: x\n", r"line 9, nme: unknown key 'nme'. Did you mean 'name'\?"),
        (LINES.replace("kl > limit", "kl > limt"), r"line 6, rule 'first', when: character 6: unknown signal 'limt'"),
        (LINES.replace("lr_half", "lr_hlf"), r"line 7, rule 'first', action: unknown adjustment 'lr_hlf'"),
        (LINES.replace("lr_half", "{kind: lr_scle}"), r"line 7, rule 'first', action: adjustment: 'lr_scle'"),
        (LINES.replace("lr_half", "{knd: lr_scale}"), r"line 7, rule 'first', action, knd: unknown key 'knd'"),
        (LINES.replace("lr_half", "{value: 2}"), r"line 7, rule 'first', action: expected a kind"),
        (LINES.replace("lr_half", "[lr_half]"), r"line 7, rule 'first', action: expected the name of an adjustment"),
        (LINES.replace("    action: lr_half\n", ""), r"line 5, rule 'first': key 'action' is missing"),
        (LINES.replace("first", "''"), r"line 5, rule '', name: expected words"),
        (LINES + "    cooldown: soon\n", r"line 9, rule 'first', cooldown: expected an integer in .* got 'soon'"),
        (LINES + "    at_most: 0\n", r"line 9, rule 'first', at_most: expected an integer"),
        (LINES + "    confidence: high\n", r"line 9, rule 'first', confidence: expected a number in \[0, 1\]"),
        (LINES + "    algorithms: grpo\n", r"line 9, rule 'first', algorithms: expected a list of names"),
        (LINES + "  - just words\n", r"line 4, rules: rule 2: expected keys like name, when and action, got 'just w"),
        (LINES + LINES[LINES.index("  - name") :], r"line 9, rule 'first', name: another rule is called 'first' too"),
        (LINES.replace("1e-1", "big"), r"line 3, constants, limit: expected a finite number, got 'big'"),
        (LINES.replace("limit: 1e-1", "kl: 1"), r"line 3, constants, kl: 'kl' means something else"),
        (LINES.replace("name: mine", "name: 5"), r"line 1, name: expected words, got 5"),
        (LINES + "damping: x\n", r"line 9, damping: expected an integer"),
        (LINES + "log_only: maybe\n", r"line 9, log_only: expected true or false, got 'maybe'"),
        ("name: a\n", r"line 1, rules?: expected a list of rules|line 1, rules: expected a list"),
        ("rules: 3\n", r"line 1, rules: expected a list of rules, got 3"),
        ("- a\n", r"line 1, column 1: expected keys like name and rules, got a list"),
        ("", r"line 1, column 1: expected keys like name and rules, got nothing"),
        ("rules: [\n  a: b: c\n", r"line 2, column 7: not readable as YAML .*check that brackets are closed"),
        ("a: &x [1]\nb: *x\n", r"line 1, column 4: anchors and aliases"),
        ("rules: " + "[" * 50_000, r"line 1, column 23: nested more than 16 deep"),
        ("".join(" " * n + "a:\n" for n in range(50)), r"line 17, column 17: nested more than 16 deep"),
        ("? [a]\n: b\n", r"line 1, column 3: expected a key in words, got a list"),
        ("rules: 2001-99-99\n", r"line 1, rules: expected a list of rules, got '2001-99-99'"),
        (LINES + "log_only: yes\n", r"line 9, log_only: expected true or false, got 'yes'\. Write true"),
        (
            LINES.replace("1e-1", "010"),
            r"line 3, constants, limit: expected a finite number, got '010'\. Write 10, or 8",
        ),
    ],
)
def test_an_error_in_a_file_names_file_line_rule_and_key(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=problem) as caught:
        load_rules(path)
    assert str(caught.value).startswith(f"rules {path}")


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no such file, and no rule set of that name\. Did you mean 'default'\?"):
        load_rules("defalt")
    (tmp_path / "latin.yaml").write_bytes(b"name: a\nreason: \xe9\n")
    with pytest.raises(ValueError, match=r"latin\.yaml, line 2: not UTF-8 text"):
        load_rules(tmp_path / "latin.yaml")
    (tmp_path / "large.yaml").write_bytes(b"#" * 200_001)
    with pytest.raises(ValueError, match=r"200001 bytes, at most 200000 are read"):
        load_rules(tmp_path / "large.yaml")


# What comes with the package


@pytest.mark.parametrize("name", shipped_rule_sets())
def test_a_shipped_rule_set_can_be_read_and_begins_on_every_algorithm(name: str) -> None:
    rules = load_rules(name)
    assert rules.name == name
    made = make_controller(f"rules:{name}")
    assert isinstance(made, Controller)
    for algorithm in ("sft", "dpo", "grpo", "ppo", "distill", "midtrain"):
        made.begin(Recipe(algorithm, {"a": 1.0}, steps=50), ("a",))
        for step in range(1, 50):
            assert made.decide(state(step, 50, sources=("a",))).chosen.action in range(len(ALL))


def test_the_default_rules_cover_what_goes_wrong() -> None:
    rules = load_rules().rules
    actions = {rule.action if isinstance(rule.action, str) else rule.action.kind for rule in rules}
    assert actions <= {*CATALOGUE_NAMES, *KINDS}
    said = " ".join(rule.name for rule in rules)
    for what in (
        "gradient explosion",
        "sparse reward",
        "plateau",
        "KL runaway",
        "under-used hardware",
        "rate too high",
    ):
        assert what in said
    for what in ("rate too low", "late annealing"):
        assert what in said
    assert rules[0].danger and load_rules().of_danger() is not None


def test_the_default_rules_halve_the_rate_when_the_gradient_explodes() -> None:
    made = make_controller("rules")
    made.begin(Recipe("sft", {"a": 1.0}, steps=100), ("a",))
    calm = [made.decide(state(step, grad_norm=1.0, loss=2.0, z={"grad_norm": 0.1})) for step in range(1, 21)]
    assert {decision.chosen.adjustment.kind for decision in calm} == {"none"}
    burst = made.decide(state(21, grad_norm=50.0, loss=2.0, z={"grad_norm": 5.0}))
    assert burst.chosen.by == "gradient explosion" and burst.chosen.adjustment == Adjustment("lr_scale", 0.5)


# Names


def test_controllers_have_names() -> None:
    assert make_controller("none").name == "none"
    assert make_controller("rules").name == "rules:default"
    assert isinstance(made := make_controller("rules", log_only=True), RulesController) and made.rules.log_only
    for name, problem in (
        ("rule", r"controller: unknown 'rule'\. Did you mean 'rules'\?"),
        ("schedule:cosin", r"unknown schedule 'cosin'\. Did you mean 'cosine'\?"),
        ("rules:nowhere.yaml", r"rules nowhere\.yaml: no such file"),
    ):
        with pytest.raises(ValueError, match=problem):
            make_controller(name)
    with pytest.raises(ValueError, match=r"controller 'rules': unknown setting 'log_onl'\. Did you mean 'log_only'\?"):
        make_controller("rules", log_onl=True)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("constants: {a: 1" + "0" * 400 + "}", r"line 1, constants, a: expected a finite number, got one beyond"),
        ("algorithms", r"algorithms: unknown \['sft'\]"),
        ("{kind: lr_scale}", r"'lr_scale' needs a value, for example 0\.5"),
    ],
)
def test_what_would_overflow_or_has_the_wrong_type_is_refused_by_name(text: str, problem: str) -> None:
    one = "rules:\n- {name: a, when: step > 1, action: lr_half, reason: r}\n"
    files = {
        "algorithms": one.replace("reason: r", "reason: r, algorithms: [[sft]]"),
        "{kind: lr_scale}": one.replace("lr_half", "{kind: lr_scale}"),
    }
    with pytest.raises(ValueError, match=problem):
        parse_rules(files.get(text, f"{text}\n{one}"), "mine.yaml")
