"""SqueezeLLM checkpoints of 3 bits, dense part only.

A Linear has `qweight` int32 [3K/32, N], packed along K as GPTQ packs, and `lookup_table` [N, 8], the eight weights of each row:

    W[n, k] = lookup_table[n, code[k, n]]

The table is float32 or a half. What float16 cannot hold of it (after a power of two has gone to the row's scale) is rounded
to float16: the last bits of float32 entries, and of a half only entries some 10,000 times smaller than the largest of a row.

The sparse part (`rows`, `cols`, `vals`) and the dense rows beside it (`full_rows`) are added to that, and are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from w3pack.checkpoint.imported import (
    ImportedLinear,
    PackedShape,
    check_bits,
    check_parts,
    check_tensor,
    parts_of,
    row_group_size,
    unpack_triples,
)
from w3pack.checkpoint.source import Source, TensorInfo
from w3pack.errors import CheckpointError, UnsupportedError
from w3pack.format.layout import CODES_PER_MAP

_SPARSE_WEIGHTS = ("vals", "full_rows")
_SPARSE = (*_SPARSE_WEIGHTS, "rows", "cols", "full_row_indices", "startrows")


class SqueezeLLMImporter:
    """`Importer` of SqueezeLLM."""

    format = "SqueezeLLM"

    def __init__(self, source: Source, config: Mapping[str, Any]) -> None:
        """Check config and headers.

        Raises:
            UnsupportedError: other bits, or a sparse part.
            CheckpointError: tensors that are missing or do not fit each other.
        """
        check_bits(config.get("wbits", config.get("bits")), format_name=self.format)
        self._source = source
        self.shapes: dict[str, PackedShape] = {
            module: self._shape(module, parts) for module, parts in parts_of(source, "qweight").items()
        }

    def _shape(self, module: str, parts: Mapping[str, TensorInfo]) -> PackedShape:
        filled = [parts[part] for part in _SPARSE_WEIGHTS if part in parts and 0 not in parts[part].shape]
        if filled:
            raise UnsupportedError(
                f"expected a SqueezeLLM checkpoint without its sparse part, got {filled[0].name}, weights outside the table that a "
                "w3pack Linear has no place for; quantise the model as dense only, or run `w3pack quantize` on the "
                "unquantised model"
            )
        check_parts(
            module, parts, needed=("qweight", "lookup_table"), allowed=("bias", *_SPARSE), format_name=self.format
        )
        qweight, table = parts["qweight"], parts["lookup_table"]
        if len(qweight.shape) != 2 or not all(qweight.shape) or qweight.shape[0] % 3:
            raise CheckpointError(
                f"expected {qweight.name} of [3K/32, N], got {list(qweight.shape)}; "
                "this Linear is not of 3 bits, or the file is damaged"
            )
        rows, columns = qweight.shape[1], qweight.shape[0] // 3 * 32
        check_tensor(qweight, dtypes=("I32",), shape=qweight.shape)
        check_tensor(table, dtypes=("F16", "BF16", "F32"), shape=(rows, CODES_PER_MAP))
        return PackedShape(
            rows=rows,
            columns=columns,
            group_size=row_group_size(columns),
            maps=rows,
            parts=tuple(info.name for part, info in parts.items() if part != "bias"),
            rounded=True,
        )

    def read(self, module: str) -> ImportedLinear:
        """One Linear; its scales are 1, its tables the rows' weights."""
        codes = unpack_triples(self._source.read(f"{module}.qweight")).T.contiguous()
        rows, columns = codes.shape
        group_size = row_group_size(columns)
        return ImportedLinear(
            codes=codes,
            table=self._source.read(f"{module}.lookup_table").float(),
            scales=torch.ones(rows, -(-columns // group_size)),
            group_size=group_size,
        )
