"""What may be tried: the single source of the action space, of encode/decode, and of what is legal."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np

from ..inner_trainers.messages import did_you_mean
from ..inner_trainers.recipe import STARTS, Recipe
from .constraints import Constraint, Node, parse_condition
from .decision_plan import DecisionPlan
from .parameter import Parameter
from .simplex import MIX_GRID, bounds_problem, on_simplex_grid, project_to_simplex
from .space_batch import RecipeBatch, decode_batch, encode_batch, mask_batch
from .space_compiler import EPOCHS, SpaceCompiler, SpaceParts
from .space_fields import CASTS, DEFAULT_PARAMETERS, KNOBS, SpaceFields
from .space_masks import SpaceMasks
from .task_facts import TaskFacts, refused_choices

if TYPE_CHECKING:
    from ..inner_trainers.base import InnerTrainer
    from ..inner_trainers.tasks.base import InnerTask

STOP = 0
"""Index of ``stop`` in the algorithm choice; it is always legal."""

COSTLY_KNOBS = ("batch_size", "gradient_accumulation", "kl_coef", "lora_rank", "max_length", "packing")
"""Knobs that change what an optimiser step can cost; all but ``lora_rank`` cost the least at their lowest value."""


@dataclass(frozen=True)
class DecisionSpace(SpaceFields):
    """The recipes a search may try on a family of tasks; `SpaceFields` has its arguments.

    Raises:
        ValueError: as `SpaceFields`, or a condition or constraint that cannot be read.
    """

    def __post_init__(self) -> None:
        """Check the fields, and compile what is legal: what cannot be compiled is refused now."""
        super().__post_init__()
        self._plans  # noqa: B018

    # Plans ------------------------------------------------------------------------------------------------------------

    @cached_property
    def _parts(self) -> SpaceParts:
        constants = {n: self.fixed.get(n, default) for n, default in KNOBS.items() if n not in self.parameters}
        if EPOCHS in self.parameters:
            del constants["steps"]
        unused = {**KNOBS, EPOCHS: 1}
        conditions: dict[str, Node] = {}
        for name, text in self.conditions.items():
            try:
                conditions[name] = parse_condition(text)
            except ValueError as error:
                raise ValueError(f"decision space: when {name} is used: {error}") from error
        return SpaceParts(
            algorithms=self.algorithms,
            sources=self.sources,
            usable={name: [self.sources.index(s) for s in found] for name, found in self.usable.items()},
            parameters=self.parameters,
            constants=constants,
            defaults={name: unused[name] for name in self.parameters},
            mix_bounds=self.mix_bounds,
            conditions=conditions,
            constraints=[Constraint.parse(text) for text in self.constraints],
            starts=self.starts,
            facts=self.facts,
            groups=self._groups,
        )

    @cached_property
    def _plans(self) -> dict[str, DecisionPlan]:
        compiler = SpaceCompiler(self._parts)
        return {name: compiler.plan(name) for name in self.algorithms}

    @cached_property
    def _free_plans(self) -> dict[str, DecisionPlan]:
        """Plans without constraints, bounds and facts: how actions of algorithms that are not legal decode."""
        free = replace(self._parts, mix_bounds={}, constraints=(), starts=STARTS)
        if free.facts is not None:
            free = replace(free, facts=replace(free.facts, refused={}))
        compiler = SpaceCompiler(free)
        return {name: compiler.plan(name) for name in self.algorithms}

    def plan(self, algorithm: str) -> DecisionPlan:
        """Return how the settings of an algorithm are decided; without constraints where none can keep them.

        Raises:
            ValueError: an unknown algorithm.
        """
        if algorithm not in self._plans:
            raise ValueError(f"algorithm: unknown {algorithm!r}.{did_you_mean(algorithm, self.algorithms)}")
        found = self._plans[algorithm]
        return found if found.problem is None else self._free_plans[algorithm]

    @cached_property
    def problems(self) -> Mapping[str, str | None]:
        """Algorithm -> why no recipe of it keeps the constraints; None where some do."""
        return {name: plan.problem for name, plan in self._plans.items()}

    # Masks ------------------------------------------------------------------------------------------------------------

    @cached_property
    def _masks(self) -> SpaceMasks:
        return SpaceMasks(self)

    def start_mask(self, algorithms: Sequence[str]) -> np.ndarray:
        """Return ``(3,)`` bool: the starts that some of the algorithms can have."""
        return self._masks.starts(algorithms)

    def action_mask(self, payable: Collection[str] | None = None) -> np.ndarray:
        """Return ``(1 + algorithms + 3,)`` bool: the legal choices of ``algorithm``, ``stop`` first, and of ``start``.

        Args:
            payable: algorithms that the budget pays and the task has rows for; None for all.
        """
        legal = [n for n in self.algorithms if self.problems[n] is None and (payable is None or n in payable)]
        return np.concatenate([[True], [name in legal for name in self.algorithms], self.start_mask(legal)])

    def knob_mask(self, name: str, values: Sequence[Any], algorithms: Sequence[str]) -> np.ndarray:
        """Return ``(len(values),)`` bool: the values that some of the algorithms can have; see `SpaceMasks.knob`."""
        return self._masks.knob(name, values, algorithms)

    def unused_value(self, name: str) -> Any:
        """Return what a knob is where its condition does not hold."""
        return self._parts.defaults[name]

    def used_many(self, name: str, batch: RecipeBatch) -> np.ndarray:
        """Return ``(n,)`` bool: whether each recipe of a batch uses a knob; ``stop`` uses none."""
        if name not in self.conditions:
            return batch.algorithm > 0
        used = np.zeros(len(batch), bool)
        for position, algorithm in enumerate(self.algorithms):
            rows = np.flatnonzero(batch.algorithm == position + 1)
            knob = next(knob for knob in self.plan(algorithm).knobs if knob.name == name)
            if knob.when is None:
                used[rows] = not knob.never
            elif len(rows):
                columns = [batch.start[rows], *batch.mix[rows].T, *[v[rows] for v in batch.values.values()]]
                used[rows] = knob.when.run(columns)
        return used

    def decode_batch(self, actions: Mapping[str, np.ndarray]) -> RecipeBatch:
        """Return the recipes of many actions; see `space_batch.decode_batch`."""
        return decode_batch(self, actions)

    def encode_batch(self, batch: RecipeBatch) -> dict[str, np.ndarray]:
        """Return the actions of many recipes; see `space_batch.encode_batch`."""
        return encode_batch(self, batch)

    def mask_batch(self, payable: np.ndarray) -> np.ndarray:
        """Return the masks of many searches on one task; see `space_batch.mask_batch`."""
        return mask_batch(self, payable)

    # The task ---------------------------------------------------------------------------------------------------------

    @property
    def needs_facts(self) -> bool:
        """Whether what is legal, or what an action means, depends on the task."""
        return bool(self.constraints or self.conditions or EPOCHS in self.parameters or self._checked_choices)

    @property
    def _checked_choices(self) -> list[str]:
        """Knobs whose choices a trainer may refuse for some algorithms."""
        return [
            name
            for name, parameter in self.parameters.items()
            if parameter.named or name in ("packing", "lora_rank", "replay_share")
        ]

    def bind(self, facts: TaskFacts) -> DecisionSpace:
        """Return this space for a task: the actions stay, what is legal and what ``epochs`` mean follow the facts."""
        return self if facts == self.facts else replace(self, facts=facts)

    def bound_to(self, task: InnerTask, trainer: InnerTrainer) -> DecisionSpace:
        """Return this space for a task on a trainer; itself when neither matters to it."""
        if not self.needs_facts:
            return self
        bound = self.bind(TaskFacts.of(task, trainer, self.algorithms))
        refused = refused_choices(task, trainer, bound._recipes_to_check(trainer))
        return bound.bind(replace(bound.facts, refused=refused)) if refused and bound.facts else bound

    def _recipes_to_check(self, trainer: InnerTrainer) -> list[tuple[str, str, Any, Recipe]]:
        found = []
        for algorithm in self.algorithms:
            if self.problems[algorithm] is not None or algorithm not in trainer.algorithms:
                continue
            for name in self._checked_choices:
                for choice in self.parameters[name].choices:
                    recipe = self._decided(algorithm, "best", None, {name: choice})
                    if getattr(recipe, name) == choice:
                        # A refusal must be this choice's own, not that of another knob's middle choice.
                        others = {other: KNOBS[other] for other in self._checked_choices if other != name}
                        found.append((algorithm, name, choice, replace(recipe, **others)))
        return found

    # Cheap recipes ----------------------------------------------------------------------------------------------------

    def cheapest_recipes(self, algorithm: str, sources: Sequence[str], **held: Any) -> list[Recipe]:
        """Return recipes of which one has the cheapest optimiser steps over a mix of all ``sources``.

        Args:
            algorithm: algorithm name.
            sources: what the mix is over, at least one of the usable sources.
            **held: knobs with a value that is kept; the others of `COSTLY_KNOBS` take the values that cost the least.
        """
        mix = {name: 1.0 / len(sources) for name in sources}
        found = [self._decided(algorithm, "best", mix, {**k, **held}) for k in self._cheapest_knobs(held)]
        return found

    def cheaper_recipes(self, recipe: Recipe) -> list[Recipe]:
        """Return the recipe with the other `COSTLY_KNOBS` than the batch at the values whose steps cost the least."""
        return [self._with(recipe, **knobs) for knobs in self._cheapest_knobs(("batch_size",))]

    def with_largest_batch(self, recipe: Recipe, payable: Callable[[Recipe], bool]) -> Recipe | None:
        """Return the recipe with the largest batch, up to its own, that is ``payable``; None when none is."""
        sizes = [size for size in self._integers("batch_size") if size <= recipe.batch_size]
        first_dear = bisect_left(sizes, True, key=lambda size: not payable(self._with(recipe, batch_size=size)))
        return None if first_dear == 0 else self._with(recipe, batch_size=sizes[first_dear - 1])

    def _cheapest_knobs(self, held: Collection[str]) -> list[dict[str, Any]]:
        free = {name: self.parameters[name] for name in COSTLY_KNOBS if name in self.parameters and name not in held}
        lowest = {name: parameter.decode(-1.0) for name, parameter in free.items()}
        if lowest.get("lora_rank", 1) != 0:
            return [lowest]
        # in train tokens every rank costs the same, in FLOPs an adapter less than full weights
        return [lowest, *({**lowest, "lora_rank": rank} for rank in free["lora_rank"].values()[1:2])]

    def _with(self, recipe: Recipe, **changes: Any) -> Recipe:
        values = {n: getattr(recipe, n) for n in self.parameters if n != EPOCHS}
        if EPOCHS in self.parameters:
            values[EPOCHS] = self._epochs_of(recipe)[0]
        return self._decided(recipe.algorithm, recipe.start, recipe.mix, {**values, **changes})

    # Actions ----------------------------------------------------------------------------------------------------------

    @property
    def width(self) -> int:
        """Length of `to_vector`."""
        return len(self.algorithms) + len(STARTS) + len(self.sources) + len(self.parameters)

    def action_space(self) -> gym.spaces.Dict:
        """Return the action space: which algorithm (0 stops), which start, and coordinates in [-1, 1]."""
        return gym.spaces.Dict(
            {
                "algorithm": gym.spaces.Discrete(1 + len(self.algorithms)),
                "mix": gym.spaces.Box(-1.0, 1.0, (len(self.sources),), np.float32),
                "parameters": gym.spaces.Box(-1.0, 1.0, (len(self.parameters),), np.float32),
                "start": gym.spaces.Discrete(len(STARTS)),
            }
        )

    def decode(self, action: Mapping[str, Any]) -> Recipe | None:
        """Return the recipe of an action, or None for ``stop``; where the algorithm is legal, the recipe is.

        The mix coordinates of sources that the algorithm cannot use are ignored; the others are projected onto the
        simplex within its bounds. A knob that the algorithm does not use takes its default. A start that is not
        allowed becomes the first that is, of best, latest and base. What is left illegal is repaired as
        `decision_plan` says: a number of generations that does not divide the batch is moved to the nearest one of
        the space that does; where none does, the batch is moved.
        """
        choice = int(action["algorithm"])
        if choice == STOP:
            return None
        algorithm = self.algorithms[choice - 1]
        plan = self.plan(algorithm)
        start = plan.start(int(action["start"]))
        slots: list[Any] = [start, *plan.mix([(x + 1.0) / 2.0 for x in _floats(action["mix"])], start)]
        for (place, decode), coordinate in zip(self._decoders, _floats(action["parameters"]), strict=True):
            value = decode(coordinate)
            slots.append(value if place is None else place[value])
        plan.decide(slots)
        return self.recipe_of_slots(algorithm, slots)

    @cached_property
    def _decoders(self) -> list[tuple[dict[Any, int] | None, Callable[[float], Any]]]:
        return [
            ({c: i for i, c in enumerate(p.choices)} if p.named else None, p.decode) for p in self.parameters.values()
        ]

    def decode_mix(self, algorithm: str, coordinates: Sequence[float], start: str = "best") -> dict[str, float]:
        """Return the mix at coordinates in [-1, 1]: weight (x + 1) / 2 per usable source, projected, on the grid."""
        plan = self.plan(algorithm)
        weights = plan.mix([(float(x) + 1) / 2 for x in coordinates], plan.start(STARTS.index(start)))
        return {name: weight for name, weight in zip(self.sources, weights, strict=True) if weight > 0}

    def encode(self, recipe: Recipe | None) -> dict[str, Any]:
        """Return the action of a recipe (None is ``stop``); `decode` gives the recipe back when it lies on the grid.

        Raises:
            ValueError: the recipe is not in this space; the message names the field or the constraint.
        """
        if recipe is None:
            mix, middle = (np.zeros(len(part), np.float32) for part in (self.sources, self.parameters))
            return {"algorithm": STOP, "mix": mix, "parameters": middle, "start": 0}
        if recipe.algorithm not in self.algorithms:
            raise ValueError(
                f"algorithm: {recipe.algorithm!r} is not in the decision space."
                f"{did_you_mean(recipe.algorithm, self.algorithms)}"
            )
        self._require_constants(recipe)
        plan = self.plan(recipe.algorithm)
        slots = self._slots_of(recipe, plan)
        coordinates = np.zeros(len(self.parameters), np.float32)
        first = 1 + len(self.sources)
        for knob in plan.knobs:
            if not plan.used(knob, slots):
                if slots[knob.slot] != knob.unused:
                    wanted = KNOBS[knob.name]
                    raise ValueError(
                        f"{knob.name}: it is not used here and is then {wanted!r}, the recipe has "
                        f"{getattr(recipe, knob.name)!r}."
                    )
                continue
            value = slots[knob.slot]
            try:
                coordinate = knob.parameter.encode(knob.parameter.choices[value] if knob.parameter.named else value)
            except ValueError as error:
                raise ValueError(f"{knob.name}: {error}.") from error
            coordinates[knob.slot - first] = coordinate
        problem = self._illegal(plan, slots, recipe)
        if problem is not None:
            raise ValueError(problem)
        return {
            "algorithm": 1 + self.algorithms.index(recipe.algorithm),
            "mix": np.array([2 * slots[1 + i] - 1 for i in range(len(self.sources))], np.float32),
            "parameters": coordinates,
            "start": STARTS.index(recipe.start),
        }

    def _require_constants(self, recipe: Recipe) -> None:
        """Refuse a recipe that differs where the space leaves no choice."""
        values = recipe.__dict__
        for name in recipe.mix:
            if name not in self.sources:
                raise ValueError(f"mix: {name!r} is not in the decision space.{did_you_mean(name, self.sources)}")
            if recipe.mix[name] > 0 and name not in (self.usable[recipe.algorithm] or self.sources):
                raise ValueError(
                    f"mix: {name!r} has no rows that {recipe.algorithm} trains on; "
                    f"sources that have: {', '.join(self.usable[recipe.algorithm])}."
                )
        for name, wanted in self._parts.constants.items():
            if values[name] != wanted and not (name == "warmup_steps" and values[name] == recipe.steps < wanted):
                raise ValueError(
                    f"{name}: it is {wanted!r} throughout the decision space, the recipe has {values[name]!r}."
                )

    def _slots_of(self, recipe: Recipe, plan: DecisionPlan) -> list[Any]:
        slots: list[Any] = [STARTS.index(recipe.start), *[recipe.mix.get(name, 0.0) for name in self.sources]]
        for name, parameter in self.parameters.items():
            if name == EPOCHS:
                slots.append(None)
                continue
            value = getattr(recipe, name)
            if parameter.named:
                if value not in parameter.choices and value != KNOBS[name]:
                    raise ValueError(f"{name}: {value!r} is not among the choices {list(parameter.choices)}.")
                value = parameter.choices.index(value) if value in parameter.choices else -1
            slots.append(value)
        if EPOCHS in self.parameters:
            place = self._slot_names.index(EPOCHS)
            for epochs in self._epochs_of(recipe, slots, plan):
                slots[place] = epochs
                if not plan.broken(slots):
                    break
        return slots

    @cached_property
    def _slot_names(self) -> list[str]:
        return list(self._parts.slots)

    def _epochs_of(self, recipe: Recipe, slots: list[Any] | None = None, plan: DecisionPlan | None = None) -> list[int]:
        """Return the epochs whose steps a recipe has; few rows give several the same.

        Raises:
            ValueError: none of the space's.
        """
        plan = plan or self.plan(recipe.algorithm)
        if plan.steps is None:
            raise ValueError("epochs: how many steps they are depends on the task; bind the space to one first.")
        slot = self._slot_names.index(EPOCHS)
        if slots is None:
            slots = [0, *[recipe.mix.get(name, 0.0) for name in self.sources]]
            slots += [None if name == EPOCHS else getattr(recipe, name) for name in self.parameters]
        took, found = [], []
        for epochs in self.parameters[EPOCHS].values():
            slots[slot] = epochs
            took.append(plan.steps.run(slots))
            if took[-1] == recipe.steps:
                found.append(int(epochs))
        if found:
            return found
        raise ValueError(
            f"steps: {recipe.steps} are not what {list(self.parameters[EPOCHS].values())} epochs take here, {took}."
        )

    def _illegal(self, plan: DecisionPlan, slots: list[Any], recipe: Recipe) -> str | None:
        """Return why a recipe of a legal algorithm breaks a bound or constraint; groups are the trainer's to refuse."""
        if self._plans[recipe.algorithm] is not plan:
            return None
        if slots[0] not in plan.starts:
            return f"start: {recipe.start!r} is not allowed here; allowed: {[STARTS[i] for i in plan.starts]}."
        if self.mix_bounds or self.constraints:
            problem = plan.mix_problem(recipe.mix, slots[0])
            if problem is not None:
                return problem + "."
        broken = [text for text in plan.broken(slots) if text in self.constraints or "refuses" in text]
        return f"recipe: it breaks the constraint {broken[0]!r}." if broken else None

    # Recipes ----------------------------------------------------------------------------------------------------------

    def to_vector(self, recipe: Recipe) -> np.ndarray:
        """Return ``(width,)`` float32 in [-1, 1]: one-hot algorithm, one-hot start, mix weights, coordinates."""
        action = self.encode(recipe)
        vector = np.zeros(self.width, np.float32)
        vector[action["algorithm"] - 1] = 1.0
        vector[len(self.algorithms) + action["start"]] = 1.0
        offset = len(self.algorithms) + len(STARTS)
        vector[offset : offset + len(self.sources)] = (action["mix"] + 1) / 2
        vector[offset + len(self.sources) :] = action["parameters"]
        return vector

    def recipe(self, algorithm: str, **settings: Any) -> Recipe:
        """Return a recipe of this space with settings given by name; what is left out takes its default.

        Args:
            algorithm: algorithm name.
            **settings: recipe fields (or ``epochs``); ``mix`` defaults to equal shares of the usable sources, within
                their bounds, and knobs to the space's defaults, else the middle of their range.

        Raises:
            ValueError: an unknown algorithm or field, a value outside its range, or one that a constraint moves.
        """
        if algorithm not in self.algorithms:
            raise ValueError(f"algorithm: unknown {algorithm!r}.{did_you_mean(algorithm, self.algorithms)}")
        mix = settings.pop("mix", None)
        values = {name: settings.pop(name) for name in list(settings) if name in self.parameters}
        start = settings.pop("start", "best" if "best" in self.starts else self.starts[-1])
        for name in settings:
            raise ValueError(f"recipe: {name!r} is no knob of this space.{did_you_mean(name, self.parameters)}")
        checked = {name: value for name, value in values.items() if name != EPOCHS}
        asked = Recipe(
            algorithm, {self.sources[0]: 1.0} if mix is None else mix, start, **{**{"steps": 100_000}, **checked}
        )
        for name, value in values.items():
            try:
                self.parameters[name].encode(value if name == EPOCHS else getattr(asked, name))
            except ValueError as error:
                raise ValueError(f"{name}: {error}.") from error
        recipe = self._decided(algorithm, start, None if mix is None else asked.mix, values, keep_mix=mix is not None)
        self.encode(recipe)
        if self.constraints or self.conditions:
            wanted = {n: getattr(asked, n) for n in checked if n != "warmup_steps"}
            if any(getattr(recipe, name) != value for name, value in wanted.items()):
                self.encode(replace(recipe, **wanted))  # says which constraint moved it; fitting groups may
        return recipe

    def nearest_recipe(self, algorithm: str, start: str = "best", **settings: Any) -> Recipe:
        """Return the legal recipe nearest to some settings; what is left out takes its default.

        Args:
            algorithm: algorithm name.
            start: starting checkpoint.
            **settings: knobs, and ``mix``; values are those of the knobs' ranges.
        """
        mix = settings.pop("mix", None)
        return self._decided(algorithm, start, mix, settings)

    def nearest(self, recipe: Recipe) -> Recipe:
        """Return the legal recipe nearest to one that the task's constraints may leave out."""
        plan, values = self.plan(recipe.algorithm), {n: getattr(recipe, n) for n in self.parameters if n != EPOCHS}
        if EPOCHS in self.parameters and plan.steps is not None:
            slots: list[Any] = [0, *[recipe.mix.get(name, 0.0) for name in self.sources]]
            slots += [None if name == EPOCHS else getattr(recipe, name) for name in self.parameters]

            def distance(epochs: int) -> int:
                slots[self._slot_names.index(EPOCHS)] = epochs
                return abs(int(plan.steps.run(slots)) - recipe.steps)  # type: ignore[union-attr]

            values[EPOCHS] = min(self.parameters[EPOCHS].values(), key=distance)
        return self._decided(recipe.algorithm, recipe.start, recipe.mix, values)

    def random_recipe(self, rng: np.random.Generator, legal: Sequence[str] | None = None) -> Recipe:
        """Return a random recipe: algorithm, start, mix and every coordinate drawn uniformly, then made legal.

        The mix is drawn from a flat Dirichlet distribution and moved to the nearest within its bounds.
        """
        names = self.algorithms if legal is None else tuple(legal)
        algorithm = names[int(rng.integers(len(names)))]
        usable = self.usable[algorithm] or self.sources
        weights = rng.dirichlet(np.ones(len(usable)))
        values = {name: parameter.decode(float(rng.uniform(-1, 1))) for name, parameter in self.parameters.items()}
        start = STARTS[int(rng.integers(len(STARTS)))]
        return self._decided(algorithm, start, dict(zip(usable, weights.tolist(), strict=True)), values)

    def _decided(
        self,
        algorithm: str,
        start: str,
        mix: Mapping[str, float] | None,
        values: Mapping[str, Any],
        keep_mix: bool = False,
    ) -> Recipe:
        """Return the legal recipe nearest to some settings; a mix that is kept is not put on the grid."""
        plan = self.plan(algorithm)
        position = plan.start(STARTS.index(start))
        if mix is None:
            weights = plan.mix([0.5] * len(self.sources), position)
        else:
            weights = [mix.get(name, 0.0) for name in self.sources]
            if not keep_mix:
                weights = plan.mix(weights, position)
        slots: list[Any] = [position, *weights]
        for name, parameter in self.parameters.items():
            value = values.get(name)
            if value is None:
                value = self.defaults.get(name, parameter.decode(0.0))
            if parameter.named:
                value = parameter.choices.index(value) if value in parameter.choices else -1
            slots.append(value)
        plan.decide(slots)
        return self.recipe_of_slots(algorithm, slots)

    def recipe_of_slots(self, algorithm: str, slots: Sequence[Any]) -> Recipe:
        """Return the recipe of legal settings: the start's position, a weight per source, a value per knob."""
        plan = self.plan(algorithm)
        settings = dict(self._templates[algorithm])
        first = 1 + len(self.sources)
        for (name, choices, cast), value in zip(self._fields, slots[first:], strict=True):
            if choices is not None:
                settings[name] = choices[value] if value >= 0 else KNOBS[name]
            elif name != EPOCHS:
                settings[name] = cast(value)
        if plan.steps is not None:
            settings["steps"] = plan.steps.run(slots)
        elif EPOCHS in self.parameters:
            raise ValueError("epochs: how many steps they are depends on the task; bind the space to one first.")
        if settings["warmup_steps"] > settings["steps"]:
            settings["warmup_steps"] = settings["steps"]
        settings["mix"] = {name: slots[1 + place] for name, place in self._sorted_sources if slots[1 + place] > 0}
        settings["start"] = STARTS[slots[0]]
        return Recipe.of_checked(settings)

    @cached_property
    def _templates(self) -> dict[str, dict[str, Any]]:
        return {
            name: Recipe(name, {"any": 1.0}, **{**self._template_steps, **self.fixed}).to_dict()
            for name in self.algorithms
        }

    @cached_property
    def _template_steps(self) -> dict[str, Any]:
        """A number of steps that no fixed warm-up exceeds; it is replaced wherever steps are a knob."""
        return {} if "steps" not in self.parameters and EPOCHS not in self.parameters else {"steps": 100_000}

    @cached_property
    def _fields(self) -> list[tuple[str, tuple[Any, ...] | None, type]]:
        return [(n, p.choices if p.named else None, CASTS.get(n, int)) for n, p in self.parameters.items()]

    @cached_property
    def _sorted_sources(self) -> list[tuple[str, int]]:
        return sorted((name, place) for place, name in enumerate(self.sources))


def _floats(values: Any) -> list[float]:
    return values.tolist() if isinstance(values, np.ndarray) else [float(value) for value in values]


__all__ = [
    "COSTLY_KNOBS",
    "DEFAULT_PARAMETERS",
    "MIX_GRID",
    "STOP",
    "DecisionSpace",
    "Parameter",
    "bounds_problem",
    "on_simplex_grid",
    "project_to_simplex",
]
