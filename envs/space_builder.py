"""Builds the decision space that a file describes, for a task and a trainer or for none yet."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..inner_trainers.messages import did_you_mean
from ..inner_trainers.recipe import STARTS
from ..inner_trainers.yaml_file import Keys
from .constraints import FACTS, Constraint, ConstraintError, parse_condition
from .decision_space import DecisionSpace
from .simplex import MIX_GRID, bounds_problem
from .space_knobs import TYPES, Knobs, knobs_of, place_of
from .space_schema import DecisionSection, MixSection, SpaceProblem

if TYPE_CHECKING:
    from ..inner_trainers.base import InnerTrainer
    from ..inner_trainers.tasks.base import InnerTask

EVERY_SOURCE = "(every source)"
"""What stands for the sources of a task, but those that constraints name, while there is no task."""


def check_section(section: DecisionSection) -> None:
    """Check what needs no task.

    Raises:
        SpaceProblem: what is wrong, and where.
    """
    at: Keys = ("decision_space", "algorithm", "choices")
    if not section.algorithm.choices:
        raise SpaceProblem(at, "expected at least one algorithm, got [].")
    _require_once(section.algorithm.choices, at)
    if section.start is not None:
        at = ("decision_space", "start")
        if not section.start:
            raise SpaceProblem(at, "expected at least one starting checkpoint, got [].")
        _require_once(section.start, at)
        for place, name in enumerate(section.start):
            if name not in STARTS:
                raise SpaceProblem((*at, place), f"no checkpoint is called {name!r}.{did_you_mean(name, STARTS)}")
    if section.data_mix is not None:
        _check_mix(section.data_mix)
    for text, where in _constraints(section):
        try:
            Constraint.parse(text)
        except ConstraintError as error:
            raise SpaceProblem(where, _with_comma_hint(error)) from None
    knobs_of(section)


def _with_comma_hint(error: ConstraintError) -> str:
    """Return a constraint's error; where the text is but a name, with what may have cut it off."""
    hint = "\nInside [ ] a comma begins a new entry; put a constraint that has commas in quotes."
    return str(error) + (hint if re.fullmatch(r"[\w.-]+", error.text) else "")


def _require_once(names: Sequence[str], at: Keys) -> None:
    for place, name in enumerate(names):
        if name in names[:place]:
            raise SpaceProblem((*at, place), f"{name!r} is there twice; leave one out.")


def _check_mix(mix: Mapping[str, MixSection]) -> None:
    at: Keys = ("decision_space", "data_mix")
    if not mix:
        raise SpaceProblem(at, "expected sources with their bounds, got none; leave it out for every source.")
    for name, bounds in mix.items():
        for end, bound in (("low", bounds.low), ("high", bounds.high)):
            if not 0 <= bound <= 1:
                raise SpaceProblem((*at, name, end), f"expected a weight in [0, 1], got {bound:g}.")
            if abs(bound * MIX_GRID - round(bound * MIX_GRID)) > 1e-9:
                raise SpaceProblem(
                    (*at, name, end),
                    f"{bound:.12g} has more than three decimals; weights are multiples of 0.001: write "
                    f"{round(bound, 3):g}.",
                )
        if bounds.low > bounds.high:
            raise SpaceProblem((*at, name), f"low {bounds.low:g} is above high {bounds.high:g}; swap them.")
    problem = bounds_problem({name: (bounds.low, bounds.high) for name, bounds in mix.items()})
    if problem is not None:
        raise SpaceProblem(at, problem)


def _constraints(section: DecisionSection) -> list[tuple[str, Keys]]:
    """Return the constraints of both places with the keys that lead to them."""
    found: list[tuple[str, Keys]] = []
    for texts, at in (
        (section.algorithm.constraints, ("decision_space", "algorithm", "constraints")),
        (section.constraints, ("decision_space", "constraints")),
    ):
        found += [(text, (*at, place)) for place, text in enumerate(texts or ())]
    return found


def build_space(section: DecisionSection, task: InnerTask | None, trainer: InnerTrainer | None) -> DecisionSpace:
    """Return the decision space of a section that `check_section` took.

    Raises:
        SpaceProblem: what is wrong, and where.
    """
    knobs = knobs_of(section)
    algorithms = section.algorithm.choices
    known = trainer.algorithms if trainer is not None else _trl_algorithms()
    for place, name in enumerate(algorithms):
        if name not in known:
            who = "the trainer has" if trainer is not None else "there is"
            at: Keys = ("decision_space", "algorithm", "choices", place)
            raise SpaceProblem(at, f"{who} no algorithm {name!r}.{did_you_mean(name, known)}")
    constraints = _constraints(section)
    sources = _sources(section.data_mix, task, constraints, algorithms)
    conditions = _conditions(knobs, algorithms, {name: _ignored(name, trainer) for name in algorithms}, sources)
    mix = section.data_mix or {}
    usable = {name: sources for name in algorithms}
    if task is not None and trainer is not None:
        usable = {n: tuple(s for s in sources if s in trainer.usable_sources(task, n)) for n in algorithms}
    try:
        space = DecisionSpace(
            algorithms=algorithms,
            sources=sources,
            usable=usable,
            parameters=knobs.parameters,
            fixed=knobs.fixed,
            mix_bounds={name: (float(b.low), float(b.high)) for name, b in mix.items() if (b.low, b.high) != (0, 1)},
            conditions=conditions,
            constraints=tuple(text for text, _ in constraints),
            starts=STARTS if section.start is None else section.start,
            defaults=knobs.defaults,
        )
    except ConstraintError as error:
        where = _place_of_text(error.text, constraints) or ("decision_space",)
        raise SpaceProblem(where, _with_comma_hint(error)) from None
    except ValueError as error:
        text = str(error).removeprefix("decision space: ")
        raise SpaceProblem(place_of(text, knobs), text) from None
    if all(space.problems.values()):
        problem = str(next(iter(space.problems.values())))
        broken = _place_of_text(problem, constraints)
        if broken is not None:
            raise SpaceProblem(broken, f"no recipe of any algorithm can meet it: {problem!r}.")
        shown = "; ".join(f"{name}: {str(why).rstrip('.')}" for name, why in space.problems.items())
        raise SpaceProblem(("decision_space",), f"no recipe of any algorithm can meet the constraints: {shown}.")
    return space


