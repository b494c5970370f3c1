"""`posttrain-gym space` and `--space`: the table, its figures by hand, and what wins over the file."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from posttrain_gym.envs.budget import Budget
from posttrain_gym.envs.parameter import Parameter
from posttrain_gym.envs.space_file import parse_space_file
from posttrain_gym.experiments.cli import main
from posttrain_gym.experiments.cli_options import environment_settings
from posttrain_gym.experiments.settings import EnvSettings
from posttrain_gym.experiments.space_summary import grid_values, mixes_within, summarise_space
from posttrain_gym.inner_trainers.testing import ScriptedFamily, ScriptedTask, ScriptedTrainer

from .space_mutations import EXAMPLE

SCRIPTED = "posttrain_gym.inner_trainers.testing:ScriptedFamily"
FILE = """\
decision_space:
  algorithm:
    choices: [sft, grpo]
    constraints: [if base_model_size < 3B then exclude sft]
  start: [base, best]
  data_mix: {left: [0.2, 0.7], right: [0, 1]}
  hyperparams:
    learning_rate: [1e-4, 1e-2]
    batch_size: {choices: [16, 32, 64], default: 32}
    steps: [10, 60]
    temperature: {choices: [0.5, 1.0]}
    weight_decay: 0.01
  constraints: ["learning_rate <= 1e-3", "batch_size != 64"]
