"""A task's rows as token ids, made once: what a round mixes, how long its sequences are, what truncation costs."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from transformers import PreTrainedTokenizerBase

from ..chat import ChatFormat
from ..recipe import Recipe
from ..tasks.base import SPLITS, InnerTask
from ..tasks.rows import distinct_rows
from ..tokens import text_ids
from . import data, preferences
from .algorithms import AlgorithmSpec, replayed_sources
from .step_tokens import Lengths

REPLAYED = " (replayed)"
"""What a pool of replayed demonstrations is called, after its source."""


TOLERATED_REPEATS = 0.01
"""Share of a source's rows that may repeat others without a word: a few fall together by chance."""


class Tokenised(Protocol):
    """What every kind of tokenised rows has in common; see `data.TokenisedRows`.

    Attributes:
        lost_by_cutting: what rows do that a smaller ``max_length`` leaves nothing to learn of, as a predicate.
        lost_anyway: what rows do that have nothing to learn at any length.
    """

    lost_by_cutting: ClassVar[str]
    lost_anyway: ClassVar[str]

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
    """The tokenised rows of one task, each made when it is first asked for and kept.

    Args:
        task: the task.
        tokenizer: the model's tokenizer.
        ends: token ids that end an answer of the model; None for the tokenizer's.
        unusable: tokens that the model has no embedding for, which no text may hold.

    Attributes:
        chat: how the task's prompts become turns; None for plain text.

    Raises:
        ValueError: a source is called as replayed demonstrations are, or a text holds an unusable token.
    """

    def __init__(
        self,
        task: InnerTask,
        tokenizer: PreTrainedTokenizerBase,
        ends: Collection[int] | None = None,
        unusable: Collection[str] = (),
    ) -> None:
        if unusable:
            _refuse_unusable(task, unusable)
        for name in task.built.sources:
            if name.endswith(REPLAYED):
                raise ValueError(
                    f"source {name!r}: names that end in {REPLAYED!r} are those of replayed demonstrations; rename it."
                )
        self._task, self._tokenizer = task, tokenizer
        chat = task.built.chat
        self.chat = None if chat is None else ChatFormat(tokenizer, chat, str(task.base_checkpoint()), ends)
        self._repeats: dict[tuple[str, str], str] = {}
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
            prompt = max(self._prompt_length(name) for name in pools)
            if self.chat is None or not self.chat.uses_tool:
                return Lengths(prompt, completion, row=0)
            return Lengths(prompt, completion, 0, self.chat.chat.max_turns, self.chat.longest_tool_turn)
        longest = max(self.tokenised(spec, pool).longest for pool in pools)
        return Lengths(0, completion, row=min(recipe.max_length, longest))

    def prompt_ids(self, prompts: Sequence[str]) -> list[list[int]]:
        """Return prompts as the token ids that the model continues."""
        if self.chat is not None:
            return self.chat.prompts(prompts)
        return text_ids(self._tokenizer, prompts)

    def repeat_flags(self, spec: AlgorithmSpec, recipe: Recipe) -> tuple[str, ...]:
        """Return a sentence for each source of the mix of which more than `TOLERATED_REPEATS` of the rows repeat."""
        flags = []
        for pool in self.pools(spec, recipe):
            kind = "demonstrations" if pool.endswith(REPLAYED) else spec.rows
            key = pool.removesuffix(REPLAYED), kind
            if key not in self._repeats:
                rows = self._task.built.sources[key[0]].rows[kind]
                distinct = distinct_rows(rows)
                said = f"source {key[0]!r}: {len(rows)} {kind} rows, {distinct} distinct"
                self._repeats[key] = said if distinct < (1.0 - TOLERATED_REPEATS) * len(rows) else ""
            flags.append(self._repeats[key])
        return tuple(dict.fromkeys(flag for flag in flags if flag))

    def _demonstrations(self, source: str) -> data.TokenisedRows:
        rows = self._task.built.sources[source].rows["demonstrations"]
        if self.chat is None:
            return data.tokenise_demonstrations(self._tokenizer, rows)
        turns = [
            row["messages"] if "messages" in row else self.chat.turns(row["prompt"], row["completion"]) for row in rows
        ]
        return data.labelled_rows(*zip(*self.chat.encode(turns, f"source {source!r}, demonstrations"), strict=True))

    def _tokenise(self, kind: str, pool: str) -> Tokenised:
        rows = self._task.built.sources[pool.removesuffix(REPLAYED)].rows
        if pool.endswith(REPLAYED):
            return self._demonstrations(pool.removesuffix(REPLAYED)).supervised_throughout()
        if kind == "text":
            return data.tokenise_text(self._tokenizer, [row["text"] for row in rows["text"]])
        if kind == "preferences":
            return preferences.tokenise_preferences(
                self._tokenizer, rows["preferences"], self.chat, f"source {pool!r}, preferences"
            )
        return self._demonstrations(pool)

    def _prompt_length(self, source: str) -> int:
        if source not in self._longest_prompt:
            rows = self._task.built.sources[source].rows["prompts"]
            ids = self.prompt_ids([row["prompt"] for row in rows])
            empty = [number for number, row in enumerate(ids, start=1) if not row]
            if empty:
                raise ValueError(f"source {source!r}, prompts row {empty[0]}: the prompt has no tokens to continue.")
            self._longest_prompt[source] = max(map(len, ids))
        return self._longest_prompt[source]


