"""What scorers and verifiers print stays out of results and is told once; one that hangs is ended and named."""

from __future__ import annotations

import logging
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain_gym.inner_trainers.evaluation import Evaluator, shortened
from posttrain_gym.inner_trainers.fault_policy import FaultPolicy
from posttrain_gym.inner_trainers.printed import LONGEST_LINE, prints_aside, prints_kept
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.tasks.base import Benchmark, Item
from posttrain_gym.inner_trainers.testing import TinyTask, write_tiny_checkpoint
from posttrain_gym.inner_trainers.time_limit import TimeLimitError
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


# Keeping what is printed


def test_what_a_block_prints_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    with prints_kept() as printed:
        print("\n  one")
        print("two", file=sys.stderr)
    assert (printed.first, printed.lines) == ("one", 3)
    assert str(printed) == "3 lines, which are not shown; the first: 'one'"
    assert (sys.stdout, sys.stderr) == before
    print("after")
    assert capsys.readouterr() == ("after\n", "")
    with prints_kept() as quiet:
        pass
    assert not quiet
    with prints_kept() as open_line:
        print("x" * 1000, end="")
    assert open_line.first == "x" * LONGEST_LINE


def test_other_threads_print_as_ever(capsys: pytest.CaptureFixture[str]) -> None:
    entered, printed_outside = threading.Event(), threading.Event()

    def other() -> None:
        entered.wait(10)
        print("of another thread")
        printed_outside.set()

    thread = threading.Thread(target=other)
    thread.start()
    with prints_kept() as printed:
        entered.set()
        printed_outside.wait(10)
        print("of this one")
    thread.join()
    assert printed.first == "of this one"
    assert capsys.readouterr().out == "of another thread\n"


def test_blocks_can_be_nested_and_overlap_between_threads(capsys: pytest.CaptureFixture[str]) -> None:
    found: list[str] = []

    def keep(name: str) -> None:
        with prints_kept() as printed:
            for _ in range(50):
                print(name)
                time.sleep(0.0005)
        found.append(printed.first * (printed.lines == 50))

    threads = [threading.Thread(target=keep, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    with prints_kept() as outer:
        with prints_kept() as inner:
            print("inner")
        print("outer")
    for thread in threads:
        thread.join()
    assert sorted(found) == list("abcd")
    assert (inner.first, outer.first, outer.lines) == ("inner", "outer", 1)
    assert capsys.readouterr().out == ""


def test_a_block_that_raises_puts_the_streams_back() -> None:
    before = sys.stdout
    with pytest.raises(KeyError), prints_kept():
        raise KeyError
    assert sys.stdout is before


def test_what_is_printed_aside_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    with prints_aside():
        print("aside")
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr() == ("", "aside\n")
    with prints_kept() as printed, prints_aside():
        print("kept")
    assert (printed.first, printed.lines) == ("kept", 1)
    assert capsys.readouterr() == ("", "")


# In evaluations and rewards


class Loud(TinyTask):
    """A task whose scorer prints, or hangs, as the test says."""

    scorer: Any = None

    def benchmark(self) -> Benchmark:
        return replace(super().benchmark(), score=self.scorer)


class LoudWhenBuilt(TinyTask):
    def benchmark(self) -> Benchmark:
        print("reading the benchmark")
        return super().benchmark()


def test_what_building_a_task_prints_is_no_result(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert LoudWhenBuilt(folder).built.content_hash == TinyTask(folder).built.content_hash
    assert capsys.readouterr() == ("", "reading the benchmark\n")


def test_a_scorer_that_prints_is_told_once(
    folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def score(item: Item, text: str) -> float:
        print(f"debug of one test {item.prompt}")
        return 1.0

    task = Loud(folder)
    task.scorer = score
    trainer = TrlTrainer(evaluator=Evaluator(seeds=(0,), samples_per_seed=2, k=2))
    with caplog.at_level(logging.WARNING):
        card, _ = trainer.evaluate(task, trainer.base(task), "validation")
    assert card.score == 1.0
    assert capsys.readouterr().out == ""
    (told,) = [record.getMessage() for record in caplog.records if "printed" in record.getMessage()]
    assert told.startswith(
        "the benchmark's scorer printed 32 lines, which are not shown; the first: 'debug of one test "
    )


def test_a_verifier_that_prints_is_flagged_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def verifier(row: Any, text: str) -> float:
        print("judging", text)
        return float(len(text) % 2)

    task = TinyTask(folder, verifier=verifier)
    trainer = TrlTrainer()
    recipe = Recipe("grpo", {"good": 1.0}, steps=2, batch_size=8, num_generations=4, learning_rate=1e-4)
    session = trainer.begin(task, recipe, trainer.base(task), 0)
    session.advance()
    report, _ = session.result()
    told = [flag for flag in report.flags if "prints" in flag]
    assert len(told) == 1
    assert told[0].startswith("the verifier of source 'good' prints, which is not shown; the first line: 'judging")
    assert "judging" not in capsys.readouterr().out


@pytest.mark.parametrize("ends", [True, False])
def test_a_scorer_that_hangs_is_ended_and_named(folder: Path, ends: bool) -> None:
    def score(item: Item, text: str) -> float:
        if item.prompt == "be2=":
            if ends:
                while True:
                    time.sleep(0.01)
            time.sleep(3)
        return 1.0

    task = Loud(folder)
    task.scorer = score
    policy = FaultPolicy(max_scoring_seconds=0.5, grace_seconds=2.0 if ends else 0.1)
    trainer = TrlTrainer(evaluator=Evaluator(seeds=(0,), samples_per_seed=1, k=1), fault_policy=policy)
    began = time.monotonic()
    with pytest.raises(TimeLimitError) as error:
        trainer.evaluate(task, trainer.base(task), "validation")
    assert time.monotonic() - began < 30
    assert str(error.value).startswith("scoring on validation, at prompt 'be2=' and completion '")
    assert "took longer than 0.5 seconds" in str(error.value)
    assert error.value.ended is ends


def test_long_texts_are_shortened_in_messages() -> None:
    assert shortened("abc") == "'abc'"
    assert shortened("x" * 500) == repr("x" * 120 + "…")


def test_the_default_limit_moves_no_journal() -> None:
    policy = FaultPolicy()
    assert policy.max_scoring_seconds == 600.0
    assert "max_scoring_seconds" not in policy.to_dict()
    other = FaultPolicy(max_scoring_seconds=5.0)
    assert FaultPolicy.from_dict(other.to_dict()) == other
    assert FaultPolicy.from_dict(FaultPolicy(max_scoring_seconds=None).to_dict()).max_scoring_seconds is None
    with pytest.raises(ValueError, match="max_scoring_seconds"):
        FaultPolicy(max_scoring_seconds=0)
