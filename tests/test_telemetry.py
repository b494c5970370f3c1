"""Case E01: a machine without NVML is an ordinary machine."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import types
from typing import Any

import pytest

from posttrain_gym.inner_trainers import telemetry


def fake_nvml(init: Any = None, cards: tuple[tuple[str, int], ...] = ()) -> types.ModuleType:
    module: Any = types.ModuleType("pynvml")

    def start() -> None:
        if init is not None:
            raise init

    module.nvmlInit = start
    module.nvmlShutdown = lambda: None
    module.nvmlDeviceGetCount = lambda: len(cards)
    module.nvmlDeviceGetHandleByIndex = lambda index: index
    module.nvmlDeviceGetName = lambda handle: cards[handle][0]
    module.nvmlDeviceGetMemoryInfo = lambda handle: types.SimpleNamespace(total=cards[handle][1])
    return module  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (None, "nvidia-ml-py is not installed"),
        (fake_nvml(RuntimeError("NVML Shared Library Not Found")), "NVML does not start (RuntimeError: NVML Shared"),
        (fake_nvml(OSError("Driver Not Loaded")), "NVML does not start (OSError: Driver Not Loaded)"),
    ],
)
def test_absent_is_said_once(
    module: Any, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    telemetry._notice.cache_clear()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    with caplog.at_level(logging.INFO):
        first, second = telemetry.gpu_facts(), telemetry.gpu_facts()
    assert first == second
    assert first["cards"] == "unavailable"
    assert reason in first["reason"]
    assert len(caplog.records) == 1


def test_cards_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(cards=(("A", 24 << 30), ("B", 8 << 30))))
    assert telemetry.gpu_facts() == {
        "cards": [{"name": "A", "memory_bytes": 24 << 30}, {"name": "B", "memory_bytes": 8 << 30}]
    }


def test_no_deprecation_warning_comes_from_nvml() -> None:
    code = (
        "import json; from posttrain_gym.inner_trainers.telemetry import machine_facts; "
        "print(json.dumps(machine_facts()))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert json.loads(done.stdout)["processors"] >= 1
