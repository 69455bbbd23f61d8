"""Checkpoints of other 3-bit formats, written code by code with whole numbers; weights computed in Python floats.

Nothing here is shared with the readers that are tested. Products of two float16 numbers are exact in a double and in float32.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Rows = Sequence[Sequence[int]]
NF3 = (-1.0, -0.53515625, -0.2469482421875, 0.0, 0.183349609375, 0.382080078125, 0.623046875, 1.0)
GPTQMODEL_WORDS = (0x24924924, 0x92492492, 0x49249249)


def signed(word: int, *, bits: int) -> int:
    """An unsigned word as the signed number of the same bits."""
    return word - (1 << bits) if word >> (bits - 1) else word


def triples(codes: Rows) -> torch.Tensor:
    """codes[k][n] -> int32 [3K/32, N]: each 32 codes of a column are one number of 96 bits, code 0 lowest."""
    words: list[list[int]] = []
    for first in range(0, len(codes), 32):
        numbers = [sum(codes[first + i][n] << (3 * i) for i in range(32)) for n in range(len(codes[0]))]
        words += [[number >> (32 * part) & 0xFFFFFFFF for number in numbers] for part in range(3)]
    return torch.tensor([[signed(word, bits=32) for word in row] for row in words], dtype=torch.int32)


def transposed(codes: Rows) -> list[list[int]]:
    return [list(column) for column in zip(*codes, strict=True)]


@dataclass
class Made:
    """One Linear: its tensors by part, and the matrix they stand for (float32 [rows, columns])."""

    parts: dict[str, torch.Tensor]
    weight: torch.Tensor
    codes: list[list[int]] = field(default_factory=list)


def some_codes(rows: int, columns: int, *, seed: int) -> list[list[int]]:
    """codes[n][k], all eight of them."""
    source = random.Random(seed)
    return [[source.randrange(8) for _ in range(columns)] for _ in range(rows)]


def some_scales(rows: int, groups: int, *, seed: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Distinct scales of both signs [rows, groups]."""
    generator = torch.Generator().manual_seed(seed)
    scales = 0.01 + 0.05 * torch.rand(rows, groups, generator=generator)
    return (scales * (1 - 2 * (torch.rand(rows, groups, generator=generator) < 0.2).float())).to(dtype)


