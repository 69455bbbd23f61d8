"""Importing does nothing: no torch, no transformers, no output, no CUDA context, no compilation, no files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import w3pack

ROOT = Path(w3pack.__file__).parents[1]


def run(code: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run Python elsewhere, with a cache folder of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "W3PACK_CACHE_DIR": str(tmp_path / "cache")}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=120
    )


def new_modules(statement: str, tmp_path: Path) -> list[str]:
    """Modules that a statement brings in; it must print nothing and leave no file."""
    code = f"import json, sys; before = set(sys.modules); {statement}; print(json.dumps(sorted(set(sys.modules) - before)))"
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
    modules: list[str] = json.loads(done.stdout)
    return modules


@pytest.mark.parametrize(
    "module", ["w3pack", "w3pack.errors", "w3pack.format.layout", "w3pack.format.linear", "w3pack.format.config"]
)
def test_the_package_and_its_format_need_only_the_standard_library(module: str, tmp_path: Path) -> None:
    found = {name.partition(".")[0] for name in new_modules(f"import {module}", tmp_path)}
    assert found.isdisjoint(
        {"torch", "transformers", "numpy", "safetensors", "gguf", "huggingface_hub", "typer", "cuda"}
    )
    assert {name for name in found if not name.startswith("w3pack")} <= set(sys.stdlib_module_names)


def test_version_is_there(tmp_path: Path) -> None:
    done = run("import w3pack; print(w3pack.__version__)", tmp_path)
    assert done.stdout.strip() == w3pack.__version__


def test_importing_twice_hooks_once(tmp_path: Path) -> None:
    code = (
        "import sys, importlib, w3pack, w3pack_autoload; importlib.reload(w3pack); w3pack_autoload.install(); "
        "print(sum(type(finder).__module__ == 'w3pack_autoload' for finder in sys.meta_path))"
    )
    done = run(code, tmp_path)
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_the_operators_create_no_cuda_context(tmp_path: Path) -> None:
    code = (
        "import w3pack.ops.w3_linear, w3pack.runtime.linear, sys, torch; "
        "assert not torch.cuda.is_initialized(); "
        "assert hasattr(torch.ops.w3pack, 'w3_linear'); "
        "assert 'transformers' not in sys.modules; "
        "assert 'torch._inductor' not in sys.modules; "
        "assert 'typer' not in sys.modules"
    )
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr) == ("", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["jit", "ops", "pack", "quantize", "reference", "checkpoint", "runtime", "pipeline", "bench"]
)
def test_rooms_import_without_transformers(name: str) -> None:
    """Every file of a room names neither transformers nor typer at its top level."""
    files = sorted((ROOT / "w3pack" / name).rglob("*.py"))
    assert files
    for path in files:
        for line in path.read_text(encoding="utf-8").splitlines():
            assert not line.lstrip().startswith(
                ("import transformers", "from transformers", "import typer", "from typer")
            )
