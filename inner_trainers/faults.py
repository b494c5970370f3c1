"""Detects training faults from the raw loss, before any logging filter, and names their cause."""

from __future__ import annotations

import math

from .base import Failure
from .fault_kinds import failure
from .fault_policy import FaultPolicy
from .messages import first_line
from .time_limit import TimeLimitError

HEALTHY_WITHOUT_GRADIENT = 1e-6
"""A loss of rows up to which a gradient of exactly 0 is no fault: there is nothing left to learn."""


class FaultWatch:
    """Watches one round step by step; `observe` returns a `Failure` at the first fault.

    The first spike ends the round, so a loss that explodes and then sits flat at ln(vocabulary), which looks
    unharmed by its last value alone, is caught too.

    Args:
        vocabulary_size: tokens of the model's vocabulary; its logarithm is the loss of knowing nothing.
        on_policy: whether the loss is a policy gradient, whose size says nothing of health.
        policy: the thresholds.
    """

    def __init__(self, vocabulary_size: int, on_policy: bool, policy: FaultPolicy | None = None) -> None:
        self.policy = FaultPolicy() if policy is None else policy
        self._uniform_loss = math.log(max(vocabulary_size, 2))
        self._on_policy = on_policy
        self._first_loss: float | None = None
        self._first_chosen: float | None = None
        self._steps_without_signal: int | None = 0  # None once rewards have differed
        self._compares_groups = False
        self._first_reward: float | None = None

    def observe(
        self,
        step: int,
        loss: float,
        grad_norm: float | None,
        groups_without_spread: float | None = None,
        *,
        reward: float | None = None,
        reward_spread: float | None = None,
        kl: float | None = None,
        chosen_log_probability: float | None = None,
    ) -> Failure | None:
        """Check one optimiser step.

        Args:
            step: optimiser step, from 1.
            loss: mean raw loss of the step, unfiltered.
            grad_norm: gradient norm before clipping; None when unknown.
            groups_without_spread: share of on-policy groups whose completions all got one reward; None when unknown.
            reward: mean reward of the batch; None when unknown. With the spread it decides about signal where
                completions are not compared in groups, but with what was seen before.
            reward_spread: standard deviation of the rewards of the whole batch; None when unknown.
            kl: KL divergence per token to the start, in nats; None when unknown.
            chosen_log_probability: mean log-probability of a token of the better answers of pairs; None when unknown.
        """
        self._note_signal(groups_without_spread, reward_spread, reward)
        if not math.isfinite(loss):
            return failure("diverged", step, f"the loss was {loss} at step {step}")
        if grad_norm is not None and not math.isfinite(grad_norm):
            return failure("diverged", step, f"the gradient norm was {grad_norm} at step {step}")
        if self._first_loss is None:
            self._first_loss = abs(loss)
        limit = self.policy.explosion_factor * max(self._first_loss, self._uniform_loss)
        if self._on_policy:
            limit = self.policy.exploded_policy_loss
        if abs(loss) > limit:
            evidence = f"the loss was {loss:.4g} at step {step}, above {limit:.4g} (first loss {self._first_loss:.4g})"
            return failure("diverged", step, evidence)
        if chosen_log_probability is not None:
            # A preference loss is bounded below and, for KTO, above: it reads 0 or 1/2 when the weights are ruined.
            if self._first_chosen is None:
                self._first_chosen = abs(chosen_log_probability)
            lowest = -self.policy.explosion_factor * max(self._first_chosen, self._uniform_loss)
            if not chosen_log_probability >= lowest:  # NaN too
                evidence = (
                    f"a token of the better answers had a log-probability of {chosen_log_probability:.4g} on average "
                    f"at step {step}, below {lowest:.4g}: the weights are ruined"
                )
                return failure("diverged", step, evidence)
        if grad_norm == 0 and groups_without_spread is not None and groups_without_spread < 1:
            # Ruined weights saturate the logits, and a policy-gradient loss does not show it: it stays near 0.
            evidence = f"rewards differed at step {step}, yet the gradient was exactly 0: the weights are saturated"
            return failure("diverged", step, evidence)
        if grad_norm == 0 and not self._on_policy and abs(loss) > HEALTHY_WITHOUT_GRADIENT:
            # The same of rows: their loss is flat where every output is saturated.
            evidence = f"the gradient was exactly 0 at step {step} at a loss of {loss:.4g}: the weights are saturated"
            return failure("diverged", step, evidence)
        most = self.policy.max_kl
        # KTO's estimate is one of whole answers and says nothing of runaway
        if self._on_policy and most is not None and kl is not None and not kl <= most:  # NaN too
            return failure(
                "kl_runaway", step, f"the KL divergence per token was {kl:.4g} at step {step}, above {most:g}"
            )
        patience = self.policy.no_signal_steps
        if patience is not None and self._steps_without_signal is not None and self._steps_without_signal >= patience:
            return self._no_signal(step)
        return None

    def round_ended(self, step: int) -> Failure | None:
        """Return the failure of a round that is over after ``step`` steps and never had a signal, else None."""
        return self._no_signal(step) if self._steps_without_signal else None

    def _note_signal(
        self, groups_without_spread: float | None, reward_spread: float | None, reward: float | None
    ) -> None:
        if not self._on_policy or self._steps_without_signal is None:
            return
        if groups_without_spread is not None:
            self._compares_groups, differed = True, groups_without_spread < 1
        elif (reward is not None or reward_spread is not None) and not self._compares_groups:
            if self._first_reward is None:
                self._first_reward = reward
            # of a batch of one there is no spread
            spread = reward_spread is not None and math.isfinite(reward_spread) and reward_spread != 0
            differed = spread or reward != self._first_reward
        else:  # a step that uses a batch of completions again says nothing of its groups
            return
        self._steps_without_signal = None if differed else self._steps_without_signal + 1

    def _no_signal(self, step: int) -> Failure:
        return failure(
            "no_signal",
            step,
            f"no signal: in all {step} steps no reward told one completion from another; the task is too hard or too "
            "easy here, or the verifier is constant",
        )


