"""`w3pack fuse-gateup`: what it prints and refuses, and that an interruption costs one file at most."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import w3pack
from w3pack.checkpoint.staging import Staging
from w3pack.checkpoint.tensor_file import ShardWriter
from w3pack.quantize.fp8_blocks import quantize_fp8_blocks

Cli = Callable[..., Any]
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.fixture
def source(tiny: Any, tmp_path: Path) -> Path:
    """A two-layer FP8 Llama in three files; gate and up lie in different ones."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in tiny.tensors().items():
        if ".mlp." in name or "self_attn" in name:
            tensors[name], tensors[f"{name}_scale_inv"] = quantize_fp8_blocks(tensor)
        else:
            tensors[name] = tensor
    folder = tiny.write(tmp_path / "source", tensors, {**tiny.config, "quantization_config": FP8}, shards=3)
    (folder / "tokenizer.json").write_text("{}")
    return Path(folder)


def weights(tiny: Any, folder: Path) -> dict[str, str]:
    return {name: digest for name, digest in tiny.snapshot(folder).items() if name.endswith(".safetensors")}


@pytest.mark.parametrize("keep", [(), ("--keep-names",)])
def test_there_and_back(cli: Cli, tiny: Any, source: Path, tmp_path: Path, keep: tuple[str, ...]) -> None:
    plan = cli("fuse-gateup", source, "-o", tmp_path / "out", "--dry-run", "--json", *keep).json
    assert set(plan["pairs"]) == {f"model.layers.{layer}.mlp.gate_up_proj" for layer in range(2)}
    assert not (tmp_path / "out").exists()
    result = cli("fuse-gateup", source, "-o", tmp_path / "out", "--json", *keep)
    assert result.code == 0, result.err
    assert result.err == ""
    report = result.json
    assert (report["pairs"], report["declined"], report["weight_bytes_delta"]) == (2, {}, 0)
    assert report["output_bytes"] == plan["output_bytes"] == sum(plan["shards"].values()) + report["guard_bytes"]
    entry = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert entry == FP8 if keep else entry["quant_method"] == "w3pack"
    split = cli("fuse-gateup", tmp_path / "out", "--split", "-o", tmp_path / "back", "--json")
    assert split.code == 0, split.err
    assert split.json["pairs"] == 2
    assert weights(tiny, tmp_path / "back") == weights(tiny, source)


def test_for_people(cli: Cli, source: Path, tmp_path: Path) -> None:
    plan = cli("fuse-gateup", source, "-o", tmp_path / "out", "--dry-run")
    assert "model.layers.*.mlp.gate_up_proj" in plan.out
    done = cli("fuse-gateup", source, "-o", tmp_path / "out", "-q")
    assert "+0 bytes of weights, +0 bytes of scales" in " ".join(done.out.split())
    assert cli("fuse-gateup", tmp_path / "out", "--split", "--dry-run", "-o", tmp_path / "back").code == 0
    assert "Pairs split" in cli("fuse-gateup", tmp_path / "out", "--split", "-o", tmp_path / "back").out
    words = " ".join(cli("fuse-gateup", "--help").out.split())
    assert "w3pack fuse-gateup" in words.split("Example:")[1]


