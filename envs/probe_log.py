"""The rounds of one probe of a search: answered by the journal where it has them, written down, charged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..inner_trainers.base import Limit, RoundReport
from ..inner_trainers.recipe import Recipe
from .budget import BudgetLedger
from .journal import Journal


class ProbeLog:
    """Runs the rounds of one probe. Each is on disk before the next begins, so a killed probe loses at most one.

    Args:
        key: the probe's key in the journal; its rounds have ``key.0``, ``key.1`` and so on.
        purpose: what the ledger calls it.
        ledger: who is charged, replayed rounds included, as the ledger of a restarted search begins anew.
        journal: where rounds are written; None for nowhere.
        lookup: returns the journal's entry of a key, or raises when it was written for other content.
        content: what must be equal for a round to be the one that was written down.
        train: runs a round that is not written down.
        facts: further plain data for each entry.
    """

    def __init__(
        self,
        *,
        key: str,
        purpose: str,
        ledger: BudgetLedger,
        journal: Journal | None,
        lookup: Callable[[str, Mapping[str, Any]], Mapping[str, Any] | None],
        content: Callable[[Recipe], Mapping[str, Any]],
        train: Callable[[Recipe, Limit | None], RoundReport],
        facts: Mapping[str, Any],
    ) -> None:
        self._key, self._purpose, self._ledger, self._journal = key, purpose, ledger, journal
        self._lookup, self._content, self._train, self._facts = lookup, content, train, facts
        self._rounds = 0

    def run(self, recipe: Recipe, limit: Limit | None) -> RoundReport:
        """Return the report of one round, trained or read back, and charge it."""
        key, content = f"{self._key}.{self._rounds}", self._content(recipe)
        entry = self._lookup(key, content)
        if entry is not None:
            report = RoundReport.from_dict(entry["probe_report"])
        else:
            report = self._train(recipe, limit)
            if self._journal is not None:
                # not "report": a probe's rounds are none of the search's
                self._journal.append(key, {**content, **self._facts, "probe_report": report.to_dict()})
        self._rounds += 1
        self._ledger.settle(self._purpose, report.training_cost)
        return report
