r"""Example: an inner problem that is no language model. One network forecasts level, direction and volatility.

The sources are the three tasks, and the recipe's mix is the weights of their losses; adjustments move these weights
and the learning rate while the network trains, for instance when the tasks' gradients conflict.

    posttrain-gym run-recipe experiments/examples/forecasting.yaml \
        --task posttrain_gym.experiments.examples.forecasting:ForecastingFamily \
        --controller rules:experiments/examples/forecasting_rules.yaml --interval 27
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from posttrain_gym.experiments.examples.market import FEATURES, Windows, windows
from posttrain_gym.inner_trainers.base import Cost
from posttrain_gym.inner_trainers.loop import Loop, LoopSettings, LoopStep, LoopTask, LoopTrainer
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.tasks import Benchmark, InnerTask, Item, Source, TaskFamily

TASKS = ("direction", "level", "volatility")
HIDDEN = 64
BLOCK = 20
"""Windows of one benchmark item."""


@lru_cache(maxsize=64)
def windows_of(seed: int, split: str) -> Windows:
    """Return the windows of a series, made once."""
    return windows(seed, split)


class Network(torch.nn.Module):
    """A trunk of two layers that the three tasks share, and a head for each."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Tanh()
        )
        self.heads = torch.nn.ModuleDict({name: torch.nn.Linear(HIDDEN, 1) for name in TASKS})

    def forward(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the output of each head: (n, FEATURES) -> (n,)."""
        hidden = self.trunk(features)
        return {name: head(hidden)[:, 0] for name, head in self.heads.items()}


def losses_of(network: Network, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the loss of each task on a batch."""
    out = network(batch["features"])
    return {
        "direction": torch.nn.functional.binary_cross_entropy_with_logits(out["direction"], batch["direction"]),
        "level": torch.nn.functional.mse_loss(out["level"], batch["level"]),
        "volatility": torch.nn.functional.mse_loss(out["volatility"], batch["volatility"]),
    }


class ForecastingLoop(Loop):
    """Trains the network with Adam; batches run through the windows in a new order each epoch."""

    def __init__(self, data: Windows, weights: Mapping[str, torch.Tensor], seed: int) -> None:
        self._data, self._network = data, Network()
        self._generator = torch.Generator().manual_seed(seed)
        self._order = torch.empty(0, dtype=torch.long)
        self.load(weights)

    def step(self, settings: LoopSettings) -> LoopStep:
        """Take one step on the weighted losses; the weights of the mix, times three, are those of the losses."""
        size = settings.recipe.batch_size
        batch = self._batch(size)
        losses = losses_of(self._network, batch)
        trunk = list(self._network.trunk.parameters())
        gradients = {
            name: torch.cat([g.flatten() for g in torch.autograd.grad(loss, trunk, retain_graph=True)])
            for name, loss in losses.items()
        }
        total = sum(3 * settings.recipe.mix.get(name, 0.0) * loss for name, loss in losses.items())
        assert isinstance(total, torch.Tensor)
        self._optimizer.zero_grad()
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._network.parameters(), settings.recipe.max_grad_norm)
        self._optimizer.param_groups[0]["lr"] = settings.learning_rate
        self._optimizer.step()
        parameters = sum(p.numel() for p in self._network.parameters())
        return LoopStep(
            loss=float(total.detach()),
            metrics={
                "grad_norm": float(norm),
                # the signal's name for the angle that matters here: the smallest between two tasks on the shared trunk
                "grad_cosine": min(_cosines(gradients)),
                **{f"loss/{name}": float(loss.detach()) for name, loss in losses.items()},
            },
            cost=Cost(trained_tokens=size, flops=6.0 * parameters * size),
            samples=size,
        )

    def weights(self) -> dict[str, torch.Tensor]:
        """Return copies of the network's parameters."""
        return {name: value.detach().clone() for name, value in self._network.state_dict().items()}

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Put parameters in place, with a new optimiser."""
        self._network.load_state_dict(dict(weights))
        self._optimizer = torch.optim.Adam(self._network.parameters())

    def _batch(self, size: int) -> dict[str, torch.Tensor]:
        if len(self._order) < size:
            self._order = torch.randperm(len(self._data), generator=self._generator)
        chosen, self._order = self._order[:size], self._order[size:]
        names = ("features", "direction", "level", "volatility")
        return {name: getattr(self._data, name)[chosen] for name in names}


def _cosines(gradients: Mapping[str, torch.Tensor]) -> list[float]:
    names = list(gradients)
    return [
        float(torch.nn.functional.cosine_similarity(gradients[a], gradients[b], dim=0))
        for place, a in enumerate(names)
        for b in names[place + 1 :]
    ]


class ForecastingTrainer(LoopTrainer):
    """Trains `Network` on the windows of the task's series."""

    algorithms = ("forecast",)
    reads = {"forecast": ("max_grad_norm",)}
    adjustments = frozenset(
        {"lr_scale", "lr_restart", "grad_clip_scale", "mix_toward", "mix_away", "mix_reset", "snapshot", "rollback"}
    )

    def base_weights(self, task: InnerTask) -> dict[str, torch.Tensor]:
        """Return the initial parameters, equal for every series."""
        state = torch.get_rng_state()
        torch.manual_seed(0)
        weights = {name: value.detach().clone() for name, value in Network().state_dict().items()}
        torch.set_rng_state(state)
        return weights

    def build(self, task: InnerTask, recipe: Recipe, weights: Any, seed: int) -> ForecastingLoop:
        """Return the loop of one round."""
        assert isinstance(task, Forecasting)
        return ForecastingLoop(windows_of(task.seed, "train"), weights, seed)

    def score(self, task: InnerTask, weights: Any, items: Sequence[Item]) -> NDArray[np.float64]:
        """Return the mean skill in each block of windows: 1 / (1 + error), and the share of right directions."""
        assert isinstance(task, Forecasting)
        skill: dict[str, dict[str, NDArray[np.float64]]] = {}
        scores = []
        for item in items:
            split = item.data["split"]
            if split not in skill:
                skill[split] = skills(weights, windows_of(task.seed, split))
            first = item.data["first"]
            scores.append(skill[split][item.dimension][first : first + BLOCK].mean())
        return np.array(scores)[:, None]

    def parameters(self, task: InnerTask) -> int:
        """Return the number of parameters of the network."""
        return sum(p.numel() for p in Network().parameters())

    def step_cost(self, task: InnerTask, recipe: Recipe) -> Cost:
        """Return the cost of a batch; a token is one window."""
        return Cost(trained_tokens=recipe.batch_size, flops=6.0 * self.parameters(task) * recipe.batch_size)

    def evaluation_cost(self, task: InnerTask, items: int) -> Cost:
        """Return the cost of reading every window of the items."""
        count = items * BLOCK
        return Cost(scored_tokens=count, flops=2.0 * self.parameters(task) * count)


