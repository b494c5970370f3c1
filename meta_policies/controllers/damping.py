"""Rules that undo each other's adjustments: which adjustments are opposites, and how long the second has to wait."""

from __future__ import annotations

from ...inner_trainers.adjustments import Adjustment

DAMPING_WINDOW = 20
"""Steps for which an adjustment's opposite is held back the first time; see `Damping`."""


class Damping:
    """Holds back what would undo a recent adjustment, for longer each time.

    The opposite of an adjustment that was made at step s waits until step s + window · 2^r, where r counts how often
    the direction has turned in this round: on the learning rate, the batch, the mix of one source and so on, each by
    itself. An adjustment that prevents harm does not wait for one that does not, but its turning is counted.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._last: dict[str, tuple[int, int, str, bool]] = {}  # axis -> direction, step, by, danger
        self._turns: dict[str, int] = {}

    def waits(self, axis: str, direction: int, step: int, danger: bool) -> tuple[int, str] | None:
        """Return the step it has to wait for and whose adjustment it would undo; None when it need not wait."""
        last = self._last.get(axis)
        if last is None or last[0] == direction or (danger and not last[3]):
            return None
        until = last[1] + self._window * 2 ** min(self._turns.get(axis, 0), 30)
        return (until, last[2]) if step < until else None

    def did(self, axis: str, direction: int, step: int, by: str, danger: bool) -> None:
        """Note an adjustment that was made."""
        last = self._last.get(axis)
        if last is not None and last[0] != direction:
            self._turns[axis] = self._turns.get(axis, 0) + 1
        self._last[axis] = (direction, step, by, danger)


def direction_of(adjustment: Adjustment) -> tuple[str, int] | None:
    """Return what an adjustment moves and whether up (1) or down (-1); None for one that has no opposite."""
    kind, value = adjustment.kind, adjustment.number
    if kind.endswith("_scale"):
        return None if value == 1 else (kind, 1 if value > 1 else -1)
    if kind in ("gamma_add", "generations_step"):
        return None if value == 0 else (kind, 1 if value > 0 else -1)
    if kind in ("mix_toward", "mix_away"):
        return f"mix {adjustment.source}", 1 if kind == "mix_toward" else -1
    if kind in ("lora_freeze", "lora_unfreeze", "log_more", "log_less"):
        return kind.partition("_")[0], 1 if kind in ("lora_unfreeze", "log_more") else -1
    return None
