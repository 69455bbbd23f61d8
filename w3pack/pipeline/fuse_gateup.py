"""An FP8 checkpoint -> the same with gate and up of each MLP as one tensor, file by file, without rounding.

    check every header -> plan every pair and tensor -> claim the output -> copy the other files
    for each shard: for each tensor: copy it, or read the two halves, append them, write, digest
    write index, manifest and config -> let the folder appear

Nothing is computed from the weights: the fused bytes are the two sources' bytes, and the manifest holds what `--split` needs to
give back every tensor, file and dtype. With `--quantize` float halves are rounded to FP8 first, each with scales of its own.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from w3pack import __version__
from w3pack.checkpoint.source import Source, TensorInfo
from w3pack.checkpoint.staging import Staging
from w3pack.checkpoint.tensor_file import digest
from w3pack.format import names
from w3pack.format.gateup import (
    ADJACENT_FORM,
    FUSED_FORM,
    METADATA_KEY,
    SCALES,
    WEIGHT,
    GateUpConfig,
)
from w3pack.format.layout import FORMAT_VERSION
from w3pack.pack.gateup import E4M3, fuse_scales, holds_nan, split_rows
from w3pack.pipeline.fuse_pairs import Half, Pair
from w3pack.pipeline.fuse_plan import (
    Fusable,
    FuseOptions,
    FusePlan,
    Piece,
    by_alignment,
    half_outputs,
    make_fuse_plan,
    other_linears,
    piece_bytes,
)
from w3pack.pipeline.one_linear import check_finite
from w3pack.pipeline.output import check_place, check_space, write_tensor
from w3pack.pipeline.selection import module_of
from w3pack.quantize.fp8_blocks import dequantize_blocks, quantize_fp8_blocks

#: Called when a tensor or pair is done, with its name and its number of bytes.
Progress = Callable[[str, int], None]


@dataclass(frozen=True)
class FuseJob:
    """A planned run: what `--dry-run` prints and `run_fuse` executes."""

    source: Source
    options: FuseOptions
    plan: FusePlan

    @property
    def copied_bytes(self) -> int:
        """Bytes of the files that are copied as they are."""
        return sum(path.stat().st_size for path in self.source.companion_files().values())


@dataclass(frozen=True)
class FuseReport:
    """What a run did.

    `weight_bytes_delta` and `scale_bytes_delta` compare all pairs in the output with the same pairs, as FP8, in the source:
    what a loaded model needs more. `load_transient_bytes` is what a loader needs for a moment beyond the loaded model.
    """

    output: str
    pairs: int
    declined: dict[str, str]
    fused_already: int
    quantized: int
    worst_relative_error: float | None
    source_bytes: int
    output_bytes: int
    weight_bytes_delta: int
    scale_bytes_delta: int
    guard_bytes: int
    load_transient_bytes: int
    seconds: float
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)


def prepare_fuse(source: Source, options: FuseOptions, *, fusable: Fusable | None = None) -> FuseJob:
    """Plan a run from headers alone; see `make_fuse_plan`."""
    return FuseJob(source=source, options=options, plan=make_fuse_plan(source, options, fusable=fusable))


def run_fuse(
    job: FuseJob, output: Path, *, overwrite: bool = False, resume: bool = False, progress: Progress | None = None
) -> FuseReport:
    """Execute a job; the checkpoint appears at `output` when everything is on the disk, and not before.

    Args:
        output: folder to create; absent or empty unless `overwrite`.
        progress: told of each finished tensor and pair.

    Raises:
        W3PackError: one of its children, see `w3pack.errors`; finished shards stay beside `output` for `resume`.
    """
    started = time.monotonic()
    check_place(job.source, output)
    plan = hashlib.sha256(repr(job.plan.shards).encode("utf-8", "backslashreplace")).hexdigest()
    fingerprint = (
        f"fuse-gateup w3pack {__version__} format {FORMAT_VERSION} {job.options!r} {job.source.fingerprint()} {plan}"
    )
    staging = Staging(output, fingerprint=fingerprint, overwrite=overwrite, resume=resume)
    try:
        check_space(job.plan, staging, copied_bytes=job.copied_bytes)
        staging.copy(job.source.companion_files())
        for file in job.plan.shards:
            if file not in staging.records:
                _write_shard(job, file, staging, progress=progress)
        staging.publish(_documents(job, staging.records))
    except BaseException:  # an interruption too
        staging.abandon()
        raise
    return report_of(job, output, records=staging.records, seconds=time.monotonic() - started)


def _write_shard(job: FuseJob, file: str, staging: Staging, *, progress: Progress | None) -> None:
    pieces = job.plan.shards[file]
    guard = job.plan.guard if file == next(iter(job.plan.shards)) else None
    infos = [info for piece in pieces for info in piece.outputs] + ([guard] if guard else [])
    adjacent = {piece.name: [o.name for o in piece.outputs] for piece in pieces if piece.action == "adjacent"}
    metadata = {METADATA_KEY: json.dumps(adjacent)} if adjacent else None
    record: dict[str, Any] = {"tensors": {}, "pairs": {}}
    with staging.open_shard(file, by_alignment(infos), metadata=metadata) as writer:
        if guard is not None:
            text = torch.frombuffer(bytearray(names.GUARD_TEXT), dtype=torch.uint8)
            write_tensor(writer, record, name=guard.name, data=text)
        for piece in pieces:
            if piece.pair is None:
                data = job.source.read(piece.name)
                _check_values(data, piece.name)
                write_tensor(writer, record, name=piece.name, data=data)
            else:
                made, record["pairs"][piece.name] = _make_pair(job, piece, piece.pair)
                while made:  # let go of each: the next pair needs the memory
                    name, tensor = made.popitem()
                    write_tensor(writer, record, name=name, data=tensor)
                    del tensor
            if progress is not None:
                progress(piece.name, piece_bytes(piece))
    staging.finish_shard(file, record)


def _check_values(data: torch.Tensor, name: str) -> None:
    if data.dtype != E4M3 or holds_nan(data):
        check_finite(data, name)


def _make_pair(job: FuseJob, piece: Piece, pair: Pair) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of a pair, fused or side by side, and what the manifest is to say of it."""
    rows, columns = pair.spec.weight_shape
    fused = torch.empty(rows, columns, dtype=torch.uint8).view(E4M3)
    grids, sources, squares = [], {}, [0.0, 0.0]
    for half, place in zip((pair.gate, pair.up), split_rows(fused), strict=True):
        weight, scales = _read_half(job, half, squares)
        place.view(torch.uint8).copy_(weight.view(torch.uint8))
        grids.append(scales)
        for info, tensor in zip(half_outputs(half, job.plan.block), (weight, scales), strict=True):
            sources[info.name] = digest(tensor)
        del weight
    entry: dict[str, Any] = {**asdict(pair.spec), "sources": sources}
    if pair.quantized:
        entry["relative_error"] = math.sqrt(squares[0] / squares[1]) if squares[1] else 0.0
    if piece.action == "adjacent":
        gate, up = split_rows(fused)
        return dict(zip((o.name for o in piece.outputs), (gate, up, *grids), strict=True)), entry
    made = {names.tensor(piece.name, WEIGHT): fused, names.tensor(piece.name, SCALES): fuse_scales(*grids)}
    return made, entry


