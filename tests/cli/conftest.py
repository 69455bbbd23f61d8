"""Tiny checkpoints written by hand, and the command line called in this process."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from w3pack.cli import app as app_module

HIDDEN, INTERMEDIATE, VOCABULARY, HEADS, KEY_HEADS, HEAD = 128, 200, 300, 4, 2, 30

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "head_dim": HEAD,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


def llama_tensors(*, seed: int = 0, layers: int = 2, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Random weights of a Llama of the sizes above, under the names that checkpoints use."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(dtype)

    tensors = {"model.embed_tokens.weight": random(VOCABULARY, HIDDEN), "lm_head.weight": random(VOCABULARY, HIDDEN)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        for name, rows, columns in (
            ("self_attn.q_proj", HEADS * HEAD, HIDDEN),
            ("self_attn.k_proj", KEY_HEADS * HEAD, HIDDEN),
            ("self_attn.v_proj", KEY_HEADS * HEAD, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HEADS * HEAD),
            ("mlp.gate_proj", INTERMEDIATE, HIDDEN),
            ("mlp.up_proj", INTERMEDIATE, HIDDEN),
            ("mlp.down_proj", HIDDEN, INTERMEDIATE),
        ):
            tensors[f"{at}.{name}.weight"] = random(rows, columns)
        tensors[f"{at}.input_layernorm.weight"] = 1 + random(HIDDEN)
        tensors[f"{at}.post_attention_layernorm.weight"] = 1 + random(HIDDEN)
    tensors["model.norm.weight"] = 1 + random(HIDDEN)
    return tensors


def write_checkpoint(
    folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], *, shards: int = 1
) -> Path:
    """A checkpoint folder as Hugging Face writes it, in one file or several."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = list(tensors)
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = names[number::shards]
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def snapshot(folder: Path) -> dict[str, str]:
    """Relative name -> SHA-256 of every file below a folder; empty when there is no folder."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


class Tiny:
    """What the tests make checkpoints with."""

    config = LLAMA
    tensors = staticmethod(llama_tensors)
    write = staticmethod(write_checkpoint)
    snapshot = staticmethod(snapshot)


@dataclass
class Result:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """stdout as the JSON document that it must be."""
        return json.loads(self.out)


Cli = Callable[..., Result]


@pytest.fixture(scope="session")
def tiny() -> type[Tiny]:
    """The maker of checkpoints."""
    return Tiny


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs `w3pack ARGUMENTS` in this process."""

    def run(*arguments: str | Path) -> Result:
        monkeypatch.setattr(sys, "argv", ["w3pack", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            app_module.main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        captured = capsys.readouterr()
        return Result(code=code, out=captured.out, err=captured.err)

    return run


@pytest.fixture
def refused(cli: Cli) -> Cli:
    """Runs a command that must fail: with the code, in one sentence on stderr, with nothing on stdout."""

    def run(code: int, *arguments: str | Path, says: str = "") -> Result:
        result = cli(*arguments)
        assert result.code == code, (result.code, result.err, result.out)
        assert result.out == ""
        assert "Traceback" not in result.err
        if result.err.startswith("w3pack: "):  # the rest comes from the option parser
            assert result.err.count("\n") == 1, result.err
        else:
            assert code == 2
            assert "Usage:" in result.err
        assert says in result.err, result.err
        return result

    return run


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound two-layer Llama checkpoint in one file. Read it, never write to it."""
    return write_checkpoint(tmp_path_factory.mktemp("pristine") / "model", llama_tensors(), LLAMA)


@pytest.fixture(scope="session")
def pristine_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tensors in three files with an index. Read it, never write to it."""
    return write_checkpoint(tmp_path_factory.mktemp("pristine") / "sharded", llama_tensors(), LLAMA, shards=3)


@pytest.fixture(autouse=True)
def _quiet_logging() -> Iterator[None]:
    """`main` configures the root logger; leave it as it was."""
    level, handlers = logging.root.level, list(logging.root.handlers)
    yield
    logging.root.setLevel(level)
    logging.root.handlers[:] = handlers
