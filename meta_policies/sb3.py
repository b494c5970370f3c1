"""Stable-Baselines3 models as meta-policies: which wrapper and which defaults fit, saving and loading.

Defaults suit searches of a few hundred real rounds, each worth seconds to hours: short rollouts, few parameters.
"""

from __future__ import annotations

import importlib
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gymnasium as gym
import numpy as np

from ..envs.decision_space import STOP
from ..inner_trainers.adjustments import CATALOGUE_NAMES, NONE, STOP_ROUND
from ..inner_trainers.messages import did_you_mean
from ..wrappers import DiscretizeAction, FlattenAction

_ON_POLICY = {"n_steps": 8, "batch_size": 16, "learning_rate": 2e-3, "gamma": 0.99, "ent_coef": 0.01}
_OFF_POLICY = {"learning_rate": 1e-3, "learning_starts": 16, "batch_size": 32, "buffer_size": 10_000, "gamma": 0.99}
_META_FILE = "posttrain_gym.json"
NOISE = 0.3
"""Standard deviation of TD3's exploration noise, in action coordinates in [-1, 1]; without any it repeats itself."""
STOP_RELUCTANCE = 2.5
"""Taken from the untrained logit of ``stop``; it is then chosen in about 4 % of the first decisions."""
NONE_PREFERENCE = 2.0
"""Added to the untrained logit of the adjustment ``none``, which is then about a third of the first adjustments."""

Wrapper = type[gym.ActionWrapper[Any, Any, Any]]


@dataclass(frozen=True)
class Sb3Algorithm:
    """How one SB3 algorithm is used.

    Attributes:
        target: ``module:Class``.
        wrapper: the action wrapper that fits an action with recipes.
        masked: whether it takes action masks.
        defaults: keyword arguments.
        policy: SB3's name of its policy for Dict observations.
        discrete: whether it takes a `Discrete` action as it is, so that an environment that has one needs no wrapper.
    """

    target: str
    wrapper: Wrapper
    masked: bool
    defaults: Mapping[str, Any]
    policy: str = "MultiInputPolicy"
    discrete: bool = True

    def wrapper_for(self, env: gym.Env[Any, Any]) -> Wrapper | None:
        """Return the action wrapper that fits an environment; None where it needs none."""
        plain = isinstance(env.unwrapped.action_space, gym.spaces.Discrete)
        return (None if self.discrete else FlattenAction) if plain else self.wrapper

    def load_class(self) -> Any:
        """Import and return the class."""
        module, _, name = self.target.partition(":")
        return getattr(importlib.import_module(module), name)


SB3_ALGORITHMS: Mapping[str, Sb3Algorithm] = MappingProxyType(
    {
        "a2c": Sb3Algorithm(
            "stable_baselines3:A2C",
            FlattenAction,
            False,
            {"n_steps": 8, "learning_rate": 1e-3, "gamma": 0.99, "ent_coef": 0.01},
        ),
        "maskable_ppo": Sb3Algorithm("sb3_contrib:MaskablePPO", DiscretizeAction, True, _ON_POLICY),
        "ppo": Sb3Algorithm("stable_baselines3:PPO", FlattenAction, False, _ON_POLICY),
        "recurrent_ppo": Sb3Algorithm(
            "sb3_contrib:RecurrentPPO", FlattenAction, False, _ON_POLICY, policy="MultiInputLstmPolicy"
        ),
        "sac": Sb3Algorithm("stable_baselines3:SAC", FlattenAction, False, _OFF_POLICY, discrete=False),
        "td3": Sb3Algorithm(
            "stable_baselines3:TD3", FlattenAction, False, {**_OFF_POLICY, "action_noise": "normal"}, discrete=False
        ),
    }
)
"""SB3 and sb3-contrib algorithms by the name the command line takes."""


def sb3_algorithm(name: str) -> Sb3Algorithm:
    """Return the algorithm of a name.

    Raises:
        ValueError: unknown, with a did-you-mean.
    """
    if name not in SB3_ALGORITHMS:
        raise ValueError(f"algo: unknown {name!r}.{did_you_mean(name, SB3_ALGORITHMS)}")
    return SB3_ALGORITHMS[name]


def wrap_for(name: str, env: gym.Env[Any, Any], **arguments: Any) -> gym.Env[Any, Any]:
    """Return ``env`` in the action wrapper that fits the algorithm, with the wrapper's own arguments.

    An environment whose action is a `Discrete` is returned as it is where the algorithm takes that.
    """
    wrapper = sb3_algorithm(name).wrapper_for(env)
    return env if wrapper is None else wrapper(env, **arguments)


