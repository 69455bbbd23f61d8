"""Merged Linears on a GPU: as exact as separate ones, one launch for all, captured and compiled."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from w3pack.format.linear import LinearSpec
from w3pack.ops import w3_cuda
from w3pack.pack.words import pack_codes, pack_scales
from w3pack.runtime.linear import W3Linear
from w3pack.runtime.merge import merge_linears, unmerge
from w3pack.runtime.merged import MergedLinears
from w3pack.runtime.prepare import prepare

pytestmark = pytest.mark.gpu
COLUMNS = 512
ROWS = {"q": 512, "k": 100, "v": 192}


def linear(rows: int, **changes: Any) -> W3Linear:
    settings = {
        "columns": COLUMNS,
        "group_size": 128,
        "layout": "dense",
        "maps": 1,
        "qmap_dtype": "int8",
        "bias": False,
    }
    spec = LinearSpec(rows=rows, **{**settings, **changes})
    made = W3Linear(spec, dtype=torch.float16, device="cuda")
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 8, (rows, spec.columns), generator=generator).to(torch.uint8)
    scales = (torch.rand(rows, spec.groups, generator=generator) + 0.5) / spec.columns**0.5
    steps = torch.stack([torch.randperm(255, generator=generator)[:8].sort().values - 127 for _ in range(spec.maps)])
    with torch.no_grad():
        made.codes.copy_(pack_codes(codes, spec))
        made.scales.copy_(pack_scales(scales.half(), spec))
        made.qmap.copy_(steps if spec.qmap_dtype == "int8" else steps / 127.0)
        if made.bias is not None:
            made.bias.copy_(torch.randn(rows, generator=generator))
    return made


class Siblings(nn.Module):
    """Three Linears on one x, side by side."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        for name, rows in ROWS.items():
            self.add_module(name, linear(rows, **changes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.q(x), self.k(x), self.v(x)], dim=-1)


class Model(nn.Module):
    """Token ids -> floats: two layers of siblings and a product back."""

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, COLUMNS, dtype=dtype, device="cuda")
        self.layers = nn.ModuleList([Siblings(), Siblings()])
        self.down = nn.ModuleList([linear(COLUMNS, columns=sum(ROWS.values())) for _ in range(2)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for siblings, down in zip(self.layers, self.down, strict=True):
            x = nn.functional.rms_norm(x + down(siblings(x)), (COLUMNS,))
        return x


def ids(batch: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 64, (batch, 1), generator=torch.Generator().manual_seed(seed)).cuda()


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "changes",
    [{}, {"bias": True}, {"layout": "nibble", "qmap_dtype": "float16"}, {"group_size": 64, "columns": 200}],
    ids=["plain", "bias", "nibble", "padded"],
)
@torch.no_grad()
def test_as_exact_as_torch(changes: dict[str, Any], dtype: torch.dtype) -> None:
    model = Siblings(**changes)
    columns = changes.get("columns", COLUMNS)
    exact = torch.cat([child.dequantized_weight(torch.float64) for child in model.children()])
    rounded = exact.to(dtype)
    bias = torch.cat([child.bias for child in model.children()]) if changes.get("bias") else None
    assert merge_linears(model, run=lambda: model(torch.zeros(1, columns, device="cuda"))).groups
    prepare(model, (1, 5, 16, 40, 200), dtype=dtype)
    for tokens in (1, 5, 16, 40, 200):
        x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens)).to("cuda", dtype)
        wanted = x.double() @ exact.T + (0 if bias is None else bias.double())
        plain = nn.functional.linear(x, rounded, None if bias is None else bias.to(dtype))
        found = model(x)
        assert torch.equal(found, model(x))
        assert error(found, wanted) <= 2 * error(plain, wanted)


@torch.no_grad()
def test_prepare_merges_and_loads_the_merged_kernels(monkeypatch: Any) -> None:
    model, separate = Model(), Model()
    separate.load_state_dict(model.state_dict())
    report = prepare(model, (1, 8))
    assert [group.members for group in report.merging.groups] == [("q", "k", "v")] * 2
    prepare(separate, (1, 8), merge=False)
    calls: list[int] = []
    run = w3_cuda.linear

    def counted(form: w3_cuda.Form, *args: Any) -> torch.Tensor:
        calls.append(form.spec.rows)
        return run(form, *args)

    monkeypatch.setattr(w3_cuda, "linear", counted)
    found = model(ids(8))
    assert calls == [merged_rows := 512 + 128 + 192, COLUMNS, merged_rows, COLUMNS]
    assert error(found, separate(ids(8)).double()) < 5e-3
    assert prepare(model, (1, 8)).built == 0
    unmerge(model)
    assert torch.equal(model(ids(8)), separate(ids(8)))


@pytest.mark.parametrize("batch", [1, 8])
@torch.no_grad()
def test_captured_in_a_graph(batch: int) -> None:
    model = Model()
    prepare(model, (batch,))
    static = ids(batch)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model(static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(static)
    assert all(not m._calls for m in model.modules() if isinstance(m, MergedLinears))
    for seed in range(3):
        static.copy_(ids(batch, seed))
        graph.replay()
        assert torch.equal(out, model(ids(batch, seed)))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@torch.inference_mode()
def test_compiled_in_one_graph(mode: str) -> None:
    torch._dynamo.reset()
    model = Model()
    prepare(model, (4,))
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    for seed in range(4):
        tokens = ids(4, seed)
        torch.compiler.cudagraph_mark_step_begin()
        found = compiled(tokens).clone()
        assert error(found, model(tokens).double()) < 5e-3


def test_two_streams() -> None:
    model = Model()
    prepare(model, (2,))
    with torch.no_grad():
        expected = [model(ids(2, seed)) for seed in range(2)]
    torch.cuda.synchronize()
    same: list[bool] = []

    def work(seed: int) -> None:
        tokens, stream = ids(2, seed), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(stream):
            found = [model(tokens) for _ in range(20)]
            same.extend(bool(torch.equal(one, expected[seed])) for one in found)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same == [True] * 40


@torch.no_grad()
def test_moved_to_a_cpu_and_back_and_memory() -> None:
    model = Model()
    bytes_before = torch.cuda.memory_allocated()
    report = prepare(model, (1,))
    found = model(ids(1))
    model.cpu()
    assert all(tensor.device.type == "cpu" for tensor in model.state_dict().values())
    model.cuda()
    assert torch.equal(model(ids(1)), found)
    del found
    merged = [m for m in model.modules() if isinstance(m, MergedLinears)]
    assert all(m.codes.data_ptr() == child.q.codes.data_ptr() for m, child in zip(merged, model.layers, strict=True))
    rounding = 1 << 20  # of allocations
    assert torch.cuda.memory_allocated() < bytes_before + report.workspace_bytes + rounding


def test_gradients_of_x() -> None:
    model, separate = Model(), Model()
    separate.load_state_dict(model.state_dict())
    prepare(model, (4,))
    prepare(separate, (4,), merge=False)
    gradients = []
    for one in (model, separate):
        one(ids(4)).float().square().sum().backward()
        gradients.append(one.embedding.weight.grad)
    torch.testing.assert_close(*gradients)
