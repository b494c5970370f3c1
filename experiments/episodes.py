"""Runs one policy for one episode on one instance and reports what it reached on test items."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import gymnasium as gym

from ..envs.post_training import describe_round
from ..inner_trainers.base import Scorecard
from ..meta_policies.catalogue import load_policy
from .comparison import EpisodeResult, RoundRecord
from .comparison import normalised as normalised_gain
from .settings import EnvSettings, recipe_env


def run_episode(
    env: gym.Env[Any, Any],
    policy: Any,
    *,
    name: str,
    instance: int,
    seed: int,
    deterministic: bool = True,
    on_round: Callable[[str], None] | None = None,
) -> EpisodeResult:
    """Run an episode to its end.

    The test split is scored outside the budget, whenever the best checkpoint changes; no policy sees it.

    Args:
        env: environment in the wrappers the policy needs.
        policy: anything with SB3's `predict`.
        name: what the result calls the policy.
        instance: instance seed.
        seed: seed of the episode; equal seeds give every policy the same round seeds.
        deterministic: passed to `predict`.
        on_round: called with a line about each round.
    """
    base = recipe_env(env)
    observation, _ = env.reset(seed=seed, options={"instance": instance})
    search = base.search
    base_test = _test_score(base)
    best_test, best_id = base_test, search.checkpoints["best"].id
    trajectory: list[RoundRecord] = []
    state: Any = None
    takes_masks = hasattr(type(policy), "predict") and "action_masks" in type(policy).predict.__code__.co_varnames
    over = search.ended() is not None
    while not over:
        extra = {"action_masks": env.get_wrapper_attr("action_masks")()} if takes_masks else {}
        action, state = policy.predict(observation, state, deterministic=deterministic, **extra)
        before = len(search.outcomes)
        observation, _, terminated, truncated, _ = env.step(action)
        over = terminated or truncated
        if len(search.outcomes) == before:
            continue
        outcome = search.outcomes[-1]
        if search.checkpoints["best"].id != best_id:
            best_test, best_id = _test_score(base), search.checkpoints["best"].id
        line = describe_round(len(search.outcomes), outcome)
        report = outcome.report
        trajectory.append(
            RoundRecord(
                round=len(search.outcomes),
                budget_fraction=search.ledger.spent / base.budget.limit,
                best_validation_score=search.scorecards["best"].score,
                best_test_score=best_test.score,
                recipe=describe_recipe(report.recipe.to_dict()),
                gain=outcome.best_after - outcome.best_before,
                ended=report.ended,
                failure=None if report.failure is None else report.failure.cause,
            )
        )
        if on_round is not None:
            on_round(line)
    base_validation = search.scorecards["base"].score
    return EpisodeResult(
        policy=name,
        instance=instance,
        seed=seed,
        base_score=base_test.score,
        final_score=best_test.score,
        base_error=base_test.standard_error,
        final_error=best_test.standard_error,
        base_validation_score=base_validation,
        validation_gain=normalised_gain(base_validation, search.scorecards["best"].score),
        budget_used=search.ledger.spent / base.budget.limit,
        rounds=len(search.outcomes),
        failures=dict(Counter(entry.failure for entry in trajectory if entry.failure is not None)),
        recorded=base.trainer.recorded,
        trajectory=tuple(trajectory),
    )


def run_named_episode(
    settings: EnvSettings, policy: str, instance: int, seed: int, worker: int = 0, deterministic: bool = True
) -> EpisodeResult:
    """Build the environment and the policy of a name and run one episode; a spawn target."""
    env = settings.build(worker)
    chosen, wrapped = load_policy(policy, env, seed)
    try:
        return run_episode(
            wrapped, chosen, name=policy_label(policy), instance=instance, seed=seed, deterministic=deterministic
        )
    finally:
        wrapped.close()


def policy_label(policy: str) -> str:
    """Return what tables call a policy: a heuristic's name, or ``trained (folder)`` for a file."""
    if not policy.endswith(".zip"):
        return policy
    from pathlib import Path

    return f"trained ({Path(policy).resolve().parent.name})"


def describe_recipe(recipe: dict[str, Any]) -> str:
    """Return a recipe in a few words."""
    mix = ", ".join(f"{name} {weight:.0%}" for name, weight in recipe["mix"].items() if weight >= 0.005)
    return (
        f"{recipe['algorithm']} from {recipe['start']}, lr {recipe['learning_rate']:.2g}, {recipe['steps']} steps, "
        f"batch {recipe['batch_size']}, {mix}"
    )


def _test_score(base: Any) -> Scorecard:
    scorecard: Scorecard = base.trainer.evaluate(base.search.task, base.search.weights_of("best"), "test")[0]
    return scorecard
