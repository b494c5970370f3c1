"""The curve of a round: which of a trainer's logs it shows, under which name, and what a person should read in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_HIDDEN_LOGS = ("epoch", "num_tokens", "step_time", "learning_rate", "loss")
_CURVE_NAMES = {
    "frac_reward_zero_std": "groups_without_spread",
    "rewards/margins": "reward_margin",  # of the better answer over the worse one, implicit in the log-probabilities
    "rewards/accuracies": "reward_accuracy",
}


def _is_curve(name: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    hidden = name in _HIDDEN_LOGS or name.startswith(("rewards/", "sampling/", "profiling/", "completions/min"))
    return name in _CURVE_NAMES or not hidden


def _curve_name(name: str) -> str:
    return _CURVE_NAMES.get(name, name)


def curve_values(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return the logs of one optimiser step that a curve row shows; loss and learning rate come from elsewhere."""
    return {_curve_name(name): float(value) for name, value in logs.items() if _is_curve(name, value)}


def completion_flags(curves: Sequence[Mapping[str, float]]) -> list[str]:
    """Return a sentence when every completion of the second half of the round was empty, or was cut."""
    half = curves[len(curves) // 2 :]
    flags = []
    for name, is_bad, said in (
        ("completions/max_length", lambda row: row["completions/max_length"] <= 1 and not _clipped(row), "empty"),
        ("completions/clipped_ratio", _clipped, "cut at the length limit"),
    ):
        if half and all(name in row and is_bad(row) for row in half):
            flags.append(
                f"100 % of the completions sampled in the last {len(half)} steps are {said}; check the end token of "
                "the model and the length that the benchmark allows"
            )
    return flags


def _clipped(row: Mapping[str, float]) -> bool:
    return row.get("completions/clipped_ratio") == 1.0
