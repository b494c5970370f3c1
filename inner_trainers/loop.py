"""A base for inner trainers that are a training loop of one's own and no language model.

An author writes three things: a `Loop`, the training that runs, one optimiser step at a time; a `LoopTrainer`, which
builds loops and scores what they made; and an `InnerTask` whose ``trainer()`` returns it. Sessions, limits, costs,
adjustments, signals, faults and checkpoints are done here, in the way they are done for language models.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .base import Checkpoint, Cost, Limit, Scorecard
from .evaluation import summarise_dimension
from .fault_policy import FaultPolicy
from .messages import did_you_mean, require_integer
from .recipe import Recipe
from .tasks.base import InnerTask, Item

ALWAYS_READ = ("batch_size", "gradient_accumulation", "learning_rate", "schedule", "steps", "warmup_steps")
"""Recipe fields that every loop is taken to read."""


@dataclass(frozen=True)
class LoopSettings:
    """What a loop's next step uses: the recipe as adjustments have left it, and the rate of this step.

    Attributes:
        recipe: the recipe in force; its mix, coefficients, discount and batch are those of now.
        learning_rate: the rate of this step: the schedule's, times what adjustments have made of it.
    """

    recipe: Recipe
    learning_rate: float


@dataclass(frozen=True)
class LoopStep:
    """What one step of a loop did.

    Attributes:
        loss: the loss that was descended.
        metrics: name -> value: curves (any name), and signals where they have the name of one in `signals.SIGNALS`
            (``grad_norm``, ``reward``, ``reward_sparsity``, ``entropy``) or are ``loss/SOURCE`` of a source.
        cost: what it cost; seconds are measured by the session.
        samples: training samples that carried a loss.
    """

    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    cost: Cost = field(default_factory=Cost)
    samples: int = 1


class Loop(ABC):
    """One training that runs. It is built for one round, and closed at its end."""

    @abstractmethod
    def step(self, settings: LoopSettings) -> LoopStep:
        """Take one optimiser step with these settings; an exception ends the round as a labelled failure."""

    @abstractmethod
    def weights(self) -> Any:
        """Return a copy of the weights, which later steps leave alone."""

    @abstractmethod
    def load(self, weights: Any) -> None:
        """Put weights back that `weights` returned, and forget the optimiser's state."""

    def close(self) -> None:
        """Free what the loop holds; called once or more."""
        return


class LoopTask(InnerTask):
    """A task that is no language model: its trainer makes the base weights, and no folder is ever opened."""

    def base_checkpoint(self) -> Path:
        """Return a folder that is not there."""
        return Path("made-by-the-trainer")

    @abstractmethod
    def trainer(self) -> LoopTrainer:
        """Return the task's trainer."""


