"""Tiny random models of many families, packed into checkpoints, and the stock models that they must equal.

Sizes are awkward on purpose: hidden 576 is no multiple of 128 and 200 none of 64, key and value have 60 rows, the
intermediate size is 1000. Every norm weight and bias is random, so that one which is lost or left at its initial value shows.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file

import w3pack
from w3pack.checkpoint.safetensors_source import SafetensorsSource
from w3pack.format.config import W3Config
from w3pack.format.layout import code_bits, scale_position
from w3pack.format.linear import LinearSpec
from w3pack.integrations.loadable import loadable_for
from w3pack.pipeline.plan import QuantizeOptions
from w3pack.pipeline.quantize_model import prepare_job, run
from w3pack.pipeline.report import Report

REPOSITORY = Path(w3pack.__file__).parents[1]
VOCABULARY = 300

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 30,
    "hidden_size": 200,
    "intermediate_size": 1000,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "intermediate_size": 200}

#: Family -> (config class, what differs from the common sizes).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"hidden_size": 576}),
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {}),
    "gemma": ("GemmaConfig", {"tie_word_embeddings": True}),
    "gemma2": ("Gemma2Config", {"tie_word_embeddings": True, "sliding_window": 4, "query_pre_attn_scalar": 30}),
    "gemma3_text": (
        "Gemma3TextConfig",
        {"tie_word_embeddings": True, "sliding_window": 4, "query_pre_attn_scalar": 30},
    ),
    "mistral": ("MistralConfig", {"sliding_window": 4}),
    "phi3": ("Phi3Config", {"hidden_size": 576}),
    # layer 1 is a dense MLP
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 100, "mlp_only_layers": [1], "decoder_sparse_step": 1},
    ),
    "mixtral": ("MixtralConfig", {**_EXPERTS, "num_local_experts": 3, "sliding_window": None}),
}


@dataclass(frozen=True)
class Packed:
    """A source checkpoint, the checkpoint packed from it, and the packer's report."""

    source: Path
    folder: Path
    report: Report

    @property
    def config(self) -> W3Config:
        """The quantization_config as written."""
        return W3Config.from_dict(json.loads((self.folder / "config.json").read_text())["quantization_config"])


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint folder, as the safetensors package reads it."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  not a dict
                assert name not in tensors, f"{name} is stored twice"
                tensors[name] = file.get_tensor(name)
    return tensors


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits (NaN equals itself)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(
        torch.equal(
            a.detach().contiguous().flatten().view(torch.uint8), b.detach().contiguous().flatten().view(torch.uint8)
        )
    )


@functools.cache
def bit_positions(layout: str) -> np.ndarray:
    """int64 [64, 64, 3, 4]: for each bit of each code of a tile its vector, lane, component and bit, after `code_bits`."""
    return np.array(
        [
            [
                [(at.vector, at.lane, at.component, at.bit) for at in code_bits(layout, row, column)]
                for column in range(64)
            ]
            for row in range(64)
        ]
    )


def unpack_slowly(codes: torch.Tensor, scales: torch.Tensor, qmap: torch.Tensor, spec: LinearSpec) -> torch.Tensor:
    """float32 [rows, columns] out of the packed tensors, bit by bit: shares no code with the packer or the reference.

    value(q) and the product are rounded to float32 as in the reference, so that a cast to bfloat16 rounds alike.
    """
    vector, lane, component, bit = np.moveaxis(bit_positions(spec.layout), -1, 0)
    words = codes.numpy().view(np.uint32)  # [row tiles, column tiles, vectors, 32, 4]
    tiles, across = words.shape[:2]
    bits = words[:, :, vector, lane, component] >> bit.astype(np.uint32) & 1  # [row tiles, column tiles, 64, 64, 3]
    code = (bits.astype(np.int64) << np.arange(3)).sum(axis=-1).transpose(0, 2, 1, 3).reshape(64 * tiles, 64 * across)
    first, second = np.array([scale_position(row) for row in range(64)]).T
    scale = scales.to(torch.float32).numpy()[:, :, first, second].transpose(0, 2, 1).reshape(64 * tiles, spec.groups)
    values = qmap.to(torch.float32).numpy() / np.float32(127 if spec.qmap_dtype == "int8" else 1)
    map_of = np.arange(64 * tiles) // (64 * tiles // spec.maps)
    weight = values[map_of[:, None], code] * scale.repeat(spec.group_size, axis=1)
    return torch.from_numpy(weight[: spec.rows, : spec.columns].copy())


