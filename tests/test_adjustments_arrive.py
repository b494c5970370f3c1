"""Every entry of the catalogue arrives: the optimiser, the loss or the sampler uses the new value at the next step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from posttrain_gym.inner_trainers.adjustments import CATALOGUE, CATALOGUE_NAMES, Adjustment, catalogue_index
from posttrain_gym.inner_trainers.base import round_id
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.testing import write_tiny_checkpoint
from posttrain_gym.inner_trainers.trl.adjust_policy import START_ENTROPY, START_KL
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer
from tests.adjusted_rounds import (
    SOURCES,
    FourSources,
    Watch,
    adjusted,
    before_updates,
    completions_per_prompt,
    gradient_norm,
    grpo_kl,
    learning_rate,
    loss_temperature,
    one_of,
    ppo_gamma,
    ppo_kl,
    projection_sums,
    recipe,
    repeated_rows,
    rloo_kl,
    rows_in_loss,
    rows_of,
    sampling_temperature,
    weight_of,
    weight_sums,
)
from tests.trl_fixtures import *  # noqa: F403
from tests.trl_rounds import Weights, equal


@pytest.fixture(scope="module")
def four(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> FourSources:
    return FourSources(folder, write_tiny_checkpoint(tmp_path_factory.mktemp("teacher"), seed=1))


_UNADJUSTED: dict[str, Weights] = {}


def unadjusted(trainer: TrlTrainer, task: FourSources, asked: Recipe) -> Weights:
    """Return the weights of the round that nothing is applied to."""
    if asked.content_hash not in _UNADJUSTED:
        _UNADJUSTED[asked.content_hash] = adjusted(trainer, task, asked)[1]
    return _UNADJUSTED[asked.content_hash]


@dataclass(frozen=True)
class Arrival:
    """What a round's four steps use when an entry of the catalogue is applied after the second; None for any."""

    algorithm: str
    watch: Watch | Callable[[Any], Watch]
    used: tuple[float | None, float | None, float, float]
    changes: dict[str, Any] = field(default_factory=dict)
    patches: bool = False  # whether `watch` needs the fixture `monkeypatch` first


RATES = before_updates(learning_rate)
NORMS = before_updates(gradient_norm)
LINEAR = {"schedule": "linear"}
NEAR = {"kl_coef": 0.1}
TWENTY = {"batch_size": 20}
LORA = {"lora_rank": 2, "learning_rate": 3e-2}


UNKNOWN = math.nan
"""What a watcher says of a step whose loss does not depend on the value."""


def steps(before: float, after: float, first: float | None = None) -> tuple[float, float, float, float]:
    return before if first is None else first, before, after, after


