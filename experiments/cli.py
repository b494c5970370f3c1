"""The command line `posttrain-gym`: its commands."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import __version__
from . import cli_cost, cli_data, cli_lists, cli_rounds, cli_search, cli_space, cli_tasks
from .cli_entry import run_app
from .progress import console

app = typer.Typer(
    help="LLM post-training as a Gymnasium environment: one step is one real training round.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

for command in (
    cli_search.demo,
    cli_search.train,
    cli_search.evaluate,
    cli_search.compare,
    cli_rounds.run_recipe,
    cli_rounds.probe,
    cli_cost.predict_cost,
    cli_rounds.replay,
    cli_space.space,
    cli_lists.tasks,
    cli_tasks.check_task,
    cli_data.inspect_data,
    cli_lists.models,
    cli_lists.policies,
    cli_lists.algorithms,
    cli_rounds.bench,
):
    app.command(command.__name__.replace("_", "-"))(command)


def main() -> None:
    """Run `posttrain-gym`; see `cli_entry.run_app`."""
    run_app(app, "train (with --resume), compare and demo go on where they were: finished rounds are kept.")


@app.callback(invoke_without_command=True)
def _top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        console.print(__version__)
        raise typer.Exit
