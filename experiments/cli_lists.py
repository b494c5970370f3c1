"""Commands that list what there is: tasks, models, policies, algorithms."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from .cli_options import Json
from .cli_output import say, table_of
from .progress import console


def tasks(
    task: Annotated[str, typer.Argument(help="Show one: a built-in name, module:Class or task.yaml.")] = "",
    instance: Annotated[int, typer.Option(help="Instance seed.")] = 0,
    as_json: Json = False,
) -> None:
    """List the built-in tasks, or show one instance: base, sources, benchmark."""
    from ..inner_trainers.tasks import BUILT_IN, resolve_task
    from ..inner_trainers.tasks.rows import distinct_rows

    if not task:
        rows = []
        for name in BUILT_IN:
            family = resolve_task(name)
            rows.append(
                {
                    "name": name,
                    "train": _span(family.train_seeds),
                    "test": _span(family.test_seeds),
                    "about": (type(getattr(family, "task", family)).__doc__ or "").strip().splitlines()[0],
                }
            )
        console.print_json(data=rows) if as_json else console.print(table_of(["name", "train", "test", "about"], rows))
        return
    drawn = resolve_task(task).instance(instance)
    built = drawn.built
    data = {
        "facts": drawn.facts(),
        "content_hash": built.content_hash,
        "sources": {n: {k: len(r) for k, r in s.rows.items()} for n, s in built.sources.items()},
        "distinct_rows": {n: {k: distinct_rows(r) for k, r in s.rows.items()} for n, s in built.sources.items()},
        "leaked_rows_removed": dict(built.leaked),
        "contaminated_items_removed": [asdict(item) for item in built.contaminated],
        "benchmark": {
            "content_hash": built.benchmark.content_hash,
            "weights": dict(built.benchmark.weights),
            "validation": len(built.benchmark.validation),
            "test": len(built.benchmark.test),
        },
    }
    console.print_json(data=data)


def models(as_json: Json = False) -> None:
    """List the built-in base models: parameters, licence, and what to run for one that is not there."""
    from ..inner_trainers.base_models import BUILT_IN_MODELS

    rows: list[dict[str, Any]] = [
        {
            "name": model.name,
            "about": model.summary,
            "parameters": model.parameters,
            "licence": model.licence,
            "missing": model.available(),
        }
        for model in BUILT_IN_MODELS.values()
    ]
    if as_json:
        console.print_json(data=rows)
        return
    shown = [
        {**row, "parameters": f"{row['parameters']:,}", "there": "no" if row["missing"] else "yes"} for row in rows
    ]
    console.print(table_of(["name", "about", "parameters", "licence", "there"], shown))
    for row in rows:
        if row["missing"]:
            say(f"for {row['name']}, run {row['missing']}")
    say("a task also takes a folder that save_pretrained wrote, or a hub name, org/name or org/name@revision")


def policies(as_json: Json = False) -> None:
    """List heuristics, the SB3 algorithms that `train` takes, and in-loop controllers."""
    from ..meta_policies.controllers.catalogue import controller_summaries
    from ..meta_policies.heuristics import HEURISTICS
    from ..meta_policies.sb3 import SB3_ALGORITHMS

    rows = [
        {"name": name, "kind": "heuristic", "about": (cls.__doc__ or "").strip().splitlines()[0]}
        for name, cls in HEURISTICS.items()
    ]
    rows += [
        {"name": name, "kind": "train --algo", "about": f"{a.target.replace(':', '.')} on {a.wrapper.__name__}"}
        for name, a in SB3_ALGORITHMS.items()
    ]
    rows += [{"name": name, "kind": "controller", "about": about} for name, about in controller_summaries().items()]
    console.print_json(data=rows) if as_json else console.print(table_of(["name", "kind", "about"], rows))


def algorithms(
    task: Annotated[str, typer.Option(help="Built-in family, module:Class or task.yaml.")] = "letters",
    instance: Annotated[int, typer.Option(help="Instance seed.")] = 0,
    as_json: Json = False,
) -> None:
    """List the inner algorithms: what each trains on and reads, and the sources of a task that it can use."""
    from ..inner_trainers.tasks import resolve_task
    from ..inner_trainers.trl.algorithms import ALGORITHMS, usable_sources

    drawn = resolve_task(task).instance(instance)
    rows = [
        {
            "name": spec.name,
            "about": spec.summary,
            "rows": spec.rows + (", teacher" if spec.needs_teacher else ""),
            "losses": list(spec.losses),
            "reads": list(spec.reads),
            "sources": list(usable_sources(drawn, spec)),
        }
        for spec in ALGORITHMS.values()
    ]
    if as_json:
        console.print_json(data=rows)
        return
    shown = [{**row, **{key: ", ".join(row[key]) or "none" for key in ("losses", "sources")}} for row in rows]
    console.print(table_of(["name", "about", "rows", "losses", "sources"], shown))
    say(f"sources are those of {drawn.name}; --json also has the recipe fields that each reads")


def _span(seeds: range) -> str:
    return f"{seeds.start} to {seeds.stop - 1}"
