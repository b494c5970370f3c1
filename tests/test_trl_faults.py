"""Rounds that fail say what failed, whose fault it was and at which step, and leave nothing broken."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trl import SFTTrainer

from posttrain_gym.inner_trainers.base import Checkpoint
from posttrain_gym.inner_trainers.fault_policy import FaultPolicy
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.tasks.base import Source
from posttrain_gym.inner_trainers.testing import TinyTask, write_tiny_checkpoint
from posttrain_gym.inner_trainers.trl import models as models_module
from posttrain_gym.inner_trainers.trl.curves import completion_flags
from posttrain_gym.inner_trainers.trl.grpo import MeteredGRPOTrainer
from posttrain_gym.inner_trainers.trl.memory import memory_in_use
from posttrain_gym.inner_trainers.trl.sft import MeteredSFTTrainer
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer
from tests.trl_fixtures import *  # noqa: F403
from tests.trl_rounds import EveryKind, Weights, equal, graded, grpo, run, sft, trained

# Divergence (B01) ----------------------------------------------------------------------------------------------------


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


# Batches and groups (B03) --------------------------------------------------------------------------------------------


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
        (
            sft(algorithm="grop"),
            "algorithm: unknown 'grop'. Did you mean 'grpo'? "
            "Known: distill, dpo, grpo, kto, midtrain, ppo, rft, rloo, sft.",
        ),
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


# Memory and other people's code (B09) --------------------------------------------------------------------------------


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
        (lambda: [1.0], "returned [1.0]; expected a finite number"),
    ],
    ids=["raises", "exits", "memory", "none", "nan", "inf", "text", "huge", "vector", "list"],
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


# Settings that were not used, rewards that teach nothing -------------------------------------------------------------


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


@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "ppo"])
def test_a_round_without_any_signal_fails(algorithm: str, trainer: TrlTrainer, folder: Path) -> None:
    recipe = grpo(algorithm=algorithm, steps=3, batch_size=16)
    report, checkpoint = run(trainer, TinyTask(folder, verifier=lambda row, text: 0.25), recipe)
    assert checkpoint is None
    assert report.failure is not None
    assert (report.failure.cause, report.failure.kind, report.failure.step) == ("algorithm_mismatch", "no_signal", 3)
    assert report.failure.evidence.startswith("no signal: in all 3 steps no reward told one completion from another")
    report, _ = run(trainer, TinyTask(folder, verifier=graded), recipe)
    assert report.failure is None


def test_rewards_that_differ_between_batches_alone_are_a_signal_for_ppo(folder: Path) -> None:
    calls = [0]

    def verifier(row: Mapping[str, Any], completion: str) -> float:
        calls[0] += 1
        return float((calls[0] - 1) // 8 % 2)  # a whole batch of 8 gets 0, the next one 1

    report, checkpoint = run(TrlTrainer(), TinyTask(folder, verifier=verifier), grpo(algorithm="ppo"))
    assert report.failure is None and checkpoint is not None
    assert [row["reward"] for row in report.curves] == [0.0, 1.0, 0.0, 1.0]
    single = grpo(algorithm="ppo", batch_size=1, steps=3)
    report, _ = run(TrlTrainer(), TinyTask(folder, verifier=lambda row, text: 1.0), single)
    assert report.failure is not None and report.failure.kind == "no_signal"


def test_steps_without_signal_are_counted_from_the_start(folder: Path) -> None:
    calls: list[str] = []

    def verifier(row: Mapping[str, Any], completion: str) -> float:
        calls.append(completion)
        return 0.0 if len(calls) <= 16 else graded(row, completion)  # 8 completions a step: steps 1 and 2

    task = TinyTask(folder, verifier=verifier)
    report, _ = run(TrlTrainer(fault_policy=FaultPolicy(no_signal_steps=3)), task, grpo())
    assert (report.steps, report.failure) == (4, None)
    assert [row["groups_without_spread"] for row in report.curves[:2]] == [1.0, 1.0]
    calls.clear()
    report, checkpoint = run(TrlTrainer(fault_policy=FaultPolicy(no_signal_steps=2)), task, grpo())
    assert report.failure is not None and checkpoint is None
    assert (report.failure.kind, report.failure.step, report.steps) == ("no_signal", 2, 2)


@pytest.mark.parametrize(
    ("attribute", "value", "evidence"),
    [
        ("max_steps", 5, "the trainer used steps 5, asked for 4"),
        ("max_grad_norm", 0.5, "the trainer used max_grad_norm 0.5, asked for 1.0"),
        ("weight_decay", 0.1, "the trainer used weight_decay 0.1, asked for 0.0"),
        ("temperature", 0.5, "the trainer used temperature 0.5, asked for 1.0"),
        ("num_generations", 8, "the trainer used num_generations 8, asked for 4"),
        ("beta", 0.3, "the trainer used kl_coef 0.3, asked for 0.0"),
        ("epsilon_low", 0.3, "the trainer used clip_range 0.3, asked for 0.2"),
    ],
)
def test_a_setting_that_the_trainer_did_not_hold_fails_the_round(
    attribute: str, value: float, evidence: str, trainer: TrlTrainer, task: TinyTask
) -> None:
    session = trainer.begin(task, grpo(), trainer.base(task), 3)
    session.advance(1)
    holder = session._trainer if hasattr(session._trainer, attribute) else session._trainer.args
    setattr(holder, attribute, value)
    report, checkpoint = session.result()
    assert checkpoint is None and report.failure is not None
    assert (report.failure.cause, report.failure.kind, report.failure.step) == ("environment", "setting_not_used", 1)
    assert report.failure.evidence == evidence


def test_memory_in_use_is_reported_and_limited(trainer: TrlTrainer, task: TinyTask, sft_weights: Weights) -> None:
    report, _ = run(trainer, task, sft())
    assert report.peak_memory_bytes is not None and report.peak_memory_bytes > 10**8  # torch alone is larger
    enough = report.peak_memory_bytes + 2**28
    limited = TrlTrainer(fault_policy=FaultPolicy(max_memory_bytes=enough))
    assert equal(trained(limited, task, sft()), sft_weights)
    report, checkpoint = run(TrlTrainer(fault_policy=FaultPolicy(max_memory_bytes=10**6)), task, sft())
    assert checkpoint is None and report.failure is not None
    assert (report.failure.cause, report.failure.kind, report.failure.step) == ("resources", "memory_limit", 1)
    assert report.failure.evidence.endswith(" bytes of memory were in use, above 1000000")


def test_memory_is_given_back_after_an_out_of_memory_round(
    trainer: TrlTrainer, task: TinyTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resident() -> int:
        used = memory_in_use(torch.device("cpu"))
        assert used is not None
        return used

    def hold_and_run_out() -> Any:
        ballast = torch.ones(2**26)  # 256 MiB that only the frame of the exception holds
        raise torch.OutOfMemoryError(f"out of memory beside {ballast.numel()}")

    run(trainer, task, sft())
    before = resident()
    with monkeypatch.context() as patch:
        patch.setattr(MeteredSFTTrainer, "compute_loss", failing(hold_and_run_out))
        report, _ = run(trainer, task, sft())
    assert report.failure is not None and report.failure.kind == "oom"
    assert resident() - before < 2**26


def test_memory_after_five_rounds_is_that_after_one(trainer: TrlTrainer, task: TinyTask) -> None:
    used = []
    for seed in range(5):
        run(trainer, task, sft() if seed % 2 == 0 else grpo(), seed=seed)
        used.append(memory_in_use(torch.device("cpu")))
    assert used[0] is not None and used[4] is not None
    assert used[4] <= 1.05 * used[0]


@pytest.mark.gpu
def test_memory_on_cuda_is_the_devices(task: TinyTask) -> None:
    report, _ = run(TrlTrainer(device="cuda"), task, sft())
    assert report.peak_memory_bytes is not None
    assert 0 < report.peak_memory_bytes <= torch.cuda.get_device_properties(0).total_memory
    limited = TrlTrainer(device="cuda", fault_policy=FaultPolicy(max_memory_bytes=1024))
    report, checkpoint = run(limited, task, sft())
    assert checkpoint is None and report.failure is not None
    assert report.failure.kind == "memory_limit"


def test_a_loss_that_explodes_and_then_lies_flat_ends_at_the_explosion(trainer: TrlTrainer, task: TinyTask) -> None:
    report, checkpoint = run(trainer, task, sft(steps=12, learning_rate=1e3))
    assert checkpoint is None and report.failure is not None
    assert (report.failure.kind, report.failure.step, report.steps) == ("diverged", 2, 2)
    assert [row["loss"] > 1e6 for row in report.curves] == [False, True]


@pytest.mark.parametrize(
    ("longest", "clipped", "said"),
    [
        ([4.0, 4.0, 4.0, 4.0], [0.5, 0.9, 1.0, 1.0], "cut at the length limit"),
        ([4.0, 4.0, 1.0, 1.0], [0.5, 0.0, 0.0, 0.0], "empty"),
        ([4.0, 1.0, 1.0, 2.0], [0.5, 0.0, 0.0, 0.0], None),
        ([4.0, 4.0, 4.0, 4.0], [1.0, 1.0, 1.0, 0.9], None),
        ([1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0], "cut at the length limit"),  # one token is all there may be
    ],
)
def test_completions_that_are_all_empty_or_all_cut_are_flagged(
    longest: list[float], clipped: list[float], said: str | None
) -> None:
    pairs = zip(longest, clipped, strict=True)
    flags = completion_flags([{"completions/max_length": a, "completions/clipped_ratio": b} for a, b in pairs])
    expected = f"100 % of the completions sampled in the last 2 steps are {said}; check the end token of the model and "
    assert flags == ([] if said is None else [expected + "the length that the benchmark allows"])
    assert completion_flags([{"loss": 1.0}] * 4) == completion_flags([]) == []


@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "ppo"])
def test_curves_of_algorithms_that_sample_hold_what_the_flags_need(
    algorithm: str, trainer: TrlTrainer, task: TinyTask
) -> None:
    report, _ = run(trainer, task, grpo(algorithm=algorithm, steps=1))
    assert {"completions/max_length", "completions/clipped_ratio"} <= set(report.curves[0])


@pytest.mark.parametrize("rate", [1e3, 1e6])
@pytest.mark.parametrize("algorithm", ["sft", "dft", "midtrain", "dpo", "kto", "rft", "distill"])
def test_a_rate_that_ruins_the_weights_at_once_is_no_finished_round(
    algorithm: str, rate: float, folder: Path, tmp_path: Path
) -> None:
    name, loss = ("sft", "dft") if algorithm == "dft" else (algorithm, "default")
    recipe = Recipe(name, {"good": 1.0}, steps=6, batch_size=8, num_generations=4, learning_rate=rate, loss=loss)
    teacher = write_tiny_checkpoint(tmp_path, seed=1)
    trainer, task = TrlTrainer(), EveryKind(folder, teacher, lambda row, text: float(len(text) % 2))
    report, checkpoint = run(trainer, task, recipe)
    assert checkpoint is None, (report.ended, [row["loss"] for row in report.curves])
    assert report.failure is not None
    assert (report.failure.cause, report.failure.kind) == ("hyperparameter", "diverged")


@pytest.mark.parametrize("reward", [1e30, -1.1e6])
def test_a_reward_beyond_all_measure_is_the_verifiers_fault(reward: float, trainer: TrlTrainer, folder: Path) -> None:
    report, checkpoint = run(trainer, TinyTask(folder, verifier=lambda row, text: reward), grpo())
    assert checkpoint is None and report.failure is not None
    assert (report.failure.cause, report.failure.kind) == ("environment", "reward_function")
    assert report.failure.evidence.endswith(f"returned {reward:g}; expected a number in [-1e+06, 1e+06]")


def test_a_verifier_cannot_change_the_task(trainer: TrlTrainer, folder: Path) -> None:
    def verifier(row: Any, text: str) -> float:
        row["prompt"] = "changed"
        return 0.0

    task = TinyTask(folder, verifier=verifier)
    before = [dict(row) for row in task.built.sources["good"].rows["prompts"]]
    report, _ = run(trainer, task, grpo())
    assert report.failure is not None and report.failure.kind == "reward_function"
    assert [dict(row) for row in task.built.sources["good"].rows["prompts"]] == before


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_sequences_beyond_the_models_positions_are_refused(algorithm: str, trainer: TrlTrainer, folder: Path) -> None:
    class Long(TinyTask):
        def sources(self) -> list[Source]:
            row = {"prompt": "a" * 130 + "=", "completion": "a"}
            return [Source("good", {"demonstrations": [row], "prompts": [row]}, lambda row, text: 1.0)]

    task, recipe = Long(folder), Recipe(algorithm, {"good": 1.0}, steps=2, batch_size=8)
    messages = {
        "sft": r"^max_length: rows of up to 133 tokens do not fit the 128 positions of the model; .* at most 128\.$",
        "grpo": r"^prompts of up to 131 tokens with completions of up to 4 do not fit the 128 positions of the model",
    }
    with pytest.raises(ValueError, match=messages[algorithm]):
        trainer.begin(task, recipe, trainer.base(task), 0)
    if algorithm == "sft":  # the prompt fills what is left, so nothing could be learned: a shorter row is needed
        with pytest.raises(ValueError, match="the smallest max_length that works is 132"):
            trainer.begin(task, Recipe("sft", {"good": 1.0}, max_length=128), trainer.base(task), 0)
