"""A task's rows as token ids, made once: what a round mixes, how long its sequences are, what truncation costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from ..recipe import Recipe
from ..tasks.base import InnerTask
from . import data, preferences
from .algorithms import AlgorithmSpec, Lengths, replayed_sources

REPLAYED = " (replayed)"
"""What a pool of replayed demonstrations is called, after its source."""


class Tokenised(Protocol):
    """What every kind of tokenised rows has in common; see `data.TokenisedRows`."""

    @property
    def longest(self) -> int:
        """Length of the longest row, in tokens."""

    @property
    def trainable(self) -> tuple[int, ...]:
        """Indices of the rows that can be trained on, in order."""

    @property
    def unsupervised(self) -> tuple[int, ...]:
        """The other rows, numbered from 1."""

    @property
    def needed(self) -> tuple[int | None, ...]:
        """Per row, the smallest ``max_length`` that keeps something to learn; None where nothing does."""

    @property
    def smallest_max_length(self) -> int | None:
        """The smallest ``max_length`` at which some row can be trained on; None when there is none."""

    def cut(self, max_length: int) -> Tokenised:
        """Return the rows truncated to ``max_length`` tokens."""


class TaskRows:
    """The tokenised rows of one task, each made when it is first asked for and kept."""

    def __init__(self, task: InnerTask, tokenizer: PreTrainedTokenizerBase) -> None:
        self._task, self._tokenizer = task, tokenizer
        self._rows: dict[str, Tokenised] = {}
        self._longest_prompt: dict[str, int] = {}

    def pools(self, spec: AlgorithmSpec, recipe: Recipe) -> dict[str, float]:
        """Return what a round mixes: pool -> share, summing to 1. A pool is a source, or its demonstrations replayed.

        Replayed demonstrations are shared out by the sources' sizes.
        """
        pools = {name: weight for name, weight in recipe.mix.items() if weight > 0}
        if "replay_share" in spec.reads and recipe.replay_share > 0:
            sources = self._task.built.sources
            sizes = {name: len(sources[name].rows["demonstrations"]) for name in replayed_sources(self._task)}
            pools = {name: weight * (1.0 - recipe.replay_share) for name, weight in pools.items()}
            for name, size in sizes.items():
                pools[name + REPLAYED] = recipe.replay_share * size / math.fsum(sizes.values())
        return pools

    def tokenised(self, spec: AlgorithmSpec, pool: str) -> Any:
        """Return a pool's rows, uncut."""
        key = pool if pool.endswith(REPLAYED) else f"{spec.rows}/{pool}"
        if key not in self._rows:
            self._rows[key] = self._tokenise(spec.rows, pool)
        return self._rows[key]

    def lengths(self, spec: AlgorithmSpec, recipe: Recipe) -> Lengths:
        """Return the longest sequences that a round can meet."""
        completion = self._task.built.benchmark.max_new_tokens
        pools = self.pools(spec, recipe)
        if spec.sampled:
            return Lengths(max(self._prompt_length(name) for name in pools), completion, row=0)
        longest = max(self.tokenised(spec, pool).longest for pool in pools)
        return Lengths(0, completion, row=min(recipe.max_length, longest))

    def _tokenise(self, kind: str, pool: str) -> Tokenised:
        rows = self._task.built.sources[pool.removesuffix(REPLAYED)].rows
        if pool.endswith(REPLAYED):
            return data.tokenise_demonstrations(self._tokenizer, rows["demonstrations"]).supervised_throughout()
        if kind == "text":
            return data.tokenise_text(self._tokenizer, [row["text"] for row in rows["text"]])
        if kind == "preferences":
            return preferences.tokenise_preferences(self._tokenizer, rows["preferences"])
        return data.tokenise_demonstrations(self._tokenizer, rows["demonstrations"])

    def _prompt_length(self, source: str) -> int:
        if source not in self._longest_prompt:
            rows = self._task.built.sources[source].rows["prompts"]
            ids = self._tokenizer(text=[row["prompt"] for row in rows])["input_ids"]
            empty = [number for number, row in enumerate(ids, start=1) if not row]
            if empty:
                raise ValueError(f"source {source!r}, prompts row {empty[0]}: the prompt has no tokens to continue.")
            self._longest_prompt[source] = max(map(len, ids))
        return self._longest_prompt[source]


def truncation_flags(tokenised: Mapping[str, Tokenised], max_length: int) -> tuple[int, tuple[str, ...]]:
    """Return how many rows keep nothing to learn at ``max_length``, and a sentence for each pool that has some.

    Raises:
        ValueError: no row of a pool keeps something to learn; the message names the smallest length that works.
    """
    for name, rows in tokenised.items():
        if not rows.trainable:
            count, needed = len(rows.needed), rows.smallest_max_length
            if needed is None:
                raise ValueError(f"source {name!r}: all {count} completions are empty, so there is nothing to learn.")
            raise ValueError(
                f"max_length: at {max_length} none of the {count} rows of source {name!r} keeps a completion token; "
                f"the smallest max_length that works is {needed}."
            )
    lost = {name: rows.unsupervised for name, rows in tokenised.items() if rows.unsupervised}
    flags = tuple(
        f"{len(rows)} of {len(tokenised[name].needed)} rows of source {name!r} keep no completion token at "
        f"max_length {max_length}: rows {', '.join(map(str, rows[:10]))}{', …' if len(rows) > 10 else ''}"
        for name, rows in lost.items()
    )
    return sum(map(len, lost.values())), flags
