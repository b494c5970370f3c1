"""Example: an inner problem that is no language model, with a trainer of its own: PPO on a body with sparse reward.

Run it: `posttrain-gym run-recipe --task posttrain_gym.experiments.examples.sparse_control:SparseControl
experiments/examples/sparse_control.yaml --controller rules:experiments/examples/sparse_control_rules.yaml`
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from posttrain_gym.inner_trainers.loop import LoopTask
from posttrain_gym.inner_trainers.messages import require_integer
from posttrain_gym.inner_trainers.tasks import Benchmark, Item, Source, TaskFamily

from .sparse_locomotion import START_POOL, problem_named

if TYPE_CHECKING:
    from .sparse_trainer import SparseTrainer

TRAINING_STARTS = 8192
ITEMS = 24
"""Items of each dimension and split, where nothing else is asked."""

DIMENSIONS = ("marks", "success")


class SparseControl(LoopTask):
    """A body that is rewarded only when it reaches marks, learned by Stable-Baselines3's PPO.

    A row is a start of a training episode, an item is a start of an evaluation episode; both are reset seeds, and no
    seed is in two splits. Dimension ``success`` scores 1 where the first mark was reached, ``marks`` the share of all
    marks. A "token" is an environment step; see `SparseTrainer`.

    Args:
        problem: a name of `PROBLEMS`.
        instance: decides the untrained policy that rounds start from.
        items: starts in each dimension and split, at least 1; more make smaller errors.
    """

    def __init__(self, problem: str = "hopper", instance: int = 0, items: int = ITEMS) -> None:
        self.problem_name, self.problem, self.instance = problem, problem_named(problem), instance
        self._items = require_integer("items", items, low=1, high=100_000)
        self.name = f"sparse-{problem}"

    def sources(self) -> list[Source]:
        """Return one source, the starts of training episodes."""
        return [Source("starts", {"records": [{"start": start} for start in range(TRAINING_STARTS)]})]

    def benchmark(self) -> Benchmark:
        """Return starts of evaluation episodes."""
        own = {"problem": self.problem_name, "policy": self.instance, "versions": _versions(self.problem.environment)}

        def items(first: int) -> list[Item]:
            starts = range(first, first + self._items * len(DIMENSIONS))
            return [
                Item(f"start {start}", DIMENSIONS[start % len(DIMENSIONS)], {"start": start, **own}) for start in starts
            ]

        return Benchmark(
            {"success": 0.5, "marks": 0.5},
            validation=items(START_POOL // 2),
            test=items(START_POOL // 2 + self._items * len(DIMENSIONS)),
            score=lambda item, text: _score(item, text, len(self.problem.marks)),
            scorer_version=f"marks {self.problem.marks} in {self.problem.max_steps} steps",
        )

    def trainer(self) -> SparseTrainer:
        """Return the trainer of this task."""
        from .sparse_trainer import SparseTrainer

        return SparseTrainer()

    def recipe_defaults(self) -> Mapping[str, Any]:
        """Return Stable-Baselines3's defaults, with minibatches of 256 in place of 64."""
        return {
            "steps": 28,
            "batch_size": 256,
            "learning_rate": 3e-4,
            "num_iterations": 10,
            "gamma": 0.99,
            "gae_lambda": 0.95,
            "clip_range": 0.2,
            "entropy_coef": 0.0,
            "vf_coef": 0.5,
            "max_grad_norm": 0.5,
        }


class SparseControlFamily(TaskFamily):
    """One problem from many untrained policies; meta-training and meta-testing have policies of their own."""

    name = "sparse-control"
    train_seeds = range(100, 200)
    test_seeds = range(100)

    def __init__(self, problem: str = "hopper") -> None:
        self._problem = problem

    def instance(self, seed: int) -> SparseControl:
        """Return the task of one untrained policy."""
        return SparseControl(self._problem, seed)


class SparseMountainCar(SparseControl):
    """The same where MuJoCo is missing: a car in a valley, with three marks on the hill."""

    def __init__(self, instance: int = 0, items: int = ITEMS) -> None:
        super().__init__("mountain-car", instance, items)


def _score(item: Item, marks: str, of: int) -> float:
    """Return the score of an episode, given as the number of marks that it reached."""
    try:
        reached = int(marks)
    except ValueError:
        return 0.0
    return float(reached > 0) if item.dimension == "success" else max(0, min(reached, of)) / of


def _versions(environment: str) -> str:
    """Return what decides how the body moves and how it learns: results of other versions are other results."""
    names = ["gymnasium", "stable-baselines3", *(["mujoco"] if environment.startswith("Hopper") else [])]
    return ", ".join(f"{name} {_version(name)}" for name in names)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
