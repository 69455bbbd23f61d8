"""GgufSource on tiny files written here: every undo is exact, nothing is dropped, damage is named and cheap."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from w3pack.checkpoint.gguf_header import read_header
from w3pack.checkpoint.gguf_source import GgufSource, is_same_matrix
from w3pack.errors import CheckpointError, UnsupportedError

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTER, VOCAB, BLOCKS = 64, 4, 2, 16, 96, 40, 2
Tensors = dict[str, np.ndarray[Any, Any]]
TYPES = gguf.GGMLQuantizationType


def random(*shape: int, seed: int) -> np.ndarray[Any, Any]:
    """Values that float16 and bfloat16 hold exactly, so that every comparison can be exact."""
    values = np.random.default_rng(seed).integers(-127, 128, shape)
    return (values / 64.0).astype(np.float32)


def blocks(stems: dict[str, tuple[int, ...]]) -> Tensors:
    """Random `blk.N.<stem>` of the given shapes, plus embedding and final norm."""
    shapes = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    shapes |= {f"blk.{n}.{stem}": shape for n in range(BLOCKS) for stem, shape in stems.items()}
    return {name: random(*shape, seed=number) for number, (name, shape) in enumerate(shapes.items())}


ATTENTION = {
    "attn_norm.weight": (HIDDEN,),
    "attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
    "attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
    "ffn_norm.weight": (HIDDEN,),
}
MLP = {"ffn_gate.weight": (INTER, HIDDEN), "ffn_up.weight": (INTER, HIDDEN), "ffn_down.weight": (HIDDEN, INTER)}


def write(
    path: Path, architecture: str, tensors: Tensors, *, types: dict[str, TYPES] | None = None, **extra: int
) -> Path:
    """Write a GGUF file; `types` quantises some tensors, `extra` adds integers to the metadata."""
    writer = gguf.GGUFWriter(path, architecture)
    numbers = {"block_count": BLOCKS, "embedding_length": HIDDEN, "attention.head_count": HEADS}
    numbers |= {"attention.head_count_kv": KV_HEADS, "context_length": 128, "feed_forward_length": INTER}
    for key, value in (numbers | extra).items():
        writer.add_uint32(f"{architecture}.{key}" if key != "split.count" else key, value)
    for name, value in tensors.items():
        kind = (types or {}).get(name)
        if kind is None:
            writer.add_tensor(name, value)
        else:
            writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def source(path: Path, **config: Any) -> GgufSource:
    folder = path.parent / "companions"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": True} | config))
    return GgufSource(path, companion_dir=folder)


def permuted(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """What llama.cpp's converter does to query and key rows."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def check_contract(src: GgufSource) -> None:
    dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    for name, info in src.tensors.items():
        tensor = src.read(name)
        assert (tuple(tensor.shape), tensor.dtype) == (info.shape, dtypes[info.dtype])
        assert tensor.is_contiguous()


def test_llama_query_and_key_rows_and_biases_are_put_back(tmp_path: Path) -> None:
    biases = {f"attn_{part}.bias": (ATTENTION[f"attn_{part}.weight"][0],) for part in ("q", "k", "v", "output")}
    original = blocks(ATTENTION | MLP | biases)
    stored = {
        name: permuted(value, HEADS if ".attn_q." in name else KV_HEADS)
        if ".attn_q." in name or ".attn_k." in name
        else value
        for name, value in original.items()
    }
    src = source(write(tmp_path / "m.gguf", "llama", stored))
    check_contract(src)
    assert len(src.tensors) == len(original)
    assert src.notes == ()
    for theirs, ours in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("output", "o_proj")):
        for part in ("weight", "bias"):
            read = src.read(f"model.layers.1.self_attn.{ours}.{part}")
            assert torch.equal(read, torch.from_numpy(original[f"blk.1.attn_{theirs}.{part}"])), ours
    assert not np.array_equal(stored["blk.1.attn_k.weight"], original["blk.1.attn_k.weight"])


