"""Runs recipes with a wrong learning rate or sparse reward under schedules, rules, net and hybrid, at equal budget.

Writes `experiments/results/in_loop_effects.parquet` and the page `in_loop_effects.md`. Rounds that are in the Parquet
file already are not run again, so an interrupted run goes on where it was; `--again` begins anew.

    python -m posttrain_gym.experiments.make_in_loop_effects
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from ..inner_trainers.files import write_atomically
from .make_letters_rounds import RESULTS, read_parquet_rows, versions

NAME = "in_loop_effects"
INSTANCES = (10_000, 10_001, 10_002, 10_004, 10_022)
"""The first meta-test instance of each base: messy, unsafe, strong, formless, gap."""
SEEDS = (0, 1, 2, 3, 4)
UNITS = tuple((INSTANCES[(seed + shift) % len(INSTANCES)], seed) for shift in (0, 1) for seed in SEEDS)
"""(instance, seed of the round): every instance with two seeds, every seed on two instances."""

STATIC = (
    "schedule:constant",
    "schedule:cosine",
    "schedule:linear",
    "schedule:warmup_stable_decay",
    "schedule:adaptive_kl",
)
CONTROLLED = ("rules", "net:letters", "hybrid:letters")
ARMS = (*STATIC, *CONTROLLED)
RESAMPLES = 10_000


@dataclass(frozen=True)
class Scenario:
    """One recipe that something is wrong with.

    Attributes:
        name: names it in the table.
        what: what is wrong, in words.
        settings: recipe fields; equal shares of all sources unless they say otherwise.
        base: base of the letters task; None for the instance's own.
    """

    name: str
    what: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    base: str | None = None

    @property
    def arms(self) -> tuple[str, ...]:
        """Arms that can differ: an adaptive KL needs one."""
        has_kl = self.settings.get("kl_coef", 0.0) > 0
        return tuple(arm for arm in ARMS if has_kl or arm != "schedule:adaptive_kl")


_SFT = {"algorithm": "sft", "steps": 80, "batch_size": 32}
_GRPO = {"algorithm": "grpo", "steps": 60, "batch_size": 32, "kl_coef": 0.02}
_ONE_SOURCE = {"instruction": 0.05, "multi_turn": 0.05, "reasoning": 0.8, "safety": 0.05, "web": 0.05}
SCENARIOS: tuple[Scenario, ...] = (
    Scenario("sft, rate 3 times too high", "learning rate 3e-3, right is 1e-3", {**_SFT, "learning_rate": 3e-3}),
    Scenario("sft, rate 10 times too low", "learning rate 1e-4, right is 1e-3", {**_SFT, "learning_rate": 1e-4}),
    Scenario("grpo, rate 3 times too high", "learning rate 9e-4, right is 3e-4", {**_GRPO, "learning_rate": 9e-4}),
    Scenario("grpo, rate 10 times too low", "learning rate 3e-5, right is 3e-4", {**_GRPO, "learning_rate": 3e-5}),
    Scenario(
        "grpo, sparse reward",
        "learning rate 3e-4; four fifths of the prompts ask for what base gap never gets right",
        {**_GRPO, "learning_rate": 3e-4, "mix": _ONE_SOURCE},
        base="gap",
    ),
)


def inner_task(scenario: Scenario, instance: int) -> Any:
    """Return the task of a unit: an instance whose sources have sound data, sound verifiers and 512 rows."""
    from ..inner_trainers.tasks.letters import SOURCES, LettersTask

    return LettersTask(
        instance,
        base=scenario.base,
        qualities=dict.fromkeys(SOURCES, "clean"),
        verifiers=dict.fromkeys(SOURCES, "exact"),
        sizes=dict.fromkeys(SOURCES, 512),
    )


def scenario_recipe(scenario: Scenario, task: Any, trainer: Any) -> Any:
    """Return the recipe of a scenario, from the base checkpoint, at a constant rate unless a controller changes it."""
    from ..inner_trainers.recipe import Recipe

    usable = trainer.usable_sources(task, scenario.settings["algorithm"])
    return Recipe.from_dict({"mix": dict.fromkeys(usable, 1 / len(usable)), "start": "base", **scenario.settings})


def new_trainer() -> Any:
    """Return the trainer of the study: four completions per test item, whose error is small beside that of seeds."""
    from ..inner_trainers.evaluation import Evaluator
    from ..inner_trainers.trl.trainer import TrlTrainer

    return TrlTrainer(Evaluator(seeds=(0,), samples_per_seed=4, k=4))


def run_cell(
    scenario: Scenario, arm: str, instance: int, seed: int, limit: float | None, trainer: Any = None
) -> dict[str, Any]:
    """Run one round and return its row.

    Args:
        scenario: what to run.
        arm: name of a controller.
        instance: instance seed.
        seed: seed of the round.
        limit: budget in train tokens; None for the arm whose cost is everyone's budget.
        trainer: a trainer that is in memory already; None for a new one.
    """
    from ..inner_trainers.base import Limit
    from ..meta_policies.controllers.catalogue import make_controller
    from ..meta_policies.controllers.drive import drive_round

    trainer = new_trainer() if trainer is None else trainer
    task = inner_task(scenario, instance)
    recipe = scenario_recipe(scenario, task, trainer)
    controller = make_controller(arm)
    base = trainer.base(task)
    before = trainer.evaluate(task, base, "test")[0]
    session = trainer.begin(task, recipe, base, seed, None if limit is None else Limit("train_tokens", limit))
    try:
        driven = drive_round(session, recipe, controller)
        report, checkpoint = session.result()
    finally:
        session.close()
    if driven.failure is not None:
        raise RuntimeError(f"{arm} failed: {driven.failure}")
    after = before if checkpoint is None else trainer.evaluate(task, checkpoint, "test")[0]
    changes = Counter(adjustment.kind for _, adjustment in report.adjustments)
    spent = report.training_cost.in_unit("train_tokens")
    return {
        "scenario": scenario.name,
        "arm": arm,
        "instance": instance,
        "seed": seed,
        "base": task.base,
        "content_hash": task.built.content_hash,
        "recipe": json.dumps(recipe.to_dict(), sort_keys=True),
        "controller": controller_digest(arm),
        "base_test_score": before.score,
        "test_score": after.score,
        "test_error": after.standard_error,
        "failure": None if report.failure is None else report.failure.kind,
        "ended": report.ended,
        "steps": report.steps,
        "train_tokens": spent,
        "limit": spent + trainer.step_cost_bound(task, recipe).in_unit("train_tokens") if limit is None else limit,
        "train_seconds": report.wall_seconds,
        "adjustments": json.dumps(dict(sorted(changes.items()))),
        "rates": [row["learning_rate"] for row in report.curves],
        "versions": versions(),
    }


@cache
def controller_digest(arm: str) -> str:
    """Return 16 hex digits of everything that decides what a controller does; where its file lies does not."""
    from ..meta_policies.controllers.catalogue import make_controller

    facts = json.dumps(_deciding(make_controller(arm).describe()), sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def _deciding(facts: Any) -> Any:
    """Return what a controller tells of itself, without reasons and the name of a file."""
    if isinstance(facts, Mapping):
        return {key: _deciding(value) for key, value in facts.items() if key not in ("file", "reason")}
    return [_deciding(value) for value in facts] if isinstance(facts, list | tuple) else facts


def key_of(row: Mapping[str, Any]) -> tuple[str, str, int, int]:
    """Return what tells a round from the others."""
    return row["scenario"], row["arm"], row["instance"], row["seed"]


def gains(rows: Sequence[Mapping[str, Any]], scenario: str, arm: str) -> dict[tuple[int, int], float]:
    """Return (instance, seed) -> gain of the test score; a round that failed has the base's."""
    return {
        (row["instance"], row["seed"]): row["test_score"] - row["base_test_score"]
        for row in rows
        if row["scenario"] == scenario and row["arm"] == arm
    }


