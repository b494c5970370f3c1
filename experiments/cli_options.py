"""What the options of several commands share: their help, and how their text is read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .cli_output import say

if TYPE_CHECKING:
    from ..inner_trainers.tasks import TaskFamily
    from .settings import EnvSettings

MANY = 10_000

Task = Annotated[str, typer.Option("--task", help="Built-in family, or your own task: module:Class or task.yaml.")]
Env = Annotated[
    str, typer.Option("--env", help="recipe, in-loop (adjust rounds of --recipe) or full (choose and adjust).")
]
GivenRecipe = Annotated[Path | None, typer.Option("--recipe", help="Recipe file of --env in-loop.")]
Interval = Annotated[int, typer.Option("--interval", min=1, help="Optimiser steps between two adjustments.")]
Limit = Annotated[float, typer.Option("--budget", help="Budget of one episode, in --unit.")]
Unit = Annotated[str, typer.Option("--unit", help="train_tokens, flops or device_seconds.")]
Rounds = Annotated[int, typer.Option("--max-rounds", help="Rounds of one episode at most.")]
Patience = Annotated[int, typer.Option("--patience", help="Rounds without a new best that end an episode.")]
Price = Annotated[float, typer.Option("--price", help="Reward taken for spending the whole budget.")]
Samples = Annotated[int, typer.Option("--samples", help="Completions per item and evaluation seed.")]
Devices = Annotated[str, typer.Option("--devices", help="Devices dealt to workers in turn, e.g. cuda:0,cuda:1.")]
OnFault = Annotated[
    list[str] | None,
    typer.Option("--on-fault", help="KIND=RESPONSE, e.g. diverged=retry or oom=rollback; may be given several times."),
]
RoundSeconds = Annotated[float | None, typer.Option("--max-round-seconds", help="Time limit of one round's training.")]
Workers = Annotated[int, typer.Option("--workers", min=1, help="Processes.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Instances = Annotated[
    str, typer.Option("--instances", help="Seeds, e.g. 10000,10003 or 10000-10004; default: first 3 of meta-test.")
]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="Trained policies take their likeliest action instead of sampling.")
]
Space = Annotated[
    Path | None,
    typer.Option(
        "--space",
        help="Decision-space file: what may be tried. Its budget, evaluator and price hold where no option is given.",
    ),
]
Seeds = Annotated[str, typer.Option("--seeds", help="Episode seeds, e.g. 0,1,2 or 0-4.")]


def environment_settings(
    task: str,
    split: str,
    budget: float,
    unit: str,
    max_rounds: int,
    patience: int,
    price: float,
    samples: int,
    devices: str,
    faults: Mapping[str, Any],
    space: Path | None = None,
    given: Collection[str] = (),
) -> EnvSettings:
    """Return the settings of the environments that a command's options ask for.

    A decision-space file holds against options that are not ``given`` and have their default.
    """
    from ..envs.budget import Budget
    from ..envs.reward import RewardSettings
    from ..inner_trainers.evaluation import Evaluator
    from ..inner_trainers.tasks import resolve_task
    from .settings import EnvSettings

    family = resolve_task(task)
    RewardSettings(price=price)
    if samples < 1:
        raise ValueError(f"--samples: expected at least 1, got {samples}.")
    evaluator: dict[str, Any] = {"samples_per_seed": samples, "k": min(8, 2 * samples)}
    Evaluator(**evaluator)
    settings = EnvSettings(
        task=task,
        split=split,
        budget=Budget(budget, unit, max_rounds, patience),
        price=price,
        evaluator=evaluator,
        faults=faults,
        devices=tuple(d.strip() for d in devices.split(",") if d.strip()),
    )
    return settings if space is None else _with_space(settings, space, family, given)


def _with_space(settings: EnvSettings, path: Path, family: TaskFamily, given: Collection[str]) -> EnvSettings:
    """Return the settings with a decision-space file; options that were given on the command line win over it."""
    from ..envs.space_file import load_space_file
    from ..inner_trainers.evaluation import Evaluator

    file = load_space_file(path)
    budget, own = settings.budget, file.budget()
    if own is not None:
        if "unit" in given and "budget" not in given:
            raise ValueError(f"--unit: the limit in {path} is in {own.unit}; give --budget too.")
        names = {"limit": "budget", "unit": "unit", "max_rounds": "max_rounds", "patience": "patience"}
        budget = replace(budget, **{field: getattr(own, field) for field, name in names.items() if name not in given})
    evaluator = dict(settings.evaluator)
    chosen = file.evaluator_settings()
    if chosen is not None:
        samples = evaluator["samples_per_seed"]
        evaluator = chosen
        if "samples" in given:
            asked = file.evaluator_section.k if file.evaluator_section is not None else None
            most = samples * len(chosen.get("seeds", Evaluator.seeds))
            evaluator = {**chosen, "samples_per_seed": samples, "k": min(Evaluator.k if asked is None else asked, most)}
    reward = file.reward()
    settings = replace(
        settings,
        budget=budget,
        evaluator=evaluator,
        price=settings.price if "price" in given else reward.get("price", settings.price),
        failure_penalty=reward.get("failure_penalty", settings.failure_penalty),
        space=file.to_dict(),
    )
    # what is wrong for this task is refused with its line here, where the file is known
    file.decision_space(family.instance(family.train_seeds[0]), settings.trainer())
    return settings


def given_options(context: typer.Context) -> set[str]:
    """Return the names of a command's options that were given, by their Python names."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def refuse_space_of_recipe(env: str, space: Path | None) -> None:
    """Refuse a decision-space file where every round has the recipe that is given.

    Raises:
        ValueError: both are given.
    """
    if env == "in-loop" and space is not None:
        raise ValueError("--space: with --env in-loop every round has the recipe of --recipe; leave it out.")


