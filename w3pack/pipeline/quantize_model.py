"""Quantise a checkpoint, tensor by tensor, from files to files.

    open the source -> plan every tensor -> claim the output -> check space -> copy the other files
    for each shard: for each tensor: read, (dequantise,) quantise, pack, write, digest     <- resumable after each shard
    write index, manifest and config -> let the folder appear

Nothing here holds more than one tensor of the source at a time.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from w3pack import __version__
from w3pack.checkpoint.source import Source, TensorInfo
from w3pack.checkpoint.staging import Staging, free_bytes
from w3pack.checkpoint.tensor_file import DTYPES, ShardWriter, digest
from w3pack.errors import CheckpointError, ResourceError, UsageError
from w3pack.format import names
from w3pack.format.config import W3Config
from w3pack.format.layout import FORMAT_VERSION
from w3pack.format.linear import LinearSpec
from w3pack.pack.words import pack_codes, pack_scales, pad_qmap
from w3pack.pipeline.plan import Loadable, Plan, PlannedTensor, QuantizeOptions, make_plan, settings_fingerprint
from w3pack.pipeline.qmaps import QmapChoice, read_qmaps
from w3pack.pipeline.report import ModuleError, Report, kind_rows
from w3pack.quantize import QuantizedLinear, QuantizeSettings, quantize_data_free
from w3pack.quantize.fp8_blocks import dequantize_blocks
from w3pack.reference import w3

#: Called when a Linear is done, with its module name and its number of weights.
Progress = Callable[[str, int], None]

_ROWS_AT_ONCE = 1 << 22
_SPARE_BYTES = 64 << 20


@dataclass(frozen=True)
class Job:
    """A planned run: what `--dry-run` prints and `run` executes."""

    source: Source
    options: QuantizeOptions
    plan: Plan
    qmaps: QmapChoice

    @property
    def copied_bytes(self) -> int:
        """Bytes of the files that are copied as they are."""
        return sum(path.stat().st_size for path in self.source.companion_files().values())


def prepare_job(source: Source, options: QuantizeOptions, *, loadable: Loadable | None = None) -> Job:
    """Settle the options and plan; reads headers only (and a tied head, to compare it with the embedding)."""
    if options.min_coverage is not None and not 0 <= options.min_coverage <= 1:
        raise UsageError(f"expected a coverage between 0 and 1, got {options.min_coverage}; pass a share such as 0.9")
    qmaps = read_qmaps(options.qmap)
    fixed = qmaps.default is not None or bool(qmaps.by_module)
    options = replace(
        options,
        qmap_dtype=options.qmap_dtype or ("int8" if qmaps.fits_int8 else "float16"),
        qmap_per=options.qmap_per or "tensor",
    )
    if fixed and options.qmap_per == "row":
        raise UsageError("expected either --qmap or --qmap-per row, got both; a given map is one for each Linear")
    plan = make_plan(source, options, loadable=loadable)
    qmaps.check(plan.modules)
    return Job(source=source, options=options, plan=plan, qmaps=qmaps)


def run(
    job: Job,
    output: Path,
    *,
    overwrite: bool = False,
    resume: bool = False,
    workers: int | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Report:
    """Execute a job; the checkpoint appears at `output` when everything is on the disk, and not before.

    Args:
        output: folder to create; absent or empty unless `overwrite`.
        workers: threads; the result does not depend on it. None: as many as torch uses.
        device: where tensors are quantised, "cpu" or "cuda".
        progress: told of each finished Linear.

    Raises:
        W3PackError: one of its children, see `w3pack.errors`; finished shards stay beside `output` for `resume`.
    """
    started = time.monotonic()
    _check_place(job, output)
    parts = (job.source.fingerprint(), settings_fingerprint(job.options, version=__version__), job.qmaps.fingerprint())
    # the plan as well: another transformers may find other modules loadable, and finished shards would not fit it
    plan = hashlib.sha256(repr(job.plan.shards).encode("utf-8", "backslashreplace")).hexdigest()
    fingerprint = " ".join((*parts, plan, device.partition(":")[0]))
    staging = Staging(output, fingerprint=fingerprint, overwrite=overwrite, resume=resume)
    try:
        _check_space(job, staging)
        staging.copy(job.source.companion_files())
        done = _write_shards(job, staging, workers=workers, device=device, progress=progress)
        records = staging.records
        errors = {
            name: ModuleError(**entry["error"])
            for shard in records.values()
            for name, entry in shard["modules"].items()
        }
        staging.publish(_documents(job, records, errors))
    except BaseException:  # an interruption too
        staging.abandon()
        raise
    seconds = time.monotonic() - started
    return _report(job, output, errors, seconds=seconds, done=done)


def _write_shards(job: Job, staging: Staging, *, workers: int | None, device: str, progress: Progress | None) -> int:
    """Write the shards that are not there yet; returns the weights quantised."""
    done = 0
    for file, tensors in job.plan.shards.items():
        if file in staging.records:
            continue
        record: dict[str, Any] = {"tensors": {}, "modules": {}}
        with staging.open_shard(file, _announced(job.plan, file)) as writer:
            if file == next(iter(job.plan.shards)):
                text = torch.frombuffer(bytearray(names.GUARD_TEXT), dtype=torch.uint8)
                _write(writer, record, name=job.plan.guard.name, data=text)
            for tensor in tensors:
                _process(job, tensor, writer=writer, record=record, workers=workers, device=device)
                if tensor.spec is not None:
                    done += tensor.spec.weights
                    if progress is not None:
                        progress(tensor.module, tensor.spec.weights)
        staging.finish_shard(file, record)
    return done


def _check_place(job: Job, output: Path) -> None:
    source = os.path.expanduser(job.source.location)
    if os.path.exists(source):
        target, origin = Path(os.path.realpath(os.path.expanduser(output))), Path(os.path.realpath(source))
        if target == origin or target in origin.parents or (origin.is_dir() and origin in target.parents):
            raise UsageError(
                f"expected an output apart from the source, got {output} for {source}; choose another place with -o"
            )


def _check_space(job: Job, staging: Staging) -> None:
    finished = sum(
        info.nbytes for file in staging.records for tensor in job.plan.shards.get(file, ()) for info in tensor.outputs
    )
    needed = job.plan.output_bytes - finished + job.copied_bytes + _SPARE_BYTES
    free = free_bytes(staging.folder)
    if free < needed:
        raise ResourceError(
            f"expected {needed / 1e9:.2f} GB free at {staging.output.parent}, got {free / 1e9:.2f} GB; free space or choose another place with -o"
        )


def _announced(plan: Plan, file: str) -> Iterator[TensorInfo]:
    if file == next(iter(plan.shards)):
        yield plan.guard
    for tensor in plan.shards[file]:
        yield from tensor.outputs


def _process(
    job: Job,
    tensor: PlannedTensor,
    *,
    writer: ShardWriter,
    record: dict[str, Any],
    workers: int | None,
    device: str,
) -> None:
    name = tensor.source.name
    if tensor.action == "quantize" and tensor.spec is not None:
        weight = read_float(job.source, tensor, block=job.plan.block)
        result = quantize_weight(
            weight.to(device),
            tensor.spec,
            module=tensor.module,
            qmap=job.qmaps.of(tensor.module),
            seed=job.options.seed,
            workers=workers,
        )
        packed = {
            names.CODES: pack_codes(result.codes, tensor.spec),
            names.SCALES: pack_scales(result.scales, tensor.spec),
            names.QMAP: pad_qmap(result.qmap, tensor.spec),
        }
        del result
        error = measure_error(weight, packed, spec=tensor.spec)
        del weight
        for part, data in packed.items():
            _write(writer, record, name=names.tensor(tensor.module, part), data=data)
        record["modules"][tensor.module] = {
            "error": {"squared_error": error.squared_error, "squared_weight": error.squared_weight},
        }
    elif tensor.action == "dequantize":
        data = read_float(job.source, tensor, block=job.plan.block).to(DTYPES[tensor.outputs[0].dtype])
        _write(writer, record, name=name, data=data)
    else:
        data = job.source.read(name)
        check_finite(data, name)
        _write(writer, record, name=name, data=data)


def _write(writer: ShardWriter, record: dict[str, Any], *, name: str, data: torch.Tensor) -> None:
    writer.write(name, data)
    record["tensors"][name] = {
        "dtype": str(data.dtype).removeprefix("torch."),
        "shape": list(data.shape),
        "sha256": digest(data),
    }


def read_float(source: Source, tensor: PlannedTensor, *, block: tuple[int, int] | None) -> torch.Tensor:
    """A source weight as float32 on the CPU; FP8 blocks multiplied by their scales.

    Raises:
        CheckpointError: NaN or infinite weights.
    """
    data = source.read(tensor.source.name)
    if tensor.scales is not None and block is not None:
        data = dequantize_blocks(data, source.read(tensor.scales), block=block)
    data = data.to(torch.float32)
    check_finite(data, tensor.source.name)
    return data


def check_finite(data: torch.Tensor, name: str) -> None:
    """CheckpointError naming the tensor when a float in it is NaN or infinite."""
    if not (data.is_floating_point() or data.is_complex()):
        return
    for part in data.reshape(-1).split(_ROWS_AT_ONCE):
        finite = torch.isfinite(part.to(torch.float32) if part.dtype.itemsize == 1 else part)
        if not bool(finite.all()):
            raise CheckpointError(
                f"expected finite weights in {name}, got {int((~finite).sum())} NaN or infinite ones or more; "
                "the checkpoint is damaged, download it again"
            )


def quantize_weight(
    weight: torch.Tensor,
    spec: LinearSpec,
    *,
    module: str,
    qmap: torch.Tensor | None = None,
    seed: int = 0,
    workers: int | None = None,
) -> QuantizedLinear:
    """Codes, map and scales of one Linear, back on the CPU.

    This is the one place where a calibrated solver will take over from the data-free one.

    Args:
        weight: float32 [rows, columns], any device.
        spec: shape, group size and map form wanted.
        module: name for messages.
        qmap: float32 [8] to keep, or None to learn one.
    """
    settings = QuantizeSettings(
        group_size=spec.group_size,
        qmap_dtype=torch.int8 if spec.qmap_dtype == "int8" else torch.float16,
        qmap_per="tensor" if spec.maps == 1 else "row",
        seed=seed,
    )
    try:
        result = quantize_data_free(weight, settings, qmap=qmap, workers=workers or torch.get_num_threads())
    except CheckpointError as error:
        raise CheckpointError(f"{module}: {error}") from error
    return replace(result, codes=result.codes.cpu(), qmap=result.qmap.cpu(), scales=result.scales.cpu())


def measure_error(weight: torch.Tensor, packed: Mapping[str, torch.Tensor], *, spec: LinearSpec) -> ModuleError:
    """Squared sums of error and weight, of the packed tensors as they are stored.

    Sums run over one row at a time in float64 and then over the list of rows, so that not even the last bit depends on
    the number of threads.

    Args:
        weight: float32 [rows, columns] on the CPU.
        packed: `codes`, `scales` and `qmap` of the Linear.
    """
    squared_error = squared_weight = 0.0
    blocks = w3.dequantized_blocks(packed[names.CODES], packed[names.SCALES], packed[names.QMAP], spec=spec)
    for rows, block in blocks:
        squared_error += sum((block - weight[rows]).square_().sum(dim=1, dtype=torch.float64).tolist())
        squared_weight += sum(weight[rows].square().sum(dim=1, dtype=torch.float64).tolist())
    return ModuleError(squared_error=squared_error, squared_weight=squared_weight)


def _documents(job: Job, records: Mapping[str, Any], errors: Mapping[str, ModuleError]) -> dict[str, Any]:
    """Manifest, index and config, in the order in which they are to be written."""
    plan, specs = job.plan, job.plan.modules
    stored = {name: entry for shard in records.values() for name, entry in shard["tensors"].items()}
    weight_map = {name: file for file in plan.shards for name in records[file]["tensors"]}
    config = {key: value for key, value in job.source.config.items() if key != "quantization_config"}
    if isinstance(config.get("text_config"), dict):
        config["text_config"] = {k: v for k, v in config["text_config"].items() if k != "quantization_config"}
    w3 = W3Config(modules=specs, guard=plan.guard.name.removesuffix(".weight"), version=__version__)
    manifest = {
        "format_version": FORMAT_VERSION,
        "producer": "w3pack",
        "version": __version__,
        "source": {"location": Path(job.source.location).name or job.source.location, "notes": list(job.source.notes)},
        "settings": _settings(job.options),
        "coverage": round(plan.coverage, 6),
        "modules": {
            name: {
                **spec.to_dict(),
                "relative_error": errors[name].relative,
                "snr_db": errors[name].snr_db,
                "qmap_origin": job.qmaps.origin_of(name),
                "scales_origin": "searched, data-free",
            }
            for name, spec in specs.items()
        },
        "kept": {t.source.name: f"{t.action}: {t.reason}" for t in plan.tensors if t.action != "quantize"},
        "tensors": {name: stored[name] for name in sorted(stored)},
    }
    documents: dict[str, Any] = {names.MANIFEST: manifest}
    if len(plan.shards) > 1:
        documents[names.INDEX] = {
            "metadata": {"total_size": plan.output_bytes},
            "weight_map": dict(sorted(weight_map.items())),
        }
    documents[names.CONFIG] = {**config, "quantization_config": w3.to_dict()}
    return documents


def _settings(options: QuantizeOptions) -> dict[str, Any]:
    return {
        "group_size": options.group_size,
        "layout": options.layout,
        "qmap": Path(options.qmap).name if options.qmap else "learned",
        "qmap_dtype": options.qmap_dtype,
        "qmap_per": options.qmap_per,
        "skip": list(options.skip),
        "only": list(options.only),
        "lm_head": options.lm_head,
        "seed": options.seed,
    }


def _report(job: Job, output: Path, errors: Mapping[str, ModuleError], *, seconds: float, done: int) -> Report:
    specs = job.plan.modules
    worst = sorted(((name, errors[name].relative) for name in specs), key=lambda pair: -pair[1])[:3]
    return Report(
        output=str(output),
        kinds=kind_rows(specs, errors),
        modules=len(specs),
        weights=job.plan.weights,
        bits_per_weight=job.plan.bits_per_weight,
        coverage=job.plan.coverage,
        source_bytes=job.plan.source_bytes,
        output_bytes=job.plan.output_bytes,
        seconds=seconds,
        weights_per_second=done / seconds if seconds else 0.0,
        worst=tuple(worst),
        notes=job.plan.notes,
    )
