"""Versions of libraries that torch and the driver bring along, for keys of what was measured with them."""

from __future__ import annotations

import ctypes
import functools
import os

import torch

_TEXT_BYTES = 96


@functools.cache
def driver() -> str | None:
    """The NVIDIA driver's release, such as "580.159.04"; None where NVML does not say."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        if nvml.nvmlInit_v2() != 0:
            return None
        failed = nvml.nvmlSystemGetDriverVersion(text, ctypes.c_uint(_TEXT_BYTES))
        nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return None
    return None if failed else text.value.decode("ascii", "replace") or None


@functools.cache
def cublaslt() -> str | None:
    """The number of the cuBLASLt that torch has loaded, such as "130000"; None where it has loaded none."""
    if torch.version.cuda is None or not hasattr(os, "RTLD_NOLOAD"):
        return None
    name = f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}"
    try:
        library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)  # another copy could be another version
        ask = library.cublasLtGetVersion
    except (OSError, AttributeError):
        return None
    ask.restype = ctypes.c_size_t
    return str(ask())
