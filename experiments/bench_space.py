"""What deciding costs: decode, mask and encode of one action and of 1,024 at once, and constraints compiled or not."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ..envs.decision_space import DecisionSpace, Parameter
from ..envs.task_facts import TaskFacts

ACTIONS = 1_024
SCALAR_TARGET_US, BATCH_TARGET_US = 50.0, 2.0
_SOURCES = ("code", "general", "math")
_ALGORITHMS = ("dpo", "grpo", "ppo", "sft")


def bench_space(repeats: int) -> dict[str, Any]:
    """Time three spaces on random actions: the default one, one with bounds and epochs, and one with five constraints.

    One time is that of decoding an action, masking and encoding the recipe again; the median of ``repeats`` passes over
    1,024 actions. ``compiled_once_ratio`` holds checking a recipe against the constraints beside reading and compiling
    them anew.
    """
    result: dict[str, Any] = {}
    for name, space in _spaces().items():
        actions, columns = _actions(space)
        payable = np.ones((ACTIONS, len(space.algorithms)), bool)
        scalar, batch = [], []
        _scalar(space, actions)
        _batch(space, columns, payable)
        for _ in range(repeats):
            scalar.append(_microseconds(lambda space=space, actions=actions: _scalar(space, actions)))  # type: ignore[misc]
            batch.append(
                _microseconds(lambda space=space, columns=columns, payable=payable: _batch(space, columns, payable))  # type: ignore[misc]
            )
        result[name] = {
            "scalar_us_per_action": statistics.median(scalar),
            "batch_us_per_action": statistics.median(batch),
            "scalar_over_target": statistics.median(scalar) / SCALAR_TARGET_US,
            "batch_over_target": statistics.median(batch) / BATCH_TARGET_US,
            "scalar_over_batch": statistics.median(scalar) / statistics.median(batch),
        }
    return {
        **result,
        "scalar_target_us": SCALAR_TARGET_US,
        "batch_target_us": BATCH_TARGET_US,
        "compiled_once_ratio": _compiled_once(repeats),
    }


def _spaces() -> dict[str, DecisionSpace]:
    usable = dict.fromkeys(_ALGORITHMS, _SOURCES)
    rows = dict.fromkeys(_SOURCES, 1_000)
    facts = TaskFacts(7e9, rows, dict.fromkeys(_ALGORITHMS, rows), frozenset({"grpo"}), False, "cpu", 24e9)
    bounded = DecisionSpace(
        _ALGORITHMS,
        _SOURCES,
        usable,
        parameters={
            "batch_size": Parameter(16, 128, "log", integer=True),
            "epochs": Parameter(1, 5, integer=True),
            "kl_coef": Parameter(0.01, 0.5, "log"),
            "learning_rate": Parameter(1e-6, 5e-5, "log"),
        },
        mix_bounds={"math": (0.1, 0.5), "code": (0.1, 0.4), "general": (0.2, 0.6)},
        conditions={"kl_coef": "algorithm in [grpo, ppo]"},
        constraints=("if base_model_size < 3B then exclude ppo",),
    )
    constrained = replace(
        bounded,
        constraints=(
            "if base_model_size < 3B then exclude ppo",
            "if algorithm == dpo then learning_rate <= 1e-5",
            "if algorithm in [grpo, ppo] and mix.math > 0.4 then kl_coef >= 0.05",
            "batch_size * epochs <= 256",
            "if algorithm == grpo then exclude latest",
        ),
    )
    default = DecisionSpace(_ALGORITHMS, _SOURCES, usable)
    return {n: s.bind(facts) for n, s in (("default", default), ("bounded", bounded), ("constrained", constrained))}


def _actions(space: DecisionSpace) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    sampler = space.action_space()
    sampler.seed(0)
    actions = [dict(sampler.sample()) for _ in range(ACTIONS)]
    return actions, {key: np.array([action[key] for action in actions]) for key in actions[0]}


def _scalar(space: DecisionSpace, actions: list[dict[str, Any]]) -> None:
    for action in actions:
        recipe = space.decode(action)
        space.action_mask()
        space.encode(recipe)


def _batch(space: DecisionSpace, columns: dict[str, np.ndarray], payable: np.ndarray) -> None:
    recipes = space.decode_batch(columns)
    space.mask_batch(payable)
    space.encode_batch(recipes)


def _compiled_once(repeats: int) -> float:
    """Return the time of one check with compiled constraints over the time of reading, compiling and checking."""
    space = _spaces()["constrained"]
    recipe = space.recipe("grpo", epochs=2, batch_size=64)
    ratios = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(50):
            space.encode(recipe)
        checked = time.perf_counter()
        for _ in range(5):
            replace(space).encode(recipe)
        ratios.append(((checked - began) / 50) / ((time.perf_counter() - checked) / 5))
    return statistics.median(ratios)


def _microseconds(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) / ACTIONS * 1e6