def make_model(name: str, env: Any, seed: int, **overrides: Any) -> Any:
    """Return an untrained SB3 model for a wrapped environment or a vector of them.

    Args:
        name: key of `SB3_ALGORITHMS`.
        env: environment (already in `wrap_for`) or SB3 `VecEnv`.
        seed: SB3's seed.
        **overrides: keyword arguments that replace the defaults.
    """
    algorithm = sb3_algorithm(name)
    settings = {"device": "cpu", **algorithm.defaults, **overrides}
    if settings.get("action_noise") == "normal":
        from stable_baselines3.common.noise import NormalActionNoise

        width = env.action_space.shape[0]
        settings["action_noise"] = NormalActionNoise(np.zeros(width), np.full(width, NOISE))
    envs = getattr(env, "num_envs", 1)
    if "n_steps" in settings and "batch_size" in settings:
        rollout = settings["n_steps"] * envs
        settings["batch_size"] = min(settings["batch_size"], rollout)
    model = algorithm.load_class()(algorithm.policy, env, seed=seed, **settings)
    _prefer_going_on_at_first(model)
    return model


def _prefer_going_on_at_first(model: Any) -> None:
    """Make an untrained policy with discrete choices stop rarely, and often leave a running round alone.

    With equal preferences a third of all decisions would end their episode before a round was tried, and a running
    round would be changed at nearly every pause.
    """
    import torch

    space = model.action_space
    if not isinstance(space, gym.spaces.MultiDiscrete | gym.spaces.Discrete):
        return
    with torch.no_grad():
        bias = model.policy.action_net.bias  # one logit per choice, heads one after the other
        if isinstance(space, gym.spaces.MultiDiscrete):
            bias[STOP] -= STOP_RELUCTANCE
        if "control" in model.observation_space.spaces:  # the last head is the adjustment
            first = len(bias) - len(CATALOGUE_NAMES)
            bias[first + STOP_ROUND] -= STOP_RELUCTANCE
            bias[first + NONE] += NONE_PREFERENCE


def space_fingerprint(env: gym.Env[Any, Any]) -> dict[str, Any]:
    """Return what a saved policy needs to be used again: algorithms, sources, knobs, adjustments and shapes.

    Where the recipe is given, it is no part of it: a policy that adjusts rounds can be used on those of other recipes.
    """
    base: Any = env.unwrapped
    space = base.space
    adjustments = {"adjustments": list(CATALOGUE_NAMES)} if base.in_loop else {}
    observation = {n: list(s.shape or ()) for n, s in base.observation_space.spaces.items()}
    if isinstance(base.action_space, gym.spaces.Discrete):
        return {"sources": list(space.sources), "observation": observation, **adjustments}
    return {
        **adjustments,
        "algorithms": list(space.algorithms),
        "sources": list(space.sources),
        "parameters": {n: p.to_dict() for n, p in space.parameters.items()},
        "fixed": dict(space.fixed),
        "observation": observation,
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


def save_policy(model: Any, path: str | Path, algo: str, env: gym.Env[Any, Any], task: str) -> Path:
    """Write the model with the facts needed to use it elsewhere, in one zip, atomically.

    Args:
        model: an SB3 model.
        path: target, ``.zip``.
        algo: key of `SB3_ALGORITHMS`.
        env: an environment of the kind it was trained in.
        task: name of the task family.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial.zip")
    model.save(partial)
    with zipfile.ZipFile(partial, "a") as archive:
        facts = {"algo": algo, "task": task, "wrapper": wrapper_arguments(algo, env), **space_fingerprint(env)}
        archive.writestr(_META_FILE, json.dumps(facts))
    partial.replace(path)
    return path


class TrainedPolicy:
    """A saved SB3 model, with `predict` that takes masks whether or not its algorithm does.

    SB3 files hold pickled Python objects: load only files you made or trust.

    Args:
        path: file written by `save_policy`.
        env: the wrapped-or-not environment it will act in.

    Raises:
        ValueError: the file is missing, damaged, no policy of this project, or made for another decision space; the
            message shows the difference.
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
        different = [
            f"{k}: the policy has {meta.get(k)}, the environment {own[k]}" for k in own if meta.get(k) != own[k]
        ]
        if different:
            raise ValueError(
                f"policy {path}: trained on task {meta.get('task')!r}, made for another decision space; "
                f"{'; '.join(different)}."
            )
        self.algo: str = meta["algo"]
        self.wrapper_arguments: dict[str, Any] = meta.get("wrapper", {})
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
        observation: Mapping[str, np.ndarray],
        state: tuple[np.ndarray, ...] | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
        action_masks: np.ndarray | None = None,
    ) -> tuple[Any, tuple[np.ndarray, ...] | None]:
        """Return ``(action, state)`` in the action space of the algorithm's wrapper.

        Raises:
            ValueError: a mask without a legal choice in one of its heads.
        """
        if not self._masked or action_masks is None:
            action, state = self.model.predict(observation, state, episode_start, deterministic)
        else:
            require_legal_choice(action_masks, self.model.action_space)
            action, state = self.model.predict(
                observation, state, episode_start, deterministic, action_masks=action_masks
            )
        return action, state


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
