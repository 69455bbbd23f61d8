"""Merged Linears: the same results and the same state dict, tensors held once, and nothing kept from call to call."""

from __future__ import annotations

import copy
import gc
import io
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from w3pack.errors import UnsupportedError
from w3pack.format.linear import LinearSpec
from w3pack.pack.words import pack_codes, pack_scales
from w3pack.runtime import dense_cache
from w3pack.runtime.linear import STORED, W3Linear
from w3pack.runtime.merge import merge_linears, merged_of, unmerge
from w3pack.runtime.merged import MergedLinears, merged_spec
from w3pack.runtime.prepare import prepare

COLUMNS = 200


@pytest.fixture(autouse=True)
def budget() -> Iterator[None]:
    """Each test starts with a roomy budget and leaves the policy as it was."""
    dense_cache.set_budget(dense_cache.used_bytes() + (64 << 20))
    yield
    dense_cache.set_budget(None)


def spec(rows: int, **changes: Any) -> LinearSpec:
    settings = {"columns": COLUMNS, "group_size": 64, "layout": "dense", "maps": 1, "qmap_dtype": "int8", "bias": False}
    return LinearSpec(rows=rows, **{**settings, **changes})


def linear(rows: int, **changes: Any) -> W3Linear:
    """All eight codes, distinct scales of both signs, distinct maps; other content for other rows."""
    made = W3Linear(spec(rows, **changes), dtype=torch.float32)
    s = made.spec
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 8, (s.rows, s.columns), generator=generator).to(torch.uint8)
    scales = (torch.rand(s.rows, s.groups, generator=generator) + 0.5) / s.columns**0.5
    signs = torch.randint(0, 2, scales.shape, generator=generator) * 2 - 1
    steps = torch.stack([torch.randperm(255, generator=generator)[:8].sort().values - 127 for _ in range(s.maps)])
    with torch.no_grad():
        made.codes.copy_(pack_codes(codes, s))
        made.scales.copy_(pack_scales((scales * signs).half(), s))
        made.qmap.copy_(steps if s.qmap_dtype == "int8" else steps / 127.0)
        if made.bias is not None:
            made.bias.copy_(torch.randn(rows, generator=generator))
    return made


class Attention(nn.Module):
    """Three siblings that share x, and one that does not."""

    def __init__(self, q: W3Linear, k: W3Linear, v: W3Linear, o: W3Linear) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = q, k, v, o

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        width = min(q.shape[-1], k.shape[-1], v.shape[-1])
        mixed = q[..., :width].sigmoid() * k[..., :width] + v[..., :width]
        return self.o(nn.functional.pad(mixed, (0, COLUMNS - width)))


