"""Floats -> E4M3 with block scales: nearest, ties to even, saturating, awkward sizes and magnitudes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from w3pack.errors import CheckpointError
from w3pack.quantize.fp8_blocks import E4M3_MAX, dequantize_blocks, quantize_fp8_blocks

#: Every finite E4M3 number, ascending, once.
NUMBERS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
NUMBERS = NUMBERS[NUMBERS.isfinite()].unique()
SIZES = st.sampled_from([1, 5, 127, 128, 129, 200])


@settings(max_examples=40, deadline=None)
@given(
    rows=SIZES,
    columns=SIZES,
    seed=st.integers(0, 2**31),
    power=st.integers(-30, 30),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_every_weight_becomes_the_nearest_number(
    rows: int, columns: int, seed: int, power: int, dtype: torch.dtype
) -> None:
    magnitude = 2.0 ** (power if dtype != torch.float16 else power / 3)
    weight = (torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * magnitude).to(dtype)
    packed, scales = quantize_fp8_blocks(weight)
    assert packed.dtype == torch.float8_e4m3fn
    assert packed.shape == weight.shape
    assert scales.dtype == torch.float32
    assert scales.shape == (-(-rows // 128), -(-columns // 128))
    whole = scales.double().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    distance = (packed.double() - weight.double() / whole).abs()
    at = torch.searchsorted(NUMBERS, weight.double() / whole).clamp(1, len(NUMBERS) - 1)
    nearest = torch.minimum(
        (NUMBERS[at] - weight.double() / whole).abs(), (NUMBERS[at - 1] - weight.double() / whole).abs()
    )
    assert torch.equal(distance, nearest)
    assert bool(packed.double().isfinite().all())
    assert torch.equal(dequantize_blocks(packed, scales, block=(128, 128)), (packed.float() * whole.float()))


def test_ties_go_to_even_and_the_largest_is_448() -> None:
    weight = torch.tensor([[448.0, 17.0, 19.0, 21.0, -17.0, 0.0]])  # E4M3 has 16, 18, 20, 22 there
    packed, scales = quantize_fp8_blocks(weight)
    assert scales.item() == 1.0
    assert packed.float().tolist() == [[448.0, 16.0, 20.0, 20.0, -16.0, 0.0]]


def test_blocks_do_not_see_each_other() -> None:
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    packed, scales = quantize_fp8_blocks(weight)
    weight[:128, :128] *= 1000
    other, other_scales = quantize_fp8_blocks(weight)
    assert torch.equal(other[128:].float(), packed[128:].float())
    assert torch.equal(other_scales[:, 1], scales[:, 1])
    assert other_scales[0, 0] > 900 * scales[0, 0]


def test_zeros_and_the_smallest_numbers() -> None:
    packed, scales = quantize_fp8_blocks(torch.zeros(3, 130))
    assert not packed.float().any()
    assert torch.equal(scales, torch.ones(1, 2))
    tiny = torch.full((2, 2), 1e-45)
    packed, scales = quantize_fp8_blocks(tiny)
    assert bool(packed.float().isfinite().all())
    assert scales.item() == torch.finfo(torch.float32).tiny
    huge = torch.full((2, 2), torch.finfo(torch.float32).max)
    packed, scales = quantize_fp8_blocks(huge)
    assert packed.float().unique().tolist() == [E4M3_MAX]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_are_refused(bad: float) -> None:
    with pytest.raises(CheckpointError, match="finite"):
        quantize_fp8_blocks(torch.tensor([[1.0, bad]]))
