"""The round of the scripted trainer: computed in microseconds, adjustable like a real one, no training at all."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .adjustments import Adjustment, require_adjustment
from .base import Checkpoint, Cost, Failure, Limit, RoundReport, checkpoint_id, round_id
from .fault_kinds import failure
from .faults import FaultWatch, failure_from_exception
from .mixes import mix_refusal, shifted_mix
from .monitor import Monitor
from .recipe import Recipe
from .signals import Signals

if TYPE_CHECKING:
    from .tasks.base import InnerTask
    from .testing import ScriptedTrainer

TOO_HIGH = 3e-3
"""Learning rate above which a step of a scripted round makes its scores worse."""

_ON_POLICY_ONLY = ("kl_scale", "entropy_scale", "temperature_scale", "generations_step")
_SCALED = {
    "grad_clip_scale": "max_grad_norm",
    "kl_scale": "kl_coef",
    "entropy_scale": "entropy_coef",
    "temperature_scale": "temperature",
}
_CHANGED_FROM_ZERO = 0.01


class ScriptedSession:
    """A scripted round; satisfies `TrainingSession`.

    Each step moves the scores toward a point that the mix decides: the most at a learning rate of 1e-3, the wrong way
    above `TOO_HIGH`. So a policy that looks at the rate in force can learn to correct it. A rollback forgets the steps
    since the snapshot.
    """

    def __init__(
        self,
        trainer: ScriptedTrainer,
        task: InnerTask,
        recipe: Recipe,
        start: Checkpoint,
        seed: int,
        limit: Limit | None,
        fault: Any,
    ) -> None:
        self._trainer, self._task, self._recipe, self._start, self._seed = trainer, task, recipe, start, seed
        self._fault, self._limit = fault, limit
        self._now = recipe
        self._curves: list[dict[str, float]] = []
        self._ended: str | None = None
        self._failure: Failure | None = None
        self._factor = 1.0
        self._factors: list[float] = []
        self._applied: list[tuple[int, Adjustment]] = []
        self._flags = ["scripted: nothing was trained"]
        self._gains: list[tuple[float, float, float]] = []  # of each step: how far it moves, shares of left and right
        self._snapshot: list[tuple[float, float, float]] = []
        self._hardest = self._frozen = False
        self._monitor = Monitor(tuple(recipe.mix), on_policy=recipe.algorithm == "grpo")
        self._spent, self._since = Cost(), 0  # before the last change of the batch, and the step of that change
        self._price_steps()
        self._check_limit()

    @property
    def step(self) -> int:
        """Steps done."""
        return len(self._curves)

    @property
    def done(self) -> bool:
        """Whether no further step will be taken."""
        return self._ended is not None

    def advance(self, steps: int | None = None) -> Mapping[str, float]:
        """Take scripted steps."""
        watch = FaultWatch(vocabulary_size=20, on_policy=False)
        for _ in range(self._recipe.steps if steps is None else steps):
            if self.done:
                break
            if isinstance(self._fault, BaseException):
                self._failure, self._ended = failure_from_exception(self._fault, self.step + 1), "failed"
                break
            if self._trainer.step_seconds > 0:
                time.sleep(self._trainer.step_seconds)
            scripted = self._fault or []
            loss = float(scripted[self.step]) if self.step < len(scripted) else 1.0 / (self.step + 1)
            rate = self._now.learning_rate * self._factor
            self._curves.append({"step": self.step + 1.0, "loss": loss, "grad_norm": 1.0, "learning_rate": rate})
            self._factors.append(self._factor)
            self._gains.append((self._gain(), self._now.mix.get("left", 0.0), self._now.mix.get("right", 0.0)))
            fault = watch.observe(self.step, loss, 1.0)
            if fault is not None:
                self._failure, self._ended = fault, "failed"
            elif self.step >= self._recipe.steps:
                self._ended = "finished"
            else:
                self._check_limit()
        return self._curves[-1] if self._curves else {}

    def _price_steps(self) -> None:
        """Put the price of a step in force, and how many of them the limit pays."""
        self._spent, self._since = self.cost if self._since < self.step else self._spent, self.step
        self._bound = self._trainer.step_cost_bound(self._task, self._now)
        self._steps_paid = math.inf
        if self._limit is not None and self._bound.in_unit(self._limit.unit) > 0:
            left = self._limit.amount - self._spent.in_unit(self._limit.unit)
            self._steps_paid = self.step + left // self._bound.in_unit(self._limit.unit)

    def _check_limit(self) -> None:
        if self.step + 1 > self._steps_paid:
            self._ended = "budget"

    @property
    def cost(self) -> Cost:
        """The cost of the steps so far."""
        return self._spent + self._bound.times(self.step - self._since) if self.step else Cost()

    @property
    def signals(self) -> Signals:
        """What the last step showed."""
        for row in self._curves[self._monitor.signals.step :]:  # only now: a round that no one watches needs none
            self._monitor.observe(int(row["step"]), {**row, **self._rewards(row)})
        return self._monitor.signals

    def _rewards(self, row: Mapping[str, float]) -> dict[str, float]:
        if self._recipe.algorithm != "grpo":
            return {}
        reward = 1.0 - 1.0 / (row["step"] + 1.0)
        return {"reward": reward, "reward_std": 0.1, "groups_without_spread": 0.25, "kl": 1e-3 * row["step"]}

    @property
    def settings(self) -> Mapping[str, float]:
        """Settings in force for the next step."""
        now = self._now
        sampled = ("kl_coef", "entropy_coef", "num_generations", "temperature")
        return {
            "learning_rate": now.learning_rate * self._factor,
            "learning_rate_factor": self._factor,
            "batch_size": float(now.batch_size),
            "max_grad_norm": now.max_grad_norm,
            **{name: float(getattr(now, name)) for name in sampled if now.algorithm == "grpo"},
            **{f"mix.{name}": weight for name, weight in now.mix.items()},
        }

    def refusal(self, adjustment: Adjustment) -> str | None:
        """Return why the adjustment cannot be applied now; None when it can."""
        require_adjustment(adjustment)
        if self.done:
            return f"the round has ended ({self._ended}) at step {self.step}"
        kind, algorithm = adjustment.kind, self._recipe.algorithm
        if kind in _ON_POLICY_ONLY and algorithm != "grpo":
            return f"{algorithm} samples nothing that it could change"
        if kind == "gamma_add":
            return f"{algorithm} has no discount"
        if kind.startswith("lora_"):
            if self._now.lora_rank == 0:
                return "the round trains no adapters"
            if self._frozen == (kind == "lora_freeze"):
                return f"the adapters are {'frozen' if self._frozen else 'not frozen'} already"
        if kind in ("mix_toward", "mix_away"):
            usable = self._trainer.usable_sources(self._task, self._recipe.algorithm)
            return mix_refusal(self._now.mix, adjustment, usable, algorithm)
        try:
            changed = self._changed(adjustment)
        except ValueError as error:
            return str(error).rstrip(".")
        if kind in ("batch_scale", "generations_step") and changed == self._now:
            return "no other size is legal"
        return None

    def apply(self, adjustment: Adjustment) -> None:
        """Change the round from the next step on.

        Raises:
            ValueError: `refusal` has a reason.
        """
        reason = self.refusal(adjustment)
        if reason is not None:
            raise ValueError(f"adjustment {adjustment.kind!r}: {reason}.")
        kind, number = adjustment.kind, adjustment.number
        if kind == "none":
            return
        self._applied.append((self.step, adjustment))
        if kind == "stop":
            self._ended = "stopped"
        elif kind == "lr_scale":
            self._factor *= number
        elif kind in ("batch_scale", "generations_step"):
            self._now = self._changed(adjustment)
            self._price_steps()
            self._check_limit()
        elif kind == "mix_reset":
            self._now, self._hardest = self._changed(adjustment), False
        elif kind == "hardest_rows":
            self._hardest = True
        elif kind.startswith("lora_"):
            self._frozen = kind == "lora_freeze"
        elif kind == "snapshot":
            self._snapshot = list(self._gains)
        elif kind == "rollback":
            self._gains = list(self._snapshot)
        else:
            self._now = self._changed(adjustment)

    def _changed(self, adjustment: Adjustment) -> Recipe:
        """Return the recipe in force after an adjustment; itself for kinds that are about something else.

        Raises:
            ValueError: a setting would leave the range it has in a recipe.
        """
        kind, now = adjustment.kind, self._now
        if kind in _SCALED:
            name = _SCALED[kind]
            scaled: dict[str, Any] = {name: (getattr(now, name) or _CHANGED_FROM_ZERO) * adjustment.number}
            return replace(now, **scaled)
        if kind in ("mix_toward", "mix_away"):
            return replace(now, mix=shifted_mix(now.mix, adjustment))
        if kind == "mix_reset":
            return replace(now, mix=self._recipe.mix)
        return self._resized(adjustment) if kind in ("batch_scale", "generations_step") else now

    def _resized(self, adjustment: Adjustment) -> Recipe:
        """Return the recipe with another batch or number of generations; groups always divide the batch."""
        now = self._now
        if adjustment.kind == "generations_step":
            legal = [n for n in range(2, now.batch_size + 1) if now.batch_size % n == 0]
            further = [n for n in legal if (n - now.num_generations) * adjustment.number > 0]
            nearest = min(further, key=lambda n: abs(n - now.num_generations), default=now.num_generations)
            return replace(now, num_generations=nearest)
        grid = now.num_generations if now.algorithm == "grpo" else 1
        away = 1 if adjustment.number > 1 else -1
        wanted = round(now.batch_size * adjustment.number / grid) * grid
        size = wanted if (wanted - now.batch_size) * away > 0 else now.batch_size + away * grid
        return now if adjustment.number == 1.0 or size < grid else replace(now, batch_size=size)

    def flag(self, sentence: str) -> None:
        """Add a sentence to the report's flags; one that is there already is not repeated."""
        if sentence not in self._flags:
            self._flags.append(sentence)

    def result(self) -> tuple[RoundReport, Checkpoint | None]:
        """Return the report and the moved scores."""
        ended = self._ended or "stopped"
        self._ended = ended
        if self.step == 0 and self._failure is None:
            self._failure, ended = failure("budget_too_small", 0, "no optimiser step was taken"), "failed"
        checkpoint = None
        if self._failure is None:
            ignored = self._trainer.ignored_settings(self._recipe.algorithm)
            whole = round_id(self._task, self._start, self._recipe, self._seed, ignored)
            made = checkpoint_id(whole, self._recipe.steps, self._factors, self._history())
            noise = np.random.default_rng(self._seed).normal(0, 0.005, 2)
            checkpoint = Checkpoint(made, {"scores": self.scores_now(noise)}, self._start.depth + 1)
        return (
            RoundReport(
                recipe=self._recipe,
                start=self._start.id,
                seed=self._seed,
                checkpoint=None if checkpoint is None else checkpoint.id,
                steps=self.step,
                ended=ended,
                supervised_tokens=self.step * self._recipe.batch_size,
                training_cost=self.cost,
                failure=self._failure,
                curves=tuple(self._curves),
                adjustments=tuple(self._applied),
                flags=tuple(self._flags),
            ),
            checkpoint,
        )

    def close(self) -> None:
        """End the round."""
        self._ended = self._ended or "stopped"

    def scores_now(self, noise: Any = 0.0) -> Any:
        """Return ``(2,)`` the scores after the steps so far, with what is added to them as ``noise``."""
        scores = self._start.weights["scores"]
        if self._history() or len(set(self._factors)) > 1:
            speed, left, right = (math.fsum(column) / max(1, len(self._gains)) for column in self._columns())
            speed *= min(1.0, len(self._gains) / 40)
            target = np.array([left, right]) * 0.9
        else:
            rate = self._recipe.learning_rate * (self._factors[0] if self._factors else 1.0)
            speed = -0.5 if rate > TOO_HIGH else math.exp(-((math.log10(rate) + 3) ** 2)) * min(1.0, self.step / 40)
            target = np.array([self._recipe.mix.get("left", 0.0), self._recipe.mix.get("right", 0.0)]) * 0.9
        return np.clip(scores + speed * np.maximum(target - scores, -0.2) + noise, 0.0, 1.0)

    def _columns(self) -> list[tuple[float, ...]]:
        return list(zip(*self._gains, strict=True)) or [(0.0,)] * 3

    def _gain(self) -> float:
        """Return how far the next step moves the scores, 1 at best for the recipe's own settings."""
        now, asked = self._now, self._recipe
        rate = now.learning_rate * self._factor
        gain = -0.5 if rate > TOO_HIGH else math.exp(-((math.log10(rate) + 3) ** 2))
        gain *= math.sqrt(now.batch_size / asked.batch_size)
        gain *= math.exp(-(math.log(now.temperature / asked.temperature) ** 2))
        return gain * (1.1 if self._hardest else 1.0) * (0.9 if self._frozen else 1.0)

    def _history(self) -> list[str]:
        """Return what made the scores others than those of the whole round, besides its learning rates."""
        return [
            f"{adjustment} after {step}"
            for step, adjustment in self._applied
            if adjustment.changes_weights
            and adjustment.kind not in ("lr_scale", "stop")
            and (step < self.step or adjustment.kind == "rollback")
        ]
