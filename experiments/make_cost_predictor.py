"""Runs drawn recipes and recipes far from them, and measures how well their costs are foreseen.

Writes `experiments/results/cost_predictor.parquet`, a row per round, and the page `cost_predictor.md`. Beside the new
rounds it takes those of `letters_rounds` and `effects`, whose tokens and FLOPs were counted the same way.

    python -m posttrain_gym.experiments.make_cost_predictor
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from ..envs.cost_rounds import UNKNOWN_MACHINE, CostFacts, CostRound, left_out
from ..inner_trainers.base import RoundReport
from ..inner_trainers.files import write_atomically
from ..inner_trainers.recipe import Recipe
from .make_letters_rounds import RESULTS, read_parquet_rows, versions

ALGORITHMS = ("distill", "dpo", "grpo", "kto", "midtrain", "ppo", "rft", "rloo", "sft")
DRAWN = 234
"""Recipes that are drawn: 26 of each algorithm."""
INSTANCES = 12
"""Meta-train letters instances that they are drawn for, from 0."""
WITH_TEACHER = 1
"""The instance that takes the place of one whose base is as strong as the teacher."""


@dataclass(frozen=True)
class Asked:
    """One round to run.

    Attributes:
        source: ``"drawn"`` or ``"extrapolation"``.
        kind: what of it lies outside of what was drawn; empty for drawn ones.
        task: ``"letters"``, ``"calculator"`` or ``"tiny"``.
        instance: instance seed.
        recipe: its fields.
        seed: seed of the round.
    """

    source: str
    kind: str
    task: str
    instance: int
    recipe: Mapping[str, Any]
    seed: int


FAR: tuple[tuple[str, str, int, str, dict[str, Any]], ...] = (
    ("batch 6 times larger", "letters", 16, "sft", {"batch_size": 384, "steps": 15}),
    ("batch 3 times larger", "letters", 16, "dpo", {"batch_size": 192, "steps": 12}),
    ("batch 4 times larger", "letters", 16, "rloo", {"batch_size": 256, "steps": 8}),
    ("batch 4 times larger", "letters", 18, "ppo", {"batch_size": 256, "steps": 8}),
    ("4 times as many steps", "letters", 18, "midtrain", {"steps": 240}),
    ("4 times as many steps", "letters", 18, "kto", {"batch_size": 16, "steps": 240}),
    ("4 times as many steps", "letters", 19, "grpo", {"batch_size": 16, "steps": 240}),
    ("8 times the generations", "letters", 19, "grpo", {"batch_size": 64, "steps": 15, "num_generations": 64}),
    ("8 times the generations", "letters", 19, "rft", {"batch_size": 64, "steps": 30, "num_generations": 64}),
    ("6 times the accumulation", "letters", 20, "distill", {"batch_size": 16, "gradient_accumulation": 12, "steps": 8}),
    ("6 times the accumulation", "letters", 20, "sft", {"batch_size": 16, "gradient_accumulation": 12, "steps": 15}),
    ("rate that ruins the model", "letters", 20, "rloo", {"learning_rate": 3e-2, "steps": 40}),
    ("rate that ruins the model", "letters", 20, "rft", {"learning_rate": 3e-2, "steps": 40}),
    ("another task, with a tool", "calculator", 1, "sft", {"mix": {"worked": 1.0}, "steps": 30}),
    ("another task, with a tool", "calculator", 1, "sft", {"mix": {"answers": 1.0}, "steps": 30}),
    ("another task, with a tool", "calculator", 1, "ppo", {"mix": {"practice": 1.0}, "batch_size": 64}),
    ("model 20 times smaller", "tiny", 1, "sft", {"mix": {"good": 1.0}, "steps": 50}),
    ("model 20 times smaller", "tiny", 1, "ppo", {"mix": {"good": 1.0}, "steps": 25}),
)
"""Recipes outside of what is drawn: kind, task, instance seed, algorithm, other fields."""


def draw_recipe(rng: np.random.Generator, algorithm: str, sources: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a random recipe: sizes, steps and rate over a wide range, the mix from a Dirichlet."""
    fields: dict[str, Any] = {
        "algorithm": algorithm,
        "start": "base",
        "batch_size": int(rng.choice([8, 16, 32, 64])),
        "gradient_accumulation": int(rng.choice([1, 1, 2])),
        "steps": round(math.exp(rng.uniform(math.log(4), math.log(60)))),
        "learning_rate": float(f"{math.exp(rng.uniform(math.log(1e-5), math.log(3e-3))):.3g}"),
        "lora_rank": int(rng.choice([0, 0, 0, 8])),
    }
    weights = np.round(rng.dirichlet(np.full(len(sources), 0.7)), 3)
    weights[0] += 1 - weights.sum()
    weights = np.clip(weights, 0, 1)
    weights /= weights.sum()
    fields["mix"] = dict(zip(sources, map(float, weights), strict=True))
    if algorithm in ("grpo", "rloo", "rft"):
        fields["num_generations"] = int(rng.choice([2, 4, 8]))
    if algorithm in ("grpo", "rloo", "ppo"):
        fields["num_iterations"] = int(rng.choice([1, 1, 1, 2]))
        fields["kl_coef"] = float(rng.choice([0.0, 0.0, 0.05]))
    if algorithm == "ppo":
        fields["critic"] = str(rng.choice(["head", "head", "model", "none"]))
    if algorithm in ("sft", "midtrain", "dpo", "kto"):
        fields["max_length"] = int(rng.choice([1024, 1024, 1024, 16, 24]))
    if algorithm in ("sft", "midtrain") and rng.random() < 0.25:
        fields["packing"] = True
        fields["max_length"] = int(rng.choice([48, 96, 128]))
        fields["batch_size"] = int(rng.choice([4, 8, 16]))
    return fields


