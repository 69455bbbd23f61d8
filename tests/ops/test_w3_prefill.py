"""Which tiles a call of the prefill kernel takes, and when the operator uses it: no device needed."""

from __future__ import annotations

import itertools
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from w3pack.errors import ResourceError, UnsupportedError
from w3pack.jit import kernels_folder
from w3pack.ops import w3_cuda, w3_prefill_launch
from w3pack.ops.configs import DEVICES, all_kernel_texts
from w3pack.ops.w3_config import W3Desc
from w3pack.ops.w3_prefill import (
    DIVISIONS,
    PrefillConfig,
    config_of,
    configs,
    cycles,
    mainloop_tokens,
    make_plan,
    prefill_plan,
    takes,
)
from w3pack.ops.w3_prefill_launch import FIELDS, PARAMS_BYTES, mappable, values_of
from w3pack.ops.w3_table import Table, from_json, to_json

SHAPES = ((28672, 8192), (8192, 8192), (4096, 4096), (17408, 5120), (5120, 17408), (1000, 3000), (1, 64))
TOKENS = (65, 100, 128, 129, 255, 256, 257, 512, 513, 1000, 4096)


def desc(rows: int = 4096, columns: int = 4096, tokens: int = 512, **changes: Any) -> W3Desc:
    made = W3Desc(tokens, rows, columns, 128, "dense", "int8", "linear", "float16", DEVICES["sm_90a"])
    return replace(made, **changes)


def test_every_config_fits_and_covers_the_output() -> None:
    for (rows, columns), tokens, layout in itertools.product(SHAPES, TOKENS, ("dense", "nibble")):
        call = desc(rows, columns, tokens, layout=layout)
        for config in configs(call):
            plan = make_plan(call, config)
            assert config.fewest_slots <= config.slots <= 8
            assert plan.shared_bytes <= call.device.shared_bytes
            assert plan.token_tiles * config.tokens >= tokens > (plan.token_tiles - 1) * config.tokens
            assert plan.tiles * config.cluster * 64 * config.row_tiles * config.tokens >= rows * tokens
            assert plan.grid % config.cluster == 0
            assert 0 < plan.grid <= min(132, plan.tiles * config.cluster)
            assert plan.steps * 64 >= columns > (plan.steps - 1) * 64
        assert prefill_plan(call).config in set(configs(call))


def test_fewer_rounds_are_preferred() -> None:
    """17 of 20 row pairs and three token tiles are one round where four, or two, would be more or longer ones."""
    assert prefill_plan(desc(5120, 17408)).config.tokens == 192
    assert prefill_plan(desc(4096, 4096)).config.tokens == 128
    assert prefill_plan(desc(5120, 17408, 128)).config.split  # 40 tiles of 128 rows, 80 of 64
    assert not prefill_plan(desc(28672, 8192, 128)).config.split
    assert prefill_plan(desc(8192, 8192)).config.tokens == 256
    call = desc(28672, 8192)
    best = prefill_plan(call).config
    assert cycles(call, best) == min(cycles(call, config) for config in configs(call))


def test_calls_without_a_kernel_are_refused() -> None:
    config = PrefillConfig(256, 4, 2)
    assert takes(desc())
    for call in (
        desc(columns=63),
        desc(device=DEVICES["sm_80"]),
        desc(device=DEVICES["sm_100a"]),
        desc(tokens=1 << 30),
    ):
        assert not takes(call)
        with pytest.raises(UnsupportedError, match=r"expected .*, got .*; dequantise it"):
            make_plan(call, config)
    for unsound in (
        PrefillConfig(40, 4, 1),
        PrefillConfig(256, 2, 1),
        PrefillConfig(256, 8, 1),
        PrefillConfig(256, 4, 4),
        PrefillConfig(64, 4, 1, split=True),
        PrefillConfig(96, 5, 1, split=True),
        PrefillConfig(64, 8, 8, split=True),
    ):
        with pytest.raises(UnsupportedError, match=r"expected a config .*, got .*; choose another"):
            make_plan(desc(), unsound)
    with pytest.raises(UnsupportedError, match="shared memory for 3 steps"):
        config_of(desc(device=replace(DEVICES["sm_90a"], shared_bytes=99 << 10)), tokens=256, cluster=2)


def test_every_tile_is_built_and_looked_at() -> None:
    texts = [dict(text.defines) for text in all_kernel_texts("sm_90a") if text.entry == "w3_prefill"]
    assert {(t["W3_TOKENS"], t["W3_CLUSTER"], t["W3_SPLIT"]) for t in texts} == set(DIVISIONS)
    assert len(DIVISIONS) == (7 + 4) * 2
    names = ("W3_BF16", "W3_DENSE", "W3_INT8_MAP", "W3_ROW_MAPS")
    assert len({tuple(t[name] for name in names) for t in texts}) == 16
    assert not [text for text in all_kernel_texts("sm_80") if text.entry == "w3_prefill"]


