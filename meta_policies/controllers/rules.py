"""Rules as a controller: conditions that switch on and off, and which of the actions they ask for is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ...inner_trainers.adjustments import CATALOGUE, CATALOGUE_NAMES, KINDS, Adjustment, catalogue_index
from ...inner_trainers.messages import did_you_mean, require_integer, require_number
from ...inner_trainers.recipe import Recipe
from ...inner_trainers.trl.algorithms import ALGORITHMS
from .base import Candidate, ControlState, Decision, catalogue_candidate, nothing
from .closures import View
from .damping import DAMPING_WINDOW, Damping, direction_of
from .expressions import RESERVED, Condition

MAX_RULES = 100


@dataclass(frozen=True)
class Rule:
    """One rule.

    It switches on after ``when`` held at ``agree`` looks in a row, and off when ``until`` holds (without one: when
    ``when`` no longer does). While it is on it asks for its action, at most once in ``cooldown`` steps.

    Attributes:
        name: what logs call it.
        when: on condition; see `expressions`.
        action: name of a catalogue entry, or an `Adjustment`, which need not be in the catalogue.
        reason: why, in words a person can read.
        until: off condition; None for the opposite of ``when``.
        priority: among rules that ask at the same look the highest is done, in [-1000, 1000].
        confidence: decides between equal priorities, and is shown, in [0, 1].
        cooldown: steps between two times, in [0, 100000].
        agree: looks in a row at which ``when`` must hold, in [1, 1000].
        at_most: times per round, in [1, 100000]; None for any number.
        algorithms: those it is for; empty for all.
        danger: whether it prevents harm: its action is not held back as the opposite of a rule's that does not, and
            hybrid controllers let it go before their net.
    """

    name: str
    when: str
    action: str | Adjustment
    reason: str
    until: str | None = None
    priority: int = 0
    confidence: float = 1.0
    cooldown: int = 10
    agree: int = 1
    at_most: int | None = None
    algorithms: tuple[str, ...] = ()
    danger: bool = False

    def __post_init__(self) -> None:
        """Check every field but the conditions, which need the rule set's constants.

        Raises:
            ValueError: a field that is not as described, named first.
        """
        put = object.__setattr__
        for name in ("name", "reason"):
            text = getattr(self, name)
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"{name}: expected words, got {text!r}.")
        if isinstance(self.action, str):
            catalogue_index(self.action)
        elif not isinstance(self.action, Adjustment):
            raise ValueError(f"action: expected the name of an adjustment, got {self.action!r}.")
        put(self, "priority", require_integer("priority", self.priority, low=-1000, high=1000))
        put(self, "confidence", require_number("confidence", self.confidence, low=0, high=1))
        put(self, "cooldown", require_integer("cooldown", self.cooldown, low=0, high=100_000))
        put(self, "agree", require_integer("agree", self.agree, low=1, high=1000))
        if self.at_most is not None:
            put(self, "at_most", require_integer("at_most", self.at_most, low=1, high=100_000))
        if isinstance(self.algorithms, str) or not isinstance(self.algorithms, Sequence):
            raise ValueError(f"algorithms: expected a list of names, got {self.algorithms!r}.")
        put(self, "algorithms", tuple(self.algorithms))
        for algorithm in self.algorithms:
            if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
                raise ValueError(f"algorithms: unknown {algorithm!r}.{did_you_mean(str(algorithm), ALGORITHMS)}")
        if not isinstance(self.danger, bool):
            raise ValueError(f"danger: expected true or false, got {self.danger!r}.")

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types, without what is at its default."""
        data: dict[str, Any] = {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value != entry.default:
                data[entry.name] = value
        if isinstance(self.action, Adjustment):
            data["action"] = self.action.to_dict()
        if self.algorithms:
            data["algorithms"] = list(self.algorithms)
        return data


@dataclass(frozen=True)
class RuleSet:
    """Rules that go together.

    Attributes:
        name: what tables and logs call it.
        rules: between 1 and `MAX_RULES`, with different names.
        constants: names that conditions may use for numbers.
        damping: steps for which an adjustment's opposite is held back the first time, in [0, 100000]; see `Damping`.
        log_only: whether what would be done is only said, never done.
    """

    name: str
    rules: tuple[Rule, ...]
    constants: Mapping[str, float] = field(default_factory=dict)
    damping: int = DAMPING_WINDOW
    log_only: bool = False

    def __post_init__(self) -> None:
        """Check names and constants, and that every condition can be read.

        Raises:
            ValueError: what is wrong, with the rule's name.
        """
        put = object.__setattr__
        if not isinstance(self.name, str) or not self.name.strip():
            raise ValueError(f"name: expected words, got {self.name!r}.")
        put(self, "rules", tuple(self.rules))
        if not 1 <= len(self.rules) <= MAX_RULES:
            raise ValueError(f"rules: expected between 1 and {MAX_RULES}, got {len(self.rules)}.")
        names = [rule.name for rule in self.rules]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"rules: two are called {name!r}; give each a name of its own.")
        constants = {}
        for name, value in self.constants.items():
            check_constant_name(name)
            constants[name] = require_number(f"constants.{name}", value)
        put(self, "constants", constants)
        put(self, "damping", require_integer("damping", self.damping, low=0, high=100_000))
        if not isinstance(self.log_only, bool):
            raise ValueError(f"log_only: expected true or false, got {self.log_only!r}.")
        for rule in self.rules:
            for key, text in (("when", rule.when), ("until", rule.until)):
                if text is not None:
                    try:
                        Condition(text, constants)
                    except ValueError as error:
                        raise ValueError(f"rule {rule.name!r}: {key}: {error}") from None

    def of_danger(self) -> RuleSet | None:
        """Return the rules that prevent harm alone; None when there are none."""
        rules = tuple(rule for rule in self.rules if rule.danger)
        return replace(self, name=f"{self.name}, danger", rules=rules) if rules else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            "name": self.name,
            "constants": dict(self.constants),
            "damping": self.damping,
            "log_only": self.log_only,
            "rules": [rule.to_dict() for rule in self.rules],
        }


