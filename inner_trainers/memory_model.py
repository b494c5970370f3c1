"""What a larger batch will take of memory, foreseen from the peaks of the batches that a round has had."""

from __future__ import annotations

MARGIN = 0.1
"""Share by which the growth of a batch's memory may turn out larger than foreseen: rows differ in length."""


class MemoryModel:
    """Peaks by batch size, fitted as the round goes on.

    With one size seen, all memory above the level before training is taken to grow in proportion to the batch, the
    optimiser's state included: an overestimate. From two sizes on it is the line of least squares through their
    peaks, with a slope of at least 0 and never below a peak that was seen.

    Attributes:
        level: bytes in use before the first step; None while unknown.
    """

    def __init__(self) -> None:
        self.level: int | None = None
        self._peaks: dict[int, int] = {}

    @property
    def peaks(self) -> dict[int, int]:
        """The largest peak, in bytes, of each batch size that told something, ascending."""
        return dict(sorted(self._peaks.items()))

    def observe(self, batch_size: int, peak_bytes: int) -> None:
        """Take in a peak; that of a smaller batch than the largest seen tells nothing, as freed memory is kept."""
        if not self._peaks or batch_size >= max(self._peaks):
            self._peaks[batch_size] = max(peak_bytes, self._peaks.get(batch_size, 0))

    def foreseen(self, batch_size: int) -> int | None:
        """Return the peak that a batch would have, in bytes; None before any was seen."""
        if not self._peaks:
            return None
        highest = max(self._peaks.values())
        if len(self._peaks) == 1:
            ((seen, peak),) = self._peaks.items()
            level = min(self.level or 0, peak)
            return round(level + (peak - level) * max(1.0, batch_size / seen))
        sizes, peaks = list(self._peaks), list(self._peaks.values())
        middle, mean = sum(sizes) / len(sizes), sum(peaks) / len(peaks)
        spread = sum((size - middle) ** 2 for size in sizes)
        slope = sum((size - middle) * (peak - mean) for size, peak in zip(sizes, peaks, strict=True)) / spread
        return max(highest, round(mean + max(0.0, slope) * (batch_size - middle)))

    def refusal(self, batch_size: int, limit: int | None) -> str | None:
        """Return why a batch may not grow to a size, with the arithmetic; None when it may.

        Args:
            batch_size: the size, larger than the one in force.
            limit: most bytes that may be in use; None where nothing says.
        """
        foreseen = self.foreseen(batch_size)
        if foreseen is None or limit is None:
            return None
        highest = max(self._peaks.values())
        needed = highest + (1.0 + MARGIN) * (foreseen - highest)
        if needed <= limit:
            return None
        seen = ", ".join(f"{_shown(peak)} at {size}" for size, peak in self.peaks.items())
        before = "" if self.level is None else f"{_shown(self.level)} before training, "
        return (
            f"a batch of {batch_size} would take about {_shown(foreseen)} ({before}{seen}), with a margin of "
            f"{MARGIN:.0%} of the growth {_shown(round(needed))}, above the {_shown(limit)} there may be in use"
        )


def _shown(amount: int) -> str:
    return f"{amount / 1e9:.3g} GB" if amount >= 1e9 else f"{amount / 1e6:.3g} MB"