def estimate(by_unit: Mapping[tuple[int, int], float]) -> tuple[float, float, float]:
    """Return the mean over instances, and its 95 % bootstrap interval that redraws instances and rounds within.

    The interval is that of `statistics.task_bootstrap_interval`, drawn at once: every instance has as many rounds.
    """
    instances = sorted({instance for instance, _ in by_unit})
    values = np.array([[value for (instance, _), value in by_unit.items() if instance == one] for one in instances])
    rng = np.random.default_rng(0)
    picks = rng.integers(len(values), size=(RESAMPLES, len(values), 1))
    rounds = rng.integers(values.shape[1], size=(RESAMPLES, *values.shape))
    low, high = np.quantile(values[picks, rounds].mean(axis=(1, 2)), (0.025, 0.975))
    return float(values.mean()), float(low), float(high)


def difference(rows: Sequence[Mapping[str, Any]], scenario: str, arm: str, other: str) -> tuple[float, float, float]:
    """Return by how much an arm is better than another on the same units, with its interval."""
    left, right = gains(rows, scenario, arm), gains(rows, scenario, other)
    return estimate({unit: left[unit] - right[unit] for unit in left})


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str, float, float, float]]:
    """Return (scenario, controller, schedule, difference, low, high) for every pair."""
    return [
        (scenario.name, arm, other, *difference(rows, scenario.name, arm, other))
        for scenario in SCENARIOS
        for arm in CONTROLLED
        for other in scenario.arms
        if other in STATIC
    ]


