"""Detects training faults from the raw loss, before any logging filter, and names their cause."""

from __future__ import annotations

import math

from .base import Failure
from .messages import first_line

EXPLOSION_FACTOR = 10.0
"""A supervised loss above this many times the larger of its first value and ln(vocabulary) has exploded."""

EXPLODED_POLICY_LOSS = 1e3
"""A policy-gradient loss beyond this magnitude has exploded; its ordinary size is below 10."""


class FaultWatch:
    """Watches one round step by step; `observe` returns a `Failure` at the first fault.

    The first spike ends the round, so a loss that explodes and then sits flat at ln(vocabulary), which looks
    unharmed by its last value alone, is caught too.
    """

    def __init__(self, vocabulary_size: int, on_policy: bool) -> None:
        self._uniform_loss = math.log(max(vocabulary_size, 2))
        self._on_policy = on_policy
        self._first_loss: float | None = None

    def observe(
        self, step: int, loss: float, grad_norm: float | None, groups_without_spread: float | None = None
    ) -> Failure | None:
        """Check one optimiser step.

        Args:
            step: optimiser step, from 1.
            loss: mean raw loss of the step, unfiltered.
            grad_norm: gradient norm before clipping; None when unknown.
            groups_without_spread: share of on-policy groups whose completions all got one reward; None when unknown.
        """
        if not math.isfinite(loss):
            return Failure("hyperparameter", "diverged", step, f"the loss was {loss} at step {step}")
        if grad_norm is not None and not math.isfinite(grad_norm):
            return Failure("hyperparameter", "diverged", step, f"the gradient norm was {grad_norm} at step {step}")
        if self._first_loss is None:
            self._first_loss = abs(loss)
        limit = (
            EXPLODED_POLICY_LOSS if self._on_policy else EXPLOSION_FACTOR * max(self._first_loss, self._uniform_loss)
        )
        if abs(loss) > limit:
            evidence = f"the loss was {loss:.4g} at step {step}, above {limit:.4g} (first loss {self._first_loss:.4g})"
            return Failure("hyperparameter", "diverged", step, evidence)
        if grad_norm == 0 and groups_without_spread is not None and groups_without_spread < 1:
            # Ruined weights saturate the logits, and a policy-gradient loss does not show it: it stays near 0.
            evidence = f"rewards differed at step {step}, yet the gradient was exactly 0: the weights are saturated"
            return Failure("hyperparameter", "diverged", step, evidence)
        return None


_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cublas_status_alloc_failed")
"""How CUDA, torch's CPU allocator and cuBLAS say it."""


def failure_from_exception(error: BaseException, step: int) -> Failure:
    """Return the labelled failure for an exception that a trainer raised."""
    text = first_line(error)
    if isinstance(error, RewardFault):  # before memory: the message quotes the verifier, whatever that says
        return Failure("environment", "reward_function", step, str(error)[:300])
    if isinstance(error, ToolFault):
        return Failure("environment", "tool_raised", step, str(error)[:300])
    if isinstance(error, ScorerFault):
        return Failure("environment", "evaluation_raised", step, str(error)[:300])
    if isinstance(error, MemoryError) or any(sign in str(error).lower() for sign in _OUT_OF_MEMORY):
        return Failure("resources", "oom", step, text)
    if isinstance(error, RuntimeError) and "probability tensor contains" in str(error):
        # `torch.multinomial` met non-finite logits: the policy's weights are ruined, which its loss did not show
        return Failure("hyperparameter", "diverged", step, f"sampling failed, the logits are not finite ({text})")
    return Failure("environment", "trainer_raised", step, text)


class RewardFault(RuntimeError):
    """A verifier raised, or returned something that is no finite number."""


class ScorerFault(RuntimeError):
    """A benchmark's scorer raised."""


class ToolFault(RuntimeError):
    """A task's tool raised, or returned something that is neither text nor None."""
