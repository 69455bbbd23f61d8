"""A Hugging Face checkpoint folder as a `Source`."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from w3pack.checkpoint.paths import inside, read_json
from w3pack.checkpoint.source import TensorInfo
from w3pack.checkpoint.tensor_file import StoredTensor, read_header, read_tensor
from w3pack.errors import CheckpointError, ResourceError, UnsupportedError, UsageError
from w3pack.format import names

#: Weights in other formats, and what describes them: never copied beside the packed ones.
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".distcp")
_WEIGHT_SUFFIXES = (
    *_PICKLE_SUFFIXES, ".safetensors", ".gguf", ".ggml", ".h5", ".msgpack", ".onnx", ".onnx_data", ".ot", ".tflite", ".npz",
)  # fmt: skip
_STALE = ("quantize_config.json", "quant_config.json", "quantization_config.json", "hf_quant_config.json")


class SafetensorsSource:
    """Config, tensors and companion files of a folder with `config.json` and safetensors files.

    Every file of the index is opened, and its header checked, when the source is made: a missing or truncated shard is
    reported before any work starts.
    """

    def __init__(self, folder: Path, *, location: str | None = None) -> None:
        """Raises UsageError (no folder), CheckpointError (damaged), UnsupportedError (pickle only) or ResourceError."""
        try:
            entries = sorted(path.name for path in folder.iterdir())
        except (FileNotFoundError, NotADirectoryError) as error:
            raise UsageError(
                f"expected a checkpoint folder at {folder}, got {'a file' if os.path.exists(folder) else 'nothing'}; "
                "check the path"
            ) from error
        except OSError as error:
            raise ResourceError(f"expected to read {folder}, got: {error.strerror}; check its permissions") from error
        self.folder = folder
        self._location = location or str(folder)
        if names.CONFIG not in entries and not any(entry.endswith(".safetensors") for entry in entries):
            raise CheckpointError(
                f"expected config.json and safetensors files in {folder}, got {'no files' if not entries else 'neither'}; "
                "pass the folder that from_pretrained would load"
            )
        self._config = read_json(folder / names.CONFIG)
        self._stored, self._paths = self._open(entries)
        self._tensors = MappingProxyType({name: tensor.info for name, tensor in self._stored.items()})

    def _open(self, entries: list[str]) -> tuple[dict[str, StoredTensor], dict[str, Path]]:
        weight_map = self._weight_map(entries)
        files = sorted(set(weight_map.values())) if weight_map is not None else [names.SINGLE_FILE]
        paths = {file: inside(self.folder, file) for file in files}
        missing = [file for file, path in paths.items() if not os.path.isfile(path)]
        if missing:
            raise CheckpointError(
                f"expected {len(files)} weight files in {self.folder}, {len(missing)} missing: {', '.join(missing[:3])}"
                f"{', ...' if len(missing) > 3 else ''}; download the checkpoint completely"
            )
        tensors: dict[str, StoredTensor] = {}
        for file, path in paths.items():
            for name, tensor in read_header(path).items():
                try:
                    name.encode()
                except UnicodeEncodeError as error:
                    raise CheckpointError(
                        f"expected tensor names that are text, got {name!r} in {file}; the file is damaged"
                    ) from error
                if name in tensors:
                    raise CheckpointError(
                        f"expected tensor {name} once, got it in {tensors[name].info.file} and in {file}; "
                        "remove the stray file"
                    )
                tensors[name] = replace(tensor, info=replace(tensor.info, file=file))  # as the index calls the file
        if weight_map is not None:
            for name, file in weight_map.items():
                if name not in tensors or tensors[name].info.file != file:
                    raise CheckpointError(
                        f"expected tensor {name} in {file} as the index says, got none there; download it again"
                    )
            unlisted = sorted(set(tensors) - set(weight_map))
            if unlisted:
                raise CheckpointError(
                    f"expected every tensor of the files to be in the index, got {len(unlisted)} that are not, "
                    f"such as {unlisted[0]}; the index does not belong to these files"
                )
        if not tensors:
            raise CheckpointError(f"expected tensors in {self.folder}, got files without any")
        return tensors, paths

    def _weight_map(self, entries: list[str]) -> dict[str, str] | None:
        """Tensor name -> file name from the index; None for a single unindexed file."""
        if names.INDEX in entries:
            weight_map = read_json(self.folder / names.INDEX).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise CheckpointError(f"expected a weight_map in {names.INDEX}, got none; download the index again")
            for name, file in weight_map.items():
                if not isinstance(file, str):
                    raise CheckpointError(f"expected a file name for {name} in {names.INDEX}, got {file!r}")
                inside(self.folder, file)
            return dict(weight_map)
        if names.SINGLE_FILE in entries:
            return None
        pickles = [entry for entry in entries if entry.endswith(_PICKLE_SUFFIXES)]
        if pickles:
            raise UnsupportedError(
                f"expected safetensors files in {self.folder}, got only pickle files such as {pickles[0]}, which can run "
                "code when loaded; convert the checkpoint to safetensors first"
            )
        stray = [entry for entry in entries if entry.endswith(".safetensors")]
        raise CheckpointError(
            f"expected {names.SINGLE_FILE} or {names.INDEX} in {self.folder}, got {stray[0] if stray else 'no weights'}; "
            "download the checkpoint completely"
        )

    @property
    def location(self) -> str:
        return self._location

    @property
    def config(self) -> dict[str, Any]:
        return self._config

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    @property
    def notes(self) -> tuple[str, ...]:
        return ()

    def read(self, name: str) -> torch.Tensor:
        tensor = self._stored[name]
        return read_tensor(self._paths[tensor.info.file], tensor)

    def companion_files(self) -> Mapping[str, Path]:
        """Every file that is not weights, an index of weights or config.json, at any depth, by its relative name."""
        found: dict[str, Path] = {}
        for path in sorted(self.folder.rglob("*")):
            relative = path.relative_to(self.folder)
            hidden = any(part.startswith(".") for part in relative.parts)
            ours = relative.name in (names.CONFIG, names.MANIFEST) and len(relative.parts) == 1
            weights = relative.name.lower().endswith((*_WEIGHT_SUFFIXES, ".index.json"))
            stale = relative.name in _STALE or "__pycache__" in relative.parts
            if path.is_file() and not hidden and not ours and not weights and not stale:
                found[relative.as_posix()] = path
        return found

    def fingerprint(self) -> str:
        """SHA-256 over the config and, for each file, its header and its size and modification time."""
        hasher = hashlib.sha256(json.dumps(self._config, sort_keys=True).encode())
        for name, path in sorted(self._paths.items()):
            stat = path.stat()
            hasher.update(f"{name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
        for name, tensor in sorted(self._stored.items()):
            hasher.update(f"{name} {tensor.info.dtype} {tensor.info.shape} {tensor.start}\n".encode())
        return hasher.hexdigest()
