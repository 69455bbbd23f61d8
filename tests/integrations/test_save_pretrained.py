"""What was loaded is saved bit for bit, guard included, and loads again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from w3pack.format.names import GUARD_TEXT


def quantization_config(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"lm_head": True, "qmap_per": "row"}),
    ("qwen2", {"layout": "nibble"}),
    ("gemma3_text", {}),
    ("phi3", {}),
    ("qwen3_moe", {}),
    ("qwen3_moe", {"only": ("re:.*experts.*",)}),
    ("mixtral", {"layout": "nibble"}),
    ("mixtral", {"only": ("re:.*experts.*",)}),
    ("mixtral", {"only": ("re:.*self_attn.*",)}),
]


@pytest.mark.parametrize("limit", ["5GB", "200KB"])
@pytest.mark.parametrize(("family", "options"), CASES, ids=lambda value: str(value))
def test_round_trip_is_bit_for_bit(lab: Any, tmp_path: Path, family: str, options: dict[str, Any], limit: str) -> None:
    packed = lab.packed(family, **options)
    model = lab.load(packed.folder)
    logits = lab.logits(model)
    model.save_pretrained(tmp_path, max_shard_size=limit)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (limit == "200KB")

    before, after = lab.read(packed.folder), lab.read(tmp_path)
    assert set(before) == set(after)
    assert [name for name in before if not lab.same(before[name], after[name])] == []
    assert bytes(after[f"{packed.config.guard}.weight"].tolist()) == GUARD_TEXT
    assert quantization_config(tmp_path) == quantization_config(packed.folder)

    assert lab.same(lab.logits(lab.load(tmp_path)), logits)


def test_names_of_the_source_are_kept(lab: Any, tmp_path: Path) -> None:
    packed = lab.packed("mixtral")
    source = lab.read(packed.source)
    legacy = "model.layers.0.block_sparse_moe.experts.2.w1"
    assert f"{legacy}.weight" in source
    lab.load(packed.folder).save_pretrained(tmp_path)
    for folder in (packed.folder, tmp_path):
        stored = lab.read(folder)
        assert f"{legacy}.codes" in stored
        kept = {
            name
            for name in stored
            if not name.endswith((".codes", ".scales", ".qmap")) and stored[name].dtype != torch.uint8
        }
        assert kept <= set(source)


def test_saving_in_another_dtype_changes_only_floats_that_are_not_packed(lab: Any, tmp_path: Path) -> None:
    packed = lab.packed("qwen2")
    lab.load(packed.folder, dtype=torch.bfloat16).save_pretrained(tmp_path)
    before, after = lab.read(packed.folder), lab.read(tmp_path)
    for name, tensor in before.items():
        exact = tensor.to(torch.bfloat16) if tensor.dtype == torch.float32 else tensor
        assert lab.same(after[name], exact), name


def test_a_second_generation_equals_the_first(lab: Any, tmp_path: Path) -> None:
    lab.load(lab.packed("qwen3_moe").folder).save_pretrained(tmp_path / "first")
    lab.load(tmp_path / "first").save_pretrained(tmp_path / "second")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes()
