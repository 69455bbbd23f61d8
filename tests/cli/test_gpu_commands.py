"""`bench`, `tune` and `doctor`: exit codes without a GPU, what they print, what they hand on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from w3pack.bench import doctor, suite, tuner
from w3pack.bench.shapes import Case

Cli = Callable[..., Any]
CONFIG = {
    "token_tiles": 1,
    "row_warps": 2,
    "split_warps": 4,
    "token_warps": 1,
    "slots": 4,
    "ring": 0,
    "blocks": 132,
    "warpgroups": True,
}
SOURCE = {
    "device": "NVIDIA H200",
    "driver": "580.0",
    "clocks": {"sm_mhz": 1980.0},
    "torch": "2.11",
    "cuda": "13.0",
    "nvrtc": "13.0",
}


@pytest.fixture
def document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(__file__).parents[1] / "bench" / "sample.json").read_text())
    return found


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "driver_lists_gpus", lambda: False)


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("command", [("bench",), ("tune",), ("bench", "--json", "-q"), ("tune", "--shape", "64x64")])
def test_without_a_gpu_one_sentence_and_code_3(refused: Cli, command: tuple[str, ...]) -> None:
    refused(3, *command, says="w3pack doctor")


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("bench", "--model", "gpt-5"), "expected a model"),
        (("bench", "--shape", "4096"), "expected a shape"),
        (("tune", "--tokens", "0"), "expected token counts"),
        (("tune", "--tokens", "8,65"), "at most 64"),
        (("bench", "--layout", "sparse"), "sparse"),
        (("tune", "--qmap", "int4"), "int4"),
        (("bench", "--dtype", "float32"), "float32"),
        (("bench", "--device", "-1"), "--device"),
    ],
)
def test_usage(refused: Cli, command: tuple[str, ...], says: str) -> None:
    refused(2, *command, says=says)


def test_bench_hands_on_what_was_chosen_and_prints_it(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, document: dict[str, Any]
) -> None:
    chosen: list[Case] = []

    def run(cases: Any, **options: Any) -> dict[str, Any]:
        chosen.extend(cases)
        assert options["command"].startswith("w3pack bench")
        for case in cases:
            options["progress"](str(case))
        return document

    monkeypatch.setattr(suite, "run", run)
    shape = ("--shape", "64x128", "--tokens", "1,8")
    result = cli("bench", *shape, "--layout", "dense", "--qmap", "int8", "--dtype", "bfloat16", "--group-size", "64")
    assert (result.code, result.err) == (0, "")
    assert chosen == [Case(64, 128, tokens, group_size=64, x_dtype="bfloat16") for tokens in (1, 8)]
    assert "28672 x 8192" in result.out
    assert "NVIDIA H200" in result.out
    chosen.clear()
    assert cli("bench", "--json", "--model", "limits", "--tokens", "1").json == document
    assert len(chosen) == 8 * 2 * 2


def test_tune_hands_on_what_was_chosen_and_prints_it(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entry = Case(64, 128, 8).to_dict() | {"config": CONFIG, "microseconds": 4.0, "microseconds_before": None}
    found = {
        "table": "tables/nvidia_h200.json",
        "provenance": SOURCE,
        "tuned": [entry | {"scale_sets": 1, "tried": 12, "refused": {"spills": 2}}],
        "failed": ["64x64: expected a sound config, got none"],
    }
    options: dict[str, Any] = {}

    def tune(cases: Any, **given: Any) -> dict[str, Any]:
        options.update(given, cases=cases)
        return found

    monkeypatch.setattr(tuner, "tune", tune)
    result = cli("tune", "--shape", "64x128", "--tokens", "8", "--output", tmp_path / "t.json", "--candidates", "12")
    assert (result.code, result.err) == (0, "")
    assert (options["limit"], options["output"], len(options["cases"])) == (12, tmp_path / "t.json", 4)
    assert "64 x 128" in result.out
    assert "got none" in result.out
    assert cli("tune", "--json").json == found


@pytest.mark.usefixtures("without_gpu")
def test_doctor_without_a_gpu_is_fine(cli: Cli) -> None:
    result = cli("doctor")
    assert (result.code, result.err) == (0, "")
    assert "CPU" in result.out
    assert "OK" in result.out
    found = cli("doctor", "--json")
    assert found.code == 0
    assert found.json["ok"] is True
    assert found.json["gpus"] == []


@pytest.mark.usefixtures("without_gpu")
def test_doctor_with_a_problem_prints_the_report_and_ends_with_the_remedy(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "driver_lists_gpus", lambda: True)
    for flags in ((), ("--json",)):
        result = cli("doctor", *flags)
        assert result.code == 1
        assert result.err.startswith("w3pack: expected ")
        assert result.err.count("\n") == 1
        assert "W3PACK_LOG" not in result.err
        assert "torch" in result.out
    assert json.loads(result.out)["ok"] is False


def test_doctor_shows_a_gpu(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctor.diagnose()
    kernel = {"linear": "576x576", "kernel": "w3_decode", "arch": "sm_90a", "origin": "compiled"}
    found.gpus = [
        {
            "index": 0,
            "name": "NVIDIA H200",
            "capability": "9.0",
            "multiprocessors": 132,
            "memory_bytes": 150 * 10**9,
            "driver": None,
            "supported": True,
            "kernels": [kernel | {"build_seconds": 1.25, "registers": None}],
            "relative_error": 2e-4,
        }
    ]
    found.problems = []
    monkeypatch.setattr(doctor, "diagnose", lambda: found)
    result = cli("doctor")
    assert result.code == 0
    assert "NVIDIA H200" in result.out
    assert "compiled" in result.out


@pytest.mark.gpu
def test_doctor_on_this_machine(cli: Cli) -> None:
    result = cli("doctor", "--json")
    assert result.code == 0, result.err
    assert result.json["gpus"]


@pytest.mark.gpu
def test_bench_and_tune_a_tiny_shape(cli: Cli, tmp_path: Path) -> None:
    form = ("--shape", "192x256", "--tokens", "1,17", "--layout", "dense", "--qmap", "int8", "--json")
    measured = cli("bench", *form)
    assert measured.code == 0, measured.err
    assert [entry["tokens"] for entry in measured.json["entries"]] == [1, 17]
    tuned = cli("tune", *form, "--candidates", "4", "--output", tmp_path / "table.json")
    assert tuned.code == 0, tuned.err
    assert len(json.loads((tmp_path / "table.json").read_text())["entries"]) == 2
