"""Reads graphics cards through NVML: memory, load, power, energy, temperature; without one, says so once, no more.

Nothing here raises for a card that cannot be read, and nothing here imports torch: figures that are not to be had are
`UNAVAILABLE`, with the reason beside them and one notice in the log.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import Any

from .cards import Card, CardUnavailableError, cuda_card

UNAVAILABLE = "unavailable"
"""Stands for a figure that cannot be read."""

SAMPLE_SECONDS = 0.5
"""How often an `EnergyMeter` looks at the card."""

ANSWER_SECONDS = 5.0
"""How long NVML may take to answer before a reading is given up; a card that was lost can leave a call hanging."""

_LOG = logging.getLogger(__name__)
_HINTS = {
    "NVMLError_LibRmVersionMismatch": "the driver was updated while it was loaded: restart the machine",
    "NVMLError_NoPermission": "this user may not read it",
    "NVMLError_GpuIsLost": "the card fell off the bus: see the system log",
}


def gpu_facts() -> dict[str, Any]:
    """Return the machine's cards.

    ``{"driver", "cards": [{"name", "memory_bytes"}, ...]}``, or ``{"cards": "unavailable", "reason": ...}``.

    The package `nvidia-ml-py` imports as `pynvml`. A machine without it, without its library or without a loaded
    driver is an ordinary CPU machine: one notice is logged, and no error is raised.
    """
    try:
        with _nvml() as nvml:
            count = nvml.nvmlDeviceGetCount()
            cards = [_named_card(nvml, number) for number in range(count)]
            return {"driver": _driver(nvml), "cards": cards}
    except CardUnavailableError as error:
        reason = str(error)
    except Exception as error:
        reason = f"NVML cannot be read ({_in_words(error)})"
    _notice(reason)
    return {"cards": UNAVAILABLE, "reason": reason}


def card_facts(device: object = "cuda:0") -> dict[str, Any]:
    """Return what the card of one device reads now.

    ``{"card", "uuid", "chosen_by", "driver", "memory_used_bytes", "memory_total_bytes", "utilisation" (0 to 1),
    "power_watts", "energy_joules" (since the driver was loaded), "temperature_celsius"}``. A figure that the card does
    not offer is ``"unavailable"``, and ``"reasons"`` says why; without a card all that comes is ``{"card":
    "unavailable", "reason": ...}``.

    Args:
        device: ``"cuda"``, ``"cuda:N"`` or a `torch.device`; of the CPU there is nothing to read.
    """
    try:
        index = _cuda_index(device)
        with _nvml() as nvml:
            card = cuda_card(nvml, index)
            facts: dict[str, Any] = {**_identity(nvml, card), "driver": _driver(nvml)}
            reasons = {}
            for name, read in _READINGS.items():
                try:
                    facts[name] = read(nvml, card.handle)
                except Exception as error:
                    facts[name], reasons[name] = UNAVAILABLE, _in_words(error)
                    _notice(f"{name}: {_in_words(error)}")
            return {**facts, "reasons": reasons} if reasons else facts
    except CardUnavailableError as error:
        reason = str(error)
    except Exception as error:
        reason = f"NVML cannot be read ({_in_words(error)})"
    _notice(reason)
    return {"card": UNAVAILABLE, "reason": reason}


@cache
def machine_name() -> str:
    """Return the machine on whose clock seconds are measured, in words: processor and how many; no host name."""
    import os
    import platform

    name = platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            name = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), name)
    except OSError:  # no Linux
        pass
    return f"{name}, {os.cpu_count() or 1} processors"


def machine_facts() -> dict[str, Any]:
    """Return the machine in words for a run's record: system, processor count, cards. No host name."""
    import os
    import platform

    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processors": os.cpu_count(),
        "python": platform.python_version(),
        **gpu_facts(),
    }


