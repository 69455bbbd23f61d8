"""The byte-exact vectors: packer, scales, dequantisation and product of the reference against files made elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from w3pack.format.layout import Layout
from w3pack.format.linear import LinearSpec, QmapDtype
from w3pack.pack.words import pack_codes, pack_scales, pad_qmap, unpack_codes, unpack_scales
from w3pack.reference.w3 import dequantize, linear, map_values

FOLDER = Path(__file__).parents[1] / "golden"
FILES = sorted(path.stem for path in FOLDER.glob("*.safetensors") if not path.stem.startswith("flute"))
LAYOUTS: tuple[Layout, ...] = ("dense", "nibble")


@dataclass(frozen=True)
class Vector:
    """One golden file."""

    rows: int
    columns: int
    group_size: int
    tensors: dict[str, torch.Tensor]

    def spec(self, layout: Layout, *, bias: bool = False) -> LinearSpec:
        qmap = self.tensors["qmap"]
        qmap_dtype: QmapDtype = "int8" if qmap.dtype == torch.int8 else "float16"
        return LinearSpec(
            rows=self.rows,
            columns=self.columns,
            group_size=self.group_size,
            layout=layout,
            maps=qmap.shape[0],
            qmap_dtype=qmap_dtype,
            bias=bias,
        )

    def packed(self, layout: Layout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.tensors[f"packed_{layout}"], self.tensors["scales"], self.tensors["qmap"]


@pytest.fixture(params=FILES)
def vector(request: pytest.FixtureRequest) -> Vector:
    with safe_open(FOLDER / f"{request.param}.safetensors", framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    return Vector(int(metadata["rows"]), int(metadata["columns"]), int(metadata["group_size"]), tensors)


@pytest.fixture
def sentinels() -> Iterator[None]:
    """Uninitialised memory reads as NaN (floats) or the largest integer, so an element never written shows."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert bool(torch.empty(3).isnan().all())
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = filled


