"""The contracts every layer above sees: `InnerTrainer`, `TrainingSession`, and the records they exchange."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from .adjustments import Adjustment
from .messages import did_you_mean, require_number
from .recipe import Recipe
from .signals import Signals

if TYPE_CHECKING:
    from .tasks.base import InnerTask

CAUSES = ("hyperparameter", "data", "algorithm_mismatch", "resources", "environment")
"""Causes of a failed round, in the fixed order used by observations."""


@dataclass(frozen=True)
class Cost:
    """What something cost, counted and timed. Costs add.

    Attributes:
        trained_tokens: tokens that went forward and backward.
        generated_tokens: tokens sampled.
        scored_tokens: tokens that went forward only (prompts, reference log-probabilities).
        flops: 6·N per trained, 2·N per generated or scored token, N the parameters used; frozen parameters count
            4·N per trained token (their weight gradients are not computed).
        device_seconds: wall-clock seconds times devices. A clock decides it, so it never enters an observation
            unless the budget itself is in seconds.
    """

    trained_tokens: int = 0
    generated_tokens: int = 0
    scored_tokens: int = 0
    flops: float = 0.0
    device_seconds: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.trained_tokens + other.trained_tokens,
            self.generated_tokens + other.generated_tokens,
            self.scored_tokens + other.scored_tokens,
            self.flops + other.flops,
            self.device_seconds + other.device_seconds,
        )

    def times(self, factor: int) -> Cost:
        """Return this cost ``factor`` times over."""
        return Cost(
            self.trained_tokens * factor,
            self.generated_tokens * factor,
            self.scored_tokens * factor,
            self.flops * factor,
            self.device_seconds * factor,
        )

    def in_unit(self, unit: str) -> float:
        """Return the amount in a budget unit.

        ``"train_tokens"`` weighs a generated or scored token as a third of a trained one, the ratio of 2·N to 6·N;
        ``"flops"`` and ``"device_seconds"`` are as recorded.

        Raises:
            ValueError: another unit.
        """
        _require_unit(unit)
        if unit == "train_tokens":
            return self.trained_tokens + (self.generated_tokens + self.scored_tokens) / 3
        if unit == "flops":
            return self.flops
        return self.device_seconds


UNITS = ("train_tokens", "flops", "device_seconds")
"""Units a budget can have."""


@dataclass(frozen=True)
class Limit:
    """A hard limit on the training cost of one round: ``amount`` of ``unit`` (one of `UNITS`)."""

    unit: str
    amount: float

    def __post_init__(self) -> None:
        """Check unit and amount.

        Raises:
            ValueError: an unknown unit, or an amount that is negative or no finite number: NaN would never be passed.
        """
        _require_unit(self.unit)
        object.__setattr__(self, "amount", require_number("limit.amount", self.amount, low=0))


def _require_unit(unit: str) -> None:
    if unit not in UNITS:
        raise ValueError(f"unit: nothing is counted in {unit!r}.{did_you_mean(unit, UNITS)}")


@dataclass(frozen=True)
class Checkpoint:
    """Weights held in memory, with where they came from.

    Attributes:
        id: ``"base"`` for the task's own weights, else the `checkpoint_id` of the round that made them.
        weights: parameter name -> CPU tensor, or whatever the inner trainer keeps there.
        depth: rounds between the base weights and these.
    """

    id: str
    weights: Any = field(repr=False, compare=False)
    depth: int = 0


def round_id(task: InnerTask, start: Checkpoint, recipe: Recipe, seed: int, ignored: Collection[str] = ()) -> str:
    """Return 16 hex digits that name a round: equal for an equal training from equal weights, in any process.

    Args:
        task: what it trains on.
        start: the checkpoint it starts from; its id counts, not the name the recipe gives it.
        recipe: what is asked.
        seed: the trainer's seed.
        ignored: recipe fields that the algorithm ignores; see `InnerTrainer.ignored_settings`.
    """
    return _digest(f"{task.built.content_hash}/{start.id}/{recipe.training_hash(ignored)}/{seed}")


def checkpoint_id(round_id: str, planned: int, factors: Sequence[float], history: Sequence[str] = ()) -> str:
    """Return the id of the checkpoint a round made: the round's own when it finished as asked, else one of its own.

    Args:
        round_id: the round.
        planned: optimiser steps that were asked for.
        factors: for each step that was done, the product of the adjustments its learning rate was multiplied by.
        history: what else made the weights others than those of the whole round: what was done about each fault after
            which it went on, and each adjustment that reached a step, with that step.
    """
    if len(factors) == planned and all(factor == 1.0 for factor in factors) and not history:
        return round_id
    return _digest("/".join((round_id, str(list(map(float, factors))), *history)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Failure:
    """Why a round failed.

    Attributes:
        cause: one of `CAUSES`.
        kind: short name of the fault, for example ``"diverged"``, ``"oom"``, ``"nothing_supervised"``.
        step: optimiser step (from 1) at which it was seen; 0 before the first.
        evidence: one sentence with the numbers that show it.
    """

    cause: str
    kind: str
    step: int
    evidence: str


def student_t(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution, to three digits.

    Exact for one and two degrees of freedom; else the expansion of Abramowitz and Stegun (26.7.5) around the normal's.
    """
    if degrees == 1:
        return 12.7062047
    if degrees == 2:
        return 4.3026527
    z, n = 1.959963985, float(degrees)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    fourth = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160
    return z + first / n + second / n**2 + third / n**3 + fourth / n**4


