"""Real rounds on the tiny model: equal to TRL's own, adjustable, priced, cut at the limit, labelled when they fail."""

from __future__ import annotations

import gc
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from posttrain_gym.inner_trainers.base import Checkpoint, Cost, InnerTrainer, Limit, RoundReport, round_id
from posttrain_gym.inner_trainers.evaluation import Evaluator
from posttrain_gym.inner_trainers.recipe import Adjustment, Recipe
from posttrain_gym.inner_trainers.tasks.base import Source
from posttrain_gym.inner_trainers.testing import TinyTask, write_tiny_checkpoint
from posttrain_gym.inner_trainers.trl import data as data_module
from posttrain_gym.inner_trainers.trl import models as models_module
from posttrain_gym.inner_trainers.trl import session as session_module
from posttrain_gym.inner_trainers.trl.data import draw_mix, tokenise_demonstrations
from posttrain_gym.inner_trainers.trl.grpo import MeteredGRPOTrainer
from posttrain_gym.inner_trainers.trl.models import (
    LoadedModel,
    hold_to_device,
    load_weights,
    resolve_device,
    resolve_precision,
)
from posttrain_gym.inner_trainers.trl.session import TrlSession
from posttrain_gym.inner_trainers.trl.sft import MeteredSFTTrainer
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer, lora_parameters

Weights = Mapping[str, torch.Tensor]

SFT: dict[str, Any] = {"algorithm": "sft", "mix": {"good": 1.0}, "steps": 4, "batch_size": 8, "learning_rate": 1e-2}
GRPO: dict[str, Any] = {**SFT, "algorithm": "grpo", "num_generations": 4, "learning_rate": 3e-3}
ROW = 4 + 1 + 1  # tokens of a tiny row: prompt, letter, end


def graded(row: Mapping[str, Any], completion: str) -> float:
    """A reward with spread on a model that has learnt nothing."""
    return sum(map(ord, completion)) % 7 / 7


def sft(**changes: Any) -> Recipe:
    return Recipe(**{**SFT, **changes})


def grpo(**changes: Any) -> Recipe:
    return Recipe(**{**GRPO, **changes})


def equal(left: Weights, right: Weights) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


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


@pytest.fixture(scope="module")
def sft_weights(trainer: TrlTrainer, task: TinyTask) -> Weights:
    return trained(trainer, task, sft())


@pytest.fixture(scope="module")
def grpo_weights(trainer: TrlTrainer, task: TinyTask) -> Weights:
    return trained(trainer, task, grpo())


def test_it_satisfies_the_protocol(trainer: TrlTrainer, task: TinyTask) -> None:
    assert isinstance(trainer, InnerTrainer)
    assert trainer.algorithms == ("grpo", "sft")
    assert "temperature" in trainer.ignored_settings("sft") and trainer.ignored_settings("grpo") == ("max_length",)
    assert json.loads(json.dumps(trainer.fingerprint)) == trainer.fingerprint
    assert trainer.fingerprint["precision"] == ("bf16" if torch.cuda.is_available() else "fp32")
    assert trainer.usable_sources(task, "grpo") == ("good",)
    assert trainer.usable_sources(task, "sft") == ("bad", "good")
    with pytest.raises(ValueError, match=r"unknown 'grop'. Did you mean 'grpo'\?"):
        trainer.usable_sources(task, "grop")


# Equal to TRL, bit for bit -------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        (
            {"schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1, "max_grad_norm": 0.2, "max_length": 5},
            {
                "lr_scheduler_type": "cosine",
                "warmup_steps": 2,
                "weight_decay": 0.1,
                "max_grad_norm": 0.2,
                "max_length": 5,
            },
        ),
        (
            {"batch_size": 4, "gradient_accumulation": 2, "mix": {"good": 0.75, "bad": 0.25}},
            {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        ),
    ],
)
def test_an_sft_round_is_trls_own_run(
    ours: dict[str, Any], theirs: dict[str, Any], trainer: TrlTrainer, task: TinyTask, folder: Path
) -> None:
    recipe = sft(**ours)
    rows = {name: source.rows["demonstrations"] for name, source in task.built.sources.items()}
    draw = draw_mix({name: len(r) for name, r in rows.items()}, recipe.mix, 32, 3)
    reference = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=by_hand("sft", **theirs),
        train_dataset=datasets.Dataset.from_list([dict(rows[name][index]) for name, index in draw]),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    reference.train()
    weights = trained(trainer, task, recipe)
    state = reference.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in weights.items())
    assert not equal(weights, trainer.base(task).weights)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"kl_coef": 0.5}, {"beta": 0.5}),
        (
            {"batch_size": 4, "gradient_accumulation": 2, "temperature": 0.7, "num_generations": 8},
            {
                "per_device_train_batch_size": 4,
                "gradient_accumulation_steps": 2,
                "temperature": 0.7,
                "num_generations": 8,
            },
        ),
    ],
)
def test_a_grpo_round_is_trls_own_run(
    ours: dict[str, Any], theirs: dict[str, Any], trainer: TrlTrainer, task: TinyTask, folder: Path
) -> None:
    recipe = grpo(**ours)
    rows = task.built.sources["good"].rows["prompts"]
    draw = draw_mix({"good": len(rows)}, {"good": 1.0}, 32 // recipe.num_generations, 3)
    reference = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [graded({}, completion) for completion in completions],
        args=by_hand("grpo", max_completion_length=4, temperature=1.0, **theirs)
        if "temperature" not in theirs
        else by_hand("grpo", max_completion_length=4, **theirs),
        train_dataset=datasets.Dataset.from_list([dict(rows[index]) for _, index in draw]),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    reference.train()
    weights = trained(trainer, task, recipe)
    state = reference.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in weights.items())
    assert not equal(weights, trainer.base(task).weights)


