"""Cases E01 and E03: a machine without NVML is an ordinary machine, and the card that CUDA means is the one read."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from posttrain_gym.inner_trainers import telemetry
from posttrain_gym.inner_trainers.cards import ASSUMED_ORDER, Card, visible_cards
from posttrain_gym.inner_trainers.telemetry import UNAVAILABLE, EnergyMeter, RoundTelemetry, card_facts, gpu_facts

BIG, SMALL = "GPU-aaaa1111-0000-0000-0000-000000000000", "GPU-aaaa2222-0000-0000-0000-000000000000"
Call = Callable[..., Any]


class NVMLError(Exception):
    """Base of the library's errors; the subclasses carry its names."""


def nvml_error(kind: str, text: str) -> NVMLError:
    error: NVMLError = type(f"NVMLError_{kind}", (NVMLError,), {})(text)
    return error


def fake_nvml(init: Exception | None = None, **replaced: Call | Exception) -> types.ModuleType:
    """A machine with a 24 GB and an 8 GB card, in PCI order; functions may be replaced, or made to raise."""
    module: Any = types.ModuleType("pynvml")
    cards = (("Big", 24 << 30, BIG), ("Small", 8 << 30, SMALL))
    module.started = 0

    def start() -> None:
        if init is not None:
            raise init
        module.started += 1

    def stop() -> None:
        module.started -= 1

    module.nvmlInit, module.nvmlShutdown = start, stop
    functions: dict[str, Call | Exception] = {
        "nvmlSystemGetDriverVersion": lambda: "570.1",
        "nvmlDeviceGetCount": lambda: len(cards),
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: cards[handle][0].encode(),  # old versions of the library return bytes
        "nvmlDeviceGetUUID": lambda handle: cards[handle][2],
        "nvmlDeviceGetMemoryInfo": lambda handle: types.SimpleNamespace(total=cards[handle][1], used=1 << 30),
        "nvmlDeviceGetUtilizationRates": lambda handle: types.SimpleNamespace(gpu=25 + 50 * handle),
        "nvmlDeviceGetPowerUsage": lambda handle: 100_000 * (handle + 1),
        "nvmlDeviceGetTotalEnergyConsumption": lambda handle: 7_000_000,
        "nvmlDeviceGetTemperature": lambda handle, sensor: 40 + handle,
        "nvmlDeviceGetPciInfo": lambda handle: types.SimpleNamespace(domain=0, bus=1 + handle, device=0),
        "nvmlDeviceGetMaxMigDeviceCount": nvml_error("NotSupported", "Not Supported"),
        **replaced,
    }
    for name, function in functions.items():
        setattr(module, name, raising(function) if isinstance(function, Exception) else function)
    return module  # type: ignore[no-any-return]


def raising(error: Exception) -> Call:
    def function(*_: Any) -> Any:
        raise error

    return function


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    telemetry._notice.cache_clear()
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "posttrain-telemetry"]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def installed(**replaced: Any) -> Any:
        module = fake_nvml(**replaced)
        monkeypatch.setitem(sys.modules, "pynvml", module)
        return module

    return installed


