"""Every meta-policy by the name the command line takes: a heuristic, a fixed recipe's file, a trained model's file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym

from ..inner_trainers.messages import did_you_mean
from ..inner_trainers.recipe_file import load_recipe
from .heuristics import HEURISTICS, FixedPolicy

FIXED_PREFIX = "fixed:"


def policy_file(name: str) -> Path | None:
    """Return the file behind a policy's name, or None for a heuristic."""
    if name in HEURISTICS:
        return None
    return Path(name.removeprefix(FIXED_PREFIX))


def check_policy_name(name: str) -> None:
    """Refuse a name that is no heuristic and no readable policy or recipe file, before anything is run.

    Raises:
        ValueError: unknown name, or a damaged file.
    """
    if name in HEURISTICS:
        return
    if name.startswith(FIXED_PREFIX):
        load_recipe(Path(name.removeprefix(FIXED_PREFIX)))
        return
    if name.endswith(".zip") or Path(name).exists():
        from .policy_file import read_policy_facts

        read_policy_facts(Path(name))
        return
    raise ValueError(
        f"policy: unknown {name!r}.{did_you_mean(name, HEURISTICS)} A trained policy is given as its .zip file, "
        "a recipe of your own as fixed:FILE.yaml."
    )


def require_adjusting_policy(name: str, env: str) -> None:
    """Refuse a policy that plays recipes where rounds are adjusted.

    Args:
        name: what `load_policy` takes.
        env: what the environment is called, for the message.

    Raises:
        ValueError: a heuristic or a fixed recipe.
    """
    if name in HEURISTICS or name.startswith(FIXED_PREFIX):
        raise ValueError(
            f"policy: {name!r} chooses recipes and adjusts no round; with --env {env} give the .zip of a policy that "
            "was trained in it, or use `posttrain-gym run-recipe --controller`."
        )


def load_policy(name: str, env: gym.Env[Any, Any], seed: int) -> tuple[Any, gym.Env[Any, Any]]:
    """Return the policy of a name with the environment, wrapped as the policy needs it.

    Args:
        name: a heuristic, ``fixed:FILE`` with a recipe file, or the path of a trained policy.
        env: the recipe environment.
        seed: seed of the policy's own random numbers.

    Raises:
        ValueError: as `check_policy_name`, or a policy or recipe made for another decision space.
    """
    check_policy_name(name)
    if name in HEURISTICS:
        return HEURISTICS[name](env, seed=seed), env
    if name.startswith(FIXED_PREFIX):
        return FixedPolicy(env, seed, load_recipe(Path(name.removeprefix(FIXED_PREFIX)))), env
    from .policy_file import TrainedPolicy
    from .sb3 import wrap_for

    policy = TrainedPolicy(name, env)
    policy.model.set_random_seed(seed)
    return policy, wrap_for(policy.algo, env, **policy.wrapper_arguments)
