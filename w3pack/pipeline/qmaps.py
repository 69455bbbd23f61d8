"""`--qmap`: a named map, a JSON list of eight numbers, or a JSON object of module -> list."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from w3pack.errors import UsageError
from w3pack.format.layout import CODES_PER_MAP
from w3pack.quantize import map_names, named_map

_DEFAULT_KEY = "default"
_MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class QmapChoice:
    """Fixed maps by module. A module without one has its map learned. Maps are float32 [8], ascending, max |.| 1."""

    by_module: Mapping[str, torch.Tensor]
    default: torch.Tensor | None
    origin: str

    def of(self, module: str) -> torch.Tensor | None:
        """The fixed map of a module, or None to learn it."""
        return self.by_module.get(module, self.default)

    def origin_of(self, module: str) -> str:
        """How the report calls the map of a module."""
        return "learned" if self.of(module) is None else self.origin

    def fingerprint(self) -> str:
        """A digest of the maps themselves: the same file name may hold others tomorrow."""
        hasher = hashlib.sha256()
        for name, values in sorted({**self.by_module, "": self.default}.items()):
            hasher.update(f"{name} {None if values is None else values.tolist()}\n".encode())
        return hasher.hexdigest()

    @property
    def fits_int8(self) -> bool:
        """Whether every fixed map lies exactly on the int8 grid, so that nothing is lost by storing it there."""
        maps = [*self.by_module.values(), *([] if self.default is None else [self.default])]
        return all(bool(((m * 127).round() / 127 - m).abs().max() < 1e-6) for m in maps)

    def check(self, modules: Collection[str]) -> None:
        """UsageError for a module that the plan does not quantise."""
        unknown = [name for name in self.by_module if name not in modules]
        if unknown:
            raise UsageError(
                f"expected the modules of --qmap to be quantised Linears, got {unknown[0]!r}; check the name"
            )


def read_qmaps(choice: str | None) -> QmapChoice:
    """Read `--qmap`.

    Raises:
        UsageError: neither a known name nor a readable JSON file of eight finite numbers (or an object of such).
    """
    if choice is None:
        return QmapChoice(by_module={}, default=None, origin="learned")
    if choice in map_names():
        return QmapChoice(by_module={}, default=named_map(choice), origin=choice)
    path = Path(os.path.expanduser(choice))
    if not os.path.isfile(path):
        raise UsageError(f"expected --qmap to be one of {', '.join(map_names())} or a JSON file, got {choice[:80]!r}")
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UsageError(
                f"expected {path} to be at most {_MAX_BYTES >> 20} MiB, got {path.stat().st_size >> 20} MiB; "
                f"write a list of {CODES_PER_MAP} numbers"
            )
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"expected {path} to hold JSON, got something else; write a list of {CODES_PER_MAP} numbers"
        ) from error
    if isinstance(value, dict):
        maps = {name: _map(entry, where=f"{path.name}, {name}") for name, entry in value.items()}
        return QmapChoice(by_module=maps, default=maps.pop(_DEFAULT_KEY, None), origin=path.name)
    return QmapChoice(by_module={}, default=_map(value, where=path.name), origin=path.name)


def _map(value: object, *, where: str) -> torch.Tensor:
    numbers = value if isinstance(value, list) else []
    if len(numbers) != CODES_PER_MAP or not all(type(n) in (int, float) and abs(n) < 1e30 for n in numbers):
        raise UsageError(
            f"expected a list of {CODES_PER_MAP} finite numbers in {where}, got {str(value)[:80]}; mend the file"
        )
    entries = torch.tensor(numbers, dtype=torch.float64).sort().values
    largest = float(entries.abs().max())
    if largest == 0 or bool((entries[1:] == entries[:-1]).any()):
        raise UsageError(f"expected {CODES_PER_MAP} different numbers in {where}, got {str(value)[:80]}; mend the file")
    return (entries / largest).float()  # the factor goes into the scales, which are searched for the map
