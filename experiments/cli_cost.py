"""The command that foresees what a recipe will cost: predict-cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from .cli_options import Json, Limit, Task, Unit
from .cli_output import say, table_of
from .progress import console

_SHOWN = {
    "train_tokens": ("train tokens", 1.0, ",.0f"),
    "flops": ("TFLOPs", 1e-12, ",.3f"),
    "device_seconds": ("seconds", 1.0, ",.1f"),
    "peak_memory_bytes": ("peak memory, MiB", 2.0**-20, ",.0f"),
}


def predict_cost(
    recipe: Annotated[Path, typer.Argument(help="Recipe file.")],
    rounds: Annotated[
        Path | None, typer.Option("--rounds", help="Run folder, or rounds-NAME.jsonl, whose rounds are fitted to.")
    ] = None,
    task: Task = "letters",
    instance: Annotated[int, typer.Option(help="Instance seed.")] = 0,
    budget: Limit = 200_000,
    unit: Unit = "train_tokens",
    as_json: Json = False,
) -> None:
    """Predict what a recipe will cost before it runs: tokens, FLOPs, seconds and memory, with intervals."""
    from ..envs.budget import Budget
    from ..envs.cost_predictor import CostPredictor
    from ..envs.cost_rounds import CostFacts, CostRounds, rounds_of_file
    from ..inner_trainers.recipe_file import load_recipe
    from .settings import EnvSettings

    settings = EnvSettings(task=task, budget=Budget(budget, unit))
    family, trainer = settings.family(), settings.trainer()
    inner_task = family.instance(instance)
    asked = load_recipe(recipe, inner_task.recipe_defaults())
    trainer.check(inner_task, asked)

    def task_of(entry: Mapping[str, Any]) -> Any:
        facts = entry.get("facts", {})  # a journal has none: its rounds are taken to be of this instance
        if facts.get("task", family.name) != family.name:
            return None
        return family.instance(int(facts.get("instance", instance))), trainer

    found = CostRounds() if rounds is None else rounds_of_file(rounds, task_of)
    predictor = CostPredictor(found)
    estimate = predictor.predict(CostFacts(inner_task, trainer), asked)
    whole = estimate.total(unit)
    notes = list(predictor.notes)
    if predictor.rounds and all(one.recipe.algorithm != asked.algorithm for one in predictor.rounds):
        notes.append(
            f"none of the rounds is of {asked.algorithm}: errors are of other algorithms, intervals can be far off"
        )
    errors = [
        error
        for error in predictor.errors
        if error.algorithm in (asked.algorithm, "all") and error.grouping == "recipe" and error.quantity in _SHOWN
    ]
    pays = None if whole is None or whole.value <= 0 else int(budget // whole.value)
    if as_json:
        console.print_json(
            data={
                "recipe": asked.to_dict(),
                "rounds": len(predictor.rounds),
                **estimate.to_dict(),
                "budget_share": None if whole is None else whole.value / budget,
                "rounds_that_the_budget_pays": pays,
                "errors": [asdict(error) for error in errors],
                "notes": notes,
            }
        )
        return
    rows = []
    for part, quantities in (("training", estimate.training), ("evaluation", estimate.evaluation)):
        for name, (label, scale, form) in _SHOWN.items():
            if name in quantities:
                one = quantities[name]
                span = f"{format(one.low * scale, form)} to {format(one.high * scale, form)}"
                rows.append({"what": f"{part}, {label}", "predicted": format(one.value * scale, form), "90 %": span})
    console.print(table_of(["what", "predicted", "90 %"], rows))
    say(f"made from: {next(iter(estimate.training.values())).how}")
    for error in errors:
        say(_sentence(error))
    if whole is not None and pays is not None:
        say(f"budget: {whole.value / budget:.1%} of {budget:,.0f} {unit}; it pays about {pays} such rounds")
    for note in notes:
        say(f"note: {note}")


def _sentence(error: Any) -> str:
    name = _SHOWN[error.quantity][0].partition(",")[0]
    return (
        f"error on recipes it was not fitted to ({name}, {error.algorithm}): median {error.median:.1%}, "
        f"90th percentile {error.p90:.1%}, {error.rounds} rounds"
    )
