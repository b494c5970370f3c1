"""The policy net as a file and as a forward pass in numpy: from features to probabilities of the catalogue."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...inner_trainers.adjustments import CATALOGUE_NAMES, NONE, catalogue_index
from ...inner_trainers.files import write_atomically
from ...inner_trainers.messages import require_number
from ...inner_trainers.signals import SIGNALS
from .features import FEATURE_COUNT, FEATURE_NAMES
from .limits import checked_limits

HIDDEN = (64, 32)
"""Widths of the hidden layers; activations are tanh."""

PARAMETER_LIMIT = 15_000
"""Most parameters a net may have, the value head it is fine-tuned with among them."""

FORMAT = "posttrain-gym policy net"
FORMAT_VERSION = 1
_META_KEY = "posttrain_gym"  # one entry: safetensors writes several in no fixed order
_LARGEST_WEIGHT = 1e6
_SHAPES: Mapping[str, tuple[int, ...]] = {
    "hidden_1.weight": (HIDDEN[0], FEATURE_COUNT),
    "hidden_1.bias": (HIDDEN[0],),
    "hidden_2.weight": (HIDDEN[1], HIDDEN[0]),
    "hidden_2.bias": (HIDDEN[1],),
    "output.weight": (len(CATALOGUE_NAMES), HIDDEN[1]),
    "output.bias": (len(CATALOGUE_NAMES),),
}

LAYERS: tuple[str, ...] = tuple(_SHAPES)
"""Names of the arrays a net is made of, in the order of a torch module's parameters."""


