"""A round that is under way: what each pause shows, what was decided then, and the same read back from a journal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Protocol

from ..inner_trainers.adjustments import CATALOGUE, NONE, Adjustment
from ..inner_trainers.base import Checkpoint, Cost, Limit, RoundReport, TrainingSession
from ..inner_trainers.messages import require_integer
from ..inner_trainers.recipe import Recipe
from ..inner_trainers.signals import SIGNALS, Signals


@dataclass(frozen=True)
class Steering:
    """How a round is paused.

    Attributes:
        interval: optimiser steps between two decisions, in [1, 100000].
        quick_items: validation items of the quick evaluation at each pause; 0 for none.
    """

    interval: int = 1
    quick_items: int = 0

    def __post_init__(self) -> None:
        """Check the ranges; raises `ValueError` outside them."""
        require_integer("interval", self.interval, low=1, high=100_000)
        require_integer("quick_items", self.quick_items, low=0, high=1_000_000)

    def pauses(self, steps: int) -> int:
        """Return how often a round of ``steps`` optimiser steps is paused before its last."""
        return (steps - 1) // self.interval


@dataclass(frozen=True)
class Moment:
    """What a round shows while it is parked, or once it has ended.

    Attributes:
        step: optimiser steps done.
        ended: whether no further step will be taken.
        signals: what the last step showed.
        settings: settings in force for the next step.
        refusals: for each entry of the catalogue why it cannot be applied now; None where it can.
        cost: training cost so far.
        quick_score: score of a quick evaluation; None without one, and once the round has ended.
        quick_cost: what it cost.
    """

    step: int
    ended: bool
    signals: Signals
    settings: Mapping[str, float]
    refusals: tuple[str | None, ...]
    cost: Cost
    quick_score: float | None = None
    quick_cost: Cost | None = None

    @property
    def legal(self) -> tuple[bool, ...]:
        """For each entry of the catalogue whether it can be applied; ``none`` always can."""
        return tuple(index == NONE or refusal is None for index, refusal in enumerate(self.refusals))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types; what is absent or zero is left out."""
        data: dict[str, Any] = {
            "step": self.step,
            "ended": self.ended,
            "signals_of": self.signals.step,
            "values": {name: value for name, value in self.signals.values.items() if value is not None},
            "z": {name: z for name, z in self.signals.z.items() if z != 0.0},
            "broken": list(self.signals.broken),
            "settings": {k: (v if math.isfinite(v) else str(v)) for k, v in self.settings.items()},
            "refusals": {str(i): refusal for i, refusal in enumerate(self.refusals) if refusal is not None},
            "cost": asdict(self.cost),
        }
        if self.quick_score is not None and self.quick_cost is not None:
            data |= {"quick_score": self.quick_score, "quick_cost": asdict(self.quick_cost)}
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Moment:
        """Read `to_dict` back."""
        values: dict[str, float | None] = {**dict.fromkeys(SIGNALS), **data["values"]}
        z = {**dict.fromkeys(SIGNALS, 0.0), **data["z"]}
        quick_cost = data.get("quick_cost")
        return cls(
            step=data["step"],
            ended=data["ended"],
            signals=Signals(data["signals_of"], values, z, tuple(data["broken"])),
            settings={name: float(value) for name, value in data["settings"].items()},
            refusals=tuple(data["refusals"].get(str(index)) for index in range(len(CATALOGUE))),
            cost=Cost(**data["cost"]),
            quick_score=data.get("quick_score"),
            quick_cost=None if quick_cost is None else Cost(**quick_cost),
        )


class Steered(Protocol):
    """A round between whose optimiser steps decisions are taken."""

    def advance(self, adjustment: Adjustment | None) -> Moment:
        """Apply the adjustment (None before the first step), take the next steps, and say what that showed."""

    def close(self) -> None:
        """End it now."""


def refusals(session: TrainingSession, sources: Sequence[str]) -> tuple[str | None, ...]:
    """Return for each entry of the catalogue why it cannot be applied to the session now; None where it can.

    Args:
        session: a parked round.
        sources: the sources of its mix, sorted.
    """
    found: list[str | None] = []
    for entry, adjustment in zip(CATALOGUE, _adjustments(tuple(sources)), strict=True):
        if adjustment is None:
            found.append(f"the round's mix has {len(sources)} sources, no source {(entry.slot or 0) + 1}")
        else:
            found.append(session.refusal(adjustment))
    return tuple(found)


@lru_cache(maxsize=64)
def _adjustments(sources: tuple[str, ...]) -> tuple[Adjustment | None, ...]:
    return tuple(entry.adjustment(sources) for entry in CATALOGUE)