def _refuse_unusable(task: InnerTask, tokens: Collection[str]) -> None:
    """Refuse texts that hold one of the tokens, wherever in a row or item they stand."""
    built = task.built
    places = [
        (f"source {name!r}, {kind} row {number}", row)
        for name, source in built.sources.items()
        for kind, rows in source.rows.items()
        for number, row in enumerate(rows, start=1)
    ]
    for split in SPLITS:
        places += [
            (f"{split} item {number}", {"prompt": item.prompt})
            for number, item in enumerate(built.benchmark.items(split), start=1)
        ]
    for where, row in places:
        text = json.dumps(dict(row), ensure_ascii=False, default=str)
        found = next((token for token in tokens if token in text), None)
        if found is not None:
            raise ValueError(
                f"{where} holds {found!r}, a special token of the tokenizer that the model has no embedding for; "
                "take it out of the text."
            )


def truncation_flags(tokenised: Mapping[str, Tokenised], max_length: int) -> tuple[int, tuple[str, ...]]:
    """Return how many rows keep nothing to learn at ``max_length``, and a sentence for each pool that has some.

    Raises:
        ValueError: no row of a pool keeps something to learn; the message names the smallest length that works.
    """
    for name, rows in tokenised.items():
        if not rows.trainable:
            count, needed = len(rows.needed), rows.smallest_max_length
            if needed is None:
                raise ValueError(f"source {name!r}: all {count} rows {rows.lost_anyway}, so there is nothing to learn.")
            raise ValueError(
                f"max_length: at {max_length} all {count} rows of source {name!r} {rows.lost_by_cutting}; "
                f"the smallest max_length that works is {needed}."
            )
    flags = []
    for name, rows in tokenised.items():
        empty = [number for number in rows.unsupervised if rows.needed[number - 1] is None]
        cut = [number for number in rows.unsupervised if rows.needed[number - 1] is not None]
        for numbers, reason in ((cut, f"{rows.lost_by_cutting} at max_length {max_length}"), (empty, rows.lost_anyway)):
            if numbers:
                flags.append(
                    f"{len(numbers)} of {len(rows.needed)} rows of source {name!r} {reason}: "
                    f"rows {', '.join(map(str, numbers[:10]))}{', …' if len(numbers) > 10 else ''}"
                )
    return sum(len(rows.unsupervised) for rows in tokenised.values()), tuple(flags)