class Model(nn.Module):
    """Token ids -> floats, through one parent of packed Linears."""

    def __init__(self, parent: nn.Module | None = None, **changes: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(
            11, COLUMNS, _weight=torch.randn(11, COLUMNS, generator=torch.Generator().manual_seed(1))
        )
        self.parent = parent or Attention(
            linear(130, **changes), linear(60, **changes), linear(192, **changes), linear(COLUMNS, **changes)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.parent(self.embedding(ids))
        return found


IDS = torch.tensor([[1, 5, 7], [0, 2, 10]])


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return list(a) == list(b) and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def merged_in(model: nn.Module) -> MergedLinears:
    (found,) = [module for module in model.modules() if isinstance(module, MergedLinears)]
    return found


def is_empty(merged: MergedLinears) -> bool:
    return merged._traced is None and not merged._calls


def products(model: nn.Module) -> list[str]:
    """Names of the modules that computed a product in one call of the model, in order."""
    seen: list[str] = []
    names = {id(module): name.rpartition(".")[2] for name, module in model.named_modules()}
    original = W3Linear._dense_weight

    def watched(self: W3Linear, dtype: torch.dtype) -> torch.Tensor | None:
        seen.append(names[id(self)])
        return original(self, dtype)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(W3Linear, "_dense_weight", watched)
        model(IDS)
    return seen


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("qmap_dtype", ["int8", "float16"])
@pytest.mark.parametrize("layout", ["dense", "nibble"])
@pytest.mark.parametrize("kept", [True, False], ids=["unpacked once", "unpacked each call"])
def test_same_weights_and_results(layout: str, qmap_dtype: str, bias: bool, kept: bool) -> None:
    if not kept:
        dense_cache.set_budget(0)
    model = Model(layout=layout, qmap_dtype=qmap_dtype, bias=bias)
    before, weights = bits(model), [child.dequantized_weight() for child in model.parent.children()]
    with torch.no_grad():
        expected = model(IDS)
        report = merge_linears(model)
        assert str(report) == "1 times q + k + v as one of 448 x 200"
        found = model(IDS)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert equal(bits(model), before)
    merged = merged_in(model)
    parts = [child.dequantized_weight() for child in (model.parent.q, model.parent.k, model.parent.v)]
    assert all(torch.equal(part, weight) for part, weight in zip(parts, weights, strict=False))
    together = merged.dequantized_weight()
    for first, part in zip((0, 192, 256), parts, strict=True):
        assert torch.equal(together[first : first + part.shape[0]], part)
        together[first : first + part.shape[0]] = 0
    assert not together.any()  # padded rows
    assert unmerge(model) == 1
    assert equal(bits(model), before)
    with torch.no_grad():
        assert torch.equal(model(IDS), expected)


@pytest.mark.parametrize(
    ("maps", "expected"),
    [((1, 1, 1), 7), ((3, 1, 3), 7), ((192, 64, 192), 448), ((1, 1, 3), 7)],
    ids=["one each", "by tiles", "by rows", "of several kinds"],
)
def test_maps(maps: tuple[int, int, int], expected: int) -> None:
    q, k, v = (linear(rows, maps=n) for rows, n in zip((130, 60, 192), maps, strict=True))
    model = Model(Attention(q, k, v, linear(COLUMNS)))
    before = bits(model)
    weights = [child.dequantized_weight() for child in (q, k, v)]
    merge_linears(model)
    assert merged_in(model).spec.maps == expected
    assert all(torch.equal(child.dequantized_weight(), w) for child, w in zip((q, k, v), weights, strict=True))
    assert equal(bits(model), before)
    unmerge(model)
    assert equal(bits(model), before)
    assert all(child.qmap.is_contiguous() for child in (q, k, v))


def test_maps_of_equal_sizes_are_held_once_each() -> None:
    assert merged_spec([spec(256), spec(256)]).maps == 2
    assert merged_spec([spec(4096), spec(1024), spec(1024)]).maps == 6
    with pytest.raises(UnsupportedError, match="expected at least two Linears of equal columns"):
        merged_spec([spec(64), spec(64, columns=100)])


def test_one_has_a_bias_and_others_have_none() -> None:
    model = Model(Attention(linear(130), linear(60, bias=True), linear(192), linear(COLUMNS)))
    before = bits(model)
    with torch.no_grad():
        expected = model(IDS)
        merge_linears(model)
        torch.testing.assert_close(model(IDS), expected, rtol=1e-5, atol=1e-5)
    assert model.parent.q.bias is None
    assert model.parent.k.bias is not None
    assert equal(bits(model), before)
    unmerge(model)
    assert equal(bits(model), before)
    assert model.parent.q.bias is None


def test_nothing_is_held_twice() -> None:
    model = Model(bias=True)
    held = sum(tensor.nbytes for tensor in model.state_dict().values())
    padding = 4 * (192 - 130 + 64 - 60) + 8 * (7 - 3)  # of the bias, and a map for each row tile
    merge_linears(model)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in model.state_dict().values()}
    assert sum(storages.values()) == held + padding
    assert sum(p.nbytes for p in model.parameters()) == held + padding
    merged = merged_in(model)
    for child in (model.parent.q, model.parent.k, model.parent.v):
        assert not dict(child.named_parameters())
        for part in (*STORED, "bias"):
            view, whole = getattr(child, part), getattr(merged, part)
            assert view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    unmerge(model)
    assert sum(p.nbytes for p in model.parameters()) == held
    assert not merged_of(model)


def through_a_file(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.to(torch.float64),
        lambda model: model.double(),
        lambda model: model.cpu(),
        lambda model: model.to("cpu", torch.float64),
        copy.deepcopy,
        lambda model: copy.deepcopy(model).double(),
        through_a_file,
    ],
    ids=["to(dtype)", "double", "cpu", "to(device, dtype)", "deepcopy", "deepcopy and cast", "file"],
)
def test_moves_and_copies(move: Callable[[nn.Module], nn.Module]) -> None:
    model, separate = Model(bias=True), Model(bias=True)
    merge_linears(model)
    with torch.no_grad():
        model(IDS)
        moved: Any = move(model)
        wanted: Any = move(separate)
        assert equal(bits(moved), bits(wanted))
        assert products(moved) == ["merged_q_k_v", "o"]
        torch.testing.assert_close(moved(IDS), wanted(IDS), rtol=1e-5, atol=1e-5)
        assert moved.parent.q.codes.data_ptr() == merged_in(moved).codes.data_ptr()
        if moved is not model:
            assert merged_in(moved).codes.data_ptr() != merged_in(model).codes.data_ptr()
            assert is_empty(merged_in(model))
        assert unmerge(moved) == 1
        assert products(moved) == ["q", "k", "v", "o"]
        assert equal(bits(moved), bits(wanted))
    if moved is not model:
        assert products(model) == ["merged_q_k_v", "o"]


