"""What every importer hands over: a Linear of another 3-bit format as codes, table and scales, in that format's own terms.

    W[n, k] = table[map_of(n), codes[n, k]] * scales[n, k // group_size]

Nothing is rounded here; `w3pack.pack.exact_map` turns it into what a w3pack checkpoint stores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from w3pack.checkpoint.source import Source, TensorInfo
from w3pack.errors import CheckpointError, UnsupportedError
from w3pack.format.layout import TILE
from w3pack.format.linear import MAX_SIDE

CODES_PER_TRIPLE = 32
_ROWS_AT_ONCE = 1 << 20  # weights for which indices are spread out at once


@dataclass(frozen=True)
class PackedShape:
    """A packed Linear as headers and zero points tell it, before its codes are read.

    `group_size` is that of the result; `maps` is 1, or `rows` for a map of each row; `parts` are the names of the tensors
    that are consumed (the bias is not one of them); `rounded` says that entries of its tables may be rounded to float16.
    """

    rows: int
    columns: int
    group_size: int
    maps: int
    parts: tuple[str, ...]
    rounded: bool = False


@dataclass(frozen=True)
class ImportedLinear:
    """One Linear, read.

    Attributes:
        codes: uint8 [rows, columns], values 0..7.
        table: float32 [1 or rows, 8], in any order.
        scales: float32 [rows, ceil(columns / group_size)].
        group_size: columns that share a scale.
    """

    codes: torch.Tensor
    table: torch.Tensor
    scales: torch.Tensor
    group_size: int

    def dequantize(self) -> torch.Tensor:
        """float32 [rows, columns] by the formula of the source format: the truth that the result is measured against."""
        rows, columns = self.codes.shape
        weight = torch.empty(rows, columns)
        step = max(1, _ROWS_AT_ONCE // columns)
        for first in range(0, rows, step):
            part = slice(first, first + step)
            index = self.codes[part].to(torch.int64)
            values = self.table[0][index] if self.table.shape[0] == 1 else self.table[part].gather(1, index)
            weight[part] = values * self.scales[part].repeat_interleave(self.group_size, dim=1)[:, :columns]
        return weight


class Importer(Protocol):
    """Reads one foreign format. Making one checks every header, so that `read` seldom fails."""

    @property
    def format(self) -> str:
        """Its name in reports."""
        ...

    @property
    def shapes(self) -> Mapping[str, PackedShape]:
        """Module -> shape, for every packed Linear."""
        ...

    def read(self, module: str) -> ImportedLinear:
        """One Linear."""
        ...


def row_group_size(columns: int) -> int:
    """The group size in which a scale for each whole row is repeated: the largest usual one that needs no padding."""
    return next((size for size in (256, 128, TILE) if columns % size == 0), TILE)


def check_group_size(group_size: object, *, format_name: str) -> int:
    """The group size of a config as an integer, -1 (or None) meaning whole rows; UnsupportedError for one w3pack has not."""
    if group_size is None or group_size == -1:
        return -1
    if type(group_size) is not int or not TILE <= group_size <= MAX_SIDE or group_size % TILE:
        raise UnsupportedError(
            f"expected a {format_name} checkpoint with groups of a multiple of {TILE} columns, got group_size "
            f"{str(group_size)[:40]}; quantise the model with group size 64 or 128, or run `w3pack quantize` on the "
            "unquantised model"
        )
    return group_size


def check_bits(bits: object, *, format_name: str) -> None:
    """UnsupportedError unless a config says 3 bits."""
    if bits != 3 or type(bits) is not int:
        raise UnsupportedError(
            f"expected a {format_name} checkpoint of 3 bits, got {str(bits)[:40]}; w3pack holds 3-bit codes only, so run "
            "`w3pack quantize` on the unquantised model"
        )


def parts_of(source: Source, marker: str) -> dict[str, dict[str, TensorInfo]]:
    """Module -> part -> tensor, for every module that has a tensor called `marker`, in the order of the files."""
    modules = [name.removesuffix(f".{marker}") for name in source.tensors if name.endswith(f".{marker}")]
    found: dict[str, dict[str, TensorInfo]] = {module: {} for module in modules}
    for name, info in source.tensors.items():
        module, _, part = name.rpartition(".")
        if module in found:
            found[module][part] = info
    return found


def check_parts(
    module: str, parts: Mapping[str, TensorInfo], *, needed: tuple[str, ...], allowed: tuple[str, ...], format_name: str
) -> None:
    """A packed Linear must have the tensors `needed` and none besides `needed` and `allowed`.

    Raises:
        CheckpointError: one is missing.
        UnsupportedError: there is another, whose meaning would be lost.
    """
    missing = [part for part in needed if part not in parts]
    if missing:
        raise CheckpointError(
            f"expected {module}.{missing[0]} beside the other tensors of {module}, got none; "
            "download the checkpoint completely"
        )
    strange = [part for part in parts if part not in (*needed, *allowed)]
    if strange:
        raise UnsupportedError(
            f"expected only {', '.join((*needed, *allowed))} in a {format_name} Linear, got {module}.{strange[0]} too, which "
            "a w3pack Linear has no place for; quantise the model without it"
        )


def check_tensor(info: TensorInfo, *, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    """CheckpointError unless a tensor has one of these dtypes and this shape."""
    if info.dtype not in dtypes or info.shape != shape:
        raise CheckpointError(
            f"expected {info.name} to be {' or '.join(dtypes)} {list(shape)}, got {info.dtype} {list(info.shape)}; "
            "config.json and the weights do not belong together"
        )


def unpack_triples(words: torch.Tensor) -> torch.Tensor:
    """The 3-bit packing of GPTQ along the first axis: 32 codes are a string of 96 bits in three words, lowest bit first.

    Codes 10 and 21 lie across the borders of their words.

    Args:
        words: int32 [3 * n, width].

    Returns:
        uint8 [32 * n, width], values 0..7.
    """
    triples = words.view(-1, 3, words.shape[1])
    codes = torch.empty(triples.shape[0], CODES_PER_TRIPLE, words.shape[1], dtype=torch.uint8)
    for number in range(CODES_PER_TRIPLE):
        word, bit = divmod(3 * number, 32)
        code = triples[:, word] >> bit
        if bit > 29:
            held = 32 - bit
            code = (code & ((1 << held) - 1)) | (triples[:, word + 1] << held)
        codes[:, number] = code & 7
    return codes.view(-1, words.shape[1])


def is_object(value: object) -> dict[str, Any]:
    """A JSON object as it is, anything else as an empty one."""
    return value if isinstance(value, dict) else {}
