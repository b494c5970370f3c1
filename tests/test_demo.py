"""`make demo` at toy size, on real rounds: the report's figures come from that run, and a second call goes on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from posttrain_gym.envs.budget import Budget
from posttrain_gym.experiments.comparison_files import read_parquet
from posttrain_gym.experiments.demo import DemoSettings, run_demo

SETTINGS = DemoSettings(
    train_rounds=4,
    algo="a2c",
    policies=("random", "shortlist"),
    instances=1,
    seeds=1,
    budget=Budget(limit=30_000, max_rounds=1),
    evaluator={"seeds": (0,), "samples_per_seed": 2, "k": 2},
    workers=1,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo")
    stages: list[str] = []
    report, _ = run_demo(SETTINGS, out, command="posttrain-gym demo", on_stage=stages.append)
    assert [stage[:3] for stage in stages] == ["1/3", "2/3", "3/3"]
    assert report == out / "report.html"
    return out


def test_the_report_shows_the_figures_of_this_run(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    episodes = read_parquet(folder)
    assert [episode.policy for episode in episodes] == ["random", "shortlist", "trained (train)"]
    assert {episode.instance for episode in episodes} == {10_000}
    assert not any(episode.recorded for episode in episodes)
    for episode in episodes:
        assert episode.policy in page
        assert f"{episode.normalised_gain:.3f}".replace("-", "−").lstrip("−") in page
    assert page.count("data:image/png;base64,") == 3  # best so far, intervals, training
    facts = json.loads((folder / "run.json").read_text())
    assert facts["training"]["algorithm"] == "a2c"
    assert facts["settings"]["machine"]["processors"] >= 1
    assert facts["settings"]["rounds this call took from earlier ones"] == 0


def test_training_rounds_were_real(folder: Path) -> None:
    journal = (folder / "train" / "rounds-0.jsonl").read_text()
    reports = [entry["report"] for line in journal.splitlines() if "report" in (entry := json.loads(line))]
    assert reports
    for report in reports:
        assert report["steps"] > 0 or report["failure"] is not None
        assert not report["recorded"]
    assert any(report["supervised_tokens"] > 0 for report in reports)


def test_a_second_call_trains_nothing_and_gives_the_same_figures(folder: Path) -> None:
    before = read_parquet(folder)
    report, comparison = run_demo(SETTINGS, folder, command="posttrain-gym demo", on_stage=lambda text: None)
    assert read_parquet(folder) == before == comparison.episodes
    facts = json.loads((folder / "run.json").read_text())
    assert facts["settings"]["rounds this call took from earlier ones"] >= 1
    assert re.search(r"rounds this call took from earlier ones", report.read_text())
