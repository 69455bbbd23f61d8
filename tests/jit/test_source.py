"""Kernel texts are values; what is rendered and digested decides the key."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import w3pack
from w3pack.errors import ResourceError, UsageError
from w3pack.jit import KernelText, kernels_folder, source


def test_order_of_defines_does_not_matter() -> None:
    one = KernelText("a.cu", "a", (("Y", 2), ("X", 1)))
    two = KernelText(file="a.cu", entry="a", defines=(("X", 1), ("Y", 2)))
    assert one == two
    assert hash(one) == hash(two)
    assert str(one) == "a.cu:a X=1 Y=2"


@pytest.mark.parametrize("file", ["../a.cu", "/a.cu", "a.cuh", "", 'a"\n.cu'])
def test_a_file_outside_the_folder_is_refused(file: str) -> None:
    with pytest.raises(UsageError, match=r"expected a \.cu file inside the kernels folder"):
        KernelText(file, "a")


def test_names_are_identifiers_and_unique() -> None:
    with pytest.raises(UsageError, match="expected an identifier"):
        KernelText("a.cu", "a b")
    with pytest.raises(UsageError, match="expected an identifier"):
        KernelText("a.cu", "a", (("X\n#include", 1),))
    with pytest.raises(UsageError, match="each define of a once"):
        KernelText("a.cu", "a", (("X", 1), ("X", 2)))


def test_rendered_text_has_defines_and_keeps_line_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text("body\n")
    text = KernelText("a.cu", "a", (("Y", -2), ("X", 1)))
    assert source.render(text, tmp_path) == '#define X 1\n#define Y -2\n#line 1 "a.cu"\nbody\n'


def test_a_missing_file_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"expected the kernel text .*a\.cu, got: .*; reinstall"):
        source.render(KernelText("a.cu", "a"), tmp_path)


def test_digest_sees_names_and_bytes_of_device_code_only(tmp_path: Path) -> None:
    def digest() -> str:
        return source.folder_digest(tmp_path)

    (tmp_path / "inner").mkdir()
    (tmp_path / "a.cu").write_text("a")
    (tmp_path / "inner" / "b.cuh").write_text("b")
    seen = [digest()]
    (tmp_path / "README.md").write_text("prose")
    assert digest() == seen[0]
    (tmp_path / "inner" / "b.cuh").write_text("c")
    seen.append(digest())
    (tmp_path / "inner" / "b.cuh").rename(tmp_path / "b.cuh")
    seen.append(digest())
    (tmp_path / "new.cuh").write_text("")
    seen.append(digest())
    assert len(set(seen)) == len(seen)


def test_folder_is_the_packages_own_or_the_checkouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "w3pack"
    (package / "jit").mkdir(parents=True)
    monkeypatch.setattr(source, "__file__", str(package / "jit" / "source.py"))
    (tmp_path / "kernels").mkdir()  # in site-packages, this is another package
    with pytest.raises(ResourceError, match="reinstall w3pack"):
        kernels_folder()
    (tmp_path / "pyproject.toml").touch()
    assert kernels_folder() == tmp_path / "kernels"
    (package / "kernels").mkdir()
    assert kernels_folder() == package / "kernels"


def test_import_brings_no_cuda_and_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; before = set(sys.modules); import w3pack.jit; "
        "found = {name.partition('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names); "
        "print([name for name in found if not name.startswith('w3pack')])"
    )
    root = Path(w3pack.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(root), "W3PACK_CACHE_DIR": str(tmp_path / "cache")},
        timeout=120,
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")
    assert list(tmp_path.iterdir()) == []
