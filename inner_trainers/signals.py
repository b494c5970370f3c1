"""The signals of a running round: their names, units, and which of them exist; `monitor.Monitor` fills them in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

WINDOW = 200
"""Optimiser steps over which a signal's mean and spread are taken."""

Z_LIMIT = 5.0
"""Z-scores are clipped to [-Z_LIMIT, Z_LIMIT]."""


@dataclass(frozen=True)
class SignalKind:
    """One signal.

    Attributes:
        group: ``"gradients"``, ``"loss"``, ``"preferences"``, ``"rewards"`` or ``"hardware"``.
        unit: unit and range.
        summary: what it says.
        clocked: whether a clock or the machine decides it, so that two equal rounds differ in it.
    """

    group: str
    unit: str
    summary: str
    clocked: bool = False


SIGNALS: Mapping[str, SignalKind] = MappingProxyType(
    {
        "grad_norm": SignalKind("gradients", "L2 norm, at least 0", "norm of the whole gradient before clipping"),
        "grad_norm_ratio": SignalKind(
            "gradients",
            "at least 1",
            "largest over smallest norm of a parameter tensor's gradient before clipping, those of 0 left out",
        ),
        "grad_variance": SignalKind("gradients", "at least 0", "variance of the gradient's entries"),
        "grad_cosine": SignalKind("gradients", "[-1, 1]", "cosine between this step's gradient and the one before"),
        "grad_clip_ratio": SignalKind("gradients", "(0, 1]", "norm after clipping over norm before"),
        "loss": SignalKind("loss", "nats, or as the algorithm defines it", "mean loss of the step"),
        "loss_slope": SignalKind(
            "loss",
            "loss per step",
            "slope of the smoothed loss: least squares over the last 10 values of an exponential moving average",
        ),
        "loss_curvature": SignalKind(
            "loss", "loss per step squared", "change of the slope, when three steps in a row agree on its sign"
        ),
        "loss_source_1": SignalKind("loss", "nats", "mean loss of the step's rows of the first source in sorted order"),
        "loss_source_2": SignalKind("loss", "nats", "the same of the second source"),
        "loss_source_3": SignalKind("loss", "nats", "the same of the third source"),
        "loss_source_4": SignalKind("loss", "nats", "the same of the fourth source"),
        "chosen_log_probability": SignalKind(
            "preferences", "nats per token, at most 0", "mean log-probability of the better answers' tokens"
        ),
        "reward_margin": SignalKind("preferences", "nats", "implicit reward of the better answer over the worse"),
        "reward": SignalKind("rewards", "the verifier's", "mean reward of the step's completions"),
        "reward_std": SignalKind("rewards", "at least 0", "standard deviation of the step's rewards"),
        "reward_sparsity": SignalKind(
            "rewards",
            "[0, 1]",
            "share of completions whose reward carries no information: 0, or negative without being decisive",
        ),
        "groups_without_spread": SignalKind(
            "rewards", "[0, 1]", "share of groups whose completions all got one reward"
        ),
        "kl": SignalKind("rewards", "nats per token", "KL divergence to the round's start"),
        "entropy": SignalKind("rewards", "nats per token, at least 0", "entropy of the policy's next token"),
        "clip_ratio": SignalKind("rewards", "[0, 1]", "share of tokens whose probability ratio was clipped"),
        "completion_length": SignalKind("rewards", "tokens", "mean length of the sampled completions"),
        "completion_truncated": SignalKind("rewards", "[0, 1]", "share of completions cut at the length limit"),
        "reward_source_1": SignalKind(
            "rewards", "the verifier's", "mean reward of the step's first source in sorted order"
        ),
        "reward_source_2": SignalKind("rewards", "the verifier's", "the same of the second source"),
        "reward_source_3": SignalKind("rewards", "the verifier's", "the same of the third source"),
        "reward_source_4": SignalKind("rewards", "the verifier's", "the same of the fourth source"),
        "step_seconds": SignalKind("hardware", "seconds", "wall time of the step", clocked=True),
        "tokens_per_second": SignalKind("hardware", "tokens/s", "trained and sampled tokens over time", clocked=True),
        "memory_share": SignalKind(
            "hardware", "[0, 1]", "memory in use (of a card, the most reserved so far) over what there is", clocked=True
        ),
        "utilisation": SignalKind("hardware", "[0, 1]", "share of the time that the card was busy", clocked=True),
    }
)
"""Signals by name, in the order of vectors."""

_COUNTED = np.array([not kind.clocked for kind in SIGNALS.values()], np.float32)


@dataclass(frozen=True)
class Signals:
    """What the monitor read from one optimiser step.

    Attributes:
        step: the step, from 1; 0 before the first.
        values: signal -> raw value, None where it does not apply or was not measured. Has every key of `SIGNALS`.
            A value that was measured and is not finite is None too, and named in ``broken``.
        z: signal -> z-score over the last `WINDOW` steps in [-Z_LIMIT, Z_LIMIT], 0 where absent. Always finite.
        broken: signals whose value was not finite.
    """

    step: int = 0
    values: Mapping[str, float | None] = field(default_factory=lambda: dict.fromkeys(SIGNALS))
    z: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(SIGNALS, 0.0))
    broken: tuple[str, ...] = ()

    def vector(self, clocked: bool = False) -> NDArray[np.float32]:
        """Return z-scores over `Z_LIMIT` in the order of `SIGNALS`: (len(SIGNALS),) float32 in [-1, 1].

        Args:
            clocked: whether signals that a clock decides are there; without, they are 0 like absent ones.
        """
        scores = (np.array([self.z[name] for name in SIGNALS]) / Z_LIMIT).astype(np.float32)
        return scores if clocked else scores * _COUNTED

    def presence(self, clocked: bool = False) -> NDArray[np.float32]:
        """Return 1 where `vector` holds a measured signal, else 0: (len(SIGNALS),) float32."""
        there = np.array([self.values[name] is not None for name in SIGNALS], np.float32)
        return there if clocked else there * _COUNTED
