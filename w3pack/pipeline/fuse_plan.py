"""Which gate/up pairs of a checkpoint are fused, which are left alone and why, and where every tensor goes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from w3pack.checkpoint.source import Source, TensorInfo
from w3pack.checkpoint.tensor_file import DTYPES
from w3pack.errors import UnsupportedError
from w3pack.format import names
from w3pack.format.gateup import SCALES, WEIGHT, Fp8Spec, GateUpSpec, halves_of
from w3pack.pipeline.fp8_source import block_size
from w3pack.pipeline.fuse_pairs import Half, Pair, find_pairs, plain_fp8
from w3pack.pipeline.selection import module_of

#: Asked for fused pairs and for FP8 Linears; answers which of them no loader could run, and why.
Fusable = Callable[[Mapping[str, GateUpSpec], Mapping[str, Fp8Spec]], Mapping[str, str]]
Action = Literal["copy", "fuse", "adjacent", "slice"]
DEFAULT_BLOCK = (128, 128)


@dataclass(frozen=True)
class FuseOptions:
    """Everything that decides the bytes of the output, besides the source."""

    quantize: bool = False
    keep_names: bool = False


@dataclass(frozen=True)
class Piece:
    """What becomes one or several tensors of one output file: a tensor that is copied, or a pair."""

    action: Action
    name: str
    outputs: tuple[TensorInfo, ...]
    pair: Pair | None = None


@dataclass(frozen=True)
class FusePlan:
    """The whole job. `shards` holds the pieces of each output file; the guard, if any, is in the first."""

    pieces: tuple[Piece, ...]
    shards: Mapping[str, tuple[Piece, ...]]
    guard: TensorInfo | None
    block: tuple[int, int]
    pairs: Mapping[str, Pair]
    fp8: Mapping[str, Fp8Spec]
    declined: Mapping[str, str]
    fused_already: tuple[str, ...]
    source_bytes: int
    notes: tuple[str, ...] = field(default=())

    @property
    def output_bytes(self) -> int:
        """Bytes of all tensors of the output."""
        return sum(info.nbytes for piece in self.pieces for info in piece.outputs) + self.guard_bytes

    @property
    def guard_bytes(self) -> int:
        """Bytes of the guard tensor."""
        return self.guard.nbytes if self.guard else 0

    @property
    def pair_source_bytes(self) -> int:
        """Bytes of the weights and scales of all pairs in the source."""
        return sum(pair.source_bytes for pair in self.pairs.values())

    @property
    def pair_output_bytes(self) -> int:
        """Bytes of the weights and scales of all pairs in the output."""
        return sum(info.nbytes for piece in self.pieces if piece.pair for info in piece.outputs)

    @property
    def largest_pair_bytes(self) -> int:
        """Bytes of the weights and scales of the largest pair in the output; 0 without pairs."""
        return max((sum(o.nbytes for o in piece.outputs) for piece in self.pieces if piece.pair), default=0)

    @property
    def memory_bytes(self) -> int:
        """Upper estimate of peak memory: the process, and the tensors of the largest pair twice, or in float64."""
        floats = max((pair.float_bytes for pair in self.pairs.values()), default=0)
        largest = max(piece_bytes(piece) for piece in self.pieces)
        return (700 << 20) + max(2 * largest, floats)


def piece_bytes(piece: Piece) -> int:
    """Bytes of everything that a piece becomes."""
    return sum(info.nbytes for info in piece.outputs)


def make_fuse_plan(source: Source, options: FuseOptions, *, fusable: Fusable | None = None) -> FusePlan:
    """Decide for every pair and every tensor of `source`.

    Args:
        source: a block-scaled FP8 checkpoint, or with `options.quantize` one of floats.
        options: see `FuseOptions`.
        fusable: what the model class says of pairs and FP8 Linears; None trusts their names.

    Raises:
        UnsupportedError: another kind of checkpoint, nothing to fuse, or FP8 tensors that the fused form cannot hold.
        CheckpointError: FP8 weights without their scales, or scales that do not fit.
    """
    block = block_size(source)
    if block is None and not options.quantize:
        raise UnsupportedError(
            f"expected a block-scaled FP8 checkpoint, got {source.location} without quantization_config; "
            "pass --quantize to turn its gate and up matrices into FP8"
        )
    for info in source.tensors.values():
        if "/" in info.file:
            raise UnsupportedError(
                f"expected all weight files beside config.json, got {info.file}; move them there and adapt the index"
            )
    found = find_pairs(source, block=block, quantize=options.quantize)
    pairs, declined = dict(found.pairs), dict(found.declined)
    if options.keep_names:
        for name, why in _not_adjacent(pairs).items():
            declined[name] = why
            del pairs[name]
    elif fusable is not None and pairs:
        for name, why in fusable({name: pair.spec for name, pair in pairs.items()}, {}).items():
            declined[name] = why
            del pairs[name]
    if not pairs and declined:
        name, why = next(iter(declined.items()))
        raise UnsupportedError(
            f"expected a gate/up pair that can be fused in {source.location}, got {len(declined)} that cannot, such as {name}: "
            f"{why}; this checkpoint stays as it is"
        )
    if not pairs and not found.fused_already:
        raise UnsupportedError(f"expected gate/up pairs in {source.location}, got none; this model has nothing to fuse")
    fused_form = bool(pairs) and not options.keep_names
    fp8 = plain_fp8(source, pairs, block=block) if fused_form and block is not None else {}
    for name, why in fusable({}, fp8).items() if fusable is not None and fp8 else ():
        raise UnsupportedError(
            f"expected a place for every FP8 Linear in the model, got {name}: {why}; a loader of the fused form would stop there, "
            "pass --keep-names"
        )
    guard = _guard(pairs) if fused_form else None
    pieces = _pieces(source, pairs, options, block=block or DEFAULT_BLOCK)
    return FusePlan(
        pieces=tuple(piece for _, piece in pieces),
        shards=_shards(pieces),
        guard=guard,
        block=block or DEFAULT_BLOCK,
        pairs=pairs,
        fp8=fp8,
        declined=declined,
        fused_already=found.fused_already,
        source_bytes=sum(info.nbytes for info in source.tensors.values()),
        notes=(*source.notes, *_notes(pairs, found.fused_already)),
    )


def _notes(pairs: Mapping[str, Pair], fused_already: Sequence[str]) -> tuple[str, ...]:
    notes = []
    if fused_already and not pairs:
        notes.append("gate and up are one tensor in this checkpoint already: it was copied as it is")
    if any(pair.quantized for pair in pairs.values()):
        notes.append("gate and up were rounded to FP8: --split gives back the FP8 matrices, not the floats")
    return tuple(notes)


def _not_adjacent(pairs: Mapping[str, Pair]) -> dict[str, str]:
    declined = {}
    for name, pair in pairs.items():
        if pair.gate.scales is not None and pair.up.scales is not None:
            if pair.gate.scales.dtype != pair.up.scales.dtype:
                declined[name] = "scales of two dtypes, which cannot lie side by side"
        elif names.expert_of(module_of(pair.gate.weight.name)) is not None:
            declined[name] = "one of many experts, which stock loaders want in one precision (leave out --keep-names)"
    return declined


def _guard(pairs: Mapping[str, Pair]) -> TensorInfo:
    """Under a plain Linear's stock name where there is one: every loader checks the shape of those."""
    plain = next((name for name in pairs if ".experts." not in name), next(iter(pairs)))
    return info_of(names.guard_tensor(halves_of(plain, pairs[plain].spec)[0]), "U8", (len(names.GUARD_TEXT),))


