"""Constraints are read with exact errors, decided by the task's facts, and repaired to the nearest legal settings."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain_gym.envs.constraints import Constraint, ConstraintError, parse_condition
from posttrain_gym.envs.decision_space import DecisionSpace, Parameter
from posttrain_gym.envs.space_masks import DecisionOrder
from posttrain_gym.envs.task_facts import TaskFacts

SOURCES = ("code", "general", "math")
ALGORITHMS = ("dpo", "grpo", "ppo", "sft")
ROWS = {"code": 100, "general": 300, "math": 1000}
FACTS = TaskFacts(
    base_model_size=1e9,
    rows=ROWS,
    training_rows={name: ROWS for name in ALGORITHMS},
    grouped=frozenset({"grpo"}),
    has_teacher=False,
    device="cpu",
    device_memory=8e9,
)
KNOBS = {
    "batch_size": Parameter(16, 128, "log", integer=True),
    "gradient_accumulation": Parameter(choices=(1, 2, 4)),
    "learning_rate": Parameter(1e-6, 5e-5, "log"),
    "lora_rank": Parameter(choices=(0, 8, 16)),
    "schedule": Parameter(choices=("constant", "linear", "cosine")),
}


def space(*constraints: str, facts: TaskFacts | None = FACTS, **changes: Any) -> DecisionSpace:
    usable = dict.fromkeys(ALGORITHMS, SOURCES)
    settings: dict[str, Any] = {"parameters": KNOBS, "constraints": constraints, **changes}
    made = DecisionSpace(ALGORITHMS, SOURCES, usable, **settings)
    return made if facts is None else made.bind(facts)


# Reading --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("if base_model_size < 3B", 23, "expected `then` after the condition; the text ends"),
        ("if base_model_size = 3B then exclude ppo", 19, "one `=` compares nothing; write `==`"),
        ("if base_model_size < 3X then exclude ppo", 21, "unknown unit 'X' after a number"),
        ("batch_size", None, None),
        ("batch_size + 3", 0, "expected a comparison, such as batch_size <= 64"),
        ("(batch_size < 3) * 2 < 4", 1, "expected a number or a name, not a condition"),
        ("exclude", 7, "expected the name of an algorithm, a start or a source"),
        ("exclude ppo;", 11, "';' has no meaning in a constraint"),
        ("a.b < 3", 0, "only mix.SOURCE and rows.SOURCE have a dot"),
        ("__import__('os') == 1", 10, "expected the end, `and` or `or`"),
        ("if " + "(" * 40 + "x" + ")" * 40 + " < 3 then y < 3", 36, "more than 32 parts within parts"),
        ("x < 1e999", 4, "the number is too large"),
        ("x in grpo", 5, "expected a list such as [grpo, ppo]"),
        ("'a' * 2 < 3", 0, "text cannot be calculated with"),
    ],
)
def test_what_cannot_be_read_is_located(text: str, column: int | None, message: str | None) -> None:
    if column is None:
        assert Constraint.parse(text).condition is None
        return
    with pytest.raises(ConstraintError) as caught:
        Constraint.parse(text)
    assert caught.value.column == column
    assert str(message) in caught.value.problem
    caret = str(caught.value).splitlines()[-1]
    assert caret.strip() == "^"


@pytest.mark.parametrize("text", ["", "   ", None, 3, "x < 1 " + "and x < 1 " * 60])
def test_no_text_and_too_much_text_are_refused(text: Any) -> None:
    with pytest.raises(ValueError, match=r"expected a constraint such as|characters, at most 500"):
        Constraint.parse(text)


@settings(max_examples=1000, deadline=None)
@given(st.text(alphabet="ifthenexcludeandornot <>=!+-*/()[],.'\"3BGBx_\t\n\0é", max_size=60))
def test_any_text_is_read_or_refused_as_a_value_error(text: str) -> None:
    for read in (Constraint.parse, parse_condition):
        try:
            read(text)
        except ValueError as error:
            assert str(error)


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ("if base_model_sise < 3B then exclude ppo", "unknown name 'base_model_sise'. Did you mean 'base_model_size'"),
        ("if base_model_size < 3B then exclude pqo", "cannot exclude 'pqo'. Did you mean 'ppo'"),
        ("exclude batch_size", "to hold a knob at a value write NAME == VALUE"),
        ("learning_rte < 1e-5", "Did you mean 'learning_rate'"),
        ("if algorithm == pqo then batch_size <= 32", "unknown name 'pqo'. Did you mean 'ppo'"),
        ("mix.maths <= 0.4", "Did you mean 'mix.math'"),
        ("mix.math + mix.code <= 0.4", "bounds one source by a number"),
        ("rows.maths < 3", "Did you mean 'rows.math'"),
    ],
)
def test_names_that_mean_nothing_are_refused_with_the_space(constraint: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"character \d+") as caught:
        space(constraint)
    assert message in str(caught.value)


# The task's facts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("constraint", "left_out"),
    [
        ("if base_model_size < 3B then exclude ppo", {"ppo"}),
        ("if base_model_params < 1B then exclude ppo", set()),
        ("if model_size <= 1000M then exclude ppo, grpo", {"ppo", "grpo"}),
        ("if rows.code < 200 and device == cpu then exclude dpo", {"dpo"}),
        ("if rows > 1.5K then exclude dpo", set()),
        ("if rows >= 1.4K then exclude dpo", {"dpo"}),
        ("if device_memory < 16GB then exclude ppo", {"ppo"}),
        ("if not has_teacher or device == cuda then exclude sft", {"sft"}),
        ("exclude grpo", {"grpo"}),
        ("algorithm in [sft, dpo]", {"grpo", "ppo"}),
    ],
)
def test_facts_decide_which_algorithms_are_left(constraint: str, left_out: set[str]) -> None:
    assert {name for name, why in space(constraint).problems.items() if why is not None} == left_out
    for name in left_out:
        assert space(constraint).problems[name] == constraint


def test_unknown_facts_take_nothing_away() -> None:
    unknown = space("if base_model_size < 3B then exclude ppo", facts=None)
    assert set(unknown.problems.values()) == {None}
    both = space("if base_model_size < 3B or algorithm == sft then batch_size <= 32", facts=None)
    assert both.recipe("dpo", batch_size=100).batch_size == 100
    with pytest.raises(ValueError, match="it breaks the constraint 'if base_model_size < 3B or"):
        both.recipe("sft", batch_size=100)


def test_binding_to_another_task_changes_what_is_left_and_nothing_else() -> None:
    small = space("if base_model_size < 3B then exclude ppo")
    large = small.bind(replace(FACTS, base_model_size=7e9))
    assert (small.problems["ppo"] is None, large.problems["ppo"] is None) == (False, True)
    assert small.action_space() == large.action_space()
    assert small.action_mask().tolist() == [True, True, True, False, True, True, True, True]
    assert large.action_mask().tolist() == [True] * 8
    assert small.bind(FACTS) is small


def test_a_space_survives_json() -> None:
    made = space(
        "if algorithm == dpo then learning_rate <= 1e-5",
        mix_bounds={"math": (0.1, 0.5)},
        conditions={"lora_rank": "algorithm != ppo"},
        starts=("base", "best"),
        defaults={"batch_size": 32, "schedule": "linear"},
        fixed={"weight_decay": 0.1},
    )
    again = DecisionSpace.from_dict(json.loads(json.dumps(made.to_dict()))).bind(FACTS)
    assert again == made
    assert again.recipe("dpo") == made.recipe("dpo")


# Repair ---------------------------------------------------------------------------------------------------------------


def nearest(made: DecisionSpace, algorithm: str, **values: Any) -> Any:
    """Decodes an action with some knobs at values, the others in the middle."""
    coordinates = [p.encode(values[n]) if n in values else 0.0 for n, p in made.parameters.items()]
    action = {
        "algorithm": 1 + made.algorithms.index(algorithm),
        "start": values.get("start", 1),
        "mix": np.array(values.get("mix", [0.0] * 3), np.float32),
        "parameters": np.array(coordinates),
    }
    return made.decode(action)


@pytest.mark.parametrize(
    ("constraint", "algorithm", "asked", "expected"),
    [
        ("if algorithm == dpo then learning_rate <= 1e-5", "dpo", {"learning_rate": 4e-5}, {"learning_rate": 1e-5}),
        ("if algorithm == dpo then learning_rate <= 1e-5", "sft", {"learning_rate": 4e-5}, {"learning_rate": 4e-5}),
        ("learning_rate < 1e-5", "sft", {"learning_rate": 4e-5}, {"learning_rate": 9.999e-6}),
        ("1e-5 > learning_rate", "sft", {"learning_rate": 4e-5}, {"learning_rate": 9.999e-6}),
        ("learning_rate == 2e-5", "sft", {"learning_rate": 4e-5}, {"learning_rate": 2e-5}),
        ("learning_rate in [2e-6, 3e-5]", "sft", {"learning_rate": 4e-5}, {"learning_rate": 3e-5}),
        (
            "batch_size * gradient_accumulation <= 128",
            "sft",
            {"batch_size": 100, "gradient_accumulation": 2},
            {"batch_size": 64, "gradient_accumulation": 2},
        ),
        (
            "if lora_rank == 0 then learning_rate <= 2e-6",
            "sft",
            {"lora_rank": 0, "learning_rate": 1e-5},
            {"lora_rank": 0, "learning_rate": 2e-6},
        ),
        (
            "if lora_rank == 0 then learning_rate <= 2e-6",
            "sft",
            {"lora_rank": 8, "learning_rate": 1e-5},
            {"lora_rank": 8, "learning_rate": 1e-5},
        ),
        ("if algorithm == sft then schedule in [cosine]", "sft", {"schedule": "constant"}, {"schedule": "cosine"}),
        ("schedule != linear", "sft", {"schedule": "linear"}, {"schedule": "constant"}),
        ("if mix.math > 0.4 then lora_rank >= 8", "sft", {"mix": [-1, -1, 1], "lora_rank": 0}, {"lora_rank": 8}),
        ("if mix.math > 0.4 then lora_rank >= 8", "sft", {"mix": [1, -1, -1], "lora_rank": 0}, {"lora_rank": 0}),
        ("if device == cpu then batch_size <= 20", "ppo", {"batch_size": 128}, {"batch_size": 20}),
        (
            "batch_size >= 100 / gradient_accumulation",
            "sft",
            {"batch_size": 17, "gradient_accumulation": 2},
            {"batch_size": 50},
        ),
        (
            "if gradient_accumulation == 4 then exclude sft",
            "sft",
            {"gradient_accumulation": 4},
            {"gradient_accumulation": 2},
        ),
    ],
)
def test_the_repair_moves_to_the_nearest_legal_value(
    constraint: str, algorithm: str, asked: dict[str, Any], expected: dict[str, Any]
) -> None:
    made = space(constraint)
    recipe = nearest(made, algorithm, **asked)
    assert {name: getattr(recipe, name) for name in expected} == expected
    assert made.decode(made.encode(recipe)) == recipe


def test_knobs_that_cannot_be_repaired_one_by_one_are_decided_together() -> None:
    made = space("batch_size * gradient_accumulation >= 500")
    recipe = nearest(made, "sft", batch_size=30, gradient_accumulation=1)
    assert (recipe.batch_size, recipe.gradient_accumulation) == (125, 4)


def test_an_algorithm_whose_constraints_contradict_each_other_is_not_legal() -> None:
    made = space("if algorithm == sft then batch_size <= 20", "batch_size >= 64")
    assert made.problems == {
        **dict.fromkeys(("dpo", "grpo", "ppo")),
        "sft": "no setting of its knobs keeps 'if algorithm == sft then batch_size <= 20'",
    }
    assert not made.action_mask()[4]
    assert made.decode({"algorithm": 4, "start": 0, "mix": [0.0] * 3, "parameters": [0.0] * 5}) is not None


def test_groups_are_kept_where_the_algorithm_compares_completions_and_only_there() -> None:
    made = space(parameters={"batch_size": Parameter(16, 128, "log", integer=True)})
    assert nearest(made, "grpo", batch_size=37).batch_size == 40  # num_generations is 8 throughout
    assert nearest(made, "grpo", batch_size=35).batch_size == 32
    assert nearest(made, "sft", batch_size=37).batch_size == 37


def test_a_knob_that_is_not_used_has_its_default_and_one_legal_value() -> None:
    made = space(conditions={"lora_rank": "algorithm == sft", "schedule": "lora_rank > 0"})
    assert nearest(made, "dpo", lora_rank=16, schedule="cosine").lora_rank == 0
    assert nearest(made, "dpo", lora_rank=16, schedule="cosine").schedule == "constant"
    assert nearest(made, "sft", lora_rank=16, schedule="cosine").schedule == "cosine"
    assert nearest(made, "sft", lora_rank=0, schedule="cosine").schedule == "constant"
    assert made.knob_mask("lora_rank", (0, 8, 16), ("dpo", "ppo")).tolist() == [True, False, False]
    assert made.knob_mask("lora_rank", (0, 8, 16), ("dpo", "sft")).tolist() == [True, True, True]
    with pytest.raises(ValueError, match="lora_rank: it is not used here and is then 0, the recipe has 8"):
        made.encode(replace(nearest(made, "dpo"), lora_rank=8))


# Mixes and starts -----------------------------------------------------------------------------------------------------

BOUNDS = {"math": (0.1, 0.5), "code": (0.1, 0.4), "general": (0.2, 0.6)}


def test_mixes_keep_their_bounds() -> None:
    made = space(mix_bounds=BOUNDS)
    assert nearest(made, "sft", mix=[1, -1, -1]).mix == {"code": 0.4, "general": 0.3, "math": 0.3}
    assert nearest(made, "sft", mix=[-1, -1, 1]).mix == {"code": 0.25, "general": 0.25, "math": 0.5}
    with pytest.raises(ValueError, match=r"mix.general: 0 is outside \[0.2, 0.6\]"):
        made.recipe("sft", mix={"math": 0.9, "code": 0.1})


def test_constraints_bound_sources_by_algorithm_start_and_task() -> None:
    made = space("if algorithm == grpo then exclude general", "if start == base then mix.math >= 0.8")
    assert nearest(made, "grpo", start=1).mix == {"code": 0.5, "math": 0.5}
    assert nearest(made, "grpo", start=0).mix == {"code": 0.2, "math": 0.8}
    assert nearest(made, "sft", start=0).mix == {"code": 0.1, "general": 0.1, "math": 0.8}


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"math": (0, 0.5), "code": (0, 0.2), "general": (0, 0.1)}, "cannot reach 1; raise them by 0.2 in all"),
        (
            {"math": (0.5, 0.6), "code": (0.4, 0.5), "general": (0.3, 1)},
            "code 0.4 + general 0.3 + math 0.5 = 1.2 are above 1",
        ),
        ({"math": (0.5, 0.4)}, "the lower bound 0.5 is above the upper bound 0.4"),
        ({"math": (0.12345, 0.4)}, "0.12345 is no multiple of 1/1000"),
        ({"maths": (0.1, 0.4)}, "mix_bounds has 'maths'. Did you mean 'math'"),
        ({"math": (-0.1, 0.4)}, r"data_mix.math: expected a number in \[0, 1\]"),
    ],
)
def test_bounds_that_leave_out_one_are_refused_with_the_arithmetic(bounds: Any, message: str) -> None:
    with pytest.raises(ValueError, match=r"data_mix|mix_bounds") as caught:
        space(mix_bounds=bounds)
    assert message.replace("\\", "") in str(caught.value)


def test_an_algorithm_whose_sources_cannot_fill_the_mix_is_not_legal() -> None:
    usable = {**dict.fromkeys(ALGORITHMS, SOURCES), "grpo": ("code", "math")}
    made = DecisionSpace(ALGORITHMS, SOURCES, usable, KNOBS, mix_bounds=BOUNDS)
    sums = "the upper bounds code 0.4 + math 0.5 = 0.9 cannot reach 1; raise them by 0.1 in all."
    assert made.problems["grpo"] == f"data_mix: without general, {sums}"


def test_starts_that_are_not_allowed_become_the_first_that_is() -> None:
    made = space("if algorithm == grpo then exclude best", starts=("base", "best"))
    assert [nearest(made, "sft", start=s).start for s in range(3)] == ["base", "best", "best"]
    assert [nearest(made, "grpo", start=s).start for s in range(3)] == ["base", "base", "base"]
    assert made.start_mask(("grpo",)).tolist() == [True, False, False]
    assert made.start_mask(("grpo", "sft")).tolist() == [True, True, False]


# Epochs ---------------------------------------------------------------------------------------------------------------


def test_epochs_are_the_steps_that_passes_over_the_rows_take() -> None:
    knobs = {"batch_size": Parameter(choices=(16, 32)), "epochs": Parameter(1, 5, integer=True)}
    made = space(parameters=knobs)
    one_source = {"mix": [-1, -1, 1]}
    assert nearest(made, "sft", epochs=1, batch_size=32, **one_source).steps == 32  # 1000 rows / 32, rounded up
    assert nearest(made, "sft", epochs=3, batch_size=16, mix=[1, -1, -1]).steps == 19  # 300 / 16
    assert nearest(made, "grpo", epochs=1, batch_size=32, **one_source).steps == 250  # 4 prompts of 8 completions
    assert nearest(made, "sft", epochs=1, batch_size=32).steps == 44  # 1400 rows of all three sources
    recipe = nearest(made, "sft", epochs=4, batch_size=16)
    assert made.decode(made.encode(recipe)) == recipe
    with pytest.raises(ValueError, match="steps: 7 are not what"):
        made.encode(replace(recipe, steps=7))
    with pytest.raises(ValueError, match="bind the space to one first"):
        nearest(space(parameters=knobs, facts=None), "sft")
    with pytest.raises(ValueError, match="epochs and steps say the same"):
        space(parameters={**knobs, "steps": Parameter(1, 9, integer=True)})


# Deciding step by step ------------------------------------------------------------------------------------------------


def test_each_step_of_a_decision_knows_what_is_still_possible() -> None:
    made = space("batch_size * gradient_accumulation >= 500", "if lora_rank == 0 then learning_rate <= 2e-6")
    order = DecisionOrder(made, "sft")
    assert order.knobs.index("gradient_accumulation") < order.knobs.index("batch_size")
    assert order.knobs.index("lora_rank") < order.knobs.index("learning_rate")
    assert order.legal_values("gradient_accumulation", (1, 2, 4)).tolist() == [False, False, True]
    order.choose("gradient_accumulation", 4)
    assert order.legal_values("batch_size", (16, 124, 125, 128)).tolist() == [False, False, True, True]
    order.choose("batch_size", 128)
    order.choose("lora_rank", 0)
    assert order.legal_values("learning_rate", (1e-6, 2e-6, 3e-6)).tolist() == [True, True, False]
    with pytest.raises(ValueError, match="'ppo' is not legal here: exclude ppo"):
        DecisionOrder(space("exclude ppo"), "ppo")
