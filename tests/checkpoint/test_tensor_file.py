"""Safetensors files: exchange with the `safetensors` package, damaged files, and the writer's promises."""

from __future__ import annotations

import hashlib
import json
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from w3pack.checkpoint.paths import inside
from w3pack.checkpoint.source import TensorInfo
from w3pack.checkpoint.tensor_file import (
    DTYPE_NAMES,
    DTYPES,
    MAX_HEADER_BYTES,
    ShardWriter,
    digest,
    read_header,
    read_tensor,
)
from w3pack.errors import CheckpointError, ResourceError, W3PackError

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def sample(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Bytes that all differ while there are bytes to choose from (0 and 1 for bool)."""
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randperm(max(count, 1), generator=torch.Generator().manual_seed(count))[:count]
    raw = raw.remainder(2 if dtype == torch.bool else 256).to(torch.uint8)
    return raw.view(dtype).view(shape)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and raw_bytes(left) == raw_bytes(right)


def all_kinds() -> dict[str, torch.Tensor]:
    """One tensor of every dtype that the installed `safetensors` can write, and some odd shapes."""
    tensors = {f"kind.{name}": sample(dtype, 3, 5) for name, dtype in DTYPES.items()}
    tensors["scalar"] = torch.tensor(3.25)
    tensors["empty"] = torch.empty(0, 7, dtype=torch.float16)
    tensors["deep"] = sample(torch.int16, 2, 1, 3, 1, 2, 2)
    tensors["odd name/ü.weight"] = sample(torch.bfloat16, 11)
    return tensors


def info(name: str, tensor: torch.Tensor) -> TensorInfo:
    return TensorInfo(
        name=name,
        dtype=DTYPE_NAMES[tensor.dtype],
        shape=tuple(tensor.shape),
        nbytes=tensor.numel() * tensor.dtype.itemsize,
        file="",
    )


def written(path: Path, tensors: dict[str, torch.Tensor], **metadata: str) -> Path:
    with ShardWriter(path, [info(name, tensor) for name, tensor in tensors.items()], metadata=metadata) as writer:
        for name in reversed(tensors):  # any order
            writer.write(name, tensors[name])
    return path


def file_of(folder: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    """A file with the given header, sound or not."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def assert_refused(path: Path) -> None:
    """A CheckpointError that names the file, without an allocation of more than a few MiB."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=path.name):
            read_header(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


def test_files_of_the_safetensors_package_are_read(tmp_path: Path) -> None:
    tensors = all_kinds()
    path = tmp_path / "theirs.safetensors"
    save_file(tensors, path, metadata={"format": "pt", "note": "x"})
    entries = read_header(path)
    assert set(entries) == set(tensors)
    starts = [entry.start for entry in entries.values()]
    assert starts == sorted(starts)
    for name, tensor in tensors.items():
        assert entries[name].info == TensorInfo(
            name=name,
            dtype=DTYPE_NAMES[tensor.dtype],
            shape=tuple(tensor.shape),
            nbytes=tensor.nbytes,
            file="theirs.safetensors",
        )
        assert same(read_tensor(path, entries[name]), tensor)


def test_the_safetensors_package_reads_our_files(tmp_path: Path) -> None:
    tensors = all_kinds()
    path = written(tmp_path / "ours.safetensors", tensors, note="x")
    loaded = load_file(path)
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert same(loaded[name], tensor), name
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "note": "x"}


def test_our_files_are_read_by_us(tmp_path: Path) -> None:
    tensors = all_kinds()
    path = written(tmp_path / "ours.safetensors", tensors)
    entries = read_header(path)
    assert list(entries) == list(tensors)
    for name, tensor in tensors.items():
        assert same(read_tensor(path, entries[name]), tensor), name


def test_data_starts_at_a_multiple_of_eight(tmp_path: Path) -> None:
    for length in range(1, 9):
        path = written(tmp_path / f"{length}.safetensors", {"n" * length: sample(torch.int64, 2)})
        assert read_header(path)["n" * length].start % 8 == 0


def test_a_file_without_tensors(tmp_path: Path) -> None:
    path = written(tmp_path / "none.safetensors", {})
    assert read_header(path) == {}
    assert load_file(path) == {}


def test_tensors_of_any_strides_are_written_row_major(tmp_path: Path) -> None:
    base = sample(torch.float32, 6, 4)
    tensors = {"turned": base.t(), "strided": base[::2, 1:3], "shared": base[1].expand(3, 4), "grad": base.clone()}
    tensors["grad"].requires_grad_()
    path = written(tmp_path / "m.safetensors", tensors)
    for name, tensor in load_file(path).items():
        assert same(tensor, tensors[name].detach()), name


def test_a_read_tensor_owns_its_memory(tmp_path: Path) -> None:
    path = written(tmp_path / "m.safetensors", {"a": torch.arange(4.0), "b": torch.arange(4.0) + 9})
    entries = read_header(path)
    first = read_tensor(path, entries["a"])
    first.fill_(-1)
    assert read_tensor(path, entries["a"]).tolist() == [0, 1, 2, 3]
    assert read_tensor(path, entries["b"]).tolist() == [9, 10, 11, 12]


def test_digest_is_sha256_of_the_bytes_on_disk() -> None:
    for tensor in all_kinds().values():
        assert digest(tensor) == hashlib.sha256(raw_bytes(tensor)).hexdigest()
    turned = torch.arange(6.0).view(2, 3).t()
    assert digest(turned) == digest(turned.contiguous()) == digest(torch.tensor([0.0, 3, 1, 4, 2, 5]))


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 40, -9, -1])
def test_truncated_files_are_refused(tmp_path: Path, keep: int) -> None:
    path = written(tmp_path / "m.safetensors", {"a": sample(torch.float32, 8), "b": sample(torch.int8, 3)})
    path.write_bytes(path.read_bytes()[:keep])
    assert_refused(path)


def test_files_with_bytes_to_spare_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "m.safetensors", {"a": sample(torch.float32, 8)})
    path.write_bytes(path.read_bytes() + b"\0")
    assert_refused(path)


def test_a_file_cut_after_its_header_was_read_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "m.safetensors", {"a": sample(torch.float32, 8)})
    entry = read_header(path)["a"]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"m\.safetensors"):
        read_tensor(path, entry)


@pytest.mark.parametrize(
    "length", [0, 1, 1 << 20, MAX_HEADER_BYTES + 1, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
)
def test_impossible_header_lengths_are_refused(tmp_path: Path, length: int) -> None:
    assert_refused(file_of(tmp_path, {"a": F32}, bytes(8), length=length))


def test_a_header_beyond_the_formats_limit_is_refused_although_the_file_is_large_enough(tmp_path: Path) -> None:
    path = file_of(tmp_path, {"a": F32}, length=MAX_HEADER_BYTES + 1)
    with path.open("r+b") as file:
        file.truncate(MAX_HEADER_BYTES + 100)  # sparse: takes no disk
    assert_refused(path)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"3",
        b'"a"',
        b"\xff\xfe\xfd",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"9" * 10_000,
        b'{"a": nul}',
    ],
    ids=["empty", "open", "list", "null", "number", "string", "bytes", "deep lists", "deep objects", "digits", "typo"],
)
def test_headers_that_are_no_json_object_are_refused(tmp_path: Path, header: bytes) -> None:
    assert_refused(file_of(tmp_path, header))


ENTRIES: dict[str, Any] = {
    "no object": 3,
    "null": None,
    "list": [1, 2],
    "empty": {},
    "unknown dtype": {**F32, "dtype": "F33"},
    "dtype of a later format": {**F32, "dtype": "F4"},
    "dtype lower case": {**F32, "dtype": "f32"},
    "dtype number": {**F32, "dtype": 32},
    "dtype list": {**F32, "dtype": ["F32"]},
    "dtype missing": {"shape": [2], "data_offsets": [0, 8]},
    "shape missing": {"dtype": "F32", "data_offsets": [0, 8]},
    "shape number": {**F32, "shape": 2},
    "shape negative": {**F32, "shape": [-2]},
    "shape two negatives": {**F32, "shape": [-2, -1]},
    "shape float": {**F32, "shape": [2.0]},
    "shape bool": {**F32, "shape": [True, 2]},
    "shape string": {**F32, "shape": ["2"]},
    "shape null": {**F32, "shape": [None]},
    "shape other": {**F32, "shape": [3]},
    "shape huge": {**F32, "shape": [1 << 62, 1 << 62]},
    "shape that wraps at 2^64": {**F32, "shape": [1 << 33, 1 << 31, 2]},
    "shape of 10^30": {**F32, "shape": [10**30]},
    "offsets missing": {"dtype": "F32", "shape": [2]},
    "offsets one": {**F32, "data_offsets": [8]},
    "offsets three": {**F32, "data_offsets": [0, 8, 8]},
    "offsets turned": {**F32, "data_offsets": [8, 0]},
    "offsets negative": {**F32, "data_offsets": [-8, 0]},
    "offsets float": {**F32, "data_offsets": [0.0, 8.0]},
    "offsets string": {**F32, "data_offsets": ["0", "8"]},
    "offsets bool": {"dtype": "U8", "shape": [1], "data_offsets": [False, True]},
    "offsets not from 0": {**F32, "data_offsets": [8, 16]},
    "offsets out of range": {**F32, "shape": [1 << 40], "data_offsets": [0, 1 << 42]},
    "offsets huge": {**F32, "data_offsets": [1 << 70, (1 << 70) + 8]},
}


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_damaged_entries_are_refused(tmp_path: Path, entry: Any) -> None:
    assert_refused(file_of(tmp_path, {"a": entry}, bytes(8)))


@pytest.mark.parametrize(
    "offsets",
    [
        [[0, 8], [0, 8]],
        [[0, 8], [4, 12]],
        [[0, 8], [9, 17]],
        [[0, 8], [16, 24]],
        [[4, 12], [12, 20]],
        [[0, 8], [8, 16], [8, 16]],
        [[0, 8], [1 << 40, (1 << 40) + 8]],
    ],
    ids=["same", "overlapping", "gap of 1", "gap of 8", "gap before", "third on second", "far away"],
)
def test_overlapping_and_gapped_tensors_are_refused(tmp_path: Path, offsets: list[list[int]]) -> None:
    header = {f"t{i}": {**F32, "data_offsets": pair} for i, pair in enumerate(offsets)}
    for size in (16, 24, 20):
        assert_refused(file_of(tmp_path, header, bytes(size)))


@pytest.mark.parametrize(
    "second",
    ['{"dtype":"F32","shape":[2],"data_offsets":[8,16]}', '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'],
    ids=["another range", "the same range"],
)
def test_duplicate_names_are_refused(tmp_path: Path, second: str) -> None:
    """Which of the two a reader takes would be its own choice."""
    for size in (8, 16):
        assert_refused(file_of(tmp_path, f'{{"a":{json.dumps(F32)},"a":{second}}}'.encode(), bytes(size)))


def test_duplicate_names_of_empty_tensors_are_refused(tmp_path: Path) -> None:
    empty = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    assert_refused(file_of(tmp_path, f'{{"a":{empty},"a":{json.dumps(F32)}}}'.encode(), bytes(8)))


def test_duplicate_fields_of_an_entry_are_refused(tmp_path: Path) -> None:
    header = b'{"a":{"dtype":"I32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    assert_refused(file_of(tmp_path, header, bytes(8)))


def test_empty_tensors_of_huge_sides_are_refused(tmp_path: Path) -> None:
    """No bytes are asked for, but the product of the other sides overflows 64 bits."""
    entry = {"dtype": "F32", "shape": [0, (1 << 48) - 1, (1 << 48) - 1], "data_offsets": [0, 0]}
    path = file_of(tmp_path, {"a": entry})
    with pytest.raises(CheckpointError):
        read_tensor(path, read_header(path)["a"])


def test_errors_stay_short_whatever_the_header_says(tmp_path: Path) -> None:
    for entry in ("x" * 1_000_000, {**F32, "dtype": "x" * 1_000_000}, {**F32, "shape": list(range(200_000))}):
        path = file_of(tmp_path, {"a": entry}, bytes(8))
        with pytest.raises(CheckpointError) as caught:
            read_header(path)
        assert len(str(caught.value)) < 2000


def test_a_flipped_bit_of_a_header_is_refused_or_harmless(tmp_path: Path) -> None:
    """Whatever passes describes a file of exactly this size, so nothing outside it can be read."""
    header = {"a": F32, "b": {"dtype": "I8", "shape": [4], "data_offsets": [8, 12]}}
    path = file_of(tmp_path, json.dumps(header, separators=(",", ":")).encode(), bytes(range(12)))
    good = path.read_bytes()
    start = len(good) - 12
    assert len(read_header(path)) == 2
    for position in range(start):
        for bit in (0, 1, 4, 7):
            bad = bytearray(good)
            bad[position] ^= 1 << bit
            path.write_bytes(bad)
            try:
                entries = read_header(path)
            except CheckpointError:
                continue
            end = 8 + int.from_bytes(bad[:8], "little")
            for entry in entries.values():
                assert entry.start == end
                assert entry.stop - entry.start == entry.info.nbytes == read_tensor(path, entry).nbytes
                end = entry.stop
            assert end == len(good)


def outcome(data: bytes) -> None:
    """Reads everything in a file of these bytes; only W3PackError may come out."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.safetensors"
        path.write_bytes(data)
        try:
            entries = read_header(path)
            for entry in entries.values():
                tensor = read_tensor(path, entry)
                assert tensor.nbytes == entry.info.nbytes <= len(data)
        except W3PackError:
            return


FUZZ = settings(derandomize=True, database=None, deadline=None, max_examples=100)


@given(data=st.binary(max_size=200))
@example(data=b"")
@example(data=(2).to_bytes(8, "little") + b"{}")
@example(data=(1 << 40).to_bytes(8, "little") + b"{}")
@FUZZ
def test_random_bytes_raise_nothing_but_our_errors(data: bytes) -> None:
    outcome(data)


@given(header=st.binary(max_size=100), data=st.binary(max_size=20))
@FUZZ
def test_random_headers_raise_nothing_but_our_errors(header: bytes, data: bytes) -> None:
    outcome(len(header).to_bytes(8, "little") + header + data)


SIZES = st.integers(0, 9) | st.sampled_from([-1, 1 << 31, (1 << 48) - 1, 1 << 48, 1 << 63, 1 << 64, 10**40])
LOOSE = st.none() | st.booleans() | st.floats() | st.text(max_size=3) | SIZES
HEADERS = st.dictionaries(
    st.text(max_size=4) | st.just("__metadata__"),
    LOOSE
    | st.fixed_dictionaries(
        {},
        optional={
            "dtype": st.sampled_from([*DTYPES, "F4", "F6_E2M3"]) | LOOSE,
            "shape": st.lists(SIZES, max_size=10) | st.lists(LOOSE, max_size=3) | LOOSE,
            "data_offsets": st.lists(SIZES, min_size=2, max_size=2) | st.lists(LOOSE, max_size=3) | LOOSE,
        },
    ),
    max_size=3,
)


@given(header=HEADERS, data=st.binary(max_size=20))
@FUZZ
def test_random_json_raises_nothing_but_our_errors(header: dict[str, Any], data: bytes) -> None:
    raw = json.dumps(header).encode()
    outcome(len(raw).to_bytes(8, "little") + raw + data)


@given(
    shapes=st.lists(st.lists(st.integers(0, 3), max_size=9), min_size=1, max_size=3),
    dtype=st.sampled_from(sorted(DTYPES)),
    data=st.data(),
)
@FUZZ
def test_sound_offsets_of_any_dtype_and_shape(shapes: list[list[int]], dtype: str, data: st.DataObject) -> None:
    header, offset = {}, 0
    for i, shape in enumerate(shapes):
        nbytes = torch.Size(shape).numel() * DTYPES[dtype].itemsize
        header[f"t{i}"] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    raw = json.dumps(header).encode()
    slip = data.draw(st.sampled_from([0, 0, 0, 1]))
    outcome(len(raw).to_bytes(8, "little") + raw + bytes(offset + slip))


def test_a_file_that_is_not_there_is_a_resource_error(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="absent"):
        read_header(tmp_path / "absent.safetensors")
    with pytest.raises(ResourceError):
        read_header(tmp_path)
    path = written(tmp_path / "m.safetensors", {"a": sample(torch.int8, 3)})
    entry = read_header(path)["a"]
    path.unlink()
    with pytest.raises(ResourceError, match="a"):
        read_tensor(path, entry)


def test_an_announced_tensor_that_is_missing_is_an_error(tmp_path: Path) -> None:
    tensors = {"a": sample(torch.int8, 3), "b": sample(torch.int8, 5)}
    writer = ShardWriter(tmp_path / "m.safetensors", [info(name, tensor) for name, tensor in tensors.items()])
    writer.write("a", tensors["a"])
    with pytest.raises(W3PackError, match=r"m\.safetensors.*missing b"):
        writer.close()


def test_leaving_the_with_block_early_reports_the_first_error(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyError, match="mine"),
        ShardWriter(tmp_path / "m.safetensors", [info("a", sample(torch.int8, 3))]),
    ):
        raise KeyError("mine")


