"""Experts in the plan: every expert is a Linear of its own, coverage counts them, stacks are refused by the floor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from w3pack.checkpoint.safetensors_source import SafetensorsSource
from w3pack.errors import UnsupportedError, UsageError
from w3pack.pipeline.plan import Plan, QuantizeOptions
from w3pack.pipeline.quantize_model import prepare_job

HIDDEN, INTERMEDIATE, EXPERTS = 72, 100, 3
LAYER = "model.layers.0"
ATTENTION = 2 * HIDDEN * HIDDEN
ROUTER = EXPERTS * HIDDEN
STACKS = 3 * EXPERTS * HIDDEN * INTERMEDIATE


def write(folder: Path, *, stacked: bool) -> SafetensorsSource:
    """One layer: two attention matrices, a router, and experts one by one or in 3-D stacks."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    tensors = {
        "model.embed_tokens.weight": random(10, HIDDEN),
        f"{LAYER}.self_attn.q_proj.weight": random(HIDDEN, HIDDEN),
        f"{LAYER}.self_attn.o_proj.weight": random(HIDDEN, HIDDEN),
        f"{LAYER}.input_layernorm.weight": random(HIDDEN),
        f"{LAYER}.mlp.gate.weight": random(EXPERTS, HIDDEN),
    }
    if stacked:
        tensors[f"{LAYER}.mlp.experts.gate_up_proj"] = random(EXPERTS, 2 * INTERMEDIATE, HIDDEN)
        tensors[f"{LAYER}.mlp.experts.down_proj"] = random(EXPERTS, HIDDEN, INTERMEDIATE)
    else:
        for number in range(EXPERTS):
            for projection in ("gate_proj", "up_proj"):
                tensors[f"{LAYER}.mlp.experts.{number}.{projection}.weight"] = random(INTERMEDIATE, HIDDEN)
            tensors[f"{LAYER}.mlp.experts.{number}.down_proj.weight"] = random(HIDDEN, INTERMEDIATE)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "tie_word_embeddings": True}))
    return SafetensorsSource(folder)


def plan(source: SafetensorsSource, **options: object) -> Plan:
    return prepare_job(source, QuantizeOptions(**options)).plan  # type: ignore[arg-type]


def test_every_expert_is_a_linear_and_the_router_is_not(tmp_path: Path) -> None:
    made = plan(write(tmp_path, stacked=False))
    assert len(made.modules) == 2 + 3 * EXPERTS
    assert f"{LAYER}.mlp.experts.2.down_proj" in made.modules
    assert f"{LAYER}.mlp.gate" not in made.modules
    total = ATTENTION + STACKS + ROUTER
    assert made.coverage == pytest.approx((ATTENTION + STACKS) / total)


def test_coverage_of_a_part_is_the_part(tmp_path: Path) -> None:
    made = plan(write(tmp_path, stacked=False), skip=(f"{LAYER}.mlp.experts.1.up_proj",))
    one = HIDDEN * INTERMEDIATE
    assert made.coverage == pytest.approx((ATTENTION + STACKS - one) / (ATTENTION + STACKS + ROUTER))
    assert f"{LAYER}.mlp.experts.1.up_proj" not in made.modules
    assert f"{LAYER}.mlp.experts.1.gate_proj" in made.modules


def test_skip_entry_of_the_router_is_not_a_prefix(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no match.*near names"):
        plan(write(tmp_path, stacked=False), skip=(f"{LAYER}.mlp.experts.1.gate",))


def test_stacks_fail_on_the_floor(tmp_path: Path) -> None:
    source = write(tmp_path, stacked=True)
    share = ATTENTION / (ATTENTION + STACKS + ROUTER)
    with pytest.raises(
        UnsupportedError, match=rf"at least 90%.*could only {share:.1%}.*experts\.gate_up_proj.*3-dimensional"
    ):
        plan(source)
    with pytest.raises(UnsupportedError, match=r"at least 50%"):
        plan(source, min_coverage=0.5)


def test_stacks_pass_when_the_floor_is_lifted(tmp_path: Path) -> None:
    made = plan(write(tmp_path, stacked=True), min_coverage=0.0)
    assert set(made.modules) == {f"{LAYER}.self_attn.q_proj", f"{LAYER}.self_attn.o_proj"}
    kept = {tensor.source.name: tensor for tensor in made.tensors if tensor.action == "copy"}
    assert "3-dimensional" in kept[f"{LAYER}.mlp.experts.gate_up_proj"].reason


def test_the_guard_prefers_a_plain_linear(tmp_path: Path) -> None:
    source = write(tmp_path, stacked=False)
    assert plan(source).guard.name == f"{LAYER}.self_attn.q_proj.weight" or "self_attn" in plan(source).guard.name
    assert ".experts." in plan(source, only=("re:.*experts.*",)).guard.name