class EnergyMeter:
    """Measures the energy and the mean load of a card over a stretch, on a thread of its own.

    Use it as a context manager, or call `start` and `stop`. Energy is the difference of the card's own counter; a card
    without one has its power sampled every `SAMPLE_SECONDS` and integrated (trapezoids). Other programs on the card are
    measured too. On the CPU everything is `UNAVAILABLE`.

    Args:
        device: ``"cuda"``, ``"cuda:N"``, ``"cpu"`` or a `torch.device`.
        clock: seconds that never go back.

    Attributes:
        joules: energy of the stretch, or `UNAVAILABLE`.
        utilisation: mean share of the time that the card was busy, in [0, 1], or `UNAVAILABLE`.
        identity: the card's name, UUID, how it was chosen, and the driver; empty without a card.
        reasons: figure -> why it is unavailable; ``"card"`` when there is no card at all.
        utilisation_now: the load when the card was last looked at, in [0, 1]; None while there is none.
    """

    def __init__(self, device: object = "cuda:0", clock: Callable[[], float] = time.monotonic) -> None:
        self.joules: float | str = UNAVAILABLE
        self.utilisation: float | str = UNAVAILABLE
        self.identity: dict[str, Any] = {}
        self.reasons: dict[str, str] = {}
        self.utilisation_now: float | None = None
        self._device, self._clock = device, clock
        self._begun, self._ending = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> EnergyMeter:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin the stretch; returns once the card was read, after a second at the latest.

        Raises:
            RuntimeError: it was started before.
        """
        if self._thread is not None or self.reasons:
            raise RuntimeError("energy meter: it measures one stretch; make a new one for the next.")
        try:
            index = _cuda_index(self._device)
        except CardUnavailableError as error:
            self.reasons["card"] = str(error)
            return
        self._thread = threading.Thread(target=self._watch, args=(index,), name="posttrain-telemetry", daemon=True)
        self._thread.start()
        self._begun.wait(1.0)

    def stop(self) -> float | str:
        """End the stretch and return its joules, or `UNAVAILABLE`; more calls return the same."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._ending.set()
            thread.join(ANSWER_SECONDS)
            if thread.is_alive():  # it may still write its figures: they are not waited for
                self.joules = self.utilisation = UNAVAILABLE
                self.reasons = {"card": f"NVML did not answer within {ANSWER_SECONDS:g} s"}
            for name, reason in self.reasons.items():
                _notice(reason if name == "card" else f"{name}: {reason}")
        return self.joules

    def _watch(self, index: int) -> None:
        reasons: dict[str, str] = {}
        try:
            with _nvml() as nvml:
                card = cuda_card(nvml, index)
                self.identity = {**_identity(nvml, card), "driver": _driver(nvml)}
                self._sample(_Stretch(nvml, card.handle, self._clock, reasons))
        except CardUnavailableError as error:
            reasons["card"] = str(error)
        except Exception as error:
            reasons["card"] = f"NVML cannot be read ({_in_words(error)})"
        finally:
            self.reasons = reasons
            self._begun.set()

    def _sample(self, stretch: _Stretch) -> None:
        self.utilisation_now = stretch.look()
        self._begun.set()
        while not self._ending.wait(SAMPLE_SECONDS):
            self.utilisation_now = stretch.look()
        stretch.look()
        self.joules, self.utilisation = stretch.joules(), stretch.utilisation()


