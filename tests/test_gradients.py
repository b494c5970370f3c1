"""Gradients are clipped as the library clips them, bit for bit, and measured on the way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from posttrain_gym.inner_trainers.trl.gradients import SAMPLED_ENTRIES, SAMPLED_TENSORS, GradientMeter

SHAPES = ((41, 96), (96, 96), (96,), (192, 96), (96, 192), (3, 5, 7), (1,))


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def parameters(
    gradients: Sequence[torch.Tensor | None], dtype: torch.dtype = torch.float32
) -> list[tuple[str, torch.nn.Parameter]]:
    made = []
    for number, gradient in enumerate(gradients):
        shape = (2, 2) if gradient is None else gradient.shape
        parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        parameter.grad = None if gradient is None else gradient.clone().to(dtype)
        made.append((f"p{number}", parameter))
    return made


def drawn(seed: int, scale: float = 1.0, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(shape, generator=generator) for shape in shapes]


def give(named: Sequence[tuple[str, torch.nn.Parameter]], gradients: Sequence[torch.Tensor | None]) -> None:
    for (_, parameter), gradient in zip(named, gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.clone()


def flat(gradients: Sequence[torch.Tensor]) -> np.ndarray:
    return np.concatenate([gradient.double().flatten().numpy() for gradient in gradients])


# Clipping ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e6])
def test_clipping_is_the_librarys_bit_for_bit(
    max_norm: float, dtype: torch.dtype, exact: bool, accelerator: Accelerator
) -> None:
    meter: GradientMeter | None = None
    named: list[tuple[str, torch.nn.Parameter]] = []
    for seed in range(5):
        theirs = parameters(drawn(seed, scale=10.0 ** (seed - 3)), dtype)
        theirs[seed][1].grad = None  # frozen
        if meter is None:
            named = parameters(drawn(0), dtype)
            meter = GradientMeter(named)
        give(named, [p.grad for _, p in theirs])
        expected = accelerator.clip_grad_norm_([p for _, p in theirs], max_norm)
        norm = meter.clip(accelerator, max_norm, exact)
        assert norm is not None
        assert norm.dtype == expected.dtype
        assert torch.equal(norm, expected)
        for (_, ours), (_, other) in zip(named, theirs, strict=True):
            assert (ours.grad is None) == (other.grad is None)
            assert ours.grad is None or other.grad is None or torch.equal(ours.grad, other.grad)


@pytest.mark.parametrize(
    "gradients",
    [
        [torch.tensor([[math.nan, 1.0]]), torch.ones(3)],
        [torch.tensor([[math.inf, -math.inf]]), torch.ones(3)],
        [torch.zeros(2, 2), torch.zeros(3)],
    ],
)
def test_odd_gradients_are_clipped_as_the_library_does(gradients: list[torch.Tensor], accelerator: Accelerator) -> None:
    ours, theirs = parameters(gradients), parameters(gradients)
    norm = GradientMeter(ours).clip(accelerator, 1.0, False)
    expected = accelerator.clip_grad_norm_([p for _, p in theirs], 1.0)
    assert norm is not None
    assert torch.equal(norm, expected) or (norm.isnan() and expected.isnan())
    for (_, one), (_, other) in zip(ours, theirs, strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad.nan_to_num(7.0), other.grad.nan_to_num(7.0))


def test_what_is_unusual_is_left_to_the_library(accelerator: Accelerator) -> None:
    mixed = parameters(drawn(0))
    mixed[1][1].data = mixed[1][1].data.double()
    mixed[1][1].grad = torch.ones(96, 96, dtype=torch.float64)
    before = flat([p.grad for _, p in mixed if p.grad is not None])
    meter = GradientMeter(mixed)
    assert meter.clip(accelerator, 1e-3, False) is None
    assert meter.read() == ({}, {})
    assert np.array_equal(flat([p.grad for _, p in mixed if p.grad is not None]), before)
    mixed[1][1].grad = None
    assert meter.clip(accelerator, 1e-3, False) is not None  # those that are left share a dtype
    sharded: Any = SimpleNamespace(distributed_type=DistributedType.FSDP)
    assert GradientMeter(parameters(drawn(0))).clip(sharded, 1.0, False) is None
    assert GradientMeter(parameters([None, None])).clip(accelerator, 1.0, False) is None
    table = torch.nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    assert GradientMeter(list(table.named_parameters())).clip(accelerator, 1.0, False) is None


def test_gradients_of_half_precision_are_unscaled_first() -> None:
    named = parameters([torch.full((2, 2), 1024.0)])

    def unscale() -> None:
        assert named[0][1].grad is not None
        named[0][1].grad /= 1024.0

    scaled: Any = SimpleNamespace(distributed_type=DistributedType.NO, unscale_gradients=unscale)
    assert float(GradientMeter(named).clip(scaled, 1.0, False)) == 2.0  # type: ignore[arg-type]
    assert float(named[0][1].grad[0, 0]) == pytest.approx(0.5)  # type: ignore[index]


# Measuring -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exact", [False, True])
def test_exact_values_of_small_gradients(exact: bool, accelerator: Accelerator) -> None:
    first = [torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0]]), None]
    named = parameters(first)
    meter = GradientMeter(named)
    meter.clip(accelerator, 0.5, exact)
    signals, norms = meter.read()
    assert signals == {
        "grad_norm_ratio": 5.0,  # the second tensor's gradient is 0
        "grad_clip_ratio": pytest.approx(0.5 / math.sqrt(26)),
        "grad_variance": pytest.approx(26 / 5 - (8 / 5) ** 2),
    }
    assert norms == ({"p0": 5.0, "p1": 0.0, "p2": 1.0} if exact else {})
    assert meter.read() == ({}, {})
    give(named, [torch.tensor([[-4.0, 3.0]]), torch.tensor([[0.0, 2.0]]), torch.tensor([[1.0]]), None])
    meter.clip(accelerator, 100.0, exact)
    signals, _ = meter.read()
    assert signals["grad_cosine"] == pytest.approx(1 / math.sqrt(26 * 30))
    assert signals["grad_clip_ratio"] == 1.0
    assert signals["grad_norm_ratio"] == 5.0


@pytest.mark.parametrize("exact", [False, True])
def test_gradients_of_zero_and_those_that_are_ruined(exact: bool, accelerator: Accelerator) -> None:
    named = parameters([torch.ones(2, 2)])
    meter = GradientMeter(named)

    def signals(gradient: torch.Tensor) -> dict[str, float]:
        give(named, [gradient])
        meter.clip(accelerator, 1.0, exact)
        return meter.read()[0]

    assert "grad_cosine" not in signals(torch.ones(2, 2))
    assert signals(2 * torch.ones(2, 2))["grad_cosine"] == pytest.approx(1.0)
    assert signals(-torch.ones(2, 2))["grad_cosine"] == pytest.approx(-1.0)
    assert signals(torch.zeros(2, 2)) == {"grad_clip_ratio": 1.0, "grad_variance": 0.0}
    assert "grad_cosine" not in signals(torch.ones(2, 2))  # the one before was 0
    ruined = signals(torch.tensor([[math.nan, 0.0], [1.0, 1.0]]))
    assert ruined.keys() == {"grad_norm_ratio", "grad_variance", "grad_clip_ratio"}
    assert all(math.isnan(value) for value in ruined.values())
    assert signals(torch.tensor([[math.inf, -math.inf], [1.0, 1.0]])).keys() == ruined.keys()
    assert "grad_cosine" not in signals(torch.ones(2, 2))
    assert signals(torch.ones(2, 2))["grad_cosine"] == pytest.approx(1.0)  # nothing is left of it
    assert all(math.isfinite(value) for value in signals(torch.full((2, 2), 1e18)).values())


def test_a_sample_comes_close_to_all_entries(accelerator: Accelerator) -> None:
    sampled, exact = GradientMeter(parameters(drawn(0))), GradientMeter(parameters(drawn(0)))
    before = drawn(0)
    for seed in range(1, 5):
        after = [0.7 * old + 0.7 * new for old, new in zip(before, drawn(seed), strict=True)]
        found = []
        for meter, level in ((sampled, False), (exact, True)):
            for gradients in (before, after):
                give(list(zip(meter._names, meter._parameters, strict=True)), gradients)
                meter.clip(accelerator, 1.0, level)
                signals = meter.read()[0]
            found.append(signals)
        one, other = flat(before), flat(after)
        cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
        assert found[1]["grad_cosine"] == pytest.approx(cosine, abs=1e-6)
        assert found[1]["grad_variance"] == pytest.approx(other.var(), rel=1e-6)
        assert found[0]["grad_cosine"] == pytest.approx(cosine, abs=0.05)  # about 0.7 ± 1/64
        assert found[0]["grad_variance"] == pytest.approx(other.var(), rel=5e-3)
        assert found[0]["grad_norm_ratio"] == pytest.approx(found[1]["grad_norm_ratio"])
        before = after


def test_a_sample_is_small_and_spread_over_the_tensor(accelerator: Accelerator) -> None:
    gradients = [torch.zeros(1), torch.arange(8000.0).reshape(80, 100), *(torch.ones(64, 64) for _ in range(9))]
    meter = GradientMeter(parameters(gradients))
    meter.clip(accelerator, 1.0, False)
    sample = meter._sample
    assert sample is not None
    assert len(sample._chosen) == SAMPLED_TENSORS
    assert sample.count <= SAMPLED_TENSORS * SAMPLED_ENTRIES
    runs = 8000 // 64 * torch.arange(64.0)[:, None] + torch.arange(16.0)
    assert torch.equal(sample._rows[2][:1024], runs.flatten())
    assert meter._copies is None  # nothing else is kept
    turned = torch.arange(8000.0).reshape(80, 100).T
    assert not turned.is_contiguous()
    meter = GradientMeter(parameters([turned]))
    meter._parameters[0].grad = turned
    meter.clip(accelerator, 1e9, False)
    assert meter._looked_at == 1024


def test_what_is_trained_may_change(accelerator: Accelerator) -> None:
    gradients: list[torch.Tensor | None] = [torch.ones(4, 4), 2 * torch.ones(4, 4), torch.ones(4)]
    named = parameters(gradients)
    meter = GradientMeter(named)

    def signals(exact: bool, *present: int) -> dict[str, float]:
        give(named, [gradient if i in present else None for i, gradient in enumerate(gradients)])
        meter.clip(accelerator, 1e9, exact)
        return meter.read()[0]

    signals(False, 0, 1, 2)
    assert "grad_cosine" in signals(False, 0, 1, 2)
    assert "grad_cosine" not in signals(False, 1, 2)
    assert "grad_cosine" in signals(False, 1, 2)
    frozen = signals(True, 1, 2)
    assert "grad_cosine" not in frozen  # another level
    assert frozen["grad_variance"] == pytest.approx(68 / 20 - (36 / 20) ** 2, rel=1e-5)
    assert signals(True, 1, 2)["grad_cosine"] == pytest.approx(1.0)
    assert "grad_cosine" not in signals(True, 0, 1, 2)
    assert "grad_cosine" not in signals(False, 0, 1, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("exact", [False, True])
def test_on_a_card_nothing_waits_and_the_figures_are_the_same(exact: bool, accelerator: Accelerator) -> None:
    on_cpu, on_card = parameters(drawn(0)), [(n, torch.nn.Parameter(p.cuda())) for n, p in parameters(drawn(0))]
    meters = GradientMeter(on_cpu), GradientMeter(on_card)
    plain: Any = SimpleNamespace(distributed_type=DistributedType.NO, unscale_gradients=lambda: None)
    for seed in range(3):
        give(on_cpu, drawn(seed))
        give(on_card, [gradient.cuda() for gradient in drawn(seed)])
        meters[0].clip(plain, 1.0, exact)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            norm = meters[1].clip(plain, 1.0, exact)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert norm is not None
        norm.item()  # as the library's logging
        expected, found = meters[0].read(), meters[1].read()
        assert found[0] == pytest.approx(expected[0], rel=1e-4)
        assert found[1] == pytest.approx(expected[1], rel=1e-4)
    busy = torch.ones(8192, 8192, device="cuda")
    give(on_card, [gradient.cuda() for gradient in drawn(0)])
    for _ in range(50):
        busy = busy @ busy
    meters[1].clip(plain, 1.0, exact)
    assert meters[1].read() == ({}, {})  # not complete: absent, not waited for
