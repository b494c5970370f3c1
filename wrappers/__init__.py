"""Gymnasium wrappers that fit the environments to learning algorithms; each is one class with its own arguments."""

from .autoregressive_action import AutoregressiveAction
from .budget_price import BudgetPrice
from .controller_in_the_loop import ControllerInTheLoop
from .discretize_action import DiscretizeAction
from .flatten_action import FlattenAction
from .flatten_observation import FlattenObservation
from .masked_observation import MaskedObservation
from .recipe_catalogue import RecipeCatalogue
from .record_rounds import RecordRounds
from .seed_episodes import SeedEpisodes

__all__ = [
    "AutoregressiveAction",
    "BudgetPrice",
    "ControllerInTheLoop",
    "DiscretizeAction",
    "FlattenAction",
    "FlattenObservation",
    "MaskedObservation",
    "RecipeCatalogue",
    "RecordRounds",
    "SeedEpisodes",
]