class _Stretch:
    """The readings of one stretch; a quantity that fails once is given up, with its reason."""

    def __init__(self, nvml: Any, handle: Any, clock: Callable[[], float], reasons: dict[str, str]) -> None:
        self._nvml, self._handle, self._clock, self._reasons = nvml, handle, clock, reasons
        self._energy: list[float] = []
        self._power: list[tuple[float, float]] = []
        self._load: list[float] = []
        try:
            _energy_joules(nvml, handle)
            self._counts = True
        except Exception:
            self._counts = False

    def look(self) -> float | None:
        """Read everything that is still to be had; return the load, None when it is not."""
        if "energy_joules" not in self._reasons:
            try:
                if self._counts:
                    self._energy.append(_energy_joules(self._nvml, self._handle))
                else:
                    self._power.append((self._clock(), _power_watts(self._nvml, self._handle)))
            except Exception as error:
                self._reasons["energy_joules"] = _in_words(error)
        if "utilisation" not in self._reasons:
            try:
                self._load.append(_utilisation(self._nvml, self._handle))
            except Exception as error:
                self._reasons["utilisation"] = _in_words(error)
        return None if "utilisation" in self._reasons else self._load[-1]

    def joules(self) -> float | str:
        if "energy_joules" in self._reasons:
            return UNAVAILABLE
        if not self._counts:
            return integrated(self._power)
        spent = self._energy[-1] - self._energy[0]
        if spent < 0:
            self._reasons["energy_joules"] = "the card's energy counter went back: the driver was loaded anew"
            return UNAVAILABLE
        return spent

    def utilisation(self) -> float | str:
        return UNAVAILABLE if "utilisation" in self._reasons else math.fsum(self._load) / len(self._load)


def integrated(power: Sequence[tuple[float, float]]) -> float:
    """Return the joules of samples (seconds, watts) by the trapezoid rule; 0 for fewer than two samples."""
    return math.fsum(
        (later - earlier) * (watts + next_watts) / 2 for (earlier, watts), (later, next_watts) in pairwise(power)
    )


class RoundTelemetry:
    """What one round of training tells about its device: from `start` to `finish`, which returns the figures.

    Args:
        device: where the round trains, ``"cpu"`` or ``"cuda:N"``, as text or a `torch.device`.
    """

    def __init__(self, device: object) -> None:
        self._device = str(device)
        self._meter = EnergyMeter(device)
        self._facts: dict[str, Any] | None = None

    @property
    def utilisation_now(self) -> float | None:
        """The card's load when a thread of its own last looked, in [0, 1]; None without one. Never waits."""
        return self._meter.utilisation_now

    def start(self) -> None:
        """Begin to measure; on CUDA, torch's peak memory begins anew."""
        self._meter.start()
        memory = self._torch_memory()
        if memory is not None:
            try:
                memory.reset_peak_memory_stats(self._device)
            except Exception as error:  # a card that was lost: training itself will say so
                _LOG.debug("torch does not count its memory anew: %s", error)

    def finish(self) -> dict[str, Any]:
        """Return the figures as plain JSON types; the first call ends the stretch, later ones return the same.

        On CUDA ``{"device", "card", "uuid", "chosen_by", "driver", "peak_memory_bytes" (of torch's allocator),
        "energy_joules", "utilisation"}``, where what cannot be read is ``"unavailable"`` and ``"reasons"`` says why. On
        the CPU ``{"device": "cpu", "card": "unavailable", "reason": ...}``.
        """
        if self._facts is None:
            self._meter.stop()
            self._facts = self._figures(self._peak_memory())
        return self._facts

    def _peak_memory(self) -> int | None:
        memory = self._torch_memory()
        try:
            return None if memory is None else int(memory.max_memory_allocated(self._device))
        except Exception as error:  # a card that was lost must not take the round's report with it
            _LOG.debug("torch does not tell its peak memory: %s", error)
            return None

    def _figures(self, peak: int | None) -> dict[str, Any]:
        facts: dict[str, Any] = {"device": self._device}
        if peak is not None:
            facts["peak_memory_bytes"] = peak
        reasons = dict(self._meter.reasons)
        if "card" in reasons:
            return {**facts, "card": UNAVAILABLE, "reason": reasons["card"]}
        if not self._meter.identity:
            return {**facts, "card": UNAVAILABLE, "reason": "the round ended before it began to train"}
        figures = {"energy_joules": self._meter.joules, "utilisation": self._meter.utilisation}
        return {**facts, **self._meter.identity, **figures, **({"reasons": reasons} if reasons else {})}

    def _torch_memory(self) -> Any | None:
        torch = sys.modules.get("torch")
        if not self._device.startswith("cuda") or torch is None or not torch.cuda.is_available():
            return None
        return torch.cuda


