"""Trains one recipe from the base checkpoint and reports its scores, without an environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from ..inner_trainers.recipe import Recipe
from ..inner_trainers.tasks import resolve_task


def load_recipe(path: Path) -> Recipe:
    """Read a recipe from YAML or JSON.

    Raises:
        ValueError: no such file, no mapping, an unknown key, or a value outside its range; names the file.
    """
    if not path.is_file():
        raise ValueError(f"recipe {path}: no such file.")
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"recipe {path}: not readable as YAML ({' '.join(str(error).split())}).") from error
    if not isinstance(data, dict):
        raise ValueError(f"recipe {path}: expected keys like algorithm and mix, got {type(data).__name__}.")
    for key, value in data.items():
        if isinstance(value, str) and key in ("learning_rate", "kl_coef", "weight_decay", "max_grad_norm"):
            try:
                data[key] = float(value)  # YAML 1.1 reads 1e-4, without a point, as text
            except ValueError:
                raise ValueError(f"recipe {path}: {key}: expected a number, got {value!r}.") from None
    try:
        return Recipe.from_dict(data)
    except (ValueError, TypeError) as error:
        raise ValueError(f"recipe {path}: {error}") from error


def run_recipe(path: Path, task: str, instance: int, seed: int, save: Path | None) -> dict[str, Any]:
    """Train and score a recipe; return plain data.

    Args:
        path: recipe file.
        task: built-in family, or ``module:Class``.
        instance: instance seed.
        seed: seed of the round.
        save: where the weights go, as safetensors; None for nowhere.
    """
    recipe = load_recipe(path)
    drawn = resolve_task(task).instance(instance)
    trainer: Any = drawn.trainer()
    if trainer is None:
        from ..inner_trainers.trl.trainer import TrlTrainer

        trainer = TrlTrainer()
    trainer.check(drawn, recipe)
    base = trainer.base(drawn)
    session = trainer.begin(drawn, recipe, base, seed)
    try:
        session.advance()
        report, checkpoint = session.result()
    finally:
        session.close()
    scores = {}
    for split in ("validation", "test"):
        before = trainer.evaluate(drawn, base, split)[0]
        after = before if checkpoint is None else trainer.evaluate(drawn, checkpoint, split)[0]
        scores[split] = {
            "before": before.score,
            "before_error": before.standard_error,
            "after": after.score,
            "after_error": after.standard_error,
            "dimensions": json.loads(json.dumps(after.to_dict()["dimensions"])),
        }
    if save is not None and checkpoint is not None:
        from safetensors.torch import save_file

        save.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: value.contiguous() for name, value in checkpoint.weights.items()}, save)
    data = report.to_dict()
    return {
        "recipe": data["recipe"],
        "ended": data["ended"],
        "steps": data["steps"],
        "failure": data["failure"],
        "flags": data["flags"],
        "training_cost": data["training_cost"],
        "scores": scores,
        "saved": None if save is None or checkpoint is None else str(save),
    }
