"""Shapes, sizes and refusals of `LinearSpec`, by the document and without allocating anything."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from w3pack.errors import CheckpointError, UnsupportedError
from w3pack.format.layout import Layout
from w3pack.format.linear import LinearSpec

QUICK = settings(derandomize=True, database=None, deadline=None, max_examples=100)


def make(**changes: Any) -> LinearSpec:
    fields: dict[str, Any] = {
        "rows": 128,
        "columns": 256,
        "group_size": 128,
        "layout": "dense",
        "maps": 1,
        "qmap_dtype": "int8",
        "bias": False,
    }
    return LinearSpec(**{**fields, **changes})


@st.composite
def specs(draw: st.DrawFn) -> LinearSpec:
    rows = draw(st.integers(1, 1 << 24))
    padded_rows = -(-rows // 64) * 64
    maps = draw(st.sampled_from([1, padded_rows, padded_rows // 64]))
    return LinearSpec(
        rows=rows,
        columns=draw(st.integers(1, 1 << 24)),
        group_size=64 * draw(st.integers(1, 40)),
        layout=draw(st.sampled_from(["dense", "nibble"])),
        maps=maps,
        qmap_dtype=draw(st.sampled_from(["int8", "float16"])),
        bias=draw(st.booleans()),
    )


@given(spec=specs())
@QUICK
def test_sizes_follow_from_the_shapes(spec: LinearSpec) -> None:
    n_pad, k_pad = -(-spec.rows // 64) * 64, -(-spec.columns // spec.group_size) * spec.group_size
    vectors = {"dense": 3, "nibble": 4}[spec.layout]
    assert (spec.padded_rows, spec.padded_columns) == (n_pad, k_pad)
    assert spec.codes_shape == (n_pad // 64, k_pad // 64, vectors, 32, 4)
    assert spec.scales_shape == (n_pad // 64, k_pad // spec.group_size, 8, 8)
    assert spec.qmap_shape == (spec.maps, 8)
    assert spec.rows_per_map * spec.maps == n_pad
    itemsize = {"int8": 1, "float16": 2}[spec.qmap_dtype]
    expected = (
        4 * math.prod(spec.codes_shape) + 2 * math.prod(spec.scales_shape) + itemsize * math.prod(spec.qmap_shape)
    )
    assert spec.nbytes == expected
    assert spec.bits_per_weight == pytest.approx(8 * expected / (spec.rows * spec.columns), rel=1e-12)


@given(spec=specs())
@QUICK
def test_dict_round_trip_through_json(spec: LinearSpec) -> None:
    assert LinearSpec.from_dict(json.loads(json.dumps(spec.to_dict())), name="m") == spec


@pytest.mark.parametrize(("layout", "bits"), [("dense", 3.0), ("nibble", 4.0)])
@pytest.mark.parametrize(("group_size", "scale_bits"), [(64, 0.25), (128, 0.125), (256, 0.0625)])
def test_bits_per_weight_by_hand(layout: Layout, bits: float, group_size: int, scale_bits: float) -> None:
    spec = make(rows=4096, columns=4096, layout=layout, group_size=group_size)
    map_bits = 8 * 8 / 4096**2
    assert spec.bits_per_weight == bits + scale_bits + map_bits


def test_a_tile_takes_the_bytes_that_the_document_says() -> None:
    for layout, tile in (("dense", 1536), ("nibble", 2048)):
        spec = make(rows=64, columns=64, group_size=64, layout=layout)
        assert 4 * math.prod(spec.codes_shape[2:]) == tile
        assert spec.nbytes == tile + 2 * 64 + 8


def test_case_05_padding_is_explicit_and_logical_sizes_are_stored() -> None:
    spec = make(rows=60, columns=200, group_size=64)
    assert (spec.rows, spec.columns) == (60, 200)
    assert (spec.padded_rows, spec.padded_columns) == (64, 256)
    assert spec.codes_shape == (1, 4, 3, 32, 4)
    assert spec.scales_shape == (1, 4, 8, 8)
    assert spec.weights == 60 * 200
    entry = spec.to_dict()
    assert (entry["rows"], entry["columns"]) == (60, 200)


def test_case_06_permitted_tensor_parallel_degrees() -> None:
    """29568 = 128 * 3 * 7 * 11: two shards would be 14784 columns, 115.5 groups of 128."""
    by_rows, by_columns = make(rows=8192, columns=29568, group_size=128).tensor_parallel_degrees(limit=16)
    assert by_columns == [1, 3, 7, 11]
    assert by_rows == [1, 2, 4, 8, 16]
    _, by_columns = make(rows=8192, columns=29568, group_size=64).tensor_parallel_degrees(limit=16)
    assert by_columns == [1, 2, 3, 6, 7, 11, 14]
    by_rows, _ = make(rows=29568, columns=8192).tensor_parallel_degrees(limit=8)
    assert by_rows == [1, 2, 3, 6, 7]


def test_case_06_padded_sides_are_not_cut() -> None:
    assert make(rows=60, columns=200, group_size=64).tensor_parallel_degrees(limit=16) == ([1], [1])
    by_rows, by_columns = make(rows=1000, columns=29568, group_size=256).tensor_parallel_degrees(limit=16)
    assert by_rows == [1]
    assert by_columns == [1]


def test_case_06_several_maps_are_cut_with_their_rows() -> None:
    by_rows, _ = make(rows=384, columns=256, maps=3, qmap_dtype="float16").tensor_parallel_degrees(limit=16)
    assert by_rows == [1, 3]
    by_rows, _ = make(rows=384, columns=256, maps=384).tensor_parallel_degrees(limit=16)
    assert by_rows == [1, 2, 3, 6]


@given(spec=specs(), limit=st.integers(1, 24))
@QUICK
def test_case_06_shards_of_a_permitted_degree_are_whole_tiles(spec: LinearSpec, limit: int) -> None:
    by_rows, by_columns = spec.tensor_parallel_degrees(limit=limit)
    assert by_rows[0] == by_columns[0] == 1
    assert max(by_rows + by_columns) <= limit
    for degree in by_rows[1:]:
        assert spec.rows % (64 * degree) == 0
        assert spec.scales_shape[0] % degree == spec.codes_shape[0] % degree == 0
        assert spec.maps in (1, degree * (spec.maps // degree))
    for degree in by_columns[1:]:
        assert spec.columns % (spec.group_size * degree) == 0
        assert spec.scales_shape[1] % degree == spec.codes_shape[1] % degree == 0


def test_case_07_group_size_is_stored_not_inferred() -> None:
    """The packed width of 200 columns is 256 for groups of 64, 128 and 256 alike."""
    alike = [make(rows=64, columns=200, group_size=size) for size in (64, 128, 256)]
    assert len({spec.codes_shape for spec in alike}) == 1
    assert [spec.to_dict()["group_size"] for spec in alike] == [64, 128, 256]
    for spec in alike:
        entry = spec.to_dict()
        del entry["group_size"]
        with pytest.raises(CheckpointError, match=r"group_size.*a\.b"):
            LinearSpec.from_dict(entry, name="a.b")


@pytest.mark.parametrize(("layout", "eighths"), [("dense", 3), ("nibble", 4)])
def test_case_08_arithmetic_beyond_2_to_31_is_exact(layout: Layout, eighths: int) -> None:
    rows, columns = 1 << 24, 1 << 20
    spec = make(rows=rows, columns=columns, layout=layout, maps=rows, qmap_dtype="float16")
    assert spec.codes_shape == (1 << 18, 1 << 14, eighths, 32, 4)
    assert spec.scales_shape == (1 << 18, 1 << 13, 8, 8)
    assert spec.weights == 1 << 44
    assert spec.nbytes == (1 << 44) * eighths // 8 + 2 * (1 << 37) + 2 * 8 * (1 << 24)
    assert type(spec.nbytes) is int
    assert all(type(side) is int for side in (*spec.codes_shape, *spec.scales_shape, *spec.qmap_shape))


def test_case_08_the_last_weight_of_an_odd_huge_matrix_is_covered() -> None:
    spec = make(rows=(1 << 24) - 1, columns=(1 << 20) + 1, group_size=192)
    assert spec.padded_rows == 1 << 24
    assert spec.padded_columns == 192 * 5462
    assert 8 * 4 * math.prod(spec.codes_shape) == 3 * spec.padded_rows * spec.padded_columns


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": 0},
        {"rows": -64},
        {"columns": 0},
        {"columns": -1},
        {"rows": 1 << 62},
        {"columns": 1 << 62},
        {"group_size": 0},
        {"group_size": -64},
        {"group_size": 32},
        {"group_size": 96},
        {"layout": "sparse"},
        {"qmap_dtype": "bfloat16"},
        {"maps": 0},
        {"maps": -1},
        {"maps": 3},
        {"maps": 4},  # 32 rows a map: neither one row nor whole row tiles
        {"maps": 256},
    ],
)
def test_impossible_specs_are_refused_with_a_sentence(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"expected .*, got "):
        make(**changes)
    with pytest.raises(CheckpointError, match=r"layers\.3\.q"):
        LinearSpec.from_dict({**make().to_dict(), **changes}, name="layers.3.q")


@pytest.mark.parametrize("maps", [1, 2, 128])
def test_one_map_a_map_for_whole_tiles_and_a_map_for_each_row_are_permitted(maps: int) -> None:
    assert make(maps=maps).rows_per_map == 128 // maps


def test_maps_divide_the_padded_rows_not_the_logical_ones() -> None:
    assert make(rows=60, maps=64).rows_per_map == 1
    with pytest.raises(UnsupportedError):
        make(rows=60, maps=60)


@pytest.mark.parametrize("field", ["rows", "columns", "group_size", "layout", "maps", "qmap_dtype", "bias"])
@pytest.mark.parametrize("value", [None, "128", 128.0, True, 1, [128], {}])
def test_wrong_or_missing_fields_name_the_module(field: str, value: object) -> None:
    entry = make().to_dict()
    damages = [{key: kept for key, kept in entry.items() if key != field}]
    if type(value) is not type(entry[field]):
        damages.append({**entry, field: value})
    for damaged in damages:
        with pytest.raises(CheckpointError, match=rf"{field}.*layers\.3\.q"):
            LinearSpec.from_dict(damaged, name="layers.3.q")


ANYTHING = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.lists(st.integers(), max_size=2)
)


@given(changes=st.dictionaries(st.sampled_from(list(make().to_dict())), ANYTHING, min_size=1))
@QUICK
def test_damaged_entries_raise_nothing_but_checkpoint_errors(changes: dict[str, Any]) -> None:
    entry = {**make().to_dict(), **changes}
    try:
        spec = LinearSpec.from_dict(entry, name="m")
    except CheckpointError:
        return
    assert spec.to_dict() == entry
