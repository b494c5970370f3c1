"""Measures the gradient of each optimiser step on the norms that clipping takes anyway; changes no bit of it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from accelerate.utils import DistributedType

SAMPLED_TENSORS = 3
"""Parameter tensors whose gradients are sampled, evenly spread over those with more than one dimension."""

SAMPLED_ENTRIES = 1024
"""Entries of each that are looked at, at most: runs of `RUN` neighbours, evenly spread."""

RUN = 16
"""Neighbours that are read together: a cache line, so that a sample costs the memory it is made of and no more."""

_FACTS = 9  # numbers that `_signals` takes, before the norms of the tensors


class GradientMeter:
    """Clips gradients as the library does, and measures them on the way.

    Exact at either level: the largest over the smallest norm of a parameter tensor (tensors whose gradient is exactly 0
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
        seconds: what the last measurement took beyond clipping, on the thread that asked for it, with its reading.
    """

    def __init__(self, parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        self._names = [name for name, _ in parameters]
        self._parameters = [parameter for _, parameter in parameters]
        self._sizes = sum(parameter.numel() for parameter in self._parameters)
        self._uniform = _alike(self._parameters)
        self._known, self._usual = -1, False
        self._sample: _Sample | None = None
        self._copies: list[torch.Tensor] | None = None  # of the last gradients, when they are measured exactly
        self._last_square = torch.zeros(())
        self._facts: Any = None
        self._pinned: torch.Tensor | None = None
        self._copied: Any = None
        self._shown: list[str] = []
        self._entries = self._looked_at = 1
        self._max_norm = math.inf
        self._swapped = False
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
        gradients: list[torch.Tensor] = [p.grad for p in self._parameters if p.grad is not None]
        if not (self._uniform and len(gradients) == self._known):  # a tensor's gradient is always of the same kind
            self._known = len(gradients)
            self._usual = _alike(gradients) and accelerator.distributed_type == DistributedType.NO
        if not self._usual:
            return None
        accelerator.unscale_gradients()
        with torch.no_grad():
            # as torch.nn.utils.get_total_norm, which does not return the norms that it makes
            norms = torch.stack(torch._foreach_norm(gradients, 2.0))
            norm: torch.Tensor = torch.linalg.vector_norm(norms, 2.0)
            began = time.perf_counter()
            self._max_norm = max_norm
            self._measure(gradients, norms, norm, exact)
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
        began = time.perf_counter()
        numbers: list[float] = facts.tolist() if isinstance(facts, torch.Tensor) else facts
        signals, norms = self._signals(*numbers[:_FACTS]), dict(zip(self._shown, numbers[_FACTS:], strict=True))
        self.seconds += time.perf_counter() - began
        return signals, norms

    # What is measured -------------------------------------------------------------------------------------------

    def _measure(self, gradients: list[torch.Tensor], norms: torch.Tensor, norm: torch.Tensor, exact: bool) -> None:
        everything = len(gradients) == len(self._parameters)
        self._entries = self._sizes if everything else sum(map(torch.Tensor.numel, gradients))
        products = self._products_of_all(gradients, norm) if exact else self._products_of_sample()
        if norm.device.type == "cpu":
            found: list[float] = norms.tolist()
            smallest: Any = min(filter(None, found), default=math.inf)
            rows: list[list[float]] = products.tolist()
            self._facts = [math.hypot(*found), max(found), smallest, *chain(*rows), *(found if exact else ())]
            return
        smallest = torch.where(norms != 0, norms, math.inf).amin()
        facts = [torch.stack([norm, norms.amax(), smallest]).double(), products.double().flatten()]
        self._copy(torch.cat([*facts, norms.double()] if exact else facts))

    def _products_of_sample(self) -> torch.Tensor:
        """Return the products of a sample's entries, see `_Sample.products`: (3, 2)."""
        self._shown, self._copies = [], None
        products = None if self._sample is None else self._sample.products()
        while products is None:
            self._sample = _Sample([p for p in self._parameters if p.grad is not None])
            products = self._sample.products()
        assert self._sample is not None
        self._looked_at, self._swapped = self._sample.count, self._sample.swapped
        return products

    def _products_of_all(self, gradients: list[torch.Tensor], norm: torch.Tensor) -> torch.Tensor:
        """Return the products of ones, last and new entries with the last and the new: (3, 2). Keeps a copy."""
        self._sample, self._looked_at, self._swapped = None, self._entries, False
        last, shown = self._copies, self._shown
        self._shown = [name for name, p in zip(self._names, self._parameters, strict=True) if p.grad is not None]
        square = norm.double() ** 2
        dot, before = torch.zeros_like(square), torch.zeros_like(square)
        if last is not None and shown == self._shown:
            pairs = zip(gradients, last, strict=True)
            dot = torch.stack([torch.dot(a.flatten().double(), b.flatten().double()) for a, b in pairs]).sum()
            before = self._last_square
        self._copies, self._last_square = [gradient.clone() for gradient in gradients], square
        total = torch.stack([gradient.sum(dtype=torch.float64) for gradient in gradients]).sum()
        return torch.stack([torch.zeros_like(total), total, before, dot, dot, square]).view(3, 2)

    def _copy(self, facts: torch.Tensor) -> None:
        """Begin to copy the figures to the CPU, behind what the device still has to do."""
        if self._pinned is None or self._pinned.shape != facts.shape:
            self._pinned = torch.empty_like(facts, device="cpu", pin_memory=True)
            self._copied = torch.cuda.Event()
        self._pinned.copy_(facts, non_blocking=True)
        self._copied.record(torch.cuda.current_stream(facts.device))
        self._facts = self._pinned

    def _signals(self, norm: float, largest: float, smallest: float, *products: float) -> dict[str, float]:
        """Return the signals; what cannot be said is left out, what the gradient has ruined is NaN."""
        if not math.isfinite(norm):
            return dict.fromkeys(("grad_norm_ratio", "grad_variance", "grad_clip_ratio"), math.nan)
        _, total, before, dot, _, square = products
        if self._swapped:
            total, _, square, dot, _, before = products
        found = {"grad_clip_ratio": min(1.0, self._max_norm / (norm + 1e-6))}  # the library's own formula
        variance = norm**2 / self._entries - (total / self._looked_at) ** 2
        if math.isfinite(variance):
            found["grad_variance"] = max(0.0, variance)
        if 0 < smallest < math.inf:
            found["grad_norm_ratio"] = largest / smallest
        if 0 < square < math.inf and 0 < before < math.inf and math.isfinite(dot):
            found["grad_cosine"] = max(-1.0, min(1.0, dot / (math.sqrt(square) * math.sqrt(before))))
        return found


class _Sample:
    """A fixed sample of the entries of some gradients, and their values at the last step.

    Args:
        parameters: those that have a gradient; some are chosen, evenly spread over the matrices among them.

    Attributes:
        count: entries.
        swapped: whether last and new are the other way round in the products.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        candidates = [parameter for parameter in parameters if parameter.dim() > 1] or list(parameters)
        number, last = min(SAMPLED_TENSORS, len(candidates)), len(candidates) - 1
        self._chosen = [candidates[round(last * place / max(1, number - 1))] for place in range(number)]
        width = RUN if all(parameter.numel() >= RUN for parameter in self._chosen) else 1
        self._places = []
        for parameter in self._chosen:
            runs = min(SAMPLED_ENTRIES, parameter.numel()) // width
            self._places.append(((runs, width), (parameter.numel() // runs, 1)))
        self.count = sum(runs * width for (runs, _), _ in self._places)
        rows = torch.zeros(3, self.count, device=parameters[0].device)  # ones, and by turns the last values and the new
        rows[0] = 1.0
        self._rows, self._turns = rows, rows[1:].t()
        self._runs = rows[1].view(-1, width), rows[2].view(-1, width)
        self.swapped = True

    def products(self) -> torch.Tensor | None:
        """Take in the gradients; return the products of ones, last and new values with the last and the new: (3, 2).

        None, with nothing taken in, when one of what is sampled has no gradient any more.
        """
        parts = []
        for parameter, (size, stride) in zip(self._chosen, self._places, strict=True):
            gradient: Any = parameter.grad
            if gradient is None:
                return None
            whole = gradient if gradient.is_contiguous() else gradient.contiguous()
            parts.append(whole.as_strided(size, stride))
        self.swapped = not self.swapped
        torch.cat(parts, out=self._runs[0 if self.swapped else 1])
        return torch.mm(self._rows, self._turns)


def _alike(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether the tensors are plain ones that share a dtype and a device, the CPU or CUDA."""
    kinds = {(tensor.device, tensor.dtype, tensor.layout) for tensor in tensors}
    if len(kinds) != 1 or not all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in tensors):
        return False
    device, _, layout = kinds.pop()
    return device.type in ("cpu", "cuda") and layout is torch.strided
