"""The environment keeps its contracts: Gymnasium's and SB3's checks, masks, legality, errors and its table."""

from __future__ import annotations

import dataclasses
import re
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from sb3_contrib import MaskablePPO
from stable_baselines3 import PPO
from stable_baselines3.common.env_checker import check_env as check_env_sb3

from posttrain_gym.envs.budget import Budget
from posttrain_gym.envs.decision_space import DecisionSpace, Parameter
from posttrain_gym.envs.observation import (
    CHECKPOINTS,
    CURVE_COLUMNS,
    SCORE_COLUMNS,
    SIGNALS,
    ObservationLayout,
)
from posttrain_gym.envs.post_training import PostTrainingEnv, describe_round
from posttrain_gym.inner_trainers.base import CAUSES, Cost
from posttrain_gym.inner_trainers.tasks import InnerTask
from posttrain_gym.inner_trainers.tasks.letters import LettersFamily
from posttrain_gym.inner_trainers.testing import ScriptedFamily, ScriptedTask, ScriptedTrainer
from posttrain_gym.wrappers import DiscretizeAction, FlattenAction
from tests.scripted_env import AMPLE, make, recipe_action

# Gymnasium and Stable-Baselines3 -------------------------------------------------------------------------------------


TINY_EVALUATOR = {"seeds": (0,), "samples_per_seed": 2, "k": 2}


def test_scripted_environment_passes_both_checks() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SB3 has no Dict actions and would flatten `history`, which its extractor does
        env: Any = gym.make("PostTrain/Recipe-v0", task=ScriptedFamily(), render_mode="ansi")
        check_env(env.unwrapped)
        check_env_sb3(env)


def small_letters_space() -> DecisionSpace:
    """Returns the default space of the letters with rounds of 2 to 4 steps."""
    env = PostTrainingEnv(LettersFamily(4, 4), instances=(0,), evaluator=TINY_EVALUATOR)
    return dataclasses.replace(env.space, parameters={**env.space.parameters, "steps": Parameter(choices=(2, 4))})


def test_letters_environment_passes_both_checks() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        env: Any = gym.make(
            "PostTrain/Recipe-v0",
            task=LettersFamily(4, 4),
            instances=(0,),
            evaluator=TINY_EVALUATOR,
            space=small_letters_space(),
        )
        check_env(env.unwrapped)
        check_env_sb3(env)


def test_observation_is_a_copy() -> None:
    env = make(budget=AMPLE)
    first, _ = env.reset(seed=0)
    kept = {name: values.copy() for name, values in first.items()}
    env.step(recipe_action(env))
    assert all(np.array_equal(first[name], kept[name]) for name in first)


def test_a_budget_in_seconds_makes_the_spec_nondeterministic() -> None:
    for unit, expected in (("device_seconds", True), ("train_tokens", False)):
        env: Any = gym.make("PostTrain/Recipe-v0", task=ScriptedFamily(), budget={"limit": 500, "unit": unit})
        assert env.spec.nondeterministic is expected
        assert gym.make(env.spec).spec.nondeterministic is expected  # type: ignore[union-attr]
    assert not gym.spec("PostTrain/Recipe-v0").nondeterministic


def test_huge_row_counts_stay_inside_the_space() -> None:
    class Many(list[Any]):
        def __len__(self) -> int:
            return 10**9

    env = make()
    env.reset(seed=0)
    built = env.search.task.built
    source = built.sources["left"]
    big = dataclasses.replace(built, sources={**built.sources, "left": source})
    object.__setattr__(source, "rows", {"demonstrations": Many(source.rows["demonstrations"])})
    env.search.task.__dict__["built"] = big
    observation = env._observation()
    assert observation["task"][1] == 1.0  # log10(1e9) / 9
    assert observation["task"][0] == np.float32(3 / 12)  # 1000 parameters
    assert observation["task"][2] == np.float32(np.log10(6) / 9)
    assert env.observation_space.contains(observation)


# C03: masks and legality ---------------------------------------------------------------------------------------------


def test_a_budget_too_small_for_any_round_leaves_stop_alone() -> None:
    env = make(budget={"limit": 100.0})  # an evaluation costs 100, a step of 16 sequences 160
    observation, info = env.reset(seed=0)
    assert env.action_masks().tolist() == [True, False, False, True, True, True]
    assert info["ended"] == "budget"
    assert observation["budget"][0] == 0.0
    assert env.trainer.launched == 0  # type: ignore[attr-defined]
    assert env.search.ledger.spent == 100.0