ARRIVALS: dict[str, list[Arrival]] = {
    "lr_half": [
        Arrival("sft", RATES, steps(3e-3, 1.5e-3)),
        Arrival("ppo", RATES, (3e-3, 2.25e-3, 0.75e-3, 0.375e-3), LINEAR),
    ],
    "lr_down": [Arrival("dpo", RATES, steps(3e-3, 2.4e-3)), Arrival("kto", RATES, steps(3e-3, 2.4e-3))],
    "lr_up": [Arrival("grpo", RATES, steps(3e-3, 3.75e-3)), Arrival("midtrain", RATES, steps(3e-3, 3.75e-3))],
    "lr_double": [Arrival("rft", RATES, steps(3e-3, 6e-3)), Arrival("distill", RATES, steps(3e-3, 6e-3))],
    "lr_restart": [
        Arrival("sft", RATES, (3e-3, 2.25e-3, 3e-3, 1.5e-3), LINEAR),
        Arrival("ppo", RATES, (3e-3, 2.25e-3, 3e-3, 1.5e-3), LINEAR),
    ],
    "grad_clip_down": [
        Arrival("sft", NORMS, steps(0.02, 0.01), {"max_grad_norm": 0.02}),
        Arrival("ppo", NORMS, steps(0.02, 0.01), {"max_grad_norm": 0.02}),
    ],
    "grad_clip_up": [Arrival("grpo", NORMS, steps(0.02, 0.04), {"max_grad_norm": 0.02})],
    "batch_down": [
        Arrival("sft", rows_in_loss, steps(8, 6)),
        Arrival("grpo", rows_in_loss, steps(8, 4)),
        Arrival("kto", rows_in_loss, steps(8, 6)),
    ],
    "batch_up": [
        Arrival("sft", rows_in_loss, steps(8, 10)),
        Arrival("dpo", rows_in_loss, steps(16, 20)),  # both sides of each pair
        Arrival("rloo", rows_in_loss, steps(8, 12)),
        Arrival("ppo", rows_in_loss, steps(8, 10)),
    ],
    "generations_down": [Arrival("grpo", completions_per_prompt, steps(4, 2))],
    "generations_up": [Arrival("rloo", completions_per_prompt, steps(4, 8))],
    **{f"mix_toward_{slot + 1}": [Arrival("sft", rows_of(slot), (None, None, 8, 8), TWENTY)] for slot in range(4)},
    **{f"mix_away_{slot + 1}": [Arrival("sft", rows_of(slot), (None, None, 4, 4), TWENTY)] for slot in range(4)},
    "hardest_rows": [Arrival("sft", repeated_rows, steps(0, 4)), Arrival("ppo", repeated_rows, steps(0, 4))],
    "kl_down": [
        Arrival("grpo", grpo_kl, steps(0.1, 0.067, UNKNOWN), NEAR),
        Arrival("dpo", one_of("beta", 0.1, 0.1 * 0.67), steps(0.1, 0.1 * 0.67, UNKNOWN)),
        Arrival("ppo", ppo_kl, steps(0.1, 0.067, UNKNOWN), NEAR, patches=True),
    ],
    "kl_up": [
        Arrival("grpo", grpo_kl, steps(0.1, 0.15, UNKNOWN), NEAR),
        Arrival("grpo", grpo_kl, steps(0.0, START_KL), LORA),
        Arrival("rloo", rloo_kl, steps(0.1, 0.15, UNKNOWN), NEAR),
        Arrival("rloo", rloo_kl, steps(0.0, START_KL), LORA),
        Arrival("ppo", ppo_kl, steps(0.1, 0.15, UNKNOWN), NEAR, patches=True),
        Arrival("ppo", ppo_kl, steps(UNKNOWN, START_KL), LORA, patches=True),
        Arrival("kto", one_of("beta", 0.1, 0.1 * 1.5), steps(0.1, 0.1 * 1.5, UNKNOWN)),
    ],
    "entropy_down": [Arrival("grpo", weight_of("entropy_coef"), steps(0.01, 0.005), {"entropy_coef": 0.01})],
    "entropy_up": [
        Arrival("ppo", weight_of("entropy_coef"), steps(0.01, 0.02), {"entropy_coef": 0.01}),
        Arrival("grpo", weight_of("entropy_coef"), steps(UNKNOWN, START_ENTROPY)),
    ],
    "gamma_down": [Arrival("ppo", ppo_gamma, steps(1.0, 0.99), patches=True)],
    "gamma_up": [
        Arrival("ppo", ppo_gamma, steps(0.9, 0.91), {"gamma": 0.9}, patches=True),
        Arrival("ppo", ppo_gamma, steps(0.995, 1.0), {"gamma": 0.995}, patches=True),
    ],
    "temperature_down": [
        Arrival("grpo", sampling_temperature, steps(1.0, 0.9), patches=True),
        Arrival("grpo", loss_temperature(1.0, 0.9), steps(1.0, 0.9)),
        Arrival("grpo", loss_temperature(1.0, 0.9, reference=True), steps(1.0, 0.9), NEAR),
        Arrival("grpo", loss_temperature(1.0, 0.9), steps(1.0, 0.9), LORA),
        Arrival("distill", sampling_temperature, steps(1.0, 0.9), patches=True),
        Arrival("distill", one_of("temperature", 1.0, 0.9), steps(1.0, 0.9)),
    ],
    "temperature_up": [
        Arrival("rloo", sampling_temperature, steps(1.0, 1.1), patches=True),
        Arrival("rloo", loss_temperature(1.0, 1.1), steps(1.0, 1.1)),
        Arrival("ppo", sampling_temperature, steps(0.5, 0.55), {"temperature": 0.5}, patches=True),
        Arrival("ppo", loss_temperature(0.5, 0.55), steps(0.5, 0.55), {"temperature": 0.5}),
    ],
}


