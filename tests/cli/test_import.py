"""`w3pack import`: what it prints and refuses, and that transformers runs what it writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from w3pack.runtime.linear import W3Linear

Cli = Callable[..., Any]
KINDS = ("flute", "gptq", "gptqmodel", "gptq_rows", "autoround_own", "squeezellm")


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_computes_with_the_sources_weights(cli: Cli, foreign: Any, tmp_path: Path, kind: str) -> None:
    made = foreign.write_llama(tmp_path / "source", kind)
    result = cli("import", made.folder, "-o", tmp_path / "out")
    assert result.code == 0, result.err
    assert result.err == ""
    assert cli("verify", tmp_path / "out").code == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    packed = {name: module for name, module in model.named_modules() if isinstance(module, W3Linear)}
    assert packed.keys() == made.weights.keys()
    for name, module in packed.items():
        assert torch.equal(module.dequantized_weight(), made.weights[name]), name
    config = {key: value for key, value in made.config.items() if key != "quantization_config"}
    stock = LlamaForCausalLM(LlamaConfig.from_dict(config)).float()
    stock.load_state_dict({name: tensor.float() for name, tensor in made.stock.items()})
    tokens = torch.arange(12).view(1, 12)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, stock(tokens).logits)


def test_report_and_options(cli: Cli, foreign: Any, tmp_path: Path) -> None:
    made = foreign.write_llama(tmp_path / "source", "gptq")
    arguments = ("import", made.folder, "-o", tmp_path / "out", "--max-shard-size", "8KB")
    report = cli(*arguments, "--layout", "nibble", "--json").json
    assert report["modules"] == 7
    assert report["worst"][0][1] == 0
    assert "GPTQ" in report["notes"][0]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["layout"] == "nibble"
    assert cli(*arguments).code == 2
    text = cli(*arguments, "--overwrite", "-q")
    assert text.code == 0
    assert "Bits per weight" in text.out
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["layout"] == "dense"


def test_help_has_an_example(cli: Cli) -> None:
    words = " ".join(cli("import", "--help").out.split())
    assert "w3pack import" in words.split("Example:")[1]
    assert " import " in cli("--help").out


@pytest.mark.parametrize(
    ("entry", "code", "says"),
    [
        (None, 3, "--qmap"),
        ({"quant_method": "awq", "bits": 4}, 3, "flute, gptq, auto-round, squeezellm"),
        ({"quant_method": "gptq", "bits": 4}, 3, "3 bits"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 64, "sym": False, "checkpoint_format": "gptq_v2"}, 0, ""),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128, "sym": True}, 4, "qzeros"),
    ],
)
def test_exit_codes(cli: Cli, refused: Cli, foreign: Any, tmp_path: Path, entry: Any, code: int, says: str) -> None:
    made = foreign.write_llama(tmp_path / "source", "gptq")
    config = {**made.config, "quantization_config": entry}
    if entry is None:
        (made.folder / "quantize_config.json").unlink()
        del config["quantization_config"]
    (made.folder / "config.json").write_text(json.dumps(config))
    if code == 0:  # a zero point that is stored as it is, whatever it is
        assert cli("import", made.folder, "-o", tmp_path / "out").code == 0
        return
    refused(code, "import", made.folder, "-o", tmp_path / "out", says=says)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_pickles_and_paths(refused: Cli, foreign: Any, tmp_path: Path) -> None:
    made = foreign.write_llama(tmp_path / "source", "squeezellm")
    index = {"weight_map": {"model.norm.weight": "../../etc/passwd.safetensors"}}
    (made.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(4, "import", made.folder, "-o", tmp_path / "out", says="not safe to follow")
    (made.folder / "model.safetensors.index.json").unlink()
    (made.folder / "model.safetensors").rename(made.folder / "pytorch_model.bin")
    refused(3, "import", made.folder, "-o", tmp_path / "out", says="convert the checkpoint to safetensors")


def test_a_config_of_another_model(refused: Cli, foreign: Any, tmp_path: Path) -> None:
    made = foreign.write_llama(tmp_path / "source", "gptq")
    (made.folder / "config.json").write_text(json.dumps({**made.config, "intermediate_size": 128}))
    refused(3, "import", made.folder, "-o", tmp_path / "out", says="a Linear of 64 x 128 there")
