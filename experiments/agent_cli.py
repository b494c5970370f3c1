"""The command line `posttrain-agent`: what a person does around searches, beginning with the data at hand."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import __version__
from . import cli_data
from .cli_entry import run_app
from .progress import console

app = typer.Typer(
    help="Work around post-training searches: look at data before they cost a round.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("inspect-data")(cli_data.inspect_data)


def main() -> None:
    """Run `posttrain-agent`; see `cli_entry.run_app`."""
    run_app(app, "nothing was changed.")


@app.callback(invoke_without_command=True)
def _top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        console.print(__version__)
        raise typer.Exit
