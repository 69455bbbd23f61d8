"""Seeded, cached, compiled: the order, the keys, and what may go wrong with files."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import w3pack
from w3pack.errors import ResourceError
from w3pack.jit import Compiled, Found, KernelText, Store, ToolchainError, bindings, cache_folder, default_store, store

TEXT = KernelText(file="scale.cu", entry="scale", defines=(("FACTOR", 2),))
ROOT = Path(w3pack.__file__).parents[1]


class FakeCompiler:
    """Counts builds; the code is the text."""

    def __init__(self) -> None:
        self.built: list[tuple[KernelText, str]] = []

    def __call__(self, text: KernelText, arch: str, folder: Path | None = None) -> Compiled:
        self.built.append((text, arch))
        cubin = f"\x7fELF {text} {arch} {len(self.built)}".encode() + bytes(range(256))
        return Compiled(cubin, 40, 1024, 0, 16, "log\nline", 0.5)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    fake = FakeCompiler()
    monkeypatch.setattr(store, "compile_text", fake)
    monkeypatch.setattr(bindings, "nvrtc_version", lambda: (13, 0))
    return fake


def fresh(kernels: Path, seeded: Path | None = None) -> Store:
    """What a new process would have."""
    return Store(kernels=kernels, seeded=seeded or kernels.parent / "absent")


def entries(cache: Path) -> list[Path]:
    return sorted((cache / "cubins").iterdir())


def test_compiled_once_then_cached_unchanged(compiler: FakeCompiler, kernels: Path, cache: Path) -> None:
    first = fresh(kernels).find(TEXT, "sm_80")
    second = fresh(kernels).find(TEXT, "sm_80")
    assert (first.origin, second.origin) == ("compiled", "cache")
    assert first.compiled == second.compiled
    assert len(compiler.built) == 1
    (path,) = entries(cache)
    assert path.name.startswith("scale-sm_80-")
    assert path.read_bytes().startswith(first.compiled.cubin)  # the CUDA tools can read it


def test_each_part_of_the_key_counts(
    compiler: FakeCompiler, kernels: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def origin(text: KernelText = TEXT, arch: str = "sm_80") -> str:
        return fresh(kernels).find(text, arch).origin

    def new(text: KernelText = TEXT, arch: str = "sm_80") -> bool:
        return (origin(text, arch), origin(text, arch)) == ("compiled", "cache")

    assert new()
    assert new(arch="sm_90a")
    assert new(KernelText("scale.cu", "scale", (("FACTOR", 3),)))
    assert new(KernelText("scale.cu", "scale", (("FACTORS", 2),)))
    (kernels / "scale.cuh").write_text("// changed")
    assert new()
    (kernels / "scale.cu").write_text("// changed")
    assert new()
    monkeypatch.setattr(store, "options_for", lambda arch: (arch, "--other"))
    assert new()
    monkeypatch.setattr(bindings, "nvrtc_version", lambda: (13, 1))
    assert new()
    assert len(entries(cache)) == len(compiler.built) == 8


def test_seeded_wins_and_needs_no_nvrtc(
    compiler: FakeCompiler, kernels: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeded = tmp_path / "seeded"
    cached = fresh(kernels, seeded).find(TEXT, "sm_80").compiled
    own = Compiled(b"\x7fELF own", 1, 2, 0, None, "", 0.1)
    path = fresh(kernels, seeded).seed(TEXT, "sm_80", own, seeded)
    assert path.parent == seeded

    def missing() -> tuple[int, int]:
        raise ToolchainError("no NVRTC")

    monkeypatch.setattr(bindings, "nvrtc_version", missing)
    assert fresh(kernels, seeded).find(TEXT, "sm_80") == Found(own, "seeded")
    assert cached != own
    with pytest.raises(ToolchainError):
        fresh(kernels, seeded).find(TEXT, "sm_86")
    (kernels / "scale.cuh").write_text("// the seeded kernel is another one's now")
    with pytest.raises(ToolchainError):
        fresh(kernels, seeded).find(TEXT, "sm_80")


def damages(whole: bytes) -> dict[str, bytes]:
    middle = len(whole) // 2
    return {
        "empty": b"",
        "short": whole[:20],
        "truncated": whole[:-1],
        "half": whole[:middle],
        "zeroed end": whole[:-60] + bytes(60),
        "one bit of code": bytes([whole[0] ^ 1]) + whole[1:],
        "one bit of facts": whole[:-60] + bytes([whole[-60] ^ 1]) + whole[-59:],
        "longer": whole + b"\0",
    }


@pytest.mark.parametrize("kind", sorted(damages(bytes(200))))
def test_a_damaged_entry_is_built_again(
    kind: str, compiler: FakeCompiler, kernels: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fresh(kernels).find(TEXT, "sm_80")
    (path,) = entries(cache)
    path.write_bytes(damages(path.read_bytes())[kind])
    assert fresh(kernels).find(TEXT, "sm_80").origin == "compiled"
    assert fresh(kernels).find(TEXT, "sm_80").origin == "cache"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "damaged" in caplog.text
    assert entries(cache) == [path]


def test_an_entry_under_anothers_name_is_not_taken(compiler: FakeCompiler, kernels: Path, cache: Path) -> None:
    other = KernelText("scale.cu", "scale", (("FACTOR", 3),))
    for text in (TEXT, other):
        fresh(kernels).find(text, "sm_80")
    one, two = entries(cache)
    one.write_bytes(two.read_bytes())
    assert sorted(fresh(kernels).find(text, "sm_80").origin for text in (TEXT, other)) == ["cache", "compiled"]


def test_a_damaged_seeded_kernel_is_passed_over(compiler: FakeCompiler, kernels: Path, tmp_path: Path) -> None:
    seeded = tmp_path / "seeded"
    path = fresh(kernels).seed(TEXT, "sm_80", compiler(TEXT, "sm_80"), seeded)
    path.write_bytes(path.read_bytes()[:-5])
    assert fresh(kernels, seeded).find(TEXT, "sm_80").origin == "compiled"


def test_a_folder_that_cannot_be_written_warns_once(
    compiler: FakeCompiler, kernels: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, cache: Path
) -> None:
    cache.write_text("a file where the folder would be")
    own = fresh(kernels)
    assert [own.find(TEXT, arch).origin for arch in ("sm_80", "sm_80", "sm_86")] == ["compiled", "cache", "compiled"]
    assert fresh(kernels).find(TEXT, "sm_80").origin == "compiled"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "set W3PACK_CACHE_DIR" in record.getMessage()
    with pytest.raises(ResourceError, match="expected to write"):
        own.seed(TEXT, "sm_80", compiler(TEXT, "sm_80"), cache)


def test_a_full_disk_leaves_nothing_behind(
    compiler: FakeCompiler, kernels: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store.os, "replace", full)
        assert fresh(kernels).find(TEXT, "sm_80").origin == "compiled"
    assert entries(cache) == []
    assert fresh(kernels).find(TEXT, "sm_80").origin == "compiled"
    assert len(entries(cache)) == 1


def test_an_interruption_leaves_nothing_behind(
    compiler: FakeCompiler, kernels: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(store.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fresh(kernels).find(TEXT, "sm_80")
    assert entries(cache) == []


WORKER = """
import sys
from pathlib import Path
from w3pack.jit import Compiled, Found, KernelText, Store, bindings, store
bindings.nvrtc_version = lambda: (13, 0)
store.compile_text = lambda text, arch, folder: Compiled(b"\\x7fELF" + bytes(1 << 20), 40, 0, 0, 0, "", 0.1)
text = KernelText("scale.cu", "scale", (("FACTOR", 2),))
print("ready", flush=True)
sys.stdin.readline()
path = None
for turn in range(60):
    found = Store(kernels=Path(sys.argv[1])).find(text, "sm_80")
    assert found.compiled.cubin == b"\\x7fELF" + bytes(1 << 20), turn
    if turn % 3 == 0:
        for path in Path(sys.argv[2]).glob("*.cubin"):
            path.unlink(missing_ok=True)
print("done")
"""


def test_processes_at_the_same_kernel_do_not_disturb_each_other(kernels: Path, cache: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(kernels), str(cache / "cubins")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": str(ROOT), "W3PACK_CACHE_DIR": str(cache)},
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    results = [None, None]

    def finish(index: int) -> None:
        results[index] = processes[index].communicate("go\n", timeout=120)

    threads = [threading.Thread(target=finish, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [("done\n", "")] * 2  # a damaged file would have been told of on stderr
    assert not [path for path in entries(cache) if path.suffix != ".cubin"]


def test_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("W3PACK_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("W3PACK_CACHE_DIR")
    assert cache_folder() == tmp_path / "shared" / "w3pack"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / "home" / ".cache" / "w3pack"
    assert default_store() is default_store()
    assert default_store().folder == cache_folder() / "cubins"
    assert not (tmp_path / "home").exists()


def test_real_builds_go_through_the_store(kernels: Path) -> None:
    try:
        bindings.nvrtc()
    except ToolchainError as error:
        pytest.skip(str(error))
    first, second = (fresh(kernels).find(TEXT, "sm_90a") for _ in range(2))
    assert (first.origin, second.origin) == ("compiled", "cache")
    assert first.compiled == second.compiled
