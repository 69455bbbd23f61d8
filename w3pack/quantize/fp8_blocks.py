"""Block-scaled FP8 weights -> floats (SPEC.md, section 2).

The block size comes from the checkpoint's config, never from dividing shapes: 1000 rows with 8 scale rows are blocks of
128 with a partial last one, not blocks of 125.
"""

from __future__ import annotations

import torch

from w3pack.errors import CheckpointError


def decode_scales(scales: torch.Tensor) -> torch.Tensor:
    """Block scales in whatever dtype they are stored -> float32 of the same shape.

    float32, bfloat16 and float16 are values; e8m0, and uint8 holding its bytes, mean 2^(byte - 127).
    """
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    return scales.to(torch.float32)


def dequantize_blocks(weight: torch.Tensor, scales: torch.Tensor, *, block: tuple[int, int]) -> torch.Tensor:
    """Multiply each block of an FP8 matrix by its scale.

    Args:
        weight: float8 [..., rows, columns]; leading axes (experts) are blocked one by one.
        scales: [..., ceil(rows / block rows), ceil(columns / block columns)], any dtype of `decode_scales`.
        block: rows and columns of a block, from the config's `weight_block_size`.

    Returns:
        float32 of `weight`'s shape.

    Raises:
        CheckpointError: the grid is not the one that the shape and the block size call for.
    """
    rows, columns = weight.shape[-2:]
    grid = (*weight.shape[:-2], -(-rows // block[0]), -(-columns // block[1]))
    if tuple(scales.shape) != grid:
        raise CheckpointError(
            f"expected a scale grid of {grid} for a weight of {tuple(weight.shape)} in blocks of {block}, "
            f"got {tuple(scales.shape)}; the checkpoint contradicts its config"
        )
    values = decode_scales(scales)
    result = weight.to(torch.float32)
    for first in range(0, rows, block[0]):  # one band of blocks at a time: the expanded scales stay small
        band = values[..., first // block[0], :].repeat_interleave(block[1], dim=-1)[..., :columns]
        result[..., first : first + block[0], :].mul_(band.unsqueeze(-2))
    return result
