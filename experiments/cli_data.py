"""The command that tells what is wrong with files of rows, and writes repaired copies: inspect-data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .cli_options import Json
from .cli_output import say

if TYPE_CHECKING:
    pass


def inspect_data(
    files: Annotated[list[str], typer.Argument(help="Files, folders, patterns or hub names with rows.")],
    model: Annotated[str, typer.Option(help="Built-in model, folder or hub name; without it, no tokens.")] = "",
    algorithm: Annotated[str, typer.Option(help="What will train on them: sft, dpo, kto, grpo, ...")] = "",
    max_length: Annotated[int | None, typer.Option(help="Where rows are cut, in tokens; default: 1024.")] = None,
    columns: Annotated[
        list[str] | None, typer.Option("--column", help="NEW=OLD for a column that is called otherwise; repeatable.")
    ] = None,
    verifier: Annotated[
        str, typer.Option(help="Try a verifier on a sample: NAME[:setting=value,...] or module:function.")
    ] = "",
    task: Annotated[
        str, typer.Option(help="Compare with the benchmark of this task, and write turns as it does.")
    ] = "",
    benchmark: Annotated[str, typer.Option(help="Compare with this benchmark: a YAML file, or a file of items.")] = "",
    fail_on: Annotated[str, typer.Option(help="Exit with 1 on findings as severe: error, warning or note.")] = "error",
    fix: Annotated[Path | None, typer.Option(help="Write a repaired copy of the one file here.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a copy that is there already.")] = False,
    report: Annotated[Path | None, typer.Option(help="Write a page (HTML) with everything here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the histograms of lengths (PNG) here.")] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Count the tokens of every row.")] = False,
    sample_rows: Annotated[int, typer.Option(help="Rows whose tokens are counted otherwise.")] = 10_000,
    call_seconds: Annotated[float, typer.Option(help="Time limit of one call of the verifier.")] = 5.0,
    as_json: Json = False,
) -> None:
    """Tell what is wrong with data before it is trained on; exit code 1 on findings, 2 where it cannot be read."""
    from ..inner_trainers.data.inspection import InspectionSettings
    from ..inner_trainers.data.inspection import inspect_data as inspect
    from ..inner_trainers.data.inspection_benchmark import benchmark_prompts, chat_of
    from ..inner_trainers.data.inspection_findings import SEVERITIES
    from ..inner_trainers.messages import did_you_mean

    if fail_on not in SEVERITIES:
        raise ValueError(f"--fail-on: unknown {fail_on!r}.{did_you_mean(fail_on, SEVERITIES)}")
    if fix is not None and len(files) != 1:
        raise ValueError(f"--fix: it writes a copy of one file, got {len(files)}; name each by itself.")
    renames = _renames(columns or [])
    # what is cheap to refuse is refused before a benchmark is built
    InspectionSettings(model, algorithm, max_length, sample_rows=sample_rows, call_seconds=call_seconds)
    settings = InspectionSettings(
        model=model,
        algorithm=algorithm,
        max_length=max_length,
        columns=renames,
        verifier=verifier,
        benchmark=benchmark_prompts(task, benchmark, renames),
        chat=chat_of(task),
        exact=exact,
        sample_rows=sample_rows,
        call_seconds=call_seconds,
    )
    found = inspect(files, settings, progress=_tell_nothing if as_json else _tell)
    result = found.to_dict()
    if fix is not None:
        from ..inner_trainers.data.repair import repair

        result["fix"] = {"path": str(fix), **repair(found.files[0], fix, force=force)}
    if plot is not None or report is not None:
        from .data_report import plot_lengths, write_report

        if plot is not None:
            plot_lengths(found, plot)
        if report is not None:
            write_report(found, report)
    if as_json:
        print(json.dumps(result))
    else:
        from .data_report import lines_of

        for line in lines_of(found):
            say(line)
        if fix is not None:
            done = {check: count for check, count in result["fix"].items() if check not in ("path", "rows")}
            counts = ", ".join(f"{check} {count}" for check, count in done.items()) or "none"
            say(f"fix: {result['fix']['rows']} rows in {fix}; changes: {counts}; listed in {fix}.changes.jsonl")
        for name, path in (("plot", plot), ("report", report)):
            if path is not None:
                say(f"{name}: {path}")
    if found.fails(fail_on):
        raise typer.Exit(1)


def _renames(columns: list[str]) -> dict[str, str]:
    renames = {}
    for text in columns:
        new, mark, old = text.partition("=")
        if not mark or not new or not old:
            raise ValueError(f"--column: expected NEW=OLD, for example prompt=question, got {text!r}.")
        renames[new] = old
    return renames


def _tell(path: str, rows: int) -> None:
    from .cli_entry import errors
    from .progress import plain

    if errors.is_terminal:
        errors.print(f"{plain(path)}: {rows} rows", end="\r", soft_wrap=True)


def _tell_nothing(path: str, rows: int) -> None:
    pass
