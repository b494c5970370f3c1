"""Small stand-ins for tests of this project and of third parties: a tiny checkpoint, a tiny task, a scripted trainer.

Nothing here trains a useful model. `ScriptedTrainer` is no training at all and says so in its flags.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .adjustments import Adjustment
from .base import Checkpoint, Cost, DimensionScore, Failure, Limit, RoundReport, Scorecard, checkpoint_id, round_id
from .fault_kinds import failure
from .messages import did_you_mean
from .recipe import Recipe
from .signals import Signals
from .tasks.base import Benchmark, InnerTask, Item, Source, TaskFamily

TINY_CHARACTERS = "abcdefgh=0123456789>"


def write_tiny_checkpoint(folder: Path, *, seed: int = 0, pad_is_eos: bool = False, eos_ids: Any = None) -> Path:
    """Write a random two-layer character model of about 14,000 parameters and return its folder.

    Args:
        folder: where `save_pretrained` writes.
        seed: seed of the weights.
        pad_is_eos: whether the end token doubles as padding.
        eos_ids: end-token ids for the generation settings; None for the tokenizer's own.
    """
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    specials = ["<pad>", "<eos>", "<unk>"]
    vocabulary = {token: i for i, token in enumerate([*specials, *TINY_CHARACTERS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<eos>" if pad_is_eos else "<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=128,
    )
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    torch.set_rng_state(state)
    if eos_ids is not None:
        model.generation_config.eos_token_id = eos_ids
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)


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

    def evaluate(self, task: InnerTask, checkpoint: Checkpoint, split: str) -> tuple[Scorecard, Cost]:
        """Return the checkpoint's two scores."""
        scores = checkpoint.weights["scores"] - (0.01 if split == "test" else 0.0)
        entries = {
            name: DimensionScore(float(s), 0.02, float(s), min(1.0, float(s) * 1.5), 1.0)
            for name, s in zip("xy", np.clip(scores, 0.0, 1.0), strict=True)
        }
        mean = math.fsum(entry.mean for entry in entries.values()) / 2
        return Scorecard(split, entries, mean, 0.014, 2, 2, 2), self.evaluation_cost_bound(task, split)


