"""What the policy sees: bounded float32 arrays, built by pure functions over a leading batch axis."""

from __future__ import annotations

from dataclasses import dataclass

import gymnasium as gym
import numpy as np

from ..inner_trainers.base import CAUSES
from .control import CONTROL_LOWS, SIGNAL_COLUMNS

SCORE_COLUMNS = ("mean", "standard_error", "pass_at_1", "pass_at_k", "format_rate")
CHECKPOINTS = ("base", "latest", "best")
SIGNALS = ("loss", "loss_slope", "grad_norm", "entropy", "kl", "reward", "reward_std", "groups_without_spread")
CURVE_COLUMNS = ("first_loss", "last_loss", "largest_grad_norm", "last_reward", "last_entropy")
LOSS_SCALE = 10.0
"""Losses, gradient norms and entropies x enter the observation as tanh(x / LOSS_SCALE)."""


@dataclass(frozen=True)
class ObservationLayout:
    """Sizes that decide the observation's shapes.

    Attributes:
        sources: number of sources.
        algorithms: number of algorithms.
        dimensions: number of benchmark dimensions.
        recipe_width: length of an encoded recipe.
        history: rounds kept in ``history``.
        in_loop: whether rounds can be adjusted while they run: ``signals`` is then wider, and there are ``control``
            and ``recipe``.
    """

    sources: int
    algorithms: int
    dimensions: int
    recipe_width: int
    history: int
    in_loop: bool = False

    @property
    def task_width(self) -> int:
        """Length of ``task``: model size, rows per source, algorithm availability, dimension weights."""
        return 1 + self.sources + self.algorithms + self.dimensions

    @property
    def scores_width(self) -> int:
        """Length of ``scores``: per checkpoint the overall score, its error, and five columns per dimension."""
        return len(CHECKPOINTS) * (2 + len(SCORE_COLUMNS) * self.dimensions)

    @property
    def last_width(self) -> int:
        """Length of ``last``: the recipe, gain, cost, share of steps done, failed, causes, curves, not-finite flag."""
        return self.recipe_width + 4 + len(CAUSES) + len(CURVE_COLUMNS) + 1

    @property
    def round_width(self) -> int:
        """Length of one round in ``history``: the recipe, gain, cost, failed."""
        return self.recipe_width + 3

    def space(self) -> gym.spaces.Dict:
        """Return the observation space."""

        def box(low: float, *shape: int) -> gym.spaces.Box:
            return gym.spaces.Box(low, 1.0, shape, np.float32)

        blocks: dict[str, gym.Space[np.ndarray]] = {
            "budget": box(0.0, 3),
            "history": box(-1.0, self.history, self.round_width),
            "last": box(-1.0, self.last_width),
            "phase": box(0.0, 1),
            "scores": box(0.0, self.scores_width),
            "signals": box(-1.0, len(SIGNAL_COLUMNS if self.in_loop else SIGNALS)),
            "task": box(0.0, self.task_width),
        }
        if self.in_loop:
            ones = np.ones(len(CONTROL_LOWS), np.float32)
            blocks["control"] = gym.spaces.Box(CONTROL_LOWS, ones, dtype=np.float32)
            blocks["recipe"] = box(-1.0, self.recipe_width)
        return gym.spaces.Dict(blocks)


@dataclass
class ObservationInputs:
    """Raw quantities behind a batch of observations; ``n`` is the batch.

    Attributes:
        parameters: ``(n,)`` model parameters.
        rows: ``(n, sources)`` rows per source.
        available: ``(n, algorithms)`` 0 or 1.
        dimension_weights: ``(n, dimensions)``.
        scores: ``(n, scores_width)``.
        budget: ``(n, 3)`` fractions left of budget, rounds and patience.
        last: ``(n, last_width)`` without its flag, zeros before the first round.
        history: ``(n, history, round_width)``, newest first.
    """

    parameters: np.ndarray
    rows: np.ndarray
    available: np.ndarray
    dimension_weights: np.ndarray
    scores: np.ndarray
    budget: np.ndarray
    last: np.ndarray
    history: np.ndarray


@dataclass
class RunningInputs:
    """Raw quantities of rounds that can be adjusted while they run; zeros where none runs.

    Attributes:
        phase: ``(n, 1)`` 0: a recipe is asked for; 1: an adjustment is.
        signals: ``(n, 62)`` as `control.signal_row`.
        control: ``(n, len(CONTROL))`` as `control.control_row`.
        recipe: ``(n, recipe_width)`` the encoded recipe.
    """

    phase: np.ndarray
    signals: np.ndarray
    control: np.ndarray
    recipe: np.ndarray


def observe_running(inputs: RunningInputs) -> dict[str, np.ndarray]:
    """Return the blocks of a batch of running rounds: float32, finite, inside the space.

    What was not finite is shown as 0 and raises ``was_not_finite``, the last column of ``control``.
    """
    broken = np.zeros(len(inputs.phase), dtype=bool)
    clean = {}
    lows: dict[str, float | np.ndarray] = {"phase": 0.0, "signals": -1.0, "control": CONTROL_LOWS, "recipe": -1.0}
    for name, low in lows.items():
        values = getattr(inputs, name)
        finite = np.isfinite(values)
        broken |= ~finite.all(axis=1)
        clean[name] = np.minimum(np.maximum(np.where(finite, values, 0.0), low), 1.0).astype(np.float32)
    clean["control"][:, -1] = np.maximum(clean["control"][:, -1], broken)
    return clean


def observe(inputs: ObservationInputs) -> dict[str, np.ndarray]:
    """Return a batch of observations: float32, finite, inside the space.

    A quantity that was not finite is shown as 0 and raises the flag in the last column of ``last``.
    """
    count = len(inputs.parameters)
    task = np.concatenate(
        [
            np.log10(np.maximum(inputs.parameters, 1.0))[:, None] / 12.0,
            np.log10(np.maximum(inputs.rows, 1.0)) / 9.0,
            inputs.available,
            inputs.dimension_weights,
        ],
        axis=1,
    )
    raw = {
        "budget": inputs.budget,
        "history": inputs.history,
        "last": inputs.last,
        "scores": inputs.scores,
        "task": task,
    }
    broken = np.zeros(count, dtype=bool)
    clean = {
        "phase": np.zeros((count, 1), np.float32),
        "signals": np.zeros((count, len(SIGNALS)), np.float32),
    }
    for name, values in raw.items():
        finite = np.isfinite(values)
        if not finite.all():
            broken |= ~finite.reshape(count, -1).all(axis=1)
            values = np.where(finite, values, 0.0)
        low = -1.0 if name in ("history", "last") else 0.0
        clean[name] = np.minimum(np.maximum(values, low), 1.0).astype(np.float32)
    clean["last"][:, -1] = np.maximum(clean["last"][:, -1], broken)
    return clean
