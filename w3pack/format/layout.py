"""Where each weight's code lies (SPEC.md, section 1, "Tile order").

Plain integer functions, one weight at a time: the definition that the vectorised packers and the kernels are checked
against, not code for a hot path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TILE = 64
CODES_PER_MAP = 8
CODE_BITS = 3
FORMAT_VERSION = 1

Layout = Literal["dense", "nibble"]
LAYOUTS: tuple[Layout, ...] = ("dense", "nibble")

#: 16-byte vectors that one lane reads of one 64x64 tile: 4 words for each of 4 row blocks, three quarters when dense.
VECTORS: dict[Layout, int] = {"dense": 3, "nibble": 4}
LANES = 32
COMPONENTS = 4


@dataclass(frozen=True)
class TilePosition:
    """A weight inside its 64x64 tile, in fragment terms.

    `block` is the 16-row block, `half` the upper or lower 8 rows of it, `lane_row` and `lane_column` the two halves of
    the lane number, `word` one of the lane's four words and `element` the place in it.
    """

    block: int
    half: int
    lane_row: int
    lane_column: int
    word: int
    element: int

    @property
    def lane(self) -> int:
        """Lane of the warp that owns the weight, 0..31."""
        return 4 * self.lane_row + self.lane_column

    @property
    def nibble(self) -> int:
        """Which of the word's eight 4-bit fields holds the code."""
        return 4 * self.half + self.element


@dataclass(frozen=True)
class BitPosition:
    """One bit of a packed tile: which int32 of it, by vector, lane and component, and which bit of that word."""

    vector: int
    lane: int
    component: int
    bit: int


def tile_position(row: int, column: int) -> TilePosition:
    """Position of the weight at `row`, `column` (both 0..63) of a tile."""
    return TilePosition(
        block=row // 16,
        half=row % 16 // 8,
        lane_row=row % 8,
        lane_column=column // 16,
        word=column % 16 // 4,
        element=column % 4,
    )


def code_bits(layout: Layout, row: int, column: int) -> tuple[BitPosition, BitPosition, BitPosition]:
    """Where bits 0, 1 and 2 of the code at `row`, `column` of a tile are stored."""
    at = tile_position(row, column)
    if layout == "nibble":
        words = [(at.block, at.word, 4 * at.nibble + b) for b in range(CODE_BITS)]
    elif at.word < 3:
        words = [((3 * at.block + at.word) // 4, (3 * at.block + at.word) % 4, 4 * at.nibble + b) for b in range(3)]
    else:  # the fourth word of a lane is spread over the spare bit 3 of the other three
        words = [((3 * at.block + b) // 4, (3 * at.block + b) % 4, 4 * at.nibble + 3) for b in range(CODE_BITS)]
    first, second, third = (BitPosition(vector, at.lane, component, bit) for vector, component, bit in words)
    return first, second, third


def scale_position(row: int) -> tuple[int, int]:
    """The last two indices of the tile-ordered scales for `row` (0..63) of a row tile: (lane row, 2 * block + half)."""
    at = tile_position(row, 0)
    return at.lane_row, 2 * at.block + at.half


def padded(size: int, *, to: int) -> int:
    """`size` rounded up to a multiple of `to`."""
    return -(-size // to) * to
