"""Many tokens: dequantise, then torch's matmul. Large matrices in portions of rows, one dequantised beside the other's product."""

from __future__ import annotations

import threading

import torch

from w3pack.format.linear import LinearSpec
from w3pack.jit import KernelText, load
from w3pack.ops import device as devices
from w3pack.ops import w3_params
from w3pack.ops.w3_config import XDtype
from w3pack.ops.w3_launch import map_tiles

_WARPS = 8
#: Two portions exist at a time.
_MAX_PORTION_BYTES = 128 << 20
#: A portion of this size is still in the L2 cache when the product reads it.
_PORTION_BYTES = 32 << 20
#: The output tile that a matmul on a multiprocessor has at least; smaller portions leave some of them idle.
_OUTPUT_TILE = 128

_SIDE_STREAMS: dict[tuple[int, int], torch.cuda.Stream] = {}
_LOCK = threading.Lock()


def dequantize_text(spec: LinearSpec, x_dtype: XDtype) -> KernelText:
    """The kernel that dequantises a Linear."""
    return KernelText(
        file="w3_dequantize.cu",
        entry="w3_dequantize",
        defines=(
            ("W3_BF16", int(x_dtype == "bfloat16")),
            ("W3_DENSE", int(spec.layout == "dense")),
            ("W3_INT8_MAP", int(spec.qmap_dtype == "int8")),
            ("W3_ROW_MAPS", int(spec.maps > 1 and spec.rows_per_map == 1)),
        ),
    )


def row_portions(
    rows: int, columns: int, tokens: int, *, multiprocessors: int, itemsize: int = 2
) -> list[tuple[int, int]]:
    """Cut rows into portions [first, last), all but the last whole row tiles and of one size.

    A portion is as large as the L2 cache likes, but large enough that its product fills the device, and at most 128 MiB (or
    one row tile, where that is more).
    """
    row_bytes = columns * itemsize
    token_tiles = -(-tokens // _OUTPUT_TILE)
    fills = -(-multiprocessors // token_tiles) * _OUTPUT_TILE
    wanted = min(max(fills, _PORTION_BYTES // row_bytes), _MAX_PORTION_BYTES // row_bytes)
    row_tiles = -(-rows // 64)
    count = -(-row_tiles // max(1, wanted // 64))
    size = 64 * -(-row_tiles // count)
    return [(first, min(first + size, rows)) for first in range(0, rows, size)]


class Dequantizer:
    """The dequantising kernel of a Linear, loaded on a device."""

    def __init__(self, spec: LinearSpec, x_dtype: XDtype, device_index: int) -> None:
        """Load, and build what is not built yet; errors as `Decoder`."""
        self._kernel = load(dequantize_text(spec, x_dtype), device_index)
        self._dtype = torch.bfloat16 if x_dtype == "bfloat16" else torch.float16
        self._device_index = device_index
        self._multiprocessors = devices.limits(device_index).multiprocessors
        self._spec = spec
        self._column_tiles = spec.padded_columns // 64
        self._constants = {
            "rows": spec.rows,
            "columns": spec.columns,
            "column_tiles": self._column_tiles,
            "groups": spec.groups,
            "tiles_per_group": spec.group_size // 64,
            "map_tiles": map_tiles(spec.padded_rows // 64, spec.maps),
            "unused": 0,
        }

    def weight(self, codes: torch.Tensor, scales: torch.Tensor, qmap: torch.Tensor) -> torch.Tensor:
        """The whole matrix, a new tensor [rows, columns]; bit for bit that of the reference."""
        weight = torch.empty(self._spec.rows, self._spec.columns, dtype=self._dtype, device=codes.device)
        self.run(codes, scales, qmap, weight, first=0, stream=devices.current_stream(self._device_index))
        return weight

    def run(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        qmap: torch.Tensor,
        weight: torch.Tensor,
        *,
        first: int,
        stream: int,
    ) -> None:
        """Write rows `first` (a multiple of 64) and on of the matrix into `weight`, on `stream`.

        Args:
            codes, scales, qmap: as stored, contiguous, 16-byte aligned.
            weight: [count, columns], unit column stride; `count` whole row tiles, or up to the last row.
        """
        at, row_stride = weight.data_ptr(), weight.stride(0)
        row_tiles = -(-weight.shape[0] // 64)
        self._kernel.launch(
            stream=stream,
            grid=-(-row_tiles * self._column_tiles // _WARPS),
            block=32 * _WARPS,
            shared_bytes=0,
            params=w3_params.DEQUANTIZE.pack(
                {
                    **self._constants,
                    "codes": codes.data_ptr(),
                    "scales": scales.data_ptr(),
                    "qmap": qmap.data_ptr(),
                    "weight": at,
                    "weight_stride": row_stride,
                    "row_tile_first": first // 64,
                    "row_tiles": row_tiles,
                    "weight_aligned": at % 16 == 0 and row_stride % 8 == 0,
                }
            ),
        )

    def linear(
        self,
        x: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        qmap: torch.Tensor,
        bias: torch.Tensor | None,
        y: torch.Tensor,
    ) -> None:
        """Write y = x W^T + bias on the current stream, with tensors as `Decoder.run` takes them and any number of tokens."""
        spec = self._spec
        portions = row_portions(spec.rows, spec.columns, x.shape[0], multiprocessors=self._multiprocessors)
        main = torch.cuda.current_stream(self._device_index)
        side = _side_stream(self._device_index, main.cuda_stream) if len(portions) > 1 else None
        # Allocated on the main stream and used on the side stream only between a fork and a join, so that the allocator
        # needs to know of the main stream alone.
        scratch = [
            torch.empty(portions[0][1], spec.columns, dtype=x.dtype, device=x.device)
            for _ in range(1 if side is None else 2)
        ]
        filled, free = torch.cuda.Event(), [torch.cuda.Event(), torch.cuda.Event()]
        if side is not None:
            free[0].record(main)
            free[1].record(main)
        for number, (first, last) in enumerate(portions):
            weight = scratch[number % len(scratch)][: last - first]
            if side is None:
                self.run(codes, scales, qmap, weight, first=first, stream=main.cuda_stream)
            else:
                side.wait_event(free[number % 2])
                self.run(codes, scales, qmap, weight, first=first, stream=side.cuda_stream)
                filled.record(side)
                main.wait_event(filled)
            _multiply(x, weight, None if bias is None else bias[first:last], y[:, first:last])
            if side is not None:
                free[number % 2].record(main)


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def _side_stream(device_index: int, main: int) -> torch.cuda.Stream | None:
    """The side stream of a main stream: one each, so that none is drawn into another one's capture.

    None where there is none yet and a capture is under way, during which no stream is made; the portions then follow
    each other on the main stream.
    """
    key = (device_index, main)
    side = _SIDE_STREAMS.get(key)
    if side is None and not torch.cuda.is_current_stream_capturing():
        with _LOCK:
            side = _SIDE_STREAMS.get(key) or _SIDE_STREAMS.setdefault(key, devices.own_stream(device_index))
    return side
