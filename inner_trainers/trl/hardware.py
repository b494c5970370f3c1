"""The signals of the hardware at each optimiser step, read without waiting for anything."""

from __future__ import annotations

import torch

from ..telemetry import RoundTelemetry
from .memory import memory_total


class HardwareWatch:
    """Reads time, throughput, memory and load of one round; a clock decides them, so no curve holds them.

    Args:
        device: where the round trains.
        telemetry: looks at the card on a thread of its own.
    """

    def __init__(self, device: torch.device, telemetry: RoundTelemetry) -> None:
        self._device, self._telemetry = device, telemetry
        self._tokens = 0

    def read(self, seconds: float, tokens: int, used: int | None) -> dict[str, float | None]:
        """Return the signals of the step that is done, None for what there is not.

        Args:
            seconds: wall time of the step.
            tokens: tokens trained on and sampled in the round so far.
            used: bytes in use, of a card the most that was reserved in the round; None when unknown.
        """
        of_step, self._tokens = tokens - self._tokens, tokens
        total = memory_total(self._device)
        return {
            "step_seconds": seconds,
            "tokens_per_second": of_step / seconds if seconds > 0 else None,
            "memory_share": None if used is None or not total else used / total,
            "utilisation": self._telemetry.utilisation_now,
        }
