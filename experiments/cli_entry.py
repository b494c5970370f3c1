"""How the commands begin and end: settings before anything heavy loads, errors as one paragraph, polite interrupts."""

from __future__ import annotations

import io
import os
import signal
import sys

import typer
from rich.console import Console

from .progress import plain

errors = Console(stderr=True, highlight=False)
INTERRUPTED = 130
DEBUG = "POSTTRAIN_GYM_DEBUG"
"""Environment variable that shows the traceback behind an error."""


def run_app(app: typer.Typer, when_interrupted: str) -> None:
    """Run a command line; errors a person can act on are one paragraph and exit code 2.

    Args:
        app: its commands.
        when_interrupted: what Ctrl-C leaves behind, as one sentence.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads collapse on a shared machine
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.path.append(os.getcwd())  # module:Class of a person's own folder
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without "±" shows "?" instead of ending the run
    signal.signal(signal.SIGTERM, _interrupt)  # a polite end is an interrupt: finished rounds are kept
    try:
        app()
    except (ValueError, RuntimeError, OSError, ImportError) as error:  # ImportError: an extra is missing
        if os.environ.get(DEBUG):
            raise
        errors.print(f"[bold red]error[/]: {plain(str(error))}", soft_wrap=True)
        raise SystemExit(2) from None
    except SystemExit as stop:
        if stop.code == INTERRUPTED:  # typer turns Ctrl-C into this code without a word
            errors.print(f"interrupted; {when_interrupted}", soft_wrap=True)
        raise


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