def check_constant_name(name: object) -> None:
    """Refuse a name that conditions could not use, or that means something else to them.

    Raises:
        ValueError: such a name.
    """
    if not isinstance(name, str) or not name.isidentifier() or not name.isascii():
        raise ValueError(f"constants: a name has letters, digits and _ alone, got {name!r}.")
    if name in RESERVED or name in ("and", "or", "not"):
        raise ValueError(f"constants: {name!r} means something else in conditions; choose another name.")


class _Running:
    """One rule in the round that runs."""

    __slots__ = (
        "agree",
        "agreeing",
        "candidate",
        "direction",
        "done",
        "kinds",
        "last",
        "on",
        "rule",
        "shown",
        "turns_off",
        "turns_on",
    )

    def __init__(self, rule: Rule, when: Condition, until: Condition | None, sources: Sequence[str]) -> None:
        self.rule, self.agree = rule, rule.agree
        self.turns_on = when.holds
        self.turns_off = None if until is None else until.holds
        self.candidate: Candidate | None
        if isinstance(rule.action, Adjustment):
            known = rule.action.source is None or rule.action.source in sources
            self.candidate = Candidate(None, rule.action, rule.name, rule.reason, rule.confidence) if known else None
        else:
            index = catalogue_index(rule.action)
            self.candidate = catalogue_candidate(index, sources, rule.name, rule.reason, rule.confidence)
        self.shown = nothing(rule.name, rule.reason) if self.candidate is None else self.candidate
        self.kinds: tuple[int, ...] = ()
        if self.candidate is not None:
            action, kind = self.candidate.action, self.candidate.adjustment.kind
            same_kind = (index for index, entry in enumerate(CATALOGUE) if entry.kind == kind)
            self.kinds = tuple(same_kind) if action is None else (action,)
        self.direction = None if self.candidate is None else direction_of(self.candidate.adjustment)
        self.on, self.agreeing, self.done = False, 0, 0
        self.last: int | None = None

    def update(self, view: View) -> None:
        """Switch it on or off.

        Raises:
            ArithmeticError: a condition came to no finite number; it counts as not true.
        """
        if self.on and self.turns_off is not None:
            if self.turns_off(view):
                self.on, self.agreeing = False, 0
            return
        try:
            holds = self.turns_on(view)
        except ArithmeticError:
            self.on, self.agreeing = False, 0
            raise
        self.agreeing = self.agreeing + 1 if holds else 0
        self.on = self.agreeing >= self.agree


