"""Which buffer a launch gets, with torch's CUDA calls replaced: no device needed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from w3pack.ops import workspace

MEGABYTE = 1 << 20


@dataclass
class Situation:
    """What the replaced calls say."""

    capture: int | None = None
    told: bool = True
    fills: int = 0
    waits: int = 0

    def synchronize(self) -> None:
        self.waits += 1


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Situation:
    situation = Situation()

    def filled(device_index: int, size: int, stream: object) -> torch.Tensor:
        situation.fills += 1
        return torch.full((size,), 255, dtype=torch.uint8)

    monkeypatch.setattr(workspace, "_WORKSPACES", {})
    monkeypatch.setattr(workspace, "_filled", filled)
    monkeypatch.setattr(workspace.devices, "own_stream", lambda index: situation)
    monkeypatch.setattr(workspace.devices, "capture_id", lambda stream: situation.capture if situation.told else None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index=None: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: situation.capture is not None)
    return situation


def at(stream: int, nbytes: int = 1000, device: int = 0) -> int:
    """Address of the buffer that a launch gets."""
    buffer = workspace.acquire(device, stream, nbytes)
    assert buffer.numel() >= nbytes
    assert bool((buffer == 255).all())
    return buffer.data_ptr()


def test_a_stream_keeps_its_buffer(now: Situation) -> None:
    assert at(1) == at(1)
    assert len({at(1), at(2), at(3), at(1, device=1)}) == 4
    fills = now.fills
    for _ in range(10):
        at(1)
        at(2)
    assert now.fills == fills


def test_a_larger_plan_gets_a_larger_buffer(now: Situation) -> None:
    small = workspace.acquire(0, 1, 1000)
    large = workspace.acquire(0, 1, 3 * MEGABYTE)
    assert (small.numel(), large.numel()) == (MEGABYTE, 3 * MEGABYTE)
    assert at(1) == large.data_ptr()


def test_the_per_thread_stream_is_another_one_in_each_thread(now: Situation) -> None:
    here = at(2)
    assert workspace._elsewhere(lambda: at(2)) != here
    assert at(2) == here


def test_each_capture_and_each_of_its_streams_has_its_own(now: Situation) -> None:
    eager = at(1)
    seen = {eager}
    for capture in (5, 6):
        now.capture = capture
        for stream in (1, 2):
            buffer = at(stream)
            assert buffer == at(stream)
            assert buffer not in seen
            seen.add(buffer)
    now.capture = None
    assert at(1) == eager
    now.capture = 5
    assert at(1) in seen


def test_captures_allocate_nothing_until_the_spares_are_used_up(now: Situation) -> None:
    at(1)
    fills = now.fills
    held = []
    for capture in range(workspace._SPARES):
        now.capture = capture
        held.append(at(1))
    assert now.fills == fills
    now.capture = 99
    temporary = workspace.acquire(0, 1, 1000)
    assert temporary.numel() == 1000
    assert now.fills == fills + 1
    now.capture = None
    at(1)  # makes new ones
    fills = now.fills
    now.capture = 100
    assert at(1) not in held
    assert now.fills == fills


def test_a_capture_that_needs_more_takes_another(now: Situation) -> None:
    at(1, 3 * MEGABYTE)
    now.capture = 7
    first = at(1)
    assert at(1, 2 * MEGABYTE) == first
    now.capture = None
    at(1, 5 * MEGABYTE)
    now.capture = 7
    second = at(1, 5 * MEGABYTE)
    assert second != first
    assert at(1) == first


def test_a_capture_that_is_not_told_gets_a_temporary(now: Situation) -> None:
    at(1)
    now.capture, now.told = 7, False
    assert workspace.acquire(0, 1, 1000).numel() == 1000


def test_spares_are_waited_for_and_counted(now: Situation) -> None:
    workspace.provide(0, 2 * MEGABYTE, 9)
    assert now.waits == 1
    assert now.fills == 9
    assert workspace.nbytes(0) == 18 * MEGABYTE
    workspace.provide(0, 1000, 2)
    assert now.fills == 9
    now.capture = 3
    at(1)
    assert workspace.nbytes(0) == 18 * MEGABYTE
    assert workspace.nbytes(1) == 0


def test_no_more_than_the_limit_is_handed_out(now: Situation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_MAX_BOUND_BYTES", 3 * MEGABYTE)
    for capture in range(20):
        now.capture = None
        at(1)
        now.capture = capture
        at(1)
    assert workspace._WORKSPACES[0].bound_bytes <= (3 + workspace._SPARES) * MEGABYTE


def test_without_memory_there_are_no_spares(now: Situation, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(device_index: int, size: int, stream: object) -> torch.Tensor:
        if stream is not None:
            raise torch.OutOfMemoryError("no")
        return torch.full((size,), 255, dtype=torch.uint8)

    monkeypatch.setattr(workspace, "_filled", full)
    assert at(1) == at(1)
    assert workspace._WORKSPACES[0].spares == []
