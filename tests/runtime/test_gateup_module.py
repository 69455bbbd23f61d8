"""FusedGateUp, its halves and FP8 Linears by themselves; which modules count as plain gated MLPs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from w3pack.errors import CheckpointError
from w3pack.format.gateup import GateUpSpec
from w3pack.quantize.fp8_blocks import dequantize_blocks, quantize_fp8_blocks
from w3pack.reference import fp8_gateup
from w3pack.runtime.build_gateup import plain_gated_mlp
from w3pack.runtime.fp8_linear import Fp8Linear
from w3pack.runtime.gateup import FusedGateUp, FusedMLP

ROWS, COLUMNS, BLOCK = 200, 130, (128, 128)


@pytest.fixture
def pair() -> tuple[FusedGateUp, torch.Tensor, torch.Tensor]:
    """(module, gate, up) with the float32 matrices that its halves stand for."""
    generator = torch.Generator().manual_seed(0)
    halves = [quantize_fp8_blocks(torch.randn(ROWS, COLUMNS, generator=generator)) for _ in range(2)]
    module = FusedGateUp(GateUpSpec(ROWS, COLUMNS), nn.functional.silu, block=BLOCK)
    module.weight.data.view(torch.uint8).copy_(torch.cat([weight.view(torch.uint8) for weight, _ in halves]))
    module.weight_scale_inv.data.copy_(torch.cat([scales for _, scales in halves]))
    gate, up = (dequantize_blocks(weight, scales, block=BLOCK) for weight, scales in halves)
    return module, gate, up


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_forward_is_that_of_the_dequantised_halves(pair: Any, dtype: torch.dtype) -> None:
    module, gate, up = pair
    x = torch.randn(2, 3, COLUMNS, generator=torch.Generator().manual_seed(1)).to(dtype)
    linear = nn.functional.linear
    expected = nn.functional.silu(linear(x, gate.to(dtype))) * linear(x, up.to(dtype))
    assert torch.equal(module(x), expected)
    mlp = FusedMLP(module, nn.Identity(), down_name="down_proj")
    assert torch.equal(mlp(x), expected)
    assert torch.equal(mlp.gate_proj(x), linear(x, gate.to(dtype)))
    assert torch.equal(mlp.up_proj(x), linear(x, up.to(dtype)))
    assert {name for name, _ in mlp.named_parameters()} == {"gate_up_proj.weight", "gate_up_proj.weight_scale_inv"}


def test_no_float_copy_of_the_whole_matrix(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, gate, _ = pair
    largest = [0]
    real = fp8_gateup.dequantize

    def watched(weight: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        largest[0] = max(largest[0], len(weight))
        return real(weight, *arguments, **keywords)

    monkeypatch.setattr(fp8_gateup, "dequantize", watched)
    x = torch.randn(4, COLUMNS)
    whole = fp8_gateup.linear(x, module.weight[:ROWS], module.weight_scale_inv[:2], block=BLOCK)
    assert largest == [ROWS]
    largest[0] = 0
    banded = fp8_gateup.linear(x, module.weight[:ROWS], module.weight_scale_inv[:2], block=BLOCK, band_bytes=1)
    assert largest == [128]
    torch.testing.assert_close(banded, whole)
    torch.testing.assert_close(whole, x @ gate.T)


def test_gradients_reach_the_input(pair: Any) -> None:
    module, gate, up = pair
    x = torch.randn(4, COLUMNS, requires_grad=True)
    module(x).sum().backward()
    plain = x.detach().clone().requires_grad_()
    (nn.functional.silu(plain @ gate.T) * (plain @ up.T)).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, plain.grad)
    assert not any(parameter.requires_grad for parameter in module.parameters())


def test_other_dtypes_are_not_loaded(pair: Any) -> None:
    module, _, _ = pair
    state = {name: tensor.to(torch.bfloat16) for name, tensor in module.state_dict().items()}
    with pytest.raises(RuntimeError, match="load the checkpoint anew"):
        module.load_state_dict(state)
    with pytest.raises(CheckpointError, match="without data"):
        FusedGateUp(module.spec, module.activation, block=BLOCK, device="meta").check("mlp")
    module.weight_scale_inv.data[0, 0] = float("inf")
    with pytest.raises(CheckpointError, match=r"mlp\.weight_scale_inv"):
        module.check("mlp")


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu, torch.uint8])
def test_linear_with_every_dtype_of_scales(scales: torch.dtype) -> None:
    weight, grid = quantize_fp8_blocks(torch.randn(ROWS, COLUMNS))
    stored = grid.to(torch.float8_e8m0fnu).view(torch.uint8) if scales == torch.uint8 else grid.to(scales)
    layer = Fp8Linear(ROWS, COLUMNS, block=BLOCK, scales=scales, bias=True)
    layer.load_state_dict({"weight": weight, "weight_scale_inv": stored, "bias": torch.arange(ROWS).float()})
    layer.check("linear")
    x = torch.randn(3, COLUMNS)
    matrix = dequantize_blocks(weight, stored, block=BLOCK)
    assert torch.equal(layer(x), nn.functional.linear(x, matrix, torch.arange(ROWS).float()))
    moved = layer.to(torch.bfloat16)
    assert (moved.weight.dtype, moved.weight_scale_inv.dtype) == (torch.float8_e4m3fn, scales)
    assert moved.bias is not None
    assert moved.bias.dtype == torch.bfloat16


class MLP(nn.Module):
    """As transformers writes them; `formula` is what forward computes."""

    def __init__(self, formula: Callable[[Any, torch.Tensor], torch.Tensor], **more: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 6, bias=False), nn.Linear(8, 6, bias=False)
        self.down_proj = nn.Linear(6, 8, bias=False)
        self.act_fn = nn.SiLU()
        self.formula = formula
        for name, module in more.items():
            self.add_module(name, module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.formula(self, x)


PLAIN: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "plain": lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)),
    "turned": lambda self, x: self.down_proj(self.up_proj(x) * self.act_fn(self.gate_proj(x))),
}
OTHER: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "swapped": lambda self, x: self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x)),
    "clamped": lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=1.0)) * self.up_proj(x)),
    "limited": lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).clamp(-50, 50)),
    "scaled": lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * 1.5,
    "residual": lambda self, x: x + self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)),
    "plus one": lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)) * (self.up_proj(x) + 1)),
    "no activation": lambda self, x: self.down_proj(self.gate_proj(x) * self.up_proj(x)),
    "a tuple": lambda self, x: (x, x),  # type: ignore[dict-item, return-value]
    "an error": lambda self, x: self.nothing(x),
}


@pytest.mark.parametrize("name", [*PLAIN, *OTHER])
def test_plain_is_what_computes_the_plain_formula(name: str) -> None:
    mlp = MLP({**PLAIN, **OTHER}[name])
    before = {key: value.clone() for key, value in mlp.state_dict().items()}
    state = torch.random.get_rng_state()
    found = plain_gated_mlp(mlp, gate="gate_proj", up="up_proj")
    assert found == (("down_proj", mlp.act_fn) if name in PLAIN else None)
    assert all(torch.equal(value, before[key]) for key, value in mlp.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert plain_gated_mlp(MLP(PLAIN["plain"], norm=nn.LayerNorm(8)), gate="gate_proj", up="up_proj") is None


def test_it_is_traced_without_a_break(pair: Any) -> None:
    module, *_ = pair
    down = Fp8Linear(COLUMNS, ROWS, block=BLOCK, scales=torch.bfloat16)
    weight, scales = quantize_fp8_blocks(torch.randn(COLUMNS, ROWS, generator=torch.Generator().manual_seed(2)))
    down.weight.data.view(torch.uint8).copy_(weight.view(torch.uint8))
    down.weight_scale_inv.data.copy_(scales)
    mlp = FusedMLP(module, down, down_name="down_proj")
    x = torch.randn(3, COLUMNS)
    expected = mlp(x)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(mlp, fullgraph=True, backend="aot_eager")(x), expected)
    torch._dynamo.reset()


def test_another_activation_than_silu_is_taken_as_it_is(pair: Any) -> None:
    module, gate, up = pair
    for activation, silu in ((nn.SiLU(), True), (nn.functional.silu, True), (nn.GELU(), False), (torch.tanh, False)):
        other = FusedGateUp(module.spec, activation, block=BLOCK)
        assert other.silu == silu
        other.load_state_dict(module.state_dict())
        x = torch.randn(2, COLUMNS, generator=torch.Generator().manual_seed(1))
        assert torch.equal(other(x), activation(nn.functional.linear(x, gate)) * nn.functional.linear(x, up))


def test_widened_scales_go_with_the_next_move_or_load() -> None:
    linear = Fp8Linear(200, 144, block=BLOCK, scales=torch.bfloat16)
    linear.weight_scale_inv.data.fill_(2)
    assert linear.scales is linear.weight_scale_inv
    linear.widen()
    assert (linear.scales.dtype, linear.weight_scale_inv.dtype) == (torch.float32, torch.bfloat16)
    assert set(linear.state_dict()) == {"weight", "weight_scale_inv"}
    linear.to("cpu")
    assert linear.scales is linear.weight_scale_inv
    linear.widen()
    linear.load_state_dict(linear.state_dict())
    assert linear.scales is linear.weight_scale_inv
