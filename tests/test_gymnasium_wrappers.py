"""Gymnasium's own wrappers work on the environments: masks and info stay, and the spec rebuilds the stack."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import (
    FrameStackObservation,
    NormalizeObservation,
    NormalizeReward,
    NumpyToTorch,
    RecordEpisodeStatistics,
    TimeLimit,
)

from posttrain_gym.envs.post_training import PostTrainingEnv
from posttrain_gym.inner_trainers.testing import ScriptedFamily
from posttrain_gym.wrappers import DiscretizeAction, FlattenAction, FlattenObservation

from .scripted_env import AMPLE, make


def made(name: str = "PostTrain/Recipe-v0") -> Any:
    return gym.make(name, task=ScriptedFamily(), budget=AMPLE)


def _layers(env: Any) -> list[str]:
    layers = []
    while isinstance(env, gym.Wrapper):
        layers.append(type(env).__name__)
        env = env.env
    return layers


STACKS: dict[str, Any] = {
    "TimeLimit": lambda env: TimeLimit(env, 5),
    "RecordEpisodeStatistics": RecordEpisodeStatistics,
    "NormalizeReward": NormalizeReward,
    "NormalizeObservation": lambda env: NormalizeObservation(FlattenObservation(env)),
    "FrameStackObservation": lambda env: FrameStackObservation(FlattenObservation(env), 3),
    "FrameStackObservation of a Dict": lambda env: FrameStackObservation(env, 3),
    "NumpyToTorch": NumpyToTorch,
}


@pytest.mark.parametrize("name", sorted(STACKS))
def test_masks_info_and_spec_survive(name: str) -> None:
    env, plain = STACKS[name](DiscretizeAction(made(), 4)), DiscretizeAction(made(), 4)
    _, info = env.reset(seed=3)
    _, expected = plain.reset(seed=3)
    assert expected.keys() <= info.keys()
    action = plain.encode_recipe(plain.unwrapped.space.recipe("sft", steps=10))  # type: ignore[attr-defined]
    given = torch.as_tensor(action) if name == "NumpyToTorch" else action
    _, _, terminated, truncated, info = env.step(given)
    result = plain.step(action)
    assert (bool(terminated), bool(truncated)) == result[2:4]
    assert result[4].keys() <= info.keys()
    if name == "NumpyToTorch":  # it turns every number of info into a tensor and spoils text; the keys stay
        assert float(info["round"]["score"]) == pytest.approx(result[4]["round"]["score"])
    else:
        assert info["round"]["recipe"] == result[4]["round"]["recipe"]
    assert np.array_equal(np.asarray(env.get_wrapper_attr("action_masks")()), plain.action_masks())
    again: Any = gym.make(env.spec)
    assert sorted(_layers(again)) == sorted(_layers(env))  # `gym.make` puts a TimeLimit innermost
    assert (again.action_space, again.observation_space) == (env.action_space, env.observation_space)


def test_what_each_does() -> None:
    limited = TimeLimit(DiscretizeAction(made(), 4), 2)
    limited.reset(seed=0)
    action = limited.get_wrapper_attr("encode_recipe")(limited.unwrapped.space.recipe("sft", steps=10))  # type: ignore[attr-defined]
    assert [limited.step(action)[3] for _ in range(2)] == [False, True]
    recorded = RecordEpisodeStatistics(FlattenAction(make(budget={"limit": 1e7, "max_rounds": 2, "patience": 9})))
    recorded.reset(seed=0)
    flat = recorded.get_wrapper_attr("encode_recipe")(recorded.unwrapped.space.recipe("sft", steps=10))  # type: ignore[attr-defined]
    first = float(recorded.step(flat)[1])
    _, second, _, _, info = recorded.step(flat)
    assert info["episode"]["l"] == 2
    assert info["episode"]["r"] == pytest.approx(first + float(second))
    stacked, _ = STACKS["FrameStackObservation"](made()).reset(seed=0)
    assert stacked.shape == (3, len(FlattenObservation(made()).feature_names))
    tensors, _ = NumpyToTorch(made()).reset(seed=0)
    assert all(isinstance(value, torch.Tensor) for value in tensors.values())


@pytest.mark.parametrize(("mode", "rounds"), [(AutoresetMode.NEXT_STEP, 16), (AutoresetMode.SAME_STEP, 18)])
def test_the_ignored_step_of_a_reset_runs_and_costs_nothing(mode: AutoresetMode, rounds: int) -> None:
    """Episodes of 8 rounds, 18 vector steps: the reset step of the default mode launches nothing."""
    begun = [0, 0]

    class Counted(PostTrainingEnv):
        def __init__(self, index: int) -> None:
            super().__init__(ScriptedFamily(), budget={"limit": 1e9, "max_rounds": 8, "patience": 8}, reuse=False)
            self.index = index

        def step(self, action: Any) -> Any:
            before = self.search.ledger.spent
            result = super().step(action)
            begun[self.index] += 1
            assert self.search.ledger.spent > before
            return result

    vector = SyncVectorEnv(
        [lambda index=index: FlattenAction(Counted(index)) for index in range(2)],  # type: ignore[misc]
        autoreset_mode=mode,
    )
    assert vector.metadata["autoreset_mode"] == mode
    vector.reset(seed=7)
    single = FlattenAction(make())
    action = single.encode_recipe(single.unwrapped.space.recipe("sft", steps=10))  # type: ignore[attr-defined]
    for _ in range(18):
        vector.step(np.stack([action, action]))
    assert begun == [rounds, rounds]
    vector.close()
