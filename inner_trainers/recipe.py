"""What a round is asked to do: the frozen `Recipe`."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from .messages import did_you_mean, require_integer, require_number

STARTS = ("base", "best", "latest")
SCHEDULES = ("constant", "linear", "cosine")
CRITICS = ("head", "model", "none")
LORA_ADAPTERS = ("merge", "stack")
_CHOICES = {"schedule": SCHEDULES, "critic": CRITICS, "lora_adapter": LORA_ADAPTERS}
_INTEGERS = {
    "steps": (1, 100_000),
    "batch_size": (1, 65_536),
    "gradient_accumulation": (1, 1024),
    "num_generations": (1, 1024),
    "lora_rank": (0, 1024),
    "max_length": (2, 1_048_576),
    "num_iterations": (1, 64),
}
_NUMBERS = {  # low, high, whether low itself is refused
    "learning_rate": (0.0, 1e6, True),
    "kl_coef": (0.0, 100.0, False),
    "temperature": (0.0, 10.0, True),
    "max_grad_norm": (0.0, 1e6, True),
    "weight_decay": (0.0, 10.0, False),
    "beta": (0.0, 100.0, True),
    "entropy_coef": (0.0, 10.0, False),
    "clip_range": (0.0, 10.0, True),
    "gamma": (0.0, 1.0, False),
    "gae_lambda": (0.0, 1.0, False),
    "vf_coef": (0.0, 100.0, False),
    "clip_range_vf": (0.0, 1e6, True),
    "min_reward": (-1e6, 1e6, False),
    "replay_share": (0.0, 1.0, False),
}
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
        kl_coef: weight of the KL divergence to the starting checkpoint, in [0, 100].
        num_generations: completions per prompt, in [1, 1024].
        temperature: sampling temperature, in (0, 10].
        max_grad_norm: gradient-clipping threshold, in (0, 1e6].
        weight_decay: decoupled weight decay, in [0, 10].
        lora_rank: rank of LoRA adapters, 0 for full weights, in [0, 1024].
        lora_adapter: what becomes of the adapter when the round ends: ``"merge"`` adds it to the weights, ``"stack"``
            keeps it apart on top of the weights and of the adapters that are there already.
        max_length: longest row in tokens; what is longer is cut at its end. In [2, 1048576].
        packing: whether rows are packed into sequences of up to ``max_length`` tokens; they do not see each other.
        loss: variant of the algorithm's loss; ``"default"`` is the first that it lists.
        beta: how strongly a preference algorithm holds to the starting checkpoint, in (0, 100].
        entropy_coef: weight of the entropy bonus, in [0, 10].
        clip_range: how far a probability ratio may move from 1 before its gradient is cut, in (0, 10].
        num_iterations: optimiser steps that reuse one batch of completions, in [1, 64].
        gamma: discount per token, in [0, 1].
        gae_lambda: λ of generalised advantage estimation, in [0, 1].
        vf_coef: weight of the value loss, in [0, 100].
        clip_range_vf: how far a value may move from its old one before its gradient is cut, in (0, 1e6].
        critic: where values come from: ``"head"`` on the policy's trunk, ``"model"`` of its own, or ``"none"``.
        min_reward: smallest reward with which a sampled completion is kept as a training row.
        replay_share: share of a raw-text round that repeats the task's earlier stages, its demonstrations, in [0, 1).

    Which algorithm reads which of these is in `trl.algorithms.ALGORITHMS`; the others change nothing about its rounds.
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
    lora_adapter: str = "merge"
    max_length: int = 1024
    packing: bool = False
    loss: str = "default"
    beta: float = 0.1
    entropy_coef: float = 0.0
    clip_range: float = 0.2
    num_iterations: int = 1
    gamma: float = 1.0
    gae_lambda: float = 0.95
    vf_coef: float = 0.5
    clip_range_vf: float = 0.2
    critic: str = "head"
    min_reward: float = 1.0
    replay_share: float = 0.0
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
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"{name}: unknown {value!r}.{did_you_mean(value, known)}")
        if not isinstance(self.loss, str) or not self.loss:
            raise ValueError(f"loss: expected a name, got {self.loss!r}.")
        if not isinstance(self.packing, bool):
            raise ValueError(f"packing: expected true or false, got {self.packing!r}.")
        for name, (low, high) in _INTEGERS.items():
            put(self, name, require_integer(name, getattr(self, name), low=low, high=high))
        put(self, "warmup_steps", require_integer("warmup_steps", self.warmup_steps, low=0, high=self.steps))
        for name, (below, above, is_open) in _NUMBERS.items():
            put(self, name, require_number(name, getattr(self, name), low=below, high=above, low_open=is_open))
        if self.replay_share >= 1:
            raise ValueError(f"replay_share: expected a number in [0, 1), got {self.replay_share!r}.")

    @classmethod
    def of_checked(cls, values: Mapping[str, Any]) -> Recipe:
        """Return the recipe of values that are known to pass every check, in a tenth of the time.

        Args:
            values: every field by name, in its own type; ``mix`` sorted by name. Nothing is checked or copied.
        """
        recipe = object.__new__(cls)
        recipe.__dict__.update(values, mix=MappingProxyType(values["mix"]), _hash="")
        return recipe

    @property
    def content_hash(self) -> str:
        """16 hex digits that are equal exactly when every field is equal, in any process."""
        if not self._hash:
            object.__setattr__(self, "_hash", _digest(self.to_dict()))
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
        return hash(self.content_hash)


def number_range(name: str) -> tuple[float, float, bool]:
    """Return the smallest and the largest value of a field that holds a real number, and whether the former is out.

    Raises:
        KeyError: no such field.
    """
    return _NUMBERS[name]


def integer_range(name: str) -> tuple[int, int]:
    """Return the smallest and the largest value of a field that holds a whole number.

    Raises:
        KeyError: no such field.
    """
    return _INTEGERS[name]


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
