"""The prompts of a benchmark that data is compared with, from a task, a benchmark file or a file of items."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..tasks import resolve_task
from ..tasks.base import SPLITS, Benchmark, Chat, InnerTask
from ..tasks.turns import user_texts
from .errors import DataError
from .formats import prompt_text, renamed
from .reading import open_data
from .sources import place_of


def benchmark_prompts(task: str, benchmark: str, columns: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return (name, prompt) of each item of the benchmarks that are named.

    Args:
        task: a built-in task, a task file or ``module:Class``; empty for none.
        benchmark: a benchmark file (YAML), or a file of items; empty for none.
        columns: new name -> name, which hold for a file of items where it has them.

    Raises:
        ValueError: neither can be read, or an item has no prompt.
    """
    found: list[tuple[str, str]] = []
    if task:
        found += _items(_instance(task).benchmark())
    if benchmark and Path(benchmark).suffix.lower() in (".yaml", ".yml"):
        from ..benchmarks.benchmark_file import load_benchmark

        found += _items(load_benchmark(benchmark))
    elif benchmark:
        data = open_data(benchmark)
        for raw in data.rows():
            place = place_of(data, raw)
            here = {new: old for new, old in columns.items() if old in raw.value}
            found.append((place, _prompt(renamed(raw.value, here, place), place)))
    return found


def chat_of(task: str) -> Chat | None:
    """Return how a task writes turns; None for plain text, or without a task."""
    return _instance(task).chat() if task else None


def _instance(task: str) -> InnerTask:
    family = resolve_task(task)
    return family.instance(family.train_seeds[0])


def _items(benchmark: Benchmark) -> list[tuple[str, str]]:
    return [
        (f"{split} item {number}", item.prompt)
        for split in SPLITS
        for number, item in enumerate(benchmark.items(split), start=1)
    ]


def _prompt(row: Mapping[str, Any], place: str) -> str:
    """Return what a row of items asks: its prompt, what the user says in its turns, or its text."""
    found: Any = None
    if "prompt" in row:
        found = prompt_text(row["prompt"], place)
    elif isinstance(row.get("messages"), list):
        found = "\n".join(
            user_texts([turn for turn in row["messages"] if isinstance(turn, Mapping) and "role" in turn])
        )
    elif "text" in row:
        found = row["text"]
    if not isinstance(found, str):
        raise DataError(place, f"expected an item with prompt, messages or text, got the columns {', '.join(row)}.")
    return found
