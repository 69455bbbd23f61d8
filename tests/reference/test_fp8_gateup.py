"""The reference against loops over single elements in float64; partial blocks and stacked grids included."""

from __future__ import annotations

import pytest
import torch

from w3pack.errors import UnsupportedError
from w3pack.reference import fp8_gateup


def element_by_element(weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], halves: int) -> torch.Tensor:
    """float64 [rows, columns] by the sentence of the format, for one matrix or a fused pair."""
    result = torch.empty(weight.shape, dtype=torch.float64)
    half, grid = weight.shape[0] // halves, scales.shape[0] // halves
    for row in range(weight.shape[0]):
        at = row // half * grid + row % half // block[0]
        for column in range(weight.shape[1]):
            result[row, column] = float(weight[row, column]) * float(scales[at, column // block[1]])
    return result


def made(rows: int, columns: int, block: tuple[int, int], halves: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and a grid whose neighbours differ by large factors."""
    generator = torch.Generator().manual_seed(rows + columns)
    weight = (torch.randn(halves * rows, columns, generator=generator) * 50).to(torch.float8_e4m3fn)
    shape = (halves * -(-rows // block[0]), -(-columns // block[1]))
    return weight, 3.0 ** (torch.arange(shape[0] * shape[1]).view(shape) % 7 - 3.0)


@pytest.mark.parametrize(
    ("rows", "columns", "block"), [(10, 7, (4, 3)), (8, 6, (4, 3)), (3, 2, (4, 3)), (130, 5, (128, 128))]
)
def test_partial_blocks(rows: int, columns: int, block: tuple[int, int]) -> None:
    weight, scales = made(rows, columns, block)
    expected = element_by_element(weight, scales, block, 1)
    assert torch.equal(fp8_gateup.dequantize(weight, scales, block=block, dtype=torch.float64), expected)
    assert torch.equal(fp8_gateup.dequantize(weight, scales, block=block), expected.float())


@pytest.mark.parametrize(("rows", "columns", "block"), [(10, 7, (4, 3)), (8, 6, (4, 3)), (5, 9, (4, 4))])
def test_fused_pair_is_two_products(rows: int, columns: int, block: tuple[int, int]) -> None:
    weight, scales = made(rows, columns, block, halves=2)
    whole = element_by_element(weight, scales, block, 2)
    x = torch.randn(2, 3, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gate, up = x @ whole[:rows].T, x @ whole[rows:].T
    expected = gate / (1 + torch.exp(-gate)) * up
    found = fp8_gateup.gate_up(x, weight, scales, block=block)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    banded = fp8_gateup.gate_up(x, weight, scales, block=block, band_bytes=1)  # one row block at a time
    torch.testing.assert_close(banded, expected, rtol=1e-12, atol=1e-12)
    assert fp8_gateup.gate_up(x.bfloat16(), weight, scales, block=block).dtype == torch.bfloat16


def test_a_grid_for_other_blocks_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="scale grid"):
        fp8_gateup.dequantize(torch.zeros(192, 8).to(torch.float8_e4m3fn), torch.ones(1, 1), block=(128, 128))
