"""Every kernel that is to be built and looked at for an architecture, though no such device is here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from w3pack.errors import UnsupportedError
from w3pack.format.layout import LAYOUTS
from w3pack.format.linear import QMAP_DTYPES, LinearSpec
from w3pack.jit import ARCHS, KernelText
from w3pack.ops.gateup_kernels import gateup_texts
from w3pack.ops.w3_config import OWN, DeviceLimits, W3Config, W3Desc, XDtype, decode_text, make_plan, stage_text
from w3pack.ops.w3_decide import BUCKETS, ladder, width_of
from w3pack.ops.w3_dense import dequantize_text
from w3pack.ops.w3_prefill import ARCH, DIVISIONS, TOKEN_TILES, config_of, prefill_text
from w3pack.ops.w3_table import Table, read_table

#: The device of each architecture that a rule of thumb is computed for: multiprocessors, shared bytes of a block.
DEVICES = {
    "sm_80": DeviceLimits("sm_80", 108, 163 << 10),
    "sm_86": DeviceLimits("sm_86", 84, 99 << 10),
    "sm_89": DeviceLimits("sm_89", 128, 99 << 10),
    "sm_90a": DeviceLimits("sm_90a", 132, 227 << 10),
    "sm_100a": DeviceLimits("sm_100a", 148, 227 << 10),
    "sm_120a": DeviceLimits("sm_120a", 170, 99 << 10),
}
#: Architectures with instructions between E4M3 and float16.
CONVERTS_E4M3 = frozenset({"sm_89", "sm_90a", "sm_100a", "sm_120a"})
#: Tables measured on a device of this architecture.
TABLES_ARCH = "sm_90a"
_X_DTYPES: tuple[XDtype, ...] = get_args(XDtype)
#: Columns and group size of a small Linear: whole steps of one scale; steps of two; the last one half a step.
_SCALINGS = ((256, 128), (256, 64), (192, 64))
#: Forms that stand for all in configs with a number of slots that is seldom chosen.
_EVERYWHERE = {("dense", "int8"), ("nibble", "float16")}


def all_kernel_texts(arch: str) -> list[KernelText]:
    """Kernels that calls on a device of `arch` can need, each once.

    Every config is there in both layouts, map dtypes and for both x dtypes where these are usual; the rare forms (a map for
    each row, groups of 64) only for the config that each number of tokens prefers.

    Raises:
        UnsupportedError: an architecture that is not built for.
    """
    if arch not in ARCHS:
        raise UnsupportedError(f"expected an architecture out of {', '.join(ARCHS)}, got {arch!r}; name one of them")
    texts = itertools.chain(
        _chosen(DEVICES[arch]),
        _measured(DEVICES[arch]),
        _staging(DEVICES[arch]),
        _others(DEVICES[arch]),
        _prefilling(DEVICES[arch]),
        gateup_texts(DEVICES[arch], fp8=arch in CONVERTS_E4M3),
    )
    return list(dict.fromkeys(texts))


def _desc(
    device: DeviceLimits, tokens: int, form: tuple[str, str], scaling: int, row_maps: bool, x_dtype: XDtype
) -> W3Desc:
    columns, group_size = _SCALINGS[scaling]
    return W3Desc(
        tokens=tokens,
        rows=64,
        columns=columns,
        group_size=group_size,
        layout="dense" if form[0] == "dense" else "nibble",
        qmap_dtype="int8" if form[1] == "int8" else "float16",
        map_kind="row" if row_maps else "linear",
        x_dtype=x_dtype,
        device=device,
    )


def _ladders(
    device: DeviceLimits, form: tuple[str, str], scaling: int, row_maps: bool
) -> Iterator[tuple[int, W3Config]]:
    """(bucket, config): what the rule of thumb can choose, the preferred one of each bucket first."""
    for bucket in BUCKETS:
        width = width_of(_desc(device, bucket, form, scaling, row_maps, "bfloat16"))
        for config in ladder(bucket, device, first_row_warps=1, width=width):
            yield bucket, config


def _chosen(device: DeviceLimits) -> Iterator[KernelText]:
    rare: tuple[tuple[int, bool, XDtype], ...] = (
        (0, False, "float16"),
        (0, True, "bfloat16"),
        (1, False, "bfloat16"),
        (2, False, "float16"),
        (2, True, "bfloat16"),
    )
    for form in itertools.product(LAYOUTS, QMAP_DTYPES):
        for bucket, config in _ladders(device, form, 0, False):
            desc = _desc(device, bucket, form, 0, False, "bfloat16")
            if (form in _EVERYWHERE or config.slots % 3) and _fits(desc, config):
                yield decode_text(desc, config)
        for scaling, row_maps, x_dtype in rare:
            preferred: dict[int, W3Config] = {}
            for bucket, config in _ladders(device, form, scaling, row_maps):
                desc = _desc(device, bucket, form, scaling, row_maps, x_dtype)
                if _fits(desc, config) and preferred.setdefault(bucket, config) == config:
                    yield decode_text(desc, config)


def _fits(desc: W3Desc, config: W3Config) -> bool:
    try:
        make_plan(desc, config)
    except UnsupportedError:
        return False
    return True


def _measured(device: DeviceLimits) -> Iterator[KernelText]:
    for table in _tables() if device.arch == TABLES_ARCH else ():
        for entry in table.entries:
            for x_dtype in _X_DTYPES if entry.x_dtype is None else (entry.x_dtype,):
                desc = _desc(
                    device,
                    entry.tokens,
                    (entry.layout, entry.qmap_dtype),
                    entry.scale_sets - 1,
                    entry.map_kind == "row",
                    x_dtype,
                )
                yield decode_text(desc, entry.config)
                if entry.config.ring != OWN:
                    yield stage_text(desc, entry.config)


def _tables() -> Iterator[Table]:
    for path in sorted((Path(__file__).parent / "tables").glob("*.json")):
        yield read_table(path)


def _staging(device: DeviceLimits) -> Iterator[KernelText]:
    everything = itertools.product(LAYOUTS, QMAP_DTYPES, range(len(_SCALINGS)), (False, True), _X_DTYPES)
    for layout, qmap_dtype, scaling, row_maps, x_dtype in everything:
        form = (layout, qmap_dtype)
        for bucket, config in _ladders(device, form, scaling, row_maps):
            if config.ring != OWN:
                yield stage_text(_desc(device, bucket, form, scaling, row_maps, x_dtype), config)


def _others(device: DeviceLimits) -> Iterator[KernelText]:
    for layout, qmap_dtype, maps, x_dtype in itertools.product(LAYOUTS, QMAP_DTYPES, (1, 64), _X_DTYPES):
        spec = LinearSpec(
            rows=64, columns=64, group_size=64, layout=layout, maps=maps, qmap_dtype=qmap_dtype, bias=False
        )
        yield dequantize_text(spec, x_dtype)
    if device.bulk:
        yield KernelText("read_ceiling.cu", "read_ceiling", (("READ_PIECE_BYTES", 16384), ("READ_PIECES", 6)))


def _prefilling(device: DeviceLimits) -> Iterator[KernelText]:
    """Every tile of the usual form, and every form of the widest tile, which has the fewest registers to spare."""
    if device.arch != ARCH:
        return
    everything = itertools.product(LAYOUTS, QMAP_DTYPES, (False, True), _X_DTYPES, DIVISIONS)
    for layout, qmap_dtype, row_maps, x_dtype, (tokens, cluster, split) in everything:
        usual = (layout, qmap_dtype) in _EVERYWHERE and not row_maps
        widest = tokens == TOKEN_TILES[-1] and cluster == 2
        if (usual and x_dtype == "float16") or widest:
            desc = _desc(device, tokens, (layout, qmap_dtype), 0, row_maps, x_dtype)
            config = config_of(desc, tokens=tokens, cluster=cluster, split=split)
            yield prefill_text(config, layout=layout, qmap_dtype=qmap_dtype, map_kind=desc.map_kind, x_dtype=x_dtype)
