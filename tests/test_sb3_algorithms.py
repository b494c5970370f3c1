"""Every algorithm of SB3 and sb3-contrib trains on the cheap trainer, is saved in one file, acts the same elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from sb3_contrib import MaskablePPO
from stable_baselines3.common.vec_env import VecNormalize

from posttrain_gym.envs.budget import Budget
from posttrain_gym.envs.decision_space import DecisionSpace, Parameter
from posttrain_gym.experiments.settings import EnvSettings, in_loop_settings
from posttrain_gym.experiments.train import TrainSettings, train
from posttrain_gym.inner_trainers.testing import ScriptedFamily
from posttrain_gym.meta_policies.catalogue import load_policy
from posttrain_gym.meta_policies.hyperparameters import (
    Hyperparameters,
    Linear,
    literal,
    load_hyperparameters,
    merged,
    override,
    packaged,
    schedule,
)
from posttrain_gym.meta_policies.normaliser import Normaliser
from posttrain_gym.meta_policies.policy_file import TrainedPolicy, read_policy_facts, require_legal_choice
from posttrain_gym.meta_policies.sb3 import SB3_ALGORITHMS, make_model, sb3_algorithm, wrap_for

from .scripted_env import make

SCRIPTED = "posttrain_gym.inner_trainers.testing:ScriptedFamily"
STEPS = 200
SETTINGS = EnvSettings(task=SCRIPTED, budget=Budget(60_000, max_rounds=6, patience=6))
SMALL = {"policy_kwargs": "dict(net_arch=[16])"}

ACT = """
import json, sys
import numpy as np
import torch
torch.set_num_threads(1)
from posttrain_gym.envs.post_training import PostTrainingEnv
from posttrain_gym.inner_trainers.testing import ScriptedFamily
from posttrain_gym.meta_policies.catalogue import load_policy
env = PostTrainingEnv(ScriptedFamily(), budget={"limit": 60_000, "max_rounds": 6, "patience": 6})
policy, wrapped = load_policy(sys.argv[1], env, seed=3)
observation, _ = wrapped.reset(seed=5)
actions = [np.asarray(policy.predict(observation, deterministic=d)[0]).tolist() for d in (True, False, False)]
print(json.dumps(actions))
"""


def small(algo: str) -> dict[str, Any]:
    return {key: literal(value) for key, value in SMALL.items()} if algo != "ars" else {}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, int]]:
    """Policies of every algorithm, each after 200 decisions."""
    found = {}
    for algo in SB3_ALGORITHMS:
        folder = tmp_path_factory.mktemp(algo)
        normalize = {"norm_reward": True} if algo in ("ppo", "sac", "ars") else None
        seen: list[Any] = []
        settings = TrainSettings(SETTINGS, algo, STEPS, hyperparameters=small(algo), normalize=normalize)
        path, episodes = train(settings, folder / "run", on_round=seen.append)
        assert len(seen) >= STEPS and len(episodes) > STEPS / 10
        assert [event.number for event in seen] == list(range(1, len(seen) + 1))
        found[algo] = path, len(seen)
    return found


@pytest.mark.parametrize("algo", sorted(SB3_ALGORITHMS))
def test_it_trains_and_acts_the_same_in_another_process(algo: str, trained: dict[str, tuple[Path, int]]) -> None:
    path, _ = trained[algo]
    env = make(budget={"limit": 60_000, "max_rounds": 6, "patience": 6})
    policy, wrapped = load_policy(str(path), env, seed=3)
    for name, value in policy.model.policy.state_dict().items():
        assert torch.isfinite(value).all(), name
    observation, _ = wrapped.reset(seed=5)
    actions = [np.asarray(policy.predict(observation, deterministic=d)[0]).tolist() for d in (True, False, False)]
    done = subprocess.run([sys.executable, "-c", ACT, str(path)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == actions
    over = False
    while not over:  # and plays an episode to its end
        observation, _, over, _, _ = wrapped.step(policy.predict(observation)[0])


@pytest.mark.parametrize("algo", sorted(SB3_ALGORITHMS))
def test_the_file_says_what_it_is(algo: str, trained: dict[str, tuple[Path, int]]) -> None:
    facts = read_policy_facts(trained[algo][0])
    env = make()
    assert facts["algo"] == algo
    assert DecisionSpace.from_dict(
        {**{k: facts[k] for k in env.space.to_dict() if k != "usable"}, "usable": env.space.to_dict()["usable"]}
    ) == replace(env.space, facts=None)
    assert facts["task_facts"]["family"] == "scripted"
    assert facts["task_facts"]["budget"] == ["train_tokens", 60_000, 6, 6]
    assert (facts["normaliser"] is not None) == (algo in ("ppo", "sac", "ars"))
    assert facts["seed"] == 0
    if algo in ("dqn", "qrdqn"):
        assert len(facts["wrapper"]["recipes"]) == 12


@pytest.mark.parametrize("kind", ["in-loop", "full"])
@pytest.mark.parametrize("algo", sorted(SB3_ALGORITHMS))
def test_it_learns_where_rounds_are_adjusted_or_says_why_not(algo: str, kind: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("algorithm: sft\nmix: {left: 0.5, right: 0.5}\nsteps: 20\n")
    in_loop = in_loop_settings(kind, recipe if kind == "in-loop" else None, 5, False)
    settings = TrainSettings(replace(SETTINGS, in_loop=in_loop), algo, 40, hyperparameters=small(algo))
    if algo in ("dqn", "qrdqn") and kind == "full":
        with pytest.raises(ValueError, match=f"{algo} chooses one of a list, and --env full asks"):
            train(settings, tmp_path / "run")
        assert not (tmp_path / "run").exists()
        return
    path, _ = train(settings, tmp_path / "run")
    env = settings.environment.build()
    policy, wrapped = load_policy(str(path), env, seed=0)
    observation, _ = wrapped.reset(seed=1)
    assert wrapped.action_space.contains(policy.predict(observation, deterministic=True)[0])


def test_hindsight_replay_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"'HER' cannot be used here: .* no goal .* Use sac, td3 or tqc"):
        sb3_algorithm("HER")
    with pytest.raises(ValueError, match="Did you mean 'qrdqn'"):
        sb3_algorithm("QR-DQN")
    with pytest.raises(ValueError, match="ars plays whole episodes one after the other; use --envs 1"):
        TrainSettings(SETTINGS, "ars", envs=2)


def test_a_policy_of_another_space_is_refused_with_the_differences(trained: dict[str, tuple[Path, int]]) -> None:
    space = replace(
        make().space,
        parameters={**make().space.parameters, "learning_rate": Parameter(3e-5, 2e-2, "log")},
        constraints=("if algorithm == sft then batch_size <= 32",),
        starts=("base", "best"),
    )
    with pytest.raises(ValueError, match="made for another decision space") as caught:
        TrainedPolicy(trained["ppo"][0], make(space=space))
    text = str(caught.value)
    assert "parameters.learning_rate.high: the policy has 0.01, the environment 0.02" in text
    assert "constraints: the policy has [], the environment ['if algorithm == sft then batch_size <= 32']" in text
    assert "starts: the policy has ['base', 'best', 'latest'], the environment ['base', 'best']" in text
    assert "batch_size" not in text.replace("then batch_size", "")


def test_the_normaliser_scales_as_vec_normalize_does(trained: dict[str, tuple[Path, int]]) -> None:
    stored = read_policy_facts(trained["ppo"][0])["normaliser"]
    normaliser = Normaliser.from_dict(json.loads(json.dumps(stored)))
    assert normaliser.to_dict() == stored
    from stable_baselines3.common.vec_env import DummyVecEnv

    vector = VecNormalize(DummyVecEnv([lambda: wrap_for("ppo", make())]), training=False)
    for key, running in vector.obs_rms.items():
        entry = normaliser.statistics[key]
        running.mean, running.var, running.count = entry["mean"], entry["var"], entry["count"]
        assert entry["count"] > STEPS
    vector.seed(3)
    scaled = vector.reset()
    raw = vector.get_original_obs()
    own = normaliser(raw)
    assert all(np.array_equal(own[key], scaled[key]) for key in raw)
    assert not np.array_equal(raw["budget"], scaled["budget"])


# Hyperparameters ------------------------------------------------------------------------------------------------------

ZOO = """
CartPole-v1:
  n_timesteps: !!float 1e5
  n_envs: 2
  policy: 'MlpPolicy'
  normalize: "dict(norm_obs=True, norm_reward=False)"
  n_steps: 32
  batch_size: 64
  learning_rate: lin_3e-4
  clip_range: lin_0.2
  ent_coef: 0.0
  policy_kwargs: "dict(net_arch=[64, 64], activation_fn=nn.Tanh)"
