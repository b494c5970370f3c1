"""The environment keeps its contracts: spaces, seeds, masks, rewards, costs and errors, with values worked by hand."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv
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
from posttrain_gym.envs.reward import RewardSettings, round_reward
from posttrain_gym.inner_trainers.base import CAUSES, Checkpoint, Cost, Scorecard
from posttrain_gym.inner_trainers.tasks import InnerTask
from posttrain_gym.inner_trainers.tasks.letters import LettersFamily
from posttrain_gym.inner_trainers.testing import ScriptedFamily, ScriptedTask, ScriptedTrainer
from posttrain_gym.wrappers import DiscretizeAction, FlattenAction

TINY_EVALUATOR = {"seeds": (0,), "samples_per_seed": 2, "k": 2}
AMPLE = {"limit": 1e7, "max_rounds": 100, "patience": 100}


def make(**settings: Any) -> PostTrainingEnv:
    """Returns a scripted environment without Gymnasium's own wrappers."""
    return PostTrainingEnv(**{"task": ScriptedFamily(), **settings})


def recipe_action(env: PostTrainingEnv, algorithm: str = "sft", **settings: Any) -> dict[str, Any]:
    return env.encode_recipe(env.space.recipe(algorithm, **settings))


# Gymnasium and Stable-Baselines3 --------------------------------------------------------------------------------------


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


# C09: seeds -----------------------------------------------------------------------------------------------------------

TRACE = """
import hashlib, json
from posttrain_gym.envs.post_training import PostTrainingEnv

def trace():
    env = PostTrainingEnv("letters", instances=(3,), evaluator={"seeds": (0,), "samples_per_seed": 2, "k": 2})
    digest = hashlib.sha256()
    def note(observation, *rest):
        for name in sorted(observation):
            digest.update(name.encode() + observation[name].tobytes())
        digest.update(json.dumps(rest, sort_keys=True, default=lambda array: array.tolist()).encode())
    note(*env.reset(seed=7))
    for algorithm, start, rate in (("sft", "base", 1e-3), ("grpo", "latest", 1e-3)):
        recipe = env.space.recipe(
            algorithm, start=start, learning_rate=rate, steps=10, batch_size=16, num_generations=4
        )
        observation, reward, terminated, truncated, info = env.step(env.encode_recipe(recipe))
        assert info["round"]["ended"] == "finished" and info["round"]["steps"] == 10, info["round"]
        note(observation, reward, terminated, truncated, info)
    return digest.hexdigest()
"""


def test_same_seed_and_actions_give_the_same_trace_in_one_process_and_in_two() -> None:
    programs = [TRACE + "print(trace(), trace())", TRACE + "print(trace())"]
    environment = {**os.environ, "PYTHONHASHSEED": "random"}
    processes = [
        subprocess.Popen([sys.executable, "-c", p], stdout=subprocess.PIPE, text=True, env=environment)
        for p in programs
    ]
    digests = [digest for process in processes for digest in process.communicate(timeout=300)[0].split()]
    assert [process.returncode for process in processes] == [0, 0]
    assert len(digests) == 3
    assert len(set(digests)) == 1


def test_reset_with_a_seed_seeds_the_action_space_too() -> None:
    samples = []
    for _ in range(2):
        env = make()
        env.reset(seed=7)
        samples.append([env.action_space.sample() for _ in range(3)])
    assert all(np.array_equal(one[name], other[name]) for one, other in zip(*samples, strict=True) for name in one)


@pytest.mark.parametrize("wrapper", [FlattenAction, DiscretizeAction])
def test_reset_with_a_seed_seeds_the_wrapped_action_space(wrapper: Any) -> None:
    samples = []
    for _ in range(2):
        env = wrapper(make())
        env.reset(seed=7)
        samples.append(np.stack([env.action_space.sample() for _ in range(3)]))
    assert np.array_equal(samples[0], samples[1])


