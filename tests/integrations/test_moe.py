"""Mixtures of experts: mixed precision inside one layer, and experts that no loader could unstack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from w3pack.errors import UnsupportedError
from w3pack.runtime.experts import W3Experts
from w3pack.runtime.linear import W3Linear

QWEN = "model.layers.0.mlp.experts"
MIXTRAL = "model.layers.1.block_sparse_moe.experts"

MIXED: dict[str, tuple[str, tuple[str, ...]]] = {
    "one projection": ("qwen3_moe", (f"{QWEN}.1.gate_proj",)),
    "a down projection": ("qwen3_moe", (f"{QWEN}.0.down_proj",)),
    "one expert": ("qwen3_moe", (f"re:{QWEN}\\.2\\..*",)),
    "all but one": ("qwen3_moe", (f"re:{QWEN}\\.[013]\\..*",)),
    "legacy names, one projection": ("mixtral", (f"{MIXTRAL}.2.w3",)),
    "legacy names, one expert": ("mixtral", (f"re:{MIXTRAL}\\.0\\..*",)),
    "one layer": ("mixtral", (f"re:{MIXTRAL}\\..*",)),
    "attention": ("mixtral", ("re:.*self_attn.*",)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", MIXED)
def test_mixed_precision_inside_one_layer(lab: Any, tmp_path: Path, case: str, dtype: torch.dtype) -> None:
    family, skip = MIXED[case]
    packed = lab.packed(family, skip=skip)
    model, stock = lab.load(packed.folder, dtype=dtype), lab.stock(packed, dtype=dtype)
    assert sum(isinstance(module, W3Linear) for module in model.modules()) == len(packed.config.modules)
    assert lab.distance(lab.logits(model), lab.logits(stock)) < 1e-3
    assert lab.continuation(model) == lab.continuation(stock)
    assert {p.dtype for p in model.parameters() if p.is_floating_point()} <= {dtype, torch.float16}


@pytest.mark.parametrize("case", MIXED)
def test_mixed_precision_round_trip(lab: Any, tmp_path: Path, case: str) -> None:
    family, skip = MIXED[case]
    packed = lab.packed(family, skip=skip)
    lab.load(packed.folder).save_pretrained(tmp_path)
    before, after = lab.read(packed.folder), lab.read(tmp_path)
    assert set(before) == set(after)
    assert [name for name in before if not lab.same(before[name], after[name])] == []


@pytest.mark.parametrize("missing", [f"{QWEN}.1.gate_proj.weight"])
def test_float_projection_that_is_missing(lab: Any, tmp_path: Path, missing: str) -> None:
    packed = lab.packed("qwen3_moe", skip=(f"{QWEN}.1.gate_proj",))
    folder = lab.edit(lab.copy(packed, tmp_path / "damaged"), lambda tensors: tensors.pop(missing))
    with pytest.raises(Exception, match=r"experts\.1\.gate_proj"):
        lab.load(folder)


def test_coverage_counts_experts(lab: Any) -> None:
    whole = lab.packed("qwen3_moe").report
    assert 0.99 < whole.coverage < 1  # all but the router
    attention = lab.packed("qwen3_moe", only=("re:.*self_attn.*",)).report
    assert 0 < attention.coverage < 0.5


def stacked_source(lab: Any, folder: Path) -> Path:
    """A checkpoint as a loader would have it in memory: each layer's experts in two 3-D tensors."""
    tensors = lab.read(lab.source("qwen3_moe"))
    experts = range(4)
    names = {part: [f"{QWEN}.{n}.{part}_proj.weight" for n in experts] for part in ("gate", "up", "down")}
    gate, up, down = (torch.stack([tensors.pop(name) for name in names[part]]) for part in ("gate", "up", "down"))
    tensors[f"{QWEN}.gate_up_proj"] = torch.cat([gate, up], dim=1)
    tensors[f"{QWEN}.down_proj"] = down
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes((lab.source("qwen3_moe") / "config.json").read_bytes())
    return folder


def test_stacked_experts_fail_on_the_coverage_floor(lab: Any, tmp_path: Path) -> None:
    source = stacked_source(lab, tmp_path / "stacked")
    with pytest.raises(
        UnsupportedError, match=r"at least 90%.*could only \d+\.\d%.*experts\.gate_up_proj.*3-dimensional"
    ):
        lab.pack(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_stacked_experts_load_when_the_floor_is_lifted(lab: Any, tmp_path: Path) -> None:
    source = stacked_source(lab, tmp_path / "stacked")
    packed = lab.pack(source, tmp_path / "out", min_coverage=0.0)
    assert packed.report.coverage < 0.9
    model, stock = lab.load(packed.folder), lab.stock(packed, dtype=torch.float32)
    assert not any(isinstance(module, W3Experts) for module in model.modules())
    assert lab.distance(lab.logits(model), lab.logits(stock)) < 1e-3