def test_refusals(cli: Cli, refused: Cli, tiny: Any, pristine: Path, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused(2, "fuse-gateup", tmp_path / "none", "-o", out, says="does not exist")
    refused(2, "fuse-gateup", source, "-o", source / "in", says="apart from the source")
    refused(2, "fuse-gateup", source, "-o", out, "--split", "--keep-names", says="--split alone")
    refused(3, "fuse-gateup", pristine, "-o", out, says="--quantize")
    refused(3, "fuse-gateup", source, "-o", out, "--split", says="w3pack.json")
    assert not out.exists()
    assert cli("fuse-gateup", source, "-o", out).code == 0
    refused(2, "fuse-gateup", source, "-o", out, says="--overwrite")
    refused(3, "fuse-gateup", out, "-o", tmp_path / "again", says="packed already")
    refused(3, "quantize", out, "-o", tmp_path / "again", says="packed already")
    assert cli("fuse-gateup", source, "-o", out, "--overwrite", "--keep-names").code == 0
    assert cli("fuse-gateup", pristine, "-o", out, "--overwrite", "--quantize").code == 0


@pytest.mark.parametrize("what", ["truncated", "header", "missing file", "scale", "per-tensor", "config"])
def test_damaged_sources(refused: Cli, tiny: Any, source: Path, tmp_path: Path, what: str) -> None:
    file, config = source / "model-00002-of-00003.safetensors", source / "config.json"
    code, says = 4, "download"
    if what == "truncated":
        file.write_bytes(file.read_bytes()[:-5])
    elif what == "header":
        file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])
    elif what == "missing file":
        file.unlink()
    elif what == "scale":
        config.write_text(config.read_text().replace("[128, 128]", "[64, 64]"))
        says = "weight_block_size"
    elif what == "per-tensor":
        config.write_text(config.read_text().replace("[128, 128]", "null"))
        code, says = 3, "weight_block_size"
    else:
        config.write_text(config.read_text()[:-9])
    refused(code, "fuse-gateup", source, "-o", tmp_path / "out", says=says)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("what", ["truncated", "manifest", "no manifest", "tensor list", "file name", "shape"])
def test_damaged_fused_checkpoints(cli: Cli, refused: Cli, source: Path, tmp_path: Path, what: str) -> None:
    out = tmp_path / "out"
    assert cli("fuse-gateup", source, "-o", out).code == 0
    manifest, code = out / "w3pack.json", 4
    known = json.loads(manifest.read_text())
    if what == "truncated":
        file = next(iter(out.glob("*.safetensors")))
        file.write_bytes(file.read_bytes()[:-1])
    elif what == "manifest":
        manifest.write_text(json.dumps({**known, "split": {}}))
    elif what == "no manifest":
        manifest.unlink()
        code = 3
    elif what == "tensor list":
        del known["split"]["files"]["model-00001-of-00003.safetensors"]
        manifest.write_text(json.dumps(known))
    elif what == "file name":
        known["split"]["files"]["../x.safetensors"] = known["split"]["files"].pop("model-00001-of-00003.safetensors")
        manifest.write_text(json.dumps(known))
    else:
        files = known["split"]["files"]["model-00001-of-00003.safetensors"]
        next(iter(files.values()))["shape"] = [1, 1]
        manifest.write_text(json.dumps(known))
    refused(code, "fuse-gateup", out, "--split", "-o", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def stop_after(monkeypatch: pytest.MonkeyPatch, shards: int, error: BaseException) -> None:
    """Raise `error` in the middle of the shard after `shards` finished ones."""
    real_write, real_finish = ShardWriter.write, Staging.finish_shard
    finished: list[str] = []

    def write(self: ShardWriter, name: str, tensor: Any) -> None:
        if len(finished) == shards:
            raise error
        real_write(self, name, tensor)

    def finish(self: Staging, file: str, record: Any) -> None:
        real_finish(self, file, record)
        finished.append(file)

    monkeypatch.setattr(ShardWriter, "write", write)
    monkeypatch.setattr(Staging, "finish_shard", finish)


@pytest.mark.parametrize("command", ["fuse", "keep", "split"])
@pytest.mark.parametrize("shards", [0, 1, 2])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_resumed_run_has_the_same_bytes(
    cli: Cli, refused: Cli, tiny: Any, source: Path, tmp_path: Path, command: str, shards: int, error: BaseException
) -> None:
    options = {"fuse": (), "keep": ("--keep-names",), "split": ("--split",)}[command]
    if command == "split":
        assert cli("fuse-gateup", source, "-o", tmp_path / "fused").code == 0
        source = tmp_path / "fused"
    assert cli("fuse-gateup", source, "-o", tmp_path / "whole", *options).code == 0
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, shards, error)
        stopped = cli("fuse-gateup", source, "-o", out, *options)
    assert stopped.code == (130 if isinstance(error, KeyboardInterrupt) else 5)
    assert not out.exists()
    assert bool(list(tmp_path.glob(".out*"))) == bool(shards)
    if shards:
        refused(2, "fuse-gateup", source, "-o", out, *options, says="--resume")
        assert cli("fuse-gateup", source, "-o", out, *options, "--resume").code == 0
        assert tiny.snapshot(out) == tiny.snapshot(tmp_path / "whole")
        assert not list(tmp_path.glob(".out*"))