def test_copies_in_a_vector_start_differently_and_say_their_seeds() -> None:
    vector = SyncVectorEnv([lambda: gym.make("PostTrain/Recipe-v0", task=ScriptedFamily())] * 2)
    _, infos = vector.reset(seed=7)
    _, again = vector.reset(seed=7)
    assert infos["seed"][0] != infos["seed"][1]
    assert infos["seed"].tolist() == again["seed"].tolist()
    assert infos["instance"].tolist() == again["instance"].tolist()
    _, unseeded = vector.reset()
    assert unseeded["seed"][0] != unseeded["seed"][1]


def test_unseeded_copies_differ() -> None:
    seeds = {make().reset()[1]["seed"] for _ in range(4)}
    assert len(seeds) == 4


def test_round_seed_is_the_search_seed_plus_the_depth_of_the_start() -> None:
    env = make(budget=AMPLE)
    _, info = env.reset(seed=1)
    first = env.step(recipe_action(env, start="base"))[4]["round"]
    second = env.step(recipe_action(env, start="latest"))[4]["round"]
    assert (first["seed"], second["seed"]) == (info["seed"], info["seed"] + 1)


def test_an_option_fixes_the_instance_and_leaves_the_seed_stream_alone() -> None:
    env = make()
    drawn = env.reset(seed=5)[1]
    fixed = env.reset(seed=5, options={"instance": 42})[1]
    assert fixed["instance"] == 42
    assert fixed["seed"] == drawn["seed"]


# C03: masks and legality ----------------------------------------------------------------------------------------------


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


# C05: observations ----------------------------------------------------------------------------------------------------


def test_observations_of_faulty_rounds_stay_inside_the_space_and_are_flagged() -> None:
    losses = {2: [1.0, 1.0, float("nan")], 4: [1.0] * 4 + [float("inf")], 6: [1.0] * 6 + [1e9]}
    env = make(trainer=ScriptedTrainer(faults=losses), budget=AMPLE, reuse=False)
    observation, _ = env.reset(seed=0)
    env.action_space.seed(0)
    flags, failed = [], []
    for number in range(50):
        action = recipe_action(env, steps=20) if number < 7 else {**env.action_space.sample(), "algorithm": 1}
        observation, reward, *_ = env.step(action)
        assert env.observation_space.contains(observation)
        assert all(values.dtype == np.float32 and np.isfinite(values).all() for values in observation.values())
        assert np.isfinite(reward)
        flags.append(float(observation["last"][-1]))
        failed.append(float(observation["last"][env.space.width + 3]))
    assert [i for i, flag in enumerate(flags) if flag] == [2, 4]  # 1e9 is finite: a failure, but nothing to flag
    assert [i for i, flag in enumerate(failed) if flag] == [2, 4, 6]


@pytest.mark.parametrize("algorithm", [PPO, MaskablePPO])
def test_training_on_faulty_rounds_never_makes_an_action_nan(algorithm: Any) -> None:
    faults = {i: [[float("nan")], [float("inf")], [1e9]][i % 3] for i in range(0, 500, 2)}
    base = make(trainer=ScriptedTrainer(faults=faults), budget={"limit": 1e7, "max_rounds": 8, "patience": 8})
    env: Any = FlattenAction(base) if algorithm is PPO else DiscretizeAction(base)
    model = algorithm("MultiInputPolicy", env, n_steps=32, batch_size=32, seed=0, device="cpu")
    model.learn(128)
    observation, _ = env.reset(seed=0)
    for _ in range(8):
        action, _ = model.predict(observation)
        assert np.isfinite(action).all()
        observation, *_ = env.step(action)
        if base.search.ended():
            observation, _ = env.reset()
    assert all(bool(p.isfinite().all()) for p in model.policy.parameters())


