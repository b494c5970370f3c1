"""Made-up states of rounds for the tests of controllers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posttrain_gym.inner_trainers.adjustments import CATALOGUE
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.signals import SIGNALS, Z_LIMIT, Signals
from posttrain_gym.meta_policies.controllers.base import ControlState

RECIPE = Recipe("grpo", {"easy": 0.25, "hard": 0.75}, steps=100, learning_rate=1e-3, kl_coef=0.1, batch_size=32)
SOURCES = ("easy", "hard")


def signals(step: int = 10, broken: Sequence[str] = (), **values: float) -> Signals:
    """Return signals in which everything is absent but ``values``; a name that starts with ``z_`` is a z-score."""
    raw: dict[str, float | None] = dict.fromkeys(SIGNALS)
    z = dict.fromkeys(SIGNALS, 0.0)
    for name, value in values.items():
        (z if name.startswith("z_") else raw)[name.removeprefix("z_")] = value
    return Signals(step, raw, z, tuple(broken))


def settings(recipe: Recipe = RECIPE, **changed: float) -> dict[str, float]:
    """Return the settings in force at a round's start, with some of them changed."""
    return {
        "learning_rate": recipe.learning_rate,
        "learning_rate_factor": 1.0,
        "batch_size": float(recipe.batch_size),
        "max_grad_norm": recipe.max_grad_norm,
        "kl_coef": recipe.kl_coef,
        "temperature": recipe.temperature,
        "num_generations": float(recipe.num_generations),
        **{f"mix.{name}": weight for name, weight in recipe.mix.items()},
        **changed,
    }


def legal(*refused: str, sources: int = 2) -> list[bool]:
    """Return a mask that allows all but the named kinds and the slots without a source."""
    return [entry.kind not in refused and (entry.slot is None or entry.slot < sources) for entry in CATALOGUE]


def state(
    step: int = 10, shown: Signals | None = None, mask: Sequence[bool] | None = None, **more: Any
) -> ControlState:
    """Return a state of `RECIPE`'s round."""
    return ControlState(
        step,
        RECIPE.steps,
        signals(step) if shown is None else shown,
        more.get("settings", settings()),
        SOURCES,
        legal() if mask is None else mask,
    )


def random_state(rng: np.random.Generator, step: int, mask: Sequence[bool] | None = None) -> ControlState:
    """Return a state whose signals are drawn; about a fifth of them is absent."""
    values: Mapping[str, float | None] = {
        name: float(rng.normal() * 10.0 ** rng.integers(-3, 3)) if rng.random() > 0.2 else None for name in SIGNALS
    }
    z = {name: 0.0 if values[name] is None else float(np.clip(rng.normal() * 2, -Z_LIMIT, Z_LIMIT)) for name in SIGNALS}
    if mask is None:
        mask = [True, *(rng.random(len(CATALOGUE) - 1) < 0.5)]
        mask = [bool(a and b) for a, b in zip(mask, legal(), strict=True)]
    return ControlState(step, RECIPE.steps, Signals(step, values, z), settings(), SOURCES, mask)
