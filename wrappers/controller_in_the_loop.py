"""`ControllerInTheLoop`: the round of each recipe step is adjusted while it runs, by an in-loop controller."""

from __future__ import annotations

import importlib
from typing import Any

import gymnasium as gym

from ..envs.records import JournalMismatchError
from ..envs.running import RunningRound, Steering
from ..envs.search import Outcome, Search
from ..inner_trainers.adjustments import NONE, Adjustment
from ..inner_trainers.control import Controller, ControlState, Decision
from ..inner_trainers.messages import first_line, require_integer
from ..inner_trainers.recipe import Recipe
from .checks import base_env


class ControllerInTheLoop(gym.Wrapper[Any, Any, Any, Any], gym.utils.RecordConstructorArgs):
    """Plays `PostTrain/Recipe-v0` with a controller inside: an action names a recipe, the controller adjusts its round.

    After every ``interval`` optimiser steps the round is parked and the controller asked, as `drive_round` does: what
    it decides is applied before the next step. A controller that raises, or whose decision is none or cannot be
    applied, is not asked again in that round; the round goes on unadjusted and its report is flagged. What a controller
    would do before the first step (`opening` of schedules that warm up) is left out. Rounds are journalled with their
    decisions and repeated from there. An equal round is trained again, as every adjusted one, not answered from memory.

    Action, observation, masks and reward are those of the environment below. ``info["controller"]`` has the name, how
    often it was asked, how many adjustments were applied, and why it was given up; ``info["round"]["adjustments"]``
    what was applied and after which step.

    Args:
        env: `PostTrain/Recipe-v0`, wrapped or not.
        controller: a `Controller`, or ``module:callable`` that returns one, with arguments after further colons
            (``"posttrain_gym.meta_policies.controllers.catalogue:make_controller:rules"``). Text is imported: give only
            what you trust.
        interval: optimiser steps between two decisions, in [1, 100000].

    Raises:
        ValueError: another environment, or text that names no controller.
    """

    def __init__(self, env: gym.Env[Any, Any], controller: Controller | str, interval: int = 5) -> None:
        gym.utils.RecordConstructorArgs.__init__(self, controller=controller, interval=interval)
        gym.Wrapper.__init__(self, env)
        if base_env(env).in_loop:
            raise ValueError(
                f"ControllerInTheLoop: {type(env.unwrapped).__name__} adjusts rounds by its own actions; "
                "wrap PostTrain/Recipe-v0."
            )
        self._steering = Steering(require_integer("interval", interval, low=1, high=100_000))
        self.controller = _controller(controller)
        self._asked: dict[str, Any] = {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Run one round with the controller; see `PostTrainingEnv.step`."""
        base = base_env(self.env)
        self._asked = self._facts(0, 0, None)
        rounds = len(base.search.outcomes)
        with base.rounds_run_by(self._run):
            observation, reward, terminated, truncated, info = self.env.step(action)
        info["controller"] = self._asked
        if len(base.search.outcomes) > rounds:
            adjusted = base.search.outcomes[-1].report.adjustments
            info["round"]["adjustments"] = [[step, str(adjustment)] for step, adjustment in adjusted]
        return observation, reward, terminated, truncated, info

    def _facts(self, looks: int, applied: int, failure: str | None) -> dict[str, Any]:
        return {"name": self.controller.name, "looks": looks, "applied": applied, "failure": failure}

    def _run(self, search: Search, recipe: Recipe) -> Outcome:
        running = search.begin(recipe, self._steering)
        looks = applied = 0
        failure: str | None = None
        if not running.ended:
            try:
                self.controller.begin(recipe, running.sources)
            except Exception as error:
                failure = first_line(error)
            running.advance()
        while not running.ended:
            adjustment = Adjustment()
            if failure is None:
                looks += 1
                adjustment, failure = self._decision(running)
            if not _applied(running, adjustment):
                failure = f"its {adjustment} was refused"
            elif adjustment.kind != "none":
                applied += 1
        if failure is not None and running.session is not None:
            name = self.controller.name
            running.session.flag(f"controller {name!r} failed: {failure}; the round went on unadjusted")
        self._asked = self._facts(looks, applied, failure)
        return search.finish(running)

    def _decision(self, running: RunningRound) -> tuple[Adjustment, str | None]:
        """Return what the controller decides at a pause, and why it is not asked again, if so."""
        moment = running.moments[-1]
        state = ControlState(
            step=moment.step,
            steps=running.recipe.steps,
            signals=moment.signals,
            settings=moment.settings,
            sources=running.sources,
            legal=moment.legal,
        )
        try:
            decision = self.controller.decide(state)
        except Exception as error:
            return Adjustment(), first_line(error)
        if not isinstance(decision, Decision) or not isinstance(decision.chosen.adjustment, Adjustment):
            return Adjustment(), f"decide returned {type(decision).__name__}, expected a Decision with an Adjustment"
        action = decision.chosen.action
        if action is not None and action != NONE and not moment.legal[action]:
            return Adjustment(), f"it chose {decision.chosen.adjustment}, which cannot be applied now"
        if running.session is not None:
            for sentence in decision.flags:
                running.session.flag(str(sentence))
        return decision.chosen.adjustment, None

    def action_masks(self) -> Any:
        """Return the masks of the environment below."""
        return self.env.get_wrapper_attr("action_masks")()


def _applied(running: RunningRound, adjustment: Adjustment) -> bool:
    """Apply an adjustment and go on; return False where it was refused and nothing was changed instead."""
    try:
        running.advance(adjustment)
    except JournalMismatchError:
        if adjustment.kind == "none":
            raise
        running.advance(Adjustment())  # a refused one was written down as none; another decision raises again
        return False
    except ValueError:
        if adjustment.kind == "none":
            raise
        running.advance(Adjustment())
        return False
    return True


def _controller(given: Any) -> Controller:
    """Return a controller from a controller or from text that names what makes one.

    Raises:
        ValueError: neither.
    """
    if isinstance(given, str):
        module, _, rest = given.partition(":")
        name, *arguments = rest.split(":")
        try:
            given = getattr(importlib.import_module(module), name)(*arguments)
        except (ImportError, AttributeError, TypeError) as error:
            raise ValueError(
                f"controller: {given!r} does not lead to a controller ({first_line(error)}); expected module:callable, "
                "with arguments after further colons."
            ) from error
    if not isinstance(given, Controller):
        raise ValueError(f"controller: expected begin, decide, describe and a name, got {type(given).__name__}.")
    return given
