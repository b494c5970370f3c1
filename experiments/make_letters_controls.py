"""Runs two recipes on letters tasks that differ in one thing at a time: the base, the demonstrations, the verifier.

Writes `experiments/results/letters_controls.parquet` and the page `letters_controls.md`.

    python -m posttrain_gym.experiments.make_letters_controls
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ..inner_trainers.files import write_atomically
from .make_letters_rounds import RESULTS, letters_recipe, mean_changes, read_parquet_rows, versions, weighted_pass

SEEDS = (0, 1, 2)
WEIGHTS = {"reasoning": 0.7, "instruction": 0.1, "multi_turn": 0.1, "safety": 0.1}
CONTROLS: Mapping[str, Mapping[str, Any]] = {
    "gap, clean data": {"base": "gap", "quality": "clean", "recipe": "sft-curated"},
    "gap, sound verifier": {"base": "gap", "verifier": "exact", "recipe": "grpo-gentle"},
    "messy, noisy data": {"base": "messy", "quality": "noisy", "recipe": "sft-curated"},
    "messy, clean data": {"base": "messy", "quality": "clean", "recipe": "sft-curated"},
    "messy, sound verifier": {"base": "messy", "verifier": "exact", "recipe": "grpo-gentle"},
    "messy, verifier that pays for length": {"base": "messy", "verifier": "length", "recipe": "grpo-gentle"},
    "strong, noisy data": {"base": "strong", "quality": "noisy", "recipe": "sft-curated"},
    "strong, clean data": {"base": "strong", "quality": "clean", "recipe": "sft-curated"},
    "strong, sound verifier": {"base": "strong", "verifier": "exact", "recipe": "grpo-gentle"},
}
"""What each control fixes: every source has the same quality and verifier; the benchmark is mostly reasoning."""


def run_control(name: str, seeds: Sequence[int] = SEEDS) -> list[dict[str, Any]]:
    """Run one control with each seed; a row per round."""
    from ..envs.post_training import default_space
    from ..inner_trainers.tasks.letters import SOURCES, LettersTask
    from ..inner_trainers.trl.trainer import TrlTrainer

    control = CONTROLS[name]
    task = LettersTask(
        0,
        base=control["base"],
        qualities=dict.fromkeys(SOURCES, control.get("quality", "clean")),
        verifiers=dict.fromkeys(SOURCES, control.get("verifier", "exact")),
        sizes=dict.fromkeys(SOURCES, 512),
        weights=WEIGHTS,
    )
    trainer = TrlTrainer()
    recipe = letters_recipe(control["recipe"], default_space(task, trainer))
    base = trainer.base(task)
    before = trainer.evaluate(task, base, "test")[0]
    rows = []
    for seed in seeds:
        session = trainer.begin(task, recipe, base, seed)
        session.advance()
        report, checkpoint = session.result()
        after = before if checkpoint is None else trainer.evaluate(task, checkpoint, "test")[0]
        rows.append(
            {
                "control": name,
                "seed": seed,
                "content_hash": task.built.content_hash,
                "reasoning_pass_at_1": before.dimensions["reasoning"].pass_at_1,
                "reasoning_pass_at_k": before.dimensions["reasoning"].pass_at_k,
                "base_pass_at_1": weighted_pass(task, before, "pass_at_1"),
                "base_test_score": before.score,
                "base_test_error": before.standard_error,
                "test_score": after.score,
                "test_error": after.standard_error,
                "failure": None if report.failure is None else report.failure.kind,
                "train_tokens": report.training_cost.in_unit("train_tokens"),
                "versions": versions(),
                "note": "",
            }
        )
    return rows


def changes(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Return control -> mean change of the test score over seeds, with its standard error."""
    return mean_changes(rows, "control")


def describe(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the Markdown page."""
    found = changes(rows)
    lines = [
        "# One thing at a time",
        "",
        f"{len(rows)} real rounds on letters tasks (seed 0) whose five sources all have the named quality or verifier, "
        "512 rows each; the benchmark weighs reasoning 0.7, the other dimensions 0.1. Change of the TEST score, mean "
        f"over {len(SEEDS)} seeds ± standard error (spread between seeds joined with the item errors of both scores).",
        "",
        "| base and what is fixed | recipe | reasoning pass@1 / pass@8 before | score before | change | train tokens |",
        "|---|---|---|---|---|---|",
    ]
    for name, control in CONTROLS.items():
        first = next(row for row in rows if row["control"] == name)
        tokens = statistics.mean(row["train_tokens"] for row in rows if row["control"] == name)
        passes = f"{first['reasoning_pass_at_1']:.2f} / {first['reasoning_pass_at_k']:.2f}"
        change, error = found[name]
        lines.append(
            f"| {name} | {control['recipe']} | {passes} | {first['base_test_score']:.3f} | "
            f"{change:+.3f} ± {error:.3f} | {tokens:,.0f} |"
        )
    lines += [
        "",
        "Recipes are those of [letters_rounds.md](letters_rounds.md). What it does not show: other weights, other "
        "sizes, rounds after the first.",
        "",
        "Command: `python -m posttrain_gym.experiments.make_letters_controls`, from the repository root. One x86-64 "
        f"core, no GPU. Versions: {rows[0]['versions']}.",
        "",
    ]
    return "\n".join(lines)


def read_results() -> list[dict[str, Any]]:
    """Return the committed rows."""
    return read_parquet_rows("letters_controls")


def main() -> None:
    """Run everything and write the results."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    rows = [row for name in CONTROLS for row in run_control(name)]
    parquet.write_table(pa.Table.from_pylist(rows), RESULTS / "letters_controls.parquet")
    write_atomically(RESULTS / "letters_controls.md", describe(rows).encode())
    print(describe(rows))


if __name__ == "__main__":
    main()
