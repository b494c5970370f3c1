"""DPO and KTO rounds equal TRL's own bit for bit, count what they train on, and refuse what teaches nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

from posttrain_gym.inner_trainers.base import Checkpoint, Limit
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.trl.kto import balanced_sides
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer
from tests.preference_rounds import PairTask, arguments, drawn, preference
from tests.trl_fixtures import *  # noqa: F403
from tests.trl_rounds import equal, run, sft, trained


@pytest.fixture(scope="module")
def pairs(folder: Path) -> PairTask:
    return PairTask(folder)


def adapter(recipe: Recipe) -> LoraConfig | None:
    if recipe.lora_rank == 0:
        return None
    alpha = 2 * recipe.lora_rank
    return LoraConfig(r=recipe.lora_rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM")


def final_state(library_trainer: Any) -> dict[str, torch.Tensor]:
    library_trainer.train()
    model = library_trainer.model
    return dict((model.merge_and_unload() if hasattr(model, "merge_and_unload") else model).state_dict())


# Equal to TRL, bit for bit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "loss_type"),
    [
        ({}, ["sigmoid"]),
        ({"loss": "sigmoid", "beta": 0.5, "batch_size": 2, "gradient_accumulation": 2}, ["sigmoid"]),
        ({"loss": "sigmoid+sft"}, ["sigmoid", "sft"]),
        ({"loss": "ipo", "max_length": 5}, ["ipo"]),
        ({"lora_rank": 3}, ["sigmoid"]),
    ],
)
def test_a_dpo_round_is_trls_own_run(
    changes: dict[str, Any], loss_type: list[str], trainer: TrlTrainer, pairs: PairTask, folder: Path
) -> None:
    recipe = preference("dpo", **changes)
    reference = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=arguments(DPOConfig, recipe, loss_type=loss_type),
        train_dataset=datasets.Dataset.from_list(drawn(recipe)),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=adapter(recipe),
    )
    state = final_state(reference)
    weights = trained(trainer, pairs, recipe)
    assert all(torch.equal(value, state[name]) for name, value in weights.items())
    assert not equal(weights, trainer.base(pairs).weights)


@pytest.mark.parametrize(
    "changes",
    [{}, {"beta": 0.5, "batch_size": 3, "gradient_accumulation": 2, "max_length": 5}, {"lora_rank": 3}],
)
def test_a_kto_round_is_trls_own_run(
    changes: dict[str, Any], trainer: TrlTrainer, pairs: PairTask, folder: Path
) -> None:
    recipe = preference("kto", **changes)
    rows = drawn(recipe)
    sides = balanced_sides([(row["prompt"], row["chosen"], row["rejected"]) for row in rows], recipe.batch_size)
    answers = [
        {"prompt": row["prompt"], "completion": row["chosen" if good else "rejected"], "label": good}
        for row, good in zip(rows, sides, strict=True)
    ]
    reference = KTOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=arguments(KTOConfig, recipe),
        train_dataset=datasets.Dataset.from_list(answers),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=adapter(recipe),
    )
    state = final_state(reference)
    weights = trained(trainer, pairs, recipe)
    assert all(torch.equal(value, state[name]) for name, value in weights.items())
    assert not equal(weights, trainer.base(pairs).weights)


@pytest.mark.parametrize("algorithm", ["dpo", "kto"])
@pytest.mark.parametrize("rank", [0, 2])
def test_the_reference_is_the_checkpoint_the_round_starts_from(
    algorithm: str, rank: int, trainer: TrlTrainer, pairs: PairTask
) -> None:
    start = Checkpoint("other", trained(trainer, pairs, sft(steps=2)), 1)
    report, _ = run(trainer, pairs, preference(algorithm, lora_rank=rank), start)
    first, last = report.curves[0], report.curves[-1]
    assert (first["reward_margin"], first["loss"]) == pytest.approx((0.0, math.log(2) if algorithm == "dpo" else 0.5))
    assert last["reward_margin"] > 0 and last["loss"] < first["loss"]
    from_base, _ = run(trainer, pairs, preference(algorithm, lora_rank=rank))
    assert from_base.curves[0]["logps/chosen"] != first["logps/chosen"]


def test_the_curve_tells_what_a_preference_round_is_judged_by(trainer: TrlTrainer, pairs: PairTask) -> None:
    report, _ = run(trainer, pairs, preference("dpo"))
    assert report.curves[0]["reward_accuracy"] == 0.0  # equal rewards are no preference
    assert 0.0 < report.curves[-1]["reward_accuracy"] <= 1.0
    assert not [name for row in report.curves for name in row if name.startswith("rewards/")]
    report, _ = run(trainer, pairs, preference("kto"))
    assert report.curves[0]["kl"] == 0.0 and all(row["kl"] >= 0.0 for row in report.curves)
    assert "reward_accuracy" not in report.curves[0]  # one side alone wins nothing


def test_beta_holds_a_round_to_its_start(trainer: TrlTrainer, pairs: PairTask) -> None:
    base = trainer.base(pairs).weights

    def distance(beta: float) -> float:
        weights = trained(trainer, pairs, preference("dpo", loss="ipo", beta=beta, learning_rate=1e-3, steps=12))
        return math.sqrt(sum(float(((weights[name] - base[name]) ** 2).sum()) for name in weights))

    assert distance(100.0) < 0.8 * distance(0.1)


# Counts and bounds ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_length", [1024, 5])
def test_dpo_counts_both_sides_once_for_each_model(max_length: int, trainer: TrlTrainer, pairs: PairTask) -> None:
    recipe = preference("dpo", max_length=max_length, batch_size=2, gradient_accumulation=2)
    report, _ = run(trainer, pairs, recipe)
    sides = [(row["prompt"], row[side]) for row in drawn(recipe) for side in ("chosen", "rejected")]
    tokens = sum(min(max_length, len(prompt) + len(answer) + 1) for prompt, answer in sides)
    supervised = sum(min(max_length, len(prompt) + len(answer) + 1) - len(prompt) for prompt, answer in sides)
    cost = report.training_cost
    assert (cost.trained_tokens, cost.scored_tokens, cost.generated_tokens) == (tokens, tokens, 0)
    assert report.supervised_tokens == supervised
    assert cost.flops == 8 * trainer.parameters(pairs) * tokens


@pytest.mark.parametrize("max_length", [1024, 5])
def test_kto_counts_one_side_and_the_mismatched_answers(max_length: int, trainer: TrlTrainer, pairs: PairTask) -> None:
    recipe = preference("kto", max_length=max_length)
    report, _ = run(trainer, pairs, recipe)
    rows = drawn(recipe)
    good = balanced_sides([(row["prompt"], row["chosen"], row["rejected"]) for row in rows], 4)
    answers = [row["chosen" if g else "rejected"] for row, g in zip(rows, good, strict=True)]
    tokens = mismatched = 0
    for first in range(0, 16, 4):
        batch = answers[first : first + 4]
        for row, answer, other in zip(rows[first : first + 4], batch, [batch[-1], *batch[:-1]], strict=True):
            tokens += min(max_length, len(row["prompt"]) + len(answer) + 1)
            mismatched += min(max_length, len(row["prompt"]) + len(other) + 1)
    cost = report.training_cost
    assert (cost.trained_tokens, cost.scored_tokens) == (tokens, tokens + 2 * mismatched)


@pytest.mark.parametrize("algorithm", ["dpo", "kto"])
@pytest.mark.parametrize("max_length", [1024, 5])
def test_no_step_costs_more_than_its_bound(
    algorithm: str, max_length: int, trainer: TrlTrainer, folder: Path, pairs: PairTask
) -> None:
    lopsided = [  # a long prompt with a short answer, and the reverse, meet in the KL estimate
        {"prompt": "abcdefgh=", "chosen": "a", "rejected": "b"},
        {"prompt": "a", "chosen": "abcdefgh", "rejected": "hgfedcba"},
        {"prompt": "b", "chosen": "hhhhhhhh", "rejected": "aaaaaaaa"},
        {"prompt": "bcdefgh0=", "chosen": "b", "rejected": "a"},
    ]
    for task in (pairs, PairTask(folder, lopsided)):
        if task is not pairs and max_length == 5:
            max_length = 10
        recipe = preference(algorithm, max_length=max_length, batch_size=2, steps=6)
        bound = trainer.step_cost_bound(task, recipe)
        session = trainer.begin(task, recipe, trainer.base(task), 3)
        before = session.cost
        highest = 0.0
        while not session.done:
            session.advance(1)
            for name in ("trained_tokens", "scored_tokens", "flops"):
                assert getattr(session.cost, name) - getattr(before, name) <= getattr(bound, name)
            highest = max(highest, (session.cost.flops - before.flops) / bound.flops)
            before = session.cost
        session.close()
        assert highest > 0.7  # and the bound is no wild guess


def test_a_limit_is_kept(trainer: TrlTrainer, pairs: PairTask) -> None:
    recipe = preference("kto", steps=6)
    bound = trainer.step_cost_bound(pairs, recipe).in_unit("train_tokens")
    report, _ = run(trainer, pairs, recipe, limit=Limit("train_tokens", 2.5 * bound))
    assert report.ended == "budget" and report.steps in (2, 3)
    assert report.training_cost.in_unit("train_tokens") <= 2.5 * bound


# Devices and memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["dpo", "kto"])
def test_policy_and_reference_are_gone_when_a_round_ends(
    algorithm: str, trainer: TrlTrainer, pairs: PairTask, live_models: Callable[[], int]
) -> None:
    session = trainer.begin(pairs, preference(algorithm), trainer.base(pairs), 3)
    assert live_models() == 2
    session.advance()
    assert session.result()[0].failure is None
    assert live_models() == 0
    session = trainer.begin(pairs, preference(algorithm, lora_rank=2), trainer.base(pairs), 3)
    assert live_models() == 1  # the policy with its adapter switched off is the reference
    session.close()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("algorithm", ["dpo", "kto"])
def test_a_preference_round_on_a_real_card(algorithm: str, rank: int, precision: str, pairs: PairTask) -> None:
    trainer = TrlTrainer(device="cuda", precision=precision)
    report, checkpoint = run(trainer, pairs, preference(algorithm, lora_rank=rank, steps=8))
    assert report.failure is None and checkpoint is not None
    assert {value.device.type for value in checkpoint.weights.values()} == {"cpu"}
    assert report.curves[-1]["reward_margin"] > report.curves[0]["reward_margin"]


# Refusals ------------------------------------------------------------------------------------------------------------


def test_what_cannot_run_is_refused_before_a_model_is_loaded(folder: Path, task: Any) -> None:
    fresh = TrlTrainer()
    without = "mix: source 'good' has no preferences rows, which dpo trains on; sources that have: pairs."
    cases = [
        (preference("dpo", mix={"good": 1.0}), without),
        (preference("dpo", loss="sigmod"), "loss: dpo has none called 'sigmod'. Did you mean 'sigmoid'?"),
        (preference("kto", loss="ipo"), "loss: kto has none called 'ipo'."),
        (
            preference("kto", batch_size=1),
            "batch_size: kto estimates a KL divergence from mismatched rows of a batch, so it needs at least 2, got 1.",
        ),
    ]
    pairs = PairTask(folder)
    for recipe, message in cases:
        for refuse in (
            lambda recipe=recipe: fresh.check(pairs, recipe),
            lambda recipe=recipe: fresh.begin(pairs, recipe, Checkpoint("base", {}), 0),
        ):
            with pytest.raises(ValueError) as caught:
                refuse()
            assert str(caught.value).startswith(message)
    assert not fresh._models
    with pytest.raises(ValueError) as caught:
        preference("dpo", beta=0.0)
    assert str(caught.value) == "beta: expected a number in (0, 100], got 0.0."


@pytest.mark.parametrize("changes", [{"algorithm": "dpo"}, {"algorithm": "dpo", "loss": "ipo"}, {"algorithm": "kto"}])
def test_ruined_weights_are_seen_behind_a_bounded_loss(
    changes: dict[str, Any], trainer: TrlTrainer, pairs: PairTask
) -> None:
    report, checkpoint = run(trainer, pairs, preference(**changes, learning_rate=1e3, steps=12))
    assert checkpoint is None and report.failure is not None
    assert (report.failure.cause, report.failure.kind, report.failure.step) == ("hyperparameter", "diverged", 2)
    if "loss" not in changes:
        assert report.curves[1]["loss"] <= 0.5 < report.curves[0]["loss"] + 0.1  # looks learnt, or untouched
        assert "a token of the better answers had a log-probability of -" in report.failure.evidence


@pytest.mark.parametrize("algorithm", ["dpo", "kto"])
def test_the_likelihood_of_better_answers_is_per_token(algorithm: str, trainer: TrlTrainer, pairs: PairTask) -> None:
    one = preference(algorithm, batch_size=8, steps=1)
    whole, _ = run(trainer, pairs, one)
    parts, _ = run(trainer, pairs, preference(algorithm, batch_size=2, gradient_accumulation=4, steps=1))
    found = whole.curves[0]["chosen_log_probability"]
    assert found == pytest.approx(-math.log(23), abs=0.3)  # an untrained model of 23 tokens
    if algorithm == "dpo":  # KTO shows other sides in batches of another size
        assert parts.curves[0]["chosen_log_probability"] == pytest.approx(found, rel=1e-5)
        answers = [len(row["chosen"]) + 1 for row in drawn(one)]
        assert found * sum(answers) / len(answers) == pytest.approx(whole.curves[0]["logps/chosen"], rel=1e-5)