budget: {max_gpu_hours: 48, max_rounds: 20, early_stop_patience: 3}
evaluator: {eval_repeats: 3}
reward: {price: 0.2, failure_penalty: 0.3}
"""


def shown(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int = 0
) -> str:
    monkeypatch.setattr(sys, "argv", ["posttrain-gym", *arguments])
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        main()
    output = capsys.readouterr()
    assert stop.value.code == code, output
    return output.out + output.err


def summary_of(text: str, *, task: bool = True, samples: int = 2000) -> dict[str, Any]:
    file = parse_space_file(text, "space f.yaml")
    if not task:
        return summarise_space(file, samples=samples)
    return summarise_space(file, ScriptedTask(), ScriptedTrainer(parameters_count=1000), samples=samples)


def brute_values(parameter: Parameter) -> int:
    """Counts what decodes from a fine walk over the coordinate."""
    return len({parameter.decode(-1 + 2 * step / 400_000) for step in range(400_001)})


@pytest.mark.parametrize(
    ("parameter", "values"),
    [
        (Parameter(1e-4, 1e-2, "log"), 18_001),  # two decades of 9,000, and an end
        (Parameter(0.7, 1.2), 3_201),  # 0.7000 to 0.9999, 1.000 to 1.200
        (Parameter(0.3333333, 1.7), 7_368),  # 0.3334 to 1.7, and its own lower end
        (Parameter(0.0, 0.1), 36_002),  # four decades, an end and 0
        (Parameter(-0.1, 0.1), 72_003),
        (Parameter(5.0, 5.001), 2),
        (Parameter(16, 128, "log", integer=True), 113),
        (Parameter(choices=(1, 2, 4)), 3),
        (Parameter(choices=("a", "b")), 2),
    ],
)
def test_values_on_the_grid_are_counted(parameter: Parameter, values: int) -> None:
    assert grid_values(parameter) == values
    if parameter.low > 0 and values < 10_000:
        assert brute_values(parameter) == values


def test_mixes_on_the_grid_are_counted_exactly() -> None:
    assert mixes_within([(0.0, 1.0)]) == 1
    assert mixes_within([(0.0, 1.0)] * 2) == 1001
    assert mixes_within([(0.0, 1.0)] * 3) == 1002 * 1001 // 2
    assert mixes_within([(0.2, 0.2), (0.0, 1.0)]) == 1
    assert mixes_within([(0.2, 0.7), (0.0, 1.0)]) == 501
    assert mixes_within([(0.6, 1.0), (0.6, 1.0)]) == 0
    counted = sum(
        200 <= 1000 - math - code <= 600 for math in range(100, 501) for code in range(100, 401)
    )  # the bounds of the example
    assert mixes_within([(0.1, 0.5), (0.1, 0.4), (0.2, 0.6)]) == counted


def test_figures_of_a_task_by_hand() -> None:
    summary = summary_of(FILE, samples=4000)
    assert summary["facts"]["base_model_size"] == 1000.0 and summary["facts"]["rows"] == {"left": 6, "right": 6}
    (first, rate, size) = summary["constraints"]
    assert (first["text"], first["algorithms"]) == ("if base_model_size < 3B then exclude sft", ["sft"])
    assert first["share"] == 0.0  # nothing of grpo
    assert rate["algorithms"] == size["algorithms"] == []
    assert rate["samples"] == size["samples"] == 4000
    assert abs(rate["share"] - 0.5) < 5 * rate["standard_error"]  # half of two decades
    assert abs(size["share"] - 1 / 3) < 5 * size["standard_error"]  # one of three choices
    assert rate["standard_error"] == pytest.approx((rate["share"] * (1 - rate["share"]) / 4000) ** 0.5)
    kept = summary["kept"]
    assert 1800 < kept["samples"] < 2200  # the recipes of grpo among those drawn
    assert abs(kept["share"] - 0.5 * 2 / 3) < 5 * kept["standard_error"]
    by_name = {entry["name"]: entry for entry in summary["algorithms"]}
    assert not by_name["sft"]["reachable"] and by_name["sft"]["reason"] == "if base_model_size < 3B then exclude sft"
    assert by_name["grpo"]["reachable"] and by_name["grpo"]["starts"] == ["base", "best"]
    assert by_name["grpo"]["settings"] == ["batch_size", "learning_rate", "steps", "temperature"]
    settings = {entry["name"]: entry for entry in summary["settings"]}
    assert settings["batch_size"]["unreachable"] == [64]
    assert (settings["batch_size"]["default"], settings["batch_size"]["default_given"]) == (32, True)
    assert (settings["learning_rate"]["default"], settings["learning_rate"]["default_given"]) == (0.001, False)
    assert settings["temperature"]["when"] == "algorithm in [grpo]"
    # starts x mixes x rates x batches x steps x temperatures, of grpo
    assert summary["size"] == {
        "recipes": 2 * 501 * 18_001 * 3 * 51 * 2,
        "log10": pytest.approx(9.7419, abs=1e-4),
        "each_mix": False,
    }
    assert summary == json.loads(json.dumps(summary))
    assert summary_of(FILE, samples=4000) == summary  # the draw is seeded


def test_without_a_task_what_depends_on_one_stays_undecided() -> None:
    summary = summary_of(FILE, task=False)
    assert summary["facts"] is None
    first, rate, _ = summary["constraints"]
    assert (first["unknown"], first["algorithms"], first["samples"]) == (["base_model_size"], [], 0)
    assert rate["unknown"] == [] and rate["samples"] == 2000
    assert all(entry["reachable"] for entry in summary["algorithms"])
    text = FILE.replace("  data_mix: {left: [0.2, 0.7], right: [0, 1]}\n", "").replace(
        "steps: [10, 60]", "epochs: [1, 3]"
    )
    text = text.replace('"batch_size != 64"', "mix.left <= 0.5, steps <= 30, if rows.left < 9 then exclude left")
    summary = summary_of(text, task=False)
    assert [entry["unknown"] for entry in summary["constraints"]] == [
        ["base_model_size"],
        [],
        ["the mix"],
        ["steps"],
        ["rows.left", "the mix"],
    ]
    assert summary["size"]["each_mix"] is True
    assert summary["size"]["recipes"] == 2 * 18_001 * 3 * 3 * (1 + 2)  # sft without temperature, grpo with two


def test_an_algorithm_without_rows_says_so() -> None:
    text = FILE.replace("{left: [0.2, 0.7], right: [0, 1]}", "[right]").replace(
        "if base_model_size < 3B then exclude sft", "if base_model_size < 1 then exclude sft"
    )
    file = parse_space_file(text, "space f.yaml")
    summary = summarise_space(file, ScriptedTask(kinds=("demonstrations",)), ScriptedTrainer(), samples=50)
    reasons = {entry["name"]: entry["reason"] for entry in summary["algorithms"]}
    assert reasons == {"sft": None, "grpo": "no source has the rows it trains on"}


def test_the_table_fits_eighty_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("space.yaml").write_text(FILE)
    for arguments in (("space", "space.yaml"), ("space", "space.yaml", "--task", SCRIPTED, "--instance", "3")):
        text = shown(arguments, monkeypatch, capsys)
        assert max(map(len, text.splitlines())) <= 80, text
        assert "batch_size     16, 32, 64      choices" in text
        assert "budget: 172,800 device seconds (48 hours), at most 20 rounds, patience 3" in text
        assert "evaluator: seeds [0, 1, 2], k 8" in text and "reward: price 0.2, failure_penalty 0.3" in text
        assert "mix: left 0.2 to 0.7, right 0 to 1" in text
    assert "task: 1,000 parameters, 12 rows, no teacher" in text
    assert "sft        no         if base_model_size < 3B then exclude sft" in text
    assert "batch_size: never 64 on this task" in text
    assert "if base_model_size < 3B then exclude sft  sft (exact)" in text
    assert f"size: {2 * 501 * 18_001 * 3 * 51 * 2:,} recipes on the grid\n" in text


def test_json_is_one_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(EXAMPLE)
    data = json.loads(shown(("space", str(path), "--json"), monkeypatch, capsys))
    assert [entry["name"] for entry in data["settings"]] == ["batch_size", "epochs", "kl_coef", "learning_rate"]
    assert data["sources"] == {"math": [0.1, 0.5], "code": [0.1, 0.4], "general": [0.2, 0.6]}
    assert data["size"]["recipes"] is None and data["size"]["log10"] == pytest.approx(16.73, abs=0.01)


def test_what_is_wrong_is_one_paragraph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("space.yaml").write_text(FILE.replace("1e-2]", "1_0]"))
    text = shown(("space", "space.yaml"), monkeypatch, capsys, code=2)
    assert text == (
        "error: space space.yaml, line 8, column 27: decision_space.hyperparams.learning_rate[1]: expected a number, "
        "got '1_0'. Write 10.\n"
    )
    Path("space.yaml").write_text(FILE)
    text = shown(("space", "space.yaml", "--instance", "3"), monkeypatch, capsys, code=2)
    assert "--instance: an instance is one of a task; give --task too" in text
    Path("space.yaml").write_text(FILE.replace("right:", "rihgt:"))
    text = shown(("space", "space.yaml", "--task", SCRIPTED), monkeypatch, capsys, code=2)
    assert "line 6, column 32: decision_space.data_mix.rihgt: task 'scripted' has no source 'rihgt'." in text
    both = "['if base_model_size < 3B then exclude sft, grpo']"
    Path("space.yaml").write_text(FILE.replace("[if base_model_size < 3B then exclude sft]", both))
    text = shown(("space", "space.yaml", "--task", SCRIPTED), monkeypatch, capsys, code=1)
    assert "size: 0; no algorithm can run" in text and "sft, grpo (exact)" in text


# --space on other commands


def test_given_options_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(FILE)

    def settings_of(space: Path | None, given: Collection[str] = ()) -> EnvSettings:
        return environment_settings(SCRIPTED, "train", 500, "train_tokens", 7, 6, 0.7, 5, "", {}, space, given)

    own = settings_of(path)
    assert own.budget == Budget(48 * 3600, "device_seconds", 20, 3)
    assert (own.price, own.failure_penalty) == (0.2, 0.3)
    assert own.evaluator == {"seeds": [0, 1, 2], "k": 8}
    given = settings_of(path, {"budget", "unit", "max_rounds", "price", "samples"})
    assert given.budget == Budget(500, "train_tokens", 7, 3)
    assert given.price == 0.7
    assert given.evaluator == {"seeds": [0, 1, 2], "samples_per_seed": 5, "k": 8}
    with pytest.raises(ValueError, match=r"--unit: the limit in .* is in device_seconds; give --budget too"):
        settings_of(path, {"unit"})
    assert settings_of(None).space is None


def test_settings_with_a_space_are_plain_data_and_build_its_environment(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(FILE)
    settings = environment_settings(SCRIPTED, "train", 1e6, "train_tokens", 8, 4, 0.1, 4, "", {}, path)
    data = settings.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["space"]["decision_space"]["algorithm"]["choices"] == ["sft", "grpo"]
    assert not {"space", "failure_penalty"} & set(EnvSettings(task=SCRIPTED).to_dict())  # as runs of before have it
    env: Any = settings.build().unwrapped
    assert env.space.algorithms == ("sft", "grpo") and env.space.starts == ("base", "best")
    assert env.space.fixed == {"weight_decay": 0.01}
    assert (env.budget, env.reward_settings.failure_penalty) == (settings.budget, 0.3)
    assert isinstance(env.family, ScriptedFamily)


def test_a_run_with_a_space_is_trained_resumed_and_compared_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    space = FILE.replace("budget: {max_gpu_hours: 48,", "budget: {limit: 60000,")
    Path("space.yaml").write_text(space)
    common = ("--task", SCRIPTED, "--space", "space.yaml")
    text = shown(("train", *common, "--algo", "ppo", "--rounds", "8", "--out", "run"), monkeypatch, capsys)
    assert "--budget 60000 --unit train_tokens --max-rounds 20 --patience 3 --space space.yaml" in text
    again = ("train", *common, "--algo", "ppo", "--rounds", "16", "--out", "run", "--resume")
    shown(again, monkeypatch, capsys)
    rows = json.loads(
        shown(("evaluate", *common, "run/policy.zip", "--instances", "100", "--json"), monkeypatch, capsys)
    )
    assert [entry["episodes"] for entry in rows["policies"]] == [1]
    Path("space.yaml").write_text(space.replace("1e-2", "2e-2"))
    text = shown(again, monkeypatch, capsys, code=2)
    assert "it was made with other settings" in text and "space" in text
    Path("r.yaml").write_text("{algorithm: sft, mix: {left: 1.0}}")
    text = shown(
        ("evaluate", "--env", "in-loop", "--recipe", "r.yaml", *common, "run/policy.zip"), monkeypatch, capsys, code=2
    )
    assert "error: --space: with --env in-loop every round has the recipe of --recipe; leave it out." in text
