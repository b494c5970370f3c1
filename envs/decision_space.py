"""What may be tried: the single source of the action space, of encode/decode, and of what is legal."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import gymnasium as gym
import numpy as np

from ..inner_trainers.messages import did_you_mean, require_number
from ..inner_trainers.recipe import STARTS, Recipe

_KNOBS: Mapping[str, Any] = MappingProxyType(
    {
        name: entry.default
        for name, entry in Recipe.__dataclass_fields__.items()
        if entry.init and name not in ("algorithm", "mix", "start")
    }
)

STOP = 0
"""Index of ``stop`` in the algorithm choice; it is always legal."""

MIX_GRID = 1000
"""Mix weights are multiples of 1 / MIX_GRID."""

COSTLY_KNOBS = ("batch_size", "gradient_accumulation", "kl_coef", "lora_rank", "max_length", "packing")
"""Knobs that change what an optimiser step can cost; all but ``lora_rank`` cost the least at their lowest value."""

_SIGNIFICANT_DIGITS = 4


@dataclass(frozen=True)
class Parameter:
    """One numeric knob of the recipe, mapped to a coordinate in [-1, 1].

    Attributes:
        low: smallest value.
        high: largest value.
        scale: ``"linear"`` or ``"log"``.
        integer: whether values are rounded to integers.
        choices: the only values there are, in ascending order; ``low``, ``high`` and ``scale`` are then unused.
    """

    low: float = 0.0
    high: float = 1.0
    scale: str = "linear"
    integer: bool = False
    choices: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Check the range.

        Raises:
            ValueError: an empty range, a log scale that touches 0, or choices out of order.
        """
        if self.choices:
            if list(self.choices) != sorted(set(self.choices)):
                raise ValueError(f"parameter: choices must ascend without repeats, got {self.choices}.")
            return
        require_number("parameter.low", self.low)
        require_number("parameter.high", self.high)
        if self.scale not in ("linear", "log"):
            raise ValueError(f"parameter.scale: unknown {self.scale!r}.{did_you_mean(self.scale, ('linear', 'log'))}")
        if self.low >= self.high:
            raise ValueError(f"parameter: low must be below high, got [{self.low}, {self.high}].")
        if self.scale == "log" and self.low <= 0:
            raise ValueError(f"parameter: a log scale needs low > 0, got {self.low}.")

    def narrowed(self, low: float, high: float) -> Parameter:
        """Return this knob within ``low`` and ``high`` too, as a probe suggests; one value becomes a single choice.

        Raises:
            ValueError: none of its values is in that range.
        """
        if self.choices:
            kept = tuple(choice for choice in self.choices if low <= choice <= high)
            if not kept:
                raise ValueError(f"parameter: none of the choices {list(self.choices)} is in [{low:g}, {high:g}].")
            return Parameter(choices=kept)
        below, above = max(self.low, low), min(self.high, high)
        if self.integer:
            below, above = math.ceil(below), math.floor(above)
        if below > above:
            raise ValueError(
                f"parameter: [{self.low:g}, {self.high:g}] and [{low:g}, {high:g}] have no value in common."
            )
        return Parameter(choices=(below,)) if below == above else replace(self, low=below, high=above)

    def decode(self, coordinate: float) -> float | int:
        """Return the value at a coordinate in [-1, 1], on the grid: integers, choices, or 4 significant digits."""
        share = (min(1.0, max(-1.0, coordinate)) + 1.0) / 2.0
        if self.choices:
            return self.choices[min(int(share * len(self.choices)), len(self.choices) - 1)]
        if self.scale == "log":
            value = self.low * (self.high / self.low) ** share
        else:
            value = self.low + (self.high - self.low) * share
        if self.integer:
            return int(min(self.high, max(self.low, round(value))))
        rounded = float(f"{value:.{_SIGNIFICANT_DIGITS - 1}e}")
        return min(self.high, max(self.low, rounded))

    def values(self) -> Sequence[float]:
        """Return every value on the grid of a knob with choices or integers; nothing for a continuous one."""
        if self.choices:
            return self.choices
        return range(math.ceil(self.low), math.floor(self.high) + 1) if self.integer else ()

    def encode(self, value: float) -> float:
        """Return the coordinate of a value; `decode` gives the value back when it lies on the grid.

        Raises:
            ValueError: a value that is not among the choices or outside the range.
        """
        if self.choices:
            if value not in self.choices:
                raise ValueError(f"{value!r} is not among the choices {list(self.choices)}")
            return (2 * self.choices.index(value) + 1) / len(self.choices) - 1.0
        if not self.low <= value <= self.high:
            raise ValueError(f"{value!r} is outside [{self.low:g}, {self.high:g}]")
        if self.scale == "log":
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return 2.0 * share - 1.0


