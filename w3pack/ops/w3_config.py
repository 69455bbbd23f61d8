"""Describe, decide, plan: from what a call of `w3_linear` is to the kernels that compute it. Pure functions, no GPU.

    desc = W3Desc.of(spec, tokens=8, x_dtype="float16", device=DeviceLimits(...))
    config = decide(desc, table)           # measured entry, or the heuristic
    plan = make_plan(desc, config)         # kernels, grid, shared memory, workspace

Kernels and their partition are described in docs/kernel_anatomy.md and at the head of kernels/w3_decode.cu.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from w3pack.errors import UnsupportedError
from w3pack.format.layout import TILE, VECTORS, Layout
from w3pack.format.linear import LinearSpec, QmapDtype
from w3pack.jit import KernelText

XDtype = Literal["float16", "bfloat16"]
MapKind = Literal["linear", "tile", "row"]

STEP_COLUMNS = 128
TOKEN_TILE = 8
#: Tokens whose two planes fit a token tile together.
BESIDE_TOKENS = 4
_ARITHMETIC = 1 << 32
#: Values of `W3Config.ring` that are no length: kOwn, kFromGlobal, kKept, kStreamed of the kernels.
OWN, FROM_GLOBAL, KEPT, STREAMED = 0, -1, -2, -3
#: Tokens that a decode kernel takes in one launch.
MAX_TOKENS = 64
#: Tokens up to which a block stages the activations that it needs by itself.
MAX_OWN_TOKENS = 16


@dataclass(frozen=True)
class DeviceLimits:
    """What planning needs to know of a GPU: `arch` as in "sm_90a", multiprocessors, shared bytes a block may have."""

    arch: str
    multiprocessors: int
    shared_bytes: int

    @property
    def bulk(self) -> bool:
        """Whether the device has bulk copies, transaction barriers and dependent launches (sm_90 and later)."""
        return int(self.arch.removeprefix("sm_").rstrip("a")) >= 90


@dataclass(frozen=True)
class W3Desc:
    """One call: shape, form and device."""

    tokens: int
    rows: int
    columns: int
    group_size: int
    layout: Layout
    qmap_dtype: QmapDtype
    map_kind: MapKind
    x_dtype: XDtype
    device: DeviceLimits

    @classmethod
    def of(cls, spec: LinearSpec, *, tokens: int, x_dtype: XDtype, device: DeviceLimits) -> W3Desc:
        """The call of a Linear with `tokens` rows of x."""
        kind: MapKind = "linear" if spec.maps == 1 else "row" if spec.rows_per_map == 1 else "tile"
        return cls(
            tokens=tokens,
            rows=spec.rows,
            columns=spec.columns,
            group_size=spec.group_size,
            layout=spec.layout,
            qmap_dtype=spec.qmap_dtype,
            map_kind=kind,
            x_dtype=x_dtype,
            device=device,
        )

    @property
    def row_tiles(self) -> int:
        """Tiles of 64 rows."""
        return -(-self.rows // TILE)

    @property
    def column_tiles(self) -> int:
        """Tiles of 64 columns, padded to whole groups."""
        return -(-self.columns // self.group_size) * self.group_size // TILE

    @property
    def steps(self) -> int:
        """Steps of 128 columns; the last may be half a step."""
        return -(-self.column_tiles // 2)

    @property
    def scale_sets(self) -> int:
        """Scales that a row has in a step: 2 when a step can hold two groups."""
        return 1 if self.group_size % STEP_COLUMNS == 0 else 2

    @property
    def tile_bytes(self) -> int:
        """Bytes of the codes of a tile."""
        return 512 * VECTORS[self.layout]


@dataclass(frozen=True)
class W3Config:
    """How a decode kernel divides its work; see kernels/w3_decode.cu.

    Attributes:
        token_tiles: tiles of 8 tokens for each warp.
        row_warps, split_warps, token_warps: warps along row tiles, along the steps of a row tile, and along tokens.
        slots: slots of weights in flight.
        ring: where activations are staged and kept. OWN: each block stages what it needs and keeps it. KEPT: the staging
            kernel stages, each block keeps what it needs. STREAMED: the staging kernel stages, they come with the weights
            in every slot. A positive number: the staging kernel stages, and that many steps are in flight. FROM_GLOBAL:
            the staging kernel stages, and they are read from global memory at each use.
        blocks: thread blocks.
        slot_steps: steps of every row tile in a slot; divides `split_warps`, and before sm_90 is equal to it.
        warpgroups: four warps share a matrix instruction (sm_90a only).
        depth: 16-row blocks of products that a warpgroup has in flight, 1 or 2.
        cluster: blocks that share the steps of a row block and add up in each other's shared memory; 1: runs over all
            blocks, and partial sums through global memory.
        beside: at most four tokens, whose two int8 planes fill one token tile together: half the products.
    """

    token_tiles: int
    row_warps: int
    split_warps: int
    token_warps: int
    slots: int
    ring: int
    blocks: int
    slot_steps: int = 1
    warpgroups: bool = False
    depth: int = 2
    beside: bool = False
    cluster: int = 1

    @property
    def warps(self) -> int:
        """Warps of a thread block."""
        return self.row_warps * self.split_warps * self.token_warps

    @property
    def all_token_tiles(self) -> int:
        """Tiles of 8 tokens that a thread block takes."""
        return self.token_tiles * self.token_warps

    @property
    def tokens(self) -> int:
        """Tokens that a thread block takes."""
        return BESIDE_TOKENS if self.beside else TOKEN_TILE * self.all_token_tiles

    @property
    def step_bytes(self) -> int:
        """Staged activations of a step, without their scales (kStepXBytes)."""
        return (1024 if self.beside else 2048) * self.all_token_tiles


@dataclass(frozen=True)
class W3Plan:
    """What to launch: the decode kernel, and before it the staging kernel unless blocks stage their own activations."""

    desc: W3Desc
    config: W3Config
    decode: KernelText
    stage: KernelText | None
    grid: int
    block: int
    shared_bytes: int
    row_blocks: int
    run_units: int
    longer_runs: int
    resident_steps: int
    first_chunk: int
    chunk_steps: int
    chunks: int
    partial_bytes: int
    staged_bytes: int
    staged_scale_bytes: int


def fitted(desc: W3Desc, config: W3Config) -> W3Config:
    """`config` with no more thread blocks than there are units of work."""
    row_blocks = -(-desc.row_tiles // config.row_warps)
    if config.cluster > 1:
        return replace(config, blocks=config.cluster * max(1, min(config.blocks // config.cluster, row_blocks)))
    return replace(config, blocks=max(1, min(config.blocks, row_blocks * desc.steps)))


def resident_steps(desc: W3Desc, config: W3Config) -> int:
    """Steps of activations that a thread block needs at most, when it stages its own."""
    if config.cluster > 1:
        return -(-desc.steps // config.cluster)
    units = -(-desc.row_tiles // config.row_warps) * desc.steps
    return min(desc.steps, -(-units // config.blocks))


def keeps_activations(config: W3Config) -> bool:
    """Whether a block keeps the staged activations of all its steps in shared memory."""
    return config.ring in (OWN, KEPT)


def chunks(desc: W3Desc, config: W3Config) -> tuple[int, int, int]:
    """Kept activations are announced in chunks: (steps of the first, steps of the others, number of chunks at most)."""
    if not keeps_activations(config):
        return 1, 1, 0
    if (
        config.ring == OWN
    ):  # what the warps stage in one round: four pairs of (step, token) each; three go on after the first
        tokens = max(1, desc.tokens)
        warps = 3 + (config.warps if config.warps < 16 else 0)
        first, others = max(1, 8 * warps // tokens), max(1, 24 // tokens)
    else:
        first, others = max(2, config.split_warps), 4
    steps = resident_steps(desc, config)
    return first, others, 1 + max(0, -(-(steps - first) // others))


def shared_bytes(desc: W3Desc, config: W3Config) -> int:
    """Dynamic shared memory of the decode kernel: slots, staged activations and their scales, exchange, barriers."""
    slot_rows = config.row_warps * (1 if desc.device.bulk else config.token_warps)
    slot = slot_rows * config.slot_steps * (2 * desc.tile_bytes + 128 * desc.scale_sets)
    tiles = config.all_token_tiles
    if config.ring == STREAMED:
        slot += config.slot_steps * (config.step_bytes + 32 * tiles)
    steps = resident_steps(desc, config) if keeps_activations(config) else max(config.ring, 0)
    quads = 4 * config.token_tiles
    exchange = config.warps * quads * 512 if config.split_warps > 1 else 0
    if config.cluster > 1:
        items = config.warps * -(-quads // config.split_warps)
        exchange += (config.cluster - 1) * -(-items // config.cluster) * 512 + 16
    barriers = 8 * (2 * config.slots + 2 * max(config.ring, 0) + chunks(desc, config)[2])
    return config.slots * slot + steps * (config.step_bytes + 32 * tiles) + exchange + barriers


def decode_text(desc: W3Desc, config: W3Config) -> KernelText:
    """The decode kernel of a config."""
    return KernelText(
        file="w3_decode.cu",
        entry="w3_decode",
        defines=(
            ("W3_BESIDE", int(config.beside)),
            ("W3_BF16", int(desc.x_dtype == "bfloat16")),
            ("W3_BULK", int(desc.device.bulk)),
            ("W3_CLUSTER", config.cluster),
            ("W3_DENSE", int(desc.layout == "dense")),
            ("W3_DEPTH", config.depth),
            ("W3_HALF_STEP", desc.column_tiles % 2),
            ("W3_INT8_MAP", int(desc.qmap_dtype == "int8")),
            ("W3_ROW_MAPS", int(desc.map_kind == "row")),
            ("W3_ROW_WARPS", config.row_warps),
            ("W3_SCALE_SETS", desc.scale_sets),
            ("W3_SLOTS", config.slots),
            ("W3_SLOT_STEPS", config.slot_steps),
            ("W3_SPLIT_WARPS", config.split_warps),
            ("W3_STAGED_X", config.ring),
            ("W3_TOKEN_TILES", config.token_tiles),
            ("W3_TOKEN_WARPS", config.token_warps),
            ("W3_WARPGROUPS", int(config.warpgroups)),
        ),
    )


def stage_text(desc: W3Desc, config: W3Config) -> KernelText:
    """The staging kernel that goes with a config."""
    return KernelText(
        file="w3_stage.cu",
        entry="w3_stage",
        defines=(
            ("W3_BESIDE", int(config.beside)),
            ("W3_BF16", int(desc.x_dtype == "bfloat16")),
            ("W3_INT8_MAP", int(desc.qmap_dtype == "int8")),
            ("W3_TOKEN_TILES", config.token_tiles),
            ("W3_TOKEN_WARPS", config.token_warps),
            ("W3_WARPGROUPS", int(config.warpgroups)),
        ),
    )


def countable(desc: W3Desc, config: W3Config) -> bool:
    """Whether kernels/w3_partition.cuh can divide: its quotients need (dividend + 1) * divisor below 2^32."""
    units = -(-desc.row_tiles // config.row_warps) * desc.steps
    return (units + 1) * desc.steps < _ARITHMETIC and (desc.column_tiles + 1) * desc.group_size // TILE < _ARITHMETIC


def make_plan(desc: W3Desc, config: W3Config) -> W3Plan:
    """Plan a decode call.

    Raises:
        UnsupportedError: the config does not fit the call or the device.
    """
    config = fitted(desc, config)
    if desc.tokens > config.tokens:
        raise UnsupportedError(
            f"expected at most {config.tokens} tokens for {config}, got {desc.tokens}; choose more token tiles"
        )
    if config.cluster > 1 and (not desc.device.bulk or desc.steps < config.cluster):
        raise UnsupportedError(
            f"expected clusters on sm_90 or later and a step of {STEP_COLUMNS} columns for each block, got {config.cluster} "
            f"blocks for {desc.columns} columns on {desc.device.arch}; choose smaller clusters"
        )
    if config.beside and (desc.qmap_dtype != "int8" or config.all_token_tiles != 1):
        raise UnsupportedError(
            f"expected an int8 map and one token tile for planes beside each other, got {desc.qmap_dtype} and {config}; "
            "leave beside out"
        )
    if config.slots * config.slot_steps % config.split_warps:
        raise UnsupportedError(
            f"expected slots for whole rounds of split warps, got {config.slots} of {config.slot_steps} steps for "
            f"{config.split_warps} warps; choose a multiple"
        )
    shared = shared_bytes(desc, config)
    if shared > desc.device.shared_bytes:
        raise UnsupportedError(
            f"expected at most {desc.device.shared_bytes} bytes of shared memory, got {shared} for {config}; choose fewer slots"
        )
    row_blocks = -(-desc.row_tiles // config.row_warps)
    if not countable(desc, config):
        raise UnsupportedError(
            f"expected a matrix that the kernels can count through, got {desc.rows} x {desc.columns} with groups of "
            f"{desc.group_size}; dequantise it"
        )
    own = config.ring == OWN
    first_chunk, chunk_steps, most_chunks = chunks(desc, config)
    return W3Plan(
        desc=desc,
        config=config,
        decode=decode_text(desc, config),
        stage=None if own else stage_text(desc, config),
        grid=config.blocks,
        block=32 * (config.warps + (4 if desc.device.bulk else 0)),
        shared_bytes=shared,
        row_blocks=row_blocks,
        run_units=row_blocks * desc.steps // config.blocks,
        longer_runs=row_blocks * desc.steps % config.blocks,
        resident_steps=resident_steps(desc, config) if keeps_activations(config) else 0,
        first_chunk=first_chunk,
        chunk_steps=chunk_steps,
        chunks=most_chunks,
        partial_bytes=512
        if config.cluster > 1
        else config.blocks * config.row_warps * config.all_token_tiles * 4 * 512,
        staged_bytes=0 if own else desc.steps * config.step_bytes,
        staged_scale_bytes=0 if own else desc.steps * 32 * config.all_token_tiles,
    )
