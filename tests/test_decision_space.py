"""Encoding and decoding are inverses, every action decodes to a valid recipe, and the simplex is projected exactly."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq

from posttrain_gym.envs.decision_space import (
    DEFAULT_PARAMETERS,
    MIX_GRID,
    DecisionSpace,
    Parameter,
    on_simplex_grid,
    project_to_simplex,
)
from posttrain_gym.envs.post_training import PostTrainingEnv
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.testing import ScriptedFamily
from posttrain_gym.inner_trainers.trl.algorithms import check_recipe

SPACE = DecisionSpace(
    ("grpo", "sft"), ("code", "math", "web"), {"grpo": ("math", "code"), "sft": ("code", "math", "web")}
)
WIDE = DecisionSpace(
    ("grpo",),
    ("a", "b"),
    {"grpo": ("a", "b")},
    parameters={
        "batch_size": Parameter(5, 64, "log", integer=True),
        "gradient_accumulation": Parameter(choices=(1, 3)),
        "kl_coef": Parameter(0.0, 0.2),
        "num_generations": Parameter(choices=(4, 7)),
        "steps": Parameter(1, 30, "log", integer=True),
        "temperature": Parameter(0.3333333, 1.7),
        "warmup_steps": Parameter(0, 20, integer=True),
    },
    fixed={"schedule": "linear"},
)


def action_of(space: DecisionSpace, seed: int) -> dict[str, Any]:
    actions = space.action_space()
    actions.seed(seed)
    return dict(actions.sample())


@pytest.mark.parametrize("space", [SPACE, WIDE], ids=["default", "wide"])
def test_decode_inverts_encode_for_recipes_on_the_grid(space: DecisionSpace) -> None:
    rng = np.random.default_rng(0)
    for _ in range(1000):
        recipe = space.random_recipe(rng)
        action = space.encode(recipe)
        assert space.decode(action) == recipe
        assert space.action_space().contains({**action, "algorithm": np.int64(action["algorithm"])})


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**31 - 1), choice=st.integers(1, 2))
def test_encode_of_decode_is_stable(seed: int, choice: int) -> None:
    for space in (SPACE, WIDE):
        recipe = space.decode({**action_of(space, seed), "algorithm": min(choice, len(space.algorithms))})
        assert recipe is not None
        once = space.encode(recipe)
        again = space.decode(once)
        assert again == recipe
        twice = space.encode(again)
        assert all(np.array_equal(once[name], twice[name]) for name in once)


def test_extreme_coordinates_decode_to_the_ends() -> None:
    for sign, expected in ((-1.0, (16, 3e-5, 4, 10)), (1.0, (64, 1e-2, 8, 60))):
        action = {"algorithm": 2, "start": 0, "mix": np.full(3, sign), "parameters": np.full(4, sign)}
        recipe = SPACE.decode(action)
        assert recipe is not None
        assert (recipe.batch_size, recipe.learning_rate, recipe.num_generations, recipe.steps) == expected
        assert sum(recipe.mix.values()) == 1.0
        assert max(recipe.mix.values()) - min(recipe.mix.values()) <= 0.001 + 1e-12


def test_middle_coordinates_by_hand() -> None:
    recipe = SPACE.recipe("sft")
    assert recipe.learning_rate == pytest.approx(math.sqrt(3e-5 * 1e-2), rel=1e-3)  # geometric mean, 4 digits: 5.477e-4
    assert (recipe.learning_rate, recipe.steps, recipe.batch_size) == (5.477e-4, round(math.sqrt(600)), 32)


def test_all_sampled_actions_under_the_mask_are_valid_recipes() -> None:
    env = PostTrainingEnv(ScriptedFamily(), budget={"limit": 1e9, "max_rounds": 100_000, "patience": 100_000})
    env.reset(seed=0)
    refused = 0
    for _ in range(1000):
        mask = env.action_masks()
        action = env.action_space.sample(
            mask={
                "algorithm": mask[:3].astype(np.int8),
                "start": mask[3:].astype(np.int8),
                "mix": None,
                "parameters": None,
            }
        )
        recipe = env.space.decode(action)
        if recipe is None:
            continue
        assert recipe.batch_size * recipe.gradient_accumulation % recipe.num_generations == 0
        check_recipe(env.search.task, recipe)  # what TRL rounds are held to
        refused += env.step(action)[4]["round"]["failure"] is not None
    assert refused == 0


@settings(max_examples=500, deadline=None)
@given(seed=st.integers(0, 2**31 - 1))
def test_groups_always_divide_the_batch(seed: int) -> None:
    recipe = WIDE.decode({**action_of(WIDE, seed), "algorithm": 1})
    assert recipe is not None
    assert recipe.num_generations in (4, 7)
    assert 5 <= recipe.batch_size <= 64
    assert recipe.batch_size * recipe.gradient_accumulation % recipe.num_generations == 0
    assert recipe.warmup_steps <= recipe.steps


@pytest.mark.parametrize(
    ("size", "wanted", "expected"),
    [
        (8, 4, (8, 4)),
        (8, 7, (8, 4)),
        (14, 4, (14, 7)),
        (28, 4, (28, 4)),
        (28, 7, (28, 7)),
        (6, 4, (7, 7)),
        (5, 7, (4, 4)),
    ],
)
def test_group_fitting_by_hand(size: int, wanted: int, expected: tuple[int, int]) -> None:
    parameters = {
        "batch_size": Parameter(choices=(4, 5, 6, 7, 8, 14, 28)),
        "num_generations": Parameter(choices=(4, 7)),
    }
    space = DecisionSpace(("grpo",), ("a",), {"grpo": ("a",)}, parameters)
    coordinates = [parameters["batch_size"].encode(size), parameters["num_generations"].encode(wanted)]
    recipe = space.decode({"algorithm": 1, "start": 0, "mix": [1.0], "parameters": coordinates})
    assert recipe is not None
    assert (recipe.batch_size, recipe.num_generations) == expected


# The simplex ----------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(weights=st.lists(st.floats(-2, 2), min_size=1, max_size=5))
def test_projection_is_the_nearest_point(weights: list[float]) -> None:
    point = np.array(weights)
    found = project_to_simplex(point)
    assert found.min() >= 0 and math.fsum(found) == pytest.approx(1.0, abs=1e-12)
    # the optimality condition of the nearest point (Boyd and Vandenberghe 2004, 5.5.3): one shift for all positive ones
    shift = (found - point)[found > 0]
    assert np.ptp(shift) < 1e-12
    assert (found - point)[found == 0].size == 0 or (found - point)[found == 0].min() >= shift[0] - 1e-12
    root = brentq(lambda theta: np.maximum(point - theta, 0.0).sum() - 1.0, -4.0, 2.0, xtol=1e-14)
    assert np.abs(found - np.maximum(point - root, 0.0)).max() < 1e-9


def test_projection_leaves_the_simplex_alone() -> None:
    rng = np.random.default_rng(0)
    for weights in rng.dirichlet(np.ones(4), 100):
        assert np.abs(project_to_simplex(weights) - weights).max() < 1e-15


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**31 - 1), count=st.integers(1, 8), grid=st.sampled_from([10, 100, MIX_GRID]))
def test_grid_weights_sum_to_exactly_one(seed: int, count: int, grid: int) -> None:
    weights = np.random.default_rng(seed).dirichlet(np.full(count, 0.3))
    rounded = on_simplex_grid(weights, grid)
    counts = np.rint(rounded * grid)
    assert counts.sum() == grid
    assert np.array_equal(counts / grid, rounded)
    assert np.abs(rounded - weights).max() < 1 / grid + 1e-3


def test_mix_of_the_algorithms_sources_alone() -> None:
    mix = SPACE.decode_mix("grpo", [1.0, -1.0, 1.0])  # web cannot be used, however it is weighed
    assert mix == {"code": 1.0}
    assert SPACE.decode_mix("grpo", [0.0, 0.0, 0.0]) == {"code": 0.5, "math": 0.5}
    assert SPACE.usable["grpo"] == ("code", "math")  # in the order of the sources, however it was given


def test_weights_belong_to_the_right_source_however_usable_is_ordered() -> None:
    recipe = SPACE.recipe("grpo", mix={"code": 0.2, "math": 0.8})
    assert SPACE.decode(SPACE.encode(recipe)) == recipe


# Vectors, names and errors --------------------------------------------------------------------------------------------


def test_vector_by_hand() -> None:
    recipe = SPACE.recipe(
        "sft", start="latest", mix={"code": 0.25, "web": 0.75}, batch_size=64, steps=60, learning_rate=3e-5
    )
    expected = [0, 1, 0, 0, 1, 0.25, 0, 0.75, 2 / 3, -1, 0.5, 1]  # 8 generations, the second of two choices
    assert SPACE.to_vector(recipe).tolist() == pytest.approx(expected, abs=1e-6)
    assert SPACE.width == len(expected) == len(SPACE.to_vector(recipe))
    assert list(SPACE.parameters) == sorted(DEFAULT_PARAMETERS)


def test_stop_is_its_own_inverse() -> None:
    assert SPACE.decode(SPACE.encode(None)) is None


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Recipe("dpo", {"math": 1.0}), "algorithm: 'dpo' is not in the decision space"),
        (Recipe("sft", {"maths": 1.0}), "mix: 'maths' is not in the decision space. Did you mean 'math'"),
        (Recipe("grpo", {"web": 1.0}), "mix: 'web' has no rows that grpo trains on; .*code, math"),
        (Recipe("sft", {"math": 1.0}, learning_rate=0.1), r"learning_rate: 0.1 is outside \[3e-05, 0.01\]"),
        (Recipe("sft", {"math": 1.0}, steps=5), r"steps: 5 is outside \[10, 60\]"),
        (Recipe("sft", {"math": 1.0}, batch_size=48), r"batch_size: 48 is not among the choices \[16, 32, 64\]"),
        (Recipe("sft", {"math": 1.0}, schedule="linear"), "schedule: it is 'constant' throughout"),
        (Recipe("sft", {"math": 1.0}, kl_coef=0.1), "kl_coef: it is 0.0 throughout the decision space.*0.1"),
    ],
)
def test_recipes_outside_the_space_are_refused_by_field(recipe: Recipe, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SPACE.encode(recipe)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm": "stf"}, "algorithm: unknown 'stf'. Did you mean 'sft'"),
        ({"algorithm": "sft", "lr": 1e-3}, "recipe: 'lr' is no knob"),
        ({"algorithm": "sft", "learning_rat": 1e-3}, "Did you mean 'learning_rate'"),
        ({"algorithm": "sft", "learning_rate": 1.0}, "learning_rate: 1.0 is outside"),
        ({"algorithm": "sft", "start": "last"}, "start: no checkpoint is called 'last'. Did you mean 'latest'"),
        ({"algorithm": "sft", "mix": {"math": 0.5}}, "mix: weights must sum to 1"),
    ],
)
def test_named_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SPACE.recipe(**settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithms": ()}, "at least one algorithm and one source"),
        ({"sources": ()}, "at least one algorithm and one source"),
        ({"usable": {}}, "usable names no sources for 'sft'"),
        ({"usable": {"sft": ("b",)}}, "usable has 'b'"),
        ({"parameters": {"learning_rte": Parameter()}}, "no knob of a recipe. Did you mean 'learning_rate'"),
        ({"parameters": {"mix": Parameter()}}, "'mix' is no knob"),
        ({"parameters": {"schedule": Parameter()}}, "schedule"),
        ({"parameters": {"steps": Parameter(1, 9)}}, "steps is an integer"),
        ({"parameters": {"steps": Parameter(choices=(1.0, 2.0))}}, "steps is an integer"),
        ({"parameters": {"steps": Parameter(0, 9, integer=True)}}, "steps: expected an integer in .*got 0"),
        ({"parameters": {"temperature": Parameter(0.0, 1.0)}}, "temperature"),
        ({"fixed": {"steps": 30}}, "'steps' is both a parameter and fixed"),
        ({"fixed": {"kl_coef": -1.0}}, "kl_coef"),
        ({"fixed": {"gradient_accumulaton": 2}}, "Did you mean 'gradient_accumulation'"),
        (
            {"parameters": {"batch_size": Parameter(choices=(6, 9)), "num_generations": Parameter(choices=(4, 8))}},
            r"none that is at least 2 divides batch_size \[6, 9\]",
        ),
        ({"parameters": {"batch_size": Parameter(choices=(6,))}, "fixed": {"num_generations": 4}}, "divides"),
        ({"parameters": {"num_generations": Parameter(choices=(4, 8))}, "fixed": {"batch_size": 6}}, "divides"),
        ({"parameters": {}, "fixed": {"num_generations": 1}}, "divides"),
    ],
)
def test_spaces_with_impossible_actions_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecisionSpace(**{"algorithms": ("sft",), "sources": ("a",), "usable": {"sft": ("a",)}, **changes})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"low": 2, "high": 1}, "low must be below high"),
        ({"low": 1, "high": 1}, "low must be below high"),
        ({"low": 0, "high": 1, "scale": "log"}, "a log scale needs low > 0"),
        ({"scale": "logarithmic"}, "parameter.scale: unknown 'logarithmic'. Known: linear, log"),
        ({"choices": (2, 1)}, "choices must ascend"),
        ({"choices": (1, 1)}, "choices must ascend"),
        ({"low": math.nan}, "parameter.low"),
        ({"high": math.inf}, "parameter.high"),
    ],
)
def test_parameters_with_an_empty_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Parameter(**settings)


def test_an_algorithm_without_data_still_decodes() -> None:
    space = DecisionSpace(("grpo", "sft"), ("a", "b"), {"grpo": (), "sft": ("a", "b")})
    recipe = space.decode({**action_of(space, 0), "algorithm": 1})
    assert recipe is not None and set(recipe.mix) <= {"a", "b"}
    assert space.decode(space.encode(recipe)) == recipe
    assert space.recipe("grpo").mix == {"a": 0.5, "b": 0.5}


def test_cheapest_recipes_are_the_smallest_steps() -> None:
    (cheapest,) = WIDE.cheapest_recipes("grpo", ("a", "b"))
    assert (cheapest.batch_size, cheapest.gradient_accumulation, cheapest.kl_coef) == (7, 1, 0.0)
    assert cheapest.mix == {"a": 0.5, "b": 0.5}  # 5 and 6 hold no group of 4 or 7
    (held,) = WIDE.cheapest_recipes("grpo", ("b",), batch_size=64, kl_coef=0.2)
    assert (held.batch_size, held.gradient_accumulation, held.kl_coef, dict(held.mix)) == (64, 1, 0.2, {"b": 1.0})


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (Parameter(choices=(0, 8, 16)), [0, 8]),  # full weights or the smallest adapter: it depends on the unit
        (Parameter(choices=(8, 16)), [8]),
        (Parameter(choices=(0,)), [0]),
        (Parameter(0, 64, integer=True), [0, 1]),
    ],
)
def test_the_cheapest_recipes_consider_adapters(ranks: Parameter, expected: list[int]) -> None:
    space = DecisionSpace(
        ("sft",), ("a",), {"sft": ("a",)}, {"batch_size": Parameter(choices=(4, 8)), "lora_rank": ranks}
    )
    found = space.cheapest_recipes("sft", ("a",))
    assert [(recipe.lora_rank, recipe.batch_size) for recipe in found] == [(rank, 4) for rank in expected]
    assert [r.lora_rank for r in space.cheapest_recipes("sft", ("a",), lora_rank=expected[-1])] == [expected[-1]]


def test_the_largest_batch_that_can_be_paid() -> None:
    asked = SPACE.recipe("grpo", batch_size=64, num_generations=8, start="latest", learning_rate=1e-3)
    for most, expected in ((64, 64), (63, 32), (16, 16), (15, None)):
        found = SPACE.with_largest_batch(asked, lambda recipe, most=most: recipe.batch_size <= most)  # type: ignore[misc]
        assert found == (None if expected is None else dataclasses.replace(asked, batch_size=expected))
    small = dataclasses.replace(asked, batch_size=16)
    assert SPACE.with_largest_batch(small, lambda recipe: True) == small  # never larger than asked
    wide = WIDE.recipe("grpo", batch_size=60, gradient_accumulation=3, kl_coef=0.2, num_generations=4)
    for most in (60, 41, 30, 8, 7):
        found = WIDE.with_largest_batch(wide, lambda recipe, most=most: recipe.batch_size <= most)  # type: ignore[misc]
        assert found is not None
        assert found.batch_size == max(n for n in range(5, most + 1) if n * 3 % 4 == 0 or n * 3 % 7 == 0)
        assert found.batch_size * 3 % found.num_generations == 0
    (cheaper,) = WIDE.cheaper_recipes(wide)
    assert (cheaper.batch_size, cheaper.gradient_accumulation, cheaper.kl_coef) == (60, 1, 0.0)


def test_a_space_survives_pickling() -> None:
    _ = SPACE.random_recipe(np.random.default_rng(0))
    again = pickle.loads(pickle.dumps(SPACE))
    assert again == SPACE
    assert again.decode(action_of(SPACE, 3)) == SPACE.decode(action_of(SPACE, 3))
