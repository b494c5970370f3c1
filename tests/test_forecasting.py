"""The forecasting example: no window sees its future, weights and rules reach the loss, the table can be made again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from posttrain_gym.experiments import make_forecasting
from posttrain_gym.experiments.examples.forecasting import (
    BLOCK,
    TASKS,
    Forecasting,
    ForecastingFamily,
    Network,
    forecasts,
    skills,
    windows_of,
)
from posttrain_gym.experiments.examples.market import HORIZON, SPLITS, STEPS, WINDOW, log_prices, windows
from posttrain_gym.inner_trainers.adjustments import Adjustment
from posttrain_gym.inner_trainers.conformance import TrainerConformance
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.recipe_file import load_recipe
from posttrain_gym.meta_policies.controllers.rule_file import load_rules
from posttrain_gym.meta_policies.controllers.rules import RulesController

RECIPE = Recipe("forecast", dict.fromkeys(TASKS, 1 / 3), learning_rate=1e-3, batch_size=128, steps=54)


def test_a_series_follows_from_its_seed() -> None:
    assert log_prices(3).tolist() == log_prices(3).tolist()
    assert log_prices(3).tolist() != log_prices(4).tolist()
    moves = np.diff(log_prices(3))
    assert len(moves) == STEPS
    assert 0.005 < moves.std() < 0.03
    assert (np.abs(moves) > 4 * moves.std()).sum() > 3  # jumps and turbulence: fatter tails than a normal


def test_targets_lie_after_their_window_and_splits_share_no_step() -> None:
    prices = log_prices(5)
    data = windows(5, "validation")
    first = int(SPLITS["validation"][0] * STEPS)
    for row in (0, 17, len(data) - 1):
        end = first + WINDOW + row
        past = prices[end - WINDOW : end + 1]
        assert data.level[row] == pytest.approx((prices[end + 1] - past.mean()) / (past.std() + 1e-6), rel=1e-4)
        assert bool(data.direction[row]) == (prices[end + HORIZON] > prices[end])
        assert data.last[row] == pytest.approx((prices[end] - past.mean()) / (past.std() + 1e-6), rel=1e-4, abs=1e-5)
        ahead = np.sqrt((np.diff(prices[end : end + HORIZON + 1]) ** 2).mean())
        assert data.volatility[row] == pytest.approx(np.log((ahead + 1e-6) / (np.diff(past).std() + 1e-6)), rel=1e-3)
    last = {name: int(SPLITS[name][1] * STEPS) for name in SPLITS}
    assert last["train"] < int(SPLITS["validation"][0] * STEPS)
    assert last["validation"] < int(SPLITS["test"][0] * STEPS)


def test_features_do_not_move_when_the_future_does(monkeypatch: pytest.MonkeyPatch) -> None:
    import posttrain_gym.experiments.examples.market as market

    before = windows(6, "test")
    changed = log_prices(6)
    last_end = STEPS - HORIZON - 1
    changed[last_end + 1 :] += 1.0
    monkeypatch.setattr(market, "log_prices", lambda seed: changed)
    after = windows(6, "test")
    assert torch.equal(before.features, after.features)
    assert before.level[-1] != after.level[-1]


def run(recipe: Recipe, *adjustments: tuple[int, Adjustment]) -> Any:
    task = Forecasting(2)
    session = task.trainer().begin(task, recipe, task.trainer().base(task), 0)
    for step, adjustment in adjustments:
        session.advance(step - session.step)
        session.apply(adjustment)
    session.advance()
    return session.result()


def test_a_round_learns_and_repeats_bit_for_bit() -> None:
    report, checkpoint = run(RECIPE)
    again = run(RECIPE)[1]
    assert report.ended == "finished"
    assert all(torch.equal(checkpoint.weights[name], again.weights[name]) for name in checkpoint.weights)
    task = Forecasting(2)
    before, after = (task.trainer().evaluate(task, each, "test")[0] for each in (task.trainer().base(task), checkpoint))
    assert after.score > before.score + 3 * before.standard_error
    assert report.curves[-1]["loss"] < 0.8 * report.curves[0]["loss"]
    assert -1 <= report.curves[0]["grad_cosine"] <= 1


def test_the_mix_is_the_weights_of_the_losses() -> None:
    report, _ = run(Recipe("forecast", {"level": 1.0}, learning_rate=1e-3, batch_size=128, steps=30))
    assert report.curves[0]["loss"] == pytest.approx(3 * report.curves[0]["loss/level"], rel=1e-5)
    mixed, _ = run(RECIPE)
    first = mixed.curves[0]
    assert first["loss"] == pytest.approx(sum(first[f"loss/{name}"] for name in TASKS), rel=1e-5)
    assert report.curves[-1]["loss/direction"] > mixed.curves[-1]["loss/direction"] - 0.05


def test_adjustments_move_weights_and_rate() -> None:
    report, _ = run(RECIPE, (27, Adjustment("mix_toward", 0.5, "volatility")), (27, Adjustment("lr_scale", 0.5)))
    row = report.curves[27]
    assert row["learning_rate"] == 5e-4
    weights = {"direction": 0.5, "level": 0.5, "volatility": 2.0}
    assert row["loss"] == pytest.approx(sum(weights[name] * row[f"loss/{name}"] for name in TASKS), rel=1e-5)


def test_scores_are_means_of_blocks() -> None:
    task = Forecasting(2)
    weights = task.trainer().base(task).weights
    items = [item for item in task.built.benchmark.test if item.dimension == "direction"][:2]
    data = windows_of(2, "test")
    right = (forecasts(weights, data)["direction"] > 0) == (data.direction.numpy() > 0.5)
    scores = task.trainer().score(task, weights, items)
    assert scores[:, 0].tolist() == pytest.approx([right[:BLOCK].mean(), right[BLOCK : 2 * BLOCK].mean()])
    level = skills(weights, data)["level"]
    assert level[0] == pytest.approx(1 / (1 + abs(forecasts(weights, data)["level"][0] - float(data.level[0]))))


def test_crashes_are_counted() -> None:
    epoch = make_forecasting.EPOCH
    steady = [1.0] * epoch * 4
    assert make_forecasting.crashes(steady) == 0
    assert make_forecasting.crashes([*steady[:epoch], *[1.6] * epoch, *[1.4] * epoch, *[9.0] * epoch]) == 50
    assert make_forecasting.crashes([*steady[:epoch], *[float("nan")] * epoch]) == 50


class TestForecastingTrainer(TrainerConformance):
    trainer = Forecasting(2).trainer()
    task = Forecasting(2)
    recipe = {"learning_rate": 1e-3, "batch_size": 16}


def test_the_recipe_file_is_that_of_the_comparison() -> None:
    asked = load_recipe(Path(make_forecasting.__file__).parent / "examples" / "forecasting.yaml")
    assert (asked.steps, asked.batch_size, asked.learning_rate) == (make_forecasting.STEPS, 128, 1e-3)
    family = ForecastingFamily()
    assert len(windows_of(family.test_seeds[0], "train")) // 128 == make_forecasting.EPOCH
    assert sum(p.numel() for p in Network().parameters()) == Forecasting().trainer().parameters(Forecasting())


def test_the_page_is_made_from_the_table() -> None:
    rows = make_forecasting.read_rows()
    assert make_forecasting.page(rows) == make_forecasting.TABLE.with_suffix(".md").read_text()
    assert {row["setting"] for row in rows} == set(make_forecasting.RATES)
    for setting in make_forecasting.RATES:
        methods = {row["method"] for row in rows if row["setting"] == setting}
        learned = set() if setting in make_forecasting.LEARNED_AT else {"learned"}
        assert methods == set(make_forecasting.METHODS) - learned
        assert all(row["series"] in make_forecasting.SERIES for row in rows)


def test_a_sample_of_the_table_is_made_again() -> None:
    number = make_forecasting.SERIES[1]
    rows = {
        (row["method"], row["series"]): row for row in make_forecasting.read_rows() if row["setting"] == "usual rate"
    }
    task = Forecasting(number)
    for method in ("fixed, equal weights", "rules"):
        controller = None
        if method == "rules":
            controller = RulesController(load_rules(str(make_forecasting.RULES)))
        asked = make_forecasting.recipe(1e-3, make_forecasting.EQUAL)
        report, checkpoint, applied = make_forecasting.run(task, asked, 1, controller)
        made = make_forecasting.measures(task, checkpoint.weights, report)
        row = rows[method, number]
        assert applied == row["adjustments"]
        for key in ("mae", "direction", "r2_level", "r2_volatility", "crashes_per_100_epochs"):
            assert made[key] == pytest.approx(row[key], rel=1e-4, abs=1e-6)
