"""The FP8 ops on a CUDA device: errors against float64, equal bits each time, graphs, streams, compiled code, arms."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from w3pack.format.gateup import GateUpSpec
from w3pack.jit import load
from w3pack.ops import gateup_arms, gateup_choices, gateup_cuda, gateup_probe
from w3pack.ops.device import limits
from w3pack.ops.gateup_between import between_text
from w3pack.ops.gateup_launch import GateUpDecoder, Matrix
from w3pack.ops.gateup_linear import fp8_linear, gate_up_linear, gate_up_linear_of
from w3pack.reference import fp8_gateup
from w3pack.runtime.fp8_linear import Fp8Linear
from w3pack.runtime.gateup import FusedGateUp, FusedMLP
from w3pack.runtime.prepare import prepare

pytestmark = pytest.mark.gpu

BLOCK = (128, 128)
HALVES = [torch.float16, torch.bfloat16]
TOKENS = (1, 2, 5, 8, 9, 15, 16, 17, 32, 33, 100, 300)
#: rows, columns: one row, partial scale blocks both ways, fewer and more units than multiprocessors, more than one row of scales.
SHAPES = (
    (1, 16),
    (5, 128),
    (64, 208),
    (130, 1040),
    (300, 3600),
    (1000, 2064),
    (768, 2048),
    (2048, 7168),
    (10944, 2048),
)


@dataclass(frozen=True)
class Pair:
    """A fused pair on the device."""

    weight: torch.Tensor
    scales: torch.Tensor

    @property
    def gate(self) -> Matrix:
        return Matrix(self.weight[: len(self.weight) // 2], self.scales[: len(self.scales) // 2])

    @property
    def up(self) -> Matrix:
        return Matrix(self.weight[len(self.weight) // 2 :], self.scales[len(self.scales) // 2 :])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return gate_up_linear(x, self.weight, self.scales, block=BLOCK)

    def truth(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = (dense(matrix, torch.float64) for matrix in (self.gate, self.up))
        return functional.silu(x.double() @ gate.t()) * (x.double() @ up.t())

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = (dense(matrix, x.dtype) for matrix in (self.gate, self.up))
        return functional.silu(x @ gate.t()) * (x @ up.t())


def dense(matrix: Matrix, dtype: torch.dtype) -> torch.Tensor:
    """Worked out without the package's dequantiser."""
    rows, columns = matrix.weight.shape
    grown = matrix.scales.double().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return (matrix.weight.double() * grown).to(dtype)


