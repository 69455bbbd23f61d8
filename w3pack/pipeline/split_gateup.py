"""What `w3pack fuse-gateup` wrote -> the checkpoint that it was made from: names, dtypes, bytes, files.

The manifest says which tensor was where and in which dtype; every restored half is compared with its digest there.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from w3pack import __version__
from w3pack.checkpoint.paths import read_json
from w3pack.checkpoint.safetensors_source import SafetensorsSource
from w3pack.checkpoint.source import TensorInfo
from w3pack.checkpoint.staging import Staging
from w3pack.checkpoint.tensor_file import DTYPES, digest
from w3pack.errors import CheckpointError, UnsupportedError, VerificationError
from w3pack.format import names
from w3pack.format.gateup import ADJACENT_FORM, FUSED_FORM, SCALES, SPLIT_FORM, WEIGHT, GateUpSpec, halves_of
from w3pack.format.layout import FORMAT_VERSION
from w3pack.pack.gateup import narrow_scales, split_rows
from w3pack.pipeline.fuse_gateup import Progress, index_of
from w3pack.pipeline.fuse_plan import info_of
from w3pack.pipeline.output import check_place, check_space, write_tensor

_AGAIN = "copy the checkpoint completely, with its w3pack.json"


@dataclass(frozen=True)
class Restored:
    """One tensor of the output: `half` 0 or 1 of the fused tensor `origin`, or `origin` as it is (None)."""

    origin: str
    half: int | None
    outputs: tuple[TensorInfo, ...]
    sha256: str | None

    @property
    def info(self) -> TensorInfo:
        """The tensor as it will be announced."""
        return self.outputs[0]


@dataclass(frozen=True)
class SplitJob:
    """A planned split."""

    source: SafetensorsSource
    shards: Mapping[str, tuple[Restored, ...]]
    config: dict[str, Any]
    pairs: int

    @property
    def output_bytes(self) -> int:
        """Bytes of all tensors of the output."""
        return sum(tensor.info.nbytes for tensors in self.shards.values() for tensor in tensors)

    @property
    def copied_bytes(self) -> int:
        """Bytes of the files that are copied as they are."""
        return sum(path.stat().st_size for path in self.source.companion_files().values())


@dataclass(frozen=True)
class SplitReport:
    """What a split did."""

    output: str
    pairs: int
    files: int
    tensors: int
    output_bytes: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)


def prepare_split(folder: Path, *, location: str | None = None) -> SplitJob:
    """Read the manifest of a fused checkpoint and plan its undoing.

    Raises:
        UnsupportedError: not a checkpoint that `w3pack fuse-gateup` wrote.
        CheckpointError: tensors or a manifest that are damaged or do not belong together.
    """
    source = SafetensorsSource(folder, location=location)
    if not (folder / names.MANIFEST).exists():
        raise UnsupportedError(
            f"expected a checkpoint that `w3pack fuse-gateup` wrote, got {folder} without {names.MANIFEST}; {_AGAIN}"
        )
    manifest = read_json(folder / names.MANIFEST)
    if manifest.get("form") not in (FUSED_FORM, ADJACENT_FORM):
        raise UnsupportedError(
            f"expected a checkpoint that `w3pack fuse-gateup` wrote, got form {manifest.get('form')!r} in "
            f"{names.MANIFEST}; there is nothing to split"
        )
    try:
        pairs = manifest["pairs"] if manifest["form"] == FUSED_FORM else {}
        sums = {name: sha for entry in manifest["pairs"].values() for name, sha in entry["sources"].items()}
        halves = _halves(pairs)
        shards = {
            _plain_name(file): tuple(_restored(name, entry, halves, sums) for name, entry in tensors.items())
            for file, tensors in manifest["split"]["files"].items()
        }
        config = dict(manifest["split"]["config"])
        count = len(manifest["pairs"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"expected {names.MANIFEST} to say where every tensor came from, got {type(error).__name__} while reading it; {_AGAIN}"
        ) from error
    job = SplitJob(source=source, shards=shards, config=config, pairs=count)
    _check(job)
    return job


def _plain_name(file: str) -> str:
    if Path(file).name != file or not file.endswith(".safetensors"):
        raise CheckpointError(
            f"expected {names.MANIFEST} to name safetensors files of one folder, got {file!r}; {_AGAIN}"
        )
    return file


def _halves(pairs: Mapping[str, Any]) -> dict[str, tuple[str, int]]:
    """Restored tensor -> the fused tensor that holds it, and which half it is."""
    found: dict[str, tuple[str, int]] = {}
    for fused, entry in pairs.items():
        spec = GateUpSpec(entry["rows"], entry["columns"], entry["gate"], entry["up"])
        for half, module in enumerate(halves_of(fused, spec)):
            for part in (WEIGHT, SCALES):
                found[names.tensor(module, part)] = (names.tensor(fused, part), half)
    return found


def _restored(
    name: str, entry: Mapping[str, Any], halves: Mapping[str, tuple[str, int]], sums: Mapping[str, str]
) -> Restored:
    origin, half = halves.get(name, (name, None))
    info = info_of(name, entry["dtype"], [int(side) for side in entry["shape"]])
    return Restored(origin=origin, half=half, outputs=(info,), sha256=sums.get(name))


def _check(job: SplitJob) -> None:
    """CheckpointError unless every tensor of the output can be made of one that is there, and none is left over."""
    needed = {tensor.origin for tensors in job.shards.values() for tensor in tensors}
    entry = job.source.config.get("quantization_config")
    guard = names.guard_tensor(str(entry.get("guard"))) if isinstance(entry, dict) else ""
    missing = [name for name in needed if name not in job.source.tensors]
    strange = [name for name in job.source.tensors if name not in needed and name != guard]
    if missing or strange:
        raise CheckpointError(
            f"expected the tensors that {names.MANIFEST} lists, got {len(missing)} missing and {len(strange)} more, such as "
            f"{sorted(missing + strange)[0]}; {_AGAIN}"
        )
    for tensors in job.shards.values():
        for tensor in tensors:
            have, want = job.source.tensors[tensor.origin], tensor.info
            shape = want.shape if tensor.half is None else (2 * (want.shape or (0,))[0], *want.shape[1:])
            widened = tensor.half is not None and have.dtype == "F32"
            if have.shape != shape or not (have.dtype == want.dtype or widened):
                raise CheckpointError(
                    f"expected {have.name} of shape {list(shape)} for {want.name}, got {have.dtype} {list(have.shape)}; {_AGAIN}"
                )


def run_split(
    job: SplitJob, output: Path, *, overwrite: bool = False, resume: bool = False, progress: Progress | None = None
) -> SplitReport:
    """Execute a split; the checkpoint appears at `output` when everything is on the disk, and not before.

    Raises:
        VerificationError: a restored half is not what the manifest says the source was.
        W3PackError: see `w3pack.errors`; finished files stay beside `output` for `resume`.
    """
    started = time.monotonic()
    check_place(job.source, output)
    plan = hashlib.sha256(repr(job.shards).encode("utf-8", "backslashreplace")).hexdigest()
    fingerprint = f"split-gateup w3pack {__version__} format {FORMAT_VERSION} {job.source.fingerprint()} {plan}"
    staging = Staging(output, fingerprint=fingerprint, overwrite=overwrite, resume=resume)
    try:
        check_space(job, staging, copied_bytes=job.copied_bytes)
        staging.copy(job.source.companion_files())
        for file, tensors in job.shards.items():
            if file in staging.records:
                continue
            record: dict[str, Any] = {"tensors": {}}
            with staging.open_shard(file, [tensor.info for tensor in tensors]) as writer:
                for tensor in tensors:
                    write_tensor(writer, record, name=tensor.info.name, data=_restore(job, tensor))
                    if progress is not None:
                        progress(tensor.info.name, tensor.info.nbytes)
            staging.finish_shard(file, record)
        staging.publish(_documents(job, staging.records))
    except BaseException:  # an interruption too
        staging.abandon()
        raise
    return SplitReport(
        output=str(output),
        pairs=job.pairs,
        files=len(job.shards),
        tensors=sum(map(len, job.shards.values())),
        output_bytes=job.output_bytes,
        seconds=time.monotonic() - started,
    )


def _restore(job: SplitJob, tensor: Restored) -> torch.Tensor:
    data = job.source.read(tensor.origin)
    if tensor.half is not None:
        data = split_rows(data)[tensor.half]
        dtype = DTYPES[tensor.info.dtype]
        if data.dtype != dtype:
            data = narrow_scales(data, dtype)
    if tensor.sha256 is not None and digest(data) != tensor.sha256:
        raise VerificationError(
            f"expected {tensor.info.name} to have the digest of the source, got other bytes; copy the checkpoint again"
        )
    return data


def _documents(job: SplitJob, records: Mapping[str, Any]) -> dict[str, Any]:
    stored = {name: entry for shard in records.values() for name, entry in shard["tensors"].items()}
    documents: dict[str, Any] = {
        names.MANIFEST: {
            "format_version": FORMAT_VERSION,
            "producer": "w3pack",
            "version": __version__,
            "form": SPLIT_FORM,
            "tensors": {name: stored[name] for name in sorted(stored)},
        }
    }
    documents |= index_of(records, job.shards, total=job.output_bytes)
    documents[names.CONFIG] = job.config
    return documents