def test_the_packed_struct_is_the_declared_one() -> None:
    text = (kernels_folder() / "w3_prefill_params.cuh").read_text()
    found = re.search(r"struct alignas\(64\) Params \{(.*?)\n\};", text, re.S)
    assert found
    fields: dict[str, str] = {}
    for line in filter(None, (part.strip() for part in re.sub(r"//.*", "", found[1]).split(";"))):
        kind, _, names = line.partition(" ")
        if "*" in line:
            fields[line.rpartition("*")[2].strip()] = "Q"
        else:
            fields |= {name.strip(): {"TensorMap": "128s", "int": "i"}[kind] for name in names.split(",")}
    assert list(fields.items()) == list(FIELDS.items())
    assert -(-struct.calcsize("".join(FIELDS.values())) // 64) * 64 == PARAMS_BYTES == 256


def test_which_activations_the_copy_engine_takes() -> None:
    x = torch.zeros(70, 256, dtype=torch.float16)
    assert mappable(x)
    assert mappable(torch.zeros(70, 300, dtype=torch.float16)[:, 8:264]) is False  # 600 bytes a row
    assert mappable(torch.zeros(70, 304, dtype=torch.float16)[:, 8:264])
    assert not mappable(torch.zeros(70, 304, dtype=torch.float16)[:, 1:257])
    assert not mappable(x[:1].expand(70, 256))
    assert not mappable(torch.zeros(70, 1001, dtype=torch.float16))


def test_parameters_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    def encode(pointer: int, **given: Any) -> bytes:
        made.append(given)
        return bytes(128)

    monkeypatch.setattr(w3_prefill_launch, "encode_bytes", encode)
    monkeypatch.setattr(w3_prefill_launch, "_maps", {})
    call = desc(300, 1000, 257, group_size=256)
    plan = make_plan(call, PrefillConfig(96, 4, 2))
    x = torch.zeros(257, 1008, dtype=torch.float16)[:, :1000]
    y = torch.zeros(257, 300, dtype=torch.float16)
    qmap = torch.zeros(5, 8, dtype=torch.int8)
    for _ in range(2):
        values = values_of(plan, x, y, y, qmap, None, y)
    assert made == [
        {"rows": 257, "columns": 2000, "row_bytes": 2016, "box_rows": 48, "box_columns": 128, "promotion": 256}
    ]
    expected = {"steps": 16, "row_tiles": 5, "column_tiles": 16, "groups": 4, "tiles_per_group": 4, "map_tiles": 1}
    expected |= {"token_tiles": 3, "tiles": 6, "tokens": 257, "rows": 300, "bias": 0, "y_aligned": False}
    assert {name: values[name] for name in expected} == expected
    assert len(w3_prefill_launch.pack(values)) == PARAMS_BYTES


MEASURED = Table("NVIDIA H200", (), (), mainloop_tokens=((4096, 4096, 129, 1000), (28672, 8192, 65, 512)))


def test_only_measured_shapes_and_tokens_take_the_kernel() -> None:
    assert mainloop_tokens(desc(), MEASURED) == range(129, 1001)
    assert mainloop_tokens(desc(28672, 8192), MEASURED) == range(65, 513)
    for call, table in ((desc(4096, 4160), MEASURED), (desc(), None), (desc(device=DEVICES["sm_80"]), MEASURED)):
        assert len(mainloop_tokens(call, table)) == 0


def test_the_table_keeps_the_numbers_of_tokens() -> None:
    document = to_json(MEASURED)
    assert document["mainloop_tokens"] == {"4096x4096": [129, 1000], "28672x8192": [65, 512]}
    assert from_json(document, Path("t.json")) == MEASURED
    assert "mainloop_tokens" not in to_json(replace(MEASURED, mainloop_tokens=()))
    for damage in (
        [],
        {"4096": [1, 2]},
        {"4096x4096": 5},
        {"4096x4096": [5]},
        {"4096x4096": [5, 4]},
        {"64x64": [0, 4]},
    ):
        with pytest.raises(ResourceError, match=r"expected .* in t\.json, got .*; write the table again"):
            from_json(document | {"mainloop_tokens": damage}, Path("t.json"))


def test_the_operator_takes_it_where_the_table_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from w3pack.format.linear import LinearSpec

    table = Table("X", (), (), mainloop_tokens=((300, 256, 100, 200),))
    monkeypatch.setattr(w3_cuda.devices, "limits", lambda index: DEVICES["sm_90a"])
    monkeypatch.setattr(w3_cuda.devices, "device_name", lambda index: "X")
    monkeypatch.setattr(w3_cuda, "table_of", lambda name, arch: table)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    spec = LinearSpec(rows=300, columns=256, group_size=128, layout="dense", maps=1, qmap_dtype="int8", bias=False)
    form = w3_cuda.Form(spec, "float16", 0)
    taken: list[str] = []
    monkeypatch.setattr(w3_prefill_launch, "run_prefill", lambda plan, *_: taken.append(f"prefill {plan.desc.tokens}"))
    monkeypatch.setattr(w3_cuda, "without_mainloop", lambda form, x, *_: taken.append(f"other {x.shape[0]}"))
    packed = (torch.zeros(spec.codes_shape, dtype=torch.int32), torch.zeros(1), torch.zeros(1))
    for tokens in (64, 99, 100, 200, 201):
        w3_cuda.linear(form, torch.zeros(tokens, 256, dtype=torch.float16), *packed, None)
    w3_cuda.linear(form, torch.zeros(2, 75, 256, dtype=torch.float16), *packed, None)
    w3_cuda.linear(form, torch.zeros(150, 258, dtype=torch.float16)[:, 1:257], *packed, None)
    assert taken == ["other 64", "other 99", "prefill 100", "prefill 200", "other 201", "prefill 150", "other 150"]
    entries = {tokens: {text.entry for text in form.texts(tokens)} for tokens in (99, 100, 150, 201)}
    assert entries[99] == {"w3_decode", "w3_stage"}
    assert entries[100] == {"w3_decode", "w3_stage", "w3_prefill"}
    assert entries[150] == {"w3_dequantize", "w3_prefill"}
    assert entries[201] == {"w3_dequantize"}
