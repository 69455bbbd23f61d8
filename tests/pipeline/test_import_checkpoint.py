"""Checkpoints of other 3-bit formats from files to files: the same weights, the same crash safety as quantising."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from w3pack.checkpoint.import_source import ImportSource, open_import
from w3pack.errors import CheckpointError, ResourceError, UnsupportedError, UsageError, VerificationError
from w3pack.pipeline import import_checkpoint, output
from w3pack.pipeline.import_checkpoint import prepare_import, run_import
from w3pack.pipeline.inspect_checkpoint import inspect_checkpoint
from w3pack.pipeline.packed import open_packed
from w3pack.pipeline.verify_checkpoint import verify_checkpoint
from w3pack.reference import w3

KINDS = ("flute", "gptq", "gptq_v2", "gptqmodel", "gptq_rows", "autoround", "autoround_own", "squeezellm")
UP = "model.layers.0.mlp.up_proj"


def decoded(folder: Path, module: str) -> torch.Tensor:
    """What a packed Linear means, by the slow reference."""
    packed = open_packed(folder)
    stored = (packed.read(module, part) for part in ("codes", "scales", "qmap"))
    return w3.dequantize(*stored, spec=packed.config.modules[module], dtype=torch.float32)


def everything(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def written_notes(folder: Path) -> Any:
    return json.loads((folder / "w3pack.json").read_text())["source"]["notes"]


def opened(folder: Path) -> ImportSource:
    return open_import(str(folder))


@pytest.mark.parametrize("layout", ["dense", "nibble"])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_the_same_to_the_last_bit(tmp_path: Path, foreign: Any, kind: str, layout: Any) -> None:
    made = foreign.write_llama(tmp_path / "source", kind)
    seen: list[str] = []
    report = run_import(
        prepare_import(opened(made.folder), layout=layout),
        tmp_path / "out",
        progress=lambda name, weights: seen.append(name),
    )
    assert sorted(seen) == sorted(made.weights)
    for module, weight in made.weights.items():
        assert torch.equal(decoded(tmp_path / "out", module), weight), module
    assert report.modules == len(made.weights)
    assert report.worst[0][1] == 0
    verification = verify_checkpoint(tmp_path / "out")
    assert verification.modules == len(made.weights)
    assert verification.digests == verification.tensors
    found = inspect_checkpoint(tmp_path / "out")
    assert {entry["layout"] for entry in found["modules"].values()} == {layout}
    assert found["settings"]["import"] in ("FLUTE", "GPTQ", "AutoRound", "SqueezeLLM")


@pytest.mark.parametrize("kind", KINDS)
def test_everything_else_is_copied(tmp_path: Path, foreign: Any, kind: str) -> None:
    made = foreign.write_llama(tmp_path / "source", kind)
    run_import(prepare_import(opened(made.folder)), tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    kept = {name: tensor for name, tensor in made.stock.items() if name.rpartition(".")[0] not in made.weights}
    for name, tensor in kept.items():
        assert torch.equal(tensors.pop(name).view(torch.int16), tensor.view(torch.int16)), name
    packed = {f"{module}.{part}" for module in made.weights for part in ("codes", "scales", "qmap")}
    assert len(set(tensors) - packed) == 1, "besides the guard nothing is left"
    files = everything(tmp_path / "out")
    assert set(files) == {"config.json", "generation_config.json", "model.safetensors", "w3pack.json"}
    assert files["generation_config.json"] == b'{"max_new_tokens": 7}'
    config = json.loads(files["config.json"])
    assert config.pop("quantization_config")["quant_method"] == "w3pack"
    assert config == {key: value for key, value in made.config.items() if key != "quantization_config"}


def test_bias_goes_along(tmp_path: Path, foreign: Any) -> None:
    made = foreign.write_llama(tmp_path / "source", "gptq")
    file = made.folder / "model.safetensors"
    bias = torch.arange(96).half()
    save_file({**load_file(file), f"{UP}.bias": bias}, file, metadata={"format": "pt"})
    run_import(prepare_import(opened(made.folder)), tmp_path / "out")
    assert open_packed(tmp_path / "out").config.modules[UP].bias
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[f"{UP}.bias"], bias)


def test_maps_are_ascending_and_at_most_one(tmp_path: Path, foreign: Any) -> None:
    """A FLUTE table in no order with numbers above 1, and negative scales."""
    table = (0.5, -6.0, 3.0, 0.0, -1.5, 2.0, 5.0, 0.25)
    made = foreign.flute(512, 64, table=table)
    folder = tmp_path / "source"
    folder.mkdir()
    config = {"model_type": "llama", "quantization_config": foreign.CONFIGS["flute"]}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({f"{UP}.{part}": tensor for part, tensor in made.parts.items()}, folder / "model.safetensors")
    run_import(prepare_import(opened(folder)), tmp_path / "out")
    assert torch.equal(decoded(tmp_path / "out", UP), made.weight)
    qmap = open_packed(tmp_path / "out").read(UP, "qmap")
    assert qmap.tolist() == [sorted(entry / 8 for entry in table)]


def test_scales_that_would_overflow_are_refused(tmp_path: Path, foreign: Any) -> None:
    made = foreign.write_llama(tmp_path / "source", "gptq")
    file = made.folder / "model.safetensors"
    tensors = load_file(file)
    tensors[f"{UP}.scales"][0, 5] = 20000
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UnsupportedError, match=rf"{UP} that float16 holds exactly, got scales up to 80000"):
        run_import(prepare_import(opened(made.folder)), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize("name", [f"{UP}.scales", "model.norm.weight"])
def test_no_number_is_refused_by_name(tmp_path: Path, foreign: Any, name: str) -> None:
    made = foreign.write_llama(tmp_path / "source", "gptq")
    file = made.folder / "model.safetensors"
    tensors = load_file(file)
    tensors[name].view(-1)[3] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=name.removesuffix(".scales")):
        run_import(prepare_import(opened(made.folder)), tmp_path / "out")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_tables_too_fine_are_rounded_once_and_measured(tmp_path: Path, foreign: Any, dtype: torch.dtype) -> None:
    made = foreign.squeezellm(64, 192, dtype=dtype, tiny=dtype == torch.float16)
    folder = tmp_path / "source"
    folder.mkdir()
    config = {"model_type": "llama", "quantization_config": foreign.CONFIGS["squeezellm"]}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({f"{UP}.{part}": tensor for part, tensor in made.parts.items()}, folder / "model.safetensors")
    report = run_import(prepare_import(opened(folder)), tmp_path / "out")
    error = (decoded(tmp_path / "out", UP) - made.weight).double().norm() / made.weight.double().norm()
    assert 0 < float(error) < 2.0**-11
    assert report.worst[0][1] == pytest.approx(float(error), rel=1e-6)
    assert "tables of 1 Linears were rounded to float16" in report.notes[-1]
    assert written_notes(tmp_path / "out") == list(report.notes)


def test_shards_change_no_tensor(tmp_path: Path, foreign: Any) -> None:
    made = foreign.write_llama(tmp_path / "source", "gptq")
    run_import(prepare_import(opened(made.folder)), tmp_path / "one")
    run_import(prepare_import(opened(made.folder), max_shard_bytes=8000), tmp_path / "many")
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 3
    many = {name: tensor for file in files for name, tensor in load_file(file).items()}
    one = load_file(tmp_path / "one" / "model.safetensors")
    assert many.keys() == one.keys()
    assert all(torch.equal(many[name], one[name]) for name in one)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(one)
    verify_checkpoint(tmp_path / "many")


@pytest.mark.parametrize("after", [0, 2, 5])
def test_interrupted_work_is_resumed(tmp_path: Path, foreign: Any, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    made = foreign.write_llama(tmp_path / "source", "gptq")

    def job() -> Any:
        return prepare_import(opened(made.folder), max_shard_bytes=8000)

    run_import(job(), tmp_path / "whole")
    done: list[str] = []

    def stop(name: str, weights: int) -> None:
        done.append(name)
        if len(done) > after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_import(job(), tmp_path / "out", progress=stop)
    assert not (tmp_path / "out").exists()
    again: list[str] = []
    if list(tmp_path.glob(".*unfinished")):
        with pytest.raises(UsageError, match="--resume"):
            run_import(job(), tmp_path / "out")
        with pytest.raises(UsageError, match="same source, arguments"):
            run_import(prepare_import(opened(made.folder), max_shard_bytes=9000), tmp_path / "out", resume=True)
        run_import(job(), tmp_path / "out", resume=True, progress=lambda name, _: again.append(name))
        assert len(again) < len(made.weights)
    else:
        run_import(job(), tmp_path / "out")
    assert everything(tmp_path / "out") == everything(tmp_path / "whole")


def test_output_apart_from_the_source(tmp_path: Path, foreign: Any) -> None:
    made = foreign.write_llama(tmp_path / "source", "gptq")
    for place in (made.folder, tmp_path, made.folder / "inside"):
        with pytest.raises(UsageError, match="apart from the source"):
            run_import(prepare_import(opened(made.folder)), place)


def test_space_is_checked_first(tmp_path: Path, foreign: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = foreign.write_llama(tmp_path / "source", "gptq")
    monkeypatch.setattr(output, "free_bytes", lambda _: 1000)
    with pytest.raises(ResourceError, match="GB free"):
        run_import(prepare_import(opened(made.folder)), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_faulty_packer_would_be_noticed(tmp_path: Path, foreign: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = foreign.write_llama(tmp_path / "source", "gptq")
    monkeypatch.setattr(import_checkpoint, "sort_table", lambda codes, table: (codes ^ 1, table))
    with pytest.raises(VerificationError, match="defect in w3pack"):
        run_import(prepare_import(opened(made.folder)), tmp_path / "out")


def test_modules_that_no_loader_has_are_refused(tmp_path: Path, foreign: Any) -> None:
    made = foreign.write_llama(tmp_path / "source", "gptq")
    with pytest.raises(UnsupportedError, match=f"got {UP}: an embedding"):
        prepare_import(opened(made.folder), loadable=lambda modules: {UP: "an embedding"})


@pytest.mark.parametrize("part", ["codes", "qmap"])
def test_names_of_packed_tensors_are_taken(tmp_path: Path, foreign: Any, part: str) -> None:
    made = foreign.write_llama(tmp_path / "source", "gptq")
    file = made.folder / "model.safetensors"
    save_file({**load_file(file), f"model.extra.{part}": torch.ones(2)}, file, metadata={"format": "pt"})
    with pytest.raises(UnsupportedError, match=f"model.extra.{part}"):
        prepare_import(opened(made.folder))


def test_another_source_does_not_resume(tmp_path: Path, foreign: Any) -> None:
    """flute_config.json lies beside config.json and decides as much."""
    made = foreign.flute(512, 64)
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "flute_config.json").write_text('{"num_bits": 3, "group_size": 64}')
    save_file({f"{UP}.{part}": tensor for part, tensor in made.parts.items()}, folder / "model.safetensors")
    before = opened(folder).fingerprint()
    (folder / "flute_config.json").write_text('{"num_bits": 3, "group_size": 64, "version": "0.4.0"}')
    assert opened(folder).fingerprint() != before