@contextmanager
def _nvml() -> Iterator[Any]:
    """Start NVML for the block; it counts its users, so blocks may overlap.

    Raises:
        CardUnavailableError: there is no NVML here, or it does not start.
    """
    try:
        import pynvml
    except ImportError as error:
        raise CardUnavailableError(f"nvidia-ml-py is not installed ({error})") from error
    try:
        pynvml.nvmlInit()
    except Exception as error:
        raise CardUnavailableError(f"NVML does not start ({_in_words(error)})") from error
    try:
        yield pynvml
    finally:
        try:
            pynvml.nvmlShutdown()
        except Exception as error:  # a card that was lost takes the library's state with it
            _LOG.debug("NVML does not shut down: %s", error)


def _cuda_index(device: object) -> int:
    """Return N of ``"cuda:N"``.

    Raises:
        CardUnavailableError: another kind of device.
    """
    kind, _, number = str(device).partition(":")
    if kind != "cuda":
        raise CardUnavailableError(f"device {device} has no NVML card")
    if number.isdecimal():
        return int(number)
    if number:
        raise CardUnavailableError(f"device {device} has no CUDA number")
    torch = sys.modules.get("torch")
    return int(torch.cuda.current_device()) if torch is not None and torch.cuda.is_initialized() else 0


def _identity(nvml: Any, card: Card) -> dict[str, Any]:
    try:
        name = _text(nvml.nvmlDeviceGetName(card.handle))
    except Exception:
        name = UNAVAILABLE
    return {"card": name, "uuid": card.uuid or UNAVAILABLE, "chosen_by": card.chosen_by}


def _named_card(nvml: Any, number: int) -> dict[str, Any]:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(number)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        return {"name": _text(nvml.nvmlDeviceGetName(handle)), "memory_bytes": int(memory.total)}
    except Exception as error:  # one card that may not be opened hides no other
        _notice(f"card {number}: {_in_words(error)}")
        return {"name": UNAVAILABLE, "reason": _in_words(error)}


def _driver(nvml: Any) -> str:
    try:
        return _text(nvml.nvmlSystemGetDriverVersion())
    except Exception:
        return UNAVAILABLE


def _energy_joules(nvml: Any, handle: Any) -> float:
    return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1000.0  # millijoules


def _power_watts(nvml: Any, handle: Any) -> float:
    return float(nvml.nvmlDeviceGetPowerUsage(handle)) / 1000.0  # milliwatts


def _utilisation(nvml: Any, handle: Any) -> float:
    return float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100.0  # per cent


_READINGS: dict[str, Callable[[Any, Any], Any]] = {
    "memory_used_bytes": lambda nvml, handle: int(nvml.nvmlDeviceGetMemoryInfo(handle).used),
    "memory_total_bytes": lambda nvml, handle: int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
    "utilisation": _utilisation,
    "power_watts": _power_watts,
    "energy_joules": _energy_joules,
    "temperature_celsius": lambda nvml, handle: int(nvml.nvmlDeviceGetTemperature(handle, 0)),  # 0: the chip's sensor
}


def _text(value: Any) -> str:
    """Return NVML's text; older libraries give bytes.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if not isinstance(value, str):
        raise TypeError(f"NVML gave {value!r} for a text")
    return value


def _in_words(error: BaseException) -> str:
    name = type(error).__name__
    hint = _HINTS.get(name)
    return f"{name}: {error}" + (f"; {hint}" if hint else "")


@cache
def _notice(reason: str) -> None:
    _LOG.info("no graphics card figures: %s", reason)
