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


#: Largest finite E4M3 number.
E4M3_MAX = 448.0


def quantize_fp8_blocks(weight: torch.Tensor, block: tuple[int, int] = (128, 128)) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix to E4M3 with one scale for each block: the block's largest magnitude becomes 448.

    Quotients are rounded once, to nearest even, and saturate. A block of zeros has scale 1; a scale is at least the
    smallest normal float32, so that no division overflows.

    Args:
        weight: floating [rows, columns].
        block: rows and columns of a block; the last one of a side may be partial.

    Returns:
        float8_e4m3fn [rows, columns], and float32 [ceil(rows / R), ceil(columns / C)], by which it is to be multiplied.

    Raises:
        CheckpointError: NaN or infinity.
    """
    rows, columns = weight.shape
    across = -(-columns // block[1])
    packed = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(-(-rows // block[0]), across, dtype=torch.float32, device=weight.device)
    for number, first in enumerate(range(0, rows, block[0])):  # a band of blocks at a time: little memory
        band = weight[first : first + block[0]].to(torch.float64)
        if not bool(torch.isfinite(band).all()):
            raise CheckpointError("expected finite weights, got NaN or infinity; the checkpoint is damaged")
        wide = torch.nn.functional.pad(band, (0, across * block[1] - columns)).view(-1, across, block[1])
        largest = wide.abs().amax(dim=(0, 2))
        scale = (largest / E4M3_MAX).to(torch.float32).clamp_min(torch.finfo(torch.float32).tiny)
        scale = torch.where(largest == 0, torch.ones_like(scale), scale)
        scales[number] = scale
        quotient = (wide / scale.to(torch.float64)[:, None]).clamp_(-E4M3_MAX, E4M3_MAX).view(len(band), -1)
        packed[first : first + block[0]] = _round_to_e4m3(quotient[:, :columns])
    return packed, scales


def _round_to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """float64 within +-448 -> the nearest E4M3 number, ties to even.

    torch's own cast goes by way of float32 and so rounds twice. Here the value is rounded to whole steps of its binade first,
    which float64 does exactly; a quotient of two float32 is never so near a tie that float64 would show it as one.
    """
    exponent = torch.frexp(values)[1].clamp_min(-5) - 4  # of the step: 3 bits below the leading one, -9 for denormals
    step = torch.ldexp(torch.ones_like(values), exponent)
    return (torch.round(values / step) * step).to(torch.float8_e4m3fn)
