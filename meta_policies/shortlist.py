"""The list of recipes whose best round was best on average over meta-train instances, read from a measured list."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

from ..envs.decision_space import DecisionSpace
from ..inner_trainers.recipe import Recipe


@cache
def measured_shortlists() -> tuple[dict[str, Any], ...]:
    """Return the packaged lists: each has ``sources`` and ``recipes``, best first, and says where it was measured."""
    folder = resources.files(__package__) / "shortlists"
    if not folder.is_dir():
        return ()
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".json")), key=lambda f: f.name)
    return tuple(json.loads(file.read_text()) for file in files)


def default_shortlist(space: DecisionSpace) -> list[Recipe]:
    """Return the list measured for the space's sources, else SFT and GRPO at two rates each."""
    for entry in measured_shortlists():
        if tuple(entry["sources"]) == space.sources:
            recipes = [Recipe.from_dict(recipe) for recipe in entry["recipes"]]
            if all(_fits(space, recipe) for recipe in recipes):
                return recipes
    rates: list[dict[str, Any]] = [{}]
    if "learning_rate" in space.parameters:
        rates = [{"learning_rate": space.parameters["learning_rate"].decode(x)} for x in (0.0, 0.4)]
    return [space.recipe(name, **rate) for rate in rates for name in reversed(space.algorithms)]


def _fits(space: DecisionSpace, recipe: Recipe) -> bool:
    try:
        space.encode(recipe)
    except ValueError:
        return False
    return True
