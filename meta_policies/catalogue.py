"""Every meta-policy by the name the command line takes: heuristics, or a file of a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym

from ..inner_trainers.messages import did_you_mean
from .heuristics import HEURISTICS


def check_policy_name(name: str) -> None:
    """Refuse a name that is neither a heuristic nor an existing policy file, before anything is run.

    Raises:
        ValueError: unknown name, or a damaged file.
    """
    if name in HEURISTICS:
        return
    if name.endswith(".zip") or Path(name).exists():
        from .sb3 import read_policy_facts

        read_policy_facts(Path(name))
        return
    raise ValueError(
        f"policy: unknown {name!r}.{did_you_mean(name, HEURISTICS)} A trained policy is given as its .zip file."
    )


def load_policy(name: str, env: gym.Env[Any, Any], seed: int) -> tuple[Any, gym.Env[Any, Any]]:
    """Return the policy of a name with the environment, wrapped as the policy needs it.

    Args:
        name: a heuristic, or the path of a policy file.
        env: the recipe environment.
        seed: seed of the policy's own random numbers.

    Raises:
        ValueError: as `check_policy_name`, or a policy made for another decision space.
    """
    check_policy_name(name)
    if name in HEURISTICS:
        return HEURISTICS[name](env, seed=seed), env
    from .sb3 import TrainedPolicy, wrap_for

    policy = TrainedPolicy(name, env)
    policy.model.set_random_seed(seed)
    return policy, wrap_for(policy.algo, env)
