"""What the commands print, where, and what they write when all is well."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from w3pack.cli import app as app_module
from w3pack.cli import quantize as quantize_command
from w3pack.errors import (
    CheckpointError,
    ResourceError,
    UnsupportedError,
    UsageError,
    VerificationError,
    W3PackError,
)

Cli = Callable[..., Any]
COMMANDS = ("quantize", "inspect", "verify", "eval", "generate", "bench", "tune", "doctor", "autoload")
UP = "model.layers.0.mlp.up_proj"
INDEX = "model.safetensors.index.json"
FAST = ("--only", UP, "--qmap", "nf3")


@pytest.fixture(scope="session")
def packed(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole model, packed with learned maps. Read it, never write to it."""
    output = tmp_path_factory.mktemp("packed") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["w3pack", "quantize", str(pristine), "-o", str(output), "-q"])
        with pytest.raises(SystemExit) as stop:
            app_module.main()
    assert stop.value.code == 0
    return output


# --- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(cli: Cli, command: str) -> None:
    result = cli(command, "--help")
    assert result.code == 0
    assert result.err == ""
    words = " ".join(result.out.split())
    assert "Example:" in words
    assert f"w3pack {command}" in words.split("Example:")[1]


def test_help_names_every_command(cli: Cli) -> None:
    result = cli("--help")
    assert result.code == 0
    for command in COMMANDS:
        assert command in result.out
    assert cli("--version").out.strip().count(".") == 2
    assert cli().code == 2


def test_results_on_stdout_and_nothing_on_stderr(cli: Cli, pristine: Path, packed: Path, tmp_path: Path) -> None:
    for arguments in (
        ("quantize", pristine, "-o", tmp_path / "a", *FAST),
        ("quantize", pristine, "-o", tmp_path / "b", *FAST, "--json"),
        ("quantize", pristine, "-o", tmp_path / "c", "--dry-run"),
        ("inspect", packed),
        ("inspect", packed, "--layers"),
        ("inspect", packed, "--json"),
        ("verify", packed),
        ("verify", packed, "--json"),
        ("verify", packed, "--against", pristine),
    ):
        result = cli(*arguments)
        assert result.code == 0, result.err
        assert result.out.strip()
        assert result.err == "", arguments
        if "--json" in arguments:
            assert isinstance(result.json, dict)


