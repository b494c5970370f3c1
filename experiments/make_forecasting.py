"""Compares fixed weights, rules and a learned controller on the forecasting example, over series and seeds.

Writes `experiments/results/forecasting.parquet` and the page `forecasting.md`. The learned controller is trained first,
on series of the meta-train range, and is not kept.

    python -m posttrain_gym.experiments.make_forecasting
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..inner_trainers.base import RoundReport
from ..inner_trainers.files import write_atomically
from ..inner_trainers.recipe import Recipe
from ..meta_policies.controllers.drive import drive_round
from ..meta_policies.controllers.rule_file import load_rules
from ..meta_policies.controllers.rules import RulesController
from .examples.forecasting import TASKS, Forecasting, ForecastingFamily, forecasts, windows_of
from .make_letters_rounds import RESULTS, versions

TABLE = RESULTS / "forecasting.parquet"
RULES = Path(__file__).parent / "examples" / "forecasting_rules.yaml"
SERIES = tuple(ForecastingFamily.test_seeds)[:5]
EPOCH = 27
"""Steps of one epoch: 3,563 windows in batches of 128."""

STEPS = 20 * EPOCH
RATES = {"usual rate": 1e-3, "rate ten times higher": 1e-2, "rate a hundred times higher": 1e-1}
LEARNED_AT = ("usual rate", "rate ten times higher")
"""Settings that a controller is learned for."""

CRASH = 1.5
"""An epoch crashed when its mean loss is above this many times the lowest mean of the epochs before, or the round ended
in it as failed."""

EQUAL = {name: 1 / 3 for name in TASKS}
GRID: Mapping[str, Mapping[str, float]] = {
    "equal": EQUAL,
    **{f"{name} heavy": {other: 0.6 if other == name else 0.2 for other in TASKS} for name in TASKS},
    **{f"{name} light": {other: 0.1 if other == name else 0.45 for other in TASKS} for name in TASKS},
}
"""Fixed weights that the best of the grid is chosen from, on validation windows."""

DECISIONS = 1600
METHODS = ("fixed, equal weights", "fixed, best of seven on validation", "linear decay", "rules", "learned")


def recipe(rate: float, mix: Mapping[str, float], schedule: str = "constant") -> Recipe:
    """Return the recipe of one round."""
    return Recipe("forecast", dict(mix), learning_rate=rate, batch_size=128, steps=STEPS, schedule=schedule)


def measures(task: Forecasting, weights: Any, report: RoundReport, split: str = "test") -> dict[str, float]:
    """Return what the comparison is about, on the windows of a split; level errors are in spreads of the window."""
    data = windows_of(task.seed, split)
    out = forecasts(weights, data)
    level, volatility = data.level.double().numpy(), data.volatility.double().numpy()
    right = (out["direction"] > 0) == (data.direction.numpy() > 0.5)
    return {
        "mae": float(np.abs(out["level"] - level).mean()),
        "mae_persistence": float(np.abs(data.last.double().numpy() - level).mean()),
        "direction": float(right.mean()),
        "direction_majority": float(max(data.direction.mean(), 1 - data.direction.mean())),
        "r2_level": float(1 - ((out["level"] - level) ** 2).mean() / level.var()),
        "r2_volatility": float(1 - ((out["volatility"] - volatility) ** 2).mean() / volatility.var()),
        "crashes_per_100_epochs": crashes([row["loss"] for row in report.curves], report.failure is not None),
    }


def crashes(losses: Sequence[float], failed: bool = False) -> float:
    """Return how many of 100 epochs crash; see `CRASH`."""
    means = [float(np.mean(losses[first : first + EPOCH])) for first in range(0, len(losses) - EPOCH + 1, EPOCH)]
    crashed = sum(not mean <= CRASH * min(means[:place]) for place, mean in enumerate(means) if place)
    begun = len(means) + failed  # the epoch that a failed round ended in was not finished
    return 100 * (crashed + failed) / max(1, begun)


def run(task: Forecasting, asked: Recipe, seed: int, controller: Any = None) -> tuple[Any, Any, int]:
    """Run one round; return its report, checkpoint and how many adjustments were applied."""
    trainer = task.trainer()
    session = trainer.begin(task, asked, trainer.base(task), seed)
    applied = 0
    try:
        if controller is None:
            session.advance()
        else:
            applied = drive_round(session, asked, controller, interval=EPOCH).applied
        report, checkpoint = session.result()
    finally:
        session.close()
    return report, checkpoint, applied


def rows_of(task: Forecasting, setting: str, seed: int, model: Any) -> list[dict[str, Any]]:
    """Return a row for each method on one series."""
    rate = RATES[setting]
    rows = []
    for method in METHODS:
        chosen, applied = "", 0
        if method == "fixed, best of seven on validation":
            tried = {name: run(task, recipe(rate, mix), seed) for name, mix in GRID.items()}
            scores = {
                name: -1.0 if found[1] is None else task.trainer().evaluate(task, found[1], "validation")[0].score
                for name, found in tried.items()
            }
            chosen = max(scores, key=lambda name: scores[name])
            report, checkpoint, _ = tried[chosen]
        elif method == "rules":
            report, checkpoint, applied = run(task, recipe(rate, EQUAL), seed, RulesController(load_rules(str(RULES))))
        elif method == "learned":
            if model is None:
                continue
            report, checkpoint, applied = run_learned(task, recipe(rate, EQUAL), seed, model)
        else:
            schedule = "linear" if method == "linear decay" else "constant"
            report, checkpoint, _ = run(task, recipe(rate, EQUAL, schedule), seed)
        row: dict[str, Any] = {
            "setting": setting,
            "method": method,
            "series": task.seed,
            "seed": seed,
            "chosen": chosen,
            "ended": report.ended,
            "steps": report.steps,
            "adjustments": applied,
            "mean_smallest_cosine": float(np.mean([each["grad_cosine"] for each in report.curves])),
        }
        base = task.trainer().base(task).weights
        rows.append(row | measures(task, base if checkpoint is None else checkpoint.weights, report))
    return rows


# The learned controller -----------------------------------------------------------------------------------------------


def environment(rate: float, instances: Sequence[int], seed: int) -> Any:
    """Return the in-loop environment that the controller learns in."""
    import gymnasium as gym

    import posttrain_gym  # noqa: F401 - registers the environments

    from ..meta_policies.sb3 import wrap_for

    env = gym.make(
        "PostTrain/InLoop-v0",
        task=ForecastingFamily(),
        recipe=recipe(rate, EQUAL).to_dict(),
        interval=EPOCH,
        budget={"limit": 1e9, "max_rounds": 1, "patience": 1},
        instances=list(instances),
    )
    env.reset(seed=seed)
    return wrap_for("maskable_ppo", env)


def learn(rate: float, decisions: int, seed: int = 0) -> Any:
    """Train a controller with MaskablePPO on series of the meta-train range."""
    from ..meta_policies.sb3 import make_model

    env = environment(rate, range(64), seed)
    model = make_model("maskable_ppo", env, seed, n_steps=100, batch_size=50)
    model.learn(decisions)
    return model


def run_learned(task: Forecasting, asked: Recipe, seed: int, model: Any) -> tuple[Any, Any, int]:
    """Run one round under a learned controller, which takes its likeliest action."""
    env = environment(asked.learning_rate, [task.seed], seed)
    observation, _ = env.reset(seed=seed, options={"instance": task.seed})
    ended = False
    while not ended:
        action, _ = model.predict(observation, action_masks=env.get_wrapper_attr("action_masks")(), deterministic=True)
        observation, _, terminated, truncated, _ = env.step(action)
        ended = terminated or truncated
    search = env.unwrapped.search
    outcome = search.outcomes[-1]
    return outcome.report, search.weights_of("latest"), len(outcome.report.adjustments)


# Table and page -------------------------------------------------------------------------------------------------------


def make(series: Sequence[int], decisions: int, settings: Sequence[str]) -> list[dict[str, Any]]:
    """Run every method on every series in some settings."""
    rows = []
    for setting in settings:
        rate = RATES[setting]
        began = time.process_time()
        model = learn(rate, decisions) if decisions and setting in LEARNED_AT else None
        if model is not None:
            print(f"{setting}: learned in {time.process_time() - began:.0f} CPU s", flush=True)
        for seed, number in enumerate(series):
            rows += rows_of(Forecasting(number), setting, seed, model)
            print(f"{setting}: series {number} done", flush=True)
    return rows


MEASURES = {
    "mae": ("MAE of level", -1),
    "direction": ("direction right", 1),
    "r2_level": ("R² of level", 1),
    "r2_volatility": ("R² of volatility", 1),
    "crashes_per_100_epochs": ("crashes per 100 epochs", -1),
}
"""Column -> its name, and 1 where more is better."""


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the page about the table."""
    from scipy import stats

    series = sorted({row["series"] for row in rows})
    lines = [
        "# Multi-task forecasting: fixed weights, rules, a learned controller",
        "",
        "One network forecasts the level, the direction and the volatility of a generated market series with regime",
        "changes (`experiments/examples/forecasting.py`); the mix of the recipe is the weights of the three losses.",
        "Figures are of test windows, later in time than all others.",
        "",
        "    python -m posttrain_gym.experiments.make_forecasting",
        "",
        f"Series {series[0]} to {series[-1]} (one each, with round seeds 0 to {len(series) - 1}), {STEPS} steps of 128",
        "windows in every method. Rules: `forecasting_rules.yaml`, asked once an epoch. Learned: MaskablePPO,",
        f"{DECISIONS} decisions on 64 other series, asked once an epoch. Versions: {versions()}.",
        "No controller was learned at the highest rate. An epoch crashed when its mean loss is above",
        f"{CRASH:g} times the lowest epoch before, or the round ended in it as failed; a failed round leaves the",
        "weights it started from. MAE is in spreads (standard deviations) of the window's log prices.",
        "",
        "Mean ± standard error over series; in brackets the difference to equal fixed weights, paired by series, with",
        "its 95 % interval (t distribution).",
    ]
    for setting in RATES:
        mine = [row for row in rows if row["setting"] == setting]
        if not mine:
            continue
        lines += ["", f"## {setting[0].upper()}{setting[1:]} ({RATES[setting]:g})", ""]
        lines += ["| method | " + " | ".join(name for name, _ in MEASURES.values()) + " |"]
        lines += ["|---" * (len(MEASURES) + 1) + "|"]
        by = {(row["method"], row["series"]): row for row in mine}
        methods = [method for method in METHODS if any(row["method"] == method for row in mine)]
        for method in methods:
            cells = []
            for key in MEASURES:
                values = [by[method, number][key] for number in series]
                mean, error = statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values))
                cell = f"{mean:.3f} ± {error:.3f}"
                if method != METHODS[0]:
                    pairs = [by[method, number][key] - by[METHODS[0], number][key] for number in series]
                    spread = statistics.stdev(pairs) / math.sqrt(len(pairs))
                    half = float(stats.t.ppf(0.975, len(pairs) - 1)) * spread
                    middle = statistics.mean(pairs)
                    cell += f" ({middle:+.3f} [{middle - half:+.3f}, {middle + half:+.3f}])"
                cells.append(cell)
            lines.append(f"| {method} | " + " | ".join(cells) + " |")
        first = [by[METHODS[0], number] for number in series]
        persistence, majority, cosine = (
            statistics.mean(row[key] for row in first)
            for key in ("mae_persistence", "direction_majority", "mean_smallest_cosine")
        )
        lines += [
            "",
            f"Without any training: persistence has MAE {persistence:.3f}, and always the commoner direction is right "
            f"in {majority:.3f}. The mean smallest cosine between two tasks' gradients is {cosine:+.3f}.",
            "",
            *verdicts(by, methods, series),
        ]
    return "\n".join([*lines, ""])


