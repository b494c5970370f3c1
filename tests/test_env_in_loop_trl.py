"""Real rounds in the adjustable environments: bit-identical when left alone, changed when not, no thread left."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

from posttrain_gym.envs.full import FullEnv
from posttrain_gym.envs.in_loop import InLoopEnv
from posttrain_gym.envs.post_training import PostTrainingEnv
from posttrain_gym.inner_trainers.adjustments import CATALOGUE, catalogue_index
from posttrain_gym.inner_trainers.evaluation import Evaluator, smaller_benchmark
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.testing import ScriptedTrainer, TinyTask
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer
from posttrain_gym.meta_policies.sb3 import make_model
from tests.trl_fixtures import *  # noqa: F403

RECIPE = {"algorithm": "sft", "mix": {"bad": 0.25, "good": 0.75}, "steps": 6, "batch_size": 8, "learning_rate": 3e-3}


@pytest.fixture(scope="module")
def quick_trainer() -> TrlTrainer:
    return TrlTrainer(Evaluator(seeds=(0,), samples_per_seed=2, k=2))


def final_weights(env: Any) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = env.search.weights_of("latest").weights
    return weights


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("rank", [0, 4])
def test_left_alone_a_round_has_the_weights_of_the_recipe_environment(
    task: TinyTask, quick_trainer: TrlTrainer, rank: int
) -> None:
    """Quick evaluations in between change no bit either."""
    recipe = {**RECIPE, "lora_rank": rank}
    made = []
    for settings in ({"interval": 1}, {"interval": 2, "shaping": True, "quick_items": 4}):
        env = InLoopEnv(task, recipe=recipe, trainer=quick_trainer, **settings)
        env.reset(seed=0)
        terminated = False
        while not terminated:
            _, _, terminated, _, info = env.step(0)
        made.append((info["round"]["checkpoint"], info["round"]["score"], final_weights(env)))
        env.close()
    whole = PostTrainingEnv(task, space=env.space, trainer=quick_trainer)
    whole.reset(seed=0)
    info = whole.step(whole.encode_recipe(env.recipe))[4]
    expected = (info["round"]["checkpoint"], info["round"]["score"], final_weights(whole))
    for got in made:
        assert got[:2] == expected[:2]
        assert same(got[2], expected[2])


def test_an_adjusted_round_has_others_and_is_made_again_bit_for_bit(task: TinyTask, quick_trainer: TrlTrainer) -> None:
    env = InLoopEnv(task, recipe=RECIPE, trainer=quick_trainer, interval=2)
    env.reset(seed=0)
    env.step(0)
    env.step(0)
    alone = final_weights(env)
    env.reset(seed=0)
    env.step(catalogue_index("lr_half"))
    info = env.step(catalogue_index("mix_toward_2"))[4]
    assert info["round"]["adjustments"] == [[2, "lr_scale 0.5"], [4, "mix_toward 0.2 good"]]
    assert [row["learning_rate"] for row in info["round"]["curves"]] == [3e-3] * 2 + [1.5e-3] * 4
    adjusted = final_weights(env)
    assert not same(adjusted, alone)
    env.search.records.kept.pop(info["round"]["checkpoint"])
    assert same(final_weights(env), adjusted)


def test_masks_are_true_to_what_a_real_session_takes(task: TinyTask, quick_trainer: TrlTrainer) -> None:
    recipe = {**RECIPE, "steps": len(CATALOGUE) + 1}
    env = InLoopEnv(task, recipe=recipe, trainer=quick_trainer, interval=1, illegal="raise")
    env.reset(seed=0)
    taken = []
    for index, entry in enumerate(CATALOGUE):
        if entry.name == "stop":
            assert env.action_masks()[index]
        elif env.action_masks()[index]:
            observation, _, terminated, _, info = env.step(index)
            assert (info["adjustment"], terminated) == (entry.name, False)
            assert env.observation_space.contains(observation)
            taken.append(entry.name)
        else:
            with pytest.raises(ValueError, match="cannot be applied now"):
                env.step(index)
    assert {"none", "rollback", "lr_double", "batch_up", "mix_toward_1", "hardest_rows"} <= set(taken)
    assert not {"kl_up", "temperature_up", "generations_up", "mix_away_3", "lora_freeze"} & set(taken)
    env.close()


def test_the_check_passes_on_real_rounds(task: TinyTask, quick_trainer: TrlTrainer) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        env: Any = gym.make("PostTrain/InLoop-v0", task=task, recipe=RECIPE, trainer=quick_trainer, interval=2)
        check_env(env.unwrapped)
        env.close()


def test_a_policy_trains_on_real_rounds_and_leaves_no_thread(task: TinyTask, quick_trainer: TrlTrainer) -> None:
    env = InLoopEnv(task, recipe={**RECIPE, "steps": 4}, trainer=quick_trainer, interval=1, shaping=True, quick_items=2)
    model = make_model("maskable_ppo", env, 0, n_steps=10, batch_size=10, n_epochs=2)
    model.learn(20)
    assert model.num_timesteps == 20
    env.close()
    assert [t.name for t in threading.enumerate() if t.name == "posttrain-round"] == []


def test_a_real_search_has_both_halves(task: TinyTask, quick_trainer: TrlTrainer) -> None:
    env = FullEnv(task, trainer=quick_trainer, interval=5, budget={"limit": 1e6, "max_rounds": 2, "patience": 2})
    env.reset(seed=0)
    action = env.encode_recipe(env.space.recipe("sft", steps=10, batch_size=16, mix={"good": 1.0}))
    assert env.step(action)[4]["running"]["step"] == 5
    info = env.step(env.encode_adjustment(catalogue_index("lr_down")))[4]
    assert info["round"]["adjustments"] == [[5, "lr_scale 0.8"]]
    later = env.encode_recipe(env.space.recipe("sft", steps=10, batch_size=16, mix={"good": 1.0}, start="latest"))
    env.step(later)
    _, _, terminated, _, info = env.step(env.encode_adjustment(catalogue_index("stop")))
    assert terminated and (info["round"]["ended"], info["round"]["failure"]) == ("stopped", None)


def test_a_quick_evaluation_has_its_bound_and_moves_no_generator(task: TinyTask, quick_trainer: TrlTrainer) -> None:
    base = quick_trainer.base(task)
    session = quick_trainer.begin(task, Recipe.from_dict(RECIPE), base, 0)
    with pytest.raises(ValueError, match="no round is parked between two steps"):
        quick_trainer.quick_score(task, session, 4)
    session.advance(3)
    state = torch.get_rng_state()
    first, cost = quick_trainer.quick_score(task, session, 4)
    assert (first, torch.equal(torch.get_rng_state(), state)) == (quick_trainer.quick_score(task, session, 4)[0], True)
    bound = quick_trainer.quick_cost_bound(task, 4)
    for unit in ("train_tokens", "flops"):
        assert (
            0
            < cost.in_unit(unit)
            <= bound.in_unit(unit)
            < quick_trainer.evaluation_cost_bound(task, "validation").in_unit(unit)
        )
    session.close()
    with pytest.raises(ValueError, match="expected a session of TrlTrainer, got ScriptedSession"):
        scripted = ScriptedTrainer()
        other: Any = scripted.begin(task, Recipe("sft", {"good": 1.0}), _scored(base), 0)
        quick_trainer.quick_score(task, other, 4)


def _scored(base: Any) -> Any:
    from posttrain_gym.inner_trainers.base import Checkpoint

    return Checkpoint(base.id, {"scores": np.zeros(2)})


def test_a_smaller_benchmark_takes_its_items_from_each_dimension_in_turn(task: TinyTask) -> None:
    benchmark = task.built.benchmark
    for items, expected in ((1, ["early", "late"]), (3, ["early", "late", "early"]), (99, None)):
        smaller = smaller_benchmark(benchmark, items)
        assert expected is None or [item.dimension for item in smaller.validation] == expected
        assert len(smaller.validation) == (16 if expected is None else len(expected))
        assert (smaller.test, smaller.weights) == (benchmark.test, benchmark.weights)
