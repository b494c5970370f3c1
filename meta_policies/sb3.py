"""Stable-Baselines3 and sb3-contrib algorithms as meta-policies: which wrappers and which defaults fit each.

Defaults, in ``hyperparameters/``, suit searches of a few hundred real rounds, each worth seconds to hours.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np

from ..envs.decision_space import STOP
from ..inner_trainers.adjustments import CATALOGUE_NAMES, NONE, STOP_ROUND
from ..inner_trainers.messages import did_you_mean
from ..wrappers import DiscretizeAction, FlattenAction, FlattenObservation, MaskedObservation, RecipeCatalogue

if TYPE_CHECKING:
    from .hyperparameters import Hyperparameters

NOISE = 0.3
"""Standard deviation of action noise that is not said otherwise, in action coordinates in [-1, 1]."""
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
        policy: SB3's name of its policy.
        discrete: whether it takes a `Discrete` action as it is, so that an environment that has one needs no wrapper.
        box: whether it takes a `Box` action.
        above: wrappers of the observation, above that of the action.
        vectors: whether it learns from several environments side by side.
        on_policy: whether it has rollouts of ``n_steps``.
    """

    target: str
    wrapper: Wrapper
    masked: bool = False
    policy: str = "MultiInputPolicy"
    discrete: bool = True
    box: bool = True
    above: tuple[Any, ...] = ()
    vectors: bool = True
    on_policy: bool = False

    @property
    def acts(self) -> str:
        """What it acts in, for tables."""
        return {FlattenAction: "Box", DiscretizeAction: "MultiDiscrete", RecipeCatalogue: "Discrete"}[self.wrapper]

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
        "a2c": Sb3Algorithm("stable_baselines3:A2C", FlattenAction, on_policy=True),
        "ars": Sb3Algorithm(
            "sb3_contrib:ARS", FlattenAction, policy="MlpPolicy", above=(FlattenObservation,), vectors=False
        ),
        "crossq": Sb3Algorithm(
            "sb3_contrib:CrossQ", FlattenAction, policy="MlpPolicy", discrete=False, above=(FlattenObservation,)
        ),
        "ddpg": Sb3Algorithm("stable_baselines3:DDPG", FlattenAction, discrete=False),
        "dqn": Sb3Algorithm("stable_baselines3:DQN", RecipeCatalogue, box=False, above=(MaskedObservation,)),
        "maskable_ppo": Sb3Algorithm("sb3_contrib:MaskablePPO", DiscretizeAction, masked=True, on_policy=True),
        "ppo": Sb3Algorithm("stable_baselines3:PPO", FlattenAction, on_policy=True),
        "qrdqn": Sb3Algorithm("sb3_contrib:QRDQN", RecipeCatalogue, box=False, above=(MaskedObservation,)),
        "recurrent_ppo": Sb3Algorithm(
            "sb3_contrib:RecurrentPPO", FlattenAction, policy="MultiInputLstmPolicy", on_policy=True
        ),
        "sac": Sb3Algorithm("stable_baselines3:SAC", FlattenAction, discrete=False),
        "td3": Sb3Algorithm("stable_baselines3:TD3", FlattenAction, discrete=False),
        "tqc": Sb3Algorithm("sb3_contrib:TQC", FlattenAction, discrete=False),
        "trpo": Sb3Algorithm("sb3_contrib:TRPO", FlattenAction, on_policy=True),
    }
)
"""SB3 and sb3-contrib algorithms by the name the command line takes."""

_ALIASES = {"qr-dqn": "qrdqn", "qr_dqn": "qrdqn", "maskable-ppo": "maskable_ppo", "recurrent-ppo": "recurrent_ppo"}
_REFUSED = {
    "her": "hindsight experience replay relabels what was reached as what was wanted, and these environments have no "
    "goal that could be: their reward is a gain, not the distance to a target. Use sac, td3 or tqc, whose replay "
    "buffer it would replace"
}


def sb3_algorithm(name: str) -> Sb3Algorithm:
    """Return the algorithm of a name.

    Raises:
        ValueError: unknown, with a did-you-mean, or one that makes no sense here, with the reason.
    """
    if name.lower() in _REFUSED:
        raise ValueError(f"algo: {name!r} cannot be used here: {_REFUSED[name.lower()]}.")
    if name not in SB3_ALGORITHMS:
        alias = _ALIASES.get(name.lower(), name)
        raise ValueError(f"algo: unknown {name!r}.{did_you_mean(alias, SB3_ALGORITHMS)}")
    return SB3_ALGORITHMS[name]


