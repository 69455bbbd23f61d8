"""Readers of other 3-bit formats against slow packers: every code, every straddling bit, every refusal."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from w3pack.checkpoint import import_flute
from w3pack.checkpoint.import_source import ImportSource, importer_for, open_import
from w3pack.checkpoint.imported import unpack_triples
from w3pack.checkpoint.safetensors_source import SafetensorsSource
from w3pack.errors import CheckpointError, UnsupportedError, W3PackError

M = "model.layers.0.mlp.up_proj"
Folder = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Writes a checkpoint of the given quantization_config and parts of one Linear."""

    def write(config: dict[str, Any] | None, parts: dict[str, torch.Tensor], **more: Any) -> Path:
        path = tmp_path / f"source-{len(list(tmp_path.iterdir()))}"
        path.mkdir()
        entry = {} if config is None else {"quantization_config": config}
        (path / "config.json").write_text(json.dumps({"model_type": "llama", **more, **entry}))
        tensors = {f"{M}.{part}": tensor.contiguous() for part, tensor in parts.items()}
        save_file({**tensors, "model.norm.weight": torch.ones(4)}, path / "model.safetensors")
        return path

    return write


def opened(path: Path) -> ImportSource:
    return open_import(str(path))


def config(foreign: Any, kind: str, **edit: Any) -> dict[str, Any]:
    return {**foreign.CONFIGS[kind], **edit}


# --- what is read ----------------------------------------------------------------------------------------------------


