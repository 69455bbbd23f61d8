"""Where a code lies inside a tile: the index functions against the document's words, and as bijections."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from w3pack.format.layout import LAYOUTS, BitPosition, Layout, code_bits, padded, scale_position, tile_position

SIDE = range(64)
VECTORS = {"dense": 3, "nibble": 4}


def all_bits(layout: Layout) -> Iterator[BitPosition]:
    for row in SIDE:
        for column in SIDE:
            yield from code_bits(layout, row, column)


def test_both_layouts_exist() -> None:
    assert set(LAYOUTS) == {"dense", "nibble"}


def test_tile_position_is_the_documents_formula() -> None:
    for r in SIDE:
        for c in SIDE:
            at = tile_position(r, c)
            i, half, g = r // 16, (r % 16) // 8, r % 8
            t, j, e = c // 16, (c % 16) // 4, c % 4
            found = (at.block, at.half, at.lane_row, at.lane_column, at.word, at.element)
            assert found == (i, half, g, t, j, e)
            assert at.lane == 4 * g + t
            assert at.nibble == 4 * half + e


def test_tile_position_is_a_bijection() -> None:
    places = {(p.block, p.lane, p.word, p.nibble) for p in (tile_position(r, c) for r in SIDE for c in SIDE)}
    assert places == {(i, lane, j, n) for i in range(4) for lane in range(32) for j in range(4) for n in range(8)}


def test_a_lane_owns_two_rows_of_each_block_and_sixteen_columns_in_a_row() -> None:
    for lane in range(32):
        owned = [(r, c) for r in SIDE for c in SIDE if tile_position(r, c).lane == lane]
        g, t = divmod(lane, 4)
        assert {r for r, _ in owned} == {16 * i + g + 8 * half for i in range(4) for half in range(2)}
        assert {c for _, c in owned} == set(range(16 * t, 16 * t + 16))
        assert len(owned) == 128


def test_nibble_layout_is_the_documents_formula() -> None:
    for r in SIDE:
        for c in SIDE:
            at = tile_position(r, c)
            for b, bit in enumerate(code_bits("nibble", r, c)):
                assert (bit.vector, bit.lane, bit.component) == (at.block, at.lane, at.word)
                assert bit.bit == 4 * at.nibble + b


def test_dense_layout_is_the_documents_formula() -> None:
    for r in SIDE:
        for c in SIDE:
            at = tile_position(r, c)
            for b, bit in enumerate(code_bits("dense", r, c)):
                q = 3 * at.block + (at.word if at.word < 3 else b)
                shift = b if at.word < 3 else 3
                assert (bit.vector, bit.component) == (q // 4, q % 4)
                assert (bit.lane, bit.bit) == (at.lane, 4 * at.nibble + shift)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_code_bit_has_a_place_of_its_own(layout: Layout) -> None:
    bits = list(all_bits(layout))
    assert len(bits) == len(set(bits)) == 3 * 64 * 64


def test_dense_layout_uses_every_bit_of_the_tile_once() -> None:
    everything = {
        BitPosition(vector, lane, component, bit)
        for vector in range(3)
        for lane in range(32)
        for component in range(4)
        for bit in range(32)
    }
    assert set(all_bits("dense")) == everything


def test_nibble_layout_uses_every_bit_but_the_top_one_of_each_nibble() -> None:
    everything = {
        BitPosition(vector, lane, component, bit)
        for vector in range(4)
        for lane in range(32)
        for component in range(4)
        for bit in range(32)
        if bit % 4 != 3
    }
    assert set(all_bits("nibble")) == everything


@pytest.mark.parametrize("layout", LAYOUTS)
def test_low_half_of_a_word_is_the_upper_rows(layout: Layout) -> None:
    for r in SIDE:
        for c in SIDE:
            assert all((bit.bit >= 16) == (r % 16 >= 8) for bit in code_bits(layout, r, c))


def test_scale_position_is_the_documents_formula_and_a_bijection() -> None:
    places = [scale_position(r) for r in SIDE]
    assert places == [(r % 8, 2 * (r // 16) + (r % 16) // 8) for r in SIDE]
    assert set(places) == {(g, k) for g in range(8) for k in range(8)}


def test_scales_of_a_lanes_rows_stand_together() -> None:
    """Lane row g reads [g, 0..7] and finds the scales of rows g, g+8, g+16, ... in that order."""
    for g in range(8):
        rows = sorted((scale_position(r)[1], r) for r in SIDE if scale_position(r)[0] == g)
        assert rows == [(k, g + 8 * k) for k in range(8)]


@given(size=st.integers(1, 1 << 70), to=st.sampled_from([64, 128, 192, 256]))
@settings(derandomize=True, database=None, deadline=None)
def test_padded_is_the_next_multiple(size: int, to: int) -> None:
    result = padded(size, to=to)
    assert type(result) is int
    assert result % to == 0
    assert size <= result < size + to


@pytest.mark.parametrize(("size", "to", "expected"), [(64, 64, 64), (65, 64, 128), (60, 64, 64), (29568, 256, 29696)])
def test_padded_by_hand(size: int, to: int, expected: int) -> None:
    assert padded(size, to=to) == expected
