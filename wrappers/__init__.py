"""Gymnasium wrappers that fit the recipe environment to learning algorithms; none changes what a round does."""

from .discretize_action import DiscretizeAction
from .flatten_action import FlattenAction

__all__ = ["DiscretizeAction", "FlattenAction"]
