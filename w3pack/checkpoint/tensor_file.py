"""Safetensors files, one tensor at a time.

The `safetensors` package reads through a memory map and serialises a whole dictionary at once, so peak memory is a shard.
Here a tensor is read with plain reads into its own buffer and a shard is written tensor by tensor behind a header that
the plan already knows, so peak memory is a tensor. Every header is bounded and checked before anything it says is used.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from w3pack.checkpoint.source import TensorInfo
from w3pack.errors import CheckpointError, ResourceError, W3PackError

#: The limit of the safetensors format itself.
MAX_HEADER_BYTES = 100_000_000

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's entry in a file's header, with the absolute byte range of its data."""

    info: TensorInfo
    start: int
    stop: int


def _bad(path: Path, expected: str, got: str) -> CheckpointError:
    return CheckpointError(
        f"{path.name} is damaged: expected {expected}, got {got}; download or copy the file again ({path})"
    )


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, in the order of their data.

    Raises:
        CheckpointError: not a safetensors file, truncated, or a header that contradicts itself or the file's size.
        ResourceError: the file cannot be opened.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise _bad(path, "at least 8 bytes", f"{size}")
            length = int.from_bytes(prefix, "little")
            if length > min(MAX_HEADER_BYTES, size - 8):
                raise _bad(path, f"a header of at most {min(MAX_HEADER_BYTES, size - 8)} bytes", f"{length}")
            raw = file.read(length)
    except OSError as error:
        raise ResourceError(
            f"expected to read {path}, got: {error.strerror}; check that it exists and is readable"
        ) from error
    try:
        header = json.loads(raw, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise _bad(path, "a JSON header without repeated names", "something else") from error
    if not isinstance(header, dict):
        raise _bad(path, "a JSON object as header", type(header).__name__)
    tensors = [_entry(path, name, entry, length) for name, entry in header.items() if name != "__metadata__"]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.stop))
    end = 8 + length
    for tensor in tensors:
        if tensor.start != end:
            raise _bad(path, f"the data of {tensor.info.name} at byte {end}", f"byte {tensor.start}")
        end = tensor.stop
    if end != size:
        raise _bad(path, f"{end} bytes as its header says", f"{size} bytes")
    return {tensor.info.name: tensor for tensor in tensors}


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; ValueError for a repeated key, of which a dict would silently keep the last."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("repeated key")
    return found


def _entry(path: Path, name: str, entry: Any, header_length: int) -> StoredTensor:
    if not isinstance(entry, dict):
        raise _bad(path, f"an object for tensor {name}", repr(entry)[:60])
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _bad(path, f"a known dtype for tensor {name}", repr(dtype)[:60])
    if not (isinstance(shape, list) and len(shape) <= 8 and all(type(s) is int and 0 <= s < 1 << 48 for s in shape)):
        raise _bad(path, f"a list of sizes for tensor {name}", repr(shape)[:60])
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(type(o) is int and o >= 0 for o in offsets)):
        raise _bad(path, f"two data offsets for tensor {name}", repr(offsets)[:60])
    if math.prod(max(side, 1) for side in shape) >= 1 << 60:  # also for an empty tensor: its strides would overflow
        raise _bad(path, f"a sensible shape for tensor {name}", repr(shape)[:60])
    nbytes = DTYPES[dtype].itemsize * math.prod(shape)
    if offsets[1] - offsets[0] != nbytes:
        raise _bad(path, f"{nbytes} bytes for tensor {name}", f"{offsets[1] - offsets[0]}")
    info = TensorInfo(name=name, dtype=dtype, shape=tuple(shape), nbytes=nbytes, file=path.name)
    start = 8 + header_length + offsets[0]
    return StoredTensor(info=info, start=start, stop=start + nbytes)


def read_tensor(path: Path, tensor: StoredTensor) -> torch.Tensor:
    """Read one tensor into memory of its own, on the CPU.

    Raises:
        CheckpointError: the file is shorter than its header said.
        ResourceError: the file cannot be read.
    """
    data = torch.empty(tensor.info.nbytes, dtype=torch.uint8)
    view = memoryview(data.numpy().data)
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(tensor.start)
            filled = 0
            while filled < tensor.info.nbytes:
                count = file.readinto(view[filled:])
                if not count:
                    raise _bad(path, f"{tensor.info.nbytes} bytes of {tensor.info.name}", f"{filled}")
                filled += count
    except OSError as error:
        raise ResourceError(
            f"expected to read {tensor.info.name} from {path}, got: {error.strerror}; check the disk"
        ) from error
    return data.view(DTYPES[tensor.info.dtype]).view(tensor.info.shape)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a CPU tensor as they go to disk (little-endian, row-major), without a copy where possible."""
    return memoryview(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes, in hex."""
    return hashlib.sha256(tensor_bytes(tensor)).hexdigest()


class ShardWriter:
    """Writes one safetensors file whose tensors are known beforehand, in any order, one at a time.

    The file is complete on disk (written, flushed, fsynced) only after `close`, which refuses to finish while a tensor is
    missing.
    """

    def __init__(self, path: Path, tensors: Iterable[TensorInfo], *, metadata: Mapping[str, str] | None = None) -> None:
        """Write the header and reserve the space of all `tensors`."""
        self.path = path
        header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
        offset = 0
        for info in tensors:
            if info.nbytes != DTYPES[info.dtype].itemsize * math.prod(info.shape):
                raise W3PackError(
                    f"expected the size of {info.name} to fit its dtype and shape, got {info.nbytes} bytes"
                )
            header[info.name] = {
                "dtype": info.dtype,
                "shape": list(info.shape),
                "data_offsets": [offset, offset + info.nbytes],
            }
            offset += info.nbytes
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        self._start = 8 + len(raw)
        self._pending = {name: entry for name, entry in header.items() if name != "__metadata__"}
        try:
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            raise disk_error(error, path) from error
        try:
            if hasattr(os, "posix_fallocate") and offset:
                os.posix_fallocate(self._file.fileno(), 0, self._start + offset)
            self._write(len(raw).to_bytes(8, "little") + raw, at=0)
        except OSError as error:
            self._file.close()
            raise disk_error(error, path) from error

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor; its dtype and shape must be those announced."""
        entry = self._pending.get(name)
        if entry is None:
            raise W3PackError(f"expected a tensor announced for {self.path.name} and not yet written, got {name}")
        if DTYPE_NAMES.get(tensor.dtype) != entry["dtype"] or list(tensor.shape) != entry["shape"]:
            raise W3PackError(
                f"expected {name} to be {entry['dtype']} {entry['shape']} as planned, got {tensor.dtype} {list(tensor.shape)}"
            )
        del self._pending[name]
        try:
            self._write(tensor_bytes(tensor), at=self._start + entry["data_offsets"][0])
        except OSError as error:
            raise disk_error(error, self.path) from error

    def _write(self, data: bytes | memoryview, *, at: int) -> None:
        self._file.seek(at)
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]

    def close(self) -> None:
        """Flush everything to the disk; W3PackError while an announced tensor is missing."""
        if self._pending:
            self._file.close()
            raise W3PackError(
                f"expected every tensor of {self.path.name} to be written, missing {next(iter(self._pending))}"
            )
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise disk_error(error, self.path) from error
        finally:
            self._file.close()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._file.close()


def disk_error(error: OSError, path: Path) -> ResourceError:
    """The sentence for a failed write."""
    return ResourceError(
        f"expected to write {path}, got: {error.strerror or error}; free space or choose another place with -o, then run again (with --resume where a file was finished)"
    )
