"""FLUTE 0.4 checkpoints of 3 bits.

A Linear has `weight` int16 [3N/16, K], `scales` [N, K/g], `tables` [8] and, for the kernel, `tables2`: every pair of table
entries. N is a multiple of 512.

    columns 2q and 2q+1 of `weight` are the low and the high half of one 32-bit word, for matrix columns k = 2q and 2q+1
    block b of 512 rows, lane p = 0..31, row n = 512 b + 32 j + p with j = 0..15: three words,
        word 0 in row 32 b + p of `weight`, word w = 1, 2 in row N/16 + 64 b + 32 (w - 1) + p
    word w holds j = w + 3t for t = 0..4: the odd column at bits 6t..6t+2, the even one at bits 6t+3..6t+5
    bits 30 and 31 of words 0, 1, 2 are bits 0..5 of j = 15: odd column first, then the even one
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from w3pack.checkpoint.imported import (
    ImportedLinear,
    PackedShape,
    check_bits,
    check_group_size,
    check_parts,
    check_tensor,
    parts_of,
)
from w3pack.checkpoint.source import Source, TensorInfo
from w3pack.errors import CheckpointError, UnsupportedError
from w3pack.format.layout import CODES_PER_MAP

_BLOCK_ROWS = 512
_LANES = 32
_ROWS_PER_LANE = 16
_HALVES = ("F16", "BF16")
_FIRST_VERSION = (0, 4)


class FluteImporter:
    """`Importer` of FLUTE."""

    format = "FLUTE"

    def __init__(self, source: Source, config: Mapping[str, Any]) -> None:
        """Check config and headers.

        Raises:
            UnsupportedError: other bits, group size or version, or a table of pairs.
            CheckpointError: tensors that are missing or do not fit each other.
        """
        check_bits(config.get("num_bits", config.get("bits")), format_name=self.format)
        _check_version(config)
        group_size = check_group_size(config.get("group_size"), format_name=self.format)
        if group_size == -1:
            raise CheckpointError("expected a group_size in the FLUTE config, got none; use the original config file")
        self._source = source
        self._group_size = group_size
        packed = {name: parts for name, parts in parts_of(source, "tables").items() if "weight" in parts}
        self.shapes: dict[str, PackedShape] = {module: self._shape(module, parts) for module, parts in packed.items()}

    def _shape(self, module: str, parts: Mapping[str, TensorInfo]) -> PackedShape:
        check_parts(
            module, parts, needed=("weight", "scales", "tables"), allowed=("tables2", "bias", "_extra_state"),
            format_name=self.format,
        )  # fmt: skip
        weight, tables = parts["weight"], parts["tables"]
        if len(weight.shape) != 2 or not all(weight.shape):
            raise CheckpointError(
                f"expected {weight.name} to be a matrix, got shape {list(weight.shape)}; download it again"
            )
        rows, columns = 16 * weight.shape[0] // 3, weight.shape[1]
        if rows % _BLOCK_ROWS or columns % self._group_size or 3 * rows != 16 * weight.shape[0]:
            raise CheckpointError(
                f"expected {weight.name} of [3N/16, K] with {_BLOCK_ROWS} dividing N and {self._group_size} dividing K, got "
                f"{list(weight.shape)}; config and weights do not belong together"
            )
        check_tensor(weight, dtypes=("I16",), shape=weight.shape)
        check_tensor(parts["scales"], dtypes=_HALVES, shape=(rows, columns // self._group_size))
        check_tensor(tables, dtypes=_HALVES, shape=(CODES_PER_MAP,))
        if "tables2" in parts:
            self._check_pairs(tables, parts["tables2"])
        return PackedShape(
            rows=rows,
            columns=columns,
            group_size=self._group_size,
            maps=1,
            parts=tuple(info.name for part, info in parts.items() if part != "bias"),
        )

    def _check_pairs(self, tables: TensorInfo, pairs: TensorInfo) -> None:
        """UnsupportedError unless `tables2` says the same as `tables`; a two-dimensional grid lives in `tables2` alone."""
        check_tensor(pairs, dtypes=("F32", *_HALVES), shape=(CODES_PER_MAP, CODES_PER_MAP))
        single = self._source.read(tables.name)
        both = torch.stack(torch.broadcast_tensors(single[:, None], single[None, :]), dim=-1).contiguous()
        expected, found = both.view(torch.float32).view(CODES_PER_MAP, CODES_PER_MAP), self._source.read(pairs.name)
        cast = expected.to(single.dtype)  # some loaders cast this tensor with all the others and save it so
        same = [_equal(found.float(), expected), _equal(found.float(), cast.float())]
        if not any(same):
            raise UnsupportedError(
                f"expected {pairs.name} to hold the pairs of {tables.name}, got others, which stand for codes of two weights "
                "at once; w3pack has a table for single weights only, so quantise the model with vector size 1"
            )

    def read(self, module: str) -> ImportedLinear:
        """One Linear, codes in the source's order of the table."""
        return ImportedLinear(
            codes=unpack(self._source.read(f"{module}.weight")),
            table=self._source.read(f"{module}.tables").float().view(1, CODES_PER_MAP),
            scales=self._source.read(f"{module}.scales").float(),
            group_size=self._group_size,
        )


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal numbers, with NaN equal to NaN: pairs of halves read as one float may be anything."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0))


def _check_version(config: Mapping[str, Any]) -> None:
    version = config.get("version")
    numbers = re.match(r"(\d{1,6})\.(\d{1,6})", str(version))
    old = numbers is not None and (int(numbers[1]), int(numbers[2])) < _FIRST_VERSION
    legacy = next((key for key in ("num_sms", "num_sms_packed") if key in config), None)
    if old or legacy:
        raise UnsupportedError(
            f"expected a checkpoint of FLUTE 0.4 or later, got {f'version {str(version)[:20]}' if old else f'one with {legacy}'}, "
            "whose packing depends on a GPU; pack it again with flute-kernel 0.4"
        )


def unpack(weight: torch.Tensor) -> torch.Tensor:
    """The codes of a packed weight.

    Args:
        weight: int16 [3N/16, K], contiguous; 512 divides N, K is even.

    Returns:
        uint8 [N, K], values 0..7.
    """
    rows, columns = 16 * weight.shape[0] // 3, weight.shape[1]
    blocks = rows // _BLOCK_ROWS
    words = weight.view(torch.int32)  # [3N/16, K/2]
    others = words[rows // 16 :].view(blocks, 2, _LANES, columns // 2)
    triple = (words[: rows // 16].view(blocks, _LANES, columns // 2), others[:, 0], others[:, 1])
    codes = torch.empty(blocks, _ROWS_PER_LANE, _LANES, columns // 2, 2, dtype=torch.uint8)
    for number, word in enumerate(triple):
        for pair in range(5):
            codes[:, 3 * pair + number, :, :, 1] = (word >> (6 * pair)) & 7
            codes[:, 3 * pair + number, :, :, 0] = (word >> (6 * pair + 3)) & 7
    first, second, third = ((word >> 30) & 3 for word in triple)
    last = first | (second << 2) | (third << 4)
    codes[:, 15, :, :, 1] = last & 7
    codes[:, 15, :, :, 0] = last >> 3
    return codes.view(rows, columns)
