"""Writes TensorBoard curves that survive a kill and hold no step twice after a resume."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LOG = logging.getLogger(__name__)


class CurveWriter:
    """Appends scalars to one folder; each `write` is on disk when it returns.

    Points that the folder's event files already hold are skipped, so a resumed run that repeats its decisions
    writes only what is new.

    Args:
        folder: TensorBoard log folder.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._seen = _existing_points(self._folder)
        self._writer: Any = None

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Write the scalars of one step; TensorBoard marks values that are not finite."""
        new = {tag: value for tag, value in values.items() if (tag, step) not in self._seen}
        if not new:
            return
        if self._writer is None:  # a resumed run with nothing new leaves no file behind
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), flush_secs=3600, max_queue=10_000)
        for tag, value in new.items():
            self._seen.add((tag, step))
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()


def _existing_points(folder: Path) -> set[tuple[str, int]]:
    points: set[tuple[str, int]] = set()
    if not folder.is_dir():
        return points
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    for file in sorted(folder.glob("events.out.tfevents.*")):
        try:
            for event in EventFileLoader(str(file)).Load():
                points.update((value.tag, event.step) for value in event.summary.value)
        except Exception:  # a file cut by a kill; the reader's error types vary, and what came before the cut was read
            _LOG.debug("%s ends in a damaged record", file, exc_info=True)
    return points
