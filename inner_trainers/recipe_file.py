"""Reads a recipe from a YAML or JSON file."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from .recipe import Recipe

_NUMBERS = {f.name for f in fields(Recipe) if f.type in ("int", "float") and f.init}


def load_recipe(path: Path) -> Recipe:
    """Read a recipe from YAML or JSON.

    Raises:
        ValueError: no such file, no mapping, an unknown key, or a value outside its range; names the file.
    """
    if not path.is_file():
        raise ValueError(f"recipe {path}: no such file.")
    try:
        data = yaml.load(path.read_text(encoding="utf-8-sig"), _UniqueKeys)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a bad date, say, is a bare ValueError
        raise ValueError(f"recipe {path}: not readable as YAML ({' '.join(str(error).split())}).") from error
    if not isinstance(data, dict):
        raise ValueError(f"recipe {path}: expected keys like algorithm and mix, got {type(data).__name__}.")
    try:
        mix = data.get("mix")
        if isinstance(mix, dict):
            data["mix"] = {name: _number(f"mix.{name}", weight) for name, weight in mix.items()}
        return Recipe.from_dict({key: _number(key, v) if key in _NUMBERS else v for key, v in data.items()})
    except (ValueError, TypeError) as error:
        raise ValueError(f"recipe {path}: {error}") from error


class _UniqueKeys(yaml.SafeLoader):
    """YAML's safe loader, which by itself takes the last of two equal keys without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping.

        Raises:
            ValueError: a key stands in it twice.
        """
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key.value, str) and key.value in seen:
                raise ValueError(f"line {key.start_mark.line + 1}: key {key.value!r} is there twice")
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def _number(name: str, value: Any) -> Any:
    """Return the number that YAML 1.1 reads as text because it has no point, like ``1e-4``; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"{name}: expected a number, got {value!r}.") from None
    return int(number) if number.is_integer() and abs(number) < 2**53 else number
