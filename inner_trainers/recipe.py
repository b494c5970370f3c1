"""What a round is asked to do: the frozen `Recipe`, and the `Adjustment` of a round that is running."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from types import MappingProxyType
from typing import Any

from .messages import did_you_mean, require_integer, require_number

STARTS = ("base", "best", "latest")
SCHEDULES = ("constant", "linear", "cosine")
_MIX_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Recipe:
    """Everything one round needs, apart from the task, the weights and the seed.

    Attributes:
        algorithm: name of an inner algorithm, for example ``"sft"`` or ``"grpo"``.
        mix: share of each source in the training rows, ``name -> weight``; weights are ≥ 0 and sum to 1.
        start: which checkpoint the round starts from: ``"base"``, ``"best"`` or ``"latest"``.
        steps: optimiser steps, in [1, 100000].
        batch_size: sequences per device and forward pass, in [1, 65536]; completions for on-policy algorithms.
        gradient_accumulation: forward passes per optimiser step, in [1, 1024].
        learning_rate: peak learning rate, in (0, 1e6].
        schedule: learning-rate schedule over the round: ``"constant"``, ``"linear"`` or ``"cosine"`` (to zero).
        warmup_steps: steps of linear warm-up, in [0, steps].
        kl_coef: weight of the KL divergence to the starting checkpoint, in [0, 100]; only algorithms that use it.
        num_generations: completions per prompt of on-policy algorithms, in [1, 1024].
        temperature: sampling temperature of on-policy algorithms, in (0, 10].
        max_grad_norm: gradient-clipping threshold, in (0, 1e6].
        weight_decay: decoupled weight decay, in [0, 10].
        lora_rank: rank of LoRA adapters, 0 for full weights, in [0, 1024].
        max_length: longest row in tokens; what is longer is cut at its end. In [2, 1048576].
    """

    algorithm: str
    mix: Mapping[str, float]
    start: str = "best"
    steps: int = 20
    batch_size: int = 32
    gradient_accumulation: int = 1
    learning_rate: float = 3e-4
    schedule: str = "constant"
    warmup_steps: int = 0
    kl_coef: float = 0.0
    num_generations: int = 8
    temperature: float = 1.0
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0
    lora_rank: int = 0
    max_length: int = 1024
    _hash: str = field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ValueError: a field outside its range; the message names the field, the value and the range.
        """
        put = object.__setattr__
        if not isinstance(self.algorithm, str) or not self.algorithm:
            raise ValueError(f"algorithm: expected a name, got {self.algorithm!r}.")
        put(self, "mix", MappingProxyType(_checked_mix(self.mix)))
        if self.start not in STARTS:
            raise ValueError(f"start: no checkpoint is called {self.start!r}.{did_you_mean(self.start, STARTS)}")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule: unknown {self.schedule!r}.{did_you_mean(self.schedule, SCHEDULES)}")
        put(self, "steps", require_integer("steps", self.steps, low=1, high=100_000))
        put(self, "batch_size", require_integer("batch_size", self.batch_size, low=1, high=65_536))
        put(
            self,
            "gradient_accumulation",
            require_integer("gradient_accumulation", self.gradient_accumulation, low=1, high=1024),
        )
        put(self, "learning_rate", require_number("learning_rate", self.learning_rate, low=0, high=1e6, low_open=True))
        put(self, "warmup_steps", require_integer("warmup_steps", self.warmup_steps, low=0, high=self.steps))
        put(self, "kl_coef", require_number("kl_coef", self.kl_coef, low=0, high=100))
        put(self, "num_generations", require_integer("num_generations", self.num_generations, low=1, high=1024))
        put(self, "temperature", require_number("temperature", self.temperature, low=0, high=10, low_open=True))
        put(self, "max_grad_norm", require_number("max_grad_norm", self.max_grad_norm, low=0, high=1e6, low_open=True))
        put(self, "weight_decay", require_number("weight_decay", self.weight_decay, low=0, high=10))
        put(self, "lora_rank", require_integer("lora_rank", self.lora_rank, low=0, high=1024))
        put(self, "max_length", require_integer("max_length", self.max_length, low=2, high=1_048_576))
        put(self, "_hash", _digest(self.to_dict()))

    @property
    def content_hash(self) -> str:
        """16 hex digits that are equal exactly when every field is equal, in any process."""
        return self._hash

    def training_hash(self, ignored: Collection[str] = ()) -> str:
        """Return 16 hex digits that are equal when two recipes ask for the same training from the same weights.

        Neither the name of the start nor a source of weight 0 changes what is trained.

        Args:
            ignored: fields that the recipe's algorithm ignores.
        """
        data = {name: value for name, value in self.to_dict().items() if name not in ("start", *ignored)}
        data["mix"] = {name: weight for name, weight in self.mix.items() if weight > 0}
        return _digest(data)

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate that optimiser step ``step`` (from 1) uses when nothing adjusts it."""
        done = step - 1
        if done < self.warmup_steps:
            return self.learning_rate * done / self.warmup_steps
        share = (done - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        if self.schedule == "linear":
            return self.learning_rate * (1.0 - share)
        if self.schedule == "cosine":
            return self.learning_rate * 0.5 * (1.0 + math.cos(math.pi * share))
        return self.learning_rate

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types; `from_dict` reads them back to an equal recipe."""
        return {f.name: (dict(self.mix) if f.name == "mix" else getattr(self, f.name)) for f in fields(self) if f.init}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Recipe:
        """Build a recipe from plain data.

        Raises:
            ValueError: an unknown key, a missing key, or a value outside its range.
        """
        known = [f.name for f in fields(cls) if f.init]
        for key in data:
            if key not in known:
                raise ValueError(f"recipe: unknown key {key!r}.{did_you_mean(str(key), known)}")
        for key in ("algorithm", "mix"):
            if key not in data:
                raise ValueError(f"recipe: key {key!r} is missing.")
        return cls(**data)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Recipe.from_dict, (self.to_dict(),))

    def __hash__(self) -> int:
        return hash(self._hash)