def _sources(
    mix: Mapping[str, MixSection] | None,
    task: InnerTask | None,
    constraints: Sequence[tuple[str, Keys]],
    algorithms: Collection[str],
) -> tuple[str, ...]:
    if task is None:
        return (*_mentioned(constraints, algorithms), EVERY_SOURCE) if mix is None else tuple(mix)
    there = tuple(task.built.sources)
    if mix is None:
        return there
    for name in mix:
        if name not in there:
            raise SpaceProblem(
                ("decision_space", "data_mix", name),
                f"task {task.name!r} has no source {name!r}.{did_you_mean(name, there)}",
                key=True,
            )
    return tuple(name for name in there if name in mix)


def _mentioned(constraints: Sequence[tuple[str, Keys]], algorithms: Collection[str]) -> list[str]:
    """Return the sources that constraints name, where the sources of the task are not known yet."""
    found: list[str] = []
    for text, _ in constraints:
        constraint = Constraint.parse(text)
        names = [str(node.value) for node in constraint.names]
        found += [name.partition(".")[2] for name in names if name.startswith(("mix.", "rows."))]
        if constraint.effect.kind == "exclude":
            excluded = [str(node.value) for node in constraint.effect.parts]
            found += [name for name in excluded if name not in (*algorithms, *STARTS, *_trl_algorithms(), *TYPES)]
    return list(dict.fromkeys(found))


def _conditions(
    knobs: Knobs, algorithms: Sequence[str], ignored: Mapping[str, Collection[str]], sources: Sequence[str]
) -> dict[str, str]:
    """Return when each knob is used: as the file says, and by the algorithms that read it."""
    conditions: dict[str, str] = {}
    for name in list(knobs.parameters):
        readers = [algorithm for algorithm in algorithms if name not in ignored[algorithm]]
        at = knobs.places.get(name)
        if not readers:
            if at is not None:
                raise SpaceProblem(at, f"none of {', '.join(algorithms)} reads it; leave it out.", key=True)
            del knobs.parameters[name]  # of the default space, which has it for others
            continue
        asked = knobs.conditions.get(name)
        if asked is not None and at is not None:
            _require_known(asked, knobs, algorithms, sources, (*at, "when"))
        by_readers = f"algorithm in [{', '.join(readers)}]"
        if asked is not None:
            whole = len(readers) == len(algorithms) or _algorithms_of(asked) <= set(readers)
            conditions[name] = asked if whole else f"({asked}) and {by_readers}"
        elif len(readers) < len(algorithms):
            conditions[name] = by_readers
    return conditions


def _algorithms_of(text: str) -> set[Any]:
    """Return the algorithms that a condition names, where it does nothing else; else one that there is not."""
    node = parse_condition(text)
    head, *others = node.parts or (node,)
    named = node.kind == "in" or (node.kind == "compare" and node.value == "==")
    if named and head.value == "algorithm" and all(other.kind in ("name", "text") for other in others):
        return {other.value for other in others}
    return {""}


def _require_known(text: str, knobs: Knobs, algorithms: Sequence[str], sources: Sequence[str], at: Keys) -> None:
    known = {"algorithm", "start", *TYPES, *FACTS, *(f"{head}.{name}" for name in sources for head in ("mix", "rows"))}
    texts = {choice for parameter in knobs.parameters.values() if parameter.named for choice in parameter.choices}
    try:
        Constraint.parse(text).require_names(known, {*algorithms, *STARTS, *sources}, texts)
    except ConstraintError as error:
        raise SpaceProblem(at, str(error)) from None


def _place_of_text(text: str, constraints: Sequence[tuple[str, Keys]]) -> Keys | None:
    """Return where a constraint stands, by its text as it was read."""
    for written, at in constraints:
        read = Constraint.parse(written).text
        if read == text or read in text:
            return at
    return None


def _trl_algorithms() -> tuple[str, ...]:
    from ..inner_trainers.trl.algorithms import ALGORITHMS

    return tuple(ALGORITHMS)


def _ignored(algorithm: str, trainer: InnerTrainer | None) -> Collection[str]:
    if trainer is not None:
        return trainer.ignored_settings(algorithm)
    from ..inner_trainers.trl.algorithms import ALGORITHMS

    return ALGORITHMS[algorithm].ignored
