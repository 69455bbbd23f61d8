"""What is in a packed checkpoint, from headers, config and manifest alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from w3pack.errors import CheckpointError
from w3pack.format import names
from w3pack.format.linear import LinearSpec
from w3pack.pipeline.packed import PackedCheckpoint, open_packed, tensor_parallel_degrees
from w3pack.pipeline.selection import kind_of


def inspect_checkpoint(folder: Path) -> dict[str, Any]:
    """Describe a packed checkpoint.

    Returns:
        JSON-ready: `producer`, `settings`, `bits_per_weight`, `bytes`, `tensor_parallel_degrees`, `kinds` (sums by kind of
        module) and `modules` (each with shape, maps, map values, error figures and permitted cuts).

    Raises:
        CheckpointError: not a packed checkpoint, damaged or incomplete.
    """
    packed = open_packed(folder)
    specs = packed.config.modules
    modules = {name: _module(packed, name, spec) for name, spec in specs.items()}
    kinds: dict[str, dict[str, Any]] = {}
    for name, spec in specs.items():
        row = kinds.setdefault(kind_of(name), {"modules": 0, "weights": 0, "bytes": 0, "worst_relative_error": None})
        row["modules"] += 1
        row["weights"] += spec.weights
        row["bytes"] += spec.nbytes
        error = modules[name]["relative_error"]
        if error is not None:
            row["worst_relative_error"] = max(error, row["worst_relative_error"] or 0.0)
    weights = sum(spec.weights for spec in specs.values())
    return {
        "folder": str(folder),
        "producer": f"{packed.config.producer} {packed.config.version}",
        "source": packed.manifest.get("source", {}),
        "settings": packed.manifest.get("settings", {}),
        "coverage": packed.manifest.get("coverage"),
        "sensitivity": _sensitivity(packed),
        "weights": weights,
        "bits_per_weight": 8 * sum(spec.nbytes for spec in specs.values()) / weights,
        "bytes": sum(info.nbytes for info in packed.source.tensors.values()),
        "packed_bytes": sum(spec.nbytes for spec in specs.values()),
        "tensor_parallel_degrees": tensor_parallel_degrees(specs),
        "kinds": kinds,
        "modules": modules,
        "kept": packed.manifest.get("kept", {}),
    }


def _sensitivity(packed: PackedCheckpoint) -> dict[str, Any] | None:
    """What the manifest says of sensitivities and mixed precision.

    Raises:
        CheckpointError: not what a run writes there.
    """
    found = packed.manifest.get("sensitivity")
    if found is None:
        return None
    try:
        modules, mixed = found["modules"], found["mixed"]
        sound = all(form["loss"] >= 0 for entry in modules.values() for form in entry.values())
        sound &= set(found["most_sensitive_first"]) == set(modules)
        sound &= all(str(found["group_size"]) in entry for entry in modules.values())
        sound &= isinstance(found["unit"], str) and type(found["tokens"]) is int
        if mixed is not None:
            numbers = ("bytes", "bytes_without", "bits_per_weight", "bits_per_weight_without", "loss", "loss_without")
            sound &= all(mixed[key] >= 0 for key in numbers) and isinstance(mixed["group_sizes"], dict)
            sound &= isinstance(mixed["asked"], str) and isinstance(mixed["kept"], list)
    except (KeyError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise CheckpointError(
            f"expected {names.MANIFEST} to record sensitivities as a run writes them, got something else; "
            "copy the checkpoint again"
        )
    return dict(found)


def _module(packed: PackedCheckpoint, name: str, spec: LinearSpec) -> dict[str, Any]:
    by_rows, by_columns = spec.tensor_parallel_degrees()
    entry = packed.manifest.get("modules", {}).get(name, {})
    values = packed.read(name, "qmap")[0]
    return {
        **spec.to_dict(),
        "bits_per_weight": spec.bits_per_weight,
        "bytes": spec.nbytes,
        "first_map": [int(v) if spec.qmap_dtype == "int8" else float(v) for v in values.tolist()],
        "qmap_origin": entry.get("qmap_origin"),
        "relative_error": packed.relative_error(name),
        "snr_db": entry.get("snr_db"),
        "expected_loss": entry.get("expected_loss"),
        "cut_rows_by": by_rows,
        "cut_columns_by": by_columns,
    }
