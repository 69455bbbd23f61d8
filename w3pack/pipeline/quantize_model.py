"""Quantise a checkpoint, tensor by tensor, from files to files.

    open the source -> plan every tensor -> claim the output -> check space -> copy the other files
    for each shard: for each tensor: read, (dequantise,) quantise, pack, write, digest     <- resumable after each shard
    write index, manifest and config -> let the folder appear

Nothing here holds more than one tensor of the source at a time. A calibrated run first quantises the blocks in the order of
the model (`w3pack.pipeline.calibrate`); then the shards are written out of its files.
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
from w3pack.errors import ResourceError, UsageError
from w3pack.format import names
from w3pack.format.config import W3Config
from w3pack.format.layout import FORMAT_VERSION
from w3pack.pipeline.calibrate import Calibration, calibrate, read_work, work_files
from w3pack.pipeline.one_linear import check_finite as check_finite
from w3pack.pipeline.one_linear import measure_error as measure_error
from w3pack.pipeline.one_linear import moved, pack, quantize_weight
from w3pack.pipeline.one_linear import read_float as read_float
from w3pack.pipeline.plan import Loadable, Plan, PlannedTensor, QuantizeOptions, make_plan, settings_fingerprint
from w3pack.pipeline.qmaps import QmapChoice, read_qmaps
from w3pack.pipeline.report import ModuleError, Report, block_rows, expected_loss, kind_rows, linear_rows
from w3pack.pipeline.tune import read_tuned, tuned

#: Called when a Linear is done, with its module name and its number of weights.
Progress = Callable[[str, int], None]

_SPARE_BYTES = 64 << 20


@dataclass(frozen=True)
class Job:
    """A planned run: what `--dry-run` prints and `run` executes."""

    source: Source
    options: QuantizeOptions
    plan: Plan
    qmaps: QmapChoice
    sensitivity: Mapping[str, Any] | None = None  # see `w3pack.pipeline.mixing`

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
    calibration: Calibration | None = None,
) -> Report:
    """Execute a job; the checkpoint appears at `output` when everything is on the disk, and not before.

    Args:
        output: folder to create; absent or empty unless `overwrite`.
        workers: threads; the result does not depend on it. None: as many as torch uses.
        device: where tensors are quantised, "cpu" or "cuda".
        progress: told of each finished Linear.
        calibration: effort and data; None quantises without data.

    Raises:
        W3PackError: one of its children, see `w3pack.errors`; finished shards and blocks stay beside `output` for `resume`.
    """
    started = time.monotonic()
    _check_place(job, output)
    parts = (job.source.fingerprint(), settings_fingerprint(job.options, version=__version__), job.qmaps.fingerprint())
    # the plan as well: another transformers may find other modules loadable, and finished shards would not fit it
    plan = hashlib.sha256(repr(job.plan.shards).encode("utf-8", "backslashreplace")).hexdigest()
    if calibration is not None:
        plan += f" {hashlib.sha256(calibration.fingerprint().encode()).hexdigest()}"
    fingerprint = " ".join((*parts, plan, device.partition(":")[0]))
    staging = Staging(output, fingerprint=fingerprint, overwrite=overwrite, resume=resume)
    try:
        _check_space(job, staging)
        staging.copy(job.source.companion_files())
        facts: dict[str, Any] | None = None
        if calibration is not None:
            threads = workers or torch.get_num_threads()
            facts = calibrate(job, calibration, staging, workers=threads, device=device, progress=progress)
        done = _write_shards(job, staging, workers=workers, device=device, progress=progress)
        records = staging.records
        found = {name: entry for shard in records.values() for name, entry in shard["modules"].items()}
        errors = {name: ModuleError(**entry["error"]) for name, entry in found.items()}
        staging.publish(_documents(job, records, errors, facts))
    except BaseException:  # an interruption too
        staging.abandon()
        raise
    seconds = time.monotonic() - started
    return _report(
        job,
        output,
        errors,
        found=found,
        seconds=seconds,
        done=done,
        facts=facts,
        notes=calibration.notes if calibration else (),
    )


def _write_shards(job: Job, staging: Staging, *, workers: int | None, device: str, progress: Progress | None) -> int:
    """Write the shards that are not there yet; returns the weights quantised."""
    done = 0
    finished = work_files(staging.work)
    for file, tensors in job.plan.shards.items():
        if file in staging.records:
            continue
        record: dict[str, Any] = {"tensors": {}, "modules": {}}
        with staging.open_shard(file, _announced(job.plan, file)) as writer:
            if file == next(iter(job.plan.shards)):
                text = torch.frombuffer(bytearray(names.GUARD_TEXT), dtype=torch.uint8)
                _write(writer, record, name=job.plan.guard.name, data=text)
            for tensor in tensors:
                if tensor.spec is not None and tensor.module in finished:
                    _take(staging, finished[tensor.module], tensor.module, writer=writer, record=record)
                    done += tensor.spec.weights
                    continue
                learned = read_tuned(staging, tensor.source.name) if tensor.spec is None else None
                if learned is not None:
                    _write(writer, record, name=tensor.source.name, data=learned)
                    continue
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
        weight = read_float(job.source, tensor, block=job.plan.block, device=device)
        result = quantize_weight(
            weight,
            tensor.spec,
            module=tensor.module,
            qmap=job.qmaps.of(tensor.module),
            seed=job.options.seed,
            workers=workers,
        )
        packed = pack(result, tensor.spec)
        del result
        error = measure_error(weight, packed, spec=tensor.spec)
        del weight
        for part, data in moved(packed, "cpu").items():
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


def _take(staging: Staging, file: str, module: str, *, writer: ShardWriter, record: dict[str, Any]) -> None:
    """Write a Linear that calibration has packed already, with the scales and map of the last stage if it had one."""
    for part, data in read_work(staging, file, module).items():
        name = names.tensor(module, part)
        learned = read_tuned(staging, name)
        _write(writer, record, name=name, data=data if learned is None else learned)
    last = tuned(staging)
    entries = {} if last is None else last["modules"]
    record["modules"][module] = entries.get(module, staging.work[file]["modules"][module])


def _write(writer: ShardWriter, record: dict[str, Any], *, name: str, data: torch.Tensor) -> None:
    writer.write(name, data)
    record["tensors"][name] = {
        "dtype": str(data.dtype).removeprefix("torch."),
        "shape": list(data.shape),
        "sha256": digest(data),
    }


def _documents(
    job: Job, records: Mapping[str, Any], errors: Mapping[str, ModuleError], facts: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Manifest, index and config, in the order in which they are to be written."""
    plan, specs = job.plan, job.plan.modules
    learned = set((facts or {}).get("tuning", {}).get("vectors", ()))
    stored = {name: entry for shard in records.values() for name, entry in shard["tensors"].items()}
    found = {name: entry for shard in records.values() for name, entry in shard["modules"].items()}
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
        **({} if facts is None else {"calibration": {key: value for key, value in facts.items() if key != "losses"}}),
        **({} if job.sensitivity is None else {"sensitivity": dict(job.sensitivity)}),
        "coverage": round(plan.coverage, 6),
        "modules": {
            name: {
                **spec.to_dict(),
                "relative_error": errors[name].relative,
                "snr_db": errors[name].snr_db,
                "qmap_origin": job.qmaps.origin_of(name),
                **_calibrated(found[name]),
                **_expected(job, name, found[name]),
            }
            for name, spec in specs.items()
        },
        "kept": {
            t.source.name: f"{t.action}: {t.reason}{', tuned' if t.source.name in learned else ''}"
            for t in plan.tensors
            if t.action != "quantize"
        },
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


