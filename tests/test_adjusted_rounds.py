"""Adjusted rounds: exact rates, settings as they are, ids of their checkpoints; what never arrives fails them."""

from __future__ import annotations

import json
import math
from types import MappingProxyType, MethodType
from typing import Any

import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32
from trl.trainer.utils import add_fused_lm_head

from posttrain_gym.inner_trainers.adjustments import KINDS, Adjustment
from posttrain_gym.inner_trainers.base import Checkpoint, RoundReport
from posttrain_gym.inner_trainers.fault_policy import FaultPolicy
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.testing import TinyTask
from posttrain_gym.inner_trainers.trl import executor
from posttrain_gym.inner_trainers.trl.live import LiveRound
from posttrain_gym.inner_trainers.trl.settings import fused_temperature
from posttrain_gym.inner_trainers.trl.sft import MeteredSFTTrainer
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer
from tests.adjusted_rounds import adjusted, before_updates, grpo_kl, learning_rate, rloo_kl
from tests.trl_fixtures import *  # noqa: F403
from tests.trl_rounds import Weights, equal, grpo, sft

RATES = before_updates(learning_rate)
HALF, RESTART = Adjustment("lr_scale", 0.5), Adjustment("lr_restart")
KEEP, BACK = Adjustment("snapshot"), Adjustment("rollback")


def ran(
    trainer: TrlTrainer, task: TinyTask, recipe: Recipe, *adjustments: tuple[int, Adjustment]
) -> tuple[str, Weights]:
    report, weights, _ = adjusted(trainer, task, recipe, *adjustments)
    assert report.checkpoint is not None
    return report.checkpoint, weights


# Learning rates (C01, B05) -------------------------------------------------------------------------------------------


def test_a_halved_linear_schedule_uses_exactly_half_of_each_later_rate(trainer: TrlTrainer, task: TinyTask) -> None:
    recipe = sft(steps=10, learning_rate=1e-3, schedule="linear")
    report, weights, used = adjusted(trainer, task, recipe, (5, HALF), watch=RATES)
    rates = [1e-3, 9e-4, 8e-4, 7e-4, 6e-4, 2.5e-4, 2.0e-4, 1.5e-4, 1.0e-4, 5.0e-5]
    assert used == pytest.approx(rates, rel=1e-12)
    assert [row["learning_rate"] for row in report.curves] == used
    assert not equal(weights, adjusted(trainer, task, recipe)[1])


@pytest.mark.parametrize(
    ("changes", "adjustments", "rates"),
    [
        ({"schedule": "linear"}, [(2, RESTART)], [8, 6.4, 8, 16 / 3, 8 / 3]),
        ({"schedule": "linear"}, [(1, HALF), (2, RESTART)], [8, 3.2, 4, 8 / 3, 4 / 3]),
        ({"schedule": "linear"}, [(2, RESTART), (3, HALF)], [8, 6.4, 8, 8 / 3, 4 / 3]),
        ({"schedule": "linear"}, [(0, HALF), (2, RESTART), (3, HALF), (4, RESTART)], [4, 3.2, 4, 4 / 3, 2]),
        ({"schedule": "linear", "warmup_steps": 1}, [(2, RESTART)], [0, 8, 0, 8, 4]),
        ({"schedule": "cosine"}, [(2, RESTART)], [8, 4 + 4 * math.cos(math.pi / 5), 8, 6, 2]),
        ({"warmup_steps": 2}, [(3, RESTART)], [0, 4, 8, 0, 8]),
    ],
)  # fmt: skip
def test_a_restart_composes_with_the_schedule_its_warm_up_and_factors(
    changes: dict[str, Any],
    adjustments: list[tuple[int, Adjustment]],
    rates: list[float],
    trainer: TrlTrainer,
    task: TinyTask,
) -> None:
    recipe = sft(steps=5, learning_rate=8.0e-3, **changes)
    session = trainer.begin(task, recipe, trainer.base(task), 3)
    used = RATES(session._trainer)
    asked = []
    for step in range(5):
        for after, adjustment in adjustments:
            if after == step:
                session.apply(adjustment)
        asked.append(session.settings["learning_rate"])
        session.advance(1)
    report, _ = session.result()
    assert report.failure is None
    assert used == pytest.approx([rate * 1e-3 for rate in rates], rel=1e-12, abs=1e-18)
    assert used == pytest.approx(asked, rel=1e-12)
    restarted = max(after for after, adjustment in adjustments if adjustment == RESTART)
    assert used[restarted:] == asked[restarted:]  # to the last bit


