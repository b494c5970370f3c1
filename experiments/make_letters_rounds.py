"""Runs ten recipes on 21 letters instances, three seeds each: does the best recipe depend on the state?

Writes `experiments/results/letters_rounds.parquet`, the table `letters_rounds.md` and the shortlist of the recipes that
are best on average, which the `shortlist` heuristic plays. All instances are meta-train instances.

    python -m posttrain_gym.experiments.make_letters_rounds
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import multiprocessing
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..envs.decision_space import DecisionSpace
from ..inner_trainers.base import DimensionScore
from ..inner_trainers.files import write_atomically
from ..inner_trainers.recipe import Recipe
from .comparison import normalised

RESULTS = Path(__file__).resolve().parent / "results"
SHORTLIST = Path(__file__).resolve().parent.parent / "meta_policies" / "shortlists" / "letters.json"

CURATED = {"instruction": 0.25, "multi_turn": 0.25, "reasoning": 0.25, "safety": 0.25}
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "default": {"algorithm": "sft"},  # what `default_recipe` is: every knob in the middle, equal shares
    "sft-gentle": {"algorithm": "sft", "learning_rate": 1e-4, "steps": 40},
    "sft-curated": {"algorithm": "sft", "learning_rate": 1e-3, "steps": 40, "mix": CURATED},
    "sft-reasoning": {"algorithm": "sft", "learning_rate": 1e-3, "steps": 60, "mix": {"reasoning": 1.0}},
    "sft-web": {"algorithm": "sft", "learning_rate": 1e-3, "steps": 40, "mix": {"web": 1.0}},
    "sft-hot": {"algorithm": "sft", "learning_rate": 1e-2, "steps": 40},
    "grpo": {"algorithm": "grpo"},
    "grpo-gentle": {"algorithm": "grpo", "learning_rate": 1e-4, "steps": 40},
    "grpo-long": {"algorithm": "grpo", "learning_rate": 4e-4, "steps": 60, "batch_size": 64},
    "grpo-hot": {"algorithm": "grpo", "learning_rate": 1e-2, "steps": 40},
}
"""Recipes by name, each one round from the base checkpoint; what is left out takes the default space's middle."""

COST_CAP = 30_000
"""Train tokens up to which recipes are compared with each other."""


@dataclass(frozen=True)
class Args:
    """Settings of the run.

    Attributes:
        instances: meta-train instance seeds: the first sixteen, and the next ones until each base has three.
        seeds: round seeds.
        workers: processes.
    """

    instances: tuple[int, ...] = (*range(16), 17, 20, 22, 25, 29)
    seeds: tuple[int, ...] = (0, 1, 2)
    workers: int = 2


def letters_recipe(name: str, space: DecisionSpace) -> Recipe:
    """Return a recipe of `RECIPES` in the default space, from the base checkpoint."""
    settings = dict(RECIPES[name])
    return space.recipe(settings.pop("algorithm"), start="base", **settings)


def run_instance(instance: int, seeds: Sequence[int], names: Sequence[str] = tuple(RECIPES)) -> list[dict[str, Any]]:
    """Run the named recipes on one instance with each seed; a row per round. A spawn target."""
    from ..envs.post_training import default_space
    from ..inner_trainers.tasks.letters import LettersFamily
    from ..inner_trainers.trl.trainer import TrlTrainer

    task = LettersFamily().instance(instance)
    trainer = TrlTrainer()
    space = default_space(task, trainer)
    base = trainer.base(task)
    before = {split: trainer.evaluate(task, base, split)[0] for split in ("validation", "test")}
    rows = []
    for name in names:
        recipe = letters_recipe(name, space)
        for seed in seeds:
            session = trainer.begin(task, recipe, base, seed)
            session.advance()
            report, checkpoint = session.result()
            after = before["test"] if checkpoint is None else trainer.evaluate(task, checkpoint, "test")[0]
            rows.append(
                {
                    "instance": instance,
                    "base": task.facts()["base"],
                    "hidden": json.dumps(
                        {k: task.reveal()[k] for k in ("qualities", "verifiers", "sizes")}, sort_keys=True
                    ),
                    "weights": json.dumps({k: round(v, 3) for k, v in task.built.benchmark.weights.items()}),
                    "content_hash": task.built.content_hash,
                    "recipe_name": name,
                    "recipe": json.dumps(recipe.to_dict(), sort_keys=True),
                    "seed": seed,
                    "base_pass_at_1": weighted_pass(task, before["test"], "pass_at_1"),
                    "base_pass_at_k": weighted_pass(task, before["test"], "pass_at_k"),
                    "base_test_score": before["test"].score,
                    "base_test_error": before["test"].standard_error,
                    "test_score": after.score,
                    "test_error": after.standard_error,
                    "failure": None if report.failure is None else report.failure.kind,
                    "train_tokens": report.training_cost.in_unit("train_tokens"),
                    "flops": report.training_cost.flops,
                    "train_seconds": report.wall_seconds,
                    "versions": versions(),
                    "note": "",
                }
            )
    return rows


