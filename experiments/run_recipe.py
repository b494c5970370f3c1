"""Trains one recipe from the base checkpoint, under an in-loop controller if asked, and reports its scores."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..inner_trainers.evaluation import completion_flags
from ..inner_trainers.messages import did_you_mean, require_integer
from ..inner_trainers.recipe_file import load_recipe
from ..inner_trainers.tasks import resolve_task
from ..meta_policies.controllers.catalogue import make_controller
from .settings import require_folder

if TYPE_CHECKING:
    from ..inner_trainers.base import Scorecard, TrainingSession
    from ..inner_trainers.recipe import Recipe
    from ..inner_trainers.tasks.base import Item
    from ..meta_policies.controllers.base import Controller
    from ..meta_policies.controllers.decision_log import DecisionLog


@dataclass(frozen=True)
class Control:
    """How a round is controlled while it runs.

    Attributes:
        controller: a name that `make_controller` takes.
        interval: optimiser steps between two decisions, in [1, 100000].
        log: folder of the decision log; None for none.
        level: how much is logged, one of `decision_log.LEVELS`.
    """

    controller: str
    interval: int = 1
    log: Path | None = None
    level: str = "decisions"


def run_recipe(
    path: Path,
    task: str,
    instance: int,
    seed: int,
    save: Path | None,
    faults: Mapping[str, Any] | None = None,
    control: Control | None = None,
) -> dict[str, Any]:
    """Train and score a recipe; return plain data.

    Args:
        path: recipe file.
        task: built-in family, ``module:Class`` or a task file.
        instance: instance seed.
        seed: seed of the round.
        save: where the weights go, as safetensors; None for nowhere.
        faults: settings of the TRL trainer's fault policy.
        control: what adjusts the round while it runs; None for nothing.

    Raises:
        ValueError: a file, name or setting that is not what it should be; before any training.
    """
    if save is not None:
        require_folder("save", save.parent.resolve())
        if save.is_dir():
            raise ValueError(f"save: {save} is a folder; expected the name of a .safetensors file.")
    controller = None if control is None else _controller(control)
    drawn = resolve_task(task).instance(instance)
    recipe = load_recipe(path, drawn.recipe_defaults())
    trainer: Any = drawn.trainer()
    if trainer is None:
        from ..inner_trainers.fault_policy import FaultPolicy
        from ..inner_trainers.trl.trainer import TrlTrainer

        trainer = TrlTrainer(fault_policy=FaultPolicy.from_dict(faults or {}))
    trainer.check(drawn, recipe)
    base = trainer.base(drawn)
    session = trainer.begin(drawn, recipe, base, seed)
    controlled: dict[str, Any] | None = None
    try:
        if control is None or controller is None:
            session.advance()
            report, checkpoint = session.result()
        else:
            with nullcontext() if control.log is None else _log(control.log, control.level) as log:
                controlled = _drive(session, recipe, controller, control, log)
                report, checkpoint = session.result()
                if log is not None:
                    log.end(report)
    finally:
        session.close()
    if save is not None and checkpoint is not None:
        from safetensors.torch import save_file

        from ..inner_trainers.trl.adapters import merge

        save.parent.mkdir(parents=True, exist_ok=True)
        partial = save.with_name(save.name + ".partial")
        save_file({name: value.contiguous() for name, value in merge(checkpoint.weights).items()}, partial)
        partial.replace(save)
    scores = {}
    flags = [*drawn.built.flags, *report.flags]
    for split in ("validation", "test"):
        before = trainer.evaluate(drawn, base, split)[0]
        after = before if checkpoint is None else trainer.evaluate(drawn, checkpoint, split)[0]
        flags += [f"{split}: {flag}" for flag in completion_flags(after)]
        scores[split] = {
            "before": before.score,
            "before_error": before.standard_error,
            "after": after.score,
            "after_error": after.standard_error,
            "dimensions": _dimensions(before, after, drawn.built.benchmark.items(split)),
        }
    data = report.to_dict()
    return {
        "recipe": data["recipe"],
        "ignored": list(trainer.ignored_settings(recipe.algorithm)),
        "ended": data["ended"],
        "steps": data["steps"],
        "failure": data["failure"],
        "rescued": data["rescued"],
        "flags": flags,
        "training_cost": data["training_cost"],
        "peak_memory_bytes": data["peak_memory_bytes"],
        "telemetry": data["telemetry"],
        "scores": scores,
        "saved": None if save is None or checkpoint is None else str(save),
        **({} if controlled is None else {"control": {**controlled, "adjustments": data["adjustments"]}}),
    }


def _dimensions(before: Scorecard, after: Scorecard, items: Sequence[Item]) -> dict[str, Any]:
    """Return each dimension's scores after the round, its mean before, and the 95 % intervals of both means."""
    data: dict[str, Any] = json.loads(json.dumps(after.to_dict()["dimensions"]))
    for name, entry in data.items():
        count = sum(item.dimension == name for item in items)
        entry["items"] = count
        entry["interval"] = list(after.dimensions[name].interval(count))
        entry["before"] = before.dimensions[name].mean
        entry["before_interval"] = list(before.dimensions[name].interval(count))
    return data


def _controller(control: Control) -> Controller:
    """Return the controller, after a look at everything else that could be wrong."""
    from ..meta_policies.controllers.decision_log import LEVELS

    require_integer("interval", control.interval, low=1, high=100_000)
    if control.level not in LEVELS:
        raise ValueError(f"log level: unknown {control.level!r}.{did_you_mean(control.level, LEVELS)}")
    if control.log is not None:
        require_folder("log", control.log)
    return make_controller(control.controller)


def _log(folder: Path, level: str) -> DecisionLog:
    from ..meta_policies.controllers.decision_log import DecisionLog

    return DecisionLog(folder, level)


def _drive(
    session: TrainingSession, recipe: Recipe, controller: Controller, control: Control, log: DecisionLog | None
) -> dict[str, Any]:
    """Take the round to its end; return what the controller did, as plain data."""
    from ..meta_policies.controllers.drive import drive_round

    driven = drive_round(session, recipe, controller, interval=control.interval, log=log)
    return {
        "controller": controller.name,
        "interval": control.interval,
        "log": None if control.log is None else str(control.log),
        "decisions": driven.looks,
        "applied": driven.applied,
        "refused": driven.refused,
        "failure": driven.failure,
    }
