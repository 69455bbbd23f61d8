"""Synthetic layers that look like real ones: correlated inputs, a few massive channels, heavy-tailed weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch


@dataclass(frozen=True)
class Layer:
    """A weight float32 [rows, columns], inputs float32 [tokens, columns], and E[x x^T] float32 of these."""

    weight: torch.Tensor
    inputs: torch.Tensor

    @property
    def moment(self) -> torch.Tensor:
        wide = self.inputs.to(torch.float64)
        return (wide.t() @ wide / wide.shape[0]).to(torch.float32)

    def loss(self, approximation: torch.Tensor) -> float:
        """E |What x - W x|^2 / E |W x|^2 in float64, from the inputs themselves."""
        x, w = self.inputs.to(torch.float64), self.weight.to(torch.float64)
        return float(((approximation.to(torch.float64) - w) @ x.t()).square().sum() / (w @ x.t()).square().sum())


@pytest.fixture(scope="session")
def make_layer() -> Callable[..., Layer]:
    """`make_layer(rows, columns, tokens=..., seed=..., massive=..., dead=...)`."""

    def make(
        rows: int, columns: int, *, tokens: int = 1024, seed: int = 0, massive: float = 1.0, dead: int = 0
    ) -> Layer:
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(rows, columns, generator=generator) * torch.linspace(0.01, 0.04, rows).unsqueeze(1)
        outliers = torch.rand(rows, columns, generator=generator) < 0.01
        weight = torch.where(outliers, weight * 4, weight)
        latent = torch.randn(tokens, max(2, columns // 8), generator=generator)
        mixing = torch.randn(latent.shape[1], columns, generator=generator) / latent.shape[1] ** 0.5
        inputs = latent @ mixing + 0.4 * torch.randn(tokens, columns, generator=generator)
        inputs *= torch.rand(columns, generator=generator) * 2 + 0.2
        inputs[:, columns // 3] *= massive
        if dead:
            inputs[:, torch.randperm(columns, generator=generator)[:dead]] = 0.0
        return Layer(weight=weight, inputs=inputs)

    return make
