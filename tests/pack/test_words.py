"""The vectorised packer against a slow one that is written from the document's text, loop by loop."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from w3pack.errors import CheckpointError, UnsupportedError, W3PackError
from w3pack.format.layout import Layout, code_bits, scale_position
from w3pack.format.linear import LinearSpec, QmapDtype
from w3pack.pack.words import nibble_words, pack_codes, pack_scales, pad_qmap, unpack_codes, unpack_scales

LAYOUTS: tuple[Layout, ...] = ("dense", "nibble")
SHAPES = [(60, 200, 64), (1, 1, 64), (64, 64, 64), (60, 576, 192), (65, 1000, 128), (130, 200, 256)]
GOLDEN = [
    "map_per_row_int8",
    "map_per_tile_fp16",
    "one_map_fp16",
    "one_map_int8",
    "padded_rows_and_columns",
]


def make_spec(
    rows: int,
    columns: int,
    group_size: int,
    layout: Layout = "dense",
    *,
    maps: int = 1,
    qmap_dtype: QmapDtype = "int8",
) -> LinearSpec:
    return LinearSpec(
        rows=rows,
        columns=columns,
        group_size=group_size,
        layout=layout,
        maps=maps,
        qmap_dtype=qmap_dtype,
        bias=False,
    )


def random_codes(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """uint8 [rows, columns], every code equally often (where there is room) in random order."""
    order = torch.randperm(rows * columns, generator=torch.Generator().manual_seed(seed))
    codes = (order % 8).to(torch.uint8).view(rows, columns)
    assert rows * columns < 8 or codes.unique().numel() == 8
    return codes


def distinct_scales(rows: int, groups: int, seed: int = 0) -> torch.Tensor:
    """float16 [rows, groups], all distinct, both signs; there are 2 * 31743 finite non-zero ones to draw from."""
    bits = 1 + torch.randperm(31743, generator=torch.Generator().manual_seed(seed))[: rows * groups]
    signed = torch.where(torch.arange(bits.numel()) % 2 == 0, bits, bits - 32768).to(torch.int16)
    scales = signed.view(torch.float16).view(rows, groups)
    assert scales.unique().numel() == rows * groups
    assert bool(scales.isfinite().all())
    return scales


def slow_pack(codes: torch.Tensor, layout: Layout, group_size: int) -> torch.Tensor:
    """The words of a code matrix, code by code, after FORMAT section 1 "Tile order" and nothing else."""
    rows, columns = codes.shape
    n_pad, k_pad = -(-rows // 64) * 64, -(-columns // group_size) * group_size
    vectors = 4 if layout == "nibble" else 3
    table = codes.tolist()
    words = [
        [[[[0] * 4 for _ in range(32)] for _ in range(vectors)] for _ in range(k_pad // 64)] for _ in range(n_pad // 64)
    ]
    for n in range(rows):
        for k in range(columns):  # padded codes are 0, which is what the words start with
            r, c = n % 64, k % 64
            i, half, g = r // 16, (r % 16) // 8, r % 8
            t, j, e = c // 16, (c % 16) // 4, c % 4
            lane, nibble = 4 * g + t, 4 * half + e
            code, tile = table[n][k], words[n // 64][k // 64]
            if layout == "nibble":
                tile[i][lane][j] |= code << (4 * nibble)
            elif j < 3:
                q = 3 * i + j
                tile[q // 4][lane][q % 4] |= code << (4 * nibble)
            else:
                for b in range(3):
                    q = 3 * i + b
                    tile[q // 4][lane][q % 4] |= (code >> b & 1) << (4 * nibble + 3)
    unsigned = torch.tensor(words, dtype=torch.int64)
    return torch.where(unsigned >= 1 << 31, unsigned - (1 << 32), unsigned).to(torch.int32)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("rows", "columns", "group_size"), SHAPES)
def test_packer_equals_its_slow_twin(layout: Layout, rows: int, columns: int, group_size: int) -> None:
    spec = make_spec(rows, columns, group_size, layout)
    codes = random_codes(rows, columns)
    packed = pack_codes(codes, spec)
    assert packed.dtype == torch.int32
    assert packed.is_contiguous()
    assert tuple(packed.shape) == spec.codes_shape
    assert torch.equal(packed, slow_pack(codes, layout, group_size))
    assert torch.equal(unpack_codes(packed, spec), codes)


@pytest.mark.parametrize("name", GOLDEN)
def test_slow_twin_equals_the_golden_words(golden: Path, name: str) -> None:
    path = golden / f"{name}.safetensors"
    with safe_open(path, framework="pt") as file:
        group_size = int(file.metadata()["group_size"])
    stored = load_file(path)
    codes = stored["codes"]
    assert codes.unique().tolist() == list(range(8))
    for layout in LAYOUTS:
        assert torch.equal(slow_pack(codes, layout, group_size), stored[f"packed_{layout}"])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("code", range(8))
def test_each_bit_of_each_code_lies_where_code_bits_says(layout: Layout, code: int) -> None:
    """One code other than 0 at a time, on a diagonal that meets every block, lane, word and element."""
    spec = make_spec(64, 64, 64, layout)
    for row in range(0, 64, 3):
        column = (5 * row + code) % 64
        codes = torch.zeros(64, 64, dtype=torch.uint8)
        codes[row, column] = code
        words = pack_codes(codes, spec)[0, 0].tolist()
        expected = {bit for b, bit in enumerate(code_bits(layout, row, column)) if code >> b & 1}
        found = {
            (vector, lane, component, bit)
            for vector, lanes in enumerate(words)
            for lane, components in enumerate(lanes)
            for component, word in enumerate(components)
            for bit in range(32 if word else 0)
            if word >> bit & 1
        }
        assert found == {(at.vector, at.lane, at.component, at.bit) for at in expected}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packer_equals_code_bits_for_random_codes(layout: Layout) -> None:
    codes = random_codes(64, 64, seed=5)
    expected = [[[0] * 4 for _ in range(32)] for _ in range(4)]
    for row in range(64):
        for column in range(64):
            for b, at in enumerate(code_bits(layout, row, column)):
                expected[at.vector][at.lane][at.component] |= (int(codes[row, column]) >> b & 1) << at.bit
    packed = pack_codes(codes, make_spec(64, 64, 64, layout))[0, 0]
    found = [[[word & 0xFFFFFFFF for word in lane] for lane in vector] for vector in packed.tolist()]
    assert found == expected[: len(found)]


@given(
    rows=st.integers(1, 200),
    columns=st.integers(1, 700),
    group_size=st.sampled_from([64, 128, 192, 256]),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 1 << 30),
)
@settings(derandomize=True, database=None, deadline=None, max_examples=60)
def test_unpack_undoes_pack(rows: int, columns: int, group_size: int, layout: Layout, seed: int) -> None:
    spec = make_spec(rows, columns, group_size, layout)
    codes = random_codes(rows, columns, seed)
    assert torch.equal(unpack_codes(pack_codes(codes, spec), spec), codes)


@given(seed=st.integers(0, 1 << 30), row_tiles=st.integers(1, 3), groups=st.integers(1, 3))
@settings(derandomize=True, database=None, deadline=None, max_examples=30)
def test_pack_undoes_unpack_for_any_dense_words(seed: int, row_tiles: int, groups: int) -> None:
    """Dense words have no bit to spare, so every bit pattern is some code matrix."""
    spec = make_spec(64 * row_tiles, 128 * groups, 128, "dense")
    words = torch.randint(-(1 << 31), 1 << 31, spec.codes_shape, generator=torch.Generator().manual_seed(seed))
    words = words.to(torch.int32)
    codes = unpack_codes(words, spec)
    assert int(codes.max()) <= 7
    assert torch.equal(pack_codes(codes, spec), words)


@pytest.mark.parametrize(("rows", "columns", "group_size"), SHAPES)
def test_nibble_words_of_both_layouts_are_the_nibble_layout(rows: int, columns: int, group_size: int) -> None:
    codes = random_codes(rows, columns)
    nibble = pack_codes(codes, make_spec(rows, columns, group_size, "nibble"))
    dense = pack_codes(codes, make_spec(rows, columns, group_size, "dense"))
    assert torch.equal(nibble_words(nibble, "nibble"), nibble)
    assert torch.equal(nibble_words(dense, "dense"), nibble)


def test_dense_words_masked_are_nibble_words() -> None:
    codes = random_codes(64, 128)
    nibble = pack_codes(codes, make_spec(64, 128, 64, "nibble"))
    dense = pack_codes(codes, make_spec(64, 128, 64, "dense"))
    assert int((dense < 0).sum()) > 0  # the sign bit is a code bit like any other
    for i in range(4):
        for j in range(3):
            q = 3 * i + j
            assert torch.equal(dense[:, :, q // 4, :, q % 4] & 0x77777777, nibble[:, :, i, :, j])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_padded_codes_are_zero(layout: Layout) -> None:
    spec = make_spec(60, 200, 256, layout)
    packed = pack_codes(torch.full((60, 200), 7, dtype=torch.uint8), spec)
    whole = unpack_codes(packed, make_spec(64, 256, 256, layout))
    assert bool((whole[:60, :200] == 7).all())
    assert int(whole[60:].sum()) == int(whole[:, 200:].sum()) == 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["transposed", "strided", "columns of a wider one", "odd offset"])
def test_codes_of_any_strides_pack_alike(layout: Layout, kind: str) -> None:
    for rows, columns in ((64, 128), (60, 200)):
        codes = random_codes(rows, columns)
        if kind == "transposed":
            view = codes.t().contiguous().t()
        elif kind == "strided":
            view = codes.repeat_interleave(2, dim=0)[::2]
        elif kind == "odd offset":
            view = torch.cat([torch.tensor([7], dtype=torch.uint8), codes.flatten()])[1:].view(rows, columns)
        else:
            view = torch.cat([codes, torch.full_like(codes, 7)], dim=1)[:, :columns]
        assert view.is_contiguous() == (kind == "odd offset")
        spec = make_spec(rows, columns, 64, layout)
        assert torch.equal(pack_codes(view, spec), pack_codes(codes, spec))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_words_of_any_strides_unpack_alike(layout: Layout) -> None:
    spec = make_spec(128, 200, 64, layout)
    codes = random_codes(128, 200)
    words = pack_codes(codes, spec)
    view = words.permute(4, 3, 2, 1, 0).contiguous().permute(4, 3, 2, 1, 0)
    assert not view.is_contiguous()
    assert torch.equal(unpack_codes(view, spec), codes)


def test_packing_leaves_its_input_alone() -> None:
    codes = random_codes(64, 64)
    before = codes.clone()
    for layout in LAYOUTS:
        words = pack_codes(codes, make_spec(64, 64, 64, layout))
        words.fill_(-1)
    assert torch.equal(codes, before)


@pytest.mark.parametrize(
    "codes",
    [
        torch.zeros(64, 64, dtype=torch.int32),
        torch.zeros(64, 63, dtype=torch.uint8),
        torch.zeros(64 * 64, dtype=torch.uint8),
        torch.full((64, 64), 8, dtype=torch.uint8),
        torch.full((64, 64), 255, dtype=torch.uint8),
    ],
    ids=["dtype", "shape", "flat", "eight", "255"],
)
def test_impossible_codes_are_refused_with_a_sentence(codes: torch.Tensor) -> None:
    for layout in LAYOUTS:
        with pytest.raises(UnsupportedError, match=r"expected .*, got "):
            pack_codes(codes, make_spec(64, 64, 64, layout))


def test_impossible_words_are_refused_with_a_sentence() -> None:
    for layout in LAYOUTS:
        spec = make_spec(64, 64, 64, layout)
        words = pack_codes(random_codes(64, 64), spec)
        for wrong in (words.long(), words[..., :3], words.flatten(), words.repeat(1, 2, 1, 1, 1)):
            with pytest.raises(CheckpointError, match=r"expected .*, got "):
                unpack_codes(wrong, spec)


@pytest.mark.parametrize("nibble", range(8))
def test_bit_3_of_a_nibble_must_be_0_in_nibble_layout(nibble: int) -> None:
    spec = make_spec(64, 64, 64, "nibble")
    words = pack_codes(random_codes(64, 64), spec)
    mask = 8 << (4 * nibble)
    words[0, 0, 3, 17, 2] |= mask - (1 << 32) if mask >= 1 << 31 else mask
    with pytest.raises(CheckpointError, match="bit 3"):
        unpack_codes(words, spec)


@pytest.mark.parametrize(("rows", "columns", "group_size"), SHAPES)
def test_scales_are_where_the_document_says(rows: int, columns: int, group_size: int) -> None:
    spec = make_spec(rows, columns, group_size)
    scales = distinct_scales(rows, spec.groups)
    packed = pack_scales(scales, spec)
    assert packed.dtype == torch.float16
    assert packed.is_contiguous()
    assert tuple(packed.shape) == spec.scales_shape
    seen = torch.full(spec.scales_shape, fill_value=True)
    for row in range(rows):
        r = row % 64
        place = (r % 8, 2 * (r // 16) + (r % 16) // 8)
        assert place == scale_position(r)
        for group in range(spec.groups):
            assert packed[row // 64, group, place[0], place[1]] == scales[row, group]
            seen[row // 64, group, place[0], place[1]] = False
    assert bool((packed[seen] == 0).all())  # scales of padded rows
    assert torch.equal(unpack_scales(packed, spec), scales)


def test_scales_of_any_strides_pack_alike() -> None:
    spec = make_spec(128, 256, 64)
    scales = distinct_scales(128, 4)
    view = scales.t().contiguous().t()
    assert not view.is_contiguous()
    assert torch.equal(pack_scales(view, spec), pack_scales(scales, spec))


def test_scales_keep_every_bit() -> None:
    """Negative zero and subnormal scales come back as the same bytes."""
    spec = make_spec(64, 64, 64)
    scales = (torch.arange(64, dtype=torch.int16) - 32).view(torch.float16).view(64, 1)
    scales[0, 0] = -0.0
    restored = unpack_scales(pack_scales(scales, spec), spec)
    assert torch.equal(restored.view(torch.int16), scales.view(torch.int16))


def test_impossible_scales_are_refused_with_a_sentence() -> None:
    spec = make_spec(60, 200, 64)
    scales = distinct_scales(60, 4)
    for wrong in (scales.float(), scales[:, :3], scales.t(), scales[:59]):
        with pytest.raises(UnsupportedError, match=r"expected .*, got "):
            pack_scales(wrong, spec)
    packed = pack_scales(scales, spec)
    for wrong in (packed.float(), packed[:, :3], packed.flatten()):
        with pytest.raises(CheckpointError, match=r"expected .*, got "):
            unpack_scales(wrong, spec)


def test_maps_of_logical_rows_are_padded_and_others_pass() -> None:
    qmap = torch.arange(60 * 8, dtype=torch.int16).view(60, 8).to(torch.float16)
    spec = make_spec(60, 200, 64, maps=64, qmap_dtype="float16")
    wide = pad_qmap(qmap, spec)
    assert tuple(wide.shape) == (64, 8)
    assert torch.equal(wide[:60], qmap)
    assert torch.equal(pad_qmap(wide, spec), wide)
    single = qmap[:1]
    assert torch.equal(pad_qmap(single, make_spec(60, 200, 64, qmap_dtype="float16")), single)
    with pytest.raises(UnsupportedError, match=r"expected .*, got "):
        pad_qmap(qmap[:59], spec)
    with pytest.raises(UnsupportedError, match=r"expected .*, got "):
        pad_qmap(qmap[:, :7], spec)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_case_05_sixty_rows_pack_and_unpack(layout: Layout) -> None:
    spec = make_spec(60, 1000, 192, layout)
    codes, scales = random_codes(60, 1000), distinct_scales(60, 6)
    assert torch.equal(unpack_codes(pack_codes(codes, spec), spec), codes)
    assert torch.equal(unpack_scales(pack_scales(scales, spec), spec), scales)


def test_case_07_the_same_words_mean_other_scales_under_another_group_size() -> None:
    """Nothing in the words tells groups of 64 from groups of 256: only the stored number does."""
    codes = random_codes(64, 200)
    words = [pack_codes(codes, make_spec(64, 200, size)) for size in (64, 128, 256)]
    assert all(torch.equal(word, words[0]) for word in words)
    packed = pack_scales(distinct_scales(64, 2), make_spec(64, 200, 128))
    for other in (64, 256):
        with pytest.raises(W3PackError):
            unpack_scales(packed, make_spec(64, 200, other))


def test_case_35_words_depend_on_nothing_but_the_codes(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same bytes on a machine of any size: no device is asked, and the number of cores and threads does not matter."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the packer asked for a device")

    for name in ("is_available", "device_count", "get_device_properties", "get_device_capability", "current_device"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    stored = load_file(golden / "padded_rows_and_columns.safetensors")
    threads = torch.get_num_threads()
    try:
        for cores in (1, 2, 132):
            monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
            torch.set_num_threads(min(cores, 2))
            for layout in LAYOUTS:
                spec = make_spec(80, 200, 64, layout)
                assert torch.equal(pack_codes(stored["codes"], spec), stored[f"packed_{layout}"])
                assert torch.equal(pack_scales(stored["scales_rowmajor"], spec), stored["scales"])
    finally:
        torch.set_num_threads(threads)
