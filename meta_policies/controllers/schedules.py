"""Schedules as controllers, the baselines that learned control is held against: they look at the step, or at the KL.

A schedule sets the learning rate of each step by a factor outside the catalogue, computed from the rate in force, so
that rounding does not add up. With interval k the rate between two looks is the recipe's own schedule times the last
factor; at interval 1 it is exactly the schedule's. Recipes for them have ``schedule: constant`` and no warm-up: a rate
of 0 cannot be multiplied into another.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from ...inner_trainers.adjustments import KINDS, Adjustment, catalogue_index
from ...inner_trainers.messages import require_number
from ...inner_trainers.recipe import Recipe
from .base import Candidate, ControlState, Decision, nothing


class LearningRateSchedule(ABC):
    """A learning rate for each step, as a share of the recipe's peak.

    What others multiply the rate by, as a retry after a fault does, stays in force: the schedule is multiplied by it.
    """

    name = "schedule"

    def __init__(self) -> None:
        self._peak, self._steps = 1.0, 1
        self._own_factor = 1.0  # of the rate's factor in force, what this schedule has asked for

    @abstractmethod
    def share(self, step: int, steps: int) -> float:
        """Return the rate of step ``step`` (from 1) of ``steps`` over the peak, in (0, 1]."""

    def begin(self, recipe: Recipe, sources: Sequence[str]) -> None:
        """Take the peak and the length of the round."""
        self._peak, self._steps, self._own_factor = recipe.learning_rate, recipe.steps, 1.0

    def opening(self, settings: Mapping[str, float]) -> Candidate | None:
        """Return the factor for the first step; None for none."""
        return self._candidate(0, settings)

    def decide(self, state: ControlState) -> Decision:
        """Return the factor that makes the next step's rate the schedule's."""
        candidate = self._candidate(state.step, state.settings)
        return Decision(nothing(self.name, "the rate is the schedule's")) if candidate is None else Decision(candidate)

    def _candidate(self, done: int, settings: Mapping[str, float]) -> Candidate | None:
        others = settings.get("learning_rate_factor", 1.0) / self._own_factor
        wanted = self._peak * self.share(done + 1, self._steps) * others
        now = settings["learning_rate"]
        if now <= 0 or math.isclose(now, wanted, rel_tol=1e-12):
            return None
        factor = min(wanted / now, KINDS["lr_scale"].high)
        self._own_factor *= factor
        return Candidate(None, Adjustment("lr_scale", factor), self.name, "the rate follows the schedule")

    def describe(self) -> Mapping[str, Any]:
        """Return the schedule's name."""
        return {"controller": self.name}


class ConstantSchedule(LearningRateSchedule):
    """The peak at every step."""

    name = "schedule:constant"

    def share(self, step: int, steps: int) -> float:
        """Return 1."""
        return 1.0


class CosineSchedule(LearningRateSchedule):
    """Half a cosine from the peak toward 0 (Loshchilov and Hutter 2017)."""

    name = "schedule:cosine"

    def share(self, step: int, steps: int) -> float:
        """Return (1 + cos(π (step - 1) / steps)) / 2."""
        return 0.5 * (1.0 + math.cos(math.pi * (step - 1) / steps))


class LinearSchedule(LearningRateSchedule):
    """A straight line from the peak toward 0."""

    name = "schedule:linear"

    def share(self, step: int, steps: int) -> float:
        """Return 1 - (step - 1) / steps."""
        return 1.0 - (step - 1) / steps


