"""Rounds in the environment: seeds, observations, vectors, reuse and rewards, with values worked by hand."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from sb3_contrib import MaskablePPO
from stable_baselines3 import PPO

from posttrain_gym.envs.reward import RewardSettings, round_reward
from posttrain_gym.inner_trainers.base import Checkpoint, Cost, Scorecard
from posttrain_gym.inner_trainers.tasks import InnerTask
from posttrain_gym.inner_trainers.testing import ScriptedFamily, ScriptedTask, ScriptedTrainer
from posttrain_gym.wrappers import DiscretizeAction, FlattenAction
from tests.scripted_env import AMPLE, make, recipe_action

# C09: seeds ----------------------------------------------------------------------------------------------------------


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


# C05: observations ---------------------------------------------------------------------------------------------------


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


# C07: vector environments --------------------------------------------------------------------------------------------


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


# D03: an equal round is not bought twice -----------------------------------------------------------------------------


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


# Reward and termination ----------------------------------------------------------------------------------------------


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
