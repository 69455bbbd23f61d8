"""What goes into the launches, with kernels that only write it down; and how rows are cut for many tokens."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from w3pack.format.linear import LinearSpec
from w3pack.jit import KernelText
from w3pack.ops import w3_dense, w3_launch, w3_params, workspace
from w3pack.ops.configs import DEVICES
from w3pack.ops.w3_config import W3Desc
from w3pack.ops.w3_decide import plan_of
from w3pack.ops.w3_dense import Dequantizer, row_portions
from w3pack.ops.w3_launch import Decoder, map_tiles
from w3pack.ops.w3_params import Packing

STREAM = 7
SPEC = LinearSpec(rows=300, columns=1000, group_size=192, layout="nibble", maps=5, qmap_dtype="float16", bias=True)


@dataclass
class Recorder:
    """Stands for a loaded kernel."""

    text: KernelText
    launches: list[dict[str, Any]] = field(default_factory=list)

    def launch(self, **arguments: Any) -> None:
        self.launches.append(arguments)

    def values(self, packing: Packing, number: int = 0) -> dict[str, int]:
        params = self.launches[number]["params"]
        assert len(params) == packing.size
        letters = "<" + "".join(packing.fields.values())
        unpacked = struct.unpack(letters, params[: struct.calcsize(letters)])
        return dict(zip(packing.fields, unpacked, strict=True))


Load = Callable[[], list[Recorder]]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    recorders: list[Recorder] = []

    def load(text: KernelText, device_index: int) -> Recorder:
        recorders.append(Recorder(text))
        return recorders[-1]

    for module in (w3_launch, w3_dense):
        monkeypatch.setattr(module, "load", load)
        monkeypatch.setattr(module.devices, "current_stream", lambda index: STREAM)
        monkeypatch.setattr(module.devices, "limits", lambda index: DEVICES["sm_90a"])
    monkeypatch.setattr(workspace, "acquire", lambda *_: torch.full((16,), 255, dtype=torch.uint8))
    return recorders


def stored() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.zeros(SPEC.codes_shape, dtype=torch.int32),
        torch.zeros(SPEC.scales_shape, dtype=torch.float16),
        torch.zeros(SPEC.qmap_shape, dtype=torch.float16),
    )


def decode(
    loaded: list[Recorder], x: torch.Tensor, *, bias: torch.Tensor | None = None
) -> tuple[Decoder, dict[str, int]]:
    desc = W3Desc.of(SPEC, tokens=x.shape[0], x_dtype="float16", device=DEVICES["sm_90a"])
    decoder = Decoder(plan_of(desc), maps=SPEC.maps, device_index=0)
    y = torch.empty(x.shape[0], SPEC.rows, dtype=torch.float16)
    codes, scales, qmap = stored()
    decoder.run(x, codes, scales, qmap, bias, y)
    values = loaded[0].values(w3_params.DECODE)
    pointers = {"x": x, "codes": codes, "scales": scales, "qmap": qmap, "y": y}
    assert {name: values[name] for name in pointers} == {name: t.data_ptr() for name, t in pointers.items()}
    assert values["bias"] == (0 if bias is None else bias.data_ptr())
    return decoder, values


def test_a_decode_launch(loaded: list[Recorder]) -> None:
    bias = torch.zeros(300, dtype=torch.float16)
    decoder, values = decode(loaded, torch.zeros(5, 1000, dtype=torch.float16), bias=bias)
    plan = decoder.plan
    expected = {
        "x_stride": 1000,
        "tokens": 5,
        "rows": 300,
        "columns": 1000,
        "row_tiles": 5,
        "column_tiles": 18,
        "groups": 6,
        "group_reciprocal": (2**32 - 1) // 3,
        "map_tiles": 1,
        "steps": 9,
        "step_reciprocal": (2**32 - 1) // 9,
        "row_blocks": plan.row_blocks,
        "resident_steps": plan.resident_steps,
        "run_units": plan.run_units,
        "longer_runs": plan.longer_runs,
        "x_aligned": 1,
        "token_reciprocal": (2**32 - 1) // 5,
        "first_chunk": plan.first_chunk,
        "chunk_steps": plan.chunk_steps,
        "chunk_reciprocal": (2**32 - 1) // plan.chunk_steps,
        "chunks": plan.chunks,
        "staged": 0,
        "staged_scales": 0,
    }
    assert {name: values[name] for name in expected} == expected
    (launch,) = loaded[0].launches
    assert (launch["stream"], launch["grid"], launch["block"]) == (STREAM, plan.grid, plan.block)
    assert (launch["shared_bytes"], launch["programmatic"]) == (plan.shared_bytes, True)


def test_many_tokens_are_staged_first(loaded: list[Recorder]) -> None:
    x = torch.zeros(40, 1000, dtype=torch.float16)
    decoder, values = decode(loaded, x)
    stage = loaded[1].values(w3_params.STAGE)
    assert loaded[1].text.entry == "w3_stage"
    assert values["staged"] == stage["staged"] != 0
    assert values["staged_scales"] == stage["scales"] == stage["staged"] + decoder.plan.staged_bytes
    assert (stage["x"], stage["x_stride"], stage["tokens"], stage["columns"]) == (x.data_ptr(), 1000, 40, 1000)
    assert (loaded[1].launches[0]["grid"], loaded[1].launches[0]["block"]) == (9 * 8, 64)


def test_alignment_of_x(loaded: list[Recorder]) -> None:
    wide = torch.zeros(9, 1017, dtype=torch.float16)
    for x, stride, aligned in (
        (wide[:3, :1000], 1017, 0),
        (wide[:1, :1000], 0, 1),  # the stride of one token is nothing
        (wide[:1, 1:1001], 0, 0),
        (torch.zeros(1, 1000, dtype=torch.float16).expand(4, 1000), 0, 1),
        (torch.zeros(4, 1008, dtype=torch.float16)[:, 8:], 1008, 1),
        (torch.zeros(4, 1008, dtype=torch.float16)[:, 4:1004], 1008, 0),
    ):
        loaded.clear()
        _, values = decode(loaded, x)
        assert (values["x_stride"], values["x_aligned"]) == (stride, aligned)


def test_map_tiles() -> None:
    assert [map_tiles(6, maps) for maps in (1, 2, 3, 6, 384)] == [0, 3, 2, 1, 0]
    assert map_tiles(1, 64) == 0


def test_a_dequantising_launch_of_a_row_range(loaded: list[Recorder]) -> None:
    weight = torch.empty(172, 1000, dtype=torch.bfloat16)
    Dequantizer(SPEC, "bfloat16", 0).run(*stored(), weight, first=128, stream=3)
    values = loaded[0].values(w3_params.DEQUANTIZE)
    expected = {
        "weight": weight.data_ptr(),
        "weight_stride": 1000,
        "rows": 300,
        "columns": 1000,
        "row_tile_first": 2,
        "row_tiles": 3,
        "column_tiles": 18,
        "groups": 6,
        "tiles_per_group": 3,
        "map_tiles": 1,
        "weight_aligned": 1,
    }
    assert {name: values[name] for name in expected} == expected
    (launch,) = loaded[0].launches
    assert (launch["stream"], launch["grid"], launch["block"]) == (3, 7, 256)


@given(
    rows=st.integers(1, 300_000),
    columns=st.integers(1, 1 << 17),
    tokens=st.integers(1, 1 << 17),
    multiprocessors=st.sampled_from([1, 84, 132, 170]),
)
def test_portions_cover_all_rows_once(rows: int, columns: int, tokens: int, multiprocessors: int) -> None:
    portions = row_portions(rows, columns, tokens, multiprocessors=multiprocessors)
    assert portions[0][0] == 0
    assert portions[-1][1] == rows
    assert all(last == first for (_, last), (first, _) in itertools.pairwise(portions))
    assert all(first % 64 == 0 and first < last for first, last in portions)
    size = portions[0][1]
    assert all(last - first <= size for first, last in portions)
    assert all(last - first == size for first, last in portions[:-1])
    assert 2 * columns * size <= max(128 << 20, 64 * 2 * columns)


def test_portions_of_usual_shapes() -> None:
    def count(rows: int, columns: int, tokens: int) -> int:
        return len(row_portions(rows, columns, tokens, multiprocessors=132))

    assert count(4096, 4096, 512) == 1
    assert count(28672, 8192, 512) == 7
    assert count(28672, 8192, 4096) == 14
    assert (
        count(28672, 8192, 129) == 4
    )  # as large as scratch allows, since few tokens fill a device only with many rows
