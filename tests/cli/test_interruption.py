"""Full disks, interruptions and resuming: nothing half-written, nothing lost, the same bytes in the end."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import w3pack
from w3pack.checkpoint import staging as staging_module
from w3pack.checkpoint.staging import Staging
from w3pack.checkpoint.tensor_file import ShardWriter
from w3pack.pipeline import quantize_model

Cli = Callable[..., Any]
OPTIONS = ("--qmap", "nf3", "--max-shard-size", "100KB")
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def whole(cli: Cli, pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an uninterrupted run writes."""
    output = tmp_path_factory.mktemp("whole") / "out"
    assert cli("quantize", pristine, "-o", output, *OPTIONS).code == 0
    return output


def stop_after(monkeypatch: pytest.MonkeyPatch, shards: int, error: BaseException) -> None:
    """Raise `error` in the middle of the shard after `shards` finished ones."""
    real_write, real_finish = ShardWriter.write, Staging.finish_shard
    finished: list[str] = []

    def write(self: ShardWriter, name: str, tensor: Any) -> None:
        if len(finished) == shards:
            raise error
        real_write(self, name, tensor)

    def finish(self: Staging, file: str, record: Any) -> None:
        real_finish(self, file, record)
        finished.append(file)

    monkeypatch.setattr(ShardWriter, "write", write)
    monkeypatch.setattr(Staging, "finish_shard", finish)


def looks_like_a_model(folder: Path) -> bool:
    """Whether a loader, or a person, might take any visible or hidden folder below for a finished checkpoint."""
    return any(path.name == "config.json" for path in folder.rglob("*"))


# --- space -----------------------------------------------------------------------------------------------------------


def test_space_is_checked_before_anything_is_written(
    refused: Cli, cli: Cli, pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**12, 10**12, 100_000))
    refused(5, "quantize", pristine, "-o", tmp_path / "out", *OPTIONS, says="free")
    assert not list(tmp_path.iterdir())
    plan = cli("quantize", pristine, "-o", tmp_path / "out", *OPTIONS, "--dry-run")
    assert plan.code == 0
    assert "NOT ENOUGH" in plan.out


@pytest.mark.parametrize("shards", [0, 2])
@pytest.mark.parametrize("earlier", [False, True])
def test_disk_full_while_writing(
    refused: Cli,
    cli: Cli,
    pristine: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shards: int,
    earlier: bool,
    tiny: Any,
) -> None:
    output = tmp_path / "out"
    if earlier:
        assert cli("quantize", pristine, "-o", output, "--qmap", "uniform").code == 0
    before = tiny.snapshot(output)
    real, calls = ShardWriter._write, [0]

    def full(self: ShardWriter, data: bytes | memoryview, *, at: int) -> None:
        calls[0] += 1
        if calls[0] > 5 + 20 * shards:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, data, at=at)

    monkeypatch.setattr(ShardWriter, "_write", full)
    extra = ("--overwrite",) if earlier else ()
    refused(5, "quantize", pristine, "-o", output, *OPTIONS, *extra, says="No space left on device")
    assert tiny.snapshot(output) == before
    assert output.exists() == earlier
    unfinished = list(tmp_path.glob(".*"))
    assert len(unfinished) <= 1
    assert not any(looks_like_a_model(folder) or list(folder.glob("*.partial")) for folder in unfinished)


