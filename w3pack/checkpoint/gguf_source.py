"""A GGUF file as a source of Hugging Face tensors, read one tensor at a time.

Which dtype comes out. A GGUF file mixes float and block-quantised tensors, a Hugging Face model has one dtype, into
which transformers casts every parameter as it loads. So there is one model dtype per file, and `TensorInfo.dtype` and
`read` state it alike:

    matrices stored as F32, F16 or BF16 keep that dtype, bit for bit;
    block-quantised matrices are dequantised in float32, then rounded to the model dtype;
    vectors (norms, biases), which GGUF stores as F32, are rounded to the model dtype.

The model dtype is F32 if all matrices are F32, BF16 if any matrix is BF16 or the architecture's activations overflow
float16 (Gemma), else F16. Rounding to float16 errs by at most 2**-11 of a value and to bfloat16 by 2**-8, little beside
the source's own quantisation and less beside 3 bit. Vectors come out exact almost always: models are trained in
bfloat16, whose values float16 holds exactly between 6e-5 and 65504; for Gemma, one is subtracted in float32 before
bfloat16 rounds away what adding it had cost. A value that the dtype cannot hold is an error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch

from w3pack.checkpoint import gguf_names
from w3pack.checkpoint.gguf_header import GgufHeader, GgufTensor, read_header
from w3pack.checkpoint.gguf_names import Architecture, Undo
from w3pack.checkpoint.source import TensorInfo
from w3pack.errors import CheckpointError, UnsupportedError
from w3pack.format import names

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_INTEGERS = frozenset({"I8", "I16", "I32", "I64", "F64"})
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
_MAX_BLOCKS = 4096
_REDO = "download or convert the file again"
#: Least mean correlation between rows of one matrix quantised twice, by bits of the coarser type: a relative error e
#: costs e*e/2, and 8, 6, 5, 4, 3, 2 bits err by about 0.006, 0.02, 0.04, 0.09, 0.17, 0.35.
_SAME_MATRIX = {8: 0.9995, 6: 0.999, 5: 0.997, 4: 0.99, 3: 0.97, 2: 0.92}
_SAMPLED_ROWS = 256


@dataclass(frozen=True)
class _Entry:
    """One tensor handed out: where its bytes are and what to undo."""

    info: TensorInfo
    tensor: GgufTensor
    undo: Undo
    expert: int = 0


class GgufSource:
    """A GGUF file and the folder of companion files made from it (`w3pack.integrations.gguf_assets`).

    Args:
        path: the .gguf file.
        companion_dir: folder with config.json, tokenizer and the like. If the file holds embedding and head apart and
            config.json ties them, the more finely quantised of the two is handed out as the embedding.

    Raises:
        CheckpointError: the file or the folder is damaged or incomplete, or they contradict each other.
        UnsupportedError: an architecture, tensor or quantisation type that w3pack does not read.
    """

    def __init__(self, path: Path, *, companion_dir: Path) -> None:
        self._header = read_header(path)
        self._companions = companion_dir
        self._config = _read_config(companion_dir)
        self._row = row_of(self._header)
        self._notes: list[str] = []
        self._dtype = model_dtype(self._header)
        self._entries = self._plan()
        self._tensors = MappingProxyType({name: entry.info for name, entry in self._entries.items()})
        _check_types(self._header)
        matrix_types = sorted({t.type for t in self._header.tensors.values() if len(t.shape) > 1} - set(_FLOATS))
        if matrix_types:
            self._notes.append(
                f"the source is itself quantised ({', '.join(matrix_types)}): errors are measured against it, not"
                " against the original model"
            )

    @property
    def location(self) -> str:
        return str(self._header.path)

    @property
    def config(self) -> dict[str, Any]:
        return self._config

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Hugging Face name -> shape and dtype as `read` returns them; `nbytes` is what it takes in the file."""
        return self._tensors

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self._notes)

    def read(self, name: str) -> torch.Tensor:
        """The tensor in the dtype that `tensors` states; one tensor (one expert of a stack) is read from the file.

        Raises:
            CheckpointError: the file has shrunk, or a value does not fit the dtype.
        """
        entry = self._entries[name]
        source = entry.tensor
        shape, nbytes, offset = source.shape, source.nbytes, source.offset
        if entry.undo is Undo.SPLIT_EXPERTS:
            shape, nbytes = shape[1:], nbytes // shape[0]
            offset += entry.expert * nbytes
        data = _bytes_of(self._header.path, source, offset=offset, nbytes=nbytes)
        dtype = _FLOATS[entry.info.dtype]
        if source.type in _FLOATS:
            weight = torch.from_numpy(data).view(_FLOATS[source.type]).view(shape)
        else:
            weight = torch.from_numpy(_dequantize(data, source.type, columns=shape[-1])).view(shape)
        weight = self._undone(weight, entry, source)
        rounded = weight.to(dtype).contiguous()
        if not bool(torch.isfinite(rounded).all()):
            raise CheckpointError(
                f"expected finite values in {source.name} of {self._header.path.name} as {entry.info.dtype}, got"
                f" infinity or NaN; {_REDO}"
            )
        return rounded

    def companion_files(self) -> Mapping[str, Path]:
        """Every file of the companion folder but config.json and weights, by its relative name."""
        found: dict[str, Path] = {}
        for path in sorted(self._companions.rglob("*")):
            relative = path.relative_to(self._companions).as_posix()
            if path.is_file() and relative != names.CONFIG and not relative.endswith(_WEIGHT_SUFFIXES):
                found[relative] = path
        return found

    def fingerprint(self) -> str:
        """SHA-256 over the file's bytes and the config, whichever transformers wrote it; about 1 s for 500 MB."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        with self._header.path.open("rb") as file:
            hasher = hashlib.file_digest(file, "sha256")
        config = {key: value for key, value in self._config.items() if key != "transformers_version"}
        hasher.update(json.dumps(config, sort_keys=True).encode())
        return hasher.hexdigest()

    def _plan(self) -> dict[str, _Entry]:
        """What each tensor of the file becomes, in the file's order."""
        header, blocks = self._header, self._header.integer(f"{self._header.architecture}.block_count")
        if not 1 <= blocks <= _MAX_BLOCKS:
            raise CheckpointError(f"expected 1 to {_MAX_BLOCKS} blocks in {header.path.name}, got {blocks}; {_REDO}")
        skipped = self._untied_leftover()
        entries: dict[str, _Entry] = {}
        for tensor in header.tensors.values():
            if tensor.name == skipped:
                continue
            target = gguf_names.translate(tensor.name, self._row, blocks=blocks)
            if target.undo is Undo.IN_CONFIG:
                self._check_rope(tensor)
                continue
            name = gguf_names.EMBEDDING if tensor.name == gguf_names.GGUF_HEAD and skipped else target.name
            self._add(entries, name, tensor, target.undo)
        gguf_names.check_complete(frozenset(header.tensors), blocks=blocks)
        return entries

    def _add(self, entries: dict[str, _Entry], name: str, tensor: GgufTensor, undo: Undo) -> None:
        matrix_float = tensor.type in _FLOATS and len(tensor.shape) > 1
        dtype = tensor.type if matrix_float else self._dtype
        file = self._header.path.name
        wanted = 3 if undo is Undo.SPLIT_EXPERTS else 1 if undo is Undo.ADD_FIRST_AXIS else None
        if len(tensor.shape) != wanted if wanted else len(tensor.shape) > 2:
            raise CheckpointError(
                f"expected {wanted or '1 or 2'} dimensions for {tensor.name}, got {tensor.shape}; {_REDO}"
            )
        if undo is Undo.SPLIT_EXPERTS:
            experts = self._header.integer(f"{self._header.architecture}.expert_count")
            if tensor.shape[0] != experts:
                raise CheckpointError(f"expected {experts} experts in {tensor.name}, got {tensor.shape[0]}; {_REDO}")
            for expert in range(experts):
                one = name.format(expert=expert)
                info = TensorInfo(one, dtype, tensor.shape[1:], tensor.nbytes // experts, file)
                entries[one] = _Entry(info, tensor, undo, expert)
            return
        shape = (1, *tensor.shape) if undo is Undo.ADD_FIRST_AXIS else tensor.shape
        if undo in (Undo.UNPERMUTE_QUERY, Undo.UNPERMUTE_KEY) and shape[0] % (2 * self._heads(undo)):
            raise CheckpointError(f"expected rows for {self._heads(undo)} heads in {tensor.name}, got {shape}; {_REDO}")
        entries[name] = _Entry(TensorInfo(name, dtype, shape, tensor.nbytes, file), tensor, undo)

    def _undone(self, weight: torch.Tensor, entry: _Entry, source: GgufTensor) -> torch.Tensor:
        match entry.undo:
            case Undo.UNPERMUTE_QUERY | Undo.UNPERMUTE_KEY:
                # llama.cpp rotates neighbouring rows, transformers rows half a head apart.
                heads = self._heads(entry.undo)
                pairs = weight.view(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
                return pairs.transpose(1, 2).reshape(weight.shape)
            case Undo.SUBTRACT_ONE:
                return weight.float() - 1.0
            case Undo.ADD_FIRST_AXIS:
                return weight.unsqueeze(0)
            case _:
                return weight

    def _heads(self, undo: Undo) -> int:
        prefix = f"{self._header.architecture}.attention.head_count"
        heads = self._header.integer(prefix)
        if undo is Undo.UNPERMUTE_KEY:
            heads = self._header.integer(f"{prefix}_kv", heads)
        if heads == 0:
            raise CheckpointError(f"expected attention heads in {self._header.path.name}, got none; {_REDO}")
        return heads

    def _untied_leftover(self) -> str | None:
        """The coarser of embedding and head, to be left out, where the config ties two that the file holds apart."""
        tensors = self._header.tensors
        if not self._config.get("tie_word_embeddings") or not {gguf_names.GGUF_HEAD, gguf_names.GGUF_EMBEDDING} <= set(
            tensors
        ):
            return None
        if not is_same_matrix(self._header):
            raise CheckpointError(
                f"expected one matrix for embedding and head of {self._header.path.name}, as config.json says, got two;"
                " set tie_word_embeddings to false"
            )
        head, embedding = tensors[gguf_names.GGUF_HEAD], tensors[gguf_names.GGUF_EMBEDDING]
        kept, left = (head, embedding) if head.nbytes >= embedding.nbytes else (embedding, head)
        self._notes.append(
            f"embedding and head are one matrix, which the file holds as {kept.type} and {left.type}: {kept.name}"
            f" ({kept.type}) is used for both and {left.name} is left out"
        )
        return left.name

    def _check_rope(self, tensor: GgufTensor) -> None:
        """The rotary factors are not dropped: config.json must speak of them, unless all are one."""
        factors = read_vector(self._header, tensor.name)
        rope = self._config.get("rope_parameters") or self._config.get("rope_scaling") or {}
        if not np.all(factors == 1.0) and rope.get("rope_type", "default") not in ("llama3", "longrope"):
            raise CheckpointError(
                f"expected config.json to hold the rotary factors of {tensor.name}, got {rope}; write it again with"
                " w3pack.integrations.gguf_assets"
            )


def row_of(header: GgufHeader) -> Architecture:
    """The architecture of a file; UnsupportedError if w3pack does not read it."""
    name = header.architecture
    return gguf_names.architecture(name, experts=header.integer(f"{name}.expert_count", 0))


def model_dtype(header: GgufHeader) -> str:
    """The model dtype of a file, "F32", "BF16" or "F16", as the module's docstring derives it."""
    types = {tensor.type for tensor in header.tensors.values() if len(tensor.shape) > 1}
    if types == {"F32"}:
        return "F32"
    return "BF16" if "BF16" in types or row_of(header).needs_bfloat16 else "F16"


def is_same_matrix(header: GgufHeader) -> bool:
    """Whether embedding and head are one matrix, stored twice at different types.

    Some conversions write the head again although the model ties it. Rows spread over the vocabulary are compared: two
    roundings of one matrix correlate as far as the coarser type allows, two trained matrices do not. Float matrices,
    which no rounding sets apart, must be equal. True as well if the file holds no head.
    """
    if gguf_names.GGUF_HEAD not in header.tensors:
        return True
    pair = [
        header.tensors[name] for name in (gguf_names.GGUF_EMBEDDING, gguf_names.GGUF_HEAD) if name in header.tensors
    ]
    if len(pair) < 2 or pair[0].shape != pair[1].shape or len(pair[0].shape) != 2:
        return False
    _check_types(header)
    first, second = (_sample_rows(header.path, tensor) for tensor in pair)
    if all(tensor.type in _FLOATS for tensor in pair):
        return bool(np.array_equal(first, second))
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    used = lengths > 0  # rows of unused tokens can be all zero
    correlation = float(np.mean((first * second).sum(axis=1)[used] / lengths[used])) if used.any() else 0.0
    bits = min(_bits(tensor.type) for tensor in pair)
    return correlation >= _SAME_MATRIX[max(step for step in _SAME_MATRIX if step <= max(bits, 2))]


def read_vector(header: GgufHeader, name: str) -> npt.NDArray[np.float32]:
    """A float vector of the file as float32; CheckpointError if it is something else."""
    tensor = header.tensors[name]
    if tensor.type != "F32" or len(tensor.shape) != 1:
        raise CheckpointError(f"expected a float32 vector in {name}, got {tensor.type} {tensor.shape}; {_REDO}")
    return _bytes_of(header.path, tensor, offset=tensor.offset, nbytes=tensor.nbytes).view(np.float32)


def _sample_rows(path: Path, tensor: GgufTensor) -> npt.NDArray[np.float32]:
    """At most `_SAMPLED_ROWS` rows, evenly spread: float32 [rows, columns]."""
    rows, columns = tensor.shape
    width = tensor.nbytes // rows
    chosen = np.unique(np.linspace(0, rows - 1, _SAMPLED_ROWS).astype(np.int64))
    parts = [_bytes_of(path, tensor, offset=tensor.offset + int(row) * width, nbytes=width) for row in chosen]
    return _dequantize(np.concatenate(parts), tensor.type, columns=columns)


def _bits(kind: str) -> int:
    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return int(8 * block_bytes // block)


def _bytes_of(path: Path, tensor: GgufTensor, *, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
    # Read, not mapped: a file that shrinks meanwhile is then an error and not a bus error, and nothing stays resident.
    data = np.fromfile(path, dtype=np.uint8, count=nbytes, offset=offset)
    if data.size != nbytes:
        raise CheckpointError(f"expected {nbytes} bytes of {tensor.name} in {path.name}, got {data.size}; {_REDO}")
    return data


def _dequantize(data: npt.NDArray[np.uint8], kind: str, *, columns: int) -> npt.NDArray[np.float32]:
    """Bytes of whole rows -> float32 [rows, columns]."""
    number = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[number]
    rows = data.reshape(-1, columns // block * block_bytes)
    if kind in ("F32", "F16"):
        return rows.view(np.float32 if kind == "F32" else np.float16).astype(np.float32)
    values: npt.NDArray[np.float32] = gguf.dequantize(rows, number)
    return values


def _check_types(header: GgufHeader) -> None:
    """Every type of the file can be dequantised; found out on one block of zeros for each."""
    for kind in sorted({tensor.type for tensor in header.tensors.values()} - set(_FLOATS)):
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        try:
            known = (
                kind not in _INTEGERS
                and _dequantize(np.zeros(block_bytes, np.uint8), kind, columns=block).size == block
            )
        except NotImplementedError:
            known = False
        if not known:
            raise UnsupportedError(
                f"expected quantisation types that the gguf package can dequantise, {header.path.name} has {kind}; use"
                " another quantisation of the model"
            )


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / names.CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"expected {names.CONFIG} in {folder}, got {type(error).__name__}; write it with"
            " w3pack.integrations.gguf_assets"
        ) from error
    if not isinstance(config, dict):
        raise CheckpointError(
            f"expected an object in {folder / names.CONFIG}, got {type(config).__name__}; write it again"
        )
    return config
