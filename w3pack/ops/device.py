"""What the operators ask of a CUDA device; nothing here touches one before it is asked."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch

from w3pack.jit import LaunchError, arch_of, bindings
from w3pack.ops.w3_config import DeviceLimits

_NON_BLOCKING = 1


@functools.cache
def limits(device_index: int) -> DeviceLimits:
    """What planning needs to know of the device, asked once.

    Raises:
        UnsupportedError: its compute capability has no kernels.
    """
    properties: Any = torch.cuda.get_device_properties(device_index)  # its type leaves one of these out
    return DeviceLimits(
        arch=arch_of(properties.major, properties.minor),
        multiprocessors=properties.multi_processor_count,
        shared_bytes=properties.shared_memory_per_block_optin,
    )


@functools.cache
def device_name(device_index: int) -> str:
    """The name by which tables of measured choices are found, as in "NVIDIA H200"."""
    return str(torch.cuda.get_device_properties(device_index).name)


def current_stream(device_index: int) -> int:
    """The CUstream that torch uses on the device now."""
    return _raw_stream()(device_index)


@functools.cache
def _raw_stream() -> Callable[[int], int]:
    """Without making a Stream object: this is called for every launch."""
    return cast("Callable[[int], int]", torch._C._cuda_getCurrentRawStream)


def own_stream(device_index: int) -> torch.cuda.Stream:
    """A stream that nobody else has, non-blocking, kept as long as the process.

    Streams of torch.cuda.Stream() come from a pool and repeat: one of them may be in another thread's capture.

    Raises:
        LaunchError: the driver refuses.
    """
    driver = bindings.driver()
    result, device = driver.cuDeviceGet(device_index)
    if int(result) == 0:
        result, context = driver.cuDevicePrimaryCtxRetain(device)
    if int(result) == 0:
        (result,) = driver.cuCtxPushCurrent(context)
    if int(result) == 0:
        result, stream = driver.cuStreamCreate(_NON_BLOCKING)
        driver.cuCtxPopCurrent()
    if int(result) != 0:
        raise LaunchError(f"expected a new stream on CUDA device {device_index}, got {result.name}; free device memory")
    return torch.cuda.ExternalStream(int(stream), device=device_index)


def capture_id(stream: int) -> int | None:
    """The number of the capture that `stream` is in, unique in the process; None where there is none or it is not told."""
    result, status, number, *_ = bindings.driver().cuStreamGetCaptureInfo(stream)
    return int(number) if int(result) == 0 and int(status) == 1 else None
