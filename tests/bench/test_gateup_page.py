"""The page's tables of gate and up in FP8, from a small made-up file."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for name in ("render_results", "render_gateup"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("render_gateup"), importlib.import_module("render_results")


def timed(what: str, us: float, tokens: int = 8, dtype: str = "bfloat16", **more: Any) -> dict[str, Any]:
    return {"timed": what, "us": us, "shape": "17408x5120", "tokens": tokens, "dtype": dtype, **more}


@pytest.fixture
def document() -> dict[str, Any]:
    worst = {"float16 pair": {"error": 3.2e-4, "torch_error": 3.6e-4}}
    return {
        "provenance": {
            "device": "NVIDIA H200",
            "driver": "1",
            "torch": "2",
            "cuda": "13",
            "commit": "abc",
            "dirty": False,
            "command": "python scripts/measure_gateup_gpu.py",
        },
        "parts": {
            "check": {"ended": "done", "entries": [{"check": {"cases": 500, "bad": 0, "worst": worst}}]},
            "kernel": {
                "ended": "done",
                "entries": [
                    timed("kernel gate+up+SiLU", 45.0, dtype="float16"),
                    timed("kernel gate+up+SiLU", 46.0, dtype="float16", round=1),
                    timed("kernel gate+up+SiLU", 45.2, dtype="float16", round=2),
                    timed("kernel FFN", 70.0, dtype="float16"),
                ],
            },
            "arms": {
                "ended": "done",
                "entries": [
                    timed("cuBLASLt two calls: gate+up+SiLU", 81.9),
                    timed("cuBLASLt two calls: FFN", 116.1),
                ],
            },
            "configs": {"ended": "done", "entries": [timed("config down", 1.0), timed("config down", 9.0)]},
            "equality": {
                "ended": "done",
                "entries": [
                    {"equality": "equal", "why": None, "shape": "768x2048", "tokens": 8, "dtype": "bfloat16"},
                    {
                        "equality": "declined",
                        "why": "8 of 98304",
                        "shape": "6144x6144",
                        "tokens": 8,
                        "dtype": "bfloat16",
                    },
                ],
            },
        },
    }


def test_tables(pages: tuple[ModuleType, ModuleType], document: dict[str, Any]) -> None:
    gateup, results = pages
    text = gateup.section(document, results.table)
    assert "| 17408x5120 | 8 | 45.2 | - | 81.9 | - | - |" in text
    assert "| 17408x5120 | 8 | 70.0 | - | 116.1 | - | - |" in text
    assert "| 6144x6144 | 8 | bf16 | declined | 8 of 98304 |" in text
    assert "1 of these times are medians over 3 processes, which lie at most 2.2 % apart" in text
    assert "500 calls of awkward shapes" in text


def test_summary(pages: tuple[ModuleType, ModuleType], document: dict[str, Any]) -> None:
    gateup, _ = pages
    text = gateup.summary(document)
    assert "gate, up and SiLU take 45 to 45 µs (two cuBLASLt calls with 8-bit activations: 82 to 82)" in text
    assert gateup.summary({**document, "parts": {}}) == ""


def test_the_page_works_with_and_without_the_file(
    pages: tuple[ModuleType, ModuleType], document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, results = pages
    monkeypatch.setattr(results, "load", lambda name: document if name == "gateup_h200.json" else None)
    assert "Gate and up in FP8" in results.sections()
    monkeypatch.setattr(results, "load", lambda name: None)
    assert "Gate and up in FP8" not in results.sections()