def info_of(name: str, dtype: str, shape: Sequence[int]) -> TensorInfo:
    """A tensor of the output."""
    nbytes = DTYPES[dtype].itemsize * math.prod(shape)
    return TensorInfo(name=name, dtype=dtype, shape=tuple(shape), nbytes=nbytes, file="")


def _pieces(
    source: Source, pairs: Mapping[str, Pair], options: FuseOptions, *, block: tuple[int, int]
) -> list[tuple[str, Piece]]:
    """Source file -> piece, in the order of the files; a pair is where its gate was."""
    owner = {info.name: name for name, pair in pairs.items() for info in pair.tensors}
    pieces: list[tuple[str, Piece]] = []
    for info in source.tensors.values():
        name = owner.get(info.name)
        if name is None:
            copied = Piece(action="copy", name=info.name, outputs=(info_of(info.name, info.dtype, info.shape),))
            pieces.append((info.file, copied))
        elif info.name == pairs[name].gate.weight.name:
            pair = pairs[name]
            outputs = _adjacent(pair, block) if options.keep_names else _fused(name, pair, block)
            action: Action = "adjacent" if options.keep_names else "fuse"
            pieces.append((info.file, Piece(action=action, name=name, outputs=outputs, pair=pair)))
    return pieces


def _fused(name: str, pair: Pair, block: tuple[int, int]) -> tuple[TensorInfo, ...]:
    return (
        info_of(names.tensor(name, WEIGHT), "F8_E4M3", pair.spec.weight_shape),
        info_of(names.tensor(name, SCALES), "F32", pair.spec.grid_shape(block)),
    )


def _adjacent(pair: Pair, block: tuple[int, int]) -> tuple[TensorInfo, ...]:
    gate, up = half_outputs(pair.gate, block), half_outputs(pair.up, block)
    return gate[0], up[0], gate[1], up[1]


def half_outputs(half: Half, block: tuple[int, int]) -> tuple[TensorInfo, TensorInfo]:
    """Weight and scales of one half under the source's names, as FP8."""
    rows, columns = half.weight.shape
    dtype = "F32" if half.scales is None else half.scales.dtype
    scales = names.tensor(module_of(half.weight.name), SCALES)
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    return info_of(half.weight.name, "F8_E4M3", half.weight.shape), info_of(scales, dtype, grid)


def _shards(pieces: Collection[tuple[str, Piece]]) -> dict[str, tuple[Piece, ...]]:
    """The source's files, less those that are left without a tensor, numbered anew."""
    groups: dict[str, list[Piece]] = {}
    for file, piece in pieces:
        groups.setdefault(file, []).append(piece)
    return {
        names.shard_file(number + 1, len(groups)): tuple(group)
        for number, (_, group) in enumerate(sorted(groups.items()))
    }


def by_alignment(infos: Collection[TensorInfo]) -> list[TensorInfo]:
    """Tensors in the order in which they lie in a file: larger elements first, so that every one is aligned."""
    return sorted(infos, key=lambda info: -DTYPES[info.dtype].itemsize)


def other_linears(source: Source, pairs: Mapping[str, Pair]) -> list[str]:
    """Every module with a matrix that is in no pair, by its whole name: what a stock FP8 loader must leave in floats.

    Experts of which none is in a pair are also named together, as the stack that such a loader makes of them.
    """
    halves = {module_of(info.name) for pair in pairs.values() for info in pair.tensors}
    matrices = [info.name for info in source.tensors.values() if len(info.shape) == 2 and info.name.endswith(".weight")]
    others = [module for module in dict.fromkeys(map(module_of, matrices)) if module not in halves]
    mixed = {expert[0] for expert in map(names.expert_of, halves) if expert is not None}
    stacks = dict.fromkeys(expert[0] for expert in map(names.expert_of, others) if expert is not None)
    return [*(stack for stack in stacks if stack not in mixed), *others]