def test_moved_alone_is_refused_with_a_sentence() -> None:
    model = Model()
    merge_linears(model)
    for move in (lambda m: m.to("cpu"), lambda m: m.cpu(), lambda m: m.cuda()):
        with pytest.raises(UnsupportedError, match=r"expected the whole model or layer to be moved.*unmerge"):
            move(model.parent.k)
    model.parent.o.to("cpu")


def test_loads_a_state_dict() -> None:
    model, other = Model(bias=True), Model(bias=True)
    for child in other.parent.children():
        with torch.no_grad():
            child.codes.copy_(child.codes.flip(0))
            child.qmap.add_(1 - child.qmap.amax())
            child.bias.mul_(2)
    merge_linears(model)
    with torch.no_grad():
        model(IDS)  # unpacks
        assert not equal(bits(model), bits(other))
        model.load_state_dict(other.state_dict())
        assert equal(bits(model), bits(other))
        torch.testing.assert_close(model(IDS), other(IDS), rtol=1e-5, atol=1e-5)
    wrong = {**other.state_dict(), "parent.k.codes": torch.zeros(3), "parent.q.qmap": torch.zeros(1, 8)}
    del wrong["parent.v.scales"]
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(wrong)
    assert "expected parent.k.codes to be torch.int32" in str(caught.value)
    assert "expected parent.q.qmap to be torch.int8" in str(caught.value)
    assert "parent.v.scales" in str(caught.value)


def test_one_product_for_all_and_nothing_is_kept() -> None:
    model = Model()
    merge_linears(model)
    assert products(model) == ["merged_q_k_v", "o"]
    kept: list[weakref.ref[torch.Tensor]] = []
    for module in (model.parent.q, model.parent.v, merged_in(model)):
        module.register_forward_hook(lambda _m, args, out: kept.extend([weakref.ref(args[0]), weakref.ref(out)]))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            model(IDS)
        gc.collect()
        assert len(kept) == 6
        assert not any(ref() is not None for ref in kept)
        assert is_empty(merged_in(model))
        kept.clear()


