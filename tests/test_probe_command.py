"""The probe command: its table, its JSON, its exit code, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain_gym.experiments.cli import main

SCRIPTED = ["--task", "posttrain_gym.inner_trainers.testing:ScriptedFamily"]


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text("algorithm: sft\nmix: {left: 1.0}\n")
    return str(path)


def said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str, code: int
) -> tuple[str, str]:
    """Return what the command printed on standard output and error, each in one line."""
    monkeypatch.setattr(sys, "argv", ["posttrain-gym", "probe", *arguments])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == code
    captured = capsys.readouterr()
    return " ".join(captured.out.split()), " ".join(captured.err.split())


def test_a_probe_of_letters_suggests_a_range_and_says_what_it_cost(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("algorithm: sft\nmix: {web: 1.0}\n")
    options = ["--instance", "1", "--low", "1e-5", "--high", "1e-1", "--points", "5", "--steps", "8", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "posttrain_gym", "probe", str(path), *options],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [point["learning_rate"] for point in found["points"]] == [1e-5, 1e-4, 1e-3, 1e-2, 1e-1]
    assert found["signal"] == "loss"
    low, high = found["suggested_range"]
    assert low <= found["suggested_rate"] <= high < found["hurts_from"] <= 1e-1
    assert found["suggested_rate"] in (1e-4, 1e-3)
    assert found["cost"]["trained_tokens"] >= sum(point["cost"]["trained_tokens"] for point in found["points"]) > 0


def test_a_probe_that_cannot_tell_says_so_and_exits_with_one(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown, _ = said(monkeypatch, capsys, recipe, *SCRIPTED, "--points", "3", "--steps", "4", code=1)
    assert "note cannot tell: at no rate was the loss better than the control's beyond noise" in shown
    assert shown.count("flat") == 3
    assert "range" not in shown
    assert "cost 5120 train tokens" in shown  # the control and three rates, 4 steps x 32 sequences x 10 tokens


def test_a_batch_size_probe_shows_each_size_and_what_it_proposes(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*SCRIPTED, "--what", "batch-size", "--candidates", "2,4-6,8"]
    shown, _ = said(monkeypatch, capsys, recipe, *options, code=0)
    assert "batch 6; the largest that fits is 8" in shown
    assert "the largest candidate, 8, fits: larger batches may fit too" in shown
    assert "cost 140 train tokens" in shown  # 2, 4 and 8 sequences x 10 tokens
    shown, _ = said(monkeypatch, capsys, recipe, *options, "--memory-bytes", "1", code=1)
    assert "memory_limit" in shown
    assert "note no candidate fits" in shown


def test_a_probe_keeps_to_its_budget(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*SCRIPTED, "--points", "3", "--steps", "4", "--budget", "2560"]
    shown, _ = said(monkeypatch, capsys, recipe, *options, code=1)
    assert "cost 2560 train tokens" in shown
    assert "the budget does not pay the round at" in shown


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--what", "learning_rat"], "--what: unknown 'learning_rat'. Did you mean 'learning-rate'?"),
        (["--points", "1"], "points: expected an integer in [2, 100], got 1"),
        (["--memory-bytes", "5"], "memory_bytes: a learning-rate probe has no such setting"),
        (["--what", "batch-size", "--low", "1e-4"], "low: a batch-size probe has no such setting"),
        (["--what", "batch-size", "--candidates", "8,x"], "--candidates: expected numbers like 0,1,2 or 0-4"),
        (["--budget", "-1"], "limit.amount: expected a number in [0"),
        (["--budget", "1", "--unit", "tokens"], "Did you mean 'train_tokens'"),
        (["--task", "leters"], "Did you mean 'letters'"),
    ],
)
def test_bad_input_is_one_clear_error(
    options: list[str],
    expected: str,
    recipe: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, error = said(monkeypatch, capsys, recipe, *SCRIPTED, *options, code=2)
    assert expected in error


def test_a_recipe_that_cannot_run_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("algorithm: sft\nmix: {wob: 1.0}\n")
    assert "Did you mean 'web'" in said(monkeypatch, capsys, str(path), code=2)[1]
