"""Block-scaled FP8 without a kernel of its own: dequantise in bands, then torch's matmul. For any device, block size and strides."""

from __future__ import annotations

import torch
from torch.nn import functional

from w3pack.reference import fp8_gateup

Block = tuple[int, int]


def dequantize(weight: torch.Tensor, scales: torch.Tensor, *, block: Block, dtype: torch.dtype) -> torch.Tensor:
    """The matrix in `dtype`, bit for bit the reference's.

    On CUDA whole blocks take two passes: E4M3 becomes float16 or bfloat16 exactly, and the product with float32 scales is formed in
    float32 and rounded on its way out.
    """
    rows, columns = weight.shape
    quick = weight.is_cuda and dtype in (torch.float16, torch.bfloat16) and weight.is_contiguous()
    if not quick or rows % block[0] or columns % block[1] or scales.dtype != torch.float32:
        return fp8_gateup.dequantize(weight, scales, block=block, dtype=dtype)
    grid = (rows // block[0], columns // block[1])
    if tuple(scales.shape) != grid:
        return fp8_gateup.dequantize(weight, scales, block=block, dtype=dtype)  # which says what is wrong
    values = weight.view(grid[0], block[0], grid[1], block[1]).to(dtype)
    torch.mul(values, scales[:, None, :, None], out=values)
    return values.view(rows, columns)


def linear(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, *, block: Block
) -> torch.Tensor:
    """x [..., columns] -> [..., rows] in x's dtype, as `fp8_gateup.linear`; large matrices in bands."""
    if not weight.is_cuda:
        return fp8_gateup.linear(x, weight, scales, bias, block=block)
    rows, columns = weight.shape
    height = max(1, fp8_gateup.BAND_BYTES // (max(1, columns) * x.element_size() * block[0])) * block[0]
    y = x.new_empty((*x.shape[:-1], rows))
    for first in range(0, rows, height):
        part = weight[first : first + height]
        grid = scales[first // block[0] : -(-(first + part.shape[0]) // block[0])]
        band = dequantize(part, grid, block=block, dtype=x.dtype)
        y[..., first : first + height] = functional.linear(x, band)
    return y if bias is None else y.add_(bias.to(x.dtype))


def gate_up(
    x: torch.Tensor,
    gate: torch.Tensor,
    gate_scales: torch.Tensor,
    up: torch.Tensor,
    up_scales: torch.Tensor,
    *,
    block: Block,
) -> torch.Tensor:
    """SiLU(x W_gate^T) * (x W_up^T), each step in x's dtype."""
    products = linear(x, gate, gate_scales, None, block=block)
    return functional.silu(products) * linear(x, up, up_scales, None, block=block)


def gate_up_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor,
    gate_scales: torch.Tensor,
    up: torch.Tensor,
    up_scales: torch.Tensor,
    *,
    block: Block,
) -> torch.Tensor:
    """The gradient of x; both products are formed again."""
    gate_product = linear(x, gate, gate_scales, None, block=block)
    up_product = linear(x, up, up_scales, None, block=block)
    of_gate = torch.ops.aten.silu_backward(gradient * up_product, gate_product)
    of_up = gradient * functional.silu(gate_product)
    result = linear_backward(of_gate, gate, gate_scales, block=block)
    return result + linear_backward(of_up, up, up_scales, block=block)


def linear_backward(
    gradient: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, *, block: Block
) -> torch.Tensor:
    """gradient [..., rows] times the matrix -> [..., columns]; the whole matrix is dequantised."""
    return gradient @ dequantize(weight, scales, block=block, dtype=gradient.dtype)
