"""How the settings of one algorithm are decided: in which order, which values are legal, and the nearest legal ones.

The repair, in words: knobs are decided one after the other, each after those that its constraints mention. A knob whose
value breaks a constraint moves to the nearest value that keeps all of them, given the knobs decided before. Where it
has none, the knobs that share constraints with it are decided again together: the first choices by distance that fit
together. Only where none is found near (`SEARCH_LIMIT` trials) are these, the start and the mix put to the settings
that were found legal when the space was made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..inner_trainers.recipe import STARTS
from .parameter import Parameter
from .programs import Program
from .simplex import MIX_GRID, bounds_problem, grid_counts, grid_counts_many, project_to_bounds, project_to_bounds_many

SEARCH_LIMIT = 2_000
"""Settings that are tried to make knobs fit together again."""
_MEMORY = 65_536
_NEAREST = 64
_POINTS = 65
"""Points of a continuous knob's coordinate among which a legal value is looked for, besides the bounds themselves."""


@dataclass(frozen=True)
class Check:
    """A constraint that must hold, compiled.

    Attributes:
        text: the constraint, for messages.
        holds: slots -> whether it holds.
        last: name of the slot decided last among those it reads; empty where it reads none.
    """

    text: str
    holds: Program
    last: str


@dataclass(frozen=True)
class Bound:
    """A bound of one knob that a constraint gives, with which a repair tries first.

    Attributes:
        knob: its name.
        limit: slots -> the bound.
        applies: slots -> whether it does.
        upper: whether it bounds from above.
        lower: whether it bounds from below; where it does neither, it is one of several values that are legal.
    """

    knob: str
    limit: Program
    applies: Program
    upper: bool
    lower: bool


@dataclass
class Knob:
    """One knob in the order of decision.

    Attributes:
        name: field of the recipe, or ``epochs``.
        slot: its slot.
        parameter: its range.
        unused: what its slot holds while the algorithm does not use it.
        when: slots -> whether it is used; None for always.
        never: whether the algorithm never uses it.
        refused: positions of choices that the trainer refuses.
        checks: what must hold once it is decided.
        bounds: what a repair tries first.
        together: slots of the knobs that share constraints with it, in the order of decision.
    """

    name: str
    slot: int
    parameter: Parameter
    unused: Any
    when: Program | None = None
    never: bool = False
    refused: frozenset[Any] = frozenset()
    checks: list[Check] = field(default_factory=list)
    bounds: list[Bound] = field(default_factory=list)
    together: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    memory: dict[Any, Any] = field(default_factory=dict)

    @property
    def free(self) -> bool:
        """Whether every one of its values is always legal."""
        return not (self.checks or self.refused)

    def holds(self, slots: Sequence[Any]) -> bool:
        """Return whether the value in its slot is legal, given those decided before."""
        return slots[self.slot] not in self.refused and self.kept(slots)

    def kept(self, slots: Sequence[Any]) -> bool:
        """Return whether its constraints hold, whether it is used or has its default."""
        for check in self.checks:  # noqa: SIM110 - `all` would build a generator
            if not check.holds.run(slots):
                return False
        return True

    def holds_many(self, slots: Sequence[Any], count: int) -> np.ndarray:
        """Return ``(count,)`` bool as `holds`, where slots hold arrays."""
        legal = self.kept_many(slots, count)
        values = slots[self.slot]
        for choice in self.refused:
            legal &= values != choice
        return legal

    def kept_many(self, slots: Sequence[Any], count: int) -> np.ndarray:
        """Return ``(count,)`` bool as `kept`, where slots hold arrays."""
        legal = np.ones(count, bool)
        for check in self.checks:
            legal &= np.asarray(check.holds.run(slots), bool)
        return legal

    def bounded(self, slots: Sequence[Any]) -> Any:
        """Return the value moved within its bounds, on the grid."""
        value = slots[self.slot]
        for bound in self.bounds:
            if bound.applies.run(slots):
                value = self._within(value, bound, bound.limit.run(slots))
        return value

    def _within(self, value: Any, bound: Bound, limit: float) -> Any:
        if not math.isfinite(limit):
            return value
        if (bound.upper and value > limit) or (bound.lower and value < limit):
            limit = min(self.parameter.high, max(self.parameter.low, limit))
            near = self.parameter.on_grid(limit)
            if bound.upper and near > limit:
                near = self._neighbour(near, -1)
            elif bound.lower and near < limit:
                near = self._neighbour(near, 1)
            return near
        return value

    def _around(self, limit: float) -> list[Any]:
        """Return the grid values at and beside a bound; a strict one leaves only those beside it."""
        if not math.isfinite(limit) or not self.parameter.low <= limit <= self.parameter.high:
            return []
        near = self.parameter.on_grid(limit)
        return [near, self._neighbour(near, -1), self._neighbour(near, 1)]

    def _neighbour(self, value: float, direction: int) -> Any:
        """Return the next value on the grid."""
        if self.parameter.integer:
            return int(min(self.parameter.high, max(self.parameter.low, value + direction)))
        step = 1e-4
        if value:  # just below a power of ten the grid is ten times as fine
            step = 10.0 ** (math.floor(math.log10(abs(value + direction * 1e-6 * abs(value)))) - 3)
        return self.parameter.on_grid(value + direction * step)

    def candidates(self, slots: list[Any]) -> list[Any]:
        """Return its legal values, given those decided before, nearest to the one in its slot first; at most 64."""
        parameter, asked = self.parameter, slots[self.slot]
        options: np.ndarray
        if parameter.named:
            options = np.arange(len(parameter.choices))
        elif parameter.choices or parameter.integer:
            options = np.array(parameter.values())
        else:
            points = parameter.decode_many(np.linspace(-1.0, 1.0, _POINTS))
            limits = [parameter.low, parameter.high, asked]
            for bound in self.bounds:
                limits += self._around(bound.limit.run(slots))
            options = np.unique(np.concatenate([points, np.array(limits, float)]))
        held = slots[self.slot]
        slots[self.slot] = options
        legal = self.holds_many(slots, len(options))
        slots[self.slot] = held
        options = options[legal]
        if parameter.choices or parameter.integer:
            distance = np.abs(options.astype(float) - float(asked))
        else:
            distance = np.abs(parameter.encode_many(options) - parameter.encode_many(np.array(float(asked))))
        nearest = np.argsort(distance, kind="stable")[:_NEAREST]
        found: list[Any] = options[nearest].tolist()
        return found


