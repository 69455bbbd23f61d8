"""Kernels loaded into a device's primary context (the one torch uses), and their launch.

Every kernel takes one struct by value (`const __grid_constant__ Params p`), so a launch passes one pointer. A launch costs
a few microseconds of host time: its configuration object is made once and kept, the parameters are copied into a buffer
that lives as long as the call (the driver copies them again before it returns).
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from w3pack.errors import UsageError, W3PackError
from w3pack.jit import bindings
from w3pack.jit.compiler import Compiled, arch_of
from w3pack.jit.source import KernelText
from w3pack.jit.store import Found, Store, default_store

#: Shared memory that a block may have, static and dynamic together, before the function must opt in.
_SHARED_WITHOUT_OPT_IN = 48 << 10
#: Configurations kept for one kernel; grids that follow a token count could otherwise pile up for ever.
_CONFIGS_KEPT = 4096

_Pointer = ctypes.c_void_p * 1
_Key = tuple[KernelText, int, Store | None]
_LOADED: dict[_Key, LoadedKernel] = {}
_LOCKS: dict[KernelText, threading.Lock] = {}
_LOCKS_LOCK = threading.Lock()


class LaunchError(W3PackError):
    """The driver refused to load or launch a kernel."""


@dataclass(frozen=True)
class KernelAttributes:
    """What the driver says of a loaded kernel."""

    registers: int
    local_bytes: int
    static_shared_bytes: int
    max_threads: int


class LoadedKernel:
    """A kernel on one device, ready for launches from any thread."""

    def __init__(self, text: KernelText, device_index: int, arch: str, found: Found) -> None:
        """Load the cubin; `load` does this once for each kernel and device.

        Raises:
            ToolchainError: cuda-core or the driver is missing.
            LaunchError: the driver refuses the cubin, or the kernel does not take exactly one struct.
        """
        driver = bindings.driver()
        self.text = text
        self.device_index = device_index
        self.arch = arch
        self.origin = found.origin
        self.compiled: Compiled = found.compiled
        self._driver = driver
        self._launch = driver.cuLaunchKernelEx
        self._lock = threading.Lock()
        self._configs: dict[tuple[Any, ...], Any] = {}
        device = self._call(driver.cuDeviceGet(device_index))
        self._context = self._call(driver.cuDevicePrimaryCtxRetain(device))  # kept as long as the process
        with self._current_context():
            try:
                self._code = bindings.object_code().from_cubin(found.compiled.cubin)  # unloads when collected
                kernel = self._code.get_kernel(text.entry)
            except Exception as error:  # cuda-core's CUDAError is an Exception in a module that moved between releases
                raise self._error("load", f"{type(error).__name__}: {error}") from error
            handle = kernel.handle if hasattr(kernel, "handle") else kernel._handle
            # As a CUfunction it belongs to this device: launched with another one current, it fails instead of running
            # there, as a context-free CUkernel would.
            self._function = self._call(driver.cuKernelGetFunction(handle))
            self.parameter_bytes = self._parameter_bytes(handle)
            self._attributes = KernelAttributes(
                registers=self._attribute("NUM_REGS"),
                local_bytes=self._attribute("LOCAL_SIZE_BYTES"),
                static_shared_bytes=self._attribute("SHARED_SIZE_BYTES"),
                max_threads=self._attribute("MAX_THREADS_PER_BLOCK"),
            )
        self._buffer = ctypes.c_char * self.parameter_bytes
        self._shared_allowed = _SHARED_WITHOUT_OPT_IN - self._attributes.static_shared_bytes

    def __repr__(self) -> str:
        return f"LoadedKernel({self.text}, device {self.device_index}, {self.arch}, {self.origin})"

    def attributes(self) -> KernelAttributes:
        """Registers, local and static shared bytes of the loaded code."""
        return self._attributes

    def launch(
        self,
        *,
        stream: int,
        grid: int | tuple[int, ...],
        block: int,
        shared_bytes: int,
        params: bytes | bytearray | memoryview[int],
        programmatic: bool = False,
        cluster: int = 1,
    ) -> None:
        """Launch on `stream` (a CUstream as integer, 0 for the device's default one).

        `grid` has up to three extents, x first. `params` holds the bytes of the kernel's struct, padding included.
        `programmatic` lets the kernel begin before its predecessor in the stream has ended (compute capability 9.0 on);
        `cluster` is the number of blocks along x that form a cluster.

        Raises:
            UsageError: `params` is not as long as the kernel's struct, or the grid has no or more than three extents.
            LaunchError: the driver refuses; errors of earlier work on the device may show here too.
        """
        config = self._configs.get((stream, grid, block, shared_bytes, programmatic, cluster))
        if config is None:
            config = self._make_config(stream, grid, block, shared_bytes, programmatic, cluster)
        if len(params) != self.parameter_bytes:
            raise UsageError(
                f"expected {self.parameter_bytes} bytes of parameters for {self.text.entry}, got {len(params)}; "
                "pack the kernel's struct with its padding"
            )
        buffer = self._buffer.from_buffer_copy(params)
        pointer = _Pointer(ctypes.addressof(buffer))
        (result,) = self._launch(config, self._function, ctypes.addressof(pointer), 0)
        if int(result) != 0:
            self._launch_again(result, config, pointer)

    def _launch_again(self, result: Any, config: Any, pointer: ctypes.Array[ctypes.c_void_p]) -> None:
        """A thread that has not touched the device yet has no context, or another device's; that is no failure."""
        if result.name == "CUDA_ERROR_INVALID_CONTEXT":
            # left current, as the runtime would: whoever comes next in this thread (cuBLAS, say) needs one as well
            self._call(self._driver.cuCtxSetCurrent(self._context))
            (result,) = self._launch(config, self._function, ctypes.addressof(pointer), 0)
        elif result.name == "CUDA_ERROR_INVALID_HANDLE":
            with self._current_context():
                (result,) = self._launch(config, self._function, ctypes.addressof(pointer), 0)
        if int(result) != 0:
            raise self._error(
                f"launch with grid {(config.gridDimX, config.gridDimY, config.gridDimZ)}, block {config.blockDimX} "
                f"and {config.sharedMemBytes} bytes of dynamic shared memory",
                result.name,
            )

    def _make_config(
        self, stream: int, grid: int | tuple[int, ...], block: int, shared_bytes: int, programmatic: bool, cluster: int
    ) -> Any:
        """A configuration for this stream alone: the driver reads it without the GIL, so none is changed once made."""
        driver = self._driver
        extents = (grid,) if isinstance(grid, int) else tuple(grid)
        if not 1 <= len(extents) <= 3:
            raise UsageError(f"expected a grid of one to three extents for {self.text.entry}, got {grid}; reshape it")
        self._allow_shared(shared_bytes)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = (*extents, 1, 1)[:3]
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes = shared_bytes
        config.hStream = stream
        kinds = driver.CUlaunchAttributeID
        attributes = []
        if programmatic:
            attribute = driver.CUlaunchAttribute()
            attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        if cluster > 1:
            attribute = driver.CUlaunchAttribute()
            attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            extent = attribute.value.clusterDim
            extent.x, extent.y, extent.z = cluster, 1, 1
            attributes.append(attribute)
        config.attrs = attributes
        config.numAttrs = len(attributes)
        with self._lock:
            if len(self._configs) >= _CONFIGS_KEPT:
                self._configs.clear()
            self._configs[stream, grid, block, shared_bytes, programmatic, cluster] = config
        return config

    def _allow_shared(self, shared_bytes: int) -> None:
        with self._lock:
            if shared_bytes > self._shared_allowed:
                kind = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                with self._current_context():
                    (result,) = self._driver.cuFuncSetAttribute(self._function, kind, shared_bytes)
                if int(result) != 0:
                    raise self._error(f"have {shared_bytes} bytes of dynamic shared memory", result.name)
                self._shared_allowed = shared_bytes

    def _parameter_bytes(self, handle: Any) -> int:
        """Size of the kernel's struct; the launch would read past the end of a shorter one."""
        driver = self._driver
        _, size = self._call(driver.cuKernelGetParamInfo(handle, 0))
        second = driver.cuKernelGetParamInfo(handle, 1)[0]
        if int(second) == 0:
            raise LaunchError(
                f"expected {self.text.entry} to take one struct by value, got more parameters; correct the kernel text"
            )
        return int(size)

    def _attribute(self, name: str) -> int:
        kind = getattr(self._driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        return int(self._call(self._driver.cuFuncGetAttribute(kind, self._function)))

    @contextlib.contextmanager
    def _current_context(self) -> Iterator[None]:
        self._call(self._driver.cuCtxPushCurrent(self._context))
        try:
            yield
        finally:
            self._call(self._driver.cuCtxPopCurrent())

    def _call(self, results: tuple[Any, ...]) -> Any:
        """Take the result code off: nothing, the value, or the tuple of values remains."""
        result, *values = results
        if int(result) != 0:
            raise self._error("load", result.name)
        return values[0] if len(values) == 1 else tuple(values)

    def _error(self, what: str, got: str) -> LaunchError:
        return LaunchError(
            f"expected {self.text} ({self.arch}) to {what} on CUDA device {self.device_index}, got {got}; "
            "if an earlier kernel may have failed, run again with CUDA_LAUNCH_BLOCKING=1"
        )


def load(text: KernelText, device_index: int, *, store: Store | None = None) -> LoadedKernel:
    """The kernel on that device: found (or built) and loaded by the first call, the same object ever after.

    Threads may call it at once; they build different kernels side by side and the same one only once. `store` stands in
    for the default one.

    Raises:
        UsageError: a CUDA graph is being captured and the kernel is not loaded yet.
        UnsupportedError: the device's compute capability has no kernels.
        ToolchainError: cuda-core, the driver or (if it must be built) NVRTC is missing.
        CompileError, LaunchError: it does not build, or the driver refuses it.
    """
    key = (text, device_index, store)
    loaded = _LOADED.get(key)
    if loaded is not None:
        return loaded
    if _capturing():
        raise UsageError(
            f"expected every kernel to be loaded before a CUDA graph is captured, got the first use of {text} during "
            "a capture; call prepare() first"
        )
    with _LOCKS_LOCK:
        lock = _LOCKS.setdefault(text, threading.Lock())
    with lock:
        if key not in _LOADED:
            arch = arch_of(*_capability(device_index))
            found = (store or default_store()).find(text, arch)
            _LOADED[key] = LoadedKernel(text, device_index, arch, found)
        return _LOADED[key]


def _capturing() -> bool:
    torch = sys.modules.get("torch")  # where torch has not begun with CUDA, it captures nothing
    return torch is not None and torch.cuda.is_initialized() and bool(torch.cuda.is_current_stream_capturing())


def _capability(device_index: int) -> tuple[int, int]:
    """Compute capability, asked of the driver: neither a context nor torch is needed."""
    driver = bindings.driver()
    kinds = driver.CUdevice_attribute
    result, device = driver.cuDeviceGet(device_index)
    if int(result) != 0:
        raise LaunchError(f"expected a CUDA device {device_index}, got {result.name}; name one that nvidia-smi lists")
    _, major = driver.cuDeviceGetAttribute(kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
    _, minor = driver.cuDeviceGetAttribute(kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
    return int(major), int(minor)
