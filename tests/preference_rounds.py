"""A task of preference pairs on the tiny model, for the tests of preference algorithms and of adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.tasks.base import Source
from posttrain_gym.inner_trainers.testing import TinyTask

UNEVEN = [
    {"prompt": f"{a}{b}="[-length:], "chosen": a * (1 + number % 3), "rejected": b * (1 + number % 2)}
    for number, (a, b, length) in enumerate((a, b, length) for a in "abcd" for b in "efgh" for length in (2, 3))
]
"""32 pairs whose prompts, better and worse answers have different lengths."""


class PairTask(TinyTask):
    """`TinyTask` with a source ``pairs`` of preferences; ``good`` has demonstrations and prompts."""

    name = "pairs"

    def __init__(self, folder: Path, pairs: Sequence[Mapping[str, str]] = UNEVEN) -> None:
        super().__init__(folder)
        self._pairs = pairs

    def sources(self) -> list[Source]:
        return [super().sources()[1], Source("pairs", {"preferences": self._pairs})]


def preference(algorithm: str, **changes: Any) -> Recipe:
    settings: dict[str, Any] = {"mix": {"pairs": 1.0}, "steps": 4, "batch_size": 4, "learning_rate": 1e-2}
    return Recipe(algorithm, **{**settings, **changes})