@pytest.mark.parametrize("stop", [True, False])
def test_the_first_step_of_an_episode_that_is_over_at_reset_ends_it(stop: bool) -> None:
    env = make(budget={"limit": 100.0})
    env.reset(seed=0)
    action = env.encode_recipe(None) if stop else recipe_action(env)
    observation, reward, terminated, truncated, info = env.step(action)
    assert (reward, terminated, truncated) == (0.0 if stop else -0.1, True, False)
    assert info["ended"] == ("stop" if stop else "budget")
    assert env.observation_space.contains(observation)
    if not stop:
        assert (info["round"]["failure"]["kind"], info["round"]["charged"]) == ("unaffordable", 0.0)
    assert env.search.ledger.spent == 100.0
    assert env.trainer.launched == 0  # type: ignore[attr-defined]
    for again in (env.encode_recipe(None), recipe_action(env)):
        with pytest.raises(ValueError, match=r"the episode is over \((stop|budget)\); call reset\(\)"):
            env.step(again)
    env.reset()
    assert env.step(action)[2]


@pytest.mark.parametrize(("algorithm", "wrapper"), [(MaskablePPO, DiscretizeAction), (PPO, FlattenAction)])
def test_a_loop_that_sees_only_masks_runs_where_no_round_can_be_paid(algorithm: Any, wrapper: Any) -> None:
    env = wrapper(make(budget={"limit": 100}))
    model = algorithm("MultiInputPolicy", env, n_steps=4, batch_size=4, seed=0, device="cpu")
    model.learn(4)
    assert model.num_timesteps == 4
    assert [entry["l"] for entry in model.ep_info_buffer] == [1] * 4


def test_a_limit_below_the_base_evaluation_is_refused_when_the_environment_is_made() -> None:
    for unit, limit, evaluation in (("train_tokens", 99, "100"), ("flops", 5e5, "600000")):
        with pytest.raises(ValueError, match=rf"budget.limit: {limit:g} is below .* \({evaluation} {unit}\)"):
            make(budget={"limit": limit, "unit": unit})


def test_a_later_instance_whose_evaluation_is_dearer_is_over_at_reset_and_does_not_crash() -> None:
    class Dearer(ScriptedTrainer):
        def evaluation_cost_bound(self, task: InnerTask, split: str) -> Cost:
            return super().evaluation_cost_bound(task, split).times(1 if getattr(task, "seed", 0) == 0 else 50)

    env = make(trainer=Dearer(), instances=(0, 1), budget={"limit": 1000})
    assert env.reset(seed=0, options={"instance": 0})[1]["ended"] is None
    observation, info = env.reset(seed=0, options={"instance": 1})
    assert info["ended"] == "budget" and env.observation_space.contains(observation)
    assert env.step(recipe_action(env))[2]


def test_the_cheapest_round_is_legal_to_the_token() -> None:
    for limit, legal in ((100 + 100 + 160, True), (100 + 100 + 159, False)):  # base, evaluation, one step of 16
        env = make(budget={"limit": limit})
        env.reset(seed=0)
        assert env.action_masks()[1:3].tolist() == [legal, legal], limit
    env = make(budget={"limit": 100 + 100 + 160})
    env.reset(seed=0)
    info = env.step(recipe_action(env, batch_size=16, steps=10))[4]
    assert (info["round"]["steps"], info["round"]["ended"], info["ended"]) == (1, "budget", "budget")
    assert info["budget_left"] == 0.0


def test_a_batch_that_cannot_be_paid_becomes_the_largest_that_can() -> None:
    for left, expected in ((160, 16), (319, 16), (320, 32), (639, 32), (640, 64)):
        env = make(budget={"limit": 100 + left + 100})
        env.reset(seed=0)
        facts = env.step(recipe_action(env, batch_size=64, steps=10))[4]["round"]
        assert (facts["recipe"]["batch_size"], facts["failure"]) == (expected, None), left
        assert facts["steps"] == left // (expected * 10)


def test_knobs_besides_the_batch_are_lowered_only_when_no_batch_is_small_enough() -> None:
    class Accumulating(ScriptedTrainer):
        def step_cost_bound(self, task: InnerTask, recipe: Any) -> Cost:
            return super().step_cost_bound(task, recipe).times(recipe.gradient_accumulation)

    space = DecisionSpace(
        ("sft",),
        ("left", "right"),
        {"sft": ("left", "right")},
        {
            "batch_size": Parameter(choices=(16, 32, 64)),
            "gradient_accumulation": Parameter(choices=(1, 2, 4)),
            "steps": Parameter(choices=(10,)),
        },
    )
    for left, expected in ((640, (16, 4)), (1300, (32, 4)), (639, (32, 1)), (319, (16, 1))):
        env = make(trainer=Accumulating(), space=space, budget={"limit": 100 + left + 100})
        env.reset(seed=0)
        facts = env.step(recipe_action(env, batch_size=64, gradient_accumulation=4))[4]["round"]["recipe"]
        assert (facts["batch_size"], facts["gradient_accumulation"]) == expected, left


