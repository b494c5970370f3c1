"""Commands about single rounds: run-recipe, probe, replay, bench."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from .cli_options import Json, OnFault, RoundSeconds, Task, Unit, fault_settings, integers
from .cli_output import print_round, say
from .progress import console


def run_recipe(
    recipe: Annotated[Path, typer.Argument(help="YAML or JSON file with the recipe's fields.")],
    task: Task = "letters",
    instance: Annotated[int, typer.Option(help="Instance seed.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the round.")] = 0,
    save: Annotated[Path | None, typer.Option(help="Write the weights here as safetensors.")] = None,
    controller: Annotated[
        str, typer.Option(help="Adjust the round while it runs: rules, rules:FILE.yaml, schedule:cosine, net, ...")
    ] = "",
    interval: Annotated[int | None, typer.Option(help="Optimiser steps between two decisions; default: 1.")] = None,
    log: Annotated[Path | None, typer.Option(help="Folder for the log of the controller's decisions.")] = None,
    log_level: Annotated[str, typer.Option(help="decisions, signals or timings; each has the one before.")] = "",
    on_fault: OnFault = None,
    max_round_seconds: RoundSeconds = None,
    as_json: Json = False,
) -> None:
    """Train one recipe from the base checkpoint and print its scores; no environment, no policy."""
    from .run_recipe import Control
    from .run_recipe import run_recipe as run

    control = None
    if controller:
        control = Control(controller, 1 if interval is None else interval, log, log_level or "decisions")
    else:
        for option, given in (("--interval", interval), ("--log", log), ("--log-level", log_level or None)):
            if given is not None:
                raise ValueError(f"{option}: it is about a controller; name one with --controller, for example rules.")
    if log_level and log is None:
        raise ValueError("--log-level: there is no log; name its folder with --log.")
    result = run(recipe, task, instance, seed, save, fault_settings(on_fault, max_round_seconds), control)
    console.print_json(data=result) if as_json else print_round(result)
    if result["failure"] is not None:
        raise typer.Exit(1)


def probe(
    recipe: Annotated[Path, typer.Argument(help="YAML or JSON file with the recipe's fields.")],
    what: Annotated[str, typer.Option("--what", help="learning-rate or batch-size.")] = "learning-rate",
    task: Task = "letters",
    instance: Annotated[int, typer.Option(help="Instance seed.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the rounds.")] = 0,
    low: Annotated[float | None, typer.Option(help="Lowest learning rate.")] = None,
    high: Annotated[float | None, typer.Option(help="Highest learning rate.")] = None,
    points: Annotated[int | None, typer.Option(help="Number of learning rates, evenly spaced on a log scale.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps at each learning rate.")] = None,
    candidates: Annotated[str, typer.Option(help="Batch sizes, e.g. 8,16,32.")] = "",
    memory_bytes: Annotated[int | None, typer.Option(help="Most memory in use; default: what there is.")] = None,
    budget: Annotated[float | None, typer.Option("--budget", help="What the probe may cost, in --unit.")] = None,
    unit: Unit = "train_tokens",
    as_json: Json = False,
) -> None:
    """Try learning rates or batch sizes in short real rounds and suggest what works, before a budget is spent on it."""
    from ..inner_trainers.base import Limit
    from .probe import found_something, probe_lines, probe_table, run_probe

    sizes = integers("candidates", candidates) if candidates else None
    asked: dict[str, Any] = {"low": low, "high": high, "points": points, "steps_per_point": steps}
    asked |= {"candidates": sizes, "memory_bytes": memory_bytes}
    limit = None if budget is None else Limit(unit, budget)
    result = run_probe(recipe, task, what, instance, seed, limit, **asked)
    if as_json:
        console.print_json(data=result.to_dict())
    else:
        console.print(probe_table(result))
        for line in probe_lines(result):
            say(line)
    if not found_something(result):
        raise typer.Exit(1)


def replay(
    run: Annotated[Path, typer.Argument(help="Folder of a decision log, as run-recipe --log writes it.")],
    plot: Annotated[
        Path | None, typer.Option(help="Write a PNG of the loss or reward, the rate and each change.")
    ] = None,
    signals: Annotated[bool, typer.Option("--signals", help="Show what was seen at each change.")] = False,
    number: Annotated[int | None, typer.Option("--round", help="Which round of the log, from 1; default: all.")] = None,
    as_json: Json = False,
) -> None:
    """Show what a controller changed in a round while it ran, and why."""
    from .replay import changes_table, read_stories, story_lines

    stories = read_stories(run, number)
    if as_json:
        console.print_json(data=[story.to_dict() for story in stories])
    for index, story in enumerate([] if as_json else stories, start=1):
        say((f"round {index} of {len(stories)}: " if len(stories) > 1 else "") + story.heading)
        say(story.summary)
        if story.changes:
            console.print(changes_table(story, signals))
        for line in story_lines(story):
            say(line)
    if plot is not None:
        from .plots import plot_round

        plot_round(stories[-1], plot)
        if not as_json:
            say(f"plot: {plot}" + (f" (round {len(stories)})" if len(stories) > 1 else ""))


def bench(
    name: Annotated[str, typer.Argument(help="round, rollouts, in-loop, inspect-data, space, ...")],
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Repetitions of each side, interleaved; default: 5, of in-loop 10.")
    ] = None,
    algorithm: Annotated[
        str | None, typer.Option(help="With round: a long round of this algorithm instead of a short SFT round.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure a figure against its alternative in this very run; prints ratios."""
    from .bench import run_bench

    result = run_bench(name, repeats, algorithm)
    if as_json:
        print(json.dumps(result))
    else:
        console.print_json(data=result)
