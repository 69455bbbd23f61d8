"""`W3Linear`: its tensors never change dtype, it copies and saves like any module, and its cache never shows."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from w3pack.errors import UnsupportedError
from w3pack.format.layout import Layout
from w3pack.format.linear import LinearSpec, QmapDtype
from w3pack.pack.words import pack_codes, pack_scales
from w3pack.runtime import dense_cache
from w3pack.runtime.linear import W3Linear

STORED = {"codes", "scales", "qmap"}
CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "to(bfloat16)": lambda m: m.to(torch.bfloat16),
    "to(float16)": lambda m: m.to(torch.float16),
    "to(float64)": lambda m: m.to(torch.float64),
    "to(device and dtype)": lambda m: m.to("cpu", torch.float64),
    "half()": lambda m: m.half(),
    "bfloat16()": lambda m: m.bfloat16(),
    "float()": lambda m: m.float(),
    "double()": lambda m: m.double(),
    "type(float64)": lambda m: m.type(torch.float64),
}
WANTED = {
    "to(bfloat16)": torch.bfloat16,
    "to(float16)": torch.float16,
    "to(float64)": torch.float64,
    "to(device and dtype)": torch.float64,
    "half()": torch.float16,
    "bfloat16()": torch.bfloat16,
    "float()": torch.float32,
    "double()": torch.float64,
    "type(float64)": torch.float64,
}


@pytest.fixture(autouse=True)
def budget() -> Iterator[None]:
    """Each test starts with a roomy budget and leaves the policy as it was."""
    dense_cache.set_budget(dense_cache.used_bytes() + (64 << 20))
    yield
    dense_cache.set_budget(None)


def fill(module: W3Linear, seed: int = 0) -> W3Linear:
    """Random content that can fail: all eight codes, distinct scales of both signs, distinct map entries."""
    spec = module.spec
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randperm(spec.rows * spec.columns, generator=generator).remainder(8).to(torch.uint8)
    magnitudes = 1 + torch.randperm(spec.rows * spec.groups, generator=generator)
    signs = torch.randint(0, 2, magnitudes.shape, generator=generator) * 2 - 1
    scales = (magnitudes * signs / 1024).half().view(spec.rows, spec.groups)
    steps = torch.stack([torch.randperm(255, generator=generator)[:8].sort().values - 127 for _ in range(spec.maps)])
    assert codes.unique().numel() == 8
    assert scales.unique().numel() == scales.numel()
    with torch.no_grad():
        module.codes.copy_(pack_codes(codes.view(spec.rows, spec.columns), spec))
        module.scales.copy_(pack_scales(scales, spec))
        module.qmap.copy_(steps if spec.qmap_dtype == "int8" else steps / 127.0)
        if module.bias is not None:
            module.bias.copy_(torch.linspace(-2, 3, spec.rows))
    return module


@pytest.fixture(autouse=True)
def nothing_left_of_other_tests() -> None:
    """What they left in reference cycles would give its matrices back in the middle of one that counts."""
    gc.collect()


def make(
    layout: Layout = "dense",
    qmap_dtype: QmapDtype = "float16",
    *,
    bias: bool = True,
    maps: int = 1,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> W3Linear:
    spec = LinearSpec(rows=60, columns=200, group_size=64, layout=layout, maps=maps, qmap_dtype=qmap_dtype, bias=bias)
    return fill(W3Linear(spec, dtype=dtype), seed)


def bits(module: nn.Module) -> dict[str, tuple[torch.dtype, bytes]]:
    """Dtype and bytes of the three stored tensors of every W3Linear inside."""
    return {
        name: (tensor.dtype, tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
        for name, tensor in module.state_dict().items()
        if name.rpartition(".")[2] in STORED
    }


def random_x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("layout", ["dense", "nibble"])
@pytest.mark.parametrize("qmap_dtype", ["int8", "float16"])
@pytest.mark.parametrize("bias", [False, True])
def test_parameters_are_those_of_the_spec(layout: Layout, qmap_dtype: QmapDtype, bias: bool) -> None:
    module = make(layout, qmap_dtype, bias=bias, maps=64, dtype=torch.bfloat16)
    found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in module.state_dict().items()}
    expected = {
        "codes": (torch.int32, module.spec.codes_shape),
        "scales": (torch.float16, module.spec.scales_shape),
        "qmap": (getattr(torch, qmap_dtype), module.spec.qmap_shape),
    }
    if bias:
        expected["bias"] = (torch.bfloat16, (60,))
    assert found == expected
    assert (module.in_features, module.out_features) == (200, 60)
    assert not any(parameter.requires_grad for parameter in module.parameters())
    module.check("layer")


def test_meta_device_allocates_nothing_and_check_accepts_only_the_right_tensors() -> None:
    module = W3Linear(make().spec, device="meta")
    assert all(parameter.is_meta for parameter in module.parameters())
    wrong = make()
    wrong.scales = nn.Parameter(wrong.scales.data.float(), requires_grad=False)
    with pytest.raises(UnsupportedError, match=r"layers\.3\.q\.scales.*got"):
        wrong.check("layers.3.q")


def test_check_refuses_tensors_on_meta() -> None:
    with pytest.raises(UnsupportedError, match="codes"):
        W3Linear(make().spec, device="meta").check("layer")


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("qmap_dtype", ["int8", "float16"])
def test_casts_change_neither_dtype_nor_bits(cast: str, qmap_dtype: QmapDtype) -> None:
    module = make(qmap_dtype=qmap_dtype)
    before = bits(module)
    assert CASTS[cast](module) is module
    assert bits(module) == before
    assert module.bias is not None
    assert module.bias.dtype == WANTED[cast]
    module.check("layer")


@pytest.mark.parametrize("cast", CASTS)
def test_casts_of_a_parent_change_neither_dtype_nor_bits(cast: str) -> None:
    model = nn.Sequential(nn.Linear(200, 200), make(), nn.ReLU())
    before = bits(model)
    CASTS[cast](model)
    assert bits(model) == before
    assert model[0].weight.dtype == WANTED[cast]
    y = model(random_x(3, 200, dtype=WANTED[cast]))
    assert y.dtype == WANTED[cast]


def test_a_cast_there_and_back_loses_nothing() -> None:
    module = make()
    x = random_x(3, 200)
    before, expected = bits(module), module(x)
    module.to(torch.bfloat16).half().float()
    assert bits(module) == before
    with torch.no_grad():
        assert module.bias is not None
        module.bias.copy_(torch.linspace(-2, 3, 60))  # the bias did go through bfloat16
    assert torch.equal(module(x), expected)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("swap", [False, True])
def test_casts_under_torchs_future_switches(overwrite: bool, swap: bool) -> None:
    """torch converts parameters in place, by replacing them, or by swapping, as two global switches say."""
    future = torch.__future__
    saved = future.get_overwrite_module_params_on_conversion(), future.get_swap_module_params_on_conversion()
    try:
        future.set_overwrite_module_params_on_conversion(overwrite)
        future.set_swap_module_params_on_conversion(swap)
        module = make()
        before = bits(module)
        module.to(torch.bfloat16)
        assert bits(module) == before
        assert module.bias is not None
        assert module.bias.dtype == torch.bfloat16
    finally:
        future.set_overwrite_module_params_on_conversion(saved[0])
        future.set_swap_module_params_on_conversion(saved[1])


def test_a_cast_module_still_loads_a_state_dict() -> None:
    source, target = make(seed=1), make(seed=2)
    target.to(torch.bfloat16)
    target.load_state_dict(source.state_dict())
    assert bits(target) == bits(source)


def test_moving_to_meta_and_back_keeps_the_dtypes() -> None:
    module = make().to("meta")
    assert {name: parameter.dtype for name, parameter in module.named_parameters() if name in STORED} == {
        "codes": torch.int32,
        "scales": torch.float16,
        "qmap": torch.float16,
    }
    module.to_empty(device="cpu")
    assert fill(module)(random_x(1, 200)).shape == (1, 60)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_deepcopy_is_equal_and_independent(warm: bool, bias: bool) -> None:
    module = make(bias=bias).eval()
    x = random_x(3, 200)
    expected = module(x)
    if not warm:
        module.drop_dense()
    twin = copy.deepcopy(module)
    assert not twin.training
    assert bits(twin) == bits(module)
    assert torch.equal(twin(x), expected)
    assert {p.data_ptr() for p in twin.parameters()}.isdisjoint({p.data_ptr() for p in module.parameters()})
    twin.drop_dense()
    fill(twin, seed=5)
    assert torch.equal(module(x), expected)
    assert not torch.equal(twin(x), expected)


def test_deepcopy_of_a_model_keeps_shared_modules_shared() -> None:
    shared = make()
    model = nn.ModuleList([shared, shared])
    twin = copy.deepcopy(model)
    assert twin[0] is twin[1]
    assert twin[0] is not shared


@pytest.mark.parametrize("layout", ["dense", "nibble"])
@pytest.mark.parametrize("qmap_dtype", ["int8", "float16"])
def test_state_dict_round_trip_through_a_file(layout: Layout, qmap_dtype: QmapDtype) -> None:
    source, target = make(layout, qmap_dtype, seed=1), make(layout, qmap_dtype, seed=2)
    x = random_x(3, 200)
    assert not torch.equal(source(x), target(x))
    target.drop_dense()
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    target.load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert bits(target) == bits(source)
    assert torch.equal(source(x), target(x))


def test_state_dict_holds_the_four_tensors_also_when_the_cache_is_warm() -> None:
    module = make()
    module(random_x(3, 200))
    assert set(module.state_dict()) == {"codes", "scales", "qmap", "bias"}
    assert set(dict(module.named_buffers())) == set()


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_after_a_call_is_seen_by_the_next_call(assign: bool) -> None:
    """A matrix unpacked before the load must not answer after it."""
    source, target = make(seed=1), make(seed=2)
    x = random_x(3, 200)
    target(x)
    target.load_state_dict(source.state_dict(), assign=assign)
    assert torch.equal(target(x), source(x))


def test_there_is_no_float_weight() -> None:
    module = make()
    with pytest.raises(AttributeError, match="dequantized_weight"):
        _ = module.weight
    assert not hasattr(module, "weight")
    assert tuple(module.dequantized_weight().shape) == (60, 200)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(200,), (3, 200), (0, 200), (2, 3, 200)])
def test_cached_and_uncached_outputs_are_identical(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    module = make()
    x = random_x(*shape, dtype=dtype)
    start = dense_cache.used_bytes()
    dense_cache.set_budget(0)
    uncached = module(x)
    assert dense_cache.used_bytes() == start
    dense_cache.set_budget(start + (1 << 20))
    first, second = module(x), module(x)
    assert dense_cache.used_bytes() == start + 60 * 200 * dtype.itemsize
    assert first.dtype == uncached.dtype == dtype
    assert torch.equal(first, uncached)
    assert torch.equal(second, uncached)
    module.drop_dense()


def test_output_is_that_of_the_matrix() -> None:
    module = make()
    assert module.bias is not None
    x = random_x(3, 200, dtype=torch.float64)
    truth = x @ module.dequantized_weight(torch.float64).T + module.bias.double()
    torch.testing.assert_close(module(x), truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("budget", [0, 1 << 20])
def test_case_19_bias_is_added(budget: int) -> None:
    dense_cache.set_budget(dense_cache.used_bytes() + budget if budget else 0)
    module = make()
    assert module.bias is not None
    assert torch.equal(module(torch.zeros(2, 200)), module.bias.expand(2, 60))
    module.drop_dense()


def test_budget_of_nothing_keeps_nothing() -> None:
    dense_cache.set_budget(0)
    start = dense_cache.used_bytes()
    module = make()
    for dtype in (torch.float32, torch.bfloat16):
        module(random_x(2, 200, dtype=dtype))
        assert dense_cache.used_bytes() == start


def test_first_come_first_kept() -> None:
    start = dense_cache.used_bytes()
    one = 60 * 200 * 4
    dense_cache.set_budget(start + 2 * one)
    modules = [make(seed=seed) for seed in range(3)]
    x = random_x(2, 200)
    outputs = [module(x) for module in modules]
    assert dense_cache.used_bytes() == start + 2 * one
    assert all(torch.equal(module(x), output) for module, output in zip(modules, outputs, strict=True))
    modules[0].drop_dense()
    assert dense_cache.used_bytes() == start + one
    modules[2](x)
    assert dense_cache.used_bytes() == start + 2 * one
    for module in modules:
        module.drop_dense()
    assert dense_cache.used_bytes() == start


@pytest.mark.parametrize("move", [lambda m: m.to(torch.bfloat16), lambda m: m.to("meta"), lambda m: m.half()])
def test_moving_gives_the_cached_matrix_back(move: Callable[[nn.Module], nn.Module]) -> None:
    start = dense_cache.used_bytes()
    module = make()
    module(random_x(2, 200))
    assert dense_cache.used_bytes() > start
    move(module)
    assert dense_cache.used_bytes() == start


def test_inputs_of_changing_dtype_are_counted_as_they_are() -> None:
    start = dense_cache.used_bytes()
    module = make()
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.float16):
        y = module(random_x(2, 200, dtype=dtype))
        assert y.dtype == dtype
        assert dense_cache.used_bytes() - start in {60 * 200 * size for size in (0, 2, 4, 8)}
    module.drop_dense()
    assert dense_cache.used_bytes() == start


def test_wider_inputs_do_not_take_more_than_the_budget() -> None:
    start = dense_cache.used_bytes()
    dense_cache.set_budget(start + 60 * 200 * 2)
    module = make()
    module(random_x(2, 200, dtype=torch.bfloat16))
    module(random_x(2, 200, dtype=torch.float64))
    assert dense_cache.used_bytes() <= start + 60 * 200 * 2
    module.drop_dense()
    assert dense_cache.used_bytes() == start


def test_a_deleted_module_gives_its_matrix_back() -> None:
    start = dense_cache.used_bytes()
    module = make()
    module(random_x(2, 200))
    del module
    gc.collect()
    assert dense_cache.used_bytes() == start


def test_copies_do_not_count_a_matrix_that_they_do_not_have() -> None:
    start = dense_cache.used_bytes()
    module = make()
    module(random_x(2, 200))
    twin = copy.deepcopy(module)
    assert dense_cache.used_bytes() == start + 60 * 200 * 4
    twin.drop_dense()
    module.drop_dense()
    assert dense_cache.used_bytes() == start


@pytest.mark.parametrize("budget", [0, 1 << 20])
def test_gradient_flows_to_x_also_after_inference(budget: int) -> None:
    """A matrix unpacked in inference mode must not be saved for a later backward."""
    dense_cache.set_budget(dense_cache.used_bytes() + budget if budget else 0)
    module = make()
    with torch.inference_mode():
        module(random_x(2, 200))
    x = random_x(2, 200).requires_grad_()
    module(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, module.dequantized_weight().sum(dim=0).expand(2, 200), rtol=1e-4, atol=1e-4)
    module.drop_dense()


def test_compiles_in_one_graph_cold_and_warm() -> None:
    module = make()
    x = random_x(3, 200)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    cold = compiled(x)
    warm = module(x)
    assert torch.equal(cold, warm)
    assert torch.equal(compiled(x), warm)
    module.drop_dense()


def test_wrong_input_is_refused_with_a_sentence_cold_and_warm() -> None:
    module = make()
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"expected .*, got "):
            module(random_x(2, 199))
        module(random_x(2, 200))
    module.drop_dense()


def test_printing_tells_the_form() -> None:
    text = repr(make("nibble", "int8", maps=64))
    for fact in ("in_features=200", "out_features=60", "nibble", "64", "int8"):
        assert fact in text


def test_a_containers_limit_bounds_the_budget(tmp_path: Path) -> None:
    for name, text in (("memory.max", "max"), ("memory.current", "700"), ("memory.stat", "anon 1\ninactive_file 100")):
        (tmp_path / name).write_text(text)
    assert dense_cache._container_bytes(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert dense_cache._container_bytes(tmp_path) == 400
    assert dense_cache._container_bytes(tmp_path / "absent") is None
