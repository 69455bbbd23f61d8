"""The FP8 ops without a device: values, shapes, gradients, tracing, and which arm a call takes."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import pytest
import torch
from torch.nn import functional

from w3pack.errors import UnsupportedError
from w3pack.jit import KernelText, ToolchainError
from w3pack.ops import (
    gateup_arms,
    gateup_choices,
    gateup_cuda,
    gateup_dense,
    gateup_launch,
    gateup_linear,
    gateup_probe,
    workspace,
)
from w3pack.ops.configs import DEVICES
from w3pack.ops.gateup_choices import ArmChoice
from w3pack.ops.gateup_launch import Matrix
from w3pack.ops.gateup_linear import fp8_linear, gate_up_linear, gate_up_linear_of
from w3pack.quantize.fp8_blocks import quantize_fp8_blocks
from w3pack.reference import fp8_gateup

BLOCK = (128, 128)
ROWS, COLUMNS = 200, 144
NO_DEVICE = -1  # what a CPU tensor says


def fused(rows: int = ROWS, columns: int = COLUMNS) -> tuple[torch.Tensor, torch.Tensor]:
    """A fused weight and its grid."""
    generator = torch.Generator().manual_seed(0)
    halves = [quantize_fp8_blocks(torch.randn(rows, columns, generator=generator)) for _ in range(2)]
    weight = torch.cat([weight.view(torch.uint8) for weight, _ in halves]).view(torch.float8_e4m3fn)
    return weight, torch.cat([scales for _, scales in halves])


def random_x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(COLUMNS,), (3, COLUMNS), (2, 0, COLUMNS), (2, 3, 4, COLUMNS)])
def test_values_are_the_references(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    weight, scales = fused()
    x = random_x(*shape, dtype=dtype)
    expected = fp8_gateup.gate_up(x, weight, scales, block=BLOCK)
    assert torch.equal(gate_up_linear(x, weight, scales, block=BLOCK), expected)
    apart = [part.clone() for part in (weight[:ROWS], scales[:2], weight[ROWS:], scales[2:])]
    assert torch.equal(gate_up_linear_of(x, *apart, block=BLOCK), expected)
    bias = torch.linspace(-1, 1, ROWS)
    for given in (None, bias):
        expected = fp8_gateup.linear(x, apart[0], apart[1], given, block=BLOCK)
        assert torch.equal(fp8_linear(x, apart[0], apart[1], given, block=BLOCK), expected)


@pytest.mark.parametrize("scales_dtype", [torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.uint8])
def test_scales_of_any_dtype(scales_dtype: torch.dtype) -> None:
    weight, scales = fused()
    narrow = (
        scales.to(torch.float8_e8m0fnu).view(torch.uint8) if scales_dtype == torch.uint8 else scales.to(scales_dtype)
    )
    wide = gateup_cuda.widened(narrow)
    assert wide.dtype == torch.float32
    x = random_x(3, COLUMNS)
    found = gate_up_linear(x, weight, narrow, block=BLOCK)
    assert torch.equal(found, gate_up_linear(x, weight, wide, block=BLOCK))


def test_gradients_are_those_of_the_dequantised_matrices() -> None:
    weight, scales = fused()
    dense = [
        fp8_gateup.dequantize(weight[at], scales[grid], block=BLOCK, dtype=torch.float64)
        for at, grid in ((slice(ROWS), slice(2)), (slice(ROWS, None), slice(2, None)))
    ]
    x = random_x(2, 3, COLUMNS).double().requires_grad_()
    plain = x.detach().clone().requires_grad_()
    gradient = random_x(2, 3, ROWS).double()
    gate_up_linear(x, weight, scales, block=BLOCK).backward(gradient)
    (functional.silu(plain @ dense[0].t()) * (plain @ dense[1].t())).backward(gradient)
    torch.testing.assert_close(x.grad, plain.grad)
    x.grad = plain.grad = None
    bias = torch.zeros(ROWS, dtype=torch.float64, requires_grad=True)
    fp8_linear(x, weight[:ROWS], scales[:2], bias, block=BLOCK).backward(gradient)
    (plain @ dense[0].t()).backward(gradient)
    torch.testing.assert_close(x.grad, plain.grad)
    torch.testing.assert_close(bias.grad, gradient.sum(dim=(0, 1)))


@pytest.mark.parametrize("dynamic", [False, True])
def test_traced_without_a_break(dynamic: bool) -> None:
    weight, scales = fused()
    down, down_scales = quantize_fp8_blocks(random_x(COLUMNS, ROWS))

    def mlp(x: torch.Tensor) -> torch.Tensor:
        return fp8_linear(gate_up_linear(x, weight, scales, block=BLOCK), down, down_scales, None, block=BLOCK)

    torch._dynamo.reset()
    traced = torch.compile(mlp, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (1, 4, 7):
        x = random_x(tokens, COLUMNS)
        assert torch.equal(traced(x), mlp(x))
    x = random_x(3, COLUMNS).requires_grad_()
    traced(x).sum().backward()
    assert x.grad is not None
    torch._dynamo.reset()


def test_registration_is_sound() -> None:
    weight, scales = fused()
    x = random_x(3, COLUMNS).requires_grad_()
    pair = (x, weight[:ROWS], scales[:2], weight[ROWS:], scales[2:], *BLOCK)
    tests = ("test_faketensor", "test_autograd_registration")  # the schema's test multiplies E4M3, which torch cannot
    torch.library.opcheck(torch.ops.w3pack.gate_up_linear.default, pair, test_utils=tests)
    single = (x, weight[:ROWS], scales[:2], torch.zeros(ROWS), *BLOCK)
    torch.library.opcheck(torch.ops.w3pack.fp8_linear.default, single, test_utils=tests)


def test_what_does_not_belong_together_is_refused() -> None:
    weight, scales = fused()
    x = random_x(3, COLUMNS)
    with pytest.raises(UnsupportedError, match=r"expected a float x of shape \[..., 144\], got .*; reshape or cast it"):
        gate_up_linear(x[:, :-1], weight, scales, block=BLOCK)
    with pytest.raises(UnsupportedError, match=r"expected a scale grid of \(2, 2\)"):
        gate_up_linear(x, weight, scales[:2], block=BLOCK)
    with pytest.raises(UnsupportedError, match=r"expected gate and up of one shape"):
        gate_up_linear_of(x, weight[:ROWS], scales[:2], weight[:128], scales[:1], block=BLOCK)
    with pytest.raises(UnsupportedError, match=r"expected a float8_e4m3fn matrix"):
        fp8_linear(x, weight.float(), scales, None, block=BLOCK)
    with pytest.raises(UnsupportedError, match=r"expected a bias of shape \[200\], got \[3\]"):
        fp8_linear(x, weight[:ROWS], scales[:2], torch.zeros(3), block=BLOCK)


# ---- the CUDA implementation, with kernels that only write their launches down


class Kernel:
    """Writes its launches down."""

    def __init__(self, text: KernelText, launches: list[dict[str, Any]]) -> None:
        self.text, self.launches = text, launches

    def launch(self, **arguments: Any) -> None:
        self.launches.append({"text": self.text, **arguments})


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(gateup_launch, "load", lambda text, index: Kernel(text, found))
    monkeypatch.setattr(gateup_launch, "encode_bytes", lambda pointer, **_: bytes(128))
    monkeypatch.setattr(gateup_cuda.devices, "limits", lambda index: DEVICES["sm_90a"])
    monkeypatch.setattr(gateup_cuda.devices, "current_stream", lambda index: 0)
    monkeypatch.setattr(workspace, "acquire", lambda *_: torch.empty(1))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: NO_DEVICE)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(gateup_cuda, "_FORMS", {})
    monkeypatch.setattr(gateup_cuda, "_WARNED", set())
    monkeypatch.setattr(gateup_choices, "_made_with", lambda: None)  # nothing of the user's is read or written
    gateup_probe.forget()
    return found


def call(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] = BLOCK) -> torch.Tensor:
    rows, grid = weight.shape[0] // 2, scales.shape[0] // 2
    return gateup_linear._gate_up_cuda(x, weight[:rows], scales[:grid], weight[rows:], scales[grid:], *block)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(0, []), (1, [1]), (8, [1]), (9, [2]), (32, [4]), (33, [4, 1]), (256, [4] * 8), (257, [])],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_launches_of_a_call(
    launches: list[dict[str, Any]], tokens: int, expected: list[int], dtype: torch.dtype
) -> None:
    weight, scales = fused()
    y = call(random_x(tokens, COLUMNS, dtype=dtype), weight, scales)
    assert [dict(launch["text"].defines)["GU_TOKEN_TILES"] for launch in launches] == expected
    assert {dict(launch["text"].defines)["GU_PAIRED"] for launch in launches} <= {1}
    assert (tuple(y.shape), y.dtype) == ((tokens, ROWS), dtype)
    launches.clear()
    gateup_linear._linear_cuda(
        random_x(tokens, COLUMNS, dtype=dtype), weight[:ROWS], scales[:2], torch.zeros(ROWS), *BLOCK
    )
    assert [dict(launch["text"].defines)["GU_PAIRED"] for launch in launches] == [0] * len(expected)


def test_what_the_kernel_cannot_read_is_dequantised(launches: list[dict[str, Any]]) -> None:
    weight, scales = fused()
    x = random_x(3, COLUMNS, dtype=torch.float16)
    expected = gate_up_linear(x, weight, scales, block=BLOCK)
    room = torch.empty(weight.numel() + 8, dtype=torch.uint8)
    shifted = room[8:].view(weight.shape).copy_(weight.view(torch.uint8)).view(torch.float8_e4m3fn)
    turned = weight.view(torch.uint8).t().contiguous().t().view(torch.float8_e4m3fn)
    for odd in (shifted, turned):
        assert odd.data_ptr() % 16 or not odd.is_contiguous()
        assert torch.equal(call(x, odd, scales), expected)
    assert torch.equal(call(x.float(), weight, scales), gate_up_linear(x.float(), weight, scales, block=BLOCK))
    small = scales.repeat_interleave(2, 0)[:8].repeat_interleave(2, 1)[:, :3]
    assert tuple(call(x, weight, torch.cat([small[:4], small[4:]]), (64, 64)).shape) == (3, ROWS)
    assert launches == []
    call(x, weight, scales.to(torch.bfloat16))  # widened for the call
    assert len(launches) == 1


def test_x_is_copied_only_where_it_must_be() -> None:
    wide = torch.zeros(6, 320, dtype=torch.float16)
    assert gateup_cuda.flat(wide[:, :144]).data_ptr() == wide.data_ptr()
    assert gateup_cuda.flat(wide[:1, :144]).data_ptr() == wide.data_ptr()
    for x in (wide[:, 1:145], wide[:, :288:2], wide.reshape(-1)[:1815].view(5, 363)[:, :144]):
        found = gateup_cuda.flat(x)
        assert torch.equal(found, x)
        assert found.data_ptr() % 16 == 0
        assert found.stride(1) == 1
        assert found.stride(0) % 8 == 0
    assert gateup_cuda.flat(torch.zeros(2, 3, 144)).shape == (6, 144)


def test_without_the_toolchain_it_dequantises_and_one_warning_says_so(
    launches: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load(text: KernelText, index: int) -> None:
        raise ToolchainError('expected the package cuda-core, got none; run `pip install "w3pack[cuda]"`')

    monkeypatch.setattr(gateup_launch, "load", load)
    weight, scales = fused()
    x = random_x(3, COLUMNS, dtype=torch.float16)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert torch.equal(call(x, weight, scales), gate_up_linear(x, weight, scales, block=BLOCK))
    assert len(caplog.records) == 1


class Elsewhere:
    """A tensor of another device."""

    device = "cuda:1"

    def get_device(self) -> int:
        return 1


def test_tensors_on_two_devices_are_refused() -> None:
    other: Any = Elsewhere()
    with pytest.raises(
        UnsupportedError, match=r"expected weights and scales on the device of x, got cuda:1 beside cpu"
    ):
        gateup_linear._check_devices(random_x(3, COLUMNS), random_x(3), None, other)


# ---- arms


@pytest.fixture
def halves(launches: list[dict[str, Any]]) -> tuple[Matrix, Matrix]:
    weight, scales = fused(256, 128)
    return Matrix(weight[:256], scales[:2]), Matrix(weight[256:], scales[2:])


def test_a_chosen_arm_is_taken_for_its_tokens(
    halves: tuple[Matrix, Matrix], launches: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    for arm in gateup_arms.ARMS:
        monkeypatch.setitem(gateup_arms.RUN, arm, lambda x, gate, up, arm=arm: taken.append(arm))
    for tokens, arm in ((5, "fused"), (16, "dequantize")):
        gateup_arms.choose(256, 128, torch.float16, NO_DEVICE, tokens, arm)  # type: ignore[arg-type]
    for tokens in (1, 5, 8, 9, 13, 16, 17):
        gateup_arms.gate_up(random_x(tokens, 128, dtype=torch.float16), *halves)
    assert taken == ["kernel", "fused", "fused", "kernel", "dequantize", "dequantize", "kernel"]
    taken.clear()
    gateup_arms.gate_up(random_x(5, 128, dtype=torch.bfloat16), *halves)  # chosen for another dtype
    apart = Matrix(halves[1].weight.clone(), halves[1].scales.clone())
    gateup_arms.gate_up(random_x(5, 128, dtype=torch.float16), halves[0], apart)  # not one tensor
    assert taken == ["kernel", "kernel"]


def test_halves_of_a_fused_tensor_are_one_matrix(halves: tuple[Matrix, Matrix]) -> None:
    whole = gateup_arms._fused(*halves)
    assert whole is not None
    assert torch.equal(whole.weight[256:].view(torch.uint8), halves[1].weight.view(torch.uint8))
    assert torch.equal(whole.scales[:2], halves[0].scales)
    assert gateup_arms._fused(halves[1], halves[0]) is None
    assert gateup_arms.why_not("fused", halves[1], halves[0]) == "gate and up do not follow each other in memory"
    assert gateup_arms.why_not("separate", *halves) is None
    weight, scales = fused()
    partial = Matrix(weight[:ROWS], scales[:2]), Matrix(weight[ROWS:], scales[2:])
    assert gateup_arms.why_not("fused", *partial) == "16 does not divide 200 x 144"


def test_auto_keeps_activations_unless_it_may_round_them() -> None:
    assert gateup_probe.allowed("auto", w8a8=False) == ("kernel", "dequantize")
    assert gateup_probe.allowed("auto", w8a8=True) == ("kernel", "fused", "separate", "dequantize")
    assert gateup_probe.allowed("fused", w8a8=False) == ("fused", "separate")
    assert gateup_probe.allowed("dequantize", w8a8=True) == ("dequantize",)


def test_the_fastest_is_picked_and_the_first_unless_clearly_slower() -> None:
    arms = ("kernel", "fused", "separate")
    assert gateup_probe.pick(arms, {"kernel": 50.0, "fused": 49.0, "separate": 80.0}) == "kernel"
    assert gateup_probe.pick(arms, {"kernel": 50.0, "fused": 40.0, "separate": 80.0}) == "fused"
    assert gateup_probe.pick(arms, {"separate": 80.0}) == "separate"
    assert gateup_probe.pick((), {}) == "kernel"


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("wanted", ["auto", "fused"])
def test_a_fused_product_with_other_bytes_declines(
    halves: tuple[Matrix, Matrix], monkeypatch: pytest.MonkeyPatch, equal: bool, wanted: Any
) -> None:
    first = torch.zeros(8, 256, dtype=torch.float16)
    second = first.clone()
    second[7, 3] = 0 if equal else 1e-3
    monkeypatch.setattr(gateup_arms, "fused_products", lambda x, gate, up: (first, first))
    monkeypatch.setattr(gateup_arms, "separate_products", lambda x, gate, up: (first, second))
    times = iter([50.0, *([30.0] if equal else []), 60.0, 900.0])
    monkeypatch.setattr(gateup_probe, "microseconds", lambda run: next(times))
    choice = gateup_probe.decide(*halves, 5, torch.float16, wanted=wanted, w8a8=True)
    assert choice.arm == ("fused" if equal else "kernel" if wanted == "auto" else "separate")
    declined = {} if equal else {"fused": "1 of 4096 numbers differ from two products"}
    assert dict(choice.declined) == declined
    assert choice.tokens == 8
    assert gateup_arms.chosen(256, 128, torch.float16, NO_DEVICE, 6) == choice.arm
    assert gateup_probe.decide(*halves, 7, torch.float16, wanted=wanted, w8a8=True) is choice  # measured once
    assert gateup_arms.chosen(256, 128, torch.float16, NO_DEVICE, 9) == "kernel"


def test_auto_without_a_kernel_dequantises(halves: tuple[Matrix, Matrix], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateup_cuda.devices, "limits", lambda index: DEVICES["sm_80"])
    choice = gateup_probe.decide(*halves, 8, torch.bfloat16)
    assert choice.arm == "dequantize"
    assert dict(choice.declined) == {"kernel": "sm_80 has no bulk copies"}
    assert torch.equal(
        gateup_arms.gate_up(random_x(3, 128, dtype=torch.bfloat16), *halves),
        gateup_dense.gate_up(
            random_x(3, 128, dtype=torch.bfloat16),
            halves[0].weight,
            halves[0].scales,
            halves[1].weight,
            halves[1].scales,
            block=BLOCK,
        ),
    )


def test_a_choice_reads_as_a_line() -> None:
    choice = ArmChoice(
        17408, 5120, 8, "float16", "kernel", (("kernel", 45.61), ("dequantize", 612.0)), (("fused", "why"),)
    )
    assert str(choice) == (
        "17408 x 5120, 8 tokens, float16: kernel (kernel 45.6 us, dequantize 612.0 us; fused declined: why)"
    )
