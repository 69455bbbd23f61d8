"""The operator on a CUDA device in graphs, on streams, in threads and in compiled code."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from w3pack.errors import UsageError
from w3pack.format.linear import LinearSpec
from w3pack.ops import w3_dense, workspace
from w3pack.ops.device import limits
from w3pack.runtime.linear import W3Linear
from w3pack.runtime.prepare import prepare

pytestmark = pytest.mark.gpu

#: conftest.py's Packed: spec, codes, scales, qmap, weight; called with x and a bias.
Make = Callable[..., Any]


def random_x(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + len(shape))
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def small_portions(monkeypatch: pytest.MonkeyPatch) -> int:
    """Make a 4096 x 4096 matrix of 513 tokens several portions; how many."""
    monkeypatch.setattr(w3_dense, "_PORTION_BYTES", 1)
    monkeypatch.setattr(w3_dense, "_OUTPUT_TILE", 16)
    portions = w3_dense.row_portions(4096, 4096, 513, multiprocessors=limits(0).multiprocessors)
    assert len(portions) > 4
    return len(portions)


def capture(
    function: Callable[[], torch.Tensor], stream: torch.cuda.Stream | None = None
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = function()
    return graph, out


@pytest.mark.parametrize("tokens", [1, 8, 16, 40, 64, 100, 513])
def test_captured_once_and_replayed_with_other_x(
    make: Make, tokens: int, monkeypatch: pytest.MonkeyPatch, workspace_is_clean: None
) -> None:
    packed = make()
    if tokens == 513:
        small_portions(monkeypatch)
    inputs = [random_x(tokens, 4096, seed=10 * seed) for seed in range(4)]
    expected = [packed(packed(x)) for x in inputs]
    source, x = inputs[0].clone(), inputs[0].clone()

    def twice() -> torch.Tensor:
        x.copy_(source)  # a copy, not a kernel, comes before the first launch
        return packed(packed(x))

    graph, out = capture(twice)
    for given, wanted in zip(inputs * 2, expected * 2, strict=True):
        source.copy_(given)
        graph.replay()
        assert torch.equal(out, wanted)


def test_two_graphs_alternately_and_at_once(make: Make, workspace_is_clean: None) -> None:
    packed = make()
    inputs = [random_x(8, 4096, seed=1), random_x(16, 4096, seed=2)]
    expected = [packed(x) for x in inputs]

    def repeated(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([packed(x) for _ in range(10)])

    graphs = [capture(functools.partial(repeated, x)) for x in inputs]
    for _ in range(5):
        for (graph, out), wanted in zip(graphs, expected, strict=True):
            graph.replay()
            assert bool((out == wanted).all())
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(50):
        for (graph, _), stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for (_, out), wanted in zip(graphs, expected, strict=True):
        assert bool((out == wanted).all())


def test_captures_without_spare_workspace(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, x = make(), random_x(8, 4096)
    expected = packed(x)
    monkeypatch.setattr(workspace._WORKSPACES[0], "spares", [])
    graph, out = capture(lambda: torch.stack([packed(x) for _ in range(3)]))
    for _ in range(3):
        graph.replay()
        assert bool((out == expected).all())


def test_branches_of_one_graph(make: Make, workspace_is_clean: None) -> None:
    packed, side = make(), torch.cuda.Stream()
    inputs = [random_x(8, 4096, seed=1), random_x(8, 4096, seed=2)]
    expected = [packed(x) for x in inputs]

    def branches() -> torch.Tensor:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        first = [packed(inputs[0]) for _ in range(10)]
        with torch.cuda.stream(side):
            second = [packed(inputs[1]) for _ in range(10)]
        main.wait_stream(side)
        return torch.stack([torch.stack(first), torch.stack(second)])

    graph, out = capture(branches)
    for _ in range(20):
        graph.replay()
        for found, wanted in zip(out, expected, strict=True):
            assert bool((found == wanted).all())


def test_kernels_are_not_built_during_a_capture(make: Make) -> None:
    packed = make((704, 704, 704, 1), "nibble")
    graph = torch.cuda.CUDAGraph()
    x = random_x(8, 704)
    with torch.cuda.graph(graph):
        doubled = x + x
        with pytest.raises(UsageError, match=r"call prepare\(\) first"):
            packed(x)
    graph.replay()
    assert torch.equal(doubled, 2 * x)


def test_prepare_then_capture() -> None:
    spec = LinearSpec(rows=448, columns=832, group_size=832, layout="nibble", maps=448, qmap_dtype="float16", bias=True)
    layer = W3Linear(spec, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        for tensor in (layer.codes, layer.scales, layer.qmap, layer.bias):
            tensor.zero_()
        layer.bias.fill_(3)
    report = prepare(torch.nn.Sequential(layer), (1, 40, 513))
    assert report.kernels == 4  # a decode kernel, another with its staging kernel, and the dequantising one
    assert report.workspace_bytes > 0
    assert prepare(layer, (1, 40, 513)).built == 0
    for tokens in (1, 40, 513):
        x = random_x(tokens, 832, dtype=torch.bfloat16)
        graph, out = capture(functools.partial(layer.forward, x))
        graph.replay()
        assert bool((out == 3).all())


def test_streams_at_once(make: Make, workspace_is_clean: None) -> None:
    packed = make()
    inputs = [random_x(tokens, 4096, seed=tokens) for tokens in (8, 8, 16, 40)]
    expected = [packed(x) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    found: list[list[torch.Tensor]] = [[] for _ in inputs]
    for _ in range(100):
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[number].append(packed(inputs[number]))
    torch.cuda.synchronize()
    for results, wanted in zip(found, expected, strict=True):
        assert all(torch.equal(result, wanted) for result in results)


@pytest.mark.parametrize("own_streams", [False, True])
def test_threads(make: Make, own_streams: bool, workspace_is_clean: None) -> None:
    packed = make((8200, 2048, 128, 1))
    inputs = [random_x(tokens, 2048, seed=tokens) for tokens in (1, 5, 8, 9, 16, 33, 64, 100)]
    expected = [packed(x) for x in inputs]
    torch.cuda.synchronize()
    wrong: list[int] = []
    start = threading.Barrier(len(inputs))

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream() if own_streams else None):
            start.wait()
            results = [packed(inputs[number]) for _ in range(30)]
            torch.cuda.current_stream().synchronize()
            if not all(torch.equal(result, expected[number]) for result in results):
                wrong.append(number)

    with ThreadPoolExecutor(len(inputs)) as pool:
        list(pool.map(work, range(len(inputs))))
    assert wrong == []


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(make: Make, mode: str, workspace_is_clean: None) -> None:
    """Two Linears with pointwise work between, over several batch sizes, in one graph each."""
    packed = make()
    bias = torch.linspace(-1, 1, 4096, device="cuda", dtype=torch.float16)

    def block(x: torch.Tensor) -> torch.Tensor:
        return packed(torch.relu(packed(x * 2, bias))) + x

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, mode=mode, dynamic=False)
    with torch.inference_mode():
        for tokens in (1, 8, 40, 513):
            for seed in range(5):
                x = random_x(tokens, 4096, seed=seed)
                torch.compiler.cudagraph_mark_step_begin()
                found = compiled(x).clone()
                torch.testing.assert_close(found, block(x), rtol=4e-3, atol=4e-3)
    torch._dynamo.reset()
