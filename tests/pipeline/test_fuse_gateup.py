"""Fusing and splitting again: random checkpoints with awkward sizes, every scale dtype, and files cut anywhere."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from w3pack.checkpoint.safetensors_source import SafetensorsSource
from w3pack.checkpoint.tensor_file import read_header
from w3pack.errors import CheckpointError, UnsupportedError, VerificationError, W3PackError
from w3pack.format.gateup import METADATA_KEY, GateUpConfig
from w3pack.pipeline.fuse_gateup import FuseReport, prepare_fuse, run_fuse
from w3pack.pipeline.fuse_plan import FuseOptions
from w3pack.pipeline.fused import inspect_fused, verify_fused
from w3pack.pipeline.split_gateup import prepare_split, run_split
from w3pack.quantize.fp8_blocks import quantize_fp8_blocks

E4M3 = torch.float8_e4m3fn
SCALE_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.uint8]
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
MLP = "model.layers.0.mlp"


def fp8(rows: int, columns: int, *, seed: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """A finite random E4M3 matrix and its grid."""
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(rows, columns, generator=generator) * 60).to(E4M3)
    shape = (-(-rows // 128), -(-columns // 128))
    if dtype in (torch.uint8, torch.float8_e8m0fnu):
        return weight, torch.randint(0, 255, shape, dtype=torch.uint8, generator=generator).view(dtype)
    return weight, (torch.rand(shape, generator=generator) + 0.01).to(dtype)


def pair(at: str, rows: int, columns: int, *, seed: int, dtype: torch.dtype = torch.float32, leaves: Any = None) -> Any:
    """Tensors of an MLP's gate and up."""
    tensors = {}
    for number, leaf in enumerate(leaves or ("gate_proj", "up_proj")):
        weight, scales = fp8(rows, columns, seed=seed + number, dtype=dtype)
        tensors |= {f"{at}.{leaf}.weight": weight, f"{at}.{leaf}.weight_scale_inv": scales}
    return tensors


