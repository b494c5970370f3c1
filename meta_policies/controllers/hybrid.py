"""`HybridController`: rules decide when there is danger, a policy net decides otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...inner_trainers.messages import require_integer
from ...inner_trainers.recipe import Recipe
from .base import Controller, ControlState, Decision, nothing
from .net import PolicyNet
from .net_controller import NetController
from .rule_file import DEFAULT, load_rules
from .rules import RulesController

CALM_STEPS = 5
"""Optimiser steps after a rule for danger acted in which the net holds still."""


class HybridController:
    """Rules first for danger, the net elsewhere.

    Each decision's candidates carry who proposed them, so that the log says who decided. Satisfies `Controller`.

    Args:
        danger: decides on danger alone, usually a rule set of its own; whatever it does but ``none`` comes first.
        net: decides when ``danger`` does nothing.
        calm: optimiser steps after ``danger`` acted in which the net holds still, so that it does not undo at once what
            saved the round; at least 0.
    """

    def __init__(self, danger: Controller, net: NetController, *, calm: int = CALM_STEPS) -> None:
        self._danger, self._net = danger, net
        self._calm = require_integer("calm", calm, low=0, high=100_000)
        self._acted: int | None = None

    @property
    def name(self) -> str:
        """``"hybrid"``."""
        return "hybrid"

    def begin(self, recipe: Recipe, sources: Sequence[str]) -> None:
        """Forget the last round."""
        self._danger.begin(recipe, sources)
        self._net.begin(recipe, sources)
        self._acted = None

    def decide(self, state: ControlState) -> Decision:
        """Return what the rules for danger do; what the net does when they do nothing."""
        danger, net = self._danger.decide(state), self._net.propose(state)
        candidates = (*danger.candidates, *net.candidates)
        held_back, flags = {**net.held_back, **danger.held_back}, (*danger.flags, *net.flags)
        if danger.chosen.adjustment.kind != "none":
            self._acted = state.step
            chosen = danger.chosen
            if net.chosen.adjustment.kind != "none":
                held_back[net.chosen.by] = f"danger: {chosen.by} came first"
        elif net.chosen.adjustment.kind != "none" and self._is_calm(state.step):
            why = f"danger at step {self._acted}: the net holds still for {self._calm} steps"
            chosen = nothing(self._net.name, why)
            candidates, held_back[net.chosen.by] = (chosen, *candidates), why
        else:
            chosen = net.chosen
        self._net.note(chosen.adjustment, state.step)
        return replace(danger, chosen=chosen, candidates=candidates, held_back=held_back, flags=flags)

    def describe(self) -> Mapping[str, Any]:
        """Return both halves."""
        return {
            "controller": self.name,
            "calm": self._calm,
            "danger": dict(self._danger.describe()),
            "net": dict(self._net.describe()),
        }

    def _is_calm(self, step: int) -> bool:
        return self._acted is not None and step - self._acted < self._calm


def make_hybrid(
    net: PolicyNet | str | Path,
    *,
    rules: str | Path = DEFAULT,
    calm: int = CALM_STEPS,
    threshold: float | None = None,
) -> HybridController:
    """Return a net behind those rules of a rule set that are for danger.

    Args:
        net: as in `NetController`.
        rules: name or file of the rule set.
        calm: as in `HybridController`.
        threshold: as in `NetController`.

    Raises:
        ValueError: a net or rule set that cannot be read, or one without a rule for danger.
    """
    danger = load_rules(rules).of_danger()
    if danger is None:
        raise ValueError(f"rules {rules}: none is marked `danger: true`, so none would come before the net.")
    return HybridController(RulesController(danger), NetController(net, threshold=threshold), calm=calm)
