"""NVRTC builds for every architecture with no GPU; the log's numbers and errors arrive."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from w3pack.errors import ResourceError, UnsupportedError
from w3pack.jit import ARCHS, CompileError, KernelText, ToolchainError, arch_of, bindings, compile_text, compiler

TEXT = KernelText(file="scale.cu", entry="scale", defines=(("FACTOR", 2),))


@pytest.fixture
def nvrtc() -> None:
    """Skips where NVRTC is missing."""
    try:
        bindings.nvrtc()
    except ToolchainError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 7), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((10, 3), "sm_100"),
        ((12, 0), "sm_120a"),
        ((12, 1), "sm_120"),
    ],
)
def test_arch_of_a_device(capability: tuple[int, int], arch: str) -> None:
    assert arch_of(*capability) == arch


@pytest.mark.parametrize("capability", [(7, 5), (11, 0), (13, 0)])
def test_a_device_without_code_is_unsupported(capability: tuple[int, int]) -> None:
    major, minor = capability
    with pytest.raises(UnsupportedError, match=rf"8\.0, .*12\.0 .*got {major}\.{minor}; run on"):
        arch_of(major, minor)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("arch", [*ARCHS, "sm_100", "sm_120"])
def test_builds_for_every_arch(arch: str, kernels: Path) -> None:
    built = compile_text(TEXT, arch, kernels)
    assert built.cubin[:4] == b"\x7fELF"
    assert built.registers is not None
    assert built.registers >= 6
    assert (built.shared_bytes, built.spill_bytes, built.stack_bytes) == (0, 0, 0)
    assert built.seconds > 0
    assert built.warnings == ()


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("arch", ARCHS)
def test_spills_are_seen(arch: str, kernels: Path) -> None:
    built = compile_text(KernelText("spills.cu", "spills"), arch, kernels)
    assert built.registers is not None
    assert built.registers <= 64  # a block of 1024 threads shares 65536
    assert built.shared_bytes is not None
    assert built.shared_bytes >= 128 * 4  # newer architectures reserve a KiB more
    assert built.spill_bytes is not None
    assert built.spill_bytes > 0
    assert built.stack_bytes is not None
    assert built.stack_bytes > 0


@pytest.mark.usefixtures("nvrtc")
def test_defines_reach_the_kernel(kernels: Path) -> None:
    other = KernelText(TEXT.file, TEXT.entry, (("FACTOR", 3),))
    assert compile_text(TEXT, "sm_80", kernels).cubin != compile_text(other, "sm_80", kernels).cubin


@pytest.mark.usefixtures("nvrtc")
def test_an_error_in_the_text_is_its_first_line(kernels: Path) -> None:
    with pytest.raises(
        CompileError, match=r'got: scale\.cu\(\d+\): error: identifier "FACTOR" is undefined; correct'
    ) as raised:
        compile_text(KernelText("scale.cu", "scale"), "sm_80", kernels)
    assert raised.value.log.count("\n") >= 2
    again = pickle.loads(pickle.dumps(raised.value))  # it crosses processes
    assert (str(again), again.log) == (str(raised.value), raised.value.log)


@pytest.mark.usefixtures("nvrtc")
def test_an_error_of_the_assembler_is_told(kernels: Path) -> None:
    (kernels / "big.cu").write_text(
        'extern "C" __global__ void big(const __grid_constant__ int p) { __shared__ volatile char s[300000]; s[p] = 1; }'
    )
    with pytest.raises(CompileError, match="too much shared data"):
        compile_text(KernelText("big.cu", "big"), "sm_90a", kernels)


@pytest.mark.usefixtures("nvrtc")
def test_no_header_but_the_folders_own(kernels: Path) -> None:
    (kernels / "foreign.cu").write_text('#include <cuda_fp16.h>\nextern "C" __global__ void foreign(int p) {}')
    with pytest.raises(CompileError, match=r"foreign\.cu\(1\): .*cuda_fp16\.h"):
        compile_text(KernelText("foreign.cu", "foreign"), "sm_80", kernels)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("entry", ["missing", "cale"])
def test_a_missing_entry_is_told(entry: str, kernels: Path) -> None:
    with pytest.raises(CompileError, match=f"got: no .* function {entry}; correct"):
        compile_text(KernelText("scale.cu", entry, TEXT.defines), "sm_80", kernels)


@pytest.mark.usefixtures("nvrtc")
def test_an_unknown_arch_and_a_missing_file_are_told(kernels: Path) -> None:
    with pytest.raises(CompileError, match=r"for sm_10 .*gpu-architecture"):
        compile_text(TEXT, "sm_10", kernels)
    with pytest.raises(ResourceError, match=r"none\.cu"):
        compile_text(KernelText("none.cu", "none"), "sm_80", kernels)


LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'other' for 'sm_80'
ptxas info    : Function properties for other
ptxas         .     160 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 99 registers, used 0 barriers, 160 bytes cumulative stack size, 368 bytes cmem[0]
ptxas info    : Compiling entry function 'k' for 'sm_80'
ptxas info    : Function properties for k
ptxas         .     672 bytes stack frame, 796 bytes spill stores, 824 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 680 bytes cumulative stack size, 512 bytes smem, 368 bytes cmem[0]
ptxas info    : Function properties for _Z1fPfi
ptxas         .     8 bytes stack frame, 3 bytes spill stores, 2 bytes spill loads
"""


def test_usage_is_the_entrys_own_and_that_of_its_functions() -> None:
    usage = compiler.resource_usage(LOG, "k")
    assert usage == {"registers": 32, "shared_bytes": 512, "spill_bytes": 796 + 824 + 5, "stack_bytes": 680}
    assert compiler.resource_usage(LOG, "other")["spill_bytes"] == 8


def test_a_log_without_numbers_gives_none() -> None:
    assert set(compiler.resource_usage("something else", "k").values()) == {None}