@pytest.mark.parametrize("where", ["posix_fallocate", "fsync", "replace", "rename", "mkdir", "copyfileobj"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EIO])
def test_every_failing_system_call_is_a_sentence(
    refused: Cli,
    cli: Cli,
    pristine: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    number: int,
    tiny: Any,
) -> None:
    source = Path(shutil.copytree(pristine, tmp_path / "source"))
    (source / "tokenizer.json").write_bytes(b"{}")
    output = tmp_path / "out"
    assert cli("quantize", source, "-o", output, "--only", "model.layers.0.mlp.up_proj", "--qmap", "nf3").code == 0
    before = tiny.snapshot(tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    if where in ("replace", "rename", "mkdir"):
        monkeypatch.setattr(Path, where, fail)
    elif where == "copyfileobj":
        monkeypatch.setattr(shutil, where, fail)
    else:
        monkeypatch.setattr(os, where, fail)
    refused(5, "quantize", source, "-o", output, "--qmap", "nf3", "--overwrite", says=os.strerror(number))
    monkeypatch.undo()
    after = {name: value for name, value in tiny.snapshot(tmp_path).items() if not name.startswith(".")}
    assert after == before


def test_no_permission(refused: Cli, pristine: Path, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    source = Path(shutil.copytree(pristine, tmp_path / "source"))
    (tmp_path / "closed").mkdir(mode=0o500)
    refused(5, "quantize", source, "-o", tmp_path / "closed" / "out", says="Permission denied")
    (source / "model.safetensors").chmod(0)
    refused(5, "quantize", source, "-o", tmp_path / "out", says="Permission denied")


def test_unreadable_companion_is_found_before_the_work(
    refused: Cli, pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(shutil.copytree(pristine, tmp_path / "source"))
    (source / "secret.txt").write_text("x")
    real = Path.open

    def guarded(self: Path, *arguments: Any, **keywords: Any) -> Any:
        if self.name == "secret.txt":
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(self, *arguments, **keywords)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("quantised before the other files were copied")

    monkeypatch.setattr(Path, "open", guarded)
    monkeypatch.setattr(quantize_model, "quantize_weight", never)
    refused(5, "quantize", source, "-o", tmp_path / "out", says="secret.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


# --- interruption and resuming ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_resumed_run_has_the_same_bytes(
    cli: Cli, whole: Path, pristine: Path, tmp_path: Path, shards: int, error: BaseException, tiny: Any
) -> None:
    output = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, shards, error)
        stopped = cli("quantize", pristine, "-o", output, *OPTIONS)
    assert stopped.code == (130 if isinstance(error, KeyboardInterrupt) else 5)
    assert stopped.err.count("\n") == 1
    assert not output.exists()
    assert not looks_like_a_model(tmp_path)
    written: list[str] = []
    real = Staging.finish_shard
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Staging, "finish_shard", lambda self, file, record: (written.append(file), real(self, file, record))
        )
        assert cli("quantize", pristine, "-o", output, *OPTIONS, "--resume").code == 0
    assert len(written) == len(list(whole.glob("*.safetensors"))) - shards
    assert tiny.snapshot(output) == tiny.snapshot(whole)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_interrupted_before_the_first_file_leaves_nothing(
    cli: Cli, pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(monkeypatch, 0, KeyboardInterrupt())
    result = cli("quantize", pristine, "-o", tmp_path / "out", *OPTIONS)
    assert result.code == 130
    assert "Traceback" not in result.err
    assert not list(tmp_path.iterdir())


def unfinished(cli: Cli, source: Path, output: Path, *options: str | Path) -> None:
    """Leave the work of one shard."""
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 1, KeyboardInterrupt())
        assert cli("quantize", source, "-o", output, *options).code == 130


def test_unfinished_work_is_not_stepped_on(cli: Cli, refused: Cli, pristine: Path, tmp_path: Path, tiny: Any) -> None:
    output = tmp_path / "out"
    unfinished(cli, pristine, output, *OPTIONS)
    before = tiny.snapshot(tmp_path)
    refused(2, "quantize", pristine, "-o", output, *OPTIONS, says="--resume")
    assert tiny.snapshot(tmp_path) == before
    assert cli("quantize", pristine, "-o", output, *OPTIONS, "--overwrite").code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    "options",
    [
        (*OPTIONS, "--group-size", "64"),
        (*OPTIONS, "--layout", "nibble"),
        (*OPTIONS, "--skip", "model.layers.0.mlp.up_proj"),
        (*OPTIONS, "--seed", "1"),
        (*OPTIONS, "--lm-head"),
        (*OPTIONS, "--qmap-dtype", "int8"),
        ("--qmap", "nf3", "--max-shard-size", "90KB"),
        ("--qmap", "uniform", "--max-shard-size", "100KB"),
        ("--max-shard-size", "100KB"),
    ],
)
def test_resuming_with_other_arguments(
    cli: Cli, refused: Cli, pristine: Path, tmp_path: Path, options: tuple[str, ...], tiny: Any
) -> None:
    unfinished(cli, pristine, tmp_path / "out", *OPTIONS)
    before = tiny.snapshot(tmp_path)
    refused(2, "quantize", pristine, "-o", tmp_path / "out", *options, "--resume", says="same source, arguments")
    assert tiny.snapshot(tmp_path) == before


def test_resuming_with_another_source(cli: Cli, refused: Cli, pristine: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(pristine, tmp_path / "source"))
    unfinished(cli, source, tmp_path / "out", *OPTIONS)
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, source / "model.safetensors")
    refused(2, "quantize", source, "-o", tmp_path / "out", *OPTIONS, "--resume", says="same source")


