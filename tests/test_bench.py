"""Every benchmark runs to its end and reports both sides; no timing is asserted."""

from __future__ import annotations

import json

import pytest

from posttrain_gym.experiments import bench_in_loop
from posttrain_gym.experiments.bench import run_bench


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("import", {"import_seconds", "loads_torch", "target_seconds"}),
        ("round", {"env_step_seconds", "plain_seconds", "ratio", "cpu_ratio", "target_ratio"}),
        ("rounds-per-hour", {"rounds_per_hour", "fresh_process_rounds_per_hour", "ratio", "target_ratio"}),
    ],
)
def test_bench_reports_both_sides(name: str, keys: set[str]) -> None:
    result = json.loads(json.dumps(run_bench(name, 5 if name == "round" else 1)))
    assert keys <= set(result)
    assert result["bench"] == name
    assert all(value > 0 for key, value in result.items() if key.endswith(("ratio", "hour")))


def test_import_loads_no_torch() -> None:
    assert run_bench("import", 1)["loads_torch"] is False


def test_bench_in_loop_has_its_figures_beside_their_targets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_in_loop, "STEPS", 6)

    def peak_here(side: str) -> float:  # a fresh process would load TRL again
        bench_in_loop.print_peak(side)
        return float(capsys.readouterr().out)

    monkeypatch.setattr(bench_in_loop, "_peak_of_fresh_process", peak_here)
    result = json.loads(json.dumps(run_bench("in-loop", 1)))
    assert result["repeats"] == result["pairs"] == 1
    assert set(result["own_ms_by_part"]) == {"gradients", "rows", "monitor", "decide", "apply"}
    assert result["own_ms"] == pytest.approx(sum(result["own_ms_by_part"].values()))
    assert result["own_share"] == pytest.approx(result["own_ms"] / result["step_ms"])
    targets = {"own_ms": 0.15, "own_share": 0.004, "net_forward_ms": 0.05, "memory_ratio": 1.02}
    assert {name: result[f"target_{name}"] for name in targets} == targets
    for name in ("throughput_ratio", "throughput_ratio_of_steps"):
        low, high = result[f"{name}_interval"]
        assert 0 < low <= result[name] <= high
    assert result["net_parameters"] <= 15_000
    assert 0 < result["net_forward_ms"] < result["net_decide_ms"]
    assert result["steps"] == 5  # of six: nothing is decided after the last
    assert result["memory_ratio"] > 0
