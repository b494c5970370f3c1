"""What our own code takes of each optimiser step of a running round, part by part, beside the step itself."""

from __future__ import annotations

import time
from collections.abc import Mapping

from ..adjustments import Adjustment
from .session import TrlSession

HARMLESS = Adjustment("lr_scale", 1.0)
"""An adjustment that goes all the way to the optimiser and changes nothing."""

PARTS = ("gradients", "monitor", "executor")


def step_costs(
    session: TrlSession, steps: int, *, warmup: int = 5, adjustment: Adjustment = HARMLESS
) -> Mapping[str, list[float]]:
    """Take steps of a round and return the seconds of each: ``"step"``, all of it, and of `PARTS`.

    Each step is followed by the adjustment, so the weights are those of a round with it. Times are those of a step
    among others, with the caches that training leaves behind: several times those of the same code in a loop of its
    own. Take medians, and look at the load of the machine beside them.

    Args:
        session: a round that has more steps left than are asked for.
        steps: optimiser steps to time.
        warmup: steps before them.
        adjustment: what is asked for and applied after each step: the executor's part.

    Raises:
        ValueError: the round ends before.
    """
    session.advance(warmup)
    seconds: dict[str, list[float]] = {"step": [], **{part: [] for part in PARTS}}
    for _ in range(steps):
        began = time.perf_counter()
        session.advance(1)
        stepped = time.perf_counter()
        if session.done:
            raise ValueError(
                f"step_costs: the round ended at step {session.step}, expected more than {warmup} + {steps} steps; "
                "give it a recipe with more."
            )
        if session.refusal(adjustment) is None:
            session.apply(adjustment)
        adjusted = time.perf_counter()
        for part, taken in session.own_seconds.items():
            seconds[part].append(taken)
        seconds["executor"].append(adjusted - stepped)
        seconds["step"].append(adjusted - began)
    return seconds