def _calibrated(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What the manifest says of how a Linear's scales and codes were found."""
    story = entry.get("calibration")
    if story is None or story["effort"] == "none":
        return {"scales_origin": "searched, data-free"}
    origin = f"calibrated, {story['effort']}{', then tuned' if entry.get('tuned') else ''}"
    return {"scales_origin": origin, "calibration": story}


def _expected(job: Job, module: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """What the manifest says of the cost of a Linear's error, if it was measured."""
    group_size = job.plan.modules[module].group_size
    loss = expected_loss(module, group_size, sensitivity=job.sensitivity, story=entry.get("calibration"))
    return {} if loss is None else {"expected_loss": loss}


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
        "mix": options.mix.asked if options.mix is not None else None,
        "seed": options.seed,
    }


def _report(
    job: Job,
    output: Path,
    errors: Mapping[str, ModuleError],
    *,
    found: Mapping[str, Mapping[str, Any]],
    seconds: float,
    done: int,
    facts: dict[str, Any] | None,
    notes: tuple[str, ...] = (),
) -> Report:
    specs = job.plan.modules
    linears = linear_rows(specs, found, errors, job.sensitivity)
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
        notes=(*job.plan.notes, *notes),
        calibration=facts,
        sensitivity=None if job.sensitivity is None else dict(job.sensitivity),
        linears=linears,
        blocks=block_rows(linears, None if facts is None else facts["block_errors"]),
    )
