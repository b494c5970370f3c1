"""Every kind of fault with its cause, what it means and how a round may respond: the one table of failures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from .base import Failure

RESPONSES = ("stop", "rollback", "retry")
"""What a round can do about a fault; see `FaultPolicy`."""


@dataclass(frozen=True)
class FaultKind:
    """One kind of fault.

    Attributes:
        cause: one of `CAUSES`.
        meaning: one sentence for tables.
        responses: those of `RESPONSES` that fit it.
        unfit: why the others do not fit; empty when all do.
    """

    cause: str
    meaning: str
    responses: tuple[str, ...] = ("stop",)
    unfit: str = ""


_NO_STEPS = "no optimiser step was done, so there are no other weights to go on with"
_UNWOUND = "training has unwound when it is seen, and a trainer that has unwound cannot go on"
_NEVER_TRAINED = "there is no round yet"
_NOT_THE_ASKED = "no weights of the round are what the recipe asked for"

FAULTS: Mapping[str, FaultKind] = MappingProxyType(
    {
        "diverged": FaultKind(
            "hyperparameter",
            "A loss, a gradient norm or a weight was not finite, the loss exploded, or the gradient collapsed.",
            RESPONSES,
        ),
        "kl_runaway": FaultKind(
            "hyperparameter", "The KL divergence per token to the start passed the policy's `max_kl`.", RESPONSES
        ),
        "refused": FaultKind("hyperparameter", "The recipe cannot run on the task.", unfit=_NEVER_TRAINED),
        "rows_refused": FaultKind("data", "The rows cannot be trained on as the recipe asks.", unfit=_NEVER_TRAINED),
        "nothing_supervised": FaultKind("data", "No token of the round carried a loss.", unfit=_NOT_THE_ASKED),
        "no_data": FaultKind(
            "algorithm_mismatch", "No source has the rows that the algorithm trains on.", unfit=_NEVER_TRAINED
        ),
        "no_signal": FaultKind(
            "algorithm_mismatch",
            "No reward told one completion from another in the whole round, or rejection sampling kept none.",
            unfit="weights that saw no difference in reward are no better at any earlier step or smaller rate",
        ),
        "unaffordable": FaultKind(
            "resources", "The budget pays no step of the algorithm with its evaluation.", unfit=_NEVER_TRAINED
        ),
        "budget_too_small": FaultKind("resources", "The round's limit pays no optimiser step.", unfit=_NO_STEPS),
        "oom": FaultKind("resources", "Memory ran out.", ("stop", "rollback"), _UNWOUND),
        "memory_limit": FaultKind(
            "resources", "Memory in use passed the policy's `max_memory_bytes`.", ("stop", "rollback"), _UNWOUND
        ),
        "time_limit": FaultKind(
            "resources",
            "The round passed `max_round_seconds`, or its evaluation `max_evaluation_seconds` or "
            "`max_scoring_seconds`.",
            ("stop", "rollback"),
            _UNWOUND,
        ),
        "reward_function": FaultKind(
            "environment",
            "A verifier raised, or returned something that is no finite number.",
            ("stop", "rollback"),
            _UNWOUND,
        ),
        "tool_raised": FaultKind(
            "environment",
            "A task's tool raised, or returned something that is neither text nor None.",
            ("stop", "rollback"),
            _UNWOUND,
        ),
        "trainer_raised": FaultKind("environment", "The trainer raised.", ("stop", "rollback"), _UNWOUND),
        "stopped_early": FaultKind(
            "environment", "The trainer ended by itself before the last step.", ("stop", "rollback"), _UNWOUND
        ),
        "no_steps": FaultKind("environment", "The round ended without an optimiser step.", unfit=_NO_STEPS),
        "setting_not_used": FaultKind(
            "environment", "The trainer used another setting than the recipe's.", unfit=_NOT_THE_ASKED
        ),
        "evaluation_raised": FaultKind(
            "environment", "The evaluation of the checkpoint raised.", unfit="the round is over when it is seen"
        ),
    }
)
"""Kinds of faults by name."""


def failure(kind: str, step: int, evidence: str) -> Failure:
    """Return a failure of one of `FAULTS`, with the kind's cause.

    Args:
        kind: a key of `FAULTS`.
        step: optimiser step (from 1) at which it was seen; 0 before the first.
        evidence: one sentence with the numbers that show it.
    """
    return Failure(FAULTS[kind].cause, kind, step, evidence)
