"""What a decision space comes to, in plain data: its settings, its size, what is reachable, what constraints remove."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..envs.constraints import FACTS, Constraint
from ..envs.decision_space import DecisionSpace, Parameter
from ..envs.parameter import SIGNIFICANT_DIGITS
from ..envs.simplex import MIX_GRID
from ..envs.space_builder import EVERY_SOURCE
from ..envs.space_compiler import EPOCHS
from ..envs.task_facts import TaskFacts

if TYPE_CHECKING:
    from ..envs.space_file import SpaceFile
    from ..inner_trainers.base import InnerTrainer
    from ..inner_trainers.recipe import Recipe
    from ..inner_trainers.tasks.base import InnerTask

SAMPLES = 10_000
"""Recipes that are drawn to see what constraints remove."""


def summarise_space(
    file: SpaceFile, task: InnerTask | None = None, trainer: InnerTrainer | None = None, samples: int = SAMPLES
) -> dict[str, Any]:
    """Return plain JSON types: settings, sources, starts, algorithms, what constraints remove, the size, and more.

    Args:
        file: the decision-space file.
        task: whose facts decide; None leaves undecided what depends on them.
        trainer: who trains on it; given with the task.
        samples: recipes drawn for each estimate, from a fixed seed.
    """
    space = file.decision_space(task, trainer)
    if task is not None and trainer is not None:
        space = space.bound_to(task, trainer)
        facts = space.facts if space.facts is not None else TaskFacts.of(task, trainer, space.algorithms)
    else:
        facts = TaskFacts()  # nothing is known, but recipes can be made of epochs
    space = space.bind(facts)
    budget = file.budget()
    algorithms = [_algorithm(space, name) for name in space.algorithms]
    reachable = [entry["name"] for entry in algorithms if entry["reachable"]]
    removed, kept = _constraints(space, reachable, facts, samples, known=task is not None)
    return {
        "task": None if task is None else task.name,
        "facts": None if task is None else _facts(facts),
        "settings": [_setting(space, name, reachable) for name in space.parameters],
        "fixed": dict(space.fixed),
        "sources": {name: list(space.mix_bounds.get(name, (0.0, 1.0))) for name in space.sources},
        "starts": list(space.starts),
        "algorithms": algorithms,
        "constraints": removed,
        "size": _size(space, reachable),
        "kept": kept,
        "budget": None if budget is None else dict(vars(budget)),
        "evaluator": file.evaluator_settings(),
        "reward": file.reward() or None,
    }


def grid_values(parameter: Parameter) -> int:
    """Return how many values a knob has on its grid.

    A continuous knob has numbers of 4 significant digits. Of a range that touches or passes 0, where they never end,
    those count that are at least a ten-thousandth of its larger end away from 0, and 0 itself.
    """
    if parameter.choices or parameter.integer:
        return len(parameter.values())
    if parameter.low > 0:
        return _numbers_between(parameter.low, parameter.high)
    least = max(-parameter.low, parameter.high) * 10.0**-SIGNIFICANT_DIGITS
    above = _numbers_between(least, parameter.high) if parameter.high > least else 0
    below = _numbers_between(least, -parameter.low) if -parameter.low > least else 0
    return above + below + 1


def _numbers_between(low: float, high: float) -> int:
    """Return how many numbers of 4 significant digits are in [low, high], its ends among them; 0 < low < high."""
    first = int(10 ** (SIGNIFICANT_DIGITS - 1))

    def up_to(value: float) -> int:
        """Numbers in (0, value] counted from 1e-308: 9,000 in each decade."""
        decade = math.floor(math.log10(value) + 1e-12)
        within = math.floor(value / 10.0**decade * first + 1e-6)
        return (decade + 308) * 9 * first + within - first + 1

    ends = [end for end in (low, high) if float(f"{end:.{SIGNIFICANT_DIGITS}g}") != end]
    on_grid = low not in ends
    return up_to(high) - up_to(low) + on_grid + len(ends)


def mixes_within(bounds: Sequence[tuple[float, float]]) -> int:
    """Return how many mixes on the grid of 1/1000 keep the bounds of their weights, exactly."""
    ways = [1] + [0] * MIX_GRID  # ways[s]: mixes of the sources so far whose counts sum to s
    for low, high in bounds:
        least, most = round(low * MIX_GRID), round(high * MIX_GRID)
        sums = [0]
        for count in ways:
            sums.append(sums[-1] + count)
        ways = [
            sums[max(0, total - least + 1)] - sums[max(0, total - most)] if total >= least else 0
            for total in range(MIX_GRID + 1)
        ]
    return ways[MIX_GRID]


def _facts(facts: TaskFacts) -> dict[str, Any]:
    return {
        "base_model_size": facts.base_model_size,
        "rows": None if facts.rows is None else dict(facts.rows),
        "has_teacher": facts.has_teacher,
        "device": facts.device,
        "device_memory": facts.device_memory,
    }


def _setting(space: DecisionSpace, name: str, reachable: Sequence[str]) -> dict[str, Any]:
    parameter = space.parameters[name]
    data: dict[str, Any] = {"name": name}
    if parameter.choices:
        values = list(parameter.choices)
        legal = space.knob_mask(name, values, reachable)
        data |= {"kind": "choices", "choices": values}
        data["unreachable"] = (
            [value for value, on in zip(values, legal, strict=True) if not on] if reachable else values
        )
    else:
        data |= {"kind": "range", "low": parameter.low, "high": parameter.high}
        data |= {"scale": parameter.scale, "integer": parameter.integer}
    data["default"] = space.defaults.get(name, parameter.decode(0.0))
    data["default_given"] = name in space.defaults
    data["when"] = space.conditions.get(name)
    data["values"] = grid_values(parameter)
    return data


def _algorithm(space: DecisionSpace, name: str) -> dict[str, Any]:
    plan, problem = space.plan(name), space.problems[name]
    if not space.usable[name]:
        problem = "no source has the rows it trains on"
    used = [knob for knob in plan.knobs if not knob.never]
    return {
        "name": name,
        "reachable": problem is None,
        "reason": problem,
        "settings": sorted(knob.name for knob in used),
        "settings_in_part": sorted(knob.name for knob in used if knob.when is not None),
        "sources": list(space.usable[name]),
        "starts": [start for start, on in zip(("base", "best", "latest"), space.start_mask([name]), strict=True) if on],
    }


def _size(space: DecisionSpace, reachable: Sequence[str]) -> dict[str, Any]:
    """Return the number of recipes on the grid within the bounds, before constraints.

    Where the task's sources are not known it is the number for each mix.
    """
    total = 0
    each_mix = EVERY_SOURCE in space.sources
    for name in reachable:
        bounds = [space.mix_bounds.get(source, (0.0, 1.0)) for source in space.usable[name] or space.sources]
        count = len(space.starts) * (1 if each_mix else mixes_within(bounds))
        for knob in space.plan(name).knobs:
            count *= 1 if knob.never else grid_values(knob.parameter)
        total += count
    return {
        "recipes": total if total < 2**53 else None,
        "log10": math.log10(total) if total else None,
        "each_mix": each_mix,
    }


def _constraints(
    space: DecisionSpace, reachable: Sequence[str], facts: TaskFacts, samples: int, *, known: bool
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Return what each constraint removes by itself, and the share that keeps all that can be decided."""
    if not space.constraints:
        return [], None
    free = replace(space, constraints=())
    there = [name for name in space.algorithms if space.usable[name] and free.problems[name] is None]
    rng = np.random.default_rng(0)
    drawn = [free.random_recipe(rng, there) for _ in range(samples)] if there else []
    found = []
    for text in space.constraints:
        alone = replace(space, constraints=(text,))
        unknown = _unknown(text, space, facts, known)
        removed = [name for name in there if alone.problems[name] is not None]
        left = [name for name in there if name not in removed]
        share = _share_removed([] if unknown else drawn, alone, left)
        found.append({"text": text, "unknown": unknown, "algorithms": removed, **share})
    decided = tuple(entry["text"] for entry in found if not entry["unknown"])
    every = _share_removed(drawn, replace(space, constraints=decided), reachable)
    return found, {**every, "share": 1.0 - every["share"]} if every["samples"] else None


