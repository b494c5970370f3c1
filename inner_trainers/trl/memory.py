"""Memory that a round uses: how much is in use, and how a trainer's memory is given back at once."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import torch

_STATM = "/proc/self/statm"
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def memory_in_use(device: torch.device) -> int | None:
    """Return the bytes that this process holds of a CUDA device, else those resident in it; None when unknown."""
    if device.type == "cuda":
        return int(torch.cuda.memory_reserved(device))
    try:
        with open(_STATM, "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):  # no Linux
        return None


@cache
def memory_total(device: torch.device) -> int | None:
    """Return the bytes there are for `memory_in_use` to grow to; None when unknown.

    Those of the CUDA device; else those of the machine, or what its control groups leave a container.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        machine = os.sysconf("SC_PHYS_PAGES") * _PAGE
        groups = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError, AttributeError):  # no Linux
        return None
    return min([machine, *_group_limits(groups)])


def _group_limits(groups: list[str], root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """Return the memory limits of this process's control groups, of either version, and of those they are in."""
    limits = []
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, file = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        for folder in (PurePosixPath(path), *PurePosixPath(path).parents):
            try:
                limits.append(int((top / str(folder).lstrip("/") / file).read_text(encoding="ascii")))
            except (OSError, ValueError):  # not shown in here, or "max"
                continue
    return limits


def peak_memory(device: torch.device) -> int | None:
    """Return the most bytes in use since `forget_peak`: exact on CUDA, else what is in use now."""
    return int(torch.cuda.max_memory_reserved(device)) if device.type == "cuda" else memory_in_use(device)


def forget_peak(device: torch.device) -> None:
    """Begin to measure the peak of a CUDA device anew."""
    if device.type == "cuda" and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats(device)


def take_apart(trainer: Any) -> None:
    """Cut the references between a trainer's parts, so that its memory goes without waiting for the cycle collector."""
    for model in (trainer.model, *(getattr(trainer, name, None) for name in ("ref_model", "teacher_model"))):
        for module in () if model is None else model.modules():
            module.__dict__.pop("forward", None)  # TRL's fused head is a method bound to the model: a cycle
            for parameter in module.parameters(recurse=False):
                parameter.grad = None
    accelerator = getattr(trainer, "accelerator", None)
    for held in ("_models", "_optimizers", "_schedulers", "_dataloaders"):  # `free_memory` would also run the collector
        if hasattr(accelerator, held):
            setattr(accelerator, held, [])
    optimizer = getattr(trainer, "optimizer", None)
    inner = getattr(optimizer, "optimizer", optimizer)
    if inner is not None:
        inner.state.clear()
        inner.param_groups.clear()
    for name in vars(trainer):
        trainer.__dict__[name] = None