def test_flute_golden_vector(golden: Path, folder: Folder, foreign: Any) -> None:
    with safe_open(golden / "flute_v0.4_512x128_g64.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    parts = {name.removeprefix(f"{M}."): tensor for name, tensor in tensors.items() if name.startswith(M)}
    linear = opened(folder(config(foreign, "flute"), parts)).importer.read(M)
    assert linear.codes.unique().tolist() == list(range(8))
    assert torch.equal(linear.codes, tensors["expect.codes"])
    assert torch.equal(linear.dequantize().double(), tensors["expect.dequantised_float64"])


def test_flute_of_several_blocks(folder: Folder, foreign: Any) -> None:
    made = foreign.flute(1024, 64, seed=3)
    assert torch.equal(import_flute.unpack(made.parts["weight"]).int(), torch.tensor(made.codes).int())
    source = opened(folder(config(foreign, "flute"), made.parts))
    assert torch.equal(source.read(f"{M}.weight"), made.weight)
    assert dict(source.tensors).keys() == {f"{M}.weight", "model.norm.weight"}
    assert source.tensors[f"{M}.weight"].shape == (1024, 64)


def test_flute_described_beside_config_json(folder: Folder, foreign: Any) -> None:
    made = foreign.flute(512, 64)
    path = folder(None, made.parts)
    (path / "flute_config.json").write_text('{"version": "0.4.2", "num_bits": 3, "group_size": 64}')
    source = opened(path)
    assert torch.equal(source.read(f"{M}.weight"), made.weight)
    assert source.companion_files() == {}


def test_three_words_of_thirty_two_codes(foreign: Any) -> None:
    """Each code alone, at each place: the two that straddle a border as well."""
    for place in range(32):
        codes = [[code if k == place else 0 for code in range(8)] for k in range(32)]
        assert torch.equal(unpack_triples(foreign.triples(codes)).int(), torch.tensor(codes).int()), place
        others = [[code if k == place else 7 for code in range(8)] for k in range(32)]
        assert torch.equal(unpack_triples(foreign.triples(others)).int(), torch.tensor(others).int()), place


@pytest.mark.parametrize(
    "kind", ["gptq", "gptq_v2", "gptqmodel", "gptq_rows", "autoround", "autoround_own", "squeezellm"]
)
@pytest.mark.parametrize(("rows", "columns"), [(32, 32), (64, 192), (96, 256)])
def test_linears_are_read_exactly(folder: Folder, foreign: Any, kind: str, rows: int, columns: int) -> None:
    made = foreign.linear(kind, rows, columns, seed=rows)
    source = opened(folder(config(foreign, kind), made.parts))
    linear = source.importer.read(M)
    assert linear.codes.tolist() == made.codes
    assert torch.equal(linear.dequantize(), made.weight)
    assert source.importer.shapes[M].maps == (rows if kind in ("gptq_rows", "squeezellm") else 1)
    assert linear.scales.shape == (rows, -(-columns // linear.group_size))


@pytest.mark.parametrize("zero", range(1, 8))
@pytest.mark.parametrize("stored", ["v1", "v2", "words"])
def test_any_single_zero_point(folder: Folder, foreign: Any, zero: int, stored: str) -> None:
    made = foreign.gptq(32, 64, zeros=zero, stored=stored)
    kind = "gptq_v2" if stored == "v2" else "gptq"
    source = opened(folder(config(foreign, kind, sym=False), made.parts))
    assert torch.equal(source.read(f"{M}.weight"), made.weight)


def test_no_single_zero_point_can_be_read_in_two_ways(foreign: Any) -> None:
    def words(zero: int, stored: str) -> tuple[int, ...]:
        return tuple(foreign.gptq(32, 32, group_size=-1, zeros=zero, stored=stored).parts["qzeros"][0].tolist())

    plain = {words(zero, "v1") for zero in range(1, 8)}
    assert not plain & {words(zero, "words") for zero in range(8)}
    assert len(plain) == 7


def test_groups_that_do_not_divide_the_columns(folder: Folder, foreign: Any) -> None:
    made = foreign.gptq(32, 96, group_size=64)
    linear = opened(folder(config(foreign, "gptq"), made.parts)).importer.read(M)
    assert linear.scales.shape == (32, 2)
    assert torch.equal(linear.dequantize(), made.weight)


def test_tables2_cast_by_a_loader(folder: Folder, foreign: Any) -> None:
    parts = foreign.flute(512, 64).parts
    cast = parts["tables2"].half().float()
    assert opened(folder(config(foreign, "flute"), {**parts, "tables2": cast})).importer.shapes
    without = {part: tensor for part, tensor in parts.items() if part != "tables2"}
    assert opened(folder(config(foreign, "flute"), without)).importer.shapes


# --- what is refused -------------------------------------------------------------------------------------------------


def _g_idx(parts: dict[str, torch.Tensor], order: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**parts, "g_idx": order.to(torch.int32)}


def cases(foreign: Any) -> dict[str, tuple[dict[str, Any], dict[str, torch.Tensor], type[W3PackError], str]]:
    """Config, parts, error class, and what the sentence says."""
    flute, gptq, squeeze = foreign.flute(512, 64).parts, foreign.gptq(32, 128).parts, foreign.squeezellm(32, 64).parts
    k = torch.arange(128)
    differing = foreign.gptq(32, 128, zeros=[[3] * 32, [4] * 32]).parts
    sevens = foreign.gptq(32, 128, zeros=8, stored="v1").parts
    rows = foreign.gptq(32, 128, group_size=-1, zeros=[[1 + n % 7 for n in range(32)]]).parts
    no, bad = UnsupportedError, CheckpointError

    def made(kind: str, **edit: Any) -> dict[str, Any]:
        return config(foreign, kind, **edit)

    def less(parts: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
        return {part: tensor for part, tensor in parts.items() if part != name}

    return {
        "flute bits": (made("flute", num_bits=4), flute, no, "3 bits, got 4"),
        "flute groups": (made("flute", group_size=32), flute, no, "group_size 32"),
        "flute groups missing": (made("flute", group_size=None), flute, bad, "group_size"),
        "flute pairs": (made("flute"), {**flute, "tables2": flute["tables2"] + 1}, no, "vector size 1"),
        "flute old": (made("flute", version="0.3.0"), flute, no, "version 0.3.0"),
        "flute legacy": (made("flute", num_sms=108), flute, no, "num_sms"),
        "flute rows": (made("flute"), {**flute, "weight": flute["weight"][:48]}, bad, "512 dividing N"),
        "flute scales": (made("flute"), {**flute, "scales": flute["scales"][:8]}, bad, r"scales to be F16"),
        "flute dtype": (made("flute"), {**flute, "weight": flute["weight"].int()}, bad, "I16"),
        "flute missing": (made("flute"), less(flute, "scales"), bad, "got none"),
        "gptq bits": (made("gptq", bits=4), gptq, no, "3 bits, got 4"),
        "gptq bits as text": (made("gptq", bits="3"), gptq, no, "3 bits"),
        "gptq groups": (made("gptq", group_size=32), gptq, no, "group_size 32"),
        "gptq strange groups": (made("gptq", group_size=[64]), gptq, no, "group_size"),
        "gptq marlin": (made("gptq", checkpoint_format="marlin"), gptq, no, "'marlin'"),
        "gptq planar": (made("gptq", checkpoint_format="gptq_p"), gptq, no, "'gptq_p'"),
        "gptq words": (made("gptq", pack_dtype="int16"), gptq, no, "pack_dtype"),
        "act-order": (made("gptq", desc_act=True), _g_idx(gptq, k.flip(0) // 64), no, "desc_act false"),
        "no group": (made("gptq"), _g_idx(gptq, 0 * k), no, "another order"),
        "zeros differ": (made("gptq", sym=False), differing, no, "sym true"),
        "zero of 0 or 8": (made("gptq", sym=False), sevens, no, "gptq_v2"),
        "not symmetric": (made("gptq_v2"), gptq, bad, "sym true"),
        "which GPTQModel": (made("gptqmodel", group_size=-1, sym=False), rows, no, "two ways"),
        "gptq adapter": (made("gptq"), {**gptq, "lora_A": torch.ones(2, 2)}, no, "lora_A"),
        "gptq missing": (made("gptq"), less(gptq, "qzeros"), bad, "qzeros"),
        "gptq scales": (made("gptq"), {**gptq, "scales": gptq["scales"][:1]}, bad, "scales"),
        "gptq 4-bit Linear": (made("gptq"), {**gptq, "qweight": gptq["qweight"][:8]}, bad, "not of 3 bits"),
        "autoround awq": (made("autoround", packing_format="auto_round:auto_awq"), gptq, no, "auto_awq"),
        "autoround activations": (made("autoround", act_bits=8), gptq, no, "act_bits 8"),
        "autoround mx": (made("autoround", data_type="mx_fp"), gptq, no, "mx_fp"),
        "autoround says v2": (made("autoround_own", sym=True), less(gptq, "g_idx"), bad, "sym true"),
        "squeezellm bits": (made("squeezellm", wbits=4), squeeze, no, "3 bits"),
        "sparse": (made("squeezellm"), {**squeeze, "vals": torch.ones(5)}, no, "sparse part"),
        "squeezellm table": (made("squeezellm"), {**squeeze, "lookup_table": torch.ones(32, 16)}, bad, "lookup_table"),
        "nothing packed": (made("gptq"), {"weight": torch.ones(4, 4)}, bad, "got none"),
    }  # fmt: skip


NAMES = (
    "flute bits", "flute groups", "flute groups missing", "flute pairs", "flute old", "flute legacy", "flute rows",
    "flute scales", "flute dtype", "flute missing", "gptq bits", "gptq bits as text", "gptq groups", "gptq strange groups",
    "gptq marlin", "gptq planar", "gptq words", "act-order", "no group", "zeros differ", "zero of 0 or 8", "not symmetric",
    "which GPTQModel", "gptq adapter", "gptq missing", "gptq scales", "gptq 4-bit Linear", "autoround awq",
    "autoround activations", "autoround mx", "autoround says v2", "squeezellm bits", "sparse", "squeezellm table",
    "nothing packed",
)  # fmt: skip


@pytest.fixture(scope="module")
def table_of_cases(foreign: Any) -> dict[str, Any]:
    found = cases(foreign)
    assert set(found) == set(NAMES)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_refusal(folder: Folder, table_of_cases: dict[str, Any], name: str) -> None:
    entry, parts, error, says = table_of_cases[name]
    with pytest.raises(error, match=says) as caught:
        opened(folder(entry, parts))
    assert type(caught.value) is error
    assert "expected" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert ";" in str(caught.value), "what to do is missing"


def test_empty_sparse_part_is_none(folder: Folder, foreign: Any) -> None:
    made = foreign.squeezellm(32, 64)
    empty = {
        "rows": torch.zeros(33, dtype=torch.int32),
        "cols": torch.zeros(0, dtype=torch.int32),
        "vals": torch.ones(0),
    }
    assert torch.equal(
        opened(folder(config(foreign, "squeezellm"), made.parts | empty)).read(f"{M}.weight"), made.weight
    )


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (None, "--qmap nf3 or --qmap FILE.json"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "w3pack quantize"),
        ({"quant_method": "awq"}, "flute, gptq, auto-round, squeezellm"),
        ({"quant_method": ["gptq"]}, "flute, gptq, auto-round, squeezellm"),
        ({"quant_method": "w3pack"}, "packed already"),
        ("gptq", "--qmap"),
        ([], "--qmap"),
    ],
)
def test_other_formats_are_told_what_is_known(folder: Folder, entry: Any, says: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        opened(folder(entry, {"weight": torch.ones(4, 4)}))
    assert says in str(caught.value)
    assert "flute, gptq, auto-round, squeezellm" in str(caught.value)


def test_gguf_is_sent_to_quantize(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(UnsupportedError, match="w3pack quantize"):
        open_import(str(path))


def test_pickles_are_refused_unread(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "squeezellm", "wbits": 3}}')
    (tmp_path / "sq-w3.pt").write_bytes(b"\x80\x04")
    with pytest.raises(UnsupportedError, match="convert the checkpoint to safetensors"):
        open_import(str(tmp_path))


def test_strange_configs_are_sentences(folder: Folder, foreign: Any) -> None:
    parts = {kind: foreign.linear(kind, 512 if kind == "flute" else 32, 64, seed=1).parts for kind in foreign.CONFIGS}
    for kind, entry in foreign.CONFIGS.items():
        source = SafetensorsSource(folder(entry, parts[kind]))
        for key in (*entry, "meta", "version", "act_bits", "backend"):
            for value in (None, -1, 2**70, "", "x" * 9999, [], {}, True, 0.5, {"quantizer": [1]}):
                source._config = {"quantization_config": {**entry, key: value}}
                with contextlib.suppress(W3PackError):  # anything else fails the test
                    importer_for(source)
