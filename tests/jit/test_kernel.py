"""Loading and launching, with the driver replaced by one that records what it is asked."""

from __future__ import annotations

import ctypes
import enum
import struct
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from w3pack.errors import UnsupportedError, UsageError
from w3pack.jit import Compiled, KernelText, LaunchError, Store, ToolchainError, bindings, kernel, load, store

TEXT = KernelText(file="scale.cu", entry="scale", defines=(("FACTOR", 2),))
PARAMS = struct.pack("<Qif", 7, 5, 0.5)


class Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES = 701


OK = Result.CUDA_SUCCESS


class Names:
    """An enumeration whose members are their own names."""

    def __getattr__(self, name: str) -> str:
        return name


class FakeDriver:
    """Two devices of compute capability 9.0 and one of 7.5; a kernel of 16 parameter bytes and 1 KiB static shared."""

    CUdevice_attribute = Names()
    CUfunction_attribute = Names()
    CUlaunchAttributeID = Names()
    CUlaunchConfig = SimpleNamespace

    def __init__(self) -> None:
        self.contexts: list[str] = []
        self.launches: list[dict[str, Any]] = []
        self.shared: list[tuple[str, int]] = []
        self.loaded: list[str] = []
        self.refusals: list[Result] = []
        self.configs: list[Any] = []
        self.parameters = 1

    def CUlaunchAttribute(self) -> Any:
        return SimpleNamespace(value=SimpleNamespace(clusterDim=SimpleNamespace()))

    def cuDeviceGet(self, index: int) -> tuple[Any, ...]:
        return (OK, f"device {index}") if index < 3 else (Result.CUDA_ERROR_INVALID_DEVICE, None)

    def cuDeviceGetAttribute(self, kind: str, device: str) -> tuple[Any, ...]:
        return OK, (9, 7)[device == "device 2"] if kind.endswith("MAJOR") else (0, 5)[device == "device 2"]

    def cuDevicePrimaryCtxRetain(self, device: str) -> tuple[Any, ...]:
        return OK, f"context of {device}"

    def cuCtxSetCurrent(self, context: str) -> tuple[Any, ...]:
        self.contexts = [context]
        return (Result.CUDA_SUCCESS,)

    def cuCtxPushCurrent(self, context: str) -> tuple[Any, ...]:
        self.contexts.append(context)
        return (OK,)

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        return OK, self.contexts.pop()

    def from_cubin(self, cubin: bytes) -> Any:
        def get_kernel(entry: str) -> Any:
            if b"refused" in cubin:
                raise ValueError("CUDA_ERROR_NO_BINARY_FOR_GPU")
            self.loaded.append(f"{entry} in {self.contexts[-1]}")
            return SimpleNamespace(_handle=f"kernel {entry}")

        return SimpleNamespace(get_kernel=get_kernel)

    def cuKernelGetFunction(self, handle: str) -> tuple[Any, ...]:
        return OK, f"function of {handle} in {self.contexts[-1]}"

    def cuKernelGetParamInfo(self, handle: str, index: int) -> tuple[Any, ...]:
        return (OK, 0, 16) if index < self.parameters else (Result.CUDA_ERROR_INVALID_VALUE, 0, 0)

    def cuFuncGetAttribute(self, kind: str, function: str) -> tuple[Any, ...]:
        values = {"NUM_REGS": 40, "LOCAL_SIZE_BYTES": 8, "SHARED_SIZE_BYTES": 1024, "MAX_THREADS_PER_BLOCK": 256}
        return OK, values[kind.removeprefix("CU_FUNC_ATTRIBUTE_")]

    def cuFuncSetAttribute(self, function: str, kind: str, value: int) -> tuple[Any, ...]:
        self.shared.append((kind, value))
        return (OK if value < 230_000 else Result.CUDA_ERROR_INVALID_VALUE,)

    def cuLaunchKernelEx(self, config: Any, function: str, pointer: int, extra: int) -> tuple[Any, ...]:
        (address,) = (ctypes.c_void_p * 1).from_address(pointer)
        self.configs.append(config)
        self.launches.append(
            {
                "grid": (config.gridDimX, config.gridDimY, config.gridDimZ),
                "block": (config.blockDimX, config.blockDimY, config.blockDimZ),
                "shared": config.sharedMemBytes,
                "stream": config.hStream,
                "attributes": [
                    (item.id, vars(item.value.clusterDim) or item.value.programmaticStreamSerializationAllowed)
                    for item in config.attrs
                ],
                "function": function,
                "params": ctypes.string_at(address, 16),
                "contexts": list(self.contexts),
            }
        )
        assert config.numAttrs == len(config.attrs)
        assert extra == 0
        return (self.refusals.pop(0) if self.refusals else OK,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    for name, value in {"driver": fake, "object_code": fake, "nvrtc_version": (13, 0)}.items():
        cached = bindings.functools.cache(lambda value=value: value)  # type: ignore[misc]
        monkeypatch.setattr(bindings, name, cached)
    monkeypatch.setattr(store, "compile_text", built)
    return fake


def built(text: KernelText, arch: str, folder: Path) -> Compiled:
    return Compiled(f"\x7fELF {text} {arch}".encode(), 40, 1024, 0, 8, "", 0.1)


@pytest.fixture
def own(kernels: Path) -> Store:
    return Store(kernels=kernels)


def test_loaded_once_for_each_device_in_its_primary_context(driver: FakeDriver, own: Store) -> None:
    first = load(TEXT, 0, store=own)
    assert load(KernelText("scale.cu", "scale", (("FACTOR", 2),)), 0, store=own) is first
    second = load(TEXT, 1, store=own)
    assert driver.loaded == ["scale in context of device 0", "scale in context of device 1"]
    assert (first.arch, first.origin, second.origin) == ("sm_90a", "compiled", "cache")
    assert (first.parameter_bytes, driver.contexts) == (16, [])
    assert repr(first) == "LoadedKernel(scale.cu:scale FACTOR=2, device 0, sm_90a, compiled)"
    assert first.attributes() == kernel.KernelAttributes(40, 8, 1024, 256)
    first.launch(stream=0, grid=1, block=32, shared_bytes=0, params=PARAMS)
    second.launch(stream=0, grid=1, block=32, shared_bytes=0, params=PARAMS)
    assert [launch["function"][-8:] for launch in driver.launches] == ["device 0", "device 1"]


def test_launch_passes_everything_on(driver: FakeDriver, own: Store) -> None:
    loaded = load(TEXT, 0, store=own)
    loaded.launch(stream=0xABC, grid=7, block=128, shared_bytes=64, params=PARAMS)
    loaded.launch(
        stream=1, grid=(4, 2, 3), block=64, shared_bytes=0, params=bytearray(PARAMS), programmatic=True, cluster=2
    )
    one, two = driver.launches
    assert one["grid"] == (7, 1, 1)
    assert one["block"] == (128, 1, 1)
    assert (one["shared"], one["stream"], one["attributes"], one["params"]) == (64, 0xABC, [], PARAMS)
    assert (two["grid"], two["stream"], two["params"]) == ((4, 2, 3), 1, PARAMS)
    assert two["attributes"] == [
        ("CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION", 1),
        ("CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION", {"x": 2, "y": 1, "z": 1}),
    ]
    assert one["contexts"] == two["contexts"] == []


def test_configurations_are_made_once_and_never_changed(driver: FakeDriver, own: Store) -> None:
    loaded = load(TEXT, 0, store=own)
    for stream in (1, 2, 1, 2):
        for grid in (3, 4):
            loaded.launch(stream=stream, grid=grid, block=32, shared_bytes=0, params=PARAMS)
    assert len({id(config) for config in driver.configs}) == 4
    assert [launch["stream"] for launch in driver.launches] == [1, 1, 2, 2] * 2


def test_configurations_do_not_pile_up(driver: FakeDriver, own: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_CONFIGS_KEPT", 4)
    loaded = load(TEXT, 0, store=own)
    for grid in range(1, 20):
        loaded.launch(stream=0, grid=grid, block=32, shared_bytes=0, params=PARAMS)
        assert len(loaded._configs) <= 4
    assert [launch["grid"][0] for launch in driver.launches] == list(range(1, 20))


def test_large_shared_memory_is_allowed_once_and_only_grows(driver: FakeDriver, own: Store) -> None:
    loaded = load(TEXT, 0, store=own)
    for shared in (47 << 10, 48 << 10, 100_000, 60_000, 100_000):  # 1 KiB is static
        loaded.launch(stream=0, grid=1, block=32, shared_bytes=shared, params=PARAMS)
    kind = "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
    assert driver.shared == [(kind, 48 << 10), (kind, 100_000)]
    with pytest.raises(LaunchError, match=r"have 300000 bytes of dynamic shared .*got CUDA_ERROR_INVALID_VALUE"):
        loaded.launch(stream=0, grid=1, block=32, shared_bytes=300_000, params=PARAMS)
    assert len(driver.launches) == 5


def test_wrong_arguments_are_sentences(driver: FakeDriver, own: Store) -> None:
    loaded = load(TEXT, 0, store=own)
    with pytest.raises(UsageError, match="expected 16 bytes of parameters for scale, got 12; pack"):
        loaded.launch(stream=0, grid=1, block=32, shared_bytes=0, params=PARAMS[:12])
    with pytest.raises(UsageError, match="expected a grid of one to three extents"):
        loaded.launch(stream=0, grid=(1, 1, 1, 1), block=32, shared_bytes=0, params=PARAMS)
    assert driver.launches == []


def test_a_refused_launch_names_the_error(driver: FakeDriver, own: Store) -> None:
    loaded = load(TEXT, 0, store=own)
    driver.refusals = [Result.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES]
    with pytest.raises(
        LaunchError,
        match=r"expected scale\.cu:scale FACTOR=2 \(sm_90a\) to launch with grid \(2, 1, 1\), block 2048 .* on CUDA "
        r"device 0, got CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES; ",
    ):
        loaded.launch(stream=0, grid=2, block=2048, shared_bytes=0, params=PARAMS)
    assert len(driver.launches) == 1


def test_a_thread_without_the_context_is_helped(driver: FakeDriver, own: Store) -> None:
    loaded = load(TEXT, 1, store=own)
    driver.refusals = [Result.CUDA_ERROR_INVALID_CONTEXT]
    loaded.launch(stream=0, grid=1, block=32, shared_bytes=0, params=PARAMS)
    assert [launch["contexts"] for launch in driver.launches] == [[], ["context of device 1"]]
    driver.refusals = [Result.CUDA_ERROR_INVALID_CONTEXT] * 2
    with pytest.raises(LaunchError, match="INVALID_CONTEXT"):
        loaded.launch(stream=0, grid=1, block=32, shared_bytes=0, params=PARAMS)
    # it stays, for whoever comes next in this thread
    assert driver.contexts == ["context of device 1"]


def test_another_context_is_put_aside_for_the_launch(driver: FakeDriver, own: Store) -> None:
    loaded = load(TEXT, 1, store=own)
    driver.contexts = ["another"]
    driver.refusals = [Result.CUDA_ERROR_INVALID_HANDLE]
    loaded.launch(stream=0, grid=1, block=32, shared_bytes=0, params=PARAMS)
    assert driver.launches[-1]["contexts"] == ["another", "context of device 1"]
    assert driver.contexts == ["another"]


def test_nothing_is_loaded_during_a_capture(
    driver: FakeDriver, own: Store, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    other = KernelText("scale.cu", "scale", (("FACTOR", 3),))
    loaded = load(TEXT, 0, store=own)
    for name in ("is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    assert load(TEXT, 0, store=own) is loaded
    for text, device in ((other, 0), (TEXT, 1)):
        with pytest.raises(UsageError, match=r"expected .* before a CUDA graph is captured.*call prepare\(\) first"):
            load(text, device, store=own)
    assert len(driver.loaded) == 1
    assert len(list((cache / "cubins").iterdir())) == 1


def test_threads_build_a_kernel_once_and_different_ones_side_by_side(
    driver: FakeDriver, own: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2, timeout=30)
    count: list[KernelText] = []

    def slow(text: KernelText, arch: str, folder: Path) -> Compiled:
        count.append(text)
        both.wait()  # passes only when two builds are under way
        time.sleep(0.02)
        return built(text, arch, folder)

    monkeypatch.setattr(store, "compile_text", slow)
    texts = [KernelText("scale.cu", "scale", (("FACTOR", factor),)) for factor in (1, 2)]
    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda text=text: results.append(load(text, 0, store=own))) for text in texts * 4
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert len(set(map(id, results))) == 2
    assert sorted(map(str, count)) == sorted(map(str, texts))


def test_devices_and_cubins_that_cannot_be_used_are_told(
    driver: FakeDriver, own: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnsupportedError, match=r"got 7\.5"):
        load(TEXT, 2, store=own)
    with pytest.raises(LaunchError, match="expected a CUDA device 3, got CUDA_ERROR_INVALID_DEVICE"):
        load(TEXT, 3, store=own)
    monkeypatch.setattr(store, "compile_text", lambda *_: Compiled(b"refused", 1, 0, 0, 0, "", 0.1))
    with pytest.raises(LaunchError, match="to load on CUDA device 0, got ValueError: CUDA_ERROR_NO_BINARY_FOR_GPU"):
        load(TEXT, 0, store=own)
    assert driver.contexts == []


def test_a_kernel_takes_one_struct(driver: FakeDriver, own: Store) -> None:
    driver.parameters = 2
    with pytest.raises(LaunchError, match="to take one struct by value, got more parameters"):
        load(TEXT, 0, store=own)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_without_a_driver_it_is_a_sentence(own: Store) -> None:
    with pytest.raises(ToolchainError, match=r"expected .*, got.*; (install the NVIDIA driver|run `pip install)"):
        load(TEXT, 0, store=own)