class LoopTrainer(ABC):
    """An inner trainer whose rounds are `Loop`s; satisfies `InnerTrainer`.

    Attributes:
        algorithms: names of the algorithms, in a fixed order.
        reads: algorithm -> the recipe fields that it reads beside `ALWAYS_READ`; the others are ignored.
        adjustments: kinds of adjustments that its loops take beside ``none`` and ``stop``; see `adjustments.KINDS`.
            Which of them the session can do: rates (``lr_scale``, ``lr_restart``), ``batch_scale``,
            ``grad_clip_scale``, ``kl_scale``, ``entropy_scale``, ``gamma_add``, ``temperature_scale``, the mix
            (``mix_toward``, ``mix_away``, ``mix_reset``), ``snapshot`` and ``rollback``.
        rows: the kind of rows that its algorithms train on.
        on_policy: whether the loss is a policy gradient, whose size says nothing of health.
        fault_policy: where faults begin.
        version: names the behaviour of trainer and loops; part of `fingerprint`.
        samples: how often each item is scored.
    """

    recorded: bool = False
    algorithms: tuple[str, ...] = ()
    reads: Mapping[str, Collection[str]] = MappingProxyType({})
    adjustments: Collection[str] = frozenset({"lr_scale", "snapshot", "rollback"})
    rows: str = "records"
    on_policy: bool = False
    fault_policy: FaultPolicy = FaultPolicy()
    version: str = "1"
    samples: int = 1

    # What an author writes --------------------------------------------------------------------------------------

    @abstractmethod
    def base_weights(self, task: InnerTask) -> Any:
        """Return the weights that every search on the task starts from; equal in any process."""

    @abstractmethod
    def build(self, task: InnerTask, recipe: Recipe, weights: Any, seed: int) -> Loop:
        """Return the loop of one round, which starts from a copy of ``weights``."""

    @abstractmethod
    def score(self, task: InnerTask, weights: Any, items: Sequence[Item]) -> NDArray[np.float64]:
        """Return how well weights do on items: ``(items, samples)`` float in [0, 1], deterministic."""

    @abstractmethod
    def parameters(self, task: InnerTask) -> int:
        """Return the number of parameters of the task's model."""

    @abstractmethod
    def step_cost(self, task: InnerTask, recipe: Recipe) -> Cost:
        """Return the most one optimiser step can cost, seconds left out."""

    def evaluation_cost(self, task: InnerTask, items: int) -> Cost:
        """Return the most scoring so many items can cost, seconds left out: 2·N FLOPs an item and sample."""
        passes = items * self.samples
        return Cost(scored_tokens=passes, flops=2.0 * self.parameters(task) * passes)

    # What a search asks -----------------------------------------------------------------------------------------

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        """Class and version."""
        return {"trainer": type(self).__name__, "version": self.version, "fault_policy": self.fault_policy.to_dict()}

    def ignored_settings(self, algorithm: str) -> tuple[str, ...]:
        """Return the recipe fields that ``algorithm`` ignores."""
        from dataclasses import fields

        read = {"algorithm", "mix", "start", *ALWAYS_READ, *self.reads.get(algorithm, ())}
        return tuple(each.name for each in fields(Recipe) if each.init and each.name not in read)

    def usable_sources(self, task: InnerTask, algorithm: str) -> tuple[str, ...]:
        """Return the names of the sources that have rows of the trainer's kind, sorted.

        Raises:
            ValueError: an unknown algorithm.
        """
        self._require(algorithm)
        return tuple(sorted(name for name, source in task.built.sources.items() if self.rows in source.rows))

    def base(self, task: InnerTask) -> Checkpoint:
        """Return the task's base weights."""
        return Checkpoint("base", self.base_weights(task))

    def check(self, task: InnerTask, recipe: Recipe) -> None:
        """Refuse a recipe that cannot run on the task; see `InnerTrainer.check`."""
        self._require(recipe.algorithm)
        usable = self.usable_sources(task, recipe.algorithm)
        for name, weight in recipe.mix.items():
            if name not in task.built.sources:
                raise ValueError(
                    f"mix: task {task.name!r} has no source {name!r}.{did_you_mean(name, task.built.sources)}"
                )
            if weight > 0 and name not in usable:
                raise ValueError(
                    f"mix: source {name!r} has no {self.rows} rows, which {recipe.algorithm} trains on; sources that "
                    f"have: {', '.join(usable) or 'none'}."
                )

    def step_cost_bound(self, task: InnerTask, recipe: Recipe) -> Cost:
        """Return the most one optimiser step can cost."""
        self.check(task, recipe)
        return self.step_cost(task, recipe)

    def evaluation_cost_bound(self, task: InnerTask, split: str) -> Cost:
        """Return the most one evaluation can cost."""
        return self.evaluation_cost(task, len(task.built.benchmark.items(split)))

    def begin(self, task: InnerTask, recipe: Recipe, start: Checkpoint, seed: int, limit: Limit | None = None) -> Any:
        """Start a round, parked before its first step; see `InnerTrainer.begin`.

        Returns:
            A `loop_session.LoopSession`.
        """
        from .loop_session import LoopSession

        self.check(task, recipe)
        require_integer("seed", seed, low=0, high=2**32 - 1)
        return LoopSession(self, task, recipe, start, seed, limit)

    def evaluate(self, task: InnerTask, checkpoint: Checkpoint, split: str) -> tuple[Scorecard, Cost]:
        """Score a checkpoint on one split.

        Raises:
            ValueError: `score` returned something else than it must.
        """
        began = time.perf_counter()
        benchmark = task.built.benchmark
        items = benchmark.items(split)
        scores = np.asarray(self.score(task, checkpoint.weights, items), dtype=np.float64)
        if scores.ndim != 2 or len(scores) != len(items) or scores.shape[1] < 1:
            raise ValueError(
                f"{type(self).__name__}.score: expected an array (items, samples) of {len(items)} rows, got "
                f"{scores.shape}."
            )
        if not bool(((scores >= 0) & (scores <= 1)).all()):
            raise ValueError(
                f"{type(self).__name__}.score: expected scores in [0, 1], got {scores.min()} to {scores.max()}."
            )
        k = scores.shape[1]
        dimensions = {}
        for name in benchmark.dimensions:
            rows = [place for place, item in enumerate(items) if item.dimension == name]
            dimensions[name] = summarise_dimension(scores[rows], np.ones((len(rows), k), np.bool_), k)
        weights = benchmark.weights
        card = Scorecard(
            split=split,
            dimensions=dimensions,
            score=math.fsum(weights[name] * entry.mean for name, entry in dimensions.items()),
            standard_error=math.sqrt(
                math.fsum((weights[name] * entry.standard_error) ** 2 for name, entry in dimensions.items())
            ),
            k=k,
            items=len(items),
            samples=k,
        )
        bound = self.evaluation_cost(task, len(items))
        seconds = time.perf_counter() - began
        return card, Cost(bound.trained_tokens, bound.generated_tokens, bound.scored_tokens, bound.flops, seconds)

    def _require(self, algorithm: str) -> None:
        if algorithm not in self.algorithms:
            raise ValueError(f"algorithm: unknown {algorithm!r}.{did_you_mean(algorithm, self.algorithms)}")