def fault_settings(on_fault: list[str] | None, max_round_seconds: float | None) -> dict[str, Any]:
    """Return the settings of a fault policy that differ from its defaults."""
    from ..inner_trainers.fault_policy import FaultPolicy

    settings: dict[str, Any] = {}
    responses = {}
    for text in on_fault or []:
        kind, separator, response = text.partition("=")
        if not separator:
            raise ValueError(f"--on-fault: expected KIND=RESPONSE, for example diverged=retry, got {text!r}.")
        responses[kind.strip()] = response.strip()
    if responses:
        settings["responses"] = responses
    if max_round_seconds is not None:
        settings["max_round_seconds"] = max_round_seconds
    FaultPolicy.from_dict(settings)
    return settings


def instances_of(environment: EnvSettings, text: str) -> list[int]:
    """Return the instance seeds of an option; the first of meta-test when it is empty."""
    from ..inner_trainers.tasks import resolve_task

    return integers("instances", text) if text else list(resolve_task(environment.task).test_seeds[:3])


def note_seen(environment: EnvSettings, instances: Sequence[int], quiet: bool) -> list[int]:
    """Return the instances that meta-training may have drawn, and say so: figures on them are not for unseen tasks."""
    seen = [instance for instance in instances if instance in environment.family().train_seeds]
    if seen and not quiet:
        say(f"note: meta-training may have drawn these instances: {', '.join(map(str, seen))}")
    return seen


def integers(name: str, text: str) -> list[int]:
    """Return the numbers of an option such as ``0,2,5-7``.

    Raises:
        ValueError: text that is no such list, or a list that is too long.
    """
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        ends = [first, last] if dash else [first, first]
        if not all(end.isascii() and end.isdigit() and len(end) < 16 for end in ends):
            raise ValueError(f"--{name}: expected numbers like 0,1,2 or 0-4, got {text!r}.")
        low, high = map(int, ends)
        if not low <= high < low + MANY:
            raise ValueError(f"--{name}: expected a rising range of at most {MANY} numbers, got {part.strip()!r}.")
        numbers.extend(range(low, high + 1))
    return numbers
