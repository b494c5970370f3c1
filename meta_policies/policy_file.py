"""A trained policy in one file: SB3's zip with its wrappers, normaliser, decision space and task facts beside it."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from ..envs.decision_space import DecisionSpace, Parameter
from ..inner_trainers.adjustments import CATALOGUE_NAMES
from .normaliser import Normaliser
from .sb3 import sb3_algorithm, wrap_for

_META_FILE = "posttrain_gym.json"
_SHOWN = 8
"""Differences between two decision spaces that an error shows."""
_SPACE_KEYS = ("mix_bounds", "conditions", "constraints", "starts", "defaults")
"""Parts of a space that files of before there were such have not; they then have the defaults."""


def space_fingerprint(env: gym.Env[Any, Any]) -> dict[str, Any]:
    """Return what a saved policy needs to be used again: decision space, adjustments and shapes.

    Where the recipe is given, it is no part of it: a policy that adjusts rounds can be used on those of other recipes.
    """
    base: Any = env.unwrapped
    space = base.space
    adjustments = {"adjustments": list(CATALOGUE_NAMES)} if base.in_loop else {}
    observation = {n: list(s.shape or ()) for n, s in base.observation_space.spaces.items()}
    if isinstance(base.action_space, gym.spaces.Discrete):
        return {"sources": list(space.sources), "observation": observation, **adjustments}
    described = space.to_dict()
    del described["usable"]  # that is the task's
    return {**adjustments, **described, "observation": observation}


def task_facts(env: gym.Env[Any, Any]) -> dict[str, Any]:
    """Return what the policy was trained on, for people: it may be used on other tasks."""
    base: Any = env.unwrapped
    first = base.family.instance(base.instances[0])
    return {
        "family": base.family.name,
        "dimensions": list(first.built.benchmark.dimensions),
        "base_model_size": int(base.trainer.parameters(first)),
        "budget": [base.budget.unit, base.budget.limit, base.budget.max_rounds, base.budget.patience],
        "price": base.reward_settings.price,
    }


def _environment_of(facts: Mapping[str, Any]) -> str:
    """Return what the command line calls the environment that a fingerprint is of."""
    if "adjustments" not in facts:
        return "recipe"
    return "full" if "algorithms" in facts else "in-loop"


def wrapper_arguments(algo: str, env: gym.Env[Any, Any]) -> dict[str, Any]:
    """Return the arguments of the action wrapper that fits the algorithm, as ``env`` has it.

    Raises:
        ValueError: ``env`` is not in that wrapper.
    """
    wrapper = sb3_algorithm(algo).wrapper_for(env)
    if wrapper is None:
        return {}
    layer: Any = env
    while not isinstance(layer, wrapper):
        if layer is env.unwrapped:
            raise ValueError(f"env: {algo} acts in {wrapper.__name__}, which this environment is not wrapped in.")
        layer = layer.env
    recorded: Any = layer  # Gymnasium's `RecordConstructorArgs` keeps them for `env.spec`
    return dict(recorded._saved_kwargs)


def save_policy(
    model: Any,
    path: str | Path,
    algo: str,
    env: gym.Env[Any, Any],
    task: str,
    hyperparameters: Mapping[str, Any] | None = None,
) -> Path:
    """Write the model with the facts needed to use it elsewhere, in one zip, atomically.

    Args:
        model: an SB3 model; the statistics of its `VecNormalize`, if it has one, are written as plain data.
        path: target, ``.zip``.
        algo: key of `SB3_ALGORITHMS`.
        env: an environment of the kind it was trained in.
        task: name of the task family.
        hyperparameters: what it was trained with, in plain data.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial.zip")
    model.save(partial)
    normalised = model.get_vec_normalize_env()
    facts = {
        "algo": algo,
        "task": task,
        "wrapper": wrapper_arguments(algo, env),
        "normaliser": None if normalised is None else Normaliser.of(normalised).to_dict(),
        "task_facts": task_facts(env),
        "hyperparameters": {} if hyperparameters is None else dict(hyperparameters),
        "seed": model.seed,
        "versions": {name: version(name) for name in ("posttrain-gym", "stable-baselines3", "sb3-contrib", "torch")},
        **space_fingerprint(env),
    }
    with zipfile.ZipFile(partial, "a") as archive:
        archive.writestr(_META_FILE, json.dumps(facts))
    partial.replace(path)
    return path


