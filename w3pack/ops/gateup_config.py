"""Describe, decide, plan for block-scaled FP8 weights: from what a call is to the kernel that computes it. Pure functions, no GPU.

    desc = GateUpDesc(tokens=8, rows=17408, columns=5120, paired=True, x_dtype="float16", device=DeviceLimits(...))
    plan = plan_of(desc)                   # kernel, grid, shared memory, workspace

The kernel is described at the head of kernels/gateup_decode.cu.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from w3pack.errors import UnsupportedError
from w3pack.jit import KernelText
from w3pack.ops.w3_config import DeviceLimits, XDtype

BLOCK = 128
#: Tokens that a kernel takes in one launch.
MAX_TOKENS = 32
#: Rows of a matrix start at multiples of this many bytes, which the copy engine asks for.
ALIGNMENT = 16
_ARITHMETIC = 1 << 32
_TOKEN_TILE = 8
_FEEDERS = 2
#: Units that each thread block has at least before row blocks become smaller.
_UNITS = 4


@dataclass(frozen=True)
class GateUpDesc:
    """One call: `rows` x `columns` are those of gate (and of up) where `paired`, else of the only matrix."""

    tokens: int
    rows: int
    columns: int
    paired: bool
    x_dtype: XDtype
    device: DeviceLimits


@dataclass(frozen=True)
class GateUpConfig:
    """How a kernel divides its work; see kernels/gateup_decode.cu.

    Attributes:
        token_tiles: tiles of 8 tokens.
        half_rows: rows of each half of a row block.
        piece: columns of a slot.
        slots: slots of weights and activations in flight.
        row_warps, split_warps: working warps along the rows of a row block, and along the columns of a slot.
        unroll: halves of 128 columns, 1 or 2, that are worked on together.
        blocks: thread blocks; 0: one for each multiprocessor.
        converters: warps that turn bfloat16 activations into float16, at most; a power of two.
    """

    token_tiles: int
    half_rows: int
    piece: int
    slots: int
    row_warps: int
    split_warps: int
    unroll: int = 1
    blocks: int = 0
    converters: int = 2

    @property
    def warps(self) -> int:
        """Working warps of a thread block."""
        return self.row_warps * self.split_warps

    @property
    def quads(self) -> int:
        """Accumulators of a lane, in fours."""
        return self.half_rows // 8 // self.row_warps * self.token_tiles


@dataclass(frozen=True)
class GateUpPlan:
    """What to launch."""

    desc: GateUpDesc
    config: GateUpConfig
    text: KernelText
    grid: int
    block: int
    shared_bytes: int
    pieces: int
    row_blocks: int
    run_units: int
    longer_runs: int
    partial_bytes: int


def converters(desc: GateUpDesc, config: GateUpConfig) -> int:
    """Warps that turn bfloat16 activations into float16; each takes 8 tokens of 128 columns at once."""
    return min(config.converters, config.token_tiles * config.piece // BLOCK) if desc.x_dtype == "bfloat16" else 0


def kernel_text(desc: GateUpDesc, config: GateUpConfig) -> KernelText:
    """The kernel of a config."""
    return KernelText(
        file="gateup_decode.cu",
        entry="gateup_decode",
        defines=(
            ("GU_BF16", int(desc.x_dtype == "bfloat16")),
            ("GU_CONVERTERS", converters(desc, config)),
            ("GU_HALF_ROWS", config.half_rows),
            ("GU_PAIRED", int(desc.paired)),
            ("GU_PARTIAL", int(desc.columns % BLOCK != 0)),
            ("GU_PIECE", config.piece),
            ("GU_ROW_WARPS", config.row_warps),
            ("GU_SLOTS", config.slots),
            ("GU_SPLIT_WARPS", config.split_warps),
            ("GU_TOKEN_TILES", config.token_tiles),
            ("GU_UNROLL", config.unroll),
        ),
    )


def row_blocks(desc: GateUpDesc, half_rows: int) -> int:
    """Row blocks of the call."""
    return -(-desc.rows // (half_rows * (1 if desc.paired else 2)))


def shared_bytes(desc: GateUpDesc, config: GateUpConfig) -> int:
    """Dynamic shared memory, as SharedMap of gateup_params.cuh lays it out, and room to begin at a multiple of 1024."""
    slot = 2 * config.half_rows * config.piece
    exchange = config.warps * config.quads * 512 if config.split_warps > 1 else 0
    barriers = -(-3 * 8 * config.slots // 16) * 16
    activations = desc.tokens * (2 * config.piece + 16)
    scales = 4 * config.piece // BLOCK * _TOKEN_TILE * config.token_tiles if desc.x_dtype == "bfloat16" else 0
    return 1024 + exchange + barriers + config.slots * (slot + activations + scales)


def why_not(desc: GateUpDesc) -> str | None:
    """None when the kernel can take the call; otherwise the reason."""
    if not desc.device.bulk:
        return f"{desc.device.arch} has no bulk copies"
    if desc.columns % ALIGNMENT:
        return f"{ALIGNMENT} does not divide {desc.columns} columns"
    if not 1 <= desc.tokens <= MAX_TOKENS:
        return f"{desc.tokens} tokens are not 1 to {MAX_TOKENS}"
    pieces = -(-desc.columns // BLOCK)
    if (-(-desc.rows // 16) * pieces + 1) * pieces >= _ARITHMETIC:
        return f"{desc.rows} x {desc.columns} is too large to count through"
    return None


def make_plan(desc: GateUpDesc, config: GateUpConfig) -> GateUpPlan:
    """Plan a call.

    Raises:
        UnsupportedError: the config does not fit the call or the device.
    """
    why = why_not(desc)
    if why is None and desc.tokens > _TOKEN_TILE * config.token_tiles:
        why = f"{config} takes {_TOKEN_TILE * config.token_tiles} tokens, not {desc.tokens}"
    if why is not None:
        raise UnsupportedError(f"expected a call that the FP8 kernel takes, got one where {why}; dequantise it")
    pieces = -(-desc.columns // config.piece)
    blocks = row_blocks(desc, config.half_rows)
    config = replace(config, blocks=min(config.blocks or desc.device.multiprocessors, blocks * pieces))
    shared = shared_bytes(desc, config)
    if shared > desc.device.shared_bytes:
        raise UnsupportedError(
            f"expected at most {desc.device.shared_bytes} bytes of shared memory, got {shared} for {config}; choose fewer slots"
        )
    return GateUpPlan(
        desc=desc,
        config=config,
        text=kernel_text(desc, config),
        grid=config.blocks,
        block=32 * (config.warps + _FEEDERS + converters(desc, config)),
        shared_bytes=shared,
        pieces=pieces,
        row_blocks=blocks,
        run_units=blocks * pieces // config.blocks,
        longer_runs=blocks * pieces % config.blocks,
        partial_bytes=config.blocks * config.row_warps * config.quads * 512,
    )


def candidates(desc: GateUpDesc) -> Iterator[GateUpConfig]:
    """Configs, the preferred one first; the others have fewer slots, for devices with less shared memory.

    Measured on an H200 at I x K of 17408 x 5120, 12288 x 4096 and 6144 x 2048. Small matrices get small row blocks, so that every
    multiprocessor has work.
    """
    tiles = 1 if desc.tokens <= 8 else 2 if desc.tokens <= 16 else 4
    everywhere = desc.device.multiprocessors
    units = row_blocks(desc, 64) * -(-desc.columns // 256)
    long_units = row_blocks(desc, 32) * -(-desc.columns // 512)
    if units < _UNITS * everywhere and tiles < 4 and long_units >= 2 * everywhere:
        form = GateUpConfig(tiles, half_rows=32, piece=512, slots=6 - tiles, row_warps=2, split_warps=4)
    elif units < _UNITS * everywhere:
        form = GateUpConfig(tiles, half_rows=32, piece=256, slots=6, row_warps=4, split_warps=2)
    elif tiles == 4:
        form = GateUpConfig(tiles, half_rows=64, piece=128, slots=6, row_warps=8, split_warps=1)
    elif tiles == 2 and desc.paired and units >= 12 * everywhere:
        form = GateUpConfig(tiles, half_rows=128, piece=256, slots=3, row_warps=8, split_warps=1)
    elif tiles == 1 and desc.paired and units >= 32 * everywhere:
        form = GateUpConfig(tiles, half_rows=64, piece=512, slots=3, row_warps=4, split_warps=2)
    else:
        form = GateUpConfig(tiles, half_rows=64, piece=256, slots=4, row_warps=4, split_warps=2)
    yield form
    small = GateUpConfig(tiles, half_rows=32, piece=256, slots=3, row_warps=4, split_warps=2)
    yield from (
        small,
        replace(small, piece=128, row_warps=4, split_warps=1),
        replace(small, piece=128, slots=2, split_warps=1),
    )


def plan_of(desc: GateUpDesc) -> GateUpPlan:
    """The plan of the best config that fits with whole token tiles: numbers of tokens that share a tile share a kernel.

    Raises:
        UnsupportedError: the kernel does not take the call; `why_not` says why.
    """
    for config in candidates(desc):
        whole = replace(desc, tokens=_TOKEN_TILE * config.token_tiles)
        if why_not(desc) is not None or shared_bytes(whole, config) <= desc.device.shared_bytes:
            return make_plan(desc, config)
    raise UnsupportedError(f"expected a device with room for two slots, got {desc.device}; dequantise")
