"""Measures the gradient of each optimiser step on the norms that clipping takes anyway; changes no bit of it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from accelerate.utils import DistributedType

SAMPLED_TENSORS = 4
"""Parameter tensors whose gradients are sampled, evenly spread over those with more than one dimension."""

SAMPLED_ENTRIES = 1024
"""Entries of each that are looked at, evenly spread."""

_FACTS = 7  # what `_signals` reads before the norms of the tensors


class GradientMeter:
    """Clips gradients as the library does, and measures them on the way.

    Exact at every level: the largest over the smallest norm of a parameter tensor (tensors whose gradient is exactly 0
    are left out; absent when all are), the clip ratio, and the mean square of the entries, which the whole norm gives.
    The mean of the entries and the cosine with the step before are those of a fixed sample, at most `SAMPLED_TENSORS`
    times `SAMPLED_ENTRIES` entries; nothing else is kept of a gradient. Measured exactly, both are of all entries, and
    a copy of the last gradient is kept. The cosine is absent at the first step, at the first after the level or what is
    trained has changed, and where one of the two gradients is 0 or not finite.

    On CUDA the figures are device tensors, copied to pinned memory without waiting; `read` returns them once the copy
    is seen to be complete, which after the library has logged the step's loss it is.

    Args:
        parameters: the names and tensors that are clipped together, in the library's order.

    Attributes:
        seconds: what the last measurement took beyond clipping, on the thread that asked for it.
    """

    def __init__(self, parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        self._names = [name for name, _ in parameters]
        self._parameters = [parameter for _, parameter in parameters]
        self._uniform = _alike(self._parameters)
        self._sampled: list[torch.nn.Parameter] = []
        self._last: tuple[Any, Any] | None = None  # (what identifies the entries, the entries and their square)
        self._facts: Any = None
        self._pinned: torch.Tensor | None = None
        self._copied: Any = None
        self._shown: list[str] = []
        self._entries = self._looked_at = 0
        self._max_norm = math.inf
        self.seconds = 0.0

    def clip(self, accelerator: Any, max_norm: float, exact: bool) -> torch.Tensor | None:
        """Clip the gradients in place and return their norm before; None, with nothing done, for what is unusual.

        Unusual are several processes, shards, devices or dtypes, and devices other than the CPU and CUDA.

        Args:
            accelerator: the trainer's; it unscales the gradients of half precision.
            max_norm: norm they are clipped to.
            exact: whether to measure exactly.
        """
        self._facts = None
        pairs = [(name, p) for name, p in zip(self._names, self._parameters, strict=True) if p.grad is not None]
        gradients: list[torch.Tensor] = [p.grad for _, p in pairs]  # type: ignore[misc]
        if not gradients or accelerator.distributed_type != DistributedType.NO:
            return None
        if not (self._uniform or _alike(gradients)) or gradients[0].device.type not in ("cpu", "cuda"):
            return None
        accelerator.unscale_gradients()
        with torch.no_grad():
            # as torch.nn.utils.get_total_norm, which does not return the norms that it makes
            norms = torch.stack(torch._foreach_norm(gradients, 2.0))
            norm = torch.linalg.vector_norm(norms, 2.0)
            began = time.perf_counter()
            self._max_norm = max_norm
            self._entries = sum(map(torch.Tensor.numel, gradients))
            self._shown = [name for name, _ in pairs] if exact else []
            self._measure(pairs, gradients, norms, norm, exact)
            self.seconds = time.perf_counter() - began
            torch.nn.utils.clip_grads_with_norm_(self._parameters, max_norm, norm)
        return norm

    def read(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the signals of the last step, and the norm of each tensor's gradient when it was measured exactly.

        Both are empty when nothing was measured since the last call, or when the device has not finished.
        """
        facts, self._facts = self._facts, None
        if facts is None or (self._copied is not None and not self._copied.query()):
            return {}, {}
        numbers: list[float] = facts.tolist() if isinstance(facts, torch.Tensor) else facts
        norms = dict(zip(self._shown, numbers[_FACTS:], strict=True))
        return self._signals(*numbers[:_FACTS]), norms

    # What is measured -------------------------------------------------------------------------------------------

    def _measure(
        self,
        pairs: Sequence[tuple[str, torch.nn.Parameter]],
        gradients: list[torch.Tensor],
        norms: torch.Tensor,
        norm: torch.Tensor,
        exact: bool,
    ) -> None:
        if exact:
            self._looked_at = self._entries
            total, square, dot, before = self._all_entries([name for name, _ in pairs], gradients, norm)
        else:
            total, square, dot, before = self._sample(pairs)
        if norm.device.type == "cpu":
            found = norms.double().numpy()
            with np.errstate(all="ignore"):
                smallest = found[found != 0].min(initial=np.inf)
            facts = [norm, found.max(), smallest, total, square, dot, before]
            self._facts = [*map(float, facts), *(found.tolist() if exact else ())]
            return
        smallest = torch.where(norms != 0, norms, math.inf).amin()
        facts = [norm, norms.amax(), smallest, total, square, dot, before]
        self._copy(torch.cat([torch.stack([fact.double() for fact in facts]), norms.double()[: len(self._shown)]]))

    def _sample(self, pairs: Sequence[tuple[str, torch.nn.Parameter]]) -> tuple[Any, Any, Any, Any]:
        """Return sum, square and product with the last step of the sampled entries, and the last step's square."""
        if not self._sampled or any(parameter.grad is None for parameter in self._sampled):
            self._sampled, self._last = _spread([parameter for _, parameter in pairs]), None
        parts = [_entries_of(parameter.grad) for parameter in self._sampled]
        entries: Any = torch.cat(parts).double()
        self._looked_at = entries.numel()
        if entries.device.type == "cpu":
            entries = entries.numpy()  # several times as fast for so few
        square = entries.dot(entries)
        last, before = self._remembered(("sample", self._looked_at))
        dot = square if last is None else entries.dot(last)
        self._last = (("sample", self._looked_at), (entries, square))
        return entries.sum(), square, dot, _absent_like(square) if before is None else before

    def _all_entries(self, names: list[str], gradients: list[torch.Tensor], norm: torch.Tensor) -> Any:
        """Return the same of all entries, and keep a copy of them."""
        total = torch.stack([gradient.sum(dtype=torch.float64) for gradient in gradients]).sum()
        square = norm.double() ** 2
        last, before = self._remembered(names)
        dot = square
        if last is not None:
            products = zip(gradients, last, strict=True)
            dot = torch.stack([torch.linalg.vecdot(a.double().flatten(), b.double().flatten()) for a, b in products])
            dot = dot.sum()
            torch._foreach_copy_(last, gradients)
        else:
            last = [gradient.clone() for gradient in gradients]
        self._last = (names, (last, square))
        return total, square, dot, _absent_like(square) if before is None else before

    def _remembered(self, what: Any) -> tuple[Any, Any]:
        """Return the last step's entries and their square when they are those of the same tensors, else Nones."""
        if self._last is None or self._last[0] != what:
            return None, None
        entries, square = self._last[1]
        return entries, square

    def _copy(self, facts: torch.Tensor) -> None:
        """Begin to copy the figures to the CPU, behind what the device still has to do."""
        if self._pinned is None or self._pinned.shape != facts.shape:
            self._pinned = torch.empty_like(facts, device="cpu", pin_memory=True)
            self._copied = torch.cuda.Event()
        self._pinned.copy_(facts, non_blocking=True)
        self._copied.record(torch.cuda.current_stream(facts.device))
        self._facts = self._pinned

    def _signals(
        self, norm: float, largest: float, smallest: float, total: float, square: float, dot: float, before: float
    ) -> dict[str, float]:
        """Return the signals; what cannot be said is left out, what the gradient has ruined is NaN."""
        if not math.isfinite(norm):
            names = ("grad_norm_ratio", "grad_variance", "grad_clip_ratio")
            return dict.fromkeys(names, math.nan)
        found = {
            "grad_variance": max(0.0, norm**2 / self._entries - (total / self._looked_at) ** 2),
            "grad_clip_ratio": min(1.0, self._max_norm / (norm + 1e-6)),  # the library's own formula
        }
        if 0 < smallest < math.inf:
            found["grad_norm_ratio"] = largest / smallest
        if square > 0 and 0 < before < math.inf:
            found["grad_cosine"] = max(-1.0, min(1.0, dot / (math.sqrt(square) * math.sqrt(before))))
        return found


def _alike(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether the tensors share one device, dtype and layout, and none is a shard of another."""
    kinds = {(tensor.device, tensor.dtype, tensor.layout) for tensor in tensors}
    return len(kinds) == 1 and all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in tensors)


def _spread(parameters: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Return some of the parameters, evenly spread over the matrices among them."""
    candidates = [parameter for parameter in parameters if parameter.dim() > 1] or list(parameters)
    places = np.linspace(0, len(candidates) - 1, min(SAMPLED_TENSORS, len(candidates))).round()
    return [candidates[int(place)] for place in places]


def _entries_of(gradient: Any) -> torch.Tensor:
    """Return at most `SAMPLED_ENTRIES` entries of a gradient, evenly spread, as a view where that can be."""
    stride = -(-gradient.numel() // SAMPLED_ENTRIES)
    if gradient.is_contiguous():
        entries: torch.Tensor = gradient.as_strided((-(-gradient.numel() // stride),), (stride,))
        return entries
    return gradient.flatten()[::stride]  # type: ignore[no-any-return]


def _absent_like(square: Any) -> Any:
    """Return the square of a step there was not, which no cosine is taken with: 0."""
    return square * 0
