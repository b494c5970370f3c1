"""Every benchmark runs to its end and reports both sides; no timing is asserted."""

from __future__ import annotations

import json

import pytest

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
