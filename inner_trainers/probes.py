"""The probes: short real rounds that find a learning rate or a batch size before a budget is spent on them."""

from __future__ import annotations

from .probe_batch_size import BatchSizePoint, BatchSizeProbe, batch_size_probe
from .probe_learning_rate import LearningRateProbe, RatePoint, learning_rate_probe

__all__ = [
    "BatchSizePoint",
    "BatchSizeProbe",
    "LearningRateProbe",
    "RatePoint",
    "batch_size_probe",
    "learning_rate_probe",
]
