"""Tokenises each source once per algorithm and mixes rows by weight without mapping them again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..tasks.base import Row


@dataclass(frozen=True)
class TokenisedRows:
    """Demonstration rows of one source as token ids, truncated at their end.

    Attributes:
        input_ids: token ids per row, prompt then completion then end token.
        labels: the same ids, -100 where no loss is taken (the prompt).
        longest: length of the longest row, in tokens.
        unsupervised: rows (numbered from 1) that kept no completion token.
        smallest_max_length: the smallest ``max_length`` at which some row keeps a completion token.
    """

    input_ids: list[list[int]]
    labels: list[list[int]]
    longest: int
    unsupervised: tuple[int, ...]
    smallest_max_length: int


def tokenise_demonstrations(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], max_length: int) -> TokenisedRows:
    """Tokenise prompt/completion rows exactly as TRL's SFT trainer does, with completion-only labels."""
    eos = tokenizer.eos_token or ""
    texts = [
        row["prompt"] + (row["completion"] if eos and row["completion"].endswith(eos) else row["completion"] + eos)
        for row in rows
    ]
    prompts: list[list[int]] = tokenizer(text=[row["prompt"] for row in rows])["input_ids"]
    wholes: list[list[int]] = tokenizer(text=texts)["input_ids"]
    input_ids, labels, unsupervised = [], [], []
    prefixes = []
    for number, (prompt, whole) in enumerate(zip(prompts, wholes, strict=True), start=1):
        prefix = _common_prefix_length(prompt, whole)
        prefixes.append(prefix)
        kept = whole[:max_length]
        input_ids.append(kept)
        labels.append(([-100] * prefix + whole[prefix:])[:max_length])
        if len(kept) <= prefix:
            unsupervised.append(number)
    return TokenisedRows(
        input_ids=input_ids,
        labels=labels,
        longest=max(map(len, input_ids)),
        unsupervised=tuple(unsupervised),
        smallest_max_length=min(prefixes) + 1,
    )


def _common_prefix_length(left: Sequence[int], right: Sequence[int]) -> int:
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


def draw_mix(sizes: Mapping[str, int], mix: Mapping[str, float], count: int, seed: int) -> list[tuple[str, int]]:
    """Draw ``count`` rows by weight: (source, row index) pairs in training order.

    Shares are met to within one row (largest remainder). A source is passed through in a new random order each
    time it is used up, so no row comes a second time before every other row came once.

    Args:
        sizes: source -> number of rows; every source with weight > 0 must be there.
        mix: source -> weight, summing to 1.
        count: rows to draw.
        seed: seed of the draw.
    """
    rng = np.random.default_rng(seed)
    names = [name for name in sorted(mix) if mix[name] > 0]
    exact = {name: mix[name] * count for name in names}
    counts = {name: int(exact[name]) for name in names}
    by_remainder = sorted(names, key=lambda name: (counts[name] - exact[name], name))
    for name in by_remainder[: count - sum(counts.values())]:
        counts[name] += 1
    drawn: list[tuple[str, int]] = []
    for name in names:
        indices: list[int] = []
        while len(indices) < counts[name]:
            indices.extend(rng.permutation(sizes[name]).tolist())
        drawn.extend((name, index) for index in indices[: counts[name]])
    order = rng.permutation(len(drawn))
    return [drawn[i] for i in order]


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return rows as columns, in the first row's column order."""
    return {name: [row[name] for row in rows] for name in rows[0]}