UNPLANNED: dict[str, tuple[str, torch.Tensor]] = {
    "unknown name": ("b", sample(torch.int8, 4)),
    "other dtype": ("a", sample(torch.uint8, 4)),
    "other shape": ("a", sample(torch.int8, 5)),
    "other axes": ("a", sample(torch.int8, 2, 2)),
}


@pytest.mark.parametrize(("name", "tensor"), UNPLANNED.values(), ids=UNPLANNED)
def test_tensors_that_were_not_announced_so_are_refused(tmp_path: Path, name: str, tensor: torch.Tensor) -> None:
    writer = ShardWriter(tmp_path / "m.safetensors", [info("a", sample(torch.int8, 4))])
    with pytest.raises(W3PackError, match=r"expected .*, got "):
        writer.write(name, tensor)
    with pytest.raises(W3PackError, match="missing a"):
        writer.close()


def test_a_tensor_is_written_once(tmp_path: Path) -> None:
    tensor = sample(torch.int8, 4)
    with ShardWriter(tmp_path / "m.safetensors", [info("a", tensor)]) as writer:
        writer.write("a", tensor)
        with pytest.raises(W3PackError, match=r"expected .*, got a"):
            writer.write("a", tensor)


@pytest.mark.parametrize("names", [["a", "a"], ["__metadata__"]], ids=["twice", "reserved"])
def test_names_that_a_header_cannot_hold_are_refused(tmp_path: Path, names: list[str]) -> None:
    tensor = sample(torch.int8, 4)

    def write() -> None:
        with ShardWriter(tmp_path / "m.safetensors", [info(name, tensor) for name in names]) as writer:
            for name in names:
                writer.write(name, tensor)

    with pytest.raises(W3PackError, match=names[0]):
        write()


