"""What the environments share in which a running round can be adjusted: pauses, masks, shaping, observation blocks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np

from ..inner_trainers.adjustments import CATALOGUE, CATALOGUE_NAMES, NONE
from ..inner_trainers.messages import did_you_mean, require_integer, require_number
from ..inner_trainers.recipe import Recipe
from ..inner_trainers.signals import SIGNALS
from ..inner_trainers.tasks import InnerTask, TaskFamily
from .control import control_row, signal_row
from .observation import RunningInputs, observe_running
from .post_training import PostTrainingEnv
from .reward import MIN_HEADROOM
from .running import RunningRound, Steering
from .scoring import require_quick_evaluator
from .search import Outcome

ILLEGAL = ("none", "raise")
"""What becomes of an adjustment that cannot be applied now."""


class AdjustableEnv(PostTrainingEnv):
    """A search in which the round that runs is paused every ``interval`` optimiser steps for an adjustment.

    Where nothing else is said, a reward of 0 is given until the round ends; then that of `round_reward`. With
    ``shaping`` each step also gets ``F = discount * phi(s') - phi(s)`` (Ng, Harada and Russell, 1999), which changes no
    optimal policy. The potential phi of a paused round is ``(quick score - base score) / max(1 - base score,
    MIN_HEADROOM)``; it is 0 where no round runs, so that the discounted sum of F from a state to the end of its round
    is minus the potential of that state. A quick evaluation scores few validation items and is charged; half of what
    is left of the budget is kept for these at most, and once that is spent the last score is taken again.

    Args:
        task: as in `PostTrainingEnv`.
        interval: optimiser steps between two decisions, in [1, 100000].
        shaping: whether rewards are shaped; needs a trainer that is a `QuickEvaluator`.
        discount: the discount of the shaping reward, in [0, 1]; give the learning algorithm the same.
        quick_items: validation items of a quick evaluation, in [1, 1000000].
        illegal: what becomes of an adjustment that cannot be applied now: ``"none"`` changes nothing instead, sets
            ``info["illegal"]`` and counts it, for algorithms that take no masks; ``"raise"`` refuses it.
        hardware_signals: whether signals that a clock or the machine decides are observed; they then make the spec
            ``nondeterministic``. They are observed too where the budget is in seconds.
        **settings: the other arguments of `PostTrainingEnv`.
    """

    in_loop = True

    def __init__(
        self,
        task: str | InnerTask | TaskFamily = "letters",
        *,
        interval: int = 5,
        shaping: bool = False,
        discount: float = 0.99,
        quick_items: int = 16,
        illegal: str = "none",
        hardware_signals: bool = False,
        **settings: Any,
    ) -> None:
        for name, value in (("shaping", shaping), ("hardware_signals", hardware_signals)):
            if not isinstance(value, bool):
                raise ValueError(f"{name}: expected True or False, got {value!r}.")
        if not isinstance(illegal, str) or illegal not in ILLEGAL:
            raise ValueError(f"illegal: unknown {illegal!r}.{did_you_mean(str(illegal), ILLEGAL)}")
        require_integer("quick_items", quick_items, low=1, high=1_000_000)
        for name in settings:
            if name not in _SETTINGS:
                raise ValueError(f"unknown argument {name!r}.{did_you_mean(name, _SETTINGS)}")
        self._steering = Steering(interval, quick_items if shaping else 0)
        self._discount = require_number("discount", discount, low=0, high=1)
        self._refuses, self._hardware_signals = illegal == "raise", hardware_signals
        self._running: RunningRound | None = None
        self._refused = False
        self._illegal = 0
        self._applied: str | None = None
        super().__init__(task, **settings)
        if shaping:
            require_quick_evaluator(self.trainer)

    @property
    def clocked(self) -> bool:
        """Whether a clock decides some of what is observed: the budget is in seconds, or hardware signals are shown."""
        return super().clocked or self._hardware_signals

    @property
    def asks_for_recipe(self) -> bool:
        """Whether the next action is a recipe, not an adjustment of a running round."""
        return self._running is None

    @property
    def running(self) -> RunningRound | None:
        """The round that runs, for controllers that act in the environment; None while none does."""
        return self._running

    @abstractmethod
    def step(self, action: Any) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        """Take one action; see the environment."""

    def adjustment_mask(self) -> np.ndarray:
        """Return ``(37,)`` bool: the entries of the catalogue that can be applied now.

        ``none`` always can. While no round runs, and once it has ended, nothing else can; before the first `reset` all
        are legal.
        """
        if self._search is None:
            return np.full(len(CATALOGUE), True)
        running = self._running
        if running is None or running.ended:
            return one_legal(len(CATALOGUE), NONE)
        return np.array(running.moments[-1].legal)

    # A round's steps ----------------------------------------------------------------------------------------------

    def _search_began(self) -> None:
        self._running, self._refused, self._illegal, self._applied = None, False, 0, None

    def _begin(self, recipe: Recipe) -> float:
        """Begin a round and take its first steps; return the shaping reward."""
        running = self.search.begin(recipe, self._steering)
        self._running, self._refused, self._applied = running, False, None
        if not running.ended:
            running.advance()
        return self._discount * self._potential()

    def _adjust(self, choice: Any, key: str) -> float:
        """Apply the adjustment of an action and take the next steps; return the shaping reward.

        Raises:
            ValueError: no index of the catalogue, or one that cannot be applied and is not to become ``none``; nothing
                was done.
        """
        index = require_integer(key, choice, low=0, high=len(CATALOGUE) - 1)
        running = self._running
        assert running is not None  # both environments ask only then
        before, self._refused = self._potential(), not self.adjustment_mask()[index]
        if self._refused:
            if self._refuses:
                self._refused = False
                why = "the round has ended" if running.ended else running.moments[-1].refusals[index]
                raise ValueError(
                    f"{key}: {CATALOGUE_NAMES[index]!r} cannot be applied now ({why}); choose one that action_masks() "
                    "allows, or make the environment with illegal='none'."
                )
            self._illegal += 1
            index = NONE
        self._applied = CATALOGUE_NAMES[index]
        if not running.ended:
            adjustment = CATALOGUE[index].adjustment(running.sources)
            assert adjustment is not None  # a legal entry has its source
            running.advance(adjustment)
        return self._discount * self._potential() - before

    def _finished(self) -> tuple[Outcome | None, float]:
        """Settle the round if it has ended; return its outcome and reward, else None and 0."""
        running = self._running
        if running is None or not running.ended:
            return None, 0.0
        outcome = self.search.finish(running)
        self._running = None
        return outcome, self._reward(outcome, outcome.charged + running.charged)

    def _potential(self) -> float:
        running = self._running
        if running is None or not running.moments or running.moments[-1].quick_score is None:
            return 0.0
        base = self.search.scorecards["base"].score
        return float((running.moments[-1].quick_score - base) / max(1.0 - base, MIN_HEADROOM))

    # What is seen -------------------------------------------------------------------------------------------------

    def _left(self) -> float:
        spent = 0.0 if self._running is None else self._running.cost.in_unit(self.budget.unit)
        return max(0.0, super()._left() - spent)

    def _observation(self) -> dict[str, np.ndarray]:
        running = self._running
        moment = running.moments[-1] if running is not None and running.moments else None
        recipe = None if running is None else running.recipe
        sources = () if running is None else running.sources
        inputs = RunningInputs(
            phase=np.array([[float(running is not None)]]),
            signals=signal_row(moment, self.clocked)[None],
            control=control_row(moment, recipe, sources, self._refused)[None],
            recipe=(np.zeros(self.space.width) if recipe is None else self.space.to_vector(recipe))[None],
        )
        blocks = {name: values[0] for name, values in observe_running(inputs).items()}
        return {**super()._observation(), **blocks}

    def _info(self, outcome: Outcome | None) -> dict[str, Any]:
        info = super()._info(outcome)
        running = self._running
        info["adjustment"], info["illegal"], info["illegal_count"] = self._applied, self._refused, self._illegal
        if running is not None:
            info["ended"], info["replayed"] = None, running.origin == "written"
            info["running"] = self._running_info(running)
        if outcome is not None:
            info["round"]["adjustments"] = [[step, str(adjustment)] for step, adjustment in outcome.report.adjustments]
        return info

    def _running_info(self, running: RunningRound) -> dict[str, Any]:
        """Return the facts of a running round: nothing a clock decides unless that is observed too."""
        facts: dict[str, Any] = {"recipe": running.recipe.to_dict(), "step": 0, "quick_score": None}
        if running.moments:
            moment = running.moments[-1]
            shown = {n: v for n, v in moment.signals.values.items() if self.clocked or not SIGNALS[n].clocked}
            facts |= {"step": moment.step, "quick_score": moment.quick_score}
            facts |= {"signals": shown, "settings": dict(moment.settings)}
        return facts

    def render(self) -> str | None:
        """Return the running round, else the last one, in words when ``render_mode="ansi"``."""
        text, running = super().render(), self._running
        if text is None or running is None or not running.moments:
            return text
        moment = running.moments[-1]
        loss = moment.signals.values.get("loss")
        shown = "" if loss is None else f", loss {loss:.3g}"
        rate = moment.settings.get("learning_rate", float("nan"))
        return (
            f"{text}\nround {self.search.rounds + 1}: step {moment.step}/{running.recipe.steps}{shown}, lr {rate:.3g}"
        )


_SETTINGS: Mapping[str, Any] = {
    name: None for name in PostTrainingEnv.__init__.__annotations__ if name not in ("self", "task", "return")
}


def one_legal(count: int, index: int = 0) -> np.ndarray:
    """Return ``(count,)`` bool that is True at one index."""
    mask = np.zeros(count, dtype=bool)
    mask[index] = True
    return mask


def adjustment_space() -> gym.spaces.Discrete:
    """Return the space of adjustments: an index into the catalogue; 0 changes nothing."""
    return gym.spaces.Discrete(len(CATALOGUE))


__all__ = ["ILLEGAL", "AdjustableEnv", "adjustment_space", "one_legal"]