def write(folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], *, file_of: Any = None) -> Path:
    """A checkpoint whose tensors lie in the files that `file_of` names, or in one."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    if file_of is None:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        files.setdefault(file_of[name], {})[name] = tensor
    for file, part in files.items():
        save_file(part, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    return folder


def contents(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Tensor -> dtype, shape and bytes."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        raw = file.read_bytes()
        for name, stored in read_header(file).items():
            assert name not in found
            found[name] = (stored.info.dtype, stored.info.shape, raw[stored.start : stored.stop])
    return found


def fuse(source: Path, output: Path, **options: bool) -> FuseReport:
    return run_fuse(prepare_fuse(SafetensorsSource(source), FuseOptions(**options)), output)


def split(folder: Path, output: Path) -> Path:
    run_split(prepare_split(folder), output)
    return output


def weight_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@settings(max_examples=25, deadline=None)
@given(data=st.data(), keep_names=st.booleans())
def test_what_is_fused_is_the_sources_bytes_and_comes_back(data: st.DataObject, keep_names: bool) -> None:
    sizes = st.sampled_from([1, 3, 64, 127, 128, 129, 192, 260])
    tensors: dict[str, torch.Tensor] = {"model.embed_tokens.weight": torch.randn(5, 3).bfloat16()}
    shapes = {}
    for layer in range(data.draw(st.integers(1, 3))):
        rows, columns = data.draw(sizes), data.draw(sizes)
        at = f"model.layers.{layer}.mlp"
        tensors |= pair(at, rows, columns, seed=10 * layer, dtype=data.draw(st.sampled_from(SCALE_DTYPES)))
        weight, scales = fp8(columns, rows, seed=99 + layer)
        tensors |= {f"{at}.down_proj.weight": weight, f"{at}.down_proj.weight_scale_inv": scales}
        shapes[at] = (rows, columns)
    files = [f"part-{number}.safetensors" for number in range(data.draw(st.integers(1, 4)))]
    file_of = {name: data.draw(st.sampled_from(files)) for name in tensors}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        source = write(root / "source", tensors, {"quantization_config": FP8}, file_of=file_of)
        report = fuse(source, root / "out", keep_names=keep_names)
        assert report.pairs == len(shapes)
        assert report.weight_bytes_delta == 0
        before, after = contents(source), contents(root / "out")
        if keep_names:
            assert before == after
            check_adjacent(root / "out", list(shapes))
        else:
            check_fused(before, after, shapes)
        back = split(root / "out", root / "back")
        assert contents(back) == before
        assert weight_files(back) == weight_files(source)
        assert json.loads((back / "config.json").read_text()) == {"quantization_config": FP8}
        assert (back / "tokenizer.json").read_text() == "{}"


def check_fused(before: Any, after: Any, shapes: Mapping[str, tuple[int, int]]) -> None:
    used = set()
    for at, (rows, columns) in shapes.items():
        halves = [f"{at}.{leaf}" for leaf in ("gate_proj", "up_proj")]
        dtype, shape, data = after[f"{at}.gate_up_proj.weight"]
        assert (dtype, shape) == ("F8_E4M3", (2 * rows, columns))
        assert data == before[f"{halves[0]}.weight"][2] + before[f"{halves[1]}.weight"][2]
        dtype, shape, data = after[f"{at}.gate_up_proj.weight_scale_inv"]
        assert (dtype, shape) == ("F32", (2 * -(-rows // 128), -(-columns // 128)))
        meant = [value_of(before[f"{half}.weight_scale_inv"]) for half in halves]
        assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.float32).double(), torch.cat(meant))
        used |= {f"{half}.{part}" for half in halves for part in ("weight", "weight_scale_inv")}
        used |= {f"{at}.gate_up_proj.{part}" for part in ("weight", "weight_scale_inv")}
    assert {name: entry for name, entry in after.items() if name not in used} == {
        name: entry for name, entry in before.items() if name not in used
    }
    guard = [name for name in used & set(after) if name.endswith("gate_proj.weight")]
    assert len(guard) == 1
    assert after[guard[0]][0] == "U8"


def value_of(entry: tuple[str, tuple[int, ...], bytes]) -> torch.Tensor:
    """Scales as float64; e8m0 by its definition."""
    dtypes = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    if entry[0] in dtypes:
        return torch.frombuffer(bytearray(entry[2]), dtype=dtypes[entry[0]]).double()
    return 2.0 ** (torch.frombuffer(bytearray(entry[2]), dtype=torch.uint8).double() - 127)


def check_adjacent(folder: Path, mlps: list[str]) -> None:
    listed: dict[str, list[str]] = {}
    headers: dict[str, Any] = {}
    for file in folder.glob("*.safetensors"):
        headers |= read_header(file)
        with safe_open(file, framework="pt") as opened:
            listed |= json.loads((opened.metadata() or {}).get(METADATA_KEY, "{}"))
    assert set(listed) == {f"{at}.gate_up_proj" for at in mlps}
    for gate, up, gate_scales, up_scales in listed.values():
        assert headers[gate].stop == headers[up].start
        assert headers[gate_scales].stop == headers[up_scales].start
        assert headers[gate].info.file == headers[up].info.file


def test_residency_and_alignment(tmp_path: Path) -> None:
    """float32 scales: not a byte more than before, the guard aside; and every tensor aligned for a memory map."""
    tensors = {"model.norm.weight": torch.ones(3).bfloat16(), **pair(MLP, 131, 7, seed=0)}
    source = write(tmp_path / "source", tensors, {"quantization_config": FP8})
    report = fuse(source, tmp_path / "out")
    before, after = (sum(len(entry[2]) for entry in contents(tmp_path / name).values()) for name in ("source", "out"))
    assert (report.weight_bytes_delta, report.scale_bytes_delta, report.load_transient_bytes) == (0, 0, 0)
    assert after == before + report.guard_bytes == report.output_bytes
    for stored in read_header(tmp_path / "out" / "model.safetensors").values():
        assert stored.start % {"F32": 4, "BF16": 2}.get(stored.info.dtype, 1) == 0
    narrow = write(tmp_path / "narrow", pair(MLP, 131, 7, seed=0, dtype=torch.bfloat16), {"quantization_config": FP8})
    assert fuse(narrow, tmp_path / "wide").scale_bytes_delta == 2 * 2 * 2  # said, not hidden: 2 grids of 2 scales


def declined_of(tmp_path: Path, tensors: Mapping[str, torch.Tensor], config: Any = None, **options: bool) -> Any:
    """What is said of the pair of layer 0 when another pair can be fused."""
    whole = {**tensors, **pair("model.layers.1.mlp", 4, 4, seed=50)}
    source = write(tmp_path / "source", whole, {"model_type": "llama", "quantization_config": FP8, **(config or {})})
    report = fuse(source, tmp_path / "out", **options)
    after = contents(tmp_path / "out")
    assert all(name in after for name in tensors)
    split(tmp_path / "out", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)
    return report.declined


def test_pairs_that_are_left_alone_pair_by_pair(tmp_path: Path) -> None:
    good = pair(MLP, 200, 130, seed=0)
    bf16 = torch.randn(200, 130).bfloat16()
    cases: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
        "mixed": ({**good, f"{MLP}.up_proj.weight": bf16}, {}, "mixed precision"),
        "floats": ({f"{MLP}.gate_proj.weight": bf16, f"{MLP}.up_proj.weight": bf16.clone()}, {}, "not FP8"),
        "alone": ({f"{MLP}.gate_proj.weight": good[f"{MLP}.gate_proj.weight"][:128, :128].clone(),
                   f"{MLP}.gate_proj.weight_scale_inv": torch.ones(1, 1)}, {}, "no up_proj"),
        "bias": ({**good, f"{MLP}.up_proj.bias": torch.ones(200)}, {}, "bias"),
        "static": ({**good, f"{MLP}.gate_proj.input_scale": torch.ones(1)}, {}, "input_scale"),
        "listed": (good, {"modules_to_not_convert": ["layers.0.mlp"]}, "list of modules"),
    }  # fmt: skip
    for name, (tensors, more, says) in cases.items():
        if name == "mixed":
            del tensors[f"{MLP}.up_proj.weight_scale_inv"]
        declined = declined_of(tmp_path / name, tensors, {"quantization_config": {**FP8, **more}})
        assert list(declined) == [f"{MLP}.gate_up_proj"], name
        assert says in declined[f"{MLP}.gate_up_proj"]


def test_per_tensor_scales_are_left_alone_where_names_are_kept(tmp_path: Path) -> None:
    tensors = pair(MLP, 200, 130, seed=0)
    tensors |= {f"{MLP}.{leaf}.weight_scale_inv": torch.ones(1) for leaf in ("gate_proj", "up_proj")}
    assert "one scale" in declined_of(tmp_path / "a", tensors, keep_names=True)[f"{MLP}.gate_up_proj"]
    with pytest.raises(UnsupportedError, match=r"gate_proj\.weight .*--keep-names"):
        declined_of(tmp_path / "b", tensors)


def test_skip_entries_are_whole_segments(tmp_path: Path) -> None:
    """ "mlp.gate" is a router, and no part of "mlp.gate_proj"; "layers.1" is not "layers.11"."""
    tensors = {**pair("model.layers.11.mlp", 8, 8, seed=1), **pair(MLP, 8, 8, seed=2)}
    config = {"quantization_config": {**FP8, "modules_to_not_convert": ["mlp.gate", "lm_head", "model.layers.1"]}}
    assert fuse(write(tmp_path / "source", tensors, config), tmp_path / "out").pairs == 2


@pytest.mark.parametrize(("model_type", "known"), [("mixtral", True), ("minimax_m2", True), ("qwen", False)])
def test_w1_and_w3_only_where_the_family_is_known(tmp_path: Path, model_type: str, known: bool) -> None:
    at = "model.layers.0.block_sparse_moe.experts.3"
    tensors = {**pair(at, 130, 20, seed=3, leaves=("w1", "w3")), **pair(MLP, 8, 8, seed=2)}
    weight, scales = fp8(20, 130, seed=9)
    tensors |= {f"{at}.w2.weight": weight, f"{at}.w2.weight_scale_inv": scales}
    source = write(tmp_path / "source", tensors, {"model_type": model_type, "quantization_config": FP8})
    report = fuse(source, tmp_path / "out")
    assert (report.pairs, len(report.declined)) == ((2, 0) if known else (1, 1))
    after = contents(tmp_path / "out")
    assert (f"{at}.gate_up_proj.weight" in after) == known
    if known:
        assert after[f"{at}.gate_up_proj.weight"][2] == b"".join(
            tensors[f"{at}.{leaf}.weight"].view(torch.uint8).numpy().tobytes() for leaf in ("w1", "w3")
        )
    assert contents(split(tmp_path / "out", tmp_path / "back")) == contents(source)


def test_fused_already_is_copied(tmp_path: Path) -> None:
    weight, scales = fp8(2 * 130, 20, seed=0)
    tensors = {f"{MLP}.gate_up_proj.weight": weight, f"{MLP}.gate_up_proj.weight_scale_inv": scales}
    config = {"model_type": "phi3", "quantization_config": FP8}
    source = write(tmp_path / "source", tensors, config)
    report = fuse(source, tmp_path / "out")
    assert (report.pairs, report.fused_already, report.guard_bytes) == (0, 1, 0)
    assert contents(tmp_path / "out") == contents(source)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config
    assert contents(split(tmp_path / "out", tmp_path / "back")) == contents(source)


def test_interleaved_is_left_alone(tmp_path: Path) -> None:
    tensors = {"model.layers.0.mlp.experts.gate_up_proj": torch.ones(2, 4, 6).bfloat16()}
    source = write(tmp_path / "source", tensors, {"model_type": "gpt_oss"})
    with pytest.raises(UnsupportedError, match="interleaved"):
        fuse(source, tmp_path / "out", quantize=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("keep_names", [False, True])
def test_floats_are_quantised_half_by_half(tmp_path: Path, dtype: torch.dtype, keep_names: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    halves = {leaf: torch.randn(200, 130, generator=generator).to(dtype) for leaf in ("gate_proj", "up_proj")}
    tensors = {f"{MLP}.{leaf}.weight": tensor for leaf, tensor in halves.items()}
    tensors |= {f"{MLP}.down_proj.weight": torch.ones(130, 200, dtype=dtype)}
    source = write(tmp_path / "source", tensors, {"model_type": "llama"})
    with pytest.raises(UnsupportedError, match="--quantize"):
        fuse(source, tmp_path / "out")
    report = fuse(source, tmp_path / "out", quantize=True, keep_names=keep_names)
    assert report.quantized == 1
    assert report.worst_relative_error is not None
    assert 0.01 < report.worst_relative_error < 0.05
    back = contents(split(tmp_path / "out", tmp_path / "back"))
    for leaf, tensor in halves.items():
        packed, scales = quantize_fp8_blocks(tensor)
        assert back[f"{MLP}.{leaf}.weight"] == ("F8_E4M3", (200, 130), packed.view(torch.uint8).numpy().tobytes())
        assert back[f"{MLP}.{leaf}.weight_scale_inv"] == ("F32", (2, 2), scales.numpy().tobytes())
    entry = json.loads((tmp_path / "back" / "config.json").read_text())["quantization_config"]
    assert entry["quant_method"] == "fp8"
    assert entry["modules_to_not_convert"] == [f"{MLP}.down_proj"]


@pytest.mark.parametrize("part", ["weight", "weight_scale_inv"])
def test_nan_is_refused_by_name(tmp_path: Path, part: str) -> None:
    tensors = pair(MLP, 8, 8, seed=0)
    tensors[f"{MLP}.up_proj.{part}"].view(-1)[0] = float("nan")
    with pytest.raises(CheckpointError, match=rf"up_proj\.{part}"):
        fuse(write(tmp_path / "source", tensors, {"quantization_config": FP8}), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        ({"gate_proj.weight_scale_inv": None}, CheckpointError, "gate_proj.weight_scale_inv"),
        ({"gate_proj.weight_scale_inv": torch.ones(3, 2)}, CheckpointError, "of shape"),
        ({"gate_proj.weight_scale_inv": torch.ones(2, 2).double()}, CheckpointError, "F64"),
        ({"up_proj.weight": torch.ones(4, 4).to(E4M3)}, UnsupportedError, "one shape"),
    ],
)
def test_sources_that_contradict_themselves(tmp_path: Path, change: Any, kind: type[W3PackError], says: str) -> None:
    tensors = pair(MLP, 200, 130, seed=0)
    for name, tensor in change.items():
        if tensor is None:
            del tensors[f"{MLP}.{name}"]
        else:
            tensors[f"{MLP}.{name}"] = tensor
    with pytest.raises(kind, match=says):
        fuse(write(tmp_path / "source", tensors, {"quantization_config": FP8}), tmp_path / "out")


def test_a_changed_half_is_found_when_splitting(tmp_path: Path) -> None:
    fuse(write(tmp_path / "source", pair(MLP, 8, 8, seed=0), {"quantization_config": FP8}), tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    at = read_header(file)[f"{MLP}.gate_up_proj.weight"].start
    raw = bytearray(file.read_bytes())
    raw[at + 70] ^= 1
    file.write_bytes(raw)
    with pytest.raises(VerificationError, match="up_proj"):
        split(tmp_path / "out", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_config_round_trip_and_damage(tmp_path: Path) -> None:
    fuse(write(tmp_path / "source", pair(MLP, 8, 8, seed=0), {"quantization_config": FP8}), tmp_path / "out")
    entry = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert GateUpConfig.from_dict(entry).to_dict() == entry
    damage: list[dict[str, Any]] = [
        {"form": "other"}, {"format_version": 9}, {"weight_block_size": [128]}, {"guard": "x"}, {"guard": None},
        {"pairs": None}, {"pairs": {"a": {"rows": 1}}}, {"pairs": {"a": 3}}, {"fp8_modules": {"a": {}}},
    ]  # fmt: skip
    for change in damage:
        with pytest.raises(CheckpointError):
            GateUpConfig.from_dict({**entry, **change})


@pytest.mark.parametrize(
    ("file", "path", "value"),
    [
        ("config.json", ("quantization_config",), [1]),
        ("config.json", ("quantization_config",), "x"),
        ("w3pack.json", ("tensors", f"{MLP}.gate_up_proj.weight"), 3),
        ("w3pack.json", ("pairs", f"{MLP}.gate_up_proj"), None),
        ("w3pack.json", ("pairs", f"{MLP}.gate_up_proj", "sources"), []),
        ("w3pack.json", ("pairs", f"{MLP}.gate_up_proj", "gate"), "other"),
        ("w3pack.json", ("split", "files", "model.safetensors", f"{MLP}.gate_proj.weight", "shape"), []),
        ("w3pack.json", ("split", "files", "model.safetensors", f"{MLP}.gate_proj.weight", "dtype"), "F7"),
        ("w3pack.json", ("split", "config"), None),
    ],
)
def test_descriptions_that_are_damaged(tmp_path: Path, file: str, path: tuple[str, ...], value: Any) -> None:
    """Whoever reads them finds a sentence or does without; nobody falls over."""
    source = write(tmp_path / "source", pair(MLP, 8, 8, seed=0), {"quantization_config": FP8})
    out = tmp_path / "out"
    fuse(source, out)
    known = json.loads((out / file).read_text())
    entry = known
    for key in path[:-1]:
        entry = entry[key]
    entry[path[-1]] = value
    (out / file).write_text(json.dumps(known))
    sentences: list[str] = []
    for attempt in (
        lambda: split(out, tmp_path / "back"),
        lambda: verify_fused(out, against=SafetensorsSource(source)),
        lambda: inspect_fused(out),
    ):
        try:
            attempt()
        except W3PackError as error:
            sentences.append(str(error))
    assert sentences
    assert all(";" in sentence for sentence in sentences)
