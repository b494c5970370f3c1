"""A round that meets a fault goes on, or ends, with its last good weights; its checkpoint says so."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback
from trl import SFTTrainer

from posttrain_gym.envs.post_training import PostTrainingEnv
from posttrain_gym.inner_trainers.adjustments import Adjustment
from posttrain_gym.inner_trainers.base import Checkpoint
from posttrain_gym.inner_trainers.evaluation import Evaluator
from posttrain_gym.inner_trainers.fault_policy import FaultPolicy
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.testing import TinyTask
from posttrain_gym.inner_trainers.trl.grpo import MeteredGRPOTrainer
from posttrain_gym.inner_trainers.trl.ppo import PPOTrainer
from posttrain_gym.inner_trainers.trl.sft import MeteredSFTTrainer
from posttrain_gym.inner_trainers.trl.snapshots import Snapshots
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer
from tests.trl_fixtures import *  # noqa: F403
from tests.trl_rounds import Weights, by_hand, equal, graded, grpo, run, sft


def rescuing(response: str, **settings: Any) -> TrlTrainer:
    return TrlTrainer(fault_policy=FaultPolicy({"diverged": response}, **settings))


def spoil(
    monkeypatch: pytest.MonkeyPatch, passes: tuple[int, ...], cls: type[Any] = MeteredSFTTrainer, act: Any = None
) -> None:
    """Multiply the loss of some forward passes (from 1, over all rounds) by NaN, or let ``act`` raise in them."""
    method = "compute_loss" if cls is MeteredSFTTrainer else "_compute_loss"
    original, calls = getattr(cls, method), [0]

    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if act is not None and calls[0] in passes:
            act()
        loss = original(self, *args, **kwargs)
        return loss * math.nan if calls[0] in passes else loss

    monkeypatch.setattr(cls, method, patched)


def stopped(recipe: Recipe, steps: int, trainer: TrlTrainer, task: TinyTask) -> Checkpoint:
    """Return the checkpoint of the round that was stopped after some of its steps."""
    session = trainer.begin(task, recipe, trainer.base(task), 3)
    session.advance(steps)
    session.apply(Adjustment("stop"))
    report, checkpoint = session.result()
    assert report.failure is None and checkpoint is not None
    return checkpoint


# Roll back -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "cls"),
    [
        (sft(), MeteredSFTTrainer),
        (sft(lora_rank=2), MeteredSFTTrainer),
        (sft(lora_rank=2, lora_adapter="stack"), MeteredSFTTrainer),
        (grpo(kl_coef=0.1), MeteredGRPOTrainer),
        (grpo(algorithm="ppo"), PPOTrainer),
    ],
    ids=["sft", "lora", "stack", "grpo", "ppo"],
)
def test_a_round_that_is_rolled_back_has_the_weights_of_one_stopped_at_that_step(
    recipe: Recipe, cls: type[Any], trainer: TrlTrainer, task: TinyTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = stopped(recipe, 1, trainer, task)
    spoil(monkeypatch, (3,), cls)
    report, checkpoint = run(rescuing("rollback"), task, recipe)
    assert checkpoint is not None and report.failure is None
    # step 2 was fine, so the weights after step 1 were; those after step 2 no step has tried
    assert (report.ended, report.steps, report.rolled_back_to) == ("rolled_back", 3, 1)
    assert equal(checkpoint.weights, good.weights)
    assert report.checkpoint == checkpoint.id not in (good.id, "base")
    fault = report.rescued[0]
    assert [(f.cause, f.kind, f.step) for f in report.rescued] == [("hyperparameter", "diverged", 3)]
    assert f"rescued from diverged: {fault.evidence}; the round ended with the weights after step 1" in report.flags
    assert math.isnan(report.curves[2]["loss"])


def test_what_was_trained_before_a_roll_back_is_charged(
    trainer: TrlTrainer, task: TinyTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = run(trainer, task, sft(steps=3))
    spoil(monkeypatch, (3,))
    report, _ = run(rescuing("rollback"), task, sft())
    assert report.training_cost.trained_tokens == plain.training_cost.trained_tokens > 0


@pytest.mark.parametrize("bad_pass", [1, 2])
def test_a_fault_before_any_step_was_fine_fails_in_spite_of_the_policy(
    bad_pass: int, task: TinyTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, (bad_pass,))
    report, checkpoint = run(rescuing("rollback"), task, sft())
    assert checkpoint is None and report.failure is not None
    assert (report.ended, report.failure.kind, report.failure.step) == ("failed", "diverged", bad_pass)
    assert (report.rescued, report.rolled_back_to) == ((), None)


def raises(error: type[BaseException]) -> Callable[[], Any]:
    def act() -> None:
        raise error("told to")

    return act


@pytest.mark.parametrize(
    ("error", "kind"), [(MemoryError, "oom"), (KeyError, "trainer_raised"), (torch.OutOfMemoryError, "oom")]
)
def test_a_round_can_be_rolled_back_after_an_exception(
    error: type[BaseException],
    kind: str,
    trainer: TrlTrainer,
    task: TinyTask,
    live_models: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    good = stopped(sft(), 2, trainer, task)
    spoil(monkeypatch, (4,), act=raises(error))
    report, checkpoint = run(TrlTrainer(fault_policy=FaultPolicy({kind: "rollback"})), task, sft())
    assert checkpoint is not None and report.failure is None
    assert (report.ended, report.steps, report.rolled_back_to) == ("rolled_back", 3, 2)
    assert [(fault.kind, fault.step) for fault in report.rescued] == [(kind, 4)]
    assert equal(checkpoint.weights, good.weights)
    assert live_models() == 0


@pytest.mark.parametrize(
    "changes", [{}, {"lora_rank": 2}, {"lora_rank": 2, "lora_adapter": "stack"}], ids=["full", "lora", "stack"]
)
def test_weights_that_the_last_update_ruined_are_rolled_back(
    changes: dict[str, Any], trainer: TrlTrainer, task: TinyTask
) -> None:
    good = stopped(sft(**changes), 3, trainer, task)
    session = rescuing("rollback").begin(task, sft(**changes), trainer.base(task), 3)
    session.advance()
    with torch.no_grad():  # no later step will show it
        next(p for p in session._trainer.model.parameters() if p.requires_grad).mul_(math.nan)
    report, checkpoint = session.result()
    assert checkpoint is not None
    assert (report.ended, report.rolled_back_to, report.failure) == ("rolled_back", 3, None)
    assert "weights are not finite: " in report.rescued[0].evidence
    assert equal(checkpoint.weights, good.weights)


def test_weights_that_are_ruined_in_the_end_fail_without_a_policy(trainer: TrlTrainer, task: TinyTask) -> None:
    session = trainer.begin(task, sft(lora_rank=2), trainer.base(task), 3)
    session.advance()
    with torch.no_grad():
        next(p for p in session._trainer.model.parameters() if p.requires_grad).mul_(math.nan)
    report, checkpoint = session.result()
    assert checkpoint is None and report.failure is not None
    assert (report.failure.kind, report.failure.step) == ("diverged", 4)


def test_a_round_rolled_back_to_before_its_first_signal_keeps_its_fault_and_can_be_repeated(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [0]

    def verifier(row: Any, text: str) -> float:
        calls[0] += 1
        return 0.0 if calls[0] <= 16 else float(calls[0] % 2)  # eight completions a step: nothing in steps 1 and 2

    task, trainer = TinyTask(folder, verifier=verifier), TrlTrainer(fault_policy=FaultPolicy({"oom": "rollback"}))
    with monkeypatch.context() as patched:
        spoil(patched, (4,), MeteredGRPOTrainer, act=raises(torch.OutOfMemoryError))
        report, checkpoint = run(trainer, task, grpo())
    assert checkpoint is not None and report.failure is None
    assert (report.ended, report.rolled_back_to, [f.kind for f in report.rescued]) == ("rolled_back", 2, ["oom"])
    calls[0] = 0
    again = trainer.begin(task, grpo(), trainer.base(task), 3)
    again.advance(report.rolled_back_to)
    repeated, made = again.result()
    assert repeated.failure is None and made is not None
    assert equal(made.weights, checkpoint.weights)


def test_a_failed_round_claims_no_roll_back(task: TinyTask, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, (3,))
    not_used = "posttrain_gym.inner_trainers.trl.settings_watch.settings_not_used"
    monkeypatch.setattr(not_used, lambda *_: ["the trainer used steps 5, asked for 4"])
    report, checkpoint = run(rescuing("rollback"), task, sft())
    assert checkpoint is None and report.failure is not None
    assert (report.failure.kind, report.rescued, report.rolled_back_to) == ("setting_not_used", (), None)
    assert not any("rescued" in flag for flag in report.flags)


# Retry ---------------------------------------------------------------------------------------------------------------


class Retrying(TrainerCallback):  # type: ignore[misc]
    """What a person would write: after step 3 put back the weights after step 1, forget the moments, halve the rate."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        if state.global_step == 1:
            self.kept = [parameter.detach().clone() for parameter in model.parameters()]
        if state.global_step == 3:
            with torch.no_grad():
                for parameter, kept in zip(model.parameters(), self.kept, strict=True):
                    parameter.copy_(kept)
            optimizer.state.clear()
            scheduler = kwargs["lr_scheduler"]
            scheduler.base_lrs = [rate / 2 for rate in scheduler.base_lrs]
            for group in optimizer.param_groups:
                group["lr"] /= 2


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_a_retried_round_equals_the_same_run_by_hand(
    schedule: str, trainer: TrlTrainer, task: TinyTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = sft(steps=6, schedule=schedule)
    spoil(monkeypatch, (3,))
    session = rescuing("retry").begin(task, recipe, trainer.base(task), 3)
    built = session._trainer
    model, dataset, tokenizer = (built.model, built.train_dataset, built.processing_class)
    session.advance()
    report, checkpoint = session.result()
    assert checkpoint is not None and report.failure is None
    assert (report.ended, report.steps, report.rolled_back_to) == ("finished", 6, None)
    assert [(fault.kind, fault.step) for fault in report.rescued] == [("diverged", 3)]
    assert any(
        "went on from the weights after step 1 with 0.5 times the learning rate" in flag for flag in report.flags
    )
    rates = [recipe.learning_rate_at(step) * (0.5 if step > 3 else 1.0) for step in range(1, 7)]
    assert [row["learning_rate"] for row in report.curves] == pytest.approx(rates)
    assert [math.isfinite(row["loss"]) for row in report.curves] == [True, True, False, True, True, True]
    del model

    resident = trainer._load(task).model
    hand = SFTTrainer(
        model=resident.with_weights(trainer.base(task).weights),
        args=by_hand(
            "sft",
            max_steps=6,
            lr_scheduler_type=schedule,
            dataset_kwargs={"skip_prepare_dataset": True},
            max_length=1024,
        ),
        train_dataset=dataset,
        processing_class=tokenizer,
        callbacks=[Retrying()],
    )
    hand.train()
    state = hand.model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in checkpoint.weights.items())