def weighted_pass(task: Any, scorecard: Any, column: str) -> float:
    """Return a scorecard's column (``"pass_at_1"``, ``"pass_at_k"``) as the benchmark weighs its dimensions."""
    weights: Mapping[str, float] = task.built.benchmark.weights
    dimensions: Mapping[str, DimensionScore] = scorecard.dimensions
    total: float = math.fsum(weights[name] * getattr(entry, column) for name, entry in dimensions.items())
    return total


def mean_changes(rows: Sequence[Mapping[str, Any]], key: str) -> dict[str, tuple[float, float]]:
    """Return value of column ``key`` -> mean change of the test score over its rounds, with its standard error.

    The error joins the spread between seeds with the item errors of both scores.
    """
    result = {}
    for name in dict.fromkeys(row[key] for row in rows):
        group = [row for row in rows if row[key] == name]
        values = [row["test_score"] - row["base_test_score"] for row in group]
        between = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
        items = math.hypot(group[0]["base_test_error"], statistics.mean(row["test_error"] for row in group))
        result[name] = (statistics.mean(values), math.hypot(between, items))
    return result


def versions() -> str:
    """Return the versions of what decides a round's result."""
    names = ("torch", "transformers", "trl", "numpy")
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


def cells(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[int, str], tuple[float, float]]:
    """Return (instance, recipe name) -> mean change of the test score over seeds, with its standard error.

    The error joins the spread between seeds with the item errors of both scores.
    """
    groups: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["instance"], row["recipe_name"]), []).append(row)
    result = {}
    for key, group in groups.items():
        changes = [row["test_score"] - row["base_test_score"] for row in group]
        between = statistics.stdev(changes) / math.sqrt(len(changes)) if len(changes) > 1 else 0.0
        items = math.hypot(group[0]["base_test_error"], statistics.mean(row["test_error"] for row in group))
        result[key] = (statistics.mean(changes), math.hypot(between, items))
    return result


