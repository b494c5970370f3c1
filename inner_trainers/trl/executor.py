"""Applies adjustments to a live round: which kind is carried out by what, and what each has changed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ..adjustments import Adjustment
from . import adjust_data, adjust_monitor, adjust_optimizer, adjust_policy, adjust_weights
from .live import Handler, LiveRound

HANDLERS: Mapping[str, Handler] = MappingProxyType(
    {
        **adjust_data.HANDLERS,
        **adjust_monitor.HANDLERS,
        **adjust_optimizer.HANDLERS,
        **adjust_policy.HANDLERS,
        **adjust_weights.HANDLERS,
    }
)
"""Kind of adjustment -> what carries it out; ``"none"`` and ``"stop"`` are the session's own."""

_SHOWN = ("beta", "entropy_coef", "gamma", "kl_coef", "num_generations", "temperature")


class Executor:
    """Carries out the adjustments of one round, and remembers them.

    Args:
        live: the round.

    Attributes:
        applied: (steps done then, adjustment), in order, without those that change nothing.
    """

    def __init__(self, live: LiveRound) -> None:
        self._live = live
        self.applied: list[tuple[int, Adjustment]] = []
        self._details: list[str] = []  # of each that was applied

    def refusal(self, adjustment: Adjustment) -> str | None:
        """Return why the adjustment cannot be applied now; None when it can."""
        return None if adjustment.kind == "none" else HANDLERS[adjustment.kind].refusal(self._live, adjustment)

    def apply(self, adjustment: Adjustment) -> None:
        """Change the round from the next step on; the adjustment must not be refused."""
        detail = None if adjustment.kind == "none" else HANDLERS[adjustment.kind].apply(self._live, adjustment)
        self.note(adjustment, detail)

    def settings(self) -> dict[str, float]:
        """Return the settings in force for the next step; see `TrainingSession.settings`."""
        live, now = self._live, self._live.now
        optional = [name for name in _SHOWN if name in live.spec.reads]
        return {
            "learning_rate": live.rates.at(live.step + 1),
            "learning_rate_factor": live.rates.factor,
            "batch_size": float(now.batch_size),
            "max_grad_norm": now.max_grad_norm,
            **{name: float(getattr(now, name)) for name in optional},
            **({"lora_frozen": float(bool(live.frozen))} if now.lora_rank else {}),
            **{f"mix.{name}": weight for name, weight in now.mix.items()},
        }

    def note(self, adjustment: Adjustment, detail: str | None = None) -> None:
        """Remember an adjustment, with what decides the weights besides; one that changes nothing is left out."""
        if adjustment.kind != "none":
            self.applied.append((self._live.step, adjustment))
            self._details.append("" if detail is None else f" {detail}")

    def history(self) -> list[str]:
        """Return what made the weights others than those of the unadjusted round, for `checkpoint_id`.

        Learning rates are left out, which `checkpoint_id` sees step by step, and what no step has met. A rollback
        needs none.
        """
        return [
            f"{adjustment} after {step}{detail}"
            for (step, adjustment), detail in zip(self.applied, self._details, strict=True)
            if adjustment.changes_weights
            and adjustment.kind not in ("lr_scale", "stop")
            and (step < self._live.step or adjustment.kind == "rollback")
        ]
