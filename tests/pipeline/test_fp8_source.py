"""Block-scaled FP8 sources: dequantised first, by the block size of the config and the dtypes of the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from w3pack.checkpoint.safetensors_source import SafetensorsSource
from w3pack.errors import CheckpointError, UnsupportedError
from w3pack.pipeline.mixing import MixRequest, mix_job
from w3pack.pipeline.plan import QuantizeOptions
from w3pack.pipeline.quantize_model import prepare_job, read_float, run
from w3pack.pipeline.verify_checkpoint import verify_checkpoint

BLOCK = (128, 128)
CONFIG = {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(BLOCK), "fmt": "e4m3"}}
AT = "model.layers.0"
UP, DOWN, Q, HEAD = f"{AT}.mlp.up_proj", f"{AT}.mlp.down_proj", f"{AT}.self_attn.q_proj", "lm_head"


def to_blocks(weight: torch.Tensor, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FP8 weight, block scales, and the float32 matrix that the two mean: element by element, in plain loops."""
    rows, columns = weight.shape
    grid = torch.empty(-(-rows // BLOCK[0]), -(-columns // BLOCK[1]))
    packed = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    meant = torch.empty(rows, columns)
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            part = (slice(i * BLOCK[0], (i + 1) * BLOCK[0]), slice(j * BLOCK[1], (j + 1) * BLOCK[1]))
            # neighbours differ by large factors: a scale taken from the wrong block shows
            scale = weight[part].abs().max() / 448 * 3.0 ** ((i + 2 * j) % 4)
            stored = (2.0 ** scale.log2().ceil()) if scale_dtype is torch.float8_e8m0fnu else scale
            grid[i, j] = stored.to(scale_dtype).float()
            packed[part] = (weight[part] / grid[i, j]).to(torch.float8_e4m3fn)
            meant[part] = packed[part].float() * grid[i, j]
    return packed, grid.to(scale_dtype), meant


def fp8_model(lab: Any, scale_dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The tensors of an FP8 checkpoint, and the float32 weights that they mean."""
    shapes = {UP: (200, 160), DOWN: (160, 200), Q: (160, 160), HEAD: (130, 160)}
    tensors: dict[str, torch.Tensor] = {"model.norm.weight": lab.random(160), f"{Q}.bias": lab.random(160, seed=5)}
    meant: dict[str, torch.Tensor] = {}
    for seed, (module, shape) in enumerate(shapes.items()):
        packed, scales, weight = to_blocks(lab.random(*shape, seed=seed), scale_dtype)
        tensors |= {f"{module}.weight": packed, f"{module}.weight_scale_inv": scales}
        meant[module] = weight
    tensors[f"{AT}.self_attn.o_proj.weight"] = lab.random(160, 160, seed=9).to(torch.bfloat16)  # never was FP8
    return tensors, meant


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu, torch.float16])
def test_same_as_quantising_the_dequantised_weights(lab: Any, scale_dtype: torch.dtype) -> None:
    tensors, meant = fp8_model(lab, scale_dtype)
    plain = {name: tensor for name, tensor in tensors.items() if not name.startswith((UP, DOWN, HEAD, f"{Q}.weight"))}
    plain |= {f"{module}.weight": weight for module, weight in meant.items()}
    found = lab.quantize(lab.source(tensors, CONFIG), skip=(Q,))
    expected = lab.quantize(lab.source(plain, name="plain"), skip=(Q,), name="expected")
    for module in (Q, HEAD):  # kept FP8 modules become bf16
        expected[f"{module}.weight"] = expected[f"{module}.weight"].to(torch.bfloat16)
    for tensors_of in (found, expected):  # the guard stands at the first Linear, and files are ordered by dtype
        (guard,) = (name for name, tensor in tensors_of.items() if tensor.dtype == torch.uint8)
        del tensors_of[guard]
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    assert not any("scale_inv" in name for name in found)
    assert lab.manifest()["kept"][f"{Q}.weight"] == "dequantize: --skip"
    verify_checkpoint(lab.root / "out", against=lab.source(tensors, CONFIG, name="again"))


def test_uint8_scales_are_e8m0(lab: Any) -> None:
    tensors, _ = fp8_model(lab, torch.float8_e8m0fnu)
    expected = lab.quantize(lab.source(tensors, CONFIG))
    for name in list(tensors):
        if name.endswith("scale_inv"):
            tensors[name] = tensors[name].view(torch.uint8)
    found = lab.quantize(lab.source(tensors, CONFIG, name="bytes"), name="found")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_what_is_written_no_longer_claims_to_be_fp8(lab: Any) -> None:
    from w3pack.pipeline.packed import open_packed

    tensors, _ = fp8_model(lab, torch.float32)
    lab.quantize(lab.source(tensors, {**CONFIG, "text_config": CONFIG}))
    config = open_packed(lab.root / "out").source.config
    assert config["quantization_config"]["quant_method"] == "w3pack"
    assert config["text_config"] == {}


@pytest.mark.parametrize("grid", [(1, 2), (2, 1), (3, 2), (25, 2), (2, 2, 1), ()])
def test_wrong_grid_is_refused_by_name(lab: Any, grid: tuple[int, ...]) -> None:
    tensors, _ = fp8_model(lab, torch.float32)
    tensors[f"{UP}.weight_scale_inv"] = torch.ones(grid)  # 200 x 160 in blocks of 128: 2 x 2
    with pytest.raises(CheckpointError, match=rf"{UP}.weight_scale_inv of shape \(2, 2\)"):
        prepare_job(lab.source(tensors, CONFIG), QuantizeOptions())


def test_block_size_comes_from_the_config(lab: Any) -> None:
    """1000 rows with 8 scale rows are blocks of 128, not of 125."""
    weight, scales, meant = to_blocks(lab.random(1000, 64), torch.float32)
    assert scales.shape == (8, 1)
    found = lab.quantize(lab.source({f"{UP}.weight": weight, f"{UP}.weight_scale_inv": scales}, CONFIG))
    expected = lab.quantize(lab.source({f"{UP}.weight": meant}, name="plain"), name="expected")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_scale_is_missing(lab: Any) -> None:
    tensors, _ = fp8_model(lab, torch.float32)
    del tensors[f"{HEAD}.weight_scale_inv"]
    with pytest.raises(CheckpointError, match=f"{HEAD}.weight_scale_inv"):
        prepare_job(lab.source(tensors, CONFIG), QuantizeOptions())


def test_no_config_for_fp8(lab: Any) -> None:
    tensors, _ = fp8_model(lab, torch.float32)
    with pytest.raises(CheckpointError, match="quantization_config"):
        prepare_job(lab.source(tensors), QuantizeOptions())


@pytest.mark.parametrize("block", [None, 128, [128], [0, 128], [128, True], ["128", "128"], [128.0, 128.0]])
def test_block_size_that_is_none(lab: Any, block: Any) -> None:
    tensors, _ = fp8_model(lab, torch.float32)
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": block}}
    with pytest.raises(UnsupportedError, match="weight_block_size"):
        prepare_job(lab.source(tensors, config), QuantizeOptions())


@pytest.mark.parametrize("what", ["weight", "weight_scale_inv"])
@pytest.mark.parametrize("module", [UP, HEAD])
def test_nan_in_weight_or_scale(lab: Any, what: str, module: str) -> None:
    tensors, _ = fp8_model(lab, torch.float32)
    tensors[f"{module}.{what}"].view(-1)[0] = float("nan")
    with pytest.raises(CheckpointError, match=f"{module}.weight"):
        lab.quantize(lab.source(tensors, CONFIG))
    assert sorted(path.name for path in Path(lab.root).iterdir()) == ["source"]


def test_activation_scales_go_with_the_fp8_weights(lab: Any) -> None:
    """Left beside a packed Linear they would make the output unreadable, after hours of work."""
    tensors, _ = fp8_model(lab, torch.float32)
    plain = lab.quantize(lab.source(tensors, CONFIG))
    tensors |= {f"{module}.input_scale": torch.ones(1) for module in (UP, HEAD)}
    found = lab.quantize(lab.source(tensors, CONFIG, name="static"), name="found")
    assert found.keys() == plain.keys()
    verify_checkpoint(lab.root / "found")


def test_memory_estimate_and_size_count_what_comes_out(lab: Any) -> None:
    tensors, _ = fp8_model(lab, torch.float32)
    job = prepare_job(lab.source(tensors, CONFIG), QuantizeOptions(qmap="nf3"))
    stored = lab.quantize(job.source)
    assert job.plan.output_bytes == sum(tensor.nbytes for tensor in stored.values())
    assert job.plan.source_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_e5m2_weights_are_fp8_too(tmp_path: Path) -> None:
    """Neither copied raw nor left out of the coverage: multiplied by their scales like E4M3 ones."""
    folder = tmp_path / "source"
    folder.mkdir()
    name = "model.layers.0.mlp.up_proj.weight"
    weight = torch.linspace(-1, 1, 128 * 256).view(128, 256).to(torch.float8_e5m2)
    scales = torch.tensor([[0.5, 3.0]])
    save_file({name: weight, f"{name}_scale_inv": scales}, folder / "model.safetensors")
    config = {"model_type": "llama", "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (folder / "config.json").write_text(json.dumps(config))
    job = prepare_job(SafetensorsSource(folder), QuantizeOptions())
    assert [tensor.action for tensor in job.plan.tensors if tensor.source.name == name] == ["quantize"]
    assert job.plan.coverage == 1.0
    found = read_float(job.source, job.plan.quantized[0], block=job.plan.block)
    assert torch.equal(found[:, :128], weight[:, :128].float() * 0.5)
    assert torch.equal(found[:, 128:], weight[:, 128:].float() * 3.0)


def test_kept_for_its_sensitivity_it_becomes_bfloat16(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("W3PACK_CACHE_DIR", str(tmp_path / "cache"))
    tensors, meant = fp8_model(lab, torch.float32)
    job = prepare_job(lab.source(tensors, CONFIG), QuantizeOptions(qmap="nf3"))
    request = MixRequest(keep_top="1")
    mixed = mix_job(job, request, gradients=None, workers=1, device="cpu")
    assert mixed.sensitivity is not None
    (kept,) = mixed.sensitivity["mixed"]["kept"]
    run(mixed, lab.root / "out")
    found = lab.read("out")[f"{kept}.weight"]
    assert torch.equal(found, meant[kept].to(torch.bfloat16))
    packed = mixed.plan.modules
    sizes = sum(spec.nbytes for spec in packed.values()) + found.nbytes
    assert mixed.sensitivity["mixed"]["bytes"] == sizes
    verify_checkpoint(lab.root / "out", against=lab.source(tensors, CONFIG, name="again"))
