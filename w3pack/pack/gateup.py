"""Gate and up of one MLP <-> one FP8 tensor and one scale grid (SPEC.md, section 2).

Rows are appended, never interleaved: gate rows first, then up rows, and their scale grids likewise. Where the block height
does not divide the rows of a half, the second grid starts a new row of blocks: two stacked grids, not one over all rows.
"""

from __future__ import annotations

import torch

from w3pack.errors import CheckpointError

E4M3 = torch.float8_e4m3fn
#: Dtypes in which checkpoints hold block scales; uint8 holds e8m0 bytes.
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.uint8)


def grid_shape(rows: int, columns: int, *, block: tuple[int, int]) -> tuple[int, int]:
    """Shape of the scale grid of one half: the last block of a side may be partial."""
    return -(-rows // block[0]), -(-columns // block[1])


def fuse_weights(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """E4M3 [I, K] and [I, K] -> E4M3 [2*I, K], a new tensor whose bytes are gate's and then up's.

    Raises:
        CheckpointError: other dtypes, or two different shapes.
    """
    if gate.dtype != E4M3 or up.dtype != E4M3 or gate.dim() != 2 or gate.shape != up.shape:
        raise CheckpointError(
            f"expected gate and up to be two float8_e4m3fn matrices of one shape, got {gate.dtype} {list(gate.shape)} and "
            f"{up.dtype} {list(up.shape)}; the checkpoint contradicts itself"
        )
    return torch.cat([gate.view(torch.uint8), up.view(torch.uint8)]).view(E4M3)


def holds_nan(weight: torch.Tensor) -> bool:
    """Whether an E4M3 tensor has a NaN, by its bytes: 0x7F and 0xFF, which is much quicker than a cast. There is no infinity."""
    parts = weight.contiguous().view(torch.uint8).view(-1).split(1 << 22)
    return any(int((part & 0x7F).max()) == 0x7F for part in parts if part.numel())


def split_rows(fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Fused weight [2*I, K] or fused grid -> its gate and up halves, both contiguous views on the same bytes.

    Raises:
        CheckpointError: not a matrix with an even number of rows.
    """
    if fused.dim() != 2 or fused.shape[0] % 2:
        raise CheckpointError(
            f"expected a fused matrix with an even number of rows, got shape {list(fused.shape)}; "
            "the checkpoint was not written by w3pack"
        )
    half = fused.shape[0] // 2
    return fused[:half], fused[half:]


def widen_scales(scales: torch.Tensor) -> torch.Tensor:
    """Block scales in any of `SCALE_DTYPES` -> the same values as float32; exact, and `narrow_scales` undoes it.

    Raises:
        CheckpointError: another dtype, or a scale that is NaN or infinite.
    """
    if scales.dtype not in SCALE_DTYPES:
        raise CheckpointError(
            f"expected block scales as {', '.join(str(dtype).removeprefix('torch.') for dtype in SCALE_DTYPES)}, "
            f"got {scales.dtype}; download the checkpoint again"
        )
    values = scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales
    wide = values.to(torch.float32)
    if not bool(torch.isfinite(wide).all()):
        raise CheckpointError("expected finite block scales, got NaN or infinity; download the checkpoint again")
    return wide


def narrow_scales(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 scales -> the dtype that they were widened from, as a new tensor.

    Raises:
        CheckpointError: a value that `dtype` cannot hold, so that it cannot have come from there.
    """
    narrow = scales.to(torch.float8_e8m0fnu).view(torch.uint8) if dtype == torch.uint8 else scales.to(dtype)
    if not torch.equal(widen_scales(narrow), scales):
        raise CheckpointError(
            f"expected scales that were {str(dtype).removeprefix('torch.')} once, got values that it cannot hold; "
            "the fused checkpoint was changed"
        )
    return narrow.clone() if narrow is scales else narrow


def fuse_scales(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Two grids [ceil(I/R), ceil(K/C)] in any of `SCALE_DTYPES` -> float32 [2*ceil(I/R), ceil(K/C)], gate's first.

    Raises:
        CheckpointError: two different shapes, or scales that `widen_scales` refuses.
    """
    if gate.dim() != 2 or gate.shape != up.shape:
        raise CheckpointError(
            f"expected two scale grids of one shape, got {list(gate.shape)} and {list(up.shape)}; "
            "the checkpoint contradicts itself"
        )
    return torch.cat([widen_scales(gate), widen_scales(up)])
