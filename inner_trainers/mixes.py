"""What adjustments make of a mix in force, for rounds whose sources are plain weights."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from .adjustments import Adjustment


def mix_refusal(
    mix: Mapping[str, float], adjustment: Adjustment, usable: Collection[str], algorithm: str
) -> str | None:
    """Return why ``mix_toward`` or ``mix_away`` cannot be applied; None when it can.

    Args:
        mix: source -> weight in force.
        adjustment: of one of the two kinds.
        usable: sources that the algorithm can train on.
        algorithm: names it in the reason.
    """
    name = str(adjustment.source)
    if name not in usable:
        return f"source {name!r} has no rows that {algorithm} trains on"
    weight = mix.get(name, 0.0)
    if adjustment.kind == "mix_toward":
        return f"{name!r} is the whole mix already" if weight >= 1.0 else None
    return f"{name!r} has no weight, or all of it" if weight in (0.0, 1.0) else None


def shifted_mix(mix: Mapping[str, float], adjustment: Adjustment) -> dict[str, float]:
    """Return the mix after ``mix_toward`` or ``mix_away``; weights sum to 1."""
    name, share = str(adjustment.source), adjustment.number
    others = {other: weight for other, weight in mix.items() if other != name}
    own = mix.get(name, 0.0)
    new = own + share * (1.0 - own) if adjustment.kind == "mix_toward" else own * (1.0 - share)
    scale = (1.0 - new) / max(1e-12, math.fsum(others.values()))
    return {name: new, **{other: weight * scale for other, weight in others.items()}}