class WarmupStableDecaySchedule(LearningRateSchedule):
    """A rise to the peak, the peak, and a straight fall (Hu et al. 2024, "MiniCPM").

    Args:
        warmup: share of the steps that rise, in [0, 1].
        decay: share of the steps that fall, in [0, 1]; with ``warmup`` at most 1.

    Raises:
        ValueError: a share outside its range.
    """

    name = "schedule:warmup_stable_decay"

    def __init__(self, warmup: float = 0.1, decay: float = 0.2) -> None:
        super().__init__()
        self._warmup = require_number("warmup", warmup, low=0, high=1)
        self._decay = require_number("decay", decay, low=0, high=1)
        if self._warmup + self._decay > 1:
            raise ValueError(f"warmup, decay: together at most 1, got {self._warmup:g} + {self._decay:g}.")

    def share(self, step: int, steps: int) -> float:
        """Return step / w in the first w steps, (steps - step + 1) / (d + 1) in the last d, else 1."""
        rising, falling = round(self._warmup * steps), round(self._decay * steps)
        if step <= rising:
            return step / rising
        left = steps - step + 1
        return left / (falling + 1) if left <= falling else 1.0

    def describe(self) -> Mapping[str, Any]:
        """Return the shares."""
        return {"controller": self.name, "warmup": self._warmup, "decay": self._decay}


class AdaptiveKL(ABC):
    """Moves the KL coefficient so that the KL divergence comes to a target; the learning rate is the recipe's.

    It needs a round in which the KL is measured: a policy gradient with a coefficient above 0. Elsewhere it does
    nothing.

    Args:
        target: KL divergence to hold, in nats per token, in (0, 1000].

    Raises:
        ValueError: a target outside its range.
    """

    name = "schedule:adaptive_kl"

    def __init__(self, target: float = 0.1) -> None:
        self._target = require_number("target", target, low=0, high=1000, low_open=True)

    @abstractmethod
    def factor(self, kl: float) -> float:
        """Return what the coefficient is multiplied by after a step that showed ``kl``."""

    def begin(self, recipe: Recipe, sources: Sequence[str]) -> None:  # noqa: B027 - there is nothing to override
        """Nothing is remembered from step to step."""

    def decide(self, state: ControlState) -> Decision:
        """Return the coefficient's factor."""
        kl = state.signals.values.get("kl")
        if kl is None:
            return Decision(nothing(self.name, "no KL divergence was measured"))
        factor = self.factor(kl)
        if factor == 1.0:
            return Decision(nothing(self.name, f"KL {kl:g} is near its target {self._target:g}"))
        reason = f"KL {kl:g} against a target of {self._target:g}"
        candidate = Candidate(None, Adjustment("kl_scale", factor), self.name, reason)
        if not state.legal[_KL_UP if factor > 1 else _KL_DOWN]:
            idle = nothing(self.name, "the KL coefficient cannot be changed now")
            return Decision(idle, (candidate,), {self.name: "masked: cannot be applied now"})
        return Decision(candidate, (candidate,))

    def describe(self) -> Mapping[str, Any]:
        """Return the target."""
        return {"controller": self.name, "target": self._target}


_KL_UP, _KL_DOWN = catalogue_index("kl_up"), catalogue_index("kl_down")


class ProportionalKL(AdaptiveKL):
    """The proportional rule of Ziegler et al. 2019: coefficient times 1 + 0.1 · clip(KL / target - 1, -0.2, 0.2)."""

    name = "schedule:adaptive_kl"

    def factor(self, kl: float) -> float:
        """Return a factor in [0.98, 1.02]."""
        return 1.0 + 0.1 * min(max(kl / self._target - 1.0, -0.2), 0.2)


class DoublingKL(AdaptiveKL):
    """The adaptive penalty of PPO (Schulman et al. 2017): doubled above 1.5 times the target, halved below 1 / 1.5."""

    name = "schedule:adaptive_kl_doubling"

    def factor(self, kl: float) -> float:
        """Return 2, 0.5 or 1."""
        if kl > 1.5 * self._target:
            return 2.0
        return 0.5 if kl < self._target / 1.5 else 1.0


SCHEDULES: Mapping[str, type[LearningRateSchedule] | type[AdaptiveKL]] = {
    cls.name.removeprefix("schedule:"): cls
    for cls in (
        ConstantSchedule,
        CosineSchedule,
        LinearSchedule,
        WarmupStableDecaySchedule,
        ProportionalKL,
        DoublingKL,
    )
}
"""Schedules by the name after ``schedule:``."""
