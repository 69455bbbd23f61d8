"""The bytes of the FP8 kernels' parameter structs. A new field of a struct is one line here, and one where its value is known."""

from __future__ import annotations

import struct
from typing import Any

_MAP, _POINTER, _INT64, _INT, _UINT = "128s", "Q", "q", "i", "I"

#: kernels/gateup_params.cuh, struct Params, which is declared alignas(64).
DECODE_FIELDS = {
    "first_map": _MAP,
    "second_map": _MAP,
    "x": _POINTER,
    "first_scales": _POINTER,
    "second_scales": _POINTER,
    "y": _POINTER,
    "partials": _POINTER,
    "x_stride": _INT64,
    "tokens": _INT,
    "rows": _INT,
    "columns": _INT,
    "scale_columns": _INT,
    "pieces": _INT,
    "piece_reciprocal": _UINT,
    "run_units": _INT,
    "longer_runs": _INT,
    "unused": "48s",
}
_DECODE = struct.Struct("<" + "".join(DECODE_FIELDS.values()))
DECODE_BYTES = _DECODE.size


def pack_decode(values: dict[str, Any]) -> bytes:
    """The struct's bytes; KeyError for a field without a value."""
    return _DECODE.pack(*[values[name] for name in DECODE_FIELDS])


_BETWEEN = struct.Struct("<QQQQqqiiii")
BETWEEN_BYTES = _BETWEEN.size


def pack_between(
    *,
    first: int,
    second: int,
    out: int,
    scales: int,
    first_stride: int,
    second_stride: int,
    tokens: int,
    columns: int,
    groups: int,
    padded_tokens: int,
) -> bytes:
    """kernels/gateup_between.cu, struct Params."""
    return _BETWEEN.pack(
        first, second, out, scales, first_stride, second_stride, tokens, columns, groups, padded_tokens
    )