def _read_half(job: FuseJob, half: Half, squares: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 weight and scales of a half; adds the squared error and the squared weight of one that is quantised."""
    weight = job.source.read(half.weight.name)
    _check_values(weight, half.weight.name)
    if half.scales is not None:
        scales = job.source.read(half.scales.name)
        check_finite(scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales, half.scales.name)
        return weight, scales
    packed, scales = quantize_fp8_blocks(weight, job.plan.block)
    for first in range(0, len(weight), job.plan.block[0]):
        rows = slice(first, first + job.plan.block[0])
        grid = scales[first // job.plan.block[0]].unsqueeze(0)
        kept = weight[rows].to(torch.float32)
        error = dequantize_blocks(packed[rows], grid, block=job.plan.block) - kept
        squares[0] += float(error.square().sum(dtype=torch.float64))
        squares[1] += float(kept.square().sum(dtype=torch.float64))
    return packed, scales


def _documents(job: FuseJob, records: Mapping[str, Any]) -> dict[str, Any]:
    """Manifest, index and config, in the order in which they are to be written."""
    plan, location = job.plan, job.source.location
    stored = {name: entry for shard in records.values() for name, entry in shard["tensors"].items()}
    entries = {name: entry for shard in records.values() for name, entry in shard["pairs"].items()}
    unfused = _unfused_config(job)
    documents: dict[str, Any] = {
        names.MANIFEST: {
            "format_version": FORMAT_VERSION,
            "producer": "w3pack",
            "version": __version__,
            "form": ADJACENT_FORM if job.options.keep_names else FUSED_FORM,
            "source": {"location": Path(location).name or location, "notes": list(plan.notes)},
            "settings": asdict(job.options),
            "pairs": {name: entries[name] for name in plan.pairs},
            "declined": dict(plan.declined),
            "fused_already": list(plan.fused_already),
            "split": {"config": unfused, "files": _source_files(job)},
            "tensors": {name: stored[name] for name in sorted(stored)},
        }
    }
    documents |= index_of(records, plan.shards, total=plan.output_bytes)
    documents[names.CONFIG] = unfused
    if plan.guard is not None:
        fused = GateUpConfig(
            pairs={name: pair.spec for name, pair in plan.pairs.items()},
            fp8=plan.fp8,
            block=plan.block,
            guard=plan.guard.name.removesuffix(".weight"),
            version=__version__,
        )
        documents[names.CONFIG] = {**_without_quantization(unfused), "quantization_config": fused.to_dict()}
    return documents


def index_of(records: Mapping[str, Any], shards: Mapping[str, Any], *, total: int) -> dict[str, Any]:
    """The index, under its file name; empty where one file with the stock name needs none."""
    if list(shards) == [names.SINGLE_FILE]:
        return {}
    weight_map = {name: file for file in shards for name in records[file]["tensors"]}
    return {names.INDEX: {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}}


def _without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in config.items() if key != "quantization_config"}
    if isinstance(kept.get("text_config"), dict):
        kept["text_config"] = {k: v for k, v in kept["text_config"].items() if k != "quantization_config"}
    return kept


def _unfused_config(job: FuseJob) -> dict[str, Any]:
    """config.json of the checkpoint with its pairs unfused: the source's, or after --quantize one that says what is FP8."""
    if not any(pair.quantized for pair in job.plan.pairs.values()) or "quantization_config" in job.source.config:
        return job.source.config
    entry = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(job.plan.block),
        "modules_to_not_convert": other_linears(job.source, job.plan.pairs),
    }
    return {**job.source.config, "quantization_config": entry}


