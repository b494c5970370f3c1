"""Adjustments of what is measured: exactly and per source at every step, or on a sample."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ..adjustments import Adjustment
from .live import Handler, LiveRound


class SetDetail:
    """Switches to one of the two levels; no weight depends on which.

    Args:
        detail: the level, as `Meter.detail`.
    """

    def __init__(self, detail: bool) -> None:
        self._detail = detail

    def refusal(self, live: LiveRound, adjustment: Adjustment) -> str | None:
        """Return a reason when the round is at the level already."""
        if live.meter.detail != self._detail:
            return None
        return (
            "everything is measured exactly already" if self._detail else "gradients are measured on a sample already"
        )

    def apply(self, live: LiveRound, adjustment: Adjustment) -> str | None:
        """Switch, from the next step on."""
        live.meter.detail = self._detail
        return None


HANDLERS: Mapping[str, Handler] = MappingProxyType({"log_more": SetDetail(True), "log_less": SetDetail(False)})
