"""Which config a call gets: the nearest measured one that fits, else a rule of thumb. Pure functions, no GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from w3pack.errors import UnsupportedError
from w3pack.ops.w3_config import (
    FROM_GLOBAL,
    KEPT,
    MAX_OWN_TOKENS,
    MAX_TOKENS,
    OWN,
    DeviceLimits,
    W3Config,
    W3Desc,
    W3Plan,
    countable,
    make_plan,
)
from w3pack.ops.w3_table import Table

#: Decode kernels are chosen for these numbers of tokens; a call gets the next one up.
BUCKETS = (8, 16, 32, 64)
#: A measured shape stands for others up to this factor away, rows and columns together.
_FAR = math.log(16)
#: Weights up to which a row block is one, or four, row tiles: smaller matrices need more runs to fill the device.
_ONE_ROW_TILE = 17 << 20
_FOUR_ROW_TILES = 100 << 20
#: Tokens up to which decode kernels in portions of 64 beat dequantising, where nothing was measured.
_DECODE_UP_TO = 128
_SLOTS = (4, 3, 2)
_RING = 4
_WARPGROUP_ARCH = "sm_90a"


def bucket_of(tokens: int) -> int:
    """The bucket of a call of 1..64 tokens."""
    return next(bucket for bucket in BUCKETS if tokens <= bucket)


def plan_of(desc: W3Desc, table: Table | None = None) -> W3Plan:
    """The plan of the best config that fits the call and the device.

    Raises:
        UnsupportedError: more than 64 tokens, or a matrix too large for the kernels' arithmetic; see `dense_from`.
    """
    if not 1 <= desc.tokens <= MAX_TOKENS:
        raise UnsupportedError(f"expected 1 to {MAX_TOKENS} tokens, got {desc.tokens}; decode in portions")
    for config in (*measured(desc, table), *heuristic(desc)):
        if not countable(desc, config) or (config.warpgroups and desc.device.arch != _WARPGROUP_ARCH):
            continue
        streamed = config.ring not in (OWN, FROM_GLOBAL)
        if (streamed and not desc.device.bulk) or (config.ring == OWN and desc.tokens > MAX_OWN_TOKENS):
            continue
        try:
            return make_plan(desc, config)
        except UnsupportedError:
            continue
    raise UnsupportedError(
        f"expected a matrix that a decode kernel can count through, got {desc.rows} x {desc.columns} "
        f"with groups of {desc.group_size} on {desc.device.arch}; dequantise it"
    )


def decide(desc: W3Desc, table: Table | None = None) -> W3Config:
    """The config of `plan_of`, with no more thread blocks than there is work; raises as it does."""
    return plan_of(desc, table).config


def dense_from(desc: W3Desc, table: Table | None = None) -> int:
    """Tokens from which a call dequantises and multiplies with torch; 1 for a matrix that no decode kernel takes."""
    if not any(countable(desc, config) for config in heuristic(replace(desc, tokens=MAX_TOKENS))):
        return 1
    measured_at = [
        (distance, tokens)
        for rows, columns, tokens in (table.prefill_from if table else ())
        if (distance := _distance(desc, rows, columns)) <= _FAR
    ]
    return min(measured_at)[1] if measured_at else _DECODE_UP_TO + 1


def measured(desc: W3Desc, table: Table | None) -> list[W3Config]:
    """Configs of the table's entries of the same form and bucket, the nearest shape first."""
    bucket, kind = bucket_of(desc.tokens), desc.map_kind == "row"
    near = [
        (distance, abs(entry.tokens - desc.tokens), index)
        for index, entry in enumerate(table.entries if table else ())
        if entry.layout == desc.layout
        and entry.qmap_dtype == desc.qmap_dtype
        and (entry.map_kind == "row") == kind  # a map for each tile and one for all are the same kernel
        and entry.scale_sets == desc.scale_sets
        and entry.x_dtype in (None, desc.x_dtype)
        and bucket_of(entry.tokens) == bucket
        and (distance := _distance(desc, entry.rows, entry.columns)) <= _FAR
    ]
    return [] if table is None else [_scaled(table.entries[index].config, table, desc) for _, _, index in sorted(near)]


def _scaled(config: W3Config, table: Table, desc: W3Desc) -> W3Config:
    """A config measured on a device with another number of multiprocessors: as many blocks for each of them.

    Fewer blocks than multiprocessors are all that the work allowed, and stay as many on a smaller device.
    """
    here, there = desc.device.multiprocessors, table.multiprocessors
    if there in (0, here):
        return config
    blocks = config.blocks * here // there if here > there else min(config.blocks, -(-config.blocks // there) * here)
    return replace(config, blocks=max(1, blocks))


def heuristic(desc: W3Desc) -> Iterator[W3Config]:
    """Configs without measurement, the preferred one first; one of the last always fits."""
    weights = 64 * 64 * desc.row_tiles * desc.column_tiles
    first = 1 if weights <= _ONE_ROW_TILE else 4 if weights <= _FOUR_ROW_TILES else 8
    return ladder(bucket_of(desc.tokens), desc.device, first_row_warps=first, width=width_of(desc))


def width_of(desc: W3Desc) -> int:
    """Token tiles for which a warp finds registers in this form on this device: 1, 2 or, by warpgroups, 4."""
    row_maps, two_scales = desc.map_kind == "row", desc.scale_sets == 2
    newer = desc.device.bulk and desc.device.arch != _WARPGROUP_ARCH
    if newer or (two_scales and (row_maps or not desc.device.bulk)):
        return 1
    plain = desc.layout == "dense" and desc.qmap_dtype == "int8" and not row_maps and not two_scales
    return 4 if plain and desc.device.arch == _WARPGROUP_ARCH else 2


def ladder(bucket: int, device: DeviceLimits, *, first_row_warps: int, width: int) -> Iterator[W3Config]:
    """Eight warps always. Step by step fewer slots, more row tiles together, and last activations from global memory."""

    def configs(token_tiles: int, row_warps: int, ring: int) -> Iterator[W3Config]:
        token_warps = bucket // 8 // token_tiles
        for slots in _SLOTS:
            yield W3Config(
                token_tiles=token_tiles,
                row_warps=row_warps,
                split_warps=8 // (row_warps * token_warps),
                token_warps=token_warps,
                # where a row tile's token warps share its words, a slot is smaller
                slots=slots * token_warps if device.bulk else slots,
                ring=ring,
                blocks=device.multiprocessors,
                slot_steps=8 // (row_warps * token_warps),
                warpgroups=token_tiles == 4,
            )

    narrow = min(width, 2, bucket // 8)
    most_row_warps = 64 // bucket * narrow
    if bucket <= MAX_OWN_TOKENS:
        for row_warps in (1, 4, 8):
            if min(first_row_warps, most_row_warps) <= row_warps <= most_row_warps:
                if device.bulk and bucket > 8:  # the more tokens, the more every block would stage anew
                    yield from configs(narrow, row_warps, KEPT)
                yield from configs(narrow, row_warps, OWN)
        yield from configs(1, 64 // bucket, FROM_GLOBAL)
        return
    if width == 4:
        yield from configs(4, 256 // bucket, _RING)
    if device.bulk:
        yield from configs(narrow, most_row_warps, _RING)
    yield from configs(narrow, most_row_warps, FROM_GLOBAL)


def _distance(desc: W3Desc, rows: int, columns: int) -> float:
    return abs(math.log(desc.rows / rows)) + abs(math.log(desc.columns / columns))