@dataclass(frozen=True)
class PolicyNet:
    """A net of two hidden layers over `features.FEATURE_NAMES`, with a masked softmax over the catalogue.

    Attributes:
        weights: layer name -> float32 array, the shapes those of a `torch.nn.Linear`.
        actions: catalogue names it may choose; the others have probability 0 whatever the mask. Has ``"none"``.
        hardware: whether it sees signals that a clock decides.
        threshold: smallest probability in [0, 1] with which a controller acts on it.
        limits: how often it may do what; see `limits.Limits`.
        facts: plain JSON types about how it was made; kept in the file.
    """

    weights: Mapping[str, np.ndarray]
    actions: tuple[str, ...] = CATALOGUE_NAMES
    hardware: bool = False
    threshold: float = 0.5
    limits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    _choices: list[int] = field(init=False, repr=False, compare=False)
    _layers: tuple[np.ndarray, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check shapes, numbers and names.

        Raises:
            ValueError: a layer is missing, of another shape, or not finite; an unknown action.
        """
        for name, shape in _SHAPES.items():
            layer = self.weights.get(name)
            if layer is None or layer.shape != shape or layer.dtype != np.float32:
                found = "nothing" if layer is None else f"{layer.shape} {layer.dtype}"
                raise ValueError(f"policy net: layer {name!r} should be {shape} float32, got {found}.")
            if not (np.abs(layer) <= _LARGEST_WEIGHT).all():  # NaN fails it too
                raise ValueError(f"policy net: layer {name!r} holds numbers that are not finite or beyond 1e6.")
        unknown = sorted(set(self.weights) - set(_SHAPES))
        if unknown:
            raise ValueError(f"policy net: unknown layer {unknown[0]!r}; expected {', '.join(_SHAPES)}.")
        require_number("threshold", self.threshold, low=0, high=1)
        object.__setattr__(self, "actions", checked_actions(self.actions))
        object.__setattr__(self, "limits", checked_limits(self.limits))
        object.__setattr__(self, "_choices", [catalogue_index(name) for name in self.actions])
        layers = (np.ascontiguousarray(self.weights[name]) for name in _SHAPES)
        object.__setattr__(self, "_layers", tuple(layers))

    @property
    def parameters(self) -> int:
        """How many numbers it has learned."""
        return sum(layer.size for layer in self.weights.values())

    def logits(self, features: np.ndarray) -> np.ndarray:
        """Return the unmasked logits, (37,) float32, of features (FEATURE_COUNT,) float32."""
        first, first_bias, second, second_bias, output, bias = self._layers
        hidden = np.tanh(first @ features + first_bias)
        hidden = np.tanh(second @ hidden + second_bias)
        return np.asarray(output @ hidden + bias)

    def probabilities(
        self, features: np.ndarray, legal: Sequence[bool] | np.ndarray, blocked: Collection[int] = ()
    ) -> np.ndarray:
        """Return the probability of each catalogue entry, (37,) float32; exactly 0 where illegal.

        Args:
            features: (FEATURE_COUNT,) float32.
            legal: (37,) truth values; ``none`` always counts as legal.
            blocked: entries that count as illegal whatever ``legal`` says.
        """
        # each look at legality may cost something, so what it may not choose anyway is not looked at
        chosen = [index for index in self._choices if index == NONE or (index not in blocked and legal[index])]
        logits = self.logits(features)[chosen]
        weights = np.exp(logits - logits.max())
        odds = np.zeros(len(CATALOGUE_NAMES), dtype=np.float32)
        odds[chosen] = weights / weights.sum()
        return odds

    def save(self, path: str | Path) -> Path:
        """Write it as safetensors, atomically; equal nets give equal bytes.

        The file's metadata hold the names of features, signals and catalogue it was made for, and `facts`.
        """
        from safetensors.numpy import save

        meta = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "signals": list(SIGNALS),
            "features": list(FEATURE_NAMES),
            "catalogue": list(CATALOGUE_NAMES),
            "actions": list(self.actions),
            "hardware": self.hardware,
            "threshold": self.threshold,
            "limits": {name: list(numbers) for name, numbers in self.limits.items()},
            "facts": dict(self.facts),
        }
        tensors = {name: np.ascontiguousarray(layer) for name, layer in self.weights.items()}
        return write_atomically(Path(path), save(tensors, {_META_KEY: json.dumps(meta)}))

    @classmethod
    def load(cls, path: str | Path) -> PolicyNet:
        """Read `save` back; nothing in the file is executed.

        Raises:
            ValueError: the file is missing, damaged, no policy net, or made for another layout; the message names the
                file and shows the difference.
        """
        from safetensors import SafetensorError, safe_open

        path = Path(path)
        if not path.is_file():
            raise ValueError(f"policy net {path}: no such file.")
        try:
            with safe_open(path, framework="numpy") as file:
                meta = json.loads((file.metadata() or {}).get(_META_KEY, "null"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, ValueError, TypeError, OSError, RecursionError) as error:
            raise ValueError(f"policy net {path}: damaged ({error}); make or copy it again.") from error
        if not isinstance(meta, dict) or meta.get("format") != FORMAT:
            raise ValueError(f"policy net {path}: not a {FORMAT}; its metadata say nothing of one.")
        if meta.get("version") != FORMAT_VERSION:
            raise ValueError(
                f"policy net {path}: format version {meta.get('version')!r}, this release reads {FORMAT_VERSION}."
            )
        own = {"signals": tuple(SIGNALS), "features": FEATURE_NAMES, "catalogue": CATALOGUE_NAMES}
        differences = [text for name, names in own.items() if (text := _difference(name, meta.get(name), names))]
        if differences:
            raise ValueError(
                f"policy net {path}: made for another layout; {'; '.join(differences)}. Train it again from the logs."
            )
        try:
            return cls(
                tensors,
                tuple(meta["actions"]),
                bool(meta["hardware"]),
                meta["threshold"],
                {name: tuple(numbers) for name, numbers in meta["limits"].items()},
                dict(meta["facts"]),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"policy net {path}: damaged ({error}); make or copy it again.") from error


def checked_actions(actions: Sequence[str]) -> tuple[str, ...]:
    """Return catalogue names in the catalogue's order, ``"none"`` among them.

    Raises:
        ValueError: an unknown name.
    """
    chosen = {catalogue_index(name) for name in actions} | {NONE}
    return tuple(name for index, name in enumerate(CATALOGUE_NAMES) if index in chosen)


def _difference(what: str, theirs: Any, own: Sequence[str]) -> str | None:
    """Return how the file's names differ from this release's; None when they do not."""
    if not isinstance(theirs, list) or not all(isinstance(name, str) for name in theirs):
        return f"{what}: the file lists none"
    if theirs == list(own):
        return None
    gone, new = [n for n in theirs if n not in own], [n for n in own if n not in theirs]
    parts = [
        f"{text} {', '.join(names[:5])}{', …' if len(names) > 5 else ''}"
        for text, names in (("the file has", gone), ("it lacks", new))
        if names
    ]
    return f"{what}: {' and '.join(parts) if parts else 'the same names in another order'}"
