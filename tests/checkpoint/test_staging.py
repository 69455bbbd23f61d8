"""The output folder appears whole or not at all; finished shards survive, everything else does not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from w3pack.checkpoint.source import TensorInfo
from w3pack.checkpoint.staging import Staging, free_bytes
from w3pack.errors import CheckpointError, ResourceError, UsageError


def claim(output: Path, *, fingerprint: str = "same", overwrite: bool = False, resume: bool = False) -> Staging:
    return Staging(output, fingerprint=fingerprint, overwrite=overwrite, resume=resume)


def write_shard(staging: Staging, file: str, name: str = "a") -> None:
    """One finished shard of one tensor."""
    info = TensorInfo(name=name, dtype="F32", shape=(3,), nbytes=12, file="")
    with staging.open_shard(file, [info]) as writer:
        writer.write(name, torch.arange(3.0))
    staging.finish_shard(file, {"tensors": {name: {}}, "modules": {}})


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def finish(staging: Staging) -> None:
    staging.publish({"w3pack.json": {"producer": "w3pack"}, "config.json": {"a": 1}})


def test_nothing_appears_before_publish(tmp_path: Path) -> None:
    output = tmp_path / "deep" / "out"
    staging = claim(output)
    write_shard(staging, "model.safetensors")
    assert not output.exists()
    assert "config.json" not in entries(staging.folder)
    finish(staging)
    assert entries(output) == ["config.json", "model.safetensors", "w3pack.json"]
    assert entries(output.parent) == ["out"]


def test_config_is_the_last_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    real = Path.replace

    def replace(self: Path, target: Any) -> Path:
        written.append(Path(target).name)
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    staging = claim(tmp_path / "out")
    write_shard(staging, "model.safetensors")
    finish(staging)
    assert written[-1] == "config.json"


def test_resume_keeps_finished_shards_only(tmp_path: Path) -> None:
    staging = claim(tmp_path / "out")
    write_shard(staging, "one.safetensors")
    (staging.folder / "two.safetensors.partial").write_bytes(b"half")
    (staging.folder / "config.json").write_bytes(b"{}")
    staging.let_go()  # as the end of its process would
    again = claim(tmp_path / "out", resume=True)
    assert list(again.records) == ["one.safetensors"]
    assert [name for name in entries(again.folder) if not name.startswith(".")] == ["one.safetensors"]
    finish(again)
    assert entries(tmp_path / "out") == ["config.json", "one.safetensors", "w3pack.json"]


def test_abandon_leaves_only_what_can_be_continued(tmp_path: Path) -> None:
    staging = claim(tmp_path / "out")
    staging.open_shard("one.safetensors", []).close()
    staging.abandon()
    staging.abandon()
    assert entries(tmp_path) == []
    staging = claim(tmp_path / "out")
    write_shard(staging, "one.safetensors")
    (staging.folder / "config.json").write_bytes(b"{}")
    staging.abandon()
    assert not (staging.folder / "config.json").exists()
    assert list(claim(tmp_path / "out", resume=True).records) == ["one.safetensors"]


@pytest.mark.parametrize(
    "journal", ["", "[]", "{}", '{"fingerprint": "same"}', '{"fingerprint": "same", "shards": [1]}']
)
def test_damaged_journal(tmp_path: Path, journal: str) -> None:
    staging = claim(tmp_path / "out")
    write_shard(staging, "one.safetensors")
    next(staging.folder.glob(".*.json")).write_text(journal)
    staging.let_go()
    with pytest.raises(UsageError, match="--overwrite"):
        claim(tmp_path / "out", resume=True)


@pytest.mark.parametrize("file", ["../escaped.safetensors", "/etc/passwd"])
def test_journal_that_points_elsewhere(tmp_path: Path, file: str) -> None:
    staging = claim(tmp_path / "out")
    write_shard(staging, "one.safetensors")
    path = next(staging.folder.glob(".*.json"))
    path.write_text(path.read_text().replace("one.safetensors", file))
    staging.let_go()
    with pytest.raises(UsageError, match="--overwrite"):
        claim(tmp_path / "out", resume=True)


def test_other_fingerprint(tmp_path: Path) -> None:
    write_shard(claim(tmp_path / "out"), "one.safetensors")
    with pytest.raises(UsageError, match="same source"):
        claim(tmp_path / "out", fingerprint="other", resume=True)
    with pytest.raises(UsageError, match="--resume"):
        claim(tmp_path / "out")
    assert not claim(tmp_path / "out", overwrite=True).records


@pytest.mark.parametrize("kind", ["file", "link"])
def test_something_of_the_users_under_the_hidden_name(tmp_path: Path, kind: str) -> None:
    hidden = tmp_path / ".out.w3pack-unfinished"
    (tmp_path / "mine").mkdir()
    if kind == "file":
        hidden.write_text("mine")
    else:
        hidden.symlink_to("mine")
    with pytest.raises(UsageError):
        claim(tmp_path / "out")
    with pytest.raises(ResourceError):
        claim(tmp_path / "out", overwrite=True)
    assert hidden.exists()


def test_companions(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    data = {"a.json": b"1", "deep/b": b"\0" * 5_000_000, ".w3pack-journal.jsonx": b"x", "back\\slash": b"2"}
    paths = {}
    for number, (name, content) in enumerate(data.items()):
        paths[name] = tmp_path / "source" / str(number)
        paths[name].write_bytes(content)
    staging = claim(tmp_path / "out")
    staging.copy(paths)
    finish(staging)
    assert all((tmp_path / "out" / name).read_bytes() == content for name, content in data.items())


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x"])
def test_companions_stay_inside(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="inside"):
        claim(tmp_path / "deep" / "out").copy({name: tmp_path / "file"})
    assert entries(tmp_path) == ["deep", "file"]


def test_missing_companion_is_named(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"read .*gone\.txt"):
        claim(tmp_path / "out").copy({"gone.txt": tmp_path / "gone.txt"})


def test_free_space_of_a_place_that_is_not_there_yet(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "a" / "b") > 0
    assert free_bytes(tmp_path / ("x" * 300) / "b") > 0
    assert free_bytes(Path("relative")) > 0


def test_output_must_have_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for place in (Path("/"), Path("."), tmp_path, Path("/..")):
        with pytest.raises(UsageError, match="name another"):
            claim(place, overwrite=True)
    assert os.listdir(tmp_path) == []


def test_two_processes_do_not_share_an_output(tmp_path: Path) -> None:
    """Neither --resume nor --overwrite may touch the files of a run that is under way."""
    first = Staging(tmp_path / "out", fingerprint="f", overwrite=False, resume=False)
    for options in ({"resume": True, "overwrite": False}, {"resume": False, "overwrite": True}):
        with pytest.raises(UsageError, match="another w3pack at work"):
            Staging(tmp_path / "out", fingerprint="f", **options)
        assert first.folder.is_dir()
    first.abandon()
    Staging(tmp_path / "out", fingerprint="f", overwrite=False, resume=False).abandon()


def test_a_disk_full_from_the_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("w3pack.checkpoint.staging.write_json", full)
    with pytest.raises(ResourceError, match="free space"):
        claim(tmp_path / "out")
    assert entries(tmp_path) == []
