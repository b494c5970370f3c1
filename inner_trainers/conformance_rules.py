"""What the conformance suites hold to: conditions in words, refusals, bounds of cost, digests of weights."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from typing import Any

from .base import Checkpoint, Cost, RoundReport
from .messages import where_raised


def hold(condition: object, message: str) -> None:
    """Raise `AssertionError` with a message unless a condition holds, also where asserts are off."""
    if not condition:
        raise AssertionError(message)


def ended(report: RoundReport) -> str:
    """Return how a round ended, with the evidence of its failure."""
    return repr(report.ended) + (f" ({report.failure.evidence})" if report.failure is not None else "")


def must_refuse(session: Any, adjustment: Any, why: str) -> None:
    """Fail unless a session refuses an adjustment with ValueError."""
    try:
        session.apply(adjustment)
    except ValueError:
        return
    except Exception as error:
        raise AssertionError(f"apply must raise ValueError where {why}, got {where_raised(error)}") from None
    raise AssertionError(f"apply must raise ValueError where {why}, but it took it")


def hold_within(cost: Cost, bound: Cost, what: str, name: str) -> None:
    """Fail unless a cost is within its bound, in tokens and in FLOPs."""
    for unit in ("train_tokens", "flops"):
        spent, most = cost.in_unit(unit), bound.in_unit(unit)
        hold(spent <= most * (1 + 1e-9), f"{what} cost {spent:g} {unit}, above {name}, {most:g}")


def digest(checkpoint: Checkpoint | None) -> str:
    """Return a digest of a checkpoint's weights, whatever they are made of."""
    digest = hashlib.sha256()
    _feed(digest, None if checkpoint is None else checkpoint.weights)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, Mapping):
        for name in sorted(value, key=str):
            digest.update(str(name).encode())
            _feed(digest, value[name])
    elif isinstance(value, list | tuple):
        for entry in value:
            _feed(digest, entry)
    elif hasattr(value, "detach"):  # a tensor
        value = value.detach().cpu().contiguous()
        digest.update(str((value.dtype, tuple(value.shape))).encode())
        digest.update(value.flatten().view(dtype=_bytes_type()).numpy().tobytes() if value.numel() else b"")
    elif hasattr(value, "tobytes"):  # an array
        digest.update(str((value.dtype, value.shape)).encode() + value.tobytes())
    else:
        digest.update(pickle.dumps(value))


def _bytes_type() -> Any:
    import torch

    return torch.uint8
