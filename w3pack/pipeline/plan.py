"""What will happen to every tensor, decided before anything is read or written."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from w3pack.checkpoint.source import Source, TensorInfo
from w3pack.checkpoint.tensor_file import DTYPES, digest
from w3pack.errors import CheckpointError, UnsupportedError, UsageError
from w3pack.format import names
from w3pack.format.layout import FORMAT_VERSION, TILE, Layout
from w3pack.format.linear import MAX_SIDE, LinearSpec, QmapDtype
from w3pack.pipeline.fp8_source import ACTIVATION_SCALES, SCALE_SUFFIX, block_size, check_grid, consumed_by_weight
from w3pack.pipeline.mixed import Mix
from w3pack.pipeline.selection import FP8, is_matrix, module_of, selector, why_not_linear

Action = Literal["quantize", "copy", "dequantize", "drop"]
#: Asked for the modules that are to be quantised; answers which of them no loader could run, and why.
Loadable = Callable[[Collection[str]], Mapping[str, str]]

_OUTSIDE = "outside the decoder's layers"
BASE_MEMORY = 700 << 20
MEMORY_FACTOR = 5


@dataclass(frozen=True)
class QuantizeOptions:
    """Everything that decides the bytes of the output, besides the source."""

    group_size: int = 128
    layout: Layout = "dense"
    qmap: str | None = None
    qmap_dtype: QmapDtype | None = None
    qmap_per: Literal["tensor", "row"] | None = None
    skip: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    lm_head: bool = False
    min_coverage: float | None = None
    max_shard_bytes: int = 5_000_000_000
    seed: int = 0
    mix: Mix | None = None


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of the source: what happens to it, why, and which tensors of the output it becomes."""

    source: TensorInfo
    action: Action
    reason: str
    outputs: tuple[TensorInfo, ...]
    spec: LinearSpec | None = None
    scales: str | None = None

    @property
    def module(self) -> str:
        """The module that owns the tensor."""
        return module_of(self.source.name)


@dataclass(frozen=True)
class Plan:
    """The whole job. `shards` holds the planned tensors of each output file, in order."""

    tensors: tuple[PlannedTensor, ...]
    shards: Mapping[str, tuple[PlannedTensor, ...]]
    guard: TensorInfo
    block: tuple[int, int] | None
    coverage: float
    notes: tuple[str, ...] = field(default=())

    @property
    def quantized(self) -> tuple[PlannedTensor, ...]:
        """The Linears that become 3-bit."""
        return tuple(tensor for tensor in self.tensors if tensor.action == "quantize")

    @property
    def modules(self) -> dict[str, LinearSpec]:
        """Quantised module -> shape."""
        return {tensor.module: tensor.spec for tensor in self.quantized if tensor.spec is not None}

    @property
    def source_bytes(self) -> int:
        """Bytes of all tensors of the source."""
        return sum(tensor.source.nbytes for tensor in self.tensors)

    @property
    def output_bytes(self) -> int:
        """Bytes of all tensors of the output."""
        return sum(info.nbytes for tensor in self.tensors for info in tensor.outputs) + self.guard.nbytes

    @property
    def weights(self) -> int:
        """Logical weights that become 3-bit."""
        return sum(spec.weights for spec in self.modules.values())

    @property
    def bits_per_weight(self) -> float:
        """Stored bits, scales, maps and padding included, for each quantised weight."""
        return 8 * sum(spec.nbytes for spec in self.modules.values()) / self.weights

    @property
    def memory_bytes(self) -> int:
        """Upper estimate of peak memory: the process and its libraries, and a few copies of the largest tensor."""
        return BASE_MEMORY + MEMORY_FACTOR * max(
            max(DTYPES[t.source.dtype].itemsize, 2) * math.prod(t.source.shape)
            for t in self.tensors  # FP8 becomes float32
        )


