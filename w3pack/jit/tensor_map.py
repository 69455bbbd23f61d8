"""Tensor maps: what the copy engine (compute capability 9.0 on) must know of a matrix in order to copy boxes of it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

from w3pack.jit import bindings
from w3pack.jit.kernel import LaunchError

MAP_BYTES = 128
#: The driver wants the map at a multiple of this many bytes.
_ALIGNMENT = 64
_UINT8 = 0
_NO_INTERLEAVE = 0
_SWIZZLE_128_BYTES = 3
_FILL_WITH_ZEROS = 0
_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}
_SINCE_CUDA = 12000

_Encode = Callable[..., int]


def encode_bytes(
    pointer: int, *, rows: int, columns: int, row_bytes: int, box_rows: int, box_columns: int, promotion: int
) -> bytes:
    """The map of a matrix of bytes, swizzled within 128 bytes; outside of it boxes read zeros.

    Args:
        pointer: device address of the first byte, a multiple of 16.
        rows, columns: of the matrix.
        row_bytes: from row to row, a multiple of 16.
        box_rows, box_columns: of each copy, at most 256 and 128.
        promotion: bytes that the second-level cache reads at once: 0, 64, 128 or 256.

    Raises:
        LaunchError: the driver refuses.
        ToolchainError: cuda-bindings or the driver is missing.
    """
    space = ctypes.create_string_buffer(MAP_BYTES + _ALIGNMENT)
    at = -(-ctypes.addressof(space) // _ALIGNMENT) * _ALIGNMENT
    result = _encoder()(
        at,
        _UINT8,
        2,
        pointer,
        (ctypes.c_uint64 * 2)(columns, rows),
        (ctypes.c_uint64 * 1)(row_bytes),
        (ctypes.c_uint32 * 2)(box_columns, box_rows),
        (ctypes.c_uint32 * 2)(1, 1),
        _NO_INTERLEAVE,
        _SWIZZLE_128_BYTES,
        _PROMOTIONS[promotion],
        _FILL_WITH_ZEROS,
    )
    if result != 0:
        raise LaunchError(
            f"expected the driver to map a matrix of {rows} x {columns} bytes at {pointer:#x}, got error {result}; "
            "pass a matrix whose rows begin at multiples of 16 bytes"
        )
    return ctypes.string_at(at, MAP_BYTES)


@functools.cache
def _encoder() -> _Encode:
    """cuTensorMapEncodeTiled itself: the object that cuda-bindings would have it fill is not always aligned."""
    driver = bindings.driver()
    found = driver.cuGetProcAddress(b"cuTensorMapEncodeTiled", _SINCE_CUDA, 0)
    if int(found[0]) != 0 or not int(found[1]):
        raise LaunchError(
            f"expected a driver that makes tensor maps, got {found[0].name}; install a driver for CUDA 12 or later"
        )
    prototype = ctypes.CFUNCTYPE(
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
    )
    encode: _Encode = prototype(int(found[1]))
    return encode
