"""Many tokens without a dequantised matrix: which tiles a call of the prefill kernel takes. Pure functions, no GPU.

    plan = prefill_plan(desc)      # the config that a rule of thumb prefers, with its kernel, grid and shared memory

The kernel is kernels/w3_prefill.cu. It needs sm_90a. Whether the operator uses it, a table of measured choices says.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from w3pack.errors import UnsupportedError
from w3pack.format.layout import TILE
from w3pack.jit import KernelText
from w3pack.ops.w3_config import MapKind, W3Desc, XDtype
from w3pack.ops.w3_table import Table

ARCH = "sm_90a"
#: Tokens of a block tile for which there are matrix instructions.
TOKEN_TILES = tuple(range(64, 257, 32))
CLUSTERS = (1, 2)
#: Warpgroups of a thread block that multiply: each takes a row tile, or both the same one.
GROUPS = 2
_THREADS = 128 * (GROUPS + 1)
_MAX_SLOTS = 8
#: Of the kernel: the scales of a row tile in a slot, two buffers of 32 tokens x 64 rows for each warpgroup.
_SCALE_BYTES = 128
_OUT_BYTES = GROUPS * 2 * 32 * 128
#: Narrower matrices are not worth a kernel, nor a question whether boxes may be wider than they.
_MIN_COLUMNS = 64
#: Blocks count tiles, and tensor maps coordinates, in 32 bits.
_COUNTABLE = 1 << 30

# What a multiprocessor needs for a step of 64 columns, in cycles, so that configs can be compared. The first two are a line through times
# of 8192 x 8192 with 2048 tokens on an H200 (0.51, 0.64, 0.79 us a step of 128, 192, 256 tokens at 1755 MHz); the others are guesses.
_CYCLES_PER_TOKEN = 4  # of the tensor cores, for 128 rows
_CYCLES_BESIDE = 400  # that decoding takes, of which hardly anything lies under the products
_SPLIT_FACTOR = 1.15  # shared rows: twice the activations come into shared memory (1.08 to 1.24, by the shape)
_L2_BYTES_PER_CYCLE = 28  # for each multiprocessor, when all ask
_MOST_L2_BYTES_PER_CYCLE = 64
_TILE_CYCLES, _TILE_CYCLES_PER_TOKEN = 2000, 16  # beginning a tile, and writing it


@dataclass(frozen=True)
class PrefillConfig:
    """How the kernel divides its work.

    Attributes:
        tokens: of a block tile.
        slots: steps of 64 columns in flight.
        cluster: blocks that take the same tokens and fetch them together.
        split: a block tile has 64 rows instead of 128; the warpgroups take its steps in turn.
    """

    tokens: int
    slots: int
    cluster: int
    split: bool = False

    @property
    def row_tiles(self) -> int:
        """Row tiles of a block tile."""
        return 1 if self.split else GROUPS

    @property
    def fewest_slots(self) -> int:
        """What warpgroups have in hand before they leave one."""
        return 5 if self.split else 3

    @property
    def sound(self) -> bool:
        """Whether there is a kernel."""
        return (
            self.tokens in TOKEN_TILES
            and self.cluster in CLUSTERS
            and (not self.split or self.tokens % 64 == 0)
            and self.slots >= self.fewest_slots
        )


#: Tokens, cluster and split of every kernel, larger tiles first.
DIVISIONS = tuple(
    (tokens, cluster, split)
    for split, cluster, tokens in product((False, True), reversed(CLUSTERS), reversed(TOKEN_TILES))
    if PrefillConfig(tokens=tokens, slots=_MAX_SLOTS, cluster=cluster, split=split).sound
)


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
            ("W3_SPLIT", int(config.split)),
        ),
    )


def shared_bytes(desc: W3Desc, config: PrefillConfig) -> int:
    """Shared memory of a thread block (kernels/w3_prefill_params.cuh, SharedMap)."""
    slot = config.tokens * 2 * TILE + config.row_tiles * (desc.tile_bytes + _SCALE_BYTES)
    return config.slots * (slot + 16) + _OUT_BYTES


def config_of(desc: W3Desc, *, tokens: int, cluster: int, split: bool = False) -> PrefillConfig:
    """The config with as many slots as fit the device's shared memory.

    Raises:
        UnsupportedError: too little of it.
    """
    config = PrefillConfig(tokens=tokens, slots=_MAX_SLOTS, cluster=cluster, split=split)
    while config.slots >= config.fewest_slots:
        if shared_bytes(desc, config) <= desc.device.shared_bytes:
            return config
        config = replace(config, slots=config.slots - 1)
    raise UnsupportedError(
        f"expected shared memory for {config.fewest_slots} steps of {tokens} tokens, got {desc.device.shared_bytes} "
        "bytes; dequantise the matrix"
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
    steps = -(-desc.columns // TILE)
    needed = shared_bytes(desc, config)
    sound = config.sound and (not config.split or steps >= GROUPS)
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
        steps=steps,
        token_tiles=token_tiles,
        tiles=tiles,
    )


@functools.lru_cache(maxsize=4096)
def prefill_plan(desc: W3Desc) -> PrefillPlan:
    """The plan of the config that should take the fewest cycles; raises as `make_plan`."""
    return make_plan(desc, min(configs(desc), key=lambda config: cycles(desc, config)))


def configs(desc: W3Desc) -> Iterator[PrefillConfig]:
    """Every config for a call, larger tiles first; of two that are alike, the first is to be preferred."""
    for tokens, cluster, split in DIVISIONS:
        if not (split and desc.columns <= TILE):
            yield config_of(desc, tokens=tokens, cluster=cluster, split=split)


def cycles(desc: W3Desc, config: PrefillConfig) -> float:
    """What a call takes, roughly: rounds of tiles, each as long as its steps."""
    _, tiles = _tiles(desc, config)
    places = max(1, desc.device.multiprocessors // config.cluster)
    busy = min(tiles, places) * config.cluster / desc.device.multiprocessors
    slots = GROUPS // config.row_tiles  # that the warpgroups work on side by side
    bytes_at_once = config.tokens * 2 * TILE * slots // config.cluster + GROUPS * (desc.tile_bytes + _SCALE_BYTES)
    l2_cycles = bytes_at_once / min(_MOST_L2_BYTES_PER_CYCLE, _L2_BYTES_PER_CYCLE / busy)
    step = max((_CYCLES_PER_TOKEN * config.tokens + _CYCLES_BESIDE) * (_SPLIT_FACTOR if config.split else 1), l2_cycles)
    steps = -(-desc.columns // (TILE * slots))
    tile = steps * step + _TILE_CYCLES + slots * _TILE_CYCLES_PER_TOKEN * config.tokens
    return -(-tiles // places) * tile


def _tiles(desc: W3Desc, config: PrefillConfig) -> tuple[int, int]:
    """Token tiles, and tiles of a cluster in all."""
    token_tiles = -(-desc.tokens // config.tokens)
    return token_tiles, token_tiles * -(-desc.row_tiles // (config.row_tiles * config.cluster))
