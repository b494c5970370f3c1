"""Reads a recipe from a YAML or JSON file."""

from __future__ import annotations

from pathlib import Path

import yaml

from .recipe import Recipe


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
