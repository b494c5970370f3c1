"""Compiles a decision space into one plan per algorithm: constraints become checks, conditions decide what is used."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..inner_trainers.recipe import STARTS
from .constraints import FACTS, Constraint, ConstraintError, Node
from .decision_plan import Bound, Check, DecisionPlan, Knob, MixRule
from .parameter import Parameter
from .programs import Program, Scope, UnknownFactError, number, truth
from .task_facts import TaskFacts

EPOCHS = "epochs"
MAX_STEPS = 100_000
_FIRST = ("gradient_accumulation", "batch_size", "num_generations")
_LAST = (EPOCHS, "steps", "warmup_steps")
_PREFERRED_STARTS = tuple(STARTS.index(name) for name in ("best", "latest", "base"))


@dataclass(frozen=True)
class SpaceParts:
    """What a decision space is compiled from.

    Attributes:
        algorithms: names, in order.
        sources: names, in order.
        usable: algorithm -> positions of the sources it can use.
        parameters: knob -> range, in the order of the action's coordinates.
        constants: recipe field -> its value throughout the space.
        defaults: recipe field -> its value where a knob is not used.
        mix_bounds: source -> lower and upper bound.
        conditions: knob -> when it is used.
        constraints: what must hold.
        starts: allowed starts.
        facts: what is known of the task; None for nothing.
        groups: whether generations divide the batch for every algorithm; else for those that group alone.
    """

    algorithms: Sequence[str]
    sources: Sequence[str]
    usable: Mapping[str, Sequence[int]]
    parameters: Mapping[str, Parameter]
    constants: Mapping[str, Any]
    defaults: Mapping[str, Any]
    mix_bounds: Mapping[str, tuple[float, float]]
    conditions: Mapping[str, Node]
    constraints: Sequence[Constraint]
    starts: Sequence[str]
    facts: TaskFacts | None
    groups: bool

    @property
    def slots(self) -> dict[str, int]:
        """Name -> slot."""
        names = ["start", *[f"mix.{name}" for name in self.sources], *self.parameters]
        return {name: slot for slot, name in enumerate(names)}

    def known_names(self) -> set[str]:
        """Return the names that constraints can use."""
        names = {"algorithm", "start", *self.parameters, *self.constants, *FACTS, "steps"}
        for source in self.sources:
            names |= {f"mix.{source}", f"rows.{source}"}
        return names

    def excludable(self) -> set[str]:
        """Return the names that can stand after ``exclude``."""
        return {*self.algorithms, *STARTS, *self.sources}


@dataclass(frozen=True)
class _Clause:
    """One thing that must hold where its condition does."""

    constraint: Constraint
    effect: Node

    @property
    def condition(self) -> Node | None:
        return self.constraint.condition

    def implication(self) -> Node:
        if self.condition is None:
            return self.effect
        return Node("or", "or", (Node("not", "not", (self.condition,)), self.effect))


class SpaceCompiler:
    """Compiles one space; `plan` gives the plan of an algorithm.

    Args:
        parts: the space.

    Raises:
        ConstraintError: a name that means nothing, or a constraint on the mix that bounds no single source.
    """

    def __init__(self, parts: SpaceParts) -> None:
        self._parts, self._slots = parts, parts.slots
        for constraint in parts.constraints:
            texts = {choice for p in parts.parameters.values() if p.named for choice in p.choices}
            texts |= {value for value in parts.constants.values() if isinstance(value, str)}
            constraint.require_names(parts.known_names(), parts.excludable(), texts)
        self._clauses = [_Clause(c, effect) for c in parts.constraints for effect in _conjuncts(c.effect)]
        self._order = self._decision_order()
        self._rank = {name: rank for rank, name in enumerate(self._order)}

    def plan(self, algorithm: str) -> DecisionPlan:
        """Return the plan of an algorithm."""
        parts = self._parts
        refused = {} if parts.facts is None else parts.facts.refused.get(algorithm, {})
        steps = self._steps(algorithm)
        scope = self._scope(algorithm, steps)
        knobs = {name: self._knob(name, scope, refused.get(name, {})) for name in self._order}
        scope = self._scope(algorithm, steps, [name for name, knob in knobs.items() if knob.never])
        mix_rules: list[MixRule] = []
        start_checks: list[Check] = []
        problem: str | None = None
        for clause in self._clauses:
            problem = self._add(clause, algorithm, scope, knobs, mix_rules, start_checks) or problem
        self._add_groups(algorithm, scope, knobs)
        self._add_warmup(scope, knobs)
        self._join(knobs)
        bounds = [parts.mix_bounds.get(name, (0.0, 1.0)) for name in parts.sources]
        starts = [start for start in _PREFERRED_STARTS if STARTS[start] in parts.starts]
        usable = parts.usable[algorithm] or range(len(parts.sources))
        return DecisionPlan(
            [knobs[name] for name in self._order],
            parts.sources,
            usable,
            bounds,
            mix_rules,
            starts,
            start_checks,
            len(self._slots),
            problem,
            steps,
        )

    # Names ------------------------------------------------------------------------------------------------------------

    def _scope(self, algorithm: str, steps: Program | None, unused: Collection[str] = ()) -> Scope:
        parts, slots = self._parts, self._slots

        def name(word: str) -> Program:
            if word in unused:
                return Program.of(self._unused_value(word))
            if word in slots:
                slot = slots[word]
                return Program(lambda values: values[slot], frozenset([word]))
            if word == "algorithm":
                return Program.of(algorithm)
            if word == "steps" and EPOCHS in slots:
                if steps is None:
                    raise UnknownFactError(word)
                return steps
            if word in parts.constants:
                return Program.of(parts.constants[word])
            if word in FACTS or word.startswith("rows."):
                known = None if parts.facts is None else parts.facts.value(word)
                if known is None:
                    raise UnknownFactError(word)
                return Program.of(known)
            raise KeyError(word)

        def position(variable: str, text: str) -> Any:
            if variable == "start":
                return STARTS.index(text) if text in STARTS else -1
            parameter = parts.parameters.get(variable)
            if parameter is not None and parameter.named:
                return parameter.choices.index(text) if text in parameter.choices else -1
            return text

        return Scope(name, position)

    def _steps(self, algorithm: str) -> Program | None:
        """Return the program of the optimiser steps that epochs come to; None where steps are decided themselves.

        ``ceil(epochs x rows / rows per step)``: the rows are those of the mix's sources that the algorithm trains on,
        the rows per step the batch, or the prompts of a batch where completions of one prompt are grouped.
        """
        parts, slots = self._parts, self._slots
        if EPOCHS not in parts.parameters or parts.facts is None:
            return None
        rows = [float(parts.facts.training_rows.get(algorithm, {}).get(name, 0)) for name in parts.sources]
        grouped = algorithm in parts.facts.grouped
        first, epochs = 1, slots[EPOCHS]
        readers = [self._reader(name) for name in ("batch_size", "gradient_accumulation")]
        generations = self._reader("num_generations") if grouped else Program.of(1)

        def run(values: Sequence[Any]) -> Any:
            total: Any = 0.0
            for place, count in enumerate(rows):
                total = total + (values[first + place] > 0) * count
            per_step = readers[0].run(values) * readers[1].run(values) / generations.run(values)
            if (
                isinstance(total, np.ndarray)
                or isinstance(per_step, np.ndarray)
                or isinstance(values[epochs], np.ndarray)
            ):
                wanted = np.ceil(values[epochs] * total / np.maximum(per_step, 1.0))
                return np.clip(wanted, 1, MAX_STEPS).astype(np.int64)
            return int(min(MAX_STEPS, max(1, math.ceil(values[epochs] * total / max(per_step, 1.0)))))

        needs = frozenset([EPOCHS, *[f"mix.{name}" for name in parts.sources]])
        return Program(run, needs.union(generations.needs, *(reader.needs for reader in readers)))

    def _reader(self, name: str) -> Program:
        if name not in self._slots:
            return Program.of(self._parts.constants[name])
        slot = self._slots[name]
        return Program(lambda values: values[slot], frozenset([name]))

    # Order ------------------------------------------------------------------------------------------------------------

    def _decision_order(self) -> list[str]:
        """Return the knobs so that each comes after those that what bounds it mentions, as far as that is possible."""
        names = list(self._parts.parameters)
        base = sorted(names, key=lambda name: (_place(name), name))
        before: dict[str, set[str]] = {name: set() for name in names}
        for clause in self._clauses:
            mentioned = self._mentioned(clause.condition, clause.effect)
            target = self._target(clause.effect)
            if target is None and mentioned:
                target = max(mentioned, key=base.index)
            if target is not None:
                before[target] |= mentioned - {target}
        for knob, node in self._parts.conditions.items():
            before[knob] |= self._mentioned(node) - {knob}
        order: list[str] = []
        left = list(base)
        while left:
            ready = next((name for name in left if not before[name] & set(left)), left[0])
            order.append(ready)
            left.remove(ready)
        return order

    def _mentioned(self, *nodes: Node | None) -> set[str]:
        found: set[str] = set()
        for node in nodes:
            for name in () if node is None else node.names():
                if name.value in self._parts.parameters:
                    found.add(str(name.value))
                elif name.value == "steps" and EPOCHS in self._parts.parameters:
                    found |= {EPOCHS, *_FIRST} & set(self._parts.parameters)
        return found

    def _target(self, effect: Node) -> str | None:
        """Return the knob that stands alone on one side of a comparison."""
        if effect.kind not in ("compare", "in"):
            return None
        sides = effect.parts[:1] if effect.kind == "in" else effect.parts
        for side, node in enumerate(sides):
            if node.kind == "name" and node.value in self._parts.parameters:
                others = [part for place, part in enumerate(effect.parts) if place != side]
                if node.value not in self._mentioned(*others):
                    return str(node.value)
        return None

    # Checks -----------------------------------------------------------------------------------------------------------

    def _knob(self, name: str, scope: Scope, refused: Mapping[Any, str]) -> Knob:
        parameter = self._parts.parameters[name]
        knob = Knob(name, self._slots[name], parameter, self._unused_value(name))
        positions = [parameter.choices.index(c) if parameter.named else c for c in refused if c in parameter.choices]
        knob.refused = frozenset(positions)
        if name in self._parts.conditions:
            used = truth(self._parts.conditions[name], scope, unknown=True)
            if used.fixed:
                knob.never = not used.constant
            else:
                knob.when = used
        return knob

    def _unused_value(self, name: str) -> Any:
        """Return what the slot of a knob holds where it is not used."""
        unused, parameter = self._parts.defaults[name], self._parts.parameters[name]
        if parameter.named:
            return parameter.choices.index(unused) if unused in parameter.choices else -1
        return unused

    def _add(
        self,
        clause: _Clause,
        algorithm: str,
        scope: Scope,
        knobs: Mapping[str, Knob],
        mix_rules: list[MixRule],
        start_checks: list[Check],
    ) -> str | None:
        """Add what a clause asks to where it is checked; return why the algorithm is not legal at all, if it is not."""
        text = clause.constraint.text
        for effect in (
            self._excluded(clause, algorithm, mix_rules, scope) if clause.effect.kind == "exclude" else [clause]
        ):
            holds = self._where_used(truth(effect.implication(), scope, unknown=True), effect.effect, knobs)
            if holds.fixed:
                if not holds.constant:
                    return text
                continue
            deciding = [name for name in self._order if name in holds.needs]
            if not deciding:
                if holds.needs == {"start"}:
                    start_checks.append(Check(text, holds, "start"))
                else:
                    mix_rules.extend(self._mix_rules(effect, scope))
                continue
            last = knobs[deciding[-1]]
            last.checks.append(Check(text, holds, last.name))
            last.bounds += self._bounds(effect, scope, last.name)
        return None

    def _where_used(self, holds: Program, effect: Node, knobs: Mapping[str, Knob]) -> Program:
        """Return a check that asks nothing while a knob of which it asks something is not used."""
        named = [knobs[str(node.value)] for node in effect.names() if node.value in knobs]
        if any(knob.never for knob in named):
            return Program.of(True)
        whens = [knob.when for knob in named if knob.when is not None]
        if not whens or holds.fixed:
            return holds
        run, runs = holds.run, [when.run for when in whens]

        def asked(values: Sequence[Any]) -> Any:
            result = run(values)
            for when in runs:
                result = result | (when(values) ^ True)
            return result

        return Program(asked, holds.needs.union(*(when.needs for when in whens)))

    def _excluded(self, clause: _Clause, algorithm: str, mix_rules: list[MixRule], scope: Scope) -> Iterable[_Clause]:
        """Yield what excluding algorithms and starts asks to hold; add excluded sources to the rules of the mix."""
        parts = self._parts
        for node in clause.effect.parts:
            name = str(node.value)
            if name in parts.algorithms:
                if name == algorithm:
                    yield _Clause(clause.constraint, _never(node))
            elif name in STARTS:
                yield _Clause(
                    clause.constraint,
                    Node("compare", "!=", (Node("name", "start"), Node("text", name)), node.column),
                )
            else:
                effect = Node("compare", "<=", (Node("name", f"mix.{name}"), Node("number", 0.0)), node.column)
                mix_rules.extend(self._mix_rules(_Clause(clause.constraint, effect), scope))

    def _mix_rules(self, clause: _Clause, scope: Scope) -> list[MixRule]:
        effect, text = clause.effect, clause.constraint.text
        applies = Program.of(True) if clause.condition is None else truth(clause.condition, scope, unknown=False)
        if effect.kind == "compare" and effect.value != "!=":
            for side in (0, 1):
                node, other = effect.parts[side], effect.parts[1 - side]
                if node.kind != "name" or not str(node.value).startswith("mix."):
                    continue
                try:
                    limit = number(other, scope)
                except UnknownFactError:
                    return []
                if limit.needs | applies.needs <= {"start"}:
                    upper, lower = _sides(str(effect.value), flipped=side == 1)
                    source = list(self._parts.sources).index(str(node.value).removeprefix("mix."))
                    if effect.value in ("<", ">"):  # the next point of the grid
                        limit = _shifted(limit, -1e-5 if upper else 1e-5)
                    return [MixRule(text, source, limit, applies, upper, lower)]
        raise ConstraintError(
            text,
            effect.column,
            "a constraint on the mix bounds one source by a number, such as mix.math <= 0.4, and can depend on the "
            "algorithm, the start and the task only.",
        )

    def _bounds(self, clause: _Clause, scope: Scope, knob: str) -> list[Bound]:
        """Return what a repair of a knob tries first to make a clause hold."""
        effect = clause.effect
        applies = Program.of(True) if clause.condition is None else truth(clause.condition, scope, unknown=False)
        earlier = {"start", *[f"mix.{s}" for s in self._parts.sources], *self._order[: self._rank[knob]]}
        if not applies.needs <= earlier or effect.kind not in ("compare", "in"):
            return []
        found = []
        if effect.kind == "in":
            if effect.parts[0].value == knob:
                for item in effect.parts[1:]:
                    if item.kind == "number":
                        found.append(Bound(knob, Program.of(item.value), applies, False, False))
            return found
        for side in (0, 1):
            node, other = effect.parts[side], effect.parts[1 - side]
            if node.kind == "name" and node.value == knob and other.kind != "text":
                try:
                    limit = number(other, scope)
                except (UnknownFactError, KeyError):
                    continue
                if limit.needs <= earlier and not isinstance(limit.constant, str):
                    upper, lower = _sides(str(effect.value), flipped=side == 1)
                    found.append(Bound(knob, limit, applies, upper, lower))
        return found

    def _add_groups(self, algorithm: str, scope: Scope, knobs: Mapping[str, Knob]) -> None:
        """Make generations divide the sequences of a step, where completions of one prompt are compared."""
        parts = self._parts
        grouped = parts.facts is not None and algorithm in parts.facts.grouped
        unused = "num_generations" in knobs and knobs["num_generations"].never
        if not grouped and (unused or not parts.groups):
            return
        if not any(name in knobs and not knobs[name].never for name in _FIRST):
            return
        accumulation, size, generations = (
            Program.of(self._unused_value(name)) if name in knobs and knobs[name].never else self._reader(name)
            for name in _FIRST
        )
        text = "num_generations of at least 2 divides batch_size x gradient_accumulation"
        if "num_generations" in knobs and not unused:
            options = [int(n) for n in parts.parameters["num_generations"].values() if n >= 2]

            def some(values: Sequence[Any]) -> Any:
                sequences = size.run(values) * accumulation.run(values)
                result = sequences % options[0] == 0 if options else sequences != sequences
                for option in options[1:]:
                    result = result | (sequences % option == 0)
                return result

            needs = size.needs | accumulation.needs
            if needs:
                last = max(needs, key=self._rank.__getitem__)
                knobs[last].checks.append(Check(text, Program(some, needs), last))

        def divides(values: Sequence[Any]) -> Any:
            count = generations.run(values)
            return (count >= 2) & (size.run(values) * accumulation.run(values) % count == 0)

        needs = size.needs | accumulation.needs | generations.needs
        last = max(needs, key=self._rank.__getitem__)
        knobs[last].checks.append(Check(text, Program(divides, needs), last))

    def _add_warmup(self, scope: Scope, knobs: Mapping[str, Knob]) -> None:
        """Keep warm-up steps within the steps."""
        if "warmup_steps" not in knobs:
            return
        try:
            steps = scope.name("steps")
        except UnknownFactError:
            return
        warmup = self._slots["warmup_steps"]
        within = Program(lambda values: values[warmup] <= steps.run(values), steps.needs | {"warmup_steps"})
        names = [name for name in self._order if name in within.needs]
        knobs[names[-1]].checks.append(Check("warmup_steps <= steps", within, names[-1]))
        if names[-1] == "warmup_steps":
            knobs["warmup_steps"].bounds.append(Bound("warmup_steps", steps, Program.of(True), True, False))

    def _join(self, knobs: Mapping[str, Knob]) -> None:
        """Tell each knob which others share constraints with it, and which slots its legality reads."""
        clusters: dict[str, set[str]] = {name: {name} for name in knobs}
        for knob in knobs.values():
            programs = [check.holds for check in knob.checks]
            programs += [part for bound in knob.bounds for part in (bound.limit, bound.applies)]
            reads = frozenset[str]().union(*(program.needs for program in programs))
            knob.reads = tuple(sorted(self._slots[name] for name in reads if name != knob.name))
            linked = reads if knob.when is None else reads | knob.when.needs
            if not knob.checks and knob.when is None:
                continue
            joined = set().union(*(clusters[name] for name in linked if name in knobs), clusters[knob.name])
            for name in joined:
                clusters[name] = joined
        for name, knob in knobs.items():
            cluster = clusters[name]
            if len(cluster) > 1 or not knob.free:
                knob.together = tuple(self._slots[other] for other in self._order if other in cluster)


def _conjuncts(effect: Node) -> tuple[Node, ...]:
    """Return the parts of an effect that must each hold."""
    if effect.kind != "and":
        return (effect,)
    return tuple(inner for part in effect.parts for inner in _conjuncts(part))


def _never(node: Node) -> Node:
    return Node("compare", "==", (Node("number", 0.0), Node("number", 1.0)), node.column)


def _sides(symbol: str, flipped: bool) -> tuple[bool, bool]:
    """Return whether a comparison bounds its left (or, flipped, its right) side from above and from below."""
    if symbol == "==":
        return True, True
    if symbol == "!=":
        return False, False
    above = symbol in ("<", "<=")
    return above is not flipped, above is flipped


def _shifted(limit: Program, by: float) -> Program:
    if limit.fixed:
        return Program.of(limit.constant + by)
    run = limit.run
    return Program(lambda values: run(values) + by, limit.needs)


def _place(name: str) -> int:
    if name in _FIRST:
        return _FIRST.index(name)
    return len(_FIRST) + 1 + _LAST.index(name) if name in _LAST else len(_FIRST)


__all__ = ["EPOCHS", "MAX_STEPS", "SpaceCompiler", "SpaceParts"]
