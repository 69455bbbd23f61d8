"""GGUF's own 3-bit types as sources: their blocks are dequantised and quantised anew; the package cannot write them, so the
blocks here are made of random bytes around a sane factor."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from w3pack.checkpoint.gguf_source import GgufSource
from w3pack.errors import UnsupportedError
from w3pack.pipeline.plan import QuantizeOptions
from w3pack.pipeline.quantize_model import prepare_job, run
from w3pack.pipeline.verify_checkpoint import verify_checkpoint

TYPES = gguf.GGMLQuantizationType
HIDDEN, HEADS = 256, 4
FACTOR_AT = {TYPES.Q3_K: 108, TYPES.IQ3_XXS: 0, TYPES.IQ3_S: 0}  # byte of the block's float16 factor
MATRICES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def raw_blocks(kind: TYPES, *, rows: int, columns: int, seed: int) -> np.ndarray[Any, Any]:
    """uint8 [rows, bytes of a row] of random blocks with factors between 2^-9 and 2^-8."""
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows, columns // size, nbytes)).astype(np.uint8)
    factors = (2.0**-9 * (1 + rng.random((rows, columns // size, 1)))).astype(np.float16)
    data[..., FACTOR_AT[kind] : FACTOR_AT[kind] + 2] = factors.view(np.uint8)
    return data.reshape(rows, -1)


def q3_k(block: bytes) -> list[float]:
    """One block of Q3_K, weight by weight: 256 codes of two low bits and one high bit, 16 scales of 6 bits."""
    high, low, scales, (factor,) = block[:32], block[32:96], block[96:108], struct.unpack("<e", block[108:110])
    values = []
    for n in range(256):
        half, shift, at = n // 128, n % 128 // 32, n % 32
        code = (low[32 * half + at] >> (2 * shift)) & 3
        code -= 0 if high[at] >> (4 * half + shift) & 1 else 4
        group = n // 16
        nibble = scales[group] & 15 if group < 8 else scales[group - 8] >> 4
        top = scales[8 + group % 4] >> (2 * (group // 4)) & 3
        values.append(factor * ((nibble | top << 4) - 32) * code)
    return values


def gguf_file(tmp_path: Path, kind: TYPES) -> tuple[GgufSource, dict[str, np.ndarray[Any, Any]]]:
    """A qwen2 of one block whose matrices are of the type; also the raw bytes of each."""
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    numbers = {"block_count": 1, "embedding_length": HIDDEN, "attention.head_count": HEADS, "context_length": 64}
    for key, value in (numbers | {"attention.head_count_kv": HEADS, "feed_forward_length": HIDDEN}).items():
        writer.add_uint32(f"qwen2.{key}", value)
    raw = {name: raw_blocks(kind, rows=HIDDEN, columns=HIDDEN, seed=n) for n, name in enumerate(MATRICES)}
    writer.add_tensor("token_embd.weight", np.ones((8, HIDDEN), np.float16))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    for name, data in raw.items():
        writer.add_tensor(f"blk.0.{name}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    companions = tmp_path / "companions"
    companions.mkdir()
    (companions / "config.json").write_text('{"model_type": "qwen2", "tie_word_embeddings": true}')
    return GgufSource(path, companion_dir=companions), raw


@pytest.mark.parametrize("kind", list(FACTOR_AT), ids=lambda kind: kind.name)
def test_matrices_are_dequantised_and_quantised_anew(tmp_path: Path, kind: TYPES) -> None:
    source, raw = gguf_file(tmp_path, kind)
    assert kind.name in source.notes[0]
    for theirs, ours in MATRICES.items():
        expected = torch.from_numpy(gguf.dequantize(raw[theirs], kind)).half()
        assert torch.equal(source.read(f"model.layers.0.{ours}.weight"), expected)
        assert expected.unique().numel() > 100
    report = run(prepare_job(source, QuantizeOptions(group_size=64)), tmp_path / "out")
    assert report.modules == len(MATRICES)
    assert 0 < report.worst[0][1] < 0.3
    assert verify_checkpoint(tmp_path / "out", against=source).errors.keys() == {
        f"model.layers.0.{ours}" for ours in MATRICES.values()
    }


def test_q3_k_by_a_slow_loop(tmp_path: Path) -> None:
    source, raw = gguf_file(tmp_path, TYPES.Q3_K)
    read = source.read("model.layers.0.mlp.up_proj.weight")
    for row in range(0, HIDDEN, 17):
        expected = torch.tensor(q3_k(raw["ffn_up"][row].tobytes()), dtype=torch.float64)
        assert torch.equal(read[row], expected.float().half())


def test_a_type_that_the_package_cannot_dequantise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr("w3pack.checkpoint.gguf_source.gguf.dequantize", refuse)
    with pytest.raises(UnsupportedError, match="has IQ3_S; use another quantisation"):
        gguf_file(tmp_path, TYPES.IQ3_S)
