"""How long a call takes on the GPU: first inside a replayed CUDA graph over cold operands, then, beside it, one call at a time.

A call is `fn(i)`; i rotates over `copies` operand sets, enough of them that the L2 cache has forgotten a set when its turn
comes again. Host time does not show, as it does not show in a decode step under a graph.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from w3pack.errors import UsageError

#: Operand sets together have at least this many times the bytes of the L2 cache.
L2_MULTIPLE = 3
#: Operand sets of tiny operands: more would only make capturing slow.
MAX_COPIES = 512
_FLUSH_BYTES = 256 << 20

Call = Callable[[int], object]


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: median, 10th and 90th percentile, and (high - low) / median."""

    median_us: float
    low_us: float
    high_us: float

    @property
    def spread(self) -> float:
        """Width of the middle four fifths, relative to the median."""
        return (self.high_us - self.low_us) / self.median_us if self.median_us else 0.0

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        """Sum up samples in microseconds; at least one."""
        ordered = sorted(samples)
        last = len(ordered) - 1
        return cls(
            median_us=statistics.median(ordered), low_us=ordered[round(0.1 * last)], high_us=ordered[round(0.9 * last)]
        )


def copies_for(nbytes: int, *, l2_bytes: int) -> int:
    """Operand sets of `nbytes` that together exceed the L2 cache `L2_MULTIPLE` times; between 2 and `MAX_COPIES`."""
    return max(2, min(MAX_COPIES, math.ceil(L2_MULTIPLE * l2_bytes / max(1, nbytes)) + 1))


def l2_bytes(device_index: int) -> int:
    """L2 cache of a CUDA device."""
    return int(torch.cuda.get_device_properties(device_index).L2_cache_size)


def graph_time(fn: Call, *, copies: int, repeats: int = 64, outer: int = 21, warm_up_seconds: float = 0.03) -> Timing:
    """Time calls in one CUDA graph, on the current device.

    Args:
        fn: launches one call with operand set i, 0 <= i < `copies`; it must be capturable.
        copies: operand sets to rotate over.
        repeats: calls in the graph, at least; rounded up to whole rounds of the sets.
        outer: replays that are timed one by one.
        warm_up_seconds: time spent on replays before, about.

    Raises:
        UsageError: a count below 1.
    """
    for name, value in (("copies", copies), ("repeats", repeats), ("outer", outer)):
        if value < 1:
            raise UsageError(f"expected at least one of {name}, got {value}; pass a positive number")
    calls = math.ceil(repeats / copies) * copies
    stream = _side_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(copies):  # builds, allocates and chooses algorithms before the capture
            fn(i)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for i in range(calls):
                fn(i % copies)
        finally:
            graph.capture_end()
        first = _elapsed_us(stream, graph.replay)
        for _ in range(max(2, min(1000, int(1e6 * warm_up_seconds / max(first, 1.0))))):  # clocks rise
            graph.replay()
        samples = [_elapsed_us(stream, graph.replay) / calls for _ in range(outer)]
    torch.cuda.current_stream().wait_stream(stream)
    del graph
    if 2 * torch.cuda.memory_reserved() > torch.cuda.get_device_properties(stream.device).total_memory:
        torch.cuda.empty_cache()  # each graph had a pool of its own, which is not given back by itself
    return Timing.of(samples)


@functools.cache
def _side_stream(device_index: int) -> torch.cuda.Stream:
    """One for all timings: what is kept for each stream is kept once."""
    return torch.cuda.Stream(device_index)


def bench_like_do_bench(fn: Call, *, copies: int, calls: int = 30) -> Timing:
    """Time single eager calls after the L2 cache was overwritten, as triton's do_bench does.

    It includes a few microseconds of launch and event time, which hide differences between short kernels; report it
    beside `graph_time`, not instead.
    """
    flush = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    stream = torch.cuda.current_stream()
    samples = []
    for i in range(calls + 3):
        flush.zero_()
        samples.append(_timed_call(stream, fn, i % copies))
    stream.synchronize()
    return Timing.of([1000 * begin.elapsed_time(end) for begin, end in samples[3:]])


def _timed_call(stream: torch.cuda.Stream, fn: Call, i: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record(stream)
    fn(i)
    end.record(stream)
    return begin, end


def _elapsed_us(stream: torch.cuda.Stream, action: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record(stream)
    action()
    end.record(stream)
    end.synchronize()
    return 1000 * float(begin.elapsed_time(end))
