"""What a recipe will cost: a bound without rounds, a fit with them, with errors that committed rounds give again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain_gym.envs.cost_estimate import CostEstimate, Estimate, fits_memory
from posttrain_gym.envs.cost_predictor import CostPredictor
from posttrain_gym.envs.cost_rounds import CostFacts, CostRounds, rounds_of_file
from posttrain_gym.experiments.make_cost_predictor import read_results, round_of_row
from posttrain_gym.experiments.make_letters_rounds import RESULTS
from posttrain_gym.wrappers import RecordRounds

from .scripted_env import AMPLE, make, recipe_action


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return read_results()


def played(path: Path) -> Any:
    """Plays rounds of several recipes and records them."""
    env: Any = RecordRounds(make(budget=AMPLE), path)
    env.reset(seed=0)
    for algorithm in ("sft", "grpo"):
        for steps in (10, 20, 40):
            for size in (16, 32):
                env.step(recipe_action(env.unwrapped, algorithm, steps=steps, batch_size=size))
    return env


def test_without_rounds_it_answers_with_the_bound_and_says_so() -> None:
    env = make()
    env.reset(seed=0)
    task, trainer = env.search.task, env.trainer
    recipe = env.space.recipe("sft", steps=20)
    estimate = CostPredictor().predict(CostFacts(task, trainer), recipe)
    step, evaluation = trainer.step_cost_bound(task, recipe), trainer.evaluation_cost_bound(task, "validation")
    tokens = estimate.training["train_tokens"]
    assert (tokens.value, tokens.high, tokens.low) == (20 * step.in_unit("train_tokens"),) * 2 + (0.0,)
    assert not tokens.fitted and "bound" in tokens.how
    whole = estimate.total("train_tokens")
    assert whole is not None
    assert whole.value == tokens.value + evaluation.in_unit("train_tokens")
    assert fits_memory(estimate, 1.0)  # nothing is known


def test_fitted_to_a_search_it_foresees_its_rounds(tmp_path: Path) -> None:
    env = played(tmp_path / "rounds-x.jsonl")
    search = env.unwrapped.search
    predictor = CostPredictor.from_search(search)
    assert len(predictor.rounds) + sum(predictor.left_out.values()) == len(search.outcomes)
    facts = CostFacts(search.task, env.unwrapped.trainer)
    for outcome in search.outcomes:
        if outcome.report.cached:
            continue
        found = predictor.predict(facts, outcome.report.recipe).training["train_tokens"]
        measured = outcome.report.training_cost.in_unit("train_tokens")
        assert found.fitted
        assert found.value == pytest.approx(measured, rel=0.2)
        assert found.low <= measured * 1.001 and measured <= found.high * 1.001
    again = rounds_of_file(tmp_path / "rounds-x.jsonl", lambda entry: (search.task, env.unwrapped.trainer))
    assert [r.recipe for r in again.kept] == [r.recipe for r in predictor.rounds]
    many = predictor.predict_batch(facts, [outcome.report.recipe for outcome in search.outcomes])
    one = predictor.predict(facts, search.outcomes[0].report.recipe).training["train_tokens"]
    assert many["train_tokens"][0] == pytest.approx([one.value, one.low, one.high], rel=1e-9)


def test_a_saved_predictor_is_the_same_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    env = played(tmp_path / "rounds-x.jsonl")
    predictor = CostPredictor.from_search(env.unwrapped.search)
    path = tmp_path / "predictor.json"
    predictor.save(path)
    again = CostPredictor.load(path)
    facts = CostFacts(env.unwrapped.search.task, env.unwrapped.trainer)
    recipe = env.unwrapped.space.recipe("grpo")
    assert again.predict(facts, recipe) == predictor.predict(facts, recipe)
    assert again.errors == predictor.errors
    data = json.loads(path.read_text())
    for damage, message in (
        ({**data, "rounds": 3}, "it was cut or edited"),
        ({**data, "format": 0}, "expected format"),
        ({**data, "kept": [{}]}, "cannot be read"),
    ):
        path.write_text(json.dumps(damage))
        with pytest.raises(ValueError, match=message):
            CostPredictor.load(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="no JSON"):
        CostPredictor.load(path)
    with pytest.raises(ValueError, match="cannot be read"):
        CostPredictor.load(tmp_path / "none.json")


def test_memory_fits_by_the_upper_end() -> None:
    peak = Estimate(100.0, 80.0, 130.0, "fitted", True)
    estimate = CostEstimate({"peak_memory_bytes": peak}, {})
    assert fits_memory(estimate, 130.0) and not fits_memory(estimate, 129.0)


def test_the_page_of_errors_is_what_the_committed_rounds_give(rows: list[dict[str, Any]]) -> None:
    assert len(rows) == 225 + 732 + 18
    page = (RESULTS / "cost_predictor.md").read_text()
    drawn = [round_of_row(row) for row in rows if row["source"] == "drawn"]
    predictor = CostPredictor(CostRounds(drawn))
    errors = {(e.quantity, e.algorithm, e.grouping): e for e in predictor.errors}
    for algorithm in ("sft", "grpo", "all"):
        shown = next(line for line in page.splitlines() if line.startswith(f"| {algorithm} |"))
        error = errors["train_tokens", algorithm, "recipe"]
        assert f"| {error.rounds} | {error.median:.1%}, {error.p90:.1%} |" in shown
    assert errors["train_tokens", "all", "recipe"].median < 0.05


def test_the_command_predicts_with_its_error(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from posttrain_gym.experiments.cli import app

    played(tmp_path / "rounds-x.jsonl").close()
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("algorithm: sft\nmix: {left: 0.5, right: 0.5}\nsteps: 30\n")
    words = ["predict-cost", str(recipe), "--task", "posttrain_gym.inner_trainers.testing:ScriptedFamily"]
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    bound = json.loads(done.output)
    assert bound["rounds"] == 0 and not bound["training"]["train_tokens"]["fitted"]
    done = CliRunner().invoke(app, [*words, "--rounds", str(tmp_path / "rounds-x.jsonl"), "--json"])
    assert done.exit_code == 0, done.output
    fitted = json.loads(done.output)
    assert fitted["rounds"] > 0 and fitted["training"]["train_tokens"]["fitted"]
    assert fitted["training"]["train_tokens"]["value"] <= bound["training"]["train_tokens"]["value"]
    shown = CliRunner().invoke(app, [*words, "--rounds", str(tmp_path / "rounds-x.jsonl")])
    assert "training, train tokens" in shown.output and "it pays about" in shown.output
    assert np.isfinite(fitted["budget_share"])
    assert not any("none of the rounds" in note for note in fitted["notes"])
    env: Any = RecordRounds(make(budget=AMPLE), tmp_path / "rounds-other.jsonl")
    env.reset(seed=0)
    env.step(recipe_action(env.unwrapped, "grpo"))
    env.close()
    other = CliRunner().invoke(app, [*words, "--rounds", str(tmp_path / "rounds-other.jsonl"), "--json"])
    assert any("none of the rounds is of sft" in note for note in json.loads(other.output)["notes"])