def drawn_rounds(trainer: Any, count: int = DRAWN) -> list[Asked]:
    """Return the drawn rounds, each algorithm in turn; the first ``count`` of a longer list are the shorter list."""
    from ..inner_trainers.tasks.letters import LettersFamily

    rng, family = np.random.default_rng(0), LettersFamily()
    tasks = {seed: family.instance(seed) for seed in range(INSTANCES)}
    asked = []
    for number in range(count):
        seed, algorithm = int(rng.integers(INSTANCES)), ALGORITHMS[number % len(ALGORITHMS)]
        if not trainer.usable_sources(tasks[seed], algorithm):
            seed = WITH_TEACHER
        fields = draw_recipe(rng, algorithm, trainer.usable_sources(tasks[seed], algorithm))
        asked.append(Asked("drawn", "", "letters", seed, fields, int(rng.integers(1000))))
    return asked


def far_rounds() -> list[Asked]:
    """Return the rounds outside of what is drawn."""
    common = {"start": "base", "mix": {"instruction": 0.5, "multi_turn": 0.5}}
    return [
        Asked("extrapolation", kind, task, seed, {**common, "algorithm": algorithm, **fields}, 0)
        for kind, task, seed, algorithm, fields in FAR
    ]


def inner_task(name: str, instance: int, folder: Path) -> Any:
    """Return a task; ``"tiny"`` writes its checkpoint into a folder."""
    from ..inner_trainers.tasks import resolve_task
    from ..inner_trainers.testing import TinyTask, write_tiny_checkpoint

    if name == "tiny":
        return TinyTask(write_tiny_checkpoint(folder / "tiny", seed=instance))
    return resolve_task(name).instance(instance)


def run_rounds(asked: Iterable[Asked], trainer: Any, folder: Path) -> list[dict[str, Any]]:
    """Run rounds, each in a forked process of its own so that its peak of memory is its own; a row for each.

    A recipe that is refused is left out: the longest row that it allows may keep no completion.
    """
    context = multiprocessing.get_context("fork")  # the parent has loaded everything, and trains nothing
    tasks: dict[tuple[str, int], Any] = {}
    rows = []
    for one in asked:
        key = (one.task, one.instance)
        if key not in tasks:
            tasks[key] = inner_task(*key, folder)
        facts, recipe = CostFacts(tasks[key], trainer), Recipe.from_dict(one.recipe)
        trainer.base(tasks[key])
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_run_one, args=(sender, trainer, tasks[key], recipe, one.seed))
        process.start()
        sender.close()
        try:
            answer = receiver.recv()
        except EOFError:
            raise RuntimeError(f"the process of round {one} died.") from None
        finally:
            process.join()
        if isinstance(answer, str):
            print(f"{one.source} {recipe.algorithm}: refused ({answer})", flush=True)
            continue
        report = RoundReport.from_dict(answer)
        if left_out(report) is None:
            rows.append(row_of_round(one, facts.round_of(report), report.ended))
        print(f"{one.source} {recipe.algorithm}: {report.ended}, {report.wall_seconds:.1f} s", flush=True)
    return rows