def _digest(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


def _checked_mix(mix: object) -> dict[str, float]:
    if not isinstance(mix, Mapping) or not mix:
        raise ValueError(f"mix: expected source names with weights, for example {{'math': 1.0}}, got {mix!r}.")
    weights = {str(name): require_number(f"mix.{name}", weight, low=0, high=1) for name, weight in mix.items()}
    total = math.fsum(weights.values())
    if abs(total - 1) > _MIX_TOLERANCE:
        shown = " + ".join(f"{name} {weight:g}" for name, weight in weights.items())
        raise ValueError(f"mix: weights must sum to 1, but {shown} = {total:g}.")
    return dict(sorted(weights.items()))


ADJUSTMENTS: Mapping[str, str] = MappingProxyType(
    {
        "none": "change nothing",
        "lr_scale": "multiply the learning rate of every later step by `value`; composes with the schedule",
        "stop": "end the round after the step that is done",
    }
)


@dataclass(frozen=True)
class Adjustment:
    """One change to a running round.

    Attributes:
        kind: a key of `ADJUSTMENTS`.
        value: the factor of ``"lr_scale"``, in (0, 1000]; unused otherwise.
    """

    kind: str = "none"
    value: float = 1.0

    def __post_init__(self) -> None:
        """Check the kind and its value.

        Raises:
            ValueError: unknown kind (with what cannot change mid-round said plainly), or a factor outside (0, 1000].
        """
        if not isinstance(self.kind, str) or self.kind not in ADJUSTMENTS:
            raise ValueError(
                f"adjustment: {self.kind!r} cannot be applied to a running round.{did_you_mean(self.kind, ADJUSTMENTS)}"
            )
        number = require_number("adjustment.value", self.value, low=0, high=1000, low_open=True)
        object.__setattr__(self, "value", number)  # a plain float, so that `to_dict` is JSON

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return asdict(self)
