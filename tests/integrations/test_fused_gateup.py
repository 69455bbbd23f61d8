"""transformers runs fused FP8 pairs: logits of the dequantised stock model, views that stay views, saving, loud failures."""

from __future__ import annotations

import copy
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaForCausalLM

from w3pack.checkpoint.safetensors_source import SafetensorsSource
from w3pack.errors import CheckpointError, UnsupportedError
from w3pack.integrations.hf_fused import fusable_for
from w3pack.pipeline.fuse_gateup import FuseReport, prepare_fuse, run_fuse
from w3pack.pipeline.fuse_plan import FuseOptions
from w3pack.quantize.fp8_blocks import dequantize_blocks, quantize_fp8_blocks
from w3pack.runtime.fp8_linear import Fp8Linear
from w3pack.runtime.gateup import FusedGateUp, FusedMLP, GateUpHalf

BLOCK = (128, 128)
FP8 = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "modules_to_not_convert": ["lm_head"]}
FAMILIES = ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mistral"]
EXPERTS = ["mixtral", "qwen3_moe"]


def is_linear(name: str) -> bool:
    return name.endswith("proj.weight") or (
        ".experts." in name and name.endswith(("w1.weight", "w2.weight", "w3.weight"))
    )


def fp8_source(lab: Any, family: str, root: Path, *, dtype: torch.dtype, scales: torch.dtype = torch.float32) -> Any:
    """(FP8 checkpoint, the same dequantised in `dtype`): every Linear of the decoder is FP8."""
    tensors = lab.read(lab.source(family, dtype=dtype))
    packed: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        plain[name] = packed[name] = tensor
        if is_linear(name):
            packed[name], grid = quantize_fp8_blocks(tensor)
            packed[f"{name}_scale_inv"] = grid.to(scales)
            plain[name] = dequantize_blocks(packed[name], grid.to(scales), block=BLOCK).to(dtype)
    config = json.loads((lab.source(family, dtype=dtype) / "config.json").read_text())
    for folder, content, more in (("fp8", packed, {"quantization_config": FP8}), ("plain", plain, {})):
        (root / folder).mkdir(parents=True)
        save_file(content, root / folder / "model.safetensors", metadata={"format": "pt"})
        (root / folder / "config.json").write_text(json.dumps({**config, **more}))
    return root / "fp8", root / "plain"


def fuse(source: Path, output: Path, **options: bool) -> FuseReport:
    opened = SafetensorsSource(source)
    return run_fuse(prepare_fuse(opened, FuseOptions(**options), fusable=fusable_for(opened)), output)


def modules(model: nn.Module, kind: type[nn.Module]) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, kind)]


def copy_of(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))


@pytest.fixture(scope="module")
def llama(lab: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """(fused, FP8, dequantised) Llama checkpoints. Read them, never write to them."""
    root = tmp_path_factory.mktemp("llama")
    fp8, plain = fp8_source(lab, "llama", root, dtype=torch.bfloat16)
    fuse(fp8, root / "fused")
    return root / "fused", fp8, plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_dequantised_model(lab: Any, tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    fp8, plain = fp8_source(lab, family, tmp_path, dtype=dtype)
    report = fuse(fp8, tmp_path / "fused")
    assert (report.pairs, report.declined) == (2, {})
    model = lab.load(tmp_path / "fused", dtype=dtype)
    assert len(modules(model, FusedMLP)) == 2
    assert len(modules(model, Fp8Linear)) == 2 * 5
    assert torch.equal(lab.logits(model), lab.logits(lab.load(plain, dtype=dtype)))


@pytest.mark.parametrize("family", EXPERTS)
def test_experts(lab: Any, tmp_path: Path, family: str) -> None:
    fp8, plain = fp8_source(lab, family, tmp_path, dtype=torch.float32)
    report = fuse(fp8, tmp_path / "fused")
    model = lab.load(tmp_path / "fused")
    assert report.pairs == len(modules(model, FusedGateUp)) > 2
    assert (
        lab.distance(lab.logits(model), lab.logits(lab.load(plain))) < 1e-6
    )  # that one multiplies both halves at once
    model.save_pretrained(tmp_path / "saved")
    before, after = lab.read(tmp_path / "fused"), lab.read(tmp_path / "saved")
    assert before.keys() == after.keys()
    assert all(lab.same(before[name], after[name]) for name in before)


@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float16, torch.float8_e8m0fnu])
def test_every_dtype_of_scales(lab: Any, tmp_path: Path, scales: torch.dtype) -> None:
    fp8, plain = fp8_source(lab, "qwen3", tmp_path, dtype=torch.bfloat16, scales=scales)
    fuse(fp8, tmp_path / "fused")
    model = lab.load(tmp_path / "fused", dtype=torch.bfloat16)
    assert {module.weight_scale_inv.dtype for module in modules(model, Fp8Linear)} == {scales}
    assert {module.weight_scale_inv.dtype for module in modules(model, FusedGateUp)} == {torch.float32}
    assert torch.equal(lab.logits(model), lab.logits(lab.load(plain, dtype=torch.bfloat16)))


