"""What each inner algorithm needs, checked before anything heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from ..messages import did_you_mean

if TYPE_CHECKING:
    from ..recipe import Recipe
    from ..tasks.base import InnerTask


@dataclass(frozen=True)
class AlgorithmSpec:
    """One inner algorithm.

    Attributes:
        name: what recipes call it.
        row_kind: the kind of source rows it trains on.
        on_policy: whether it samples completions while it trains.
        module: module of this package with ``build_trainer(context)``.
        ignored: recipe fields that change nothing about its rounds.
    """

    name: str
    row_kind: str
    on_policy: bool
    module: str
    ignored: tuple[str, ...] = ()


ALGORITHMS = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            AlgorithmSpec("grpo", row_kind="prompts", on_policy=True, module="grpo", ignored=("max_length",)),
            AlgorithmSpec(
                "sft",
                row_kind="demonstrations",
                on_policy=False,
                module="sft",
                ignored=("kl_coef", "num_generations", "temperature"),
            ),
        )
    }
)
"""Inner algorithms by name; to add one, write its module and list it here."""


def check_recipe(task: InnerTask, recipe: Recipe) -> AlgorithmSpec:
    """Return the recipe's algorithm, or refuse what cannot run on the task.

    Raises:
        ValueError: an unknown algorithm or source, a source without the rows the algorithm trains on, or a batch
            that does not divide into groups.
    """
    spec = ALGORITHMS.get(recipe.algorithm)
    if spec is None:
        raise ValueError(f"algorithm: unknown {recipe.algorithm!r}.{did_you_mean(recipe.algorithm, ALGORITHMS)}")
    sources = task.built.sources
    fitting = [name for name, source in sources.items() if spec.row_kind in source.rows]
    for name, weight in recipe.mix.items():
        if name not in sources:
            raise ValueError(f"mix: task {task.name!r} has no source {name!r}.{did_you_mean(name, sources)}")
        if weight > 0 and name not in fitting:
            raise ValueError(
                f"mix: source {name!r} has no {spec.row_kind} rows, which {spec.name} trains on; "
                f"sources that have: {', '.join(fitting) or 'none'}."
            )
    if spec.on_policy:
        _check_groups(recipe)
    return spec


def _check_groups(recipe: Recipe) -> None:
    if recipe.num_generations < 2:
        raise ValueError(
            f"num_generations: {recipe.algorithm} compares completions of one prompt, so it needs at least 2, "
            f"got {recipe.num_generations}."
        )
    sequences = recipe.batch_size * recipe.gradient_accumulation
    if sequences % recipe.num_generations:
        allowed = [n for n in range(2, sequences + 1) if sequences % n == 0]
        raise ValueError(
            f"num_generations: {recipe.num_generations} does not divide the {sequences} completions of a step "
            f"(batch_size {recipe.batch_size} x gradient_accumulation {recipe.gradient_accumulation}); "
            f"allowed: {', '.join(map(str, allowed)) or 'none, raise batch_size to at least 2'}."
        )
