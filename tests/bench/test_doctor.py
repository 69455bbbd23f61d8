"""The diagnosis on machines that have no GPU, or only seem to."""

from __future__ import annotations

import json

import pytest
import torch

from w3pack.bench import doctor
from w3pack.jit import Toolchain

NO_TOOLS = Toolchain(None, None, None, ("expected the package cuda-core, got none; install it",), None, False, 0, 0, 0)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "gpu" not in request.keywords:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_a_machine_without_a_gpu_is_fine_whatever_else_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "toolchain", lambda: NO_TOOLS)
    monkeypatch.setattr(doctor, "driver_lists_gpus", lambda: False)
    found = doctor.diagnose()
    assert found.ok
    assert found.path == "CPU"
    assert "CPU path" in found.notes[0]
    json.dumps(found.to_dict())


@pytest.mark.parametrize(("cuda", "remedy"), [(None, "CUDA build of torch"), ("13.0", "update the driver")])
def test_a_gpu_that_torch_does_not_see_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, remedy: str
) -> None:
    monkeypatch.setattr(doctor, "driver_lists_gpus", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    found = doctor.diagnose()
    assert not found.ok
    assert len(found.problems) == 1
    assert remedy in found.problems[0]


@pytest.mark.gpu
def test_this_machine_with_its_gpu() -> None:
    found = doctor.diagnose()
    assert found.ok, found.problems
    gpu = found.gpus[0]
    if gpu["supported"]:
        assert found.path == "GPU kernels"
        assert {row["linear"] for row in gpu["kernels"]} == {"576x576", "28672x8192"}
        assert {row["origin"] for row in gpu["kernels"]} <= {"seeded", "cache", "compiled"}
    assert gpu["relative_error"] < 1e-3
    json.dumps(found.to_dict())