@dataclass(frozen=True)
class DimensionScore:
    """One benchmark dimension of a scorecard; every entry is in [0, 1].

    Attributes:
        mean: mean verifier score over items and samples.
        standard_error: standard error of ``mean`` over items.
        pass_at_1: share of samples with full score.
        pass_at_k: unbiased estimate (Chen et al. 2021) that one of ``k`` samples has full score.
        format_rate: share of samples that have the asked form.
    """

    mean: float
    standard_error: float
    pass_at_1: float
    pass_at_k: float
    format_rate: float

    def interval(self, items: int) -> tuple[float, float]:
        """Return the 95 % confidence interval of ``mean``, in [0, 1]: Student's t over items.

        Args:
            items: items of the dimension, which the standard error was taken over; one item tells nothing.
        """
        if items < 2:
            return 0.0, 1.0
        half = student_t(items - 1) * self.standard_error
        return max(0.0, self.mean - half), min(1.0, self.mean + half)


@dataclass(frozen=True)
class Scorecard:
    """What a checkpoint scored on one split.

    Attributes:
        split: ``"validation"`` or ``"test"``.
        dimensions: dimension name -> scores, in sorted order.
        score: mean weighted by the benchmark's weights, in [0, 1].
        standard_error: standard error of ``score``, treating dimensions as independent.
        k: the ``k`` of pass@k.
        items: number of items.
        samples: number of samples per item.
        empty_share: share of completions without a token before the end token.
        clipped_share: share of completions cut at the length limit.
    """

    split: str
    dimensions: Mapping[str, DimensionScore]
    score: float
    standard_error: float
    k: int
    items: int
    samples: int
    empty_share: float = 0.0
    clipped_share: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Scorecard:
        """Read `to_dict` back."""
        dims = {name: DimensionScore(**entry) for name, entry in data["dimensions"].items()}
        return cls(**{**data, "dimensions": dims})


