"""Kernel text -> loaded kernel: NVRTC through cuda-core, and a store of what was built. Knows nothing of 3 bit.

    text = KernelText(file="w3_decode.cu", entry="w3_decode", defines=(("ROWS", 4),))
    kernel = load(text, device_index)                      # seeded cubin -> user cache -> compile now; memoised
    kernel.launch(stream=stream, grid=132, block=128, shared_bytes=0, params=struct.pack("<QQi4x", ...))

`compile_text` and `Store.find` need NVRTC and no GPU; only `load` touches the driver. Importing this room imports nothing
of CUDA and no torch.
"""

from w3pack.jit.bindings import ToolchainError
from w3pack.jit.compiler import ARCHS, Compiled, CompileError, arch_of, compile_text
from w3pack.jit.kernel import KernelAttributes, LaunchError, LoadedKernel, load
from w3pack.jit.source import KernelText, kernels_folder
from w3pack.jit.store import Found, Store, cache_folder, default_store
from w3pack.jit.toolchain import Toolchain, toolchain

__all__ = [
    "ARCHS",
    "CompileError",
    "Compiled",
    "Found",
    "KernelAttributes",
    "KernelText",
    "LaunchError",
    "LoadedKernel",
    "Store",
    "Toolchain",
    "ToolchainError",
    "arch_of",
    "cache_folder",
    "compile_text",
    "default_store",
    "kernels_folder",
    "load",
    "toolchain",
]
