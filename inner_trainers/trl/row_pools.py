"""Every pool of rows that a running round can draw from, and the number by which each row is known."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..recipe import Recipe
from ..tasks.base import InnerTask, Source
from .algorithms import AlgorithmSpec, replayed_sources, usable_sources
from .rows import REPLAYED, TaskRows, truncation_flags

ROW_NUMBER = "row_number"
"""Column of a training example, and key of a batch, that holds the numbers of its rows."""


class RowPools:
    """The pools of one round: the sources that its algorithm can train on, in its mix or not, and replayed ones.

    Rows of a source that the recipe leaves out are tokenised when an adjustment first asks for them.

    Args:
        task: the inner task.
        rows: its tokenised rows.
        spec: the round's algorithm.
        recipe: what the round was asked.
        tokenised: pool -> rows at the recipe's ``max_length``, of those that were cut already.
        check: raises `ValueError` for a recipe with another mix that cannot run.

    Attributes:
        sources: names of the sources that the mix can hold, sorted.
        names: names of the pools, in the order of their rows' numbers.
        total: rows of all pools together, those that cannot be trained on too.
    """

    def __init__(
        self,
        task: InnerTask,
        rows: TaskRows,
        spec: AlgorithmSpec,
        recipe: Recipe,
        tokenised: Mapping[str, Any],
        check: Callable[[Recipe], None],
    ) -> None:
        self._task, self._rows, self._spec, self._recipe, self._check = task, rows, spec, recipe, check
        self.sources = tuple(sorted(usable_sources(task, spec)))
        replayed: Sequence[str] = ()
        if "replay_share" in spec.reads and recipe.replay_share > 0:
            replayed = sorted(replayed_sources(task))
        self.names = (*self.sources, *(name + REPLAYED for name in replayed))
        sizes = [len(task.built.sources[name].rows[spec.rows]) for name in self.sources]
        sizes += [len(task.built.sources[name].rows["demonstrations"]) for name in replayed]
        self._starts = np.cumsum([0, *sizes])
        self._start_of: dict[str, int] = dict(zip(self.names, self._starts.tolist(), strict=False))
        self.total = int(self._starts[-1])
        self._pool_of = array("H", np.repeat(np.arange(len(self.names), dtype=np.uint16), sizes).tobytes())
        self._cut = dict(tokenised)
        self._refusals: dict[str, str | None] = {}
        self._usable: dict[str, NDArray[np.int64]] = {}

    def shares(self, recipe: Recipe) -> dict[str, float]:
        """Return what a recipe mixes: pool -> share, summing to 1."""
        return self._rows.pools(self._spec, recipe)

    def source(self, pool: str) -> Source:
        """Return the source of a pool."""
        return self._task.built.sources[pool.removesuffix(REPLAYED)]

    def tokenised(self, pool: str) -> Any:
        """Return a pool's rows at the recipe's ``max_length``; for algorithms that do not sample."""
        if pool not in self._cut:
            self._cut[pool] = self._rows.tokenised(self._spec, pool).cut(self._recipe.max_length)
        return self._cut[pool]

    def usable(self, pool: str) -> NDArray[np.int64]:
        """Return the numbers of a pool's rows that can be trained on, ascending."""
        if pool not in self._usable:
            start = self._start_of[pool]
            if self._spec.sampled:
                indices = np.arange(len(self.source(pool).rows[self._spec.rows]))
            else:
                indices = np.asarray(self.tokenised(pool).trainable, dtype=np.int64)
            self._usable[pool] = start + indices
        return self._usable[pool]

    def number(self, pool: str, index: int) -> int:
        """Return the number of a row."""
        return self._start_of[pool] + index

    def row(self, number: int) -> tuple[str, int]:
        """Return the pool and index of a row."""
        pool = int(np.searchsorted(self._starts, number, side="right")) - 1
        return self.names[pool], number - int(self._starts[pool])

    def means(
        self, numbers: Sequence[int], sums: Sequence[float], weights: Sequence[float] | None = None
    ) -> dict[str, float]:
        """Return the mean of each pool that has some of the rows: ``sums`` over ``weights``, which are 1 when None."""
        # plain loops: for the rows of a step they take a third of the time that arrays would
        pools, totals, counts = self._pool_of, [0.0] * len(self.names), [0.0] * len(self.names)
        for number, total, count in zip(numbers, sums, weights or [1.0] * len(numbers), strict=True):
            pool = pools[number]
            totals[pool] += total
            counts[pool] += count
        return {self.names[i]: totals[i] / count for i, count in enumerate(counts) if count}

    def refusal(self, now: Recipe, source: str) -> str | None:
        """Return why a source cannot come into the mix of a running round; None when it can, or is in it."""
        if now.mix.get(source, 0.0) > 0:
            return None
        if source not in self._refusals:
            try:
                self._check(replace(now, mix={source: 1.0}))
                self.flags({source: 1.0})
                self._refusals[source] = None
            except ValueError as error:
                self._refusals[source] = str(error).removesuffix(".")
        return self._refusals[source]

    def flags(self, pools: Mapping[str, float]) -> tuple[str, ...]:
        """Return what a person should know about the rows of pools that come into the mix.

        Raises:
            ValueError: no row of a pool keeps something to learn.
        """
        if self._spec.sampled:
            return ()
        return truncation_flags({pool: self.tokenised(pool) for pool in pools}, self._recipe.max_length)[1]