def test_an_algorithm_without_data_is_a_failed_round_that_costs_nothing_and_counts() -> None:
    class DemonstrationsOnly(ScriptedTask):
        def sources(self) -> list[Any]:
            return [
                dataclasses.replace(s, rows={"demonstrations": s.rows["demonstrations"]}) for s in super().sources()
            ]

    env = make(task=DemonstrationsOnly(), budget={"limit": 1e6, "max_rounds": 3})
    env.reset(seed=0)
    assert env.action_masks().tolist() == [True, False, True, True, True, True]
    spent = env.search.ledger.spent
    action = {**recipe_action(env), "algorithm": 1}
    observation, reward, terminated, _, info = env.step(action)
    assert info["round"]["failure"]["kind"] == "no_data"
    assert info["round"]["failure"]["cause"] == "algorithm_mismatch"
    assert reward == -0.1
    assert not terminated
    assert env.search.ledger.spent == spent
    assert env.trainer.launched == 0  # type: ignore[attr-defined]
    assert observation["budget"][1] == np.float32(2 / 3)
    env.step(action)
    _, _, terminated, _, info = env.step(action)
    assert terminated and info["ended"] == "rounds"


def test_an_unaffordable_algorithm_is_a_failed_round_that_costs_nothing() -> None:
    class CostlyGrpo(ScriptedTrainer):
        def step_cost_bound(self, task: InnerTask, recipe: Any) -> Cost:
            return super().step_cost_bound(task, recipe).times(1000 if recipe.algorithm == "grpo" else 1)

    env = make(trainer=CostlyGrpo(), budget={"limit": 50_000})
    env.reset(seed=0)
    assert env.action_masks()[:3].tolist() == [True, False, True]
    _, reward, terminated, _, info = env.step(recipe_action(env, "grpo"))
    assert info["round"]["failure"]["kind"] == "unaffordable"
    assert (
        info["round"]["failure"]["evidence"]
        == "49900 train_tokens are left, one step and its evaluation can cost 160100"
    )
    assert (reward, terminated, info["round"]["charged"]) == (-0.1, False, 0.0)


def test_a_mix_that_one_instance_cannot_train_on_is_a_failed_round_and_no_crash() -> None:
    class Uneven(ScriptedFamily):
        def instance(self, seed: int) -> InnerTask:
            return ScriptedTask(seed, kinds=("demonstrations", "prompts") if seed == 0 else ("demonstrations",))

    class Strict(ScriptedTrainer):
        def check(self, task: InnerTask, recipe: Any) -> None:
            for name in recipe.mix:
                if name not in self.usable_sources(task, recipe.algorithm):
                    raise ValueError(f"mix: source {name!r} has no rows")

    env = make(task=Uneven(), trainer=Strict(), budget=AMPLE)
    env.reset(seed=0, options={"instance": 1})
    info = env.step(recipe_action(env, "grpo", mix={"left": 0.5, "right": 0.5}))[4]
    assert info["round"]["failure"] == {
        "cause": "hyperparameter",
        "kind": "refused",
        "step": 0,
        "evidence": "mix: source 'right' has no rows",
    }
    assert env.step(recipe_action(env, "grpo", mix={"left": 1.0}))[4]["round"]["failure"] is None


def test_masks_are_legal_before_reset_and_after_the_end() -> None:
    env = make()
    assert env.action_masks().tolist() == [True] * 6
    env.reset(seed=0)
    env.step(env.encode_recipe(None))
    assert env.action_masks().tolist() == [True, False, False, True, True, True]


# Errors --------------------------------------------------------------------------------------------------------------


def test_a_step_after_the_end_is_refused_and_charges_nothing() -> None:
    env = make(budget={"limit": 1e7, "max_rounds": 1})
    env.reset(seed=0)
    env.step(recipe_action(env))
    spent, launched = env.search.ledger.spent, env.trainer.launched  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"the episode is over \(rounds\); call reset\(\)"):
        env.step(recipe_action(env))
    with pytest.raises(ValueError, match="the search has ended"):
        env.search.run(env.space.recipe("sft"))
    assert (env.search.ledger.spent, env.trainer.launched) == (spent, launched)  # type: ignore[attr-defined]


