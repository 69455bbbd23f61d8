"""Fused FP8 gate/up pairs: their shape, their names, and the `quantization_config` that says so (SPEC.md, section 2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from w3pack.errors import CheckpointError
from w3pack.format.config import QUANT_METHOD
from w3pack.format.layout import FORMAT_VERSION
from w3pack.format.linear import MAX_SIDE

#: Value of `form` in a quantization_config of fused pairs.
FUSED_FORM = "fp8_gate_up"
#: Value of `form` in the manifest of a checkpoint whose pairs lie side by side under the source's names.
ADJACENT_FORM = "fp8_gate_up_adjacent"
#: Value of `form` in the manifest of a checkpoint that was split again.
SPLIT_FORM = "fp8_gate_up_split"
FUSED_LEAF = "gate_up_proj"
WEIGHT = "weight"
SCALES = "weight_scale_inv"
#: Key under which a file of adjacent pairs lists them in its header.
METADATA_KEY = "w3pack_gate_up"

#: (gate, up) as checkpoints call them -> the model types for which the names mean that; None: whatever the model.
PAIR_NAMES: dict[tuple[str, str], frozenset[str] | None] = {
    ("gate_proj", "up_proj"): None,
    ("w1", "w3"): frozenset({"mixtral", "phimoe", "minimax", "minimax_m2"}),
}
#: Model types whose `gate_up_proj` holds gate and up in turns, row by row or column by column.
INTERLEAVED = frozenset({"gpt_oss"})

_Entry = TypeVar("_Entry", "GateUpSpec", "Fp8Spec")


@dataclass(frozen=True)
class GateUpSpec:
    """One fused pair: two matrices of `rows` x `columns`, called `gate` and `up` beside the fused module."""

    rows: int
    columns: int
    gate: str = "gate_proj"
    up: str = "up_proj"

    @property
    def weight_shape(self) -> tuple[int, int]:
        """Shape of the fused weight."""
        return 2 * self.rows, self.columns

    def grid_shape(self, block: tuple[int, int]) -> tuple[int, int]:
        """Shape of the fused scale grid: two stacked grids."""
        return 2 * -(-self.rows // block[0]), -(-self.columns // block[1])


@dataclass(frozen=True)
class Fp8Spec:
    """One unfused FP8 Linear of the same checkpoint. `scales` is the safetensors name of its scales' dtype."""

    rows: int
    columns: int
    scales: str
    bias: bool

    def grid_shape(self, block: tuple[int, int]) -> tuple[int, int]:
        """Shape of the scale grid."""
        return -(-self.rows // block[0]), -(-self.columns // block[1])


@dataclass(frozen=True)
class GateUpConfig:
    """Which modules of a checkpoint are fused pairs, and which are plain FP8 Linears.

    `pairs` maps the fused module's name to its shape. `guard` is a gate module under whose stock weight name the guard
    tensor lies (SPEC.md, "Guard").
    """

    pairs: Mapping[str, GateUpSpec]
    fp8: Mapping[str, Fp8Spec]
    block: tuple[int, int]
    guard: str
    producer: str = "w3pack"
    version: str = "0"

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "quant_method": QUANT_METHOD,
            "format_version": FORMAT_VERSION,
            "form": FUSED_FORM,
            "bits": 8,
            "weight_block_size": list(self.block),
            "guard": self.guard,
            "pairs": {name: asdict(spec) for name, spec in self.pairs.items()},
            "fp8_modules": {name: asdict(spec) for name, spec in self.fp8.items()},
            "producer": self.producer,
            "version": self.version,
        }

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> GateUpConfig:
        """Inverse of `to_dict`.

        Raises:
            CheckpointError: another method, form or format version, or a field that is missing or of the wrong type.
        """
        said = (config.get("quant_method"), config.get("form"), config.get("format_version"))
        if said != (QUANT_METHOD, FUSED_FORM, FORMAT_VERSION):
            raise CheckpointError(
                f"expected quant_method {QUANT_METHOD!r}, form {FUSED_FORM!r} and format_version {FORMAT_VERSION}, got "
                f"{said[0]!r}, {said[1]!r} and {said[2]!r}; install the w3pack release that wrote this checkpoint"
            )
        block, guard = config.get("weight_block_size"), config.get("guard")
        whole = isinstance(block, list) and len(block) == 2 and all(type(side) is int and side > 0 for side in block)
        if not whole or block is None or not isinstance(guard, str):
            raise CheckpointError(
                f"expected a weight_block_size of two numbers and a guard, got {block!r} and {guard!r}; "
                "the quantization_config is damaged, fuse the checkpoint again"
            )
        pairs, fp8 = _entries(config, "pairs", GateUpSpec), _entries(config, "fp8_modules", Fp8Spec)
        if guard not in {half for name, spec in pairs.items() for half in halves_of(name, spec)}:
            raise CheckpointError(f"expected the guard to be one half of a fused pair, got {guard!r}")
        return cls(
            pairs=pairs,
            fp8=fp8,
            block=(block[0], block[1]),
            guard=guard,
            producer=str(config.get("producer", "")),
            version=str(config.get("version", "")),
        )


def is_fused(config: Mapping[str, Any]) -> bool:
    """Whether a quantization_config is one of fused pairs."""
    return config.get("quant_method") == QUANT_METHOD and config.get("form") == FUSED_FORM


def halves_of(fused: str, spec: GateUpSpec) -> tuple[str, str]:
    """Names of the gate and the up module that a fused module stands for."""
    parent = fused.rpartition(".")[0]
    return f"{parent}.{spec.gate}".lstrip("."), f"{parent}.{spec.up}".lstrip(".")


def _entries(config: Mapping[str, Any], key: str, kind: type[_Entry]) -> dict[str, _Entry]:
    fields: dict[str, type] = {"rows": int, "columns": int}
    fields |= {"gate": str, "up": str} if kind is GateUpSpec else {"scales": str, "bias": bool}
    found: dict[str, _Entry] = {}
    entries = config.get(key)
    for name, entry in entries.items() if isinstance(entries, Mapping) else [("", entries)]:
        values: dict[str, Any] = {key: entry.get(key) for key in fields} if isinstance(entry, Mapping) else {}
        sound = values and all(type(values[field]) is wanted for field, wanted in fields.items())
        if not sound or not all(1 <= int(values[side]) <= MAX_SIDE for side in ("rows", "columns")):
            raise CheckpointError(
                f"expected {', '.join(fields)} for {name or 'each module'} in {key} of quantization_config, got {entry!r}; "
                "the config is damaged, fuse the checkpoint again"
            )
        found[name] = kind(**values)
    return found
