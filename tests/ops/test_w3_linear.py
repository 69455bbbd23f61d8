"""The operator: schema, fake, autograd, every leading shape and dtype, and what it refuses."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from w3pack.errors import UnsupportedError
from w3pack.format.layout import Layout
from w3pack.format.linear import LinearSpec, QmapDtype
from w3pack.ops.w3_linear import describe, w3_linear
from w3pack.pack.words import pack_codes, pack_scales

LAYOUTS: tuple[Layout, ...] = ("dense", "nibble")
QMAP_DTYPES: tuple[QmapDtype, ...] = ("int8", "float16")
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@dataclass(frozen=True)
class Packed:
    """A Linear with its matrix, worked out without the package's decoder."""

    spec: LinearSpec
    codes: torch.Tensor
    scales: torch.Tensor
    qmap: torch.Tensor
    bias: torch.Tensor
    weight: torch.Tensor  # float64 [rows, columns]

    @property
    def sizes(self) -> dict[str, int]:
        return {"rows": self.spec.rows, "columns": self.spec.columns, "group_size": self.spec.group_size}

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.codes, self.scales, self.qmap


@functools.cache
def make(
    layout: Layout = "dense",
    qmap_dtype: QmapDtype = "int8",
    *,
    rows: int = 60,
    columns: int = 200,
    group_size: int = 64,
    maps: int = 1,
) -> Packed:
    generator = torch.Generator().manual_seed(rows + columns)
    spec = LinearSpec(
        rows=rows,
        columns=columns,
        group_size=group_size,
        layout=layout,
        maps=maps,
        qmap_dtype=qmap_dtype,
        bias=True,
    )
    codes = (torch.randperm(rows * columns, generator=generator) % 8).to(torch.uint8).view(rows, columns)
    signs = torch.randint(0, 2, (rows, spec.groups), generator=generator) * 2 - 1
    scales = ((1 + torch.randperm(rows * spec.groups, generator=generator).view(rows, -1)) / 1024 * signs).half()
    if qmap_dtype == "int8":
        qmap = torch.stack([torch.randperm(255, generator=generator)[:8].sort().values - 127 for _ in range(maps)])
        qmap, values = qmap.to(torch.int8), qmap.double() / 127
    else:
        qmap = torch.rand(maps, 8, generator=generator).mul(2).sub(1).sort(dim=1).values.half()
        values = qmap.double()
    assert scales.unique().numel() == scales.numel()
    assert qmap.unique(dim=1).shape[1] == 8
    map_of = torch.arange(rows) // spec.rows_per_map
    weight = values[map_of].gather(1, codes.long()) * scales.double().repeat_interleave(group_size, dim=1)[:, :columns]
    bias = torch.linspace(-3, 4, rows)
    return Packed(spec, pack_codes(codes, spec), pack_scales(scales, spec), qmap, bias, weight)


def random_x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64).to(dtype)


