"""Episode k of a seed is always the same episode, in any process and beside any others."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import SyncVectorEnv

from posttrain_gym.inner_trainers.testing import ScriptedFamily
from posttrain_gym.wrappers import FlattenAction, SeedEpisodes

from .scripted_env import make

TRACE = """
import json, sys
from posttrain_gym.inner_trainers.testing import ScriptedFamily
from posttrain_gym.envs.post_training import PostTrainingEnv
from posttrain_gym.wrappers import FlattenAction, SeedEpisodes
env = SeedEpisodes(FlattenAction(PostTrainingEnv(ScriptedFamily())), int(sys.argv[1]))
trace = []
for _ in range(2):
    observation, info = env.reset()
    trace.append([info["episode_seed"], info["instance"], info["seed"]])
    over = False
    while not over:
        action = env.action_space.sample()
        observation, reward, over, _, info = env.step(action)
        trace.append([action.tolist(), reward, {k: v.tolist() for k, v in observation.items()}])
print(json.dumps(trace))
"""


def trace(seed: int) -> Any:
    done = subprocess.run([sys.executable, "-c", TRACE, str(seed)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_two_episodes_have_an_identical_trace_in_two_processes_and_another_seed_another() -> None:
    first, second, other = trace(7), trace(7), trace(8)
    assert first == second
    assert first[0] != other[0]
    assert len(first) > 4


def test_the_stream_is_numpys() -> None:
    env = SeedEpisodes(make(), 5)
    seeds = [env.reset()[1]["episode_seed"] for _ in range(3)]
    assert seeds == [int(np.random.SeedSequence([5, k]).generate_state(1)[0]) for k in range(3)]
    assert len(set(seeds)) == 3
    assert env.reset(seed=11)[1]["episode_seed"] == 11
    assert [env.reset()[1]["episode_seed"] for _ in range(3)] == seeds  # an explicit seed starts the stream again


def test_the_action_space_is_seeded_with_the_episode() -> None:
    env = SeedEpisodes(FlattenAction(make()), 3)
    env.reset()
    first = env.action_space.sample()
    env.reset(seed=0)
    env.reset()
    assert np.array_equal(env.action_space.sample(), first)


def test_copies_with_their_own_seeds_start_differently() -> None:
    vector = SyncVectorEnv([lambda s=s: SeedEpisodes(FlattenAction(make()), s) for s in (0, 1)])  # type: ignore[misc]
    _, info = vector.reset()
    assert info["episode_seed"][0] != info["episode_seed"][1]
    assert info["seed"][0] != info["seed"][1]
    vector.close()


@pytest.mark.parametrize("seed", [-1, 1.5, True, None])
def test_seeds_outside_the_range_are_refused(seed: Any) -> None:
    with pytest.raises(ValueError, match="seed: expected an integer"):
        SeedEpisodes(make(), seed)


def test_contract_and_spec() -> None:
    env: Any = SeedEpisodes(FlattenAction(gym.make("PostTrain/Recipe-v0", task=ScriptedFamily())), 9)
    check_env(env, skip_render_check=True)
    again: Any = gym.make(env.spec)
    assert again._saved_kwargs == {"seed": 9}
    assert again.action_space == env.action_space
