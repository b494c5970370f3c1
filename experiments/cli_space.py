"""The command that shows a decision-space file: space."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .cli_options import Json
from .progress import console


def space(
    file: Annotated[Path, typer.Argument(help="Decision-space file, YAML or JSON.")],
    task: Annotated[
        str, typer.Option("--task", help="Task whose facts decide: a built-in family, module:Class or task.yaml.")
    ] = "",
    instance: Annotated[int | None, typer.Option(help="Instance seed; default: the first of meta-training.")] = None,
    as_json: Json = False,
) -> None:
    """Show a decision space: its settings and size, what is reachable, what each constraint removes."""
    from ..envs.space_file import load_space_file
    from .settings import EnvSettings
    from .space_summary import summarise_space
    from .space_table import print_space

    described = load_space_file(file)
    if not task:
        if instance is not None:
            raise ValueError("--instance: an instance is one of a task; give --task too.")
        summary = summarise_space(described)
    else:
        settings = EnvSettings(task=task)
        family = settings.family()
        drawn = family.instance(family.train_seeds[0] if instance is None else instance)
        summary = summarise_space(described, drawn, settings.trainer())
    if as_json:
        console.print_json(data=summary)
    else:
        print_space(summary, f"space {file}")
    if not any(entry["reachable"] for entry in summary["algorithms"]):
        raise typer.Exit(1)
