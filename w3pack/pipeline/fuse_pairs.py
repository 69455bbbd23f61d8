"""Gate/up pairs in a checkpoint, found by the names of tensors and judged by their headers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from w3pack.checkpoint.source import Source, TensorInfo
from w3pack.errors import CheckpointError, UnsupportedError
from w3pack.format import names
from w3pack.format.gateup import (
    FUSED_LEAF,
    INTERLEAVED,
    PAIR_NAMES,
    SCALES,
    WEIGHT,
    Fp8Spec,
    GateUpSpec,
)
from w3pack.pipeline.fp8_source import ACTIVATION_SCALES, check_grid
from w3pack.pipeline.selection import FP8, in_decoder, module_of

_FLOATS = ("F32", "F16", "BF16")
_SCALES = ("F32", "F16", "BF16", "F8_E8M0", "U8")
_SKIP_KEYS = ("modules_to_not_convert", "ignored_layers", "ignore")


@dataclass(frozen=True)
class Half:
    """Gate or up: an FP8 weight with its scales, or a float weight (`scales` None) that is to be quantised."""

    weight: TensorInfo
    scales: TensorInfo | None

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """Weight and scales."""
        return (self.weight,) if self.scales is None else (self.weight, self.scales)


@dataclass(frozen=True)
class Pair:
    """Two halves that become one."""

    spec: GateUpSpec
    gate: Half
    up: Half

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """All tensors of both halves."""
        return (*self.gate.tensors, *self.up.tensors)

    @property
    def quantized(self) -> bool:
        """Whether it is quantised on the way."""
        return self.gate.scales is None

    @property
    def source_bytes(self) -> int:
        """Bytes of all tensors of both halves."""
        return sum(info.nbytes for info in self.tensors)

    @property
    def float_bytes(self) -> int:
        """Memory for quantising one half; 0 for a pair that is FP8 already."""
        return 8 * math.prod(self.gate.weight.shape) if self.quantized else 0


@dataclass(frozen=True)
class Found:
    """Pairs to fuse by the name of the fused module; those that are not, with the reason; those fused already."""

    pairs: Mapping[str, Pair]
    declined: Mapping[str, str]
    fused_already: tuple[str, ...]


def find_pairs(source: Source, *, block: tuple[int, int] | None, quantize: bool) -> Found:
    """Judge every gate/up pair of a checkpoint.

    Args:
        source: the checkpoint.
        block: its FP8 block size; None for a checkpoint of floats.
        quantize: whether float pairs are to be quantised.

    Raises:
        CheckpointError: an FP8 half without scales, or with scales of the wrong shape or dtype.
    """
    pairs: dict[str, Pair] = {}
    declined: dict[str, str] = {}
    fused_already: list[str] = []
    types, skips = _model_types(source.config), _skip_list(source.config)
    for info in source.tensors.values():
        module, leaf = _module_and_leaf(info.name)
        if leaf == FUSED_LEAF and _is_weight(info):
            if types & INTERLEAVED:
                declined[module] = "gate and up in turns (interleaved), not one after the other"
            else:
                fused_already.append(module)
            continue
        pair_names = next((pair for pair in PAIR_NAMES if leaf in pair), None)
        if pair_names is None or not info.name.endswith(f".{WEIGHT}"):
            continue
        parent = module.removesuffix(leaf)
        fused = f"{parent}{FUSED_LEAF}"
        gate, up = f"{parent}{pair_names[0]}", f"{parent}{pair_names[1]}"
        if fused in pairs or fused in declined:
            continue
        meant = PAIR_NAMES[pair_names]
        if meant is not None and not types & meant:
            if f"{parent}{'w2'}.{WEIGHT}" in source.tensors:  # other things are called w1, too
                declined[fused] = (
                    f"{' and '.join(pair_names)}: which of them is the gate is not known for this model_type"
                )
            continue
        if names.tensor(fused, WEIGHT) in source.tensors or fused in source.tensors:
            declined[fused] = f"the checkpoint has a {FUSED_LEAF} there beside {pair_names[0]} and {pair_names[1]}"
            continue
        result = _judge(source, gate=gate, up=up, block=block, quantize=quantize, skips=skips)
        if isinstance(result, str):
            declined[fused] = result
        else:
            pairs[fused] = result
    return Found(pairs=pairs, declined=declined, fused_already=tuple(fused_already))


def _judge(
    source: Source, *, gate: str, up: str, block: tuple[int, int] | None, quantize: bool, skips: list[str]
) -> Pair | str:
    """The pair of the modules `gate` and `up`, or why they are left alone."""
    leaves = (gate.rpartition(".")[2], up.rpartition(".")[2])
    weights = [source.tensors.get(names.tensor(module, WEIGHT)) for module in (gate, up)]
    first, second = weights
    if first is None or second is None:
        return f"no {leaves[0] if first is None else leaves[1]} beside it"
    if not in_decoder(first.name):
        return "outside the decoder's layers"
    listed = next((entry for entry in skips if _means(entry, gate) or _means(entry, up)), None)
    if listed is not None:
        return f"named by the checkpoint's list of modules that stay as they are ({listed})"
    if first.shape != second.shape or len(first.shape) != 2:
        return f"shapes {list(first.shape)} and {list(second.shape)}, not two matrices of one shape"
    if first.dtype != second.dtype:
        return f"mixed precision: {leaves[0]} is {first.dtype}, {leaves[1]} is {second.dtype}"
    for module in (gate, up):
        more = [part for part in (names.BIAS, *ACTIVATION_SCALES) if names.tensor(module, part) in source.tensors]
        if more:
            return f"{module.rpartition('.')[2]} has {more[0]}, for which the fused form has no place"
    spec = GateUpSpec(rows=first.shape[0], columns=first.shape[1], gate=leaves[0], up=leaves[1])
    if first.dtype in _FLOATS:
        if not quantize:
            return f"not FP8 but {first.dtype} (--quantize makes it FP8)"
        return Pair(spec=spec, gate=Half(first, None), up=Half(second, None))
    if first.dtype != "F8_E4M3" or block is None:
        return f"{first.dtype} data, not E4M3 with block scales"
    halves = [_with_scales(source, info, block=block) for info in (first, second)]
    lacking = next((half for half in halves if isinstance(half, str)), None)
    if lacking is not None:
        return lacking
    return Pair(spec=spec, gate=_half(halves[0]), up=_half(halves[1]))


def _half(half: Half | str) -> Half:
    if isinstance(half, str):
        raise UnsupportedError(half)
    return half


def _with_scales(source: Source, weight: TensorInfo, *, block: tuple[int, int]) -> Half | str:
    """An FP8 weight with its block scales, or the reason why it has none."""
    module = module_of(weight.name)
    scales = source.tensors.get(names.tensor(module, SCALES))
    if scales is None:
        if names.tensor(module, "weight_scale") in source.tensors:
            return "one scale for the whole tensor or for each row (weight_scale), not a grid"
        raise CheckpointError(
            f"expected {names.tensor(module, SCALES)} beside the FP8 weight {weight.name}, got none; "
            "download the checkpoint completely"
        )
    if math.prod(scales.shape) == 1 and math.prod(-(-s // b) for s, b in zip(weight.shape, block, strict=True)) > 1:
        return "one scale for the whole tensor, not a grid"
    check_grid(weight, scales, block=block)
    if scales.dtype not in _SCALES:
        raise CheckpointError(
            f"expected {scales.name} as {', '.join(_SCALES)}, got {scales.dtype}; download the checkpoint again"
        )
    return Half(weight, scales)


def plain_fp8(source: Source, pairs: Mapping[str, Pair], *, block: tuple[int, int]) -> dict[str, Fp8Spec]:
    """Every FP8 Linear that stays unfused beside fused pairs.

    Raises:
        UnsupportedError: an FP8 tensor that is no E4M3 matrix with block scales: a loader of the fused form could not run it.
        CheckpointError: scales that are missing or do not fit.
    """
    taken = {info.name for pair in pairs.values() for info in pair.tensors}
    found: dict[str, Fp8Spec] = {}
    for info in source.tensors.values():
        if info.dtype not in FP8 or info.name in taken:
            continue
        half: Half | str = f"{info.dtype} data of shape {list(info.shape)}"
        if info.dtype == "F8_E4M3" and len(info.shape) == 2 and info.name.endswith(f".{WEIGHT}"):
            half = _with_scales(source, info, block=block)
        if isinstance(half, str) or half.scales is None:
            raise UnsupportedError(
                f"expected every FP8 tensor to be an E4M3 matrix with block scales, got {info.name} ({half}), which cannot be "
                "run beside fused pairs; pass --keep-names"
            )
        module = module_of(info.name)
        bias = names.tensor(module, names.BIAS) in source.tensors
        found[module] = Fp8Spec(rows=info.shape[0], columns=info.shape[1], scales=half.scales.dtype, bias=bias)
    return found


def _module_and_leaf(tensor: str) -> tuple[str, str]:
    """The module that a tensor belongs to and its last name; stacks of experts are parameters without `.weight`."""
    module = tensor if tensor.rpartition(".")[2] == FUSED_LEAF else module_of(tensor)
    return module, module.rpartition(".")[2]


def _is_weight(info: TensorInfo) -> bool:
    return len(info.shape) >= 2 and info.name.endswith((f".{WEIGHT}", FUSED_LEAF))


def _means(entry: str, module: str) -> bool:
    """Whether an entry of a skip list names a module or one that it lies in: by whole segments, anywhere in the path."""
    wanted, path = entry.split("."), module.split(".")
    return any(path[at : at + len(wanted)] == wanted for at in range(len(path) - len(wanted) + 1))


def _texts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    text = config.get("text_config")
    return [config, text] if isinstance(text, dict) else [config]


def _model_types(config: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(str(part.get("model_type")).removesuffix("_text") for part in _texts(config))


def _skip_list(config: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    for part in _texts(config):
        entry = part.get("quantization_config")
        for key in _SKIP_KEYS:
            listed = entry.get(key) if isinstance(entry, dict) else None
            found += [name for name in listed if isinstance(name, str) and name] if isinstance(listed, list) else []
    return found