@pytest.mark.parametrize("kind", [TYPES.Q8_0, TYPES.Q4_0, TYPES.Q4_1, TYPES.Q5_0, TYPES.BF16, TYPES.F16])
def test_quantised_matrices_are_rounded_once_to_the_model_dtype(tmp_path: Path, kind: TYPES) -> None:
    original = blocks(ATTENTION | MLP | {"attn_q.bias": (HEADS * HEAD_DIM,)})
    types = {name: kind for name, value in original.items() if value.ndim == 2}
    src = source(write(tmp_path / "m.gguf", "qwen2", original, types=types))
    check_contract(src)
    expected = gguf.dequantize(gguf.quantize(original["blk.0.ffn_up.weight"], kind), kind)
    dtype = torch.bfloat16 if kind is TYPES.BF16 else torch.float16
    assert torch.equal(src.read("model.layers.0.mlp.up_proj.weight"), torch.from_numpy(expected).to(dtype))
    assert torch.equal(
        src.read("model.layers.0.self_attn.q_proj.bias"), torch.from_numpy(original["blk.0.attn_q.bias"]).to(dtype)
    )
    assert bool(src.notes) == (kind not in (TYPES.BF16, TYPES.F16))
    assert all(kind.name in note for note in src.notes)


def test_gemma3_norms_lose_the_one_that_was_added(tmp_path: Path) -> None:
    norms = {f"{name}.weight": (HIDDEN,) for name in ("post_attention_norm", "post_ffw_norm")}
    original = blocks(ATTENTION | MLP | norms | {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)})
    stored = {name: value + 1 if name.endswith("norm.weight") else value for name, value in original.items()}
    types = {name: TYPES.Q8_0 for name, value in original.items() if value.ndim == 2}
    src = source(write(tmp_path / "m.gguf", "gemma3", stored, types=types))
    check_contract(src)
    pairs = {
        "model.norm": "output_norm",
        "model.layers.1.input_layernorm": "blk.1.attn_norm",
        "model.layers.1.post_attention_layernorm": "blk.1.post_attention_norm",
        "model.layers.1.pre_feedforward_layernorm": "blk.1.ffn_norm",
        "model.layers.1.post_feedforward_layernorm": "blk.1.post_ffw_norm",
        "model.layers.1.self_attn.q_norm": "blk.1.attn_q_norm",
        "model.layers.1.self_attn.k_norm": "blk.1.attn_k_norm",
    }
    for ours, theirs in pairs.items():
        read = src.read(f"{ours}.weight")
        assert read.dtype == torch.bfloat16
        assert torch.equal(read.float(), torch.from_numpy(original[f"{theirs}.weight"])), ours


@pytest.mark.parametrize(
    ("architecture", "prefix"), [("qwen3moe", "mlp.experts"), ("llama", "block_sparse_moe.experts")]
)
def test_experts_are_read_slice_by_slice(tmp_path: Path, architecture: str, prefix: str) -> None:
    experts = 3
    stacks = {"ffn_gate_inp.weight": (experts, HIDDEN)}
    stacks |= {f"ffn_{part}_exps.weight": (experts, 32, HIDDEN) for part in ("gate", "up")}
    stacks |= {"ffn_down_exps.weight": (experts, HIDDEN, 32)}
    head_norms = (
        {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)} if architecture != "llama" else {}
    )
    original = blocks(ATTENTION | head_norms | stacks)
    types = {name: TYPES.Q4_0 for name, value in original.items() if value.ndim == 3}
    src = source(write(tmp_path / "m.gguf", architecture, original, types=types, expert_count=experts))
    check_contract(src)
    stems = ("gate_proj", "up_proj", "down_proj") if architecture != "llama" else ("w1", "w3", "w2")
    for theirs, ours in zip(("gate", "up", "down"), stems, strict=True):
        whole = gguf.dequantize(gguf.quantize(original[f"blk.1.ffn_{theirs}_exps.weight"], TYPES.Q4_0), TYPES.Q4_0)
        for expert in range(experts):
            read = src.read(f"model.layers.1.{prefix}.{expert}.{ours}.weight")
            assert torch.equal(read, torch.from_numpy(whole[expert]).half())


