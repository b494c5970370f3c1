"""Packs short rows into long sequences in which no row sees another."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .data import TokenisedRows, draw_mix

_LEAK_TOLERANCE = 1e-5
"""Largest change of a row's logits, relative to their size, when what it is packed with changes: rounding."""

_POSITION_TOLERANCE = 1e-4
"""Largest difference from the logits of the row alone, likewise: the two may come from different kernels."""


@dataclass(frozen=True)
class PackCollator:
    """Turns packs into a batch whose position ids begin anew at each row; there is no attention mask.

    From that the model library builds a causal mask for each row alone (`find_packed_sequence_indices`). Padding at the
    end of the shorter packs are rows of one token without a loss.
    """

    pad_token_id: int

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Return ``input_ids``, ``labels`` and ``position_ids`` (B, L), and ``tokens``, the number without padding."""
        width = max(len(example["input_ids"]) for example in examples)
        shape = (len(examples), width)
        input_ids = torch.full(shape, self.pad_token_id, dtype=torch.long)
        labels = torch.full(shape, -100, dtype=torch.long)
        position_ids = torch.zeros(shape, dtype=torch.long)
        for number, example in enumerate(examples):
            size = len(example["input_ids"])
            input_ids[number, :size] = torch.tensor(example["input_ids"])
            labels[number, :size] = torch.tensor(example["labels"])
            position_ids[number, :size] = torch.cat([torch.arange(length) for length in example["seq_lengths"]])
        tokens = torch.tensor(sum(len(example["input_ids"]) for example in examples))
        return {"input_ids": input_ids, "labels": labels, "position_ids": position_ids, "tokens": tokens}


def pack(lengths: Sequence[int], capacity: int, packs: int) -> list[list[int]]:
    """Return the indices of each pack's rows: in order, as many as fit, never more than ``capacity`` tokens.

    Args:
        lengths: tokens of each row, none above ``capacity``.
        capacity: most tokens of a pack.
        packs: how many are made; fewer when the rows do not fill them.
    """
    made: list[list[int]] = []
    filled = capacity
    for index, length in enumerate(lengths):
        if filled + length > capacity:
            if len(made) == packs:
                break
            made.append([])
            filled = 0
        made[-1].append(index)
        filled += length
    return made


def draw_packs(
    tokenised: Mapping[str, TokenisedRows], mix: Mapping[str, float], capacity: int, packs: int, seed: int
) -> list[list[tuple[str, int]]]:
    """Draw (pool, row index) pairs by weight and pack them; see `draw_mix` and `pack`.

    Args:
        tokenised: pool -> rows, none longer than ``capacity``; only the trainable ones are drawn.
        mix: pool -> share of the rows, summing to 1. The packs hold a random part of what is drawn, so their shares
            differ from it by chance.
        capacity: most tokens of a pack.
        packs: how many are made.
        seed: seed of the draw.
    """
    sizes = {pool: len(rows.trainable) for pool, rows in tokenised.items()}
    shortest = min(len(rows.input_ids[i]) for rows in tokenised.values() for i in rows.trainable)
    mean = sum(
        share * sum(len(tokenised[pool].input_ids[i]) for i in tokenised[pool].trainable) / sizes[pool]
        for pool, share in mix.items()
        if share > 0
    )
    count = int(packs * capacity / mean) + packs
    while True:
        drawn = [(pool, tokenised[pool].trainable[i]) for pool, i in draw_mix(sizes, mix, count, seed)]
        lengths = [len(tokenised[pool].input_ids[index]) for pool, index in drawn]
        made = pack(lengths, capacity, packs)
        # the last pack is full when rows are left over, or when not even the shortest row would fit
        used = sum(map(len, made))
        last = sum(lengths[i] for i in made[-1])
        if len(made) == packs and (used < count or last + shortest > capacity):
            return [[drawn[i] for i in indices] for indices in made]
        count += max(packs, count // 4)


def packed_columns(
    tokenised: Mapping[str, TokenisedRows], packs: Sequence[Sequence[tuple[str, int]]]
) -> dict[str, list[list[int]]]:
    """Return ``input_ids``, ``labels`` and ``seq_lengths`` of packs; no row's first token has a label."""
    columns: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "seq_lengths": []}
    for rows in packs:
        parts = [(tokenised[pool].input_ids[index], tokenised[pool].labels[index]) for pool, index in rows]
        columns["input_ids"].append([token for ids, _ in parts for token in ids])
        columns["labels"].append([label for _, labels in parts for label in [-100, *labels[1:]]])
        columns["seq_lengths"].append([len(ids) for ids, _ in parts])
    return columns


@torch.no_grad()
def rows_stay_apart(model: Any) -> bool:
    """Return whether packed rows get the logits that they get alone, whatever they are packed with: measured.

    Not every architecture and attention implementation keeps packed rows apart. Some leak little, a convolution over a
    few tokens for example, so what a row is packed with is changed and must change nothing.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    device = next(model.parameters()).device
    size = min(model.config.get_text_config().vocab_size, 97)
    tokens = torch.arange(1, 8, device=device)
    first, other, second = tokens[:3] * 31 % size, tokens[3:6] * 13 % size, tokens[:5] * 17 % size
    was_training = model.training
    model.eval()
    try:
        ids = torch.stack([torch.cat([first, second, first]), torch.cat([other, second, other])])
        positions = torch.cat([torch.arange(3), torch.arange(5), torch.arange(3)])[None].repeat(2, 1).to(device)
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, 3:8]
        alone = model(input_ids=second[None], use_cache=False).logits
    finally:
        model.train(was_training)
    scale = float(alone.abs().max())
    seen = float((packed[0] - packed[1]).abs().max())
    moved = float((packed - alone).abs().max())
    return seen <= _LEAK_TOLERANCE * scale and moved <= _POSITION_TOLERANCE * scale
