"""What is installed and what is missing, as facts and sentences."""

from __future__ import annotations

import importlib
import importlib.metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from w3pack.jit import Compiled, KernelText, Store, ToolchainError, bindings, compile_text, toolchain

TEXT = KernelText(file="scale.cu", entry="scale", defines=(("FACTOR", 2),))


def pretend(monkeypatch: pytest.MonkeyPatch, **modules: Any) -> None:
    """Only these modules of `cuda` exist; double underscores stand for dots."""
    real = importlib.import_module

    def fake(name: str, package: str | None = None) -> Any:
        if not name.startswith("cuda"):
            return real(name, package)
        if name.replace(".", "__") not in modules:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return modules[name.replace(".", "__")]

    monkeypatch.setattr(bindings.importlib, "import_module", fake)


def test_missing_packages_are_sentences(monkeypatch: pytest.MonkeyPatch, kernels: Path, cache: Path) -> None:
    pretend(monkeypatch)
    monkeypatch.setattr(importlib.metadata, "version", _not_installed)
    report = toolchain()
    assert (report.cuda_core, report.cuda_bindings, report.nvrtc, report.can_compile) == (None, None, None, False)
    assert len(report.problems) == 2
    for problem, package in zip(report.problems, ("cuda-core", "cuda-bindings"), strict=True):
        assert problem.startswith(f"expected the package {package} for CUDA kernels, got: No module named")
        assert problem.endswith('; run `pip install "w3pack[cuda]"`')
    with pytest.raises(ToolchainError, match="expected the package cuda-bindings"):
        compile_text(TEXT, "sm_80", kernels)
    assert not cache.exists()


def _not_installed(package: str) -> str:
    raise importlib.metadata.PackageNotFoundError(package)


def test_a_missing_library_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise RuntimeError('Failure finding "libnvrtc.so.13":\n  No such file')

    pretend(monkeypatch, cuda__bindings__nvrtc=SimpleNamespace(nvrtcVersion=missing))
    with pytest.raises(ToolchainError) as raised:
        bindings.nvrtc()
    assert str(raised.value) == (
        'expected the NVRTC library of package nvidia-cuda-nvrtc, got: Failure finding "libnvrtc.so.13": No such file; '
        'run `pip install "w3pack[cuda]"`'
    )


def test_a_missing_driver_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(flags: int) -> None:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    pretend(monkeypatch, cuda__bindings__driver=SimpleNamespace(cuInit=missing))
    with pytest.raises(ToolchainError, match="expected an NVIDIA driver, got: Failed to dlopen"):
        bindings.driver()


def test_object_code_of_new_and_of_older_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    class New: ...

    class Old: ...

    pretend(monkeypatch, cuda__core=SimpleNamespace(ObjectCode=New))
    assert bindings.object_code() is New
    bindings.object_code.cache_clear()
    older = {"cuda__core": SimpleNamespace(), "cuda__core__experimental": SimpleNamespace(ObjectCode=Old)}
    pretend(monkeypatch, **older)
    assert bindings.object_code() is Old


def test_the_cache_is_counted_and_not_made(kernels: Path, tmp_path: Path, cache: Path) -> None:
    own = Store(kernels=kernels, seeded=tmp_path / "seeded")
    empty = toolchain(own)
    assert (empty.cache_folder, empty.cache_writable) == (cache / "cubins", True)
    assert (empty.cache_entries, empty.cache_bytes, empty.seeded_entries) == (0, 0, 0)
    assert not cache.exists()
    compiled = Compiled(b"\x7fELF", 1, 0, 0, 0, "", 0.1)
    for arch in ("sm_80", "sm_86"):
        own.seed(TEXT, arch, compiled, own.folder)
    own.seed(TEXT, "sm_80", compiled, own.seeded)
    (own.folder / ".scale.partial").write_bytes(bytes(100))
    full = toolchain(own)
    sizes = [path.stat().st_size for path in own.folder.glob("*.cubin")]
    assert (full.cache_entries, full.cache_bytes, full.seeded_entries) == (2, sum(sizes), 1)


def test_a_file_in_the_way_is_not_writable(cache: Path) -> None:
    cache.write_text("")
    assert not toolchain().cache_writable
