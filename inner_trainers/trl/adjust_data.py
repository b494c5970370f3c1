"""Adjustments of what a step trains on: batch size, completions per prompt, mix, preference for hard rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from ..adjustments import Adjustment
from ..messages import did_you_mean
from ..recipe import integer_range
from .live import Handler, LiveRound
from .live_data import LiveRows
from .snapshots import drop_completions

_SAME = 1e-9


def _fixed(live: LiveRound) -> str | None:
    """Return why the rows of a round cannot change; None when they can."""
    if getattr(live.trainer, "live_rows", None) is None:
        reason = getattr(live.trainer, "rows_fixed", "") or "its trainer takes its rows from the loader alone"
        return f"the rows of this round cannot change: {reason}"
    return None


def _rows(live: LiveRound) -> LiveRows:
    rows: LiveRows = live.trainer.live_rows
    return rows


def _put(live: LiveRound, **settings: object) -> None:
    """Put data settings in force; completions of other prompts, or of another number, are not used again.

    A trainer that has not begun holds them when it asks for its first batch: its loader is still to be built, for the
    rows that the recipe drew.
    """
    live.change(**settings)
    drop_completions(live.trainer)
    if live.started:
        live.trainer.hold_settings()


class ScaleBatch:
    """Multiplies the batch size, to the nearest other legal size in that direction."""

    def refusal(self, live: LiveRound, adjustment: Adjustment) -> str | None:
        """Refuse where rows are fixed, no other size is legal, or memory would not hold it."""
        reason = _fixed(live)
        if reason is not None:
            return reason
        factor, now = adjustment.number, live.now.batch_size
        if factor == 1:
            return "a factor of 1 changes nothing"
        size = nearest_batch_size(live, factor)
        if size is None:
            low, high = batch_sizes(live)
            side = f"larger than {now} up to {high}" if factor > 1 else f"smaller than {now} from {low} on"
            return f"no batch size {side} is legal here"
        return _rows(live).growth_refusal(size) if size > now else None

    def apply(self, live: LiveRound, adjustment: Adjustment) -> None:
        """Take the size from the next step on."""
        size = nearest_batch_size(live, adjustment.number)
        assert size is not None  # else refused
        _put(live, batch_size=size)


def batch_sizes(live: LiveRound) -> tuple[int, int]:
    """Return the smallest and the largest legal batch size; in grouped algorithms all are multiples of the smallest."""
    high = integer_range("batch_size")[1]
    if live.spec.grouped:
        unit = live.now.num_generations // math.gcd(live.now.num_generations, live.now.gradient_accumulation)
        return unit, high // unit * unit
    return (2 if live.spec.name == "kto" else 1), high


def nearest_batch_size(live: LiveRound, factor: float) -> int | None:
    """Return the legal size nearest to the present one times ``factor``, on that side of it; None without one."""
    low, high = batch_sizes(live)
    unit, now = (low if live.spec.grouped else 1), live.now.batch_size
    size = unit * math.floor(now * factor / unit + 0.5)
    size = max(size, (now // unit + 1) * unit) if factor > 1 else min(size, (-(-now // unit) - 1) * unit)
    size = min(max(size, low), high)
    return size if (size > now) == (factor > 1) and size != now else None


class StepGenerations:
    """Takes the next larger or smaller number of completions per prompt."""

    def refusal(self, live: LiveRound, adjustment: Adjustment) -> str | None:
        """Refuse where completions are not compared in groups as they are sampled, or no other number divides them."""
        if not live.spec.grouped:
            return f"{live.spec.name} does not compare completions of one prompt with each other"
        reason = _fixed(live)
        if reason is not None:
            return reason
        if adjustment.number == 0:
            return "a step of 0 changes nothing"
        if next_generations(live, adjustment.number) is None:
            now = live.now.num_generations
            side = f"more than {now}" if adjustment.number > 0 else f"fewer than {now} and at least 2"
            return f"no number of completions per prompt {side} divides the {_completions(live)} of a step"
        return None

    def apply(self, live: LiveRound, adjustment: Adjustment) -> None:
        """Take it from the next step on, which samples anew."""
        _put(live, num_generations=next_generations(live, adjustment.number))


def _completions(live: LiveRound) -> int:
    return live.now.batch_size * live.now.gradient_accumulation


def next_generations(live: LiveRound, direction: float) -> int | None:
    """Return the next divisor of a step's completions, at least 2, in a direction; None when there is none."""
    completions, now = _completions(live), live.now.num_generations
    most = min(completions, integer_range("num_generations")[1])
    candidates = range(now + 1, most + 1) if direction > 0 else range(now - 1, 1, -1)
    return next((number for number in candidates if completions % number == 0), None)


class _Mix:
    """What the adjustments of the mix share."""

    def apply(self, live: LiveRound, adjustment: Adjustment) -> None:
        """Take the mix from the next step on."""
        mix = self._mix(live, adjustment)
        rows = _rows(live)
        before = rows.pools.shares(live.now)
        _put(live, mix=mix)
        new = {pool: share for pool, share in rows.pools.shares(live.now).items() if pool not in before}
        live.meter.flags += [flag for flag in rows.pools.flags(new) if flag not in live.meter.flags]

    def _mix(self, live: LiveRound, adjustment: Adjustment) -> dict[str, float]:
        raise NotImplementedError


