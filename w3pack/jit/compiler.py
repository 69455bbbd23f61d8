"""Kernel text -> cubin, by NVRTC. Needs no GPU, no driver, no nvcc and no host compiler.

The only include path is the kernels folder: NVRTC brings no CUDA headers, so device code includes nothing but its own.
Registers, shared memory and spills are what ptxas says of the build (`--ptxas-options=-v`, written to the program log).
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from w3pack.errors import UnsupportedError, W3PackError
from w3pack.jit import bindings
from w3pack.jit.source import KernelText, kernels_folder, render

#: Every architecture that the project builds for. The `a` ones use instructions of exactly that device.
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
#: Options beside the architecture and the include path. No --use_fast_math: kernels name the fast functions they want.
OPTIONS = ("--std=c++17", "--ptxas-options=-v")

_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_CUMULATIVE = re.compile(r"(\d+) bytes cumulative stack size")
_WARNING = re.compile(r"warning|performance loss", re.IGNORECASE)


class CompileError(W3PackError):
    """A kernel text does not build; `log` holds all that the compiler said."""

    log: str = ""


@dataclass(frozen=True)
class Compiled:
    """A built kernel. The four numbers are None where the compiler's log did not tell them."""

    cubin: bytes = field(repr=False)
    #: Per thread.
    registers: int | None
    #: Static shared memory of a block.
    shared_bytes: int | None
    #: Stores plus loads that ptxas added because registers ran out, over the kernel and the functions it calls.
    spill_bytes: int | None
    #: Per thread, spilled or indexed at run time.
    stack_bytes: int | None
    log: str = field(repr=False)
    seconds: float

    @property
    def warnings(self) -> tuple[str, ...]:
        """Lines of the log that warn, or tell of lost performance."""
        return tuple(line.strip() for line in self.log.splitlines() if _WARNING.search(line))


def arch_of(major: int, minor: int) -> str:
    """What to build for a device of compute capability `major.minor`.

    A device between two listed ones gets the nearest lower one of its major version; code for an `a` architecture runs on
    exactly one capability, so it is the base one there: 8.7 -> sm_86, 10.3 -> sm_100, 12.1 -> sm_120.

    Raises:
        UnsupportedError: no listed architecture's code runs on the device.
    """
    listed = {tuple(map(int, re.findall(r"(\d+)(\d)", arch)[0])): arch for arch in ARCHS}
    if (major, minor) in listed:
        return listed[major, minor]
    lower = [capability for capability in listed if capability[0] == major and capability[1] < minor]
    if not lower:
        known = ", ".join(f"{listed_major}.{listed_minor}" for listed_major, listed_minor in listed)
        raise UnsupportedError(
            f"expected a GPU of compute capability {known} or a later one of the same major version, "
            f"got {major}.{minor}; run on another GPU or on the CPU"
        )
    return listed[max(lower)].removesuffix("a")


def options_for(arch: str) -> tuple[str, ...]:
    """All options that change the code, hence without the include path."""
    return (f"--gpu-architecture={arch}", *OPTIONS)


def compile_text(text: KernelText, arch: str, folder: Path | None = None) -> Compiled:
    """Build `text` for `arch` (as in `ARCHS`); `folder` stands in for the kernels folder. NVRTC runs without the GIL.

    Raises:
        ToolchainError: NVRTC is missing.
        CompileError: the text does not build, or lacks the entry.
        ResourceError: the file is missing.
    """
    folder = folder or kernels_folder()
    nvrtc = bindings.nvrtc()
    program = render(text, folder).encode()
    options = [option.encode() for option in (*options_for(arch), f"--include-path={folder}")]
    begin = time.perf_counter()
    result, handle = nvrtc.nvrtcCreateProgram(program, text.file.encode(), 0, [], [])
    _check(result, text, arch)
    try:
        (result,) = nvrtc.nvrtcCompileProgram(handle, len(options), options)
        log = _read(nvrtc, "ProgramLog", handle, text, arch).decode(errors="replace").rstrip("\0\n ")
        if int(result) != 0:
            raise _compile_error(text, arch, _first_error(log) or result.name, log)
        cubin = _read(nvrtc, "CUBIN", handle, text, arch)
    finally:
        nvrtc.nvrtcDestroyProgram(handle)
    if f".text.{text.entry}\0".encode() not in cubin:  # the section that holds its code
        raise _compile_error(text, arch, f'no `extern "C" __global__` function {text.entry}', log)
    return Compiled(cubin=cubin, log=log, seconds=time.perf_counter() - begin, **resource_usage(log, text.entry))


def resource_usage(log: str, entry: str) -> dict[str, int | None]:
    """Registers, static shared, spilled and stack bytes of `entry` in ptxas's log; all None where it is not there."""
    # A section holds the entry's own lines and those of the functions that it calls.
    section = re.search(
        rf"Compiling entry function '{re.escape(entry)}'(.*?)(?=Compiling entry function|\Z)", log, re.S
    )
    used = section and _USED.search(section[1])
    if not section or not used:
        return dict.fromkeys(("registers", "shared_bytes", "spill_bytes", "stack_bytes"))
    frames = [tuple(map(int, frame)) for frame in _FRAME.findall(section[1])]
    shared = _SHARED.search(section[1])
    cumulative = _CUMULATIVE.search(section[1])
    return {
        "registers": int(used[1]),
        "shared_bytes": int(shared[1]) if shared else 0,
        "spill_bytes": sum(stores + loads for _, stores, loads in frames) if frames else None,
        "stack_bytes": int(cumulative[1]) if cumulative else max((frame[0] for frame in frames), default=None),
    }


def _read(nvrtc: Any, what: str, handle: Any, text: KernelText, arch: str) -> bytes:
    result, size = getattr(nvrtc, f"nvrtcGet{what}Size")(handle)
    _check(result, text, arch)
    data = bytearray(size)  # the binding writes into it
    (result,) = getattr(nvrtc, f"nvrtcGet{what}")(handle, data)
    _check(result, text, arch)
    return bytes(data)


def _check(result: Any, text: KernelText, arch: str) -> None:
    if int(result) != 0:
        raise _compile_error(text, arch, result.name, "")


def _first_error(log: str) -> str | None:
    for line in log.splitlines():
        if re.search(r"\b(error|fatal)\b", line, re.IGNORECASE):
            return line.strip()
    return None


def _compile_error(text: KernelText, arch: str, got: str, log: str) -> CompileError:
    error = CompileError(
        f"expected {text} to build for {arch} with NVRTC {'.'.join(map(str, bindings.nvrtc_version()))}, got: {got}; "
        "correct the kernel text, or report this line if you did not change it"
    )
    error.log = log
    return error
