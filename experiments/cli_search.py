"""Commands that search recipes or compare who does: demo, train, evaluate, compare."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from .cli_options import (
    Deterministic,
    Devices,
    Env,
    GivenRecipe,
    Instances,
    Interval,
    Json,
    Limit,
    OnFault,
    Patience,
    Price,
    Rounds,
    RoundSeconds,
    Samples,
    Seeds,
    Space,
    Task,
    Unit,
    Workers,
    environment_settings,
    fault_settings,
    given_options,
    instances_of,
    integers,
    note_seen,
    refuse_space_of_recipe,
)
from .cli_output import print_comparison, print_json, say
from .progress import ProgressDisplay, episode_line


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the run and its report.")] = Path("runs/demo"),
    rounds: Annotated[int, typer.Option(min=1, help="Decisions of meta-training.")] = 128,
    instances: Annotated[int, typer.Option(min=1, help="Unseen instances of the comparison.")] = 10,
    seeds: Annotated[int, typer.Option(min=1, help="Episodes per policy and instance.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of meta-training.")] = 0,
    space: Annotated[
        Path | None, typer.Option("--space", help="Decision-space file; the demo keeps its own budget.")
    ] = None,
) -> None:
    """Train a meta-policy on real rounds, compare it with heuristics at equal budget, leave a report."""
    from ..envs.space_file import load_space_file
    from .demo import DemoSettings, run_demo

    content = None if space is None else load_space_file(space).to_dict()
    settings = DemoSettings(train_rounds=rounds, instances=instances, seeds=seeds, seed=seed, space=content)
    with ProgressDisplay() as progress:
        report, comparison = run_demo(
            settings,
            out,
            command=_command(),
            on_round=progress.round,
            on_episode=progress.episode,
            on_stage=progress.stage,
        )
    print_comparison(comparison)
    say(f"report: {report}")


def train(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Run folder.")],
    task: Task = "letters",
    env: Env = "recipe",
    recipe: GivenRecipe = None,
    interval: Interval = 5,
    shaping: Annotated[bool, typer.Option("--shaping", help="Shape rewards by quick evaluations.")] = False,
    algo: Annotated[str, typer.Option(help="SB3 algorithm; `posttrain-gym policies` lists them.")] = "maskable_ppo",
    hyperparameters: Annotated[
        Path | None, typer.Option("--hyperparameters", help="YAML file in rl-zoo3's format; replaces the defaults.")
    ] = None,
    parameter: Annotated[
        list[str] | None, typer.Option("-P", help="KEY=VALUE of the algorithm, e.g. learning_rate=lin_3e-4.")
    ] = None,
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
    space: Space = None,
) -> None:
    """Train a meta-policy with Stable-Baselines3 on real rounds."""
    from ..meta_policies.hyperparameters import read_hyperparameters
    from ..meta_policies.sb3 import sb3_algorithm
    from .settings import ENVIRONMENTS, in_loop_settings
    from .train import TrainSettings
    from .train import train as run

    sb3_algorithm(algo)
    in_loop = in_loop_settings(env, recipe, interval, shaping)
    refuse_space_of_recipe(env, space)
    faults = fault_settings(on_fault, max_round_seconds)
    environment = environment_settings(
        task,
        "train",
        budget,
        unit,
        max_rounds,
        patience,
        price,
        samples,
        devices,
        faults,
        space,
        given_options(context),
    )
    given = given_options(context)
    chosen = read_hyperparameters(algo, ENVIRONMENTS[env], hyperparameters, parameter or ())
    rounds = chosen.n_timesteps if chosen.n_timesteps is not None and "rounds" not in given else rounds
    envs = chosen.n_envs if chosen.n_envs is not None and "envs" not in given else envs
    settings = TrainSettings(
        replace(environment, in_loop=in_loop),
        algo,
        rounds,
        envs,
        seed,
        chosen.arguments,
        chosen.normalize,
        None if chosen.noise_type is None else (chosen.noise_type, chosen.noise_std),
    )
    with ProgressDisplay() as progress:
        progress.stage(f"training {algo} on {task}: {rounds} decisions, {envs} environment(s), run folder {out}")
        policy, episodes = run(settings, out, resume=resume, on_round=progress.round)
    limit = environment.budget
    budget_options = ["--task", task, "--budget", f"{limit.limit:g}", "--unit", limit.unit]
    budget_options += ["--max-rounds", str(limit.max_rounds), "--patience", str(limit.patience)]
    budget_options += [] if space is None else ["--space", str(space)]
    say(f"policy: {policy}  ({len(episodes)} episodes)")
    say(f"curves: tensorboard --logdir {shlex.quote(str(out / 'tensorboard'))}")
    if in_loop is None:
        words = ["compare", *budget_options, "--out", f"{out}-compare", "random", str(policy)]
    else:  # `compare` plays recipes alone
        of_recipe = [] if recipe is None else ["--recipe", str(recipe)]
        words = ["evaluate", *budget_options, "--env", env, *of_recipe, "--interval", str(interval), str(policy)]
    say(f"next:   posttrain-gym {shlex.join(words)}")


def evaluate(
    context: typer.Context,
    policy: Annotated[str, typer.Argument(help="Heuristic by name, fixed:FILE.yaml, or the .zip of a trained policy.")],
    task: Task = "letters",
    env: Env = "recipe",
    recipe: GivenRecipe = None,
    interval: Interval = 5,
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
    space: Space = None,
    deterministic: Deterministic = False,
    as_json: Json = False,
) -> None:
    """Run one policy on meta-test instances and print what it reached on test items."""
    from ..meta_policies.catalogue import check_policy_name, require_adjusting_policy
    from .comparison import summarise
    from .episodes import policy_labels, run_named_episode
    from .settings import in_loop_settings

    check_policy_name(policy)
    (label,) = policy_labels([policy])
    in_loop = in_loop_settings(env, recipe, interval, shaping=False)
    refuse_space_of_recipe(env, space)
    if in_loop is not None:
        require_adjusting_policy(policy, env)
    faults = fault_settings(on_fault, max_round_seconds)
    environment = environment_settings(
        task, "test", budget, unit, max_rounds, patience, price, samples, devices, faults, space, given_options(context)
    )
    environment = replace(environment, in_loop=in_loop)
    results = []
    chosen = instances_of(environment, instances)
    note_seen(environment, chosen, quiet=as_json)
    for instance in chosen:
        for seed in integers("seeds", seeds):
            result = run_named_episode(environment, policy, instance, seed, name=label, deterministic=deterministic)
            results.append(result)
            if not as_json:
                say(episode_line(result))
    comparison = summarise(results)
    print_json(comparison) if as_json else print_comparison(comparison)


def compare(
    context: typer.Context,
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
    space: Space = None,
    deterministic: Deterministic = False,
    as_json: Json = False,
) -> None:
    """Run policies on the same unseen instances, seeds and budget; print gains and regrets with intervals."""
    from ..inner_trainers.telemetry import machine_facts
    from .compare import compare as run
    from .report import write_report

    faults = fault_settings(on_fault, max_round_seconds)
    environment = environment_settings(
        task, "test", budget, unit, max_rounds, patience, price, samples, devices, faults, space, given_options(context)
    )
    chosen, repeats = instances_of(environment, instances), integers("seeds", seeds)
    seen = note_seen(environment, chosen, quiet=as_json)
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
        print_json(comparison)
    else:
        print_comparison(comparison)
        say(f"report: {report}")


def _command() -> str:
    return " ".join(["posttrain-gym", *sys.argv[1:]])
