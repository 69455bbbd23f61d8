"""Companion files of a GGUF model: config.json, generation_config.json, tokenizer and chat template.

The GGUF metadata is translated here into the fields of transformers' config classes, whose defaults fill the rest.
`AutoConfig.from_pretrained(gguf_file=...)` would be shorter, but up to 5.24 it knows no first Gemma, drops llama 3's
rotary factors, the width of experts and Gemma 2's soft caps, and takes up to 20 s for a large vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from w3pack.checkpoint import gguf_names
from w3pack.checkpoint.gguf_header import GgufHeader, read_header
from w3pack.checkpoint.gguf_source import GgufSource, is_same_matrix, model_dtype, read_vector, row_of
from w3pack.errors import CheckpointError, ResourceError, UnsupportedError
from w3pack.format import names
from w3pack.integrations.gguf_tokenizer import build_tokenizer, special_ids

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_REDO = "download or convert the file again"
_INSTEAD = "use the model's safetensors checkpoint instead"


def open_gguf(path: Path, scratch: Path) -> GgufSource:
    """Write the companion files of `path` into the folder `scratch` and open the file as a source.

    Raises:
        CheckpointError, UnsupportedError: as `write_assets` and `GgufSource`.
        ResourceError: `scratch` cannot be written.
    """
    write_assets(path, scratch)
    return GgufSource(path, companion_dir=scratch)


def write_assets(path: Path, folder: Path) -> None:
    """Write config.json, generation_config.json, tokenizer.json, tokenizer_config.json and chat_template.jinja.

    A file without a vocabulary gets no tokenizer; one without a template, no template.

    Raises:
        CheckpointError: the header is damaged or contradicts itself.
        UnsupportedError: an architecture, rotary scaling or tokenizer that w3pack does not know.
        ResourceError: the folder cannot be written.
    """
    header = read_header(path)
    config = build_config(header)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_json(folder / names.CONFIG, config)
        _write_json(folder / "generation_config.json", _generation_config(header))
        if "tokenizer.ggml.tokens" in header.metadata:
            _write_tokenizer(header, folder, longest=config.get("max_position_embeddings"))
        if "tokenizer.chat_template" in header.metadata:
            # Bytes, not text: line ends inside a template are part of the prompt.
            (folder / "chat_template.jinja").write_bytes(header.text("tokenizer.chat_template").encode("utf-8"))
    except OSError as error:
        raise ResourceError(
            f"expected to write into {folder}, got {error.strerror}; check space and permissions"
        ) from error


def build_config(header: GgufHeader) -> dict[str, Any]:
    """config.json of the model: complete for its class, with `architectures`, `dtype` and `tie_word_embeddings`."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    row = row_of(header)
    fields = _common(header) | _EXTRA.get(row.model_type, _nothing)(header)
    try:
        config: dict[str, Any] = AutoConfig.for_model(row.model_type, **fields).to_dict()
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split())[:120]
        raise CheckpointError(
            f"expected metadata of a {row.model_type} model in {header.path.name}, got: {reason}; {_REDO}"
        ) from error
    config |= {"architectures": [row.causal_lm], "dtype": _DTYPES[model_dtype(header)]}
    config.pop("quantization_config", None)
    config.pop("_name_or_path", None)
    return config


