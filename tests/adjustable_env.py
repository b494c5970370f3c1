"""Environments with adjustable scripted rounds, and how to play them, for the tests of these environments."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from posttrain_gym.envs.full import FullEnv
from posttrain_gym.envs.in_loop import InLoopEnv
from posttrain_gym.inner_trainers.adjustments import catalogue_index
from posttrain_gym.inner_trainers.testing import ScriptedFamily

RECIPE = {"algorithm": "sft", "mix": {"left": 0.5, "right": 0.5}, "steps": 20, "learning_rate": 1e-3, "batch_size": 16}


def in_loop(**settings: Any) -> InLoopEnv:
    return InLoopEnv(**{"task": ScriptedFamily(), "recipe": RECIPE, **settings})


def full(**settings: Any) -> FullEnv:
    return FullEnv(**{"task": ScriptedFamily(), **settings})


def adjust(env: InLoopEnv, *names: str) -> list[tuple[Any, ...]]:
    """Applies adjustments by name, one a step, and returns what each step returned."""
    return [env.step(catalogue_index(name)) for name in names]


def play(env: Any, actions: Iterable[Any], seed: int = 0) -> list[tuple[Any, ...]]:
    """Returns an episode's trace: observations as bytes, rewards, ends and infos, `replayed` left out."""
    observation, info = env.reset(seed=seed)
    trace = [_row(observation, 0.0, False, info)]
    for action in actions:
        observation, reward, terminated, _, info = env.step(action)
        trace.append(_row(observation, reward, terminated, info))
        if terminated:
            break
    return trace


def _row(observation: dict[str, np.ndarray], reward: float, terminated: bool, info: dict[str, Any]) -> tuple[Any, ...]:
    facts = {name: value for name, value in info.items() if name != "replayed"}
    text = json.dumps(facts, sort_keys=True, default=lambda array: array.tolist())
    return {name: values.tobytes() for name, values in observation.items()}, reward, terminated, text


def random_actions(count: int, seed: int) -> list[int]:
    """Returns random adjustments, legal or not, without the one that stops the round."""
    return [int(action) for action in np.random.default_rng(seed).integers(2, 37, count)]
