"""What an experiment's environments are made of, as plain data that workers can receive."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import gymnasium as gym

from ..envs.budget import Budget
from ..envs.in_loop import as_recipe
from ..envs.journal import Journal
from ..envs.post_training import PostTrainingEnv
from ..envs.registration import FULL_ID, IN_LOOP_ID, RECIPE_ID
from ..inner_trainers.base import InnerTrainer
from ..inner_trainers.messages import did_you_mean
from ..inner_trainers.tasks import TaskFamily, resolve_task

ENVIRONMENTS = {"recipe": RECIPE_ID, "in-loop": IN_LOOP_ID, "full": FULL_ID}
"""Ids by the name the command line takes."""


@dataclass(frozen=True)
class InLoopSettings:
    """How rounds are adjusted while they run.

    Attributes:
        kind: ``"in-loop"``, where the recipe is given, or ``"full"``, where the policy chooses it too.
        recipe: fields of the given recipe; None for ``"full"``.
        interval: optimiser steps between two decisions.
        shaping: whether rewards are shaped by quick evaluations.
    """

    kind: str
    recipe: Mapping[str, Any] | None = None
    interval: int = 5
    shaping: bool = False

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the environment."""
        recipe = {} if self.recipe is None else {"recipe": self.recipe}
        return {**recipe, "interval": self.interval, "shaping": self.shaping}


def in_loop_settings(kind: str, recipe: Path | None, interval: int, shaping: bool) -> InLoopSettings | None:
    """Return the settings of an environment by name; None for ``"recipe"``, whose rounds are not adjusted.

    Raises:
        ValueError: an unknown name, a recipe that is missing, not wanted or not readable, or an option that only
            environments with adjustments have.
    """
    if kind not in ENVIRONMENTS:
        raise ValueError(f"--env: unknown {kind!r}.{did_you_mean(kind, ENVIRONMENTS)}")
    if kind == "in-loop" and recipe is None:
        raise ValueError("--recipe: --env in-loop adjusts rounds of one recipe; name its YAML or JSON file.")
    if kind != "in-loop" and recipe is not None:
        raise ValueError(f"--recipe: with --env {kind} the policy chooses recipes; leave it out, or use --env in-loop.")
    if kind == "recipe":
        if shaping:
            raise ValueError("--shaping: rounds of --env recipe are not paused; use --env in-loop or --env full.")
        return None
    given = None if recipe is None else as_recipe(recipe).to_dict()
    return InLoopSettings(kind, given, interval, shaping)


@dataclass(frozen=True)
class EnvSettings:
    """How to build one environment.

    Attributes:
        task: built-in family name, ``module:Class`` or a task file.
        split: ``"train"`` or ``"test"`` instances.
        instances: instance seeds to draw from; empty for all of the split.
        budget: the budget of one episode.
        price: reward taken for spending the whole budget.
        evaluator: settings of the TRL trainer's evaluator.
        faults: settings of the TRL trainer's fault policy.
        devices: devices that workers take in turn; empty lets torch choose.
        in_loop: how rounds are adjusted while they run; None where they are not.
        space: the content of a decision-space file (`SpaceFile.to_dict`), of which the space alone is used, as budget,
            price and evaluator stand here; None for the default space.
        failure_penalty: reward taken for a failed round.
    """

    task: str = "letters"
    split: str = "train"
    instances: tuple[int, ...] = ()
    budget: Budget = field(default_factory=Budget)
    price: float = 0.1
    evaluator: Mapping[str, Any] = field(default_factory=dict)
    faults: Mapping[str, Any] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    in_loop: InLoopSettings | None = None
    space: Mapping[str, Any] | None = None
    failure_penalty: float = 0.1

    def device_of(self, worker: int) -> str:
        """Return the device of a worker: devices are dealt in turn, so 4 workers on 2 get 0, 1, 0, 1."""
        return self.devices[worker % len(self.devices)] if self.devices else "auto"

    def family(self) -> TaskFamily:
        """Return the task family."""
        return resolve_task(self.task)

    def trainer(self, worker: int = 0) -> InnerTrainer:
        """Return the trainer of one worker: the task's own, or TRL on the worker's device."""
        family = self.family()
        own = family.instance(self._seeds(family)[0]).trainer()
        if own is not None:
            return own
        from ..envs.space_file import evaluator_arguments
        from ..inner_trainers.evaluation import Evaluator
        from ..inner_trainers.fault_policy import FaultPolicy
        from ..inner_trainers.trl.trainer import TrlTrainer

        policy = FaultPolicy.from_dict(self.faults)
        return TrlTrainer(
            Evaluator(**evaluator_arguments(self.evaluator)), device=self.device_of(worker), fault_policy=policy
        )

    def build(
        self, worker: int = 0, journal: Journal | None = None, trainer: InnerTrainer | None = None
    ) -> gym.Env[Any, Any]:
        """Return the environment of one worker, on a trainer that is in memory already if one is given."""
        family = self.family()
        own: dict[str, Any] = {} if self.in_loop is None else self.in_loop.arguments()
        if self.space is not None:
            own["space"] = self.space
        env: gym.Env[Any, Any] = gym.make(
            ENVIRONMENTS["recipe" if self.in_loop is None else self.in_loop.kind],
            task=family,
            split=self.split,
            instances=self._seeds(family),
            trainer=self.trainer(worker) if trainer is None else trainer,
            budget=self.budget,
            price=self.price,
            failure_penalty=self.failure_penalty,
            journal=journal,
            **own,
        )
        return env

    def _seeds(self, family: TaskFamily) -> Sequence[int]:
        return self.instances or (family.train_seeds if self.split == "train" else family.test_seeds)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        data = asdict(replace(self, evaluator=dict(self.evaluator), faults=dict(self.faults)))
        for name, absent in (("in_loop", None), ("space", None), ("failure_penalty", 0.1)):
            if getattr(self, name) == absent:
                del data[name]  # as runs of before there was such a setting have it
        return {k: list(v) if isinstance(v, tuple) else v for k, v in data.items()}


def recipe_env(env: gym.Env[Any, Any]) -> PostTrainingEnv:
    """Return the recipe environment below every wrapper."""
    base = env.unwrapped
    assert isinstance(base, PostTrainingEnv)  # built by `EnvSettings.build`
    return base


def require_folder(setting: str, path: Path) -> None:
    """Refuse a path that cannot be a run's folder, before any time is spent.

    Raises:
        ValueError: the path is empty, or it or a parent is a file, or it cannot be written.
    """
    if str(path) in ("", "."):
        raise ValueError(f"{setting}: expected the name of a folder for the run, got {str(path)!r}.")
    for place in (path, *path.parents):
        if place.exists():
            if not place.is_dir():
                raise ValueError(f"{setting}: {place} is a file; expected a folder, or a name that is free.")
            if not os.access(place, os.W_OK | os.X_OK):
                raise ValueError(f"{setting}: {place} cannot be written; choose another folder.")
            return
