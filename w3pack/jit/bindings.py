"""The only door to the `cuda` packages: imported on first use, and missing ones told of in a sentence.

The modules come back as `Any`: their names moved between releases and their types are not all published.
"""

from __future__ import annotations

import functools
import importlib
import threading
from typing import Any

from w3pack.errors import W3PackError

#: Held while a module is imported: a second thread could otherwise see one half made.
_IMPORTING = threading.RLock()
INSTALL = 'run `pip install "w3pack[cuda]"`'


class ToolchainError(W3PackError):
    """cuda-core, cuda-bindings, NVRTC or the NVIDIA driver is missing or does not answer."""


def _import(module: str, package: str) -> Any:
    try:
        with _IMPORTING:
            return importlib.import_module(module)
    except ImportError as error:
        raise ToolchainError(f"expected the package {package} for CUDA kernels, got: {error}; {INSTALL}") from error


@functools.cache
def nvrtc() -> Any:
    """Module `cuda.bindings.nvrtc`, its library found and loaded.

    Raises:
        ToolchainError: the module or the library is missing.
    """
    module = _import("cuda.bindings.nvrtc", "cuda-bindings")
    try:
        result, _, _ = module.nvrtcVersion()
    except RuntimeError as error:  # what every release raises for a library that it cannot find
        raise ToolchainError(
            f"expected the NVRTC library of package nvidia-cuda-nvrtc, got: {_one_line(error)}; {INSTALL}"
        ) from error
    if int(result) != 0:
        raise ToolchainError(f"expected NVRTC to tell its version, got {result.name}; {INSTALL}")
    return module


def nvrtc_version() -> tuple[int, int]:
    """Major and minor version of NVRTC; raises `ToolchainError` where it is missing."""
    _, major, minor = nvrtc().nvrtcVersion()
    return major, minor


@functools.cache
def driver() -> Any:
    """Module `cuda.bindings.driver`, the driver initialised.

    Raises:
        ToolchainError: the module, the driver or a usable GPU is missing.
    """
    module = _import("cuda.bindings.driver", "cuda-bindings")
    remedy = "install the NVIDIA driver, or run on the CPU"
    try:
        (result,) = module.cuInit(0)
    except RuntimeError as error:
        raise ToolchainError(f"expected an NVIDIA driver, got: {_one_line(error)}; {remedy}") from error
    if int(result) != 0:
        raise ToolchainError(f"expected a working NVIDIA driver, got {result.name}; {remedy}")
    return module


@functools.cache
def object_code() -> Any:
    """Class `ObjectCode` of cuda-core, which left `cuda.core.experimental` with release 0.5.

    Raises:
        ToolchainError: cuda-core is missing.
    """
    try:
        with _IMPORTING:
            return importlib.import_module("cuda.core").ObjectCode
    except (ImportError, AttributeError):
        pass
    module = _import("cuda.core.experimental", "cuda-core")
    return module.ObjectCode


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
