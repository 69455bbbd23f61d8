"""Companion files of tiny GGUF files, judged by stock transformers, which must load model and tokenizer unaided."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from w3pack.errors import CheckpointError, UnsupportedError, W3PackError
from w3pack.integrations.gguf_assets import open_gguf

HIDDEN, HEADS, KV_HEADS, INTER, BLOCKS, EXPERTS = 64, 2, 1, 96, 2, 4
BYTES = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
CHAT = "{% for m in messages %}{{ m['content'] }}\r\n{% endfor %}\n\n"


def stems(architecture: str, *, experts: bool, head_dim: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of one block."""
    found: dict[str, tuple[int, ...]] = {"attn_norm.weight": (HIDDEN,), "ffn_norm.weight": (HIDDEN,)}
    query, keys = HEADS * head_dim, KV_HEADS * head_dim
    found["attn_output.weight"] = (HIDDEN, query)
    if architecture == "phi3":
        found |= {"attn_qkv.weight": (query + 2 * keys, HIDDEN), "ffn_up.weight": (2 * INTER, HIDDEN)}
        return found | {"ffn_down.weight": (HIDDEN, INTER)}
    found |= {"attn_q.weight": (query, HIDDEN), "attn_k.weight": (keys, HIDDEN), "attn_v.weight": (keys, HIDDEN)}
    if architecture.startswith("qwen2"):
        found |= {"attn_q.bias": (query,), "attn_k.bias": (keys,), "attn_v.bias": (keys,)}
    if architecture.startswith("qwen3") or architecture == "gemma3":
        found |= {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}
    if architecture in ("gemma2", "gemma3"):
        found |= {"post_attention_norm.weight": (HIDDEN,), "post_ffw_norm.weight": (HIDDEN,)}
    if experts:
        found |= {f"ffn_{part}_exps.weight": (EXPERTS, 48, HIDDEN) for part in ("gate", "up")}
        found |= {"ffn_down_exps.weight": (EXPERTS, HIDDEN, 48), "ffn_gate_inp.weight": (EXPERTS, HIDDEN)}
        if architecture == "qwen2moe":
            found |= {f"ffn_{part}_shexp.weight": (80, HIDDEN) for part in ("gate", "up")}
            found |= {"ffn_down_shexp.weight": (HIDDEN, 80), "ffn_gate_inp_shexp.weight": (HIDDEN,)}
        return found
    return (
        found
        | {f"ffn_{part}.weight": (INTER, HIDDEN) for part in ("gate", "up")}
        | {"ffn_down.weight": (HIDDEN, INTER)}
    )


def write(path: Path, architecture: str, *, experts: bool = False, head_dim: int = 32, **metadata: Any) -> Path:
    """A tiny model of random weights; `metadata` is written under its keys as they are, "__" standing for a dot."""
    keys = {key.replace("__", "."): value for key, value in metadata.items()}
    tensors = keys.pop("tensors", {})
    vocabulary = len(keys.get("tokenizer.ggml.tokens", range(320)))
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    numbers = {"block_count": BLOCKS, "embedding_length": HIDDEN, "attention.head_count": HEADS, "context_length": 128}
    numbers |= {"attention.head_count_kv": KV_HEADS, "feed_forward_length": INTER, "attention.key_length": head_dim}
    if architecture == "llama":
        numbers["rope.dimension_count"] = head_dim
    if experts:
        numbers |= {"expert_count": EXPERTS, "expert_used_count": 2}
    for key, value in numbers.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32(f"{architecture}.rope.freq_base", 500000.0)
    for key, value in keys.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)
    shapes = {"token_embd.weight": (vocabulary, HIDDEN), "output_norm.weight": (HIDDEN,)}
    shapes |= {
        f"blk.{n}.{k}": v
        for n in range(BLOCKS)
        for k, v in stems(architecture, experts=experts, head_dim=head_dim).items()
    }
    for name, shape in shapes.items():
        writer.add_tensor(name, (rng.standard_normal(shape) * 0.05).astype(np.float32))
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("architecture", "experts", "head_dim", "causal_lm"),
    [
        ("llama", False, 32, "LlamaForCausalLM"),
        ("llama", False, 48, "LlamaForCausalLM"),
        ("llama", True, 32, "MixtralForCausalLM"),
        ("qwen2", False, 32, "Qwen2ForCausalLM"),
        ("qwen3", False, 48, "Qwen3ForCausalLM"),
        ("qwen2moe", True, 32, "Qwen2MoeForCausalLM"),
        ("qwen3moe", True, 48, "Qwen3MoeForCausalLM"),
        ("gemma", False, 48, "GemmaForCausalLM"),
        ("gemma2", False, 48, "Gemma2ForCausalLM"),
        ("gemma3", False, 48, "Gemma3ForCausalLM"),
        ("phi3", False, 32, "Phi3ForCausalLM"),
    ],
)
def test_stock_transformers_loads_every_architecture(
    tmp_path: Path, architecture: str, experts: bool, head_dim: int, causal_lm: str
) -> None:
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "model"
    source = open_gguf(write(tmp_path / "m.gguf", architecture, experts=experts, head_dim=head_dim), folder)
    assert source.config["architectures"] == [causal_lm]
    assert source.config["dtype"] == "float32"
    assert source.config["tie_word_embeddings"] is True
    assert source.config["rms_norm_eps"] == 1e-6
    assert "quantization_config" not in source.config
    save_file({name: source.read(name) for name in source.tensors}, folder / "model.safetensors", {"format": "pt"})
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(model).__name__ == causal_lm
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()


