"""Runs every inner algorithm once with a recipe that helps and once with one that hurts, on real rounds over seeds.

Writes `experiments/results/effects.parquet` and the page `effects.md`.

    python -m posttrain_gym.experiments.make_effects
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..inner_trainers.files import write_atomically
from .make_letters_rounds import RESULTS, mean_changes, read_parquet_rows, versions

SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Case:
    """One recipe on one task.

    Attributes:
        algorithm: inner algorithm.
        effect: ``"helps"`` or ``"hurts"``.
        what: the setting in words.
        settings: recipe fields; the round starts from the base checkpoint, over equal shares of all sources unless
            they say otherwise.
        task: ``"letters"`` or ``"calculator"``.
        base: base of the letters task.
        quality: quality of all its sources' demonstrations and text.
        verifier: verifier of all its sources.
    """

    algorithm: str
    effect: str
    what: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    task: str = "letters"
    base: str = "messy"
    quality: str = "clean"
    verifier: str = "exact"

    @property
    def name(self) -> str:
        """Names the case in the table."""
        return f"{self.task}: {self.algorithm} {self.effect}, {self.what}"


_POLICY_GRADIENT = {"learning_rate": 3e-4, "steps": 40, "batch_size": 64}
CASES: tuple[Case, ...] = (
    Case("sft", "helps", "clean demonstrations", {"learning_rate": 1e-3, "steps": 40}),
    Case("sft", "helps", "dft loss", {"learning_rate": 1e-3, "steps": 40, "loss": "dft"}),
    Case(
        "sft",
        "helps",
        "packed rows",
        {"learning_rate": 1e-3, "steps": 20, "batch_size": 16, "packing": True, "max_length": 64},
    ),
    Case("sft", "helps", "LoRA adapters", {"learning_rate": 1e-2, "steps": 40, "lora_rank": 8}),
    Case(
        "sft",
        "hurts",
        "noisy demonstrations on a strong base",
        {"learning_rate": 1e-3, "steps": 40},
        base="strong",
        quality="noisy",
    ),
    Case(
        "sft",
        "hurts",
        "right content, never in the asked form",
        {"learning_rate": 1e-3, "steps": 40},
        quality="wrong_format",
    ),
    Case("midtrain", "helps", "clean text", {"learning_rate": 1e-3, "steps": 40}),
    Case(
        "midtrain",
        "helps",
        "clean text, a fifth of the rows replayed demonstrations",
        {"learning_rate": 1e-3, "steps": 40, "replay_share": 0.2},
    ),
    Case(
        "midtrain",
        "hurts",
        "noisy text on a strong base",
        {"learning_rate": 1e-3, "steps": 40},
        base="strong",
        quality="noisy",
    ),
    Case("dpo", "helps", "sigmoid+sft loss", {"learning_rate": 3e-4, "steps": 40, "loss": "sigmoid+sft"}),
    Case("dpo", "helps", "sigmoid loss", {"learning_rate": 5e-5, "steps": 80, "beta": 0.5}),
    Case("dpo", "helps", "ipo loss", {"learning_rate": 2e-4, "steps": 60, "beta": 1.0, "loss": "ipo"}),
    Case("dpo", "hurts", "learning rate 3e-3", {"learning_rate": 3e-3, "steps": 40}),
    Case("kto", "helps", "low learning rate", {"learning_rate": 5e-5, "steps": 80, "beta": 0.5}),
    Case("kto", "hurts", "learning rate 3e-3", {"learning_rate": 3e-3, "steps": 40}),
    Case("grpo", "helps", "sound verifier", _POLICY_GRADIENT),
    Case("grpo", "helps", "dr_grpo loss", {**_POLICY_GRADIENT, "loss": "dr_grpo"}),
    Case("grpo", "hurts", "verifier that pays for length", _POLICY_GRADIENT, verifier="length"),
    Case("rloo", "helps", "sound verifier", _POLICY_GRADIENT),
    Case("rloo", "hurts", "verifier that pays for length", _POLICY_GRADIENT, verifier="length"),
    Case("ppo", "helps", "value head", _POLICY_GRADIENT),
    Case("ppo", "helps", "value model of its own", {**_POLICY_GRADIENT, "critic": "model"}),
    Case("ppo", "hurts", "verifier that pays for length", _POLICY_GRADIENT, verifier="length"),
    Case("ppo", "hurts", "entropy bonus of 2", {**_POLICY_GRADIENT, "entropy_coef": 2.0}),
    Case("rft", "helps", "sound verifier", {"learning_rate": 3e-4, "steps": 40, "batch_size": 64}),
    Case(
        "rft",
        "hurts",
        "verifier that pays for length",
        {"learning_rate": 3e-4, "steps": 40, "batch_size": 64},
        verifier="length",
    ),
    Case(
        "rft",
        "hurts",
        "verifier that pays for the form alone, on a strong base",
        {"learning_rate": 3e-4, "steps": 40, "batch_size": 64},
        base="strong",
        verifier="form_only",
    ),
    Case(
        "rft",
        "hurts",
        "nothing verified, temperature 2",
        {"learning_rate": 3e-4, "steps": 40, "batch_size": 64, "temperature": 2.0, "min_reward": 0.0},
    ),
    Case("distill", "helps", "stronger teacher", {"learning_rate": 3e-4, "steps": 40, "batch_size": 64}),
    Case("distill", "hurts", "learning rate 1e-2", {"learning_rate": 1e-2, "steps": 40, "batch_size": 64}),
    Case(
        "sft",
        "helps",
        "conversations that use the tool",
        {"learning_rate": 1e-3, "steps": 40, "batch_size": 16, "mix": {"worked": 1.0}},
        task="calculator",
    ),
    Case(
        "sft",
        "hurts",
        "right answers without a call",
        {"learning_rate": 3e-4, "steps": 20, "batch_size": 16, "mix": {"answers": 1.0}},
        task="calculator",
    ),
    Case("grpo", "helps", "sound verifier", {"learning_rate": 3e-4, "steps": 20, "batch_size": 64}, task="calculator"),
    Case(
        "grpo", "hurts", "learning rate 1e-2", {"learning_rate": 1e-2, "steps": 20, "batch_size": 64}, task="calculator"
    ),
)
"""What is run; settings were chosen by hand on these very tasks, so the changes are no blind estimates."""


def inner_task(case: Case) -> Any:
    """Return the task of a case."""
    from ..inner_trainers.tasks import resolve_task
    from ..inner_trainers.tasks.letters import SOURCES, LettersTask

    if case.task != "letters":
        return resolve_task(case.task).instance(0)
    return LettersTask(
        0,
        base=case.base,
        qualities=dict.fromkeys(SOURCES, case.quality),
        verifiers=dict.fromkeys(SOURCES, case.verifier),
        sizes=dict.fromkeys(SOURCES, 512),
        weights={"reasoning": 0.25, "instruction": 0.25, "multi_turn": 0.25, "safety": 0.25},
    )


def case_recipe(case: Case, task: Any, trainer: Any) -> Any:
    """Return the recipe of a case."""
    from ..inner_trainers.recipe import Recipe

    usable = trainer.usable_sources(task, case.algorithm)
    data = {"algorithm": case.algorithm, "mix": dict.fromkeys(usable, 1 / len(usable)), "start": "base"}
    return Recipe.from_dict({**data, **case.settings})


def run_case(case: Case, seeds: Sequence[int] = SEEDS) -> list[dict[str, Any]]:
    """Run one case with each seed; a row per round."""
    from ..inner_trainers.trl.trainer import TrlTrainer

    task, trainer = inner_task(case), TrlTrainer()
    recipe = case_recipe(case, task, trainer)
    base = trainer.base(task)
    before = trainer.evaluate(task, base, "test")[0]
    rows = []
    for seed in seeds:
        session = trainer.begin(task, recipe, base, seed)
        try:
            session.advance()
            report, checkpoint = session.result()
        finally:
            session.close()
        after = before if checkpoint is None else trainer.evaluate(task, checkpoint, "test")[0]
        rows.append(
            {
                "case": case.name,
                "algorithm": case.algorithm,
                "effect": case.effect,
                "setting": case.what,
                "seed": seed,
                "content_hash": task.built.content_hash,
                "recipe": json.dumps(recipe.to_dict(), sort_keys=True),
                "base_test_score": before.score,
                "base_test_error": before.standard_error,
                "test_score": after.score,
                "test_error": after.standard_error,
                "base_pass_at_k": statistics.mean(entry.pass_at_k for entry in before.dimensions.values()),
                "pass_at_k": statistics.mean(entry.pass_at_k for entry in after.dimensions.values()),
                "failure": None if report.failure is None else report.failure.kind,
                "steps": report.steps,
                "supervised_tokens": report.supervised_tokens,
                "train_tokens": report.training_cost.in_unit("train_tokens"),
                "flops": report.training_cost.flops,
                "train_seconds": report.wall_seconds,
                "versions": versions(),
            }
        )
    return rows


def changes(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Return case -> mean change of the test score over seeds, with its standard error."""
    return mean_changes(rows, "case")


