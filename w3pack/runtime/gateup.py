"""`FusedGateUp`: gate and up of one MLP in one FP8 tensor, and the two halves as views on it.

The halves own nothing. Each looks at the fused tensor when it is asked, so moving, copying, saving or reloading the model
cannot part them from it, and no byte is held twice.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from w3pack.format.gateup import GateUpSpec
from w3pack.ops.gateup_linear import fp8_linear, gate_up_linear
from w3pack.pack.gateup import split_rows
from w3pack.runtime.fp8_linear import Fp8Module

Activation = Callable[[torch.Tensor], torch.Tensor]


def is_silu(activation: Activation) -> bool:
    """Whether an activation computes SiLU, found out by running it: what it is called says nothing."""
    x = torch.linspace(-20, 20, 401, dtype=torch.float64, device="cpu")
    try:
        found = activation(x.clone())
    except Exception:  # noqa: BLE001 - any activation may do anything; then it is another one
        return False
    return isinstance(found, torch.Tensor) and torch.equal(found, nn.functional.silu(x))


class FusedGateUp(Fp8Module):
    """act(x W_gate^T) * (x W_up^T).

    Parameters, frozen: `weight` float8_e4m3fn [2*rows, columns], gate rows first; `weight_scale_inv` float32, two stacked grids.
    """

    def __init__(
        self,
        spec: GateUpSpec,
        activation: Activation,
        *,
        block: tuple[int, int],
        device: torch.device | str | None = None,
    ) -> None:
        """Uninitialised parameters of the shapes that `spec` gives."""
        super().__init__(spec.weight_shape, spec.grid_shape(block), block=block, device=device)
        self.spec = spec
        self.activation = activation
        self.silu = is_silu(activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x floating [..., columns] -> [..., rows] in x's dtype. With SiLU it is one op; on CUDA one kernel for few tokens."""
        if self.silu:
            return gate_up_linear(x, self.weight, self.scales, block=self.block)
        (gate, up), (gate_scales, up_scales) = split_rows(self.weight), split_rows(self.scales)
        products = self.activation(fp8_linear(x, gate, gate_scales, None, block=self.block))
        return products * fp8_linear(x, up, up_scales, None, block=self.block)

    def extra_repr(self) -> str:
        """Shape, for print(model)."""
        return f"in_features={self.spec.columns}, out_features=2 x {self.spec.rows}, block={self.block}"


class GateUpHalf(nn.Module):
    """Gate (`number` 0) or up (1) of a `FusedGateUp`, used like a Linear of its own. It has no parameters."""

    def __init__(self, fused: FusedGateUp, number: int) -> None:
        super().__init__()
        self.__dict__["fused"] = fused  # no child: its parameters belong to the one place that registers them
        self.number = number
        self.in_features, self.out_features = fused.spec.columns, fused.spec.rows

    @property
    def weight(self) -> torch.Tensor:
        """float8_e4m3fn [rows, columns], a contiguous view on the fused tensor."""
        return split_rows(self.__dict__["fused"].weight)[self.number]

    @property
    def weight_scale_inv(self) -> torch.Tensor:
        """float32 [ceil(rows / R), ceil(columns / C)], a contiguous view on the fused grid."""
        return split_rows(self.__dict__["fused"].weight_scale_inv)[self.number]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x floating [..., columns] -> [..., rows] in x's dtype."""
        fused: FusedGateUp = self.__dict__["fused"]
        return fp8_linear(x, self.weight, split_rows(fused.scales)[self.number], None, block=fused.block)

    def extra_repr(self) -> str:
        """Which half, for print(model)."""
        return f"{('gate', 'up')[self.number]} rows of the fused tensor"


class FusedMLP(nn.Module):
    """down(act(gate(x)) * up(x)) with gate and up fused; stands in for a gated MLP of a model.

    Children: `gate_up_proj`, down under the name it had, and the two halves under theirs.
    """

    def __init__(self, gate_up: FusedGateUp, down: nn.Module, *, down_name: str) -> None:
        super().__init__()
        self.gate_up_proj = gate_up
        self.down_name = down_name
        self.add_module(down_name, down)
        self.add_module(gate_up.spec.gate, GateUpHalf(gate_up, 0))
        self.add_module(gate_up.spec.up, GateUpHalf(gate_up, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x floating [..., columns] -> the same shape, through down."""
        down: torch.Tensor = self.get_submodule(self.down_name)(self.gate_up_proj(x))
        return down
