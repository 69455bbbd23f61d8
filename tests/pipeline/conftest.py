"""Checkpoints written by hand, without any model class, and the pipeline run on them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from w3pack.checkpoint.safetensors_source import SafetensorsSource
from w3pack.pipeline.plan import QuantizeOptions
from w3pack.pipeline.quantize_model import prepare_job, run

HIDDEN, INTERMEDIATE = 72, 100


class Lab:
    """Writes sources and quantises them; `qmap` defaults to a fixed map, which is quick."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @staticmethod
    def random(*shape: int, seed: int = 0) -> torch.Tensor:
        """float32 normal numbers."""
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    def layers(self, *, count: int = 2, prefix: str = "model.") -> dict[str, torch.Tensor]:
        """float32 tensors of a small decoder."""
        tensors = {f"{prefix}embed_tokens.weight": self.random(30, HIDDEN, seed=99)}
        for layer in range(count):
            at = f"{prefix}layers.{layer}"
            tensors |= {
                f"{at}.self_attn.q_proj.weight": self.random(HIDDEN, HIDDEN, seed=10 * layer),
                f"{at}.self_attn.q_proj.bias": self.random(HIDDEN, seed=10 * layer + 1),
                f"{at}.mlp.up_proj.weight": self.random(INTERMEDIATE, HIDDEN, seed=10 * layer + 2),
                f"{at}.mlp.down_proj.weight": self.random(HIDDEN, INTERMEDIATE, seed=10 * layer + 3),
                f"{at}.input_layernorm.weight": self.random(HIDDEN, seed=10 * layer + 4),
            }
        return tensors

    def source(
        self, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None = None, *, name: str = "source"
    ) -> SafetensorsSource:
        """A checkpoint folder of these tensors."""
        folder = self.root / name
        folder.mkdir()
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", **(config or {})}))
        return SafetensorsSource(folder)

    def quantize(
        self, source: SafetensorsSource, *, name: str = "out", workers: int | None = None, **options: Any
    ) -> dict[str, torch.Tensor]:
        """Every tensor of what `w3pack quantize` writes."""
        run(prepare_job(source, QuantizeOptions(**{"qmap": "nf3", **options})), self.root / name, workers=workers)
        return self.read(name)

    def read(self, name: str) -> dict[str, torch.Tensor]:
        """Every tensor of a folder."""
        files = sorted((self.root / name).glob("*.safetensors"))
        return {key: tensor for file in files for key, tensor in load_file(file).items()}

    def manifest(self, name: str = "out") -> Any:
        """w3pack.json of a folder."""
        return json.loads((self.root / name / "w3pack.json").read_text())


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """The maker of checkpoints, in a folder of its own."""
    return Lab(tmp_path)
