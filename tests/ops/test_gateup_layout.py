"""The addresses of kernels/gateup_multiply.cuh, walked through on a CPU: what each lane reads is what its fragment needs, and lanes that
are served together read from different banks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

BLOCK = 128


def tile_row(g: int) -> int:
    return g // 2 + g % 2 * 4


def slot_of(halves: list[np.ndarray], piece: int) -> np.ndarray:
    """A slot as the copy engine fills it: [part][half][row][128 bytes], 16-byte columns exchanged by row % 8."""
    rows = halves[0].shape[0]
    slot = np.zeros((piece // BLOCK, 2, rows, 8, 16), dtype=halves[0].dtype)
    for part, half, row, column in itertools.product(range(piece // BLOCK), range(2), range(rows), range(8)):
        begin = part * BLOCK + column * 16
        slot[part, half, row, column ^ row % 8] = halves[half][row, begin : begin + 16]
    return slot.reshape(-1)


def weight_address(half_rows: int, warp_row: int, lane: int, part: int, tile: int, half: int, c: int) -> int:
    g, t = divmod(lane, 4)
    half_bytes = half_rows * BLOCK
    my_row = (warp_row + tile_row(g)) * BLOCK
    column = (t ^ tile_row(g)) * 16
    return part * 2 * half_bytes + my_row + tile * 8 * BLOCK + half * half_bytes + (column ^ 64 * c)


@pytest.mark.parametrize(("half_rows", "piece", "row_warps"), [(32, 256, 4), (64, 128, 8), (64, 256, 4), (128, 256, 8)])
def test_products_of_a_slot(half_rows: int, piece: int, row_warps: int) -> None:
    rng = np.random.default_rng(0)
    halves = [rng.integers(-4, 5, (half_rows, piece)) for _ in range(2)]
    x = rng.integers(-4, 5, (8, piece))
    slot = slot_of(halves, piece)
    tiles = half_rows // 8 // row_warps
    found = np.zeros((2, half_rows, 8), dtype=np.int64)
    for row_warp, part, c, tile in itertools.product(range(row_warps), range(piece // BLOCK), range(2), range(tiles)):
        warp_row = row_warp * tiles * 8
        a = np.zeros((16, 4, 16), dtype=np.int64)  # fragment row, product, k
        b = np.zeros((4, 16, 8), dtype=np.int64)  # product, k, token
        for lane in range(32):
            g, t = divmod(lane, 4)
            for half in range(2):
                at = weight_address(half_rows, warp_row, lane, part, tile, half, c)
                words = slot[at : at + 16].reshape(8, 2)
                for s in range(4):
                    a[g + 8 * half, s, 2 * t : 2 * t + 2] = words[2 * s]
                    a[g + 8 * half, s, 2 * t + 8 : 2 * t + 10] = words[2 * s + 1]
            begin = part * BLOCK + 64 * c + 16 * t
            values = x[g, begin : begin + 16].reshape(8, 2)
            for s in range(4):
                b[s, 2 * t : 2 * t + 2, g] = values[2 * s]
                b[s, 2 * t + 8 : 2 * t + 10, g] = values[2 * s + 1]
        sums = np.einsum("rsk,skn->rn", a, b)
        for g in range(8):
            row = warp_row + tile * 8 + tile_row(g)
            found[0, row] += sums[g]
            found[1, row] += sums[g + 8]
    for half in range(2):
        np.testing.assert_array_equal(found[half], halves[half] @ x.T)


@pytest.mark.parametrize("c", [0, 1])
@pytest.mark.parametrize("piece", [128, 256])
def test_lanes_that_are_served_together_read_from_different_banks(c: int, piece: int) -> None:
    """Eight lanes with 16 bytes each make one pass over the 32 banks."""
    pitch = 2 * piece + 16
    for first in range(0, 32, 8):
        lanes = range(first, first + 8)
        weights = {weight_address(64, 8, lane, 0, 0, 0, c) // 16 % 8 for lane in lanes}
        x = {(lane // 4 * pitch + 128 * c + 32 * (lane % 4)) // 16 % 8 for lane in lanes}
        assert len(weights) == len(x) == 8


def convert(bits: np.ndarray) -> tuple[np.ndarray, float]:
    """bfloat16 bits of 128 numbers -> float16 and the scale, as kernels/gateup_convert.cuh does it."""
    peak = int((bits & 0x7FFF).max())
    exponent = max(peak >> 7, 16)
    factor = np.array([(269 - exponent) << 23], dtype=np.uint32).view(np.float32)[0]
    scale = np.array([(exponent - 15) << 23], dtype=np.uint32).view(np.float32)[0]
    values = (bits.astype(np.uint32) << 16).view(np.float32)
    return (values * factor).astype(np.float16), float(scale)


@pytest.mark.parametrize("largest", [0x0000, 0x0100, 0x0B80, 0x3F80, 0x42FF, 0x7F7F])
def test_bfloat16_becomes_float16_exactly(largest: int) -> None:
    """Everything within 2^-30 of the largest, whatever that is; nothing overflows."""
    rng = np.random.default_rng(largest)
    lowest = max((largest >> 7) - 30, 1) << 7
    bits = rng.integers(lowest, largest + 1, 128) if largest > lowest else np.full(128, largest)
    bits = bits.astype(np.uint16) | rng.integers(0, 2, 128).astype(np.uint16) << 15
    bits[0] = largest
    halves, scale = convert(bits)
    assert np.isfinite(halves).all()
    values = (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    np.testing.assert_array_equal(halves.astype(np.float64) * scale, values)