@pytest.mark.parametrize("place", ["absent/m.safetensors", "."])
def test_a_place_that_cannot_be_written_is_a_resource_error(tmp_path: Path, place: str) -> None:
    with pytest.raises(ResourceError, match="expected to write"):
        ShardWriter(tmp_path / place, [info("a", sample(torch.int8, 4))])


def test_a_full_disk_is_a_resource_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full, raising=False)
    with pytest.raises(ResourceError, match="No space left"):
        ShardWriter(tmp_path / "m.safetensors", [info("a", sample(torch.int8, 4))])


@pytest.mark.parametrize("name", ["model.safetensors", "sub/model.safetensors", "a..b", "..a", "ü", " spaced "])
def test_plain_names_stay_inside(tmp_path: Path, name: str) -> None:
    assert inside(tmp_path, name) == tmp_path / name


UNSAFE = ["", "/etc/passwd", "..", "../x", "a/../../x", "a/..", "a\\b", "..\\x", "C:\\x", "a\0b", "//server/x"]


@pytest.mark.parametrize("name", UNSAFE)
def test_names_that_lead_outside_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="expected a file name inside"):
        inside(tmp_path, name)


@given(name=st.text(alphabet="./\\ab\0~:", max_size=8))
@FUZZ
def test_no_name_escapes_the_folder(name: str) -> None:
    folder = Path("/folder/of/shards")
    try:
        path = inside(folder, name)
    except CheckpointError:
        return
    depth = 0
    for part in path.relative_to(folder).parts:
        depth += -1 if part == ".." else 1
        assert depth >= 0


@pytest.mark.parametrize("make", [read_header, lambda path: ShardWriter(path, []).close()])
def test_paths_are_paths(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    path = written(tmp_path / "m.safetensors", {})
    make(path)
    assert read_header(path) == {}