def word(low: float, high: float) -> str:
    """Return ``"better"`` or ``"worse"`` where the interval lies on one side of 0, else ``"not told apart"``."""
    return "better" if low > 0 else "worse" if high < 0 else "not told apart"


def describe(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the Markdown page."""
    found = verdicts(rows)
    lines = [
        "# What in-loop control is worth, at equal budget",
        "",
        f"{len(rows)} real rounds. Each arm runs the same {len(UNITS)} rounds of each scenario: "
        f"{len(INSTANCES)} meta-test letters instances (the first of each base), {len(SEEDS)} seeds, every seed on two "
        "instances. Sources have 512 sound rows and sound verifiers; sources' contents, items and the benchmark's "
        "weights are the instance's. All arms of a unit have one limit of train tokens: what the constant schedule "
        "spends, and one step. Cells are the mean gain of the TEST score over the base, with a 95 % bootstrap "
        "interval that redraws instances and rounds within them; bold is the best of a row.",
        "",
        "Nothing was tuned on these instances: rules were tuned by hand, and the net cloned from the rules' logs, on "
        "meta-train instances alone (`make_in_loop_net`). The scenarios' right rates are those of "
        "[effects.md](effects.md). The recipes were chosen on meta-train instances so that a wrong rate costs score. "
        "The kinds of error were known: the rules were tuned for them, and the net's logs are rounds of these "
        "scenarios on other instances, with rates within 30 % of them and, in every third turn, right ones.",
        "",
        "| scenario | base | " + " | ".join(ARMS) + " |",
        "|---|---|" + "---|" * len(ARMS),
    ]
    for scenario in SCENARIOS:
        cells = {arm: estimate(gains(rows, scenario.name, arm)) for arm in scenario.arms}
        top = max(cells, key=lambda arm: cells[arm][0])
        shown = [_cell(cells[arm], arm == top) if arm in cells else "no KL" for arm in ARMS]
        before = statistics.mean(row["base_test_score"] for row in rows if row["scenario"] == scenario.name)
        lines.append(f"| {scenario.name} ({scenario.what}) | {before:.3f} | " + " | ".join(shown) + " |")
    lines += [
        "",
        "Paired differences to each schedule on the same rounds, with their intervals; a difference counts as better "
        "or worse when its interval lies on one side of 0:",
        "",
        "| scenario | controller | " + " | ".join(STATIC) + " |",
        "|---|---|" + "---|" * len(STATIC),
    ]
    for scenario in SCENARIOS:
        for arm in CONTROLLED:
            cells = {other: (mean, low, high) for name, by, other, mean, low, high in found
                     if (name, by) == (scenario.name, arm)}  # fmt: skip
            shown = [_difference(*cells[other]) if other in cells else "no KL" for other in STATIC]
            lines.append(f"| {scenario.name} | {arm} | " + " | ".join(shown) + " |")
    lines += ["", *_summary(found), "", *_how_it_came(rows, len(found)), ""]
    return "\n".join(lines)


def _cell(of: tuple[float, float, float], best: bool) -> str:
    mean, low, high = of
    shown = f"{mean:+.3f}"
    return f"{f'**{shown}**' if best else shown} [{low:+.3f}, {high:+.3f}]"


def _difference(mean: float, low: float, high: float) -> str:
    return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}] {word(low, high)}"


def _summary(found: Sequence[tuple[str, str, str, float, float, float]]) -> list[str]:
    lines = ["In words:", ""]
    for arm in CONTROLLED:
        parts = []
        for scenario in SCENARIOS:
            words = {other: word(low, high) for name, by, other, _, low, high in found
                     if (name, by) == (scenario.name, arm)}  # fmt: skip
            better = [other for other, said in words.items() if said == "better"]
            others = [f"{said} {_than(said)} {other}" for other, said in words.items() if said != "better"]
            of = "every schedule" if len(better) == len(words) else f"{len(better)} of {len(words)} schedules"
            parts.append(f"{scenario.name}: better than {of}" + (f" ({', '.join(others)})" if others else ""))
        lines.append(f"- {arm}: " + "; ".join(parts) + ".")
    return lines


def _than(said: str) -> str:
    return "than" if said == "worse" else "from"


def _how_it_came(rows: Sequence[Mapping[str, Any]], comparisons: int) -> list[str]:
    """Return what was done in the rounds, and how the table is made again."""
    lines = [
        "What was done, per round on average, beside the share of the limit that was spent:",
        "",
        "| scenario | controller | steps | of the limit | adjustments | last rate | failed |",
        "|---|---|---|---|---|---|---|",
    ]
    for scenario in SCENARIOS:
        for arm in scenario.arms:
            group = [row for row in rows if (row["scenario"], row["arm"]) == (scenario.name, arm)]
            done: Counter[str] = Counter()
            for row in group:
                done.update(json.loads(row["adjustments"]))
            told = ", ".join(f"{kind} {count / len(group):.1f}" for kind, count in done.most_common()) or "none"
            failed = sum(row["failure"] is not None for row in group)
            lines.append(
                f"| {scenario.name} | {arm} | {statistics.mean(row['steps'] for row in group):.1f} | "
                f"{statistics.mean(row['train_tokens'] / row['limit'] for row in group):.1%} | {told} | "
                f"{statistics.geometric_mean(row['rates'][-1] for row in group):.2g} | {failed} |"
            )
    return [
        *lines,
        "",
        "What the table does not show: other sizes of model, longer rounds, recipes with a right rate, rounds after "
        "the first, or rules and nets on other tasks than those they were tuned on. Five instances make narrow "
        f"intervals, and none of the {comparisons} comparisons is corrected for their number.",
        "",
        "Command: `python -m posttrain_gym.experiments.make_in_loop_effects`, from the repository root; the "
        "committed rows were run in parts, by five processes. One thread each, no "
        f"GPU, {sum(row['train_seconds'] for row in rows) / 60:.0f} minutes of training on a shared machine. Versions: "
        f"{rows[0]['versions']}.",
    ]


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
    parser.add_argument("--again", action="store_true", help="forget the rounds that were run")
    again = parser.parse_args().again
    kept = [] if again or not (RESULTS / f"{NAME}.parquet").exists() else read_results()
    rows = {key_of(row): row for row in kept if row["controller"] == controller_digest(row["arm"])}
    trainer = new_trainer()
    for instance, seed in UNITS:
        for scenario in SCENARIOS:
            limit = None
            for arm in scenario.arms:  # the constant schedule first: what it spends is everyone's limit
                key = scenario.name, arm, instance, seed
                if key not in rows:
                    rows[key] = row = run_cell(scenario, arm, instance, seed, limit, trainer)
                    gain = row["test_score"] - row["base_test_score"]
                    print(f"{len(rows)} {key}: {gain:+.3f}, {row['train_seconds']:.1f} s", flush=True)
                    _write(list(rows.values()))
                limit = rows[key]["limit"]
    wanted = [(s.name, arm, *unit) for s in SCENARIOS for arm in s.arms for unit in UNITS]
    done = [rows[key] for key in wanted]
    _write(done)
    write_atomically(RESULTS / f"{NAME}.md", describe(done).encode())
    print(describe(done))


if __name__ == "__main__":
    main()
