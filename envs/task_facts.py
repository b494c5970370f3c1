"""What a decision space can know of a task and its trainer: sizes, rows, settings that algorithms read, the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..inner_trainers.base import InnerTrainer
    from ..inner_trainers.recipe import Recipe
    from ..inner_trainers.tasks.base import InnerTask


@dataclass(frozen=True)
class TaskFacts:
    """Facts of one task instance; those that are None are not known.

    Attributes:
        base_model_size: parameters of the base model.
        rows: source -> rows of all kinds.
        training_rows: algorithm -> source -> rows that it trains on; sources without any are left out.
        grouped: algorithms whose step samples ``num_generations`` completions of each prompt.
        has_teacher: whether the task has a teacher.
        device: ``"cpu"``, ``"cuda"``, or what the trainer says.
        device_memory: memory of the device in bytes.
        refused: algorithm -> knob -> the choices that the trainer refuses on this task, with its reason.
    """

    base_model_size: float | None = None
    rows: Mapping[str, int] | None = None
    training_rows: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    grouped: frozenset[str] = frozenset()
    has_teacher: bool | None = None
    device: str | None = None
    device_memory: float | None = None
    refused: Mapping[str, Mapping[str, Mapping[Any, str]]] = field(default_factory=dict)

    @classmethod
    def of(cls, task: InnerTask, trainer: InnerTrainer, algorithms: Iterable[str]) -> TaskFacts:
        """Return the facts of a task on a trainer.

        Args:
            task: the instance.
            trainer: who trains on it.
            algorithms: those of the decision space; others are left out.
        """
        built = task.built
        rows = {name: sum(map(len, source.rows.values())) for name, source in built.sources.items()}
        names = [name for name in algorithms if name in trainer.algorithms]
        return cls(
            base_model_size=float(trainer.parameters(task)),
            rows=rows,
            training_rows={name: _training_rows(task, trainer, name, rows) for name in names},
            grouped=frozenset(name for name in names if "num_generations" not in trainer.ignored_settings(name)),
            has_teacher=built.teacher is not None,
            device=getattr(trainer, "device_type", None),
            device_memory=getattr(trainer, "device_memory", None),
        )

    def value(self, name: str) -> float | str | None:
        """Return the fact of a name as constraints spell it; None when it is not known."""
        if name == "rows":
            return None if self.rows is None else float(sum(self.rows.values()))
        if name == "sources":
            return None if self.rows is None else float(len(self.rows))
        if name.startswith("rows."):
            return None if self.rows is None else float(self.rows.get(name.removeprefix("rows."), 0))
        if name == "has_teacher":
            return None if self.has_teacher is None else float(self.has_teacher)
        known: float | str | None = getattr(self, name)
        return known


def refused_choices(
    task: InnerTask, trainer: InnerTrainer, recipes: Iterable[tuple[str, str, Any, Recipe]]
) -> dict[str, dict[str, dict[Any, str]]]:
    """Return what the trainer refuses of some choices.

    Args:
        task: the instance.
        trainer: whose `check` is asked; it loads nothing.
        recipes: (algorithm, knob, choice, a recipe with it).

    Returns:
        algorithm -> knob -> choice -> reason.
    """
    refused: dict[str, dict[str, dict[Any, str]]] = {}
    for algorithm, knob, choice, recipe in recipes:
        try:
            trainer.check(task, recipe)
        except ValueError as error:
            refused.setdefault(algorithm, {}).setdefault(knob, {})[choice] = str(error)
    return refused


def _training_rows(task: InnerTask, trainer: InnerTrainer, algorithm: str, rows: Mapping[str, int]) -> dict[str, int]:
    counted = getattr(trainer, "training_rows", None)
    if counted is not None:
        return dict(counted(task, algorithm))
    return {name: rows[name] for name in trainer.usable_sources(task, algorithm)}
