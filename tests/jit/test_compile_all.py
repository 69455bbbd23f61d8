"""The script that builds everything: its table, its verdict, its files."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import w3pack
from w3pack.jit import KernelText, Store, ToolchainError, bindings

SCRIPT = Path(w3pack.__file__).parents[1] / "scripts" / "compile_all.py"
GOOD = [KernelText("scale.cu", "scale", (("FACTOR", factor),)) for factor in (2, 3)]
BAD = KernelText("scale.cu", "scale")
SPILLS = KernelText("spills.cu", "spills")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    try:
        bindings.nvrtc()
    except ToolchainError as error:
        pytest.skip(str(error))
    spec = importlib.util.spec_from_file_location("compile_all", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "compile_all", module)
    monkeypatch.syspath_prepend(str(SCRIPT.parent))  # the processes of the pool import it by name
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("jobs", [1, 2])
def test_sound_kernels_pass(
    jobs: int, script: Any, kernels: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.json"
    arguments = ["--arch", "sm_80", "sm_90a", "--jobs", str(jobs), "--kernels", str(kernels), "--json", str(output)]
    assert script.main(arguments, lambda arch: GOOD) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["kernel", "defines", "arch", "registers", "shared", "spill", "seconds"]
    assert [line.split()[:3] for line in lines[1:5]] == [
        ["scale", f"FACTOR={factor}", arch] for arch in ("sm_80", "sm_90a") for factor in (2, 3)
    ]
    assert lines[5].startswith("4 of 4 are sound; NVRTC ")
    document = json.loads(output.read_text())
    assert [row["fault"] for row in document["kernels"]] == [None] * 4
    assert document["kernels"][0]["defines"] == {"FACTOR": 2}
    assert document["kernels"][0]["registers"] > 0
    assert not cache.exists()


def test_failures_and_spills_fail_and_the_rest_is_built(
    script: Any, kernels: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--arch", "sm_86", "--jobs", "2", "--kernels", str(kernels)]
    assert script.main(arguments, lambda arch: [BAD, SPILLS, *GOOD]) == 1
    out = capsys.readouterr().out
    assert out.count("FAIL") == 2
    assert 'identifier "FACTOR" is undefined' in out
    assert "expected no spills of spills.cu:spills for sm_86, got " in out
    assert "2 of 4 are sound" in out


def test_the_cache_is_used_when_asked_for(script: Any, kernels: Path, cache: Path) -> None:
    arguments = ["--arch", "sm_80", "--jobs", "1", "--kernels", str(kernels), "--use-cache"]
    assert script.main(arguments, lambda arch: GOOD) == 0
    assert len(list((cache / "cubins").glob("*.cubin"))) == 2
    assert Store(kernels=kernels).find(GOOD[0], "sm_80").origin == "cache"


def test_seeds_are_found_by_the_store(script: Any, kernels: Path, tmp_path: Path) -> None:
    seeded = tmp_path / "seeded"
    arguments = ["--arch", "sm_80", "--jobs", "1", "--kernels", str(kernels), "--seed", str(seeded)]
    assert script.main(arguments, lambda arch: [*GOOD, SPILLS]) == 1
    assert len(list(seeded.iterdir())) == 2
    assert Store(kernels=kernels, seeded=seeded).find(GOOD[0], "sm_80").origin == "seeded"


def test_nothing_to_build_fails(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--arch", "sm_80"], lambda arch: []) == 1
    assert capsys.readouterr().err == "expected kernels to build for sm_80, got none\n"


def test_without_nvrtc_it_is_a_sentence(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> None:
        raise ToolchainError("expected NVRTC, got none; install it")

    monkeypatch.setattr(bindings, "nvrtc", missing)
    assert script.main([], lambda arch: GOOD) == 1
    assert "expected NVRTC, got none; install it" in capsys.readouterr().err