def _run_one(sender: Connection, trainer: Any, task: Any, recipe: Recipe, seed: int) -> None:
    """Train and evaluate one round; send its report, or why it was refused."""
    try:
        session = trainer.begin(task, recipe, trainer.base(task), seed)
    except ValueError as error:
        sender.send(str(error))
        return
    try:
        session.advance()
        report, checkpoint = session.result()
    finally:
        session.close()
    data = report.to_dict()
    if checkpoint is not None:
        data["evaluation_cost"] = asdict(trainer.evaluate(task, checkpoint, "validation")[1])
    sender.send(data)


def row_of_round(asked: Asked, measured: CostRound, ended: str) -> dict[str, Any]:
    """Return the row of a round; `round_of_row` reads it back."""
    data = measured.to_dict()
    return {
        "source": asked.source,
        "kind": asked.kind,
        "task": asked.task,
        "instance": asked.instance,
        "seed": asked.seed,
        "ended": ended,
        "algorithm": measured.recipe.algorithm,
        "recipe": json.dumps(data["recipe"], sort_keys=True),
        "ignored": data["ignored"],
        "content_hash": data["instance"],
        "parameters": data["parameters"],
        "steps": data["steps"],
        "step_bound": json.dumps(data["step_bound"], sort_keys=True),
        "evaluation_bound": json.dumps(data["evaluation_bound"], sort_keys=True),
        "measured": json.dumps(data["measured"], sort_keys=True),
        "machine": data["machine"],
        "versions": versions(),
    }


def round_of_row(row: Mapping[str, Any]) -> CostRound:
    """Return the round of a row."""
    texts = ("recipe", "step_bound", "evaluation_bound", "measured")
    return CostRound.from_dict(
        {**row, **{name: json.loads(row[name]) for name in texts}, "instance": row["content_hash"]}
    )


def earlier_rows(trainer: Any) -> list[dict[str, Any]]:
    """Return the rounds of `letters_rounds` and `effects` as rows, with their bounds; nothing is trained."""
    from ..inner_trainers.tasks.letters import LettersFamily
    from . import make_effects as effects

    family, cases = LettersFamily(), {case.name: case for case in effects.CASES}
    facts: dict[Any, CostFacts] = {}
    rows = []
    for source in ("letters_rounds", "effects"):
        for row in read_parquet_rows(source):
            key = row["instance"] if source == "letters_rounds" else row["case"]
            if (source, key) not in facts:
                task = family.instance(key) if source == "letters_rounds" else effects.inner_task(cases[key])
                facts[source, key] = CostFacts(task, trainer, UNKNOWN_MACHINE)
            known = facts[source, key]
            if known.instance != row["content_hash"]:
                raise RuntimeError(f"{source}: the task of {key!r} is not the one its rounds ran on.")
            recipe = Recipe.from_dict(json.loads(row["recipe"]))
            measured = {
                "train_tokens": row["train_tokens"],
                "flops": row["flops"],
                "device_seconds": row["train_seconds"],
            }
            found = CostRound(
                recipe=recipe,
                instance=known.instance,
                parameters=known.parameters,
                ignored=known.ignored(recipe.algorithm),
                steps=row.get("steps") or recipe.steps,
                step_bound=known.step_bound(recipe),
                evaluation_bound=known.evaluation_bound,
                measured=measured,
                machine=UNKNOWN_MACHINE,
            )
            asked = Asked(source, "", "letters", row.get("instance", 0), {}, row["seed"])
            rows.append({**row_of_round(asked, found, "finished"), "versions": row["versions"]})
    return rows


def write_results(rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the Parquet file and its page."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    from .cost_page import describe

    table = pa.Table.from_pylist([dict(row) for row in rows])
    parquet.write_table(table, RESULTS / "cost_predictor.parquet", compression="zstd")
    write_atomically(RESULTS / "cost_predictor.md", describe(rows).encode())


def read_results() -> list[dict[str, Any]]:
    """Return the committed rows."""
    return read_parquet_rows("cost_predictor")


def main() -> None:
    """Run everything and write the results."""
    from ..inner_trainers.trl.trainer import TrlTrainer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write the page of the rounds that are there again")
    if parser.parse_args().page:
        write_results(read_results())
        return
    trainer = TrlTrainer()
    with tempfile.TemporaryDirectory() as folder:  # first: what is loaded by then is part of each round's memory
        rows = run_rounds([*drawn_rounds(trainer), *far_rounds()], trainer, Path(folder))
    write_results([*earlier_rows(trainer), *rows])


if __name__ == "__main__":
    main()
