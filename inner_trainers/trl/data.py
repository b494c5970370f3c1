"""Tokenises each source once per algorithm and mixes rows by weight without mapping them again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..tasks.base import Row
from ..tokens import text_ids


@dataclass(frozen=True)
class TokenisedRows:
    """Demonstration rows of one source as token ids, truncated at their end.

    Attributes:
        input_ids: token ids per row, prompt then completion then end token.
        labels: the same ids, -100 where no loss is taken (the prompt).
        longest: length of the longest row, in tokens.
        trainable: indices of the rows that kept a completion token, in order.
        unsupervised: the other rows, numbered from 1.
        needed: per row, the smallest ``max_length`` that keeps a completion token; None for an empty completion.
    """

    lost_by_cutting: ClassVar[str] = "keep no completion token"
    lost_anyway: ClassVar[str] = "have nothing to predict"

    input_ids: list[list[int]]
    labels: list[list[int]]
    longest: int
    trainable: tuple[int, ...]
    unsupervised: tuple[int, ...]
    needed: tuple[int | None, ...]

    @property
    def smallest_max_length(self) -> int | None:
        """The smallest ``max_length`` at which some row keeps a completion token; None when all are empty."""
        return min((length for length in self.needed if length is not None), default=None)

    def supervised_throughout(self) -> TokenisedRows:
        """Return the rows with a loss on every token but the first, prompts too, as raw text has it."""
        return with_loss_on_every_token(self.input_ids)

    def cut(self, max_length: int) -> TokenisedRows:
        """Return the rows truncated to ``max_length`` tokens; themselves when none is longer."""
        if max_length >= self.longest:
            return self
        kept = [length is not None and length <= max_length for length in self.needed]
        return TokenisedRows(
            input_ids=[ids[:max_length] for ids in self.input_ids],
            labels=[ids[:max_length] for ids in self.labels],
            longest=min(self.longest, max_length),
            trainable=tuple(i for i, there in enumerate(kept) if there),
            unsupervised=tuple(i for i, there in enumerate(kept, 1) if not there),
            needed=self.needed,
        )


def tokenise_demonstrations(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]) -> TokenisedRows:
    """Tokenise prompt/completion rows exactly as TRL's SFT trainer does, with completion-only labels; cut nothing."""
    eos = tokenizer.eos_token or ""
    texts = [
        row["prompt"] + (row["completion"] if eos and row["completion"].endswith(eos) else row["completion"] + eos)
        for row in rows
    ]
    prompts = text_ids(tokenizer, [row["prompt"] for row in rows])
    wholes = text_ids(tokenizer, texts)
    prefixes = [common_prefix_length(prompt, whole) for prompt, whole in zip(prompts, wholes, strict=True)]
    labels = [[-100] * prefix + whole[prefix:] for prefix, whole in zip(prefixes, wholes, strict=True)]
    return labelled_rows(wholes, labels)


def labelled_rows(input_ids: Sequence[list[int]], labels: Sequence[list[int]]) -> TokenisedRows:
    """Return rows with the labels given: an id where a loss is taken, -100 elsewhere."""
    needed = []
    for row in labels:
        # no token predicts the first one
        first = next((position for position, label in enumerate(row) if position > 0 and label != -100), None)
        needed.append(None if first is None else first + 1)
    return TokenisedRows(
        input_ids=list(input_ids),
        labels=list(labels),
        longest=max(map(len, input_ids)),
        trainable=tuple(i for i, length in enumerate(needed) if length is not None),
        unsupervised=tuple(i for i, length in enumerate(needed, 1) if length is None),
        needed=tuple(needed),
    )


def tokenise_text(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> TokenisedRows:
    """Tokenise raw text with a loss on every token but the first, which nothing predicts; cut nothing.

    As in TRL's SFT trainer, text that does not end with the end token is given one.
    """
    eos = tokenizer.eos_token or ""
    ended = [text if eos and text.endswith(eos) else text + eos for text in texts]
    return with_loss_on_every_token(text_ids(tokenizer, ended))


def with_loss_on_every_token(input_ids: list[list[int]]) -> TokenisedRows:
    """Return rows that are supervised throughout; one of a single token has nothing to learn."""
    needed = tuple(2 if len(ids) > 1 else None for ids in input_ids)
    return TokenisedRows(
        input_ids=input_ids,
        labels=input_ids,
        longest=max(map(len, input_ids)),
        trainable=tuple(i for i, length in enumerate(needed) if length is not None),
        unsupervised=tuple(i for i, length in enumerate(needed, 1) if length is None),
        needed=needed,
    )


def common_prefix_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many first tokens two rows share: where a completion starts in a row that begins with its prompt."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


def draw_mix(sizes: Mapping[str, int], mix: Mapping[str, float], count: int, seed: int) -> list[tuple[str, int]]:
    """Draw ``count`` rows by weight: (source, row index) pairs in training order.

    Shares are met to within one row (largest remainder). A source is passed through in a new random order each
    time it is used up, so no row comes a second time before every other row came once.

    Args:
        sizes: source -> number of rows, at least 1; every source with weight > 0 must be there.
        mix: source -> weight, summing to 1.
        count: rows to draw.
        seed: seed of the draw.
    """
    rng = np.random.default_rng(seed)
    names = [name for name in sorted(mix) if mix[name] > 0]
    total = math.fsum(mix[name] for name in names)  # 1 within a tolerance that a large count would show
    exact = {name: mix[name] / total * count for name in names}
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
