"""Compares fixed settings and rules on the sparse-reward control example, at equal environment steps.

Writes `experiments/results/sparse_control.parquet` and the page `sparse_control.md`. Runs that are in the Parquet file
already are not run again, so an interrupted run goes on where it was; `--again` begins anew.

    python -m posttrain_gym.experiments.make_sparse_control
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..inner_trainers.files import write_atomically
from .make_in_loop_effects import controller_digest
from .make_letters_rounds import RESULTS, read_parquet_rows

NAME = "sparse_control"
ASKED = {"algorithm": "ppo", "mix": {"starts": 1.0}, "start": "base"}
RULES = Path(__file__).resolve().parent / "examples" / "sparse_control_rules.yaml"


@dataclass(frozen=True)
class Args:
    """Settings of the comparison.

    Attributes:
        problem: a name of `PROBLEMS`.
        steps: PPO iterations of each run; 2,048 environment steps each.
        seeds: test seeds; each decides an untrained policy, the actions and the order of starts.
        tuning_seeds: seeds on which the best fixed setting is chosen; disjoint from the test seeds.
        entropies: entropy coefficients of the grid.
        gammas: discounts of the grid.
    """

    problem: str = "hopper"
    steps: int = 28
    seeds: tuple[int, ...] = tuple(range(10))
    tuning_seeds: tuple[int, ...] = (100, 101, 102)
    entropies: tuple[float, ...] = (0.0, 0.02)
    gammas: tuple[float, ...] = (0.99, 0.998)


def run(args: Args, phase: str, arm: str, seed: int, settings: Mapping[str, Any], controller: str) -> dict[str, Any]:
    """Train one agent and return its row.

    Args:
        args: of the comparison.
        phase: ``"tuning"`` or ``"test"``.
        arm: names it in tables.
        seed: of the untrained policy and of the round.
        settings: recipe fields beside the task's defaults.
        controller: a name that `make_controller` takes.
    """
    from ..inner_trainers.recipe import Recipe
    from ..meta_policies.controllers.catalogue import make_controller
    from ..meta_policies.controllers.drive import drive_round
    from .examples.sparse_agent import ROLLOUT
    from .examples.sparse_control import SparseControl

    task = SparseControl(args.problem, seed)
    trainer = task.trainer()
    recipe = Recipe.from_dict({**task.recipe_defaults(), **ASKED, "steps": args.steps, **settings})
    session = trainer.begin(task, recipe, trainer.base(task), seed)
    try:
        driven = drive_round(session, recipe, make_controller(controller))
        report, checkpoint = session.result()
    finally:
        session.close()
    if driven.failure is not None or checkpoint is None:
        raise RuntimeError(f"{arm}, seed {seed}: {driven.failure or report.failure}")
    card = trainer.evaluate(task, checkpoint, "test")[0]
    last = report.curves[-1]
    changes = Counter(adjustment.kind for _, adjustment in report.adjustments)
    return {
        "phase": phase,
        "arm": arm,
        "seed": seed,
        "controller": controller_digest(controller),
        "problem": args.problem,
        "iterations": report.steps,
        "environment_steps": report.steps * ROLLOUT,
        "recipe": json.dumps(recipe.to_dict(), sort_keys=True),
        "content_hash": task.built.content_hash,
        "episodes": int(last["episodes_total"]),
        "first_success_episode": _whole(last.get("first_success_episode")),
        "first_success_steps": _whole(last.get("first_success_steps")),
        "test_success": card.dimensions["success"].mean,
        "test_marks": card.dimensions["marks"].mean,
        "iteration_episodes": [int(row["episodes"]) for row in report.curves],
        "iteration_reward": [row.get("reward", 0.0) for row in report.curves],
        "iteration_reward_std": [row.get("reward_std", 0.0) for row in report.curves],
        "iteration_success": [row.get("success", 0.0) for row in report.curves],
        "iteration_entropy_coef": [row["entropy_coef"] for row in report.curves],
        "iteration_gamma": [row["gamma"] for row in report.curves],
        "adjustments": json.dumps(dict(sorted(changes.items()))),
        "train_seconds": report.wall_seconds,
        "versions": versions(),
    }


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def versions() -> str:
    """Return the versions of what decides a run's result."""
    names = ("gymnasium", "mujoco", "numpy", "stable-baselines3", "torch")
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


def grid(args: Args) -> dict[str, dict[str, float]]:
    """Return the fixed settings that are tried: name -> recipe fields."""
    return {
        f"entropy {entropy:g}, gamma {gamma:g}": {"entropy_coef": entropy, "gamma": gamma}
        for entropy in args.entropies
        for gamma in args.gammas
    }


def best_of_grid(rows: Sequence[Mapping[str, Any]], args: Args) -> str:
    """Return the name of the fixed setting with the highest mean reward per episode on the tuning seeds."""
    from .sparse_control_page import reward_moments

    means = {}
    for name in grid(args):
        found = [reward_moments(row)[0] for row in rows if (row["phase"], row["arm"]) == ("tuning", name)]
        means[name] = sum(found) / len(found)
    return max(means, key=lambda name: means[name])


def plan(args: Args, chosen: str | None) -> list[tuple[str, str, int, dict[str, Any], str]]:
    """Return (phase, arm, seed, recipe fields, controller) of every run.

    Args:
        args: of the comparison.
        chosen: the fixed setting that the tuning seeds chose; None while they have not, for no more than those runs.
    """
    none: dict[str, Any] = {}
    runs = [("tuning", name, seed, of, "none") for name, of in grid(args).items() for seed in args.tuning_seeds]
    if chosen is None:
        return runs
    arms: dict[str, tuple[dict[str, Any], str]] = {
        "default": (none, "none"),
        "rules": (none, f"rules:{RULES}"),
        "best fixed": (grid(args)[chosen], "none"),
        "default, minibatches of 64": ({"batch_size": 64}, "none"),
    }
    return [*runs, *(("test", arm, seed, *of) for arm, of in arms.items() for seed in args.seeds)]


def read_results() -> list[dict[str, Any]]:
    """Return the committed rows."""
    return read_parquet_rows(NAME)


def _write(rows: Sequence[Mapping[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    partial = RESULTS / f"{NAME}.parquet.partial"
    parquet.write_table(pa.Table.from_pylist([dict(row) for row in rows]), partial)
    partial.replace(RESULTS / f"{NAME}.parquet")


def main() -> None:
    """Run what is missing and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="forget the runs that were done")
    again = parser.parse_args().again
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    from .sparse_control_page import describe

    torch.set_num_threads(1)
    args = Args()
    kept = [] if again or not (RESULTS / f"{NAME}.parquet").exists() else read_results()
    rows = {(row["phase"], row["arm"], row["seed"]): row for row in kept}
    chosen: str | None = None
    for _ in range(2):  # first the tuning, then what rests on it
        for phase, arm, seed, settings, controller in plan(args, chosen):
            done = rows.get((phase, arm, seed))
            if done is None or done["controller"] != controller_digest(controller):
                rows[phase, arm, seed] = row = run(args, phase, arm, seed, settings, controller)
                _write(list(rows.values()))
                print(
                    f"{len(rows)} {phase}, {arm}, seed {seed}: first success after {row['first_success_episode']} "
                    f"episodes, test success {row['test_success']:.2f}, {row['train_seconds']:.0f} s",
                    flush=True,
                )
        chosen = best_of_grid(list(rows.values()), args)
    page = describe(list(rows.values()), chosen or "", args)
    write_atomically(RESULTS / f"{NAME}.md", page.encode())
    print(page)


if __name__ == "__main__":
    main()
