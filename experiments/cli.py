"""The command line, `posttrain-gym`: one function for each command, and what their options share."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .. import __version__
from .progress import ProgressDisplay, console, episode_line, plain

if TYPE_CHECKING:
    from .comparison import Comparison
    from .settings import EnvSettings

app = typer.Typer(
    help="LLM post-training as a Gymnasium environment: one step is one real training round.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
errors = Console(stderr=True, highlight=False)
INTERRUPTED = 130
MANY = 10_000
SHOWN_ADJUSTMENTS = 6
DEBUG = "POSTTRAIN_GYM_DEBUG"
"""Environment variable that shows the traceback behind an error."""

Task = Annotated[str, typer.Option("--task", help="Built-in family, or module:Class of your own task.")]
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
Seeds = Annotated[str, typer.Option("--seeds", help="Episode seeds, e.g. 0,1,2 or 0-4.")]


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


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the run and its report.")] = Path("runs/demo"),
    rounds: Annotated[int, typer.Option(min=1, help="Decisions of meta-training.")] = 128,
    instances: Annotated[int, typer.Option(min=1, help="Unseen instances of the comparison.")] = 10,
    seeds: Annotated[int, typer.Option(min=1, help="Episodes per policy and instance.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of meta-training.")] = 0,
) -> None:
    """Train a meta-policy on real rounds, compare it with heuristics at equal budget, leave a report."""
    from .demo import DemoSettings, run_demo

    settings = DemoSettings(train_rounds=rounds, instances=instances, seeds=seeds, seed=seed)
    with ProgressDisplay() as progress:
        report, comparison = run_demo(
            settings,
            out,
            command=_command(),
            on_round=progress.round,
            on_episode=progress.episode,
            on_stage=progress.stage,
        )
    _print_comparison(comparison)
    _say(f"report: {report}")


@app.command()
def train(
    out: Annotated[Path, typer.Option(help="Run folder.")],
    task: Task = "letters",
    env: Annotated[str, typer.Option(help="recipe, in-loop (adjust rounds of --recipe) or full (both).")] = "recipe",
    recipe: Annotated[Path | None, typer.Option(help="Recipe file of --env in-loop.")] = None,
    interval: Annotated[int, typer.Option(min=1, help="Optimiser steps between two adjustments.")] = 5,
    shaping: Annotated[bool, typer.Option("--shaping", help="Shape rewards by quick evaluations.")] = False,
    algo: Annotated[str, typer.Option(help="a2c, maskable_ppo, ppo, recurrent_ppo, sac or td3.")] = "maskable_ppo",
    rounds: Annotated[int, typer.Option(min=1, help="Decisions in total, rounded up to whole rollouts.")] = 128,
    envs: Annotated[int, typer.Option(min=1, help="Environments side by side, one process each.")] = 1,
    seed: Annotated[int, typer.Option(help="Decides every random choice of the run.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    budget: Limit = 200_000,
    unit: Unit = "train_tokens",
    max_rounds: Rounds = 8,
    patience: Patience = 4,
    price: Price = 0.1,
    samples: Samples = 4,
    devices: Devices = "",
    on_fault: OnFault = None,
    max_round_seconds: RoundSeconds = None,
) -> None:
    """Train a meta-policy with Stable-Baselines3 on real rounds."""
    from ..meta_policies.sb3 import sb3_algorithm
    from .settings import in_loop_settings
    from .train import TrainSettings
    from .train import train as run

    sb3_algorithm(algo)
    in_loop = in_loop_settings(env, recipe, interval, shaping)
    faults = _faults(on_fault, max_round_seconds)
    environment = _environment(task, "train", budget, unit, max_rounds, patience, price, samples, devices, faults)
    settings = TrainSettings(replace(environment, in_loop=in_loop), algo, rounds, envs, seed)
    with ProgressDisplay() as progress:
        progress.stage(f"training {algo} on {task}: {rounds} decisions, {envs} environment(s), run folder {out}")
        policy, episodes = run(settings, out, resume=resume, on_round=progress.round)
    if in_loop is not None:
        return  # `compare` plays recipes alone
    compare_with = ["--task", task, "--out", f"{out}-compare", "--budget", f"{budget:g}", "--unit", unit]
    compare_with += ["--max-rounds", str(max_rounds), "--patience", str(patience), "random", str(policy)]
    _say(f"policy: {policy}  ({len(episodes)} episodes)")
    _say(f"curves: tensorboard --logdir {shlex.quote(str(out / 'tensorboard'))}")
    _say(f"next:   posttrain-gym compare {shlex.join(compare_with)}")


@app.command()
def evaluate(
    policy: Annotated[str, typer.Argument(help="Heuristic by name, fixed:FILE.yaml, or the .zip of a trained policy.")],
    task: Task = "letters",
    instances: Instances = "",
    seeds: Seeds = "0",
    budget: Limit = 200_000,
    unit: Unit = "train_tokens",
    max_rounds: Rounds = 8,
    patience: Patience = 4,
    price: Price = 0.1,
    samples: Samples = 4,
    devices: Devices = "",
    on_fault: OnFault = None,
    max_round_seconds: RoundSeconds = None,
    deterministic: Deterministic = False,
    as_json: Json = False,
) -> None:
    """Run one policy on meta-test instances and print what it reached on test items."""
    from ..meta_policies.catalogue import check_policy_name
    from .comparison import summarise
    from .episodes import policy_labels, run_named_episode

    check_policy_name(policy)
    (label,) = policy_labels([policy])
    faults = _faults(on_fault, max_round_seconds)
    environment = _environment(task, "test", budget, unit, max_rounds, patience, price, samples, devices, faults)
    results = []
    chosen = _instances(environment, instances)
    _note_seen(environment, chosen, quiet=as_json)
    for instance in chosen:
        for seed in _integers("seeds", seeds):
            result = run_named_episode(environment, policy, instance, seed, name=label, deterministic=deterministic)
            results.append(result)
            if not as_json:
                _say(episode_line(result))
    comparison = summarise(results)
    _print_json(comparison) if as_json else _print_comparison(comparison)


@app.command()
def compare(
    policies: Annotated[
        list[str], typer.Argument(help="Heuristics by name, recipes as fixed:FILE.yaml, trained policies by .zip file.")
    ],
    out: Annotated[Path, typer.Option(help="Result folder; an interrupted comparison goes on in it.")],
    task: Task = "letters",
    instances: Instances = "",
    seeds: Seeds = "0,1,2",
    workers: Workers = 1,
    reference: Annotated[str, typer.Option(help="Policy the others are held against; default: the first.")] = "",
    budget: Limit = 200_000,
    unit: Unit = "train_tokens",
    max_rounds: Rounds = 8,
    patience: Patience = 4,
    price: Price = 0.1,
    samples: Samples = 4,
    devices: Devices = "",
    on_fault: OnFault = None,
    max_round_seconds: RoundSeconds = None,
    deterministic: Deterministic = False,
    as_json: Json = False,
) -> None:
    """Run policies on the same unseen instances, seeds and budget; print gains and regrets with intervals."""
    from ..inner_trainers.telemetry import machine_facts
    from .compare import compare as run
    from .report import write_report

    faults = _faults(on_fault, max_round_seconds)
    environment = _environment(task, "test", budget, unit, max_rounds, patience, price, samples, devices, faults)
    chosen, repeats = _instances(environment, instances), _integers("seeds", seeds)
    seen = _note_seen(environment, chosen, quiet=as_json)
    with ProgressDisplay(quiet=as_json) as progress:
        comparison = run(
            environment,
            policies,
            chosen,
            repeats,
            out,
            workers=workers,
            reference=reference or None,
            deterministic=deterministic,
            on_episode=progress.episode,
        )
    facts = {
        "environment": environment.to_dict(),
        "instances": chosen,
        "seeds": repeats,
        "instances that meta-training may have drawn": seen or "none",
        "workers": workers,
        "machine": machine_facts(),
    }
    report = write_report(out, comparison, None, facts, _command())
    if as_json:
        _print_json(comparison)
    else:
        _print_comparison(comparison)
        _say(f"report: {report}")


@app.command("run-recipe")
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
    result = run(recipe, task, instance, seed, save, _faults(on_fault, max_round_seconds), control)
    console.print_json(data=result) if as_json else _print_round(result)
    if result["failure"] is not None:
        raise typer.Exit(1)


@app.command()
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

    sizes = _integers("candidates", candidates) if candidates else None
    asked: dict[str, Any] = {"low": low, "high": high, "points": points, "steps_per_point": steps}
    asked |= {"candidates": sizes, "memory_bytes": memory_bytes}
    limit = None if budget is None else Limit(unit, budget)
    result = run_probe(recipe, task, what, instance, seed, limit, **asked)
    if as_json:
        console.print_json(data=result.to_dict())
    else:
        console.print(probe_table(result))
        for line in probe_lines(result):
            _say(line)
    if not found_something(result):
        raise typer.Exit(1)


@app.command()
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
    for story in [] if as_json else stories:
        _say(story.heading)
        _say(story.summary)
        if story.changes:
            console.print(changes_table(story, signals))
        for line in story_lines(story):
            _say(line)
    if plot is not None:
        from .plots import plot_round

        plot_round(stories[-1], plot)
        if not as_json:
            _say(f"plot: {plot}" + (f" (round {len(stories)})" if len(stories) > 1 else ""))


@app.command()
def tasks(
    task: Annotated[str, typer.Argument(help="Show an instance of this task.")] = "",
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
        console.print_json(data=rows) if as_json else console.print(_table(["name", "train", "test", "about"], rows))
        return
    drawn = resolve_task(task).instance(instance)
    built = drawn.built
    data = {
        "facts": drawn.facts(),
        "content_hash": built.content_hash,
        "sources": {n: {k: len(r) for k, r in s.rows.items()} for n, s in built.sources.items()},
        "distinct_rows": {n: {k: distinct_rows(r) for k, r in s.rows.items()} for n, s in built.sources.items()},
        "leaked_rows_removed": dict(built.leaked),
        "benchmark": {
            "weights": dict(built.benchmark.weights),
            "validation": len(built.benchmark.validation),
            "test": len(built.benchmark.test),
        },
    }
    console.print_json(data=data)


@app.command()
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
    console.print_json(data=rows) if as_json else console.print(_table(["name", "kind", "about"], rows))


@app.command()
def algorithms(
    task: Annotated[str, typer.Option(help="Built-in family, or module:Class.")] = "letters",
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
    console.print(_table(["name", "about", "rows", "losses", "sources"], shown))
    _say(f"sources are those of {drawn.name}; --json also has the recipe fields that each reads")


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="round, rollouts, in-loop, rounds-per-hour, memory or import.")],
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


def _environment(
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
) -> EnvSettings:
    from ..envs.budget import Budget
    from ..envs.reward import RewardSettings
    from ..inner_trainers.evaluation import Evaluator
    from ..inner_trainers.tasks import resolve_task
    from .settings import EnvSettings

    resolve_task(task)
    RewardSettings(price=price)
    if samples < 1:
        raise ValueError(f"--samples: expected at least 1, got {samples}.")
    evaluator: dict[str, Any] = {"samples_per_seed": samples, "k": min(8, 2 * samples)}
    Evaluator(**evaluator)
    return EnvSettings(
        task=task,
        split=split,
        budget=Budget(budget, unit, max_rounds, patience),
        price=price,
        evaluator=evaluator,
        faults=faults,
        devices=tuple(d.strip() for d in devices.split(",") if d.strip()),
    )


def _faults(on_fault: list[str] | None, max_round_seconds: float | None) -> dict[str, Any]:
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


def _instances(environment: EnvSettings, text: str) -> list[int]:
    from ..inner_trainers.tasks import resolve_task

    return _integers("instances", text) if text else list(resolve_task(environment.task).test_seeds[:3])


def _note_seen(environment: EnvSettings, instances: Sequence[int], quiet: bool) -> list[int]:
    """Return the instances that meta-training may have drawn, and say so: figures on them are not for unseen tasks."""
    seen = [instance for instance in instances if instance in environment.family().train_seeds]
    if seen and not quiet:
        _say(f"note: meta-training may have drawn these instances: {', '.join(map(str, seen))}")
    return seen


def _integers(name: str, text: str) -> list[int]:
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


def _print_comparison(comparison: Comparison) -> None:
    from .report import verdicts

    rows = []
    for policy in comparison.policies:
        rows.append(
            {
                "policy": policy.policy,
                "episodes": policy.episodes,
                "gain (test)": _estimate(policy.gain),
                "regret": _estimate(policy.regret),
                "rounds": f"{policy.mean_rounds:.1f}",
                "budget": f"{policy.mean_budget_used:.0%}",
                "failed rounds": sum(policy.failures.values()),
            }
        )
    console.print(_table(list(rows[0]), rows))
    for sentence in verdicts(comparison):
        console.print(plain(sentence), soft_wrap=True)


def _estimate(estimate: Any) -> str:
    return f"{estimate.value:+.3f} [{estimate.low:+.3f}, {estimate.high:+.3f}]"


def _print_json(comparison: Comparison) -> None:
    from .comparison_files import to_json

    print(to_json(comparison))


def _print_round(result: dict[str, Any]) -> None:
    read = {name: value for name, value in result["recipe"].items() if name not in result["ignored"]}
    console.print(f"recipe   {plain(json.dumps(read))}")
    console.print(f"ended    {result['ended']} after {result['steps']} steps")
    if result["failure"] is not None:
        console.print(f"failure  {plain(json.dumps(result['failure']))}")
    for split, scores in result["scores"].items():
        before = f"{scores['before']:.3f} ± {scores['before_error']:.3f}"
        console.print(f"{split:<11}{before} -> {scores['after']:.3f} ± {scores['after_error']:.3f}")
    if "control" in result:
        _print_control(result["control"])
    told = result["telemetry"]
    if told:
        card = f"{told['card']} ({told['reason']})" if "reason" in told else json.dumps(told)
        console.print(f"card     {plain(card)}", soft_wrap=True)
    for flag in result["flags"]:
        console.print(f"flag     {plain(flag)}")


def _print_control(control: dict[str, Any]) -> None:
    from ..inner_trainers.adjustments import Adjustment

    told = f"{control['controller']}: {control['decisions']} decisions, {control['applied']} adjustments"
    console.print(f"control  {plain(told)}")
    shown = [(step, str(Adjustment.from_dict(data))) for step, data in control["adjustments"][:SHOWN_ADJUSTMENTS]]
    more = len(control["adjustments"]) - len(shown)
    if shown:
        listed = ", ".join(f"{what} after step {step}" for step, what in shown) + (f", and {more} more" if more else "")
        console.print(f"         {plain(listed)}", soft_wrap=True)
    if control["log"] is not None:
        _say(f"replay   posttrain-gym replay {shlex.quote(control['log'])}")


def _say(text: str) -> None:
    console.print(plain(text), soft_wrap=True)


def _table(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*[plain(str(row[column])) for column in columns])
    return table


def _span(seeds: range) -> str:
    return f"{seeds.start} to {seeds.stop - 1}"


def _command() -> str:
    return " ".join(["posttrain-gym", *sys.argv[1:]])