class ScriptedSession:
    """A scripted round; satisfies `TrainingSession`."""

    def __init__(
        self,
        trainer: ScriptedTrainer,
        task: InnerTask,
        recipe: Recipe,
        start: Checkpoint,
        seed: int,
        limit: Limit | None,
        fault: Any,
    ) -> None:
        self._trainer, self._task, self._recipe, self._start, self._seed = trainer, task, recipe, start, seed
        self._fault = fault
        self._curves: list[dict[str, float]] = []
        self._ended: str | None = None
        self._failure: Failure | None = None
        self._factor = 1.0
        self._factors: list[float] = []
        self._applied: list[tuple[int, Adjustment]] = []
        self._flags = ["scripted: nothing was trained"]
        self._bound = trainer.step_cost_bound(task, recipe)
        self._steps_paid = math.inf
        if limit is not None and self._bound.in_unit(limit.unit) > 0:
            self._steps_paid = limit.amount // self._bound.in_unit(limit.unit)
        self._check_limit()

    @property
    def step(self) -> int:
        """Steps done."""
        return len(self._curves)

    @property
    def done(self) -> bool:
        """Whether no further step will be taken."""
        return self._ended is not None

    def advance(self, steps: int | None = None) -> Mapping[str, float]:
        """Take scripted steps."""
        from .faults import FaultWatch, failure_from_exception

        watch = FaultWatch(vocabulary_size=20, on_policy=False)
        for _ in range(self._recipe.steps if steps is None else steps):
            if self.done:
                break
            if isinstance(self._fault, BaseException):
                self._failure, self._ended = failure_from_exception(self._fault, self.step + 1), "failed"
                break
            if self._trainer.step_seconds > 0:
                time.sleep(self._trainer.step_seconds)
            scripted = self._fault or []
            loss = float(scripted[self.step]) if self.step < len(scripted) else 1.0 / (self.step + 1)
            self._curves.append(
                {
                    "step": self.step + 1.0,
                    "loss": loss,
                    "grad_norm": 1.0,
                    "learning_rate": self._recipe.learning_rate * self._factor,
                }
            )
            self._factors.append(self._factor)
            fault = watch.observe(self.step, loss, 1.0)
            if fault is not None:
                self._failure, self._ended = fault, "failed"
            elif self.step >= self._recipe.steps:
                self._ended = "finished"
            else:
                self._check_limit()
        return self._curves[-1] if self._curves else {}

    def _check_limit(self) -> None:
        if self.step + 1 > self._steps_paid:
            self._ended = "budget"

    @property
    def cost(self) -> Cost:
        """The cost of the steps so far."""
        return self._bound.times(self.step)

    @property
    def signals(self) -> Signals:
        """What the last step showed."""
        return Signals()

    @property
    def settings(self) -> Mapping[str, float]:
        """Learning rate, its factor and the mix."""
        return {
            "learning_rate": self._recipe.learning_rate * self._factor,
            "learning_rate_factor": self._factor,
            **{f"mix.{name}": weight for name, weight in self._recipe.mix.items()},
        }

    def refusal(self, adjustment: Adjustment) -> str | None:
        """Return why the adjustment cannot be applied now; None when it can."""
        if self.done:
            return f"the round has ended ({self._ended}) at step {self.step}"
        if adjustment.kind not in ("none", "stop", "lr_scale"):
            return "a scripted round changes its learning rate alone"
        return None

    def apply(self, adjustment: Adjustment) -> None:
        """Apply ``lr_scale`` or ``stop``."""
        reason = self.refusal(adjustment)
        if reason is not None:
            raise ValueError(f"adjustment {adjustment.kind!r}: {reason}.")
        if adjustment.kind == "stop":
            self._ended = "stopped"
        elif adjustment.kind == "lr_scale":
            self._factor *= adjustment.number
        if adjustment.kind != "none":
            self._applied.append((self.step, adjustment))

    def flag(self, sentence: str) -> None:
        """Add a sentence to the report's flags."""
        self._flags.append(sentence)

    def result(self) -> tuple[RoundReport, Checkpoint | None]:
        """Return the report and the moved scores."""
        ended = self._ended or "stopped"
        if self.step == 0 and self._failure is None:
            self._failure, ended = failure("budget_too_small", 0, "no optimiser step was taken"), "failed"
        checkpoint = None
        if self._failure is None:
            ignored = self._trainer.ignored_settings(self._recipe.algorithm)
            whole = round_id(self._task, self._start, self._recipe, self._seed, ignored)
            made = checkpoint_id(whole, self._recipe.steps, self._factors)
            checkpoint = Checkpoint(made, {"scores": self._moved()}, self._start.depth + 1)
        return (
            RoundReport(
                recipe=self._recipe,
                start=self._start.id,
                seed=self._seed,
                checkpoint=None if checkpoint is None else checkpoint.id,
                steps=self.step,
                ended=ended,
                supervised_tokens=self.step * self._recipe.batch_size,
                training_cost=self._bound.times(self.step),
                failure=self._failure,
                curves=tuple(self._curves),
                adjustments=tuple(self._applied),
                flags=tuple(self._flags),
            ),
            checkpoint,
        )

    def close(self) -> None:
        """End the round."""
        self._ended = self._ended or "stopped"

    def _moved(self) -> Any:
        rate = math.log10(self._recipe.learning_rate * self._factor)
        speed = math.exp(-((rate + 3) ** 2)) * min(1.0, self.step / 40)
        if self._recipe.learning_rate * self._factor > 3e-3:
            speed = -0.5
        target = np.array([self._recipe.mix.get("left", 0.0), self._recipe.mix.get("right", 0.0)]) * 0.9
        scores = self._start.weights["scores"]
        noise = np.random.default_rng(self._seed).normal(0, 0.005, 2)
        return np.clip(scores + speed * np.maximum(target - scores, -0.2) + noise, 0.0, 1.0)
