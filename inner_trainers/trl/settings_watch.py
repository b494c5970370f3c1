"""Watches, step by step, that a round uses the settings it was asked for, those of its adjustments too."""

from __future__ import annotations

import math

from ..base import Failure
from ..fault_kinds import failure
from .live import LiveRound
from .settings import settings_not_used


class SettingsWatch:
    """What each step was asked to use, beside what it used. Told on the worker, asked when the round is over.

    Args:
        live: the round.

    Attributes:
        rates: the learning rate that each step used.
        factors: what adjustments had made of the schedule's rate in each step.
    """

    def __init__(self, live: LiveRound) -> None:
        self._live = live
        self.rates: list[float] = []
        self.factors: list[float] = []
        self._rates_asked: list[float] = []
        self._sequences_asked = 0
        self._sequences_done = 0  # not those of a step that an exception ended
        self._never_arrived: Failure | None = None

    def before_update(self, rate: float) -> None:
        """Note the learning rate that a step is about to use, and look at what was adjusted before it.

        At the end of the round it would be too late: a later adjustment may hide that one never arrived.
        """
        live = self._live
        self.rates.append(rate)
        self._rates_asked.append(live.rates.at(len(self.rates)))
        self.factors.append(live.rates.factor)
        if live.unchecked:
            live.unchecked = False
            self._never_arrived = self._never_arrived or self._difference(len(self.rates))

    def step_done(self) -> None:
        """Note the sequences that a finished step trained on."""
        live = self._live
        self._sequences_done = live.meter.sequences
        self._sequences_asked += live.now.batch_size * live.now.gradient_accumulation

    def fault(self) -> Failure | None:
        """Return a failure when a step used another learning rate, batch or setting than it was asked to."""
        if self._never_arrived is not None:
            return self._never_arrived
        for step, (used, asked) in enumerate(zip(self.rates, self._rates_asked, strict=True), start=1):
            if not math.isclose(used, asked, rel_tol=1e-6, abs_tol=1e-15):
                evidence = f"step {step} used learning rate {used:g}, asked for {asked:g}"
                return failure("setting_not_used", step, evidence)
        if self._sequences_done != self._sequences_asked:
            evidence = f"{self._sequences_done} sequences were trained on, asked for {self._sequences_asked}"
            return failure("setting_not_used", self._live.step, evidence)
        return self._difference(self._live.step)

    def detached(self) -> SettingsWatch:
        """Return a copy that a worker which was given up cannot change."""
        copy = SettingsWatch(self._live)
        copy.rates, copy.factors, copy._rates_asked = list(self.rates), list(self.factors), list(self._rates_asked)
        return copy

    def _difference(self, step: int) -> Failure | None:
        different = settings_not_used(self._live.trainer, self._live.now, self._live.spec.reads)
        return failure("setting_not_used", step, "; ".join(different)) if different else None