class TrainedPolicy:
    """A saved SB3 model, with `predict` that takes masks whether or not its algorithm does.

    SB3 files hold pickled Python objects: load only files you made or trust.

    Args:
        path: file written by `save_policy`.
        env: the wrapped-or-not environment it will act in.

    Attributes:
        algo: key of `SB3_ALGORITHMS`.
        wrapper_arguments: arguments of its action wrapper.
        normaliser: scales observations as in training; None where they were not scaled.

    Raises:
        ValueError: the file is missing, damaged, no policy of this project, or made for another decision space; the
            message shows the differences one by one.
    """

    def __init__(self, path: str | Path, env: gym.Env[Any, Any]) -> None:
        path = Path(path)
        meta = read_policy_facts(path)
        own = space_fingerprint(env)
        if _environment_of(meta) != _environment_of(own):
            raise ValueError(
                f"policy {path}: it was trained in an environment of --env {_environment_of(meta)}, this one is of "
                f"--env {_environment_of(own)}; use it there."
            )
        different = list(_differences(_complete(meta), own))
        if different:
            more = f"; and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
            raise ValueError(
                f"policy {path}: trained on task {meta.get('task')!r}, made for another decision space; "
                f"{'; '.join(different[:_SHOWN])}{more}."
            )
        self.algo: str = meta["algo"]
        self.wrapper_arguments: dict[str, Any] = meta.get("wrapper", {})
        stored = meta.get("normaliser")
        self.normaliser = None if stored is None else Normaliser.from_dict(stored)
        algorithm = sb3_algorithm(self.algo)
        try:
            self.model = algorithm.load_class().load(path, device="cpu")
        except Exception as error:  # SB3 and pickle raise many types for one fact
            raise ValueError(
                f"policy {path}: damaged ({type(error).__name__}: {error}); train or copy it again."
            ) from error
        acts_in = wrap_for(self.algo, env.unwrapped, **self.wrapper_arguments).action_space
        if self.model.action_space != acts_in:
            raise ValueError(
                f"policy {path}: made for another action space; the policy has {self.model.action_space}, "
                f"the environment {acts_in}."
            )
        self._masked = algorithm.masked

    def predict(
        self,
        observation: Any,
        state: tuple[np.ndarray, ...] | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
        action_masks: np.ndarray | None = None,
    ) -> tuple[Any, tuple[np.ndarray, ...] | None]:
        """Return ``(action, state)`` in the action space of the algorithm's wrapper.

        Raises:
            ValueError: a mask without a legal choice in one of its heads.
        """
        if self.normaliser is not None:
            observation = self.normaliser(observation)
        if not self._masked or action_masks is None:
            action, state = self.model.predict(observation, state, episode_start, deterministic)
        else:
            require_legal_choice(action_masks, self.model.action_space)
            action, state = self.model.predict(
                observation, state, episode_start, deterministic, action_masks=action_masks
            )
        return action, state


def _complete(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a policy with what older files leave out or spell otherwise."""
    facts = dict(meta)
    if "parameters" in facts:
        known = Parameter.__dataclass_fields__
        facts["parameters"] = {
            name: Parameter.from_dict({k: v for k, v in entry.items() if k in known}).to_dict()
            for name, entry in facts["parameters"].items()
        }
        empty = DecisionSpace(("any",), ("any",), {"any": ()}).to_dict()
        for key in _SPACE_KEYS:
            facts.setdefault(key, empty[key])
    return facts


def _differences(policy: Any, environment: Any, at: str = "") -> Iterator[str]:
    """Yield what differs, one sentence per place."""
    if isinstance(policy, Mapping) and isinstance(environment, Mapping):
        for key in environment if not at else {**environment, **policy}:
            place = f"{at}.{key}" if at else str(key)
            if key not in policy:
                yield f"{place}: the policy has none, the environment {environment[key]}"
            elif key not in environment:
                yield f"{place}: the policy has {policy[key]}, the environment none"
            else:
                yield from _differences(policy[key], environment[key], place)
    elif policy != environment:
        yield f"{at}: the policy has {policy}, the environment {environment}"


def require_legal_choice(mask: np.ndarray, action_space: gym.Space[Any]) -> None:
    """Refuse a mask that leaves a head without a legal choice; sb3-contrib would play any of them.

    Raises:
        ValueError: names the head.
    """
    heads = action_space.nvec if isinstance(action_space, gym.spaces.MultiDiscrete) else [int(action_space.n)]  # type: ignore[attr-defined]
    total = int(np.sum(heads))
    if np.shape(mask)[-1:] != (total,):
        raise ValueError(f"action_masks: expected {total} choices, got shape {np.shape(mask)}.")
    flat = np.asarray(mask, dtype=bool).reshape(-1, total)
    first = 0
    for number, width in enumerate(heads):
        if not flat[:, first : first + width].any(axis=1).all():
            raise ValueError(f"action_masks: head {number} has no legal choice among its {width}.")
        first += int(width)


def read_policy_facts(path: Path) -> dict[str, Any]:
    """Return the facts written beside a saved model; nothing is unpickled.

    Raises:
        ValueError: the file is missing, no zip, or holds no such facts.
    """
    if not path.is_file():
        raise ValueError(f"policy {path}: no such file; `posttrain-gym train` writes policy.zip into its run folder.")
    try:
        with zipfile.ZipFile(path) as archive:
            facts = json.loads(archive.read(_META_FILE))
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        raise ValueError(
            f"policy {path}: damaged, or not written by posttrain-gym ({type(error).__name__}: {error})."
        ) from error
    if not isinstance(facts, dict) or "algo" not in facts:
        raise ValueError(f"policy {path}: its {_META_FILE} names no algorithm.")
    return facts
