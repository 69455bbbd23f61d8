"""Shapes by name and by hand, and the product of choices."""

from __future__ import annotations

import pytest

from w3pack.bench.shapes import MODELS, Case, Shape, cases, parse_shape, parse_tokens, select, shapes_of
from w3pack.errors import UnsupportedError, UsageError


@pytest.mark.parametrize(("text", "rows", "columns"), [("4096x14336", 4096, 14336), (" 64 X 1 ", 64, 1), ("7*9", 7, 9)])
def test_a_shape_is_rows_by_columns(text: str, rows: int, columns: int) -> None:
    shape = parse_shape(text)
    assert (shape.rows, shape.columns) == (rows, columns)
    assert parse_shape(str(shape)) == shape


@pytest.mark.parametrize("text", ["", "4096", "0x64", "64x0", "64x", "x64", "64x64x64", "-1x64", "a x b", "1e3x64"])
def test_no_shape_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected a shape such as"):
        parse_shape(text)


def test_tokens_are_sorted_and_each_once() -> None:
    assert parse_tokens("16, 1,8,1") == (1, 8, 16)
    assert parse_tokens("4096") == (4096,)


@pytest.mark.parametrize("text", ["", "0", "1,,2", "1;2", "-1", "70000", "1.5", "eight"])
def test_no_tokens_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected token counts"):
        parse_tokens(text)


def test_the_linears_of_a_model() -> None:
    found = {shape.name: (shape.rows, shape.columns) for shape in shapes_of("Llama-3-8B")}
    assert found == {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
    small = {shape.name: (shape.rows, shape.columns) for shape in shapes_of("smollm2-135m")}
    assert small == {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)}


def test_the_shapes_that_others_published() -> None:
    assert len(MODELS["limits"]) == 8
    assert {(shape.rows, shape.columns) for shape in MODELS["limits"]} >= {(28672, 8192), (4096, 4096), (5120, 17408)}


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"llama-3-8b.*--shape"):
        shapes_of("gpt-5")


def test_selection_keeps_order_and_each_size_once() -> None:
    assert select([], []) == MODELS["limits"]
    assert select([], ["64x128"]) == (Shape("", 64, 128),)
    chosen = select(["llama-3-8b"], ["4096x4096", "64x128"])
    assert [str(shape) for shape in chosen] == ["6144x4096", "4096x4096", "28672x4096", "4096x14336", "64x128"]
    assert chosen[1].name == "o"


def test_tokens_run_fastest() -> None:
    made = cases(
        [Shape("", 64, 128), Shape("", 128, 64)], tokens=(1, 8), layouts=("dense", "nibble"), qmap_dtypes=("int8",)
    )
    assert len(made) == len(set(made)) == 8
    assert [case.tokens for case in made] == [1, 8] * 4
    assert [case.rows for case in made] == [64] * 4 + [128] * 4


@pytest.mark.parametrize(("kind", "maps"), [("linear", 1), ("tile", 2), ("row", 128)])
def test_maps_of_a_case(kind: str, maps: int) -> None:
    case = Case(rows=100, columns=130, tokens=3, map_kind=kind)  # type: ignore[arg-type]
    assert case.spec.maps == maps
    assert case.spec.padded_columns == 256


def test_an_impossible_group_size_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="group size"):
        _ = Case(rows=64, columns=64, tokens=1, group_size=100).spec
