"""Logits come back from the temporary file bit for bit, and the file leaves nothing behind."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from w3pack.errors import ResourceError
from w3pack.pipeline.logit_store import LogitStore


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_bit_for_bit(dtype: torch.dtype) -> None:
    windows = [(1e4 * torch.randn(5, 33)).to(dtype) for _ in range(3)]
    windows[1][2, 3], windows[2][0, 0] = float("nan"), float("inf")
    with LogitStore() as store:
        for window in windows:
            store.append(window.unsqueeze(0).expand(2, -1, -1)[1])  # a view, as a batch gives
        assert len(store) == 3
        assert store.nbytes == sum(window.nbytes for window in windows)
        for index in (2, 0, 1):
            assert store.read(index).dtype == dtype
            assert torch.equal(store.read(index).view(torch.uint8), windows[index].view(torch.uint8))


def test_nothing_is_left(tmp_path: Path) -> None:
    def interrupted() -> None:
        with LogitStore() as store:
            store.append(torch.zeros(4, 4))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_space_is_asked_for_before_and_while_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000_000))
    with LogitStore() as store:
        store.reserve(1_000_000_000)
        with pytest.raises(ResourceError, match=r"expected 1\.1 GB for logits .* 1\.0 GB free; .*TMPDIR"):
            store.reserve(1_100_000_000)

        def full(_: object) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(store, "_file", SimpleNamespace(seek=lambda _: 0, write=full, close=lambda: None))
        with pytest.raises(ResourceError, match="fewer --tokens"):
            store.append(torch.zeros(4, 4))
