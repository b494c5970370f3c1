"""Scores the checkpoints of a search: the whole evaluation after a round, and the quick one while it is parked."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace

from ..inner_trainers.base import (
    Checkpoint,
    Cost,
    InnerTrainer,
    QuickEvaluator,
    RoundReport,
    Scorecard,
    TrainingSession,
)
from ..inner_trainers.evaluation import completion_flags
from ..inner_trainers.fault_kinds import FAULTS
from ..inner_trainers.faults import failure_from_exception
from ..inner_trainers.tasks.base import InnerTask
from .prices import Prices

_LOG = logging.getLogger(__name__)


class Scoring:
    """Evaluations on validation items; what one that raises has used is charged at the most it can have been.

    Args:
        trainer: who evaluates.
        task: whose items.
        prices: what evaluations can cost.
    """

    def __init__(self, trainer: InnerTrainer, task: InnerTask, prices: Prices) -> None:
        self._trainer, self._task, self._prices = trainer, task, prices

    def base(self, base: Checkpoint) -> tuple[Scorecard, Cost]:
        """Return the base checkpoint's scorecard and its cost.

        Raises:
            ValueError: a score that is not finite.
        """
        scorecard, cost = self._trainer.evaluate(self._task, base, "validation")
        _require_finite(scorecard)
        return scorecard, cost

    def evaluated(self, report: RoundReport, checkpoint: Checkpoint) -> tuple[RoundReport, Checkpoint | None]:
        """Return the report with the checkpoint's scorecard, or as a failure when the evaluation raises."""
        began = time.perf_counter()
        bound = cost = self._prices.evaluation_bound
        try:
            scorecard, cost = self._trainer.evaluate(self._task, checkpoint, "validation")
            _require_finite(scorecard)
        except Exception as error:
            _LOG.warning("evaluation failed", exc_info=True)
            fault = failure_from_exception(error, report.steps)
            if fault.kind == "trainer_raised":
                fault = replace(fault, kind="evaluation_raised", cause=FAULTS["evaluation_raised"].cause)
            if cost is bound:
                cost = replace(cost, device_seconds=time.perf_counter() - began)
            return replace(report, failure=fault, ended="failed", checkpoint=None, evaluation_cost=cost), None
        flags = report.flags + completion_flags(scorecard)
        return replace(report, scorecard=scorecard, evaluation_cost=cost, flags=flags), checkpoint

    def quick_bound(self, items: int) -> Cost:
        """Return the most a quick evaluation can cost; in seconds its share of what the last whole one took.

        Raises:
            ValueError: the trainer has no quick evaluation.
        """
        bound = require_quick_evaluator(self._trainer).quick_cost_bound(self._task, items)
        whole = self._prices.evaluation_bound.flops
        share = min(1.0, bound.flops / whole) if whole else 1.0
        return replace(bound, device_seconds=share * self._prices.evaluation_seconds)

    def quick(self, items: int, most: int) -> Callable[[TrainingSession], tuple[float, Cost]]:
        """Return what scores a parked session.

        Where an evaluation raises, and after the last that is paid, the score before it is repeated.

        Args:
            items: validation items.
            most: evaluations that are paid, at least 1; later scores cost nothing.

        Raises:
            ValueError: the trainer has no quick evaluation.
        """
        trainer, last, left = require_quick_evaluator(self._trainer), 0.0, most

        def quick(session: TrainingSession) -> tuple[float, Cost]:
            nonlocal last, left
            if left == 0:
                return last, Cost()
            left -= 1
            began = time.perf_counter()
            try:
                score, cost = trainer.quick_score(self._task, session, items)
                if not math.isfinite(score):
                    raise ValueError(f"a quick evaluation gave {score}, which is no finite score")
            except Exception as error:
                _LOG.warning("a quick evaluation failed", exc_info=True)
                session.flag(f"a quick evaluation raised {type(error).__name__}; the score before it was taken again")
                return last, replace(self.quick_bound(items), device_seconds=time.perf_counter() - began)
            last = score
            return score, cost

        return quick


def require_quick_evaluator(trainer: InnerTrainer) -> QuickEvaluator:
    """Return the trainer as one that can score a round while it is parked.

    Raises:
        ValueError: it cannot.
    """
    if not isinstance(trainer, QuickEvaluator):
        raise ValueError(
            f"shaping: {type(trainer).__name__} cannot score a round while it is parked; give it `quick_score` and "
            "`quick_cost_bound` (see `QuickEvaluator`), or leave shaping False."
        )
    return trainer


def _require_finite(scorecard: Scorecard) -> None:
    if not (math.isfinite(scorecard.score) and math.isfinite(scorecard.standard_error)):
        raise ValueError(f"evaluation: {scorecard.score} ± {scorecard.standard_error} is no finite score.")