def matrix(codes: Rows, values: Any, scales: torch.Tensor, *, group_size: int) -> torch.Tensor:
    """values(n, k, code) * scales[n][k // group_size], one weight at a time."""
    factors = scales.double().tolist()
    return torch.tensor(
        [
            [values(n, k, code) * factors[n][k // group_size] for k, code in enumerate(row)]
            for n, row in enumerate(codes)
        ],
        dtype=torch.float32,
    )


def flute(
    rows: int, columns: int, *, group_size: int = 64, seed: int = 0, table: Sequence[float] = NF3, pairs: bool = True
) -> Made:
    """A FLUTE 0.4 Linear; `pairs` adds tables2."""
    codes = some_codes(rows, columns, seed=seed)
    words = [[0] * columns for _ in range(3 * rows // 16)]  # unsigned 16-bit
    for q in range(columns // 2):
        for block in range(rows // 512):
            for lane in range(32):
                word = [0, 0, 0]
                for j in range(15):
                    n = 512 * block + 32 * j + lane
                    odd, even = codes[n][2 * q + 1], codes[n][2 * q]
                    word[j % 3] |= odd << (6 * (j // 3)) | even << (6 * (j // 3) + 3)
                n = 512 * block + 32 * 15 + lane
                last = codes[n][2 * q + 1] | codes[n][2 * q] << 3
                for number in range(3):
                    word[number] |= (last >> (2 * number) & 3) << 30
                places = [
                    32 * block + lane,
                    rows // 16 + 64 * block + lane,
                    rows // 16 + 64 * block + 32 + lane,
                ]
                for place, value in zip(places, word, strict=True):
                    words[place][2 * q], words[place][2 * q + 1] = value & 0xFFFF, value >> 16
    scales = some_scales(rows, columns // group_size, seed=seed)
    tables = torch.tensor(table, dtype=torch.float16)
    exact = tables.double().tolist()
    parts = {
        "weight": torch.tensor([[signed(w, bits=16) for w in row] for row in words], dtype=torch.int16),
        "scales": scales,
        "tables": tables,
    }
    if pairs:
        halves = torch.tensor([[[a, b] for b in exact] for a in exact], dtype=torch.float16)
        parts["tables2"] = halves.view(torch.float32).reshape(8, 8)
    weight = matrix(codes, lambda n, k, code: exact[code], scales, group_size=group_size)
    return Made(parts, weight, codes)


def gptq(
    rows: int,
    columns: int,
    *,
    group_size: int = 64,
    seed: int = 0,
    zeros: Rows | int = 4,
    stored: str = "v1",
    scales: torch.Tensor | None = None,
    g_idx: bool = True,
) -> Made:
    """A GPTQ Linear; `zeros` is one number or zeros[group][n]; `stored` is v1, v2 or words."""
    size = columns if group_size == -1 else group_size
    groups = -(-columns // size)
    codes = some_codes(rows, columns, seed=seed)
    points = [[zeros] * rows for _ in range(groups)] if isinstance(zeros, int) else [list(row) for row in zeros]
    kept = [[point - 1 for point in row] if stored == "v1" else row for row in points]
    qzeros = triples(transposed(kept)).T.contiguous()
    if stored == "words":
        less = [
            [signed((word - GPTQMODEL_WORDS[i % 3]) & 0xFFFFFFFF, bits=32) for i, word in enumerate(row)]
            for row in qzeros.tolist()
        ]
        qzeros = torch.tensor(less, dtype=torch.int32)
    scales = some_scales(rows, groups, seed=seed) if scales is None else scales
    parts = {"qweight": triples(transposed(codes)), "qzeros": qzeros, "scales": scales.T.contiguous()}
    if g_idx:
        parts["g_idx"] = torch.tensor([k // size for k in range(columns)], dtype=torch.int32)
    weight = matrix(codes, lambda n, k, code: code - points[k // size][n], scales, group_size=size)
    return Made(parts, weight, codes)


def squeezellm(
    rows: int, columns: int, *, seed: int = 0, dtype: torch.dtype = torch.float16, tiny: bool = False
) -> Made:
    """A dense SqueezeLLM Linear: eight weights for each row, in no order; `tiny` adds one that is hard to hold."""
    codes = some_codes(rows, columns, seed=seed)
    table = (torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed)) * 0.05).to(dtype)
    table[0] *= 100  # a row with weights above 1
    if tiny:
        table[0, 5], table[0, 6] = 3.0, 2.0**-14 + 2.0**-24
    exact = table.double().tolist()
    weight = torch.tensor([[exact[n][code] for code in row] for n, row in enumerate(codes)], dtype=torch.float32)
    return Made({"qweight": triples(transposed(codes)), "lookup_table": table}, weight, codes)


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "hidden_size": 64,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_bias": False,
    "torch_dtype": "float16",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "flute": {"quant_method": "flute", "version": "0.4.1", "num_bits": 3, "group_size": 64},
    "gptq": {"quant_method": "gptq", "bits": 3, "group_size": 64, "sym": True, "desc_act": False},
    "gptq_v2": {"quant_method": "gptq", "bits": 3, "group_size": 64, "sym": True, "checkpoint_format": "gptq_v2"},
    "gptqmodel": {
        "quant_method": "gptq", "bits": 3, "group_size": 64, "sym": True, "checkpoint_format": "gptq",
        "meta": {"quantizer": ["gptqmodel:2.2.0"]},
    },
    "gptq_rows": {"quant_method": "gptq", "bits": 3, "group_size": -1, "sym": False},
    "autoround": {
        "quant_method": "auto-round", "bits": 3, "group_size": 64, "sym": True, "packing_format": "auto_round:auto_gptq",
    },
    "autoround_own": {"quant_method": "auto-round", "bits": 3, "group_size": 64, "packing_format": "auto_round"},
    "squeezellm": {"quant_method": "squeezellm", "wbits": 3},
}  # fmt: skip


def linear(kind: str, rows: int, columns: int, *, seed: int) -> Made:
    """A Linear of one of the kinds of `CONFIGS`."""
    if kind == "flute":
        return flute(rows, columns, seed=seed)
    if kind == "squeezellm":
        return squeezellm(rows, columns, seed=seed)
    if kind == "gptq_rows":
        return gptq(rows, columns, group_size=-1, zeros=[[1 + (n + seed) % 7 for n in range(rows)]], seed=seed)
    stored = {"gptq_v2": "v2", "gptqmodel": "words", "autoround_own": "v2"}.get(kind, "v1")
    return gptq(rows, columns, stored=stored, seed=seed, g_idx=not kind.startswith("autoround"))


@dataclass
class Checkpoint:
    """A Llama of one layer in another format: its folder, the weights of the packed modules, and every stock tensor."""

    folder: Path
    weights: dict[str, torch.Tensor]
    stock: dict[str, torch.Tensor]
    config: dict[str, Any]


def write_llama(folder: Path, kind: str, *, edit: Mapping[str, Any] | None = None) -> Checkpoint:
    """Write such a checkpoint; of FLUTE only gate and up are packed, since 512 must divide their rows.

    `edit` changes quantization_config.
    """
    inner = 512 if kind == "flute" else 96
    config = {**LLAMA, "intermediate_size": inner, "quantization_config": {**CONFIGS[kind], **(edit or {})}}
    at = "model.layers.0"
    shapes = {
        f"{at}.self_attn.q_proj": (64, 64),
        f"{at}.self_attn.k_proj": (32, 64),
        f"{at}.self_attn.v_proj": (32, 64),
        f"{at}.self_attn.o_proj": (64, 64),
        f"{at}.mlp.gate_proj": (inner, 64),
        f"{at}.mlp.up_proj": (inner, 64),
        f"{at}.mlp.down_proj": (64, inner),
    }
    generator = torch.Generator().manual_seed(5)
    stock = {
        name: torch.randn(*shape, generator=generator).half()
        for name, shape in {
            "model.embed_tokens.weight": (50, 64),
            "lm_head.weight": (50, 64),
            "model.norm.weight": (64,),
            f"{at}.input_layernorm.weight": (64,),
            f"{at}.post_attention_layernorm.weight": (64,),
        }.items()
    }
    stored, weights = dict(stock), {}
    for seed, (module, (rows, columns)) in enumerate(shapes.items()):
        if rows % 512 and kind == "flute":
            stored[f"{module}.weight"] = torch.randn(rows, columns, generator=generator).mul(0.1).half()
            stock[f"{module}.weight"] = stored[f"{module}.weight"]
            continue
        made = linear(kind, rows, columns, seed=seed)
        stored |= {f"{module}.{part}": tensor for part, tensor in made.parts.items()}
        weights[module] = stock[f"{module}.weight"] = made.weight
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"max_new_tokens": 7}')
    (folder / "quantize_config.json").write_text('{"bits": 3}')
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return Checkpoint(folder=folder, weights=weights, stock=stock, config=config)
