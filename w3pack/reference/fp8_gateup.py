"""The slow truth of a fused FP8 gate/up pair (SPEC.md, section 2), and its implementation on the CPU.

    gate = x W_gate^T      up = x W_up^T      y = act(gate) * up        W[r, c] = E4M3[r, c] * scale[block of r, block of c]

The row block of gate row r is r // R, that of up row r is ceil(I/R) + r // R: also where R does not divide I.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from w3pack.errors import UnsupportedError

#: Float copies of weights are made in bands of at most this many bytes.
BAND_BYTES = 64 << 20


def dequantize(
    weight: torch.Tensor, scales: torch.Tensor, *, block: tuple[int, int], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """One block-scaled matrix in floats.

    Args:
        weight: float8 [rows, columns].
        scales: [ceil(rows / R), ceil(columns / C)], any float dtype, or uint8 with e8m0 bytes.
        block: (R, C).
        dtype: of the result. The product is formed in float32 (float64 for a float64 result) and rounded once.

    Raises:
        UnsupportedError: the grid is not the one that shape and block call for.
    """
    rows, columns = weight.shape
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    if tuple(scales.shape) != grid:
        raise UnsupportedError(
            f"expected a scale grid of {grid} for {rows} x {columns} in blocks of {block}, got {tuple(scales.shape)}; "
            "take the block size from the checkpoint's config"
        )
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    values = (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).to(torch.float32).to(exact)
    row_block = torch.arange(rows, device=weight.device) // block[0]
    column_block = torch.arange(columns, device=weight.device) // block[1]
    expanded = values[row_block][:, column_block]  # [rows, columns]
    return (weight.to(exact) * expanded).to(dtype)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    block: tuple[int, int],
    band_bytes: int = BAND_BYTES,
) -> torch.Tensor:
    """x [..., columns] times the transpose of a block-scaled matrix [rows, columns] -> [..., rows] in x's dtype.

    The matrix is dequantised to x's dtype in bands of whole row blocks, at most `band_bytes` each where a block allows it.
    """
    rows, columns = weight.shape
    height = max(1, band_bytes // (max(1, columns) * 4 * block[0])) * block[0]
    bands = []
    for first in range(0, rows, height):
        part = weight[first : first + height]
        grid = scales[first // block[0] : -(-(first + part.shape[0]) // block[0])]
        band_bias = None if bias is None else bias[first : first + height].to(x.dtype)
        bands.append(functional.linear(x, dequantize(part, grid, block=block, dtype=x.dtype), band_bias))
    return bands[0] if len(bands) == 1 else torch.cat(bands, dim=-1)


def gate_up(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    *,
    block: tuple[int, int],
    activation: Callable[[torch.Tensor], torch.Tensor] = functional.silu,
    band_bytes: int = BAND_BYTES,
) -> torch.Tensor:
    """act(x W_gate^T) * (x W_up^T).

    Args:
        x: floating [..., K].
        weight: float8_e4m3fn [2*I, K], gate rows first.
        scales: [2*ceil(I/R), ceil(K/C)], the two grids one after the other.

    Returns:
        [..., I] in x's dtype.
    """
    half, grid = weight.shape[0] // 2, scales.shape[0] // 2
    gate = linear(x, weight[:half], scales[:grid], block=block, band_bytes=band_bytes)
    up = linear(x, weight[half:], scales[grid:], block=block, band_bytes=band_bytes)
    return activation(gate) * up
