"""What is chosen step by step under the mask is what is trained, to the bin; nothing is illegal or repaired."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import TimeLimit
from sb3_contrib import MaskablePPO
from stable_baselines3.common.env_checker import check_env as check_env_sb3

from posttrain_gym.envs.decision_space import DecisionSpace, Parameter
from posttrain_gym.envs.post_training import PostTrainingEnv
from posttrain_gym.envs.space_masks import DecisionOrder
from posttrain_gym.inner_trainers.recipe import STARTS
from posttrain_gym.inner_trainers.tasks.letters import SOURCES
from posttrain_gym.inner_trainers.testing import ScriptedFamily
from posttrain_gym.inner_trainers.trl.algorithms import ALGORITHMS, check_recipe
from posttrain_gym.wrappers import AutoregressiveAction, DiscretizeAction, FlattenAction
from posttrain_gym.wrappers.discretize_action import coordinate_of

from .random_spaces import random_space
from .scripted_env import AMPLE, make

LETTERS = tuple(sorted(SOURCES))
ENDLESS = {"limit": 1e15, "max_rounds": 100_000, "patience": 100_000}
CONSTRAINED = DecisionSpace(
    tuple(ALGORITHMS),
    LETTERS,
    dict.fromkeys(ALGORITHMS, LETTERS),
    parameters={
        "batch_size": Parameter(4, 64, "log", integer=True),
        "epochs": Parameter(1, 3, integer=True),
        "gradient_accumulation": Parameter(choices=(1, 2, 4)),
        "kl_coef": Parameter(0.01, 0.5, "log"),
        "learning_rate": Parameter(3e-5, 1e-2, "log"),
        "lora_rank": Parameter(choices=(0, 8)),
        "loss": Parameter(choices=("default", "nll", "dft", "ipo", "grpo")),
        "num_generations": Parameter(choices=(2, 4, 8)),
        "packing": Parameter(choices=(False, True)),
    },
    mix_bounds={LETTERS[0]: (0.1, 0.6)},
    conditions={
        "kl_coef": "algorithm in [grpo, ppo, rloo]",
        "loss": "algorithm in [sft, dpo, grpo]",
        "num_generations": "algorithm in [grpo, rloo, rft]",
        "packing": "algorithm == sft",
    },
    constraints=(
        "batch_size * gradient_accumulation <= 96",
        "if algorithm == dpo then learning_rate <= 1e-3",
        "if lora_rank == 0 then learning_rate <= 3e-3",
        "if algorithm in [grpo, rloo] and kl_coef < 0.05 then num_generations >= 4",
        "if start == base then exclude kto",
    ),
)


def autoregressive(**settings: Any) -> Any:
    return AutoregressiveAction(make(**{"budget": AMPLE, **settings}), bins=4, mix_levels=3)


def test_the_heads_come_in_order_and_the_round_runs_with_the_last() -> None:
    env = autoregressive()
    observation, info = env.reset(seed=0)
    assert info["deciding"] == env.head == "algorithm"
    assert env.action_masks().tolist() == [True, True, True, False]
    spent = env.unwrapped.search.ledger.spent
    for choice, head in ((2, "start"), (1, "mix.left"), (2, "mix.right"), (1, "batch_size"), (1, "num_generations")):
        observation, reward, terminated, truncated, info = env.step(choice)
        assert (reward, terminated, truncated, info["deciding"], "round" in info) == (0.0, False, False, head, False)
        assert observation["decision"][list(env._sizes).index(head)] == 1.0
    assert env.unwrapped.search.ledger.spent == spent
    env.step(1)
    env.step(0)
    observation, reward, _, _, info = env.step(3)
    recipe = info["round"]["recipe"]
    assert (recipe["algorithm"], recipe["start"], recipe["batch_size"], recipe["num_generations"]) == (
        "sft",
        "best",
        32,
        8,
    )
    assert recipe["mix"] == {"left": 0.667, "right": 0.333}
    assert (recipe["learning_rate"], recipe["steps"]) == (3e-5, 60)
    assert reward != 0.0 and info["deciding"] == "algorithm"
    assert observation["decision"][:7].tolist() == [1.0] + [0.0] * 6


def test_stop_acts_at_once_and_an_illegal_choice_becomes_the_nearest_legal_one() -> None:
    env = autoregressive()
    env.reset(seed=0)
    info = env.step(3)[4]  # there are two algorithms
    assert (info["repaired"], info["deciding"]) == (True, "start")
    env.reset(seed=0)
    assert env.step(0)[2:4] == (True, False)
    with pytest.raises(ValueError, match=r"the episode is over \(stop\)"):
        env.step(1)
    for action in (-1, 4, 1.5, True):
        env.reset(seed=0)
        with pytest.raises(ValueError, match="action: expected an integer"):
            env.step(action)


@pytest.mark.parametrize("wrapper", ["autoregressive", "discretize", "flatten"])
def test_ten_thousand_decisions_under_the_mask_give_no_illegal_round(wrapper: str) -> None:
    """Recipes are held to what TRL rounds are held to, on instances of the letters task, for all nine algorithms."""
    env: Any = PostTrainingEnv("letters", space=CONSTRAINED, budget=ENDLESS, instances=(0, 3))
    tried: list[Any] = []

    def note(search: Any, recipe: Any) -> Any:
        tried.append((search, recipe))
        raise _Decided

    rng = np.random.default_rng(0)
    total = 0
    for instance in (0, 3):
        env.reset(seed=1, options={"instance": instance})
        made: dict[str, Any] = {"autoregressive": AutoregressiveAction, "discretize": DiscretizeAction}
        wrapped: Any = FlattenAction(env) if wrapper == "flatten" else made[wrapper](env, bins=4)
        if wrapper == "autoregressive":
            wrapped._begin(env._observation(), env._info(None))
        wrapped.action_space.seed(instance)
        while total < (5_000 if instance == 0 else 10_000):
            with env.rounds_run_by(note):
                if wrapper == "autoregressive":
                    total += _decide_without_training(wrapped, rng)
                else:
                    total += _sampled_without_training(wrapped, masked=wrapper == "discretize")
            env.search.stopped = False
    assert len(tried) > (total / 15 if wrapper == "autoregressive" else total / 2)
    assert {recipe.algorithm for _, recipe in tried} == set(ALGORITHMS)
    for search, recipe in tried:
        check_recipe(search.task, recipe)
        search.space.encode(recipe)  # refuses what breaks a bound or a constraint


class _Decided(Exception):
    """A round would have been run now."""


def _sampled_without_training(wrapped: Any, masked: bool) -> int:
    mask = None
    if masked:
        heads = np.cumsum(wrapped.action_space.nvec)[:-1]
        mask = tuple(np.split(wrapped.action_masks().astype(np.int8), heads))
    with contextlib.suppress(_Decided):
        wrapped.step(wrapped.action_space.sample(**({"mask": mask} if masked else {})))
    return 1


def _decide_without_training(wrapped: Any, rng: np.random.Generator) -> int:
    base, steps = wrapped.unwrapped, 0
    try:
        while True:
            legal = np.flatnonzero(wrapped.action_masks())
            choice = int(rng.choice(legal[1:] if wrapped.head == "algorithm" else legal))
            steps += 1
            wrapped.step(choice)
    except _Decided:
        chosen = dict(wrapped._chosen)
        recipe = base.space.decode(wrapped._action())
        for name in base.space.parameters:  # what was chosen is what is trained, to the bin
            if name in chosen and name != "epochs":
                assert getattr(recipe, name) == wrapped._values(name)[chosen[name]], name
        wrapped._begin(*wrapped._last)
    return steps


def test_contracts_and_learning() -> None:
    env = AutoregressiveAction(gym.make("PostTrain/Recipe-v0", task=ScriptedFamily()))
    check_env(env, skip_render_check=True)
    check_env_sb3(env)
    again: Any = gym.make(env.spec)  # type: ignore[arg-type]
    assert (again.action_space, again.observation_space) == (env.action_space, env.observation_space)
    model = MaskablePPO("MultiInputPolicy", autoregressive(), n_steps=32, batch_size=32, n_epochs=2, seed=0)
    model.learn(64)
    limited = TimeLimit(autoregressive(), 3)
    limited.reset(seed=0)
    assert [limited.step(1)[3] for _ in range(3)] == [False, False, True]  # each choice counts


def test_where_it_does_not_fit_it_is_refused() -> None:
    for name in ("PostTrain/Full-v0",):
        with pytest.raises(ValueError, match="also takes adjustments; wrap PostTrain/Recipe-v0"):
            AutoregressiveAction(gym.make(name, task=ScriptedFamily()))
    with pytest.raises(ValueError, match="several steps for one"):
        autoregressive().encode_recipe(None)
    with pytest.raises(ValueError, match="bins: expected an integer"):
        AutoregressiveAction(make(), bins=1)


def test_a_knob_whose_legal_values_lie_between_its_bins_takes_the_one_nearest_to_its_middle() -> None:
    knobs = {
        "learning_rate": Parameter(1e-5, 1e-3, "log"),
        "steps": Parameter(10, 20, integer=True),
    }
    space = replace(make().space, parameters=knobs, constraints=("learning_rate in [2e-5, 7e-4]",))
    env = AutoregressiveAction(make(budget=AMPLE, space=space, reuse=False), bins=4)
    rng = np.random.default_rng(0)
    rates = set()
    env.reset(seed=0)
    for _ in range(200):
        mask = env.action_masks()
        assert mask.any()
        assert env.head != "learning_rate"
        choice = int(rng.choice(np.flatnonzero(mask)[1:] if env.head == "algorithm" else np.flatnonzero(mask)))
        info = env.step(choice)[4]
        if "round" in info:
            assert info["round"]["failure"] is None
            rates.add(info["round"]["recipe"]["learning_rate"])
    assert rates == {2e-5}  # by their logarithms, nearer to 1e-4 than 7e-4 is


@pytest.mark.parametrize("seed", range(30))
def test_on_random_spaces_every_decision_is_completed(seed: int) -> None:
    space = random_space(seed)
    rng = np.random.default_rng(seed)
    legal = [name for name, problem in space.problems.items() if problem is None]
    for _ in range(20):
        order = DecisionOrder(space, str(rng.choice(legal)))
        starts = np.flatnonzero(order.legal_starts())
        assert len(starts)
        order.choose_start(STARTS[int(rng.choice(starts))])
        for knob in order.knobs:
            if not order.uses(knob):
                continue
            parameter = space.parameters[knob]
            count = len(parameter.choices) or 4
            values = [parameter.decode(coordinate_of(parameter, b, count)) for b in range(count)]
            found = np.flatnonzero(order.legal_values(knob, values))
            order.choose(knob, values[int(rng.choice(found))] if len(found) else order.nearest_legal(knob))


def test_a_choice_is_not_refused_for_what_another_knob_holds() -> None:
    """Of `loss` each algorithm takes its own; the middle one is refused for most, and no reason to refuse a rank."""
    env = PostTrainingEnv("letters", space=CONSTRAINED, budget=ENDLESS, instances=(0,))
    assert {name: why for name, why in env.space.problems.items() if why is not None and name != "distill"} == {}
    assert env.space.facts is not None
    assert set(env.space.facts.refused["dpo"]) == {"loss"}
    assert set(env.space.facts.refused["dpo"]["loss"]) == {"nll", "dft", "grpo"}
    assert env.space.recipe("dpo", loss="ipo", lora_rank=8).loss == "ipo"


def test_masks_follow_the_constraints_of_the_running_task() -> None:
    space = replace(make().space, constraints=("if algorithm == sft then batch_size * num_generations <= 64",))
    env = AutoregressiveAction(make(budget=AMPLE, space=space), bins=4)
    env.reset(seed=0)
    for choice in (2, 1, 1, 1):
        env.step(choice)
    assert env.head == "learning_rate"  # 16 x 4 alone is legal, so neither is asked
    assert (env._chosen["batch_size"], env._chosen["num_generations"]) == (0, 0)
