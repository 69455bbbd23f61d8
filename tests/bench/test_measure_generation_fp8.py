"""`scripts/measure_generation_fp8_gpu.py` with a tiny model on a CPU, and the page's part that is made from its JSON."""

from __future__ import annotations

import copy
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import w3pack

SCRIPTS = Path(w3pack.__file__).parents[1] / "scripts"
SCRIPT = SCRIPTS / "measure_generation_fp8_gpu.py"
MODELS = ["stock", "unfused", "fused", "separate-w8a8", "fused-w8a8"]


@pytest.mark.slow
def test_every_model_is_measured(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--small", "--device", "cpu", "--layers", "2", "--batch", "1", "2"]
    command += ["--tokens", "4", "--folder", str(tmp_path)]
    found = []
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(json.loads(done.stdout))
    first, again = found
    assert {"make", "fuse"} <= first["seconds"].keys()
    assert not {"make", "fuse"} & again["seconds"].keys()
    assert (first["fusing"]["pairs"], first["fusing"]["weight_bytes_delta"], again["fusing"]) == (2, 0, None)
    assert list(first["models"]) == MODELS
    assert all(list(model["graph"]) == ["1", "2"] for model in first["models"].values())
    sizes = {name: (model["tensor_bytes"], model["fp8_parameters"]) for name, model in first["models"].items()}
    assert len({sizes[name] for name in MODELS[1:]}) == 1
    assert sizes["fused"][1] == 2 * (4 * 128 * 128 + 3 * 256 * 128)
    assert first["memory_against_unfused"]["fused"] == {"tensor_bytes": 1.0}
    assert first["speed_against_unfused"]["fused"]["graph"]["1"] > 0
    assert [(one["model"], one["against"]) for one in first["logits"]] == [
        ("fused", "unfused"),
        ("halves of fused", "unfused"),
        ("fused-w8a8", "separate-w8a8"),
    ]
    assert all(list(one["calls"]) == ["1 x 1", "2 x 1", "1 x 32"] for one in first["logits"])
    assert all(call["equal"] for one in first["logits"] for call in one["calls"].values())  # a CPU rounds alike


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    """The script that measures, and the one that renders."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    names = ("generation_bench", "measure_generation_fp8_gpu", "render_results", "render_generation_fp8")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(names[1]), importlib.import_module(names[2])


def test_the_shape_is_qwen3_8b_and_its_weights_are_whole_blocks(scripts: tuple[ModuleType, ModuleType]) -> None:
    from transformers import AutoModelForCausalLM

    measure, _ = scripts
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(measure.qwen_config(36))
    assert sum(parameter.numel() for parameter in model.parameters()) == 8_190_735_360
    name = "model.layers.35.mlp.gate_proj.weight"
    assert model.get_parameter(name).shape == (12288, 4096)
    torch.manual_seed(0)  # of the weights, and of the scales that are drawn there
    made = measure.in_fp8(name, 0.02 * torch.randn(256, 384))
    assert list(made) == [name, f"{name}_scale_inv"]
    weight, scales = made.values()
    assert (weight.dtype, tuple(scales.shape), scales.dtype) == (torch.float8_e4m3fn, (2, 3), torch.float32)
    assert len(scales.unique()) == 6
    dense = weight.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert 0.015 < float(dense.std()) < 0.025
    for other in ("lm_head.weight", "model.embed_tokens.weight"):
        assert list(measure.in_fp8(other, torch.ones(128, 128))) == [other]
    assert list(measure.in_fp8("model.layers.0.input_layernorm.weight", torch.ones(128))) != []


class Broken(nn.Module):
    """A model that loads and does not run, as transformers' FP8 without its kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.device = torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        if name == "config":
            raise ImportError("finegrained-fp8 kernel unavailable\nlong story")
        return super().__getattr__(name)


def test_what_cannot_run_is_said(scripts: tuple[ModuleType, ModuleType]) -> None:
    measure, _ = scripts

    def fail() -> Any:
        raise OSError

    bench = measure.Bench(measure.Runs([1], [], 2), torch.device("cpu"))
    bench.stock(Broken)
    assert bench.results["stock"]["why_not"] == "ImportError: finegrained-fp8 kernel unavailable"
    assert bench.results["stock"]["tensor_bytes"] == 12
    bench.results.clear()
    bench.stock(fail)
    assert bench.results["stock"] == {"why_not": "OSError", "graph": {}, "compiled": {}}
    assert measure.speeds({**bench.results, "unfused": {"graph": {}, "compiled": {}}}, "unfused") == {
        "stock": {"graph": {}, "compiled": {}}
    }


@pytest.fixture
def document() -> dict[str, Any]:
    def model(ms: float) -> dict[str, Any]:
        step = {"milliseconds_a_step": ms, "tokens_a_second": 8000 / ms}
        return {"bytes_held": 9 * 10**9, "bytes_at_most": 10**10, "graph": {"8": step}, "compiled": {}}

    def calls(**apart: float) -> dict[str, Any]:
        return {shape.replace("_", " "): {"equal": not far, "relative": far} for shape, far in apart.items()}

    return {
        "layers": 36,
        "prompt_tokens": 32,
        "steps": 64,
        "models": {
            "stock": {"tensor_bytes": 9 * 10**9, "why_not": "ImportError: no kernels", "graph": {}, "compiled": {}},
            "unfused": model(5.0),
            "fused": model(4.0),
        },
        "speed_against_unfused": {"stock": {"graph": {}, "compiled": {}}, "fused": {"graph": {"8": 1.25}}},
        "memory_against_unfused": {"fused": {"tensor_bytes": 1.0, "bytes_held": 1.0001}},
        "logits": [
            {"model": "fused", "against": "unfused", "calls": calls(**{"1_x_1": 2e-3, "8_x_1": 0.0})},
            {"model": "halves of fused", "against": "unfused", "calls": calls(**{"1_x_1": 0.0, "8_x_1": 0.0})},
        ],
        "provenance": {"device": "GPU", "torch": "2", "driver": "5", "command": "python x.py"},
    }


def test_page(scripts: tuple[ModuleType, ModuleType], document: dict[str, Any]) -> None:
    _, results = scripts
    text = results.render_generation_fp8.section(document, results.table)
    assert "| unfused | captured | 8 | 5.00 | 1600 | - | 9.00 / 10.00 |" in text
    assert "| fused | captured | 8 | 4.00 | 2000 | 1.250 | 9.00 / 10.00 |" in text
    assert "+0.000 % parameters and buffers, +0.010 % after `prepare`." in text
    assert "- fused, against unfused: equal in every bit for 8 x 1, at most 2.0e-03 apart (relative)" in text
    assert "- fused tensor, each half by a call of its own, against unfused: equal in every bit\n" in text
    assert "transformers' own FP8 did not run: ImportError: no kernels." in text
    bare = copy.deepcopy(document) | {"logits": [], "memory_against_unfused": {}}
    bare["models"] = {"fused": bare["models"]["fused"]}
    text = results.render_generation_fp8.section(bare, results.table)
    assert "Logits" not in text
    assert "Memory of the fused model" not in text
    assert "did not run" not in text


def test_the_page_works_with_and_without_the_file(
    scripts: tuple[ModuleType, ModuleType], document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, results = scripts
    monkeypatch.setattr(results, "load", lambda name: document if name == "generation_fp8_h200.json" else None)
    assert "Generating in FP8 on a GPU" in results.sections()
    monkeypatch.setattr(results, "load", lambda name: None)
    assert "Generating in FP8 on a GPU" not in results.sections()
