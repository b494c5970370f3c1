"""Gymnasium wrappers that fit the recipe environment to learning algorithms; none changes what a round does."""

from .controller_in_the_loop import ControllerInTheLoop
from .discretize_action import DiscretizeAction
from .flatten_action import FlattenAction
from .record_rounds import RecordRounds

__all__ = ["ControllerInTheLoop", "DiscretizeAction", "FlattenAction", "RecordRounds"]