_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cublas_status_alloc_failed")
"""How CUDA, torch's CPU allocator and cuBLAS say it."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception that a library raised says that memory ran out."""
    if isinstance(error, RewardFault | ToolFault | ScorerFault):  # their messages quote a task's code, whatever it says
        return False
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or any(sign in str(error).lower() for sign in _OUT_OF_MEMORY)
    )


def failure_from_exception(error: BaseException, step: int) -> Failure:
    """Return the labelled failure for an exception that a trainer raised."""
    text = first_line(error)
    if isinstance(error, RewardFault):  # before memory: the message quotes the verifier, whatever that says
        return failure("reward_function", step, str(error)[:300])
    if isinstance(error, NothingPassedError):
        return failure("no_signal", step, str(error)[:300])
    if isinstance(error, ToolFault):
        return failure("tool_raised", step, str(error)[:300])
    if isinstance(error, ScorerFault):
        return failure("evaluation_raised", step, str(error)[:300])
    if isinstance(error, TimeLimitError):
        return failure("time_limit", step, str(error)[:300])
    if isinstance(error, MemoryLimitError):
        return failure("memory_limit", step, str(error)[:300])
    if is_out_of_memory(error):
        return failure("oom", step, text)
    if isinstance(error, RuntimeError) and "probability tensor contains" in str(error):
        # `torch.multinomial` met non-finite logits: the policy's weights are ruined, which its loss did not show
        return failure("diverged", step, f"sampling failed, the logits are not finite ({text})")
    return failure("trainer_raised", step, text)


class RewardFault(RuntimeError):
    """A verifier raised, or returned something that is no finite number."""


class NothingPassedError(RuntimeError):
    """No sampled completion got the reward it needed to be trained on."""


class ScorerFault(RuntimeError):
    """A benchmark's scorer raised."""


class ToolFault(RuntimeError):
    """A task's tool raised, or returned something that is neither text nor None."""


class MemoryLimitError(RuntimeError):
    """The memory in use passed its limit."""
