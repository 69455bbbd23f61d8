"""Bad input, from the hostile and from the clumsy: one sentence, the right exit code, and nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

Cli = Callable[..., Any]

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
UP = "model.layers.1.mlp.up_proj"


@pytest.fixture
def source(pristine: Path, tmp_path: Path) -> Path:
    """A sound checkpoint that the test may damage."""
    return Path(shutil.copytree(pristine, tmp_path / "source"))


@pytest.fixture
def sharded(pristine_shards: Path, tmp_path: Path) -> Path:
    """A sound checkpoint of three files that the test may damage."""
    return Path(shutil.copytree(pristine_shards, tmp_path / "sharded"))


@pytest.fixture
def nothing_written(refused: Cli, tmp_path: Path, tiny: Any) -> Cli:
    """Refuses `quantize SOURCE -o out ...` with a code and leaves neither an output nor unfinished work."""

    def run(code: int, source: str | Path, *arguments: str | Path, says: str = "") -> Any:
        before = tiny.snapshot(tmp_path)
        result = refused(code, "quantize", source, "-o", tmp_path / "out", *arguments, says=says)
        assert tiny.snapshot(tmp_path) == before
        assert not (tmp_path / "out").exists()
        assert not list(tmp_path.glob(".*w3pack*"))
        return result

    return run


def edit_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite the header of a safetensors file and leave its data alone."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


# --- damaged files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 5, 8, 300, -1, -100_000])
def test_truncated_file(nothing_written: Cli, source: Path, keep: int) -> None:
    raw = (source / WEIGHTS).read_bytes()
    (source / WEIGHTS).write_bytes(raw[:keep])
    nothing_written(4, source, says=WEIGHTS)


def test_file_longer_than_its_header_says(nothing_written: Cli, source: Path) -> None:
    with (source / WEIGHTS).open("ab") as file:
        file.write(b"x")
    nothing_written(4, source, says=WEIGHTS)


@pytest.mark.parametrize("length", [1 << 40, (1 << 64) - 1, 1 << 31])
def test_absurd_header_length(nothing_written: Cli, source: Path, length: int) -> None:
    raw = (source / WEIGHTS).read_bytes()
    (source / WEIGHTS).write_bytes(struct.pack("<Q", length) + raw[8:])
    nothing_written(4, source, says="header")


def test_flipped_header_bits_end_in_a_sentence(cli: Cli, source: Path, tmp_path: Path) -> None:
    """A flip may spell another valid header (a name, a dtype of the same size); it must never end in a crash."""
    raw = (source / WEIGHTS).read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    codes = []
    for position in (*range(8), *range(8, 8 + length, 89)):
        flipped = bytearray(raw)
        flipped[position] ^= 1 << position % 7
        (source / WEIGHTS).write_bytes(flipped)
        result = cli("quantize", source, "-o", tmp_path / "out", "--dry-run", "--json")
        assert result.code in (0, 3, 4), result.err
        codes.append(result.code)
    assert codes[:8] == [4] * 8
    assert codes.count(4) > len(codes) // 2


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header.update({"model.norm.weight": [1]}),
        lambda header: header["model.norm.weight"].update(dtype="F4"),
        lambda header: header["model.norm.weight"].update(shape=[-1]),
        lambda header: header["model.norm.weight"].update(shape=[1 << 60, 1 << 60]),
        lambda header: header["model.norm.weight"].update(data_offsets=[0, 256]),
        lambda header: header["model.norm.weight"].pop("data_offsets"),
        lambda header: header.update({"half\ud800": header.pop("model.norm.weight")}),
    ],
)
def test_header_that_contradicts_itself(
    nothing_written: Cli, source: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    edit_header(source / WEIGHTS, change)
    nothing_written(4, source, says=WEIGHTS)


@pytest.mark.parametrize("file", ["../source/model.safetensors", "/etc/passwd", "..\\x", "a\0b", "", ".", 5, "a" * 300])
def test_index_that_points_elsewhere(nothing_written: Cli, sharded: Path, file: Any) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = file
    (sharded / INDEX).write_text(json.dumps(index))
    nothing_written(4, sharded)


@pytest.mark.parametrize("index", [[], {}, {"weight_map": []}, {"weight_map": {}}, 7])
def test_index_without_a_map(nothing_written: Cli, sharded: Path, index: Any) -> None:
    (sharded / INDEX).write_text(json.dumps(index))
    nothing_written(4, sharded, says=INDEX)


def test_index_lists_a_tensor_that_no_file_has(nothing_written: Cli, sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.ghost.weight"] = "model-00001-of-00003.safetensors"
    (sharded / INDEX).write_text(json.dumps(index))
    nothing_written(4, sharded, says="model.ghost.weight")


def test_index_lacks_a_tensor_that_a_file_has(nothing_written: Cli, sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    (sharded / INDEX).write_text(json.dumps(index))
    nothing_written(4, sharded, says="model.norm.weight")


def test_missing_shard(nothing_written: Cli, sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    nothing_written(4, sharded, says="model-00002-of-00003.safetensors")


def test_empty_folder_and_pickles(nothing_written: Cli, tmp_path: Path, tiny: Any) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    nothing_written(4, folder)
    (folder / "config.json").write_text(json.dumps(tiny.config))
    nothing_written(4, folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02cos\nsystem\n.")
    nothing_written(3, folder, says="pytorch_model.bin")


@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
@pytest.mark.parametrize("kind", ["folder", "pipe", "dangling link"])
def test_something_else_where_a_file_belongs(refused: Cli, source: Path, tmp_path: Path, name: str, kind: str) -> None:
    path = source / name
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("nowhere")
    refused(4, "quantize", source, "-o", tmp_path / "out", says=name)
    assert not (tmp_path / "out").exists()


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [f"{UP}.weight", "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_no_numbers(nothing_written: Cli, source: Path, name: str, value: float) -> None:
    tensors = load_file(source / WEIGHTS)
    tensors[name].view(-1)[3] = value
    save_file(tensors, source / WEIGHTS)
    nothing_written(4, source, "--only", UP, says=name)


# --- config.json -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"7", b'"x"', b"{", b"\xff\xfe\x00", b'{"a": "\xff"}', b"[" * 100_000, b'{"a":' * 50_000]
)
def test_config_that_is_no_object(nothing_written: Cli, source: Path, raw: bytes) -> None:
    (source / "config.json").write_bytes(raw)
    nothing_written(4, source, says="config.json")


def test_huge_config(refused: Cli, source: Path, tmp_path: Path) -> None:
    with (source / "config.json").open("r+b") as file:
        file.truncate(1 << 40)  # sparse
    refused(4, "quantize", source, "-o", tmp_path / "out", says="config.json")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("model_type", ["no-such-model", None, 5, "", "../llama"])
def test_unknown_model_type(nothing_written: Cli, source: Path, model_type: Any, tiny: Any) -> None:
    (source / "config.json").write_text(json.dumps({**tiny.config, "model_type": model_type}))
    nothing_written(3, source, says="model_type")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", ["llama"]),
        ("hidden_size", "abc"),
        ("hidden_size", -5),
        ("num_attention_heads", 0),
        ("num_hidden_layers", "2"),
        ("vocab_size", -1),
        ("pad_token_id", 10**6),
    ],
)
def test_config_that_no_model_can_be_built_from(
    nothing_written: Cli, source: Path, key: str, value: Any, tiny: Any
) -> None:
    (source / "config.json").write_text(json.dumps({**tiny.config, key: value}))
    nothing_written(3, source)


def test_config_with_more_layers_than_the_files(nothing_written: Cli, source: Path, tiny: Any) -> None:
    (source / "config.json").write_text(json.dumps({**tiny.config, "num_hidden_layers": 3}))
    nothing_written(4, source, "--only", UP)


@pytest.mark.parametrize(
    "entry",
    [
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        {"quant_method": "fp8"},
        {"quant_method": "fp8", "weight_block_size": [128, 0]},
        {"quant_method": ["x"]},
        [1],
        "x",
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_quantised_source(nothing_written: Cli, source: Path, entry: Any, nested: bool, tiny: Any) -> None:
    config = (
        {**tiny.config, "text_config": {"quantization_config": entry}}
        if nested
        else {**tiny.config, "quantization_config": entry}
    )
    (source / "config.json").write_text(json.dumps(config))
    nothing_written(3, source, says="unquantised")


def test_packed_words_without_a_config_that_explains_them(nothing_written: Cli, tmp_path: Path, tiny: Any) -> None:
    tensors = {**tiny.tensors(), f"{UP}.qweight": torch.zeros(16, 200, dtype=torch.int32)}
    source = tiny.write(tmp_path / "source", tensors, tiny.config)
    nothing_written(3, source, says=f"{UP}.qweight")


def test_nothing_of_the_source_is_executed(cli: Cli, source: Path, tmp_path: Path, tiny: Any) -> None:
    marker = tmp_path / "executed"
    code = f"open({str(marker)!r}, 'w').close()\nclass A: pass\n"
    for name in ("modeling_llama.py", "configuration_llama.py", "__init__.py", "setup.py", "conftest.py"):
        (source / name).write_text(code)
    auto = {"AutoConfig": "configuration_llama.A", "AutoModelForCausalLM": "modeling_llama.A"}
    (source / "config.json").write_text(json.dumps({**tiny.config, "auto_map": auto}))
    result = cli("quantize", source, "-o", tmp_path / "out", "--only", UP)
    assert result.code == 0, result.err
    (source / "config.json").write_text(json.dumps({**tiny.config, "auto_map": auto, "model_type": "its-own"}))
    assert cli("quantize", source, "-o", tmp_path / "other", "--only", UP).code == 3
    assert not marker.exists()
    assert (tmp_path / "out" / "modeling_llama.py").read_text() == code


# --- places ----------------------------------------------------------------------------------------------------------


def test_model_that_does_not_exist(nothing_written: Cli, tmp_path: Path) -> None:
    for model in (str(tmp_path / "none"), "./none", "", " ", "~no-such-user/x", "/" + "a" * 300, "a/b/c", "none.gguf"):
        nothing_written(2, model, says="does not exist")


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_packed_folder_that_does_not_exist(refused: Cli, source: Path, tmp_path: Path, command: str) -> None:
    refused(2, command, tmp_path / "none", says="got nothing")
    refused(2, command, source / "config.json", says="got a file")
    refused(4, command, source, says="quantization_config")
    refused(2, command)


def test_file_that_is_no_checkpoint(nothing_written: Cli, source: Path) -> None:
    nothing_written(4, source / "config.json", says=".gguf")


@pytest.mark.parametrize("place", [".", "below", "..", "./below/../../source"])
def test_output_and_source_apart(refused: Cli, source: Path, place: str, tiny: Any) -> None:
    before = tiny.snapshot(source)
    refused(2, "quantize", source, "-o", source / place, "--overwrite", says="apart from the source")
    assert tiny.snapshot(source.parent) == {f"source/{name}": value for name, value in before.items()}


def test_output_is_the_source_behind_a_link(refused: Cli, source: Path, tmp_path: Path, tiny: Any) -> None:
    (tmp_path / "link").symlink_to(source)
    before = tiny.snapshot(source)
    refused(2, "quantize", source, "-o", tmp_path / "link", "--overwrite", says="apart from the source")
    assert tiny.snapshot(source) == before


def test_output_is_a_file(refused: Cli, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_text("mine")
    refused(2, "quantize", source, "-o", target, "--overwrite", says="got the file")
    refused(5, "quantize", source, "-o", target / "below", says="Not a directory")
    refused(5, "quantize", source, "-o", tmp_path / ("o" * 300), says="too long")
    assert target.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "source"]


def test_output_where_the_shell_stands(
    refused: Cli, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for place in (".", "", "../here"):
        refused(2, "quantize", source, "-o", place, says="name another")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "source"]


def test_output_in_use(refused: Cli, source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "notes.txt").write_text("mine")
    refused(2, "quantize", source, "-o", output, says="--overwrite")
    refused(2, "quantize", source, "-o", output, "--overwrite", says="w3pack.json")
    for manifest in ("", "[]", "{}", '{"producer": "another"}'):
        (output / "w3pack.json").write_text(manifest)
        refused(2, "quantize", source, "-o", output, "--overwrite", says="w3pack.json")
    assert (output / "notes.txt").read_text() == "mine"
    assert not list(tmp_path.glob(".*"))


def test_resume_without_unfinished_work(nothing_written: Cli, source: Path) -> None:
    nothing_written(2, source, "--resume", says="without --resume")


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("--group-size", "0"),
        ("--group-size", "63"),
        ("--group-size", "100"),
        ("--group-size", "-64"),
        ("--group-size", "x"),
        ("--groupsize", "64"),
        ("--layout", "sparse"),
        ("--qmap", "nf5"),
        ("--qmap", "[0, 1, 2, 3, 4, 5, 6, 7]" + " " * 300),
        ("--qmap", "~no-such-user/x.json"),
        ("--qmap", "nf3", "--qmap-per", "row"),
        ("--qmap-dtype", "int4"),
        ("--max-shard-size", "0"),
        ("--max-shard-size", "abc"),
        ("--max-shard-size", "-5GB"),
        ("--max-shard-size", "9" * 400),
        ("--seed", "9" * 30),
        ("--seed", "-1"),
        ("--min-coverage", "nan"),
        ("--min-coverage", "1.5"),
        ("--device", "tpu"),
        ("--device", "cuda:99"),
        ("--workers", "0"),
        ("--skip", ""),
        ("--only", " "),
        ("--skip", "re:("),
        ("--only", "re:*"),
        ("--skip", "re:nothing.*"),
        ("--only", "lm_head"),
        ("stray",),
        ("--only", UP, "--skip", UP),
    ],
)
def test_bad_option(nothing_written: Cli, source: Path, arguments: tuple[str, ...]) -> None:
    nothing_written(2, source, *arguments)


def test_group_larger_than_any_matrix(nothing_written: Cli, source: Path) -> None:
    nothing_written(2, source, "--group-size", 1 << 40, says="group size")


def test_skip_names_are_whole(nothing_written: Cli, source: Path) -> None:
    for option in ("--skip", "--only"):
        result = nothing_written(2, source, option, "model.layers.0.mlp.gate", says="near names")
        assert "model.layers.0.mlp.gate_proj" in result.err
        nothing_written(2, source, option, f"{UP}.weight", says=UP)
        nothing_written(2, source, option, "up_proj", says=option)


def test_misspelt_command_and_option_are_recognised(refused: Cli, source: Path, tmp_path: Path) -> None:
    refused(2, "quantise", source, says="'quantize'")
    refused(2, "quantize", source, "-o", tmp_path / "out", "--groupsize", "64", says="--group-size")
    refused(2, "quantize", source, says="--output")


def test_tied_head_is_not_quantised(nothing_written: Cli, tmp_path: Path, tiny: Any) -> None:
    tensors = tiny.tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tied = tiny.write(tmp_path / "tied", tensors, {**tiny.config, "tie_word_embeddings": True})
    nothing_written(2, tied, "--lm-head", says="tied")
    del tensors["lm_head.weight"]
    alone = tiny.write(tmp_path / "alone", tensors, {**tiny.config, "tie_word_embeddings": True})
    nothing_written(2, alone, "--lm-head", says="tied")


# --- map files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not json",
        "[1,2,3,4,5,6,7]",
        "[1,2,3,4,5,6,7,8,9]",
        '["1","2","3","4","5","6","7","8"]',
        "[NaN,2,3,4,5,6,7,8]",
        "[1,2,3,4,5,6,7,Infinity]",
        "[[1,2,3,4,5,6,7,8]]",
        "[true,2,3,4,5,6,7,8]",
        "[0,0,0,0,0,0,0,0]",
        "[1,1,2,3,4,5,6,7]",
        "7",
        "null",
        "[1,2,3,4,5,6,7,1" + "0" * 400 + "]",
        "[1,2,3,4,5,6,7,1" + "0" * 5000 + "]",
        '{"default": [1,2,3]}',
        '{"default": ' + "[" * 900 + "]" * 900 + "}",
        "[" * 1_000_000,
        '{"model.layers.7.mlp.up_proj": [1,2,3,4,5,6,7,8]}',
        '{"model.layers.0.mlp.gate": [1,2,3,4,5,6,7,8]}',
    ],
)
def test_bad_map_file(nothing_written: Cli, source: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "map.json").write_text(text)
    nothing_written(2, source, "--qmap", tmp_path / "map.json")


def test_map_file_of_a_gigabyte(refused: Cli, source: Path, tmp_path: Path) -> None:
    with (tmp_path / "map.json").open("wb") as file:
        file.write(b"[" * 1000)
        file.truncate(1 << 30)  # sparse
    refused(2, "quantize", source, "-o", tmp_path / "out", "--qmap", tmp_path / "map.json", says="MiB")


def test_map_path_that_is_a_folder_or_pipe(nothing_written: Cli, source: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    nothing_written(2, source, "--qmap", tmp_path / "folder")


# --- tensors whose names mean something else ------------------------------------------------------------------------


@pytest.mark.parametrize("name", [f"{UP}.codes", f"{UP}.qmap", "audio.codebook.codes"])
def test_source_tensor_named_like_a_packed_one(nothing_written: Cli, tmp_path: Path, name: str, tiny: Any) -> None:
    """The output could not be opened again, after hours of work."""
    source = tiny.write(tmp_path / "source", {**tiny.tensors(), name: torch.ones(3)}, tiny.config)
    nothing_written(3, source, "--only", "model.layers.0.mlp.up_proj", says=name)


@pytest.mark.parametrize(
    "name",
    ["[/red]", "model.[bold]x", "a\x1b[31mb", "a\nb", "\u202eabc", "../../etc/passwd", "a b", "é" * 60, "a" * 3000, ""],
)
def test_tensor_with_a_weird_name_survives(cli: Cli, tmp_path: Path, name: str, tiny: Any) -> None:
    extra = torch.arange(3.0)
    source = tiny.write(tmp_path / "source", {**tiny.tensors(), name: extra}, tiny.config)
    shown = cli("quantize", source, "-o", tmp_path / "out", "--dry-run")
    assert shown.code == 0, shown.err
    assert "\x1b" not in shown.out
    assert "\u202e" not in shown.out
    done = cli("quantize", source, "-o", tmp_path / "out", "--only", UP, "--qmap", "nf3")
    assert done.code == 0, done.err
    assert torch.equal(load_file(tmp_path / "out" / WEIGHTS)[name], extra)
    assert cli("verify", tmp_path / "out", "--against", source).code == 0
    assert cli("inspect", tmp_path / "out", "--layers").code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_hostile_name_in_a_message_stays_on_one_line(nothing_written: Cli, tmp_path: Path, tiny: Any) -> None:
    name = "a\nw3pack: all is well\x1b[2J"
    source = tiny.write(tmp_path / "source", {**tiny.tensors(), name: torch.tensor([float("nan")])}, tiny.config)
    result = nothing_written(4, source, "--only", UP)
    assert "\x1b" not in result.err
