"""NVML that fails at any call, in any way, costs a figure and a notice, never a round."""

from __future__ import annotations

import logging
import types
from typing import Any

import pytest

from posttrain_gym.inner_trainers import telemetry
from posttrain_gym.inner_trainers.cards import ASSUMED_ORDER, Card, visible_cards
from posttrain_gym.inner_trainers.telemetry import UNAVAILABLE, RoundTelemetry, card_facts, gpu_facts
from tests.test_telemetry import BIG, SMALL, install, nvml_error, plain_environment  # noqa: F401

KINDS = (
    "Uninitialized",
    "NotSupported",
    "NoPermission",
    "NotFound",
    "DriverNotLoaded",
    "GpuIsLost",
    "LibRmVersionMismatch",
    "Timeout",
    "Unknown",
)
ROUND = {
    "device": "cuda:0",
    "card": "Big",
    "uuid": BIG,
    "chosen_by": ASSUMED_ORDER,
    "driver": "570.1",
    "energy_joules": 0.0,
    "utilisation": 0.25,
}
NO_CARD = {"device", "card", "reason"}


def measured() -> dict[str, Any]:
    figures = RoundTelemetry("cuda:0")
    figures.start()
    return figures.finish()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("call", "changed"),
    [
        ("nvmlDeviceGetName", {"card": UNAVAILABLE}),
        ("nvmlDeviceGetUUID", {"uuid": UNAVAILABLE}),
        ("nvmlSystemGetDriverVersion", {"driver": UNAVAILABLE}),
        ("nvmlDeviceGetTotalEnergyConsumption", {}),  # its power is sampled instead
        ("nvmlDeviceGetUtilizationRates", {"utilisation": UNAVAILABLE}),
        ("nvmlDeviceGetPowerUsage", {}),
        ("nvmlDeviceGetMemoryInfo", {}),
        ("nvmlDeviceGetTemperature", {}),
        ("nvmlDeviceGetPciInfo", {}),
        ("nvmlDeviceGetCount", None),
        ("nvmlDeviceGetHandleByIndex", None),
    ],
)
def test_each_call_costs_its_own_figure_only(
    call: str,
    changed: dict[str, Any] | None,
    kind: str,
    install: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(telemetry, "integrated", lambda power: 0.0)  # what a clock decides is tested elsewhere
    module = install(**{call: nvml_error(kind, "attacked")})
    with caplog.at_level(logging.INFO):
        facts = measured()
        again = measured()
    reasons = facts.pop("reasons", {})
    if changed is None:
        assert set(facts) == NO_CARD
        assert facts["card"] == UNAVAILABLE
        assert f"NVMLError_{kind}: attacked" in facts["reason"]
        assert len(caplog.records) == 1
    else:
        assert facts == {**ROUND, **changed}
        assert set(reasons) == {name for name in changed if name == "utilisation"}
        assert len(caplog.records) == len(reasons)
    again.pop("reasons", None)
    assert again == facts
    assert module.started == 0
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("answer", [None, "text", b"bytes", object(), []])
@pytest.mark.parametrize(
    "call",
    [
        "nvmlDeviceGetCount",
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetTotalEnergyConsumption",
        "nvmlDeviceGetPciInfo",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetMaxMigDeviceCount",
    ],
)
def test_answers_of_a_wrong_type_are_no_figures(call: str, answer: object, install: Any) -> None:  # noqa: F811
    module = install(**{call: lambda *_: answer})
    facts = measured()
    card = card_facts("cuda:0")
    if call == "nvmlDeviceGetCount":
        assert facts["card"] == card["card"] == gpu_facts()["cards"] == UNAVAILABLE
    else:
        assert facts["card"] == card["card"] == "Big"
    if call == "nvmlDeviceGetMemoryInfo":
        assert card["memory_used_bytes"] == card["memory_total_bytes"] == UNAVAILABLE
    if call == "nvmlDeviceGetUtilizationRates":
        assert facts["utilisation"] == card["utilisation"] == UNAVAILABLE
    assert module.started == 0


@pytest.mark.parametrize(("name", "expected"), [(b"H\xff", "H\ufffd"), (None, UNAVAILABLE), (7, UNAVAILABLE)])
def test_names_may_be_bytes_and_are_text_in_the_report(name: object, expected: str, install: Any) -> None:  # noqa: F811
    install(
        nvmlDeviceGetName=lambda handle: name,
        nvmlDeviceGetUUID=lambda handle: name,
        nvmlSystemGetDriverVersion=lambda: name,
    )
    facts = measured()
    assert (facts["card"], facts["uuid"], facts["driver"]) == (expected, expected, expected)


def test_a_machine_has_no_card_or_a_hundred(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    install(nvmlDeviceGetCount=lambda: 0)
    assert gpu_facts() == {"driver": "570.1", "cards": []}
    reason = "cuda:0 is not visible: CUDA_VISIBLE_DEVICES=None leaves 0 of 0 cards"
    assert measured() == {"device": "cuda:0", "card": UNAVAILABLE, "reason": reason}
    install(
        nvmlDeviceGetCount=lambda: 100,
        nvmlDeviceGetName=lambda handle: f"card {handle}",
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle:08d}",
        nvmlDeviceGetMemoryInfo=lambda handle: types.SimpleNamespace(total=handle, used=0),
    )
    assert gpu_facts()["cards"][99] == {"name": "card 99", "memory_bytes": 99}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "99,3")
    assert [card_facts(f"cuda:{index}")["card"] for index in (0, 1, 2)] == ["card 99", "card 3", UNAVAILABLE]


