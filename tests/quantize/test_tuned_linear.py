"""Gradients of maps and scales against float64 autograd, and what is stored of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from w3pack.quantize import QuantizedLinear, QuantizeSettings, quantize_data_free
from w3pack.quantize.maps import map_values
from w3pack.quantize.tuned_linear import TunedLinear, TunedVector, product, weight_sums


def quantized(rows: int, columns: int, *, seed: int = 0, **kind: Any) -> QuantizedLinear:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return quantize_data_free(weight, QuantizeSettings(**kind))


@pytest.mark.parametrize("columns", [64, 200, 384])
@pytest.mark.parametrize("group_size", [64, 128])
@pytest.mark.parametrize("per", ["tensor", "row"])
@pytest.mark.parametrize("qmap_dtype", [torch.int8, torch.float16])
def test_gradient_is_that_of_autograd(columns: int, group_size: int, per: str, qmap_dtype: torch.dtype) -> None:
    part = TunedLinear(quantized(33, columns, group_size=group_size, qmap_per=per, qmap_dtype=qmap_dtype))
    latents = part.initial().double()
    linear = part.stored(part.initial())
    slope = torch.randn(33, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    scales = linear.scales.double().requires_grad_()
    table = map_values(linear.qmap).double().requires_grad_()
    picked = table[torch.arange(33).unsqueeze(1) if per == "row" else 0, linear.codes.long()]
    weight = picked * scales.repeat_interleave(group_size, dim=1)[:, :columns]
    by_scale, by_map = torch.autograd.grad((weight * slope).sum(), [scales, table])

    found = part.gradient(latents, weight.detach(), slope)
    count = scales.numel()
    assert found.dtype == torch.float64
    assert torch.allclose(found[:count].view_as(scales), by_scale * scales, rtol=1e-9, atol=1e-12)
    assert torch.allclose(found[count:].view_as(table), by_map, rtol=1e-9, atol=1e-12)


def test_sums_are_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = quantized(50, 200, group_size=64)
    slope = torch.randn(50, 200, generator=torch.Generator().manual_seed(2))
    whole = weight_sums(slope, linear.dequantize(), linear)
    monkeypatch.setattr("w3pack.quantize.tuned_linear._PIECE_ELEMENTS", 1200)
    for one, other in zip(weight_sums(slope, linear.dequantize(), linear), whole, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("per", ["tensor", "row"])
def test_latents_start_at_what_was_there(per: str) -> None:
    linear = quantized(40, 200, qmap_per=per)
    part = TunedLinear(linear)
    again = part.stored(part.initial())
    for name in ("codes", "qmap", "scales"):
        assert torch.equal(getattr(again, name), getattr(linear, name))
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.full((40, 200), torch.nan, dtype=dtype)
        part.write(part.initial(), weight)
        assert torch.equal(weight, linear.dequantize().to(dtype))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(0, 2**31), st.floats(0.001, 30), st.sampled_from([torch.int8, torch.float16]),
    st.sampled_from(["tensor", "row"]),
)  # fmt: skip
def test_whatever_was_learned_is_legal(seed: int, size: float, qmap_dtype: torch.dtype, per: str) -> None:
    part = TunedLinear(quantized(9, 130, qmap_dtype=qmap_dtype, qmap_per=per))
    generator = torch.Generator().manual_seed(seed)
    latents = part.initial() + size * torch.randn(part.size, generator=generator)
    part.project(latents)
    stored = part.stored(latents)
    values = map_values(stored.qmap)
    assert bool((values.diff(dim=1) >= 0).all())
    assert float(values.abs().max()) <= 1
    assert bool(torch.isfinite(stored.scales).all())
    assert torch.equal(stored.scales.sign(), part.start.scales.sign())
    assert torch.equal(stored.codes, part.start.codes)


def test_a_scale_of_zero_and_a_fixed_map_do_not_move() -> None:
    linear = quantized(8, 128, group_size=64)
    scales = linear.scales.clone()
    scales[3, 1] = 0
    start = QuantizedLinear(codes=linear.codes, qmap=linear.qmap, scales=scales, group_size=64)
    rates = TunedLinear(start, fit_map=False).rates()
    assert rates[7] == 0
    assert int((rates[: scales.numel()] == 0).sum()) == 1
    assert bool((rates[scales.numel() :] == 0).all())
    assert bool((TunedLinear(start).rates()[scales.numel() :] > 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_differentiates_as_a_matmul(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 16, generator=generator, requires_grad=True)
    weight = torch.randn(7, 16, generator=generator).to(dtype)
    slope = torch.randn(3, 5, 7, generator=generator)
    seen: list[torch.Tensor] = []
    anchor = torch.zeros((), requires_grad=True)
    y = product(x, weight, anchor=anchor, told=seen.append)
    y.backward(slope)
    wide = weight.double().requires_grad_()
    again = x.detach().double().requires_grad_()
    wanted = again @ wide.t()
    wanted.backward(slope.double())
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    assert y.dtype == torch.float32
    assert x.grad is not None
    assert again.grad is not None
    assert wide.grad is not None
    assert torch.allclose(y.double(), wanted, atol=tolerance * 10, rtol=tolerance)
    assert torch.allclose(x.grad.double(), again.grad, atol=tolerance * 10, rtol=tolerance)
    assert len(seen) == 1
    assert torch.allclose(seen[0].double(), wide.grad, atol=tolerance * 10, rtol=tolerance)


def test_product_of_an_input_without_gradient_still_tells() -> None:
    seen: list[torch.Tensor] = []
    anchor = torch.zeros((), requires_grad=True)
    y = product(torch.ones(2, 4), torch.ones(3, 4), anchor=anchor, told=seen.append)
    torch.autograd.grad(y.sum(), anchor, allow_unused=True)
    assert torch.equal(seen[0], torch.full((3, 4), 2.0))


def test_vectors_keep_their_dtype_and_move_in_their_own_units() -> None:
    start = torch.tensor([1.0, -3.0, 0.0], dtype=torch.bfloat16)
    part = TunedVector(start)
    assert torch.equal(part.stored(part.initial()), start)
    moved = part.stored(torch.tensor([1.0, 1.0, 1.0]))
    assert moved.dtype == torch.bfloat16
    assert torch.allclose(moved.float(), start.float() + 4 / 3, rtol=1e-2)
    assert torch.allclose(part.gradient(part.initial(), torch.ones(3)), torch.full((3,), 4 / 3))