def ranked_recipes(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """Return (recipe name, mean normalised test gain over instances and seeds), best first."""
    gains: dict[str, list[float]] = {}
    for row in rows:
        gains.setdefault(row["recipe_name"], []).append(normalised(row["base_test_score"], row["test_score"]))
    return sorted(((name, statistics.mean(values)) for name, values in gains.items()), key=lambda x: -x[1])


def portfolio(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """Return (recipe name, mean best gain of the list up to it): the recipes that are best on average, in order.

    A search keeps its best checkpoint, so a list is worth the best of its rounds and never less than the base. Each
    place goes to the recipe that raises the mean of that most, over all instances and seeds, until none does.
    """
    gains: dict[str, dict[tuple[int, int], float]] = {}
    for row in rows:
        gain = normalised(row["base_test_score"], row["test_score"])
        gains.setdefault(row["recipe_name"], {})[row["instance"], row["seed"]] = gain
    cells = sorted(next(iter(gains.values())))
    best = dict.fromkeys(cells, 0.0)
    chosen: list[tuple[str, float]] = []
    while len(chosen) < len(gains):
        value, name = max(
            (statistics.mean(max(best[c], by_cell[c]) for c in cells), name)
            for name, by_cell in gains.items()
            if name not in dict(chosen)
        )
        if value <= statistics.mean(best.values()) + 1e-3:
            break
        best = {c: max(best[c], gains[name][c]) for c in cells}
        chosen.append((name, value))
    return chosen


def shortlist(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the recipes of `portfolio`, to be played from the best checkpoint."""
    recipes = {row["recipe_name"]: json.loads(row["recipe"]) for row in rows}
    played = [{**recipes[name], "start": "best"} for name, _ in portfolio(rows)]
    sources = sorted({source for recipe in recipes.values() for source in recipe["mix"]})
    return {"measured_in": "experiments/results/letters_rounds.parquet", "sources": sources, "recipes": played}


def mean_cost(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    """Return the mean training cost of a recipe, in train tokens."""
    costs: list[float] = [row["train_tokens"] for row in rows if row["recipe_name"] == name]
    return statistics.mean(costs)


def affordable(rows: Sequence[Mapping[str, Any]], algorithm: str) -> list[str]:
    """Return the recipes of an algorithm that cost at most `COST_CAP` on average."""
    names = [name for name, recipe in RECIPES.items() if recipe["algorithm"] == algorithm]
    return [name for name in names if mean_cost(rows, name) <= COST_CAP]


def claims(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Return the instances that show each claim, by more than two standard errors of the difference.

    The best affordable recipe of each algorithm is compared, so that neither wins by spending more.
    """
    table = cells(rows)
    instances = sorted({instance for instance, _ in table})
    found: dict[str, list[int]] = {
        "SFT better than GRPO": [],
        "GRPO better than SFT": [],
        "the default recipe hurts": [],
    }
    for instance in instances:
        sft, grpo = (max(table[instance, n] for n in affordable(rows, algorithm)) for algorithm in ("sft", "grpo"))
        error = math.hypot(sft[1], grpo[1])
        if sft[0] - grpo[0] > 2 * error:
            found["SFT better than GRPO"].append(instance)
        if grpo[0] - sft[0] > 2 * error:
            found["GRPO better than SFT"].append(instance)
        change, error = table[instance, "default"]
        if change < -2 * error:
            found["the default recipe hurts"].append(instance)
    return found


def describe(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the Markdown page of the table."""
    table, names = cells(rows), list(RECIPES)
    instances = sorted({instance for instance, _ in table})
    first = {row["instance"]: row for row in rows}
    lines = [
        f"# {len(names)} recipes on {len(instances)} letters instances",
        "",
        f"{len(rows)} real rounds, each from the base checkpoint, seeds {_listed(sorted({r['seed'] for r in rows}))}. "
        "Cells are the mean change of the TEST score over seeds ± its standard error (spread between seeds joined with "
        "the item errors of both scores); bold is the best of a row. pass@1 and pass@8 are the base's, weighted as the "
        "score is.",
        "",
        "| instance | base | score | pass@1 / pass@8 | " + " | ".join(names) + " |",
        "|---|---|---|---|" + "---|" * len(names),
        "| | | | train tokens | " + " | ".join(f"{mean_cost(rows, name):,.0f}" for name in names) + " |",
    ]
    for instance in instances:
        values = {name: table[instance, name] for name in names}
        top = max(values, key=lambda name: values[name][0])
        shown = [
            f"**{change:+.3f}** ± {error:.3f}" if name == top else f"{change:+.3f} ± {error:.3f}"
            for name, (change, error) in values.items()
        ]
        row = first[instance]
        passes = f"{row['base_pass_at_1']:.2f} / {row['base_pass_at_k']:.2f}"
        head = f"| {instance} | {row['base']} | {row['base_test_score']:.3f} | {passes} | "
        lines.append(head + " | ".join(shown) + " |")
    lines += ["", "What it shows, each by more than two standard errors of the difference:", ""]
    for claim, where in claims(rows).items():
        named = ", ".join(f"{instance} ({first[instance]['base']})" for instance in where)
        lines.append(f"- {claim}: {len(where)} of {len(instances)} instances{f', {named}' if named else ''}.")
    sft, grpo = affordable(rows, "sft"), affordable(rows, "grpo")
    lines += [
        "",
        f"The first two compare the best SFT recipe ({len(sft)} of them) with the best GRPO recipe ({len(grpo)}) among "
        f"those that cost at most {COST_CAP:,} train tokens. The best is chosen on the same scores, which flatters it "
        f"a little, SFT more than GRPO; and of {len(instances)} tests at two standard errors about one in "
        "twenty passes by chance.",
        "",
        "Mean normalised gain over all instances, best first: "
        + ", ".join(f"{name} {gain:+.3f}" for name, gain in ranked_recipes(rows))
        + ".",
        "",
        "The `shortlist` heuristic plays the list whose best round is best on average. Mean best normalised gain of "
        "the list after each recipe: " + ", ".join(f"{name} {gain:+.3f}" for name, gain in portfolio(rows)) + ".",
        "",
        "What it does not show: rounds after the first, other seeds of the family, or models of another size.",
        "",
        "The hidden qualities of each instance's sources are in the Parquet file (`hidden`); no policy sees them.",
        "",
        "Command: `python -m posttrain_gym.experiments.make_letters_rounds`, from the repository root. Two x86-64 "
        "cores, one thread per process, no GPU; "
        f"{sum(row['train_seconds'] for row in rows) / 60:.0f} minutes of training in all, on a shared machine. "
        f"Versions: {rows[0]['versions']}.",
        *(f"Instances {_listed(where)}: {note}." for note, where in _notes(rows).items()),
        "",
    ]
    return "\n".join(lines)


def _notes(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Return what was done to rows after their round, with the instances it was done to."""
    found: dict[str, set[int]] = {}
    for row in rows:
        if row["note"]:
            found.setdefault(row["note"], set()).add(row["instance"])
    return {note: sorted(where) for note, where in found.items()}


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def write_results(rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the Parquet file, its page and the shortlist."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    RESULTS.mkdir(exist_ok=True)
    parquet.write_table(pa.Table.from_pylist([dict(row) for row in rows]), RESULTS / "letters_rounds.parquet")
    write_atomically(RESULTS / "letters_rounds.md", describe(rows).encode())
    write_atomically(SHORTLIST, (json.dumps(shortlist(rows), indent=1) + "\n").encode())


def read_parquet_rows(name: str) -> list[dict[str, Any]]:
    """Return the rows of a committed result."""
    import pyarrow.parquet as parquet

    rows: list[dict[str, Any]] = parquet.read_table(RESULTS / f"{name}.parquet").to_pylist()
    return rows


def read_results() -> list[dict[str, Any]]:
    """Return the committed rows."""
    return read_parquet_rows("letters_rounds")


def main() -> None:
    """Run everything and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=Args.workers, help="processes")
    args = Args(workers=parser.parse_args().workers)
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(args.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in pool.map(run_instance, args.instances, [args.seeds] * len(args.instances)):
            rows += done
            print(f"instance {done[0]['instance']}: {len(rows)} rounds", flush=True)
    write_results(rows)


if __name__ == "__main__":
    main()
