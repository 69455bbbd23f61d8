"""A damaged checkpoint is refused with the tensor's name; no model comes out of it with memory that nothing has filled."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from w3pack.errors import CheckpointError, UnsupportedError, W3PackError
from w3pack.integrations.hf_quantizer import W3QuantizationConfig

Tensors = dict[str, torch.Tensor]
LINEAR = "model.layers.1.self_attn.k_proj"
EXPERT = "model.layers.0.block_sparse_moe.experts.1.w2"


def remove(tensors: Tensors, name: str) -> None:
    del tensors[name]


def truncate(tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name][:-1]


def change_shape(tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name].unsqueeze(0)


def transpose(tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name].transpose(0, -1)


def change_dtype(tensors: Tensors, name: str) -> None:
    to = torch.int64 if tensors[name].dtype in (torch.int32, torch.float32) else torch.float32
    tensors[name] = tensors[name].to(to)


def damaged(lab: Any, family: str, to: Path, change: Callable[[Tensors], None], **options: Any) -> Path:
    folder: Path = lab.edit(lab.copy(lab.packed(family, **options), to / "damaged"), change)
    return folder


def refuses(lab: Any, folder: Path, name: str, *kinds: type[Exception], **kwargs: Any) -> str:
    """The message of the error that loading `folder` ends with, which is one of `kinds` and holds `name`."""
    with pytest.raises(kinds or (CheckpointError,), match=re.escape(name)) as caught:
        lab.load(folder, **kwargs)
    message = str(caught.value)
    if isinstance(caught.value, W3PackError):
        assert message.startswith("expected ") or " expected " in message
        assert "\n" not in message
    return message


DAMAGE = [remove, truncate, change_dtype, change_shape, transpose]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda function: function.__name__)
@pytest.mark.parametrize("part", ["codes", "scales", "qmap", "bias"])
def test_damaged_tensor_of_a_linear(lab: Any, tmp_path: Path, part: str, damage: Callable[..., None]) -> None:
    if part == "bias" and damage is transpose:
        pytest.skip("a vector")
    name = f"{LINEAR}.{part}"
    refuses(lab, damaged(lab, "qwen2", tmp_path, lambda tensors: damage(tensors, name), qmap_per="row"), name)


@pytest.mark.parametrize("damage", [remove, truncate, change_dtype], ids=lambda function: function.__name__)
@pytest.mark.parametrize("part", ["codes", "scales", "qmap"])
def test_damaged_tensor_of_an_expert(lab: Any, tmp_path: Path, part: str, damage: Callable[..., None]) -> None:
    name = f"{EXPERT}.{part}"
    refuses(lab, damaged(lab, "mixtral", tmp_path, lambda tensors: damage(tensors, name)), name)


def test_mismatched_sizes_are_not_ignored_for_packed_tensors(lab: Any, tmp_path: Path) -> None:
    name = f"{LINEAR}.codes"
    folder = damaged(lab, "qwen2", tmp_path, lambda tensors: truncate(tensors, name))
    refuses(lab, folder, name, ignore_mismatched_sizes=True)


@pytest.mark.parametrize(
    ("family", "name", "shown"),
    [
        ("qwen2", "model.layers.1.post_attention_layernorm.weight", "model.layers.1.post_attention_layernorm.weight"),
        ("qwen2", "model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("llama", "lm_head.weight", "lm_head.weight"),
        ("qwen3", "model.layers.0.self_attn.q_norm.weight", "model.layers.0.self_attn.q_norm.weight"),
        ("qwen3_moe", "model.layers.0.mlp.gate.weight", "model.layers.0.mlp.gate.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.gate.weight", "model.layers.0.mlp.gate.weight"),
    ],
)
@pytest.mark.parametrize("damage", [remove, truncate], ids=lambda function: function.__name__)
def test_damaged_tensor_that_was_kept_in_floats(
    lab: Any, tmp_path: Path, family: str, name: str, shown: str, damage: Callable[..., None]
) -> None:
    folder = damaged(lab, family, tmp_path, lambda tensors: damage(tensors, name))
    if damage is remove:
        refuses(lab, folder, shown)
    else:  # transformers from 5.24 on refuses before w3pack can, with the name in its log only
        with pytest.raises(
            (RuntimeError, CheckpointError), match=rf"{re.escape(shown)} of shape|ignore_mismatched_sizes"
        ):
            lab.load(folder)


@pytest.mark.parametrize("part", ["codes", "scales", "qmap"])
@pytest.mark.parametrize("owner", ["model.layers.0.self_attn.x_proj", "model.layers.7.mlp.up_proj", "model.norm"])
def test_stray_packed_tensor(lab: Any, tmp_path: Path, owner: str, part: str) -> None:
    def add(tensors: Tensors) -> None:
        tensors[f"{owner}.{part}"] = tensors[f"{LINEAR}.{part}"].clone()

    refuses(lab, damaged(lab, "qwen2", tmp_path, add), f"{owner}.{part}")


@pytest.mark.parametrize("part", ["weight", "weight_scale_inv", "g_idx", "bias"])
def test_stray_tensor_beside_the_packed_ones(lab: Any, tmp_path: Path, part: str) -> None:
    name = f"model.layers.0.mlp.up_proj.{part}"

    def add(tensors: Tensors) -> None:
        tensors[name] = torch.ones(1000) if part == "bias" else torch.ones(1000, 200)

    refuses(lab, damaged(lab, "qwen2", tmp_path, add), name)


def test_float_weight_of_another_expert_beside_the_packed_ones(lab: Any, tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors[f"{EXPERT}.weight"] = torch.ones(200, 200)

    refuses(lab, damaged(lab, "mixtral", tmp_path, add), f"{EXPERT}.weight")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["scales", "qmap"])
def test_values_that_are_not_finite(lab: Any, tmp_path: Path, part: str, value: float) -> None:
    name = f"{LINEAR}.{part}"

    def spoil(tensors: Tensors) -> None:
        tensors[name].view(-1)[3] = value

    refuses(lab, damaged(lab, "qwen2", tmp_path, spoil, qmap_dtype="float16"), name)


def test_truncated_file(lab: Any, tmp_path: Path) -> None:
    folder = lab.copy(lab.packed("qwen2"), tmp_path / "short")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(Exception, match=r"model\.safetensors|incomplete|InvalidHeader|IncompleteMetadata") as caught:
        lab.load(folder)
    assert not isinstance(caught.value, (AttributeError, TypeError))


def edit_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format_version", 2),
        ("bits", 4),
        ("guard", "model.nothing"),
        ("modules", {}),
        ("layout", "wide"),
        ("group_size", 96),
    ],
)
def test_damaged_config(lab: Any, tmp_path: Path, key: str, value: Any) -> None:
    folder = edit_config(
        lab.copy(lab.packed("qwen2"), tmp_path / "damaged"), lambda config: config.update({key: value})
    )
    refuses(lab, folder, "expected", CheckpointError)


def test_module_that_the_config_lacks(lab: Any, tmp_path: Path) -> None:
    folder = lab.copy(lab.packed("qwen2"), tmp_path / "damaged")
    edit_config(folder, lambda config: config["modules"].pop(LINEAR))
    refuses(lab, folder, LINEAR)


def test_module_that_the_model_lacks(lab: Any, tmp_path: Path) -> None:
    def rename(tensors: Tensors) -> None:
        for part in ("codes", "scales", "qmap", "bias"):
            tensors[f"model.layers.7.self_attn.k_proj.{part}"] = tensors.pop(f"{LINEAR}.{part}")

    folder = damaged(lab, "qwen2", tmp_path, rename)

    def move(config: dict[str, Any]) -> None:
        config["modules"]["model.layers.7.self_attn.k_proj"] = config["modules"].pop(LINEAR)

    edit_config(folder, move)
    refuses(lab, folder, "model.layers.7.self_attn.k_proj", UnsupportedError, CheckpointError)


def test_a_float_model_is_not_quantised_on_the_fly(lab: Any) -> None:
    packed = lab.packed("qwen2")
    entries = json.loads((packed.folder / "config.json").read_text())["quantization_config"]
    with pytest.raises(UnsupportedError, match=r"w3pack quantize") as caught:
        transformers.AutoModelForCausalLM.from_pretrained(
            packed.source, quantization_config=W3QuantizationConfig(**entries)
        )
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("expected ")
