"""Small stand-ins for tests of this project and of third parties: a tiny checkpoint, a tiny task, a scripted trainer.

Nothing here trains a useful model. `ScriptedTrainer` is no training at all and says so in its flags.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .base import Checkpoint, Cost, DimensionScore, Limit, Scorecard, TrainingSession
from .messages import did_you_mean
from .recipe import Recipe
from .scripted_session import ScriptedSession
from .tasks.base import Benchmark, Chat, InnerTask, Item, Source, TaskFamily
from .tiny_models import TINY_ARCHITECTURES, TINY_CHARACTERS, write_tiny_checkpoint


class TinyTask(InnerTask):
    """Copying one of eight letters, on a checkpoint made by `write_tiny_checkpoint`."""

    name = "tiny"

    def __init__(
        self,
        folder: Path,
        *,
        rows: Sequence[Mapping[str, Any]] | None = None,
        verifier: Callable[[Any, str], Any] | None = None,
    ) -> None:
        self._folder, self._rows = folder, rows
        self._verifier = verifier if verifier is not None else (lambda row, text: float(text == row["answer"]))

    def base_checkpoint(self) -> Path:
        """Return the folder given at construction."""
        return self._folder

    def sources(self) -> list[Source]:
        """Return ``good`` (right answers, with verifiable prompts) and ``bad`` (always ``h``)."""
        prompts = [f"{a}{b}{c}=" for a in "abcdefgh" for b in "abcd" for c in "01"]
        good = self._rows or [{"prompt": p, "completion": p[0]} for p in prompts]
        bad = [{"prompt": p, "completion": "h"} for p in prompts]
        checked = [{"prompt": p, "answer": p[0]} for p in prompts]
        return [
            Source("bad", {"demonstrations": bad}),
            Source("good", {"demonstrations": good, "prompts": checked}, self._verifier),
        ]

    def benchmark(self) -> Benchmark:
        """Return 16 validation and 16 test items in two dimensions."""

        def items(last: str) -> list[Item]:
            names = ("early", "late")
            return [Item(f"{a}{b}{last}=", names[a > "d"], {"answer": a}) for a in "abcdefgh" for b in "ef"]

        return Benchmark(
            weights={"early": 0.5, "late": 0.5},
            validation=items("2"),
            test=items("3"),
            score=lambda item, text: float(text == item.data["answer"]),
            max_new_tokens=4,
        )


class GivenTask(InnerTask):
    """A task of the parts that it is given, for tests of what looks at tasks.

    Args:
        folder: the base checkpoint.
        sources: the sources, or a function that makes them anew each time.
        benchmark: the benchmark, or a function that makes it anew each time.
        chat: how prompts become turns.
        facts: what `facts` returns; None for the name.
        teacher: folder of the teacher.
        trainer: the task's own trainer.
    """

    name = "given"

    def __init__(
        self,
        folder: Path,
        sources: Sequence[Source] | Callable[[], Any],
        benchmark: Benchmark | Callable[[], Any],
        *,
        chat: Chat | None = None,
        facts: Any = None,
        teacher: Path | None = None,
        trainer: Any = None,
    ) -> None:
        self._folder, self._sources, self._benchmark = folder, sources, benchmark
        self._chat, self._facts, self._teacher, self._trainer = chat, facts, teacher, trainer

    def base_checkpoint(self) -> Path:
        """Return the folder given."""
        return self._folder

    def sources(self) -> Any:
        """Return the sources given."""
        return self._sources() if callable(self._sources) else self._sources

    def benchmark(self) -> Any:
        """Return the benchmark given."""
        return self._benchmark() if callable(self._benchmark) else self._benchmark

    def chat(self) -> Chat | None:
        """Return what was given."""
        return self._chat

    def teacher_checkpoint(self) -> Path | None:
        """Return the folder given."""
        return self._teacher

    def trainer(self) -> Any:
        """Return the trainer given."""
        return self._trainer

    def facts(self) -> Any:
        """Return the facts given."""
        return {"name": self.name} if self._facts is None else self._facts


class ScriptedFamily(TaskFamily):
    """Tasks for `ScriptedTrainer`: two sources and two dimensions, nothing to train."""

    name = "scripted"
    train_seeds = range(0, 100)
    test_seeds = range(100, 110)

    def instance(self, seed: int) -> InnerTask:
        """Return the scripted task of one seed."""
        return ScriptedTask(seed)


class ScriptedTask(InnerTask):
    """A task whose rows and items exist but are never trained on.

    Args:
        seed: decides the base scores.
        answer: completion of every row; None for the seed.
        kinds: row kinds of source ``right``; ``left`` has them all.
    """

    name = "scripted"

    def __init__(
        self, seed: int = 0, answer: str | None = None, kinds: Sequence[str] = ("demonstrations", "prompts")
    ) -> None:
        self.seed, self._kinds = seed, tuple(kinds)
        self._answer = str(seed) if answer is None else answer

    def base_checkpoint(self) -> Path:
        """Return a folder that is never opened."""
        return Path("scripted")

    def sources(self) -> list[Source]:
        """Return ``left`` and ``right`` with three rows of each kind."""
        rows: dict[str, list[dict[str, str]]] = {
            "demonstrations": [{"prompt": f"p{i}", "completion": self._answer} for i in range(3)],
            "prompts": [{"prompt": f"p{i}"} for i in range(3)],
        }
        kinds = {"left": tuple(rows), "right": self._kinds}
        return [Source(name, {kind: rows[kind] for kind in kinds[name]}, lambda row, text: 0.0) for name in kinds]

    def benchmark(self) -> Benchmark:
        """Return one item per split and dimension."""
        return Benchmark(
            weights={"x": 0.5, "y": 0.5},
            validation=[Item("v1", "x"), Item("v2", "y")],
            test=[Item("t1", "x"), Item("t2", "y")],
            score=lambda item, text: 0.0,
        )

    def trainer(self) -> ScriptedTrainer:
        """Return a trainer without scripted faults."""
        return ScriptedTrainer()


class ScriptedTrainer:
    """An inner trainer that computes scores by a formula in microseconds; satisfies `InnerTrainer`.

    A round moves the two scores toward a point that the mix decides, faster with a learning rate near 1e-3 and
    negatively above 3e-3. ``faults`` scripts what goes wrong: round number (from 0) -> an exception to raise or a list
    of losses to report.

    Args:
        faults: round number -> exception or per-step losses.
        parameters_count: what `parameters` answers.
        step_seconds: how long each optimiser step sleeps, for tests that interrupt a round.

    Attributes:
        launched: rounds begun so far.
    """

    recorded = False

    def __init__(
        self, faults: Mapping[int, Any] | None = None, parameters_count: int = 1000, step_seconds: float = 0.0
    ) -> None:
        self.faults = dict(faults or {})
        self.parameters_count, self.step_seconds = parameters_count, step_seconds
        self.launched = 0

    @property
    def algorithms(self) -> tuple[str, ...]:
        """``("grpo", "sft")``."""
        return ("grpo", "sft")

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        """The class's name: a subclass may score otherwise."""
        return {"trainer": type(self).__name__}

    def ignored_settings(self, algorithm: str) -> tuple[str, ...]:
        """Return what SFT ignores; GRPO ignores ``max_length``."""
        return ("max_length",) if algorithm == "grpo" else ("kl_coef", "num_generations", "temperature")

    def usable_sources(self, task: InnerTask, algorithm: str) -> tuple[str, ...]:
        """Return the sources with ``prompts`` for GRPO, with ``demonstrations`` for SFT."""
        kind = "prompts" if algorithm == "grpo" else "demonstrations"
        return tuple(name for name, source in task.built.sources.items() if kind in source.rows)

    def base(self, task: InnerTask) -> Checkpoint:
        """Return the two starting scores, which the task's seed decides."""
        rng = np.random.default_rng(getattr(task, "seed", 0))
        return Checkpoint("base", {"scores": rng.uniform(0.1, 0.4, 2)})

    def parameters(self, task: InnerTask) -> int:
        """Return the number given at construction."""
        return self.parameters_count

    def check(self, task: InnerTask, recipe: Recipe) -> None:
        """Refuse unknown algorithms and sources."""
        if recipe.algorithm not in self.algorithms:
            raise ValueError(
                f"algorithm: unknown {recipe.algorithm!r}.{did_you_mean(recipe.algorithm, self.algorithms)}"
            )
        for name in recipe.mix:
            if name not in task.built.sources:
                raise ValueError(f"mix: no source {name!r}.{did_you_mean(name, task.built.sources)}")

    def step_cost_bound(self, task: InnerTask, recipe: Recipe) -> Cost:
        """Return 10 tokens per sequence."""
        tokens = recipe.batch_size * 10
        return Cost(trained_tokens=tokens, flops=6.0 * self.parameters_count * tokens)

    def evaluation_cost_bound(self, task: InnerTask, split: str) -> Cost:
        """Return 300 generated tokens."""
        return Cost(generated_tokens=300, flops=2.0 * self.parameters_count * 300)

    def begin(
        self, task: InnerTask, recipe: Recipe, start: Checkpoint, seed: int, limit: Limit | None = None
    ) -> ScriptedSession:
        """Start a scripted round."""
        self.check(task, recipe)
        number, self.launched = self.launched, self.launched + 1
        return ScriptedSession(self, task, recipe, start, seed, limit, self.faults.get(number))

    def quick_cost_bound(self, task: InnerTask, items: int) -> Cost:
        """Return 15 generated tokens per item, of which there are two."""
        tokens = 15 * min(items, 2)
        return Cost(generated_tokens=tokens, flops=2.0 * self.parameters_count * tokens)

    def quick_score(self, task: InnerTask, session: TrainingSession, items: int) -> tuple[float, Cost]:
        """Return the mean of the two scores a round has reached, without the noise of its end."""
        assert isinstance(session, ScriptedSession)  # the sessions of this trainer
        return float(np.mean(session.scores_now())), self.quick_cost_bound(task, items)

    def evaluate(self, task: InnerTask, checkpoint: Checkpoint, split: str) -> tuple[Scorecard, Cost]:
        """Return the checkpoint's two scores."""
        scores = checkpoint.weights["scores"] - (0.01 if split == "test" else 0.0)
        entries = {
            name: DimensionScore(float(s), 0.02, float(s), min(1.0, float(s) * 1.5), 1.0)
            for name, s in zip("xy", np.clip(scores, 0.0, 1.0), strict=True)
        }
        mean = math.fsum(entry.mean for entry in entries.values()) / 2
        return Scorecard(split, entries, mean, 0.014, 2, 2, 2), self.evaluation_cost_bound(task, split)


__all__ = [
    "TINY_ARCHITECTURES",
    "TINY_CHARACTERS",
    "GivenTask",
    "ScriptedFamily",
    "ScriptedSession",
    "ScriptedTask",
    "ScriptedTrainer",
    "TinyTask",
    "write_tiny_checkpoint",
]