"""


def test_an_entry_of_rl_zoo3_is_read_as_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "ppo.yml"
    path.write_text(ZOO)
    found = load_hyperparameters(path, "ppo")
    assert (found.n_timesteps, found.n_envs, found.normalize) == (100_000, 2, {"norm_obs": True, "norm_reward": False})
    assert found.arguments["policy_kwargs"] == {"net_arch": [64, 64], "activation_fn": "nn.Tanh"}
    model = make_model("ppo", wrap_for("ppo", make()), 0, found)
    assert (model.n_steps, model.ent_coef, model.gamma) == (32, 0.0, 0.99)  # gamma is the packaged one
    assert model.learning_rate(0.5) == 1.5e-4
    assert model.policy.net_arch == [64, 64]
    assert model.policy.activation_fn is torch.nn.Tanh
    bare = tmp_path / "bare.yml"
    bare.write_text("n_steps: 32\nlearning_rate: 1e-4\n")
    assert load_hyperparameters(bare, "ppo").arguments == {"n_steps": 32, "learning_rate": 1e-4}


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("n_steps: 8\nlearning_rte: 3\n", 2, "ppo has no such argument. Did you mean 'learning_rate'"),
        ("frame_stack: 4\n", 1, "the observation has a history of rounds already"),
        ("env_wrapper:\n  - sb3_contrib.common.wrappers.TimeFeatureWrapper\n", 1, "the wrappers follow"),
        ("policy_kwargs: \"dict(net_arch=__import__('os'))\"\n", 1, "is not read; write literals"),
        ('policy_kwargs: "dict(**{})"\n', 1, "`**` is not read"),
        ('policy_kwargs: "dict(activation_fn=nn.Relu)"\n', 1, "unknown activation nn.Relu. Did you mean 'ReLU'"),
        ('policy_kwargs: "eval(1)"\n', 1, "is not read; write literals"),
        ("learning_rate: lin_x\n", 1, "expected a schedule such as lin_3e-4"),
        ("learning_rate: fast\n", 1, "expected a number or a schedule"),
        ("n_timesteps: 0\n", 1, "expected an integer in"),
        ('normalize: "dict(norm=True)"\n', 1, "unknown argument 'norm'"),
        ("policy: CnPolicy\n", 1, "Did you mean 'CnnPolicy'"),
        ("n_steps: 8\nn_steps: 9\n", 2, "n_steps"),
        ("noise_type: loud\n", 1, "unknown noise 'loud'"),
    ],
)
def test_what_cannot_be_used_is_named_with_its_line(text: str, line: int, message: str, tmp_path: Path) -> None:
    path = tmp_path / "ppo.yml"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"line {line}") as caught:
        load_hyperparameters(path, "ppo")
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_single_settings_win_over_files_and_files_over_defaults() -> None:
    assert override("learning_rate=lin_1e-3", "ppo") == ("learning_rate", "lin_1e-3")
    assert override("policy_kwargs=dict(net_arch=[8])", "ppo") == ("policy_kwargs", {"net_arch": [8]})
    for text, message in (("x", "expected KEY=VALUE"), ("lerning_rate=1", "Did you mean 'learning_rate'")):
        with pytest.raises(ValueError, match=message):
            override(text, "ppo")
    over = merged(packaged("td3"), Hyperparameters({"gamma": 0.5}, noise_std=0.1))
    assert (over.arguments["gamma"], over.arguments["batch_size"]) == (0.5, 32)
    assert (over.noise_type, over.noise_std) == ("normal", 0.1)
    assert isinstance(schedule("lin_2.0"), Linear) and schedule("lin_2.0")(0.25) == 0.5
    for algo in SB3_ALGORITHMS:
        assert packaged(algo).arguments


# Legality -------------------------------------------------------------------------------------------------------------


def test_a_mask_without_a_legal_choice_is_refused_for_every_masked_policy(
    trained: dict[str, tuple[Path, int]],
) -> None:
    env = make(budget={"limit": 60_000, "max_rounds": 6, "patience": 6})
    policy, wrapped = load_policy(str(trained["maskable_ppo"][0]), env, seed=0)
    observation, _ = wrapped.reset(seed=0)
    mask = wrapped.get_wrapper_attr("action_masks")()
    with pytest.raises(ValueError, match="head 0 has no legal choice among its 3"):
        policy.predict(observation, action_masks=np.zeros_like(mask))


def test_one_legal_choice_of_1400_is_the_one_that_is_played() -> None:
    class Many(gym.Env[np.ndarray, int]):
        observation_space = gym.spaces.Box(0.0, 1.0, (3,), np.float32)
        action_space: Any = gym.spaces.Discrete(1400)
        played: list[int] = []

        def reset(self, **_: Any) -> Any:
            return np.zeros(3, np.float32), {}

        def step(self, action: Any) -> Any:
            self.played.append(int(action))
            return np.zeros(3, np.float32), 0.0, len(self.played) % 16 == 0, False, {}

        def action_masks(self) -> np.ndarray:
            mask: np.ndarray = np.arange(1400) == 777
            return mask

    env = Many()
    MaskablePPO("MlpPolicy", env, n_steps=64, batch_size=64, n_epochs=1, seed=0).learn(256)
    assert env.played == [777] * 256
    require_legal_choice(env.action_masks(), env.action_space)
    with pytest.raises(ValueError, match="head 0 has no legal choice among its 1400"):
        require_legal_choice(np.zeros(1400), env.action_space)


def test_where_the_budget_pays_nothing_stop_is_the_only_legal_choice() -> None:
    evaluation = ScriptedFamily().instance(0)
    env = make()
    cost = env.trainer.evaluation_cost_bound(evaluation, "validation").in_unit("train_tokens")
    poor = make(budget={"limit": cost, "max_rounds": 3, "patience": 3})
    for algo in ("maskable_ppo", "dqn", "ppo"):
        wrapped = wrap_for(algo, poor)
        _, info = wrapped.reset(seed=0)
        assert info["ended"] == "budget"
        mask = wrapped.get_wrapper_attr("action_masks")()
        first = {"maskable_ppo": 3, "dqn": len(mask), "ppo": 3}[algo]
        assert mask[:first].tolist() == [True] + [False] * (first - 1)