def wrap_for(name: str, env: gym.Env[Any, Any], **arguments: Any) -> gym.Env[Any, Any]:
    """Return ``env`` in the wrappers that fit the algorithm, with the action wrapper's own arguments.

    An environment whose action is a `Discrete` is returned as it is where the algorithm takes that.

    Raises:
        ValueError: the algorithm cannot act in this environment; says why and what can.
    """
    algorithm = sb3_algorithm(name)
    wrapper = algorithm.wrapper_for(env)
    if wrapper is RecipeCatalogue and getattr(env.unwrapped, "in_loop", False):
        raise ValueError(
            f"algo: {name} chooses one of a list, and --env full asks for a recipe and an adjustment together; use it "
            "with --env recipe or --env in-loop, or maskable_ppo here."
        )
    wrapped = env if wrapper is None else wrapper(env, **arguments)
    for layer in algorithm.above:
        wrapped = layer(wrapped)
    return wrapped


def make_model(name: str, env: Any, seed: int, hyperparameters: Hyperparameters | None = None, **overrides: Any) -> Any:
    """Return an untrained SB3 model for a wrapped environment or a vector of them.

    Args:
        name: key of `SB3_ALGORITHMS`.
        env: environment (already in `wrap_for`) or SB3 `VecEnv`.
        seed: SB3's seed.
        hyperparameters: what replaces the packaged defaults.
        **overrides: keyword arguments that replace both.
    """
    from .hyperparameters import activations, merged, packaged, schedule

    algorithm = sb3_algorithm(name)
    chosen = packaged(name) if hyperparameters is None else merged(packaged(name), hyperparameters)
    settings = {"device": "cpu", **chosen.arguments, **overrides}
    settings = {key: activations(schedule(value)) for key, value in settings.items()}
    if chosen.noise_type is not None and "action_noise" not in settings:
        if not isinstance(env.action_space, gym.spaces.Box):
            raise ValueError(f"noise_type: {name} acts in {env.action_space}, which noise cannot be added to.")
        width = env.action_space.shape[0]
        settings["action_noise"] = _noise(
            chosen.noise_type, NOISE if chosen.noise_std is None else chosen.noise_std, width
        )
    envs = getattr(env, "num_envs", 1)
    if "n_steps" in settings and "batch_size" in settings and algorithm.on_policy:
        settings["batch_size"] = min(settings["batch_size"], settings["n_steps"] * envs)
    model = algorithm.load_class()(algorithm.policy, env, seed=seed, **settings)
    _prefer_going_on_at_first(model)
    return model


def _noise(kind: str, deviation: float, width: int) -> Any:
    from stable_baselines3.common.noise import NormalActionNoise, OrnsteinUhlenbeckActionNoise

    noise = NormalActionNoise if kind == "normal" else OrnsteinUhlenbeckActionNoise
    return noise(np.zeros(width), np.full(width, deviation))


def _prefer_going_on_at_first(model: Any) -> None:
    """Make an untrained policy with discrete choices stop rarely, and often leave a running round alone.

    With equal preferences a third of all decisions would end their episode before a round was tried, and a running
    round would be changed at nearly every pause.
    """
    import torch

    space = model.action_space
    if not isinstance(space, gym.spaces.MultiDiscrete | gym.spaces.Discrete) or not hasattr(model.policy, "action_net"):
        return
    if not isinstance(model.policy.action_net, torch.nn.Linear):  # ARS has a whole network there
        return
    with torch.no_grad():
        bias = model.policy.action_net.bias  # one logit per choice, heads one after the other
        if isinstance(space, gym.spaces.MultiDiscrete):
            bias[STOP] -= STOP_RELUCTANCE
        if "control" in model.observation_space.spaces:  # the last head is the adjustment
            first = len(bias) - len(CATALOGUE_NAMES)
            bias[first + STOP_ROUND] -= STOP_RELUCTANCE
            bias[first + NONE] += NONE_PREFERENCE
