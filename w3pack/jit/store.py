"""Built kernels, found in this order: seeded with the package, in the user's cache, compiled now.

A file is named after its key, the digest of all that decides the code. It holds a cubin that the CUDA tools can read,
followed by facts (JSON), a SHA-256 over both, the length of the facts and a magic; a file for which these do not agree
counts as absent and is built again. Files appear by rename, so that processes may share the folder.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from w3pack.errors import ResourceError
from w3pack.jit import bindings
from w3pack.jit.compiler import Compiled, compile_text, options_for
from w3pack.jit.source import KernelText, folder_digest, kernels_folder, render

_LOG = logging.getLogger(__name__)
_MAGIC = b"w3pack1\n"
_TAIL_BYTES = 32 + 4 + len(_MAGIC)
_WARNED: set[Path] = set()


@dataclass(frozen=True)
class Found:
    """A built kernel and where it came from."""

    compiled: Compiled
    origin: Literal["seeded", "cache", "compiled"]


def cache_folder() -> Path:
    """Folder of all that w3pack caches: W3PACK_CACHE_DIR, else $XDG_CACHE_HOME/w3pack, else ~/.cache/w3pack.

    Raises:
        ResourceError: none of them is known.
    """
    own = os.environ.get("W3PACK_CACHE_DIR")
    shared = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(own) if own else Path(shared or "~/.cache") / "w3pack").expanduser().absolute()
    except RuntimeError as error:
        raise ResourceError("expected a home folder for the cache, got none; set W3PACK_CACHE_DIR") from error


def seeded_folder() -> Path:
    """Folder of the kernels that the wheel brings; it may be absent."""
    return Path(__file__).resolve().parents[1] / "cubins"


class Store:
    """Finds kernels, and keeps what it had to compile."""

    def __init__(
        self, cache_dir: Path | None = None, *, kernels: Path | None = None, seeded: Path | None = None
    ) -> None:
        """Nothing is read or made yet; `kernels` and `seeded` stand in for the package's folders."""
        self.folder = (cache_dir or cache_folder()) / "cubins"
        self.seeded = seeded or seeded_folder()
        self._kernels = kernels
        self._unsaved: dict[str, Compiled] = {}

    def find(self, text: KernelText, arch: str) -> Found:
        """The kernel, compiled only if neither folder has it.

        Raises:
            ToolchainError: it is not among the seeded ones and NVRTC is missing.
            CompileError: it does not build.
            ResourceError: the kernel text is missing.
        """
        kernels = self._kernels or kernels_folder()
        key = _key(text, arch, kernels)
        if (compiled := _read(self.seeded / _name(text, arch, key), key)) is not None:
            return Found(compiled, "seeded")
        key = _with_nvrtc(key)
        path = self.folder / _name(text, arch, key)
        if (compiled := self._unsaved.get(key) or _read(path, key)) is not None:
            return Found(compiled, "cache")
        compiled = compile_text(text, arch, kernels)
        _LOG.info("built %s for %s in %.1f s", text, arch, compiled.seconds)
        self._save(path, compiled, key)
        return Found(compiled, "compiled")

    def seed(self, text: KernelText, arch: str, compiled: Compiled, folder: Path) -> Path:
        """Write `compiled` into `folder` under the name by which `find` looks for a seeded kernel, and return it.

        Raises:
            ResourceError: it cannot be written.
        """
        key = _key(text, arch, self._kernels or kernels_folder())
        path = folder / _name(text, arch, key)
        try:
            _write(path, compiled, key)
        except OSError as error:
            raise ResourceError(f"expected to write {path}, got: {error}; free space or name another folder") from error
        return path

    def _save(self, path: Path, compiled: Compiled, key: str) -> None:
        try:
            _write(path, compiled, key)
        except OSError as error:
            self._unsaved[key] = compiled
            if self.folder not in _WARNED:
                _WARNED.add(self.folder)
                _LOG.warning(
                    "expected to keep built kernels in %s, got: %s; they will be built again by every process, "
                    "set W3PACK_CACHE_DIR to a folder that can be written",
                    self.folder,
                    error,
                )


@functools.cache
def _store_at(folder: Path) -> Store:
    return Store(folder)


def default_store() -> Store:
    """The store of the present `cache_folder()`."""
    return _store_at(cache_folder())


def _key(text: KernelText, arch: str, kernels: Path) -> str:
    """Digest of the text as rendered, the folder it can include from, the options (the architecture too), our format."""
    parts = [_MAGIC.decode(), text.entry, render(text, kernels), folder_digest(kernels), *options_for(arch)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _with_nvrtc(key: str) -> str:
    return hashlib.sha256(f"{key} NVRTC {bindings.nvrtc_version()}".encode()).hexdigest()


def _name(text: KernelText, arch: str, key: str) -> str:
    return f"{text.entry}-{arch}-{key[:32]}.cubin"


def _write(path: Path, compiled: Compiled, key: str) -> None:
    facts = {name: value for name, value in asdict(compiled).items() if name != "cubin"} | {"key": key}
    encoded = json.dumps(facts).encode()
    body = compiled.cubin + encoded
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(body + hashlib.sha256(body).digest() + len(encoded).to_bytes(4, "little") + _MAGIC)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _read(path: Path, key: str) -> Compiled | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    body, tail = data[:-_TAIL_BYTES], data[-_TAIL_BYTES:]
    length = int.from_bytes(tail[32:36], "little")
    if tail[36:] != _MAGIC or tail[:32] != hashlib.sha256(body).digest() or length > len(body):
        _LOG.warning("expected a whole kernel in %s, got a damaged file; it is not used", path)
        return None
    facts = json.loads(body[len(body) - length :])
    if facts.pop("key") != key:
        return None
    return Compiled(cubin=body[: len(body) - length], **facts)
