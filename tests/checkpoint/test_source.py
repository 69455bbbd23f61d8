"""A folder as a source: what it holds, where each tensor lies, which other files belong to it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from w3pack.checkpoint import resolve as resolve_module
from w3pack.checkpoint.paths import inside, read_json, write_json
from w3pack.checkpoint.resolve import resolve
from w3pack.checkpoint.safetensors_source import SafetensorsSource
from w3pack.errors import CheckpointError, ResourceError, UnsupportedError, UsageError, W3PackError

INDEX = "model.safetensors.index.json"


def write(folder: Path, files: Mapping[str, Mapping[str, torch.Tensor]], *, index: bool) -> Path:
    """A checkpoint of these files."""
    folder.mkdir(exist_ok=True)
    for file, tensors in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        save_file(dict(tensors), folder / file)
    (folder / "config.json").write_text("{}")
    if index:
        weight_map = {name: file for file, tensors in files.items() for name in tensors}
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_tensors_and_their_bytes(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(5), "c": torch.zeros(0, 4)}
    source = SafetensorsSource(write(tmp_path, {"model.safetensors": tensors}, index=False))
    assert set(source.tensors) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(source.read(name), tensor)
        assert source.tensors[name].shape == tuple(tensor.shape)
    assert source.tensors is source.tensors  # asked for once a tensor: making it anew would cost the square
    with pytest.raises(TypeError):
        source.tensors["a"] = source.tensors["b"]  # type: ignore[index]


def test_files_of_one_name_in_two_folders(tmp_path: Path) -> None:
    files = {f"{part}/model.safetensors": {part: torch.full((4,), float(ord(part)))} for part in "xyz"}
    source = SafetensorsSource(write(tmp_path, files, index=True))
    for part in "xyz":
        assert torch.equal(source.read(part), files[f"{part}/model.safetensors"][part])
        assert source.tensors[part].file == f"{part}/model.safetensors"


def test_tensor_in_two_files(tmp_path: Path) -> None:
    one = {"a": torch.ones(2), "b": torch.ones(2)}
    write(tmp_path, {"1.safetensors": one, "2.safetensors": {"a": torch.zeros(2), "c": torch.ones(1)}}, index=True)
    with pytest.raises(CheckpointError, match="tensor a once"):
        SafetensorsSource(tmp_path)


def test_index_names_the_wrong_file(tmp_path: Path) -> None:
    write(tmp_path, {"1.safetensors": {"a": torch.ones(2)}, "2.safetensors": {"b": torch.ones(2)}}, index=True)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "2.safetensors", "b": "1.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"tensor a in 2\.safetensors"):
        SafetensorsSource(tmp_path)


def test_index_wins_over_a_single_file(tmp_path: Path) -> None:
    write(tmp_path, {"1.safetensors": {"a": torch.ones(2)}}, index=True)
    save_file({"z": torch.ones(9)}, tmp_path / "model.safetensors")
    assert set(SafetensorsSource(tmp_path).tensors) == {"a"}


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ([], CheckpointError),
        (["config.json"], CheckpointError),
        (["config.json", "other.safetensors"], CheckpointError),
        (["config.json", "pytorch_model.bin"], UnsupportedError),
        (["config.json", "consolidated.00.pth"], UnsupportedError),
        (["config.json", "model.pkl"], UnsupportedError),
        (["model.safetensors"], CheckpointError),
    ],
)
def test_folders_without_what_is_needed(tmp_path: Path, files: list[str], error: type[W3PackError]) -> None:
    for file in files:
        (tmp_path / file).write_text("{}")
    with pytest.raises(error):
        SafetensorsSource(tmp_path)


def test_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("none", "file"):
        with pytest.raises(UsageError):
            SafetensorsSource(tmp_path / name)


def test_fingerprint_follows_what_matters(tmp_path: Path) -> None:
    folder = write(tmp_path, {"model.safetensors": {"a": torch.ones(2)}}, index=False)
    first = SafetensorsSource(folder).fingerprint()
    assert SafetensorsSource(folder).fingerprint() == first
    (folder / "config.json").write_text('{"a": 1}')
    second = SafetensorsSource(folder).fingerprint()
    os.utime(folder / "model.safetensors", ns=(1, 1))
    third = SafetensorsSource(folder).fingerprint()
    save_file({"b": torch.ones(2)}, folder / "model.safetensors")
    os.utime(folder / "model.safetensors", ns=(1, 1))
    fourth = SafetensorsSource(folder).fingerprint()
    assert len({first, second, third, fourth}) == 4


def test_file_that_shrinks_after_it_was_opened(tmp_path: Path) -> None:
    source = SafetensorsSource(write(tmp_path, {"model.safetensors": {"a": torch.ones(100)}}, index=False))
    os.truncate(tmp_path / "model.safetensors", 200)
    with pytest.raises(CheckpointError, match="of a"):
        source.read("a")


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "/a", "..", "../a", "a/../../b", "a\\b", "a\0", "./../a"])
def test_names_that_lead_outside(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError):
        inside(tmp_path, name)


@pytest.mark.parametrize("name", ["a", "a/b", "..a", "a..b", "...", "é", "a b", "-rf", "~"])
def test_names_that_stay_inside(tmp_path: Path, name: str) -> None:
    assert inside(tmp_path, name).is_relative_to(tmp_path)


@pytest.mark.parametrize(
    "value", [{}, {"a": [1, None, True, "é"]}, {"half": "\ud800"}, {"deep": {"er": [{}]}}, {"n": 10**40}]
)
def test_json_round_trip(tmp_path: Path, value: Any) -> None:
    write_json(tmp_path / "x.json", value)
    assert read_json(tmp_path / "x.json") == value
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.json"]


@pytest.mark.parametrize("raw", [b"", b"[1]", b"null", b"{", b"\xff", b"[" * 100_000, b'{"a": 1}x'])
def test_json_that_is_no_object(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "x.json").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"x\.json"):
        read_json(tmp_path / "x.json")


def test_json_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.json")
    with pytest.raises(CheckpointError, match="plain file"):
        read_json(tmp_path / "x.json")


# --- what the user typed ---------------------------------------------------------------------------------------------


def test_existing_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "m.gguf").touch()
    (tmp_path / "m.bin").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name") == Path("org/name")  # a folder here wins over the hub
    assert resolve("~/m.gguf") == tmp_path / "m.gguf"
    assert resolve(".") == Path(".")
    with pytest.raises(CheckpointError):
        resolve("m.bin")


@pytest.mark.parametrize(
    "model",
    [
        "",
        " ",
        "/none",
        "./none",
        "../none",
        "~none-such/x",
        "a/b/c",
        "x.gguf",
        "a b",
        "-x",
        "https://x/y",
        "x" * 300 + "/",
    ],
)
def test_neither_path_nor_hub_id(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(_: str) -> Path:
        raise AssertionError("asked the hub")

    monkeypatch.setattr(resolve_module, "_download", never)
    with pytest.raises(UsageError, match="does not exist"):
        resolve(model)


def test_hub_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

    asked: list[Any] = []
    failures: list[Exception] = []

    def download(repository: str, **options: Any) -> str:
        asked.append((repository, options["revision"], options["allow_patterns"]))
        if failures:
            raise failures.pop()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name@v1") == tmp_path
    assert asked[0][:2] == ("org/name", "v1")
    assert not any("bin" in pattern or "pth" in pattern for pattern in asked[0][2])
    failures.append(
        RepositoryNotFoundError.__new__(RepositoryNotFoundError)
    )  # its arguments change with the hub's client
    with pytest.raises(CheckpointError, match="org/name"):
        resolve("org/name")
    for failure in (LocalEntryNotFoundError("offline"), OSError("no route"), ConnectionError("refused")):
        failures.append(failure)
        with pytest.raises(ResourceError, match="org/name"):
            resolve("org/name")
