"""Many tokens without a dequantised matrix: which tiles a call of the prefill kernel takes. Pure functions, no GPU.

    plan = prefill_plan(desc)      # the config that a rule of thumb prefers, with its kernel, grid and shared memory

The kernel is kernels/w3_prefill.cu. It needs sm_90a. Whether the operator uses it, a table of measured choices says.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from w3pack.errors import UnsupportedError
from w3pack.format.layout import TILE
from w3pack.jit import KernelText
from w3pack.ops.w3_config import MapKind, W3Desc, XDtype
from w3pack.ops.w3_table import Table

ARCH = "sm_90a"
#: Tokens of a block tile for which there are matrix instructions.
TOKEN_TILES = tuple(range(64, 257, 32))
CLUSTERS = (1, 2)
#: Warpgroups of a thread block that multiply; each takes a row tile.
GROUPS = 2
_THREADS = 128 * (GROUPS + 1)
_MAX_SLOTS, _MIN_SLOTS = 8, 3
#: Of the kernel: the scales of a row tile in a slot, two buffers of 32 tokens x 64 rows for each warpgroup.
_SCALE_BYTES = 128
_OUT_BYTES = GROUPS * 2 * 32 * 128
#: Narrower matrices are not worth a kernel, nor a question whether boxes may be wider than they.
_MIN_COLUMNS = 64
#: Blocks count tiles, and tensor maps coordinates, in 32 bits.
_COUNTABLE = 1 << 30

# What a multiprocessor needs for a step of 64 columns, in cycles, so that configs can be compared; guessed, not measured.
_CYCLES_PER_TOKEN = 4  # of the tensor cores, for 128 rows
_CYCLES_BESIDE = 80  # where they wait, in every step
_DECODE_CYCLES = 400
_L2_BYTES_PER_CYCLE = 24  # for each multiprocessor, when all ask
_MOST_L2_BYTES_PER_CYCLE = 64
_TILE_CYCLES, _TILE_CYCLES_PER_TOKEN = 2000, 16  # beginning a tile, and writing it


@dataclass(frozen=True)
class PrefillConfig:
    """How the kernel divides its work.

    Attributes:
        tokens: of a block tile of 128 rows.
        slots: steps of 64 columns in flight.
        cluster: blocks that take the same tokens and fetch them together.
    """

    tokens: int
    slots: int
    cluster: int


@dataclass(frozen=True)
class PrefillPlan:
    """What to launch."""

    desc: W3Desc
    config: PrefillConfig
    text: KernelText
    grid: int
    block: int
    shared_bytes: int
    steps: int
    token_tiles: int
    tiles: int


def takes(desc: W3Desc) -> bool:
    """Whether there is a kernel for a call of this form on this device."""
    counts = desc.row_tiles * -(-desc.tokens // TOKEN_TILES[0]), desc.tokens + TOKEN_TILES[-1], 2 * desc.columns
    return desc.device.arch == ARCH and desc.columns >= _MIN_COLUMNS and max(counts) < _COUNTABLE


def mainloop_tokens(desc: W3Desc, table: Table | None) -> range:
    """Numbers of tokens for which the kernel was measured to be faster than what the operator does without it.

    Only for exactly this shape, and empty where nothing was measured.
    """
    for rows, columns, first, last in table.mainloop_tokens if table else ():
        if (rows, columns) == (desc.rows, desc.columns) and takes(desc):
            return range(first, last + 1)
    return range(0)


def prefill_text(
    config: PrefillConfig, *, layout: str, qmap_dtype: str, map_kind: MapKind, x_dtype: XDtype
) -> KernelText:
    """The kernel of a config for a form."""
    return KernelText(
        file="w3_prefill.cu",
        entry="w3_prefill",
        defines=(
            ("W3_BF16", int(x_dtype == "bfloat16")),
            ("W3_DENSE", int(layout == "dense")),
            ("W3_INT8_MAP", int(qmap_dtype == "int8")),
            ("W3_ROW_MAPS", int(map_kind == "row")),
            ("W3_TOKENS", config.tokens),
            ("W3_SLOTS", config.slots),
            ("W3_CLUSTER", config.cluster),
        ),
    )


def shared_bytes(desc: W3Desc, config: PrefillConfig) -> int:
    """Shared memory of a thread block (kernels/w3_prefill_params.cuh, SharedMap)."""
    slot = config.tokens * 2 * TILE + GROUPS * (desc.tile_bytes + _SCALE_BYTES)
    return config.slots * (slot + 16) + _OUT_BYTES


def config_of(desc: W3Desc, *, tokens: int, cluster: int) -> PrefillConfig:
    """The config with as many slots as fit the device's shared memory.

    Raises:
        UnsupportedError: too little of it.
    """
    for slots in range(_MAX_SLOTS, _MIN_SLOTS - 1, -1):
        config = PrefillConfig(tokens=tokens, slots=slots, cluster=cluster)
        if shared_bytes(desc, config) <= desc.device.shared_bytes:
            return config
    raise UnsupportedError(
        f"expected shared memory for {_MIN_SLOTS} steps of {tokens} tokens, got {desc.device.shared_bytes} bytes; "
        "dequantise the matrix"
    )


def make_plan(desc: W3Desc, config: PrefillConfig) -> PrefillPlan:
    """The launch of a config.

    Raises:
        UnsupportedError: no kernel for the call or the config, or too little shared memory.
    """
    if not takes(desc):
        raise UnsupportedError(
            f"expected a matrix with at least {_MIN_COLUMNS} columns on {ARCH}, got {desc.rows} x {desc.columns} with "
            f"{desc.tokens} tokens on {desc.device.arch}; dequantise it"
        )
    sound = config.tokens in TOKEN_TILES and config.cluster in CLUSTERS and config.slots >= _MIN_SLOTS
    needed = shared_bytes(desc, config)
    if not sound or needed > desc.device.shared_bytes:
        raise UnsupportedError(
            f"expected a config that there is a kernel for, with {desc.device.shared_bytes} bytes of shared memory, "
            f"got {config}; choose another"
        )
    token_tiles, tiles = _tiles(desc, config)
    return PrefillPlan(
        desc=desc,
        config=config,
        text=prefill_text(
            config, layout=desc.layout, qmap_dtype=desc.qmap_dtype, map_kind=desc.map_kind, x_dtype=desc.x_dtype
        ),
        grid=config.cluster * min(tiles, desc.device.multiprocessors // config.cluster),
        block=_THREADS,
        shared_bytes=needed,
        steps=-(-desc.columns // TILE),
        token_tiles=token_tiles,
        tiles=tiles,
    )


@functools.lru_cache(maxsize=4096)
def prefill_plan(desc: W3Desc) -> PrefillPlan:
    """The plan of the config that should take the fewest cycles; raises as `make_plan`."""
    return make_plan(desc, min(configs(desc), key=lambda config: cycles(desc, config)))


def configs(desc: W3Desc) -> Iterator[PrefillConfig]:
    """Every config for a call, larger tiles first; of two that are alike, the first is to be preferred."""
    for cluster in reversed(CLUSTERS):
        for tokens in reversed(TOKEN_TILES):
            yield config_of(desc, tokens=tokens, cluster=cluster)


def cycles(desc: W3Desc, config: PrefillConfig) -> float:
    """What a call takes, roughly: rounds of tiles, each as long as its steps."""
    _, tiles = _tiles(desc, config)
    places = max(1, desc.device.multiprocessors // config.cluster)
    busy = min(tiles, places) * config.cluster / desc.device.multiprocessors
    bytes_per_step = config.tokens * 2 * TILE // config.cluster + GROUPS * (desc.tile_bytes + _SCALE_BYTES)
    l2_cycles = bytes_per_step / min(_MOST_L2_BYTES_PER_CYCLE, _L2_BYTES_PER_CYCLE / busy)
    step = max(_CYCLES_PER_TOKEN * config.tokens + _CYCLES_BESIDE, _DECODE_CYCLES, l2_cycles)
    tile = -(-desc.columns // TILE) * step + _TILE_CYCLES + _TILE_CYCLES_PER_TOKEN * config.tokens
    return -(-tiles // places) * tile


def _tiles(desc: W3Desc, config: PrefillConfig) -> tuple[int, int]:
    """Token tiles, and tiles of a cluster in all."""
    token_tiles = -(-desc.tokens // config.tokens)
    return token_tiles, token_tiles * -(-desc.row_tiles // (GROUPS * config.cluster))