class Odd(nn.Module):
    """Calls its children as `how` says; a and b are merged beforehand."""

    def __init__(self, how: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.how = linear(70), linear(100), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.how(self, x)


def plain(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([m.a(x), m.b(x)], dim=-1)


def changed_in_place(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    return torch.cat([m.a(x), m.b(x.mul_(2))], dim=-1)


ODD: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], list[str]]] = {
    "other order": (lambda m, x: torch.cat([m.b(x), m.a(x)], dim=-1), ["merged_a_b"]),
    "one only": (lambda m, x: m.b(x), ["merged_a_b"]),
    "twice": (lambda m, x: torch.cat([m.a(x), m.a(x), m.b(x)], dim=-1), ["merged_a_b"] * 2),
    "another tensor": (lambda m, x: torch.cat([m.a(x), m.b(x + 1)], dim=-1), ["merged_a_b"] * 2),
    "a view": (lambda m, x: torch.cat([m.a(x), m.b(x[:])], dim=-1), ["merged_a_b"] * 2),
    "changed in place": (changed_in_place, ["merged_a_b"] * 2),
    "nested": (lambda m, x: torch.cat([m.a(x), m.b(x), m.b(m.a(x).new_ones(x.shape))], dim=-1), ["merged_a_b"] * 3),
}


@pytest.mark.parametrize("name", ODD)
def test_called_otherwise_than_seen(name: str) -> None:
    how, computed = ODD[name]
    model, separate = Model(Odd(plain)), Model(Odd(how))
    assert merge_linears(model).groups
    model.parent.how = how
    assert products(model) == computed
    with torch.no_grad():
        torch.testing.assert_close(model(IDS), separate(IDS), rtol=1e-5, atol=1e-5)
    assert is_empty(merged_in(model))


def test_outside_of_the_parents_call_each_computes_its_own() -> None:
    model = Model()
    x = torch.randn(2, COLUMNS)
    expected = model.parent.k(x)
    merge_linears(model)
    with torch.inference_mode():
        first = model.parent.k(x)
        x.mul_(2)
        assert torch.equal(first, expected)
        assert not torch.equal(model.parent.k(x), expected)
    assert is_empty(merged_in(model))


def test_an_exception_leaves_nothing() -> None:
    model = Model()
    merge_linears(model)
    handle = model.parent.v.register_forward_pre_hook(lambda *_: 1 / 0)
    with torch.no_grad(), pytest.raises(ZeroDivisionError):
        model(IDS)
    assert is_empty(merged_in(model))
    handle.remove()
    assert products(model) == ["merged_q_k_v", "o"]


