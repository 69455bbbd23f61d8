"""Walk a matrix of groups in pieces that stay in the cache, on any number of threads with one result.

Inside a chunk torch runs on one thread, so no sum is ever split between threads and results depend neither on `workers`
nor on torch.set_num_threads. Chunks of 131,072 elements (512 KiB a buffer) were measured fastest on two cores: with
32,768 the worker threads spend half their time handing the interpreter lock to each other (8 against 21 million weights
a second). On other devices a few large pieces amortize the launches instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

CPU_CHUNK_ELEMENTS = 131072
DEVICE_CHUNK_ELEMENTS = 1 << 24

Result = TypeVar("Result")
Item = TypeVar("Item")


def chunk_bounds(groups: int, *, group_size: int, device: torch.device) -> list[tuple[int, int]]:
    """Half-open ranges of groups, one per chunk, in order; they depend on shape and device only."""
    elements = CPU_CHUNK_ELEMENTS if device.type == "cpu" else DEVICE_CHUNK_ELEMENTS
    step = max(1, elements // group_size)
    return [(first, min(first + step, groups)) for first in range(0, groups, step)]


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Run torch operations of the calling thread, and of threads started meanwhile, on one thread each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_chunks(work: Callable[[int, int], Result], bounds: list[tuple[int, int]], *, workers: int) -> list[Result]:
    """`work(first, stop)` for every chunk; results in the order of the chunks.

    torch releases the interpreter lock inside every operation, so `workers` threads keep as many cores busy. A device
    other than the CPU orders its own work; callers pass workers = 1 there.
    """
    with one_torch_thread():
        if workers == 1 or len(bounds) == 1:
            return [work(first, stop) for first, stop in bounds]
        start = (1,)
        with ThreadPoolExecutor(workers, "w3pack-quantize", initializer=torch.set_num_threads, initargs=start) as pool:
            return list(pool.map(lambda bound: work(*bound), bounds))


def in_order(work: Callable[[Item], Result], items: Sequence[Item], *, workers: int) -> Iterator[Result]:
    """`work` on every item, results in order, at most as many items at once as there are workers, one torch thread each."""
    with one_torch_thread():
        if workers == 1 or len(items) == 1:
            yield from map(work, items)
            return
        start = (1,)
        with ThreadPoolExecutor(workers, "w3pack-work", initializer=torch.set_num_threads, initargs=start) as pool:
            for first in range(0, len(items), workers):
                yield from pool.map(work, items[first : first + workers])