@pytest.mark.parametrize(
    ("name", "arrival"), [pytest.param(n, a, id=f"{n}-{a.algorithm}") for n, each in ARRIVALS.items() for a in each]
)
def test_the_next_step_uses_the_new_value(
    name: str, arrival: Arrival, trainer: TrlTrainer, four: FourSources, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = recipe(arrival.algorithm, **arrival.changes)
    plain = unadjusted(trainer, four, asked)
    adjustment = CATALOGUE[catalogue_index(name)].adjustment(SOURCES)
    assert adjustment is not None
    watch: Any = arrival.watch(monkeypatch) if arrival.patches else arrival.watch
    report, weights, used = adjusted(trainer, four, asked, (2, adjustment), watch=watch)
    expected = [value if asked_for is None else asked_for for value, asked_for in zip(used, arrival.used, strict=True)]
    assert used == pytest.approx(expected, rel=2e-3, nan_ok=True)
    assert report.adjustments == ((2, adjustment),)
    assert not equal(weights, plain)


def test_a_reset_goes_back_to_the_recipes_mix(trainer: TrlTrainer, four: FourSources) -> None:
    toward, reset = Adjustment("mix_toward", 0.2, SOURCES[0]), Adjustment("mix_reset")
    asked = recipe("sft", **TWENTY)
    _, weights, used = adjusted(trainer, four, asked, (1, toward), (2, reset), watch=rows_of(0))
    plain = adjusted(trainer, four, asked, watch=rows_of(0))[2]
    assert used == [plain[0], 8, *plain[2:]] != plain
    assert not equal(weights, adjusted(trainer, four, asked, (1, toward))[1])


def test_every_entry_of_the_catalogue_is_shown_to_arrive() -> None:
    elsewhere = ("none", "snapshot", "log_more", "log_less", "stop", "rollback", "mix_reset", "lora_freeze")
    assert {*ARRIVALS, *elsewhere, "lora_unfreeze"} == {*CATALOGUE_NAMES}
    assert len(ARRIVALS) + len(elsewhere) + 1 == 37


# What leaves the weights alone ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["none", "snapshot", "log_more", "log_less"])
@pytest.mark.parametrize("algorithm", ["sft", "grpo", "ppo"])
def test_what_changes_nothing_leaves_the_round_bit_identical(
    name: str, algorithm: str, trainer: TrlTrainer, four: FourSources
) -> None:
    asked = recipe(algorithm)
    plain = unadjusted(trainer, four, asked)
    before = [(1, Adjustment("log_more"))] if name == "log_less" else []
    report, weights, _ = adjusted(trainer, four, asked, *before, (2, Adjustment(name)))
    assert equal(weights, plain)
    assert report.checkpoint == round_id(four, trainer.base(four), asked, 3, trainer.ignored_settings(algorithm))
    assert report.adjustments == (*before, *([] if name == "none" else [(2, Adjustment(name))]))


def test_stop_ends_the_round_with_the_weights_it_has(trainer: TrlTrainer, four: FourSources) -> None:
    report, weights, _ = adjusted(trainer, four, recipe("sft"), (2, Adjustment("stop")))
    assert (report.ended, report.steps, report.adjustments) == ("stopped", 2, ((2, Adjustment("stop")),))
    session = trainer.begin(four, recipe("sft"), trainer.base(four), 3)
    session.advance(2)
    _, checkpoint = session.result()
    assert checkpoint is not None
    assert equal(weights, checkpoint.weights)


# Weights and adapters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "grpo", "ppo"])
@pytest.mark.parametrize("snapshot", [True, False], ids=["snapshot", "start"])
def test_a_rollback_puts_the_kept_weights_back_before_the_next_step(
    algorithm: str, snapshot: bool, trainer: TrlTrainer, four: FourSources
) -> None:
    """The weights right before the update of step 3 are those after step 1, or those of the start."""
    asked = recipe(algorithm)
    kept = [(1, Adjustment("snapshot"))] if snapshot else []
    report, weights, seen = adjusted(trainer, four, asked, *kept, (2, Adjustment("rollback")), watch=weight_sums)
    assert seen[0] != seen[1]
    assert seen[2] == seen[1 if snapshot else 0]
    assert not equal(weights, unadjusted(trainer, four, asked))
    assert [row["step"] for row in report.curves] == [1, 2, 3, 4]


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "grpo", "ppo"])
def test_frozen_projections_do_not_move_and_move_again(algorithm: str, trainer: TrlTrainer, four: FourSources) -> None:
    """Neither momentum nor weight decay reaches them, nor do they belong to the gradient's norm."""
    changes: dict[str, Any] = {"kl_coef": 0.1} if algorithm in ("grpo", "ppo") else {}
    asked = recipe(algorithm, steps=5, weight_decay=0.1, **LORA, **changes)
    freeze, unfreeze = Adjustment("lora_freeze"), Adjustment("lora_unfreeze")
    _, weights, seen = adjusted(trainer, four, asked, (2, freeze), (3, unfreeze), watch=projection_sums)
    down, up = seen[::2], seen[1::2]  # before each of five updates
    assert down[2] == down[3] and len(set(down)) == 4
    assert len(set(up)) == 5
    assert not equal(weights, unadjusted(trainer, four, asked))
    _, thawed, _ = adjusted(trainer, four, asked, (2, freeze))
    assert not equal(thawed, weights)