@pytest.mark.parametrize("recipe", [sft(), grpo()], ids=["sft", "grpo"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_the_caller_does_between_steps_moves_nothing(
    recipe: Recipe, mode: Callable[[], Any], trainer: TrlTrainer, task: TinyTask, request: pytest.FixtureRequest
) -> None:
    session = trainer.begin(task, recipe, trainer.base(task), 3)
    with mode():
        while not session.done:
            session.advance(1)
            torch.rand(5), np.random.rand(5), random.random()
            torch.manual_seed(session.step)
        _, checkpoint = session.result()
    assert checkpoint is not None
    assert equal(checkpoint.weights, request.getfixturevalue(f"{recipe.algorithm}_weights"))


@pytest.mark.parametrize("recipe", [sft(), grpo(lora_rank=2)], ids=["sft", "grpo"])
def test_a_caller_in_inference_mode_may_do_all_of_it(recipe: Recipe, task: TinyTask, trainer: TrlTrainer) -> None:
    expected = trained(trainer, task, recipe)
    with torch.inference_mode():
        fresh = TrlTrainer()
        card, _ = fresh.evaluate(task, fresh.base(task), "validation")
        weights = trained(fresh, task, recipe)
        fresh.evaluate(task, Checkpoint("x", weights), "validation")
    assert equal(weights, expected)
    assert equal(trained(fresh, task, recipe), expected)  # what was loaded then can still be trained
    assert card == trainer.evaluate(task, trainer.base(task), "validation")[0]


@pytest.mark.parametrize("recipe", [sft(), grpo()], ids=["sft", "grpo"])
def test_a_round_leaves_the_callers_generators_alone(recipe: Recipe, trainer: TrlTrainer, task: TinyTask) -> None:
    def states() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state(legacy=False)["state"], torch.get_rng_state().tolist()

    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    before = states()
    session = trainer.begin(task, recipe, trainer.base(task), 3)
    assert str(states()) == str(before)
    session.advance(1)
    assert str(states()) == str(before)
    _, checkpoint = session.result()
    assert checkpoint is not None
    trainer.evaluate(task, checkpoint, "validation")
    assert str(states()) == str(before)


def test_two_rounds_may_take_turns(
    trainer: TrlTrainer, task: TinyTask, sft_weights: Weights, grpo_weights: Weights
) -> None:
    base = trainer.base(task)
    one, two = trainer.begin(task, sft(), base, 3), trainer.begin(task, grpo(), base, 3)
    while not (one.done and two.done):
        one.advance(1), two.advance(1)
    for session, expected in ((one, sft_weights), (two, grpo_weights)):
        checkpoint = session.result()[1]
        assert checkpoint is not None
        assert equal(checkpoint.weights, expected)


def test_seed_start_and_history(
    trainer: TrlTrainer, task: TinyTask, sft_weights: Weights, grpo_weights: Weights
) -> None:
    assert not equal(trained(trainer, task, sft(), seed=4), sft_weights)
    report, after = run(trainer, task, sft(), Checkpoint("other", sft_weights, 1))
    assert after is not None
    assert (after.depth, report.start) == (2, "other")
    assert not equal(after.weights, sft_weights)
    trainer.evaluate(task, after, "validation")  # leaves these weights in the resident model
    assert equal(trained(trainer, task, sft()), sft_weights)
    assert equal(trained(trainer, task, grpo()), grpo_weights)


@pytest.mark.parametrize("seed", [-1, 2**32, 0.5, True])
def test_a_seed_that_numpy_would_refuse_late_is_refused_first(seed: Any, trainer: TrlTrainer, task: TinyTask) -> None:
    with pytest.raises(ValueError, match=r"seed: expected an integer in \[0, 4294967295\]"):
        trainer.begin(task, sft(), trainer.base(task), seed)


# Learning rates and adjustments (C01) --------------------------------------------------------------------------------


def rates(report: RoundReport) -> list[float]:
    return [row["learning_rate"] for row in report.curves]


def test_a_halved_rate_is_used_from_the_next_step_and_composes_with_the_schedule(
    trainer: TrlTrainer, task: TinyTask
) -> None:
    recipe = sft(learning_rate=1e-3, schedule="linear", steps=10)
    finals = {}
    for name, adjustment in (("none", None), ("nothing", Adjustment()), ("half", Adjustment("lr_scale", 0.5))):
        session = trainer.begin(task, recipe, trainer.base(task), 3)
        session.advance(5)
        if adjustment is not None:
            session.apply(adjustment)
        used: list[float] = []
        while not session.done:
            session.advance(1)
            used.append(session._trainer.optimizer.param_groups[0]["lr"])
        report, checkpoint = session.result()
        assert checkpoint is not None
        finals[name] = checkpoint.weights, rates(report)
        with pytest.raises(ValueError, match=r"'lr_scale': the round has ended \(finished\) at step 10"):
            session.apply(Adjustment("lr_scale", 0.5))
    first = [1e-3, 9e-4, 8e-4, 7e-4, 6e-4]
    assert finals["none"][1] == pytest.approx([*first, 5e-4, 4e-4, 3e-4, 2e-4, 1e-4], rel=1e-9)
    assert finals["half"][1] == pytest.approx([*first, 2.5e-4, 2.0e-4, 1.5e-4, 1.0e-4, 5.0e-5], rel=1e-9)
    assert equal(finals["nothing"][0], finals["none"][0])
    assert not equal(finals["half"][0], finals["none"][0])


def test_the_rate_in_the_curve_is_the_rate_of_the_update(trainer: TrlTrainer, task: TinyTask) -> None:
    """Without moments, AdamW's first update is the learning rate times the gradient's sign."""
    for recipe in (sft(steps=1, learning_rate=2e-4), sft(steps=1, learning_rate=1e-4)):
        session = trainer.begin(task, recipe, trainer.base(task), 3)
        if recipe.learning_rate == 1e-4:
            session.apply(Adjustment("lr_scale", 2.0))
        session.advance()
        report, checkpoint = session.result()
        assert checkpoint is not None
        assert rates(report) == pytest.approx([2e-4], rel=1e-9)
        name = "model.layers.0.mlp.up_proj.weight"
        moved = (checkpoint.weights[name] - trainer.base(task).weights[name]).abs()
        assert float(moved.max()) == pytest.approx(2e-4, rel=1e-3)


def test_adjustments_before_the_first_step_and_twice(trainer: TrlTrainer, task: TinyTask) -> None:
    session = trainer.begin(task, sft(learning_rate=4e-3), trainer.base(task), 3)
    session.apply(Adjustment("lr_scale", 0.5))
    session.apply(Adjustment("lr_scale", 0.5))
    session.advance()
    report, checkpoint = session.result()
    assert rates(report) == [1e-3] * 4
    assert checkpoint is not None
    assert equal(checkpoint.weights, trained(trainer, task, sft(learning_rate=1e-3)))


def test_other_weights_have_other_ids_and_equal_weights_equal_ones(trainer: TrlTrainer, task: TinyTask) -> None:
    """A round that was adjusted, stopped or cut is not the checkpoint of the whole round."""

    def made(*adjustments: tuple[int, Adjustment], limit: Limit | None = None) -> tuple[str, Weights]:
        session = trainer.begin(task, sft(), trainer.base(task), 3, limit)
        for step, adjustment in adjustments:
            while session.step < step:
                session.advance(1)
            session.apply(adjustment)
        session.advance()
        report, checkpoint = session.result()
        assert checkpoint is not None and report.checkpoint == checkpoint.id
        return checkpoint.id, checkpoint.weights

    half, stop = Adjustment("lr_scale", 0.5), Adjustment("stop")
    step_bound = trainer.step_cost_bound(task, sft()).trained_tokens
    whole = made()
    assert whole[0] == round_id(task, trainer.base(task), sft(), 3, trainer.ignored_settings("sft"))
    cut = made(limit=Limit("train_tokens", 2 * step_bound))
    different = [whole, made((0, half)), made((2, half)), made((2, half), (3, half)), made((1, stop)), cut]
    assert len({name for name, _ in different}) == len(different)
    same = [(whole, made((2, Adjustment("lr_scale", 1.0)))), (whole, made((1, Adjustment()))), (cut, made((2, stop)))]
    for left, right in [*same, (cut, made((2, half), (2, stop)))]:  # a rate that no step used
        assert left[0] == right[0] and equal(left[1], right[1])


def test_what_an_algorithm_ignores_changes_no_round(trainer: TrlTrainer, task: TinyTask) -> None:
    changes = {"num_generations": 4, "temperature": 0.5, "kl_coef": 0.1, "max_length": 512}
    for base in (sft(), grpo()):
        report, checkpoint = run(trainer, task, base)
        assert checkpoint is not None
        ignored = trainer.ignored_settings(base.algorithm)
        assert ignored
        for name in ignored:
            other, again = run(trainer, task, Recipe.from_dict({**base.to_dict(), name: changes[name]}))
            assert again is not None and equal(again.weights, checkpoint.weights)
            assert (other.checkpoint, other.curves[-1]["loss"]) == (report.checkpoint, report.curves[-1]["loss"])


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0, 1 / 2, 1, 1, 1]),
        ("linear", [0, 1 / 2, 1, 2 / 3, 1 / 3]),
        ("cosine", [0, 1 / 2, 1, 3 / 4, 1 / 4]),
    ],
)
def test_every_schedule_warms_up(schedule: str, expected: list[float], trainer: TrlTrainer, task: TinyTask) -> None:
    report, _ = run(trainer, task, sft(schedule=schedule, warmup_steps=2, steps=5, learning_rate=1e-3))
    assert rates(report) == pytest.approx([1e-3 * share for share in expected], rel=1e-9, abs=1e-18)


