"""The built-in task ``smol-reasoning``: SmolLM2-135M-Instruct on short questions of reasoning-gym."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from ..messages import require_integer
from .base import Benchmark, Chat, InnerTask, Item, Source

if TYPE_CHECKING:
    from ..benchmarks.reasoning_gym import Question, ReasoningGym

SYSTEM = "Answer with only the final answer and nothing else."
MAX_NEW_TOKENS = 16
"""Enough for a sentence with the answer at its end; the base model seldom writes the bare answer."""

DATASETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "basic_arithmetic": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
        "letter_counting": {"min_words": 3, "max_words": 6},
    }
)
"""Data sets of reasoning-gym with their settings; each is a dimension of the benchmark."""

_SEEDS = {"train": 1, "validation": 2, "test": 3}


class SmolReasoning(InnerTask):
    """SmolLM2-135M-Instruct on sums, basic arithmetic and letter counts; needs the extra ``smol``.

    A reply counts when the last number in it is right, so that a gain is one in answers and not in form alone; the
    format rate is the share of replies that are the bare number. Sources: ``worked`` has right answers and verifiable
    prompts, ``pairs`` a right and a near wrong answer, ``guesses`` near wrong answers alone. Which split a question is
    in follows from its text. Recipes take LoRA adapters of rank 8 unless they say otherwise.
    """

    name = "smol-reasoning"

    def __init__(self, rows_per_dataset: int = 400, items_per_dimension: int = 32) -> None:
        """Keep the sizes.

        Args:
            rows_per_dataset: rows of each data set in each source, in [8, 2000].
            items_per_dimension: validation items, and as many test items, of each dimension, in [2, 200].
        """
        self._rows = require_integer("rows_per_dataset", rows_per_dataset, low=8, high=2000)
        self._items = require_integer("items_per_dimension", items_per_dimension, low=2, high=200)

    def base_checkpoint(self) -> Path:
        """Return the folder of the converted weights, which are made once.

        Raises:
            ImportError: the package with the weights is not installed.
        """
        from ..base_models import model_folder

        return model_folder("smollm2-135m-instruct")

    def chat(self) -> Chat:
        """Return the system turn; the template is the model's own."""
        return Chat(system=SYSTEM)

    def recipe_defaults(self) -> dict[str, Any]:
        """Return what fits the model on a CPU: LoRA, small batches, short rows."""
        return {"lora_rank": 8, "batch_size": 8, "max_length": 128, "learning_rate": 5e-4, "steps": 20}

    def facts(self) -> dict[str, Any]:
        """Return the name, the model and the row counts."""
        rows = self._rows * len(DATASETS)
        return {
            "name": self.name,
            "model": "smollm2-135m-instruct",
            "rows": {
                "guesses": {"demonstrations": rows},
                "pairs": {"preferences": rows},
                "worked": {"demonstrations": rows, "prompts": rows},
            },
        }

    def sources(self) -> list[Source]:
        """Return the three sources, data sets in turn."""
        worked = self._drawn("train", self._rows, 0)
        paired = self._drawn("train", self._rows, 1)
        guessed = self._drawn("train", self._rows, 2)
        rng = np.random.default_rng(20_601)
        shown = [{"prompt": each.prompt, "completion": each.answer} for _, each in worked]
        asked = [_row(dataset, each) for dataset, each in worked]
        pairs = [
            {"prompt": each.prompt, "chosen": each.answer, "rejected": _near(each.answer, rng)} for _, each in paired
        ]
        guesses = [{"prompt": each.prompt, "completion": _near(each.answer, rng)} for _, each in guessed]
        return [
            Source("guesses", {"demonstrations": guesses}),
            Source("pairs", {"preferences": pairs}),
            Source("worked", {"demonstrations": shown, "prompts": asked}, _score, _version()),
        ]

    def benchmark(self) -> Benchmark:
        """Return the benchmark: the data sets weigh the same."""
        items = {
            split: [
                Item(
                    each.prompt, dataset, {key: value for key, value in _row(dataset, each).items() if key != "prompt"}
                )
                for dataset, each in self._drawn(split, self._items, 0)
            ]
            for split in ("validation", "test")
        }
        return Benchmark(
            weights=dict.fromkeys(DATASETS, 1 / len(DATASETS)),
            validation=items["validation"],
            test=items["test"],
            score=lambda item, text: _score(item.data, text),
            well_formed=lambda item, text: _verifier(item.data["dataset"]).well_formed(item.data, text),
            max_new_tokens=MAX_NEW_TOKENS,
            scorer_version=_version(),
        )

    @cached_property
    def _cache(self) -> dict[tuple[str, int, int], list[tuple[str, Question]]]:
        return {}

    def _drawn(self, split: str, size: int, stream: int) -> Sequence[tuple[str, Question]]:
        """Return questions of each data set in turn, with the data set's name."""
        from ..benchmarks.reasoning_gym import draw_questions

        key = (split, size, stream)
        if key not in self._cache:
            drawn = [
                [(name, each) for each in draw_questions(name, settings, split, size, 10 * stream + _SEEDS[split])]
                for name, settings in DATASETS.items()
            ]
            self._cache[key] = [each for group in zip(*drawn, strict=True) for each in group]
        return self._cache[key]


@cache
def _verifier(dataset: str) -> ReasoningGym:
    from ..benchmarks.reasoning_gym import ReasoningGym

    return ReasoningGym(dataset, tuple(sorted(DATASETS[dataset].items())), extract="last_number")


def _score(row: Mapping[str, Any], completion: str) -> float:
    return _verifier(row["dataset"]).score(row, completion)


def _version() -> str:
    return "; ".join(_verifier(name).version for name in DATASETS)


def _row(dataset: str, question: Question) -> dict[str, Any]:
    return {
        "prompt": question.prompt,
        "answer": question.answer,
        "dataset": dataset,
        "metadata": question.metadata,
    }


def _near(answer: str, rng: np.random.Generator) -> str:
    """Return a wrong answer close to the right one."""
    return str(int(answer) + int(rng.choice([-3, -2, -1, 1, 2, 3])))