def test_a_step_before_reset_is_refused() -> None:
    with pytest.raises(RuntimeError, match="call reset"):
        make().step({})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithm": 3}, r"action\['algorithm'\].*\[0, 2\].*got 3"),
        ({"algorithm": -1}, r"action\['algorithm'\]"),
        ({"algorithm": 1.0}, r"action\['algorithm'\]"),
        ({"algorithm": True}, r"action\['algorithm'\]"),
        ({"algorithm": "sft"}, r"action\['algorithm'\]"),
        ({"algorithm": None}, r"action\['algorithm'\]"),
        ({"algorithm": np.array([1, 2])}, r"action\['algorithm'\]"),
        ({"start": 3}, r"action\['start'\]"),
        ({"mix": np.array([0.0, 1.1])}, r"action\['mix'\].*finite values in \[-1, 1\]"),
        ({"mix": np.array([0.0, np.nan])}, r"action\['mix'\].*finite"),
        ({"mix": np.array([0.0, np.inf])}, r"action\['mix'\].*finite"),
        ({"mix": np.zeros(3)}, r"action\['mix'\].*shape \(2,\), got \(3,\)"),
        ({"mix": "abc"}, r"action\['mix'\]"),
        ({"mix": {"left": 1.0}}, r"action\['mix'\]"),
        ({"mix": [[0.0], [0.0, 1.0]]}, r"action\['mix'\]"),
        ({"parameters": np.zeros((1, 4))}, r"action\['parameters'\].*shape"),
        ({"parameters": None}, r"action\['parameters'\]"),
        ({"bonus": 1}, r"keys \['algorithm', 'mix', 'parameters', 'start'\], got .*bonus"),
        ({3: 1}, "action: expected a mapping with keys"),
    ],
)
def test_actions_outside_the_space_are_refused_by_name(change: dict[Any, Any], message: str) -> None:
    env = make(budget=AMPLE)
    env.reset(seed=0)
    spent = env.search.ledger.spent
    with pytest.raises(ValueError, match=message):
        env.step({**recipe_action(env), **change})
    assert env.trainer.launched == 0  # type: ignore[attr-defined]
    assert (env.search.ledger.spent, env.search.rounds) == (spent, 0)


