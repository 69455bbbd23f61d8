"""Any model that the commands know (packed, a checkpoint folder, a GGUF file, a hub id) -> tokenizer, then weights."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from w3pack.checkpoint.resolve import resolve
from w3pack.checkpoint.safetensors_source import SafetensorsSource
from w3pack.checkpoint.source import Source
from w3pack.errors import CheckpointError, UnsupportedError, W3PackError
from w3pack.format import names
from w3pack.format.config import QUANT_METHOD
from w3pack.pipeline.fp8_source import SCALE_SUFFIX, block_size, consumed_by_weight
from w3pack.pipeline.fused import holds_fused, open_fused
from w3pack.pipeline.packed import open_packed
from w3pack.pipeline.selection import FP8
from w3pack.quantize.fp8_blocks import dequantize_blocks


@dataclass(frozen=True)
class LanguageModel:
    """A model whose files were checked and whose weights are not in memory yet.

    Attributes:
        name: the last part of its path, or its hub id.
        kind: "w3pack", "gguf", "fp8", "quantised" (by another method) or "safetensors".
        source: its tensors.
        folder: where config.json and the tokenizer lie.
        tokenizer: transformers' own.
    """

    name: str
    kind: str
    source: Source
    folder: Path
    tokenizer: Any

    @property
    def memory_bytes(self) -> int:
        """What the loaded weights take, unpacked matrices of a CPU apart."""
        if self.kind not in ("gguf", "fp8"):
            return sum(tensor.nbytes for tensor in self.source.tensors.values())
        width = 4 if str(self.source.config.get("dtype")).endswith("float32") else 2
        return width * sum(torch.Size(tensor.shape).numel() for tensor in self.source.tensors.values())

    @property
    def longest(self) -> int | None:
        """Tokens of context that the config permits."""
        for config in (self.source.config.get("text_config"), self.source.config):
            value = config.get("max_position_embeddings") if isinstance(config, dict) else None
            if isinstance(value, int):
                return value
        return None

    def identity(self) -> dict[str, Any]:
        """Name, kind, bytes of the weights, and what tells this version from another: the manifest's digest or file sizes."""
        tensors = self.source.tensors.values()
        found: dict[str, Any] = {
            "name": self.name,
            "kind": self.kind,
            "bytes": sum(tensor.nbytes for tensor in tensors),
        }
        manifest = self.folder / names.MANIFEST
        if self.kind == "w3pack" and manifest.exists():
            return found | {"manifest_sha256": hashlib.sha256(manifest.read_bytes()).hexdigest()}
        path = Path(self.source.location)
        if self.kind == "gguf":
            return found | {"files": {path.name: path.stat().st_size}}
        files = sorted({tensor.file for tensor in tensors})
        return found | {"files": {file: (self.folder / file).stat().st_size for file in files}}

    def load(self, device: str) -> Any:
        """The model on `device`, in the dtype of its checkpoint, ready for inference.

        Raises:
            CheckpointError: weights that are missing or do not fit the config.
            UnsupportedError: a model or a quantisation that the installed transformers does not load.
        """
        from transformers import AutoModelForCausalLM

        from w3pack.integrations.loadable import skeleton

        options = {
            "device_map": device if device != "cpu" else None,
            "dtype": "auto",
            "output_loading_info": True,
            # As packed experts run. transformers' grouped matmul refuses 16-bit widths that are no multiple of 8.
            "experts_implementation": "eager",
        }
        model_class = type(skeleton(self.source.config))  # UnsupportedError for what cannot be built
        try:
            if self.kind in ("gguf", "fp8"):
                from transformers import AutoConfig

                config = AutoConfig.from_pretrained(self.folder)
                if hasattr(config, "quantization_config"):
                    del config.quantization_config
                state = self._float_tensors()
                model, found = model_class.from_pretrained(None, config=config, state_dict=state, **options)
            else:
                model, found = AutoModelForCausalLM.from_pretrained(self.folder, **options)
        except (W3PackError, torch.OutOfMemoryError):
            raise
        except (ImportError, RuntimeError, ValueError, TypeError, KeyError) as error:
            if "memory" in str(error).lower():
                raise
            reason = " ".join(str(error).split())[:200]
            if self.kind == "quantised":
                raise UnsupportedError(
                    f"expected a model that transformers loads on {device}, got {self.name}: {reason}; "
                    "install what that quantisation needs, or use another device"
                ) from error
            raise CheckpointError(
                f"expected weights that fit config.json in {self.name}, got: {reason}; download the checkpoint again"
            ) from error
        missing = sorted(found["missing_keys"])
        if missing:
            raise CheckpointError(
                f"expected a tensor for every parameter of {self.name}, {len(missing)} have none, such as {missing[0]}; "
                "config.json and the weights do not belong together, or a file is missing"
            )
        return model.eval()

    def _float_tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor as a float one; FP8 blocks multiplied by their scales."""
        block = block_size(self.source)
        name = str(self.source.config.get("dtype") or self.source.config.get("torch_dtype") or "bfloat16")
        dtype = getattr(torch, name.removeprefix("torch."), torch.bfloat16)
        tensors: dict[str, torch.Tensor] = {}
        for info in self.source.tensors.values():
            if consumed_by_weight(self.source, info) is not None:
                continue
            data = self.source.read(info.name)
            if info.dtype in FP8 and block is not None:
                scales = info.name + SCALE_SUFFIX
                if scales not in self.source.tensors:
                    raise CheckpointError(
                        f"expected the scales {scales} of an FP8 tensor in {self.name}, got none; download it again"
                    )
                data = dequantize_blocks(data, self.source.read(scales), block=block).to(dtype)
            tensors[info.name] = data
        return tensors


@contextmanager
def open_language_model(model: str) -> Iterator[LanguageModel]:
    """Find a model, check its files and load its tokenizer.

    Raises:
        UsageError, CheckpointError, UnsupportedError, ResourceError: see `resolve`, `open_packed`, `open_gguf`.
        CheckpointError: no tokenizer.
    """
    path = resolve(model)
    if path.is_dir():
        source = SafetensorsSource(path)
        kind = _kind(source)
        if kind == "w3pack":
            (open_fused if holds_fused(path) else open_packed)(path)
        yield _with_tokenizer(model, kind, source, path)
        return
    from w3pack.integrations.gguf_assets import open_gguf

    with tempfile.TemporaryDirectory(prefix="w3pack-gguf-") as scratch:
        folder = Path(scratch)
        yield _with_tokenizer(model, "gguf", open_gguf(path, folder), folder)


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 of what the tokenizer does: its serialised form or, for a slow one, its vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _kind(source: Source) -> str:
    entry = source.config.get("quantization_config")
    if not isinstance(entry, dict):
        return "safetensors"
    method = entry.get("quant_method")
    if method == QUANT_METHOD:
        return "w3pack"
    return "fp8" if method == "fp8" else "quantised"


def _with_tokenizer(model: str, kind: str, source: Source, folder: Path) -> LanguageModel:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"expected a tokenizer with {model}, got none that loads; copy the tokenizer's files there"
        ) from error
    local = Path(model).expanduser()
    name = local.resolve().name if local.exists() else model
    return LanguageModel(name=name, kind=kind, source=source, folder=folder, tokenizer=tokenizer)
