"""A checkpoint of another 3-bit format -> a w3pack checkpoint, Linear by Linear, from files to files, without rounding.

    recognise the format -> check every header -> plan every tensor -> claim the output -> copy the other files
    for each shard: for each tensor: read, unpack, sort the table, pack, compare with the source, write, digest
    write index, manifest and config -> let the folder appear

What a packed Linear means is compared with the source's own formula before it is written: a difference is an error, except
where the source's tables are finer than float16 and may be rounded.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from w3pack import __version__
from w3pack.checkpoint.import_source import ImportSource
from w3pack.checkpoint.staging import Staging
from w3pack.checkpoint.tensor_file import ShardWriter
from w3pack.errors import VerificationError
from w3pack.format import names
from w3pack.format.config import W3Config
from w3pack.format.layout import FORMAT_VERSION, Layout
from w3pack.format.linear import LinearSpec
from w3pack.pack.exact_map import exact_map, sort_table
from w3pack.pack.words import pack_codes, pack_scales, pad_qmap
from w3pack.pipeline.import_plan import make_import_plan
from w3pack.pipeline.output import announced, check_place, check_space, write_guard, write_tensor
from w3pack.pipeline.plan import Loadable, Plan, PlannedTensor
from w3pack.pipeline.quantize_model import check_finite, measure_error
from w3pack.pipeline.report import ModuleError, Report, kind_rows

#: Called when a Linear is done, with its module name and its number of weights.
Progress = Callable[[str, int], None]


@dataclass(frozen=True)
class ImportJob:
    """A planned import."""

    source: ImportSource
    layout: Layout
    plan: Plan

    @property
    def copied_bytes(self) -> int:
        """Bytes of the files that are copied as they are."""
        return sum(path.stat().st_size for path in self.source.companion_files().values())


def prepare_import(
    source: ImportSource,
    *,
    layout: Layout = "dense",
    max_shard_bytes: int = 5_000_000_000,
    loadable: Loadable | None = None,
) -> ImportJob:
    """Plan an import; see `make_import_plan`."""
    plan = make_import_plan(source, layout=layout, max_shard_bytes=max_shard_bytes, loadable=loadable)
    return ImportJob(source=source, layout=layout, plan=plan)


def run_import(
    job: ImportJob, output: Path, *, overwrite: bool = False, resume: bool = False, progress: Progress | None = None
) -> Report:
    """Execute an import; the checkpoint appears at `output` when everything is on the disk, and not before.

    Args:
        output: folder to create; absent or empty unless `overwrite`.
        progress: told of each finished Linear.

    Raises:
        W3PackError: one of its children, see `w3pack.errors`; finished shards stay beside `output` for `resume`.
    """
    started = time.monotonic()
    check_place(job.source, output)
    plan = hashlib.sha256(repr(job.plan.shards).encode("utf-8", "backslashreplace")).hexdigest()
    fingerprint = f"import w3pack {__version__} format {FORMAT_VERSION} {job.source.fingerprint()} {plan}"
    staging = Staging(output, fingerprint=fingerprint, overwrite=overwrite, resume=resume)
    try:
        check_space(job.plan, staging, copied_bytes=job.copied_bytes)
        staging.copy(job.source.companion_files())
        done = _write_shards(job, staging, progress=progress)
        errors = {
            name: ModuleError(**entry["error"])
            for shard in staging.records.values()
            for name, entry in shard["modules"].items()
        }
        staging.publish(_documents(job, staging.records, errors))
    except BaseException:  # an interruption too
        staging.abandon()
        raise
    return _report(job, output, errors, seconds=time.monotonic() - started, done=done)


def _write_shards(job: ImportJob, staging: Staging, *, progress: Progress | None) -> int:
    """Write the shards that are not there yet; returns the weights imported."""
    done = 0
    for file, tensors in job.plan.shards.items():
        if file in staging.records:
            continue
        record: dict[str, Any] = {"tensors": {}, "modules": {}}
        with staging.open_shard(file, announced(job.plan, file)) as writer:
            write_guard(job.plan, file, writer=writer, record=record)
            for tensor in tensors:
                if tensor.spec is None:
                    data = job.source.read(tensor.source.name)
                    check_finite(data, tensor.source.name)
                    write_tensor(writer, record, name=tensor.source.name, data=data)
                    continue
                _import_linear(job, tensor, tensor.spec, writer=writer, record=record)
                done += tensor.spec.weights
                if progress is not None:
                    progress(tensor.module, tensor.spec.weights)
        staging.finish_shard(file, record)
    return done


def _import_linear(
    job: ImportJob, tensor: PlannedTensor, spec: LinearSpec, *, writer: ShardWriter, record: dict[str, Any]
) -> None:
    module = tensor.module
    rounded = job.source.importer.shapes[module].rounded
    linear = job.source.importer.read(module)
    codes, table = sort_table(linear.codes, linear.table)
    qmap, scales = exact_map(table, linear.scales, name=module, rounded=rounded)
    packed: dict[str, torch.Tensor] = {
        names.CODES: pack_codes(codes, spec),
        names.SCALES: pack_scales(scales, spec),
        names.QMAP: pad_qmap(qmap, spec),
    }
    del codes
    error = measure_error(linear.dequantize(), packed, spec=spec)
    if error.squared_error and not rounded:
        raise VerificationError(
            f"expected the packed {module} to mean what the source means, got a relative error of {error.relative:g}; "
            "this is a defect in w3pack, report it"
        )
    for part, data in packed.items():
        write_tensor(writer, record, name=names.tensor(module, part), data=data)
    record["modules"][module] = {
        "error": {"squared_error": error.squared_error, "squared_weight": error.squared_weight}
    }


def _notes(job: ImportJob, errors: Mapping[str, ModuleError]) -> tuple[str, ...]:
    """The plan's notes, and one on tables that had to be rounded."""
    inexact = [error.relative for error in errors.values() if error.squared_error]
    if not inexact:
        return job.plan.notes
    sentence = f"tables of {len(inexact)} Linears were rounded to float16 (relative error at most {max(inexact):.1e})"
    return (*job.plan.notes, sentence)