@dataclass
class Lab:
    """Makes tiny models and checkpoints. One for the whole run: what was made once is kept."""

    root: Path
    families: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=lambda: dict(FAMILIES))
    _sources: dict[Any, Path] = field(default_factory=dict)
    _packed: dict[Any, Packed] = field(default_factory=dict)
    _weights: dict[Path, dict[str, torch.Tensor]] = field(default_factory=dict)

    read = staticmethod(read_tensors)
    same = staticmethod(same_bytes)

    def source(self, family: str, *, dtype: torch.dtype = torch.float32) -> Path:
        """A source checkpoint of random weights."""
        key = (family, dtype)
        if key not in self._sources:
            kind, changes = self.families[family]
            config = getattr(transformers, kind)(**{**_COMMON, **changes})
            torch.manual_seed(7)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() == 1:  # norms and biases: none may stay 0 or 1
                        parameter.add_(0.2 * torch.randn_like(parameter))
                    else:
                        parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
            folder = self.root / f"{family}-{str(dtype).removeprefix('torch.')}"
            model.to(dtype).save_pretrained(folder)
            self._sources[key] = folder
        return self._sources[key]

    def pack(self, source: Path, output: Path, **options: Any) -> Packed:
        """Pack one source as the command line would."""
        opened = SafetensorsSource(source)
        report = run(prepare_job(opened, QuantizeOptions(**options), loadable=loadable_for(opened)), output)
        return Packed(source=source, folder=output, report=report)

    def packed(self, family: str, *, dtype: torch.dtype = torch.float32, **options: Any) -> Packed:
        """A packed checkpoint, shared between tests: read it, never write to it."""
        key = (family, dtype, tuple(sorted(options.items())))
        if key not in self._packed:
            output = self.root / f"packed-{len(self._packed)}-{family}"
            self._packed[key] = self.pack(self.source(family, dtype=dtype), output, **options)
        return self._packed[key]

    def load(self, folder: Path, **kwargs: Any) -> Any:
        """`from_pretrained`, ready for inference."""
        kwargs.setdefault(
            "experts_implementation", "eager"
        )  # of experts that stay in floats: it rounds as W3Experts does
        return transformers.AutoModelForCausalLM.from_pretrained(folder, **kwargs).eval()

    def weights(self, packed: Packed) -> dict[str, torch.Tensor]:
        """Quantised module -> the float32 matrix that its packed tensors stand for, found the slow way."""
        if packed.folder not in self._weights:
            stored = read_tensors(packed.folder)
            self._weights[packed.folder] = {
                name: unpack_slowly(stored[f"{name}.codes"], stored[f"{name}.scales"], stored[f"{name}.qmap"], spec)
                for name, spec in packed.config.modules.items()
            }
        return self._weights[packed.folder]

    def stock(self, packed: Packed, *, dtype: torch.dtype) -> Any:
        """A stock model of the source checkpoint whose quantised weights are replaced by what the packed ones stand for.

        The replacement happens in the files, with the names of the files, so transformers alone decides what goes where.
        """
        tensors = read_tensors(packed.source)
        for name, weight in self.weights(packed).items():
            assert f"{name}.weight" in tensors
            tensors[f"{name}.weight"] = weight.to(dtype)
        folder = packed.folder.with_name(f"stock-{packed.folder.name}-{str(dtype).removeprefix('torch.')}")
        folder.mkdir(exist_ok=True)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_bytes((packed.source / "config.json").read_bytes())
        return self.load(folder, dtype=dtype)

    @staticmethod
    def tokens(*, batch: int = 2, length: int = 9) -> torch.Tensor:
        """int64 [batch, length]."""
        return torch.randint(2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(3))

    @staticmethod
    def distance(a: torch.Tensor, b: torch.Tensor) -> float:
        """||a - b|| / ||b||."""
        return float((a.double() - b.double()).norm() / b.double().norm())

    @torch.no_grad()
    def logits(self, model: Any) -> torch.Tensor:
        """The model's logits for `tokens`; finite, and not all alike."""
        result: torch.Tensor = model(self.tokens()).logits
        assert bool(torch.isfinite(result).all())
        assert float(result.float().std()) > 1e-3
        return result

    @staticmethod
    def continuation(model: Any) -> list[list[int]]:
        """Eight greedy tokens."""
        prompt = Lab.tokens(batch=1, length=5)
        found = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
        assert found.shape[1] == 13
        ids: list[list[int]] = found.tolist()
        return ids

    @staticmethod
    def copy(packed: Packed, to: Path) -> Path:
        """A copy of a packed checkpoint that may be damaged."""
        to.mkdir()
        for path in packed.folder.iterdir():
            (to / path.name).write_bytes(path.read_bytes())
        return to

    @staticmethod
    def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
        """Rewrite the single weight file of a checkpoint after `change` has edited its tensors."""
        tensors = read_tensors(folder)
        change(tensors)
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            folder / "model.safetensors",
            metadata={"format": "pt"},
        )
        return folder


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """The maker of tiny checkpoints."""
    return Lab(root=tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def python() -> Callable[[str], str]:
    """Runs a program in an interpreter of its own and returns what it prints; an error there fails the test."""

    def execute(program: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False, timeout=120
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return execute