def test_stop_ends_the_round_after_the_step_that_is_done(trainer: TrlTrainer, task: TinyTask) -> None:
    session = trainer.begin(task, sft(), trainer.base(task), 3)
    session.advance(2)
    session.apply(Adjustment("stop"))
    assert session.done
    assert session.advance()["step"] == 2.0
    for adjustment in (Adjustment(), Adjustment("stop"), Adjustment("lr_scale", 2.0)):
        with pytest.raises(ValueError, match=r"has ended \(stopped\) at step 2"):
            session.apply(adjustment)
    report, checkpoint = session.result()
    assert (report.ended, report.steps, report.failure) == ("stopped", 2, None)
    assert checkpoint is not None
    assert equal(checkpoint.weights, stopped_after(2, trainer, task))
    assert session.result() == (report, checkpoint)


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "2"])
def test_advance_counts_whole_steps(steps: Any, trainer: TrlTrainer, task: TinyTask) -> None:
    session = trainer.begin(task, sft(), trainer.base(task), 3)
    with pytest.raises(ValueError, match="steps: expected an integer in"):
        session.advance(steps)
    session.close()


# Faults: divergence (B01) --------------------------------------------------------------------------------------------


def multiply_loss(monkeypatch: pytest.MonkeyPatch, cls: type[Any], method: str, call: int, factor: float) -> None:
    original, calls = getattr(cls, method), [0]

    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        loss = original(self, *args, **kwargs)
        return loss * factor if calls[0] == call else loss

    monkeypatch.setattr(cls, method, patched)