class RulesController:
    """Rules: what the first by priority asks for that is on, legal, and neither cooling down nor damped.

    Args:
        rules: what to follow.
        log_only: whether what would be done is only said, never done; None for what the rule set says.
    """

    def __init__(self, rules: RuleSet, log_only: bool | None = None) -> None:
        self.rules = rules if log_only is None else replace(rules, log_only=log_only)
        # stable: of equal priority and confidence, the one that stands first
        order = sorted(rules.rules, key=lambda rule: (-rule.priority, -rule.confidence))
        constants = rules.constants
        self._compiled = [
            (rule, Condition(rule.when, constants), None if rule.until is None else Condition(rule.until, constants))
            for rule in order
        ]
        self._quiet = Decision(nothing(self.name, "no rule asks for anything"))
        self._all_held_back = nothing(self.name, "every rule that asks for something is held back")
        self._running: list[_Running] = []
        self._view, self._damping = View(), Damping(rules.damping)
        self._said: set[str] = set()

    @property
    def name(self) -> str:
        """``rules`` and the rule set's name."""
        return f"rules:{self.rules.name}"

    def begin(self, recipe: Recipe, sources: Sequence[str]) -> None:
        """Forget the last round; a new one is about to start."""
        self._running = []
        needs: dict[str, int] = {}
        for rule, when, until in self._compiled:
            if not rule.algorithms or recipe.algorithm in rule.algorithms:
                self._running.append(_Running(rule, when, until, sources))
                for condition in (when,) if until is None else (when, until):
                    for signal, kept in condition.needs.items():
                        needs[signal] = max(kept, needs.get(signal, 0))
        self._view, self._damping = View(needs), Damping(self.rules.damping)
        self._said = set()

    def decide(self, state: ControlState) -> Decision:
        """Return what the rules ask for before the next step."""
        view = self._view.look(state)
        flags: list[str] = []
        asking: list[_Running] = []
        for entry in self._running:
            try:
                entry.update(view)
            except ArithmeticError as error:
                self._say_once(
                    flags,
                    entry.rule.name,
                    f"rule {entry.rule.name!r}: its condition came to no number at step {state.step} ({error}) and "
                    "counts as unknown there",
                )
            if entry.on:
                asking.append(entry)
        if not asking:
            return replace(self._quiet, flags=tuple(flags)) if flags else self._quiet
        return self._choose(state, asking, flags)

    def _choose(self, state: ControlState, asking: Sequence[_Running], flags: list[str]) -> Decision:
        chosen: _Running | None = None
        held_back: dict[str, str] = {}
        for entry in asking:
            reason = self._reason_against(entry, state, flags)
            if reason is None and chosen is not None:
                reason = f"lower priority than {chosen.rule.name!r}"
            if reason is not None:
                held_back[entry.rule.name] = reason
            elif chosen is None:
                chosen = entry
        candidates = tuple([entry.shown for entry in asking])
        if chosen is None:
            return Decision(self._all_held_back, candidates, held_back, tuple(flags))
        chosen.done, chosen.last = chosen.done + 1, state.step
        if chosen.direction is not None:
            self._damping.did(*chosen.direction, state.step, chosen.rule.name, chosen.rule.danger)
        if not self.rules.log_only:
            return Decision(chosen.shown, candidates, held_back, tuple(flags))
        held_back[chosen.rule.name] = "log only"
        would = f"log only: {chosen.rule.name!r} would have done {label(chosen.shown)}"
        return Decision(nothing(self.name, would), candidates, held_back, tuple(flags))

    def _reason_against(self, entry: _Running, state: ControlState, flags: list[str]) -> str | None:
        """Return why a rule's action is not done now; None when it can be."""
        rule = entry.rule
        if entry.candidate is None:
            return "masked: the round has no such source"
        if rule.at_most is not None and entry.done >= rule.at_most:
            return f"done {entry.done} times, as often as allowed"
        if entry.last is not None and state.step - entry.last < rule.cooldown:
            return f"cooldown: {rule.cooldown - (state.step - entry.last)} more steps"
        if not any(state.legal[index] for index in entry.kinds):
            return "masked: cannot be applied now"
        if entry.direction is None:
            return None
        waits = self._damping.waits(*entry.direction, state.step, rule.danger)
        if waits is None:
            return None
        until, other = waits
        self._say_once(
            flags,
            f"{rule.name}/{other}",
            f"rules {other!r} and {rule.name!r} undo each other; at step {state.step} the second is held back until "
            f"step {until}, and for longer each time",
        )
        return f"damped: would undo what {other!r} did; waits until step {until}"

    def _say_once(self, flags: list[str], key: str, sentence: str) -> None:
        if key not in self._said:
            self._said.add(key)
            flags.append(sentence)

    def describe(self) -> Mapping[str, Any]:
        """Return the rule set."""
        return {"controller": "rules", **self.rules.to_dict()}


def label(candidate: Candidate) -> str:
    """Return the catalogue's name of what a candidate would do; for an adjustment that is not in it, its words."""
    return str(candidate.adjustment) if candidate.action is None else CATALOGUE_NAMES[candidate.action]


def adjustment_of(data: Mapping[str, Any]) -> Adjustment:
    """Return the adjustment that a rule file's mapping describes.

    Raises:
        ValueError: unknown keys, kinds or values; what has no kind.
    """
    if "kind" not in data:
        raise ValueError(f"action: expected a kind, with a value where it takes one.{did_you_mean('', KINDS)}")
    return Adjustment.from_dict(data)
