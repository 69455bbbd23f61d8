"""The slow truth of the W3 format, in plain torch; also the CPU implementation of the op.

W[n, k] = value(qmap[map_of(n), code[n, k]]) * scale[n, k // group_size]        (w3pack/format/SPEC.md, section 1)
"""

from __future__ import annotations

import torch

from w3pack.format.linear import LinearSpec
from w3pack.pack.words import unpack_padded

#: Rows decoded at once: the temporaries of a block stay in a few MiB, whatever the matrix.
_BLOCK_WEIGHTS = 1 << 20


def map_values(qmap: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """What the entries of a map mean: q / 127 for int8, q itself for float16.

    Args:
        qmap: int8 or float16 [maps, 8].
        dtype: dtype of the result.

    Returns:
        [maps, 8].
    """
    values = qmap.to(dtype)
    return values / 127 if qmap.dtype == torch.int8 else values


def dequantize(
    codes: torch.Tensor,
    scales: torch.Tensor,
    qmap: torch.Tensor,
    *,
    spec: LinearSpec,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The weight matrix that the packed tensors stand for.

    Args:
        codes: int32 `spec.codes_shape`.
        scales: float16 `spec.scales_shape`.
        qmap: int8 or float16 `spec.qmap_shape`.
        spec: the Linear's shape.
        dtype: dtype of the result; products are formed in float32 (float64 for float64) and rounded once.

    Returns:
        [rows, columns].
    """
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    values = map_values(qmap, dtype=exact)
    weight = torch.empty(spec.rows, spec.columns, dtype=dtype, device=codes.device)
    tiles_at_once = max(1, _BLOCK_WEIGHTS // (64 * spec.padded_columns))
    for first in range(0, codes.shape[0], tiles_at_once):
        last = min(first + tiles_at_once, codes.shape[0])
        block = LinearSpec(
            rows=64 * (last - first),
            columns=spec.padded_columns,
            group_size=spec.group_size,
            layout=spec.layout,
            maps=1,
            qmap_dtype=spec.qmap_dtype,
            bias=False,
        )
        rows = slice(64 * first, min(64 * last, spec.rows))
        index = unpack_padded(codes[first:last], block).int()
        if spec.maps == 1:
            picked = values.view(-1)[index]
        else:
            map_of = torch.arange(64 * first, 64 * last, device=codes.device) // spec.rows_per_map
            picked = values.view(-1)[index + 8 * map_of[:, None]]
        # float16 [tiles, groups, 8, 8] -> [rows, groups]
        by_row = scales[first:last].permute(0, 3, 2, 1).reshape(block.rows, spec.groups).to(exact)
        picked = picked.view(block.rows, spec.groups, spec.group_size).mul_(by_row.unsqueeze(-1))
        weight[rows] = picked.view(block.rows, -1)[: rows.stop - rows.start, : spec.columns].to(dtype)
    return weight


def linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    qmap: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    spec: LinearSpec,
) -> torch.Tensor:
    """y = x W^T + bias with W rounded once to x's dtype, exactly what a stock Linear holding that W computes.

    Args:
        x: floating [..., columns].
        bias: [rows] or None; cast to x's dtype.

    Returns:
        [..., rows] in x's dtype.
    """
    weight = dequantize(codes, scales, qmap, spec=spec, dtype=x.dtype)
    return torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))
