"""The slow truth of the W3 format, in plain torch; also the CPU implementation of the op.

W[n, k] = value(qmap[map_of(n), code[n, k]]) * scale[n, k // group_size]        (w3pack/format/SPEC.md, section 1)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from w3pack.format.layout import TILE
from w3pack.format.linear import LinearSpec
from w3pack.pack.words import row_quads

#: Rows decoded at once: the temporaries of a block stay in a few MiB, whatever the matrix.
_BLOCK_WEIGHTS = 1 << 20

#: Weights from which on making the table of four codes costs less than it saves.
_TABLE_PAYS = 1 << 18


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
    weight = torch.empty(spec.rows, spec.columns, dtype=dtype, device=codes.device)
    for rows, block in dequantized_blocks(codes, scales, qmap, spec=spec, exact=dtype == torch.float64):
        weight[rows] = block.to(dtype)
    return weight


def dequantized_blocks(
    codes: torch.Tensor,
    scales: torch.Tensor,
    qmap: torch.Tensor,
    *,
    spec: LinearSpec,
    exact: bool = False,
) -> Iterator[tuple[slice, torch.Tensor]]:
    """The weight matrix in blocks of whole row tiles: (rows, float32 [block rows, columns]), float64 if `exact`."""
    dtype = torch.float64 if exact else torch.float32
    values = map_values(qmap, dtype=dtype)
    table = _quad_table(values[0]) if spec.maps == 1 and spec.weights >= _TABLE_PAYS else None
    tiles_at_once = max(1, _BLOCK_WEIGHTS // (TILE * spec.padded_columns))
    for first in range(0, codes.shape[0], tiles_at_once):
        last = min(first + tiles_at_once, codes.shape[0])
        quads = row_quads(codes[first:last], spec.layout)
        if table is not None:
            picked = table.index_select(0, quads.view(-1) & 0x7777)
        else:
            shifts = torch.arange(0, 16, 4, device=codes.device, dtype=torch.int32)
            index = (quads.unsqueeze(-1) >> shifts) & 7  # [block rows, columns / 4, 4]
            map_of = torch.arange(TILE * first, TILE * last, device=codes.device) // spec.rows_per_map
            picked = values.view(-1)[index + 8 * map_of[:, None, None]]
        # float16 [tiles, groups, 8, 8] -> [block rows, groups, 1]
        by_row = scales[first:last].permute(0, 3, 2, 1).reshape(quads.shape[0], spec.groups, 1).to(dtype)
        block = picked.view(quads.shape[0], spec.groups, spec.group_size).mul_(by_row).view(quads.shape[0], -1)
        rows = slice(TILE * first, min(TILE * last, spec.rows))
        yield rows, block[: rows.stop - rows.start, : spec.columns]


def _quad_table(values: torch.Tensor) -> torch.Tensor:
    """Four codes at once: [0x7778, 4], entry s holding the values of the codes in the four nibbles of selector s.

    A selector is a code word's half, as in the kernels; one lookup fetches four neighbouring weights.
    """
    selectors = torch.arange(0x7778, device=values.device)
    return torch.stack([values[(selectors >> shift) & 7] for shift in (0, 4, 8, 12)], dim=-1)


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
