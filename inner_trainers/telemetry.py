"""Reads what graphics cards are there through NVML; without one, says so once and nothing else changes."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

_LOG = logging.getLogger(__name__)


def gpu_facts() -> dict[str, Any]:
    """Return the machine's cards.

    ``{"cards": [{"name", "memory_bytes"}, ...]}``, or ``{"cards": "unavailable", "reason": ...}``.

    The package `nvidia-ml-py` imports as `pynvml`. A machine without it, without its library or without a loaded
    driver is an ordinary CPU machine: one notice is logged, and no error is raised.
    """
    try:
        import pynvml
    except ImportError as error:
        return _unavailable(f"nvidia-ml-py is not installed ({error})")
    try:
        pynvml.nvmlInit()
    except Exception as error:
        return _unavailable(f"NVML does not start ({type(error).__name__}: {error})")
    try:
        cards = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            name = pynvml.nvmlDeviceGetName(handle)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            cards.append({"name": name if isinstance(name, str) else name.decode(), "memory_bytes": int(memory.total)})
        return {"cards": cards}
    except Exception as error:
        return _unavailable(f"NVML cannot be read ({type(error).__name__}: {error})")
    finally:
        pynvml.nvmlShutdown()


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


def _unavailable(reason: str) -> dict[str, Any]:
    _notice(reason)
    return {"cards": "unavailable", "reason": reason}


@cache
def _notice(reason: str) -> None:
    _LOG.info("no graphics card figures: %s", reason)
