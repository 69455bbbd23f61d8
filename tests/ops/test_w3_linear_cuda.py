"""The operator on a CUDA device: exact where it can be, else no worse than torch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from w3pack.errors import UnsupportedError
from w3pack.format.layout import LAYOUTS, Layout
from w3pack.format.linear import QMAP_DTYPES, LinearSpec, QmapDtype
from w3pack.jit import load
from w3pack.ops import w3_cuda, w3_dense, w3_launch
from w3pack.ops.device import limits
from w3pack.ops.w3_config import KEPT, OWN, STREAMED, W3Config, W3Desc, make_plan
from w3pack.ops.w3_decide import plan_of
from w3pack.ops.w3_dense import row_portions
from w3pack.reference import w3

pytestmark = pytest.mark.gpu

HALVES = [torch.float16, torch.bfloat16]
TOKENS = (1, 2, 5, 7, 8, 9, 15, 16, 17, 33, 64, 100, 513)
#: rows, columns, group size, maps (of the padded rows)
SHAPES = (
    (64, 64, 64, 1),
    (1, 64, 64, 1),
    (60, 200, 64, 1),
    (130, 256, 256, 1),
    (192, 384, 128, 3),
    (60, 1000, 192, 64),
    (320, 1088, 64, 1),
    (256, 4096, 4096, 1),
    (1000, 3000, 128, 1024),
    (520, 7168, 128, 9),
    (4096, 4096, 128, 1),
    (8200, 2048, 128, 1),
)
#: conftest.py's Packed: spec, codes, scales, qmap, weight; called with x and a bias.
Make = Callable[..., Any]


def random_x(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + len(shape))
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def relative(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


def by_portions(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """torch's product, portion by portion as the operator cuts the rows."""
    flat = x.reshape(-1, x.shape[-1])
    portions = row_portions(*weight.shape, flat.shape[0], multiprocessors=limits(0).multiprocessors)
    y = torch.cat([torch.mm(flat, weight[first:last].t()) for first, last in portions], dim=1)
    return (y if bias is None else y + bias.to(x.dtype)).reshape(*x.shape[:-1], -1)


