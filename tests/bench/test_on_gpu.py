"""A tiny shape end to end: what a benchmark and a tuning write. Nothing here says how fast."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from w3pack.bench.shapes import Case, Shape, cases

pytestmark = pytest.mark.gpu
TINY = [Shape("", 320, 512)]


def supported() -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("no kernels for this GPU")


def test_a_benchmark_of_a_tiny_shape() -> None:
    from w3pack.bench.suite import run

    supported()
    chosen = cases(TINY, tokens=(1, 16, 33, 100), layouts=("dense", "nibble"), qmap_dtypes=("int8", "float16"))
    names: list[str] = []
    found = run(chosen, command="test", progress=names.append)
    json.dumps(found)
    assert len(names) == len(chosen)
    assert len(found["entries"]) == 12
    assert len(found["prefill"]) == 4
    sample = json.loads((Path(__file__).parent / "sample.json").read_text())
    assert list(found) == list(sample)
    for kind in ("entries", "prefill"):
        assert set(found[kind][0]) >= set(sample[kind][0]) - {"ceiling_microseconds", "do_bench_microseconds"}
    assert set(found["entries"][0]) == set(sample["entries"][0])
    assert set(found["provenance"]) == set(sample["provenance"])
    for entry in found["entries"] + found["prefill"]:
        assert 0 < entry["low"] <= entry["microseconds"] <= entry["high"]
        assert entry["relative_error"] <= 2 * entry["torch_relative_error"] + 1e-5
    for entry in found["entries"]:
        assert entry["bytes"] == Case(320, 512, 1, layout=entry["layout"], qmap_dtype=entry["qmap_dtype"]).spec.nbytes
        assert entry["ceiling_microseconds"] > 0
        assert entry["config"]["blocks"] >= 1
    assert found["provenance"]["device"] == torch.cuda.get_device_name(0)


def test_tuning_a_tiny_shape(tmp_path: Path) -> None:
    from w3pack.bench.tuner import tune
    from w3pack.ops.device import limits
    from w3pack.ops.w3_config import make_plan
    from w3pack.ops.w3_table import read_table

    supported()
    path = tmp_path / "table.json"
    chosen = cases(TINY, tokens=(1, 33))
    found = tune(chosen, output=path, limit=6)
    json.dumps(found)
    assert found["failed"] == []
    table = read_table(path)
    assert [(entry.rows, entry.tokens, entry.x_dtype) for entry in table.entries] == [(320, 1, None), (320, 33, None)]
    for case, entry in zip(chosen, table.entries, strict=True):
        assert make_plan(case.desc(limits(0)), entry.config).config == entry.config
    again = tune(chosen[:1], output=path, limit=3)
    assert len(again["tuned"]) == 1
    assert len(read_table(path).entries) == 2


def test_a_fault_is_found_before_anything_is_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from w3pack.bench import tuner

    supported()

    def wrong(self: Any, plan: Any) -> str:
        return "errs too much"

    monkeypatch.setattr(tuner.Trial, "fault", wrong)
    found = tuner.tune(cases(TINY, tokens=(1,)), output=tmp_path / "table.json", limit=3)
    assert found["tuned"] == []
    assert "errs too much" in found["failed"][0]


def test_time_of_a_graph_and_of_single_calls() -> None:
    from w3pack.bench.timing import bench_like_do_bench, graph_time

    data = [torch.zeros(1 << 20, device="cuda") for _ in range(3)]
    timing = graph_time(lambda i: data[i].add_(1), copies=3, repeats=8, outer=5)
    eager = bench_like_do_bench(lambda i: data[i].add_(1), copies=3, calls=5)
    assert math.isfinite(timing.median_us)
    assert 0 < timing.low_us <= timing.median_us <= timing.high_us
    assert eager.median_us > 0


def test_a_ceiling_takes_longer_than_nothing() -> None:
    from w3pack.bench.ceiling import empty_kernel, read_ceiling
    from w3pack.ops.device import limits

    supported()
    device = limits(0)
    with torch.cuda.device(0):
        ceiling = read_ceiling(10_000_008, 0, device)
        assert ceiling.nbytes == 10_000_008
        assert ceiling.timing.median_us > empty_kernel(0, device).median_us > 0
        assert 0 < ceiling.terabytes_per_second < 100
