"""The `quantization_config` that config.json carries (SPEC.md, section 1, "On disk")."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from w3pack.errors import CheckpointError
from w3pack.format.layout import CODE_BITS, FORMAT_VERSION
from w3pack.format.linear import LinearSpec

QUANT_METHOD = "w3pack"
_SHARED = ("group_size", "layout", "maps", "qmap_dtype", "bias")


@dataclass(frozen=True)
class W3Config:
    """Which modules of a checkpoint are quantised, and how.

    `modules` maps the module's name in the checkpoint to its shape; `guard` is the module under whose stock weight name
    the guard tensor is stored (`names.guard_tensor`), which keeps a loader that does not know w3pack from running on
    random weights.
    """

    modules: Mapping[str, LinearSpec]
    guard: str
    producer: str = field(default="w3pack")
    version: str = field(default="0")

    def to_dict(self) -> dict[str, Any]:
        """JSON form: the commonest value of each shared field once, exceptions with their module."""
        entries = {name: spec.to_dict() for name, spec in self.modules.items()}
        defaults = {key: Counter(entry[key] for entry in entries.values()).most_common(1)[0][0] for key in _SHARED}
        return {
            "quant_method": QUANT_METHOD,
            "format_version": FORMAT_VERSION,
            "bits": CODE_BITS,
            **defaults,
            "guard": self.guard,
            "modules": {
                name: {key: value for key, value in entry.items() if defaults.get(key) != value or key not in defaults}
                for name, entry in entries.items()
            },
            "producer": self.producer,
            "version": self.version,
        }

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> W3Config:
        """Inverse of `to_dict`.

        Raises:
            CheckpointError: another method or format version, or a field that is missing or of the wrong type.
        """
        if config.get("quant_method") != QUANT_METHOD:
            raise CheckpointError(
                f"expected quantization_config with quant_method {QUANT_METHOD!r}, got {config.get('quant_method')!r}; "
                "this is not a w3pack checkpoint"
            )
        if config.get("format_version") != FORMAT_VERSION:
            raise CheckpointError(
                f"expected format_version {FORMAT_VERSION}, got {config.get('format_version')!r}; "
                "install the w3pack release that wrote this checkpoint, or a newer one"
            )
        if config.get("bits") != CODE_BITS:
            raise CheckpointError(f"expected bits {CODE_BITS}, got {config.get('bits')!r}; the config is damaged")
        modules, guard = config.get("modules"), config.get("guard")
        if not isinstance(modules, Mapping) or not modules or not isinstance(guard, str):
            raise CheckpointError(
                "expected quantization_config to list its modules and a guard, got neither or only one; "
                "the config is damaged, quantize the model again"
            )
        defaults = {key: config[key] for key in _SHARED if key in config}
        specs: dict[str, LinearSpec] = {}
        for name, entry in modules.items():
            if not isinstance(entry, Mapping):
                raise CheckpointError(f"expected an object for module {name} in quantization_config, got {entry!r}")
            specs[name] = LinearSpec.from_dict({**defaults, **entry}, name=name)
        if guard not in specs:
            raise CheckpointError(f"expected the guard to be one of the quantised modules, got {guard!r}")
        return cls(
            modules=specs,
            guard=guard,
            producer=str(config.get("producer", "")),
            version=str(config.get("version", "")),
        )