def make_plan(source: Source, options: QuantizeOptions, *, loadable: Loadable | None = None) -> Plan:
    """Decide for every tensor of `source`.

    Args:
        source: the checkpoint.
        options: see `QuantizeOptions`; `qmap_dtype` and `qmap_per` must be settled (not None).
        loadable: what the model class says of the modules chosen by name; None trusts the names.

    Raises:
        UnsupportedError: already quantised source, no Linear at all, or coverage below the floor.
        UsageError: a skip/only entry that matches nothing, a tied lm_head that is to be quantised.
        CheckpointError: FP8 weights without their scales, or scales that do not fit.
    """
    if options.group_size % TILE or not TILE <= options.group_size <= MAX_SIDE:
        raise UsageError(
            f"expected a group size that is a multiple of {TILE}, got {options.group_size}; use 64, 128 or 256"
        )
    block = block_size(source)
    tied_head = _tied_head(source)
    candidates = {info.name: why_not_linear(info) for info in source.tensors.values()}
    candidates.update(dict.fromkeys(tied_head, "tied to the embedding"))
    if options.lm_head:
        candidates.update(_lm_head(source, tied=bool(tied_head)))
    _set_aside_more_than_linear(source, candidates)
    modules = [module_of(name) for name, why in candidates.items() if why is None]
    skip, only = selector(options.skip), selector(options.only)
    # what is kept anyway may be skipped: a list of names that serves several models
    matrices = dict.fromkeys(module_of(info.name) for info in source.tensors.values() if len(info.shape) > 1)
    skip.check(list(matrices), option="--skip")
    only.check(modules, option="--only")
    for name, why in candidates.items():
        if why is None and skip.matches(module_of(name)):
            candidates[name] = "--skip"
        elif why is None and only.entries and not only.matches(module_of(name)):
            candidates[name] = "not in --only"
    chosen = [module_of(name) for name, why in candidates.items() if why is None]
    if modules and not chosen:
        raise UsageError("expected --skip and --only to leave a Linear to quantise, got none; name fewer or others")
    if loadable is not None and chosen:
        refused = loadable(chosen)
        candidates.update({names.tensor(module, "weight"): why for module, why in refused.items()})
    if options.mix is not None:
        candidates.update({names.tensor(module, "weight"): options.mix.asked for module in options.mix.kept})
    tensors = tuple(
        _planned(source, info, candidates=candidates, options=options, block=block, tied_head=tied_head)
        for info in source.tensors.values()
    )
    _check_names(tensors)
    quantized = [tensor for tensor in tensors if tensor.action == "quantize"]
    if not quantized:
        reasons = sorted({why for name, why in candidates.items() if why and is_matrix(source.tensors[name])})
        raise UnsupportedError(
            f"expected Linear weights in the decoder's layers of {source.location}, got none"
            f"{' (' + '; '.join(reasons[:4]) + ')' if reasons else ''}; this model has nothing that w3pack quantises"
        )
    guard = _guard(quantized)
    plan = Plan(
        tensors=tensors,
        shards=_shards(tensors, guard, limit=options.max_shard_bytes),
        guard=guard,
        block=block,
        coverage=_coverage(tensors),
        notes=(*source.notes, *_notes(source)),
    )
    _check_coverage(plan, options)
    return plan


def _notes(source: Source) -> tuple[str, ...]:
    if not source.config.get("auto_map"):
        return ()
    return (
        "config.json names model code of its own (auto_map), which w3pack never runs: the result is for transformers' own "
        f"class of model_type {source.config.get('model_type')!r}",
    )


def _tied_head(source: Source) -> tuple[str, ...]:
    """Stored copies of an lm_head that the config ties to the embedding, when they are indeed the same bytes."""
    config = source.config
    text = config.get("text_config")
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings") if isinstance(text, dict) else None)
    heads = [name for name in source.tensors if name.endswith("lm_head.weight")]
    embeddings = [name for name in source.tensors if name.endswith("embed_tokens.weight")]
    if not tied or len(heads) != 1 or not embeddings:
        return ()
    head = source.tensors[heads[0]]
    for name in embeddings:
        same = source.tensors[name].shape == head.shape and source.tensors[name].dtype == head.dtype
        if same and digest(source.read(name)) == digest(source.read(heads[0])):
            return (heads[0],)
    return ()


def _lm_head(source: Source, *, tied: bool) -> dict[str, str | None]:
    heads = [name for name in source.tensors if name.endswith("lm_head.weight")]
    if tied or not heads:
        raise UsageError(
            "expected an lm_head of its own for --lm-head, got a model whose head is tied to the embedding; leave the option out"
        )
    whys = {name: why_not_linear(source.tensors[name]) for name in heads}
    plain = {name for name in heads if len(source.tensors[name].shape) == 2 and whys[name] == _OUTSIDE}
    return {name: None if name in plain else why for name, why in whys.items()}


def _set_aside_more_than_linear(source: Source, candidates: dict[str, str | None]) -> None:
    """Keep a Linear that owns tensors a packed one has no place for, such as the scales of a quantised cache."""
    parts: dict[str, list[str]] = {}
    for name in source.tensors:
        module, _, part = name.rpartition(".")
        parts.setdefault(module, []).append(part)
    for name, why in candidates.items():
        plain = {"weight", names.BIAS}
        if source.tensors[name].dtype in FP8:
            plain |= {f"weight{SCALE_SUFFIX}", *ACTIVATION_SCALES}
        more = [part for part in parts[module_of(name)] if part not in plain]
        if why is None and more:
            candidates[name] = f"more than a Linear: it has {', '.join(more[:3])}"


def _check_names(tensors: tuple[PlannedTensor, ...]) -> None:
    """UnsupportedError for names of the source that mean something else in a packed checkpoint."""
    for tensor in tensors:
        part = tensor.source.name.rpartition(".")[2]
        if tensor.action == "copy" and part in (names.CODES, names.QMAP):
            raise UnsupportedError(
                f"expected no tensor whose name ends as those of packed Linears do, got {tensor.source.name}; "
                "w3pack cannot hold this model"
            )