def forecasts(weights: Any, data: Windows) -> dict[str, NDArray[np.float64]]:
    """Return the output of each head on windows: ``(n,)``; of direction, the log odds."""
    network = Network()
    network.load_state_dict(dict(weights))
    with torch.no_grad():
        return {name: out.double().numpy() for name, out in network(data.features).items()}


def skills(weights: Any, data: Windows) -> dict[str, NDArray[np.float64]]:
    """Return the score of each window in each task, in [0, 1]."""
    out = forecasts(weights, data)
    return {
        "direction": ((out["direction"] > 0) == (data.direction.numpy() > 0.5)).astype(np.float64),
        "level": 1 / (1 + np.abs(out["level"] - data.level.numpy())),
        "volatility": 1 / (1 + np.abs(out["volatility"] - data.volatility.numpy())),
    }


class Forecasting(LoopTask):
    """Level, direction and volatility of one generated market series with regime changes."""

    name = "forecasting"

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def trainer(self) -> ForecastingTrainer:
        """Return the trainer."""
        return ForecastingTrainer()

    def facts(self) -> dict[str, Any]:
        """Return the name and the series."""
        return {"name": self.name, "series": self.seed, "rows": {name: {"records": 1} for name in TASKS}}

    def sources(self) -> list[Source]:
        """Return the three tasks; a record names the series, whose windows the trainer makes."""
        return [Source(name, {"records": [{"series": self.seed, "split": "train", "target": name}]}) for name in TASKS]

    def benchmark(self) -> Benchmark:
        """Return blocks of windows that come later in time than all training windows."""

        def items(split: str) -> list[Item]:
            count = len(windows_of(self.seed, split))
            return [
                Item(f"{split} {name} from {first}", name, {"split": split, "first": first})
                for name in TASKS
                for first in range(0, count - BLOCK + 1, BLOCK)
            ]

        return Benchmark(
            dict.fromkeys(TASKS, 1 / 3),
            items("validation"),
            items("test"),
            score=_scored_by_trainer,
            scorer_version="1",
        )


def _scored_by_trainer(item: Item, text: str) -> float:
    raise RuntimeError("forecasts are scored by ForecastingTrainer.score; there is no text.")


class ForecastingFamily(TaskFamily):
    """Forecasting tasks, one for each series."""

    name = "forecasting"
    train_seeds = range(0, 1000)
    test_seeds = range(1000, 1100)

    def instance(self, seed: int) -> Forecasting:
        """Return the task of one series."""
        return Forecasting(seed)