def test_a_retry_halves_a_schedule_that_was_begun_anew(task: TinyTask, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = MeteredSFTTrainer.compute_loss, [0]

    def spoilt(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return original(self, *args, **kwargs) * (math.nan if calls[0] == 4 else 1.0)

    monkeypatch.setattr(MeteredSFTTrainer, "compute_loss", spoilt)
    trainer = TrlTrainer(fault_policy=FaultPolicy({"diverged": "retry"}))
    recipe = sft(steps=6, learning_rate=8e-3, schedule="linear")
    report, _, used = adjusted(trainer, task, recipe, (2, RESTART), watch=RATES)
    assert [fault.step for fault in report.rescued] == [4]
    assert used == pytest.approx([8e-3, 8e-3 * 5 / 6, 8e-3, 6e-3, 2e-3, 1e-3], rel=1e-12)


def test_a_new_rate_after_a_checkpoint_is_used_from_the_next_step_on(trainer: TrlTrainer, task: TinyTask) -> None:
    first = sft(steps=5, learning_rate=1e-3)
    session = trainer.begin(task, first, trainer.base(task), 3)
    session.advance()
    _, checkpoint = session.result()
    assert checkpoint is not None
    _, _, used = adjusted(trainer, task, sft(steps=3, learning_rate=1e-5), watch=RATES, start=checkpoint)
    assert used == [1e-5] * 3  # asked by the recipe
    _, _, used = adjusted(
        trainer,
        task,
        sft(steps=3, learning_rate=1e-3),
        (0, Adjustment("lr_scale", 0.01)),
        watch=RATES,
        start=checkpoint,
    )
    assert used == pytest.approx([1e-5] * 3, rel=1e-12)  # asked of the session
    with pytest.raises(ValueError, match=r"learning_rate would become 1e\+07, outside \(0, 1e\+06\]"):
        adjusted(trainer, task, sft(learning_rate=1e5), (1, Adjustment("lr_scale", 100.0)))


# A child of a population (D05) ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"lora_rank": 2}], ids=["full", "lora"])
def test_changes_of_a_child_survive_its_parents_checkpoint(
    changes: dict[str, Any], trainer: TrlTrainer, task: TinyTask
) -> None:
    recipe = grpo(algorithm="rloo", learning_rate=1e-3, kl_coef=0.05, **changes)
    session = trainer.begin(task, recipe, trainer.base(task), 3)
    session.advance()
    _, parent = session.result()
    assert parent is not None
    asked = [(0, Adjustment("lr_scale", 0.8)), (0, Adjustment("kl_scale", 1.2))]
    report, _, rates = adjusted(trainer, task, recipe, *asked, watch=RATES, start=parent, seed=4)
    assert rates == pytest.approx([8e-4] * 4, rel=1e-12)
    assert (report.start, report.recipe) == (parent.id, recipe)
    _, _, coefficients = adjusted(trainer, task, recipe, *asked, watch=rloo_kl, start=parent, seed=4)
    # in the first step the policy is its reference: there is no KL divergence to show the coefficient
    assert coefficients[1:] == pytest.approx([0.06] * 3, rel=1e-2)


# Settings ------------------------------------------------------------------------------------------------------------


def test_settings_are_those_of_the_next_step_before_between_and_after(trainer: TrlTrainer, task: TinyTask) -> None:
    recipe = Recipe(
        "ppo", {"good": 1.0}, steps=4, batch_size=8, learning_rate=4e-3, schedule="linear", kl_coef=0.1, lora_rank=2
    )
    session = trainer.begin(task, recipe, trainer.base(task), 3)
    before = {
        "learning_rate": 4e-3,
        "learning_rate_factor": 1.0,
        "batch_size": 8.0,
        "max_grad_norm": 1.0,
        "entropy_coef": 0.0,
        "gamma": 1.0,
        "kl_coef": 0.1,
        "temperature": 1.0,
        "lora_frozen": 0.0,
        "mix.good": 1.0,
    }
    assert session.settings == before
    session.apply(Adjustment("kl_scale", 2.0))
    session.advance(1)
    assert session.settings == {**before, "learning_rate": 3e-3, "kl_coef": 0.2}
    for kind, value in (("lr_scale", 0.5), ("gamma_add", -0.25), ("temperature_scale", 0.5), ("entropy_scale", 2.0)):
        session.apply(Adjustment(kind, value))
    session.apply(Adjustment("lora_freeze"))
    session.apply(Adjustment("grad_clip_scale", 0.25))
    between = {
        "learning_rate": 1.5e-3,
        "learning_rate_factor": 0.5,
        "batch_size": 8.0,
        "max_grad_norm": 0.25,
        "entropy_coef": 0.001,
        "gamma": 0.75,
        "kl_coef": 0.2,
        "temperature": 0.5,
        "lora_frozen": 1.0,
        "mix.good": 1.0,
    }
    assert session.settings == between
    session.advance()
    report, _ = session.result()
    assert report.failure is None
    assert session.settings == {**between, "learning_rate": 0.0}
    assert RoundReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    assert [(step, str(adjustment)) for step, adjustment in report.adjustments] == [
        (0, "kl_scale 2"),
        (1, "lr_scale 0.5"),
        (1, "gamma_add -0.25"),
        (1, "temperature_scale 0.5"),
        (1, "entropy_scale 2"),
        (1, "lora_freeze"),
        (1, "grad_clip_scale 0.25"),
    ]


@pytest.mark.parametrize(
    ("algorithm", "adjustment", "changes"),
    [
        ("grpo", Adjustment("temperature_scale", 0.5), {}),
        ("rloo", Adjustment("temperature_scale", 0.5), {}),
        ("ppo", Adjustment("gamma_add", -0.5), {}),
        ("ppo", Adjustment("kl_scale", 2.0), {"kl_coef": 0.1}),
        ("rloo", Adjustment("kl_scale", 2.0), {"kl_coef": 0.1}),
        ("grpo", Adjustment("kl_scale", 2.0), {"lora_rank": 2}),
    ],
)
def test_completions_that_an_adjustment_makes_stale_are_sampled_again(
    algorithm: str,
    adjustment: Adjustment,
    changes: dict[str, Any],
    trainer: TrlTrainer,
    task: TinyTask,
) -> None:
    """With four steps to a batch of completions, the step after the adjustment samples; otherwise only the first."""

    def sampled(*adjustments: tuple[int, Adjustment]) -> list[float]:
        return adjusted(trainer, task, recipe, *adjustments, watch=sampling_steps)[2]

    recipe = grpo(algorithm=algorithm, num_iterations=4, **changes)
    assert sampled() == [0]
    assert sampled((1, adjustment)) == [0, 1]
    assert sampled((1, Adjustment("lr_scale", 0.5))) == [0]


def sampling_steps(trainer: Any) -> list[float]:
    used: list[float] = []
    original = trainer._generate_and_score_completions

    def noting(inputs: Any) -> Any:
        used.append(trainer.state.global_step)
        return original(inputs)

    trainer._generate_and_score_completions = noting
    return used


def test_a_coefficient_in_the_loss_needs_no_new_completions(trainer: TrlTrainer, task: TinyTask) -> None:
    recipe = grpo(num_iterations=4, kl_coef=0.1)
    adjustment = Adjustment("kl_scale", 2.0)
    assert adjusted(trainer, task, recipe, (2, adjustment), watch=sampling_steps)[2] == [0]
    used = adjusted(trainer, task, recipe, (2, adjustment), watch=grpo_kl)[2]
    assert used[1:] == pytest.approx([0.1, 0.2, 0.2], rel=2e-3)


# What does not arrive ------------------------------------------------------------------------------------------------


def _any_of(kind: str) -> Adjustment:
    return Adjustment(kind, None if KINDS[kind].low is None else 1.0)


def _only_on_paper(name: str, value: float) -> Any:
    class Handler:
        def refusal(self, live: LiveRound, adjustment: Adjustment) -> str | None:
            return None

        def apply(self, live: LiveRound, adjustment: Adjustment) -> str | None:
            live.change(**{name: value})
            return None

    return Handler()


@pytest.mark.parametrize(
    ("algorithm", "kind", "name", "value", "said"),
    [
        ("sft", "grad_clip_scale", "max_grad_norm", 0.5, "max_grad_norm 1.0, asked for 0.5"),
        ("sft", "batch_scale", "batch_size", 4, "batch_size 8, asked for 4"),
        ("grpo", "kl_scale", "kl_coef", 0.5, "kl_coef 0.0, asked for 0.5"),
        ("ppo", "kl_scale", "kl_coef", 0.5, "kl_coef 0.0, asked for 0.5"),
        ("ppo", "gamma_add", "gamma", 0.5, "gamma 1.0, asked for 0.5"),
        ("grpo", "entropy_scale", "entropy_coef", 0.5, "entropy_coef 0.0, asked for 0.5"),
        ("rloo", "temperature_scale", "temperature", 0.5, "temperature 1.0, asked for 0.5"),
        ("grpo", "generations_step", "num_generations", 8, "num_generations 4, asked for 8"),
    ],
)
@pytest.mark.parametrize("hidden", [False, True], ids=["shown", "hidden"])
def test_a_setting_that_never_reached_the_trainer_fails_the_round(
    algorithm: str,
    kind: str,
    name: str,
    value: float,
    said: str,
    hidden: bool,
    trainer: TrlTrainer,
    task: TinyTask,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also when the old value is asked for again before the round ends."""
    recipe = grpo(algorithm=algorithm)
    other = "kl_scale" if kind != "kl_scale" else "gamma_add"
    on_paper = {kind: _only_on_paper(name, value), other: _only_on_paper(name, getattr(recipe, name))}
    monkeypatch.setattr(executor, "HANDLERS", MappingProxyType({**executor.HANDLERS, **on_paper}))
    monkeypatch.setattr("posttrain_gym.inner_trainers.trl.live_batches.LiveBatches.hold_settings", lambda self: None)
    session = trainer.begin(task, recipe, trainer.base(task), 3)
    session.advance(1)
    session.apply(_any_of(kind))
    session.advance(1)
    if hidden:
        session.apply(_any_of(other))
    session.advance()
    report, checkpoint = session.result()
    assert checkpoint is None and report.failure is not None
    assert (report.failure.kind, report.failure.step) == ("setting_not_used", 2)
    assert f"the trainer used {said}" in report.failure.evidence


def test_a_temperature_that_reaches_only_the_sampler_or_only_the_loss_fails_the_round(
    trainer: TrlTrainer, task: TinyTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    for left_out, what in (("samplers", "sampling"), ("fused_temperatures", "the loss")):
        with monkeypatch.context() as patch:
            patch.setattr(f"posttrain_gym.inner_trainers.trl.adjust_policy.{left_out}", lambda trainer: iter(()))
            session = trainer.begin(task, grpo(), trainer.base(task), 3)
            session.advance(1)
            session.apply(Adjustment("temperature_scale", 0.5))
            session.advance()
        report, _ = session.result()
        assert report.failure is not None
        assert (report.failure.kind, report.failure.step) == ("setting_not_used", 2)
        assert f"temperature of {what} 1.0, asked for 0.5" in report.failure.evidence


def test_the_temperature_of_a_loss_is_reached_under_mixed_precision(trainer: TrlTrainer, task: TinyTask) -> None:
    """Accelerate wraps the forward pass twice for it; what is wrapped stays."""
    model = trainer._load(task).model.with_weights(trainer.base(task).weights).eval()
    add_fused_lm_head(model)
    autocast: Any = torch.autocast("cpu", dtype=torch.bfloat16)
    model.forward = MethodType(convert_outputs_to_fp32(autocast(model.forward.__func__)), model)
    ids = torch.tensor([[3, 4, 5, 6]])
    wrapped = model.forward

    def log_probabilities() -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs
        return found

    before = log_probabilities()
    cell = fused_temperature(model)
    assert cell.cell_contents == 1.0
    cell.cell_contents = 0.5
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, :-1].float()
    expected = torch.log_softmax(logits / 0.5, -1).gather(-1, ids[:, 1:, None])[..., 0]
    assert model.forward == wrapped
    assert torch.allclose(log_probabilities(), expected, atol=2e-2)  # bfloat16
    assert not torch.allclose(before, expected, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_round_on_a_real_card_takes_every_adjustment_of_the_policy(
    algorithm: str, precision: str, task: TinyTask
) -> None:
    trainer = TrlTrainer(device="cuda", precision=precision)
    recipe = grpo(algorithm=algorithm, steps=6, kl_coef=0.1, entropy_coef=0.01, lora_rank=2, schedule="linear")
    kinds = ("lr_scale", "grad_clip_scale", "kl_scale", "entropy_scale", "temperature_scale")
    adjustments = [(2, Adjustment(kind, 0.5)) for kind in kinds]
    others = [(2, KEEP), (2, Adjustment("lora_freeze")), (3, BACK), (3, RESTART), (4, Adjustment("lora_unfreeze"))]
    made = [adjusted(trainer, task, recipe, *adjustments, *others) for _ in range(2)]
    assert made[0][0].checkpoint == made[1][0].checkpoint
    assert {value.device.type for value in made[0][1].values()} == {"cpu"}


def test_the_temperature_of_what_samples_before_it_trains_is_not_one_of_its_loss(
    trainer: TrlTrainer, task: TinyTask
) -> None:
    recipe = grpo(algorithm="rft", temperature=0.7, min_reward=0.0)
    assert adjusted(trainer, task, recipe, (1, HALF))[0].ended == "finished"


def test_an_entropy_bonus_that_stays_switched_off_fails_the_round(trainer: TrlTrainer, task: TinyTask) -> None:
    session = trainer.begin(task, grpo(), trainer.base(task), 3)
    session.advance(1)
    session.apply(Adjustment("entropy_scale", 2.0))
    session._trainer._entropy_bonus_enabled = False
    session.advance()
    report, _ = session.result()
    assert report.failure is not None and report.failure.kind == "setting_not_used"
    assert "no entropy bonus, asked for entropy_coef 0.001" in report.failure.evidence


@pytest.mark.parametrize("kind", ["lr_scale", "lr_restart"])
def test_a_rate_that_never_reached_the_optimiser_fails_the_round(
    kind: str, trainer: TrlTrainer, task: TinyTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OnPaper:
        def refusal(self, live: LiveRound, adjustment: Adjustment) -> str | None:
            return None

        def apply(self, live: LiveRound, adjustment: Adjustment) -> str | None:
            live.rates.restart(live.step) if kind == "lr_restart" else live.rates.scale(0.5)
            return None

    monkeypatch.setattr(executor, "HANDLERS", MappingProxyType({**executor.HANDLERS, kind: OnPaper()}))
    session = trainer.begin(task, sft(schedule="linear"), trainer.base(task), 3)
    session.advance(2)
    session.apply(_any_of(kind))
    session.advance()
    report, _ = session.result()
    assert report.failure is not None
    assert (report.failure.kind, report.failure.step) == ("setting_not_used", 3)
    asked = {"lr_scale": "0.0025", "lr_restart": "0.01"}[kind]
    assert report.failure.evidence == f"step 3 used learning rate 0.005, asked for {asked}"


# Faults after adjustments (B01) --------------------------------------------------------------------------------------


def test_a_loss_that_is_no_number_is_labelled_after_adjustments_too(
    trainer: TrlTrainer, task: TinyTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = MeteredSFTTrainer.compute_loss, [0]

    def spoilt(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return original(self, *args, **kwargs) * (math.nan if calls[0] == 3 else 1.0)

    monkeypatch.setattr(MeteredSFTTrainer, "compute_loss", spoilt)
    session = trainer.begin(task, sft(steps=5), trainer.base(task), 3)
    session.advance(2)
    for adjustment in (KEEP, HALF, Adjustment("grad_clip_scale", 0.5)):
        session.apply(adjustment)
    session.advance()
    report, checkpoint = session.result()
    assert checkpoint is None and report.failure is not None
    assert (report.failure.cause, report.failure.kind, report.failure.step) == ("hyperparameter", "diverged", 3)
    assert math.isnan(report.curves[2]["loss"])
    assert len(report.adjustments) == 3


def test_a_rate_that_ruins_the_round_is_seen_after_it_was_applied(trainer: TrlTrainer, task: TinyTask) -> None:
    session = trainer.begin(task, sft(steps=12, learning_rate=1.0, schedule="constant"), trainer.base(task), 3)
    session.advance(1)
    session.apply(Adjustment("lr_scale", 1000.0))
    session.advance()
    report, checkpoint = session.result()
    assert checkpoint is None and report.failure is not None
    assert (report.failure.kind, 2 <= report.failure.step <= 5) == ("diverged", True)


# Ids -----------------------------------------------------------------------------------------------------------------


def test_ids_tell_adjusted_weights_apart_and_equal_ones_are_equal(trainer: TrlTrainer, task: TinyTask) -> None:
    recipe = sft(lora_rank=2, schedule="linear")
    freeze, clip = Adjustment("lora_freeze"), Adjustment("grad_clip_scale", 0.01)
    lists: list[list[tuple[int, Adjustment]]] = [
        [],
        [(2, freeze)],
        [(3, freeze)],
        [(2, clip)],
        [(2, clip), (3, freeze)],
        [(2, freeze), (3, clip)],
        [(2, RESTART)],
        [(1, KEEP), (2, BACK)],
        [(2, BACK)],
        [(1, KEEP), (3, BACK)],
        [(2, KEEP), (3, BACK)],
    ]
    made = [ran(trainer, task, recipe, *adjustments) for adjustments in lists]
    assert len({made_id for made_id, _ in made}) == len(made)
    assert not any(equal(left[1], right[1]) for i, left in enumerate(made) for right in made[:i])
    for number in (0, 5, 7):
        made_id, weights = ran(trainer, task, recipe, *lists[number], (3, KEEP))  # keeping weights changes none
        assert made_id == made[number][0] and equal(weights, made[number][1])


def test_what_no_step_has_met_is_no_part_of_the_id_but_a_rollback_is(trainer: TrlTrainer, task: TinyTask) -> None:
    def made(*adjustments: Adjustment) -> Checkpoint:
        session = trainer.begin(task, sft(), trainer.base(task), 3)
        session.advance(2)
        for adjustment in adjustments:
            session.apply(adjustment)
        _, checkpoint = session.result()
        assert checkpoint is not None
        return checkpoint

    plain = made()
    assert made(Adjustment("grad_clip_scale", 0.5), HALF).id == plain.id
    back = made(BACK)
    assert back.id != plain.id
    assert equal(back.weights, trainer.base(task).weights)
