"""The command that tells the author of a task what is wrong with it: check-task."""

from __future__ import annotations

from typing import Annotated

import typer

from .cli_options import Json
from .cli_output import say
from .progress import console


def check_task(
    task: Annotated[str, typer.Argument(help="Task file such as task.yaml, module:Class, or a built-in name.")],
    instance: Annotated[int | None, typer.Option(help="Instance seed; default: the first of meta-training.")] = None,
    evaluate: Annotated[
        bool,
        typer.Option("--evaluate", help="Also score the base model, and try the task's own trainer in short rounds."),
    ] = False,
    call_seconds: Annotated[float, typer.Option(help="Time limit of one call of a scorer or verifier.")] = 5.0,
    build_seconds: Annotated[float, typer.Option(help="Time limit of importing and building the task.")] = 300.0,
    as_json: Json = False,
) -> None:
    """Tell what is wrong with a task and how to mend it, before a budget is spent on it; exit code 1 on errors."""
    from ..inner_trainers.messages import require_number
    from ..inner_trainers.task_checks import CHECKS, SEVERITIES
    from ..inner_trainers.task_checks import check_task as check

    for name, seconds in (("call-seconds", call_seconds), ("build-seconds", build_seconds)):
        require_number(f"--{name}", seconds, low=0, high=86_400, low_open=True)
    found = check(task, instance, evaluate=evaluate, call_seconds=call_seconds, build_seconds=build_seconds)
    counts = {severity: sum(finding.severity == severity for finding in found) for severity in SEVERITIES}
    if as_json:
        console.print_json(data={"task": task, **counts, "findings": [finding.to_dict() for finding in found]})
    else:
        for finding in found:
            say(str(finding))
        words = [f"{count} {severity}{'' if count == 1 else 's'}" for severity, count in counts.items()]
        say(f"{task}: {', '.join(words)}; {len(CHECKS)} checks, see docs/tasks.md")
    if counts["error"]:
        raise typer.Exit(1)
