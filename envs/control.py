"""How a running round enters the observation: its z-scored signals with presence flags, and its settings in force."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..inner_trainers.adjustments import SOURCE_SLOTS
from ..inner_trainers.recipe import Recipe
from ..inner_trainers.signals import SIGNALS
from .running import Moment

OPTIONAL = ("temperature", "kl_coef", "beta", "entropy_coef", "num_generations", "gamma", "lora_frozen")
"""Settings that some algorithms do not have; each has a presence flag."""


@dataclass(frozen=True)
class ControlColumn:
    """One column of ``control``.

    Attributes:
        name: what it is called.
        low: its lower bound, 0 or -1; the upper is 1.
        meaning: unit and meaning.
    """

    name: str
    low: float
    meaning: str


_FACTOR_DECADES = 3.0
_DECADES: Mapping[str, float] = {
    "batch_size": 1.0,
    "max_grad_norm": 2.0,
    "temperature": 1.0,
    "kl_coef": 2.0,
    "beta": 2.0,
    "entropy_coef": 3.0,
    "num_generations": 1.0,
}
"""Settings shown as log10 of their ratio to the recipe's, over these many decades."""

RATIO_FLOOR = 1e-4
"""Added to both sides of a ratio whose settings may be 0."""

CONTROL: tuple[ControlColumn, ...] = (
    ControlColumn("progress", 0.0, "optimiser steps done, over those asked"),
    ControlColumn("asked_steps", 0.0, "log10 of the steps asked, over 5"),
    ControlColumn("asked_batch_size", 0.0, "log10 of the batch size asked, over 5"),
    ControlColumn("learning_rate", -1.0, "(log10 of the next step's learning rate + 4) / 4, clipped: 1e-8 to 1"),
    ControlColumn("learning_rate_factor", -1.0, "log10 of what the schedule's rate is multiplied by, over 3, clipped"),
    *(
        ControlColumn(
            name, -1.0, f"log10(x in force / x of the recipe) / {decades:g}, clipped; 1e-4 is added to both x"
        )
        for name, decades in _DECADES.items()
    ),
    ControlColumn("gamma", -1.0, "10 times the discount in force minus the recipe's, clipped"),
    ControlColumn("lora_frozen", 0.0, "1 when of the adapters only B is trained"),
    *(ControlColumn(f"has_{name}", 0.0, f"1 when the algorithm has {name}; else its column is 0") for name in OPTIONAL),
    *(
        ControlColumn(f"mix_{slot}", 0.0, f"weight in force of source {slot} of the mix, in sorted order")
        for slot in range(1, SOURCE_SLOTS + 1)
    ),
    *(
        ControlColumn(f"mix_shift_{slot}", -1.0, "that weight minus the recipe's")
        for slot in range(1, SOURCE_SLOTS + 1)
    ),
    ControlColumn("quick_score", 0.0, "score of the last quick evaluation; 0 without one"),
    ControlColumn("has_quick_score", 0.0, "1 when there is one"),
    ControlColumn("was_refused", 0.0, "1 when the last adjustment was refused and nothing was done instead"),
    ControlColumn("was_not_finite", 0.0, "1 when a signal or setting was not finite; it is shown as 0"),
)
"""Columns of ``control``, in order."""

CONTROL_LOWS = np.array([column.low for column in CONTROL], np.float32)
SIGNAL_COLUMNS = (*SIGNALS, *(f"has_{name}" for name in SIGNALS))
"""Columns of ``signals`` while a round can be adjusted: a z-score over `Z_LIMIT` and a presence flag per signal."""


def signal_row(moment: Moment | None, clocked: bool) -> np.ndarray:
    """Return ``(62,)`` float32: z-scores over `Z_LIMIT` in [-1, 1], then presence flags; zeros when no round runs.

    Args:
        moment: what the round shows; None when none runs.
        clocked: whether signals that a clock or the machine decides are shown.
    """
    if moment is None:
        return np.zeros(len(SIGNAL_COLUMNS), np.float32)
    return np.concatenate([moment.signals.vector(clocked), moment.signals.presence(clocked)])


def control_row(moment: Moment | None, recipe: Recipe | None, sources: Sequence[str], refused: bool) -> np.ndarray:
    """Return ``(len(CONTROL),)`` float64, not yet clipped; zeros when no round runs.

    Args:
        moment: what the round shows; None when none runs.
        recipe: what it was asked.
        sources: the sources of its mix, sorted.
        refused: whether the last adjustment was refused.
    """
    if moment is None or recipe is None:
        return np.zeros(len(CONTROL))
    settings = moment.settings
    values = {
        "progress": moment.step / recipe.steps,
        "asked_steps": math.log10(recipe.steps) / 5,
        "asked_batch_size": math.log10(recipe.batch_size) / 5,
        "learning_rate": (math.log10(max(_number(settings, "learning_rate"), 1e-12)) + 4) / 4,
        "learning_rate_factor": _ratio(settings.get("learning_rate_factor", 1.0), 1.0, 0.0) / _FACTOR_DECADES,
        "quick_score": moment.quick_score or 0.0,
        "has_quick_score": float(moment.quick_score is not None),
        "was_refused": float(refused),
    }
    for name, decades in _DECADES.items():
        if name in settings:
            values[name] = _ratio(settings[name], float(getattr(recipe, name)), RATIO_FLOOR) / decades
    if "gamma" in settings:
        values["gamma"] = 10 * (settings["gamma"] - recipe.gamma)
    values["lora_frozen"] = settings.get("lora_frozen", 0.0)
    values |= {f"has_{name}": float(name in settings) for name in OPTIONAL}
    for slot, name in enumerate(sources[:SOURCE_SLOTS], start=1):
        weight = settings.get(f"mix.{name}", 0.0)
        values |= {f"mix_{slot}": weight, f"mix_shift_{slot}": weight - recipe.mix.get(name, 0.0)}
    broken = bool(moment.signals.broken) or not all(map(math.isfinite, settings.values()))
    values["was_not_finite"] = float(broken)
    return np.array([values.get(column.name, 0.0) for column in CONTROL])


def _number(settings: Mapping[str, float], name: str) -> float:
    value = settings.get(name, 0.0)
    return value if math.isfinite(value) else 0.0


def _ratio(now: float, asked: float, floor: float) -> float:
    """Return log10 of the ratio of two settings; not finite where the one in force is not."""
    if not math.isfinite(now):
        return math.nan
    return math.log10(max(now + floor, 1e-12) / max(asked + floor, 1e-12))
