"""Draws what one round trains on: rows by the recipe's mix, or packs of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..recipe import Recipe
from ..tasks.base import InnerTask
from .algorithms import AlgorithmSpec
from .data import TokenisedRows, draw_mix
from .packing import draw_packs
from .rows import TaskRows, truncation_flags


@dataclass(frozen=True)
class DrawnRows:
    """The rows of one round.

    Attributes:
        tokenised: pool -> rows at the recipe's ``max_length``; empty for algorithms that sample.
        draw: (pool, row index) pairs in training order; empty when rows are packed.
        packs: the rows of each packed sequence, in training order; empty when they are not.
        unsupervised: rows that have nothing to learn.
        flags: sentences about rows that a person should read.
    """

    tokenised: Mapping[str, Any]
    draw: Sequence[tuple[str, int]]
    packs: Sequence[Sequence[tuple[str, int]]]
    unsupervised: int
    flags: tuple[str, ...]


def draw_rows(task: InnerTask, rows: TaskRows, spec: AlgorithmSpec, recipe: Recipe, seed: int) -> DrawnRows:
    """Draw the rows of a round.

    Raises:
        ValueError: a pool of the mix has no row to learn from.
    """
    pools = rows.pools(spec, recipe)
    tokenised: dict[str, Any] = {}
    if not spec.sampled:
        tokenised = {pool: rows.tokenised(spec, pool).cut(recipe.max_length) for pool in pools}
    unsupervised, flags = truncation_flags(tokenised, recipe.max_length)
    if spec.rows == "text":
        flags += _cut_text_flags({pool: rows.tokenised(spec, pool) for pool in pools}, recipe.max_length)
    flags += rows.repeat_flags(spec, recipe)
    if recipe.packing and "packing" in spec.reads:
        sequences = recipe.steps * recipe.batch_size * recipe.gradient_accumulation
        packs = draw_packs(tokenised, pools, recipe.max_length, sequences, seed)
        return DrawnRows(tokenised, (), packs, unsupervised, flags)
    usable = {
        pool: tokenised[pool].trainable if pool in tokenised else range(len(task.built.sources[pool].rows[spec.rows]))
        for pool in pools
    }
    sizes = {pool: len(indices) for pool, indices in usable.items()}
    drawn = draw_mix(sizes, pools, spec.rows_per_round(recipe), seed)
    return DrawnRows(tokenised, [(pool, usable[pool][i]) for pool, i in drawn], (), unsupervised, flags)


def _cut_text_flags(uncut: Mapping[str, TokenisedRows], max_length: int) -> tuple[str, ...]:
    """Return a sentence for each pool of raw text of which ``max_length`` leaves tokens out."""
    flags = []
    for pool, rows in uncut.items():
        lengths = list(map(len, rows.input_ids))
        cut = sum(length > max_length for length in lengths)
        if cut:
            lost = sum(max(0, length - max_length) for length in lengths) / sum(lengths)
            flags.append(
                f"{cut} of {len(lengths)} rows of source {pool!r} are cut at max_length {max_length}, which leaves out "
                f"{lost:.1%} of its tokens; split them into shorter rows or raise max_length"
            )
    return tuple(flags)
