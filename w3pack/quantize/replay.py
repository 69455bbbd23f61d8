"""Work on fixed tensors that is repeated many times: on a CUDA device it is recorded once and replayed as one graph.

The solvers choose codes column by column, a few small operations each: launched one by one, these would leave a device waiting
for the next most of the time.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch

_LOG = logging.getLogger(__name__)


class Replayed:
    """Does work as it is the first time, then records it, and replays the record from then on. Elsewhere than on CUDA: does it.

    Args:
        device: where the tensors of the work are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, work: Callable[[], None]) -> None:
        """Do the work, which is the same each time: it reads and writes the same tensors, and asks the device nothing."""
        self._calls += 1
        if self._device.type != "cuda":
            work()
        elif self._graph is not None:
            self._graph.replay()
        elif self._calls == 1:  # libraries prepare themselves in the stream that is recorded
            self._aside(work)
        elif self._calls == 2 and (graph := self._record(work)) is not None:
            self._graph = graph
            graph.replay()
        else:
            work()

    def _record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()

        def record() -> None:
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()

        try:
            self._aside(record)
        except RuntimeError as error:  # only speed is lost
            _LOG.warning("expected to record the solver's steps as a CUDA graph, got: %s; going on without", error)
            return None
        return graph

    def _aside(self, work: Callable[[], None]) -> None:
        """In a stream of its own, after what has been asked of the device and before what will be."""
        with torch.cuda.device(self._device):
            stream, here = _stream(self._device), torch.cuda.current_stream(self._device)
            stream.wait_stream(here)
            try:
                with torch.cuda.stream(stream):
                    work()
            finally:
                here.wait_stream(stream)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all recordings: libraries keep working memory for each."""
    return torch.cuda.Stream(device)
