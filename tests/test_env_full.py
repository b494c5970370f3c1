"""`PostTrain/Full-v0`, and both adjustable environments in wrappers and under Stable-Baselines3's algorithms."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

from posttrain_gym.inner_trainers.adjustments import CATALOGUE_NAMES, STOP_ROUND, catalogue_index
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.testing import ScriptedFamily, ScriptedTrainer
from posttrain_gym.meta_policies.policy_file import TrainedPolicy, save_policy
from posttrain_gym.meta_policies.sb3 import make_model, wrap_for
from posttrain_gym.wrappers import DiscretizeAction, FlattenAction
from tests.adjustable_env import RECIPE, full, in_loop, play
from tests.scripted_env import AMPLE, recipe_action

NONE_ALONE = [name == "none" for name in CATALOGUE_NAMES]


def adjusted(env: Any, name: str) -> dict[str, Any]:
    return dict(env.encode_adjustment(catalogue_index(name)))


# Two halves -----------------------------------------------------------------------------------------------------------


def test_a_recipe_begins_a_round_and_adjustments_carry_it_on() -> None:
    env = full(interval=5, budget=AMPLE)
    observation, info = env.reset(seed=0)
    assert not (observation["phase"].any() or observation["recipe"].any() or "running" in info)
    action = recipe_action(env, learning_rate=1e-3, steps=20, batch_size=16)
    observation, reward, terminated, _, info = env.step(action)
    assert (observation["phase"][0], reward, terminated, info["running"]["step"]) == (1.0, 0.0, False, 5)
    recipe = env.space.recipe("sft", learning_rate=1e-3, steps=20, batch_size=16)
    assert np.array_equal(observation["recipe"], env.space.to_vector(recipe))
    for name, step in (("lr_half", 10), ("none", 15)):
        observation, reward, _, _, info = env.step(adjusted(env, name))
        assert (observation["phase"][0], reward, info["running"]["step"]) == (1.0, 0.0, step)
    observation, reward, terminated, _, info = env.step(adjusted(env, "none"))
    assert (observation["phase"][0], terminated, info["round"]["steps"]) == (0.0, False, 20)
    assert [row["learning_rate"] for row in info["round"]["curves"]] == [1e-3] * 5 + [5e-4] * 15
    assert reward == pytest.approx(
        (info["best_score"] - info["base_score"]) / (1 - info["base_score"]) - 0.1 * 3300 / 1e7
    )
    assert env.step(env.encode_recipe(None))[2]


def test_the_mask_of_the_half_that_is_not_in_use_has_one_choice() -> None:
    env = full(interval=5, budget=AMPLE)
    assert env.action_masks().tolist() == [True] * (37 + 3 + 3)
    env.reset(seed=0)
    assert list(env.action_space.spaces) == ["adjustment", "algorithm", "mix", "parameters", "start"]
    assert env.action_masks().tolist() == [*NONE_ALONE, True, True, True, True, True, True]
    env.step(recipe_action(env))
    masks = env.choice_masks()
    assert masks["adjustment"].sum() > 10
    assert (masks["algorithm"].tolist(), masks["start"].tolist()) == ([True, False, False], [True, False, False])


def test_the_half_that_is_not_in_use_is_ignored() -> None:
    env, other = full(interval=5, budget=AMPLE), full(interval=5, budget=AMPLE)
    first = recipe_action(env, steps=20)
    noisy = {**recipe_action(env, "grpo", steps=50, learning_rate=1e-2), "start": 2}
    quiet = play(env, [first, adjusted(env, "lr_up"), first])
    loud = play(other, [{**first, "adjustment": 36}, {**noisy, "adjustment": catalogue_index("lr_up")}, first])
    assert quiet == loud


def test_a_search_ends_only_between_rounds() -> None:
    env = full(interval=10, budget={"limit": 1e6, "max_rounds": 2, "patience": 2})
    env.reset(seed=0)
    ends = []
    for name in ("none", "stop"):
        env.step(recipe_action(env, steps=30))
        ends.append(env.step(adjusted(env, name))[2])
        if name == "none":
            ends.append(env.step(adjusted(env, "none"))[2])
    assert ends == [False, False, True]
    assert [outcome.report.ended for outcome in env.search.outcomes] == ["finished", "stopped"]
    with pytest.raises(ValueError, match=r"the episode is over \(rounds\)"):
        env.step(recipe_action(env))


def test_equal_rounds_are_trained_each_time_as_their_decisions_are_not_known_ahead() -> None:
    env = full(interval=10, budget=AMPLE)
    env.reset(seed=0)
    scores = []
    for name in ("none", "lr_half", "none"):
        env.step(recipe_action(env, steps=20, start="base"))
        scores.append(env.step(adjusted(env, name))[4]["round"]["score"])
    assert env.trainer.launched == 3  # type: ignore[attr-defined]
    assert scores[0] == scores[2] != scores[1]
    assert not any(outcome.report.cached for outcome in env.search.outcomes)


def test_an_adjusted_round_never_answers_for_a_plain_one() -> None:
    env = full(interval=10, budget=AMPLE)
    env.reset(seed=0)
    env.step(recipe_action(env, steps=20, start="base"))
    env.step(adjusted(env, "mix_toward_1"))
    outcome = env.search.run(env.space.recipe("sft", steps=20, start="base"))
    assert (outcome.report.cached, env.trainer.launched) == (False, 2)  # type: ignore[attr-defined]
    assert env.search.run(env.space.recipe("sft", steps=20, start="base")).report.cached


def test_a_later_round_starts_from_the_checkpoint_of_an_adjusted_one() -> None:
    env = full(interval=10, budget=AMPLE)
    env.reset(seed=0)
    env.step(recipe_action(env, steps=20, start="base"))
    made = env.step(adjusted(env, "lr_up"))[4]["round"]["checkpoint"]
    env.step(recipe_action(env, steps=20, start="latest"))
    assert env.step(adjusted(env, "none"))[4]["round"]["start"] == made


def test_a_round_that_fails_at_once_is_settled_in_its_first_step() -> None:
    env = full(interval=5, budget=AMPLE, trainer=ScriptedTrainer(faults={0: RuntimeError("CUDA out of memory")}))
    env.reset(seed=0)
    observation, reward, terminated, _, info = env.step(recipe_action(env))
    assert (float(observation["phase"][0]), reward, terminated) == (0.0, -0.1, False)
    assert info["round"]["failure"]["kind"] == "oom"
    assert env.step(recipe_action(env))[4]["running"]["step"] == 5


def test_shaping_over_a_whole_search_adds_up_to_nothing() -> None:
    settings: dict[str, Any] = {"interval": 6, "budget": AMPLE}
    plain, shaped = full(**settings), full(**settings, shaping=True, discount=1.0)
    names = ("lr_half", "none", "lr_double", "none", "none")
    rewards = []
    for env in (plain, shaped):
        env.reset(seed=2)
        got = []
        for _ in range(2):
            got.append(env.step(recipe_action(env, steps=30, start="best"))[1])
            for name in names:
                if env.asks_for_recipe:
                    break
                got.append(env.step(adjusted(env, name))[1])
        rewards.append(got)
    quick = 10 * sum("quick" in purpose for purpose, _ in shaped.search.ledger.entries)
    assert quick > 0
    assert sum(rewards[1]) + 0.1 * quick / 1e7 == pytest.approx(sum(rewards[0]), abs=1e-12)
    assert rewards[0] != rewards[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"adjustment": 37}, r"action\['adjustment'\]: expected an integer in \[0, 36\], got 37"),
        ({"algorithm": 3}, r"action\['algorithm'\]"),
        ({"mix": np.array([0.0, np.nan])}, r"action\['mix'\].*finite"),
    ],
)
def test_actions_outside_the_space_are_refused_in_both_phases(change: dict[str, Any], message: str) -> None:
    env = full(budget=AMPLE)
    env.reset(seed=0)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            env.step({**recipe_action(env), **change})
        env.step(recipe_action(env))
    with pytest.raises(ValueError, match="expected a mapping with keys"):
        env.step({k: v for k, v in recipe_action(env).items() if k != "adjustment"})


# Wrappers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", [FlattenAction, DiscretizeAction])
def test_wrapped_environments_pass_the_check_and_rebuild_from_their_spec(wrapper: Any) -> None:
    env: Any = wrapper(gym.make("PostTrain/Full-v0", task=ScriptedFamily(), interval=4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_env(env)
    assert gym.make(env.spec).action_space == env.action_space


def test_the_discrete_wrapper_has_a_head_of_adjustments_and_one_choice_in_the_other_heads_while_a_round_runs() -> None:
    env: Any = DiscretizeAction(full(interval=5, budget=AMPLE))
    env.reset(seed=0)
    assert env.action_space.nvec.tolist() == [3, 3, 3, 3, 3, 5, 2, 5, 37]
    action = env.encode_recipe(full().space.recipe("sft"))
    assert action[-1] == 0
    mask = env.action_masks()
    assert mask.shape == (64,) and mask[-37:].tolist() == NONE_ALONE and mask[:-37].sum() > 20
    env.step(action)
    mask = env.action_masks()
    heads = np.split(mask[:-37], np.cumsum([3, 3, 3, 3, 3, 5, 2]))
    assert [int(head.sum()) for head in heads] == [1] * 8 and all(head[0] for head in heads)
    assert mask[-37:].sum() > 10
    info = env.step(np.array([0] * 8 + [catalogue_index("lr_half")]))[4]
    assert (info["adjustment"], info["running"]["settings"]["learning_rate_factor"]) == ("lr_half", 0.5)


@pytest.mark.parametrize("make", [full, in_loop])
def test_the_flat_wrapper_never_acts_illegally(make: Callable[..., Any]) -> None:
    env = FlattenAction(make(interval=3, budget=AMPLE, illegal="raise"))
    env.reset(seed=0)
    for number in range(150):
        _, _, terminated, _, info = env.step(env.action_space.sample())
        assert info["illegal_count"] == 0
        if terminated:
            env.reset(seed=number)


def test_the_flat_wrapper_takes_the_largest_legal_preference() -> None:
    env = FlattenAction(in_loop(), stop_reluctance=0.5)
    env.reset(seed=0)
    assert env.action_space.shape == (37,)
    values = np.full(37, -1.0, np.float32)
    values[[catalogue_index("kl_up"), STOP_ROUND, catalogue_index("lr_up")]] = 1.0, 0.9, 0.5
    assert env.action(values) == catalogue_index("lr_up")  # KL is illegal here, and stop held back
    values[STOP_ROUND] = 1.0
    values[catalogue_index("lr_up")] = 0.4
    assert env.action(values) == STOP_ROUND


def test_a_discrete_action_needs_no_discrete_wrapper() -> None:
    with pytest.raises(ValueError, match="the action of InLoopEnv is a Discrete already; leave the wrapper out"):
        DiscretizeAction(in_loop())
    with pytest.raises(ValueError, match="this environment is given its recipe"):
        FlattenAction(in_loop()).encode_recipe(Recipe.from_dict(RECIPE))


# Stable-Baselines3 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ["maskable_ppo", "ppo", "recurrent_ppo"])
@pytest.mark.parametrize("make", [in_loop, full])
def test_algorithms_train_on_both(algo: str, make: Callable[..., Any]) -> None:
    illegal = []

    class Counted(gym.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            result = self.env.step(action)
            illegal.append(result[4]["illegal"])
            return result

    env = Counted(wrap_for(algo, make(interval=5)))
    model = make_model(algo, env, 0, n_steps=64, batch_size=64, n_epochs=1)
    model.learn(192)
    assert model.num_timesteps == len(illegal) == 192
    assert any(illegal) == (make is in_loop and algo != "maskable_ppo")  # those take no masks
    assert np.isfinite(model.policy.action_net.weight.detach().numpy()).all()


def test_a_policy_learns_to_correct_a_learning_rate_that_is_ten_times_too_low() -> None:
    settings: dict[str, Any] = {"interval": 6, "recipe": {**RECIPE, "steps": 24, "learning_rate": 1e-4}}
    env = in_loop(**settings, price=0.0)
    model = make_model("maskable_ppo", env, 0, n_steps=96, batch_size=96, learning_rate=1e-2)
    model.learn(768)

    def gain(choose: Callable[[Any], Any], seed: int) -> float:
        observation, info = env.reset(seed=seed)
        while "running" in info:
            observation, _, _, _, info = env.step(choose(observation))
        return float(info["round"]["gain"])

    def learned(observation: Any) -> int:
        return int(model.predict(observation, deterministic=True, action_masks=env.action_masks())[0])

    with_it, alone = (np.array([gain(choose, seed) for seed in range(10)]) for choose in (learned, lambda _: 0))
    assert (with_it > alone).all()
    assert with_it.mean() > alone.mean() + 0.02


def test_a_saved_policy_is_used_again_on_rounds_of_another_recipe(tmp_path: Path) -> None:
    env = in_loop()
    for algo in ("maskable_ppo", "recurrent_ppo"):
        model = make_model(algo, wrap_for(algo, env), 0)
        path = save_policy(model, tmp_path / f"{algo}.zip", algo, env, "scripted")
        other = in_loop(recipe={**RECIPE, "steps": 30, "learning_rate": 3e-3})
        policy = TrainedPolicy(path, other)
        observation, info = other.reset(seed=0)
        action, state = policy.predict(observation, action_masks=info["action_mask"], deterministic=True)
        assert info["action_mask"][int(action)] or algo == "recurrent_ppo"
        assert (state is not None) == (algo == "recurrent_ppo")
        with pytest.raises(ValueError, match="trained in an environment of --env in-loop, this one is of --env full"):
            TrainedPolicy(path, full())


def scripted_worker(limit: float) -> Callable[[], Any]:
    def make() -> Any:
        return DiscretizeAction(full(interval=5, budget=limit))

    return make


def test_workers_in_other_processes_do_the_same() -> None:
    actions = np.array([[1, 0, 1, 1, 2, 2, 0, 1, 0], [0] * 8 + [catalogue_index("lr_half")], [0] * 9, [0] * 9])
    seen = []
    for kind, settings in ((DummyVecEnv, {}), (SubprocVecEnv, {"start_method": "spawn"})):
        vector: Any = kind([scripted_worker(1e6)], **settings)
        vector.seed(3)
        rows = [vector.reset()]
        masks = [np.stack(vector.env_method("action_masks"))]
        for action in actions:
            observation, rewards, dones, _ = vector.step(action[None])
            rows.append({**observation, "rewards": rewards.astype(np.float32), "dones": dones})
            masks.append(np.stack(vector.env_method("action_masks")))
        vector.close()
        seen.append((rows, masks))
    for first, second in zip(seen[0][0], seen[1][0], strict=True):
        assert all(np.array_equal(first[name], second[name]) for name in first)
    assert all(np.array_equal(a, b) for a, b in zip(seen[0][1], seen[1][1], strict=True))
