"""The contract of in-loop controllers: what they see between optimiser steps, and what they decide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from .adjustments import CATALOGUE, NONE, Adjustment
from .recipe import Recipe
from .signals import Signals


@dataclass(frozen=True)
class ControlState:
    """What a controller sees while a round is parked.

    Attributes:
        step: optimiser steps done, at least 1.
        steps: optimiser steps the recipe asks for.
        signals: what the last step showed.
        settings: settings in force for the next step; see `TrainingSession.settings`.
        sources: the sources of the round's mix, sorted; the catalogue's slots count them.
        legal: for each entry of the catalogue whether it can be applied now; entry 0, ``none``, always can.
    """

    step: int
    steps: int
    signals: Signals
    settings: Mapping[str, float]
    sources: Sequence[str]
    legal: Sequence[bool]


@dataclass(frozen=True)
class Candidate:
    """Something a controller thought of doing.

    Attributes:
        action: index into the catalogue; None for an adjustment that is not in it.
        adjustment: what it would do.
        by: which rule, net or schedule proposed it.
        reason: why, in words a person can read.
        confidence: in [0, 1].
    """

    action: int | None
    adjustment: Adjustment
    by: str
    reason: str
    confidence: float = 1.0


@dataclass(frozen=True)
class Decision:
    """What a controller decided at one step.

    Attributes:
        chosen: what is applied.
        candidates: everything that was thought of, the chosen one too.
        held_back: by -> why a candidate was not chosen (cooldown, damped, masked, lower priority, log only).
        flags: sentences a person should read; each is put into the round's report once.
    """

    chosen: Candidate
    candidates: tuple[Candidate, ...] = ()
    held_back: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()


@runtime_checkable
class Controller(Protocol):
    """Decides between the optimiser steps of one round at a time."""

    @property
    def name(self) -> str:
        """What tables and logs call it."""

    def begin(self, recipe: Recipe, sources: Sequence[str]) -> None:
        """Forget the last round; a new one is about to start."""

    def decide(self, state: ControlState) -> Decision:
        """Return what to do before the next step. Deterministic in the states seen since `begin`."""

    def describe(self) -> Mapping[str, Any]:
        """Return plain JSON types that say how it is configured; written into run records."""


def nothing(by: str, reason: str = "") -> Candidate:
    """Return the candidate that changes nothing."""
    return Candidate(NONE, Adjustment(), by, reason)


def catalogue_candidate(
    action: int, sources: Sequence[str], by: str, reason: str, confidence: float = 1.0
) -> Candidate | None:
    """Return the candidate of a catalogue entry; None when there is no source in its slot."""
    adjustment = CATALOGUE[action].adjustment(sources)
    return None if adjustment is None else Candidate(action, adjustment, by, reason, confidence)
