"""What calibration asks of a model: a decoder that can be walked block by block, and what is known of a Linear's inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from w3pack.errors import UnsupportedError


@dataclass(frozen=True)
class Input:
    """Linears of a block that are fed with the same tensor.

    Attributes:
        modules: their names in the checkpoint.
        columns: width of the tensor.
        pool: a name shared with the same input of the layer's other experts; None outside of experts.
    """

    modules: tuple[str, ...]
    columns: int
    pool: str | None = None


class Moment(Protocol):
    """What is known of an input: the mean of x x^T, or of x^2."""

    @property
    def tokens(self) -> int:
        """Tokens seen."""
        ...

    def add(self, activations: torch.Tensor) -> None:
        """Count the tokens of [..., columns]."""
        ...

    def merge(self, other: Any) -> None:
        """Count what another one of the same kind has seen."""
        ...

    def matrix(self) -> torch.Tensor:
        """float32 [columns, columns] or [columns]."""
        ...

    def diagonal(self) -> torch.Tensor:
        """float32 [columns]."""
        ...


class Diagonal:
    """The mean square of each column: a `Moment` that takes columns, not columns squared, of memory and time."""

    def __init__(self, columns: int, *, device: torch.device | str = "cpu") -> None:
        self.tokens = 0
        self._total = torch.zeros(columns, dtype=torch.float64, device=device)

    def add(self, activations: torch.Tensor) -> None:
        """Count the tokens of [..., columns].

        Raises:
            UnsupportedError: NaN or infinity.
        """
        rows = activations.detach().reshape(-1, self._total.shape[0])
        total = rows.to(torch.float32).square_().sum(dim=0, dtype=torch.float64)
        if not bool(torch.isfinite(total).all()):
            raise UnsupportedError("expected finite activations; got NaN or infinity; use other data or --effort none")
        self._total += total
        self.tokens += rows.shape[0]

    def merge(self, other: Diagonal) -> None:
        """Count what another one has seen."""
        self._total += other._total
        self.tokens += other.tokens

    def matrix(self) -> torch.Tensor:
        """float32 [columns]."""
        return self.diagonal()

    def diagonal(self) -> torch.Tensor:
        """float32 [columns]."""
        return (self._total / max(self.tokens, 1)).to(torch.float32)


MakeMoment = Callable[[int], Moment]
#: Moments of inputs and of pools of inputs; one that never saw a token has 0 tokens.
Moments = tuple[Mapping[Input, Moment], Mapping[str, Moment]]


class Block(Protocol):
    """One block of the decoder with its weights, and the hidden states of all samples before it."""

    def stages(self) -> tuple[tuple[Input, ...], ...]:
        """The inputs of the Linears to quantise in the order of computation; those of one stage do not depend on each
        other. Notes the outputs of one batch on the way, for `error`."""
        ...

    def moments(self, inputs: tuple[Input, ...], make: MakeMoment) -> Moments:
        """Moments over all samples of some inputs of one stage, with the weights as they are now."""
        ...

    def set_weight(self, module: str, weight: torch.Tensor) -> None:
        """Put a weight, float32 [rows, columns], in the place of the original."""
        ...

    def error(self) -> float | None:
        """||y' - y|| / ||y - x||: what quantisation changed in what the block adds to its input, on the noted batch."""
        ...

    def advance(self) -> None:
        """Replace the hidden states by the block's outputs with the weights as they are now."""
        ...


class Walk(Protocol):
    """The decoder, entered block by block in order."""

    @property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        """The modules to quantise of each block, in the order of the checkpoint."""
        ...

    @property
    def facts(self) -> Mapping[str, Any]:
        """For the manifest: what decides the bytes beside the data, such as the dtype of the activations."""
        ...

    def block(self, number: int) -> AbstractContextManager[Block]:
        """Load a block for as long as the context lasts."""
        ...

    def weight(self, module: str) -> torch.Tensor:
        """A source weight, float32 [rows, columns] on the CPU."""
        ...
