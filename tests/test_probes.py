"""Probes: what the rounds show decides what is suggested, faults are data, and every round is paid for once."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain_gym.envs import search_probes
from posttrain_gym.envs.budget import Budget
from posttrain_gym.envs.decision_space import DEFAULT_PARAMETERS, DecisionSpace, Parameter
from posttrain_gym.envs.journal import Journal
from posttrain_gym.envs.search import JournalMismatchError, Search
from posttrain_gym.inner_trainers.base import Cost, Failure, Limit, RoundReport
from posttrain_gym.inner_trainers.fault_kinds import failure
from posttrain_gym.inner_trainers.probe_rounds import ResidentPeak, memory_within_reach
from posttrain_gym.inner_trainers.probes import batch_size_probe, learning_rate_probe
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.tasks import resolve_task
from posttrain_gym.inner_trainers.tasks.base import InnerTask
from posttrain_gym.inner_trainers.testing import ScriptedTask, ScriptedTrainer, TinyTask
from posttrain_gym.inner_trainers.trl.algorithms import ALGORITHMS
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer
from tests.trl_fixtures import *  # noqa: F403
from tests.trl_rounds import grpo, sft

SCRIPTED = Recipe("sft", {"left": 1.0}, start="base")
ROWS = (1.0, 1.2, 0.9, 1.1)  # what the rows of the second half are worth at the start, in any round
STEP = Cost(trained_tokens=10)

Curve = Mapping[str, Sequence[float]]


def written(curves: Mapping[float, Curve | Failure], asked: list[float] | None = None) -> Callable[..., RoundReport]:
    """Return a runner of eight-step rounds whose curves, or failures in step 2, are looked up by learning rate."""

    def run(recipe: Recipe, limit: Limit | None) -> RoundReport:
        assert (recipe.steps, recipe.schedule, recipe.warmup_steps) == (8, "constant", 0)
        if asked is not None:
            asked.append(recipe.learning_rate)
        found = curves[recipe.learning_rate]
        fault = found if isinstance(found, Failure) else None
        columns = {} if isinstance(found, Failure) else found
        # the first half holds nonsense: it must not count
        rows = [{name: 77.0 for name in columns}] * 4
        rows += [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return RoundReport(
            recipe=recipe,
            start="base",
            seed=0,
            checkpoint=None,
            steps=2 if fault else 8,
            ended="failed" if fault else "finished",
            training_cost=STEP.times(2 if fault else 8),
            failure=fault,
            curves=tuple(rows),
        )

    return run


def offset(by: float, spread: float = 0.01) -> list[float]:
    return [row + by + sign * spread for row, sign in zip(ROWS, (1, -1, 1, -1), strict=True)]


def probed(curves: Mapping[float, Curve | Failure], asked: list[float] | None = None, **settings: Any) -> Any:
    task, trainer = ScriptedTask(), ScriptedTrainer()
    values = {"low": 1e-4, "high": 1e-1, "points": 4, "steps_per_point": 8, "run": written(curves, asked), **settings}
    return learning_rate_probe(trainer, task, SCRIPTED, trainer.base(task), 0, **values)


# What is suggested ----------------------------------------------------------------------------------------------------


def test_the_range_reaches_from_the_first_fall_to_the_last_rate_as_good_as_the_best() -> None:
    found = probed(
        {
            1e-7: {"loss": ROWS},
            1e-4: {"loss": offset(-0.01)},
            1e-3: {"loss": offset(-0.3)},
            1e-2: {"loss": offset(-0.5)},
            1e-1: {"loss": offset(+2.0)},
        }
    )
    assert found.signal == "loss"
    assert found.control == pytest.approx(1.05)
    assert [point.learning_rate for point in found.points] == [1e-4, 1e-3, 1e-2, 1e-1]
    assert [point.verdict for point in found.points] == ["flat", "learns", "learns", "hurts"]
    assert [point.gain for point in found.points] == pytest.approx([0.01, 0.3, 0.5, -2.0])
    # four differences of ±0.01 about their mean: standard deviation 0.02 / sqrt(3), standard error half of that
    assert [point.error for point in found.points] == pytest.approx([0.01 / math.sqrt(3)] * 4)
    assert found.suggested_range == (1e-3, 1e-2)
    assert found.suggested_rate == 1e-2
    assert found.hurts_from == 1e-1
    assert (found.faults, found.notes) == ((), ())
    assert found.cost == STEP.times(5 * 8)
    assert json.loads(json.dumps(found.to_dict()))["suggested_range"] == [1e-3, 1e-2]


def test_of_equally_good_rates_the_lowest_is_suggested_and_all_are_in_the_range() -> None:
    found = probed(
        {
            1e-7: {"loss": ROWS},
            1e-4: {"loss": offset(-0.02)},  # certain, but less than a tenth of the best gain
            1e-3: {"loss": offset(-0.5)},
            1e-2: {"loss": offset(-0.505, spread=-0.01)},
            1e-1: {"loss": offset(-0.45, spread=0.0)},  # still much better than the start, yet worse than the best
        }
    )
    assert [point.verdict for point in found.points] == ["learns"] * 4
    assert found.suggested_range == (1e-3, 1e-2)
    assert found.suggested_rate == 1e-3
    assert found.hurts_from is None


def test_a_rate_that_diverges_ends_the_probe_and_bounds_the_range() -> None:
    asked: list[float] = []
    fault = failure("diverged", 2, "the loss was inf at step 2")
    found = probed({1e-7: {"loss": ROWS}, 1e-4: {"loss": offset(-0.3)}, 1e-3: fault}, asked)
    assert asked == [1e-7, 1e-4, 1e-3]  # neither 1e-2 nor 1e-1 was paid for
    assert [point.verdict for point in found.points] == ["learns", "failed"]
    assert found.suggested_range == (1e-4, 1e-4)
    assert found.hurts_from == 1e-3
    assert found.faults == (fault,)
    assert found.cost == STEP.times(8 + 8 + 2)
    assert "at 0.001 the round met diverged in step 2, so higher rates were not tried" in found.notes


def test_a_rescued_fault_is_a_fault_of_the_rate_that_was_asked_for() -> None:
    fault = failure("diverged", 5, "exploded")
    plain = written({1e-7: {"loss": ROWS}, 1e-4: {"loss": offset(-0.3)}, 1e-3: {"loss": offset(-0.9)}})

    def run(recipe: Recipe, limit: Limit | None) -> RoundReport:
        report = plain(recipe, limit)
        return replace(report, rescued=(fault,)) if recipe.learning_rate == 1e-3 else report

    found = probed({}, run=run)
    assert [point.verdict for point in found.points] == ["learns", "failed"]
    assert found.faults == (fault,)
    assert found.suggested_rate == 1e-4


def test_a_fault_that_is_none_of_the_rates_ends_the_probe_without_blaming_the_rate() -> None:
    found = probed({1e-7: {"loss": ROWS}, 1e-4: {"loss": offset(-0.3)}, 1e-3: failure("oom", 2, "out of memory")})
    assert [point.verdict for point in found.points] == ["learns", "flat"]
    assert found.hurts_from is None
    assert found.suggested_range == (1e-4, 1e-4)
    assert any("met oom" in note for note in found.notes)


def test_with_a_reward_the_loss_says_nothing() -> None:
    worse = {"loss": offset(+0.5)}
    found = probed(
        {
            1e-7: {"loss": ROWS, "reward": [0.4, 0.5, 0.3, 0.6]},
            1e-4: {**worse, "reward": [0.6, 0.7, 0.5, 0.8]},
            1e-3: {**worse, "reward": [0.7, 0.8, 0.6, 0.9]},
            1e-2: {"loss": offset(-0.9), "reward": [0.0, 0.0, 0.0, 0.0]},
            1e-1: {"loss": offset(-0.9), "reward": [0.0, 0.0, 0.0, 0.0]},
        }
    )
    assert found.signal == "reward"
    assert found.control == pytest.approx(0.45)
    assert [point.verdict for point in found.points] == ["learns", "learns", "hurts", "hurts"]
    assert [point.gain for point in found.points] == pytest.approx([0.2, 0.3, -0.45, -0.45])
    assert found.suggested_range == (1e-4, 1e-3)
    assert found.suggested_rate == 1e-3
    assert found.hurts_from == 1e-2


def test_a_preference_loss_that_falls_while_the_better_answers_die_out_is_not_believed() -> None:
    chosen = (-1.0, -1.1, -0.9, -1.0)

    def curve(loss: float, rise: float) -> dict[str, Sequence[float]]:
        spread = (0.01, -0.01, 0.01, -0.01)
        rows = [value + rise + noise for value, noise in zip(chosen, spread, strict=True)]
        return {"loss": offset(loss), "chosen_log_probability": rows}

    found = probed(
        {
            1e-7: {"loss": ROWS, "chosen_log_probability": chosen},
            1e-4: curve(-0.05, +0.1),
            1e-3: curve(-0.1, +0.3),
            1e-2: curve(-0.2, -0.05),  # less likely by a twentieth: worse than the best, no ruin
            1e-1: curve(-0.6, -2.0),
        }
    )
    assert [point.verdict for point in found.points] == ["learns", "learns", "learns", "hurts"]
    assert found.suggested_range == (1e-4, 1e-3)
    assert found.suggested_rate == 1e-3
    assert found.hurts_from == 1e-1


# What cannot be told --------------------------------------------------------------------------------------------------


def test_a_flat_curve_is_said_to_be_flat() -> None:
    task, trainer = ScriptedTask(), ScriptedTrainer()  # its losses are the same at every rate
    found = learning_rate_probe(trainer, task, SCRIPTED, trainer.base(task), 0, points=3, steps_per_point=6)
    assert [point.verdict for point in found.points] == ["flat"] * 3
    assert [point.gain for point in found.points] == [0.0] * 3
    assert (found.suggested_range, found.suggested_rate, found.hurts_from) == (None, None, None)
    assert found.notes[0].startswith("cannot tell: at no rate was the loss better than the control's beyond noise")
    assert trainer.launched == 4


def test_a_flat_probe_still_tells_which_rates_hurt() -> None:
    flat = {"loss": offset(0.0)}
    found = probed({1e-7: {"loss": ROWS}, 1e-4: flat, 1e-3: flat, 1e-2: flat, 1e-1: {"loss": offset(1.0)}})
    assert found.suggested_range is None
    assert found.hurts_from == 1e-1


@pytest.mark.parametrize(
    ("control", "said"),
    [
        (
            failure("no_signal", 2, "equal rewards"),
            "cannot tell: already the control, which learns nothing, met no_sig",
        ),
        ({"loss": [math.nan] * 4}, "cannot tell: the control's curve has no finite loss"),
    ],
)
def test_without_a_control_nothing_can_be_told(control: Any, said: str) -> None:
    learning = {"loss": offset(-0.5)}
    found = probed({1e-7: control, 1e-4: learning, 1e-3: learning, 1e-2: learning, 1e-1: learning})
    assert found.suggested_range is None
    assert found.notes[0].startswith(said)


def test_open_ends_are_said() -> None:
    curves: dict[float, Curve | Failure] = {rate: {"loss": offset(-0.5)} for rate in (1e-4, 1e-3, 1e-2, 1e-1)}
    found = probed({1e-7: {"loss": ROWS}, **curves})
    assert found.suggested_range == (1e-4, 1e-1)
    assert found.notes == (
        "the lowest rate, 0.0001, learns already: lower ones may work too",
        "no rate up to 0.1 hurts: higher ones may work too",
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"low": 0.0}, r"low: expected a number in \(0"),
        ({"low": 1e-2, "high": 1e-3}, r"high: expected a number in \(0.01"),
        ({"points": 1}, r"points: expected an integer in \[2, 100\], got 1"),
        ({"steps_per_point": 3}, r"steps_per_point: expected an integer in \[4, 100000\], got 3"),
    ],
)
def test_settings_outside_their_range_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        probed({}, **settings)


def test_a_recipe_that_cannot_run_is_refused_before_a_round() -> None:
    task, trainer = ScriptedTask(), ScriptedTrainer()
    with pytest.raises(ValueError, match="Did you mean 'left'"):
        learning_rate_probe(trainer, task, Recipe("sft", {"lft": 1.0}), trainer.base(task), 0)
    with pytest.raises(ValueError, match="Did you mean 'left'"):
        batch_size_probe(trainer, task, Recipe("sft", {"lft": 1.0}), trainer.base(task), 0)
    assert trainer.launched == 0


# What it costs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("amount", "rounds"), [(0, 0), (1279, 0), (1280, 1), (3839, 2), (3840, 3), (99999, 4)])
def test_no_round_begins_that_the_limit_does_not_pay_whole(amount: float, rounds: int) -> None:
    task, trainer = ScriptedTask(), ScriptedTrainer()
    limit = Limit("train_tokens", amount)  # a round costs 4 steps x 32 sequences x 10 tokens
    found = learning_rate_probe(
        trainer, task, SCRIPTED, trainer.base(task), 0, points=3, steps_per_point=4, limit=limit
    )
    assert trainer.launched == rounds
    assert found.cost.trained_tokens == rounds * 1280
    assert any("the budget does not pay the round" in note for note in found.notes) == (rounds < 4)


def test_where_no_step_has_a_price_ahead_the_dearest_so_far_stands_for_it() -> None:
    asked: list[int] = []

    def run(recipe: Recipe, limit: Limit | None) -> RoundReport:
        assert limit is not None
        asked.append(recipe.batch_size)
        return stepped(recipe, peak=100, seconds=float(recipe.batch_size))

    trainer, task = ScriptedTrainer(), ScriptedTask()
    limit = Limit("device_seconds", 20.0)
    found = batch_size_probe(
        trainer, task, SCRIPTED, trainer.base(task), 0, candidates=[2, 4, 8, 16], limit=limit, run=run
    )
    assert asked == [2, 4, 8]  # 14 seconds are spent, the dearest step took 8, 6 are left
    assert found.cost.device_seconds == 14.0
    assert found.notes[0] == "the budget does not pay a step of batch 16, so the search ended there"


# Batch sizes ----------------------------------------------------------------------------------------------------------


class OnCuda(ScriptedTrainer):
    """Says that it trains on a CUDA device."""

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        return {"device": "cuda"}


def stepped(recipe: Recipe, peak: int | None, seconds: float = 0.5, fault: Failure | None = None) -> RoundReport:
    return RoundReport(
        recipe=recipe,
        start="base",
        seed=0,
        checkpoint=None,
        steps=0 if fault else 1,
        ended="failed" if fault else "finished",
        training_cost=Cost(trained_tokens=recipe.batch_size, device_seconds=seconds),
        failure=fault,
        peak_memory_bytes=peak,
    )


def largest_batch(trainer: ScriptedTrainer, run: Any, **settings: Any) -> Any:
    task = ScriptedTask()
    return batch_size_probe(trainer, task, SCRIPTED, trainer.base(task), 0, run=run, **settings)


@pytest.mark.parametrize("fits", [0, 1, 2, 3, 31, 32, 33, 57, 63, 64])
def test_doubling_then_bisection_finds_the_largest_that_does_not_run_out_of_memory(fits: int) -> None:
    def run(recipe: Recipe, limit: Limit | None) -> RoundReport:
        assert recipe.steps == 1
        too_large = recipe.batch_size > fits
        return stepped(recipe, 7 * recipe.batch_size, fault=failure("oom", 1, "full") if too_large else None)

    found = largest_batch(OnCuda(), run, candidates=range(1, 65))
    assert found.largest == (fits or None)
    assert found.limit_found == (fits < 64)
    assert len(found.points) <= 13
    assert [point.batch_size for point in found.points if not point.fits and point.failure is None] == []
    assert {fault.kind for fault in found.faults} == ({"oom"} if fits < 64 else set())
    assert found.cost.trained_tokens == sum(point.batch_size for point in found.points)
    assert found.memory_bytes is None  # the device itself says
    if fits > 1:
        assert 0.5 * fits <= found.proposed <= 0.8 * fits
    else:
        assert found.proposed == (fits or None)


def test_the_order_of_the_sizes_and_their_table() -> None:
    def run(recipe: Recipe, limit: Limit | None) -> RoundReport:
        fault = failure("oom", 1, "full") if recipe.batch_size > 10 else None
        return stepped(recipe, 100 + recipe.batch_size, recipe.batch_size / 4, fault)

    found = largest_batch(OnCuda(), run, candidates=range(1, 65))
    assert [(p.batch_size, p.fits, p.peak_memory_bytes, p.seconds) for p in found.points] == [
        (1, True, 101, 0.25),
        (2, True, 102, 0.5),
        (4, True, 104, 1.0),
        (8, True, 108, 2.0),
        (16, False, 116, 4.0),
        (12, False, 112, 3.0),
        (10, True, 110, 2.5),
        (11, False, 111, 2.75),
    ]
    assert (found.largest, found.proposed) == (10, 8)
    assert json.loads(json.dumps(found.to_dict()))["points"][4]["failure"]["kind"] == "oom"


def test_on_the_cpu_a_size_is_foreseen_instead_of_tried() -> None:
    tried: list[int] = []

    def run(recipe: Recipe, limit: Limit | None) -> RoundReport:
        tried.append(recipe.batch_size)
        return stepped(recipe, 1000 + 10 * recipe.batch_size)

    found = largest_batch(ScriptedTrainer(), run, candidates=range(1, 257), memory_bytes=1000 + 10 * 100)
    assert found.largest == 100
    assert max(tried) == 100  # the line through the peaks is right about every other size
    assert next((p.batch_size, p.peak_memory_bytes) for p in found.points if p.foreseen) == (128, 2280)
    assert all(p.failure.kind == "memory_limit" and p.cost == Cost() for p in found.points if p.foreseen)
    assert (found.proposed, found.limit_found) == (80, True)


def test_a_peak_above_the_limit_does_not_fit_even_where_the_step_was_done() -> None:
    found = largest_batch(ScriptedTrainer(), lambda recipe, limit: stepped(recipe, 501), memory_bytes=500)
    assert (found.largest, found.proposed) == (None, None)
    assert found.notes == ("no candidate fits",)
    assert found.faults[0] == failure("memory_limit", 1, "501 bytes of memory were in use, above 500")


def test_a_step_that_learned_nothing_fits_and_another_fault_is_named() -> None:
    def run(recipe: Recipe, limit: Limit | None) -> RoundReport:
        report = stepped(recipe, 100)
        if recipe.batch_size == 8:
            return stepped(recipe, 100, fault=failure("rows_refused", 0, "too few rows"))
        return replace(report, failure=failure("no_signal", 1, "equal rewards"), ended="failed")

    found = largest_batch(ScriptedTrainer(), run, candidates=[2, 4, 8], memory_bytes=10**9)
    assert (found.largest, found.limit_found) == (4, True)
    assert "batch 8 failed for another reason than memory: rows_refused (too few rows)" in found.notes


def test_an_exception_in_a_step_is_data() -> None:
    trainer, task = (
        ScriptedTrainer(faults={2: MemoryError("no"), 3: RuntimeError("CUDA out of memory")}),
        ScriptedTask(),
    )
    found = batch_size_probe(trainer, task, SCRIPTED, trainer.base(task), 0, candidates=[2, 4, 6, 8])
    assert [(p.batch_size, p.fits) for p in found.points] == [(2, True), (4, True), (8, False), (6, False)]
    assert [fault.kind for fault in found.faults] == ["oom", "oom"]
    assert (found.largest, found.proposed) == (4, 2)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"candidates": []}, "candidates: expected at least one"),
        ({"memory_bytes": 0}, "memory_bytes: expected an integer in"),
        ({"candidates": [0]}, "batch_size: expected an integer in"),
    ],
)
def test_bad_settings_of_a_batch_probe_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        largest_batch(ScriptedTrainer(), None, **settings)


def test_the_peak_of_a_stretch_is_seen_after_its_memory_has_gone() -> None:
    if memory_within_reach() is None or ResidentPeak().bytes() is None:
        pytest.skip("needs Linux")
    peak = ResidentPeak()
    before = peak.bytes()
    held = np.ones(2**23)  # 64 MiB
    del held
    after = peak.bytes()
    assert before is not None and after is not None
    assert 60 * 2**20 < after - before < 80 * 2**20
    assert ResidentPeak().bytes() < after - 50 * 2**20  # type: ignore[operator]


# Real rounds ----------------------------------------------------------------------------------------------------------


def by_hand(trainer: TrlTrainer, task: TinyTask, recipe: Recipe) -> RoundReport:
    session = trainer.begin(task, recipe, trainer.base(task), 3)
    session.advance()
    return session.result()[0]


def test_a_probe_of_sft_is_the_rounds_it_says(trainer: TrlTrainer, task: TinyTask) -> None:
    found = learning_rate_probe(
        trainer, task, sft(), trainer.base(task), 3, low=1e-2, high=1e4, points=3, steps_per_point=4
    )
    rates = [1e-2, 10.0]
    reports = [by_hand(trainer, task, sft(learning_rate=rate)) for rate in rates]
    assert [point.learning_rate for point in found.points] == rates
    assert found.points[0].signal == sum(row["loss"] for row in reports[0].curves[2:]) / 2
    assert [point.cost.trained_tokens for point in found.points] == [r.training_cost.trained_tokens for r in reports]
    assert found.points[1].verdict == "failed"
    assert found.faults == (reports[1].failure,)
    assert found.faults[0].kind == "diverged"
    assert found.hurts_from == 10.0


def test_a_probe_of_grpo_compares_rewards(trainer: TrlTrainer, task: TinyTask) -> None:
    found = learning_rate_probe(
        trainer, task, grpo(), trainer.base(task), 3, low=3e-3, high=6e-3, points=2, steps_per_point=4
    )
    report = by_hand(trainer, task, grpo(learning_rate=3e-3))
    assert found.signal == "reward"
    assert found.points[0].signal == sum(row["reward"] for row in report.curves[2:]) / 2
    assert found.cost.generated_tokens > 0


def test_real_steps_have_a_peak_and_take_time(trainer: TrlTrainer, task: TinyTask) -> None:
    recipe = grpo(num_generations=4)
    found = batch_size_probe(trainer, task, recipe, trainer.base(task), 3, candidates=range(1, 17))
    assert [point.batch_size for point in found.points] == [4, 8, 16]  # only what holds whole groups
    assert all(point.fits and point.seconds > 0 for point in found.points)
    assert found.memory_bytes is None or found.points[0].peak_memory_bytes > 2**26  # type: ignore[operator]
    assert (found.largest, found.proposed, found.limit_found) == (16, 12, False)
    assert found.cost.trained_tokens > 0


@pytest.fixture(scope="module")
def letters() -> InnerTask:
    """Instance 1: it has a teacher, so every algorithm can be tried."""
    return resolve_task("letters").instance(1)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_can_be_probed(algorithm: str, trainer: TrlTrainer, letters: InnerTask) -> None:
    source = trainer.usable_sources(letters, algorithm)[-1]
    recipe = Recipe(algorithm, {source: 1.0}, start="base", batch_size=8, num_generations=4)
    found = learning_rate_probe(
        trainer, letters, recipe, trainer.base(letters), 0, low=1e-3, high=1e-1, points=2, steps_per_point=6
    )
    assert found.signal == ("reward" if algorithm in ("grpo", "ppo", "rloo") else "loss")
    assert found.control is not None
    assert found.points[-1].verdict != "learns"  # no algorithm gains from a rate of 0.1
    assert found.suggested_range in (None, (1e-3, 1e-3))
    assert (found.cost.generated_tokens > 0) == ALGORITHMS[algorithm].sampled


def test_on_letters_the_range_works_and_what_is_outside_hurts(trainer: TrlTrainer, letters: InnerTask) -> None:
    task = letters
    base = trainer.base(task)
    recipe = Recipe("sft", {"web": 1.0}, start="base")
    found = learning_rate_probe(trainer, task, recipe, base, 0, low=3e-5, high=3e-2, points=7, steps_per_point=10)
    assert found.suggested_range is not None and found.suggested_rate is not None and found.hurts_from is not None
    assert found.suggested_range[0] <= 3e-4 <= found.suggested_range[1] < 3e-3

    def score(rate: float) -> float:
        session = trainer.begin(task, replace(recipe, learning_rate=rate, steps=40), base, 1)
        session.advance()
        _, checkpoint = session.result()
        assert checkpoint is not None
        return trainer.evaluate(task, checkpoint, "validation")[0].score

    before = trainer.evaluate(task, base, "validation")[0].score
    assert score(found.suggested_rate) > before + 0.05
    assert score(found.hurts_from) < before - 0.05


@pytest.mark.gpu
def test_on_a_card_running_out_of_memory_is_data_and_gives_the_memory_back(task: TinyTask) -> None:
    import torch

    trainer = TrlTrainer(device="cuda:0")
    base = trainer.base(task)
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 64 * 2**20) / total)
    try:
        candidates = [2**n for n in range(3, 15)]
        found = batch_size_probe(trainer, task, sft(), base, 3, candidates=candidates)
        assert found.limit_found
        assert {fault.kind for fault in found.faults} == {"oom"}
        assert found.proposed is not None and found.proposed <= 0.8 * found.largest  # type: ignore[operator]
        assert torch.cuda.memory_allocated() <= held + 2**20
        again = by_hand(trainer, task, sft(batch_size=found.proposed))
        assert again.failure is None
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


# Searches -------------------------------------------------------------------------------------------------------------


def searching(folder: Path | None, trainer: ScriptedTrainer | None = None, limit: float = 1e6) -> Search:
    task = ScriptedTask()
    chosen = ScriptedTrainer() if trainer is None else trainer
    space = DecisionSpace(("sft",), ("left", "right"), {"sft": ("left", "right")})
    journal = None if folder is None else Journal(folder)
    return Search(task, chosen, space, Budget(limit), 5, journal=journal)


FEW = {"points": 3, "steps_per_point": 4}  # 4 rounds of 1280 tokens


def test_a_search_charges_its_probes() -> None:
    search = searching(None)
    spent = search.ledger.spent
    found = search.probe_learning_rate(SCRIPTED, **FEW)
    assert found.cost.trained_tokens == 4 * 1280
    assert search.ledger.spent == spent + 4 * 1280
    assert search.ledger.entries[1:] == [("learning rate probe", 1280.0)] * 4
    batches = search.probe_batch_size(SCRIPTED, candidates=[2, 4])
    assert search.ledger.entries[5:] == [("batch size probe", 20.0), ("batch size probe", 40.0)]
    assert search.probes == [found, batches]
    assert search.rounds == 0
    assert search.checkpoints["best"].id == "base"


def test_a_search_keeps_back_the_next_evaluation_and_stops_before_it_overspends() -> None:
    search = searching(None, limit=100 + 100 + 2 * 1280 + 1279)  # the base's evaluation and the next cost 100 each
    found = search.probe_learning_rate(SCRIPTED, **FEW)
    assert search.ledger.spent == 100 + 2 * 1280
    assert len(found.points) == 1
    assert any("the budget does not pay" in note for note in found.notes)


def test_a_probe_starts_from_the_checkpoint_that_the_recipe_names() -> None:
    search = searching(None)
    search.run(search.space.recipe("sft", start="base", mix={"left": 1.0}))
    began: list[str] = []
    original = search.trainer.begin

    def begin(task: Any, recipe: Recipe, start: Any, seed: int, limit: Limit | None = None) -> Any:
        began.append(start.id)
        assert start.weights is not None
        return original(task, recipe, start, seed, limit)

    search.trainer.begin = begin  # type: ignore[method-assign]
    search.probe_learning_rate(replace(SCRIPTED, start="latest"), **FEW)
    assert began == [search.checkpoints["latest"].id] * 4
    assert began[0] != "base"


def test_a_restarted_search_pays_for_no_probe_twice(tmp_path: Path) -> None:
    first = searching(tmp_path)
    rate = first.probe_learning_rate(SCRIPTED, **FEW)
    batch = first.probe_batch_size(SCRIPTED, candidates=[2, 4])
    outcome = first.run(first.space.recipe("sft", start="base"))
    trainer = ScriptedTrainer()
    again = searching(tmp_path, trainer)
    assert again.probe_learning_rate(SCRIPTED, **FEW) == rate
    assert again.probe_batch_size(SCRIPTED, candidates=[2, 4]) == batch
    assert again.run(again.space.recipe("sft", start="base")).report == outcome.report
    assert trainer.launched == 0
    assert again.ledger.entries == first.ledger.entries
    assert len(Journal(tmp_path).reports()) == 1  # a probe's rounds are none of the search's


def test_a_probe_that_was_killed_goes_on_after_its_last_whole_round(tmp_path: Path) -> None:
    first = searching(tmp_path)
    whole = first.probe_learning_rate(SCRIPTED, **FEW)
    lines = (tmp_path / "rounds-0.jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + 4
    folder = tmp_path / "killed"
    folder.mkdir()
    (folder / "rounds-0.jsonl").write_bytes(b"".join(lines[:3]) + lines[3][:50])
    trainer = ScriptedTrainer()
    again = searching(folder, trainer)
    assert again.probe_learning_rate(SCRIPTED, **FEW) == whole
    assert trainer.launched == 2
    assert again.ledger.entries == first.ledger.entries


def test_a_journal_of_another_probe_is_not_believed(tmp_path: Path) -> None:
    searching(tmp_path).probe_learning_rate(SCRIPTED, **FEW)
    with pytest.raises(JournalMismatchError, match=r"entry 0.probe0.0"):
        searching(tmp_path).probe_learning_rate(SCRIPTED, points=3, steps_per_point=5)
    with pytest.raises(JournalMismatchError, match=r"entry 0.probe0.0"):
        searching(tmp_path).probe_batch_size(SCRIPTED, candidates=[2, 4])


def test_a_restarted_batch_probe_keeps_to_the_memory_there_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_probes, "memory_to_hold_to", lambda trainer: 1)
    first = searching(tmp_path).probe_batch_size(SCRIPTED, candidates=[2, 4])
    assert (first.memory_bytes, first.largest) == (1, None)
    monkeypatch.setattr(search_probes, "memory_to_hold_to", lambda trainer: 2**50)
    assert searching(tmp_path).probe_batch_size(SCRIPTED, candidates=[2, 4]) == first
    assert searching(None).probe_batch_size(SCRIPTED, candidates=[2, 4]).largest == 4


def test_a_search_that_has_ended_probes_no_more() -> None:
    search = searching(None)
    search.stopped = True
    with pytest.raises(ValueError, match=r"the search has ended \(stop\)"):
        search.probe_learning_rate(SCRIPTED, **FEW)
    assert search.probes == []


# Narrowing ------------------------------------------------------------------------------------------------------------


def test_a_knob_narrows_to_what_a_probe_suggests() -> None:
    rate = DEFAULT_PARAMETERS["learning_rate"].narrowed(1e-4, 1.0)
    assert (rate.low, rate.high, rate.scale) == (1e-4, 1e-2, "log")
    assert rate.decode(-1.0) == 1e-4
    assert DEFAULT_PARAMETERS["learning_rate"].narrowed(3e-4, 3e-4).choices == (3e-4,)
    assert DEFAULT_PARAMETERS["batch_size"].narrowed(1, 40).choices == (16, 32)
    assert Parameter(10, 60, scale="log", integer=True).narrowed(11.5, 20.5).values() == range(12, 21)
    space = DecisionSpace(("sft",), ("left",), {"sft": ("left",)})
    narrow = replace(space, parameters={**space.parameters, "learning_rate": rate})
    assert narrow.recipe("sft").learning_rate == 1e-3


@pytest.mark.parametrize(("name", "low", "high"), [("learning_rate", 0.1, 1.0), ("batch_size", 1, 8)])
def test_a_range_without_a_value_in_common_is_refused(name: str, low: float, high: float) -> None:
    with pytest.raises(ValueError, match=r"none of the choices|no value in common"):
        DEFAULT_PARAMETERS[name].narrowed(low, high)


def test_a_loss_that_falls_when_answers_die_out_is_not_probed() -> None:
    task = ScriptedTask()
    trainer = ScriptedTrainer()
    recipe = Recipe("sft", {"left": 1.0}, loss="dft")
    with pytest.raises(ValueError, match=r"^loss: a rate cannot be judged by the loss 'dft'"):
        learning_rate_probe(trainer, task, recipe, trainer.base(task), 0)