def test_resuming_with_other_arguments(cli: Cli, refused: Cli, source: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 1, KeyboardInterrupt())
        assert cli("fuse-gateup", source, "-o", tmp_path / "out").code == 130
    refused(2, "fuse-gateup", source, "-o", tmp_path / "out", "--keep-names", "--resume", says="same source, arguments")


def test_space_is_checked_before_anything_is_written(
    cli: Cli, refused: Cli, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 10**12, 100_000))
    refused(5, "fuse-gateup", source, "-o", tmp_path / "out", says="free")
    assert "NOT ENOUGH" in cli("fuse-gateup", source, "-o", tmp_path / "out", "--dry-run").out
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_killed_without_a_warning(cli: Cli, tiny: Any, source: Path, tmp_path: Path) -> None:
    """SIGKILL in a process of its own after its first file; nothing there looks finished, and --resume goes on."""
    assert cli("fuse-gateup", source, "-o", tmp_path / "whole").code == 0
    program = (
        "import time, w3pack.pipeline.fuse_gateup as f\n"
        "from w3pack.cli.app import main\n"
        "real = f.write_tensor\n"
        "def slow(*a, **k):\n"
        "    time.sleep(0.1)\n"
        "    return real(*a, **k)\n"
        "f.write_tensor = slow\n"
        "main()\n"
    )
    root = str(Path(w3pack.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    arguments = [sys.executable, "-c", program, "fuse-gateup", str(source), "-o", str(tmp_path / "out")]
    child = subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".out*/model-*.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.02)
        assert child.poll() is None, child.communicate()
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=60)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*/config.json"))
    assert cli("fuse-gateup", source, "-o", tmp_path / "out", "--resume").code == 0
    assert tiny.snapshot(tmp_path / "out") == tiny.snapshot(tmp_path / "whole")


def test_inspect_and_verify(cli: Cli, refused: Cli, tiny: Any, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert cli("fuse-gateup", source, "-o", out).code == 0
    found = cli("inspect", out, "--json").json
    assert set(found["pairs"]) == {f"model.layers.{layer}.mlp.gate_up_proj" for layer in range(2)}
    assert len(found["fp8_modules"]) == 10
    assert found["kinds"]["mlp.gate_up_proj"]["pairs"] == 2
    assert "mlp.gate_up_proj" in cli("inspect", out).out
    result = cli("verify", out, "--against", source, "--json")
    assert result.code == 0, result.err
    assert "8 tensors" in result.json["notes"][0]
    assert cli("verify", out).code == 0

    other = tiny.write(tmp_path / "other", tiny.tensors(seed=1), tiny.config)
    refused(6, "verify", out, "--against", other, says="another model")
    file = out / "model-00001-of-00003.safetensors"
    raw = file.read_bytes()
    file.write_bytes(raw[:-60] + bytes([raw[-60] ^ 1]) + raw[-59:])
    refused(6, "verify", out, says="digest")
    file.write_bytes(raw[:-1])
    refused(4, "inspect", out, says="damaged")
    refused(4, "verify", out, says="damaged")


def test_a_fused_checkpoint_without_its_scales(refused: Cli, cli: Cli, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert cli("fuse-gateup", source, "-o", out).code == 0
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["pairs"].popitem()
    (out / "config.json").write_text(json.dumps(config))
    refused(4, "inspect", out, says="do not belong together")
    config["quantization_config"]["format_version"] = 2
    (out / "config.json").write_text(json.dumps(config))
    refused(4, "verify", out, says="format_version")