class MixToward(_Mix):
    """Moves a share of the mix to one source."""

    def refusal(self, live: LiveRound, adjustment: Adjustment) -> str | None:
        """Refuse a source that the algorithm cannot train on, or that has the whole mix already."""
        source = adjustment.source or ""
        reason = _fixed(live) or _unusable(live, source)
        if reason is not None:
            return reason
        if live.now.mix.get(source, 0.0) >= 1.0 - _SAME:
            return f"source {source!r} is the whole mix already"
        return _rows(live).pools.refusal(live.now, source)

    def _mix(self, live: LiveRound, adjustment: Adjustment) -> dict[str, float]:
        share = adjustment.number
        mix = {name: weight * (1.0 - share) for name, weight in live.now.mix.items()}
        mix[adjustment.source or ""] = mix.get(adjustment.source or "", 0.0) + share
        return _whole(mix)


class MixAway(_Mix):
    """Moves a share of one source's weight to the others: by their weights, equally where they have none."""

    def refusal(self, live: LiveRound, adjustment: Adjustment) -> str | None:
        """Refuse a source that has no weight, or that is the only one there is."""
        source = adjustment.source or ""
        reason = _fixed(live) or _unusable(live, source)
        if reason is not None:
            return reason
        if live.now.mix.get(source, 0.0) <= _SAME:
            return f"source {source!r} has no weight in the mix"
        others = _others(live, source)
        if not others:
            return f"{source!r} is the only source with {live.spec.rows} rows"
        reasons = (_rows(live).pools.refusal(live.now, name) for name in others)
        return next((reason for reason in reasons if reason is not None), None)

    def _mix(self, live: LiveRound, adjustment: Adjustment) -> dict[str, float]:
        source = adjustment.source or ""
        moved = live.now.mix[source] * adjustment.number
        mix = {**live.now.mix, source: live.now.mix[source] - moved}
        for name, part in _others(live, source).items():
            mix[name] = mix.get(name, 0.0) + moved * part
        return _whole(mix)


def _others(live: LiveRound, source: str) -> dict[str, float]:
    """Return who takes the weight of a source, and which part of it."""
    weights = {name: weight for name, weight in live.now.mix.items() if name != source and weight > _SAME}
    if not weights:
        weights = dict.fromkeys((name for name in _rows(live).pools.sources if name != source), 1.0)
    total = math.fsum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def _whole(mix: Mapping[str, float]) -> dict[str, float]:
    total = math.fsum(mix.values())
    return {name: min(1.0, max(0.0, weight / total)) for name, weight in mix.items()}


def _unusable(live: LiveRound, source: str) -> str | None:
    sources = _rows(live).pools.sources
    if source in sources:
        return None
    return (
        f"no source {source!r} has {live.spec.rows} rows, which {live.spec.name} trains on."
        f"{did_you_mean(source, sources).removesuffix('.')}"
    )


class ResetMix:
    """Goes back to the recipe's mix, without preference for hard rows."""

    def refusal(self, live: LiveRound, adjustment: Adjustment) -> str | None:
        """Refuse where that is what is in force."""
        reason = _fixed(live)
        if reason is not None:
            return reason
        if live.now.mix == live.asked.mix and _rows(live).hard_share == 0:
            return "the recipe's mix is in force already, and no hard rows are preferred"
        return None

    def apply(self, live: LiveRound, adjustment: Adjustment) -> None:
        """Go back from the next step on."""
        _rows(live).hard_share = 0.0
        _put(live, mix=live.asked.mix)


class PreferHardRows:
    """Draws a share of each later batch from the hardest quarter of each source's rows seen so far."""

    def refusal(self, live: LiveRound, adjustment: Adjustment) -> str | None:
        """Refuse where no row's difficulty is known, or nothing would change."""
        reason = _fixed(live)
        if reason is not None:
            return reason
        if live.spec.sampled and not live.spec.on_policy:
            return f"{live.spec.name} asks for no reward, so how hard a prompt is cannot be known"
        rows = _rows(live)
        if not rows.any_seen:
            return "no row was trained on yet, so none is known to be hard"
        if rows.hard_share == adjustment.number:
            return f"the share of {adjustment.number:g} is drawn from the hardest rows already"
        return None

    def apply(self, live: LiveRound, adjustment: Adjustment) -> None:
        """Prefer them from the next step on."""
        _rows(live).hard_share = adjustment.number
        drop_completions(live.trainer)


HANDLERS: Mapping[str, Handler] = MappingProxyType(
    {
        "batch_scale": ScaleBatch(),
        "generations_step": StepGenerations(),
        "mix_toward": MixToward(),
        "mix_away": MixAway(),
        "mix_reset": ResetMix(),
        "hardest_rows": PreferHardRows(),
    }
)
