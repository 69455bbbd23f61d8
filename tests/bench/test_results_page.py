"""The GPU part of the results page, from a document as the suite makes it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import w3pack

SCRIPTS = Path(w3pack.__file__).parents[1] / "scripts"
PUBLISHED = SCRIPTS.parent / "docs" / "results" / "published_h200.json"


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    import importlib

    monkeypatch.syspath_prepend(str(SCRIPTS))
    for name in ("render_results", "render_gpu", "render_generation"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("render_results")


def test_tables_beside_published_figures(page: ModuleType, document: dict[str, Any]) -> None:
    text = page.render_gpu.section(document, json.loads(PUBLISHED.read_text()), page.table)
    assert text.count("### ") == 3
    rows = [line for line in text.splitlines() if line.startswith("| 28672 x 8192 |")]
    assert rows[0].endswith("| 73.4 | 48.9 | 45.4 |")
    assert rows[1].endswith("| 247 | 84 | 83 |")
    assert "| 26.0 | 86 % | 107.0 | 4.12 |" in rows[0]
    assert next(line for line in text.splitlines() if line.startswith("| 576 x 576 |")).endswith("| - | - | - |")
    assert "measured elsewhere on the same card type" in text
    for line in text.splitlines():
        if line.startswith("|"):
            assert line.endswith("|")
    for block in re.findall(r"(?:^\|.*\n)+", text, re.M):
        assert len({line.count("|") for line in block.splitlines()}) == 1


def test_without_published_figures(page: ModuleType, document: dict[str, Any]) -> None:
    text = page.render_gpu.section(document, None, page.table)
    assert "FLUTE" not in text
    assert "28672 x 8192" in text


def test_summary_has_a_line_for_each_form(page: ModuleType, document: dict[str, Any]) -> None:
    text = page.render_gpu.summary(document, page.table)
    assert "4.1 to 26.8 times" in text
    assert text.count("\n| ") == 3
    assert page.render_gpu.summary({**document, "entries": []}, page.table) == ""


def test_the_page_works_with_and_without_the_file(
    page: ModuleType, document: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    assert "Packed Linears on a GPU" not in page.sections()
    without = page.summary()
    (tmp_path / "w3_h200.json").write_text(json.dumps(document))
    assert "Packed Linears on a GPU" in page.sections()
    assert len(page.summary()) > len(without)


def test_published_figures_are_complete() -> None:
    published = json.loads(PUBLISHED.read_text())
    assert "elsewhere" in published["note"]
    eight = [row for row in published["rows"] if row["tokens"] == 8]
    assert len(eight) == 8
    assert all(name in row for row in published["rows"] for name in published["kernels"])


def test_maps_are_compared_seed_by_seed(page: ModuleType) -> None:
    def row(kind: str, seed: int, kl: float) -> dict[str, Any]:
        return {"map": kind, "seed": seed, "texts": {"t": {"kl_mean": kl}}}

    rows = [row("free", 0, 1.0), row("free", 1, 2.0), row("grid", 0, 1.1), row("grid", 1, 2.0)]
    mean, error = page.kl_ratio(rows, "grid", "free", text="t")
    assert mean == pytest.approx(0.05)
    assert error == pytest.approx(0.05)
    assert page.kl_ratio(rows[:3], "grid", "free", text="t") == (pytest.approx(0.1), None)


def test_bfloat16_stands_beside_float16(page: ModuleType, document: dict[str, Any]) -> None:
    slower = [{**entry, "microseconds": 1.5 * entry["microseconds"]} for entry in document["entries"]]
    text = page.render_gpu.against_float16({**document, "entries": slower}, document, page.table)
    assert text.count("| 1.500 |") == len(document["entries"])
    alone = page.render_gpu.against_float16(document, {**document, "entries": []}, page.table)
    assert alone.count("| - | - |") == len(document["entries"])


def test_generation(page: ModuleType) -> None:
    def model(ms: float) -> dict[str, Any]:
        step = {"milliseconds_a_step": ms, "tokens_a_second": 8000 / ms}
        return {"bytes_held": 5 * 10**9, "bytes_at_most": 6 * 10**9, "graph": {"8": step}, "compiled": {}}

    document = {
        "layers": 32,
        "quantised_layers": 2,
        "prompt_tokens": 32,
        "steps": 64,
        "models": {"bf16": model(8.0), "merged": model(4.0)},
        "speed_against_bf16": {"merged": {"graph": {"8": 2.0}, "compiled": {}}},
        "provenance": {"device": "GPU", "torch": "2", "driver": "5", "command": "python x.py"},
    }
    text = page.render_generation.section(document, page.table)
    assert "| bf16 | captured | 8 | 8.00 | 1000 | - | 5.00 / 6.00 |" in text
    assert "| packed, merged Linears | captured | 8 | 4.00 | 2000 | 2.00 | 5.00 / 6.00 |" in text
    assert "Only 2 layers were quantised" in text
    assert "Only" not in page.render_generation.section({**document, "quantised_layers": 32}, page.table)