@pytest.mark.parametrize(
    "how",
    [
        lambda m, x: torch.cat([m.a(x), m.b(x.clone())], dim=-1),
        lambda m, x: torch.cat([m.a(x), m.b(x), m.b(x)], dim=-1),
        lambda m, x: m.a(x),
        lambda m, x: x,
        changed_in_place,
    ],
    ids=["other tensors", "one twice", "one never", "none", "changed in place"],
)
def test_not_merged_without_sharing(how: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    model = Model(Odd(how))
    assert not merge_linears(model).groups
    with torch.no_grad():
        torch.testing.assert_close(model(IDS), Model(Odd(how))(IDS))


class Listed(nn.Module):
    """Children in a container that is never called, as experts are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"a": linear(70), "b": linear(100)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.inner["a"](x), self.inner["b"](x)], dim=-1)


class Adapted(nn.Module):
    """A wrapper such as adapters use."""

    def __init__(self, base: W3Linear) -> None:
        super().__init__()
        self.base_layer = base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + 1


def test_containers_and_wrapped_linears_are_left_alone() -> None:
    assert not merge_linears(Model(Listed())).groups
    model = Model()
    model.parent.q = Adapted(model.parent.q)
    model.parent.v = Adapted(model.parent.v)
    assert not merge_linears(model).groups
    model.parent.v = model.parent.v.base_layer
    assert [group.members for group in merge_linears(model).groups] == [("k", "v")]


def test_wrapped_afterwards() -> None:
    model, separate = Model(), Model()
    merge_linears(model)
    for m in (model, separate):
        m.parent.k = Adapted(m.parent.k)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS), separate(IDS), rtol=1e-5, atol=1e-5)
    assert products(model) == ["merged_q_k_v", "o"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layout": "nibble"}, "q \\+ v and k"),
        ({"group_size": 128}, "differ in group size"),
        ({"qmap_dtype": "float16"}, "kind of map"),
        ({"maps": 64}, "kind of map"),
    ],
)
def test_only_what_fits_together(changes: dict[str, Any], says: str) -> None:
    model = Model(Attention(linear(130), linear(60, **changes), linear(192), linear(COLUMNS)))
    separate = copy.deepcopy(model)
    report = merge_linears(model)
    assert [group.members for group in report.groups] == [("q", "v")]
    assert re.search(says, str(report))
    with torch.no_grad():
        torch.testing.assert_close(model(IDS), separate(IDS), rtol=1e-5, atol=1e-5)


def test_what_is_trained_shared_or_without_data_is_left_alone() -> None:
    trained = Model(bias=True)
    trained.parent.k.bias.requires_grad_(True)
    assert [group.members for group in merge_linears(trained).groups] == [("q", "v")]
    shared = Model()
    shared.twin = shared.parent.k
    assert [group.members for group in merge_linears(shared).groups] == [("q", "v")]
    assert not merge_linears(Model().to("meta")).groups
    casts = Model(bias=True)
    casts.parent.k.bias.data = casts.parent.k.bias.data.double()
    assert "have biases of different dtypes" in str(merge_linears(casts))


def test_a_model_that_does_not_run_is_left_alone() -> None:
    report = merge_linears(Model().parent)
    assert not report.groups
    assert "not merged: the model does not run on a small input" in str(report)
    parent = Model().parent
    assert merge_linears(parent, run=lambda: parent(torch.zeros(1, COLUMNS))).groups


def test_the_small_run_leaves_no_trace() -> None:
    model = Model().train()
    model.parent.dropout = nn.Dropout(0.5)
    model.parent.register_forward_hook(lambda m, _a, out: m.dropout(out))
    own = model.parent.o.forward
    model.parent.o.forward = lambda x: own(x) * 3  # as loaders do that move tensors
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    with torch.inference_mode():
        merge_linears(model)
    assert torch.equal(torch.rand(3), expected)
    assert "forward" in model.parent.o.__dict__
    assert not any("forward" in child.__dict__ for name, child in model.parent.named_children() if name != "o")
    assert len(model.parent._forward_hooks) == 2
    assert len(model.parent._forward_pre_hooks) == 1
    assert merged_in(model).training
    unmerge(model)
    assert len(model.parent._forward_hooks) == 1
    assert not model.parent._forward_pre_hooks


def test_merging_twice_changes_nothing() -> None:
    model = Model()
    first, merged = merge_linears(model), merged_in(model)
    assert merge_linears(model) == first
    assert merged_in(model) is merged
    assert unmerge(model) == 1
    assert unmerge(model) == 0


def test_gradients_of_x_are_those_of_separate_linears() -> None:
    model, separate = Model(), Model()
    merge_linears(model)
    for m in (model, separate):
        with torch.no_grad():
            m(IDS)
        for checkpointed in (False, True):
            x = m.embedding(IDS)
            out = torch.utils.checkpoint.checkpoint(m.parent, x, use_reentrant=False) if checkpointed else m.parent(x)
            out.square().sum().backward()
    assert torch.equal(model.embedding.weight.grad, separate.embedding.weight.grad)
    assert float(model.embedding.weight.grad.abs().max()) > 0
    assert is_empty(merged_in(model))
    x = torch.randn(2, COLUMNS, requires_grad=True)
    grads = []
    for m in (model, separate):
        out = torch.utils.checkpoint.checkpoint(m.parent, x, use_reentrant=True)
        out.sum().backward()
        grads.append(x.grad)
        x.grad = None
    torch.testing.assert_close(grads[0], grads[1])


def test_under_autocast() -> None:
    model, separate = Model(), Model()
    merge_linears(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found, expected = model(IDS), separate(IDS)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_two_threads() -> None:
    model, separate = Model(), Model()
    merge_linears(model)
    inputs = [torch.randint(0, 11, (2, 3), generator=torch.Generator().manual_seed(n)) for n in range(4)]
    with torch.no_grad():
        expected = [separate(ids) for ids in inputs]
    wrong: list[float] = []

    @torch.no_grad()
    def work(number: int) -> None:
        for _ in range(60):
            wrong.append(float((model(inputs[number]) - expected[number]).abs().max()))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 240
    assert max(wrong) < 1e-4
    assert is_empty(merged_in(model))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_compiles_in_one_graph(mode: Callable[[], Any]) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    model, separate = Model(bias=True), Model(bias=True)
    merge_linears(model)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    others = IDS.flip(0)  # made here: a tensor of inference mode is another kind to the compiler
    with mode():
        for ids in (IDS, others):
            torch.testing.assert_close(compiled(ids), separate(ids), rtol=1e-5, atol=1e-5)
            assert is_empty(merged_in(model))
        model(IDS)  # eager calls in between change nothing
        torch.testing.assert_close(compiled(IDS), separate(IDS), rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 1
    calls = sum("w3_linear" in str(node.target) for graph in counter.graphs for node in graph.graph.nodes)
    assert calls == (4 if mode is torch.enable_grad else 2)
    with mode():
        unmerge(model)
        torch.testing.assert_close(compiled(IDS), separate(IDS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", ["torch.compile", "Module.compile", "before merging"])
def test_a_compiled_parent_shares_its_product(how: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    model, separate = Model(), Model()
    x = torch.randn(2, COLUMNS)
    counter = CompileCounterWithBackend("eager")
    called: Any = model.parent
    if how == "before merging":
        called = torch.compile(model.parent, fullgraph=True, backend=counter)
        with torch.no_grad():
            called(x)
    merge_linears(model)
    if how == "torch.compile":
        called = torch.compile(model.parent, fullgraph=True, backend=counter)
    elif how == "Module.compile":
        model.parent.compile(fullgraph=True, backend=counter)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(called(x), separate.parent(x), rtol=1e-5, atol=1e-5)
            assert is_empty(merged_in(model))
    assert sum("w3_linear" in str(node.target) for node in counter.graphs[-1].graph.nodes) == 2


def test_compiled_parts() -> None:
    """A member alone, a model with a graph break in the parent, and a checkpointed parent that is trained."""
    torch._dynamo.reset()

    def broken(m: Any, x: torch.Tensor) -> torch.Tensor:
        a = m.a(x)
        torch._dynamo.graph_break()
        b = m.b(x)
        torch._dynamo.graph_break()
        return torch.cat([a, b], dim=-1)

    model, separate = Model(Odd(plain)), Model(Odd(plain))
    merge_linears(model)
    x = torch.randn(2, COLUMNS)
    alone = torch.compile(model.parent.b, fullgraph=True, backend="eager")
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(alone(x), separate.parent.b(x))
        model.parent.how = broken
        compiled = torch.compile(model, backend="eager")
        for _ in range(3):
            torch.testing.assert_close(compiled(IDS), separate(IDS), rtol=1e-5, atol=1e-5)
            assert merged_in(model)._traced is None
            assert not any(call.product is not None for call in merged_in(model)._calls.values())
    model.parent.how = plain
    x.requires_grad_(True)

    def checkpointed(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.utils.checkpoint.checkpoint(model.parent, x, use_reentrant=False)
        return result

    out = torch.compile(checkpointed, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(out, separate.parent(x))
    (gradient,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(gradient, torch.autograd.grad(separate.parent(x).sum(), x)[0])


def test_prepare_merges_on_a_cpu_only_when_told_to() -> None:
    model = Model()
    assert not prepare(model).merging.groups
    assert not prepare(model, merge=False).merging.groups
    report = prepare(model, (1, 8), merge=True)
    assert report.kernels == 0
    assert str(report).splitlines()[1] == "1 times q + k + v as one of 448 x 200"
    assert [str(group) for group in report.merging.groups] == ["parent: q + k + v as one of 448 x 200"]
    assert prepare(model, merge=False).merging.groups == report.merging.groups