def _planned(
    source: Source,
    info: TensorInfo,
    *,
    candidates: Mapping[str, str | None],
    options: QuantizeOptions,
    block: tuple[int, int] | None,
    tied_head: tuple[str, ...],
) -> PlannedTensor:
    why = candidates[info.name]
    module = module_of(info.name)
    fp8 = block is not None and info.dtype in FP8
    scales = info.name + SCALE_SUFFIX if fp8 else None
    if scales is not None and scales not in source.tensors:
        raise CheckpointError(
            f"expected {scales} beside the FP8 weight {info.name}, got none; download the checkpoint completely"
        )
    if scales is not None and block is not None:
        check_grid(info, source.tensors[scales], block=block)
    consumed = consumed_by_weight(source, info) if block is not None else None
    if consumed is not None:
        return PlannedTensor(source=info, action="drop", reason=consumed, outputs=())
    if info.name in tied_head:
        return PlannedTensor(source=info, action="drop", reason="the same bytes as the tied embedding", outputs=())
    if why is not None:
        if fp8:
            kept = _info(info.name, "BF16", info.shape)
            return PlannedTensor(source=info, action="dequantize", reason=why, outputs=(kept,), scales=scales)
        return PlannedTensor(
            source=info, action="copy", reason=why, outputs=(_info(info.name, info.dtype, info.shape),)
        )
    rows, columns = info.shape
    try:
        spec = LinearSpec(
            rows=rows,
            columns=columns,
            group_size=_group_size(module, options),
            layout=options.layout,
            maps=1,
            qmap_dtype=options.qmap_dtype or "int8",
            bias=names.tensor(module, names.BIAS) in source.tensors,
        )
    except UnsupportedError as error:
        raise UnsupportedError(
            f"{info.name} of {rows} x {columns} cannot be packed: {error}; pass --skip {module}"
        ) from error
    if options.qmap_per == "row":
        spec = replace(spec, maps=spec.padded_rows)
    outputs = tuple(
        _info(names.tensor(module, part), dtype, shape)
        for part, dtype, shape in (
            (names.CODES, "I32", spec.codes_shape),
            (names.SCALES, "F16", spec.scales_shape),
            (names.QMAP, "I8" if spec.qmap_dtype == "int8" else "F16", spec.qmap_shape),
        )
    )
    return PlannedTensor(
        source=info, action="quantize", reason="Linear of the decoder", outputs=outputs, spec=spec, scales=scales
    )


def _group_size(module: str, options: QuantizeOptions) -> int:
    sizes = {} if options.mix is None else options.mix.sizes
    return sizes.get(module, options.group_size)


def _info(name: str, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
    """A tensor of the output. A source's `nbytes` may be smaller than its dtype and shape say (GGUF blocks)."""
    return TensorInfo(name=name, dtype=dtype, shape=shape, nbytes=DTYPES[dtype].itemsize * math.prod(shape), file="")


def _guard(quantized: list[PlannedTensor]) -> TensorInfo:
    """The guard goes under a plain Linear's stock name where there is one: every loader checks the shape of those."""
    plain = [tensor for tensor in quantized if ".experts." not in tensor.module] or quantized
    return _info(names.guard_tensor(plain[0].module), "U8", (len(names.GUARD_TEXT),))


def _shards(
    tensors: tuple[PlannedTensor, ...], guard: TensorInfo, *, limit: int
) -> dict[str, tuple[PlannedTensor, ...]]:
    """Cut the planned tensors, in order, into files of at most `limit` bytes; one tensor's outputs stay together."""
    groups: list[list[PlannedTensor]] = [[]]
    filled = guard.nbytes
    for tensor in tensors:
        if not tensor.outputs:
            continue
        size = sum(info.nbytes for info in tensor.outputs)
        if groups[-1] and filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += size
    return {names.shard_file(n + 1, len(groups)): tuple(group) for n, group in enumerate(groups)}


def _coverage(tensors: tuple[PlannedTensor, ...]) -> float:
    total = sum(_elements(tensor.source) for tensor in tensors if is_matrix(tensor.source) and tensor.action != "drop")
    done = sum(
        _elements(tensor.source) for tensor in tensors if tensor.action == "quantize" and is_matrix(tensor.source)
    )
    return done / total if total else 1.0


def _elements(info: TensorInfo) -> int:
    return math.prod(info.shape)


def _check_coverage(plan: Plan, options: QuantizeOptions) -> None:
    floor = options.min_coverage
    if floor is None:  # who names modules has said what they want
        floor = 0.0 if options.skip or options.only or options.mix else 0.9
    if plan.coverage < floor:
        kept = [t for t in plan.tensors if is_matrix(t.source) and t.action in ("copy", "dequantize")]
        largest = max(kept, key=lambda tensor: tensor.source.nbytes)
        raise UnsupportedError(
            f"expected to quantise at least {floor:.0%} of the decoder's matrix weights, could only {plan.coverage:.1%}; "
            f"the largest left is {largest.source.name} ({largest.reason}); pass --min-coverage 0 to go on all the same"
        )


def settings_fingerprint(options: QuantizeOptions, *, version: str) -> str:
    """A text that is the same exactly when version and options would give the same bytes."""
    return f"w3pack {version} format {FORMAT_VERSION} {options!r}"