def _documents(job: ImportJob, records: Mapping[str, Any], errors: Mapping[str, ModuleError]) -> dict[str, Any]:
    """Manifest, index and config, in the order in which they are to be written."""
    plan, specs, origin = job.plan, job.plan.modules, job.source.importer.format
    stored = {name: entry for shard in records.values() for name, entry in shard["tensors"].items()}
    location = job.source.location
    documents: dict[str, Any] = {
        names.MANIFEST: {
            "format_version": FORMAT_VERSION,
            "producer": "w3pack",
            "version": __version__,
            "source": {"location": Path(location).name or location, "notes": list(_notes(job, errors))},
            "settings": {"import": origin, "layout": job.layout},
            "coverage": round(plan.coverage, 6),
            "modules": {
                name: {
                    **spec.to_dict(),
                    "relative_error": errors[name].relative,
                    "snr_db": errors[name].snr_db,
                    "qmap_origin": origin,
                    "scales_origin": origin,
                }
                for name, spec in specs.items()
            },
            "kept": {t.source.name: f"{t.action}: {t.reason}" for t in plan.tensors if t.spec is None},
            "tensors": {name: stored[name] for name in sorted(stored)},
        }
    }
    if len(plan.shards) > 1:
        weight_map = {name: file for file in plan.shards for name in records[file]["tensors"]}
        documents[names.INDEX] = {
            "metadata": {"total_size": plan.output_bytes},
            "weight_map": dict(sorted(weight_map.items())),
        }
    w3 = W3Config(modules=specs, guard=plan.guard.name.removesuffix(".weight"), version=__version__)
    documents[names.CONFIG] = {**job.source.config, "quantization_config": w3.to_dict()}
    return documents


def _report(job: ImportJob, output: Path, errors: Mapping[str, ModuleError], *, seconds: float, done: int) -> Report:
    specs = job.plan.modules
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
        worst=tuple(sorted(((name, errors[name].relative) for name in specs), key=lambda pair: -pair[1])[:3]),
        notes=_notes(job, errors),
    )