def test_shared_expert_gate_becomes_a_matrix_again(tmp_path: Path) -> None:
    stems = {"ffn_gate_inp.weight": (2, HIDDEN), "ffn_gate_inp_shexp.weight": (HIDDEN,)}
    stems |= {f"ffn_{part}_exps.weight": (2, 32, HIDDEN) for part in ("gate", "up")} | {
        "ffn_down_exps.weight": (2, HIDDEN, 32)
    }
    stems |= {f"ffn_{part}_shexp.weight": (32, HIDDEN) for part in ("gate", "up")} | {
        "ffn_down_shexp.weight": (HIDDEN, 32)
    }
    src = source(write(tmp_path / "m.gguf", "qwen2moe", blocks(ATTENTION | stems), expert_count=2))
    check_contract(src)
    assert src.tensors["model.layers.0.mlp.shared_expert_gate.weight"].shape == (1, HIDDEN)


def test_a_head_that_repeats_the_embedding_is_used_for_both(tmp_path: Path) -> None:
    original = blocks(ATTENTION | MLP)
    original["output.weight"] = original["token_embd.weight"]
    types = {"token_embd.weight": TYPES.Q5_0, "output.weight": TYPES.Q8_0}
    path = write(tmp_path / "m.gguf", "qwen2", original, types=types)
    assert is_same_matrix(read_header(path))
    src = source(path)
    assert "lm_head.weight" not in src.tensors
    expected = gguf.dequantize(gguf.quantize(original["output.weight"], TYPES.Q8_0), TYPES.Q8_0)
    assert torch.equal(src.read("model.embed_tokens.weight"), torch.from_numpy(expected).half())
    assert "output.weight (Q8_0)" in src.notes[0]
    assert "lm_head.weight" in source(path, tie_word_embeddings=False).tensors


def test_a_head_of_its_own_stays_and_must_not_be_tied(tmp_path: Path) -> None:
    original = blocks(ATTENTION | MLP) | {"output.weight": random(VOCAB, HIDDEN, seed=99)}
    path = write(tmp_path / "m.gguf", "qwen2", original, types={"output.weight": TYPES.Q8_0})
    assert not is_same_matrix(read_header(path))
    assert "lm_head.weight" in source(path, tie_word_embeddings=False).tensors
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        source(path)


def test_the_fingerprint_follows_the_bytes_not_the_clock(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "llama", blocks(ATTENTION | MLP))
    before = source(path).fingerprint()
    path.touch()
    assert source(path).fingerprint() == before
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert source(path).fingerprint() != before


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("blk.0.attn_sinks.weight", UnsupportedError),
        ("blk.0.attn_q.bias2", UnsupportedError),
        ("blk.7.attn_q.weight", CheckpointError),
    ],
)
def test_a_tensor_nobody_knows_is_named(tmp_path: Path, name: str, error: type[Exception]) -> None:
    path = write(tmp_path / "m.gguf", "llama", blocks(ATTENTION | MLP) | {name: random(HIDDEN, seed=1)})
    with pytest.raises(error, match=name):
        source(path)


def test_refusals_name_what_is_supported(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"llama, qwen2.*'mamba'"):
        source(write(tmp_path / "a.gguf", "mamba", blocks(ATTENTION)))
    with pytest.raises(UnsupportedError, match="llama-gguf-split --merge"):
        source(write(tmp_path / "b.gguf", "llama", blocks(ATTENTION), **{"split.count": 2}))
    incomplete = blocks(ATTENTION | MLP)
    del incomplete["blk.1.ffn_up.weight"]
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up"):
        source(write(tmp_path / "c.gguf", "llama", incomplete))