def test_floats_quantised_on_the_way(lab: Any, tmp_path: Path) -> None:
    """Gate and up FP8, all else as it was: mixed precision inside an MLP."""
    source = lab.source("qwen3", dtype=torch.bfloat16)
    fuse(source, tmp_path / "fused", quantize=True)
    model = lab.load(tmp_path / "fused", dtype=torch.bfloat16)
    assert not modules(model, Fp8Linear)
    stock = lab.load(source, dtype=torch.bfloat16)
    for name, module in stock.named_modules():
        if name.endswith(("gate_proj", "up_proj")):
            packed, grid = quantize_fp8_blocks(module.weight.data)
            module.weight.data = dequantize_blocks(packed, grid, block=BLOCK).to(torch.bfloat16)
    assert torch.equal(lab.logits(model), lab.logits(stock))


@pytest.mark.parametrize("quantize", [False, True])
def test_stock_transformers_loads_kept_names(lab: Any, tmp_path: Path, quantize: bool) -> None:
    """On a CPU it dequantises to bfloat16 by itself. 256 and 128: its own arithmetic errs on partial blocks."""
    lab.families["whole"] = ("LlamaConfig", {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32,
                                             "num_key_value_heads": 4})  # fmt: skip
    fp8, plain = fp8_source(lab, "whole", tmp_path, dtype=torch.bfloat16)
    source = lab.source("whole", dtype=torch.bfloat16) if quantize else fp8
    fuse(source, tmp_path / "kept", keep_names=True, quantize=quantize)
    model = lab.load(tmp_path / "kept", dtype=torch.bfloat16)
    assert not modules(model, FusedGateUp)
    expected = dict(lab.load(plain, dtype=torch.bfloat16).named_parameters())
    floats = dict(lab.load(lab.source("whole", dtype=torch.bfloat16), dtype=torch.bfloat16).named_parameters())
    for name, parameter in model.named_parameters():
        wanted = expected if not quantize or name.endswith(("gate_proj.weight", "up_proj.weight")) else floats
        assert torch.equal(parameter, wanted[name]), name


def test_stock_transformers_leaves_experts_in_floats(lab: Any, tmp_path: Path) -> None:
    """With names kept, only the dense layer's gate and up become FP8; the stack of the others must not be taken for FP8."""
    source = lab.source("qwen3_moe", dtype=torch.bfloat16)
    report = fuse(source, tmp_path / "kept", keep_names=True, quantize=True)
    assert report.pairs == 1
    assert all("experts" in why for why in report.declined.values())
    model = lab.load(tmp_path / "kept", dtype=torch.bfloat16)
    floats = dict(lab.load(source, dtype=torch.bfloat16).named_parameters())
    for name, parameter in model.named_parameters():
        if not name.endswith(("gate_proj.weight", "up_proj.weight")):
            assert torch.equal(parameter, floats[name]), name


def same_place(fused: FusedGateUp, gate: GateUpHalf, up: GateUpHalf) -> bool:
    """Whether the halves are the fused tensors' own bytes, one after the other."""
    weight, grid = fused.weight, fused.weight_scale_inv
    return (
        gate.weight.data_ptr() == weight.data_ptr()
        and up.weight.data_ptr() == weight.data_ptr() + weight.nbytes // 2
        and gate.weight_scale_inv.data_ptr() == grid.data_ptr()
        and up.weight_scale_inv.data_ptr() == grid.data_ptr() + grid.nbytes // 2
        and gate.weight.is_contiguous()
        and up.weight.is_contiguous()
    )


