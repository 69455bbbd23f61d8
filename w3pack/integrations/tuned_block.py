"""One block of a decoder whose maps and scales are learned by what the source's block answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from w3pack.integrations.tuned_products import TunedProducts
from w3pack.quantize.chunks import in_order
from w3pack.quantize.tuning import Layout

#: Runs a batch, [batch, length, width], through the block.
Run = Callable[[torch.Tensor], torch.Tensor]


class TunedBlock:
    """A `Learner` (w3pack.pipeline.tune) over batches of hidden states.

    The loss of a token is |y' - y|^2 / |y|^2, with y what the source's block answers to the source's hidden states and y'
    what this block answers to those that the quantised blocks before it have left: the norm that follows divides each
    token by its own size, and no token with massive activations may drown the others.
    """

    def __init__(
        self,
        run: Run,
        linears: Mapping[str, Any],
        *,
        batches: Sequence[torch.Tensor],
        wanted: Sequence[torch.Tensor],
        device: torch.device,
        workers: int,
    ) -> None:
        """Take the products of the block's Linears over.

        Args:
            run: the block.
            linears: module -> nn.Linear within the block.
            batches: hidden states before the block.
            wanted: what the source answers behind it, shapes as those of `batches`.
            workers: batches worked on at once.
        """
        self._run, self._linears = run, dict(linears)
        self._batches, self._wanted = batches, wanted
        self._device, self._workers = device, workers
        self._products = TunedProducts(device=device, dtype=None)
        for module, linear in self._linears.items():
            self._products.take(module, linear)

    @property
    def facts(self) -> Mapping[str, Any]:
        """For the manifest."""
        return {"products": str(self._products.dtype).removeprefix("torch.")}

    @property
    def modules(self) -> tuple[str, ...]:
        """The Linears that are tuned."""
        return tuple(self._linears)

    @property
    def vectors(self) -> Mapping[str, torch.Tensor]:
        """None: norms and biases of a block stay as they are."""
        return {}

    @property
    def batches(self) -> int:
        """Number of batches; these are its samples."""
        return len(self._batches)

    def close(self) -> None:
        """Let the Linears compute as their class does."""
        for linear in self._linears.values():
            self._products.give_back(linear)

    def put(self, layout: Layout, latents: torch.Tensor) -> None:
        """Make the weights what latents stand for."""
        self._products.put(layout, latents, vectors={}, workers=self._workers)

    def loss(self, samples: Sequence[int]) -> float:
        """Mean relative squared error over the tokens of some batches."""

        def work(number: int) -> float:
            with torch.no_grad():
                return float(self._errors(number, self._run(self._batches[number].to(self._device))))

        return sum(in_order(work, samples, workers=self._workers)) / self._tokens(samples)

    def gradient(self, layout: Layout, latents: torch.Tensor, samples: Sequence[int]) -> torch.Tensor:
        """Of the loss by latents, float32 [n]; the weights must be those of `latents`."""

        def work(number: int) -> torch.Tensor:
            def run() -> tuple[torch.Tensor, torch.Tensor]:
                output = self._run(self._batches[number].to(self._device, copy=True))
                end = output.detach().requires_grad_(True)
                return output, torch.autograd.grad(self._errors(number, end), end)[0]

            return self._products.gradient(layout, latents, run, vectors={})

        total = torch.zeros_like(latents)
        for one in in_order(work, samples, workers=self._workers):
            total += one
        return total.div_(self._tokens(samples))

    def _tokens(self, samples: Sequence[int]) -> int:
        return sum(self._batches[number].shape[0] * self._batches[number].shape[1] for number in samples)

    def _errors(self, number: int, output: torch.Tensor) -> torch.Tensor:
        wanted = self._wanted[number].to(self._device, torch.float32, copy=True)
        size = wanted.square().sum(dim=-1).clamp_min(1e-20)
        return ((output.to(torch.float32) - wanted).square().sum(dim=-1) / size).sum()


def outside_inference(value: Any) -> Any:
    """A copy of arguments whose tensors may take part in a backward pass."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {key: outside_inference(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(outside_inference(entry) for entry in value)
    return value
