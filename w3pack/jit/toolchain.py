"""What this machine can build kernels with, and what is built already: for a report, never raising."""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import dataclass
from pathlib import Path

from w3pack.errors import W3PackError
from w3pack.jit import bindings
from w3pack.jit.store import Store


@dataclass(frozen=True)
class Toolchain:
    """Versions are None where the part is missing; `problems` has a sentence for each that is."""

    cuda_core: str | None
    cuda_bindings: str | None
    nvrtc: str | None
    problems: tuple[str, ...]
    #: None where no cache folder is known.
    cache_folder: Path | None
    cache_writable: bool
    cache_entries: int
    cache_bytes: int
    seeded_entries: int

    @property
    def can_compile(self) -> bool:
        """Whether kernels can be built here and given to a driver."""
        return not self.problems


def toolchain(store: Store | None = None) -> Toolchain:
    """Look, without making a folder or touching a GPU; `store` stands in for the default one."""
    problems: list[str] = []
    for find in (bindings.object_code, bindings.nvrtc):
        try:
            find()
        except W3PackError as error:
            problems.append(str(error))
    try:
        nvrtc = ".".join(map(str, bindings.nvrtc_version()))
    except W3PackError:
        nvrtc = None
    try:
        store = store or Store()
    except W3PackError as error:
        problems.append(str(error))
    sizes = _sizes(store.folder) if store else []
    return Toolchain(
        cuda_core=_version("cuda-core"),
        cuda_bindings=_version("cuda-bindings"),
        nvrtc=nvrtc,
        problems=tuple(problems),
        cache_folder=store.folder if store else None,
        cache_writable=store is not None and _writable(store.folder),
        cache_entries=len(sizes),
        cache_bytes=sum(sizes),
        seeded_entries=len(_sizes(store.seeded)) if store else 0,
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _sizes(folder: Path) -> list[int]:
    sizes = []
    for path in folder.glob("*.cubin"):
        try:
            sizes.append(path.stat().st_size)
        except OSError:  # gone since it was listed
            continue
    return sizes


def _writable(folder: Path) -> bool:
    while not os.path.lexists(folder):
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