def _common(header: GgufHeader) -> dict[str, Any]:
    name, tensors = header.architecture, header.tensors
    heads = header.integer(f"{name}.attention.head_count")
    hidden = header.integer(f"{name}.embedding_length")
    embedding = tensors.get(gguf_names.GGUF_EMBEDDING)
    if not heads or not hidden or embedding is None or len(embedding.shape) != 2 or embedding.shape[1] != hidden:
        raise CheckpointError(
            f"expected an embedding of {hidden} columns and attention heads in {header.path.name}, got"
            f" {embedding.shape if embedding else 'none'} and {heads} heads; {_REDO}"
        )
    ids = special_ids(header)
    fields: dict[str, Any] = {
        "vocab_size": embedding.shape[0],  # not the number of tokens: the matrix may be padded
        "hidden_size": hidden,
        "num_hidden_layers": header.integer(f"{name}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": header.integer(f"{name}.attention.head_count_kv", heads),
        "max_position_embeddings": header.integer(f"{name}.context_length"),
        "rms_norm_eps": header.number(f"{name}.attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(header),
        "tie_word_embeddings": is_same_matrix(header),
        "bos_token_id": ids.get("bos"),
        "eos_token_id": ids.get("eos"),
        "pad_token_id": ids.get("pad"),
    }
    if f"{name}.feed_forward_length" in header.metadata:
        fields["intermediate_size"] = header.integer(f"{name}.feed_forward_length")
    return fields


def _head_dim(header: GgufHeader) -> int:
    name = header.architecture
    heads = header.integer(f"{name}.attention.head_count")
    whole = header.integer(f"{name}.embedding_length") // heads
    return header.integer(f"{name}.attention.key_length", whole)


def _rope(header: GgufHeader) -> dict[str, Any]:
    """`rope_parameters`, from the metadata or, for llama 3.1 and later, from the tensor of factors."""
    name = header.architecture
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": header.number(f"{name}.rope.freq_base", 10000.0)}
    kind = header.metadata.get(f"{name}.rope.scaling.type", "none")
    if "rope_freqs.weight" in header.tensors:
        return rope | _llama3_rope(header, theta=rope["rope_theta"])
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": header.number(f"{name}.rope.scaling.factor")}
    if kind == "yarn":
        return rope | {
            "rope_type": "yarn",
            "factor": header.number(f"{name}.rope.scaling.factor"),
            "original_max_position_embeddings": header.integer(f"{name}.rope.scaling.original_context_length"),
        }
    if kind not in ("none", "longrope"):
        raise UnsupportedError(
            f"expected rotary scaling none, linear or yarn in {header.path.name}, got {str(kind)[:40]!r}; {_INSTEAD}"
        )
    return rope


def _llama3_rope(header: GgufHeader, *, theta: float) -> dict[str, Any]:
    """The llama 3 scaling that yields the stored factors, found by trying those that were published."""
    stored = read_vector(header, "rope_freqs.weight")
    if np.all(stored == 1.0):
        return {}
    for original in (8192, 4096, 16384, 32768):
        tried = {
            "factor": float(stored.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": original,
        }
        expected = _llama3_factors(len(stored), theta=theta, factor=tried["factor"], original=original)
        if np.allclose(stored, expected, rtol=1e-3):
            return {"rope_type": "llama3"} | tried
    raise UnsupportedError(f"expected llama 3's rotary factors in rope_freqs.weight of {header.path.name}; {_INSTEAD}")


def _llama3_factors(count: int, *, theta: float, factor: float, original: int) -> npt.NDArray[np.float64]:
    """What each of `count` frequencies is divided by: nothing for short waves, `factor` for long ones."""
    waves = 2 * np.pi * theta ** (np.arange(count) / count)
    blend = np.clip((original / waves - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    factors: npt.NDArray[np.float64] = 1.0 / (blend + (1.0 - blend) / factor)
    return factors


def _nothing(header: GgufHeader) -> dict[str, Any]:
    return {}


def _llama(header: GgufHeader) -> dict[str, Any]:
    biased = {stem for stem in ("attn_q", "attn_k", "attn_v", "attn_output") if f"blk.0.{stem}.bias" in header.tensors}
    mlp = {stem for stem in ("ffn_gate", "ffn_up", "ffn_down") if f"blk.0.{stem}.bias" in header.tensors}
    if len(biased) not in (0, 4) or len(mlp) not in (0, 3):
        raise UnsupportedError(
            f"expected biases on all attention or MLP projections or on none in {header.path.name}, got"
            f" {', '.join(sorted(biased | mlp))}; {_INSTEAD}"
        )
    head_dim = _head_dim(header) if "llama.attention.key_length" in header.metadata else 0
    rotary = header.integer("llama.rope.dimension_count", head_dim or _head_dim(header))
    if head_dim not in (0, rotary):
        raise UnsupportedError(f"expected whole heads to rotate in {header.path.name}, got {rotary}; {_INSTEAD}")
    return {"head_dim": rotary, "attention_bias": bool(biased), "mlp_bias": bool(mlp)}


def _mixtral(header: GgufHeader) -> dict[str, Any]:
    return {
        "head_dim": _llama(header)["head_dim"],
        "num_local_experts": header.integer("llama.expert_count"),
        "num_experts_per_tok": header.integer("llama.expert_used_count"),
        "intermediate_size": _rows(header, "blk.0.ffn_gate_exps.weight"),
    }


def _qwen3(header: GgufHeader) -> dict[str, Any]:
    return {"head_dim": _head_dim(header)}


def _qwen_moe(header: GgufHeader) -> dict[str, Any]:
    name = header.architecture
    fields: dict[str, Any] = {
        "num_experts": header.integer(f"{name}.expert_count"),
        "num_experts_per_tok": header.integer(f"{name}.expert_used_count"),
        "moe_intermediate_size": _rows(header, "blk.0.ffn_gate_exps.weight"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        # Not in the metadata: llama.cpp renormalises the chosen experts' weights for qwen3moe, not for qwen2moe.
        "norm_topk_prob": name == "qwen3moe",
    }
    if name == "qwen2moe":
        return fields | {"shared_expert_intermediate_size": _rows(header, "blk.0.ffn_gate_shexp.weight")}
    return fields | {"head_dim": _head_dim(header)}


def _rows(header: GgufHeader, tensor: str) -> int:
    if tensor not in header.tensors or len(header.tensors[tensor].shape) < 2:
        raise CheckpointError(f"expected the tensor {tensor} in {header.path.name}; {_REDO}")
    return header.tensors[tensor].shape[-2]


def _gemma(header: GgufHeader) -> dict[str, Any]:
    return {"head_dim": _head_dim(header)}


def _gemma2(header: GgufHeader) -> dict[str, Any]:
    """Soft caps, sliding window and the scale of queries, which is a head's size but for the 27B models."""
    name = header.architecture
    head_dim = _head_dim(header)
    largest = {"gemma2": 46, "gemma3": 62}[name] == header.integer(f"{name}.block_count")
    shared = header.integer(f"{name}.embedding_length") // header.integer(f"{name}.attention.head_count")
    fields: dict[str, Any] = {"head_dim": head_dim, "query_pre_attn_scalar": shared if largest else head_dim}
    if f"{name}.attention.sliding_window" in header.metadata:
        fields["sliding_window"] = header.integer(f"{name}.attention.sliding_window")
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if f"{name}.{cap}" in header.metadata:
            fields[cap] = header.number(f"{name}.{cap}")
    return fields


def _gemma3(header: GgufHeader) -> dict[str, Any]:
    """As Gemma 2, with its own rotary base for the sliding layers; scaling concerns the full ones."""
    sliding = header.number("gemma3.rope.freq_base_swa", 10000.0)
    local = {"rope_type": "default", "rope_theta": sliding}
    full = _rope(header) | {"rope_theta": header.number("gemma3.rope.freq_base", 1000000.0)}
    return _gemma2(header) | {"rope_parameters": {"full_attention": full, "sliding_attention": local}}


def _phi3(header: GgufHeader) -> dict[str, Any]:
    head_dim = _head_dim(header)
    partial = header.integer("phi3.rope.dimension_count", head_dim) / head_dim
    rope = _rope(header) | {"partial_rotary_factor": partial}
    longest = header.integer("phi3.context_length")
    original = header.integer("phi3.rope.scaling.original_context_length", longest)
    factors = [f"rope_factors_{kind}.weight" for kind in ("short", "long")]
    if all(name in header.tensors for name in factors):
        short, long = (read_vector(header, name).tolist() for name in factors)
        rope |= {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": original,
        }
    fields: dict[str, Any] = {"rope_parameters": rope, "original_max_position_embeddings": original}
    if window := header.integer("phi3.attention.sliding_window", 0):
        fields["sliding_window"] = window
    return fields


_EXTRA: Mapping[str, Any] = {
    "llama": _llama,
    "mixtral": _mixtral,
    "qwen3": _qwen3,
    "qwen2_moe": _qwen_moe,
    "qwen3_moe": _qwen_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
}


def _generation_config(header: GgufHeader) -> dict[str, Any]:
    ids = special_ids(header)
    ends = sorted({ids[name] for name in ("eos", "eot") if name in ids})
    config: dict[str, Any] = {"bos_token_id": ids.get("bos"), "pad_token_id": ids.get("pad")}
    config["eos_token_id"] = ends if len(ends) > 1 else ids.get("eos")
    return {key: value for key, value in config.items() if value is not None}


def _write_tokenizer(header: GgufHeader, folder: Path, *, longest: int | None) -> None:
    tokenizer = build_tokenizer(header)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    tokens, ids = header.strings("tokenizer.ggml.tokens"), special_ids(header)
    config: dict[str, Any] = {
        # The class that takes tokenizer.json as it is; model classes would rebuild it from the vocabulary.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": longest,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    config |= {f"{name}_token": tokens[ids[name]] for name in ("bos", "eos", "unk", "pad") if name in ids}
    _write_json(folder / "tokenizer_config.json", config)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
