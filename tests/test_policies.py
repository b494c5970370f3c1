"""Heuristics and trained models share `predict`: in every action space, alone and in batches, saved and loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from sb3_contrib import MaskablePPO
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

from posttrain_gym.envs.decision_space import DecisionSpace, Parameter
from posttrain_gym.envs.post_training import PostTrainingEnv
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.testing import ScriptedFamily, ScriptedTask
from posttrain_gym.meta_policies.catalogue import check_policy_name, load_policy
from posttrain_gym.meta_policies.heuristics import (
    HEURISTICS,
    FixedPolicy,
    GreedySftThenGrpoPolicy,
    RandomPolicy,
    ShortlistPolicy,
    View,
    default_recipe,
)
from posttrain_gym.meta_policies.policy_file import TrainedPolicy, require_legal_choice, save_policy
from posttrain_gym.meta_policies.sb3 import make_model, sb3_algorithm, wrap_for
from posttrain_gym.wrappers import DiscretizeAction, FlattenAction

BUDGET = {"limit": 60_000, "max_rounds": 6, "patience": 6}
STACKS = {"base": lambda env: env, "flatten": FlattenAction, "discretize": DiscretizeAction}
ALL_LEGAL = np.ones(6, bool)


def base(**settings: Any) -> PostTrainingEnv:
    return PostTrainingEnv(**{"task": ScriptedFamily(), "budget": BUDGET, **settings})


def run_episode(env: Any, policy: Any, seed: int, masks: bool = True) -> tuple[float, list[dict[str, Any]]]:
    """Returns the reward and the rounds of one episode."""
    observation, _ = env.reset(seed=seed)
    reward, rounds, over, state = 0.0, [], False, None
    while not over:
        extra = {"action_masks": env.get_wrapper_attr("action_masks")()} if masks else {}
        action, state = policy.predict(observation, state, deterministic=True, **extra)
        observation, gained, terminated, truncated, info = env.step(action)
        reward += gained
        over = terminated or truncated
        if "round" in info:
            rounds.append(info["round"])
    return reward, rounds


def view(rounds: int = 0, last: str | None = None, gain: float = 0.0, failed: bool = False, **changes: Any) -> View:
    values = {"last_recipe": np.zeros(0), "legal": ("grpo", "sft"), **changes}
    return View(rounds=rounds, last_algorithm=last, last_gain=gain, last_failed=failed, **values)


# Heuristics -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(HEURISTICS))
@pytest.mark.parametrize("stack", sorted(STACKS))
def test_every_heuristic_plays_in_every_action_space(name: str, stack: str) -> None:
    env = STACKS[stack](base())
    _, rounds = run_episode(env, HEURISTICS[name](env, seed=0), seed=0)
    assert rounds
    kinds = [(entry["failure"] or {}).get("kind") for entry in rounds]
    assert "unaffordable" not in kinds and "no_data" not in kinds


@pytest.mark.parametrize("name", sorted(HEURISTICS))
@pytest.mark.parametrize("stack", sorted(STACKS))
def test_every_heuristic_runs_in_sb3s_evaluation(name: str, stack: str) -> None:
    vector = DummyVecEnv([lambda: Monitor(STACKS[stack](base())) for _ in range(2)])
    policy: Any = HEURISTICS[name](vector.envs[0], seed=0)
    vector.seed(0)
    rewards, lengths = evaluate_policy(policy, vector, n_eval_episodes=4, return_episode_rewards=True)
    assert isinstance(rewards, list) and isinstance(lengths, list)
    assert len(rewards) == 4 and np.isfinite(rewards).all()
    assert max(lengths) <= 7  # six rounds, and a stop


@pytest.mark.parametrize("stack", sorted(STACKS))
def test_a_batch_gets_the_actions_of_its_members(stack: str) -> None:
    env = STACKS[stack](base())
    policy = GreedySftThenGrpoPolicy(env)
    first, _ = env.reset(seed=0)
    second = env.step(env.get_wrapper_attr("encode_recipe")(env.unwrapped.space.recipe("sft", learning_rate=1e-2)))[0]
    batch = {name: np.stack([first[name], second[name]]) for name in first}
    actions, _ = policy.predict(batch, action_masks=np.stack([ALL_LEGAL, ALL_LEGAL]))
    for action, single in zip(actions, (first, second), strict=True):
        alone, _ = policy.predict(single, action_masks=ALL_LEGAL)
        assert repr(action) == repr(alone)


def test_heuristics_refuse_other_environments() -> None:
    with pytest.raises(ValueError, match="expected a PostTrain environment, got CartPoleEnv"):
        RandomPolicy(gym.make("CartPole-v1"))


def test_greedy_switches_when_a_round_stops_gaining() -> None:
    policy = GreedySftThenGrpoPolicy(base())
    only_sft: dict[str, Any] = {"legal": ("sft",)}
    only_grpo: dict[str, Any] = {"legal": ("grpo",)}
    script: list[tuple[View, str | None]] = [
        (view(), "sft"),
        (view(1, "sft", 0.05), "sft"),
        (view(2, "sft", 0.0), "grpo"),
        (view(2, "sft", -0.05), "grpo"),
        (view(2, "sft", 0.05, failed=True), "grpo"),
        (view(3, "grpo", 0.01), "grpo"),
        (view(4, "grpo", 0.0), None),
        (view(4, "grpo", 0.01, failed=True), None),
        (view(**only_grpo), "grpo"),
        (view(1, "sft", 0.05, **only_grpo), "grpo"),
        (view(1, "sft", 0.05, **only_sft), "sft"),
        (view(1, "sft", 0.0, **only_sft), None),  # it would be the same round again
        (view(3, "grpo", 0.01, **only_sft), None),
        (view(legal=()), None),
    ]
    for number, (seen, expected) in enumerate(script):
        chosen = policy.choose(seen)
        assert (None if chosen is None else chosen.algorithm) == expected, number


def test_greedy_reads_gains_from_the_observation() -> None:
    env = base(budget={"limit": 1e6, "max_rounds": 20, "patience": 20})
    _, rounds = run_episode(env, GreedySftThenGrpoPolicy(env), seed=0)
    names = [entry["algorithm"] for entry in (r["recipe"] for r in rounds)]
    gains = [r["gain"] > 0 for r in rounds]
    switch = names.index("grpo")
    assert set(names[:switch]) == {"sft"} and set(names[switch:]) == {"grpo"}
    assert gains == [*[True] * (switch - 1), False, *[True] * (len(names) - switch - 1), False]


def test_shortlist_plays_in_order_and_stops() -> None:
    env = base(budget={"limit": 1e6, "max_rounds": 20, "patience": 20})
    recipes = [env.space.recipe(n, learning_rate=r) for n, r in (("sft", 1e-3), ("grpo", 3e-4), ("sft", 3e-3))]
    policy = ShortlistPolicy(env, recipes=recipes)
    _, rounds = run_episode(env, policy, seed=0)
    assert [entry["recipe"] for entry in rounds] == [recipe.to_dict() for recipe in recipes]
    assert env.search.ended() == "stop"


def test_shortlist_passes_over_what_is_illegal_without_playing_anything_twice() -> None:
    class NoPrompts(ScriptedTask):
        def sources(self) -> list[Any]:
            return [s for s in super().sources() if s.rows.pop("prompts")]  # type: ignore[attr-defined]

    env = base(task=NoPrompts(), budget={"limit": 1e6, "max_rounds": 20, "patience": 20})
    order = [("grpo", 1e-3), ("sft", 1e-3), ("grpo", 3e-4), ("sft", 3e-3), ("sft", 5e-3)]
    recipes = [env.space.recipe(name, learning_rate=rate) for name, rate in order]
    _, rounds = run_episode(env, ShortlistPolicy(env, recipes=recipes), seed=0)
    assert [entry["recipe"]["learning_rate"] for entry in rounds] == [1e-3, 3e-3, 5e-3]
    assert env.search.ended() == "stop"


def test_shortlist_refuses_a_recipe_that_stands_there_twice() -> None:
    env = base()
    recipe = env.space.recipe("sft")
    with pytest.raises(ValueError, match="entry 1 repeats an earlier one"):
        ShortlistPolicy(env, recipes=[recipe, recipe])


def test_default_shortlist_is_sft_and_grpo_at_two_rates() -> None:
    recipes = ShortlistPolicy(base()).recipes
    assert [recipe.algorithm for recipe in recipes] == ["sft", "grpo", "sft", "grpo"]
    assert recipes[0].learning_rate == recipes[1].learning_rate < recipes[2].learning_rate == recipes[3].learning_rate


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Recipe("sft", {"left": 1.0}, learning_rate=0.5), "learning_rate: 0.5 is outside"),
        (Recipe("sft", {"centre": 1.0}), "mix: 'centre' is not in the decision space"),
        (Recipe("sft", {"left": 1.0}, schedule="cosine"), "schedule: it is 'constant' throughout"),
        (Recipe("ppo", {"left": 1.0}), "algorithm: 'ppo' is not in the decision space"),
    ],
)
def test_recipes_outside_the_space_are_refused_at_once(recipe: Recipe, message: str) -> None:
    for make in (lambda: FixedPolicy(base(), recipe=recipe), lambda: ShortlistPolicy(base(), recipes=[recipe])):
        with pytest.raises(ValueError, match=message):
            make()


def test_fixed_repeats_its_recipe_while_it_is_legal() -> None:
    policy = FixedPolicy(base())
    assert policy.choose(view()) == policy.choose(view(5, "sft", -0.1)) == default_recipe(policy.space)
    assert default_recipe(policy.space).algorithm == "sft"
    assert policy.choose(view(legal=("grpo",))) is None


def test_random_is_reproducible_by_its_seed() -> None:
    def drawn(seed: int) -> list[Recipe | None]:
        policy = RandomPolicy(base(), seed)
        return [policy.choose(view()) for _ in range(20)]

    assert drawn(0) == drawn(0) != drawn(1)
    policy = RandomPolicy(base(), 0)
    assert {r.algorithm for r in (policy.choose(view(legal=("grpo",))) for _ in range(50)) if r} == {"grpo"}
    assert policy.choose(view(legal=())) is None


# Names ----------------------------------------------------------------------------------------------------------------


def test_unknown_names_get_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"policy: unknown 'rondom'\. Did you mean 'random'\?.*\.zip"):
        check_policy_name("rondom")
    with pytest.raises(ValueError, match=r"algo: unknown 'maskable-ppo'\. Did you mean 'maskable_ppo'"):
        sb3_algorithm("maskable-ppo")
    with pytest.raises(ValueError, match="no such file"):
        check_policy_name(str(tmp_path / "policy.zip"))
    policy, env = load_policy("random", base(), 3)
    assert isinstance(policy, RandomPolicy) and isinstance(env, PostTrainingEnv)


# Trained models -------------------------------------------------------------------------------------------------------

FRESH = """
import json, sys
import numpy as np
from posttrain_gym.envs.post_training import PostTrainingEnv
from posttrain_gym.inner_trainers.testing import ScriptedFamily
from posttrain_gym.meta_policies.catalogue import load_policy
env = PostTrainingEnv(ScriptedFamily(), budget=json.loads(sys.argv[2]))
policy, wrapped = load_policy(sys.argv[1], env, 0)
observation, _ = wrapped.reset(seed=5)
action, _ = policy.predict(observation, deterministic=True, action_masks=wrapped.get_wrapper_attr("action_masks")())
print(json.dumps(np.asarray(action).tolist()))
"""


@pytest.mark.parametrize("algo", ["maskable_ppo", "sac"])
def test_a_saved_policy_acts_the_same_in_a_fresh_process(tmp_path: Path, algo: str) -> None:
    env = wrap_for(algo, base())
    model = make_model(algo, env, 0)
    model.learn(32)
    path = save_policy(model, tmp_path / "deep" / "policy.zip", algo, env, "scripted")
    assert [file.name for file in path.parent.iterdir()] == ["policy.zip"]
    observation, _ = env.reset(seed=5)
    extra = {"action_masks": env.get_wrapper_attr("action_masks")()} if algo == "maskable_ppo" else {}
    expected, _ = model.predict(observation, deterministic=True, **extra)
    here, _ = TrainedPolicy(path, env).predict(observation, deterministic=True, **extra)
    assert np.array_equal(here, expected)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", FRESH, str(path), json.dumps(BUDGET)]
    there = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, timeout=120)
    assert json.loads(there.stdout) == expected.tolist()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    env = wrap_for("maskable_ppo", base())
    path = tmp_path_factory.mktemp("policy") / "policy.zip"
    return save_policy(make_model("maskable_ppo", env, 0), path, "maskable_ppo", env, "scripted")


def test_another_decision_space_is_refused_with_the_difference(saved: Path) -> None:
    narrow = DecisionSpace(("sft",), ("left", "right"), {"sft": ("left", "right")})
    with pytest.raises(ValueError, match=r"algorithms: the policy has \['grpo', 'sft'\], the environment \['sft'\]"):
        TrainedPolicy(saved, base(space=narrow))
    knobs = {"learning_rate": Parameter(1e-4, 1e-3, "log")}
    other = DecisionSpace(("grpo", "sft"), ("left", "right"), {n: ("left", "right") for n in ("grpo", "sft")}, knobs)
    with pytest.raises(ValueError, match=r"another decision space; parameters.learning_rate.low: the policy has"):
        TrainedPolicy(saved, base(space=other))
    with pytest.raises(ValueError, match=r"observation.history: the policy has \[4, "):
        TrainedPolicy(saved, base(history=2))


def test_a_policy_brings_the_arguments_of_its_wrapper(tmp_path: Path) -> None:
    env = DiscretizeAction(base(), bins=9)
    path = save_policy(make_model("maskable_ppo", env, 0), tmp_path / "p.zip", "maskable_ppo", env, "scripted")
    policy, wrapped = load_policy(str(path), base(), 0)
    assert policy.wrapper_arguments == {"bins": 9, "mix_levels": 3}
    assert wrapped.action_space == env.action_space == policy.model.action_space


def test_a_model_of_another_action_space_is_refused(tmp_path: Path) -> None:
    env = DiscretizeAction(base(), bins=9)
    model = make_model("maskable_ppo", DiscretizeAction(base(), bins=5), 0)
    path = save_policy(model, tmp_path / "p.zip", "maskable_ppo", env, "scripted")
    with pytest.raises(ValueError, match="made for another action space"):
        TrainedPolicy(path, base())
    with pytest.raises(ValueError, match=r"acts in DiscretizeAction, which this environment is not wrapped in"):
        save_policy(model, tmp_path / "q.zip", "maskable_ppo", base(), "scripted")


@pytest.mark.parametrize("damage", ["missing", "cut", "empty", "foreign", "no algorithm", "no facts", "no model"])
def test_files_that_are_no_policy_are_refused_by_name(saved: Path, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "broken.zip"
    facts = {"no algorithm": "{}", "no facts": '{"algo": "ppo"}', "foreign": None}
    if damage in ("cut", "empty"):
        data = saved.read_bytes()
        path.write_bytes(data[: len(data) // 2] if damage == "cut" else b"")
    elif damage == "no model":
        with zipfile.ZipFile(saved) as archive, zipfile.ZipFile(path, "w") as target:
            target.writestr("posttrain_gym.json", archive.read("posttrain_gym.json"))
    elif damage != "missing":
        with zipfile.ZipFile(path, "w") as target:
            target.writestr("posttrain_gym.json" if facts[damage] else "data.txt", facts[damage] or "hello")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=r"broken\.zip"):
            TrainedPolicy(path, base())


def test_a_mask_without_a_legal_choice_is_refused(saved: Path) -> None:
    env = DiscretizeAction(base())
    observation, _ = env.reset(seed=0)
    policy = TrainedPolicy(saved, env)
    mask = env.action_masks()
    with pytest.raises(ValueError, match="head 0 has no legal choice among its 3"):
        policy.predict(observation, action_masks=np.zeros_like(mask))
    mask[3:6] = False
    with pytest.raises(ValueError, match="head 1 has no legal choice among its 3"):
        policy.predict(observation, action_masks=mask)
    with pytest.raises(ValueError, match="expected 27 choices, got shape"):
        policy.predict(observation, action_masks=mask[:5])
    batch = np.stack([env.action_masks(), np.zeros_like(mask)])
    with pytest.raises(ValueError, match="head 0"):
        require_legal_choice(batch, env.action_space)
    require_legal_choice(np.array([False, True]), gym.spaces.Discrete(2))
    with pytest.raises(ValueError, match="head 0"):
        require_legal_choice(np.array([False, False]), gym.spaces.Discrete(2))


class ManyActions(gym.Env[np.ndarray, np.int64]):
    """1,400 actions of which one is legal, another each step; an illegal pick is an error."""

    observation_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(1400)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._legal = int(self.np_random.integers(1400))
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        assert int(action) == self._legal
        self._legal = int(self.np_random.integers(1400))
        self.steps += 1
        return np.zeros(1, np.float32), 1.0, self.steps == 64, False, {}

    def action_masks(self) -> np.ndarray:
        mask = np.zeros(1400, bool)
        mask[self._legal] = True
        return mask


def test_one_legal_choice_among_1400_is_the_one_that_is_picked() -> None:
    env: Any = ManyActions()
    model = MaskablePPO("MlpPolicy", env, n_steps=128, batch_size=64, seed=0, device="cpu")
    model.learn(256)  # `step` asserts
    observation, _ = env.reset(seed=0)
    illegal = 0
    for _ in range(256):
        mask = env.action_masks()
        require_legal_choice(mask, env.action_space)
        action, _ = model.predict(observation, action_masks=mask)
        illegal += not mask[int(action)]
        observation, *_ = env.step(action)
    assert illegal == 0


def test_maskable_ppo_learns_the_scripted_task() -> None:
    """The mean reward of 60 unseen instances rises above random's by far more than its standard error."""
    budget = {"limit": 40_000, "max_rounds": 4, "patience": 4}
    env = wrap_for("maskable_ppo", base(budget=budget))
    model = make_model("maskable_ppo", Monitor(env), 0, n_steps=128, batch_size=64, ent_coef=0.003)
    model.learn(2048)
    test_env = wrap_for("maskable_ppo", base(budget=budget, split="test"))
    raw = base(budget=budget, split="test")
    trained = [run_episode(test_env, model, seed)[0] for seed in range(60)]
    random = [run_episode(raw, RandomPolicy(raw, seed), seed)[0] for seed in range(60)]
    error = np.sqrt((np.var(trained) + np.var(random)) / 60)
    print(f"trained {np.mean(trained):.3f}, random {np.mean(random):.3f}, standard error {error:.3f}")
    assert np.mean(trained) - np.mean(random) > 5 * error