def assert_close(found: torch.Tensor, x: torch.Tensor, packed: Packed, bias: torch.Tensor | None) -> None:
    """Errs at most twice what plain torch errs in x's dtype on the same matrix (plus one unit in the last place)."""
    truth = torch.nn.functional.linear(x.double(), packed.weight, None if bias is None else bias.double())
    plain = torch.nn.functional.linear(x, packed.weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    assert found.dtype == x.dtype
    assert found.shape == truth.shape
    if found.numel():
        slack = torch.finfo(x.dtype).eps * float(truth.abs().max())
        allowed = 2 * float((plain.double() - truth).abs().max()) + slack
        assert float((found.double() - truth).abs().max()) <= allowed


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("qmap_dtype", QMAP_DTYPES)
def test_opcheck(layout: Layout, qmap_dtype: QmapDtype) -> None:
    packed = make(layout, qmap_dtype)
    sizes = tuple(packed.sizes.values())
    for x, bias in (
        (random_x(3, 200).requires_grad_(), packed.bias),
        (random_x(200, 2, 3).permute(1, 2, 0), None),
    ):
        torch.library.opcheck(torch.ops.w3pack.w3_linear.default, (x, *packed.tensors, bias, *sizes))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(200,), (1, 200), (0, 200), (2, 3, 200), (2, 0, 3, 200), (1, 1, 1, 1, 200)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_fake_tensors_have_the_real_shape(layout: Layout, shape: tuple[int, ...], with_bias: bool) -> None:
    packed = make(layout)
    bias = packed.bias if with_bias else None
    real = w3_linear(random_x(*shape), *packed.tensors, bias, **packed.sizes)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fakes = [mode.from_tensor(t) for t in (random_x(*shape), *packed.tensors)]
        fake = w3_linear(*fakes, None if bias is None else mode.from_tensor(bias), **packed.sizes)
    assert fake.shape == real.shape == (*shape[:-1], 60)
    assert fake.dtype == real.dtype
    assert fake.stride() == real.stride()


@pytest.mark.parametrize("dtype", FLOATS)
def test_meta_tensors_have_the_real_shape_and_dtype(dtype: torch.dtype) -> None:
    packed = make()
    on_meta = [t.to("meta") for t in (random_x(5, 200, dtype=dtype), *packed.tensors, packed.bias)]
    y = w3_linear(*on_meta, **packed.sizes)
    assert y.device.type == "meta"
    assert (tuple(y.shape), y.dtype) == ((5, 60), dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_compiles_in_one_graph(layout: Layout, with_bias: bool) -> None:
    packed = make(layout, "float16")
    bias = packed.bias if with_bias else None

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * w3_linear(x + 1, *packed.tensors, bias, **packed.sizes)

    torch._dynamo.reset()
    compiled = torch.compile(doubled, fullgraph=True, backend="eager", dynamic=True)
    for tokens in (1, 4, 7):
        x = random_x(tokens, 200)
        assert torch.equal(compiled(x), doubled(x))


def test_gradient_flows_through_the_compiled_graph() -> None:
    packed = make()

    def product(x: torch.Tensor) -> torch.Tensor:
        return w3_linear(x, *packed.tensors, packed.bias, **packed.sizes)

    torch._dynamo.reset()
    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    gradients = []
    for function in (product, compiled):
        x = random_x(4, 200).requires_grad_()
        function(x).square().sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("qmap_dtype", QMAP_DTYPES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(200,), (7, 200), (0, 200), (2, 3, 200), (2, 0, 200), (1, 1, 2, 200)])
def test_any_leading_shape_and_dtype(
    layout: Layout, qmap_dtype: QmapDtype, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    packed = make(layout, qmap_dtype)
    x = random_x(*shape, dtype=dtype)
    for bias in (None, packed.bias):
        assert_close(w3_linear(x, *packed.tensors, bias, **packed.sizes), x, packed, bias)


@pytest.mark.parametrize("dtype", FLOATS)
def test_x_of_any_strides(dtype: torch.dtype) -> None:
    """Views into a buffer full of NaN: reading beside the view shows."""
    packed = make()
    wide = torch.full((6, 2, 450), float("nan"), dtype=dtype)
    view = wide[::2, :, 5:405:2]
    view.copy_(random_x(3, 2, 200, dtype=dtype))
    turned = random_x(200, 5, dtype=dtype).t()
    repeated = random_x(1, 200, dtype=dtype).expand(4, 200)
    flipped = random_x(3, 2, 200, dtype=dtype).transpose(0, 1)
    for x in (view, turned, repeated, flipped):
        assert not x.is_contiguous()
        assert_close(w3_linear(x, *packed.tensors, packed.bias, **packed.sizes), x, packed, packed.bias)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_tensors_of_any_strides(layout: Layout) -> None:
    packed = make(layout)
    turned = [t.t() if t.dim() == 2 else t.transpose(-1, -2) for t in packed.tensors]
    turned = [t.contiguous() for t in turned]
    back = [t.t() if t.dim() == 2 else t.transpose(-1, -2) for t in turned]
    assert not back[0].is_contiguous()
    x = random_x(3, 200)
    expected = w3_linear(x, *packed.tensors, None, **packed.sizes)
    assert torch.equal(w3_linear(x, *back, None, **packed.sizes), expected)


@pytest.mark.parametrize("qmap_dtype", QMAP_DTYPES)
@pytest.mark.parametrize(
    ("rows", "columns", "group_size", "maps"),
    [(192, 128, 128, 3), (60, 1000, 192, 64), (128, 576, 64, 128), (1, 64, 64, 1), (130, 256, 256, 1)],
)
def test_awkward_shapes_and_maps(qmap_dtype: QmapDtype, rows: int, columns: int, group_size: int, maps: int) -> None:
    for layout in LAYOUTS:
        packed = make(layout, qmap_dtype, rows=rows, columns=columns, group_size=group_size, maps=maps)
        x = random_x(2, columns, dtype=torch.float64)
        assert_close(w3_linear(x, *packed.tensors, packed.bias, **packed.sizes), x, packed, packed.bias)


def test_both_layouts_give_the_same_bits() -> None:
    x = random_x(3, 200)
    dense, nibble = (w3_linear(x, *make(layout).tensors, None, **make(layout).sizes) for layout in LAYOUTS)
    assert torch.equal(dense, nibble)


def test_wrapper_and_op_are_one() -> None:
    packed = make()
    x = random_x(3, 200)
    through_op = torch.ops.w3pack.w3_linear(x, *packed.tensors, packed.bias, 60, 200, 64)
    assert torch.equal(through_op, w3_linear(x, *packed.tensors, packed.bias, **packed.sizes))


def test_inputs_are_left_alone() -> None:
    packed = make()
    x = random_x(3, 200)
    before = [t.clone() for t in (x, *packed.tensors, packed.bias)]
    w3_linear(x, *packed.tensors, packed.bias, **packed.sizes).fill_(float("nan"))
    for old, new in zip(before, (x, *packed.tensors, packed.bias), strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize("dtype", FLOATS)
def test_case_19_bias_is_added_whatever_its_dtype(dtype: torch.dtype) -> None:
    packed = make()
    x = torch.zeros(2, 200, dtype=dtype)
    for bias_dtype in FLOATS:
        bias = packed.bias.to(bias_dtype)
        y = w3_linear(x, *packed.tensors, bias, **packed.sizes)
        assert y.dtype == dtype
        assert torch.equal(y, bias.to(dtype).expand(2, 60))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("qmap_dtype", QMAP_DTYPES)
@pytest.mark.parametrize("shape", [(200,), (5, 200), (2, 3, 200), (0, 200)])
def test_gradient_is_that_of_the_matrix(layout: Layout, qmap_dtype: QmapDtype, shape: tuple[int, ...]) -> None:
    packed = make(layout, qmap_dtype)
    x = random_x(*shape, dtype=torch.float64).requires_grad_()
    slope = random_x(*shape[:-1], 60, dtype=torch.float64)
    w3_linear(x, *packed.tensors, packed.bias, **packed.sizes).backward(slope)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, slope @ packed.weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradient_has_the_dtype_of_x(dtype: torch.dtype) -> None:
    packed = make()
    ours = random_x(4, 200, dtype=dtype).requires_grad_()
    plain = ours.detach().clone().requires_grad_()
    slope = random_x(4, 60, dtype=dtype)
    w3_linear(ours, *packed.tensors, None, **packed.sizes).backward(slope)
    torch.nn.functional.linear(plain, packed.weight.to(dtype)).backward(slope)
    assert ours.grad is not None
    assert plain.grad is not None
    assert ours.grad.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(ours.grad, plain.grad, rtol=2 * eps, atol=2 * eps * float(plain.grad.abs().max()))


@pytest.mark.parametrize("bias_dtype", [torch.float64, torch.float32])
def test_gradient_of_the_bias(bias_dtype: torch.dtype) -> None:
    packed = make()
    x = random_x(2, 3, 200, dtype=torch.float64)
    bias = packed.bias.to(bias_dtype).requires_grad_()
    slope = random_x(2, 3, 60, dtype=torch.float64)
    w3_linear(x, *packed.tensors, bias, **packed.sizes).backward(slope)
    assert bias.grad is not None
    torch.testing.assert_close(bias.grad, slope.sum(dim=(0, 1)).to(bias_dtype))


def test_gradcheck() -> None:
    packed = make(rows=64, columns=64)
    x = random_x(2, 64, dtype=torch.float64).requires_grad_()
    bias = packed.bias.double().requires_grad_()

    def product(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return w3_linear(x, *packed.tensors, bias, **packed.sizes)

    assert torch.autograd.gradcheck(product, (x, bias))


def test_describe_reads_the_spec_off_the_tensors() -> None:
    for layout in LAYOUTS:
        for qmap_dtype in QMAP_DTYPES:
            packed = make(layout, qmap_dtype, rows=192, columns=128, group_size=128, maps=3)
            found = describe(*packed.tensors, **packed.sizes)
            assert {**found.to_dict(), "bias": True} == packed.spec.to_dict()


def wrong_calls() -> list[Any]:
    base = make()
    x = random_x(3, 200)

    def case(name: str, **changes: Any) -> Any:
        call: dict[str, Any] = {"x": x, "codes": base.codes, "scales": base.scales, "qmap": base.qmap, "bias": None}
        return pytest.param({**call, **base.sizes, **changes}, id=name)

    return [
        case("x too narrow", x=random_x(3, 199)),
        case("x of padded width", x=random_x(3, 256)),
        case("x without axes", x=torch.tensor(1.0)),
        case("x of integers", x=torch.ones(3, 200, dtype=torch.int64)),
        case("codes flat", codes=base.codes.flatten()),
        case("codes of two vectors", codes=base.codes[:, :, :2]),
        case("codes of another dtype", codes=base.codes.long()),
        case("a column tile missing", codes=base.codes[:, :3]),
        case("a row tile too many", codes=base.codes.repeat(2, 1, 1, 1, 1)),
        case("lanes missing", codes=base.codes[..., :16, :]),
        case("scales of another dtype", scales=base.scales.float()),
        case("a group missing", scales=base.scales[:, :3]),
        case("scales row-major", scales=base.scales.reshape(64, 4)),
        case("qmap flat", qmap=base.qmap.flatten()),
        case("qmap of seven", qmap=base.qmap[:, :7]),
        case("qmap of another dtype", qmap=base.qmap.float()),
        case("maps that do not divide", qmap=base.qmap.repeat(3, 1)),
        case("maps of part tiles", qmap=base.qmap.repeat(2, 1)),
        case("other rows", rows=65),
        case("no rows", rows=0),
        case("other columns", columns=128, x=random_x(3, 128)),
        case("other group size", group_size=128),
        case("group size no multiple of 64", group_size=96),
        case("group size zero", group_size=0),
        case("bias too long", bias=torch.zeros(64)),
        case("bias too short", bias=torch.zeros(59)),
        case("bias of one", bias=torch.ones(1)),
        case("bias without axes", bias=torch.tensor(1.0)),
        case("bias of two axes", bias=torch.zeros(3, 60)),
    ]


@pytest.mark.parametrize("call", wrong_calls())
def test_wrong_calls_are_refused_with_a_sentence(call: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"expected .*, got "):
        w3_linear(**call)


def test_case_05_sixty_output_features_run() -> None:
    packed = make(rows=60, columns=200)
    assert packed.codes.shape[:2] == (1, 4)
    y = w3_linear(random_x(3, 200), *packed.tensors, packed.bias, **packed.sizes)
    assert tuple(y.shape) == (3, 60)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_case_06_shards_of_permitted_degrees_add_up(layout: Layout) -> None:
    """Axis 0 cut is a cut of rows, axis 1 a cut of columns, and nothing else has to move."""
    packed = make(layout, rows=192, columns=384, group_size=128, maps=3)
    codes, scales, qmap = packed.tensors
    x = random_x(2, 384, dtype=torch.float64)
    whole = w3_linear(x, codes, scales, qmap, None, rows=192, columns=384, group_size=128)
    by_rows, by_columns = packed.spec.tensor_parallel_degrees(limit=16)
    assert (by_rows, by_columns) == ([1, 3], [1, 3])
    parts = [
        w3_linear(x, c, s, q, None, rows=64, columns=384, group_size=128)
        for c, s, q in zip(codes.chunk(3), scales.chunk(3), qmap.chunk(3), strict=True)
    ]
    torch.testing.assert_close(torch.cat(parts, dim=-1), whole, rtol=1e-12, atol=1e-12)
    sums = [
        w3_linear(piece, c, s, qmap, None, rows=192, columns=128, group_size=128)
        for piece, c, s in zip(x.chunk(3, dim=1), codes.chunk(3, dim=1), scales.chunk(3, dim=1), strict=True)
    ]
    torch.testing.assert_close(torch.stack(sums).sum(dim=0), whole, rtol=1e-12, atol=1e-12)


def test_case_07_group_size_is_an_argument_not_a_guess() -> None:
    """200 columns fill 256 stored ones under groups of 64, 128 and 256; only the argument tells them apart."""
    for group_size in (64, 128, 256):
        packed = make(rows=64, columns=200, group_size=group_size)
        x = random_x(2, 200, dtype=torch.float64)
        assert_close(w3_linear(x, *packed.tensors, None, **packed.sizes), x, packed, None)
        for other in {64, 128, 256} - {group_size}:
            with pytest.raises(UnsupportedError, match=r"expected scales"):
                w3_linear(x, *packed.tensors, None, rows=64, columns=200, group_size=other)