def test_a_score_that_is_not_finite_is_a_failed_round() -> None:
    class NanScores(ScriptedTrainer):
        def evaluate(self, task: InnerTask, checkpoint: Checkpoint, split: str) -> tuple[Scorecard, Cost]:
            scorecard, cost = super().evaluate(task, checkpoint, split)
            return (scorecard if checkpoint.id == "base" else dataclasses.replace(scorecard, score=float("nan"))), cost

    env = make(trainer=NanScores(), budget=AMPLE)
    env.reset(seed=0)
    observation, reward, _, _, info = env.step(recipe_action(env))
    assert info["round"]["failure"]["kind"] == "evaluation_raised"
    assert info["round"]["charged"] == 24 * 320 + 100  # 24 steps of 32 sequences, and the evaluation that was made
    assert info["round"]["checkpoint"] is None
    assert np.isfinite(reward) and env.observation_space.contains(observation)
    assert env.search.checkpoints["latest"].id == "base"


def test_a_scorer_that_raises_is_charged_the_most_it_can_have_used() -> None:
    class Raises(ScriptedTrainer):
        def evaluate(self, task: InnerTask, checkpoint: Checkpoint, split: str) -> tuple[Scorecard, Cost]:
            if checkpoint.id != "base":
                raise RuntimeError("judge is down")
            scorecard, cost = super().evaluate(task, checkpoint, split)
            return scorecard, dataclasses.replace(cost, generated_tokens=150)  # below the bound of 300

    env = make(trainer=Raises(), budget=AMPLE)
    env.reset(seed=0)
    assert env.search.ledger.spent == 50
    facts = env.step(recipe_action(env))[4]["round"]
    assert (facts["failure"]["kind"], facts["charged"]) == ("evaluation_raised", 24 * 320 + 100)
    assert env.search.outcomes[-1].report.evaluation_cost.device_seconds > 0


def test_completions_that_never_end_are_told_at_reset() -> None:
    class Clipped(ScriptedTrainer):
        def evaluate(self, task: InnerTask, checkpoint: Checkpoint, split: str) -> tuple[Scorecard, Cost]:
            scorecard, cost = super().evaluate(task, checkpoint, split)
            return dataclasses.replace(scorecard, clipped_share=1.0), cost

    assert make().reset(seed=0)[1]["flags"] == []
    env = make(trainer=Clipped())
    (flag,) = env.reset(seed=0)[1]["flags"]
    assert flag.startswith("100 % of the evaluated completions reach the length limit")
    assert env.step(recipe_action(env))[4]["round"]["flags"][-1] == flag


def test_what_info_holds_is_a_copy() -> None:
    env = make(trainer=ScriptedTrainer(faults={0: [float("nan")]}), budget=AMPLE)
    env.reset(seed=0)
    info = env.step(recipe_action(env))[4]
    info["round"]["failure"]["kind"] = "edited"
    failure = env.search.outcomes[-1].report.failure
    assert failure is not None and failure.kind == "diverged"


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


def test_observation_holds_what_happened() -> None:
    env = make(budget=AMPLE, history=2)
    observation, _ = env.reset(seed=0)
    assert not observation["last"].any() and not observation["history"].any()
    rewards = [env.step(recipe_action(env, learning_rate=rate, steps=40)) for rate in (1e-3, 9e-4, 8e-4)]
    observation, _, _, _, info = rewards[-1]
    width, outcomes = env.space.width, env.search.outcomes
    assert np.array_equal(observation["last"][:width], env.space.to_vector(outcomes[-1].report.recipe))
    assert observation["last"][width] == np.float32(info["round"]["gain"])
    assert observation["last"][width + 1] == np.float32(info["round"]["charged"] / 1e7)
    assert observation["last"][width + 2] == 1.0
    for row, outcome in enumerate([outcomes[2], outcomes[1]]):  # newest first, two kept
        assert np.array_equal(observation["history"][row, :width], env.space.to_vector(outcome.report.recipe))
    assert observation["budget"][1] == np.float32(0.97)
    assert observation["scores"][0] == np.float32(env.search.scorecards["base"].score)


