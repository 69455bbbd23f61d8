"""Gate and up <-> one tensor and one grid: bytes, every scale dtype, awkward sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from w3pack.errors import CheckpointError
from w3pack.pack.gateup import (
    E4M3,
    SCALE_DTYPES,
    fuse_scales,
    fuse_weights,
    grid_shape,
    holds_nan,
    narrow_scales,
    split_rows,
    widen_scales,
)

SIZES = st.sampled_from([1, 2, 63, 64, 127, 128, 129, 192, 300])


def random_weight(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Every byte, NaN included: fusing looks at no value."""
    return torch.randint(
        0, 256, (rows, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    ).view(E4M3)


def random_scales(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Finite scales over the whole range of the dtype, the smallest included."""
    generator = torch.Generator().manual_seed(seed)
    if dtype in (torch.uint8, torch.float8_e8m0fnu):
        found = torch.randint(0, 255, shape, dtype=torch.uint8, generator=generator)
        found.view(-1)[0] = 0  # 2^-127, which float32 holds as a denormal number only
        return found.view(dtype)
    found = torch.randn(shape, generator=generator).exp().to(dtype)
    found.view(-1)[0] = torch.finfo(dtype).smallest_normal
    return found


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@settings(max_examples=60, deadline=None)
@given(rows=SIZES, columns=SIZES, seed=st.integers(0, 2**31))
def test_fused_bytes_are_the_sources_and_halves_are_views(rows: int, columns: int, seed: int) -> None:
    gate, up = random_weight(rows, columns, seed), random_weight(rows, columns, seed + 1)
    fused = fuse_weights(gate, up)
    assert fused.shape == (2 * rows, columns)
    assert fused.nbytes == gate.nbytes + up.nbytes
    for half, source, offset in zip(split_rows(fused), (gate, up), (0, gate.nbytes), strict=True):
        assert same_bytes(half, source)
        assert half.data_ptr() == fused.data_ptr() + offset
        assert half.is_contiguous()


@settings(max_examples=120, deadline=None)
@given(rows=SIZES, columns=SIZES, seed=st.integers(0, 2**31), dtypes=st.tuples(*[st.sampled_from(SCALE_DTYPES)] * 2))
def test_grids_are_stacked_exactly_in_every_dtype(
    rows: int, columns: int, seed: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    shape = grid_shape(rows, columns, block=(128, 128))
    assert shape == ((rows + 127) // 128, (columns + 127) // 128)
    sources = [random_scales(shape, dtype, seed + n) for n, dtype in enumerate(dtypes)]
    fused = fuse_scales(*sources)
    assert fused.dtype == torch.float32
    assert fused.shape == (2 * shape[0], shape[1])
    for half, source in zip(split_rows(fused), sources, strict=True):
        assert same_bytes(narrow_scales(half, source.dtype), source)


def test_every_e8m0_byte_means_a_power_of_two_and_comes_back() -> None:
    stored = torch.arange(255, dtype=torch.uint8)
    wide = widen_scales(stored)
    assert torch.equal(wide.double(), 2.0 ** (stored.double() - 127))
    assert torch.equal(narrow_scales(wide, torch.uint8), stored)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scales_that_are_none(dtype: torch.dtype, bad: float) -> None:
    with pytest.raises(CheckpointError, match="finite"):
        widen_scales(torch.tensor([[1.0, bad]], dtype=dtype))
    with pytest.raises(CheckpointError, match="finite"):
        widen_scales(torch.tensor([[255]], dtype=torch.uint8))


def test_what_does_not_fit_is_refused() -> None:
    weight, grid = random_weight(4, 4, 0), torch.ones(1, 1)
    for gate, up in ((weight, weight[:3]), (weight.float(), weight), (weight.view(torch.float8_e5m2), weight)):
        with pytest.raises(CheckpointError, match="one shape"):
            fuse_weights(gate, up)
    with pytest.raises(CheckpointError, match="one shape"):
        fuse_scales(grid, torch.ones(2, 1))
    with pytest.raises(CheckpointError, match="float64"):
        fuse_scales(grid.double(), grid)
    with pytest.raises(CheckpointError, match="even"):
        split_rows(weight[:3])
    with pytest.raises(CheckpointError, match="cannot hold"):
        narrow_scales(torch.tensor([[0.3]]), torch.bfloat16)


def test_nan_is_seen_in_the_bytes() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(E4M3)
    for start in range(256):
        assert holds_nan(every[start : start + 1]) == bool(every[start : start + 1].float().isnan())
    assert not holds_nan(every[:0])
    assert holds_nan(every.view(16, 16).T)
    assert not holds_nan(every.view(16, 16)[:7].T)
