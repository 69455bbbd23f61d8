"""GGUF tensor names -> Hugging Face checkpoint names, and what the conversion to GGUF did that must be undone.

llama.cpp renames tensors and, per architecture, changes values: llama's query and key rows are interleaved for its
rotary embedding, Gemma's norm weights have one added, experts are stacked into one 3-D tensor. Tables here, no tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from w3pack.errors import CheckpointError, UnsupportedError


class Undo(Enum):
    """What stands between a tensor in the GGUF file and the one in a Hugging Face checkpoint."""

    NOTHING = "nothing"
    UNPERMUTE_QUERY = "rows interleaved per attention head"
    UNPERMUTE_KEY = "rows interleaved per key/value head"
    SUBTRACT_ONE = "one added"
    SPLIT_EXPERTS = "experts stacked along the first axis; the name has {expert} in it"
    ADD_FIRST_AXIS = "[1, columns] stored as [columns]"
    IN_CONFIG = "not a weight: rotary factors that belong into config.json"


@dataclass(frozen=True)
class Target:
    """Where a GGUF tensor goes."""

    name: str
    undo: Undo = Undo.NOTHING


@dataclass(frozen=True)
class Architecture:
    """One row of the table of supported architectures.

    `blocks` maps the stem of `blk.N.<stem>.weight` to the stem below `model.layers.N.`; `undo` says what to undo
    for some of those stems; `biases` lists the stems that may carry a bias.
    """

    model_type: str
    causal_lm: str
    blocks: Mapping[str, str]
    biases: frozenset[str] = frozenset()
    undo: Mapping[str, Undo] = field(default_factory=dict)
    norms_plus_one: bool = False
    #: Activations of these models leave float16's range, so 16 bit means bfloat16.
    needs_bfloat16: bool = False


_QKV = frozenset({"attn_q", "attn_k", "attn_v"})
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_TWO_NORMS = {"ffn_norm": "post_attention_layernorm"}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_DENSE = _ATTENTION | _TWO_NORMS | _MLP
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}
#: Mixtral checkpoints keep the paper's names: w1 is gate, w3 is up, w2 is down.
_MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_STACKED = dict.fromkeys(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), Undo.SPLIT_EXPERTS)
_INTERLEAVED = {"attn_q": Undo.UNPERMUTE_QUERY, "attn_k": Undo.UNPERMUTE_KEY}

MIXTRAL = Architecture(
    "mixtral",
    "MixtralForCausalLM",
    _ATTENTION | _TWO_NORMS | _MIXTRAL_EXPERTS,
    undo=_INTERLEAVED | _STACKED,
)
#: By `general.architecture`. Mistral models are "llama" in GGUF and, without a sliding window, the same computation.
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        "llama", "LlamaForCausalLM", _DENSE, _QKV | {"attn_output", "ffn_gate", "ffn_up", "ffn_down"}, _INTERLEAVED
    ),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _DENSE, _QKV),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _DENSE | _HEAD_NORMS),
    "gemma": Architecture("gemma", "GemmaForCausalLM", _DENSE, norms_plus_one=True, needs_bfloat16=True),
    "gemma2": Architecture(
        "gemma2", "Gemma2ForCausalLM", _ATTENTION | _FOUR_NORMS | _MLP, norms_plus_one=True, needs_bfloat16=True
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _ATTENTION | _HEAD_NORMS | _FOUR_NORMS | _MLP,
        norms_plus_one=True,
        needs_bfloat16=True,
    ),
    "phi3": Architecture(
        "phi3",
        "Phi3ForCausalLM",
        {
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
    ),
    "qwen2moe": Architecture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        _ATTENTION | _TWO_NORMS | _EXPERTS | _SHARED_EXPERT,
        _QKV,
        _STACKED | {"ffn_gate_inp_shexp": Undo.ADD_FIRST_AXIS},
    ),
    "qwen3moe": Architecture(
        "qwen3_moe", "Qwen3MoeForCausalLM", _ATTENTION | _HEAD_NORMS | _TWO_NORMS | _EXPERTS, undo=_STACKED
    ),
}

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
GGUF_EMBEDDING = "token_embd.weight"
GGUF_HEAD = "output.weight"
GGUF_FINAL_NORM = "output_norm.weight"
_TOP = {GGUF_EMBEDDING: EMBEDDING, GGUF_HEAD: HEAD, GGUF_FINAL_NORM: "model.norm.weight"}
#: Factors for the rotary frequencies: llama 3.1 and later; Phi-3's long contexts.
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,5})\.([a-z0-9_]+)\.(weight|bias)")


def architecture(name: str, *, experts: int = 0) -> Architecture:
    """The row for `general.architecture`; a llama with experts is a Mixtral.

    Raises:
        UnsupportedError: the architecture is not in the table.
    """
    if name not in ARCHITECTURES:
        raise UnsupportedError(
            f"expected a GGUF file of architecture {', '.join(ARCHITECTURES)}, got {name[:60]!r}; use the model's"
            " safetensors checkpoint instead"
        )
    return MIXTRAL if name == "llama" and experts > 0 else ARCHITECTURES[name]


def translate(name: str, row: Architecture, *, blocks: int) -> Target:
    """Where the GGUF tensor `name` goes in a checkpoint of `row` with `blocks` layers.

    Raises:
        UnsupportedError: the architecture has no such tensor; nothing is dropped silently.
        CheckpointError: a block number that the metadata does not count.
    """
    if name in _TOP:
        minus_one = row.norms_plus_one and name == GGUF_FINAL_NORM
        return Target(_TOP[name], Undo.SUBTRACT_ONE if minus_one else Undo.NOTHING)
    if name in ROPE_FACTORS:
        return Target(name, Undo.IN_CONFIG)
    match = _BLOCK.fullmatch(name)
    stem = row.blocks.get(match[2]) if match else None
    if match is None or stem is None or (match[3] == "bias" and match[2] not in row.biases):
        raise UnsupportedError(
            f"expected only tensors that w3pack knows in a {row.model_type} model, got {name[:80]!r}; use the model's"
            " safetensors checkpoint instead"
        )
    if int(match[1]) >= blocks:
        raise CheckpointError(f"expected tensors of {blocks} blocks, got {name}; download or convert the file again")
    undo = row.undo.get(match[2], Undo.NOTHING)
    if row.norms_plus_one and match[2].endswith("_norm"):
        undo = Undo.SUBTRACT_ONE
    return Target(f"model.layers.{match[1]}.{stem}.{match[3]}", undo)


def check_complete(names: frozenset[str], *, blocks: int) -> None:
    """Embedding and final norm are there, and every block has the tensors that block 0 has.

    Raises:
        CheckpointError: a tensor is missing.
    """
    per_block: dict[int, set[str]] = {block: set() for block in range(blocks)}
    for name in names:
        if match := _BLOCK.fullmatch(name):
            per_block.setdefault(int(match[1]), set()).add(f"{match[2]}.{match[3]}")
    expected = set.union(*per_block.values()) if per_block else set()
    missing = [name for name in (GGUF_EMBEDDING, GGUF_FINAL_NORM) if name not in names]
    missing += [f"blk.{block}.{stem}" for block, have in per_block.items() for stem in sorted(expected - have)]
    if missing or not expected:
        raise CheckpointError(
            f"expected every block to have the same tensors, {', '.join(missing[:3]) or 'all blocks'} and"
            f" {max(len(missing) - 3, 0)} more are missing; download or convert the file again"
        )