def _share_removed(drawn: Sequence[Recipe], held: DecisionSpace, algorithms: Sequence[str]) -> dict[str, Any]:
    """Return the share of the recipes of some algorithms that a space refuses, with its standard error."""
    refused = samples = 0
    for recipe in drawn:
        if recipe.algorithm not in algorithms:
            continue
        samples += 1
        try:
            held.encode(recipe)
        except ValueError:
            refused += 1
    share = refused / samples if samples else 0.0
    error = math.sqrt(share * (1.0 - share) / samples) if samples else 0.0
    return {"share": share, "standard_error": error, "samples": samples}


def _unknown(text: str, space: DecisionSpace, facts: TaskFacts, known: bool) -> list[str]:
    """Return what a constraint asks for and is not known."""
    constraint = Constraint.parse(text)
    names = {str(node.value) for node in constraint.names}
    unknown = [name for name in names if (name in FACTS or name.startswith("rows.")) and facts.value(name) is None]
    if "steps" in names and EPOCHS in space.parameters and not known:
        unknown.append("steps")
    excluded = {str(node.value) for node in constraint.effect.parts} if constraint.effect.kind == "exclude" else set()
    if EVERY_SOURCE in space.sources and (excluded & set(space.sources) or any(n.startswith("mix.") for n in names)):
        unknown.append("the mix")
    return sorted(unknown)


def describe_size(size: Mapping[str, Any]) -> str:
    """Return the size of a space in words: the number, or its power of ten."""
    number = f"{size['recipes']:,}" if size["recipes"] is not None else f"10^{size['log10']:.1f}"
    return f"{number} recipes on the grid{' for each mix' if size['each_mix'] else ''}"
