"""A checkpoint of fused FP8 pairs as the offline commands see it: opened, described, verified."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from w3pack.checkpoint.paths import read_json
from w3pack.checkpoint.safetensors_source import SafetensorsSource
from w3pack.checkpoint.source import Source
from w3pack.checkpoint.tensor_file import digest
from w3pack.checkpoint.validate_gateup import check_fused
from w3pack.errors import CheckpointError, VerificationError, W3PackError
from w3pack.format import names
from w3pack.format.gateup import GateUpConfig, is_fused
from w3pack.pipeline.selection import kind_of
from w3pack.pipeline.verify_checkpoint import Verification, check_digests


@dataclass(frozen=True)
class FusedCheckpoint:
    """What `w3pack fuse-gateup` wrote. `manifest` is empty for a copy that save_pretrained made, which has none."""

    source: SafetensorsSource
    config: GateUpConfig
    manifest: Mapping[str, Any]


def holds_fused(folder: Path) -> bool:
    """Whether the config.json of a folder says that it holds fused pairs; False where there is none to read."""
    try:
        entry = read_json(folder / names.CONFIG).get("quantization_config")
    except W3PackError:  # whoever opens it will say what is wrong
        return False
    return isinstance(entry, dict) and is_fused(entry)


def open_fused(folder: Path) -> FusedCheckpoint:
    """Open a checkpoint of fused pairs and check that its headers fit its config.

    Raises:
        CheckpointError: damaged or incomplete.
    """
    source = SafetensorsSource(folder)
    entry = source.config.get("quantization_config")
    config = GateUpConfig.from_dict(entry if isinstance(entry, dict) else {})
    check_fused(source.tensors, config)
    manifest = read_json(folder / names.MANIFEST) if (folder / names.MANIFEST).exists() else {}
    for key in ("pairs", "tensors", "declined"):
        entries = manifest.get(key)
        sound = isinstance(entries, dict) and all(
            isinstance(value, str if key == "declined" else dict) for value in entries.values()
        )
        if manifest and not sound:
            raise CheckpointError(f"expected {names.MANIFEST} to list {key}, got none; copy the checkpoint again")
    return FusedCheckpoint(source=source, config=config, manifest=manifest)


def inspect_fused(folder: Path) -> dict[str, Any]:
    """Describe a checkpoint of fused pairs.

    Returns:
        JSON-ready: `form`, `producer`, `source`, `settings`, `weight_block_size`, `bytes`, `pair_bytes`, `kinds` (sums by kind
        of module), `pairs`, `fp8_modules`, `declined`.

    Raises:
        CheckpointError: damaged or incomplete.
    """
    fused = open_fused(folder)
    entry, tensors = fused.config.to_dict(), fused.source.tensors
    kinds: dict[str, dict[str, int]] = {}
    total = 0
    for name, spec in fused.config.pairs.items():
        nbytes = sum(tensors[names.tensor(name, part)].nbytes for part in ("weight", "weight_scale_inv"))
        row = kinds.setdefault(kind_of(name), {"pairs": 0, "weights": 0, "bytes": 0})
        row["pairs"] += 1
        row["weights"] += 2 * spec.rows * spec.columns
        row["bytes"] += nbytes
        total += nbytes
    return {
        "folder": str(folder),
        "form": entry["form"],
        "producer": f"{fused.config.producer} {fused.config.version}",
        "source": fused.manifest.get("source", {}),
        "settings": fused.manifest.get("settings", {}),
        "weight_block_size": entry["weight_block_size"],
        "bytes": sum(info.nbytes for info in tensors.values()),
        "pair_bytes": total,
        "kinds": kinds,
        "pairs": entry["pairs"],
        "fp8_modules": entry["fp8_modules"],
        "declined": dict(fused.manifest.get("declined", {})),
    }


def verify_fused(
    folder: Path, *, against: Source | None = None, progress: Callable[[str], None] | None = None
) -> Verification:
    """Check structure, digests and values and, with `against`, that the pairs are the source's bytes.

    Raises:
        CheckpointError: structure does not hold.
        VerificationError: a digest is not what it should be; names the tensor.
    """
    fused = open_fused(folder)
    digests = check_digests(fused.source, fused.manifest, progress)
    notes = [] if fused.manifest else [f"no {names.MANIFEST}: digests could not be checked"]
    if against is not None:
        notes.append(_compare(fused, against))
    return Verification(
        tensors=len(fused.source.tensors),
        digests=digests,
        modules=len(fused.config.pairs),
        errors={},
        notes=tuple(notes),
    )


def _compare(fused: FusedCheckpoint, against: Source) -> str:
    """Compare every half with the source it was made of; a sentence on what was compared."""
    compared = 0
    for entry in fused.manifest.get("pairs", {}).values():
        if "relative_error" in entry:  # it was rounded on the way
            continue
        sources = entry.get("sources")
        if not isinstance(sources, dict):
            raise CheckpointError(
                f"expected {names.MANIFEST} to list the sources of each pair, got none; copy it again"
            )
        for name, expected in sources.items():
            if name not in against.tensors or digest(against.read(name)) != expected:
                raise VerificationError(
                    f"expected {name} of {against.location} to be what was fused, got "
                    f"{'other bytes' if name in against.tensors else 'none of that name'}; this is another model"
                )
            compared += 1
    return f"{compared} tensors of {against.location} are, byte for byte, the halves of the fused pairs"
