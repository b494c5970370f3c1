"""A tiny task that is no language model: one number per source is learned by gradient descent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posttrain_gym.inner_trainers.base import Cost
from posttrain_gym.inner_trainers.loop import Loop, LoopSettings, LoopStep, LoopTask, LoopTrainer
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.tasks import Benchmark, InnerTask, Item, Source

TARGETS = {"left": 1.0, "right": -2.0}


class Descent(Loop):
    """Descends the weighted squared distances to the targets, with noise from the global generator."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.now = dict(weights)
        self.used: list[LoopSettings] = []
        self.closed = 0

    def step(self, settings: LoopSettings) -> LoopStep:
        self.used.append(settings)
        losses = {name: (self.now[name] - target) ** 2 for name, target in TARGETS.items()}
        mix = settings.recipe.mix
        for name, target in TARGETS.items():
            gradient = 2 * mix.get(name, 0.0) * (self.now[name] - target)
            self.now[name] -= 100 * settings.learning_rate * (gradient + 0.01 * np.random.normal())
        loss = sum(mix.get(name, 0.0) * value for name, value in losses.items())
        metrics = {"grad_norm": 1.0, **{f"loss/{name}": value for name, value in losses.items()}}
        tokens = settings.recipe.batch_size
        return LoopStep(loss, metrics, Cost(trained_tokens=tokens, flops=12.0 * tokens), samples=tokens)

    def weights(self) -> dict[str, float]:
        return dict(self.now)

    def load(self, weights: Any) -> None:
        self.now = dict(weights)

    def close(self) -> None:
        self.closed += 1


class DescentTrainer(LoopTrainer):
    algorithms = ("descent",)
    reads = {"descent": ("entropy_coef", "gamma")}
    adjustments = frozenset(
        {"lr_scale", "lr_restart", "batch_scale", "entropy_scale", "gamma_add", "mix_toward", "mix_away", "mix_reset"}
        | {"snapshot", "rollback"}
    )

    def __init__(self) -> None:
        self.loops: list[Descent] = []

    def base_weights(self, task: InnerTask) -> dict[str, float]:
        return dict.fromkeys(TARGETS, 0.0)

    def build(self, task: InnerTask, recipe: Recipe, weights: Any, seed: int) -> Descent:
        self.loops.append(Descent(weights))
        return self.loops[-1]

    def score(self, task: InnerTask, weights: Any, items: Sequence[Item]) -> NDArray[np.float64]:
        distances = [abs(weights[item.data["source"]] - TARGETS[item.data["source"]]) for item in items]
        scores: NDArray[np.float64] = np.exp(-np.array(distances))[:, None]
        return scores

    def parameters(self, task: InnerTask) -> int:
        return 2

    def step_cost(self, task: InnerTask, recipe: Recipe) -> Cost:
        return Cost(trained_tokens=recipe.batch_size, flops=12.0 * recipe.batch_size)


class DescentTask(LoopTask):
    name = "descent"

    def __init__(self) -> None:
        self.made = DescentTrainer()

    def trainer(self) -> DescentTrainer:
        return self.made

    def sources(self) -> list[Source]:
        return [Source(name, {"records": [{"target": target}]}) for name, target in TARGETS.items()]

    def benchmark(self) -> Benchmark:
        def items(split: str) -> list[Item]:
            return [Item(f"{split} {name} {i}", name, {"source": name}) for name in TARGETS for i in range(2)]

        return Benchmark({"left": 0.5, "right": 0.5}, items("validation"), items("test"), score=lambda item, text: 0.0)
