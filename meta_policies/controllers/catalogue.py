"""Every in-loop controller by the name that the command line takes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from ...inner_trainers.messages import did_you_mean
from ...inner_trainers.recipe import Recipe
from .base import Controller, ControlState, Decision, nothing
from .hybrid import HybridController, make_hybrid
from .net_controller import NetController, shipped_nets
from .rule_file import load_rules, shipped_rule_sets
from .rules import RulesController
from .schedules import SCHEDULES


class NoController:
    """Decides to change nothing."""

    name = "none"

    def __init__(self) -> None:
        self._decision = Decision(nothing(self.name))

    def begin(self, recipe: Recipe, sources: Sequence[str]) -> None:
        """Nothing is remembered."""

    def decide(self, state: ControlState) -> Decision:
        """Return the decision to change nothing."""
        return self._decision

    def describe(self) -> Mapping[str, Any]:
        """Return the name."""
        return {"controller": self.name}


def controller_names() -> tuple[str, ...]:
    """Return the names that need no file, for messages and lists."""
    rule_sets = (f"rules:{name}" for name in shipped_rule_sets())
    nets = (f"{kind}:{name}" for name in shipped_nets() for kind in ("net", "hybrid"))
    return ("none", "rules", *rule_sets, *(f"schedule:{name}" for name in SCHEDULES), *nets)


def controller_summaries() -> dict[str, str]:
    """Return what each name of `controller_names` stands for, in a sentence, for lists."""
    kinds = {
        "none": NoController,
        "rules": RulesController,
        "net": NetController,
        "hybrid": HybridController,
        **{f"schedule:{name}": cls for name, cls in SCHEDULES.items()},
    }
    return {
        name: (kinds[name if name in kinds else name.partition(":")[0]].__doc__ or "").strip().splitlines()[0]
        for name in controller_names()
    }


def make_controller(name: str, **settings: Any) -> Controller:
    """Return the controller of a name.

    Args:
        name: ``none``; ``rules`` or ``rules:NAME`` for a rule set that comes with the package, ``rules:FILE`` for
            one of your own; ``schedule:NAME``; ``net:FILE`` or ``net:NAME`` for a policy net; ``hybrid:FILE`` or
            ``hybrid:NAME`` for one behind the rules for danger.
        settings: keyword arguments of the controller: ``log_only`` of rules, ``target`` of an adaptive KL,
            ``threshold`` of a net and so on.

    Raises:
        ValueError: an unknown name, a file that cannot be read, or a setting that the controller does not have.
    """
    kind, _, rest = name.partition(":")
    if name == "none":
        return _built(name, NoController, settings)
    if kind == "rules":
        rules = load_rules(rest) if rest else load_rules()
        return _built(name, RulesController, settings, rules)
    if kind == "schedule":
        if rest not in SCHEDULES:
            raise ValueError(f"controller: unknown schedule {rest!r}.{did_you_mean(rest, SCHEDULES)}")
        return _built(name, SCHEDULES[rest], settings)
    if kind in ("net", "hybrid"):
        return _built(name, NetController if kind == "net" else make_hybrid, settings, rest)
    raise ValueError(
        f"controller: unknown {name!r}.{did_you_mean(name, controller_names())} A rule set of your own is given as "
        "rules:FILE.yaml, a net as net:FILE.safetensors."
    )


def _built(name: str, cls: Any, settings: Mapping[str, Any], *arguments: Any) -> Controller:
    known = list(inspect.signature(cls).parameters)[len(arguments) :]
    for key in settings:
        if key not in known:
            raise ValueError(f"controller {name!r}: unknown setting {key!r}.{did_you_mean(key, known)}")
    controller: Controller = cls(*arguments, **settings)
    return controller