# C07: vector environments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "launches"), [(AutoresetMode.NEXT_STEP, 16), (AutoresetMode.SAME_STEP, 18)])
def test_autoreset_launches_only_what_was_asked(mode: AutoresetMode, launches: int) -> None:
    trainers = [ScriptedTrainer(), ScriptedTrainer()]
    budget = {"limit": 1e7, "max_rounds": 8, "patience": 8}
    makers = [lambda t=t: make(trainer=t, budget=budget, reuse=False) for t in trainers]
    vector = SyncVectorEnv(makers, autoreset_mode=mode)
    assert vector.metadata["autoreset_mode"] == mode
    vector.reset(seed=0)
    vector.action_space.seed(0)
    charged = np.zeros(2)
    for number in range(1, 19):
        before = [trainer.launched for trainer in trainers]
        action = vector.action_space.sample()
        action["algorithm"][:] = 2  # never stop
        _, rewards, terminated, _, infos = vector.step(action)
        ran = [trainer.launched - count for trainer, count in zip(trainers, before, strict=True)]
        ignored = mode == AutoresetMode.NEXT_STEP and number in (9, 18)
        assert ran == ([0, 0] if ignored else [1, 1]), number
        if ignored:
            assert rewards.tolist() == [0.0, 0.0] and not terminated.any()
            assert (infos["budget_left"] == 1 - 100 / 1e7).all()  # the new episode has paid its base evaluation alone
        else:
            last = infos.get("final_info", infos)
            charged += last["round"]["charged"]
    assert [trainer.launched for trainer in trainers] == [launches, launches]
    assert (charged > 0).all()


# D03: an equal round is not bought twice ------------------------------------------------------------------------------


def test_an_equal_round_costs_nothing_and_says_so() -> None:
    env = make(budget=AMPLE)
    env.reset(seed=0)
    action = recipe_action(env, start="base")
    first = env.step(action)[4]["round"]
    spent = env.search.ledger.spent
    _, reward, _, _, info = env.step(action)
    again = info["round"]
    assert (first["cached"], again["cached"]) == (False, True)
    assert again["charged"] == 0.0 and env.search.ledger.spent == spent
    assert again["checkpoint"] == first["checkpoint"] and again["score"] == first["score"]
    assert reward == 0.0
    assert env.trainer.launched == 1  # type: ignore[attr-defined]
    assert env.step(recipe_action(env, start="latest"))[4]["round"]["cached"] is False  # another start
    assert env.trainer.launched == 2  # type: ignore[attr-defined]


def test_a_round_that_diverged_is_not_bought_twice_but_one_out_of_memory_is_tried_again() -> None:
    faults: dict[int, Any] = {0: [float("nan")], 1: MemoryError("out of memory")}
    env = make(trainer=ScriptedTrainer(faults=faults), budget=AMPLE)
    env.reset(seed=0)
    diverging, starved = recipe_action(env, learning_rate=1e-2), recipe_action(env, learning_rate=1e-3)
    kinds = []
    for action in (diverging, diverging, starved, starved):
        facts = env.step(action)[4]["round"]
        kinds.append((None if facts["failure"] is None else facts["failure"]["kind"], facts["cached"]))
    assert kinds == [("diverged", False), ("diverged", True), ("oom", False), (None, False)]


def test_an_equal_round_of_another_seed_or_with_reuse_off_runs_again() -> None:
    env = make(budget=AMPLE)
    for seed in (0, 1):
        env.reset(seed=seed)
        assert env.step(recipe_action(env))[4]["round"]["cached"] is False
    assert env.trainer.launched == 2  # type: ignore[attr-defined]
    env = make(budget=AMPLE, reuse=False)
    env.reset(seed=0)
    assert [env.step(recipe_action(env, start="base"))[4]["round"]["cached"] for _ in range(2)] == [False, False]


def test_a_cached_round_can_be_continued_from() -> None:
    plain, cached = make(budget=AMPLE, reuse=False), make(budget=AMPLE)
    rounds = []
    for env in (plain, cached):
        env.reset(seed=0)
        first, second = recipe_action(env, start="base", steps=40), recipe_action(env, start="base", steps=20)
        for action in (first, second, first):
            env.step(action)
        rounds.append(env.step(recipe_action(env, start="latest"))[4]["round"])
    assert rounds[0]["start"] == rounds[1]["start"]
    assert rounds[0]["score"] == rounds[1]["score"]


