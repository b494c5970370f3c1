"""`NetController`: lets a policy net decide between the optimiser steps of a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from ...inner_trainers.adjustments import CATALOGUE, CATALOGUE_NAMES, NONE, Adjustment
from ...inner_trainers.messages import require_number
from ...inner_trainers.recipe import Recipe
from ..files import file_digest
from .base import Candidate, ControlState, Decision
from .features import Features
from .limits import Limits
from .net import PolicyNet

SHOWN_PROBABILITY = 0.05
"""Entries at least this likely are candidates of a decision."""

_NOTHING = Adjustment()

_NETS, _SUFFIX = "nets", ".safetensors"


def shipped_nets() -> tuple[str, ...]:
    """Return the names of the nets that come with the package, sorted."""
    folder = resources.files(__package__) / _NETS
    if not folder.is_dir():
        return ()
    names = (entry.name for entry in folder.iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)))


def _net_path(name: str | Path) -> Path:
    """Return the file of a net that comes with the package, or of one of the user's.

    Raises:
        ValueError: neither.
    """
    if str(name) in shipped_nets():
        return Path(str(resources.files(__package__) / _NETS / f"{name}{_SUFFIX}"))
    if str(name) and Path(name).is_file():
        return Path(name)
    shipped = ", ".join(shipped_nets())
    hint = f" With the package come: {shipped}." if shipped else ""
    raise ValueError(f"policy net {str(name)!r}: no such file; `train_net` writes one from decision logs.{hint}")


class NetController:
    """Does what a policy net finds most likely, when it is sure enough; else nothing. Never what is not legal.

    Satisfies `Controller`. Decides without torch and without drawing random numbers.

    Args:
        net: the net, or its file, or the name of one that comes with the package.
        threshold: smallest probability it acts on, in [0, 1]; None for the net's own.

    Raises:
        ValueError: the file cannot be used; see `PolicyNet.load`.
    """

    def __init__(self, net: PolicyNet | str | Path, *, threshold: float | None = None) -> None:
        self._file: dict[str, str] = {}
        if not isinstance(net, PolicyNet):
            path = _net_path(net)
            net = PolicyNet.load(path)
            self._file = {"file": path.name, "digest": file_digest(path)}
        self.net = net
        self.threshold = require_number("threshold", net.threshold if threshold is None else threshold, low=0, high=1)
        self._features = Features(hardware=net.hardware)
        self._limits = Limits(net.limits)
        self._adjustments: tuple[Adjustment | None, ...] = ()

    @property
    def name(self) -> str:
        """``"net"``."""
        return "net"

    def begin(self, recipe: Recipe, sources: Sequence[str]) -> None:
        """Forget the last round."""
        self._features.begin(recipe, sources)
        self._limits.begin()
        self._adjustments = tuple(entry.adjustment(sources) for entry in CATALOGUE)

    def decide(self, state: ControlState) -> Decision:
        """Return the most likely legal entry if its probability reaches the threshold; else ``none``."""
        decision = self.propose(state)
        self.note(decision.chosen.adjustment, state.step)
        return decision

    def propose(self, state: ControlState) -> Decision:
        """Return what `decide` would, without taking it as done."""
        blocked = self._limits.blocked(state.step)
        odds = self.net.probabilities(self._features.vector(state), state.legal, blocked).tolist()
        sure = max(odds)
        best, floor = odds.index(sure), min(sure, SHOWN_PROBABILITY)
        candidates = {action: self._candidate(action, odd) for action, odd in enumerate(odds) if odd >= floor}
        if best == NONE or sure >= self.threshold:
            return Decision(candidates[best], tuple(candidates.values()))
        chosen = Candidate(NONE, _NOTHING, self.name, f"no adjustment reaches {self.threshold:.2f}", odds[NONE])
        candidates[NONE] = chosen
        why = f"{CATALOGUE_NAMES[best]} at {sure:.2f} is below {self.threshold:.2f}"
        return Decision(chosen, tuple(candidates.values()), {self.name: why})

    def note(self, adjustment: Adjustment, step: int) -> None:
        """Remember what was applied after ``step`` steps, whoever decided it."""
        self._features.note(adjustment, step)
        if adjustment in self._adjustments:
            self._limits.note(self._adjustments.index(adjustment), step)

    def describe(self) -> Mapping[str, Any]:
        """Return its threshold, what the net may do and how it was made."""
        return {
            "controller": self.name,
            **self._file,
            "threshold": self.threshold,
            "parameters": self.net.parameters,
            "actions": list(self.net.actions),
            "hardware": self.net.hardware,
            "limits": {name: list(numbers) for name, numbers in self.net.limits.items()},
            "facts": dict(self.net.facts),
        }

    def _candidate(self, action: int, probability: float) -> Candidate:
        adjustment = self._adjustments[action]
        if adjustment is None:  # a mask that allows a slot without a source; it must not reach the round
            raise ValueError(f"legal: {CATALOGUE_NAMES[action]} is marked legal, but the round has no such source.")
        return Candidate(action, adjustment, self.name, f"probability {probability:.2f}", probability)
