"""Tables of measured choices: they come back as written, and a damaged one is told of once and not used."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from w3pack.errors import ResourceError
from w3pack.jit import ARCHS
from w3pack.ops import w3_table
from w3pack.ops.configs import DEVICES
from w3pack.ops.w3_config import DeviceLimits, W3Config, W3Desc
from w3pack.ops.w3_decide import measured
from w3pack.ops.w3_table import config_from_json, config_to_json, from_json, read_table, table_of, table_path, to_json

DOCUMENT: dict[str, Any] = {
    "format": 1,
    "device": "NVIDIA H200",
    "entries": [
        {
            "rows": 4096,
            "columns": 4096,
            "tokens": 8,
            "layout": "dense",
            "qmap_dtype": "int8",
            "map_kind": "linear",
            "scale_sets": 1,
            "config": {
                "token_tiles": 1,
                "row_warps": 1,
                "split_warps": 8,
                "token_warps": 1,
                "slots": 4,
                "ring": 0,
                "blocks": 132,
                "slot_steps": 8,
                "warpgroups": False,
            },
            "microseconds": 5.25,
        }
    ],
    "prefill_from": {"4096x4096": 129},
}
HERE = Path("table.json")


def changed(place: list[Any], value: Any) -> dict[str, Any]:
    """DOCUMENT with one value replaced, or removed where `value` is `...`."""
    document = copy.deepcopy(DOCUMENT)
    *path, last = place
    inner: Any = document
    for step in path:
        inner = inner[step]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return document


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(DOCUMENT))
    table = read_table(path)
    assert table.entries[0].config == W3Config(1, 1, 8, 1, 4, 0, 132, slot_steps=8)
    assert table.entries[0].x_dtype is None
    assert table.prefill_from == ((4096, 4096, 129),)
    expected = copy.deepcopy(DOCUMENT)
    expected["entries"][0]["config"] = config_to_json(table.entries[0].config)  # the defaults are written too
    assert to_json(table) == expected
    assert config_from_json(config_to_json(table.entries[0].config), HERE) == table.entries[0].config


def test_fields_with_defaults_may_be_left_out() -> None:
    short = changed(["entries", 0, "config", "warpgroups"], ...)
    del short["entries"][0]["config"]["slot_steps"], short["prefill_from"]
    short["entries"][0]["x_dtype"] = "bfloat16"
    table = from_json(short, HERE)
    assert table.entries[0].config == W3Config(1, 1, 8, 1, 4, 0, 132)
    assert (table.entries[0].x_dtype, table.prefill_from) == ("bfloat16", ())


ENTRY = ["entries", 0]
CONFIG = [*ENTRY, "config"]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (["format"], 2),
        (["device"], ...),
        (["entries"], {}),
        (["entries"], [3]),
        (["entries"], [DOCUMENT["entries"][0]] * 20_001),
        (["prefill_from"], []),
        (["prefill_from"], {"4096": 5}),
        (["prefill_from"], {"4096x4096": 0}),
        (["prefill_from"], {"4096x4096": True}),
        ([*ENTRY, "rows"], 0),
        ([*ENTRY, "rows"], ...),
        ([*ENTRY, "columns"], 1 << 25),
        ([*ENTRY, "tokens"], 65),
        ([*ENTRY, "tokens"], 8.0),
        ([*ENTRY, "layout"], "sparse"),
        ([*ENTRY, "qmap_dtype"], "int4"),
        ([*ENTRY, "map_kind"], None),
        ([*ENTRY, "x_dtype"], "float32"),
        ([*ENTRY, "scale_sets"], 3),
        ([*ENTRY, "microseconds"], -1),
        ([*ENTRY, "microseconds"], float("nan")),
        (CONFIG, []),
        ([*CONFIG, "slots"], 1),
        ([*CONFIG, "slots"], ...),
        ([*CONFIG, "ring"], -4),
        ([*CONFIG, "ring"], 4),  # with two or more split warps
        ([*CONFIG, "blocks"], 0),
        ([*CONFIG, "slot_steps"], 3),
        ([*CONFIG, "row_warps"], 8),  # 64 warps
        ([*CONFIG, "token_tiles"], 8 + 1),
        ([*CONFIG, "warpgroups"], 1),
        ([*CONFIG, "warpgroups"], True),  # with one row warp
        ([*CONFIG, "beside"], 1),
        ([*CONFIG, "speed"], 1),
    ],
)
def test_damage_is_refused_with_a_sentence(place: list[Any], value: Any) -> None:
    with pytest.raises(ResourceError, match=r"expected .* in table\.json, got .*; write the table again or reinstall"):
        from_json(changed(place, value), HERE)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b"0" * (9 << 20)])
def test_files_that_are_no_table_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(data)
    with pytest.raises(ResourceError, match=r"expected .*, got "):
        read_table(path)


def test_every_field_of_a_config_is_read() -> None:
    assert {field.name for field in dataclasses.fields(W3Config)} == {*w3_table._CONFIG_BOUNDS, "warpgroups", "beside"}


def test_names_of_devices_become_file_names() -> None:
    assert table_path("NVIDIA H200").name == "nvidia_h200.json"
    assert table_path("../../Tesla (V100) 32GB").name == "tesla_v100_32gb.json"
    assert table_path("NVIDIA H200").parent.name == "tables"


def test_a_damaged_table_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "nvidia_h200.json"
    path.write_text("{}")
    monkeypatch.setattr(w3_table, "table_path", lambda name: path)
    table_of.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert table_of("NVIDIA H200") is None
        assert table_of("NVIDIA H200") is None
    table_of.cache_clear()
    assert len(caplog.records) == 1
    assert "expected format 1" in caplog.text


def test_no_table_is_no_damage(caplog: pytest.LogCaptureFixture) -> None:
    assert table_of("a device that nobody measured") is None
    assert not caplog.records


def test_tables_of_the_package_are_sound() -> None:
    for path in table_path("x").parent.glob("*.json"):
        table = read_table(path)
        assert table_path(table.device) == path
        assert table.arch in ARCHS
        assert table.multiprocessors > 0


def test_a_device_without_a_table_takes_that_of_its_architecture() -> None:
    borrowed = table_of("NVIDIA H100 PCIe", "sm_90a")
    assert borrowed is not None
    assert borrowed.device == "NVIDIA H200"
    assert table_of("NVIDIA A100", "sm_80") is None
    smaller = DeviceLimits("sm_90a", 114, 227 << 10)
    desc = W3Desc(8, 28672, 8192, 128, "dense", "int8", "linear", "float16", smaller)
    own = table_of("NVIDIA H200")
    (here, *_), (there, *_) = measured(desc, borrowed), measured(replace(desc, device=DEVICES["sm_90a"]), own)
    assert here.blocks == min(there.blocks, 114)
    assert replace(here, blocks=there.blocks) == there


@pytest.mark.parametrize(
    ("blocks", "multiprocessors", "expected"),
    [(132, 114, 114), (112, 114, 112), (128, 114, 114), (264, 114, 228), (132, 148, 148), (112, 148, 125)],
)
def test_blocks_follow_the_multiprocessors(blocks: int, multiprocessors: int, expected: int) -> None:
    table = replace(from_json(changed(["entries", 0, "config", "blocks"], blocks), HERE), multiprocessors=132)
    desc = W3Desc(
        8, 4096, 4096, 128, "dense", "int8", "linear", "float16", DeviceLimits("sm_90a", multiprocessors, 227 << 10)
    )
    assert [config.blocks for config in measured(desc, table)] == [expected]