def _source_files(job: FuseJob) -> dict[str, dict[str, Any]]:
    """File -> tensor -> dtype and shape of the unfused checkpoint, all in the source's order."""
    halves = {half.weight.name: half for pair in job.plan.pairs.values() for half in (pair.gate, pair.up)}
    files: dict[str, dict[str, Any]] = {}
    for info in job.source.tensors.values():
        half = halves.get(info.name)
        several: tuple[TensorInfo, ...] = (info,)
        if half is not None and half.scales is None:
            several = half_outputs(half, job.plan.block)
        for one in several:
            files.setdefault(info.file, {})[one.name] = {"dtype": one.dtype, "shape": list(one.shape)}
    return files


def report_of(job: FuseJob, output: Path, *, records: Mapping[str, Any], seconds: float) -> FuseReport:
    """The figures of a run, or with no `records` those of a plan."""
    plan = job.plan
    errors = [
        entry["relative_error"]
        for shard in records.values()
        for entry in shard["pairs"].values()
        if "relative_error" in entry
    ]
    unfused = [
        info for pair in plan.pairs.values() for half in (pair.gate, pair.up) for info in half_outputs(half, plan.block)
    ]
    fused = [info for piece in plan.pieces if piece.pair for info in piece.outputs]
    return FuseReport(
        output=str(output),
        pairs=len(plan.pairs),
        declined=dict(plan.declined),
        fused_already=len(plan.fused_already),
        quantized=sum(pair.quantized for pair in plan.pairs.values()),
        worst_relative_error=max(errors, default=None),
        source_bytes=plan.source_bytes,
        output_bytes=plan.output_bytes,
        weight_bytes_delta=_bytes(fused, WEIGHT) - _bytes(unfused, WEIGHT),
        scale_bytes_delta=_bytes(fused, SCALES) - _bytes(unfused, SCALES),
        guard_bytes=plan.guard_bytes,
        load_transient_bytes=plan.largest_pair_bytes if job.options.keep_names else 0,
        seconds=seconds,
        notes=plan.notes,
    )


def _bytes(infos: list[TensorInfo], part: str) -> int:
    return sum(info.nbytes for info in infos if info.name == names.tensor(module_of(info.name), part))