# E01: nothing to read -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (None, "nvidia-ml-py is not installed"),
        (
            fake_nvml(nvml_error("LibraryNotFound", "NVML Shared Library Not Found")),
            "NVML does not start (NVMLError_LibraryNotFound: NVML Shared",
        ),
        (fake_nvml(nvml_error("DriverNotLoaded", "Driver Not Loaded")), "(NVMLError_DriverNotLoaded: Driver Not"),
        (
            fake_nvml(nvml_error("LibRmVersionMismatch", "Driver/library version mismatch")),
            "version mismatch; the driver was updated while it was loaded: restart the machine)",
        ),
        (fake_nvml(OSError("libnvidia-ml.so: cannot open")), "NVML does not start (OSError: libnvidia-ml.so"),
        (fake_nvml(nvmlDeviceGetCount=nvml_error("NoPermission", "No Permission")), "this user may not read it"),
    ],
)
def test_absent_is_said_once(
    module: Any, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    with caplog.at_level(logging.INFO):
        first, second, card = gpu_facts(), gpu_facts(), card_facts("cuda:0")
        with EnergyMeter("cuda:0") as meter:
            pass
    assert first == second
    assert first["cards"] == card["card"] == meter.joules == meter.utilisation == UNAVAILABLE
    assert reason in first["reason"]
    assert first["reason"] == card["reason"] == meter.reasons["card"]
    assert len(caplog.records) == 1
    assert module is None or module.started == 0


def test_the_cpu_has_no_card(install: Callable[..., Any]) -> None:
    install(nvmlDeviceGetCount=AssertionError("nothing is to be read"))
    meter = EnergyMeter("cpu")
    meter.start()
    assert meter.stop() == meter.stop() == UNAVAILABLE
    round_ = RoundTelemetry("cpu")
    round_.start()
    expected = {"device": "cpu", "card": UNAVAILABLE, "reason": "device cpu has no NVML card"}
    assert round_.finish() == round_.finish() == expected
    assert card_facts("cpu") == {"card": UNAVAILABLE, "reason": "device cpu has no NVML card"}


def test_no_deprecation_warning_comes_from_nvml() -> None:
    code = (
        "import json, sys; from posttrain_gym.inner_trainers.telemetry import machine_facts; "
        "assert 'torch' not in sys.modules; print(json.dumps(machine_facts()))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert json.loads(done.stdout)["processors"] >= 1


# E03: the card that is meant ------------------------------------------------------------------------------------------


def test_cards_are_listed(install: Callable[..., Any]) -> None:
    module = install()
    cards = [{"name": "Big", "memory_bytes": 24 << 30}, {"name": "Small", "memory_bytes": 8 << 30}]
    assert gpu_facts() == {"driver": "570.1", "cards": cards}
    assert module.started == 0


def test_a_card_that_may_not_be_opened_hides_no_other(install: Callable[..., Any]) -> None:
    def handle(index: int) -> int:
        if index == 0:
            raise nvml_error("NoPermission", "Insufficient Permissions")
        return index

    install(nvmlDeviceGetHandleByIndex=handle)
    closed, small = gpu_facts()["cards"]
    assert (closed["name"], small) == (UNAVAILABLE, {"name": "Small", "memory_bytes": 8 << 30})
    assert card_facts("cuda:1")["memory_total_bytes"] == 8 << 30
    assert "NVML does not open the card (NVMLError_NoPermission" in card_facts("cuda:0")["reason"]


@pytest.mark.parametrize(
    ("value", "device", "name", "total"),
    [
        ("1", "cuda:0", "Small", 8 << 30),
        (" 1 , 0", "cuda:1", "Big", 24 << 30),
        (SMALL, "cuda", "Small", 8 << 30),
        ("GPU-aaaa2", "cuda:0", "Small", 8 << 30),
        (f"{SMALL},{BIG}", "cuda:1", "Big", 24 << 30),
        (None, "cuda:1", "Small", 8 << 30),
    ],
)
def test_the_visible_card_is_the_one_read(
    value: str | None, device: str, name: str, total: int, install: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    small = name == "Small"
    by_uuid = value is not None and value.startswith("GPU-")
    assert card_facts(device) == {
        "card": name,
        "uuid": SMALL if small else BIG,
        "chosen_by": "CUDA_VISIBLE_DEVICES" if by_uuid else ASSUMED_ORDER,
        "driver": "570.1",
        "memory_used_bytes": 1 << 30,
        "memory_total_bytes": total,
        "utilisation": 0.75 if small else 0.25,
        "power_watts": 200.0 if small else 100.0,
        "energy_joules": 7000.0,
        "temperature_celsius": 41 if small else 40,
    }


@pytest.mark.parametrize("value", ["", "-1", "GPU-aaaa", "GPU-zzzz", "0,0", f"{BIG},{BIG}", "none", "7", "MIG-x"])
def test_no_card_is_visible(value: str, install: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    facts = card_facts("cuda:0")
    reason = f"cuda:0 is not visible: CUDA_VISIBLE_DEVICES={value!r} leaves 0 of 2 cards"
    assert facts == {"card": UNAVAILABLE, "reason": reason}


WHOLE = [Card(i, uuid) for i, uuid in enumerate((BIG, SMALL, "GPU-bbbb"))]
PARTS = [
    Card("i0", "MIG-1111", BIG, (1, 0)),
    Card("i1", "MIG-2222", BIG, (2, 0)),
    Card("i2", "MIG-2233", SMALL, (1, 0)),
]


@pytest.mark.parametrize(
    ("value", "handles"),
    [
        ("0,1,2", [0, 1, 2]),
        ("2,-1,0", [2]),  # CUDA stops at the first that is no card
        ("1,9,0", [1]),
        ("1gpu,+2x", [1, 2]),  # numbers are read as C reads them
        ("0, ,1", [0]),
        ("0,1,0", []),
        ("0,GPU-bbbb", [0]),  # kinds do not mix
        ("GPU-bbbb,1", [2]),
        (f"GPU-b,{BIG},GPU-aaaa,{SMALL}", [2, 0]),  # an ambiguous beginning stops it
        (f"GPU-aaaa1,{BIG}", []),  # two names of one card
        ("MIG-1111", ["i0"]),
        ("MIG-22", []),
        ("MIG-222,MIG-1", ["i1", "i0"]),
        (f"MIG-{BIG}/2/0", ["i1"]),
        (f"MIG-{SMALL}/1/0,MIG-{BIG}/1/0", ["i2", "i0"]),
        (f"MIG-{SMALL}/2/0", []),
    ],
)
def test_the_variable_is_read_as_cuda_reads_it(value: str, handles: list[Any]) -> None:
    assert [card.handle for card in visible_cards(value, WHOLE, PARTS)] == handles


def test_an_instance_is_read_through_its_own_handle(
    install: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def instance(card: int, number: int) -> str:
        if card != 0 or number == 1:
            raise nvml_error("NotFound", "Not Found")
        return f"mig{number}"

    uuids = {0: BIG, 1: SMALL, "mig0": "MIG-1111", "mig2": "MIG-2222"}
    memory = {"mig0": 5 << 30, "mig2": 10 << 30, 0: 24 << 30, 1: 8 << 30}
    install(
        nvmlDeviceGetMaxMigDeviceCount=lambda handle: 3 if handle == 0 else 0,
        nvmlDeviceGetMigDeviceHandleByIndex=instance,
        nvmlDeviceGetGpuInstanceId=lambda handle: int(handle[-1]) + 1,
        nvmlDeviceGetComputeInstanceId=lambda handle: 0,
        nvmlDeviceGetUUID=lambda handle: uuids[handle],
        nvmlDeviceGetName=lambda handle: f"card {handle}",
        nvmlDeviceGetMemoryInfo=lambda handle: types.SimpleNamespace(total=memory[handle], used=0),
        nvmlDeviceGetTotalEnergyConsumption=nvml_error("NotSupported", "Not Supported"),
        nvmlDeviceGetPowerUsage=nvml_error("NotSupported", "Not Supported"),
        nvmlDeviceGetUtilizationRates=nvml_error("NotSupported", "Not Supported"),
        nvmlDeviceGetTemperature=lambda handle, sensor: 50,
    )
    for value, total in [("MIG-2222", 10), (f"MIG-{BIG}/3/0", 10), ("0", 5), (BIG, 5), ("1", 8)]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert card_facts("cuda:0")["memory_total_bytes"] == total << 30, value
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-2222")
    facts = card_facts("cuda:0")
    refused = "NVMLError_NotSupported: Not Supported"
    assert facts["reasons"] == dict.fromkeys(("utilisation", "power_watts", "energy_joules"), refused)
    assert (facts["energy_joules"], facts["uuid"]) == (UNAVAILABLE, "MIG-2222")


def test_the_order_is_known_only_by_address(install: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    assert str(card_facts("cuda:0")["chosen_by"]).startswith("assumed")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert card_facts("cuda:0")["chosen_by"] == "CUDA_DEVICE_ORDER"
    install(nvmlDeviceGetCount=lambda: 1)
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    assert card_facts("cuda:0")["chosen_by"] == "only card"


@pytest.mark.parametrize(
    ("properties", "chosen_by"),
    [
        ({"uuid": SMALL.removeprefix("GPU-")}, "uuid"),
        ({"pci_domain_id": 0, "pci_bus_id": 2, "pci_device_id": 0}, "pci address"),
    ],
)
def test_torch_is_asked_once_it_has_started_cuda(
    properties: dict[str, Any], chosen_by: str, install: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA numbers the fastest card first: here the 8 GB card is cuda:0, and NVML's number 1."""
    import torch

    install()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(**properties))
    facts = card_facts("cuda:0")
    assert (facts["card"], facts["chosen_by"]) == ("Small", chosen_by)


# Energy ---------------------------------------------------------------------------------------------------------------


def test_energy_is_the_difference_of_the_counter(install: Callable[..., Any]) -> None:
    counter = iter([1_000_000, 1_000_000, 1_012_500])  # asked for once, then at the begin and at the end
    module = install(nvmlDeviceGetTotalEnergyConsumption=lambda handle: next(counter))
    with EnergyMeter("cuda:1") as meter:
        pass
    assert (meter.joules, meter.utilisation, meter.reasons) == (12.5, 0.75, {})
    assert meter.identity == {"card": "Small", "uuid": SMALL, "chosen_by": ASSUMED_ORDER, "driver": "570.1"}
    assert module.started == 0


def test_the_load_is_there_while_the_stretch_goes_on(
    install: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "SAMPLE_SECONDS", 1e-3)
    loads, seen = iter([10, 90, 40]), threading.Event()

    def rates(handle: int) -> Any:
        load = next(loads, None)
        if load is None:
            seen.set()
        return types.SimpleNamespace(gpu=40 if load is None else load)

    install(nvmlDeviceGetUtilizationRates=rates)
    stretch = RoundTelemetry("cuda:0")
    assert stretch.utilisation_now is None
    stretch.start()
    assert stretch.utilisation_now in (0.1, 0.9, 0.4)  # the card was read once before `start` returned
    assert seen.wait(10)
    assert stretch.utilisation_now == 0.4
    stretch.finish()
    install(nvmlDeviceGetUtilizationRates=nvml_error("NotSupported", "Not Supported"))
    with EnergyMeter("cuda:0") as meter:
        assert meter.utilisation_now is None


def test_without_a_counter_power_is_integrated(install: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "SAMPLE_SECONDS", 1e-3)
    seconds, watts = iter([0.0, 2.0, 3.0]), iter([100_000, 200_000, 50_000])
    done = threading.Event()

    def power(handle: int) -> int:
        value = next(watts, None)
        if value is None:
            raise AssertionError("three samples were planned")
        if value == 200_000:
            done.set()
            meter._ending.set()  # the third is the last
        return value

    install(
        nvmlDeviceGetTotalEnergyConsumption=nvml_error("NotSupported", "Not Supported"), nvmlDeviceGetPowerUsage=power
    )
    meter = EnergyMeter("cuda:0", clock=lambda: next(seconds))
    meter.start()
    assert done.wait(10)
    assert meter.stop() == pytest.approx(2 * 150 + 1 * 125)
    assert telemetry.integrated([(0.0, 5.0)]) == 0.0


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (nvml_error("GpuIsLost", "GPU is lost"), "NVMLError_GpuIsLost: GPU is lost; the card fell off the bus"),
        (500, "the card's energy counter went back"),
    ],
)
def test_a_card_that_is_lost_leaves_no_figure(
    second: Any, reason: str, install: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    answers = iter([1000, 1000, second])

    def counter(handle: int) -> int:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return int(answer)

    install(nvmlDeviceGetTotalEnergyConsumption=counter)
    with caplog.at_level(logging.INFO), EnergyMeter("cuda:0") as meter:
        pass
    assert (meter.joules, meter.utilisation) == (UNAVAILABLE, 0.25)
    assert meter.reasons["energy_joules"].startswith(reason)
    assert len(caplog.records) == 1


def test_a_call_that_hangs_is_given_up(install: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "ANSWER_SECONDS", 0.05)
    hangs = threading.Event()
    install(nvmlDeviceGetUtilizationRates=lambda handle: hangs.wait(20))
    meter = EnergyMeter("cuda:0")
    meter.start()
    thread = meter._thread
    assert thread is not None
    assert meter.stop() == UNAVAILABLE
    assert meter.reasons == {"card": "NVML did not answer within 0.05 s"}
    hangs.set()
    thread.join()


def test_a_meter_measures_one_stretch(install: Callable[..., Any]) -> None:
    install()
    meter = EnergyMeter("cuda:0")
    meter.start()
    with pytest.raises(RuntimeError, match="it measures one stretch"):
        meter.start()
    meter.stop()
    meter.stop()
