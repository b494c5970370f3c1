"""Trains one recipe from the base checkpoint and reports its scores, without an environment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..inner_trainers.evaluation import completion_flags
from ..inner_trainers.recipe_file import load_recipe
from ..inner_trainers.tasks import resolve_task
from .settings import require_folder


def run_recipe(
    path: Path, task: str, instance: int, seed: int, save: Path | None, faults: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Train and score a recipe; return plain data.

    Args:
        path: recipe file.
        task: built-in family, or ``module:Class``.
        instance: instance seed.
        seed: seed of the round.
        save: where the weights go, as safetensors; None for nowhere.
        faults: settings of the TRL trainer's fault policy.
    """
    recipe = load_recipe(path)
    if save is not None:
        require_folder("save", save.parent.resolve())
        if save.is_dir():
            raise ValueError(f"save: {save} is a folder; expected the name of a .safetensors file.")
    drawn = resolve_task(task).instance(instance)
    trainer: Any = drawn.trainer()
    if trainer is None:
        from ..inner_trainers.fault_policy import FaultPolicy
        from ..inner_trainers.trl.trainer import TrlTrainer

        trainer = TrlTrainer(fault_policy=FaultPolicy.from_dict(faults or {}))
    trainer.check(drawn, recipe)
    base = trainer.base(drawn)
    session = trainer.begin(drawn, recipe, base, seed)
    try:
        session.advance()
        report, checkpoint = session.result()
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
    flags = list(report.flags)
    for split in ("validation", "test"):
        before = trainer.evaluate(drawn, base, split)[0]
        after = before if checkpoint is None else trainer.evaluate(drawn, checkpoint, split)[0]
        flags += [f"{split}: {flag}" for flag in completion_flags(after)]
        scores[split] = {
            "before": before.score,
            "before_error": before.standard_error,
            "after": after.score,
            "after_error": after.standard_error,
            "dimensions": json.loads(json.dumps(after.to_dict()["dimensions"])),
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
    }