@dataclass(frozen=True)
class RoundReport:
    """The record of one round, carried from the trainer to the reward, the observation and the log.

    Attributes:
        recipe: what was asked.
        start: id of the checkpoint it started from.
        seed: the trainer's seed.
        checkpoint: id of the checkpoint it made; None when it failed.
        steps: optimiser steps done.
        ended: ``"finished"``, ``"budget"`` (cut at the limit), ``"stopped"`` (by an adjustment), ``"rolled_back"``
            (ended by a fault, with the last good weights) or ``"failed"``.
        supervised_tokens: tokens that carried a loss.
        rows_without_supervision: rows of the mix that kept no completion token at ``max_length``.
        training_cost: cost of the optimiser steps and their rollouts.
        evaluation_cost: cost of the scorecard; zero until evaluated.
        scorecard: validation scores of the checkpoint; None when it failed.
        failure: why it failed, or None.
        rescued: faults that did not end the round as failed: it was retried or rolled back; see `FaultPolicy`.
        rolled_back_to: after how many of its steps the checkpoint's weights were those of the round, when it was
            rolled back; else None, and they are those after the last step.
        curves: per optimiser step, name -> value: ``step``, ``loss``, ``grad_norm``, ``learning_rate`` as used, and
            what the algorithm adds.
        adjustments: what was applied while it ran: (optimiser steps done then, adjustment). Those that change
            nothing are left out.
        flags: sentences a person should read (truncated rows, clipped completions).
        cached: whether an equal earlier round answered; its cost is then zero.
        recorded: whether recorded or modelled rounds answered instead of training.
        wall_seconds: elapsed time; never part of an observation.
        peak_memory_bytes: most memory seen in use between forward passes, of the CUDA device that trained or else
            resident in the process; None when unknown. Never part of an observation.
        telemetry: what the card that trained told: energy, load, peak memory; see `telemetry.RoundTelemetry`. Never
            part of an observation.
    """

    recipe: Recipe
    start: str
    seed: int
    checkpoint: str | None
    steps: int
    ended: str
    supervised_tokens: int = 0
    rows_without_supervision: int = 0
    training_cost: Cost = field(default_factory=Cost)
    evaluation_cost: Cost = field(default_factory=Cost)
    scorecard: Scorecard | None = None
    failure: Failure | None = None
    rescued: tuple[Failure, ...] = ()
    rolled_back_to: int | None = None
    curves: tuple[Mapping[str, float], ...] = ()
    adjustments: tuple[tuple[int, Adjustment], ...] = ()
    flags: tuple[str, ...] = ()
    cached: bool = False
    recorded: bool = False
    wall_seconds: float = field(default=0.0, compare=False)
    peak_memory_bytes: int | None = field(default=None, compare=False)
    telemetry: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def cost(self) -> Cost:
        """Training and evaluation together."""
        return self.training_cost + self.evaluation_cost

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types; curve values that are not finite become text, as JSON has no such numbers."""
        data = asdict(replace(self, recipe=None, curves=(), adjustments=()))  # type: ignore[arg-type]
        data["recipe"] = self.recipe.to_dict()
        data["curves"] = [{k: (v if math.isfinite(v) else str(v)) for k, v in row.items()} for row in self.curves]
        data["adjustments"] = [[step, adjustment.to_dict()] for step, adjustment in self.adjustments]
        data["flags"], data["rescued"] = list(self.flags), [asdict(fault) for fault in self.rescued]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RoundReport:
        """Read `to_dict` back.

        Raises:
            ValueError, KeyError, TypeError: the data is not a report.
        """
        values = dict(data)
        values["recipe"] = Recipe.from_dict(values["recipe"])
        values["training_cost"] = Cost(**values["training_cost"])
        values["evaluation_cost"] = Cost(**values["evaluation_cost"])
        if values["scorecard"] is not None:
            values["scorecard"] = Scorecard.from_dict(values["scorecard"])
        if values["failure"] is not None:
            values["failure"] = Failure(**values["failure"])
        values["rescued"] = tuple(Failure(**fault) for fault in values.get("rescued", ()))
        values["curves"] = tuple({k: float(v) for k, v in row.items()} for row in values["curves"])
        values["adjustments"] = tuple(
            (int(step), Adjustment.from_dict(entry)) for step, entry in values.get("adjustments", ())
        )
        values["flags"] = tuple(values["flags"])
        return cls(**values)


class TrainingSession(Protocol):
    """A round that is running. Use from one thread; `close` may be called at any moment and any number of times.

    Each must be ended by `result` or `close`: one that is only let go of keeps its weights until the process ends.
    """

    @property
    def step(self) -> int:
        """Optimiser steps done."""

    @property
    def done(self) -> bool:
        """Whether no further step will be taken."""

    @property
    def cost(self) -> Cost:
        """Training cost so far."""

    @property
    def signals(self) -> Signals:
        """What the last optimiser step showed; all absent before the first."""

    @property
    def settings(self) -> Mapping[str, float]:
        """Settings in force for the next step, by the names of recipe fields; ``mix.NAME`` for a source's weight.

        ``learning_rate`` is the rate the next step will use; ``learning_rate_factor`` what adjustments have made of
        the schedule's; ``lora_frozen``, of rounds with adapters, 1 while only their up-projections train, else 0.
        """

    def advance(self, steps: int | None = None) -> Mapping[str, float]:
        """Take up to ``steps`` optimiser steps (all that are left when None); return the last step's curve row.

        A fault in training ends the session instead of raising: see `result`.
        """

    def refusal(self, adjustment: Adjustment) -> str | None:
        """Return why the adjustment cannot be applied now, as a sentence; None when it can. Changes nothing."""

    def apply(self, adjustment: Adjustment) -> None:
        """Change the round from the next step on.

        Raises:
            ValueError: `refusal` has a reason: the round has ended, or this algorithm or device cannot take it.
        """

    def flag(self, sentence: str) -> None:
        """Add a sentence to the flags of the round's report; one that is there already is not repeated."""

    def result(self) -> tuple[RoundReport, Checkpoint | None]:
        """Close the session; return its report (without scorecard) and the checkpoint, None after a failure."""

    def close(self) -> None:
        """End training now and free everything it holds."""