def through_a_file(model: nn.Module) -> Any:
    """torch.save and torch.load of the whole module."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model,
        lambda model: model.to(torch.float32),
        nn.Module.half,  # transformers' own refuses quantised models
        lambda model: model.cpu(),
        lambda model: model.to("cpu", torch.float64),
        copy.deepcopy,
        lambda model: nn.Module.float(copy.deepcopy(model)),
        lambda model: through_a_file(model),
    ],
)
def test_halves_stay_views(lab: Any, llama: Any, move: Callable[[Any], Any]) -> None:
    model = lab.load(llama[0], dtype=torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if "gate_up" in name}
    moved = move(model)
    tensors = {name: tensor for name, tensor in moved.state_dict().items() if "gate_up" in name}
    assert all(lab.same(tensor, before[name]) for name, tensor in tensors.items())
    assert tensors.keys() == before.keys()
    assert not any("mlp.gate_proj" in name or "mlp.up_proj" in name for name in moved.state_dict())
    for mlp in modules(moved, FusedMLP):
        assert same_place(mlp.gate_up_proj, mlp.gate_proj, mlp.up_proj)
        if moved is not model:
            originals = {module.weight.data_ptr() for module in modules(model, FusedGateUp)}
            assert moved is model or mlp.gate_up_proj.weight.data_ptr() not in originals
    logits = lab.logits(moved)
    x = torch.randn(2, 576, dtype=logits.dtype)
    mlp = modules(moved, FusedMLP)[0]
    assert torch.equal(mlp(x), mlp.down_proj(nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x)))


def test_not_a_byte_more_than_the_checkpoint(lab: Any, llama: Any) -> None:
    fused, fp8, _ = llama
    held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in lab.load(fused).parameters()}
    assert sum(held.values()) == sum(tensor.nbytes for tensor in lab.read(fp8).values())


def test_saved_bit_for_bit(lab: Any, llama: Any, tmp_path: Path) -> None:
    model = lab.load(llama[0], dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    before, after = lab.read(llama[0]), lab.read(tmp_path)
    assert before.keys() == after.keys()
    assert all(lab.same(before[name], after[name]) for name in before)
    assert torch.equal(lab.logits(lab.load(tmp_path, dtype=torch.bfloat16)), lab.logits(model))


def test_an_mlp_that_computes_something_else_calls_its_halves(lab: Any, llama: Any, monkeypatch: Any) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    monkeypatch.setattr(
        LlamaMLP,
        "forward",
        lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=1)) * self.up_proj(x)),
    )
    model = lab.load(llama[0], dtype=torch.bfloat16)
    assert not modules(model, FusedMLP)
    mlp = model.model.layers[0].mlp
    assert type(mlp) is LlamaMLP
    assert same_place(mlp.gate_up_proj, mlp.gate_proj, mlp.up_proj)
    assert torch.equal(lab.logits(model), lab.logits(lab.load(llama[2], dtype=torch.bfloat16)))


def test_pairs_that_the_model_class_does_not_have(lab: Any, llama: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """A layer for multi-token prediction, say: written as it was, not fused into something no loader can place."""
    source = copy_of(llama[1], tmp_path / "source")

    def add(tensors: dict[str, torch.Tensor]) -> None:
        for leaf in ("gate_proj", "up_proj"):
            for part in ("weight", "weight_scale_inv"):
                tensors[f"model.layers.7.mlp.{leaf}.{part}"] = tensors[f"model.layers.0.mlp.{leaf}.{part}"].clone()

    lab.edit(source, add)
    report = fuse(source, tmp_path / "out", keep_names=True)
    assert report.pairs == 3  # nothing to place
    with pytest.raises(UnsupportedError, match=r"layers\.7\.mlp.*no such module.*--keep-names"):
        fuse(source, tmp_path / "fused")
    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.7"])
    report = fuse(source, tmp_path / "fused")
    assert report.declined == {"model.layers.7.mlp.gate_up_proj": "the model class has no such module"}
    assert "model.layers.7.mlp.gate_proj.weight" in lab.read(tmp_path / "fused")
    model = lab.load(tmp_path / "fused", dtype=torch.bfloat16)
    assert torch.equal(lab.logits(model), lab.logits(lab.load(llama[2], dtype=torch.bfloat16)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("model.layers.1.mlp.gate_up_proj.weight"), "gate_up_proj.weight"),
        (lambda t: t.pop("model.layers.1.mlp.gate_up_proj.weight_scale_inv"), "gate_up_proj.weight_scale_inv"),
        (lambda t: t.pop("model.layers.1.mlp.down_proj.weight_scale_inv"), "down_proj.weight_scale_inv"),
        (lambda t: t.update({"model.layers.1.mlp.gate_up_proj.weight_scale_inv": torch.ones(15, 5)}), "scale_inv"),
        (lambda t: t.update({"x.weight": torch.ones(2, 2).to(torch.float8_e4m3fn)}), "x.weight"),
        (lambda t: t["model.layers.1.mlp.gate_up_proj.weight_scale_inv"].view(-1)[3].fill_(float("nan")), "finite"),
    ],
)
def test_damage_is_a_sentence(lab: Any, llama: Any, tmp_path: Path, change: Any, says: str) -> None:
    folder = copy_of(llama[0], tmp_path / "damaged")
    lab.edit(folder, change)
    with pytest.raises(CheckpointError, match=says):
        lab.load(folder)


def test_config_of_another_model(lab: Any, llama: Any, tmp_path: Path) -> None:
    folder = copy_of(llama[0], tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 999}))
    with pytest.raises(UnsupportedError, match="999"):
        lab.load(folder)


def test_without_w3pack_it_fails_loudly(lab: Any, llama: Any, tmp_path: Path, python: Callable[[str], str]) -> None:
    """Stock transformers logs an unknown method and would go on with random weights: the guard stops it."""
    fp8, _ = fp8_source(lab, "mixtral", tmp_path, dtype=torch.float32)
    fuse(fp8, tmp_path / "fused")
    said = python(
        "import json, sys\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if type(f).__module__ != 'w3pack_autoload']\n"
        "sys.modules['w3pack'] = sys.modules['w3pack_autoload'] = None\n"
        "from transformers import AutoModelForCausalLM\n"
        f"for folder in {[str(llama[0]), str(tmp_path / 'fused')]!r}:\n"
        "    try:\n"
        "        AutoModelForCausalLM.from_pretrained(folder)\n"
        "        print('RAN')\n"
        "    except Exception as error:\n"
        "        print('STOPPED', type(error).__name__, 'gate' in str(error))\n"
    )
    assert said.count("STOPPED") == 2, said
    assert "RAN" not in said