@pytest.mark.parametrize("action", [None, 3, [1, 2], np.zeros(9), {}, {"algorithm": 1}])
def test_actions_of_the_wrong_kind_are_refused(action: Any) -> None:
    env = make()
    env.reset(seed=0)
    with pytest.raises(ValueError, match="action: expected a mapping with keys"):
        env.step(action)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "leters"}, "Did you mean 'letters'"),
        ({"task": "no_such_module:Task"}, "no_such_module"),
        ({"task": 3}, "expected a name, an InnerTask or a TaskFamily, got int"),
        ({"split": "tests"}, "split: unknown 'tests'. Did you mean 'test'"),
        ({"task": "letters", "evaluator": {"sample_per_seed": 2}}, "Did you mean 'samples_per_seed'"),
        ({"evaluator": {"k": 2}}, "evaluator: .*brings its own trainer"),
        ({"trainer": ScriptedTrainer(), "evaluator": {"k": 2}}, "evaluator: "),
        ({"budget": {"limits": 3}}, "budget: unknown key 'limits'. Did you mean 'limit'"),
        ({"budget": {"unit": "tokens"}}, "budget.unit: unknown 'tokens'. Did you mean 'train_tokens'"),
        ({"budget": 0}, "budget.limit: "),
        ({"budget": -1.0}, "budget.limit: "),
        ({"budget": float("nan")}, "budget.limit: .*got nan"),
        ({"budget": float("inf")}, "budget.limit: .*got inf"),
        ({"budget": "100"}, "budget.limit: .*got '100' \\(str\\)"),
        ({"budget": True}, "budget.limit: "),
        ({"budget": {"max_rounds": 0}}, "budget.max_rounds: "),
        ({"budget": {"patience": 1.5}}, "budget.patience: "),
        ({"price": float("nan")}, "price: "),
        ({"failure_penalty": -1}, "failure_penalty: "),
        ({"history": 0}, "history: "),
        ({"instances": ()}, "instances: expected at least one"),
        ({"render_mode": "human"}, "render_mode: unknown 'human'"),
        (
            {"space": DecisionSpace(("dpo",), ("left", "right"), {"dpo": ("left",)})},
            "space: the trainer has no algorithm 'dpo'",
        ),
        ({"space": DecisionSpace(("sft",), ("west",), {"sft": ("west",)})}, r"sources \('left', 'right'\).*differ"),
    ],
)
def test_bad_settings_are_refused_when_the_environment_is_made(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**settings)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"instnce": 3}, "options: unknown 'instnce'. Did you mean 'instance'"),
        ({"instance": 1.5}, r"options\['instance'\]: expected an integer"),
        ({"instance": "3"}, r"options\['instance'\]: expected an integer"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    env = make()
    with pytest.raises(ValueError, match=message):
        env.reset(options=options)


def test_a_failed_reset_leaves_the_running_search_alone() -> None:
    env = make(budget=AMPLE)
    env.reset(seed=0)
    search = env.search
    with pytest.raises(ValueError, match="options"):
        env.reset(options={"x": 1})
    assert env.search is search

    def unpriced(task: InnerTask, recipe: Any) -> Cost:
        raise ValueError("source 'left', prompts row 1: the prompt has no tokens to continue.")

    env.trainer.step_cost_bound = unpriced  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no tokens to continue"):
        env.reset()
    assert env.search is search


def test_render_says_the_last_round() -> None:
    env = make(budget=AMPLE, render_mode="ansi")
    assert env.render() is None
    env.reset(seed=0, options={"instance": 4})
    assert (env.render() or "").startswith("instance 4  best 0.")
    env.step(recipe_action(env, learning_rate=1e-3, steps=40))
    text = env.render() or ""
    assert "round 1: sft from best, lr 0.001, 40 steps, left 50% right 50% -> 0." in text
    assert text.splitlines()[1] == describe_round(1, env.search.outcomes[-1])
    assert make().render() is None


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("split", [], r"split: unknown \[\]"),
        ("instances", 5, "instances: expected at least one instance seed in a sequence, got 5"),
        ("instances", [], "instances: expected at least one instance seed"),
        ("instances", "0-3", "instances: expected at least one instance seed in a sequence, got '0-3'"),
        ("instances", [1.5], "instances: expected an integer"),
        ("reuse", "no", "reuse: expected True or False, got 'no'"),
        ("journal", "", "journal: expected the name of a folder"),
    ],
)
def test_odd_arguments_are_refused_by_name(setting: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PostTrainingEnv(ScriptedFamily(), **{setting: value})


# The table in docs/environment.md ------------------------------------------------------------------------------------


def test_the_documented_table_is_the_layout() -> None:
    space = DecisionSpace(("grpo", "sft"), ("a", "b", "c"), {"grpo": ("a",), "sft": ("b",)})
    layout = ObservationLayout(sources=3, algorithms=2, dimensions=4, recipe_width=space.width, history=5)
    sizes = {"S": 3, "A": 2, "D": 4, "R": space.width, "H": 5, "K": len(space.parameters)}
    text = (Path(__file__).parents[1] / "docs" / "environment.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \| `(.+?)` \| `(\w+)` \| \[(\S+), (\S+)\] \|", text, re.MULTILINE)
    indices: dict[str, list[int]] = {}
    columns: dict[str, list[str]] = {}
    for key, first, width, name, low, high in rows:
        for d in range(sizes["D"] if "d" in first else 1):
            start = eval(first, {}, {**sizes, "d": d})
            indices.setdefault(key, []).extend(range(start, start + eval(width, {}, dict(sizes))))
        columns.setdefault(key, []).append(name)
        box: Any = layout.space().spaces.get(key)
        assert box is None or float(box.low.min()) <= float(low) < float(high) <= float(box.high.max()), (key, name)
    widths = {key: box.shape[-1] for key, box in layout.space().spaces.items() if box.shape is not None}
    assert {key: len(found) for key, found in indices.items()} == {**widths, "recipe": space.width}
    assert all(sorted(found) == list(range(len(found))) for found in indices.values())
    per_checkpoint = ["score", "score_error", *SCORE_COLUMNS]
    assert columns["scores"] == [f"{name}_{column}" for name in CHECKPOINTS for column in per_checkpoint]
    causes = [f"cause_{cause}" for cause in CAUSES]
    head = ["recipe", "gain", "cost"]
    assert columns["last"] == [*head, "steps_done", "failed", *causes, *CURVE_COLUMNS, "was_not_finite"]
    assert columns["history"] == [*head, "failed"]
    assert columns["signals"] == list(SIGNALS)
    assert columns["budget"] == ["budget_left", "rounds_left", "patience_left"]


def test_default_budget_is_the_documented_one() -> None:
    assert Budget() == Budget(limit=200_000, unit="train_tokens", max_rounds=8, patience=4)
