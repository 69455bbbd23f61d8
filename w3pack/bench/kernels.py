"""Building and loading many kernels at once: NVRTC runs without the GIL, so threads build side by side."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from w3pack.errors import W3PackError
from w3pack.jit import KernelText, LoadedKernel, load


def load_all(
    texts: Iterable[KernelText], device_index: int, *, built: Callable[[str], None] | None = None
) -> dict[KernelText, LoadedKernel | W3PackError]:
    """Load every text on a device; one that fails is its error. `built` hears of each as it is done, in order."""
    wanted = list(dict.fromkeys(texts))

    def one(text: KernelText) -> LoadedKernel | W3PackError:
        try:
            return load(text, device_index)
        except W3PackError as error:
            return error

    found: dict[KernelText, LoadedKernel | W3PackError] = {}
    with ThreadPoolExecutor(min(32, os.cpu_count() or 1)) as pool:
        for text, result in zip(wanted, pool.map(one, wanted), strict=True):
            found[text] = result
            if built is not None:
                built(text.entry)
    return found


def spills(kernel: LoadedKernel) -> bool:
    """Whether registers ran out: what ptxas said, or where it said nothing, local memory in the loaded code."""
    if kernel.compiled.spill_bytes is not None:
        return kernel.compiled.spill_bytes > 0
    return kernel.attributes().local_bytes > 0
