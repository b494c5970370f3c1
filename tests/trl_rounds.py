"""Recipes, rewards and short ways to run a round, for the tests of real rounds on the tiny model."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from trl import GRPOConfig, SFTConfig

from posttrain_gym.inner_trainers.base import Checkpoint, RoundReport
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.tasks.base import Source
from posttrain_gym.inner_trainers.testing import TinyTask
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer

Weights = Mapping[str, torch.Tensor]

SFT: dict[str, Any] = {"algorithm": "sft", "mix": {"good": 1.0}, "steps": 4, "batch_size": 8, "learning_rate": 1e-2}
GRPO: dict[str, Any] = {**SFT, "algorithm": "grpo", "num_generations": 4, "learning_rate": 3e-3}
ROW = 4 + 1 + 1  # tokens of a tiny row: prompt, letter, end


class EveryKind(TinyTask):
    """The tiny task with rows of every kind in one source, and a teacher."""

    def __init__(self, folder: Path, teacher: Path, verifier: Any) -> None:
        super().__init__(folder, verifier=verifier)
        self._teacher = teacher

    def teacher_checkpoint(self) -> Path:
        return self._teacher

    def sources(self) -> list[Source]:
        plain = super().sources()[1]
        rows = plain.rows["demonstrations"]
        pairs = [{"prompt": r["prompt"], "chosen": r["completion"], "rejected": "hh"} for r in rows]
        text = [{"text": r["prompt"] + r["completion"]} for r in rows]
        return [Source("good", {**plain.rows, "preferences": pairs, "text": text}, plain.verifier)]


def graded(row: Mapping[str, Any], completion: str) -> float:
    """A reward with spread on a model that has learnt nothing."""
    return sum(map(ord, completion)) % 7 / 7


def sft(**changes: Any) -> Recipe:
    return Recipe(**{**SFT, **changes})


def grpo(**changes: Any) -> Recipe:
    return Recipe(**{**GRPO, **changes})


def equal(left: Weights, right: Weights) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def run(
    trainer: TrlTrainer, task: TinyTask, recipe: Recipe, start: Checkpoint | None = None, seed: int = 3, **kwargs: Any
) -> tuple[RoundReport, Checkpoint | None]:
    session = trainer.begin(task, recipe, trainer.base(task) if start is None else start, seed, **kwargs)
    session.advance()
    return session.result()


def trained(*args: Any, **kwargs: Any) -> Weights:
    report, checkpoint = run(*args, **kwargs)
    assert report.failure is None, report.failure
    assert checkpoint is not None
    assert report.checkpoint == checkpoint.id
    weights: Weights = checkpoint.weights
    return weights


def stopped_after(steps: int, trainer: TrlTrainer, task: TinyTask) -> Weights:
    """Return the weights that the live model of the same round has after some of its steps."""
    session = trainer.begin(task, sft(), trainer.base(task), 3)
    session.advance(steps)
    state = session._trainer.model.state_dict()
    weights = {name: state[name].clone() for name in trainer.base(task).weights}
    session.close()
    return weights


def by_hand(kind: str, **changes: Any) -> Any:
    config, names = (SFTConfig, {}) if kind == "sft" else (GRPOConfig, {"num_generations": 4})
    return config(
        **{
            "output_dir": tempfile.gettempdir(),
            "max_steps": 4,
            "per_device_train_batch_size": 8,
            "learning_rate": 1e-2 if kind == "sft" else 3e-3,
            "lr_scheduler_type": "constant",
            "seed": 3,
            "bf16": False,
            "use_cpu": True,
            "gradient_checkpointing": False,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            **names,
            **changes,
        }
    )