DEFAULT_PARAMETERS: Mapping[str, Parameter] = MappingProxyType(
    {
        "batch_size": Parameter(choices=(16, 32, 64)),
        "learning_rate": Parameter(3e-5, 1e-2, scale="log"),
        "num_generations": Parameter(choices=(4, 8)),
        "steps": Parameter(10, 60, scale="log", integer=True),
    }
)
"""Knobs of the default decision space; the learning-rate range reaches from no effect to collapse on tiny models."""


@dataclass(frozen=True)
class DecisionSpace:
    """The recipes a search may try on a family of tasks.

    Attributes:
        algorithms: algorithm names; action 0 is ``stop``, action ``i + 1`` is ``algorithms[i]``.
        sources: source names, in the order of the mix coordinates.
        usable: algorithm -> the sources that have the rows it trains on. An algorithm without any is never legal, and
            its mix is over all sources.
        parameters: recipe field -> its knob, in sorted order.
        fixed: recipe fields that every recipe shares.
    """

    algorithms: tuple[str, ...]
    sources: tuple[str, ...]
    usable: Mapping[str, tuple[str, ...]]
    parameters: Mapping[str, Parameter] = field(default_factory=lambda: dict(DEFAULT_PARAMETERS))
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check names and ranges, so that every action decodes to a recipe.

        Raises:
            ValueError: no algorithms or sources; a parameter that is no numeric recipe field, is fixed too, or reaches
                values no recipe may have; or batches that no allowed number of generations divides.
        """
        if not self.algorithms or not self.sources:
            raise ValueError("decision space: it needs at least one algorithm and one source.")
        for name in [*self.parameters, *self.fixed]:
            if name not in _KNOBS:
                raise ValueError(f"decision space: {name!r} is no knob of a recipe.{did_you_mean(name, _KNOBS)}")
            if name in self.parameters and name in self.fixed:
                raise ValueError(f"decision space: {name!r} is both a parameter and fixed.")
        put = object.__setattr__
        put(self, "parameters", dict(sorted(self.parameters.items())))
        put(self, "fixed", dict(self.fixed))
        put(self, "usable", {name: self._usable_in_order(name) for name in self.algorithms})
        for name, parameter in self.parameters.items():
            self._check_range(name, parameter)
        for accumulation in self._integers("gradient_accumulation") if self._groups else ():
            if not self._batch_sizes(accumulation):
                raise ValueError(
                    f"decision space: of num_generations {list(self._integers('num_generations'))} none that is at "
                    f"least 2 divides batch_size {list(self._integers('batch_size'))} x gradient_accumulation "
                    f"{accumulation}."
                )

    def _usable_in_order(self, algorithm: str) -> tuple[str, ...]:
        if algorithm not in self.usable:
            raise ValueError(f"decision space: usable names no sources for {algorithm!r}.")
        for name in self.usable[algorithm]:
            if name not in self.sources:
                raise ValueError(f"decision space: usable has {name!r}.{did_you_mean(name, self.sources)}")
        return tuple(name for name in self.sources if name in self.usable[algorithm])

    def _check_range(self, name: str, parameter: Parameter) -> None:
        if isinstance(_KNOBS[name], int) and not (
            parameter.integer or (parameter.choices and all(isinstance(c, int) for c in parameter.choices))
        ):
            raise ValueError(f"decision space: {name} is an integer; give the parameter integer=True or whole choices.")
        for value in parameter.choices or (parameter.decode(-1.0), parameter.decode(1.0)):
            try:
                Recipe("any", {"any": 1.0}, **{"steps": 100_000, **self.fixed, name: value})
            except ValueError as error:
                raise ValueError(f"decision space: {error}") from error

    @property
    def _groups(self) -> bool:
        """Whether the space says anything about generations; a space without on-policy algorithms need not."""
        return "num_generations" in self.parameters or "num_generations" in self.fixed

    @cached_property
    def _generations(self) -> tuple[int, ...]:
        return tuple(n for n in self._integers("num_generations") if n >= 2)

    def _batch_sizes(self, accumulation: int) -> list[int]:
        """Return the batch sizes of the space that some number of generations divides."""
        sizes = self._integers("batch_size")
        return [size for size in sizes if any(size * accumulation % n == 0 for n in self._generations)]

    def _integers(self, name: str) -> tuple[int, ...]:
        if name in self.parameters:
            return tuple(int(value) for value in self.parameters[name].values())
        return (int(self.fixed.get(name, _KNOBS[name])),)

    def cheapest_recipes(self, algorithm: str, sources: Sequence[str], **held: Any) -> list[Recipe]:
        """Return recipes of which one has the cheapest optimiser steps over a mix of all ``sources``.

        Args:
            algorithm: algorithm name.
            sources: what the mix is over, at least one of the usable sources.
            **held: knobs with a value that is kept; the others of `COSTLY_KNOBS` take the values that cost the least.
        """
        mix = {name: 1.0 / len(sources) for name in sources}
        return [self.recipe(algorithm, mix=mix, **{**knobs, **held}) for knobs in self._cheapest_knobs(held)]

    def cheaper_recipes(self, recipe: Recipe) -> list[Recipe]:
        """Return the recipe with the other `COSTLY_KNOBS` than the batch at the values whose steps cost the least."""
        return [self._with(recipe, **knobs) for knobs in self._cheapest_knobs(("batch_size",))]

    def with_largest_batch(self, recipe: Recipe, payable: Callable[[Recipe], bool]) -> Recipe | None:
        """Return the recipe with the largest batch, up to its own, that is ``payable``; None when none is."""
        sizes = [size for size in self._integers("batch_size") if size <= recipe.batch_size]
        first_dear = bisect_left(sizes, True, key=lambda size: not payable(self._with(recipe, batch_size=size)))
        return None if first_dear == 0 else self._with(recipe, batch_size=sizes[first_dear - 1])

    def _cheapest_knobs(self, held: Collection[str]) -> list[dict[str, Any]]:
        free = {name: self.parameters[name] for name in COSTLY_KNOBS if name in self.parameters and name not in held}
        lowest = {name: parameter.decode(-1.0) for name, parameter in free.items()}
        if lowest.get("lora_rank", 1) != 0:
            return [lowest]
        # in train tokens every rank costs the same, in FLOPs an adapter less than full weights
        return [lowest, *({**lowest, "lora_rank": rank} for rank in free["lora_rank"].values()[1:2])]

    def _with(self, recipe: Recipe, **changes: Any) -> Recipe:
        values = {name: changes.get(name, getattr(recipe, name)) for name in self.parameters}
        return self._recipe(recipe.algorithm, recipe.start, recipe.mix, values)

    @property
    def width(self) -> int:
        """Length of `to_vector`."""
        return len(self.algorithms) + len(STARTS) + len(self.sources) + len(self.parameters)

    def action_space(self) -> gym.spaces.Dict:
        """Return the action space: which algorithm (0 stops), which start, and coordinates in [-1, 1]."""
        return gym.spaces.Dict(
            {
                "algorithm": gym.spaces.Discrete(1 + len(self.algorithms)),
                "mix": gym.spaces.Box(-1.0, 1.0, (len(self.sources),), np.float32),
                "parameters": gym.spaces.Box(-1.0, 1.0, (len(self.parameters),), np.float32),
                "start": gym.spaces.Discrete(len(STARTS)),
            }
        )

    def decode(self, action: Mapping[str, Any]) -> Recipe | None:
        """Return the recipe of a legal action, or None for ``stop``.

        The mix coordinates of sources that the algorithm cannot use are ignored; the others are projected onto the
        simplex. A number of generations that does not divide the batch is moved to the nearest one of the space that
        does; where none does, the batch is moved.
        """
        choice = int(action["algorithm"])
        if choice == STOP:
            return None
        algorithm = self.algorithms[choice - 1]
        values = {
            name: parameter.decode(float(coordinate))
            for (name, parameter), coordinate in zip(self.parameters.items(), action["parameters"], strict=True)
        }
        return self._recipe(algorithm, STARTS[int(action["start"])], self.decode_mix(algorithm, action["mix"]), values)

    def decode_mix(self, algorithm: str, coordinates: Sequence[float]) -> dict[str, float]:
        """Return the mix at coordinates in [-1, 1]: weight (x + 1) / 2 per usable source, projected, on the grid."""
        usable = self.usable[algorithm] or self.sources
        raw = np.array(
            [(float(x) + 1) / 2 for name, x in zip(self.sources, coordinates, strict=True) if name in usable]
        )
        weights = on_simplex_grid(project_to_simplex(raw), MIX_GRID)
        return {name: float(weight) for name, weight in zip(usable, weights, strict=True) if weight > 0}

    def encode(self, recipe: Recipe | None) -> dict[str, Any]:
        """Return the action of a recipe (None is ``stop``); `decode` gives the recipe back when it lies on the grid.

        Raises:
            ValueError: the recipe is not in this space; the message names the field.
        """
        if recipe is None:
            mix, middle = (np.zeros(len(part), np.float32) for part in (self.sources, self.parameters))
            return {"algorithm": STOP, "mix": mix, "parameters": middle, "start": 0}
        if recipe.algorithm not in self.algorithms:
            raise ValueError(
                f"algorithm: {recipe.algorithm!r} is not in the decision space."
                f"{did_you_mean(recipe.algorithm, self.algorithms)}"
            )
        for name in recipe.mix:
            if name not in self.sources:
                raise ValueError(f"mix: {name!r} is not in the decision space.{did_you_mean(name, self.sources)}")
            if recipe.mix[name] > 0 and name not in (self.usable[recipe.algorithm] or self.sources):
                raise ValueError(
                    f"mix: {name!r} has no rows that {recipe.algorithm} trains on; "
                    f"sources that have: {', '.join(self.usable[recipe.algorithm])}."
                )
        for name, default in _KNOBS.items():
            wanted = self.fixed.get(name, default)
            if name not in self.parameters and getattr(recipe, name) != wanted:
                raise ValueError(
                    f"{name}: it is {wanted!r} throughout the decision space, the recipe has {getattr(recipe, name)!r}."
                )
        coordinates = []
        for name, parameter in self.parameters.items():
            try:
                coordinates.append(parameter.encode(getattr(recipe, name)))
            except ValueError as error:
                raise ValueError(f"{name}: {error}.") from error
        return {
            "algorithm": 1 + self.algorithms.index(recipe.algorithm),
            "mix": np.array([2 * recipe.mix.get(name, 0.0) - 1 for name in self.sources], np.float32),
            "parameters": np.array(coordinates, np.float32),
            "start": STARTS.index(recipe.start),
        }

    def to_vector(self, recipe: Recipe) -> np.ndarray:
        """Return ``(width,)`` float32 in [-1, 1]: one-hot algorithm, one-hot start, mix weights, coordinates."""
        action = self.encode(recipe)
        vector = np.zeros(self.width, np.float32)
        vector[action["algorithm"] - 1] = 1.0
        vector[len(self.algorithms) + action["start"]] = 1.0
        offset = len(self.algorithms) + len(STARTS)
        vector[offset : offset + len(self.sources)] = (action["mix"] + 1) / 2
        vector[offset + len(self.sources) :] = action["parameters"]
        return vector

    def recipe(self, algorithm: str, **settings: Any) -> Recipe:
        """Return a recipe of this space with settings given by name; what is left out takes the knob's middle.

        Args:
            algorithm: algorithm name.
            **settings: recipe fields; ``mix`` defaults to equal shares of the usable sources.

        Raises:
            ValueError: an unknown algorithm or field, or a value outside its range.
        """
        if algorithm not in self.algorithms:
            raise ValueError(f"algorithm: unknown {algorithm!r}.{did_you_mean(algorithm, self.algorithms)}")
        mix = settings.pop("mix", None)
        if mix is None:
            mix = self.decode_mix(algorithm, [0.0] * len(self.sources))
        values = {name: settings.pop(name, parameter.decode(0.0)) for name, parameter in self.parameters.items()}
        start = settings.pop("start", "best")
        for name in settings:
            raise ValueError(f"recipe: {name!r} is no knob of this space.{did_you_mean(name, self.parameters)}")
        recipe = self._recipe(algorithm, start, mix, values)
        self.encode(recipe)
        return recipe

    def random_recipe(self, rng: np.random.Generator, legal: Sequence[str] | None = None) -> Recipe:
        """Return a uniformly random recipe: algorithm, start, mix (flat Dirichlet) and every coordinate."""
        names = self.algorithms if legal is None else tuple(legal)
        algorithm = names[int(rng.integers(len(names)))]
        usable = self.usable[algorithm] or self.sources
        weights = rng.dirichlet(np.ones(len(usable)))
        mix = dict(zip(usable, on_simplex_grid(weights, MIX_GRID).tolist(), strict=True))
        values = {name: parameter.decode(float(rng.uniform(-1, 1))) for name, parameter in self.parameters.items()}
        start = STARTS[int(rng.integers(len(STARTS)))]
        return self._recipe(algorithm, start, {n: w for n, w in mix.items() if w > 0}, values)

    def _recipe(self, algorithm: str, start: str, mix: Mapping[str, float], values: Mapping[str, Any]) -> Recipe:
        settings = {**self.fixed, **values}
        if "warmup_steps" in settings:
            settings["warmup_steps"] = min(settings["warmup_steps"], settings.get("steps", _KNOBS["steps"]))
        if self._groups:
            self._fit_groups(settings)
        return Recipe(algorithm=algorithm, mix=mix, start=start, **settings)

    def _fit_groups(self, settings: dict[str, Any]) -> None:
        """Move ``num_generations``, else the batch, to the nearest values of the space at which groups divide it."""
        size, accumulation, wanted = (
            int(settings.get(name, _KNOBS[name])) for name in ("batch_size", "gradient_accumulation", "num_generations")
        )
        if wanted >= 2 and size * accumulation % wanted == 0:
            return
        settings["batch_size"] = min(self._batch_sizes(accumulation), key=lambda n: (abs(n - size), n))
        fitting = [n for n in self._generations if settings["batch_size"] * accumulation % n == 0]
        settings["num_generations"] = min(fitting, key=lambda n: (abs(n - wanted), n))


def project_to_simplex(weights: np.ndarray) -> np.ndarray:
    """Return the point of the probability simplex nearest to ``weights`` (Euclidean; Duchi et al. 2008).

    Args:
        weights: ``(n,)`` finite.

    Returns:
        ``(n,)`` float64 >= 0 that sum to 1; ``weights`` itself when it already is on the simplex.
    """
    ordered = np.sort(weights)[::-1]
    excess = np.cumsum(ordered) - 1.0
    ranks = np.arange(1, len(weights) + 1)
    last = int(np.nonzero(ordered - excess / ranks > 0)[0][-1])
    result: np.ndarray = np.maximum(weights - excess[last] / ranks[last], 0.0)
    return result


def on_simplex_grid(weights: np.ndarray, grid: int) -> np.ndarray:
    """Round simplex weights to multiples of ``1 / grid`` that still sum to 1 (largest remainder)."""
    exact = np.asarray(weights, dtype=np.float64) * grid
    counts = np.floor(exact + 1e-4)  # float32 coordinates may fall a hair below their grid point
    missing = round(grid - counts.sum())
    for index in np.argsort(-(exact - counts), kind="stable")[: max(0, missing)]:
        counts[index] += 1
    result: np.ndarray = counts / grid
    return result