def assert_no_worse_than_torch(packed: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Within twice torch's error on the same matrix; single roundings may be unlucky where there are few outputs.

    The kernels' own bound is 3.0e-4 in float16. Beyond their tokens the product is torch's, on the matrix rounded to float16:
    that rounding alone is 2e-4, and with the output's 3e-4. Large matrices go to torch in portions of rows, for which cuBLAS may
    choose algorithms that round once more; so there the bound is torch's own error on the same portions.
    """
    truth = torch.nn.functional.linear(x.double(), packed.weight, None if bias is None else bias.double())
    plain = torch.nn.functional.linear(x, packed.weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    found = packed(x, bias)
    assert found.dtype == x.dtype
    assert found.shape == truth.shape
    assert found.is_contiguous()
    error = relative(found, truth)
    few = torch.finfo(x.dtype).eps if truth.numel() < 1000 else 0.0
    torchs = relative(plain, truth)
    assert error <= 2 * torchs + few, (tuple(x.shape), error, torchs)
    if x.dtype == torch.float16 and not few:
        tokens, form = x.numel() // x.shape[-1], packed.form(x.dtype)
        dense = tokens >= form.dense_from or tokens in form.mainloop  # on the matrix rounded to float16
        bound = (
            1.05 * max(torchs, relative(by_portions(x, packed.weight.to(x.dtype), bias), truth)) if dense else 3.0e-4
        )
        assert error <= bound, (tuple(x.shape), error, torchs)


@pytest.fixture(scope="module", autouse=True)
def built(make: Make) -> None:
    """All kernels of the tables below, side by side: one after the other they would take minutes."""
    texts = {
        text
        for shape in SHAPES
        for layout in LAYOUTS
        for qmap_dtype in QMAP_DTYPES
        for dtype in HALVES
        for tokens in TOKENS
        for text in make(shape, layout, qmap_dtype).form(dtype).texts(tokens)
    }
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda text: load(text, 0), texts))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("qmap_dtype", QMAP_DTYPES)
@pytest.mark.parametrize("dtype", HALVES)
def test_errs_no_more_than_twice_what_torch_errs(
    make: Make,
    shape: tuple[int, int, int, int],
    layout: Layout,
    qmap_dtype: QmapDtype,
    dtype: torch.dtype,
    workspace_is_clean: None,
) -> None:
    packed = make(shape, layout, qmap_dtype)
    bias = torch.linspace(-1, 1, shape[0], device="cuda")
    for tokens in TOKENS:
        assert_no_worse_than_torch(packed, random_x(tokens, shape[1], dtype=dtype, seed=tokens))
    assert_no_worse_than_torch(packed, random_x(3, shape[1], dtype=dtype), bias)
    assert_no_worse_than_torch(packed, random_x(40, shape[1], dtype=dtype), bias.to(dtype))
    assert_no_worse_than_torch(packed, random_x(513, shape[1], dtype=dtype), bias)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("qmap_dtype", QMAP_DTYPES)
@pytest.mark.parametrize("dtype", HALVES)
def test_dequantised_bits_are_the_references(
    make: Make, shape: tuple[int, int, int, int], layout: Layout, qmap_dtype: QmapDtype, dtype: torch.dtype
) -> None:
    packed = make(shape, layout, qmap_dtype)
    found = w3_cuda.dequantize(packed.form(dtype), *packed.tensors)
    assert torch.equal(found, w3.dequantize(*packed.tensors, spec=packed.spec, dtype=dtype))


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[1] <= 1088])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", HALVES)
def test_identity_activations_read_the_matrix_back(
    make: Make, shape: tuple[int, int, int, int], layout: Layout, dtype: torch.dtype
) -> None:
    packed = make(shape, layout, "float16")
    truth = w3.dequantize(*packed.tensors, spec=packed.spec, dtype=dtype).t()
    identity = torch.eye(shape[1], device="cuda", dtype=dtype)
    for tokens in (1, 8, 16, 31, 64):
        for first in range(0, shape[1] if tokens > 1 else 70, tokens):
            last = first + tokens
            assert torch.equal(packed(identity[first:last]), truth[first:last])


GOLDEN = sorted(path.stem for path in (Path(__file__).parents[1] / "golden").glob("*.safetensors"))


@pytest.mark.parametrize("name", [name for name in GOLDEN if not name.startswith("flute")])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", HALVES)
def test_golden_vectors(make: Make, golden: Path, name: str, layout: Layout, dtype: torch.dtype) -> None:
    with safe_open(golden / f"{name}.safetensors", framework="pt", device="cuda") as file:
        metadata = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
    qmap = tensors["qmap"]
    spec = LinearSpec(
        rows=int(metadata["rows"]),
        columns=int(metadata["columns"]),
        group_size=int(metadata["group_size"]),
        layout=layout,
        maps=qmap.shape[0],
        qmap_dtype="int8" if qmap.dtype == torch.int8 else "float16",
        bias=False,
    )
    packed = type(make())(spec, tensors[f"packed_{layout}"], tensors["scales"], qmap, tensors["weight_float64"])
    assert_no_worse_than_torch(packed, tensors["x"].to(dtype))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("tokens", [1, 16, 40])
def test_only_the_output_is_written(make: Make, dtype: torch.dtype, tokens: int) -> None:
    """NaN in and around y: what is not written shows, and so does what is written beside it."""
    packed = make((1000, 3000, 128, 1024), "nibble", "float16")
    desc = W3Desc.of(
        packed.spec, tokens=tokens, x_dtype="float16" if dtype == torch.float16 else "bfloat16", device=limits(0)
    )
    whole = torch.full((tokens + 2, 1000), float("nan"), dtype=dtype, device="cuda")
    x = random_x(tokens, 3000, dtype=dtype)
    w3_launch.run_decode(plan_of(desc), x, *packed.tensors, None, whole[1:-1])
    assert torch.equal(whole[1:-1], packed(x))
    assert bool(whole[0].isnan().all())
    assert bool(whole[-1].isnan().all())


@pytest.mark.parametrize("tokens", [1, 8, 16, 33, 64])
@pytest.mark.parametrize("qmap_dtype", QMAP_DTYPES)
def test_fifty_launches_agree_in_every_bit(
    make: Make, tokens: int, qmap_dtype: QmapDtype, workspace_is_clean: None
) -> None:
    packed = make((8200, 2048, 128, 1), "dense", qmap_dtype)
    x = random_x(tokens, 2048)
    results = [packed(x) for _ in range(50)]
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("ring", [OWN, KEPT, STREAMED])
@pytest.mark.parametrize("row_warps", [1, 4])
@pytest.mark.parametrize("warpgroups", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_planes_beside_each_other(
    make: Make, ring: int, row_warps: int, warpgroups: bool, dtype: torch.dtype, workspace_is_clean: None
) -> None:
    """Up to four tokens in one token tile: the same sums in another order."""
    packed, limits_ = make((520, 7168, 128, 9)), limits(0)
    if (ring != OWN and not limits_.bulk) or (warpgroups and (row_warps < 4 or limits_.arch != "sm_90a")):
        pytest.skip("not a config of this device")
    split = 8 // row_warps
    for tokens in (1, 2, 3, 4):
        desc = W3Desc.of(packed.spec, tokens=tokens, x_dtype=str(dtype).removeprefix("torch."), device=limits_)
        config = W3Config(
            token_tiles=1,
            row_warps=row_warps,
            split_warps=split,
            token_warps=1,
            slots=8,
            ring=ring,
            blocks=limits_.multiprocessors,
            slot_steps=1 if limits_.bulk else split,
            warpgroups=warpgroups,
            beside=True,
        )
        x = random_x(tokens, 7168, dtype=dtype, seed=tokens)
        found = torch.full((tokens, 520), float("nan"), dtype=dtype, device="cuda")
        w3_launch.run_decode(make_plan(desc, config), x, *packed.tensors, None, found)
        truth = torch.nn.functional.linear(x.double(), packed.weight)
        plain = torch.nn.functional.linear(x, packed.weight.to(dtype))
        assert relative(found, truth) <= 2 * relative(plain, truth) + torch.finfo(dtype).eps


@pytest.mark.parametrize("cluster", [2, 4, 8])
@pytest.mark.parametrize("ring", [OWN, KEPT, STREAMED, 4])
@pytest.mark.parametrize("tokens", [3, 16, 64])
@pytest.mark.parametrize("shape", [(520, 7168, 128, 9), (8200, 2048, 128, 1)])
def test_clusters_add_up(
    make: Make, shape: tuple[int, int, int, int], tokens: int, ring: int, cluster: int, workspace_is_clean: None
) -> None:
    """Blocks that share row blocks, few and many of them: right, and the same bits each time."""
    packed, limits_ = make(shape), limits(0)
    if not limits_.bulk or (ring == OWN and tokens > 16) or (ring == KEPT and tokens > 16):
        pytest.skip("not a config of this device")
    tiles = max(1, tokens // 8)
    config = W3Config(
        token_tiles=min(tiles, 2),
        row_warps=2,
        split_warps=1 if ring > 0 or tiles > 2 else 4 // tiles,
        token_warps=max(1, tiles // 2),
        slots=8,
        ring=ring,
        blocks=limits_.multiprocessors,
        cluster=cluster,
    )
    plan = make_plan(W3Desc.of(packed.spec, tokens=tokens, x_dtype="float16", device=limits_), config)
    x = random_x(tokens, shape[1])
    bias = torch.linspace(-1, 1, shape[0], device="cuda", dtype=x.dtype)
    found = [torch.full((tokens, shape[0]), float("nan"), dtype=x.dtype, device="cuda") for _ in range(20)]
    for y in found:
        w3_launch.run_decode(plan, x, *packed.tensors, bias, y)
    truth = torch.nn.functional.linear(x.double(), packed.weight, bias.double())
    assert relative(found[0], truth) <= 3.0e-4
    assert all(torch.equal(y, found[0]) for y in found)


@pytest.mark.parametrize(("row_warps", "split_warps"), [(1, 3), (1, 6), (3, 2), (1, 10), (2, 7)])
@pytest.mark.parametrize("ring", [OWN, KEPT, STREAMED])
def test_any_number_of_warps(make: Make, row_warps: int, split_warps: int, ring: int, workspace_is_clean: None) -> None:
    """Registers change hands in whole warpgroups: with other numbers of warps nobody may wait for any."""
    packed, limits_ = make((320, 1088, 64, 1)), limits(0)
    if not limits_.bulk:
        pytest.skip("not a config of this device")
    config = W3Config(
        token_tiles=1,
        row_warps=row_warps,
        split_warps=split_warps,
        token_warps=1,
        slots=split_warps,
        ring=ring,
        blocks=limits_.multiprocessors,
    )
    x = random_x(8, 1088)
    found = torch.full((8, 320), float("nan"), dtype=x.dtype, device="cuda")
    plan = make_plan(W3Desc.of(packed.spec, tokens=8, x_dtype="float16", device=limits_), config)
    w3_launch.run_decode(plan, x, *packed.tensors, None, found)
    assert relative(found, torch.nn.functional.linear(x.double(), packed.weight)) <= 3.0e-4


@pytest.mark.parametrize(("token_tiles", "slots", "cluster"), [(2, 8, 1), (4, 4, 2), (4, 4, 4)])
def test_no_slot_is_filled_while_it_is_read(
    make: Make, token_tiles: int, slots: int, cluster: int, workspace_is_clean: None
) -> None:
    """Many readers of few slots, slowed down by spills: without a fence the copy engine overtook reads in a third of launches."""
    packed, limits_ = make((14336, 4096, 128, 1)), limits(0)
    if limits_.arch != "sm_90a":
        pytest.skip("not a config of this device")
    config = W3Config(
        token_tiles=token_tiles,
        row_warps=1,
        split_warps=4,
        token_warps=8 // token_tiles,
        slots=slots,
        ring=STREAMED,
        blocks=limits_.multiprocessors,
        cluster=cluster,
    )
    plan = make_plan(W3Desc.of(packed.spec, tokens=64, x_dtype="float16", device=limits_), config)
    x = random_x(64, 4096)
    found = [torch.full((64, 14336), float("nan"), dtype=x.dtype, device="cuda") for _ in range(100)]
    for y in found:
        w3_launch.run_decode(plan, x, *packed.tensors, None, y)
    assert relative(found[0], torch.nn.functional.linear(x.double(), packed.weight)) <= 3.0e-4
    assert all(torch.equal(y, found[0]) for y in found)


@pytest.mark.parametrize(("ring", "row_warps"), [(OWN, 4), (KEPT, 4), (STREAMED, 4), (STREAMED, 1), (4, 8)])
@pytest.mark.parametrize("warpgroups", [False, True])
def test_launches_that_overlap_neither_hang_nor_differ(
    make: Make, ring: int, row_warps: int, warpgroups: bool, workspace_is_clean: None
) -> None:
    """Thousands in a row: each begins while the one before ends, and they hand partial sums through the same memory."""
    packed = make((8200, 2048, 128, 1))
    limits_ = limits(0)
    if (ring != OWN and not limits_.bulk) or (warpgroups and (row_warps < 4 or limits_.arch != "sm_90a")):
        pytest.skip("not a config of this device")
    config = W3Config(
        token_tiles=1,
        row_warps=row_warps,
        split_warps=8 // row_warps,
        token_warps=1,
        slots=8,
        ring=ring,
        blocks=limits_.multiprocessors,
        slot_steps=1 if limits_.bulk else 8 // row_warps,
        warpgroups=warpgroups,
    )
    plan = make_plan(W3Desc.of(packed.spec, tokens=8, x_dtype="float16", device=limits_), config)
    x = random_x(8, 2048)
    first, last = (torch.empty(8, 8200, dtype=x.dtype, device="cuda") for _ in range(2))
    w3_launch.run_decode(plan, x, *packed.tensors, None, first)
    for _ in range(3000):
        w3_launch.run_decode(plan, x, *packed.tensors, None, last)
    assert torch.equal(first, last)


@pytest.mark.parametrize("dtype", HALVES)
def test_any_strides_and_leading_shapes(make: Make, dtype: torch.dtype) -> None:
    packed = make((60, 200, 64, 1))
    bias = torch.linspace(-3, 4, 60, device="cuda")
    wide = torch.full((6, 2, 450), float("nan"), dtype=dtype, device="cuda")
    every_second = wide[::2, :, 5:405:2]
    every_second.copy_(random_x(3, 2, 200, dtype=dtype))
    odd = torch.full((5, 301), float("nan"), dtype=dtype, device="cuda")[:, 1:201]
    odd.copy_(random_x(5, 200, dtype=dtype))
    for x in (
        every_second,
        odd,
        random_x(200, 5, dtype=dtype).t(),
        random_x(1, 200, dtype=dtype).expand(4, 200),
        random_x(3, 2, 200, dtype=dtype).transpose(0, 1),
        random_x(200, dtype=dtype),
        random_x(2, 3, 4, 200, dtype=dtype),
        random_x(1, 1, 200, dtype=dtype),
    ):
        assert torch.equal(packed(x, bias), packed(x.clone(memory_format=torch.contiguous_format), bias))
        assert packed(x).shape == (*x.shape[:-1], 60)
        assert_no_worse_than_torch(packed, x, bias)
    for shape in ((0, 200), (2, 0, 3, 200)):
        assert packed(random_x(*shape, dtype=dtype)).shape == (*shape[:-1], 60)


def test_packed_tensors_and_bias_of_any_strides(make: Make) -> None:
    packed = make((320, 1088, 64, 1))
    x, bias = random_x(5, 1088), torch.linspace(-3, 4, 640, device="cuda")[::2]
    shifted = []
    for tensor in packed.tensors:
        room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")
        shifted.append(room[1:].view(tensor.shape).copy_(tensor))
        assert shifted[-1].data_ptr() % 16
    turned = [tensor.transpose(-1, -2).contiguous().transpose(-1, -2) for tensor in packed.tensors]
    for tensors in (shifted, turned):
        other = type(packed)(packed.spec, *tensors, packed.weight)
        for tokens in (5, 600):
            x = random_x(tokens, 1088)
            assert torch.equal(other(x, bias), packed(x, bias.contiguous()))


@pytest.mark.parametrize("qmap_dtype", QMAP_DTYPES)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("tokens", [3, 12, 40])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_in_its_token(
    make: Make, qmap_dtype: QmapDtype, dtype: torch.dtype, tokens: int, value: float, workspace_is_clean: None
) -> None:
    packed = make((520, 7168, 128, 9), "dense", qmap_dtype)
    x = random_x(tokens, 7168, dtype=dtype)
    clean = packed(x)
    x[1, 4000] = value
    found = packed(x)
    others = [token for token in range(tokens) if token != 1]
    assert torch.equal(found[others], clean[others])
    assert not bool(found[1].isfinite().any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_use_the_reference(make: Make, dtype: torch.dtype) -> None:
    packed = make((60, 200, 64, 1))
    x = random_x(3, 200, dtype=dtype)
    assert torch.equal(packed(x), w3.linear(x, *packed.tensors, None, spec=packed.spec))


def test_tensors_on_two_devices_are_refused(make: Make) -> None:
    packed = make((60, 200, 64, 1))
    for x, bias in (
        (random_x(3, 200).cpu(), None),
        (random_x(3, 200), torch.zeros(60)),
    ):
        with pytest.raises(UnsupportedError, match=r"expected codes, scales, map and bias on the device of x, got "):
            packed(x, bias)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_another_device_than_the_current_one(make: Make) -> None:
    packed = make((320, 1088, 64, 1))
    moved = type(packed)(packed.spec, *(tensor.to("cuda:1") for tensor in packed.tensors), packed.weight)
    for tokens in (1, 40, 600):
        x = random_x(tokens, 1088)
        found = moved(x.to("cuda:1"))
        assert found.device.index == 1
        assert torch.equal(found.cpu(), packed(x).cpu())
        assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("tokens", [3, 40, 600])
def test_gradient_of_x(make: Make, tokens: int) -> None:
    packed = make((1000, 3000, 128, 1024))
    x = random_x(tokens, 3000).requires_grad_()
    gradient = random_x(tokens, 1000, seed=5)
    packed(x).backward(gradient)
    weight = w3.dequantize(*packed.tensors, spec=packed.spec, dtype=torch.float16)
    assert x.grad is not None
    assert torch.equal(x.grad, gradient @ weight)


def test_opcheck(make: Make) -> None:
    packed = make((60, 200, 64, 1))
    bias = torch.zeros(60, device="cuda", dtype=torch.float16)
    for x in (random_x(3, 200).requires_grad_(), random_x(200, 2, 3).permute(1, 2, 0)):
        torch.library.opcheck(torch.ops.w3pack.w3_linear.default, (x, *packed.tensors, bias, 60, 200, 64))


def small_portions(monkeypatch: pytest.MonkeyPatch) -> int:
    """Make a 4096 x 4096 matrix of 513 tokens several portions; how many."""
    monkeypatch.setattr(w3_dense, "_PORTION_BYTES", 1)
    monkeypatch.setattr(w3_dense, "_OUTPUT_TILE", 16)
    portions = w3_dense.row_portions(4096, 4096, 513, multiprocessors=limits(0).multiprocessors)
    assert len(portions) > 4
    return len(portions)


@pytest.mark.parametrize("with_bias", [False, True])
def test_portions_change_nothing(make: Make, monkeypatch: pytest.MonkeyPatch, with_bias: bool) -> None:
    packed, x = make(), random_x(513, 4096)
    bias = torch.linspace(-1, 1, 4096, device="cuda", dtype=torch.float16) if with_bias else None
    whole = packed(x, bias)
    small_portions(monkeypatch)
    for _ in range(5):
        torch.testing.assert_close(packed(x, bias), whole, rtol=2e-3, atol=2e-3)
    assert_no_worse_than_torch(packed, x, bias)