@dataclass(frozen=True)
class MixRule:
    """A bound of one source's weight that a constraint gives.

    Attributes:
        text: the constraint, for messages.
        source: position among the sources.
        limit: slots -> the bound.
        applies: slots -> whether it does; it reads no other slot than the start.
        upper: whether it bounds from above.
        lower: whether it bounds from below.
    """

    text: str
    source: int
    limit: Program
    applies: Program
    upper: bool
    lower: bool


class DecisionPlan:
    """Decides the settings of one algorithm.

    Slot 0 is the start's position, then come the weights of the sources, then the knobs.

    Args:
        knobs: in the order of decision.
        sources: names of the sources.
        usable: positions of the sources that the algorithm can use.
        bounds: lower and upper bound of each source.
        mix_rules: bounds that constraints give.
        starts: positions of the starts that are allowed, the one that others become first.
        start_checks: what must hold of the start.
        slots: number of slots.
        problem: why the algorithm is not legal at all, where that is known.
        steps: slots -> optimiser steps, where epochs are decided instead.
    """

    def __init__(
        self,
        knobs: Sequence[Knob],
        sources: Sequence[str],
        usable: Sequence[int],
        bounds: Sequence[tuple[float, float]],
        mix_rules: Sequence[MixRule],
        starts: Sequence[int],
        start_checks: Sequence[Check],
        slots: int,
        problem: str | None = None,
        steps: Program | None = None,
    ) -> None:
        self.knobs, self.steps = tuple(knobs), steps
        self.usable = tuple(usable)
        self._sources, self._bounds, self._mix_rules = tuple(sources), tuple(bounds), tuple(mix_rules)
        self._slots = slots
        self._by_slot = {knob.slot: knob for knob in knobs}
        self._mix_bounds: dict[int, tuple[list[float], list[float]] | str] = {}
        allowed = [start for start in starts if all(check.holds.run([start]) for check in start_checks)]
        # where mixes are possible from some starts alone, those are the ones
        mixed = [start for start in allowed if not isinstance(self.mix_bounds(start), str)]
        self.starts = tuple(mixed or allowed)
        self._legal_start = [start in self.starts for start in range(len(STARTS))]
        self.fallback: list[Any] | None = None
        self.problem = problem
        if problem is None:
            self._find_fallback()

    def _find_fallback(self) -> None:
        """Find settings that are legal, which become the fallback, or say why there are none."""
        if not self.starts:
            self.problem = "no starting checkpoint is allowed"
            return
        problems = []
        for start in self.starts:
            bounds = self.mix_bounds(start)
            if isinstance(bounds, str):
                problems.append(bounds)
                continue
            weights = self.mix([0.5] * len(self._sources), start)
            slots = [start, *weights, *[None] * (self._slots - 1 - len(weights))]
            for knob in self.knobs:
                slots[knob.slot] = self._middle(knob)
            if self._decided(slots, None):
                self.fallback = slots
                return
            broken = self.broken(slots)
            problems.append(f"no setting of its knobs keeps {broken[0] if broken else 'every constraint'!r}")
        self.problem = problems[0]

    def _middle(self, knob: Knob) -> Any:
        return (
            knob.parameter.choices.index(knob.parameter.decode(0.0))
            if knob.parameter.named
            else knob.parameter.decode(0.0)
        )

    # The mix --------------------------------------------------------------------------------------------------------

    def mix_bounds(self, start: int) -> tuple[list[float], list[float]] | str:
        """Return the lower and upper bounds of the usable sources' weights, or why no mix is within them."""
        if start not in self._mix_bounds:
            low, high = ([pair[side] for pair in self._bounds] for side in (0, 1))
            slots = [start]
            texts = []
            unmet: str | None = None
            for rule in self._mix_rules:
                if not rule.applies.run(slots):
                    continue
                limit = rule.limit.run(slots)
                texts.append(rule.text)
                if rule.lower and limit > 0 and rule.source not in self.usable:
                    unmet = f"{rule.text!r} asks for {self._sources[rule.source]}, in which it has no rows"
                if rule.upper:
                    high[rule.source] = min(high[rule.source], math.floor(limit * MIX_GRID + 1e-6) / MIX_GRID)
                if rule.lower:
                    low[rule.source] = max(low[rule.source], math.ceil(limit * MIX_GRID - 1e-6) / MIX_GRID)
            kept = {self._sources[i]: (low[i], high[i]) for i in self.usable}
            crossed = [name for name, (below, above) in kept.items() if below > above]
            problem: str | None
            if crossed:
                below, above = kept[crossed[0]]
                problem = f"data_mix.{crossed[0]}: {below:g} is asked at least and {above:g} at most, by {texts}"
            else:
                problem = bounds_problem(kept)
                if problem is not None:
                    left = [name for name in self._sources if name not in kept]
                    problem = "data_mix: " + (f"without {', '.join(left)}, " if left else "") + problem
            self._mix_bounds[start] = (
                unmet or problem or ([low[i] for i in self.usable], [high[i] for i in self.usable])
            )
        return self._mix_bounds[start]

    def mix(self, weights: Sequence[float], start: int) -> list[float]:
        """Return the legal weights nearest to ``weights``, one per source, on the grid.

        Raises:
            ValueError: no mix is legal from this start.
        """
        bounds = self.mix_bounds(start)
        if isinstance(bounds, str):
            raise ValueError(bounds)
        usable = self.usable
        counts = grid_counts(project_to_bounds([weights[i] for i in usable], *bounds))
        result = [0.0] * len(self._sources)
        for place, count in zip(usable, counts, strict=True):
            result[place] = count / MIX_GRID
        return result

    def mix_many(self, weights: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Return `mix` of each row of ``(m, sources)`` from its start, ``(m,)``."""
        if not any("start" in rule.applies.needs | rule.limit.needs for rule in self._mix_rules):
            return self._mix_many(weights, self.starts[0])
        result = np.zeros(weights.shape)
        for start in self.starts:
            rows = starts == start
            if rows.any():
                result[rows] = self._mix_many(weights[rows], start)
        return result

    def _mix_many(self, weights: np.ndarray, start: int) -> np.ndarray:
        bounds = self.mix_bounds(start)
        if isinstance(bounds, str):
            raise ValueError(bounds)
        usable = list(self.usable)
        low, high = (np.array(side) for side in bounds)
        counts = grid_counts_many(project_to_bounds_many(weights[:, usable], low, high))
        result = np.zeros((len(weights), len(self._sources)))
        result[:, usable] = counts / MIX_GRID
        return result

    def mix_problem(self, weights: Mapping[str, float], start: int) -> str | None:
        """Return why a mix is not legal; None when it is."""
        bounds = self.mix_bounds(start)
        if isinstance(bounds, str):
            return bounds
        for place, low, high in zip(self.usable, *bounds, strict=True):
            weight = weights.get(self._sources[place], 0.0)
            if not low - 1e-9 <= weight <= high + 1e-9:
                return f"mix.{self._sources[place]}: {weight:g} is outside [{low:g}, {high:g}]"
        return None

    # The knobs --------------------------------------------------------------------------------------------------------

    def start(self, asked: int) -> int:
        """Return the start, or the one that it becomes where it is not allowed."""
        return asked if self._legal_start[asked] else self.starts[0]

    def starts_many(self, asked: np.ndarray) -> np.ndarray:
        """Return `start` of each of ``(n,)``."""
        return np.where(np.array(self._legal_start)[asked], asked, self.starts[0])

    def decide(self, slots: list[Any]) -> None:
        """Make the knobs legal, in place: start and mix are there and stay, but for the last resort."""
        if self._decided(slots, None):
            return
        assert self.fallback is not None  # an algorithm without is not legal, which is asked first
        slots[:] = self.fallback

    def _decided(self, slots: list[Any], fixed: Mapping[int, Any] | None) -> bool:
        for knob in self.knobs:
            if knob.never or (knob.when is not None and not knob.when.run(slots)):
                slots[knob.slot] = knob.unused
                if not knob.kept(slots) and not self._fit_together(knob, slots, fixed or {}):
                    return False
                continue
            if knob.free or knob.holds(slots):
                continue
            if not self._repaired(knob, slots, fixed):
                return False
        return True

    def _repaired(self, knob: Knob, slots: list[Any], fixed: Mapping[int, Any] | None) -> bool:
        key = None
        if fixed is None:
            key = (slots[knob.slot], *[slots[i] for i in knob.reads])
            known = knob.memory.get(key) if knob.when is None else None
            if known is not None:
                slots[knob.slot] = known
                return True
            asked = slots[knob.slot]
            if knob.bounds and not knob.parameter.choices:
                slots[knob.slot] = knob.bounded(slots)
                if knob.holds(slots):
                    return True
                slots[knob.slot] = asked
            nearest = knob.candidates(slots)
            if nearest:
                slots[knob.slot] = nearest[0]
                if len(knob.memory) < _MEMORY and knob.when is None:
                    knob.memory[key] = nearest[0]
                return True
        return self._fit_together(knob, slots, fixed or {})

    def _fit_together(self, failed: Knob, slots: list[Any], fixed: Mapping[int, Any]) -> bool:
        """Decide the knobs again that share constraints, nearest values first."""
        order = [self._by_slot[slot] for slot in failed.together]
        asked = {knob.slot: slots[knob.slot] for knob in order}
        trials = 0

        def place(position: int) -> bool:
            nonlocal trials
            if position == len(order):
                return True
            knob = order[position]
            if knob.never or (knob.when is not None and not knob.when.run(slots)):
                slots[knob.slot] = knob.unused
                return knob.slot not in fixed and knob.kept(slots) and place(position + 1)
            slots[knob.slot] = asked[knob.slot]
            if knob.slot in fixed:
                return (knob.free or knob.holds(slots)) and place(position + 1)
            for value in knob.candidates(slots):
                trials += 1
                if trials > SEARCH_LIMIT:
                    return False
                slots[knob.slot] = value
                if place(position + 1):
                    return True
            slots[knob.slot] = asked[knob.slot]
            return False

        if place(0):
            return True
        for slot, value in asked.items():
            slots[slot] = value
        return False

    def completable(self, slots: list[Any], fixed: Mapping[int, Any]) -> bool:
        """Return whether the knobs that are not ``fixed`` (slot -> value) can be decided so that all is legal.

        ``slots`` hold start and mix; the rest of them is overwritten.
        """
        for knob in self.knobs:
            slots[knob.slot] = fixed[knob.slot] if knob.slot in fixed else self._middle(knob)
        seen: set[int] = set()
        for knob in self.knobs:
            if knob.slot in seen or knob.never:
                slots[knob.slot] = slots[knob.slot] if knob.slot in seen else knob.unused
                continue
            if not knob.together:
                if knob.when is not None and not knob.when.run(slots):
                    slots[knob.slot] = knob.unused
                continue
            seen.update(knob.together)
            if not self._fit_together(knob, slots, fixed):
                return False
        return True

    def used(self, knob: Knob, slots: Sequence[Any]) -> bool:
        """Return whether the algorithm uses a knob, given those decided before."""
        return not (knob.never or (knob.when is not None and not knob.when.run(slots)))

    def broken(self, slots: Sequence[Any]) -> list[str]:
        """Return the constraints that settings break, as texts."""
        texts = []
        for knob in self.knobs:
            if slots[knob.slot] in knob.refused and self.used(knob, slots):
                shown = knob.parameter.choices[slots[knob.slot]] if knob.parameter.named else slots[knob.slot]
                texts.append(f"{knob.name}: the trainer refuses {shown!r} on this task")
            texts += [check.text for check in knob.checks if not check.holds.run(slots)]
        return texts

    def decide_many(self, columns: list[Any], count: int) -> np.ndarray:
        """Make knobs legal, in place: slots hold ``(count,)`` arrays.

        Returns:
            ``(count,)`` bool: rows that were put to the fallback.
        """
        gone = np.zeros(count, bool)
        for knob in self.knobs:
            used = None
            if knob.never:
                columns[knob.slot] = np.full(count, knob.unused)
                used = np.zeros(count, bool)
            elif knob.when is not None:
                used = np.broadcast_to(np.asarray(knob.when.run(columns), bool), (count,))
                if not used.all():
                    columns[knob.slot] = np.where(used, columns[knob.slot], knob.unused)
            if knob.free:
                continue
            legal = knob.holds_many(columns, count)
            if used is not None and knob.refused:
                legal |= ~used & knob.kept_many(columns, count)
            if not legal.all():
                self._repair_rows(knob, columns, np.flatnonzero(~legal), gone)
        return gone

    def _repair_rows(self, knob: Knob, columns: list[Any], rows: np.ndarray, gone: np.ndarray) -> None:
        # A column that is a view of the caller's, or of one value broadcast, cannot be written to.
        for slot in {knob.slot, *knob.together}:
            if not columns[slot].flags.writeable or columns[slot].base is not None:
                columns[slot] = columns[slot].copy()
        values, memory = columns[knob.slot], knob.memory
        keys = zip(*[columns[i][rows].tolist() for i in (knob.slot, *knob.reads)], strict=True)
        for row, key in zip(rows.tolist(), keys, strict=True):
            known = memory.get(key) if knob.when is None else None
            if known is not None:
                values[row] = known
                continue
            slots = [column[row].item() for column in columns]
            unused = not self.used(knob, slots)
            if not (self._fit_together(knob, slots, {}) if unused else self._repaired(knob, slots, None)):
                assert self.fallback is not None  # as in `decide`
                slots = self.fallback
                gone[row] = True
                for slot, value in enumerate(slots):
                    if not columns[slot].flags.writeable or columns[slot].base is not None:
                        columns[slot] = columns[slot].copy()
                    columns[slot][row] = value
                values = columns[knob.slot]
                continue
            for slot in {knob.slot, *knob.together}:
                columns[slot][row] = slots[slot]
