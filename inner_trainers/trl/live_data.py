"""The rows of a running round: which come next once its data settings are adjusted, and how hard each was."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from ..memory_model import MemoryModel
from ..probe_rounds import memory_within_reach
from ..recipe import Recipe
from .apportionment import Apportionment
from .memory import memory_total
from .row_pools import RowPools

if TYPE_CHECKING:
    from .live import LiveRound

HARDEST = 0.25
"""Share of a source's rows seen so far that count as its hardest."""

_LIMIT_EVERY = 32
"""Steps after which the memory that the system can give is looked at again."""

_ORDER, _PASS = 1, 2  # what a generator is for, so that no two of a round draw the same numbers

Row = tuple[str, int]


class LiveRows:
    """Draws the rows of a step when its settings differ from the recipe's, and keeps what is known of each row.

    As long as they do not differ, and again once they have come back, the library's own loader decides. Draws depend on
    the seed, the steps and the adjustments alone. Within a pool the rows that were trained on least come first, in a
    random order, and none comes again before the others; only those drawn because they are hard may.

    Args:
        pools: what can be drawn.
        seed: the round's seed.
        grouped: whether each drawn row is a prompt of which ``num_generations`` completions are sampled.

    Attributes:
        live: the round; None until its session has begun, so that nothing is drawn.
        hard_share: share of each batch that is drawn from the hardest rows.
        difficulty: (pools.total,) float64, how hard each row was when it was last seen: a row's loss per supervised
            token, a pair's loss, 1 - the mean reward of a prompt's completions. NaN for rows not seen.
        any_seen: whether the difficulty of some row is known.
        memory: foresees the memory of larger batches.
        fitted: batch sizes of the optimiser steps that were done, in order, repeats left out.
        too_large: smallest batch size that ran out of memory; None when none did.
    """

    def __init__(self, pools: RowPools, seed: int, grouped: bool) -> None:
        self.pools, self._seed, self.grouped = pools, seed, grouped
        self.live: LiveRound | None = None
        self.hard_share = 0.0
        self.any_seen = False
        self._graded = array("d", [math.nan]) * pools.total  # plain, for row by row it is faster than an array of NumPy
        self.difficulty: NDArray[np.float64] = np.frombuffer(self._graded)
        self.memory = MemoryModel()
        self.fitted: list[int] = []
        self.too_large: int | None = None
        self._times = array("q", [0]) * pools.total
        self._queues: dict[str, deque[int]] = {}
        self._passes: dict[str, int] = {}
        self._mix: Mapping[str, float] | None = None
        self._apportionment: Apportionment | None = None
        self._hard_owed: dict[str, float] = {}
        self._max_memory_bytes: int | None = None
        self._device: torch.device = torch.device("cpu")
        self._limit: int | None = None
        self._limit_at: int | None = None
        self._last: tuple[dict[str, int], dict[str, float], list[int]] | None = None

    def begin(self, live: LiveRound, max_memory_bytes: int | None, device: torch.device) -> None:
        """Follow a round.

        Args:
            live: the round, whose settings decide about its rows from now on.
            max_memory_bytes: most memory that it may have in use; None for what there is.
            device: where it trains.
        """
        self.live, self._max_memory_bytes, self._device = live, max_memory_bytes, device

    @property
    def active(self) -> bool:
        """Whether the next step draws its rows here."""
        live = self.live
        if live is None:
            return False
        same = live.now is live.asked or data_settings(live.now) == data_settings(live.asked)
        return self.hard_share > 0 or not same

    def rows_per_step(self) -> int:
        """Return how many rows, or prompts, one optimiser step uses now."""
        assert self.live is not None
        now = self.live.now
        sequences = now.batch_size * now.gradient_accumulation
        return sequences // now.num_generations if self.grouped else sequences

    def trained_on(self, numbers: Sequence[int], times: int = 1) -> None:
        """Note that rows are trained on; ``times`` -1 takes that back."""
        for number in numbers:
            self._times[number] += times

    def grade(self, numbers: Sequence[int], difficulty: Sequence[float]) -> None:
        """Note how hard rows were."""
        graded = self._graded
        for number, value in zip(numbers, difficulty, strict=True):
            graded[number] = value
        self.any_seen = True

    def pause(self) -> None:
        """Forget the order of the rows to come, as the library's loader draws the next step."""
        if self._queues:
            self._queues.clear()

    # Drawing ----------------------------------------------------------------------------------------------------

    def draw(self) -> list[Row]:
        """Return the (pool, row index) pairs of the next optimiser step, in the order of training."""
        assert self.live is not None
        mix, step = self.live.now.mix, self.live.step + 1
        if self._apportionment is None or mix != self._mix:
            self._mix, shares = mix, self.pools.shares(self.live.now)
            if self._apportionment is None:
                self._apportionment = Apportionment(shares)
            else:
                self._apportionment.change(shares)
        counts = self._apportionment.next(self.rows_per_step())
        owed_before, queued = dict(self._hard_owed), []
        drawn: list[int] = []
        rng = np.random.default_rng([self._seed, _ORDER, step])
        for pool, count in counts.items():
            hard = self._hard_rows(pool, count, rng)
            easy = self._next_in_order(pool, count - len(hard), set(hard))
            queued += easy
            drawn += hard + easy
        self._last = counts, owed_before, queued
        return [self.pools.row(drawn[i]) for i in rng.permutation(len(drawn)).tolist()]

    def take_back(self) -> None:
        """Undo the last draw, whose step could not be done."""
        assert self._last is not None and self._apportionment is not None
        counts, self._hard_owed, queued = self._last
        self._apportionment.undo(counts)
        for number in reversed(queued):
            self._queues[self.pools.row(number)[0]].appendleft(number)

    def _next_in_order(self, pool: str, count: int, taken: set[int]) -> list[int]:
        """Return the next rows of a pool, those left out that the step has already where there are others."""
        usable = self.pools.usable(pool)
        if pool not in self._queues:
            self._queues[pool] = deque(self._another_pass(pool, usable, least_used=True))
        queue = self._queues[pool]
        found: list[int] = []
        spare = len(taken) < len(usable)
        while len(found) < count:
            if not queue:
                queue.extend(self._another_pass(pool, usable, least_used=False))
            number = queue.popleft()
            if not (spare and number in taken):
                found.append(number)
        return found

    def _another_pass(self, pool: str, usable: NDArray[np.int64], least_used: bool) -> list[int]:
        """Return the usable rows in a random order; when ``least_used``, only those that were trained on least."""
        passes = self._passes[pool] = self._passes.get(pool, 0) + 1
        rng = np.random.default_rng([self._seed, _PASS, self.pools.names.index(pool), passes])
        order = usable[rng.permutation(len(usable))]
        if least_used:  # the loader has not come to them yet
            times = np.frombuffer(self._times, dtype=np.int64)[order]
            order = order[times == times.min()]
        found: list[int] = order.tolist()
        return found

    def _hard_rows(self, pool: str, count: int, rng: np.random.Generator) -> list[int]:
        """Return the part of a pool's rows in a step that is drawn from its hardest; none while none was seen."""
        if self.hard_share == 0 or count == 0:
            return []
        numbers = self.pools.usable(pool)
        difficulty = self.difficulty[numbers]
        seen = np.flatnonzero(np.isfinite(difficulty))
        if not len(seen):
            return []
        owed = self._hard_owed.get(pool, 0.0) + self.hard_share * count
        wanted = min(count, math.floor(owed + 1e-9))
        self._hard_owed[pool] = owed - wanted
        hardest = seen[np.argsort(-difficulty[seen], kind="stable")][: math.ceil(HARDEST * len(seen))]
        found: list[int] = []
        while len(found) < wanted:
            found += numbers[rng.permutation(hardest)][: wanted - len(found)].tolist()
        return found

    # Batch sizes ------------------------------------------------------------------------------------------------

    def growth_refusal(self, batch_size: int) -> str | None:
        """Return why the batch may not grow to a size; None when it may."""
        if self.too_large is not None and batch_size >= self.too_large:
            return f"a batch of {self.too_large} ran out of memory in this round, so one of {batch_size} is not tried"
        if not self.fitted:
            return "no step has shown yet what memory one takes; a batch can grow from the first step on"
        return self.memory.refusal(batch_size, self._memory_limit())

    def _memory_limit(self) -> int | None:
        """Return the most bytes that the round may have in use, looked at anew every `_LIMIT_EVERY` steps."""
        if self._max_memory_bytes is not None:
            return self._max_memory_bytes
        assert self.live is not None
        if self._limit_at is None or self.live.step >= self._limit_at + _LIMIT_EVERY:
            self._limit = memory_total(self._device) if self._device.type == "cuda" else memory_within_reach()
            self._limit_at = self.live.step
        return self._limit

    @property
    def grown(self) -> bool:
        """Whether the batch in force is larger than the recipe's."""
        return self.live is not None and self.live.now.batch_size > self.live.asked.batch_size

    def step_fitted(self) -> None:
        """Note that the step at the size in force was done."""
        if self.live is not None and self.live.now.batch_size not in self.fitted[-1:]:
            self.fitted.append(self.live.now.batch_size)

    def size_that_fitted(self) -> int | None:
        """Return the last smaller batch size that fitted, else the recipe's own; None when there is no smaller one."""
        if not self.grown:
            return None
        assert self.live is not None
        now, asked = self.live.now, self.live.asked
        for size in (*reversed(self.fitted), asked.batch_size):
            divides = not self.grouped or size * now.gradient_accumulation % now.num_generations == 0
            if asked.batch_size <= size < now.batch_size and divides:
                return size
        return None


def data_settings(recipe: Recipe) -> tuple[object, ...]:
    """Return what decides about the rows of a step."""
    return recipe.batch_size, recipe.num_generations, tuple(sorted((n, w) for n, w in recipe.mix.items() if w > 0))
