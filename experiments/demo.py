"""`posttrain-gym demo`: trains a meta-policy on real rounds, compares it at equal budget, leaves a report."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..envs.budget import Budget
from ..inner_trainers.telemetry import machine_facts
from .compare import compare
from .comparison import Comparison
from .report import write_report
from .settings import EnvSettings
from .train import RoundEvent, TrainSettings, train


@dataclass(frozen=True)
class DemoSettings:
    """Size of the demo; the defaults fit ten minutes on two cores.

    Attributes:
        train_rounds: decisions of meta-training.
        algo: SB3 algorithm of the meta-policy.
        policies: heuristics it is compared with.
        instances: meta-test instances, as offsets into the family's test seeds.
        seeds: episodes per policy and instance.
        budget: budget of one episode.
        evaluator: how checkpoints are scored.
        workers: processes.
        seed: seed of meta-training.
        space: the content of a decision-space file, of which the space alone is used; None for the default space.
    """

    train_rounds: int = 128
    algo: str = "maskable_ppo"
    policies: tuple[str, ...] = ("random", "fixed", "shortlist", "greedy-sft-then-grpo")
    instances: int = 10
    seeds: int = 1
    budget: Budget = field(default_factory=lambda: Budget(limit=120_000, max_rounds=4, patience=4))
    evaluator: dict[str, Any] = field(default_factory=lambda: {"samples_per_seed": 2, "k": 4})
    workers: int = 0
    seed: int = 0
    space: Mapping[str, Any] | None = None


def run_demo(
    settings: DemoSettings,
    out: Path,
    *,
    command: str,
    on_round: Callable[[RoundEvent], None] | None = None,
    on_episode: Callable[[int, int, Any], None] | None = None,
    on_stage: Callable[[str], None] = print,
) -> tuple[Path, Comparison]:
    """Run the demo; return the report's path and the comparison. A second call goes on where the first stopped."""
    began = time.perf_counter()
    workers = settings.workers or max(1, min(2, os.cpu_count() or 1))
    environment = EnvSettings(budget=settings.budget, evaluator=settings.evaluator, space=settings.space)
    run = TrainSettings(environment, settings.algo, settings.train_rounds, workers, settings.seed)
    folder = out / "train"
    on_stage(f"1/3 meta-training: {settings.algo} on {settings.train_rounds} decisions, each a real TRL round")
    replayed = 0

    def note(event: RoundEvent) -> None:
        nonlocal replayed
        replayed += event.replayed
        if on_round is not None:
            on_round(event)

    policy, episodes = train(run, folder, resume=(folder / "run.json").exists(), on_round=note)
    trained_seconds = time.perf_counter() - began

    from ..inner_trainers.tasks import resolve_task

    test = replace(environment, split="test")
    instances = list(resolve_task(test.task).test_seeds[: settings.instances])
    seeds = list(range(settings.seeds))
    names = [*settings.policies, str(policy)]
    total = len(names) * len(instances) * len(seeds)
    grid = f"{len(names)} policies x {len(instances)} unseen instances x {len(seeds)} seeds"
    on_stage(f"2/3 comparison: {grid} = {total} episodes")
    comparison = compare(test, names, instances, seeds, out / "compare", workers=workers, on_episode=on_episode)
    on_stage("3/3 report")
    facts = {
        "environment": test.to_dict(),
        "instances": instances,
        "seeds": seeds,
        "workers": workers,
        "machine": machine_facts(),
        "this_call_seconds": round(time.perf_counter() - began, 1),
        "rounds this call took from earlier ones": replayed,
    }
    training = {
        "rows": episodes,
        "algorithm": settings.algo,
        "decisions": settings.train_rounds,
        "seed": settings.seed,
        "this_call_seconds": round(trained_seconds, 1),
    }
    return write_report(out, comparison, training, facts, command), comparison