class SteeredSession:
    """A session that is paused every ``interval`` optimiser steps.

    Args:
        session: a round parked before its first step.
        sources: the sources of its mix, sorted.
        steering: how it is paused.
        quick: scores the parked session; None for no quick evaluations.
    """

    def __init__(
        self,
        session: TrainingSession,
        sources: Sequence[str],
        steering: Steering,
        quick: Callable[[TrainingSession], tuple[float, Cost]] | None = None,
    ) -> None:
        self.session = session
        self._sources, self._steering, self._quick = sources, steering, quick

    def advance(self, adjustment: Adjustment | None) -> Moment:
        """Apply the adjustment, take the next steps, and say what that showed.

        Raises:
            ValueError: the session refuses the adjustment; nothing was changed.
        """
        session = self.session
        if adjustment is not None:
            session.apply(adjustment)
        if not session.done:
            session.advance(self._steering.interval)
        ended = session.done
        score, cost = (None, None) if ended or self._quick is None else self._quick(session)
        return Moment(
            step=session.step,
            ended=ended,
            signals=session.signals,
            settings=dict(session.settings),
            refusals=refusals(session, self._sources),
            cost=session.cost,
            quick_score=score,
            quick_cost=cost,
        )

    def close(self) -> None:
        """End training."""
        self.session.close()


class WrittenRound:
    """A finished round that a journal repeats, as long as the same is decided again.

    Args:
        trace: a row per pause: what it showed, and ``decision``, what was applied then.
        mismatch: returns the error for a decision that differs.
    """

    def __init__(self, trace: Sequence[Mapping[str, Any]], mismatch: Callable[[str], Exception]) -> None:
        self._trace, self._mismatch, self._next = trace, mismatch, 0

    def advance(self, adjustment: Adjustment | None) -> Moment:
        """Return what the same decision led to.

        Raises:
            JournalMismatchError: something else was decided then.
        """
        if adjustment is not None:
            written = self._trace[self._next - 1].get("decision")
            if written != adjustment.to_dict():
                step = self._trace[self._next - 1]["step"]
                said = "nothing" if written is None else str(Adjustment.from_dict(written))
                raise self._mismatch(f" (after step {step} it decided {said}, this one {adjustment})")
        moment = Moment.from_dict(self._trace[self._next])
        self._next += 1
        return moment

    def close(self) -> None:
        """Do nothing: nothing runs."""


class RunningRound:
    """A round of a search between its beginning and its settlement.

    Args:
        recipe: what is asked.
        start: the checkpoint it starts from.
        seed: the trainer's seed.
        key: the round's id.
        limit: what its training may cost, where that could change what is trained.

    Attributes:
        answer: report and checkpoint where they are known without training: the round was refused, could not begin,
            or an equal one answers.
        session: the session that trains; None where nothing does.
        steered: where decisions are taken between its steps; None for a round that runs to its end by itself.
        moments: what each pause showed, oldest first.
        decisions: what was applied after each moment but the last.
        charged: what its quick evaluations were charged, in the budget's unit.
        origin: ``"refused"``, ``"cached"``, ``"written"`` (taken from the journal) or ``"trained"``.
    """

    def __init__(self, recipe: Recipe, start: Checkpoint, seed: int, key: str = "", limit: Limit | None = None) -> None:
        self.recipe, self.start, self.seed, self.key, self.limit = recipe, start, seed, key, limit
        self.answer: tuple[RoundReport, Checkpoint | None] | None = None
        self.session: TrainingSession | None = None
        self.steered: Steered | None = None
        self.steering: Steering | None = None
        self.charge: Callable[[Cost], float] = lambda cost: 0.0
        self.moments: list[Moment] = []
        self.decisions: list[Adjustment] = []
        self.charged = 0.0
        self.origin = "trained"

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources of its mix, sorted; the catalogue's slots count them."""
        return tuple(self.recipe.mix)

    @property
    def ended(self) -> bool:
        """Whether nothing is left to decide."""
        return self.steered is None or (bool(self.moments) and self.moments[-1].ended)

    @property
    def cost(self) -> Cost:
        """Training cost so far."""
        return self.moments[-1].cost if self.moments else Cost()

    def advance(self, adjustment: Adjustment | None = None) -> None:
        """Apply an adjustment (None before the first step) and take the next ``interval`` steps.

        Raises:
            ValueError: the round has ended, or refuses the adjustment; nothing was changed.
            JournalMismatchError: the journal has another decision here.
        """
        if self.steered is None or self.ended:
            raise ValueError("the round has ended; finish it.")
        moment = self.steered.advance(adjustment)
        if adjustment is not None:
            self.decisions.append(adjustment)
        self.moments.append(moment)
        if moment.quick_cost is not None and moment.quick_cost != Cost():
            self.charged += self.charge(moment.quick_cost)

    def trace(self) -> list[dict[str, Any]]:
        """Return a plain row per pause, for the journal."""
        rows = [moment.to_dict() for moment in self.moments]
        for row, adjustment in zip(rows, self.decisions, strict=False):  # nothing follows the last moment
            row["decision"] = adjustment.to_dict()
        return rows

    def close(self) -> None:
        """End training now, if it runs."""
        if self.session is not None:
            self.session.close()
