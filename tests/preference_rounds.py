"""A task of preference pairs on the tiny model, for the tests of preference algorithms and of adapters."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.tasks.base import Source
from posttrain_gym.inner_trainers.testing import TinyTask
from posttrain_gym.inner_trainers.trl.data import draw_mix

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


def arguments(config: type[Any], recipe: Recipe, **changes: Any) -> Any:
    """Return what a person would write to ask the library for the recipe's round."""
    return config(
        output_dir=tempfile.gettempdir(),
        max_steps=recipe.steps,
        per_device_train_batch_size=recipe.batch_size,
        gradient_accumulation_steps=recipe.gradient_accumulation,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type="constant",
        seed=3,
        beta=recipe.beta,
        max_length=recipe.max_length,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **changes,
    )


def drawn(recipe: Recipe, rows: Sequence[Any] = UNEVEN) -> list[dict[str, str]]:
    """Return the pairs of a round with seed 3, in training order."""
    count = recipe.steps * recipe.batch_size * recipe.gradient_accumulation
    return [dict(rows[index]) for _, index in draw_mix({"pairs": len(rows)}, recipe.mix, count, 3)]
