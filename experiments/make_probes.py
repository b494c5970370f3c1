"""Probes the learning rate of every algorithm, then trains real rounds at the probed rates to see what it was worth.

Writes `experiments/results/probes.parquet` and the page `probes.md`.

    python -m posttrain_gym.experiments.make_probes
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..inner_trainers.files import write_atomically
from .make_letters_rounds import RESULTS, read_parquet_rows, versions

INSTANCE, SOURCE = 1, "web"
PROBE_SEED, ROUND_SEED = 0, 1
LOW, HIGH, POINTS = 3e-5, 3e-2, 7
STEPS = 40
PROBES: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(("dpo", "kto", "midtrain", "rft", "sft"), (10, 32)),
    "distill": (10, 64),
    **dict.fromkeys(("grpo", "ppo", "rloo"), (20, 64)),
}
"""Algorithm -> steps of each probe round, and the batch of those and of the real rounds of `STEPS` steps."""


def probe_algorithm(algorithm: str) -> list[dict[str, Any]]:
    """Probe one algorithm and train a real round at each rate; a row per rate."""
    from ..inner_trainers.probes import learning_rate_probe
    from ..inner_trainers.recipe import Recipe
    from ..inner_trainers.tasks.letters import LettersTask
    from ..inner_trainers.trl.trainer import TrlTrainer

    task, trainer, (steps, batch) = LettersTask(INSTANCE), TrlTrainer(), PROBES[algorithm]
    base = trainer.base(task)
    recipe = Recipe(algorithm, {SOURCE: 1.0}, start="base", steps=STEPS, batch_size=batch)
    probe = learning_rate_probe(
        trainer, task, recipe, base, PROBE_SEED, low=LOW, high=HIGH, points=POINTS, steps_per_point=steps
    )
    before = trainer.evaluate(task, base, "validation")[0]
    low, high = probe.suggested_range or (None, None)
    rows = []
    for point in probe.points:
        session = trainer.begin(task, replace(recipe, learning_rate=point.learning_rate), base, ROUND_SEED)
        try:
            session.advance()
            report, checkpoint = session.result()
        finally:
            session.close()
        after = before if checkpoint is None else trainer.evaluate(task, checkpoint, "validation")[0]
        rows.append(
            {
                "algorithm": algorithm,
                "learning_rate": point.learning_rate,
                "verdict": point.verdict,
                "gain": point.gain,
                "gain_error": point.error,
                "range_low": low,
                "range_high": high,
                "suggested_rate": probe.suggested_rate,
                "hurts_from": probe.hurts_from,
                "notes": json.dumps(list(probe.notes)),
                "probe_train_tokens": probe.cost.in_unit("train_tokens"),
                "recipe": json.dumps(recipe.to_dict(), sort_keys=True),
                "base_score": before.score,
                "score": after.score,
                "score_error": after.standard_error,
                "failure": None if report.failure is None else report.failure.kind,
                "content_hash": task.built.content_hash,
                "versions": versions(),
            }
        )
    return rows


def describe(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the Markdown page."""
    lines = [
        "# What a learning-rate probe is worth",
        "",
        f"Each algorithm was probed on instance {INSTANCE} of letters with source `{SOURCE}` ({POINTS} rates from "
        f"{LOW:g} to {HIGH:g}, seed {PROBE_SEED}), then trained for {STEPS} steps from the base at every probed rate "
        f"with another seed ({ROUND_SEED}). Validation scores ± standard error; the base has "
        f"{rows[0]['base_score']:.3f}. A probe ends at the first rate that diverges.",
        "",
        "| algorithm | probe's steps x batch | range | suggested | score there | best tried rate | "
        "first rate that hurts | probe's train tokens |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for algorithm, (steps, batch) in PROBES.items():
        group = [row for row in rows if row["algorithm"] == algorithm]
        first = group[0]
        by_rate = {row["learning_rate"]: row for row in group}
        best = max(group, key=lambda row: row["score"])
        suggested = by_rate.get(first["suggested_rate"])
        hurts = by_rate.get(first["hurts_from"])
        span = "cannot tell" if first["range_low"] is None else f"{first['range_low']:.2g} to {first['range_high']:.2g}"
        lines.append(
            f"| {algorithm} | {steps} x {batch} | {span} | "
            f"{_rate(suggested)} | {_score(suggested)} | {_score(best)} at {_rate(best)} | "
            f"{_score(hurts)}{'' if hurts is None else f' at {_rate(hurts)}'} | {first['probe_train_tokens']:,.0f} |"
        )
    lines += [
        "",
        "What it does not show: other instances and sources; whether the rows were worth training on, which no probe "
        "of a rate can tell.",
        "",
        "Command: `python -m posttrain_gym.experiments.make_probes`, from the repository root. One x86-64 core, no "
        f"GPU. Versions: {rows[0]['versions']}.",
        "",
    ]
    return "\n".join(lines)


def _rate(row: Mapping[str, Any] | None) -> str:
    return "" if row is None else f"{row['learning_rate']:.2g}"


def _score(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    return "failed" if row["failure"] is not None else f"{row['score']:.3f} ± {row['score_error']:.3f}"


def read_results() -> list[dict[str, Any]]:
    """Return the committed rows."""
    return read_parquet_rows("probes")


def main() -> None:
    """Run everything and write the results."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    rows = [row for algorithm in PROBES for row in probe_algorithm(algorithm)]
    parquet.write_table(pa.Table.from_pylist(rows), RESULTS / "probes.parquet")
    write_atomically(RESULTS / "probes.md", describe(rows).encode())
    print(describe(rows))


if __name__ == "__main__":
    main()
