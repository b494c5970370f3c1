"""The fixtures of the tests of real rounds; `import *` brings them, and the check for threads, to a file."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain_gym.inner_trainers.testing import TinyTask, write_tiny_checkpoint
from posttrain_gym.inner_trainers.trl.models import LoadedModel
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer
from tests.trl_rounds import Weights, graded, grpo, sft, trained

__all__ = [
    "folder",
    "grpo_weights",
    "live_models",
    "no_worker_left",
    "sft_weights",
    "task",
    "trainer",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def task(folder: Path) -> TinyTask:
    return TinyTask(folder, verifier=graded)


@pytest.fixture(scope="module")
def trainer() -> TrlTrainer:
    return TrlTrainer()


@pytest.fixture(autouse=True)
def no_worker_left() -> Iterator[None]:
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name == "posttrain-round"] == []


@pytest.fixture(scope="module")
def sft_weights(trainer: TrlTrainer, task: TinyTask) -> Weights:
    return trained(trainer, task, sft())


@pytest.fixture(scope="module")
def grpo_weights(trainer: TrlTrainer, task: TinyTask) -> Weights:
    return trained(trainer, task, grpo())


@pytest.fixture
def live_models(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """Count the models that rounds have made and that are still held, with the cycle collector switched off."""
    made: list[weakref.ref[Any]] = []
    original = LoadedModel.with_weights

    def with_weights(self: LoadedModel, weights: Weights) -> Any:
        model = original(self, weights)
        made.append(weakref.ref(model))
        return model

    def alive() -> int:
        assert made, "no model was made"
        return sum(reference() is not None for reference in made)

    monkeypatch.setattr(LoadedModel, "with_weights", with_weights)
    gc.collect()
    gc.disable()
    yield alive
    gc.enable()
