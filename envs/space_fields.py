"""What a decision space is given: fields, their checks, and their way to plain data and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Self

from ..inner_trainers.messages import did_you_mean, require_integer
from ..inner_trainers.recipe import STARTS, Recipe
from .parameter import Parameter
from .simplex import check_bounds
from .space_compiler import EPOCHS
from .task_facts import TaskFacts

KNOBS: Mapping[str, Any] = MappingProxyType(
    {
        name: entry.default
        for name, entry in Recipe.__dataclass_fields__.items()
        if entry.init and name not in ("algorithm", "mix", "start")
    }
)
"""Recipe field that can be a knob -> its default."""
CASTS: Mapping[str, type] = MappingProxyType({name: type(value) for name, value in KNOBS.items()})
"""Recipe field that can be a knob -> its type."""

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
class SpaceFields:
    """What a decision space is given: names, ranges, conditions, constraints; checked, and in plain data and back.

    Attributes:
        algorithms: algorithm names; action 0 is ``stop``, action ``i + 1`` is ``algorithms[i]``.
        sources: source names, in the order of the mix coordinates; others of a task have weight 0.
        usable: algorithm -> the sources that have the rows it trains on. An algorithm without any is never legal, and
            its mix is over all sources.
        parameters: recipe field -> its knob, in sorted order. ``epochs``, an integer knob, stands for ``steps``: they
            are what that many passes over the mix's rows take.
        fixed: recipe fields that every recipe shares.
        mix_bounds: source -> lower and upper bound of its weight, multiples of 1 / `MIX_GRID`; others are in [0, 1].
        conditions: knob -> when it is used, such as ``"algorithm in [grpo, ppo]"``; where it is not, the recipe has
            the field's default. Knobs without one are always part of the recipe.
        constraints: what must hold, such as ``"if base_model_size < 3B then exclude ppo"``; see `constraints`.
        starts: starting checkpoints that are allowed.
        defaults: knob -> the value that `recipe` takes when none is given; the middle of the range otherwise.
        facts: what is known of the task; constraints over facts that are not known take nothing away.
    """

    algorithms: tuple[str, ...]
    sources: tuple[str, ...]
    usable: Mapping[str, tuple[str, ...]]
    parameters: Mapping[str, Parameter] = field(default_factory=lambda: dict(DEFAULT_PARAMETERS))
    fixed: Mapping[str, Any] = field(default_factory=dict)
    mix_bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    conditions: Mapping[str, str] = field(default_factory=dict)
    constraints: tuple[str, ...] = ()
    starts: tuple[str, ...] = STARTS
    defaults: Mapping[str, Any] = field(default_factory=dict)
    facts: TaskFacts | None = None

    def __post_init__(self) -> None:
        """Check names and ranges, so that every action decodes to a recipe.

        Raises:
            ValueError: no algorithms or sources; a parameter that is no recipe field, is fixed too, or reaches
                values no recipe may have; batches that no allowed number of generations divides; mix bounds that
                leave out 1; or a condition or constraint that cannot be read.
        """
        if not self.algorithms or not self.sources:
            raise ValueError("decision space: it needs at least one algorithm and one source.")
        knobs = {*KNOBS, EPOCHS}
        for name in [*self.parameters, *self.fixed]:
            if name not in knobs or (name == EPOCHS and name in self.fixed):
                raise ValueError(f"decision space: {name!r} is no knob of a recipe.{did_you_mean(name, knobs)}")
            if name in self.parameters and name in self.fixed:
                raise ValueError(f"decision space: {name!r} is both a parameter and fixed.")
        put = object.__setattr__
        put(self, "algorithms", tuple(self.algorithms))
        put(self, "sources", tuple(self.sources))
        put(self, "parameters", {n: _typed(n, p) for n, p in sorted(self.parameters.items())})
        put(self, "fixed", dict(self.fixed))
        put(self, "usable", {name: self._usable_in_order(name) for name in self.algorithms})
        put(self, "mix_bounds", self._checked_bounds())
        put(self, "constraints", tuple(self.constraints))
        put(self, "starts", self._checked_starts())
        for name, parameter in self.parameters.items():
            self._check_range(name, parameter)
        if EPOCHS in self.parameters and ("steps" in self.parameters or "steps" in self.fixed):
            raise ValueError("decision space: epochs and steps say the same; give one of them.")
        put(self, "defaults", self._checked_defaults())
        put(self, "conditions", self._checked_conditions())
        for accumulation in self._integers("gradient_accumulation") if self._groups else ():
            if not self._batch_sizes(accumulation):
                raise ValueError(
                    f"decision space: of num_generations {list(self._integers('num_generations'))} none that is at "
                    f"least 2 divides batch_size {list(self._integers('batch_size'))} x gradient_accumulation "
                    f"{accumulation}."
                )

    def __reduce__(self) -> tuple[Any, ...]:
        # What is compiled stays here.
        return (type(self), tuple(getattr(self, entry.name) for entry in fields(self)))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types, without the task's facts; `from_dict` reads them back to an equal space."""
        return {
            "algorithms": list(self.algorithms),
            "sources": list(self.sources),
            "usable": {name: list(found) for name, found in self.usable.items()},
            "parameters": {name: parameter.to_dict() for name, parameter in self.parameters.items()},
            "fixed": dict(self.fixed),
            "mix_bounds": {name: list(pair) for name, pair in self.mix_bounds.items()},
            "conditions": dict(self.conditions),
            "constraints": list(self.constraints),
            "starts": list(self.starts),
            "defaults": dict(self.defaults),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read `to_dict` back.

        Raises:
            ValueError: an unknown or missing key, or what the space itself refuses.
        """
        known = [entry.name for entry in fields(cls) if entry.name != "facts"]
        for key in data:
            if key not in known:
                raise ValueError(f"decision space: unknown key {key!r}.{did_you_mean(str(key), known)}")
        missing = [key for key in ("algorithms", "sources", "usable") if key not in data]
        if missing:
            raise ValueError(f"decision space: key {missing[0]!r} is missing.")
        values = dict(data)
        if "parameters" in data:
            values["parameters"] = {name: Parameter.from_dict(entry) for name, entry in data["parameters"].items()}
        values["usable"] = {name: tuple(found) for name, found in data["usable"].items()}
        for key in ("algorithms", "sources", "constraints", "starts"):
            if key in data:
                values[key] = tuple(data[key])
        if "mix_bounds" in data:
            values["mix_bounds"] = {name: (low, high) for name, (low, high) in data["mix_bounds"].items()}
        return cls(**values)

    # What is checked --------------------------------------------------------------------------------------------------

    def _usable_in_order(self, algorithm: str) -> tuple[str, ...]:
        if algorithm not in self.usable:
            raise ValueError(f"decision space: usable names no sources for {algorithm!r}.")
        for name in self.usable[algorithm]:
            if name not in self.sources:
                raise ValueError(f"decision space: usable has {name!r}.{did_you_mean(name, self.sources)}")
        return tuple(name for name in self.sources if name in self.usable[algorithm])

    def _checked_bounds(self) -> dict[str, tuple[float, float]]:
        for name in self.mix_bounds:
            if name not in self.sources:
                raise ValueError(f"decision space: mix_bounds has {name!r}.{did_you_mean(name, self.sources)}")
        if not self.mix_bounds:
            return {}
        bounds = check_bounds({name: self.mix_bounds.get(name, (0.0, 1.0)) for name in self.sources})
        return {name: bounds[name] for name in self.mix_bounds}

    def _checked_starts(self) -> tuple[str, ...]:
        if not self.starts:
            raise ValueError("decision space: starts must name at least one checkpoint.")
        for name in self.starts:
            if name not in STARTS:
                raise ValueError(f"decision space: starts has {name!r}.{did_you_mean(str(name), STARTS)}")
        return tuple(name for name in STARTS if name in self.starts)

    def _check_range(self, name: str, parameter: Parameter) -> None:
        whole = parameter.integer or (parameter.choices and all(type(c) is int for c in parameter.choices))
        if name == EPOCHS:
            if not whole:
                raise ValueError(
                    "decision space: epochs is an integer; give the parameter integer=True or whole choices."
                )
            for value in parameter.choices or (parameter.decode(-1.0), parameter.decode(1.0)):
                require_integer("epochs", value, low=1, high=1000)
            return
        if type(KNOBS[name]) is int and not whole:
            raise ValueError(f"decision space: {name} is an integer; give the parameter integer=True or whole choices.")
        if parameter.named is not (type(KNOBS[name]) is str):
            raise ValueError(f"decision space: {name} takes {'names' if not parameter.named else 'no names'}.")
        for value in parameter.choices or (parameter.decode(-1.0), parameter.decode(1.0)):
            try:
                Recipe("any", {"any": 1.0}, **{"steps": 100_000, **self.fixed, name: value})
            except ValueError as error:
                raise ValueError(f"decision space: {error}") from error

    def _checked_defaults(self) -> dict[str, Any]:
        for name, value in self.defaults.items():
            if name not in self.parameters:
                hint = did_you_mean(name, self.parameters)
                raise ValueError(f"decision space: defaults has {name!r}, which is no parameter.{hint}")
            try:
                self.parameters[name].encode(value)
            except (ValueError, TypeError) as error:
                raise ValueError(f"decision space: default of {name}: {error}.") from error
        return dict(self.defaults)

    def _checked_conditions(self) -> dict[str, str]:
        for name in self.conditions:
            if name not in self.parameters:
                hint = did_you_mean(name, self.parameters)
                raise ValueError(f"decision space: conditions has {name!r}, which is no parameter.{hint}")
        return dict(self.conditions)

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
        return (int(self.fixed.get(name, KNOBS[name])),)


def _typed(name: str, parameter: Parameter) -> Parameter:
    """Return the knob with choices of the field's own type, so that equal recipes have equal hashes."""
    if CASTS.get(name) is float and parameter.choices and not parameter.named:
        return replace(parameter, choices=tuple(c if isinstance(c, bool) else float(c) for c in parameter.choices))
    return parameter
