"""What the tuner of the prefill kernel makes of times and results, the GPU replaced by the reference and a made-up clock."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from w3pack.bench import prefill_tuner, suite
from w3pack.bench.prefill_tuner import Compared, tune_prefill, winning_tokens, with_mainloop
from w3pack.bench.shapes import Case, Shape, cases
from w3pack.bench.timing import Timing
from w3pack.errors import UnsupportedError
from w3pack.ops.configs import DEVICES
from w3pack.ops.w3_prefill import prefill_plan
from w3pack.ops.w3_table import Table, read_table
from w3pack.reference import w3


def compared(tokens: int, microseconds: float | None, *, without: float = 10.0, layout: Any = "dense") -> Compared:
    case = Case(4096, 4096, tokens, layout=layout)
    fault = "errs too much" if microseconds is None else None
    return Compared(case, prefill_plan(case.desc(DEVICES["sm_90a"])), microseconds, without, 1e-4, fault)


def test_the_longest_run_of_wins_counts() -> None:
    assert winning_tokens([compared(96, 9), compared(128, 8), compared(256, 12)]) == (96, 128)
    assert winning_tokens([compared(96, 9), compared(128, 11), compared(256, 9), compared(512, 9)]) == (256, 512)
    assert winning_tokens([compared(96, 9), compared(128, None), compared(256, 9.9)]) == (96, 96)  # 9.9 is no gain
    assert winning_tokens([compared(96, 9), compared(96, 11, layout="nibble")]) is None
    assert winning_tokens([]) is None


def test_an_entry_is_replaced_or_taken_out() -> None:
    table = Table("X", (), (), mainloop_tokens=((4096, 4096, 65, 128), (64, 64, 1, 2)))
    assert with_mainloop(table, 4096, 4096, (129, 512)).mainloop_tokens == ((64, 64, 1, 2), (4096, 4096, 129, 512))
    assert with_mainloop(table, 4096, 4096, None).mainloop_tokens == ((64, 64, 1, 2),)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Computes by the reference; kernel calls take 10 microseconds and other calls 20. Faults named in the list happen."""
    faults: list[str] = []

    @contextmanager
    def borrowed(device_index: int) -> Iterator[None]:
        yield

    def mainloop_call(plan: Any, sets: Any, x: torch.Tensor, ys: Any) -> Callable[[int], float]:
        calls = 0

        def call(i: int) -> float:
            nonlocal calls
            calls += 1
            w = sets[i]
            ys[i].copy_(w3.linear(x, w.codes, w.scales, w.qmap, None, spec=w.spec))
            if "error" in faults:
                ys[i].mul_(1.001)
            if "bits" in faults:
                ys[i][0, 0] += calls
            return 10.0

        return call

    def graph_time(fn: Callable[[int], float], **_: Any) -> Timing:
        return Timing.of([fn(0)])

    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(suite.Bench, "device", torch.device("cpu"))
    monkeypatch.setattr(suite.Bench, "copies", lambda *_: 2)
    for name, value in {
        "borrowed": borrowed,
        "mainloop_call": mainloop_call,
        "other_call": lambda *_: lambda i: 20.0,
        "graph_time": graph_time,
        "need_gpu": lambda *_: None,
        "limits": lambda _: DEVICES["sm_90a"],
        "device_name": lambda _: "NVIDIA H200",
        "provenance": lambda *_: {"device": "NVIDIA H200"},
    }.items():
        monkeypatch.setattr(prefill_tuner, name, value)
    return faults


def test_what_wins_is_written(machine: list[str], tmp_path: Path) -> None:
    names: list[str] = []
    chosen = cases([Shape("", 128, 256), Shape("", 64, 64)], tokens=(65, 129), layouts=("dense", "nibble"))
    found = tune_prefill(chosen, output=tmp_path / "t.json", progress=names.append)
    json.dumps(found)
    assert names == [str(case) for case in chosen]
    assert found["mainloop_tokens"] == {"128x256": [65, 129], "64x64": [65, 129]}
    assert read_table(tmp_path / "t.json").mainloop_tokens == ((64, 64, 65, 129), (128, 256, 65, 129))
    machine.append("error")
    found = tune_prefill(chosen[:1], output=tmp_path / "t.json")
    assert [one["fault"] for one in found["compared"]] == ["errs too much"]
    assert read_table(tmp_path / "t.json").mainloop_tokens == ((64, 64, 65, 129),)


def test_launches_that_differ_do_not_count(machine: list[str], tmp_path: Path) -> None:
    machine.append("bits")
    found = tune_prefill(cases([Shape("", 128, 256)], tokens=(65,)), output=tmp_path / "t.json")
    assert found["compared"][0]["fault"]
    assert found["compared"][0]["microseconds"] is None
    assert found["mainloop_tokens"] == {}


def test_a_case_without_the_kernel_is_refused(machine: list[str], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"expected a case that the prefill kernel takes, got 64x32"):
        tune_prefill(cases([Shape("", 64, 32)], tokens=(65,)), output=tmp_path / "t.json")
