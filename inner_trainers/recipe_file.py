"""Reads a recipe from a YAML or JSON file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from .recipe import Recipe
from .yaml_file import FileError, Keys, YamlFile, read_yaml
from .yaml_scalars import scalar_hint, shown

_NUMBERS = {f.name: f.type for f in fields(Recipe) if f.type in ("int", "float") and f.init}
_TRUTHS = {f.name for f in fields(Recipe) if f.type == "bool"}


def load_recipe(path: Path, defaults: Mapping[str, Any] | None = None) -> Recipe:
    """Read a recipe from YAML or JSON.

    Args:
        path: the file.
        defaults: fields that it takes when it leaves them out; see `InnerTask.recipe_defaults`.

    Raises:
        ValueError: no such file, no mapping, an unknown key, or a value outside its range; names file, line and key.
    """
    file = read_yaml(path, f"recipe {path}", expected="keys like algorithm and mix")
    data = file.data
    for name in data:
        if name in _NUMBERS:
            _require_number(file, (name,), data[name], "an integer" if _NUMBERS[name] == "int" else "a number")
        elif name in _TRUTHS and isinstance(data[name], str):
            hint = scalar_hint(data[name], "truth")
            raise file.error((name,), f"expected true or false, got {shown(data[name])}.{hint}")
    if isinstance(data.get("mix"), dict):
        for source, weight in data["mix"].items():
            _require_number(file, ("mix", source), weight, "a number")
    try:
        return Recipe.from_dict({**(defaults or {}), **data})
    except FileError:
        raise
    except (ValueError, TypeError) as error:
        raise _placed(file, str(error)) from error


def _require_number(file: YamlFile, at: Keys, value: Any, wanted: str) -> None:
    if isinstance(value, str):
        hint = scalar_hint(value, "number", quoted=at in file.quoted)
        raise file.error(at, f"expected {wanted}, got {shown(value)}.{hint}")


def _placed(file: YamlFile, problem: str) -> FileError:
    """Return a recipe's error with its place; it begins with the field's name, or names an unknown key."""
    name, _, rest = problem.partition(": ")
    at: Keys = tuple(name.split(".", 1))
    if at in file.values:
        return file.error(at, rest)
    unknown = [key for key in file.data if f"unknown key {key!r}" in rest]
    if name == "recipe" and unknown:
        return file.error((unknown[0],), rest, key=True)
    return file.error((), problem.removeprefix("recipe: "))
