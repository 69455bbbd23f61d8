"""cuBLASLt's block-scaled 8-bit product through torch's ATen overloads, as the arms of a gated MLP call it."""

from __future__ import annotations

import torch

from w3pack.ops.gateup_config import BLOCK

#: torch.nn.functional.ScalingType.BlockWise1x128 and BlockWise128x128, SwizzleType.NO_SWIZZLE: ATen takes numbers.
_TOKEN_GROUPS, _BLOCKS, _NO_SWIZZLE = 4, 5, 0
#: The grid's columns are padded to a multiple of this.
_PADDED = 4


def block_scales(grid: torch.Tensor) -> torch.Tensor:
    """Block scales as cuBLASLt wants them.

    Args:
        grid: float32 [ceil(rows/128), ceil(columns/128)].

    Returns:
        float32 [ceil(columns/128) padded to a multiple of 4, ceil(rows/128)] with strides (1, padded columns); a view where there
        is nothing to pad.
    """
    rows, columns = grid.shape
    if columns % _PADDED == 0:
        return grid.t()
    padded = grid.new_zeros(rows, -(-columns // _PADDED) * _PADDED)
    padded[:, :columns] = grid
    return padded.t()


def product(
    values: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor, out: torch.Tensor
) -> None:
    """Write x W^T into `out`.

    Args:
        values, scales: of x, as `gateup_between.quantize` makes them.
        weight: E4M3 [rows, columns], contiguous.
        weight_scales: as `block_scales` makes them.
        out: bfloat16 or float16 [padded tokens, rows], unit column stride.
    """
    torch.ops.aten._scaled_mm_v2.out(
        values,
        weight.t(),
        [scales],
        [_TOKEN_GROUPS],
        [_NO_SWIZZLE],
        [weight_scales],
        [_BLOCKS],
        [_NO_SWIZZLE],
        None,
        out.dtype,
        out=out,
    )


def why_not(rows: int, columns: int) -> str | None:
    """None when cuBLASLt can take a matrix; otherwise the reason."""
    if columns % 16 or rows % 16:
        return f"16 does not divide {rows} x {columns}"
    if rows % BLOCK:
        return f"{BLOCK} does not divide {rows} rows"
    return None