def test_resuming_with_other_maps_in_the_same_file(cli: Cli, refused: Cli, pristine: Path, tmp_path: Path) -> None:
    maps = tmp_path / "map.json"
    maps.write_text("[-4, -3, -2, -1, 0, 1, 2, 3]")
    options = ("--max-shard-size", "100KB", "--qmap", maps)
    unfinished(cli, pristine, tmp_path / "out", *options)
    maps.write_text("[-4, -3, -2, -1, 0, 1, 2, 4]")
    refused(2, "quantize", pristine, "-o", tmp_path / "out", *options, "--resume", says="arguments")
    maps.write_text("[-4, -3, -2, -1, 0, 1, 2, 3 ]")
    assert cli("quantize", pristine, "-o", tmp_path / "out", *options, "--resume").code == 0


@pytest.mark.parametrize("damage", ["journal gone", "journal damaged", "shard gone", "shard truncated", "record"])
def test_resuming_damaged_work(cli: Cli, refused: Cli, pristine: Path, tmp_path: Path, damage: str) -> None:
    output = tmp_path / "out"
    unfinished(cli, pristine, output, *OPTIONS)
    folder = next(tmp_path.glob(".out*"))
    journal, shard = folder / staging_module._JOURNAL, next(folder.glob("*.safetensors"))
    if damage == "journal gone":
        journal.unlink()
    elif damage == "journal damaged":
        journal.write_text(journal.read_text()[:-20])
    elif damage == "record":
        journal.write_text(journal.read_text().replace('"tensors"', '"tensor"'))
    elif damage == "shard gone":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-1])
    refused(2, "quantize", pristine, "-o", output, *OPTIONS, "--resume", says="--overwrite")
    assert cli("quantize", pristine, "-o", output, *OPTIONS, "--overwrite").code == 0
    assert cli("verify", output, "--against", pristine).code == 0


def test_resuming_tidies_up(cli: Cli, whole: Path, pristine: Path, tmp_path: Path, tiny: Any) -> None:
    output = tmp_path / "out"
    unfinished(cli, pristine, output, *OPTIONS)
    folder = next(tmp_path.glob(".out*"))
    (folder / "model-00009-of-00099.safetensors.partial").write_bytes(b"killed")
    (folder / "stale").mkdir()
    (folder / "stale" / "tokenizer.json").write_bytes(b"{}")
    assert cli("quantize", pristine, "-o", output, *OPTIONS, "--resume").code == 0
    assert tiny.snapshot(output) == tiny.snapshot(whole)


def test_interrupted_between_the_two_renames_restores_the_earlier_output(
    cli: Cli, pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: Any
) -> None:
    output = tmp_path / "out"
    assert cli("quantize", pristine, "-o", output, "--qmap", "uniform").code == 0
    before = tiny.snapshot(output)
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if self.name.endswith("w3pack-unfinished"):
            raise KeyboardInterrupt
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    assert cli("quantize", pristine, "-o", output, *OPTIONS, "--overwrite").code == 130
    assert tiny.snapshot(output) == before
    monkeypatch.undo()
    # the machine itself stopped there: the next run finds the earlier output under its other name
    output.rename(tmp_path / ".out.w3pack-replaced")
    assert cli("quantize", pristine, "-o", output, *OPTIONS, "--resume").code == 2
    assert tiny.snapshot(output) == before
    assert cli("quantize", pristine, "-o", output, *OPTIONS, "--resume", "--overwrite").code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_real_interruption(pristine: Path, tmp_path: Path) -> None:
    """Ctrl-C in a process of its own, after its first file."""
    output = tmp_path / "out"
    program = (
        "import time, w3pack.pipeline.quantize_model as q\n"
        "from w3pack.cli.app import main\n"
        "real = q.quantize_weight\n"
        "def slow(*a, **k):\n"
        "    time.sleep(0.3)\n"
        "    return real(*a, **k)\n"
        "q.quantize_weight = slow\n"
        "main()\n"
    )
    root = Path(w3pack.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    child = subprocess.Popen(
        [sys.executable, "-c", program, "quantize", pristine, "-o", output, "--qmap", "nf3", "--max-shard-size", "1B"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".out*/model-*.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.02)
        assert child.poll() is None, child.communicate()
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert out == ""
    assert "Traceback" not in err
    assert "--resume" in err
    assert err.count("\n") == 1
    assert not output.exists()
    assert not looks_like_a_model(tmp_path)
