"""Which configs of the decode kernel are worth trying for a call. Pure: no GPU, nothing compiled."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import product

from w3pack.errors import UnsupportedError
from w3pack.ops.w3_config import MAX_OWN_TOKENS, TOKEN_TILE, W3Config, W3Desc, make_plan

ROW_WARPS = (1, 2, 3, 4, 6, 8, 12)
SPLIT_WARPS = (1, 2, 3, 4, 6, 8)
TOKEN_WARPS = (1, 2, 4)
TOKEN_TILES = (1, 2, 4)
SLOTS = (2, 3, 4, 6, 8, 12)
RINGS = (4, 8)
#: Resident on a multiprocessor; with 16 nearly every kernel spills.
WARPS = (4, 12)
#: Bytes of weights in flight on a multiprocessor at which the reading ceiling is nearly reached.
_BYTES_IN_FLIGHT = 112 << 10
#: Shared memory that the driver keeps of each resident block.
_RESERVED_BYTES = 1 << 10


def candidates(desc: W3Desc, *, limit: int = 40) -> list[W3Config]:
    """At most `limit` configs that `make_plan` accepts, the likeliest first.

    Configs that divide the work alike (all but slots, blocks and ring depth equal) form a family. The best of each family
    come first, then the second best, so that a wrong guess costs a few places and not the right family.
    """
    families: dict[tuple[object, ...], list[tuple[float, W3Config]]] = defaultdict(list)
    for config in dict.fromkeys(_sound(desc)):
        family = (
            config.token_tiles,
            config.row_warps,
            config.split_warps,
            config.token_warps,
            config.ring > 0,
            config.warpgroups,
        )
        families[family].append((_cost(desc, config), config))
    ranked = [
        (place, cost, config)
        for members in families.values()
        for place, (cost, config) in enumerate(sorted(members, key=lambda member: member[0]))
    ]
    ranked.sort(key=lambda entry: entry[:2])
    return [config for _, _, config in ranked[:limit]]


def _sound(desc: W3Desc) -> Iterator[W3Config]:
    """Everything that fits the call and the device, as far as can be told without a compiler."""
    tiles = next((tiles for tiles in (1, 2, 4, 8) if TOKEN_TILE * tiles >= desc.tokens), 8)
    device = desc.device
    rings = ([0] if desc.tokens <= MAX_OWN_TOKENS else []) + ([*RINGS] if device.bulk else [-1])
    groups = (False, True) if device.arch == "sm_90a" else (False,)
    for token_tiles, row_warps, split_warps, token_warps, ring, warpgroups, slots, min_blocks in product(
        TOKEN_TILES, ROW_WARPS, SPLIT_WARPS, TOKEN_WARPS, rings, groups, SLOTS, (1, 2)
    ):
        warps = row_warps * split_warps * token_warps
        if token_tiles * token_warps != tiles or not WARPS[0] <= warps <= WARPS[1] // min_blocks:
            continue
        if (ring > 0 and split_warps > 1) or (warpgroups and (row_warps % 4 or ring < 0)):
            continue
        for resident in range(1, min_blocks + 1):
            config = W3Config(
                token_tiles=token_tiles,
                row_warps=row_warps,
                split_warps=split_warps,
                token_warps=token_warps,
                slots=slots,
                ring=ring,
                blocks=resident * device.multiprocessors,
                warpgroups=warpgroups,
                min_blocks=min_blocks,
            )
            try:
                plan = make_plan(desc, config)
            except UnsupportedError:
                continue
            if min_blocks * (plan.shared_bytes + _RESERVED_BYTES) <= device.shared_bytes + _RESERVED_BYTES:
                yield plan.config


def _cost(desc: W3Desc, config: W3Config) -> float:
    """How far a config is from what fast ones look like; 0 is best. Only its order matters."""
    multiprocessors = desc.device.multiprocessors
    resident = max(1, min(config.min_blocks, round(config.blocks / multiprocessors)))
    in_flight = resident * config.warps * config.slots * 2 * desc.tile_bytes
    units = -(-desc.row_tiles // config.row_warps) * desc.steps
    longest = -(-units // config.blocks)
    imbalance = longest * config.blocks / units - 1
    idle_warps = max(0, config.row_warps - desc.row_tiles) / config.row_warps
    return (
        abs(math.log2(in_flight / _BYTES_IN_FLIGHT))
        + 0.5 * abs(math.log2(resident * config.warps / 8))
        + 4 * imbalance
        + 4 * idle_warps
    )