def relative(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest error as a part of the largest true value."""
    return float((found.double() - truth).abs().max() / truth.abs().max())


def test_there_are_vectors_of_every_kind() -> None:
    assert FILES == [
        "map_per_row_int8",
        "map_per_tile_fp16",
        "one_map_fp16",
        "one_map_int8",
        "padded_rows_and_columns",
    ]


def test_vector_can_fail_a_wrong_packer(vector: Vector) -> None:
    qmap, scales = vector.tensors["qmap"].double(), vector.tensors["scales_rowmajor"]
    assert vector.tensors["codes"].unique().tolist() == list(range(8))
    assert bool((qmap.diff(dim=1) >= 0).all())
    assert qmap.unique(dim=0).shape[0] == qmap.shape[0]
    assert scales.unique().numel() > scales.numel() / 3


def test_scales_of_both_signs_occur() -> None:
    signs = set()
    for name in FILES:
        with safe_open(FOLDER / f"{name}.safetensors", framework="pt") as file:
            signs.update(file.get_tensor("scales_rowmajor").sign().unique().tolist())
    assert signs >= {-1.0, 1.0}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_words_are_exact(vector: Vector, layout: Layout, sentinels: None) -> None:
    spec = vector.spec(layout)
    assert torch.equal(pack_codes(vector.tensors["codes"], spec), vector.tensors[f"packed_{layout}"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_codes_are_exact(vector: Vector, layout: Layout, sentinels: None) -> None:
    spec = vector.spec(layout)
    assert torch.equal(unpack_codes(vector.tensors[f"packed_{layout}"], spec), vector.tensors["codes"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scales_are_exact(vector: Vector, layout: Layout, sentinels: None) -> None:
    spec = vector.spec(layout)
    packed = pack_scales(vector.tensors["scales_rowmajor"], spec)
    assert torch.equal(packed.view(torch.int16), vector.tensors["scales"].view(torch.int16))
    assert torch.equal(unpack_scales(vector.tensors["scales"], spec), vector.tensors["scales_rowmajor"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_float64_weights_are_exact(vector: Vector, layout: Layout, sentinels: None) -> None:
    weight = dequantize(*vector.packed(layout), spec=vector.spec(layout), dtype=torch.float64)
    assert weight.dtype == torch.float64
    assert torch.equal(weight, vector.tensors["weight_float64"])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_weights_are_within_their_roundings(vector: Vector, layout: Layout, dtype: torch.dtype) -> None:
    """Value, product and result are rounded once each: three half units in the last place at most."""
    weight = dequantize(*vector.packed(layout), spec=vector.spec(layout), dtype=dtype)
    truth = vector.tensors["weight_float64"]
    assert weight.dtype == dtype
    step = torch.finfo(torch.float32).eps + torch.finfo(dtype).eps / 2
    error = (weight.double() - truth).abs()
    assert bool((error <= step * truth.abs() + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps).all())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_product_is_that_of_the_document(
    vector: Vector, layout: Layout, dtype: torch.dtype, tolerance: float, sentinels: None
) -> None:
    y = linear(vector.tensors["x"].to(dtype), *vector.packed(layout), None, spec=vector.spec(layout))
    assert y.dtype == dtype
    assert tuple(y.shape) == tuple(vector.tensors["y_float64"].shape)
    assert relative(y, vector.tensors["y_float64"]) <= tolerance


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_case_19_bias_is_added(vector: Vector, layout: Layout, dtype: torch.dtype, tolerance: float) -> None:
    bias = torch.linspace(-9, 11, vector.rows, dtype=torch.float64)
    truth = vector.tensors["y_float64"] + bias
    x = vector.tensors["x"].to(dtype)
    y = linear(x, *vector.packed(layout), bias, spec=vector.spec(layout, bias=True))
    assert y.dtype == dtype
    assert relative(y, truth) <= tolerance


@pytest.mark.parametrize("layout", LAYOUTS)
def test_identity_activations_read_the_matrix_back(vector: Vector, layout: Layout) -> None:
    """x = 1: every output is one weight, so the product of a lookup kernel must be exact."""
    x = torch.eye(vector.columns, dtype=torch.float64)
    y = linear(x, *vector.packed(layout), None, spec=vector.spec(layout))
    assert torch.equal(y.T, vector.tensors["weight_float64"])


def test_weights_follow_the_documents_formula_one_by_one(vector: Vector) -> None:
    """W[n, k] = value(qmap[map_of(n), code[n, k]]) * scale[n, k // group_size], in Python floats."""
    codes, scales = vector.tensors["codes"].tolist(), vector.tensors["scales_rowmajor"].tolist()
    qmap = vector.tensors["qmap"].tolist()
    whole = vector.tensors["qmap"].dtype == torch.int8
    rows_per_map = -(-vector.rows // 64) * 64 // len(qmap)
    weight = dequantize(*vector.packed("dense"), spec=vector.spec("dense"), dtype=torch.float64).tolist()
    for n in range(vector.rows):
        for k in range(vector.columns):
            q = qmap[n // rows_per_map][codes[n][k]]
            assert weight[n][k] == (q / 127 if whole else q) * scales[n][k // vector.group_size]


def test_map_values_mean_what_the_document_says() -> None:
    whole = torch.tensor([[-127, -64, -31, 0, 1, 30, 63, 127]], dtype=torch.int8)
    assert map_values(whole, dtype=torch.float64).tolist() == [[q / 127 for q in whole[0].tolist()]]
    half = torch.tensor([[-1, -0.7, -0.31, -0.1, 0, 0.11, 0.5, 1]], dtype=torch.float16)
    assert torch.equal(map_values(half, dtype=torch.float64), half.double())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_of_the_padding_reaches_the_matrix(golden: Path, layout: Layout) -> None:
    """Sentinels in padded codes and scales: a logical weight that changes has read the wrong place."""
    with safe_open(golden / "padded_rows_and_columns.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    vector = Vector(80, 200, 64, tensors)
    whole = LinearSpec(rows=128, columns=256, group_size=64, layout=layout, maps=1, qmap_dtype="int8", bias=False)
    codes = torch.full((128, 256), 7, dtype=torch.uint8)
    codes[:80, :200] = tensors["codes"]
    scales = torch.full((128, 4), float("nan"), dtype=torch.float16)
    scales[:80] = tensors["scales_rowmajor"]
    weight = dequantize(
        pack_codes(codes, whole),
        pack_scales(scales, whole),
        tensors["qmap"],
        spec=vector.spec(layout),
        dtype=torch.float64,
    )
    assert torch.equal(weight, tensors["weight_float64"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_case_05_sixty_rows_of_a_wide_matrix(layout: Layout, sentinels: None) -> None:
    """Padding on both sides, one map per row: sizes of the result are the logical ones."""
    generator = torch.Generator().manual_seed(3)
    spec = LinearSpec(rows=60, columns=1000, group_size=192, layout=layout, maps=64, qmap_dtype="float16", bias=False)
    codes = torch.randint(0, 8, (60, 1000), generator=generator).to(torch.uint8)
    scales = (torch.randn(60, 6, generator=generator) + 0.01).half()
    qmap = torch.randn(60, 8, generator=generator).sort(dim=1).values.half()
    picked = qmap.double().gather(1, codes.long())
    truth = picked * scales.double().repeat_interleave(192, dim=1)[:, :1000]
    packed = pack_codes(codes, spec), pack_scales(scales, spec), pad_qmap(qmap, spec)
    weight = dequantize(*packed, spec=spec, dtype=torch.float64)
    assert torch.equal(weight, truth)
    x = torch.randn(2, 1000, generator=generator, dtype=torch.float64)
    y = linear(x, *packed, None, spec=spec)
    assert tuple(y.shape) == (2, 60)
    assert relative(y, x @ truth.T) <= 1e-12


@pytest.mark.parametrize("maps", [1, 3, 384])
def test_matrix_of_several_decoding_blocks_equals_that_of_one(maps: int) -> None:
    """More weights than are decoded at once: rows and maps of later blocks are not those of the first."""
    generator = torch.Generator().manual_seed(4)
    rows, columns = 384, 8192
    spec = LinearSpec(
        rows=rows, columns=columns, group_size=256, layout="dense", maps=maps, qmap_dtype="int8", bias=False
    )
    words = torch.randint(-(1 << 31), 1 << 31, spec.codes_shape, generator=generator).to(torch.int32)
    scales = torch.randn(rows, 32, generator=generator).half()
    qmap = torch.stack([torch.randperm(255, generator=generator)[:8].sort().values - 127 for _ in range(maps)])
    qmap = qmap.to(torch.int8)
    weight = dequantize(words, pack_scales(scales, spec), qmap, spec=spec, dtype=torch.float32)
    codes = unpack_codes(words, spec).long()
    each = qmap.repeat_interleave(rows // maps, dim=0).float() / 127
    truth = each.gather(1, codes) * scales.float().repeat_interleave(256, dim=1)
    assert torch.equal(weight, truth)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_case_09_a_zero_group_dequantises_to_zeros(layout: Layout, dtype: torch.dtype) -> None:
    spec = LinearSpec(rows=64, columns=192, group_size=64, layout=layout, maps=1, qmap_dtype="int8", bias=False)
    codes = (torch.arange(64 * 192) % 8).to(torch.uint8).view(64, 192)
    scales = torch.arange(1, 193, dtype=torch.float16).view(64, 3) / 64
    scales[5, 1] = 0
    scales[63, 2] = -0.0
    qmap = torch.tensor([[-127, -80, -45, -13, 17, 50, 90, 126]], dtype=torch.int8)  # no entry is 0
    weight = dequantize(pack_codes(codes, spec), pack_scales(scales, spec), qmap, spec=spec, dtype=dtype)
    zero = torch.zeros(64, 3, dtype=torch.bool)
    zero[5, 1] = zero[63, 2] = True
    assert torch.equal(weight == 0, zero.repeat_interleave(64, dim=1))
    assert bool(weight.isfinite().all())


def test_case_09_the_smallest_scales_survive() -> None:
    """A group of subnormal scale is not flushed to zero."""
    spec = LinearSpec(rows=64, columns=64, group_size=64, layout="dense", maps=1, qmap_dtype="int8", bias=False)
    codes = torch.full((64, 64), 7, dtype=torch.uint8)
    scales = torch.full((64, 1), 2.0**-24, dtype=torch.float16)
    scales[::2] *= -1
    qmap = torch.tensor([[-127, -80, -45, -13, 17, 50, 90, 127]], dtype=torch.int8)
    packed = pack_codes(codes, spec), pack_scales(scales, spec), qmap
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        weight = dequantize(*packed, spec=spec, dtype=dtype)
        assert torch.equal(weight.double(), scales.double().expand(64, 64))
