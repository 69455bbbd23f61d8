"""Small kernels in a folder of their own, and a cache of its own for every test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from w3pack.jit import bindings, kernel

SCALE = """
#include "scale.cuh"
extern "C" __global__ void scale(const __grid_constant__ Params p) {
    extern __shared__ float staged[];
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    staged[threadIdx.x] = i < p.count ? p.data[i] : 0.f;
    if (i < p.count) p.data[i] = staged[threadIdx.x] * FACTOR + p.bias;
}
"""
HEADER = "#pragma once\nstruct Params { float* data; int count; float bias; };\n"
SPILLS = """
struct Params { float* data; int stride; };
extern "C" __global__ void __launch_bounds__(1024, 1) spills(const __grid_constant__ Params p) {
    __shared__ float shared[128];
    float values[192];
    shared[threadIdx.x & 127] = p.data[0];
#pragma unroll
    for (int i = 0; i < 192; i++) values[i] = p.data[i * p.stride + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 192; i++) p.data[i * 7 + threadIdx.x] = values[i] * values[(i * 5) % 192] + shared[i & 127];
}
"""


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    """A kernels folder."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "scale.cu").write_text(SCALE)
    (folder / "scale.cuh").write_text(HEADER)
    (folder / "spills.cu").write_text(SPILLS)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the default store keeps its kernels."""
    monkeypatch.setenv("W3PACK_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def _nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kernel, "_LOADED", {})
    finders = (bindings.nvrtc, bindings.driver, bindings.object_code)
    for finder in finders:
        finder.cache_clear()
    yield
    for finder in finders:
        finder.cache_clear()
