"""The decode kernels' workspace as a benchmark sees it: is it clean, and giving back what captures took.

The workspace keeps the buffers of every capture for good, since it cannot know when a graph is gone, and stops handing
them out after 512 MiB; from then on each captured call fills a temporary, which would be timed with it. A benchmark knows
that its graphs are gone, and there are thousands of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from w3pack.ops import workspace
from w3pack.ops.device import current_stream

_EMPTY_BYTE = 255


@dataclass
class Captures:
    """What became of the captures inside `borrowed`; `clean` is whether they left every byte as it was."""

    clean: bool = True


def clean(device_index: int, nbytes: int) -> bool:
    """Whether the buffer that eager launches on the current stream use is clean; it is, afterwards."""
    buffer = workspace.acquire(device_index, current_stream(device_index), nbytes)
    return _restore(buffer)


@contextmanager
def borrowed(device_index: int) -> Iterator[Captures]:
    """Buffers that captures inside take go back at the end, restored; their graphs must be gone by then."""
    before = set(_workspace(device_index).bound)
    found = Captures()
    try:
        yield found
    finally:
        mine = _workspace(device_index)
        torch.cuda.synchronize(device_index)
        with mine.lock:
            for key in set(mine.bound) - before:
                for buffer in mine.bound.pop(key):
                    found.clean &= _restore(buffer)
                    mine.bound_bytes -= buffer.numel()
                    mine.spares.append(buffer)
        torch.cuda.synchronize(device_index)


def _restore(buffer: torch.Tensor) -> bool:
    if bool((buffer == _EMPTY_BYTE).all()):
        return True
    buffer.fill_(_EMPTY_BYTE)
    return False


def _workspace(device_index: int) -> workspace._Workspace:
    return workspace._WORKSPACES.setdefault(device_index, workspace._Workspace(device_index))