@pytest.mark.parametrize(
    ("value", "handles"),
    [
        ("0,,1", [0]),
        (" 1 , 0", [1, 0]),
        ("GPU-", []),
        ("abc", []),
        ("-1", []),
        ("1,-1,0", [1]),
        ("0,0", []),
        ("3", []),
        (",", []),
        (SMALL, [1]),
        ("GPU-aaaa2", [1]),
        ("GPU-aaaa", []),
        (f"MIG-{BIG}/1/0", []),
        ("MIG-", []),
    ],
)
def test_odd_values_leave_the_cards_that_cuda_leaves(value: str, handles: list[int]) -> None:
    assert [card.handle for card in visible_cards(value, [Card(0, BIG), Card(1, SMALL)], [])] == handles


def test_a_round_starts_nvml_once_and_shuts_it_down(install: Any) -> None:  # noqa: F811
    module = install()
    calls: list[str] = []
    start, stop = module.nvmlInit, module.nvmlShutdown

    def noted(name: str, call: Any) -> Any:
        def function() -> None:
            calls.append(name)
            call()

        return function

    module.nvmlInit, module.nvmlShutdown = noted("start", start), noted("stop", stop)
    figures = RoundTelemetry("cuda:0")
    figures.start()
    assert figures.finish() == ROUND
    assert figures.finish() is figures.finish()
    assert calls == ["start", "stop"]
    calls.clear()
    cpu = RoundTelemetry("cpu")
    cpu.start()
    cpu.finish()
    assert calls == []


def test_a_library_that_does_not_shut_down_costs_nothing(install: Any) -> None:  # noqa: F811
    install().nvmlShutdown = lambda: 1 / 0
    assert measured() == ROUND


@pytest.mark.parametrize("device", ["cuda:x", "cuda:-1", "mps", "", "cpu:0"])
def test_a_device_without_a_cuda_number_has_no_card(device: str, install: Any) -> None:  # noqa: F811
    install()
    figures = RoundTelemetry(device)
    figures.start()
    facts = figures.finish()
    assert (set(facts), facts["card"]) == (NO_CARD, UNAVAILABLE)
    assert facts["reason"].startswith(f"device {device} has no ")


def test_torch_that_lost_the_card_costs_no_report(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    class Lost:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("CUDA error: the device is lost")

    install()
    monkeypatch.setattr(RoundTelemetry, "_torch_memory", lambda self: Lost())
    assert measured() == ROUND


def test_a_round_that_never_trained_has_no_figures(install: Any) -> None:  # noqa: F811
    install()
    reason = "the round ended before it began to train"
    assert RoundTelemetry("cuda:0").finish() == {"device": "cuda:0", "card": UNAVAILABLE, "reason": reason}
