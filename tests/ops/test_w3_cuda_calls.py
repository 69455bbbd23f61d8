"""Which kernels a call of the CUDA implementation launches, with kernels that only write it down: no device needed."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import pytest
import torch

from w3pack.errors import UnsupportedError
from w3pack.format.linear import LinearSpec
from w3pack.jit import KernelText, ToolchainError
from w3pack.ops import w3_cuda, w3_dense, w3_launch, w3_linear, workspace
from w3pack.ops.configs import DEVICES
from w3pack.reference import w3

SPEC = LinearSpec(rows=300, columns=256, group_size=128, layout="dense", maps=1, qmap_dtype="int8", bias=True)
NO_DEVICE = -1  # what a CPU tensor says


class Kernel:
    """Writes its launches down."""

    def __init__(self, name: str, launches: list[str]) -> None:
        self.name, self.launches = name, launches

    def launch(self, **arguments: Any) -> None:
        self.launches.append(self.name)


class Nothing:
    """A stream and an event that do nothing."""

    cuda_stream = 0

    def record(self, stream: object) -> None: ...
    def wait_event(self, event: object) -> None: ...


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    for module in (w3_launch, w3_dense):
        monkeypatch.setattr(module, "load", lambda text, index: Kernel(text.entry.removeprefix("w3_"), found))
    monkeypatch.setattr(w3_cuda.devices, "limits", lambda index: DEVICES["sm_90a"])
    monkeypatch.setattr(w3_cuda.devices, "device_name", lambda index: "a device that nobody measured")
    monkeypatch.setattr(w3_cuda.devices, "current_stream", lambda index: 0)
    monkeypatch.setattr(workspace, "acquire", lambda *_: torch.empty(1))
    monkeypatch.setattr(w3_dense, "_side_stream", lambda index, main: Nothing())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index=None: Nothing())
    monkeypatch.setattr(torch.cuda, "Event", Nothing)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: NO_DEVICE)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(w3_linear, "_FORMS", {})
    monkeypatch.setattr(w3_cuda, "_WARNED", set())
    return found


def stored() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randint(-(1 << 31), 1 << 31, SPEC.codes_shape, generator=generator).to(torch.int32),
        torch.randn(SPEC.scales_shape, generator=generator).half(),
        torch.tensor([[-127, -80, -45, -13, 17, 50, 90, 127]], dtype=torch.int8),
    )


def call(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return w3_linear._run_cuda(x, *stored(), bias, 300, 256, 128)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (0, []),
        (8, ["decode"]),
        (16, ["stage", "decode"]),
        (17, ["stage", "decode"]),
        (64, ["stage", "decode"]),
        (65, ["stage", "decode", "decode"]),
        (128, ["stage", "decode"] * 2),
        (129, ["dequantize"]),
        (4096, ["dequantize"]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_launches_of_a_call(launches: list[str], tokens: int, expected: list[str], dtype: torch.dtype) -> None:
    for bias in (None, torch.zeros(300), torch.zeros(600, dtype=dtype)[::2]):
        launches.clear()
        y = call(torch.zeros(tokens, 256, dtype=dtype), bias)
        assert launches == expected
        assert (tuple(y.shape), y.dtype) == ((tokens, 300), dtype)


def test_portions_of_a_long_call(launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(w3_dense, "_PORTION_BYTES", 1)
    monkeypatch.setattr(w3_dense, "_OUTPUT_TILE", 1)
    call(torch.zeros(200, 256, dtype=torch.float16), torch.zeros(300))
    assert launches == ["dequantize"] * 5


def test_shapes_are_checked_the_first_time_and_kept(launches: list[str]) -> None:
    call(torch.zeros(3, 256, dtype=torch.float16))
    call(torch.zeros(2, 4, 256, dtype=torch.float16))
    (form,) = w3_linear._FORMS.values()
    assert form.spec == LinearSpec(**{**SPEC.to_dict(), "bias": False})
    call(torch.zeros(3, 256, dtype=torch.bfloat16))
    assert len(w3_linear._FORMS) == 2
    codes, scales, qmap = stored()
    x = torch.zeros(3, 256, dtype=torch.float16)
    for tensors in ((codes, scales, qmap.float()), (codes[:, :1], scales, qmap), (codes, scales.float(), qmap)):
        with pytest.raises(UnsupportedError, match=r"expected .*, got "):
            w3_linear._run_cuda(x, *tensors, None, 300, 256, 128)
    assert len(w3_linear._FORMS) == 2


def test_backward_dequantises(launches: list[str]) -> None:
    gradient = torch.zeros(5, 300, dtype=torch.float16)
    assert tuple(w3_linear._run_backward_cuda(gradient, *stored(), 300, 256, 128).shape) == (5, 256)
    assert launches == ["dequantize"]


@pytest.mark.parametrize("tokens", [1, 40, 200])
def test_without_the_toolchain_the_reference_runs_and_one_warning_says_so(
    launches: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tokens: int
) -> None:
    def load(text: KernelText, device_index: int) -> None:
        raise ToolchainError('expected the package cuda-core, got none; run `pip install "w3pack[cuda]"`')

    for module in (w3_launch, w3_dense):
        monkeypatch.setattr(module, "load", load)
    x = torch.randn(2, tokens, 256, generator=torch.Generator().manual_seed(2)).half()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            expected = w3.linear(x, *stored(), None, spec=SPEC)
            assert torch.equal(call(x), expected)
        gradient = torch.zeros(5, 300, dtype=torch.float16)
        assert tuple(w3_linear._run_backward_cuda(gradient, *stored(), 300, 256, 128).shape) == (5, 256)
    assert len(caplog.records) == 1
    assert "pip install" in caplog.text


def test_a_device_without_kernels_uses_the_reference(
    launches: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def limits(index: int) -> None:
        raise UnsupportedError("expected a GPU of compute capability 8.0 or later, got 7.0; run on another GPU")

    monkeypatch.setattr(w3_cuda.devices, "limits", limits)
    x = torch.ones(3, 256, dtype=torch.float16)
    assert torch.equal(call(x), w3.linear(x, *stored(), None, spec=SPEC))
    assert len(caplog.records) == 1
    assert launches == []