@pytest.mark.parametrize(
    ("recipe", "cls", "method"),
    [(sft(steps=5), MeteredSFTTrainer, "compute_loss"), (grpo(steps=5), MeteredGRPOTrainer, "_compute_loss")],
    ids=["sft", "grpo"],
)
@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_step_that_is_no_number_ends_the_round(
    recipe: Recipe,
    cls: type[Any],
    method: str,
    factor: float,
    trainer: TrlTrainer,
    task: TinyTask,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    multiply_loss(monkeypatch, cls, method, call=3, factor=factor)
    report, checkpoint = run(trainer, task, recipe)
    assert checkpoint is None
    assert report.failure is not None
    assert (report.failure.cause, report.failure.kind, report.failure.step) == ("hyperparameter", "diverged", 3)
    assert (report.ended, report.steps, report.checkpoint) == ("failed", 3, None)
    losses = [row["loss"] for row in report.curves]
    assert all(map(math.isfinite, losses[:2]))
    assert not math.isfinite(losses[2])  # not smoothed away
    assert report.training_cost.trained_tokens > 0  # it is charged all the same


def test_one_bad_pass_of_an_accumulated_step_is_seen(
    trainer: TrlTrainer, task: TinyTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply_loss(monkeypatch, MeteredSFTTrainer, "compute_loss", call=3, factor=math.nan)
    report, _ = run(trainer, task, sft(gradient_accumulation=2))
    assert report.failure is not None
    assert (report.failure.kind, report.failure.step) == ("diverged", 2)
    assert [math.isfinite(row["loss"]) for row in report.curves] == [True, False]  # pass 3 of 4 is bad, pass 4 is not


@pytest.mark.parametrize("recipe", [sft(steps=12), grpo(steps=12)], ids=["sft", "grpo"])
def test_a_learning_rate_that_ruins_the_weights_is_caught_early(
    recipe: Recipe, trainer: TrlTrainer, task: TinyTask
) -> None:
    recipe = Recipe.from_dict({**recipe.to_dict(), "learning_rate": 1e3})
    report, checkpoint = run(trainer, task, recipe)
    assert report.failure is not None
    assert (report.failure.cause, report.failure.kind) == ("hyperparameter", "diverged")
    assert 2 <= report.failure.step <= 4
    assert (checkpoint, report.checkpoint) == (None, None)


def test_logits_that_are_no_numbers_are_the_recipes_fault(trainer: TrlTrainer, task: TinyTask) -> None:
    ruined = {name: value * math.inf for name, value in trainer.base(task).weights.items()}
    report, checkpoint = run(trainer, task, grpo(), Checkpoint("ruined", ruined))
    assert report.failure is not None
    assert (report.failure.cause, report.failure.kind) == ("hyperparameter", "diverged")
    assert checkpoint is None


# Faults: batches and groups (B03) ------------------------------------------------------------------------------------


def test_groups_that_do_not_fit_are_refused_before_a_model_is_loaded(
    task: TinyTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> Any:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(models_module, "load_model", refuse)
    fresh, start = TrlTrainer(), Checkpoint("base", {})
    for recipe, message in (
        (
            grpo(batch_size=6, num_generations=4),
            "num_generations: 4 does not divide the 6 completions of a step "
            "(batch_size 6 x gradient_accumulation 1); allowed: 2, 3, 6.",
        ),
        (
            grpo(batch_size=4, num_generations=1),
            "num_generations: grpo compares completions of one prompt, so it needs at least 2, got 1.",
        ),
        (
            grpo(batch_size=1, num_generations=2),
            "num_generations: 2 does not divide the 1 completions of a step "
            "(batch_size 1 x gradient_accumulation 1); allowed: none, raise batch_size to at least 2.",
        ),
        (sft(algorithm="grop"), "algorithm: unknown 'grop'. Did you mean 'grpo'? Known: grpo, sft."),
        (
            sft(mix={"goods": 1.0}),
            "mix: task 'tiny' has no source 'goods'. Did you mean 'good'? Known: bad, good.",
        ),
        (
            grpo(mix={"bad": 0.5, "good": 0.5}),
            "mix: source 'bad' has no prompts rows, which grpo trains on; sources that have: good.",
        ),
    ):
        for refused in (
            lambda recipe=recipe: fresh.check(task, recipe),
            lambda recipe=recipe: fresh.begin(task, recipe, start, 0),
            lambda recipe=recipe: fresh.step_cost_bound(task, recipe),
        ):
            with pytest.raises(ValueError) as caught:
                refused()
            assert str(caught.value) == message


def test_a_group_spread_over_accumulated_passes_is_valid(trainer: TrlTrainer, task: TinyTask) -> None:
    recipe = grpo(batch_size=2, gradient_accumulation=4, num_generations=8, steps=2)
    trainer.check(task, recipe)
    report, checkpoint = run(trainer, task, recipe)
    assert (report.ended, report.steps, report.failure) == ("finished", 2, None)
    assert checkpoint is not None
    assert not equal(checkpoint.weights, trainer.base(task).weights)


# Faults: end tokens (B07) and lengths (A01) --------------------------------------------------------------------------


def test_a_tokenizer_that_pads_with_its_end_token_still_learns_to_end(trainer: TrlTrainer, tmp_path: Path) -> None:
    rows = [{"prompt": "g=", "completion": "a"}, {"prompt": "g=", "completion": "abcdef"}]
    task = TinyTask(write_tiny_checkpoint(tmp_path, pad_is_eos=True), rows=rows)
    session = trainer.begin(task, sft(batch_size=2, steps=1), trainer.base(task), 0)
    tokenizer = session._trainer.processing_class
    end = tokenizer.eos_token_id
    assert tokenizer.pad_token_id == end
    batch = next(iter(session._trainer.get_train_dataloader()))
    labels = sorted(batch["labels"].tolist(), key=lambda row: row.count(-100))
    a, b, c, d, e, f = tokenizer.convert_tokens_to_ids(list("abcdef"))
    assert labels == [
        [-100, -100, a, b, c, d, e, f, end],
        [-100, -100, a, end, -100, -100, -100, -100, -100],
    ]
    session.advance()
    assert session.result()[0].supervised_tokens == 7 + 2


CUT = [{"prompt": "a" * 60, "completion": "abc"}] * 3 + [{"prompt": "a", "completion": f"{i}bc"} for i in range(4, 9)]


def test_rows_without_a_completion_token_are_counted_named_and_left_out(trainer: TrlTrainer, folder: Path) -> None:
    task = TinyTask(folder, rows=CUT)
    recipe = sft(max_length=20, batch_size=1, steps=10)
    session = trainer.begin(task, recipe, trainer.base(task), 0)
    rows = session._trainer.train_dataset["input_ids"]
    tokenizer = session._trainer.processing_class
    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
    assert sorted(texts) == sorted([f"a{i}bc" for i in range(4, 9)] * 2)
    session.advance()
    report, checkpoint = session.result()
    assert report.rows_without_supervision == 3
    assert report.flags == ("3 of 8 rows of source 'good' keep no completion token at max_length 20: rows 1, 2, 3",)
    assert (report.ended, report.failure, report.supervised_tokens) == ("finished", None, 10 * 4)
    assert report.training_cost.trained_tokens == 10 * 5
    assert checkpoint is not None


def test_a_source_without_any_trainable_row_is_refused_with_the_way_out(trainer: TrlTrainer, folder: Path) -> None:
    task = TinyTask(folder, rows=CUT[:3])
    base = trainer.base(task)
    message = (
        "max_length: at 20 none of the 3 rows of source 'good' keeps a completion token; "
        "the smallest max_length that works is 61."
    )
    for mix in ({"good": 1.0}, {"good": 0.5, "bad": 0.5}):  # another source's rows do not make up for it
        with pytest.raises(ValueError) as caught:
            trainer.begin(task, sft(max_length=20, mix=mix), base, 0)
        assert str(caught.value) == message
    with pytest.raises(ValueError, match="max_length: at 60 none of the 3 rows"):
        trainer.begin(task, sft(max_length=60), base, 0)
    report, _ = run(trainer, task, sft(max_length=61, batch_size=2, steps=2))
    assert (report.failure, report.supervised_tokens, report.flags) == (None, 4, ())


def test_rows_that_teach_nothing_at_any_length(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [{"prompt": "", "completion": "a"}, {"prompt": "a", "completion": ""}, {"prompt": "", "completion": ""}]
    tokenised = tokenise_demonstrations(tokenizer, rows).cut(8)
    # the end token is a completion token too; the first token of a row has nothing before it that could predict it
    assert (tokenised.trainable, tokenised.unsupervised, tokenised.smallest_max_length) == ((0, 1), (3,), 2)
    tokenizer.eos_token = None
    tokenised = tokenise_demonstrations(tokenizer, rows).cut(8)
    assert (tokenised.trainable, tokenised.unsupervised, tokenised.smallest_max_length) == ((), (1, 2, 3), None)


def test_a_completion_that_brings_its_own_end_token_gets_no_second(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [{"prompt": "a=", "completion": "b<eos>"}, {"prompt": "a=", "completion": "b"}]
    tokenised = tokenise_demonstrations(tokenizer, rows).cut(8)
    assert tokenised.input_ids[0] == tokenised.input_ids[1]
    assert tokenised.input_ids[0].count(tokenizer.eos_token_id) == 1


def test_a_prompt_without_tokens_is_refused(trainer: TrlTrainer, folder: Path) -> None:
    class Empty(TinyTask):
        def sources(self) -> Any:
            bad, good = super().sources()
            rows = [{**row, "prompt": "" if i == 4 else row["prompt"]} for i, row in enumerate(good.rows["prompts"])]
            return [bad, Source("good", {"prompts": rows}, good.verifier)]

    task = Empty(folder)
    with pytest.raises(ValueError, match="source 'good', prompts row 5: the prompt has no tokens to continue"):
        trainer.begin(task, grpo(), trainer.base(task), 0)


# Faults: memory and other people's code (B09) ------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "recipe",
    [sft(), sft(lora_rank=2), grpo(), grpo(kl_coef=0.1), grpo(lora_rank=2, kl_coef=0.1)],
    ids=["sft", "sft-lora", "grpo", "grpo-kl", "grpo-lora-kl"],
)
def test_no_model_outlives_its_round(
    recipe: Recipe, trainer: TrlTrainer, task: TinyTask, live_models: Callable[[], int]
) -> None:
    start = trainer.base(task)
    for _ in range(5):
        report, checkpoint = run(trainer, task, recipe, start)
        assert report.failure is None
        assert live_models() == 0
        assert checkpoint is not None
        start = checkpoint
    session = trainer.begin(task, recipe, start, 0)
    session.advance(1)
    assert live_models() >= 1
    session.close()
    assert live_models() == 0


def failing(error: Callable[[], Any]) -> Callable[..., Any]:
    """Return a `compute_loss` that fails on its second call."""
    original, calls = MeteredSFTTrainer.compute_loss, [0]

    def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            error()
        return original(self, *args, **kwargs)

    return compute_loss


def throw(error: type[BaseException], *arguments: Any) -> Callable[[], Any]:
    def raiser() -> Any:
        raise error(
            *arguments
        )  # made here: an exception that outlives the round would keep the model through its frames

    return raiser


@pytest.mark.parametrize(
    ("error", "cause", "kind", "evidence"),
    [
        (throw(RuntimeError, "CUDA out of memory. Tried"), "resources", "oom", "RuntimeError: CUDA out of memory"),
        (throw(torch.OutOfMemoryError, "CUDA out of memory."), "resources", "oom", "OutOfMemoryError: CUDA out of"),
        (throw(MemoryError), "resources", "oom", "MemoryError"),
        (lambda: torch.empty(1 << 50), "resources", "oom", "RuntimeError: "),  # what the CPU allocator really says
        (throw(KeyError, "labels"), "environment", "trainer_raised", "KeyError: 'labels'"),
        (throw(AssertionError), "environment", "trainer_raised", "AssertionError"),
        (throw(SystemExit, 3), "environment", "trainer_raised", "SystemExit: 3"),
        (throw(KeyboardInterrupt), "environment", "trainer_raised", "KeyboardInterrupt"),
    ],
    ids=["runtime", "cuda", "memory", "allocator", "key", "silent", "exit", "interrupt"],
)
def test_an_exception_in_training_is_data_and_the_next_round_works(
    error: Callable[[], Any],
    cause: str,
    kind: str,
    evidence: str,
    trainer: TrlTrainer,
    task: TinyTask,
    sft_weights: Weights,
    live_models: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(MeteredSFTTrainer, "compute_loss", failing(error))
        report, checkpoint = run(trainer, task, sft())
    assert report.failure is not None
    assert (report.failure.cause, report.failure.kind, report.failure.step) == (cause, kind, 2)
    assert report.failure.evidence.startswith(evidence)
    assert (report.ended, report.steps, checkpoint) == ("failed", 1, None)
    assert live_models() == 0
    assert equal(trained(trainer, task, sft()), sft_weights)
    assert live_models() == 0


def test_a_trainer_that_cannot_be_built_is_a_failed_round(
    trainer: TrlTrainer, task: TinyTask, live_models: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(SFTTrainer, "__init__", init)
    session = trainer.begin(task, sft(), trainer.base(task), 3)
    assert session.done
    assert session.advance() == {}
    report, checkpoint = session.result()
    assert report.failure is not None
    assert (report.failure.cause, report.failure.kind, report.failure.step) == ("resources", "oom", 0)
    assert (report.steps, checkpoint) == (0, None)
    assert live_models() == 0


@pytest.mark.parametrize(
    ("verdict", "evidence"),
    [
        (throw(ZeroDivisionError, "oops"), "raised ZeroDivisionError: oops"),
        (throw(SystemExit, 2), "raised SystemExit: 2"),
        (throw(RuntimeError, "judge out of memory"), "raised RuntimeError: judge out of memory"),
        (lambda: None, "returned None; expected a finite number"),
        (lambda: math.nan, "returned nan; expected a finite number"),
        (lambda: -math.inf, "returned -inf; expected a finite number"),
        (lambda: "1.0", "returned '1.0'; expected a finite number"),
        (lambda: 10**400, "; expected a finite number"),
        (lambda: torch.tensor([1.0]), "returned tensor([1.]); expected a finite number"),
    ],
    ids=["raises", "exits", "memory", "none", "nan", "inf", "text", "huge", "vector"],
)
def test_a_verifier_that_fails_is_named_with_its_row(
    verdict: Callable[[], Any], evidence: str, trainer: TrlTrainer, folder: Path, live_models: Callable[[], int]
) -> None:
    asked: list[Mapping[str, Any]] = []

    def verifier(row: Mapping[str, Any], completion: str) -> Any:
        asked.append(row)
        return verdict() if len(asked) == 11 else 0.5  # in the second step of 8 completions

    task = TinyTask(folder, verifier=verifier)
    report, checkpoint = run(trainer, task, grpo())
    assert report.failure is not None
    assert (report.failure.cause, report.failure.kind, report.failure.step) == ("environment", "reward_function", 2)
    row = list(task.built.sources["good"].rows["prompts"]).index(asked[-1]) + 1
    assert report.failure.evidence.startswith(f"the verifier of source 'good', prompts row {row}, ")
    assert evidence in report.failure.evidence
    assert checkpoint is None
    assert live_models() == 0


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_a_rollout_whose_verifier_raises_is_charged(kl_coef: float, trainer: TrlTrainer, folder: Path) -> None:
    calls: list[str] = []

    def verifier(row: Mapping[str, Any], completion: str) -> float:
        calls.append(completion)
        if len(calls) > 8:  # the second step's first
            raise RuntimeError("judge is down")
        return graded(row, completion)

    whole, _ = run(trainer, TinyTask(folder, verifier=graded), grpo(steps=1, kl_coef=kl_coef))
    two, _ = run(trainer, TinyTask(folder, verifier=graded), grpo(steps=2, kl_coef=kl_coef))
    report, _ = run(trainer, TinyTask(folder, verifier=verifier), grpo(steps=2, kl_coef=kl_coef))
    assert report.failure is not None and report.steps == 1
    cost = report.training_cost
    assert cost.trained_tokens == whole.training_cost.trained_tokens
    assert cost.generated_tokens == two.training_cost.generated_tokens > whole.training_cost.generated_tokens
    assert (
        cost.scored_tokens
        == two.training_cost.scored_tokens
        == 2 * 8 * 4 + (two.training_cost.trained_tokens if kl_coef else 0)
    )
    n = trainer.parameters(TinyTask(folder))
    assert cost.flops == 6 * n * cost.trained_tokens + 2 * n * (cost.generated_tokens + cost.scored_tokens)


@pytest.mark.parametrize("kind", [np.float32, np.float64, torch.tensor], ids=["float32", "float64", "tensor"])
def test_a_verifier_may_return_the_scalars_of_other_libraries(
    kind: Callable[[float], Any], trainer: TrlTrainer, folder: Path
) -> None:
    def halves(row: Mapping[str, Any], completion: str) -> float:
        return round(graded(row, completion))

    plain = trained(trainer, TinyTask(folder, verifier=halves), grpo(steps=2))
    wrapped = trained(trainer, TinyTask(folder, verifier=lambda row, text: kind(halves(row, text))), grpo(steps=2))
    assert equal(plain, wrapped)
    truths = trained(trainer, TinyTask(folder, verifier=lambda row, text: halves(row, text) > 0), grpo(steps=2))
    assert equal(plain, truths)


# Precision and device (B11) ------------------------------------------------------------------------------------------


def test_half_precision_on_a_cpu_is_refused_and_auto_is_full() -> None:
    cpu = torch.device("cpu")
    assert resolve_precision("auto", cpu) == "fp32"
    assert resolve_precision("fp32", cpu) == "fp32"
    for precision in ("bf16", "fp16"):
        with pytest.raises(ValueError, match=rf"precision: '{precision}' needs a CUDA device, this run is on cpu"):
            TrlTrainer(device="cpu", precision=precision)
    with pytest.raises(ValueError, match="precision: unknown 'float16'; expected one of auto, fp32, bf16, fp16"):
        TrlTrainer(device="cpu", precision="float16")


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "meta", "mps", "", 7, None])
def test_an_unknown_device_is_refused(device: Any) -> None:
    with pytest.raises(ValueError, match="device: "):
        resolve_device(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_is_refused_where_there_is_none() -> None:
    assert resolve_device("auto") == torch.device("cpu")
    for device in ("cuda", "cuda:0", "cuda:3"):
        with pytest.raises(ValueError, match=f"device: '{device}' was asked for, but no CUDA device is visible"):
            TrlTrainer(device=device)


def test_a_card_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ValueError, match="device: 'cuda:2' was asked for, but 2 CUDA devices are visible"):
        resolve_device("cuda:2")


def test_training_is_held_to_the_card_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    arguments = by_hand("sft")
    assert arguments.device == torch.device("cpu")
    assert hold_to_device(arguments, torch.device("cpu")) is arguments
    assert chosen == []
    hold_to_device(arguments, torch.device("cuda:1"))
    assert (arguments.device, arguments.n_gpu, arguments.train_batch_size) == (torch.device("cuda:1"), 1, 8)
    assert arguments.distributed_state.device == torch.device("cuda:1")
    assert chosen == [torch.device("cuda:1")]
    assert by_hand("sft").device == torch.device("cpu")  # the next round starts afresh


def test_training_arguments_on_a_cpu_are_full_precision(trainer: TrlTrainer, task: TinyTask) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA")
    session = trainer.begin(task, sft(), trainer.base(task), 0)
    arguments = session._trainer.args
    assert (arguments.bf16, arguments.fp16, arguments.use_cpu) == (False, False, True)
    assert arguments.gradient_checkpointing is False
    assert {p.dtype for p in session._trainer.model.parameters()} == {torch.float32}
    session.close()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("recipe", [sft(), grpo(kl_coef=0.1)], ids=["sft", "grpo"])
def test_a_round_on_a_real_card(recipe: Recipe, precision: str, task: TinyTask) -> None:
    trainer = TrlTrainer(device="cuda", precision=precision)
    weights = trained(trainer, task, recipe)
    assert {value.device.type for value in weights.values()} == {"cpu"}
    assert not equal(weights, trainer.base(task).weights)
    before = torch.cuda.memory_allocated()
    for _ in range(4):
        trained(trainer, task, recipe)
    assert torch.cuda.memory_allocated() <= 1.05 * before


# Budget limits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "steps"),
    [(48, 1), (95, 1), (96, 2), (3 * 48 + 47, 3), (4 * 48, 4), (1e9, 4)],
)
@pytest.mark.parametrize("unit", ["train_tokens", "flops"])
def test_no_step_is_taken_that_could_pass_the_limit(
    limit: float, steps: int, unit: str, trainer: TrlTrainer, task: TinyTask
) -> None:
    per_token = 1 if unit == "train_tokens" else 6 * trainer.parameters(task)
    bound = trainer.step_cost_bound(task, sft())
    assert bound == Cost(trained_tokens=8 * ROW, flops=6.0 * trainer.parameters(task) * 8 * ROW)
    report, checkpoint = run(trainer, task, sft(), limit=Limit(unit, limit * per_token))
    assert report.steps == steps
    assert report.ended == ("finished" if limit == 1e9 or steps == 4 else "budget")
    assert report.training_cost.in_unit(unit) == steps * 8 * ROW * per_token <= limit * per_token
    assert checkpoint is not None
    assert equal(checkpoint.weights, stopped_after(steps, trainer, task))


@pytest.mark.parametrize("recipe", [sft(), grpo(), grpo(kl_coef=0.1), sft(lora_rank=2)])
@pytest.mark.parametrize("unit", ["train_tokens", "flops"])
def test_uneven_steps_stay_below_the_limit(
    recipe: Recipe, unit: str, trainer: TrlTrainer, folder: Path, task: TinyTask
) -> None:
    rows = [{"prompt": "abc="[:n], "completion": "abcdefgh"[: 2 * n]} for n in (1, 2, 3, 4)]
    uneven = TinyTask(folder, rows=rows, verifier=graded)
    bound = trainer.step_cost_bound(uneven, recipe).in_unit(unit)
    full, _ = run(trainer, uneven, recipe)
    amount = 0.6 * full.training_cost.in_unit(unit)
    report, _ = run(trainer, uneven, recipe, limit=Limit(unit, amount))
    spent = report.training_cost.in_unit(unit)
    assert (report.ended, report.failure) == ("budget", None)
    assert spent <= amount < spent + bound


@pytest.mark.parametrize("unit", ["train_tokens", "flops"])
@pytest.mark.parametrize("recipe", [sft(), grpo()], ids=["sft", "grpo"])
def test_a_limit_below_one_step_costs_nothing(
    recipe: Recipe, unit: str, trainer: TrlTrainer, task: TinyTask, live_models: Callable[[], int]
) -> None:
    bound = trainer.step_cost_bound(task, recipe).in_unit(unit)
    report, checkpoint = run(trainer, task, recipe, limit=Limit(unit, bound * 0.999))
    assert report.failure is not None
    assert (report.failure.cause, report.failure.kind, report.failure.step) == ("resources", "budget_too_small", 0)
    assert (report.ended, report.steps, checkpoint) == ("failed", 0, None)
    assert (report.training_cost.in_unit("train_tokens"), report.training_cost.flops) == (0.0, 0.0)
    assert live_models() == 0
    report, _ = run(trainer, task, recipe, limit=Limit(unit, bound))
    assert report.steps >= 1


@pytest.mark.parametrize(("limit", "steps"), [(5, 1), (10, 1), (19, 1), (20, 2), (35, 3), (1000, 4)])
@pytest.mark.parametrize("stride", [1, 100])
def test_seconds_overshoot_by_the_first_step_at_most(
    limit: float, steps: int, stride: int, trainer: TrlTrainer, task: TinyTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    original = MeteredSFTTrainer.compute_loss

    def ten_seconds(self: Any, *args: Any, **kwargs: Any) -> Any:
        now[0] += 10.0
        return original(self, *args, **kwargs)

    monkeypatch.setattr(MeteredSFTTrainer, "compute_loss", ten_seconds)
    monkeypatch.setattr(session_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    session = trainer.begin(task, sft(), trainer.base(task), 3, Limit("device_seconds", limit))
    while not session.done:
        session.advance(stride)
        now[0] += 500.0  # the caller's own time is not the round's
    report, _ = session.result()
    assert (report.steps, report.training_cost.device_seconds) == (steps, 10.0 * steps)
    assert report.wall_seconds == 10.0 * steps
    assert report.training_cost.device_seconds <= max(limit, 10.0)


# Cost ----------------------------------------------------------------------------------------------------------------


def test_sft_trains_on_exactly_the_drawn_rows(trainer: TrlTrainer, folder: Path) -> None:
    rows = [{"prompt": "abcd"[:n] + "=", "completion": "h" * (n * n)} for n in (1, 2, 3)]
    lengths = [n + 1 + n * n + 1 for n in (1, 2, 3)]
    supervised = [n * n + 1 for n in (1, 2, 3)]
    task = TinyTask(folder, rows=rows)
    draw = [index for _, index in draw_mix({"good": 3}, {"good": 1.0}, 4 * 8, 3)]
    report, _ = run(trainer, task, sft(batch_size=4, gradient_accumulation=2))
    assert report.training_cost.trained_tokens == sum(lengths[i] for i in draw)
    assert report.supervised_tokens == sum(supervised[i] for i in draw)
    assert (report.training_cost.generated_tokens, report.training_cost.scored_tokens) == (0, 0)
    assert report.training_cost.flops == 6.0 * trainer.parameters(task) * sum(lengths[i] for i in draw)
    assert trainer.step_cost_bound(task, sft(batch_size=4, gradient_accumulation=2)).trained_tokens == 8 * 14


@pytest.mark.parametrize(
    "recipe",
    [grpo(), grpo(kl_coef=0.1), grpo(batch_size=4, gradient_accumulation=2), grpo(lora_rank=2, kl_coef=0.1)],
    ids=["plain", "kl", "accumulated", "lora-kl"],
)
def test_grpo_counts_what_trl_counts(recipe: Recipe, trainer: TrlTrainer, task: TinyTask) -> None:
    session = trainer.begin(task, recipe, trainer.base(task), 3)
    session.advance()
    logs = [entry for entry in session._trainer.state.log_history if "loss" in entry]
    report, _ = session.result()
    prompts = 4 * 8 * 4  # steps x completions x prompt tokens
    completions = round(sum(entry["completions/mean_length"] * 8 for entry in logs))
    cost = report.training_cost
    assert cost.trained_tokens == logs[-1]["num_tokens"] == prompts + completions
    assert cost.generated_tokens == report.supervised_tokens == completions
    assert cost.scored_tokens == prompts + (prompts + completions if recipe.kl_coef else 0)
    n = trainer.parameters(task)
    resident = trainer._load(task)
    per_token = 4 * n + 6 * lora_parameters(resident.model.template, 2) if recipe.lora_rank else 6 * n
    assert cost.flops == per_token * cost.trained_tokens + 2 * n * (cost.generated_tokens + cost.scored_tokens)


def test_the_number_of_parameters_counts_tied_weights_once(trainer: TrlTrainer, task: TinyTask) -> None:
    vocabulary, hidden, inner, layers = 3 + 20, 32, 48, 2
    by_layer = 4 * hidden * hidden + 3 * hidden * inner + 2 * hidden
    assert trainer.parameters(task) == vocabulary * hidden + layers * by_layer + hidden
    assert sum(value.numel() for value in trainer.base(task).weights.values()) == trainer.parameters(task)


# LoRA and KL ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [sft(lora_rank=3), grpo(lora_rank=3)], ids=["sft", "grpo"])
def test_lora_trains_adapters_and_hands_out_merged_weights(recipe: Recipe, trainer: TrlTrainer, task: TinyTask) -> None:
    base = trainer.base(task)
    session = trainer.begin(task, recipe, base, 3)
    session.advance()
    adapted = session._trainer.model
    by_hand = 2 * 3 * (4 * (32 + 32) + 3 * (32 + 48))  # layers x rank x (in + out)
    resident = trainer._load(task)
    assert lora_parameters(resident.model.template, 3) == by_hand
    assert sum(p.numel() for p in adapted.parameters() if p.requires_grad) == by_hand
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        expected = adapted.eval()(input_ids=ids).logits / (recipe.temperature if recipe.algorithm == "grpo" else 1)
    report, checkpoint = session.result()
    cost, n = report.training_cost, trainer.parameters(task)
    assert cost.flops == (4 * n + 6 * by_hand) * cost.trained_tokens + 2 * n * (
        cost.generated_tokens + cost.scored_tokens
    )
    assert checkpoint is not None
    assert checkpoint.weights.keys() == base.weights.keys()
    for name, value in checkpoint.weights.items():
        assert torch.equal(value, base.weights[name]) == (not name.endswith("_proj.weight"))
    with torch.no_grad():
        merged = resident.model.with_weights(checkpoint.weights).eval()(input_ids=ids).logits
        before = resident.model.with_weights(base.weights).eval()(input_ids=ids).logits
    torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-5)
    assert float((merged - before).abs().max()) > 1e-4


@pytest.mark.parametrize("rank", [0, 3])
def test_kl_is_measured_from_the_weights_the_round_started_with(
    rank: int, trainer: TrlTrainer, task: TinyTask, sft_weights: Weights
) -> None:
    start = Checkpoint("sft", sft_weights, 1)  # far from what TRL would load from the model's folder
    plain, _ = run(trainer, task, grpo(lora_rank=rank), start)
    assert "kl" not in plain.curves[0]
    finals = {}
    for kl_coef in (0.0, 0.1, 10.0):
        report, checkpoint = run(trainer, task, grpo(lora_rank=rank, kl_coef=kl_coef), start)
        assert checkpoint is not None
        finals[kl_coef] = checkpoint.weights
        if kl_coef:
            assert report.curves[0]["kl"] == pytest.approx(0.0, abs=1e-5)
            assert report.curves[-1]["kl"] > 1e-6
    assert not equal(finals[0.0], finals[0.1])

    def distance(weights: Weights) -> float:
        return math.sqrt(sum(float(((weights[name] - sft_weights[name]) ** 2).sum()) for name in weights))

    assert distance(finals[10.0]) < distance(finals[0.0])


# Closing and interrupting --------------------------------------------------------------------------------------------


def workers() -> int:
    return sum(thread.name == "posttrain-round" for thread in threading.enumerate())


def test_close_at_any_moment_leaves_no_thread(
    trainer: TrlTrainer, task: TinyTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, frozen, before = trainer.base(task), gc.get_freeze_count(), threading.active_count()
    for number in range(30):
        session = trainer.begin(task, sft() if number % 3 else grpo(), base, number)
        steps = number % 5
        if steps:
            session.advance(steps)
            assert workers() == (0 if steps == 4 else 1)
        assert gc.get_freeze_count() == frozen
        session.close()
        assert workers() == 0
        session.close()
        assert session.done
        report, checkpoint = session.result()
        assert (report.steps, checkpoint) == (steps, None)
        assert session.advance() == (dict(report.curves[-1]) if steps else {})
    assert threading.active_count() == before
    assert gc.get_freeze_count() == frozen


def test_objects_that_the_caller_froze_stay_frozen(trainer: TrlTrainer, task: TinyTask) -> None:
    base = trainer.base(task)
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        session = trainer.begin(task, sft(), base, 0)
        session.advance(1)
        session.close()
        assert frozen * 0.9 < gc.get_freeze_count() <= frozen  # frozen objects may still die by reference count
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("then", ["go on", "close", "result"])
def test_an_interrupt_lets_the_step_finish_and_nothing_else_runs(
    then: str,
    trainer: TrlTrainer,
    task: TinyTask,
    sft_weights: Weights,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = trainer.begin(task, sft(), trainer.base(task), 3)
    original, calls = MeteredSFTTrainer.compute_loss, [0]

    def interrupting(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(MeteredSFTTrainer, "compute_loss", interrupting)
    torch.manual_seed(11)
    state = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        session.advance()
    assert session.step == 2
    assert torch.equal(torch.get_rng_state(), state)
    if then == "close":
        session.close()
        assert session.result()[1] is None
    elif then == "result":
        report, checkpoint = session.result()
        assert (report.ended, report.steps) == ("stopped", 2)
        assert checkpoint is not None
        assert equal(checkpoint.weights, stopped_after(2, trainer, task))
    else:
        session.advance()
        report, checkpoint = session.result()
        assert (report.ended, report.steps) == ("finished", 4)
        assert checkpoint is not None
        assert equal(checkpoint.weights, sft_weights)
    assert workers() == 0


def test_two_interrupts_leave_a_worker_that_close_waits_for(
    trainer: TrlTrainer, task: TinyTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = trainer.begin(task, sft(), trainer.base(task), 3)
    original, hold, waits = MeteredSFTTrainer.compute_loss, threading.Event(), [0]

    def held(self: Any, *args: Any, **kwargs: Any) -> Any:
        hold.wait()
        torch.rand(100)
        return original(self, *args, **kwargs)

    class Impatient(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits[0] += 1
            if waits[0] <= 2:
                raise KeyboardInterrupt
            hold.set()
            return super().wait(timeout)

    monkeypatch.setattr(MeteredSFTTrainer, "compute_loss", held)
    session._parked = Impatient()
    with pytest.raises(KeyboardInterrupt):
        session.advance()
    assert workers() == 1
    state = torch.get_rng_state()
    session.close()
    assert workers() == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert session.result()[0].steps <= 1


# Checkpoints and the disk --------------------------------------------------------------------------------------------


def truncate(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def pickled(folder: Path) -> None:
    torch.save(AutoModelForCausalLM.from_pretrained(folder).state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "truncated": truncate,
    "no-config": lambda folder: (folder / "config.json").unlink(),
    "broken-config": lambda folder: (folder / "config.json").write_text("{"),
    "no-weights": lambda folder: (folder / "model.safetensors").unlink(),
    "empty-weights": lambda folder: (folder / "model.safetensors").write_bytes(b""),
    "no-tokenizer": lambda folder: list(map(os.unlink, folder.glob("tokenizer*"))),
    "pickle-only": pickled,
    "remote-code": lambda folder: (folder / "config.json").write_text(
        '{"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}'
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_name(damage: str, trainer: TrlTrainer, tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "model")
    DAMAGES[damage](folder)
    with pytest.raises(ValueError, match=f"base checkpoint: {folder} "):
        trainer.base(TinyTask(folder))


def test_a_loader_that_fails_without_a_message(
    trainer: TrlTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(ValueError, match=r"cannot be loaded \(AssertionError\)"):
        trainer.base(TinyTask(write_tiny_checkpoint(tmp_path, seed=7)))  # unknown yet: an equal one would be resident


def test_a_folder_that_was_rewritten_is_loaded_anew(trainer: TrlTrainer, tmp_path: Path) -> None:
    first = trainer.base(TinyTask(write_tiny_checkpoint(tmp_path, seed=0)))
    kept = tmp_path / "model.safetensors"
    stamp = kept.stat()
    again = trainer.base(TinyTask(tmp_path))
    assert again.weights is first.weights  # resident: not read twice
    write_tiny_checkpoint(tmp_path, seed=1)
    os.utime(kept, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert kept.stat().st_size == stamp.st_size
    second = trainer.base(TinyTask(tmp_path))
    assert not equal(second.weights, first.weights)
    trainer.base(TinyTask(write_tiny_checkpoint(tmp_path / "other")))
    assert equal(trainer.base(TinyTask(tmp_path)).weights, second.weights)


def test_a_second_episode_on_an_instance_tokenises_and_scores_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, counts = TrlTrainer(Evaluator(seeds=(0,), samples_per_seed=1, k=1)), {"rows": 0, "scored": 0}
    tokenise, evaluate = data_module.tokenise_demonstrations, Evaluator.evaluate

    def counted_rows(*args: Any) -> Any:
        counts["rows"] += 1
        return tokenise(*args)

    def counted_scores(self: Evaluator, *args: Any) -> Any:
        counts["scored"] += 1
        return evaluate(self, *args)

    monkeypatch.setattr(data_module, "tokenise_demonstrations", counted_rows)
    monkeypatch.setattr(Evaluator, "evaluate", counted_scores)

    def episode(letter: str) -> tuple[int, int]:
        task = TinyTask(folder, rows=[{"prompt": f"{a}00=", "completion": letter} for a in "abcd"])  # a new object
        trainer.evaluate(task, trainer.base(task), "validation")
        for max_length in (1024, 6, 5):
            assert trainer.step_cost_bound(task, sft(max_length=max_length)).trained_tokens == 8 * min(6, max_length)
        return counts["rows"], counts["scored"]

    assert [episode("a"), episode("a"), episode("b"), episode("a")] == [(1, 1), (1, 1), (2, 2), (2, 2)]
    for number in range(8):
        episode(str(number))
    assert len(trainer._residents) == 8  # and no more
    assert episode("7") == (10, 10)
    assert episode("a") == (11, 11)  # the longest unused was let go


def test_no_telemetry_even_where_the_hub_library_came_first() -> None:
    code = (
        "import huggingface_hub.constants as c; assert not c.HF_HUB_DISABLE_TELEMETRY\n"
        "import posttrain_gym.inner_trainers.trl.models\nprint(c.HF_HUB_DISABLE_TELEMETRY)"
    )
    hidden = ("HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY", "DO_NOT_TRACK")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_weights_of_another_model_are_refused(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    own = {name: value.clone() for name, value in model.state_dict().items()}
    norm = "model.norm.weight"
    for weights, message in (
        ({**own, norm: torch.ones(33)}, f"1 foreign \\(for example \\['{norm}'\\]\\), 0 missing"),
        ({**own, "model.extra": torch.ones(1)}, "1 foreign \\(for example \\['model.extra'\\]\\), 0 missing"),
        ({k: v for k, v in own.items() if k != norm}, f"0 foreign .*1 missing \\(for example \\['{norm}'\\]\\)"),
        ({}, "0 foreign"),
    ):
        with pytest.raises(ValueError, match=f"weights do not fit the model: {message}"):
            load_weights(model, {name: value * 2 for name, value in weights.items()})
        assert equal(model.state_dict(), own)  # nothing was half loaded
    load_weights(model, {name: value * 2 for name, value in own.items() if name != "lm_head.weight"})  # tied
    assert torch.equal(model.lm_head.weight, own["lm_head.weight"] * 2)


def test_a_round_writes_nothing_to_disk(
    trainer: TrlTrainer, task: TinyTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("temporary", "here", "home"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    for recipe in (sft(), sft(lora_rank=2), grpo(kl_coef=0.1)):
        report, checkpoint = run(trainer, task, recipe)
        assert report.failure is None
        assert checkpoint is not None
        trainer.evaluate(task, checkpoint, "validation")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


# Drawing the mix -----------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_draw_meets_its_shares_and_repeats_no_row_too_soon(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=5, unique=True))
    parts = data.draw(st.lists(st.integers(0, 20), min_size=len(names), max_size=len(names)).filter(any))
    mix = {name: part / sum(parts) for name, part in zip(names, parts, strict=True)}
    sizes = {name: data.draw(st.integers(1, 12)) for name in names}
    count, seed = data.draw(st.integers(1, 60)), data.draw(st.integers(0, 2**32 - 1))
    drawn = draw_mix(sizes, mix, count, seed)
    assert len(drawn) == count
    assert drawn == draw_mix(sizes, dict(reversed(mix.items())), count, seed)
    for name in names:
        indices = [index for source, index in drawn if source == name]
        assert abs(len(indices) - mix[name] * count) < 1 + 1e-9
        if mix[name] == 0:
            assert indices == []
        times = [indices.count(i) for i in range(sizes[name])]
        assert len(indices) == sum(times)
        assert max(times) - min(times) <= 1


@pytest.mark.parametrize("excess", [6e-6, -6e-6])
def test_a_mix_that_sums_to_one_within_its_tolerance_draws_the_exact_count(excess: float) -> None:
    mix = {"a": 0.5 + excess, "b": 0.5 + excess / 2}
    assert len(draw_mix({"a": 700, "b": 900}, mix, 800_001, 0)) == 800_001


def test_other_seeds_draw_other_rows() -> None:
    draws = {tuple(draw_mix({"a": 50, "b": 50}, {"a": 0.5, "b": 0.5}, 20, seed)) for seed in range(20)}
    assert len(draws) == 20


def test_the_session_type_is_what_begin_returns(trainer: TrlTrainer, task: TinyTask) -> None:
    session = trainer.begin(task, sft(), trainer.base(task), 3)
    assert isinstance(session, TrlSession)
    assert (session.step, session.done, session.cost.trained_tokens) == (0, False, 0)
    row = session.advance(1)
    assert (row["step"], session.step, session.cost.trained_tokens) == (1.0, 1, 8 * ROW)
    session.close()


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_the_rate_asked_for_is_the_one_the_library_uses(task: TinyTask, schedule: str, warmup: int) -> None:
    """The formula of `Recipe.learning_rate_at` against what the optimiser held at each step."""
    trainer = TrlTrainer()
    recipe = Recipe("sft", {"good": 1.0}, steps=8, learning_rate=1e-3, schedule=schedule, warmup_steps=warmup)
    session = trainer.begin(task, recipe, trainer.base(task), 0)
    session.advance()
    report, checkpoint = session.result()
    assert checkpoint is not None
    used = [row["learning_rate"] for row in report.curves]
    assert used == pytest.approx([recipe.learning_rate_at(step) for step in range(1, 9)], rel=1e-9, abs=1e-15)


def test_a_rate_that_was_not_used_fails_the_round(task: TinyTask, monkeypatch: pytest.MonkeyPatch) -> None:
    from posttrain_gym.inner_trainers.trl import models, sft

    asked = models.training_arguments
    monkeypatch.setattr(sft, "training_arguments", lambda *a: {**asked(*a), "learning_rate": 5e-4})
    trainer = TrlTrainer()
    session = trainer.begin(task, Recipe("sft", {"good": 1.0}, steps=2, learning_rate=1e-3), trainer.base(task), 0)
    session.advance()
    report, checkpoint = session.result()
    assert checkpoint is None
    assert report.failure is not None
    assert (report.failure.cause, report.failure.kind) == ("environment", "setting_not_used")
    assert report.failure.evidence == "step 1 used learning rate 0.0005, asked for 0.001"


def test_a_batch_that_was_not_used_fails_the_round(task: TinyTask, monkeypatch: pytest.MonkeyPatch) -> None:
    from posttrain_gym.inner_trainers.trl import models, sft

    asked = models.training_arguments
    monkeypatch.setattr(sft, "training_arguments", lambda *a: {**asked(*a), "per_device_train_batch_size": 8})
    trainer = TrlTrainer()
    recipe = Recipe("sft", {"good": 1.0}, steps=2, batch_size=16)
    session = trainer.begin(task, recipe, trainer.base(task), 0)
    session.advance()
    report, _ = session.result()
    assert report.failure is not None
    assert report.failure.evidence == "16 sequences were trained on, asked for 32"


def damaged_copy(folder: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Return a copy of a checkpoint folder whose weights were changed; the file itself stays sound."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    change(weights)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_a_checkpoint_that_lacks_a_tensor_is_refused(folder: Path, tmp_path: Path) -> None:
    """The library fills the gap with random numbers and only warns."""
    bad = damaged_copy(folder, tmp_path / "bad", lambda weights: weights.pop("model.norm.weight"))
    with pytest.raises(ValueError, match=r"bad does not fit .*: missing keys model\.norm\.weight \(1 in all\)"):
        TrlTrainer().base(TinyTask(bad))


def test_a_checkpoint_with_a_foreign_tensor_is_refused(folder: Path, tmp_path: Path) -> None:
    bad = damaged_copy(folder, tmp_path / "bad", lambda weights: weights.update({"model.extra": torch.zeros(2)}))
    with pytest.raises(ValueError, match=r"unexpected keys model\.extra"):
        TrlTrainer().base(TinyTask(bad))


def test_a_checkpoint_with_nan_weights_is_refused(folder: Path, tmp_path: Path) -> None:
    bad = damaged_copy(folder, tmp_path / "bad", lambda weights: weights["model.norm.weight"].fill_(float("nan")))
    with pytest.raises(ValueError, match=r"bad holds weights that are not finite .*, for example model\.norm\.weight"):
        TrlTrainer().base(TinyTask(bad))


def test_grpo_without_any_signal_says_so(folder: Path) -> None:
    trainer = TrlTrainer()
    for reward, flagged in ((lambda row, text: 0.0, True), (graded, False)):
        task = TinyTask(folder, verifier=reward)
        session = trainer.begin(task, Recipe("grpo", {"good": 1.0}, steps=3, batch_size=16), trainer.base(task), 0)
        session.advance()
        report, _ = session.result()
        assert any(flag.startswith("no signal: in all 3 steps") for flag in report.flags) is flagged