def test_rotary_factors_are_not_dropped(tmp_path: Path) -> None:
    tensors = blocks(ATTENTION | MLP) | {"rope_freqs.weight": np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)}
    path = write(tmp_path / "m.gguf", "llama", tensors)
    with pytest.raises(CheckpointError, match="rope_freqs"):
        source(path)
    src = source(path, rope_parameters={"rope_type": "llama3"})
    assert "rope_freqs.weight" not in src.tensors


def test_a_value_that_the_dtype_cannot_hold_is_an_error(tmp_path: Path) -> None:
    tensors = blocks(ATTENTION | MLP)
    tensors["blk.0.attn_norm.weight"][3] = 1e6
    src = source(write(tmp_path / "m.gguf", "llama", tensors, types={"blk.0.ffn_up.weight": TYPES.Q8_0}))
    with pytest.raises(CheckpointError, match="finite"):
        src.read("model.layers.0.input_layernorm.weight")


def _patched(data: bytes, at: int, layout: str, value: int) -> bytes:
    return data[:at] + struct.pack(layout, value) + data[at + struct.calcsize(layout) :]


def _at(data: bytes, name: str) -> int:
    """Where the dimensions of a tensor's entry begin."""
    return data.index(name.encode()) + len(name)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "magic": lambda data: b"GGML" + data[4:],
    "cut in the header": lambda data: data[:200],
    "cut in the data": lambda data: data[:-40],
    "huge tensor count": lambda data: _patched(data, 8, "<Q", 2**62),
    "huge key count": lambda data: _patched(data, 16, "<Q", 2**62),
    "huge string": lambda data: _patched(data, 24, "<Q", 2**60),
    "huge dimension": lambda data: _patched(data, _at(data, "token_embd.weight") + 4, "<Q", 2**60),
    "no dimension": lambda data: _patched(data, _at(data, "token_embd.weight"), "<I", 0),
    "zero dimension": lambda data: _patched(data, _at(data, "token_embd.weight") + 4, "<Q", 0),
    "offset outside": lambda data: _patched(data, _at(data, "token_embd.weight") + 24, "<Q", 2**40),
    "two tensors in one place": lambda data: _patched(data, _at(data, "output_norm.weight") + 16, "<Q", 0),
    "bad utf-8": lambda data: data.replace(b"general.architecture", b"general.\xffrchitecture"),
    "array of nothing": lambda data: _patched(data, data.index(b"general.architecture") + 20, "<I", 77),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_one_sentence_and_allocates_nothing(tmp_path: Path, damage: str) -> None:
    path = write(tmp_path / "m.gguf", "llama", blocks(ATTENTION | MLP))
    read_header(path)
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    tracemalloc.start()
    with pytest.raises(CheckpointError) as error:
        source(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20, "what the header claims was allocated"
    assert "\n" not in str(error.value)
    assert ";" in str(error.value), "what to do is missing"


def test_any_cut_and_any_changed_header_byte_is_a_w3pack_error_or_harmless(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "llama", blocks(ATTENTION | MLP))
    data = path.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(300):
        changed = bytearray(data)
        for at in rng.integers(0, 1800, 3):
            changed[at] = rng.integers(256)
        path.write_bytes(changed[: rng.integers(1, len(data))] if rng.random() < 0.3 else changed)
        try:
            source(path)
        except (CheckpointError, UnsupportedError):
            continue


def test_an_unknown_type_is_unsupported(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "llama", blocks(ATTENTION | MLP))
    data = path.read_bytes()
    path.write_bytes(_patched(data, _at(data, "token_embd.weight") + 20, "<I", 4000))
    with pytest.raises(UnsupportedError, match="4000"):
        source(path)


def test_a_file_that_shrinks_while_open_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "llama", blocks(ATTENTION | MLP))
    src = source(path)
    path.write_bytes(path.read_bytes()[:-64])
    last = list(src.tensors)[-1]
    with pytest.raises(CheckpointError, match="bytes of"):
        src.read(last)
