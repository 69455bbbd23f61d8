"""The header of a GGUF file: key/value metadata and where each tensor lies, checked before anything is believed.

A GGUF file comes from strangers. Every count, length and offset in it is compared with the size of the file before it
is followed, so that a damaged or hostile header costs one sentence, not memory. `gguf.GGUFReader` checks little of that
and keeps every token as arrays of its own, hence this reader. Layout, little endian:

    "GGUF" | version u32 | tensor count u64 | key count u64
    key count    times:  key string | value type u32 | value      (string: length u64, bytes)
    tensor count times:  name string | dims u32 | dim u64 each, fastest first | ggml type u32 | offset u64
    padding to `general.alignment`, then the tensor data, from which the offsets count
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from w3pack.errors import CheckpointError, UnsupportedError

_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
#: Far above any real file (the largest vocabularies have 2**18 tokens), far below what would hurt to hold.
_MAX_ARRAY_ITEMS = 2**23
_MAX_TENSORS = 2**20
_STRING, _ARRAY, _BOOL = 8, 9, 7
#: GGUF value type -> struct letter.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_REDO = "download or convert the file again"


@dataclass(frozen=True)
class GgufTensor:
    """One tensor as the header describes it: `shape` slowest dimension first, `offset` from the start of the file."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says about itself; `tensors` in the order of the file's list."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """`general.architecture`, such as "llama"."""
        return self.text("general.architecture")

    def text(self, key: str) -> str:
        """The string under `key`; CheckpointError if it is absent or something else."""
        value = self.metadata.get(key)
        if not isinstance(value, str):
            raise CheckpointError(f"expected text under {key} in {self.path.name}, got {_show(value)}; {_REDO}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """The integer under `key`, or `default`; CheckpointError if it is absent without a default, or below zero."""
        value = self.metadata.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise CheckpointError(f"expected a number under {key} in {self.path.name}, got {_show(value)}; {_REDO}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """The float under `key`, as the shortest decimal that float32 rounds to it (1e-05, not 9.99999974e-06)."""
        value = self.metadata.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise CheckpointError(f"expected a number under {key} in {self.path.name}, got {_show(value)}; {_REDO}")
        return float(str(np.float32(value)))

    def strings(self, key: str) -> list[str]:
        """The list of strings under `key`; CheckpointError if it is absent or something else."""
        value = self.metadata.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise CheckpointError(f"expected a list of texts under {key} in {self.path.name}; {_REDO}")
        return value

    def numbers(self, key: str) -> list[float]:
        """The list of numbers under `key`, empty if it is absent; CheckpointError if it is something else."""
        value = self.metadata.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, int | float) for item in value):
            raise CheckpointError(f"expected a list of numbers under {key} in {self.path.name}; {_REDO}")
        return value


def read_header(path: Path) -> GgufHeader:
    """Read and check the header; no tensor data is touched.

    Raises:
        CheckpointError: the file is truncated, not GGUF, or its header contradicts its size or itself.
        UnsupportedError: a GGUF version, byte order, tensor type or split file that w3pack does not read.
    """
    try:
        with path.open("rb") as file:
            if path.stat().st_size < 24:
                raise CheckpointError(f"expected a GGUF file, {path.name} is shorter than a GGUF header; {_REDO}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                return _Parser(path, view).header()
    except OSError as error:
        raise CheckpointError(f"expected to read {path}, got {error.strerror}; check the path") from error


class _Parser:
    """A position in the file that never passes its end."""

    def __init__(self, path: Path, view: mmap.mmap) -> None:
        self._path = path
        self._view = view
        self._size = len(view)
        self._at = 0
        self._items_left = _MAX_ARRAY_ITEMS

    def header(self) -> GgufHeader:
        name = self._path.name
        if self._take(4) != b"GGUF":
            raise CheckpointError(
                f"expected a GGUF file, {name} does not begin with GGUF; give a .gguf file or a folder"
            )
        version = self._integer("I")
        if version & 0xFFFF == 0:
            raise UnsupportedError(f"expected a little-endian GGUF file, {name} is big-endian; convert it again")
        if version not in _VERSIONS:
            raise UnsupportedError(f"expected GGUF version 2 or 3, {name} has version {version}; convert it again")
        tensor_count, key_count = self._integer("Q"), self._integer("Q")
        self._room_for(key_count, 13, "keys")
        self._room_for(tensor_count, 24 + 8, "tensors")
        if tensor_count > _MAX_TENSORS:
            raise CheckpointError(f"expected at most {_MAX_TENSORS} tensors, {name} claims {tensor_count}; {_REDO}")
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._string()
            if key in metadata:
                raise CheckpointError(f"expected each key once, {name} has {_show(key)} twice; {_REDO}")
            metadata[key] = self._value(self._integer("I"))
        if isinstance(splits := metadata.get("split.count"), int) and splits > 1:
            raise UnsupportedError(
                f"expected a GGUF file in one piece, {name} is one of {splits}; join them with llama-gguf-split --merge"
            )
        described = [self._tensor() for _ in range(tensor_count)]
        return GgufHeader(path=self._path, metadata=metadata, tensors=self._placed(described, metadata))

    def _placed(self, described: list[GgufTensor], metadata: Mapping[str, Any]) -> dict[str, GgufTensor]:
        """Offsets made absolute, checked against the file's size and against each other."""
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= self._size or alignment & (alignment - 1):
            raise CheckpointError(
                f"expected a power of two as general.alignment of {self._path.name}, got {_show(alignment)}; {_REDO}"
            )
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for item in described:
            if item.name in tensors:
                raise CheckpointError(f"expected each tensor once, {self._path.name} has {item.name} twice; {_REDO}")
            if item.offset % alignment or start + item.offset + item.nbytes > self._size:
                raise CheckpointError(
                    f"expected {item.name} inside {self._path.name} ({self._size} bytes), got bytes"
                    f" {start + item.offset} to {start + item.offset + item.nbytes}: truncated or damaged; {_REDO}"
                )
            tensors[item.name] = GgufTensor(item.name, item.type, item.shape, start + item.offset, item.nbytes)
        end, before = start, "the header"
        for item in sorted(tensors.values(), key=lambda item: item.offset):
            if item.offset < end:
                raise CheckpointError(
                    f"expected tensors side by side in {self._path.name}, {item.name} overlaps {before}; {_REDO}"
                )
            end, before = item.offset + item.nbytes, item.name
        return tensors

    def _tensor(self) -> GgufTensor:
        """One entry of the tensor list, its offset still counted from the data section."""
        name = self._string()
        dims = self._integer("I")
        if not 1 <= dims <= _MAX_DIMS:
            raise CheckpointError(f"expected 1 to {_MAX_DIMS} dimensions for {_show(name)}, got {dims}; {_REDO}")
        shape = tuple(self._integer("Q") for _ in range(dims))[::-1]
        number, offset = self._integer("I"), self._integer("Q")
        try:
            kind = gguf.GGMLQuantizationType(number)
        except ValueError as error:
            raise UnsupportedError(
                f"expected a tensor type that the installed gguf package knows, {_show(name)} has type {number};"
                " update gguf or use another quantisation"
            ) from error
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        elements = math.prod(shape)
        if elements == 0 or shape[-1] % block:
            raise CheckpointError(
                f"expected rows of whole blocks of {block} for {_show(name)} ({kind.name}), got shape {shape}; {_REDO}"
            )
        return GgufTensor(name, str(kind.name), shape, offset, elements // block * block_bytes)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return struct.unpack("<" + _SCALARS[kind], self._take(struct.calcsize("<" + _SCALARS[kind])))[0]
        if kind != _ARRAY:
            raise CheckpointError(f"expected a known value type in {self._path.name}, got {kind}; {_REDO}")
        inner, count = self._integer("I"), self._integer("Q")
        if inner not in _SCALARS and inner != _STRING:
            raise CheckpointError(f"expected lists of numbers or texts in {self._path.name}, got type {inner}; {_REDO}")
        letter = _SCALARS.get(inner, "")
        width = struct.calcsize("<" + letter) if letter else 8
        self._room_for(count, width, "list items")
        self._items_left -= count
        if self._items_left < 0:
            raise CheckpointError(
                f"expected at most {_MAX_ARRAY_ITEMS} list items in the header of {self._path.name}; {_REDO}"
            )
        if inner == _STRING:
            return [self._string() for _ in range(count)]
        return list(struct.unpack(f"<{count}{letter}", self._take(count * width)))

    def _string(self) -> str:
        data = self._take(self._integer("Q"))
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"expected UTF-8 text in the header of {self._path.name}; {_REDO}") from error

    def _integer(self, letter: str) -> int:
        return int.from_bytes(self._take(8 if letter == "Q" else 4), "little")

    def _take(self, count: int) -> bytes:
        if count > self._size - self._at:
            raise CheckpointError(
                f"expected {count} bytes at {self._at} of {self._path.name}, which has {self._size}:"
                f" truncated or damaged; {_REDO}"
            )
        self._at += count
        return self._view[self._at - count : self._at]

    def _room_for(self, count: int, width: int, what: str) -> None:
        if count > (self._size - self._at) // width:
            raise CheckpointError(
                f"expected fewer {what} than fit into {self._path.name} ({self._size} bytes), got {count}; {_REDO}"
            )


def _show(value: object) -> str:
    """A value from an untrusted file, short and on one line."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
