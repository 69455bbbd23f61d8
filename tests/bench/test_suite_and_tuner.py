"""What the suite and the tuner do with times and results, the GPU replaced by the reference and a made-up clock."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from w3pack.bench import partials, suite, tuner
from w3pack.bench.ceiling import Ceiling
from w3pack.bench.shapes import Shape, cases
from w3pack.bench.timing import Timing
from w3pack.errors import UsageError, W3PackError
from w3pack.ops import w3_launch
from w3pack.ops.w3_config import DeviceLimits, W3Config, W3Plan
from w3pack.ops.w3_table import read_table
from w3pack.reference import w3

H200 = DeviceLimits(arch="sm_90a", multiprocessors=132, shared_bytes=232448)
SHAPES = [Shape("", 128, 256)]
SOURCE = {"device": "NVIDIA H200"}


class Machine:
    """A GPU that computes by the reference; tests say how fast each config is and what it gets wrong."""

    def __init__(self) -> None:
        self.plan: W3Plan | None = None
        self.seconds: Callable[[W3Config], float] = lambda config: 20.0 - config.slots
        self.broken: Callable[[W3Config], str | None] = lambda config: None
        self.launches = 0
        self.is_clean = True
        self.timed: list[W3Config] = []

    def run_decode(self, plan: W3Plan, x: Any, codes: Any, scales: Any, qmap: Any, bias: Any, y: torch.Tensor) -> None:
        self.plan, self.launches = plan, self.launches + 1
        spec = cases([Shape("", plan.desc.rows, plan.desc.columns)], tokens=(1,), layouts=(plan.desc.layout,))[0].spec
        y.copy_(w3.linear(x, codes, scales, qmap, bias, spec=spec))
        match self.broken(plan.config):
            case "bits":
                y[0, 0] += self.launches
            case "error":
                y.mul_(1.01)
            case "nan":
                y[0, 0] = float("nan")
            case "dirty":
                self.is_clean = False
            case "launch":
                raise W3PackError("refused")

    def graph_time(self, fn: Callable[[int], object], *, copies: int, **_: Any) -> Timing:
        self.plan = None
        for i in range(copies):
            fn(i)
        if self.plan is None:
            return Timing.of([100.0])
        self.timed.append(self.plan.config)
        return Timing.of([self.seconds(self.plan.config)])

    def clean(self, device_index: int, nbytes: int) -> bool:
        was, self.is_clean = self.is_clean, True
        return was

    def load_all(self, texts: Any, device_index: int, **_: Any) -> dict[Any, Any]:
        return {text: SimpleNamespace(compiled=SimpleNamespace(spill_bytes=0)) for text in texts}


@contextmanager
def borrowed(device_index: int) -> Iterator[partials.Captures]:
    yield partials.Captures()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(w3_launch, "run_decode", made.run_decode)
    monkeypatch.setattr(suite.Bench, "device", torch.device("cpu"))
    monkeypatch.setattr(suite.Bench, "copies", lambda *_: 2)
    monkeypatch.setattr(suite, "read_ceiling", lambda nbytes, *_: Ceiling(nbytes, Timing.of([5.0]), "made up"))
    monkeypatch.setattr(suite, "empty_kernel", lambda *_: Timing.of([0.8]))
    monkeypatch.setattr(suite, "bench_like_do_bench", made.graph_time)
    monkeypatch.setattr(suite, "borrowed", borrowed)
    monkeypatch.setattr(partials, "borrowed", borrowed)
    monkeypatch.setattr(partials, "clean", made.clean)
    for module in (suite, tuner):
        monkeypatch.setattr(module, "need_gpu", lambda *_: None)
        monkeypatch.setattr(module, "limits", lambda _: H200)
        monkeypatch.setattr(module, "device_name", lambda _: "NVIDIA H200")
        monkeypatch.setattr(module, "table_of", lambda _name, _arch: None)
        monkeypatch.setattr(module, "provenance", lambda *_: SOURCE)
        monkeypatch.setattr(module, "graph_time", made.graph_time)
        monkeypatch.setattr(module, "load_all", made.load_all)
    return made


@pytest.mark.usefixtures("machine")
def test_the_suite_says_how_fast_and_how_exact() -> None:
    chosen = cases(SHAPES, tokens=(1, 64, 65), layouts=("dense", "nibble"), x_dtypes=("float16",))
    names: list[str] = []
    found = suite.run(chosen, progress=names.append)
    json.dumps(found)
    few, many = [case for case in chosen if case.tokens < 65], [case for case in chosen if case.tokens == 65]
    assert names == [str(case) for case in few + many]  # clocks fall under many tokens, so they come last
    assert (len(found["entries"]), len(found["prefill"])) == (4, 2)
    for entry in found["entries"]:
        assert entry["torch_microseconds"] == 100.0
        assert entry["share_of_ceiling"] == round(5.0 / entry["microseconds"], 4)
        assert entry["speed_against_torch"] == round(100.0 / entry["microseconds"], 4)
        assert 0 < entry["relative_error"] == entry["torch_relative_error"] < 1e-2
    for entry in found["prefill"]:
        assert entry["way"] == "dequantise"
        assert entry["mainloop_microseconds"] is None
        assert entry["without_mainloop_microseconds"] == entry["microseconds"] == 100.0
    assert found["ceiling_kind"] == "made up"
    assert found["provenance"] == SOURCE


def test_the_way_without_the_prefill_kernel_is_timed_where_the_table_chooses_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[int] = []

    def graph_time(fn: Callable[[int], object], **given: Any) -> Timing:
        before = len(called)
        timing = machine.graph_time(fn, **given)
        return Timing.of([300.0]) if len(called) > before else timing

    monkeypatch.setattr(suite, "graph_time", graph_time)
    monkeypatch.setattr(suite, "chosen", lambda case, weights: case.tokens == 65)
    monkeypatch.setattr(suite, "other_call", lambda *_: called.append)
    with_it, without_it = suite.run(cases(SHAPES, tokens=(65, 66)))["prefill"]
    assert (with_it["way"], without_it["way"]) == ("mainloop", "dequantise")
    assert (with_it["mainloop_microseconds"], with_it["without_mainloop_microseconds"]) == (100.0, 300.0)
    assert (without_it["mainloop_microseconds"], without_it["without_mainloop_microseconds"]) == (None, 100.0)
    assert called == [0, 1]  # one call for each operand set, of the first case alone


def test_a_kernel_that_does_not_build_ends_the_suite(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "load_all", lambda texts, _: {text: W3PackError("no compiler") for text in texts})
    with pytest.raises(W3PackError, match="no compiler"):
        suite.run(cases(SHAPES, tokens=(1,)))


def test_the_fastest_config_wins(machine: Machine, tmp_path: Path) -> None:
    found = tuner.tune(cases(SHAPES, tokens=(8, 33)), output=tmp_path / "t.json")
    json.dumps(found)
    assert found["failed"] == []
    table = read_table(tmp_path / "t.json")
    assert [entry.tokens for entry in table.entries] == [8, 33]
    for entry in table.entries:
        assert entry.x_dtype is None
        rivals = [config for config in machine.timed if config.all_token_tiles == entry.config.all_token_tiles]
        assert len(set(rivals)) > 10
        assert entry.config.slots == max(config.slots for config in rivals)
        assert entry.microseconds == 20.0 - entry.config.slots
    assert all(one["microseconds"] <= one["microseconds_before"] for one in found["tuned"])
    document = json.loads((tmp_path / "t.json").read_text())
    assert document["provenance"] == SOURCE


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("bits", "bits differ between launches"),
        ("error", "errs too much"),
        ("nan", "errs too much"),
        ("dirty", "leaves partial sums behind"),
        ("launch", "does not launch"),
    ],
)
def test_a_config_that_is_not_sound_is_never_timed(machine: Machine, tmp_path: Path, fault: str, reason: str) -> None:
    machine.broken = lambda config: fault if config.slots > 4 else None
    found = tuner.tune(cases(SHAPES, tokens=(8,)), output=tmp_path / "t.json")
    (one,) = found["tuned"]
    assert one["refused"][reason] >= 1
    assert set(one["refused"]) == {reason}
    assert all(config.slots <= 4 for config in machine.timed)
    assert one["config"]["slots"] <= 4


def test_nothing_sound_is_a_failure_of_that_case_alone(machine: Machine, tmp_path: Path) -> None:
    machine.broken = lambda config: "error" if config.all_token_tiles == 1 else None
    found = tuner.tune(cases(SHAPES, tokens=(8, 16)), output=tmp_path / "t.json")
    assert len(found["failed"]) == 1
    assert "errs too much" in found["failed"][0]
    assert [entry.tokens for entry in read_table(tmp_path / "t.json").entries] == [16]


def test_kernels_that_spill_or_do_not_build_are_left_out(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def load_all(texts: Any, device_index: int) -> dict[Any, Any]:
        found = machine.load_all(texts, device_index)
        for text in found:
            slots = dict(text.defines).get("W3_SLOTS")
            if slots == 2:
                found[text] = SimpleNamespace(compiled=SimpleNamespace(spill_bytes=8))
            elif slots == 3:
                found[text] = W3PackError("no")
        return found

    monkeypatch.setattr(tuner, "load_all", load_all)
    found = tuner.tune(cases(SHAPES, tokens=(8,)), output=tmp_path / "t.json", limit=200)
    assert set(found["tuned"][0]["refused"]) == {"spills", "does not build"}
    assert all(config.slots > 3 for config in machine.timed)


def test_choices_for_two_dtypes_stand_side_by_side(machine: Machine, tmp_path: Path) -> None:
    tuner.tune(cases(SHAPES, tokens=(8,), x_dtypes=("float16", "bfloat16")), output=tmp_path / "t.json")
    assert [entry.x_dtype for entry in read_table(tmp_path / "t.json").entries] == ["bfloat16", "float16"]
    assert machine.timed


@pytest.mark.usefixtures("machine")
def test_more_tokens_than_a_kernel_takes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at most 64"):
        tuner.tune(cases(SHAPES, tokens=(8, 65)), output=tmp_path / "t.json")
