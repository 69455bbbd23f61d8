"""Mixture-of-experts layers whose experts' Linears are packed one by one.

transformers stacks experts in 3-D parameters; the checkpoint holds a matrix for each expert and projection. This module
keeps the checkpoint's form (`experts.7.up_proj.codes`), so that nothing is restacked at load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from w3pack.errors import UnsupportedError
from w3pack.format.gateup import FUSED_LEAF

#: Names that checkpoints give to (gate, up, down).
PROJECTIONS: tuple[tuple[str, str, str], ...] = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


class Expert(nn.Module):
    """One gated MLP; its children have the checkpoint's names."""

    def __init__(self, projections: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, module in projections.items():
            self.add_module(name, module)


class W3Experts(nn.ModuleDict):
    """Experts "0", "1", ... called like transformers' stacked experts: `(hidden, top_k_index, top_k_weights)`.

    A plain loop over the experts that were hit.
    """

    def __init__(self, experts: list[Expert], activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__({str(number): expert for number, expert in enumerate(experts)})
        self.activation = activation
        names = set(dict(experts[0].named_children()))
        try:
            self.gate, self.up, self.down = next(triple for triple in PROJECTIONS if set(triple) == names)
        except StopIteration as error:
            raise UnsupportedError(
                f"expected experts with projections {' or '.join(map(str, PROJECTIONS))}, got {sorted(names)}"
            ) from error

    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Mix the chosen experts' outputs.

        Args:
            hidden: [tokens, hidden size].
            top_k_index: integer [tokens, k], the experts of each token.
            top_k_weights: [tokens, k].

        Returns:
            [tokens, hidden size] in hidden's dtype.
        """
        result = torch.zeros_like(hidden)
        for number in top_k_index.unique().tolist():
            if number >= len(self):  # some routers send padding to one expert more than there are
                continue
            tokens, slot = torch.where(top_k_index == number)
            expert = self[str(number)]
            out = self.run_expert(expert, hidden[tokens])
            result.index_add_(0, tokens, (out * top_k_weights[tokens, slot, None]).to(result.dtype))
        return result

    def run_expert(self, expert: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """One expert's output for its tokens, [tokens, hidden size]."""
        gate = self.activation(getattr(expert, self.gate)(x))
        out: torch.Tensor = getattr(expert, self.down)(gate * getattr(expert, self.up)(x))
        return out


class FusedExperts(W3Experts):
    """Experts that hold `gate_up_proj` and down, or gate, up and down where those could not be fused."""

    def __init__(
        self,
        experts: list[Expert],
        activation: Callable[[torch.Tensor], torch.Tensor],
        *,
        projections: tuple[str, str, str],
    ) -> None:
        nn.ModuleDict.__init__(self, {str(number): expert for number, expert in enumerate(experts)})
        self.activation = activation
        self.gate, self.up, self.down = projections

    def run_expert(self, expert: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """One expert's output for its tokens, [tokens, hidden size]."""
        fused = getattr(expert, FUSED_LEAF, None)
        if fused is None:
            return super().run_expert(expert, x)
        out: torch.Tensor = getattr(expert, self.down)(fused(x))
        return out
