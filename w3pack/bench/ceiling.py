"""How fast the device can read the bytes that a call must read: nothing can beat it, so every time stands beside it.

On sm_90 and later: kernels/read_ceiling.cu, bulk copies into shared memory, 16 KB times 6 or 12 in flight on each
multiprocessor, whichever is faster. Elsewhere: torch copies half of the bytes, so that as many bytes move; the label says so.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

from w3pack.bench.timing import Timing, copies_for, graph_time, l2_bytes
from w3pack.jit import KernelText, load
from w3pack.ops.w3_config import DeviceLimits

PIECE_BYTES = 16 << 10
PIECES = (6, 12)
BULK_READ = "read only, bulk copies into shared memory"
TORCH_COPY = "torch copy of half the bytes"


@dataclass(frozen=True)
class Ceiling:
    """Time over `nbytes`; `kind` says how it was measured."""

    nbytes: int
    timing: Timing
    kind: str

    @property
    def terabytes_per_second(self) -> float:
        """Rate at the median."""
        return self.nbytes / self.timing.median_us / 1e6


def read_text(pieces: int) -> KernelText:
    """The reading kernel with `pieces` times 16 KB in flight."""
    return KernelText(
        file="read_ceiling.cu",
        entry="read_ceiling",
        defines=(("READ_PIECES", pieces), ("READ_PIECE_BYTES", PIECE_BYTES)),
    )


def read_shared_bytes(pieces: int) -> int:
    """Dynamic shared memory of the reading kernel: the pieces and their barriers."""
    return pieces * (PIECE_BYTES + 8)


def read_ceiling(nbytes: int, device_index: int, limits: DeviceLimits) -> Ceiling:
    """The ceiling over exactly `nbytes` (rounded up to 16), cold, in a replayed graph, on the current device."""
    size = max(16, -(-nbytes // 16) * 16)
    copies = copies_for(size, l2_bytes=l2_bytes(device_index))
    stride = -(-size // 256) * 256
    data = torch.zeros(copies * stride, dtype=torch.uint8, device=f"cuda:{device_index}")
    if not limits.bulk:
        return Ceiling(nbytes, _copy_time(data, size, stride, copies), TORCH_COPY)
    timings = [
        _read_time(data, size, stride, copies, pieces, device_index, limits)
        for pieces in PIECES
        if read_shared_bytes(pieces) <= limits.shared_bytes
    ]
    return Ceiling(nbytes, min(timings, key=lambda timing: timing.median_us), BULK_READ)


def empty_kernel(device_index: int, limits: DeviceLimits) -> Timing:
    """A graph node that reads nothing: what a kernel costs before it does anything."""
    data = torch.zeros(256, dtype=torch.uint8, device=f"cuda:{device_index}")
    if not limits.bulk:
        return graph_time(lambda _: data.zero_(), copies=1)
    return _read_time(data, 0, 0, 1, PIECES[0], device_index, limits)


def _read_time(
    data: torch.Tensor, size: int, stride: int, copies: int, pieces: int, device_index: int, limits: DeviceLimits
) -> Timing:
    kernel = load(read_text(pieces), device_index)
    sums = torch.zeros(limits.multiprocessors, dtype=torch.int32, device=data.device)
    params = [struct.pack("<QQqq", data.data_ptr() + i * stride, sums.data_ptr(), size, 0) for i in range(copies)]

    def read(i: int) -> None:
        kernel.launch(
            stream=torch.cuda.current_stream(device_index).cuda_stream,
            grid=limits.multiprocessors,
            block=32,
            shared_bytes=read_shared_bytes(pieces),
            params=params[i],
            programmatic=True,
        )

    return graph_time(read, copies=copies)


def _copy_time(data: torch.Tensor, size: int, stride: int, copies: int) -> Timing:
    half = size // 2
    halves = [(data[i * stride :][:half], data[i * stride + half :][:half]) for i in range(copies)]
    return graph_time(lambda i: halves[i][1].copy_(halves[i][0]), copies=copies)