@functools.cache
def make(rows: int, columns: int) -> Pair:
    """All exponents of E4M3 occur; scales are all different."""
    generator = torch.Generator("cuda").manual_seed(rows + columns)
    values = torch.randn(2 * rows, columns, device="cuda", generator=generator).mul_(120).clamp_(-448, 448)
    grid = (2 * -(-rows // 128), -(-columns // 128))
    scales = (torch.rand(grid, device="cuda", generator=generator) + 0.5) / (120 * columns**0.5)
    return Pair(values.to(torch.float8_e4m3fn), scales)


def random_x(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    """Normal numbers, some columns larger, as models have them."""
    generator = torch.Generator("cuda").manual_seed(seed + len(shape))
    x = torch.randn(*shape, generator=generator, device="cuda")
    x[..., :: max(1, shape[-1] // 7)] *= 8
    return x.to(dtype)


def relative(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


def assert_accurate(found: torch.Tensor, plain: torch.Tensor, truth: torch.Tensor) -> None:
    """Within 1.2 times torch's error on the same matrix, and in float16 2e-3; few outputs may be unlucky by a rounding."""
    assert found.dtype == plain.dtype
    assert found.shape == truth.shape
    assert found.is_contiguous()
    few = 2 * torch.finfo(found.dtype).eps if truth.numel() < 2000 else 0.0
    error, torchs = relative(found, truth), relative(plain, truth)
    assert error <= 1.2 * torchs + few, (tuple(truth.shape), error, torchs)
    if found.dtype == torch.float16:
        assert error <= 2e-3 + few


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """All kernels, side by side: one after the other they would take a minute."""
    forms = [
        gateup_cuda.form_of(rows, columns, paired=paired, x_dtype=dtype, device_index=0)
        for rows, columns in (*SHAPES, (17408, 5120), (5120, 17408))
        for paired in (True, False)
        for dtype in HALVES
    ]
    texts = {text for form in forms for tokens in (1, 9, 17) for text in form.texts(tokens)}
    texts |= {
        between_text(dtype, paired=paired, quantized=quantized)
        for dtype in HALVES
        for paired, quantized in ((False, True), (True, False), (True, True))
    }
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda text: load(text, 0), texts))


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gateup_choices, "folder", lambda: tmp_path / "gateup")
    gateup_probe.forget()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", HALVES)
def test_errs_no_more_than_torch(shape: tuple[int, int], dtype: torch.dtype, workspace_is_clean: None) -> None:
    pair = make(*shape)
    for tokens in TOKENS:
        x = random_x(tokens, shape[1], dtype=dtype, seed=tokens)
        assert_accurate(pair(x), pair.plain(x), pair.truth(x))
        gate, matrix = pair.gate, dense(pair.gate, dtype)
        found = fp8_linear(x, gate.weight, gate.scales, None, block=BLOCK)
        assert_accurate(found, x @ matrix.t(), x.double() @ dense(gate, torch.float64).t())
    bias = torch.linspace(-1, 1, shape[0], device="cuda")
    x = random_x(3, shape[1], dtype=dtype)
    found = fp8_linear(x, gate.weight, gate.scales, bias, block=BLOCK)
    torch.testing.assert_close(found, fp8_linear(x, gate.weight, gate.scales, None, block=BLOCK) + bias.to(dtype))


@pytest.mark.parametrize("dtype", HALVES)
def test_a_large_layer(dtype: torch.dtype, workspace_is_clean: None) -> None:
    pair, down = make(17408, 5120), make(2560, 17408)
    whole = Matrix(down.weight, down.scales)
    for tokens in (1, 8, 16):
        x = random_x(tokens, 5120, dtype=dtype, seed=tokens)
        h = pair(x)
        assert_accurate(h, pair.plain(x), pair.truth(x))
        y = fp8_linear(h, whole.weight, whole.scales, None, block=BLOCK)
        assert_accurate(y, h @ dense(whole, dtype).t(), h.double() @ dense(whole, torch.float64).t())


@pytest.mark.parametrize("exponent", [-60, -20, 0, 20, 60, 100])
def test_bfloat16_of_any_magnitude_is_exact(exponent: int) -> None:
    """Powers of two move through: every token has its own, far outside of float16's range."""
    # from Python's floats: CUDA's pow misses some powers of two by a rounding
    powers = torch.tensor([[2.0 ** (exponent + token)] for token in range(9)], dtype=torch.float64, device="cuda")
    pair = make(300, 3600)
    gate = pair.gate
    x = random_x(9, 3600, dtype=torch.bfloat16)
    base = fp8_linear(x, gate.weight, gate.scales, None, block=BLOCK)
    moved = x * powers.to(torch.bfloat16)
    found = fp8_linear(moved, gate.weight, gate.scales, None, block=BLOCK)
    assert torch.equal(found.double(), base.double() * powers)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [(64, 208), (130, 1040)])
def test_identity_activations_read_the_matrix_back(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate = make(*shape).gate
    truth = fp8_gateup.dequantize(gate.weight, gate.scales, block=BLOCK, dtype=dtype).t()
    identity = torch.eye(shape[1], device="cuda", dtype=dtype)
    for tokens in (1, 8, 16, 31):
        for first in range(0, shape[1] if tokens > 1 else 70, tokens):
            found = fp8_linear(identity[first : first + tokens], gate.weight, gate.scales, None, block=BLOCK)
            assert torch.equal(found, truth[first : first + tokens])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("tokens", [1, 8, 16])
def test_three_thousand_launches_agree_in_every_bit(dtype: torch.dtype, tokens: int, workspace_is_clean: None) -> None:
    """Back to back, so that each begins while the one before ends, and reads the workspace that it leaves."""
    pair, down = make(2048, 7168), make(3584, 2048)
    x = random_x(tokens, 7168, dtype=dtype)

    def step() -> torch.Tensor:
        return fp8_linear(pair(x), down.weight, down.scales, None, block=BLOCK)

    first, differing = step(), torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(30):
        results = [step() for _ in range(50)]
        differing += sum((result.view(torch.int16) != first.view(torch.int16)).sum() for result in results)
    assert int(differing) == 0


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("tokens", [1, 9, 16])
@pytest.mark.parametrize("paired", [True, False])
def test_only_the_output_is_written(dtype: torch.dtype, tokens: int, paired: bool) -> None:
    pair = make(300, 3600)
    form = gateup_cuda.form_of(300, 3600, paired=paired, x_dtype=dtype, device_index=0)
    whole = torch.full((tokens + 2, 300), float("nan"), dtype=dtype, device="cuda")
    x = random_x(tokens, 3600, dtype=dtype)
    decoder = GateUpDecoder(form.plan(tokens), device_index=0)
    decoder.run(x, pair.gate, pair.up if paired else pair.gate, whole[1:-1])
    expected = pair(x) if paired else fp8_linear(x, pair.gate.weight, pair.gate.scales, None, block=BLOCK)
    assert torch.equal(whole[1:-1], expected)
    assert bool(whole[0].isnan().all())
    assert bool(whole[-1].isnan().all())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("tokens", [3, 12, 32])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_in_its_token(dtype: torch.dtype, tokens: int, value: float) -> None:
    pair = make(1000, 2064)
    x = random_x(tokens, 2064, dtype=dtype)
    clean = pair(x)
    x[1, 2050] = value
    found = pair(x)
    others = [token for token in range(tokens) if token != 1]
    assert torch.equal(found[others], clean[others])
    single = fp8_linear(x, pair.gate.weight, pair.gate.scales, None, block=BLOCK)
    assert not bool(single[1].isfinite().any())


@pytest.mark.parametrize("dtype", HALVES)
def test_any_strides_and_leading_shapes(dtype: torch.dtype) -> None:
    pair = make(64, 208)
    wide = torch.full((6, 2, 450), float("nan"), dtype=dtype, device="cuda")
    every_second = wide[::2, :, 5:421:2]
    every_second.copy_(random_x(3, 2, 208, dtype=dtype))
    odd = torch.full((5, 301), float("nan"), dtype=dtype, device="cuda")[:, 1:209]
    odd.copy_(random_x(5, 208, dtype=dtype))
    rows = torch.full((5, 320), float("nan"), dtype=dtype, device="cuda")[:, 8:216]
    rows.copy_(random_x(5, 208, dtype=dtype))
    for x in (
        every_second,
        odd,
        rows,
        random_x(208, 5, dtype=dtype).t(),
        random_x(1, 208, dtype=dtype).expand(4, 208),
        random_x(3, 2, 208, dtype=dtype).transpose(0, 1),
        random_x(208, dtype=dtype),
        random_x(2, 3, 4, 208, dtype=dtype),
    ):
        assert torch.equal(pair(x), pair(x.clone(memory_format=torch.contiguous_format)))
        assert pair(x).shape == (*x.shape[:-1], 64)
    for shape in ((0, 208), (2, 0, 3, 208)):
        assert pair(random_x(*shape, dtype=dtype)).shape == (*shape[:-1], 64)
        empty = fp8_linear(random_x(*shape, dtype=dtype), pair.gate.weight, pair.gate.scales, None, block=BLOCK)
        assert empty.shape == (*shape[:-1], 64)


def test_two_tensors_and_scales_of_other_dtypes() -> None:
    pair, x = make(768, 2048), random_x(5, 2048)
    apart = [part.clone() for part in (pair.gate.weight, pair.gate.scales, pair.up.weight, pair.up.scales)]
    assert torch.equal(gate_up_linear_of(x, *apart, block=BLOCK), pair(x))
    narrow = pair.scales.to(torch.bfloat16)
    assert torch.equal(gate_up_linear(x, pair.weight, narrow, block=BLOCK), Pair(pair.weight, narrow.float())(x))


@pytest.mark.parametrize("dtype", HALVES)
def test_dequantised_bits_are_the_references(dtype: torch.dtype) -> None:
    from w3pack.ops.gateup_dense import dequantize

    for shape in ((768, 2048), (1000, 2064)):
        gate = make(*shape).gate
        expected = fp8_gateup.dequantize(gate.weight, gate.scales, block=BLOCK, dtype=dtype)
        assert torch.equal(dequantize(gate.weight, gate.scales, block=BLOCK, dtype=dtype), expected)


def test_gradient_of_x() -> None:
    pair = make(768, 2048)
    x = random_x(5, 2048).requires_grad_()
    plain = x.detach().double().requires_grad_()
    gradient = random_x(5, 768)
    pair(x).backward(gradient)
    pair.truth(plain).backward(gradient.double())
    assert x.grad is not None
    assert plain.grad is not None
    assert relative(x.grad, plain.grad) < 3e-3


# ---- graphs, streams, compiled code


def mlp_of(rows: int = 2048, columns: int = 1024, dtype: torch.dtype = torch.float16) -> FusedMLP:
    """A fused MLP with FP8 down."""
    pair, down = make(rows, columns), make(columns // 2, rows)
    fused = FusedGateUp(GateUpSpec(rows, columns), functional.silu, block=BLOCK, device="cuda")
    linear = Fp8Linear(columns, rows, block=BLOCK, scales=torch.bfloat16, device="cuda")
    fused.weight.data.view(torch.uint8).copy_(pair.weight.view(torch.uint8))
    fused.weight_scale_inv.data.copy_(pair.scales)
    linear.weight.data.view(torch.uint8).copy_(down.weight.view(torch.uint8))
    linear.weight_scale_inv.data.copy_(down.scales)
    return FusedMLP(fused, linear, down_name="down_proj")


@pytest.mark.parametrize("tokens", [1, 8, 16, 40])
@pytest.mark.parametrize("dtype", HALVES)
def test_captured_once_and_replayed_with_other_x(tokens: int, dtype: torch.dtype, workspace_is_clean: None) -> None:
    mlp = mlp_of()
    inputs = [random_x(tokens, 1024, dtype=dtype, seed=seed) for seed in range(4)]
    expected = [mlp(mlp(x)) for x in inputs]
    source, x = inputs[0].clone(), inputs[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.copy_(source)
        out = mlp(mlp(x))
    for given, wanted in zip(inputs * 2, expected * 2, strict=True):
        source.copy_(given)
        graph.replay()
        assert torch.equal(out, wanted)


def test_streams_at_once(workspace_is_clean: None) -> None:
    mlp = mlp_of()
    inputs = [random_x(tokens, 1024, seed=tokens) for tokens in (8, 8, 16, 32)]
    expected = [mlp(x) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    found: list[list[torch.Tensor]] = [[] for _ in inputs]
    for _ in range(100):
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[number].append(mlp(inputs[number]))
    torch.cuda.synchronize()
    for results, wanted in zip(found, expected, strict=True):
        assert all(torch.equal(result, wanted) for result in results)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(mode: str, workspace_is_clean: None) -> None:
    mlp = mlp_of()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: mlp(x * 2) + x, fullgraph=True, mode=mode, dynamic=False)
    with torch.inference_mode():
        for tokens in (1, 8, 40):
            for seed in range(4):
                x = random_x(tokens, 1024, seed=seed)
                torch.compiler.cudagraph_mark_step_begin()
                torch.testing.assert_close(compiled(x).clone(), mlp(x * 2) + x, rtol=4e-3, atol=4e-3)
    torch._dynamo.reset()


# ---- arms


def hopper() -> bool:
    return limits(0).arch == "sm_90a"


@pytest.mark.parametrize("tokens", [1, 5, 8, 16])
@pytest.mark.parametrize("shape", [(2048, 1024), (6144, 6144)])
def test_eight_bit_activations_err_as_they_must(tokens: int, shape: tuple[int, int]) -> None:
    if not hopper():
        pytest.skip("cuBLASLt's block scaling wants compute capability 9.0")
    pair, x = make(*shape), random_x(tokens, shape[1], dtype=torch.bfloat16)
    x = torch.randn_like(x)
    for arm, products in (
        (gateup_arms.fused, gateup_arms.fused_products),
        (gateup_arms.separate, gateup_arms.separate_products),
    ):
        for matrix, product in zip((pair.gate, pair.up), products(x, pair.gate, pair.up), strict=True):
            assert relative(product[:tokens], x.double() @ dense(matrix, torch.float64).t()) <= 3e-2
        found = arm(x, pair.gate, pair.up)
        assert found.shape == (tokens, shape[0])
        assert relative(found, pair.truth(x)) <= 4.5e-2  # both factors err


def test_quantised_activations_are_what_torch_would_make() -> None:
    from w3pack.ops.gateup_between import quantize

    x = random_x(5, 1024, dtype=torch.bfloat16)
    x[2, 256:384] = 0
    values, scales = quantize(x)
    assert tuple(values.shape) == (8, 1024)
    assert scales.stride() == (1, 8)
    groups = x.float().view(5, 8, 128)
    peak = groups.abs().amax(dim=-1)
    expected = torch.where(peak > 0, peak / 448, torch.ones_like(peak))
    torch.testing.assert_close(scales[:5], expected, rtol=1e-6, atol=0)
    exact = (groups / scales[:5, :, None]).view(5, 1024).to(torch.float8_e4m3fn)
    assert torch.equal(values[:5].view(torch.uint8), exact.view(torch.uint8))


@pytest.mark.parametrize("wanted", ["auto", "kernel", "fused", "separate", "dequantize"])
def test_prepare_chooses_and_says_what(wanted: str) -> None:
    mlp = mlp_of()
    report = prepare(mlp, (1, 8, 16), dtype=torch.bfloat16, gateup=wanted, w8a8=wanted in ("fused", "separate"))  # type: ignore[arg-type]
    assert [(choice.rows, choice.columns, choice.tokens) for choice in report.gateup] == [
        (2048, 1024, 4),
        (2048, 1024, 8),
        (2048, 1024, 16),
    ]
    assert report.workspace_bytes > 0
    assert len(str(report).splitlines()) == 4
    for choice in report.gateup:
        if wanted == "auto":
            assert choice.arm == "kernel"
            assert [arm for arm, _ in choice.microseconds] == ["kernel", "dequantize"]
        elif wanted in ("kernel", "dequantize"):
            assert choice.arm == wanted
        elif hopper():
            assert choice.arm == wanted or dict(choice.declined)
    x = random_x(8, 1024, dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mlp(x)
    graph.replay()
    truth = mlp(x)
    assert torch.equal(out, truth)


@pytest.mark.parametrize("w8a8", [False, True])
def test_the_next_start_takes_what_was_measured_from_disk(w8a8: bool, tmp_path: Path) -> None:
    mlp = mlp_of()
    first = prepare(mlp, (1, 16), dtype=torch.bfloat16, w8a8=w8a8).gateup
    assert not any(choice.from_disk for choice in first)
    (path,) = (tmp_path / "gateup").iterdir()
    gateup_probe.forget()
    again = prepare(mlp, (1, 16), dtype=torch.bfloat16, w8a8=w8a8).gateup
    assert [replace(choice, from_disk=False, microseconds=()) for choice in again] == [
        replace(choice, microseconds=()) for choice in first
    ]
    assert all(choice.from_disk for choice in again)
    path.write_text("{}")
    gateup_probe.forget()
    assert not any(choice.from_disk for choice in prepare(mlp, (1,), dtype=torch.bfloat16, w8a8=w8a8).gateup)


def test_prepare_widens_scales_and_moving_lets_go_of_them() -> None:
    mlp = mlp_of()
    x = random_x(3, 1024)
    expected = mlp(x)
    prepare(mlp, (3,))
    down = mlp.get_submodule("down_proj")
    assert isinstance(down, Fp8Linear)
    assert down.scales.dtype == torch.float32
    assert down.weight_scale_inv.dtype == torch.bfloat16
    assert torch.equal(mlp(x), expected)
    down.weight_scale_inv.data.mul_(2)
    mlp.half()
    assert down.scales.dtype == torch.bfloat16
    torch.testing.assert_close(mlp(x), 2 * expected)


def test_an_mlp_with_another_activation(workspace_is_clean: None) -> None:
    mlp = mlp_of()
    other = FusedGateUp(GateUpSpec(2048, 1024), nn.GELU(), block=BLOCK, device="cuda")
    other.load_state_dict(mlp.gate_up_proj.state_dict())
    assert not other.silu
    x = random_x(8, 1024)
    gate, up = (mlp.get_submodule(name)(x) for name in ("gate_proj", "up_proj"))
    assert torch.equal(other(x), nn.GELU()(gate) * up)
