"""The bytes of the kernels' parameter structs. A new field of a struct is one line here, and one where its value is known."""

from __future__ import annotations

import operator
import struct
from collections.abc import Mapping

#: Structs are declared alignas(16), so their size is a multiple of it.
_ALIGNMENT = 16
_POINTER, _INT64, _INT, _UINT = "Q", "q", "i", "I"


class Packing:
    """Fields of one struct in order, and their bytes."""

    def __init__(self, file: str, fields: Mapping[str, str]) -> None:
        """`file` of the kernels folder declares the struct; `fields` maps names to the letters of module struct."""
        self.file = file
        self.fields = dict(fields)
        format_ = "<" + "".join(fields.values())
        padding = -struct.calcsize(format_) % _ALIGNMENT
        self._struct = struct.Struct(f"{format_}{padding}x")
        self._values = operator.itemgetter(*fields)

    @property
    def size(self) -> int:
        """Bytes of the struct, padding included."""
        return self._struct.size

    def pack(self, values: Mapping[str, int]) -> bytes:
        """The struct's bytes; KeyError for a field without a value."""
        return self._struct.pack(*self._values(values))


# kernels/w3_decode_params.cuh, struct Params
DECODE = Packing(
    "w3_decode_params.cuh",
    {
        "x": _POINTER,
        "codes": _POINTER,
        "scales": _POINTER,
        "qmap": _POINTER,
        "bias": _POINTER,
        "y": _POINTER,
        "partials": _POINTER,
        "staged": _POINTER,
        "staged_scales": _POINTER,
        "x_stride": _INT64,
        "tokens": _INT,
        "rows": _INT,
        "columns": _INT,
        "row_tiles": _INT,
        "column_tiles": _INT,
        "groups": _INT,
        "group_reciprocal": _UINT,
        "map_tiles": _INT,
        "steps": _INT,
        "step_reciprocal": _UINT,
        "row_blocks": _INT,
        "resident_steps": _INT,
        "run_units": _INT,
        "longer_runs": _INT,
        "x_aligned": _INT,
        "token_reciprocal": _UINT,
        "first_chunk": _INT,
        "chunk_steps": _INT,
        "chunk_reciprocal": _UINT,
        "chunks": _INT,
        "clusters": _INT,
    },
)

# kernels/w3_stage.cu, struct Params
STAGE = Packing(
    "w3_stage.cu",
    {
        "x": _POINTER,
        "staged": _POINTER,
        "scales": _POINTER,
        "x_stride": _INT64,
        "tokens": _INT,
        "columns": _INT,
        "x_aligned": _INT,
        "unused": _INT,
    },
)

# kernels/w3_dequantize.cu, struct Params
DEQUANTIZE = Packing(
    "w3_dequantize.cu",
    {
        "codes": _POINTER,
        "scales": _POINTER,
        "qmap": _POINTER,
        "weight": _POINTER,
        "weight_stride": _INT64,
        "rows": _INT,
        "columns": _INT,
        "row_tile_first": _INT,
        "row_tiles": _INT,
        "column_tiles": _INT,
        "groups": _INT,
        "tiles_per_group": _INT,
        "map_tiles": _INT,
        "weight_aligned": _INT,
        "unused": _INT,
    },
)