def verdicts(
    by: Mapping[tuple[str, int], Mapping[str, Any]], methods: Sequence[str], series: Sequence[int]
) -> list[str]:
    """Return what may be said of the adaptive methods, against both fixed ones and the claim."""
    from scipy import stats

    lines = []
    for method in methods:
        if method not in ("rules", "learned"):
            continue
        for rival in METHODS[:3]:
            said = []
            for key, name, points in (("mae", "MAE", False), ("direction", "direction accuracy", True)):
                pairs = [by[method, number][key] - by[rival, number][key] for number in series]
                base = statistics.mean(by[rival, number][key] for number in series)
                middle = statistics.mean(pairs)
                half = float(stats.t.ppf(0.975, len(pairs) - 1)) * statistics.stdev(pairs) / math.sqrt(len(pairs))
                told = "not told apart" if abs(middle) <= half else "told apart"
                amount = f"{100 * middle:+.1f} points" if points else f"{100 * middle / base:+.1f} %"
                said.append(f"{name} {amount} ({told})")
            lines.append(f"- {method} against {rival}: {', '.join(said)}.")
    lines.append(
        "- The method's authors claim 19 % lower MAE and 5.5 points more direction accuracy for adaptive control."
    )
    return lines


def read_rows(table: Path = TABLE) -> list[dict[str, Any]]:
    """Return the rows of the table."""
    from pyarrow import parquet

    rows: list[dict[str, Any]] = parquet.read_table(table).to_pylist()
    return rows


def write_rows(rows: Sequence[Mapping[str, Any]], table: Path) -> None:
    """Write the table."""
    import pyarrow
    from pyarrow import parquet

    with tempfile.TemporaryDirectory() as folder:
        partial = Path(folder) / "table"
        parquet.write_table(pyarrow.Table.from_pylist(list(rows)), partial, compression="zstd")
        write_atomically(table, partial.read_bytes())


def main() -> None:
    """Run the comparison and write table and page."""
    import torch

    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--decisions", type=int, default=DECISIONS, help="Decisions that the controller learns from.")
    parser.add_argument("--settings", nargs="*", default=list(RATES), choices=list(RATES), help="Run anew.")
    asked = parser.parse_args()
    kept = [row for row in read_rows() if row["setting"] not in asked.settings] if TABLE.exists() else []
    rows = kept + make(SERIES, asked.decisions, asked.settings)
    write_rows(rows, TABLE)
    write_atomically(RESULTS / "forecasting.md", page(rows).encode())


if __name__ == "__main__":
    main()
