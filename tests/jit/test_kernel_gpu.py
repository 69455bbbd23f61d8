"""The same on a real device: load, launch, capture, overlap, threads."""

from __future__ import annotations

import struct
import threading
from pathlib import Path

import pytest
import torch

from w3pack.errors import UsageError
from w3pack.jit import KernelText, LaunchError, LoadedKernel, Store, load

pytestmark = pytest.mark.gpu

TEXT = KernelText(file="scale.cu", entry="scale", defines=(("FACTOR", 2),))
COUNT = 1000


@pytest.fixture
def own(kernels: Path) -> Store:
    return Store(kernels=kernels)


@pytest.fixture
def data() -> torch.Tensor:
    return torch.arange(COUNT, dtype=torch.float32, device="cuda")


def launch(loaded: LoadedKernel, data: torch.Tensor, *, programmatic: bool = False, shared_bytes: int = 512) -> None:
    """data = data * FACTOR + 0.5, on torch's current stream."""
    loaded.launch(
        stream=torch.cuda.current_stream().cuda_stream,
        grid=-(-COUNT // 128),
        block=128,
        shared_bytes=shared_bytes,
        params=struct.pack("<Qif", data.data_ptr(), COUNT, 0.5),
        programmatic=programmatic,
    )


def after(launches: int) -> torch.Tensor:
    """What so many launches leave of `data`, exact in float32."""
    expected = torch.arange(COUNT, dtype=torch.float32)
    for _ in range(launches):
        expected = expected * 2 + 0.5
    return expected


def test_load_and_launch(own: Store, data: torch.Tensor) -> None:
    loaded = load(TEXT, 0, store=own)
    assert loaded.parameter_bytes == 16
    assert loaded.attributes().registers == loaded.compiled.registers
    assert loaded.attributes().local_bytes == 0
    launch(loaded, data)
    launch(loaded, data)
    assert torch.equal(data.cpu(), after(2))


def test_from_the_cache_and_from_seeds(own: Store, kernels: Path, tmp_path: Path, data: torch.Tensor) -> None:
    first = load(TEXT, 0, store=own)
    cached = load(TEXT, 0, store=Store(kernels=kernels))
    own.seed(TEXT, first.arch, first.compiled, tmp_path / "seeded")
    seeded = load(TEXT, 0, store=Store(kernels=kernels, seeded=tmp_path / "seeded"))
    assert (first.origin, cached.origin, seeded.origin) == ("compiled", "cache", "seeded")
    for loaded in (cached, seeded):
        launch(loaded, data)
    assert torch.equal(data.cpu(), after(2))


def test_in_a_cuda_graph(own: Store, data: torch.Tensor) -> None:
    loaded = load(TEXT, 0, store=own)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            launch(load(TEXT, 0, store=own), data)
        with pytest.raises(UsageError, match=r"call prepare\(\) first"):
            load(KernelText("scale.cu", "scale", (("FACTOR", 3),)), 0, store=own)
    assert torch.equal(data.cpu(), after(0))
    graph.replay()
    assert torch.equal(data.cpu(), after(3))
    graph.replay()
    assert torch.equal(data.cpu(), after(6))
    launch(loaded, data)
    assert torch.equal(data.cpu(), after(7))


@pytest.mark.parametrize("captured", [False, True])
def test_programmatic_launches_keep_their_order(captured: bool, own: Store, data: torch.Tensor) -> None:
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("compute capability 9.0 on")
    loaded = load(TEXT, 0, store=own)
    torch.cuda.synchronize()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(8):
                launch(loaded, data, programmatic=True)
        graph.replay()
    else:
        for _ in range(8):
            launch(loaded, data, programmatic=True)
    assert torch.equal(data.cpu(), after(8))


def test_large_shared_memory(own: Store, data: torch.Tensor) -> None:
    loaded = load(TEXT, 0, store=own)
    launch(loaded, data, shared_bytes=64 << 10)
    launch(loaded, data)
    assert torch.equal(data.cpu(), after(2))
    with pytest.raises(LaunchError, match="CUDA_ERROR_INVALID_VALUE"):
        launch(loaded, data, shared_bytes=1 << 20)


def test_clusters(own: Store, data: torch.Tensor) -> None:
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("compute capability 9.0 on")
    params = struct.pack("<Qif", data.data_ptr(), COUNT, 0.5)
    stream = torch.cuda.current_stream().cuda_stream
    load(TEXT, 0, store=own).launch(stream=stream, grid=8, block=128, shared_bytes=512, params=params, cluster=2)
    assert torch.equal(data.cpu(), after(1))


def test_a_refused_launch_is_a_sentence_and_harms_nothing(own: Store, data: torch.Tensor) -> None:
    loaded = load(TEXT, 0, store=own)
    params = struct.pack("<Qif", data.data_ptr(), COUNT, 0.5)
    with pytest.raises(LaunchError, match=r"block 4096 .*got CUDA_ERROR_INVALID_VALUE"):
        loaded.launch(stream=0, grid=1, block=4096, shared_bytes=0, params=params)
    launch(loaded, data)
    assert torch.equal(data.cpu(), after(1))


def test_on_another_stream_and_in_a_new_thread(own: Store, data: torch.Tensor) -> None:
    loaded = load(TEXT, 0, store=own)
    params = struct.pack("<Qif", data.data_ptr(), COUNT, 0.5)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    errors: list[BaseException] = []

    def work(handle: int) -> None:
        try:
            loaded.launch(stream=handle, grid=8, block=128, shared_bytes=512, params=params)
        except BaseException as error:  # noqa: BLE001  told by the assertion below
            errors.append(error)

    for handle in (stream.cuda_stream, torch.cuda.default_stream().cuda_stream):
        thread = threading.Thread(target=work, args=(handle,))
        thread.start()
        thread.join()
        torch.cuda.synchronize()
    assert errors == []
    assert torch.equal(data.cpu(), after(2))


def test_on_each_device_whichever_is_current(own: Store) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one device")
    for index in (1, 0):
        data = torch.arange(COUNT, dtype=torch.float32, device=f"cuda:{index}")
        params = struct.pack("<Qif", data.data_ptr(), COUNT, 0.5)
        torch.cuda.synchronize(index)
        load(TEXT, index, store=own).launch(stream=0, grid=8, block=128, shared_bytes=512, params=params)
        torch.cuda.synchronize(index)
        assert torch.equal(data.cpu(), after(1))