def describe(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the Markdown page."""
    found = changes(rows)
    lines = [
        "# What each algorithm can do, and how it can hurt",
        "",
        f"{len(rows)} real rounds: each recipe runs from the base checkpoint with {len(SEEDS)} seeds. Change of the "
        "TEST score, mean over seeds ± standard error (spread between seeds joined with the item errors of both "
        "scores). Letters tasks have seed 0, five sources of one quality and one verifier with 512 demonstrations "
        "each, and a benchmark that weighs its four dimensions alike. The settings were chosen by hand on these very "
        "tasks: the table shows what an algorithm can do and undo, not what to expect of an untried task.",
        "",
        "| task | algorithm | setting | recipe | score before | change | each seed | pass@8 | train tokens | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        group = [row for row in rows if row["case"] == case.name]
        change, error = found[case.name]
        first = group[0]
        task = "calculator" if case.task != "letters" else f"{case.base}, {case.quality}, {case.verifier}"
        asked = ", ".join(f"{key} {_shown(value)}" for key, value in case.settings.items())
        seeds = ", ".join(f"{row['test_score'] - row['base_test_score']:+.3f}" for row in group)
        passes = f"{first['base_pass_at_k']:.2f} → {statistics.mean(row['pass_at_k'] for row in group):.2f}"
        failures = {row["failure"] for row in group if row["failure"] is not None}
        what = case.what + (f" (fails: {', '.join(sorted(failures))})" if failures else "")
        lines.append(
            f"| {task} | {case.algorithm} | {case.effect}: {what} | {asked} | {first['base_test_score']:.3f} | "
            f"{change:+.3f} ± {error:.3f} | {seeds} | {passes} | "
            f"{statistics.mean(row['train_tokens'] for row in group):,.0f} | "
            f"{statistics.mean(row['train_seconds'] for row in group):.1f} |"
        )
    lines += [
        "",
        "The task column of letters names base, quality and verifier. What a recipe leaves out has the default of "
        "`Recipe`. What the table does not show: which algorithm is best (costs and settings differ), other sizes of "
        "model, rounds after the first.",
        "",
        "Command: `python -m posttrain_gym.experiments.make_effects`, from the repository root. One x86-64 core, no "
        f"GPU, other jobs beside it, so seconds are upper bounds. Versions: {rows[0]['versions']}.",
        "",
    ]
    return "\n".join(lines)


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def read_results() -> list[dict[str, Any]]:
    """Return the committed rows."""
    return read_parquet_rows("effects")


def main() -> None:
    """Run everything and write the results."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    rows = []
    for case in CASES:
        rows += run_case(case)
        change, error = changes(rows)[case.name]
        print(f"{case.name}: {change:+.3f} ± {error:.3f}", flush=True)
    parquet.write_table(pa.Table.from_pylist(rows), RESULTS / "effects.parquet")
    write_atomically(RESULTS / "effects.md", describe(rows).encode())
    print(describe(rows))


if __name__ == "__main__":
    main()
