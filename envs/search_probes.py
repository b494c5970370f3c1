"""The probes of a search: short rounds that are charged and written down, and of which no checkpoint comes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from ..inner_trainers.base import Checkpoint, InnerTrainer, Limit, RoundReport, round_id
from ..inner_trainers.probe_rounds import memory_to_hold_to, run_round
from ..inner_trainers.probes import BatchSizeProbe, LearningRateProbe, batch_size_probe, learning_rate_probe
from ..inner_trainers.recipe import Recipe
from ..inner_trainers.tasks.base import InnerTask
from .budget import BudgetLedger
from .journal import Journal
from .prices import Prices
from .probe_log import ProbeLog
from .records import Records


class ProbedSearch(ABC):
    """What a search needs for its probes; `Search` is the one there is."""

    task: InnerTask
    trainer: InnerTrainer
    ledger: BudgetLedger
    records: Records
    checkpoints: dict[str, Checkpoint]
    probes: list[LearningRateProbe | BatchSizeProbe]
    _journal: Journal | None
    _episode: int
    _prices: Prices

    @property
    @abstractmethod
    def rounds(self) -> int:
        """Rounds done."""

    @abstractmethod
    def closed(self) -> str | None:
        """Return why no further round or probe may be asked for; None when one may."""

    @abstractmethod
    def _seed_from(self, start: Checkpoint) -> int:
        """Return the seed of rounds from a checkpoint."""

    def probe_learning_rate(self, recipe: Recipe, **settings: Any) -> LearningRateProbe:
        """Return what short rounds at several learning rates show; they are charged, and no checkpoint comes of them.

        What the evaluation of a round can cost is kept back.

        Args:
            recipe: what is asked; it need not be in the space, whose range the probe may narrow.
            **settings: ``low``, ``high``, ``points`` and ``steps_per_point`` of `learning_rate_probe`.

        Raises:
            ValueError: the search is closed, or a setting or recipe that `learning_rate_probe` refuses.
            JournalMismatchError: the journal holds another run.
        """
        found = learning_rate_probe(**self._probed("learning rate", recipe), **settings)
        self.probes.append(found)
        return found

    def probe_batch_size(self, recipe: Recipe, *, memory_bytes: int | None = None, **settings: Any) -> BatchSizeProbe:
        """Return which batches fit into memory; the steps are charged, and no checkpoint comes of them.

        Where the limit is what the system can give, a restarted search keeps to the one that was written down.

        Args:
            recipe: what is asked; it need not be in the space, whose batches the probe may narrow.
            memory_bytes: see `batch_size_probe`.
            **settings: ``candidates`` of `batch_size_probe`.

        Raises:
            ValueError: the search is closed, or a setting or recipe that `batch_size_probe` refuses.
            JournalMismatchError: the journal holds another run.
        """
        written = None if self._journal is None else self._journal.entry(f"{self._probe_key()}.0")
        if memory_bytes is None:
            memory_bytes = memory_to_hold_to(self.trainer) if written is None else written.get("memory_bytes")
        common = self._probed("batch size", recipe, memory_bytes=memory_bytes)
        found = batch_size_probe(**common, memory_bytes=memory_bytes, **settings)
        self.probes.append(found)
        return found

    def _probe_key(self) -> str:
        return f"{self._episode}.probe{len(self.probes)}"

    def _probed(self, what: str, recipe: Recipe, **facts: Any) -> dict[str, Any]:
        """Return what every probe is given: the checkpoint, what it may cost, and rounds that are written down."""
        reason = self.closed()
        if reason is not None:
            raise ValueError(f"the search has ended ({reason}); start a new one.")
        start = self.checkpoints[recipe.start]
        seed = self._seed_from(start)

        def content(tried: Recipe) -> dict[str, Any]:
            ignored = self.trainer.ignored_settings(tried.algorithm)
            identity = round_id(self.task, start, tried, seed, ignored)
            return {"probe": what, "round": self.rounds, "round_id": identity, "trainer": self.records.fingerprint}

        def train(tried: Recipe, limit: Limit | None) -> RoundReport:
            return run_round(self.trainer, self.task, self.records.with_weights(start), seed, tried, limit)

        log = ProbeLog(
            key=self._probe_key(),
            purpose=f"{what} probe",
            ledger=self.ledger,
            journal=self._journal,
            lookup=self.records.entry,
            content=content,
            train=train,
            facts=facts,
        )
        limit = self.ledger.reserve(self._prices.evaluation())
        common = {"trainer": self.trainer, "task": self.task, "recipe": recipe, "start": start, "seed": seed}
        return {**common, "limit": limit, "run": log.run}
