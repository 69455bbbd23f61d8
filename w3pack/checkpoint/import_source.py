"""A checkpoint of another 3-bit format as a `Source` whose packed Linears look like float matrices, and how it is recognised."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from w3pack.checkpoint.import_flute import FluteImporter
from w3pack.checkpoint.import_gptq import GptqImporter
from w3pack.checkpoint.import_squeezellm import SqueezeLLMImporter
from w3pack.checkpoint.imported import Importer, is_object
from w3pack.checkpoint.paths import read_json
from w3pack.checkpoint.resolve import resolve
from w3pack.checkpoint.safetensors_source import SafetensorsSource
from w3pack.checkpoint.source import TensorInfo
from w3pack.errors import CheckpointError, UnsupportedError
from w3pack.format import names

KNOWN = "flute, gptq, auto-round, squeezellm"
_AUTOROUND = ("auto-round", "auto_round", "autoround", "intel/auto-round")
#: Where tools that leave config.json alone write what they did, and the method that is meant.
_SIDE_FILES = {"flute_config.json": "flute", "quantize_config.json": "gptq", "quant_config.json": "squeezellm"}


class ImportSource:
    """Config, tensors and companion files of a checkpoint that `importer` reads.

    For every packed Linear `P` there is one tensor `P.weight` of its logical shape, read as float32; the tensors it consists
    of are hidden. All others are as in the files.
    """

    def __init__(self, base: SafetensorsSource, importer: Importer) -> None:
        self._base = base
        self.importer = importer
        self._config = _without_quantization(base.config)
        owner = {part: module for module, shape in importer.shapes.items() for part in shape.parts}
        tensors: dict[str, TensorInfo] = {}
        for info in base.tensors.values():
            module = owner.get(info.name)
            if module is None:
                tensors[info.name] = info
            elif (name := names.tensor(module, "weight")) not in tensors:
                shape = importer.shapes[module]
                nbytes = sum(base.tensors[part].nbytes for part in shape.parts)
                tensors[name] = TensorInfo(name, "F32", (shape.rows, shape.columns), nbytes, info.file)
        self._tensors = MappingProxyType(tensors)

    @property
    def location(self) -> str:
        return self._base.location

    @property
    def config(self) -> dict[str, Any]:
        """config.json without its quantization_config."""
        return self._config

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    @property
    def notes(self) -> tuple[str, ...]:
        return (
            f"the weights are those of a {self.importer.format} checkpoint: errors are measured against it, not against the "
            "original model",
        )

    def read(self, name: str) -> torch.Tensor:
        module, _, part = name.rpartition(".")
        if part == "weight" and module in self.importer.shapes:
            return self.importer.read(module).dequantize()
        return self._base.read(name)

    def companion_files(self) -> Mapping[str, Path]:
        """As of the folder, without what described the other format."""
        files = self._base.companion_files()
        return {name: path for name, path in files.items() if name not in _SIDE_FILES}

    def fingerprint(self) -> str:
        """As of the folder; the config that describes the other format is part of it or beside it."""
        sides = [self._base.folder / name for name in _SIDE_FILES]
        marks = [f"{path.name} {path.stat().st_mtime_ns} {path.stat().st_size}" for path in sides if path.exists()]
        return " ".join((self._base.fingerprint(), self.importer.format, *marks))


def open_import(checkpoint: str) -> ImportSource:
    """A folder or hub id in another 3-bit format, ready to be read.

    Raises:
        UnsupportedError: a format that is not imported (the message says what to use instead), or that cannot be carried.
        UsageError, CheckpointError, ResourceError: see `resolve`, `SafetensorsSource` and the importers.
    """
    path = resolve(checkpoint)
    if not os.path.isdir(path):
        raise UnsupportedError(
            f"expected a checkpoint folder of one of {KNOWN}, got the GGUF file {path}; run `w3pack quantize {path} -o OUT`, "
            "which reads GGUF"
        )
    base = SafetensorsSource(path, location=checkpoint)
    importer = importer_for(base)
    if not importer.shapes:
        raise CheckpointError(
            f"expected packed Linears in {base.location} as its config says ({importer.format}), got none; "
            "config and weights do not belong together"
        )
    return ImportSource(base, importer)


def importer_for(source: SafetensorsSource) -> Importer:
    """The importer that the checkpoint's config asks for; UnsupportedError, naming what is known, when there is none."""
    entry = _description(source)
    method = str(entry.get("quant_method", "")).lower()
    if method == "flute":
        return FluteImporter(source, entry)
    if method == "gptq":
        return GptqImporter(source, entry)
    if method in _AUTOROUND:
        return GptqImporter(source, entry, autoround=True)
    if method == "squeezellm":
        return SqueezeLLMImporter(source, entry)
    if method == "w3pack":
        raise UnsupportedError(
            f"expected a checkpoint of one of {KNOWN}, got {source.location}, which w3pack has packed already"
        )
    if method in ("", "fp8"):
        raise UnsupportedError(
            f"expected a checkpoint of one of {KNOWN}, got {'block-scaled FP8' if method else 'one without quantization_config'}; "
            "run `w3pack quantize`, which reads float weights, with --qmap nf3 or --qmap FILE.json for a table of your own"
        )
    raise UnsupportedError(
        f"expected a checkpoint of one of {KNOWN}, got quant_method {method[:40]!r}; run `w3pack quantize` on the unquantised model"
    )


def _description(source: SafetensorsSource) -> dict[str, Any]:
    """quantization_config of config.json (or of its text_config), or what a side file says instead."""
    for config in (source.config, is_object(source.config.get("text_config"))):
        if is_object(config.get("quantization_config")):
            return is_object(config["quantization_config"])
    for name, method in _SIDE_FILES.items():
        if (source.folder / name).is_file():
            entry = read_json(source.folder / name)
            if method != "squeezellm" or "wbits" in entry:  # others write a file of that name too
                return {"quant_method": method, **entry}
    return {}


def _without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in config.items() if key != "quantization_config"}
    if isinstance(kept.get("text_config"), dict):
        kept["text_config"] = {key: value for key, value in kept["text_config"].items() if key != "quantization_config"}
    return kept
