"""Workspace of the decode kernels: buffers that hold 0xFF in every byte between launches, which kernels restore themselves.

Two launches that may run at once must not share a buffer. In eager mode a stream has one: its launches follow each other. A
CUDA graph may run beside anything, so each capture has its own for each of its streams. Such a buffer outlives the call, so
it may not come from the graph's private pool (torch would find it there and complain): captures take spare buffers, which
eager calls and `provide` (called by prepare) make beforehand. A capture that finds none fills a temporary for that call
alone, which is right and costs one more node in the graph.

A graph's buffers are never given back, since nothing tells when the graph is gone; so no more than 512 MiB is handed out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from w3pack.ops import device as devices

_Result = TypeVar("_Result")
_GRAIN = 1 << 20
#: Spare buffers kept ready for captures, unless prepare asks for more.
_SPARES = 4
_MAX_BOUND_BYTES = 512 << 20
#: The handle that means another stream in each thread.
_PER_THREAD_STREAM = 2


@dataclass
class _Workspace:
    """All buffers of one device."""

    index: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    #: By stream, and thread where the stream is another one in each thread.
    eager: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    #: By capture and stream; all stay, since nodes of the graph may use each of them.
    bound: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)
    spares: list[torch.Tensor] = field(default_factory=list)
    filler: torch.cuda.Stream | None = None
    #: Bytes that the largest plan so far needs.
    largest: int = 0
    wanted: int = _SPARES
    bound_bytes: int = 0
    #: Whether the next eager call has spares to make.
    short: bool = True


_WORKSPACES: dict[int, _Workspace] = {}


def acquire(device_index: int, stream: int, nbytes: int) -> torch.Tensor:
    """A buffer for one launch on `stream`, the device's current one. Hold on to it until the kernel is launched.

    Args:
        device_index: the current device.
        stream: its current stream.
        nbytes: what the plan needs.

    Returns:
        uint8 [nbytes or more], all 0xFF once the stream gets to it.
    """
    workspace = _WORKSPACES.get(device_index) or _WORKSPACES.setdefault(device_index, _Workspace(device_index))
    if torch.cuda.is_current_stream_capturing():
        return _for_capture(workspace, stream, nbytes)
    buffer = workspace.eager.get((stream, threading.get_ident() if stream == _PER_THREAD_STREAM else 0))
    if buffer is None or buffer.numel() < nbytes or workspace.short:
        return _for_stream(workspace, stream, nbytes)
    return buffer


def provide(device_index: int, nbytes: int, captures: int) -> None:
    """Make sure that `captures` captures find spare buffers of `nbytes`. Not to be called during one."""
    workspace = _WORKSPACES.setdefault(device_index, _Workspace(device_index))
    with workspace.lock:
        workspace.largest = max(workspace.largest, _rounded(nbytes))
        workspace.wanted = max(workspace.wanted, captures)
        _make_spares(workspace)


def nbytes(device_index: int) -> int:
    """Bytes that the workspace takes on a device now."""
    workspace = _WORKSPACES.get(device_index)
    if workspace is None:
        return 0
    with workspace.lock:
        loose = [*workspace.eager.values(), *workspace.spares]
        return sum(buffer.numel() for buffer in loose) + workspace.bound_bytes


def _for_stream(workspace: _Workspace, stream: int, nbytes: int) -> torch.Tensor:
    key = (stream, threading.get_ident() if stream == _PER_THREAD_STREAM else 0)
    with workspace.lock:
        workspace.largest = max(workspace.largest, _rounded(nbytes))
        buffer = workspace.eager.get(key)
        if buffer is None or buffer.numel() < nbytes:
            current = torch.cuda.current_stream(workspace.index)
            # on the stream itself: the fill comes before the launch, and what is replaced is reused after the last one
            buffer = workspace.eager[key] = _elsewhere(lambda: _filled(workspace.index, workspace.largest, current))
        _make_spares(workspace)
        return buffer


def _for_capture(workspace: _Workspace, stream: int, nbytes: int) -> torch.Tensor:
    capture = devices.capture_id(stream)
    if capture is not None:
        with workspace.lock:
            mine = workspace.bound.setdefault((capture, stream), [])
            for buffer in mine:
                if buffer.numel() >= nbytes:
                    return buffer
            sizes = [(spare.numel(), at) for at, spare in enumerate(workspace.spares) if spare.numel() >= nbytes]
            workspace.largest = max(workspace.largest, _rounded(nbytes))
            workspace.short = workspace.bound_bytes < _MAX_BOUND_BYTES
            if sizes:
                mine.append(workspace.spares.pop(min(sizes)[1]))
                workspace.bound_bytes += mine[-1].numel()
                return mine[-1]
    return _filled(workspace.index, nbytes, None)


def _make_spares(workspace: _Workspace) -> None:
    """With the lock held."""
    workspace.short = False
    fitting = [spare for spare in workspace.spares if spare.numel() >= workspace.largest]
    missing = workspace.wanted - len(fitting)
    if missing <= 0 or workspace.bound_bytes >= _MAX_BOUND_BYTES:
        return
    if workspace.filler is None:
        workspace.filler = devices.own_stream(workspace.index)
    filler, size = workspace.filler, workspace.largest

    def make() -> list[torch.Tensor]:
        made = [_filled(workspace.index, size, filler) for _ in range(missing)]
        # A capture cannot wait for work outside it, so the fill has to be over: nothing else is on this stream, and the
        # caller's work is not waited for.
        filler.synchronize()
        return made

    try:
        workspace.spares = [*fitting, *_elsewhere(make)]
    except torch.OutOfMemoryError:
        workspace.wanted = len(fitting)  # captures make do with what there is, or with temporaries


def _filled(device_index: int, size: int, stream: torch.cuda.Stream | None) -> torch.Tensor:
    with torch.cuda.stream(stream):
        return torch.full((size,), 255, dtype=torch.uint8, device=torch.device("cuda", device_index))


def _elsewhere(make: Callable[[], _Result]) -> _Result:
    """Run in a thread of its own: while torch warms a CUDA graph up, what the calling thread allocates goes to the graph."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(make).result()


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _GRAIN) * _GRAIN