@runtime_checkable
class InnerTrainer(Protocol):
    """Runs rounds on tasks and evaluates checkpoints."""

    recorded: bool
    """Whether its answers come from recorded or modelled rounds instead of training."""

    @property
    def algorithms(self) -> tuple[str, ...]:
        """Names of the algorithms it knows, in a fixed order."""

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        """Plain JSON types: what of the trainer's own settings changes results. A journal holds rounds of one only."""

    def ignored_settings(self, algorithm: str) -> tuple[str, ...]:
        """Return the recipe fields that ``algorithm`` ignores: recipes that differ in them alone are one training."""

    def usable_sources(self, task: InnerTask, algorithm: str) -> tuple[str, ...]:
        """Return the names of the sources that have the rows ``algorithm`` trains on, sorted."""

    def base(self, task: InnerTask) -> Checkpoint:
        """Return the task's base weights."""

    def parameters(self, task: InnerTask) -> int:
        """Return the number of parameters of the task's model."""

    def check(self, task: InnerTask, recipe: Recipe) -> None:
        """Refuse a recipe that cannot run on the task, before anything heavy is loaded.

        Raises:
            ValueError: what does not fit, with the values that would.
        """

    def step_cost_bound(self, task: InnerTask, recipe: Recipe) -> Cost:
        """Return the most one optimiser step of the recipe can cost (device-seconds zero when unknown)."""

    def evaluation_cost_bound(self, task: InnerTask, split: str) -> Cost:
        """Return the most one evaluation can cost (device-seconds zero when unknown)."""

    def begin(
        self, task: InnerTask, recipe: Recipe, start: Checkpoint, seed: int, limit: Limit | None = None
    ) -> TrainingSession:
        """Start a round, parked before its first step; no step is taken that could pass ``limit``.

        Raises:
            ValueError: as `check`.
        """

    def evaluate(self, task: InnerTask, checkpoint: Checkpoint, split: str) -> tuple[Scorecard, Cost]:
        """Score a checkpoint on one split; deterministic."""


@runtime_checkable
class QuickEvaluator(Protocol):
    """An inner trainer that can also score a round while it is parked, for rewards that are shaped."""

    def quick_cost_bound(self, task: InnerTask, items: int) -> Cost:
        """Return the most one quick evaluation on ``items`` validation items can cost (device-seconds zero)."""

    def quick_score(self, task: InnerTask, session: TrainingSession, items: int) -> tuple[float, Cost]:
        """Score the weights that a parked session has now; changes nothing about the round, deterministic.

        Args:
            task: what it trains on.
            session: a session of this trainer's that is not done.
            items: validation items at most, at least one of each dimension.

        Returns:
            The weighted score in [0, 1], and what it cost.
        """
