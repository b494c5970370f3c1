"""`ControlView`: shows a policy of in-loop environments what a controller sees, and tells how the objective moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, SupportsFloat

import gymnasium as gym
import numpy as np

from ...inner_trainers.adjustments import CATALOGUE, CATALOGUE_NAMES, catalogue_index
from ...inner_trainers.recipe import Recipe
from ...inner_trainers.signals import Signals
from .base import ControlState
from .features import FEATURE_COUNT, Features
from .limits import Limits
from .net import checked_actions


class ParkedRound(Protocol):
    """What is asked of an environment's round; `envs.running.RunningRound` has it."""

    @property
    def recipe(self) -> Recipe:
        """What is asked of it."""

    @property
    def sources(self) -> Sequence[str]:
        """The sources of its mix, sorted."""

    @property
    def moments(self) -> Sequence[Any]:
        """What each pause showed, oldest first; see `envs.running.Moment`."""


@dataclass(frozen=True)
class Outcome:
    """What one decision led to by the next pause; `ControlView` puts it into ``info["control"]``.

    Attributes:
        decided_at: optimiser steps done when it was taken.
        step: optimiser steps done now.
        kind: ``"reward"`` or ``"loss"``: what the objective is made of; None when there is none.
        before: the objective when it was decided; None when it was not measured.
        after: the objective now; None when it was not measured.
        ended: whether the round is over.
        steps_lost: optimiser steps that a failure has kept from being taken; 0 without one.
    """

    decided_at: int
    step: int
    kind: str | None
    before: float | None
    after: float | None
    ended: bool
    steps_lost: int = 0


def objective_of(signals: Signals) -> tuple[str | None, float | None]:
    """Return what a round is to raise: its reward where it has one, else its loss with the sign turned.

    The first entry is ``"reward"`` or ``"loss"``, or None where neither was measured.
    """
    reward, loss = signals.values.get("reward"), signals.values.get("loss")
    if reward is not None:
        return "reward", reward
    return (None, None) if loss is None else ("loss", -loss)


@dataclass(frozen=True)
class _Unbegun:
    """Stands for a round that ended before its first pause."""

    step: int = 0
    signals: Signals = field(default_factory=Signals)
    settings: Mapping[str, float] = field(default_factory=dict)
    legal: Sequence[bool] = (False,) * len(CATALOGUE)


class ControlView(gym.Wrapper[np.ndarray, Any, Any, Any], gym.utils.RecordConstructorArgs):
    """An in-loop environment whose observations are a controller's features, (FEATURE_COUNT,) float32 in [-1, 1].

    What a net learns behind it, `NetController` can use in any round. The environment's own observation is not shown;
    rewards pass unchanged; ``info["control"]`` holds an `Outcome`.

    Args:
        env: an environment with a Discrete(37) action space, `action_masks` and, on its innermost layer, ``running``:
            the round that is parked, a `ParkedRound`.
        actions: catalogue names that are legal here, beside ``none``; None for all.
        hardware: whether signals that a clock decides are shown.
        limits: how often what may be done; see `limits.Limits`.

    Raises:
        ValueError: an environment with other actions, or an unknown catalogue name.
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        *,
        actions: Sequence[str] | None = None,
        hardware: bool = False,
        limits: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        gym.utils.RecordConstructorArgs.__init__(self, actions=actions, hardware=hardware, limits=limits)
        gym.Wrapper.__init__(self, env)
        space = env.action_space
        if not isinstance(space, gym.spaces.Discrete) or space.n != len(CATALOGUE):
            raise ValueError(f"env: expected actions Discrete({len(CATALOGUE)}), one for each entry, got {space}.")
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (FEATURE_COUNT,), np.float32)
        self._actions = checked_actions(CATALOGUE_NAMES if actions is None else actions)
        self._allowed = np.zeros(len(CATALOGUE), dtype=bool)
        self._allowed[[catalogue_index(name) for name in self._actions]] = True
        self._features = Features(hardware=hardware)
        self._limits = Limits({} if limits is None else limits)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin a round and return what its first pause shows."""
        _, info = self.env.reset(seed=seed, options=options)
        parked = self._parked()
        self._features.begin(parked.recipe, parked.sources)
        self._limits.begin()
        return self._observe(parked), info

    def step(self, action: Any) -> tuple[np.ndarray, SupportsFloat, bool, bool, dict[str, Any]]:
        """Take a decision and go on to the next pause."""
        parked = self._parked()
        before = _moment(parked)
        adjustment = CATALOGUE[int(action)].adjustment(parked.sources)
        _, reward, terminated, truncated, info = self.env.step(action)
        if adjustment is not None and not info.get("illegal"):
            self._features.note(adjustment, before.step)
            self._limits.note(int(action), before.step)
        after = _moment(parked)
        kind, now = objective_of(after.signals)
        moved = after.step > before.step
        failed = terminated and (info.get("round") or {}).get("failure") is not None
        outcome = Outcome(
            decided_at=before.step,
            step=after.step,
            kind=kind,
            before=objective_of(before.signals)[1],
            after=now if moved else None,
            ended=terminated or truncated,
            steps_lost=parked.recipe.steps - after.step if failed else 0,
        )
        return self._observe(parked), reward, terminated, truncated, {**info, "control": outcome}

    def action_masks(self) -> np.ndarray:
        """Return which entries can be chosen, (37,) bool."""
        masks = np.asarray(self.env.get_wrapper_attr("action_masks")(), dtype=bool)
        masks = masks & self._allowed
        running: ParkedRound | None = getattr(self.env.unwrapped, "running", None)
        if running is not None:
            masks[self._limits.blocked(_moment(running).step)] = False
        return np.asarray(masks)

    def _parked(self) -> ParkedRound:
        running: ParkedRound | None = getattr(self.env.unwrapped, "running", None)
        if running is None:
            raise ValueError("env: it has no running round; ControlView is for PostTrain/InLoop-v0.")
        return running

    def _observe(self, parked: ParkedRound) -> np.ndarray:
        moment = _moment(parked)
        state = ControlState(
            moment.step, parked.recipe.steps, moment.signals, moment.settings, parked.sources, moment.legal
        )
        return self._features.vector(state).copy()


def _moment(parked: ParkedRound) -> Any:
    return parked.moments[-1] if parked.moments else _Unbegun()
