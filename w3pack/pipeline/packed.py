"""A packed checkpoint as the offline commands see it: config, manifest and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from w3pack.checkpoint.paths import read_json
from w3pack.checkpoint.safetensors_source import SafetensorsSource
from w3pack.checkpoint.validate import check_tensors
from w3pack.errors import CheckpointError, UnsupportedError
from w3pack.format import names
from w3pack.format.config import W3Config
from w3pack.format.gateup import is_fused
from w3pack.format.linear import LinearSpec


@dataclass(frozen=True)
class PackedCheckpoint:
    """What `w3pack quantize` wrote. `manifest` is empty for a copy that save_pretrained made, which has none."""

    source: SafetensorsSource
    config: W3Config
    manifest: Mapping[str, Any]

    def read(self, module: str, part: str) -> torch.Tensor:
        """One stored tensor of a quantised module."""
        return self.source.read(names.tensor(module, part))

    def relative_error(self, module: str) -> float | None:
        """The error figure of the manifest, where there is one."""
        entry = self.manifest.get("modules", {}).get(module)
        value = entry.get("relative_error") if isinstance(entry, dict) else None
        return float(value) if isinstance(value, int | float) else None


def open_packed(folder: Path) -> PackedCheckpoint:
    """Open a packed checkpoint and check that its headers fit its config.

    Raises:
        UsageError: there is no such folder.
        CheckpointError: not a w3pack checkpoint, damaged, or incomplete.
        UnsupportedError: one of fused FP8 pairs.
    """
    source = SafetensorsSource(folder)
    entry = source.config.get("quantization_config")
    if not isinstance(entry, dict):
        raise CheckpointError(
            f"expected a checkpoint that w3pack has packed, got {folder} without quantization_config; quantize it first"
        )
    if is_fused(entry):
        raise UnsupportedError(
            f"expected a checkpoint of 3-bit Linears, got the fused FP8 pairs of {folder}; transformers, `w3pack inspect`, "
            "`w3pack verify` and `w3pack fuse-gateup --split` read those"
        )
    config = W3Config.from_dict(entry)
    check_tensors(source.tensors, config)
    manifest = read_json(folder / names.MANIFEST) if (folder / names.MANIFEST).exists() else {}
    for key in ("modules", "tensors"):
        entries = manifest.get(key)
        if manifest and not (isinstance(entries, dict) and all(isinstance(entry, dict) for entry in entries.values())):
            raise CheckpointError(f"expected {names.MANIFEST} to list {key}, got none; copy the checkpoint again")
    _check_manifest(manifest)
    return PackedCheckpoint(source=source, config=config, manifest=manifest)


def _check_manifest(manifest: Mapping[str, Any]) -> None:
    coverage, kept = manifest.get("coverage"), manifest.get("kept", {})
    if not (coverage is None or type(coverage) in (int, float)) or not isinstance(kept, dict):
        raise CheckpointError(
            f"expected {names.MANIFEST} to record coverage and kept tensors, got something else; copy the checkpoint again"
        )


def tensor_parallel_degrees(modules: Mapping[str, LinearSpec]) -> list[int]:
    """Degrees at which every Linear can be cut as transformers and vLLM cut decoders: whole tiles, whole groups.

    o_proj, down_proj and w2 are cut along columns, all others along rows.
    """
    degrees = set(range(1, 17))
    for name, spec in modules.items():
        by_rows, by_columns = spec.tensor_parallel_degrees()
        along_columns = name.rpartition(".")[2] in ("o_proj", "down_proj", "w2", "out_proj", "dense", "fc2", "c_proj")
        degrees &= set(by_columns if along_columns else by_rows)
    return sorted(degrees) or [1]