def test_one_edited_letter_makes_it_another_round() -> None:
    checkpoints = []
    for answer in ("yes", "yes", "yas"):
        env = make(task=ScriptedTask(0, answer=answer), budget=AMPLE)
        env.reset(seed=0)
        checkpoints.append(env.step(recipe_action(env))[4]["round"]["checkpoint"])
    assert checkpoints[0] == checkpoints[1] != checkpoints[2]


def test_a_file_edited_between_episodes_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "answer.txt"

    class FromFile(ScriptedFamily):
        def instance(self, seed: int) -> InnerTask:
            return ScriptedTask(seed, answer=file.read_text())

    file.write_text("yes")
    stat = file.stat()
    env = make(task=FromFile(), budget=AMPLE)
    checkpoints = []
    for text in ("yes", "yas"):
        file.write_text(text)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # old size, old time
        env.reset(seed=0)
        checkpoints.append(env.step(recipe_action(env))[4]["round"]["checkpoint"])
    assert checkpoints[0] != checkpoints[1]
    assert env.trainer.launched == 2  # type: ignore[attr-defined]


def test_a_round_is_the_training_it_does_not_the_words_it_is_asked_in() -> None:
    """Base and best are one checkpoint at depth 0, and SFT has no generations: nothing is trained twice."""
    env = make(budget=AMPLE)
    env.reset(seed=0)
    first = env.step(recipe_action(env, start="base", num_generations=4))[4]["round"]
    spent = env.search.ledger.spent
    env.reset(seed=0)
    bad = recipe_action(env, start="base", learning_rate=1e-2, num_generations=4)  # harms: best stays base
    again = [
        env.step(action)[4]["round"]
        for action in (
            bad,
            recipe_action(env, start="best", learning_rate=1e-2, num_generations=4),
            recipe_action(env, start="base", learning_rate=1e-2, num_generations=8),
            recipe_action(env, start="latest", learning_rate=1e-2, num_generations=8),  # other weights
        )
    ]
    assert [facts["cached"] for facts in again] == [False, True, True, False]
    assert [facts["charged"] for facts in again[1:3]] == [0.0, 0.0]
    assert [facts["recipe"]["num_generations"] for facts in again] == [4, 4, 8, 8]  # what was asked is shown
    assert [facts["recipe"]["start"] for facts in again] == ["base", "best", "base", "latest"]
    assert len({facts["checkpoint"] for facts in again[:3]}) == 1
    assert first["charged"] < spent
    grpo = [env.step(recipe_action(env, "grpo", start="base", num_generations=n))[4]["round"] for n in (4, 8)]
    assert [facts["cached"] for facts in grpo] == [False, False]  # there it matters


def test_launches_and_charges_agree_when_cached_rounds_are_continued() -> None:
    env = make(budget=AMPLE)
    env.reset(seed=0)
    env.action_space.seed(0)
    rng = np.random.default_rng(0)
    recipes = [env.space.random_recipe(rng) for _ in range(3)]
    cached = 0
    for _ in range(60):
        recipe = dataclasses.replace(
            recipes[int(rng.integers(3))], start=("base", "latest", "latest", "best")[int(rng.integers(4))]
        )
        cached += env.step(env.encode_recipe(recipe))[4]["round"]["cached"]
    charged = sum(outcome.charged > 0 for outcome in env.search.outcomes)
    assert cached > 5
    assert env.trainer.launched == charged == 60 - cached  # type: ignore[attr-defined]


