"""Runs one policy for one episode on one instance and reports what it reached on test items."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from ..envs.journal import Journal
from ..envs.post_training import PostTrainingEnv, describe_round
from ..inner_trainers.base import InnerTrainer, Scorecard
from ..meta_policies.catalogue import FIXED_PREFIX, load_policy, policy_file
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
    deterministic: bool = False,
    journal: Journal | None = None,
    on_round: Callable[[str], None] | None = None,
) -> EpisodeResult:
    """Run an episode to its end.

    The test split is scored outside the budget, whenever the best checkpoint changes; no policy sees it.

    Args:
        env: environment in the wrappers the policy needs.
        policy: anything with SB3's `predict`.
        name: what the result calls the policy.
        instance: instance seed.
        seed: repetition; with the instance it decides the episode's seed, the same for every policy.
        deterministic: passed to `predict`. A policy that always takes its likeliest action repeats itself within an
            episode, and a repeated round teaches nothing, so the default samples (seeded).
        journal: the environment's journal; test scores are kept there too, so that a repeated episode needs no weights
            that only they would need.
        on_round: called with a line about each round.
    """
    base = recipe_env(env)
    observation, _ = env.reset(seed=episode_seed(instance, seed), options={"instance": instance})
    search = base.search
    base_test = _test_score(base, journal)
    best_test, best_id = base_test, search.checkpoints["best"].id
    trajectory: list[RoundRecord] = []
    state: Any = None
    takes_masks = "action_masks" in inspect.signature(policy.predict).parameters
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
            best_test, best_id = _test_score(base, journal), search.checkpoints["best"].id
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


def episode_seed(instance: int, seed: int) -> int:
    """Return the seed of one episode: independent between instances, so that repetitions are independent units."""
    return int(np.random.SeedSequence([seed, instance]).generate_state(1)[0])


def run_named_episode(
    settings: EnvSettings,
    policy: str,
    instance: int,
    seed: int,
    worker: int = 0,
    *,
    name: str | None = None,
    journal: Path | None = None,
    deterministic: bool = False,
) -> EpisodeResult:
    """Build the environment and the policy of a name and run one episode; a spawn target.

    Args:
        settings: the environment.
        policy: what `load_policy` takes.
        instance: instance seed.
        seed: repetition.
        worker: number of the process, which decides its device.
        name: what the result calls the policy; None for ``policy``.
        journal: folder of the episode's finished rounds; a second call takes them from there.
        deterministic: whether a trained policy takes its likeliest action instead of sampling.
    """
    key = (json.dumps(settings.to_dict(), sort_keys=True), worker)
    if key not in _TRAINERS:
        _TRAINERS.clear()  # one trainer stays in memory: its models and tokenised rows serve the next episode
        _TRAINERS[key] = settings.trainer(worker)
    written = None if journal is None else Journal(journal)
    env = settings.build(worker, written, _TRAINERS[key])
    chosen, wrapped = load_policy(policy, env, episode_seed(instance, seed))
    try:
        return run_episode(
            wrapped,
            chosen,
            name=name or policy,
            instance=instance,
            seed=seed,
            journal=written,
            deterministic=deterministic,
        )
    finally:
        wrapped.close()


_TRAINERS: dict[tuple[str, int], InnerTrainer] = {}


def policy_labels(policies: Sequence[str]) -> list[str]:
    """Return what tables call each policy: a heuristic's name, or a file's path as far as it tells files apart."""
    parts = {p: file.resolve().with_suffix("").parts for p in policies if (file := policy_file(p)) is not None}
    labels = []
    for policy in policies:
        if policy not in parts:
            labels.append(policy)
            continue
        own, others = parts[policy], [other for name, other in parts.items() if name != policy]
        depth = 2 if own[-1] == "policy" else 1  # every trained run calls its file policy.zip
        while depth < len(own) and any(other[-depth:] == own[-depth:] for other in others):
            depth += 1
        kind = "fixed" if policy.startswith(FIXED_PREFIX) else "trained"
        labels.append(f"{kind} ({'/'.join(own[-depth:]).removesuffix('/policy')})")
    return labels


def describe_recipe(recipe: dict[str, Any]) -> str:
    """Return a recipe in a few words."""
    mix = ", ".join(f"{name} {weight:.0%}" for name, weight in recipe["mix"].items() if weight >= 0.005)
    return (
        f"{recipe['algorithm']} from {recipe['start']}, lr {recipe['learning_rate']:.2g}, {recipe['steps']} steps, "
        f"batch {recipe['batch_size']}, {mix}"
    )


def _test_score(base: PostTrainingEnv, journal: Journal | None) -> Scorecard:
    """Return the best checkpoint's test scores, from the journal where they were written down."""
    search = base.search
    key = f"test.{search.checkpoints['best'].id}"
    entry = None if journal is None else journal.entry(key)
    if entry is not None:
        return Scorecard.from_dict(entry["scorecard"])
    scorecard = base.trainer.evaluate(search.task, search.weights_of("best"), "test")[0]
    if journal is not None:
        journal.append(key, {"scorecard": scorecard.to_dict()})
    return scorecard
