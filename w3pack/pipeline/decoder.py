"""What calibration asks of a model: a decoder that can be walked block by block, and what is known of a Linear's inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from w3pack.errors import UnsupportedError
from w3pack.quantize.tuning import Layout


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

    def add(self, activations: torch.Tensor, *, weights: torch.Tensor | None = None) -> None:
        """Count the tokens of [..., columns], each as often as `weights` [...] says."""
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

    def add(self, activations: torch.Tensor, *, weights: torch.Tensor | None = None) -> None:
        """Count the tokens of [..., columns], each as often as `weights` [...] says.

        Raises:
            UnsupportedError: NaN or infinity.
        """
        rows = activations.detach().reshape(-1, self._total.shape[0])
        squares = rows.to(torch.float32).square()
        if weights is not None:
            squares *= weights.reshape(-1, 1).to(squares.device, torch.float32)
        total = squares.sum(dim=0, dtype=torch.float64)
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


#: Given a module, its inputs [tokens, columns] and the gradients of the loss by its outputs [tokens, rows] of one batch:
#: whatever is to be known of them.
Judge = Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]
MakeMoment = Callable[[int], Moment]
#: Moments of inputs and of pools of inputs; one that never saw a token has 0 tokens.
Moments = tuple[Mapping[Input, Moment], Mapping[str, Moment]]


class Learner(Protocol):
    """A model, or a block, whose maps, scales and vectors are being learned; its samples are numbered."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """For the manifest."""
        ...

    @property
    def modules(self) -> tuple[str, ...]:
        """The Linears that are tuned, in the order of the checkpoint."""
        ...

    @property
    def vectors(self) -> Mapping[str, torch.Tensor]:
        """Name of each gain and bias that is tuned -> its value in the source, in the dtype it is stored in."""
        ...

    def put(self, layout: Layout, latents: torch.Tensor) -> None:
        """Make the weights what latents stand for."""
        ...

    def loss(self, samples: Sequence[int]) -> float:
        """Mean loss over some samples."""
        ...

    def gradient(self, layout: Layout, latents: torch.Tensor, samples: Sequence[int]) -> torch.Tensor:
        """Of the loss by latents, float32 [n]; the weights must be those of `latents`."""
        ...


class BlockLearner(Learner, Protocol):
    """A block; its samples are batches."""

    @property
    def batches(self) -> int:
        """How many there are."""
        ...


class WholeModel(Learner, Protocol):
    """A model in memory with what its source answers; its samples are windows, its loss is KL(source || model) in nats."""

    def weight(self, module: str) -> torch.Tensor:
        """A source weight, float32 [rows, columns], on the device that the blocks are run on."""
        ...


class Block(Protocol):
    """One block of the decoder with its weights, and the hidden states of all samples before it."""

    def stages(self) -> tuple[tuple[Input, ...], ...]:
        """The inputs of the Linears to quantise in the order of computation; those of one stage do not depend on each
        other. Notes the outputs of one batch on the way, for `error`."""
        ...

    def moments(
        self,
        inputs: tuple[Input, ...],
        make: MakeMoment,
        says: Mapping[str, torch.Tensor] | None = None,
        *,
        advance: bool = False,
    ) -> Moments:
        """Moments over all samples of some inputs, with the weights as they are now.

        Args:
            inputs: of one stage, or of several.
            says: first module of an input -> float32 [samples, length], how much each token counts there.
            advance: do in the same pass what `Block.advance` does.
        """
        ...

    def set_weight(self, module: str, weight: torch.Tensor) -> None:
        """Put a weight, float32 [rows, columns], in the place of the original."""
        ...

    def follow(self) -> None:
        """With the source's weights in place: replace the hidden states that the source's blocks have left, where the walk
        keeps them, by the block's outputs."""
        ...

    def learner(self) -> AbstractContextManager[BlockLearner]:
        """The block as something whose maps and scales can be learned by what the source's block has answered (`follow`)."""
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
        """A source weight, float32 [rows, columns], on the device that the blocks are run on."""
        ...


class BackwardWalk(Protocol):
    """The decoder of the source, walked forwards once and then back, for gradients of the loss of its answers.

    The loss of a window is the sum of -log p over positions of tokens drawn from the model itself.
    """

    @property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        """As those of `Walk`."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens of all samples."""
        ...

    def forward(self, make: MakeMoment | None) -> Mapping[str, Moment]:
        """Go to the end; the moment of the inputs of each module, nothing for None."""
        ...

    def backward(self, number: int, judge: Judge) -> Mapping[str, list[torch.Tensor]]:
        """Go back through a block, the last one first: what `judge` said of each module, batch by batch in order."""
        ...

    def weight(self, module: str) -> torch.Tensor:
        """As that of `Walk`."""
        ...