# Reward and termination -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "base", "cost", "failed", "expected"),
    [
        (0.5, 0.75, 0.5, 0.0, False, 0.5),
        (0.5, 0.75, 0.5, 0.25, False, 0.475),
        (0.5, 0.5, 0.5, 1.0, True, -0.2),
        (0.995, 1.0, 0.995, 0.0, False, 0.5),  # the headroom is taken as 0.01
        (1.0, 1.0, 1.0, 0.5, False, -0.05),
    ],
)
def test_reward_by_hand(before: float, after: float, base: float, cost: float, failed: bool, expected: float) -> None:
    assert round_reward(before, after, base, cost, failed, RewardSettings()) == pytest.approx(expected, abs=1e-12)


def test_reward_of_a_batch_is_the_reward_of_each() -> None:
    rng = np.random.default_rng(0)
    before, after, base, cost = rng.uniform(0, 1, (4, 100))
    failed = rng.uniform(size=100) < 0.5
    batch = round_reward(before, after, base, cost, failed, RewardSettings(0.3, 0.2))
    each = [round_reward(*row, RewardSettings(0.3, 0.2)) for row in zip(before, after, base, cost, failed, strict=True)]
    assert np.array_equal(batch, np.array(each))


def test_step_reward_matches_the_formula() -> None:
    env = make(budget={"limit": 50_000}, price=0.5)
    env.reset(seed=0)
    base = env.search.scorecards["base"].score
    _, reward, _, _, info = env.step(recipe_action(env, learning_rate=1e-3, steps=40, batch_size=16))
    assert info["round"]["charged"] == 40 * 160 + 100
    expected = (info["best_score"] - base) / (1 - base) - 0.5 * 6500 / 50_000
    assert reward == pytest.approx(expected, abs=1e-12)
    assert isinstance(reward, float)


def test_stop_ends_the_episode_at_no_cost() -> None:
    env = make()
    env.reset(seed=0)
    spent = env.search.ledger.spent
    observation, reward, terminated, truncated, info = env.step(env.encode_recipe(None))
    assert (reward, terminated, truncated, info["ended"]) == (0.0, True, False, "stop")
    assert env.search.ledger.spent == spent and "round" not in info
    assert env.observation_space.contains(observation)


@pytest.mark.parametrize(
    ("budget", "column", "reason"),
    [
        ({"limit": 1e7, "max_rounds": 2, "patience": 9}, 1, "rounds"),
        ({"limit": 1e7, "max_rounds": 9, "patience": 2}, 2, "patience"),
        ({"limit": 3000.0, "max_rounds": 9, "patience": 9}, 0, "budget"),
    ],
)
def test_the_end_is_visible_in_the_observation(budget: dict[str, Any], column: int, reason: str) -> None:
    env = make(budget=budget)
    env.reset(seed=0)
    for _ in range(9):  # 1e-2 only harms, so no round is a new best
        observation, _, terminated, truncated, info = env.step(recipe_action(env, learning_rate=1e-2, start="latest"))
        assert not truncated
        if terminated:
            break
        assert observation["budget"][column] > 0
    assert info["ended"] == reason
    if reason == "budget":
        assert env.search.ledger.left < 100 + 160  # less than the cheapest round
    else:
        assert observation["budget"][column] == 0.0
        assert env.search.rounds == 2


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


# Errors ---------------------------------------------------------------------------------------------------------------


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
        ({"space": DecisionSpace(("sft",), ("left",), {"sft": ("left",)})}, r"sources \('left', 'right'\).*differ"),
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


def test_rounds_that_cannot_begin_are_failures() -> None:
    class Broken(ScriptedTrainer):
        def begin(self, *args: Any, **settings: Any) -> Any:
            if self.launched == 0:
                self.launched += 1
                raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
            return super().begin(*args, **settings)

    env = make(trainer=Broken(), budget=AMPLE)
    env.reset(seed=0)
    kinds = [env.step(recipe_action(env))[4]["round"]["failure"] for _ in range(2)]
    assert (kinds[0]["cause"], kinds[0]["kind"], kinds[1]) == ("resources", "oom", None)


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


# The table in docs/environment.md -------------------------------------------------------------------------------------


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