def test_a_retry_has_other_weights_and_another_id_than_the_same_rates_alone(
    trainer: TrlTrainer, task: TinyTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = trainer.begin(task, sft(), trainer.base(task), 3)
    session.advance(3)
    session.apply(Adjustment("lr_scale", 0.5))
    session.advance()
    _, scaled = session.result()
    spoil(monkeypatch, (3,))
    report, retried = run(rescuing("retry"), task, sft())
    assert scaled is not None and retried is not None
    assert report.checkpoint == retried.id != scaled.id
    assert not equal(scaled.weights, retried.weights)


@pytest.mark.parametrize("max_retries", [0, 1, 2])
def test_retries_run_out(max_retries: int, task: TinyTask, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = (3, 4, 5)
    good = stopped(sft(steps=6), 1, TrlTrainer(), task)
    with monkeypatch.context() as patch:
        spoil(patch, bad)
        report, checkpoint = run(rescuing("retry", max_retries=max_retries), task, sft(steps=6))
    assert checkpoint is None and report.failure is not None
    assert (report.failure.kind, report.failure.step) == ("diverged", 3 + max_retries)
    assert [row["learning_rate"] for row in report.curves][2:] == [1e-2 * 0.5**n for n in range(max_retries + 1)]
    spoil(monkeypatch, bad)
    trainer = rescuing("retry", max_retries=max_retries, after_retries="rollback")
    report, checkpoint = run(trainer, task, sft(steps=6))
    assert checkpoint is not None
    assert (report.ended, report.rolled_back_to) == ("rolled_back", 1)
    assert [fault.step for fault in report.rescued] == list(range(3, 4 + max_retries))
    assert equal(checkpoint.weights, good.weights)


def test_the_start_is_good_enough_to_retry_from(
    trainer: TrlTrainer, task: TinyTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = {name: value.clone() for name, value in trainer.base(task).weights.items()}
    spoil(monkeypatch, (1,))
    report, checkpoint = run(rescuing("retry"), task, sft())
    assert checkpoint is not None
    assert (report.ended, [fault.step for fault in report.rescued]) == ("finished", [1])
    assert equal(trainer.base(task).weights, base)


def test_a_fault_in_the_last_step_is_not_retried(task: TinyTask, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, (4,))
    report, checkpoint = run(rescuing("retry"), task, sft())
    assert checkpoint is None and report.failure is not None
    assert (report.failure.kind, report.failure.step) == ("diverged", 4)


def test_a_learning_rate_that_ruins_a_round_is_halved_until_it_does_not(task: TinyTask) -> None:
    ruined, _ = run(TrlTrainer(), task, sft(steps=12, learning_rate=1e3))
    assert ruined.failure is not None
    trainer = rescuing("retry", max_retries=30)
    report, checkpoint = run(trainer, task, sft(steps=40, learning_rate=1e3))
    assert checkpoint is not None and report.failure is None
    assert 5 < len(report.rescued) <= 30
    assert report.curves[-1]["learning_rate"] == 1e3 * 0.5 ** len(report.rescued)
    assert report.curves[-1]["loss"] < 3.2  # ln 23 is 3.14


def test_completions_of_ruined_weights_are_not_used_again(task: TinyTask, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled: list[int] = []
    original = MeteredGRPOTrainer._generate_and_score_completions

    def counting(self: Any, inputs: Any) -> Any:
        sampled.append(self.state.global_step)
        return original(self, inputs)

    monkeypatch.setattr(MeteredGRPOTrainer, "_generate_and_score_completions", counting)
    spoil(monkeypatch, (2,), MeteredGRPOTrainer)
    report, _ = run(rescuing("retry"), task, grpo(num_iterations=4))
    assert (report.ended, report.failure, len(report.rescued)) == ("finished", None, 1)
    assert sampled == [0, 2]


def test_kl_that_runs_away_is_rolled_back(folder: Path) -> None:
    task = TinyTask(folder, verifier=graded)
    recipe = grpo(kl_coef=1e-4, learning_rate=1e-1, steps=6)
    plain, _ = run(TrlTrainer(), task, recipe)
    kls = [row["kl"] for row in plain.curves]
    passing = next(step for step, kl in enumerate(kls, start=1) if step > 2 and kl > max(kls[: step - 1]))
    limit = (max(kls[: passing - 1]) + kls[passing - 1]) / 2
    report, checkpoint = run(TrlTrainer(fault_policy=FaultPolicy(max_kl=limit)), task, recipe)
    assert checkpoint is None and report.failure is not None
    assert (report.failure.cause, report.failure.kind) == ("hyperparameter", "kl_runaway")
    assert report.failure.step == passing
    policy = FaultPolicy({"kl_runaway": "rollback"}, max_kl=limit)
    report, checkpoint = run(TrlTrainer(fault_policy=policy), task, recipe)
    assert checkpoint is not None
    assert (report.rolled_back_to, report.steps) == (passing - 2, passing)
    assert equal(checkpoint.weights, stopped(recipe, passing - 2, TrlTrainer(), task).weights)


# Cost of being ready -------------------------------------------------------------------------------------------------


def test_weights_are_copied_only_when_a_response_needs_them(
    trainer: TrlTrainer, task: TinyTask, sft_weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    copied: list[int] = []
    take, copies = Snapshots.take, Snapshots._copies

    def noting_take(self: Snapshots, step: int, trainer: Any) -> None:
        taken.append(step)
        take(self, step, trainer)

    def noting_copies(self: Snapshots, trainer: Any) -> tuple[torch.Tensor, ...]:
        copied.append(1)
        return copies(self, trainer)

    monkeypatch.setattr(Snapshots, "take", noting_take)
    monkeypatch.setattr(Snapshots, "_copies", noting_copies)
    run(trainer, task, sft())
    assert taken == []
    _, checkpoint = run(rescuing("rollback"), task, sft())
    assert checkpoint is not None
    assert equal(checkpoint.weights, sft_weights)
    assert (taken, len(copied)) == ([0, 1, 2, 3], 3)  # the start's weights are in memory anyway


def test_a_policy_belongs_to_the_results(task: TinyTask) -> None:
    assert TrlTrainer().fingerprint != rescuing("rollback").fingerprint
    assert rescuing("retry").fingerprint["fault_policy"]["responses"] == {"diverged": "retry"}


# In a search ---------------------------------------------------------------------------------------------------------


def search_env(task: TinyTask, response: str, folder: Path | None = None) -> PostTrainingEnv:
    policy = FaultPolicy({"diverged": response, "oom": response})
    evaluator = Evaluator(seeds=(0,), samples_per_seed=2, k=2)
    trainer = TrlTrainer(evaluator, fault_policy=policy)
    env = PostTrainingEnv(task, trainer=trainer, budget={"limit": 1e6}, journal=folder)
    env.reset(seed=3)
    return env


def a_round(env: PostTrainingEnv) -> tuple[float, dict[str, Any]]:
    recipe = env.space.recipe("sft", mix={"good": 1.0}, steps=10, batch_size=16, learning_rate=3e-3)
    _, reward, _, _, info = env.step(env.encode_recipe(recipe))
    facts: dict[str, Any] = info["round"]
    return float(reward), facts


@pytest.mark.parametrize("response", ["stop", "rollback"])
def test_no_weights_from_after_a_fault_are_ever_promoted(
    response: str, task: TinyTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = search_env(task, response)
    spoil(monkeypatch, (5,))
    reward, facts = a_round(env)
    assert math.isfinite(reward)
    best = env.search.weights_of("latest")
    if response == "stop":
        assert (facts["failure"]["kind"], facts["failure"]["step"], facts["rescued"]) == ("diverged", 5, [])
        assert best.id == env.search.weights_of("best").id == "base"
        return
    assert facts["failure"] is None
    assert [(fault["kind"], fault["step"]) for fault in facts["rescued"]] == [("diverged", 5)]
    assert best.id == facts["checkpoint"]
    recipe = env.search.outcomes[0].report.recipe
    trainer = TrlTrainer()
    session = trainer.begin(task, recipe, trainer.base(task), env.search.outcomes[0].report.seed)
    session.advance(3)
    _, good = session.result()
    assert good is not None
    assert equal(best.weights, good.weights)


@pytest.mark.parametrize("act", [None, raises(MemoryError)], ids=["nan", "oom"])
def test_weights_of_a_rolled_back_round_are_made_again(
    act: Any, task: TinyTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = search_env(task, "rollback", tmp_path)
    with monkeypatch.context() as patch:
        spoil(patch, (5,), act=act)
        _, facts = a_round(env)
    kept = {name: value.clone() for name, value in env.search.weights_of("latest").weights.items()}
    for path in tmp_path.glob("checkpoints-0/*.safetensors"):
        path.unlink()
    again = search_env(task, "rollback", tmp_path)
    _, replayed = a_round(again)
    assert again.search.outcomes[0].replayed
    assert repr(replayed) == repr(facts)  # a loss of NaN is not equal to itself
    assert equal(again.search.weights_of("latest").weights, kept)
