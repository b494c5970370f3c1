"""The command line, `posttrain-gym`: its commands, and how errors and interrupts end it."""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import Annotated

import typer
from rich.console import Console

from .. import __version__
from . import cli_cost, cli_lists, cli_rounds, cli_search, cli_space
from .progress import console, plain

app = typer.Typer(
    help="LLM post-training as a Gymnasium environment: one step is one real training round.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
errors = Console(stderr=True, highlight=False)
INTERRUPTED = 130
DEBUG = "POSTTRAIN_GYM_DEBUG"
"""Environment variable that shows the traceback behind an error."""

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
    cli_lists.policies,
    cli_lists.algorithms,
    cli_rounds.bench,
):
    app.command(command.__name__.replace("_", "-"))(command)


def main() -> None:
    """Run the command line; errors a person can act on are one paragraph and exit code 2."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads collapse on a shared machine
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.path.append(os.getcwd())  # module:Class of a person's own folder
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without "±" shows "?" instead of ending the run
    signal.signal(signal.SIGTERM, _interrupt)  # a polite end is an interrupt: finished rounds are kept
    try:
        app()
    except (ValueError, RuntimeError, OSError) as error:
        if os.environ.get(DEBUG):
            raise
        errors.print(f"[bold red]error[/]: {plain(str(error))}", soft_wrap=True)
        raise SystemExit(2) from None
    except SystemExit as stop:
        if stop.code == INTERRUPTED:  # typer turns Ctrl-C into this code without a word
            errors.print(
                "interrupted; train (with --resume), compare and demo go on where they were: finished rounds are kept.",
                soft_wrap=True,
            )
        raise


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


@app.callback(invoke_without_command=True)
def _top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        console.print(__version__)
        raise typer.Exit
