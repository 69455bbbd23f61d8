"""Codes <-> words: the packer and its inverse (w3pack/format/SPEC.md, section 1, "Tile order").

Pure functions on tensors, on any device. `unpack_codes(pack_codes(c)) == c` for every code matrix and both layouts.
"""

from __future__ import annotations

import torch

from w3pack.errors import CheckpointError, UnsupportedError
from w3pack.format.layout import TILE, Layout
from w3pack.format.linear import LinearSpec

_LOW_BITS = 0x77777777
_SPARE_BIT = 0x88888888 - (1 << 32)  # as a signed int32: bit 3 of every nibble


def pack_codes(codes: torch.Tensor, spec: LinearSpec) -> torch.Tensor:
    """Pack a code matrix.

    Args:
        codes: uint8 [rows, columns], values 0..7.
        spec: the Linear's shape; decides layout and padding (padded codes are 0).

    Returns:
        int32 `spec.codes_shape`.

    Raises:
        UnsupportedError: wrong dtype or shape, or a code above 7.
    """
    if codes.dtype != torch.uint8 or tuple(codes.shape) != (spec.rows, spec.columns):
        raise UnsupportedError(
            f"expected uint8 codes of shape {(spec.rows, spec.columns)}, got {codes.dtype} {tuple(codes.shape)}; "
            "give the codes that this spec was made for"
        )
    if int(codes.max()) > 7:
        raise UnsupportedError(f"expected codes 0..7, got {int(codes.max())}; a map has eight entries")
    padding = (0, spec.padded_columns - spec.columns, 0, spec.padded_rows - spec.rows)
    quads = _bytes_to_nibbles(
        torch.nn.functional.pad(codes, padding).contiguous().view(torch.int32)
    )  # [padded rows, columns / 4]
    halves = quads.view(spec.padded_rows // TILE, 4, 2, 8, spec.padded_columns // TILE, 4, 4)
    # [row tile, block, half, lane row, column tile, lane column, word]
    joined = halves[:, :, 0] | (halves[:, :, 1] << 16)
    words = joined.permute(0, 3, 1, 2, 4, 5).reshape(*spec.codes_shape[:2], 4, 32, 4)  # [rt, ct, block, lane, word]
    if spec.layout == "nibble":
        return words
    fourth = words[..., 3:]
    bits = torch.cat([(fourth << 3), (fourth << 2), (fourth << 1)], dim=-1) & _SPARE_BIT  # code bit b into bit 3
    dense = words[..., :3] | bits  # [rt, ct, block, lane, 3]
    return dense.permute(0, 1, 2, 4, 3).reshape(*spec.codes_shape[:3], 4, 32).transpose(-1, -2).contiguous()


def nibble_words(words: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Packed words of either layout as nibble words.

    Args:
        words: int32 [row tiles, column tiles, vectors, 32, 4].
        layout: which layout `words` has.

    Returns:
        int32 [row tiles, column tiles, 4, 32, 4] in nibble layout.
    """
    if layout == "nibble":
        return words
    by_word = words.transpose(-1, -2).reshape(*words.shape[:2], 4, 3, 32)  # [rt, ct, block, word, lane]
    first, second, third = by_word.unbind(3)
    fourth = ((first >> 3) & 0x11111111) | ((second >> 2) & 0x22222222) | ((third >> 1) & 0x44444444)
    return torch.stack([first & _LOW_BITS, second & _LOW_BITS, third & _LOW_BITS, fourth], dim=-1)


def unpack_codes(words: torch.Tensor, spec: LinearSpec) -> torch.Tensor:
    """Inverse of `pack_codes`.

    Args:
        words: int32 `spec.codes_shape`.
        spec: the Linear's shape.

    Returns:
        uint8 [rows, columns], values 0..7.

    Raises:
        CheckpointError: wrong dtype or shape, or (nibble layout) a nibble with bit 3 set.
    """
    if words.dtype != torch.int32 or tuple(words.shape) != spec.codes_shape:
        raise CheckpointError(
            f"expected int32 code words of shape {spec.codes_shape}, got {words.dtype} {tuple(words.shape)}; "
            "config and words do not belong together"
        )
    if spec.layout == "nibble" and bool((words & _SPARE_BIT).any()):
        raise CheckpointError(
            "expected bit 3 of every nibble to be 0 in nibble layout, got a set bit; words are damaged"
        )
    return unpack_padded(words, spec)[: spec.rows, : spec.columns].contiguous()


def unpack_padded(words: torch.Tensor, spec: LinearSpec) -> torch.Tensor:
    """uint8 [padded rows, padded columns] without checks, for callers that have validated the tensors before."""
    rows = row_quads(words, spec.layout)
    return _nibbles_to_bytes(rows).view(torch.uint8)


def row_quads(words: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Packed words as rows of selectors.

    Args:
        words: int32 [row tiles, column tiles, vectors, 32, 4].
        layout: which layout `words` has.

    Returns:
        int32 [padded rows, padded columns / 4], contiguous: the codes of four neighbouring columns in the low 16 bits, the
        first in the lowest nibble; the high 16 bits are 0.
    """
    nibbles = nibble_words(words, layout)
    row_tiles, column_tiles = nibbles.shape[:2]
    ordered = nibbles.view(row_tiles, column_tiles, 4, 8, 4, 4).permute(0, 2, 3, 1, 4, 5)
    # [row tile, block, lane row, column tile, lane column, word]
    halves = torch.stack([ordered & 0xFFFF, (ordered >> 16) & 0xFFFF], dim=2)  # half in front of the lane row
    return halves.reshape(64 * row_tiles, 16 * column_tiles)


def _bytes_to_nibbles(quads: torch.Tensor) -> torch.Tensor:
    """int32 with a code in each byte -> the same four codes in the low four nibbles."""
    return (quads & 0x7) | ((quads >> 4) & 0x70) | ((quads >> 8) & 0x700) | ((quads >> 12) & 0x7000)


def _nibbles_to_bytes(quads: torch.Tensor) -> torch.Tensor:
    """Inverse of `_bytes_to_nibbles`."""
    return (quads & 0x7) | ((quads & 0x70) << 4) | ((quads & 0x700) << 8) | ((quads & 0x7000) << 12)


def pack_scales(scales: torch.Tensor, spec: LinearSpec) -> torch.Tensor:
    """Row-major scales into tile order.

    Args:
        scales: float16 [rows, groups].
        spec: the Linear's shape; scales of padded rows become 0.

    Returns:
        float16 `spec.scales_shape`.
    """
    if scales.dtype != torch.float16 or tuple(scales.shape) != (spec.rows, spec.groups):
        raise UnsupportedError(
            f"expected float16 scales of shape {(spec.rows, spec.groups)}, got {scales.dtype} {tuple(scales.shape)}; "
            "give the scales that this spec was made for"
        )
    full = torch.nn.functional.pad(scales, (0, 0, 0, spec.padded_rows - spec.rows))
    tiles = full.view(spec.padded_rows // TILE, 8, 8, spec.groups)  # [row tile, 2 * block + half, lane row, group]
    return tiles.permute(0, 3, 2, 1).contiguous()


def unpack_scales(scales: torch.Tensor, spec: LinearSpec) -> torch.Tensor:
    """Inverse of `pack_scales`: float16 `spec.scales_shape` -> float16 [rows, groups]."""
    if scales.dtype != torch.float16 or tuple(scales.shape) != spec.scales_shape:
        raise CheckpointError(
            f"expected float16 scales of shape {spec.scales_shape}, got {scales.dtype} {tuple(scales.shape)}; "
            "config and scales do not belong together"
        )
    return scales.permute(0, 3, 2, 1).reshape(spec.padded_rows, spec.groups)[: spec.rows].contiguous()


def pad_qmap(qmap: torch.Tensor, spec: LinearSpec) -> torch.Tensor:
    """Maps of the logical rows -> maps of the padded rows.

    One map for each logical row becomes one for each padded row; the last map is repeated for the padding, whose scales
    are 0. Any other number of maps passes through.
    """
    if qmap.shape[0] == spec.rows and spec.maps == spec.padded_rows:
        qmap = torch.cat([qmap, qmap[-1:].expand(spec.padded_rows - spec.rows, -1)])
    if tuple(qmap.shape) != spec.qmap_shape:
        raise UnsupportedError(
            f"expected a map of shape {spec.qmap_shape}, got {tuple(qmap.shape)}; give one map, or one per row"
        )
    return qmap.contiguous()