def byte_level(pre: str, **more: Any) -> dict[str, Any]:
    """Metadata of a byte-level tokenizer: all bytes, digits that merge, two control tokens."""
    tokens = [*BYTES, "12", "34", "ab", "<|im_end|>", "<think>"]
    return {
        "tokenizer__ggml__model": "gpt2",
        "tokenizer__ggml__pre": pre,
        "tokenizer__ggml__tokens": tokens,
        "tokenizer__ggml__token_type": [1] * (len(tokens) - 2) + [3, 4],
        "tokenizer__ggml__merges": ["1 2", "3 4", "a b"],
        "tokenizer__ggml__eos_token_id": len(tokens) - 2,
    } | more


def sentencepiece(**more: Any) -> dict[str, Any]:
    """Metadata of a sentencepiece tokenizer in which "ab" is preferred to "bc" by score, not by position."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "b", "c", "\u2581", "bc", "ab"]
    return {
        "tokenizer__ggml__model": "llama",
        "tokenizer__ggml__pre": "default",
        "tokenizer__ggml__tokens": tokens,
        "tokenizer__ggml__scores": [0.0] * 259 + [-5.0, -6.0, -7.0, -8.0, -2.0, -1.0],
        "tokenizer__ggml__token_type": [2, 3, 3] + [6] * 256 + [1] * 6,
        "tokenizer__ggml__bos_token_id": 1,
        "tokenizer__ggml__eos_token_id": 2,
        "tokenizer__ggml__unknown_token_id": 0,
    } | more


def load(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    ("architecture", "pre", "expected"),
    [
        ("llama", "smollm", ["ab", "1", "2", "3", "4"]),
        ("qwen2", "qwen2", ["ab", "1", "2", "3", "4"]),
        ("llama", "llama-bpe", ["ab", "12", "3", "4"]),
        ("llama", "gpt-2", ["ab", "12", "34"]),
    ],
)
def test_each_pre_tokenizer_splits_digits_its_own_way(
    tmp_path: Path, architecture: str, pre: str, expected: list[str]
) -> None:
    open_gguf(write(tmp_path / "m.gguf", architecture, **byte_level(pre)), tmp_path / "model")
    tokenizer = load(tmp_path / "model")
    assert tokenizer.tokenize("ab1234") == expected
    assert tokenizer.tokenize("a<|im_end|><think>b") == ["a", "<|im_end|>", "<think>", "b"]
    assert tokenizer.decode(tokenizer("é <think><|im_end|>").input_ids, skip_special_tokens=True) == "é <think>"
    assert tokenizer.eos_token == "<|im_end|>"


def test_qwen2_composes_accents_first(tmp_path: Path) -> None:
    open_gguf(write(tmp_path / "m.gguf", "qwen2", **byte_level("qwen2")), tmp_path / "model")
    tokenizer = load(tmp_path / "model")
    assert tokenizer("e\u0301").input_ids == tokenizer("\u00e9").input_ids


def test_sentencepiece_follows_the_scores_and_adds_bos(tmp_path: Path) -> None:
    open_gguf(write(tmp_path / "m.gguf", "llama", **sentencepiece()), tmp_path / "model")
    tokenizer = load(tmp_path / "model")
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("abc é").input_ids)
    assert tokens == ["<s>", "\u2581", "ab", "c", "\u2581", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer("abc é").input_ids, skip_special_tokens=True) == "abc é"


def test_gemma_follows_positions_and_prefixes_no_space(tmp_path: Path) -> None:
    open_gguf(write(tmp_path / "m.gguf", "gemma3", **sentencepiece()), tmp_path / "model")
    tokenizer = load(tmp_path / "model")
    assert tokenizer.convert_ids_to_tokens(tokenizer("abc").input_ids) == ["<s>", "a", "bc"]


def test_the_chat_template_is_kept_byte_for_byte(tmp_path: Path) -> None:
    more = {"tokenizer__chat_template": CHAT, "tokenizer__ggml__eot_token_id": 3}
    source = open_gguf(write(tmp_path / "m.gguf", "llama", **byte_level("smollm", **more)), tmp_path / "model")
    assert (tmp_path / "model" / "chat_template.jinja").read_bytes() == CHAT.encode()
    assert set(source.companion_files()) == {
        "chat_template.jinja",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    generation = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [3, source.config["eos_token_id"]]


def test_tokenizers_that_were_not_compared_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"smollm.*'mystery'"):
        open_gguf(write(tmp_path / "a.gguf", "llama", **byte_level("mystery")), tmp_path / "model")
    with pytest.raises(UnsupportedError, match="'bert'"):
        open_gguf(
            write(tmp_path / "b.gguf", "llama", **byte_level("x", tokenizer__ggml__model="bert")), tmp_path / "model"
        )
    outside = byte_level("smollm", tokenizer__ggml__bos_token_id=10**6)
    with pytest.raises(CheckpointError, match="inside the vocabulary"):
        open_gguf(write(tmp_path / "c.gguf", "llama", **outside), tmp_path / "model")
    unspellable = byte_level("smollm", tokenizer__ggml__merges=["nowhere a"])
    with pytest.raises(CheckpointError, match="merges"):
        open_gguf(write(tmp_path / "d.gguf", "llama", **unspellable), tmp_path / "model")


def test_any_changed_byte_of_the_metadata_is_a_w3pack_error_or_harmless(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "llama", **sentencepiece())
    data, rng = path.read_bytes(), np.random.default_rng(0)
    # The vocabulary takes most of the header; half of the changes go to the model's numbers before it.
    ends = data.index(b"tokenizer.ggml.tokens"), data.index(b"token_embd.weight")
    for number in range(120):
        changed = bytearray(data)
        changed[rng.integers(24, ends[number % 2])] = rng.integers(256)
        path.write_bytes(changed)
        with contextlib.suppress(W3PackError):  # anything else fails the test
            open_gguf(path, tmp_path / "model")


def test_llama3_rotary_factors_become_the_scaling_they_came_from(tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    rope = {"rope_type": "llama3", "rope_theta": 500000.0} | scaling
    config = LlamaConfig(hidden_size=HIDDEN, num_attention_heads=HEADS, head_dim=32, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    factors = (500000.0 ** -(torch.arange(0, 32, 2) / 32.0) / scaled).float().numpy()
    path = write(tmp_path / "m.gguf", "llama", tensors={"rope_freqs.weight": factors})
    found = open_gguf(path, tmp_path / "model").config["rope_parameters"]
    assert (found["rope_type"], found["rope_theta"]) == ("llama3", 500000.0)
    assert {key: found[key] for key in scaling} == pytest.approx(scaling, rel=1e-5)
    factors[0] = 3.0
    with pytest.raises(UnsupportedError, match="rope_freqs"):
        open_gguf(write(tmp_path / "n.gguf", "llama", tensors={"rope_freqs.weight": factors}), tmp_path / "model")


def _smollm2() -> Path:
    """The real model, where the quickstart script puts it."""
    cache = Path(os.environ.get("W3PACK_CACHE_DIR", Path.home() / ".cache" / "w3pack"))
    return cache / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.skipif(not _smollm2().exists(), reason=f"no {_smollm2()}: run scripts/quickstart first")
def test_smollm2_predicts_english(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    source = open_gguf(_smollm2(), tmp_path / "model")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "model"), dtype=torch.float32)
    model.load_state_dict({name: source.read(name).float() for name in source.tensors}, strict=False)
    model.tie_weights()
    ids = load(tmp_path / "model")("The capital of France is", return_tensors="pt").input_ids
    following = model.eval().generate(ids, max_new_tokens=1, do_sample=False)[0, -1]
    assert load(tmp_path / "model").decode(following).strip() == "Paris"