@pytest.mark.parametrize(("flags", "bar"), [((), True), (("-q",), False), (("--json",), False)])
def test_bar_only_where_somebody_looks(
    cli: Cli, pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], bar: bool
) -> None:
    assert cli("quantize", pristine, "-o", tmp_path / "silent", *FAST, *flags).err == ""
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda _: True, raising=False)
    result = cli("quantize", pristine, "-o", tmp_path / "out", *FAST, *flags)
    assert result.code == 0
    assert ("%|" in result.err) == bar
    assert "%|" not in result.out


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (W3PackError("sentence"), 1),
        (UsageError("sentence"), 2),
        (UnsupportedError("sentence"), 3),
        (CheckpointError("sentence"), 4),
        (ResourceError("sentence"), 5),
        (VerificationError("sentence"), 6),
        (MemoryError(), 5),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"), 5),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried"), 5),
        (OSError(28, "No space left on device", "/somewhere"), 5),
        (OSError(24, "Too many open files"), 5),
        (KeyboardInterrupt(), 130),
        (RuntimeError("two\nlines \x1b[2J"), 1),
        (KeyError("x"), 1),
        (RecursionError("deep"), 1),
    ],
)
def test_exit_code_of_each_failure(
    refused: Cli, pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("w3pack.pipeline.quantize_model.run", fail)
    result = refused(code, "quantize", pristine, "-o", tmp_path / "out")
    assert "\x1b" not in result.err
    assert ("W3PACK_LOG=debug" in result.err) == (code == 1 and type(error) is not W3PackError)


def test_strange_log_level(cli: Cli, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for level in ("", "nonsense", "basic_format", "debug"):
        monkeypatch.setenv("W3PACK_LOG", level)
        assert cli("inspect", packed).code == 0


def test_reader_that_goes_away(cli: Cli, pristine: Path, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del pristine
    closed: list[int] = []

    def broken(*_: object, **__: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("w3pack.cli.render.inspection", broken)
    monkeypatch.setattr("w3pack.cli.app.os.dup2", lambda _, to: closed.append(to))
    result = cli("inspect", packed)
    assert (result.code, result.err, closed) == (0, "", [1])


def test_commands_stay_thin() -> None:
    """House rule: a command is a translation of options, and what it calls a notebook can call too."""
    for name in COMMANDS:
        source = Path(quantize_command.__file__).with_name(f"{name}.py").read_text()
        assert len(source.splitlines()) < 85, name


# --- what is written -------------------------------------------------------------------------------------------------


def test_dry_run_tells_what_the_run_writes(cli: Cli, pristine: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    arguments = ("quantize", pristine, "-o", output, "--max-shard-size", "100KB", "--qmap", "nf3", "--json")
    plan = cli(*arguments, "--dry-run").json
    assert not list(tmp_path.iterdir())
    report = cli(*arguments).json
    files = {path.name: load_file(path) for path in sorted(output.glob("*.safetensors"))}
    assert {name: sum(t.nbytes for t in tensors.values()) for name, tensors in files.items()} == plan["shards"]
    stored = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
    total = sum(tensor.nbytes for tensor in stored.values())
    copied = sum((pristine / name).stat().st_size for name in plan["copied_files"])
    assert plan["output_bytes"] - copied == total == report["output_bytes"]
    for entry in plan["tensors"]:
        if entry["action"] == "copy":
            assert entry["output_bytes"] == stored[entry["name"]].nbytes
        else:
            module = entry["name"].removesuffix(".weight")
            parts = [stored[f"{module}.{part}"].nbytes for part in ("codes", "scales", "qmap")]
            assert entry["output_bytes"] == sum(parts)
            rows, columns = entry["shape"]
            assert entry["bits_per_weight"] == pytest.approx(8 * sum(parts) / (rows * columns))
    for key in ("weights", "bits_per_weight", "coverage", "source_bytes"):
        assert plan[key] == report[key]


@pytest.mark.parametrize("size", ["1B", "50KB", "200kb", "1 GiB", "5GB", "300000"])
def test_any_number_of_output_files(cli: Cli, pristine: Path, tmp_path: Path, size: str) -> None:
    output = tmp_path / "out"
    assert cli("quantize", pristine, "-o", output, *FAST, "--max-shard-size", size).code == 0
    files = sorted(output.glob("*.safetensors"))
    if size in ("1 GiB", "5GB"):
        assert [path.name for path in files] == ["model.safetensors"]
        assert not (output / INDEX).exists()
    else:
        index = json.loads((output / INDEX).read_text())
        found = {name: path.name for path in files for name in load_file(path)}
        assert index["weight_map"] == found
        total = sum(tensor.nbytes for path in files for tensor in load_file(path).values())
        assert index["metadata"]["total_size"] == total
        assert [path.name for path in files] == [
            f"model-{number + 1:05d}-of-{len(files):05d}.safetensors" for number in range(len(files))
        ]
        if size == "1B":  # every tensor in a file of its own, but the three of a Linear stay together
            assert len(files) == len(load_file(pristine / "model.safetensors"))
        else:
            assert 2 < len(files) < 15
    assert cli("verify", output, "--against", pristine).code == 0


@pytest.mark.parametrize("shards", [False, True])
def test_it_loads(cli: Cli, pristine: Path, tmp_path: Path, shards: bool) -> None:
    import transformers

    output = tmp_path / "out"
    options = ("--max-shard-size", "60KB") if shards else ()
    assert cli("quantize", pristine, "-o", output, "--qmap", "nf3", *options).code == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(output)
    with torch.no_grad():
        logits = model(torch.tensor([[1, 5, 7]])).logits
    assert bool(torch.isfinite(logits).all())
    assert float(logits.float().std()) > 1e-3


def test_other_files_are_copied_byte_for_byte(cli: Cli, pristine: Path, tmp_path: Path, tiny: Any) -> None:
    source = Path(shutil.copytree(pristine, tmp_path / "source"))
    kept = {
        "generation_config.json": b'{"eos_token_id": 2}',
        "tokenizer.json": bytes(range(256)) * 40_000,  # larger than one piece of the copy
        "chat_template.jinja": "{{ 'é' }}\r\n".encode(),
        "preprocessor_config.json": b"{}",
        "modeling_own.py": b"raise SystemExit(3)\n",
        "LICENSE": b"free",
        "empty.txt": b"",
        "journal.json": b"the source's own",
        "notes.partial": b"half",
        "back\\slash.txt": b"legal here",
        "deep/er/config.json": b"{}",
        "deep/er/w3pack.json": b"{}",
        "deep/tokenizer.model": b"\0\1\2",
    }
    left = [
        "pytorch_model.bin", "pytorch_model.bin.index.json", "flax_model.msgpack", "tf_model.h5", "model.gguf",
        "onnx/model.onnx", "onnx/model.onnx_data", "rust_model.ot", "original/consolidated.00.PTH", "training_args.bin",
        "adapter.safetensors", "state.pkl", ".gitattributes", ".git/config", ".cache/x.json", "quantize_config.json",
        "quant_config.json", "hf_quant_config.json", "__pycache__/modeling_own.cpython-311.pyc",
    ]  # fmt: skip
    for name, data in {**kept, **dict.fromkeys(left, b"x")}.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)
    (source / "w3pack.json").write_bytes(b"a stale manifest")
    output = tmp_path / "out"
    result = cli("quantize", source, "-o", output, *FAST)
    assert result.code == 0, result.err
    ours = {"config.json", "model.safetensors", "w3pack.json"}
    assert {name for name in tiny.snapshot(output) if name not in ours} == set(kept)
    for name, data in kept.items():
        assert (output / name).read_bytes() == data
    assert json.loads((output / "w3pack.json").read_text())["producer"] == "w3pack"


def test_the_hubs_cache_is_made_of_links(cli: Cli, pristine_shards: Path, tmp_path: Path, tiny: Any) -> None:
    blobs, snapshots = tmp_path / "blobs", tmp_path / "snapshots" / "0123abc"
    blobs.mkdir()
    snapshots.mkdir(parents=True)
    for number, path in enumerate(sorted(pristine_shards.iterdir())):
        shutil.copy(path, blobs / f"{number:040x}")
        (snapshots / path.name).symlink_to(f"../../blobs/{number:040x}")
    (blobs / "t").write_bytes(b"{}")
    (snapshots / "tokenizer.json").symlink_to("../../blobs/t")
    assert cli("quantize", snapshots, "-o", tmp_path / "linked", *FAST).code == 0
    assert cli("quantize", pristine_shards, "-o", tmp_path / "plain", *FAST).code == 0
    linked, plain = tiny.snapshot(tmp_path / "linked"), tiny.snapshot(tmp_path / "plain")
    assert linked["model.safetensors"] == plain["model.safetensors"]
    assert not (tmp_path / "linked" / "tokenizer.json").is_symlink()
    assert set(linked) - set(plain) == {"tokenizer.json"}


def test_output_behind_a_link(cli: Cli, pristine: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk/real")
    for extra in ((), ("--overwrite",)):
        assert cli("quantize", pristine, "-o", tmp_path / "out", *FAST, *extra).code == 0
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "disk" / "real" / "w3pack.json").exists()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["real"]


def test_output_folders_are_made(cli: Cli, pristine: Path, tmp_path: Path) -> None:
    assert cli("quantize", pristine, "-o", tmp_path / "a" / "b" / "c", *FAST).code == 0
    (tmp_path / "empty").mkdir()
    assert cli("quantize", pristine, "-o", tmp_path / "empty", *FAST).code == 0
    assert (tmp_path / "empty" / "w3pack.json").exists()


def test_overwrite_replaces_what_w3pack_wrote(
    cli: Cli, refused: Cli, pristine: Path, tmp_path: Path, tiny: Any
) -> None:
    output = tmp_path / "out"
    assert cli("quantize", pristine, "-o", output, *FAST, "--max-shard-size", "1B").code == 0
    before = tiny.snapshot(output)
    refused(2, "quantize", pristine, "-o", output, *FAST, says="--overwrite")
    assert tiny.snapshot(output) == before
    assert cli("quantize", pristine, "-o", output, *FAST, "--overwrite").code == 0
    assert [path.name for path in output.glob("*.safetensors")] == ["model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_packed_source_is_refused(refused: Cli, packed: Path, tmp_path: Path) -> None:
    refused(3, "quantize", packed, "-o", tmp_path / "out", says="packed already")
    refused(3, "verify", packed, "--against", packed, says="packed already")
    (tmp_path / "copy").mkdir()
    shutil.copytree(packed, tmp_path / "copy", dirs_exist_ok=True)
    config = json.loads((packed / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "copy" / "config.json").write_text(json.dumps(config))
    refused(3, "quantize", tmp_path / "copy", "-o", tmp_path / "out")


# --- selection and maps ----------------------------------------------------------------------------------------------


def quantised(output: Path) -> set[str]:
    """Modules that a checkpoint says are packed."""
    return set(json.loads((output / "config.json").read_text())["quantization_config"]["modules"])


def test_skip_and_only(cli: Cli, pristine: Path, tmp_path: Path) -> None:
    both = [f"model.layers.{layer}.mlp.{name}_proj" for layer in (0, 1) for name in ("gate", "up", "down")]
    for number, (arguments, expected) in enumerate(
        (
            (("--only", both[0], "--only", both[4]), {both[0], both[4]}),
            (("--only", r"re:.*\.mlp\..*"), set(both)),
            (
                ("--only", r"re:.*\.mlp\..*", "--skip", both[1], "--skip", r"re:.*down_proj"),
                {both[0], both[3], both[4]},
            ),
            (("--only", f" {both[0]} "), {both[0]}),
            (("--only", both[0], "--skip", "lm_head"), {both[0]}),  # kept anyway: skipping it asks for nothing else
        )
    ):
        result = cli("quantize", pristine, "-o", tmp_path / str(number), "--qmap", "nf3", *arguments)
        assert result.code == 0, result.err
        assert quantised(tmp_path / str(number)) == expected
        kept = json.loads((tmp_path / str(number) / "w3pack.json").read_text())["kept"]
        assert not set(kept) & {f"{name}.weight" for name in expected}


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_nested_language_model(cli: Cli, tmp_path: Path, tiny: Any, prefix: str) -> None:
    """Gemma 3 with a vision tower: names as new and as old checkpoints write them, and as they are written again."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {**tiny.config, "model_type": "gemma3_text", "sliding_window": 8, "query_pre_attn_scalar": 30}
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config={key: value for key, value in text.items() if key != "architectures"},
        vision_config={**vision, "model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    )
    torch.manual_seed(0)
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    old = (
        "model.language_model."
        if any(name.startswith("model.language_model.") for name in saved)
        else "language_model.model."
    )
    tensors = {name.replace(old, prefix): tensor for name, tensor in saved.items()}
    source = tiny.write(tmp_path / "source", tensors, json.loads((tmp_path / "saved" / "config.json").read_text()))
    result = cli("quantize", source, "-o", tmp_path / "out", "--qmap", "nf3")
    assert result.code == 0, result.err
    names = {name for name in tensors if name.startswith(prefix) and name.endswith("_proj.weight")}
    assert len(names) == 14
    assert quantised(tmp_path / "out") == {name.removesuffix(".weight") for name in names}
    tower = next(name for name in tensors if name.endswith("mlp.fc1.weight"))
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[tower], tensors[tower])
    assert "100.0%" in result.out
    loaded = Gemma3ForConditionalGeneration.from_pretrained(tmp_path / "out")
    assert sum(type(module).__name__ == "W3Linear" for module in loaded.modules()) == len(names)


def test_a_pattern_matches_the_whole_name(refused: Cli, pristine: Path, tmp_path: Path) -> None:
    refused(2, "quantize", pristine, "-o", tmp_path / "out", "--only", "re:mlp", says="got no match")


def test_lm_head_on_request(cli: Cli, pristine: Path, tmp_path: Path) -> None:
    options = ("--qmap", "nf3", "--only", UP, "--only", "lm_head")
    assert cli("quantize", pristine, "-o", tmp_path / "out", *options, "--lm-head").code == 0
    assert quantised(tmp_path / "out") == {UP, "lm_head"}
    assert cli("verify", tmp_path / "out", "--against", pristine).code == 0


def test_named_map(cli: Cli, pristine: Path, tmp_path: Path) -> None:
    assert cli("quantize", pristine, "-o", tmp_path / "out", *FAST).code == 0
    found = cli("inspect", tmp_path / "out", "--json").json["modules"][UP]
    assert found["qmap_origin"] == "nf3"
    assert found["maps"] == 1
    assert len(set(found["first_map"])) == 8


def test_map_for_each_module_with_a_default(cli: Cli, pristine: Path, tmp_path: Path) -> None:
    own = [-127, -90, -50, -20, 0, 30, 80, 127]
    default = [-1, -0.75, -0.5, -0.25, 0, 0.25, 0.5, 1]
    (tmp_path / "maps.json").write_text(json.dumps({UP: own[::-1], "default": default}))
    down = "model.layers.0.mlp.down_proj"
    options = ("--only", UP, "--only", down, "--qmap", tmp_path / "maps.json")
    assert cli("quantize", pristine, "-o", tmp_path / "out", *options).code == 0
    found = cli("inspect", tmp_path / "out", "--json").json["modules"]
    assert {entry["qmap_dtype"] for entry in found.values()} == {"float16"}  # -0.75 is not on the int8 grid
    assert found[down]["first_map"] == default
    assert found[UP]["first_map"] == pytest.approx([value / 127 for value in own], abs=1e-3)
    assert {entry["qmap_origin"] for entry in found.values()} == {"maps.json"}
    (tmp_path / "maps.json").write_text(json.dumps({UP: own}))
    assert cli("quantize", pristine, "-o", tmp_path / "part", *options).code == 0
    found = cli("inspect", tmp_path / "part", "--json").json["modules"]
    assert found[UP]["first_map"] == own
    assert (found[UP]["qmap_origin"], found[down]["qmap_origin"]) == ("maps.json", "learned")


# --- verify ----------------------------------------------------------------------------------------------------------


def test_flipped_bit_of_data_is_found_by_name(refused: Cli, packed: Path, tmp_path: Path) -> None:
    raw = (packed / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    for name in (
        f"{UP}.codes",
        f"{UP}.scales",
        f"{UP}.qmap",
        "model.norm.weight",
        "model.layers.0.self_attn.q_proj.codes",
    ):
        folder = Path(shutil.copytree(packed, tmp_path / name))
        damaged = bytearray(raw)
        damaged[start + header[name]["data_offsets"][1] - 1] ^= 0x04
        (folder / "model.safetensors").write_bytes(damaged)
        refused(6, "verify", folder, says=name)


def test_every_flipped_bit_of_a_packed_header_is_found(cli: Cli, packed: Path, tmp_path: Path) -> None:
    raw = (packed / "model.safetensors").read_bytes()
    stop = raw.index(b"}", raw.index(b"data_offsets", raw.index(b"__metadata__") + 30))  # length and first entries
    folder = Path(shutil.copytree(packed, tmp_path / "damaged"))
    start = raw.index(b'},"') + 2  # __metadata__ itself may hold anything
    for position in (*range(8), *range(start, stop, 3)):
        damaged = bytearray(raw)
        damaged[position] ^= 1 << position % 7
        (folder / "model.safetensors").write_bytes(damaged)
        result = cli("verify", folder)
        assert result.code in ((4,) if position < 8 else (4, 6)), (position, result.out, result.err)


def test_kept_tensor_of_another_dtype(refused: Cli, packed: Path, tmp_path: Path) -> None:
    """Same bytes, same digest, other numbers."""
    folder = Path(shutil.copytree(packed, tmp_path / "damaged"))
    raw = (folder / "model.safetensors").read_bytes()
    at = raw.index(b'"BF16"', raw.index(b'"model.norm.weight"'))
    (folder / "model.safetensors").write_bytes(raw[:at] + b'"I16" ' + raw[at + 6 :])
    refused(6, "verify", folder, says="model.norm.weight")


def test_truncated_or_incomplete_packed_checkpoint(refused: Cli, packed: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(packed, tmp_path / "damaged"))
    raw = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(raw[:-1])
    for command in ("verify", "inspect"):
        refused(4, command, folder, says="model.safetensors")
    (folder / "model.safetensors").unlink()
    refused(4, "verify", folder)


def test_verify_against_another_model(
    cli: Cli, refused: Cli, packed: Path, pristine: Path, tmp_path: Path, tiny: Any
) -> None:
    others = {
        "other weights": tiny.write(tmp_path / "a", tiny.tensors(seed=1), tiny.config),
        "fewer layers": tiny.write(tmp_path / "b", tiny.tensors(layers=1), {**tiny.config, "num_hidden_layers": 1}),
    }
    shape = tiny.tensors()
    shape["model.layers.1.mlp.up_proj.weight"] = torch.ones(100, 128)
    others["another shape"] = tiny.write(tmp_path / "c", shape, tiny.config)
    stack = tiny.tensors()
    stack["model.layers.1.mlp.up_proj.weight"] = torch.ones(2, 100, 128)
    others["no matrix"] = tiny.write(tmp_path / "d", stack, tiny.config)
    for other in others.values():
        result = refused(6, "verify", packed, "--against", other)
        assert "model.layers." in result.err
    assert cli("verify", packed, "--against", pristine).code == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest.update(tensors=[]),
        lambda manifest: manifest.update(modules={UP: 5}),
        lambda manifest: manifest["tensors"].update({"model.norm.weight": "x"}),
        lambda manifest: manifest.update(coverage="all"),
        lambda manifest: manifest.update(kept=[1]),
    ],
)
def test_damaged_manifest(refused: Cli, packed: Path, tmp_path: Path, change: Callable[[Any], None]) -> None:
    folder = Path(shutil.copytree(packed, tmp_path / "damaged"))
    manifest = json.loads((folder / "w3pack.json").read_text())
    change(manifest)
    (folder / "w3pack.json").write_text(json.dumps(manifest))
    for command in ("inspect", "verify"):
        refused(4, command, folder, says="w3pack.json")


def test_copy_without_a_manifest(cli: Cli, packed: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(packed, tmp_path / "copy"))
    (folder / "w3pack.json").unlink()
    result = cli("verify", folder)
    assert result.code == 0
    assert "no w3pack.json" in result.out
    assert cli("inspect", folder, "--layers").code == 0


# --- inspect ---------------------------------------------------------------------------------------------------------


def test_inspect_and_verify_agree(cli: Cli, packed: Path, pristine: Path) -> None:
    found = cli("inspect", packed, "--json").json
    measured = cli("verify", packed, "--against", pristine, "--json").json
    assert measured["ok"] is True
    assert set(found["modules"]) == set(measured["errors"])
    for name, entry in found["modules"].items():
        assert entry["relative_error"] == pytest.approx(measured["errors"][name], rel=1e-6)
        assert 0.05 < entry["relative_error"] < 0.3
    stored = load_file(packed / "model.safetensors")
    assert found["bytes"] == sum(tensor.nbytes for tensor in stored.values())
    assert measured["digests"] == measured["tensors"] == len(stored)


def test_report_for_people_has_the_same_figures(cli: Cli, packed: Path) -> None:
    result = cli("inspect", packed, "--layers")
    for name in quantised(packed):
        assert name in result.out
    assert "Tensor parallel" in result.out
