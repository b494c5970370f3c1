"""What a search keeps of its rounds: journal entries, and weights, which it makes again where they were lost."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..inner_trainers.adjustments import Adjustment
from ..inner_trainers.base import Checkpoint, InnerTrainer, Limit
from ..inner_trainers.recipe import Recipe
from ..inner_trainers.tasks.base import InnerTask
from ..inner_trainers.telemetry import machine_name
from .journal import Journal

_LOG = logging.getLogger(__name__)


class JournalMismatchError(ValueError):
    """A journal holds another run's rounds: the repeated decision differs from the one written down."""


@dataclass(frozen=True)
class Origin:
    """How a checkpoint was made, so that it can be made again.

    Attributes:
        start: id of the checkpoint the round started from.
        recipe: what was asked.
        seed: the trainer's seed.
        steps: optimiser steps its weights have had.
        limit: the round's limit; None for none.
        adjustments: what was applied: (optimiser steps done then, adjustment).
        rolled_back: whether a fault ended the round with weights from before its last step.
    """

    start: str
    recipe: Recipe
    seed: int
    steps: int
    limit: Limit | None
    adjustments: tuple[tuple[int, Adjustment], ...] = ()
    rolled_back: bool = False


class Records:
    """The journal's entries of one search, and the weights of its checkpoints.

    Args:
        trainer: who repeats a round whose weights were lost.
        task: what is trained on.
        base: the base checkpoint, with weights.
        journal: where entries and weights are written; None for nowhere.
        episode: number of the search in the journal.

    Attributes:
        fingerprint: the trainer's, as plain JSON.
        kept: id -> checkpoint with weights in memory.
        made_by: id -> how it was made.
    """

    def __init__(
        self, trainer: InnerTrainer, task: InnerTask, base: Checkpoint, journal: Journal | None, episode: int
    ) -> None:
        self._trainer, self._task, self._journal, self._episode = trainer, task, journal, episode
        self.fingerprint: dict[str, Any] = json.loads(json.dumps(dict(trainer.fingerprint)))
        self.kept: dict[str, Checkpoint] = {base.id: base}
        self.made_by: dict[str, Origin] = {}

    def entry(self, key: str, content: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the journal's entry of a key; None when there is none.

        Raises:
            JournalMismatchError: it was written for other ``content``.
        """
        entry = None if self._journal is None else self._journal.entry(key)
        if entry is not None and {name: entry.get(name) for name in content} != dict(content):
            raise self.mismatch(key)
        return entry

    def mismatch(self, key: str, why: str = "") -> JournalMismatchError:
        """Return the error that says that an entry is another run's."""
        path = None if self._journal is None else self._journal.path
        return JournalMismatchError(
            f"{path}, entry {key}: it was written by a run with another task, seed, trainer or settings than this "
            f"one{why}. Resume with the settings the folder was made with, or use a new folder."
        )

    def append(self, key: str, payload: Mapping[str, Any]) -> None:
        """Write an entry, where there is a journal."""
        if self._journal is not None:
            self._journal.append(key, payload)

    def round_key(self, number: int) -> str:
        """Return the key of a round, counted from 0."""
        return f"{self._episode}.{number}"

    def write_round(self, number: int, made: Checkpoint | None, payload: Mapping[str, Any]) -> None:
        """Write a finished round, its weights first, where there is a journal."""
        if self._journal is None:
            return
        if made is not None:
            self._journal.save_weights(made)
        facts = {"episode": self._episode, "round": number, "instance": self._task.facts(), "machine": machine_name()}
        self._journal.append(self.round_key(number), {**facts, **payload})

    def keep_only(self, ids: Collection[str], in_journal: bool) -> None:
        """Let go of the weights of other checkpoints, in memory and, if ``in_journal``, in the journal's folder."""
        self.kept = {name: kept for name, kept in self.kept.items() if name in ids or name == "base"}
        if in_journal and self._journal is not None:
            self._journal.keep_only(ids)

    def with_weights(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint with weights: from memory, from disk, or by repeating the round that made it."""
        if checkpoint.id not in self.kept:
            weights = None if self._journal is None else self._journal.weights(checkpoint.id)
            loaded = replace(checkpoint, weights=self._make_again(checkpoint) if weights is None else weights)
            if weights is None and self._journal is not None:
                self._journal.save_weights(loaded)
            self.kept[checkpoint.id] = loaded
        return self.kept[checkpoint.id]

    def _make_again(self, checkpoint: Checkpoint) -> Any:
        """Return the weights of a checkpoint of a journal that lost them; the round was charged when it first ran."""
        _LOG.warning("the weights of checkpoint %s were not kept; its round is repeated", checkpoint.id)
        origin = self.made_by[checkpoint.id]
        start = self.with_weights(Checkpoint(origin.start, None, checkpoint.depth - 1))
        session = self._trainer.begin(self._task, origin.recipe, start, origin.seed, origin.limit)
        try:
            for step, adjustment in origin.adjustments:
                if step > origin.steps:  # the round went back to weights from before it
                    break
                if step > session.step:
                    session.advance(step - session.step)
                reason = session.refusal(adjustment)
                if reason is not None:
                    raise RuntimeError(
                        f"the round that made checkpoint {checkpoint.id} cannot be repeated here: {adjustment} after "
                        f"step {step} is refused ({reason})."
                    )
                session.apply(adjustment)
            if origin.steps > session.step:
                session.advance(origin.steps - session.step)
            report, made = session.result()
        finally:
            session.close()
        if made is None:
            reason = "" if report.failure is None else f" ({report.failure.evidence})"
            raise RuntimeError(f"the round that made checkpoint {checkpoint.id} failed when it was repeated{reason}.")
        if made.id != checkpoint.id and not origin.rolled_back:  # memory ran out then or now, and a batch was cut
            raise RuntimeError(
                f"the round that made checkpoint {checkpoint.id} came out as {made.id} when it was repeated: "
                f"{'; '.join(report.flags) or 'its steps were others'}. Its weights are lost; begin from another "
                "checkpoint, or run the search anew."
            )
        return made.weights
