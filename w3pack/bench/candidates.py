"""Which configs of the decode kernel are worth trying for a call. Pure: no GPU, nothing compiled."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from w3pack.errors import UnsupportedError
from w3pack.ops.w3_config import (
    BESIDE_TOKENS,
    FROM_GLOBAL,
    KEPT,
    MAX_OWN_TOKENS,
    OWN,
    STREAMED,
    TOKEN_TILE,
    W3Config,
    W3Desc,
    make_plan,
)

ROW_WARPS = (1, 2, 4, 8)
SPLIT_WARPS = (1, 2, 4, 6, 8)
TOKEN_WARPS = (1, 2, 4, 8)
TOKEN_TILES = (1, 2, 4)
CLUSTERS = (1, 2, 4)
RINGS = (4,)
#: Resident on a multiprocessor; few kernels have registers for more.
WARPS = (4, 16)
#: Bytes in flight on a multiprocessor, with streamed activations: what is tried. At about 100 KB the reading ceiling is near.
IN_FLIGHT = (40 << 10, 64 << 10, 104 << 10)
_BYTES_IN_FLIGHT = 80 << 10
_MOST_SLOTS = 16


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
            config.ring,
            config.warpgroups,
            config.beside,
            config.cluster,
            config.slot_steps,
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
    own = [OWN] if desc.tokens <= MAX_OWN_TOKENS else []
    sides = (True, False) if desc.tokens <= BESIDE_TOKENS and desc.qmap_dtype == "int8" else (False,)
    rings = [*own, KEPT, STREAMED, *RINGS] if device.bulk else [*own, FROM_GLOBAL]
    groups = (False, True) if device.arch == "sm_90a" else (False,)
    for token_tiles, row_warps, split_warps, token_warps, ring, warpgroups, beside in product(
        TOKEN_TILES, ROW_WARPS, SPLIT_WARPS, TOKEN_WARPS, rings, groups, sides
    ):
        warps = row_warps * split_warps * token_warps
        if token_tiles * token_warps != tiles or not WARPS[0] <= warps <= WARPS[1]:
            continue
        if (ring > 0 and split_warps > 1) or (warpgroups and (row_warps % 4 or ring == FROM_GLOBAL)):
            continue
        config = W3Config(
            token_tiles=token_tiles,
            row_warps=row_warps,
            split_warps=split_warps,
            token_warps=token_warps,
            slots=2,
            ring=ring,
            blocks=device.multiprocessors,
            warpgroups=warpgroups,
            beside=beside,
            depth=1 if warpgroups and warps > 8 else 2,  # with two in flight twelve warps run out of registers
        )
        clusters = CLUSTERS if device.bulk else (1,)
        for candidate in (
            division for cluster in clusters for division in _divisions(desc, replace(config, cluster=cluster))
        ):
            try:
                plan = make_plan(desc, candidate)
            except UnsupportedError:
                continue
            yield plan.config  # a small matrix gets fewer blocks


def _divisions(desc: W3Desc, config: W3Config) -> Iterator[W3Config]:
    """The config with other slots and numbers of blocks."""
    slot_steps = 1 if desc.device.bulk else config.split_warps
    for blocks in _blocks(desc, config):
        step_bytes = 2 * desc.tile_bytes * config.row_warps * (1 if desc.device.bulk else config.token_warps)
        if config.ring == STREAMED:
            step_bytes += config.step_bytes
        groups = config.split_warps // slot_steps  # each slot stays with one group of split warps
        least, most = -(-2 // groups), max(1, _MOST_SLOTS // groups)
        for rounds in dict.fromkeys(round(bytes_ / (step_bytes * slot_steps * groups)) for bytes_ in IN_FLIGHT):
            slots = groups * min(max(rounds, least), max(most, least))
            yield replace(config, slots=slots, slot_steps=slot_steps, blocks=blocks)


def _blocks(desc: W3Desc, config: W3Config) -> list[int]:
    """One block for each multiprocessor; and the most that cut every row block at the same places, unless many stay idle."""
    every = desc.device.multiprocessors
    if config.cluster > 1:
        return [every // config.cluster * config.cluster]
    units = -(-desc.row_tiles // config.row_warps) * desc.steps
    aligned = next((blocks for blocks in range(every, every * 9 // 10, -1) if units % blocks == 0), every)
    return [every] if aligned == every else [every, aligned]


def _cost(desc: W3Desc, config: W3Config) -> float:
    """How far a config is from what fast ones look like; 0 is best. Only its order matters."""
    in_flight = config.row_warps * config.slot_steps * config.slots * 2 * desc.tile_bytes
    units = -(-desc.row_tiles // config.row_warps) * desc.steps
    longest = -(-units // config.blocks)
    if config.cluster > 1:
        row_blocks, clusters = -(-desc.row_tiles // config.row_warps), config.blocks // config.cluster
        longest = -(-row_blocks // clusters) * -(-desc.steps // config.cluster)
    imbalance = longest * config.blocks / units - 1 + (desc.device.multiprocessors / config.blocks - 1)
    idle_warps = max(0, config.row_warps - desc.row_tiles) / config.row_warps
    # sums that blocks hand to each other, as a share of the weights' bytes
    sums = (config.cluster == 1) * (
        config.blocks * config.row_warps * 64 * desc.tokens * 4 / (desc.row_tiles * desc.column_tiles * desc.tile_bytes)
    )
    return (
        0.5 * abs(math.log2(in_flight / _BYTES_IN_FLIGHT))
        + 0.5 * abs(math.log2(config.warps / 8))
        + 4 * imbalance
        + 4 * idle_warps
        + 4 * sums
    )
