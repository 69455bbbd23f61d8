"""A loaded checkpoint computes what a stock model computes with the dequantised weights, in the dtype that was asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from w3pack.runtime.linear import W3Linear

DTYPES = [torch.float32, torch.bfloat16]

#: Family -> options; over the set both layouts, three group sizes, both forms of map and both map dtypes.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"layout": "nibble", "group_size": 64, "qmap_per": "row", "qmap_dtype": "float16"}),
    ("llama", {"lm_head": True, "qmap_per": "row"}),
    ("llama_tied", {"group_size": 64}),
    ("qwen2", {"layout": "nibble"}),
    ("qwen3", {"qmap_dtype": "float16", "group_size": 256}),
    ("gemma", {"qmap_per": "row"}),
    ("gemma2", {"layout": "nibble", "group_size": 64}),
    ("gemma3_text", {"qmap": "nf3"}),
    ("mistral", {"group_size": 64, "qmap_dtype": "float16"}),
    ("phi3", {"layout": "nibble", "qmap_per": "row"}),
    ("qwen3_moe", {"group_size": 64}),
    ("mixtral", {"layout": "nibble"}),
]


@pytest.fixture
def warned() -> Iterator[list[str]]:
    """Warnings that transformers logs, which it does not hand on to the root logger."""
    messages: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, listener = logging.getLogger("transformers"), Listener(level=logging.WARNING)
    logger.addHandler(listener)
    yield messages
    logger.removeHandler(listener)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("family", "options"), CASES, ids=lambda value: str(value))
def test_equals_the_stock_model_with_dequantised_weights(
    lab: Any, family: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    packed = lab.packed(family, **options)
    model, stock = lab.load(packed.folder, dtype=dtype), lab.stock(packed, dtype=dtype)
    replaced = sum(isinstance(module, W3Linear) for module in model.modules())
    assert replaced == len(packed.config.modules) == packed.report.modules > 0
    logits = lab.logits(model)
    assert logits.dtype == dtype
    assert lab.distance(logits, lab.logits(stock)) < 1e-3
    assert lab.continuation(model) == lab.continuation(stock)


def test_the_comparison_can_fail(lab: Any) -> None:
    packed = lab.packed("llama")
    loss = lab.distance(lab.logits(lab.load(packed.folder)), lab.logits(lab.load(packed.source)))
    assert loss > 0.05  # 3 bits show in the logits, so a model that kept its float weights would not pass above
    for name in packed.config.modules:
        stored = lab.read(packed.folder)
        nibbles = stored[f"{name}.codes"].view(torch.uint8)
        assert {int(code) for code in (nibbles & 7).unique()} == set(range(8))
        assert stored[f"{name}.qmap"].unique().numel() == 8
        assert stored[f"{name}.scales"].unique().numel() > 32


def test_base_model_class_loads_the_same_checkpoint(lab: Any) -> None:
    packed = lab.packed("llama")
    base = transformers.AutoModel.from_pretrained(packed.folder, dtype=torch.bfloat16).eval()
    whole = lab.load(packed.folder, dtype=torch.bfloat16)
    with torch.no_grad():
        assert lab.same(base(lab.tokens()).last_hidden_state, whole.model(lab.tokens()).last_hidden_state)
    assert base.embed_tokens.weight.dtype == torch.bfloat16


def assert_dtypes(model: torch.nn.Module, dtype: torch.dtype) -> None:
    for name, parameter in model.named_parameters():
        part = name.rpartition(".")[2]
        if part == "codes":
            assert parameter.dtype == torch.int32, name
        elif part == "scales":
            assert parameter.dtype == torch.float16, name
        elif part == "qmap":
            assert parameter.dtype in (torch.int8, torch.float16), name
        else:
            assert parameter.dtype == dtype, name


@pytest.mark.parametrize("asked", [torch.float32, torch.bfloat16, torch.float16, "auto", None], ids=str)
@pytest.mark.parametrize("family", ["qwen2", "mixtral"])
@pytest.mark.parametrize("stored", DTYPES, ids=str)
def test_dtype_argument_is_honoured(
    lab: Any, family: str, stored: torch.dtype, asked: torch.dtype | str | None
) -> None:
    packed = lab.packed(family, dtype=stored)
    model = lab.load(packed.folder, **({} if asked is None else {"dtype": asked}))
    expected = asked if isinstance(asked, torch.dtype) else stored
    assert_dtypes(model, expected)
    assert lab.logits(model).dtype == expected
    if family == "qwen2":  # its float biases belong to packed modules
        assert model.model.layers[0].self_attn.q_proj.bias.dtype == expected


def test_moving_a_loaded_model_to_another_dtype_keeps_the_packed_tensors(lab: Any) -> None:
    packed = lab.packed("qwen2", layout="nibble")
    model = lab.load(packed.folder, dtype=torch.float32)
    lab.logits(model)  # something may be kept from this call
    assert_dtypes(model.to(torch.bfloat16), torch.bfloat16)
    stock = lab.stock(packed, dtype=torch.float32).to(torch.bfloat16)
    assert lab.distance(lab.logits(model), lab.logits(stock)) < 1e-3


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}], ids=str)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_device_map(lab: Any, family: str, device_map: Any) -> None:
    packed = lab.packed(family)
    mapped = lab.load(packed.folder, device_map=device_map)
    assert not any(parameter.is_meta for parameter in mapped.parameters())
    tokens = lab.tokens().to(mapped.device)
    with torch.no_grad():
        logits = mapped(tokens).logits.cpu()
    assert lab.distance(logits, lab.logits(lab.load(packed.folder))) < 1e-5


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "phi3", "qwen3_moe", "mixtral"])
def test_no_key_is_missing_unexpected_or_mismatched(lab: Any, warned: list[str], family: str) -> None:
    packed = lab.packed(family)
    _, info = transformers.AutoModelForCausalLM.from_pretrained(packed.folder, output_loading_info=True)
    assert set(info) >= {"missing_keys", "unexpected_keys", "mismatched_keys"}
    assert {key: list(found) for key, found in info.items() if found} == {}
    assert warned == []


def test_sharded_checkpoint(lab: Any, warned: list[str]) -> None:
    packed = lab.packed("qwen2", max_shard_bytes=200_000)
    assert len(list(packed.folder.glob("*.safetensors"))) > 3
    assert lab.same(lab.logits(lab.load(packed.folder)), lab.logits(lab.load(lab.packed("qwen2").folder)))
    assert warned == []


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "qwen3_moe", "mixtral"])
def test_initialisation_leaves_packed_parameters_alone(lab: Any, family: str) -> None:
    packed = lab.packed(family)
    stored = lab.read(packed.folder)
    model = lab.load(packed.folder)
    for again in (False, True):
        if again:  # as transformers does for a module with a missing key
            model.apply(model._init_weights)
        paths = {path for path, module in model.named_modules() if isinstance(module, W3Linear)}
        assert len(paths) == len(packed.config.modules)
        for name in packed.config.modules:
            module = model.get_submodule(name.replace(".block_sparse_moe.", ".mlp."))
            for part in ("codes", "scales", "qmap", "bias"):
                if f"{name}.{part}" in stored:
                    assert lab.same(getattr(module, part), stored[f"{name}.{part}"]), f"{name}.{part}"


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_compiles_without_a_graph_break(lab: Any, family: str) -> None:
    model = lab.load(lab.packed(family).folder)
    expected = lab.logits(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert lab.distance(lab.logits(compiled), expected) < 1e-5
    torch._dynamo.reset()


def test_tied_embedding_stays_tied(lab: Any) -> None:
    packed = lab.packed("gemma3_text")
    assert not [name for name in lab.read(packed.folder) if name.startswith("lm_head")]
    model = lab.load(packed.folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_loaded_model_takes_other_weights(lab: Any) -> None:
    first, second = (lab.packed("qwen2", qmap_dtype="float16", qmap=qmap) for qmap in (None, "nf3"))
    model, other = lab.load(first.folder), lab.load(second.folder)
    assert lab.distance(lab.logits(model), lab.logits(other)) > 1e-3
    model.load_state_dict(other.state_dict())  # after a forward: nothing of the old weights may survive
    assert lab.same(lab.logits(model), lab.logits(other))


def test_a_loaded_model_refuses_a_map_of_another_dtype(lab: Any) -> None:
    model, other = lab.load(lab.packed("qwen2").folder), lab.load(lab.packed("qwen2", qmap_dtype="float16").folder)
    with pytest.raises(RuntimeError, match=r"q_proj\.qmap to be torch\.int8, got torch\.float16"):
        model.load_state_dict(other.state_dict())
