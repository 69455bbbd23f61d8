"""Linears that multiply with weights made of latents, and tell of the gradients of these weights thread by thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from w3pack.quantize.chunks import in_order
from w3pack.quantize.tuned_linear import TunedLinear, TunedVector, product
from w3pack.quantize.tuning import Layout

#: Told of a module and dL/dW, [rows, columns].
Told = Callable[[str, torch.Tensor], None]


def product_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 on a GPU and on CPUs that multiply it faster than float32, else float32."""
    if device.type != "cpu":
        return torch.bfloat16
    known: Callable[[], bool] = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return torch.bfloat16 if known() else torch.float32


class TunedProducts:
    """The products of some Linears, while their weights are learned.

    Attributes:
        weights: module -> its weight as it is multiplied with now, [rows, columns] in the dtype of products.
        anchor: requires a gradient, as an input of everything that is differentiated.
    """

    def __init__(self, *, device: torch.device, dtype: torch.dtype | None) -> None:
        """dtype: of products; None: `product_dtype`."""
        self.dtype = dtype or product_dtype(device)
        self.weights: dict[str, torch.Tensor] = {}
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        self.own = ThreadState(device)

    def take(self, module: str, linear: Any) -> None:
        """Let a Linear multiply by a copy of its weight, under the name of `module`, from now on."""
        weight = linear.weight.detach().to(self.dtype, copy=True)
        self.weights[module] = weight
        own = self.own

        def told(gradient: torch.Tensor) -> None:
            own.told(module, gradient)

        linear.forward = lambda x: self._multiply(x, weight, linear.bias, told)

    def take_without_gradient(self, linear: Any) -> None:
        """The same for a Linear whose weight stays as it is."""
        weight = linear.weight.detach().to(self.dtype)
        linear.forward = lambda x: self._multiply(x, weight, linear.bias, _ignore)

    @staticmethod
    def give_back(linear: Any) -> None:
        """Let a Linear compute as its class does."""
        linear.__dict__.pop("forward", None)

    def _multiply(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, told: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        y = product(x, weight, anchor=self.anchor, told=told)
        return y if bias is None else y + bias

    def put(self, layout: Layout, latents: torch.Tensor, *, vectors: dict[str, nn.Parameter], workers: int) -> None:
        """Make weights and vectors what latents, float32 [n], stand for."""
        bounds = layout.bounds()

        def work(name: str) -> None:
            part, own = layout.parts[name], latents[bounds[name]]
            with torch.no_grad():
                if isinstance(part, TunedLinear):
                    part.write(own, self.weights[name])
                elif isinstance(part, TunedVector):
                    vectors[name].copy_(part.stored(own))

        for _ in in_order(work, list(layout.parts), workers=workers):
            pass

    def gradient(
        self,
        layout: Layout,
        latents: torch.Tensor,
        run: Callable[[], tuple[torch.Tensor, torch.Tensor]],
        *,
        vectors: dict[str, nn.Parameter],
    ) -> torch.Tensor:
        """dL/dlatents, float32 [n], of one batch in the running thread.

        Args:
            latents: what the weights stand for now.
            run: computes an output, and the gradient of the loss by it, which may use the same products.
            vectors: the parameters of the layout's vectors, which require gradients.
        """
        bounds = layout.bounds()
        total = torch.zeros_like(latents)

        def told(module: str, gradient: torch.Tensor) -> None:
            part = layout.parts.get(module)
            if isinstance(part, TunedLinear):
                here = bounds[module]
                total[here] += part.gradient(latents[here], self.weights[module], gradient)

        with torch.enable_grad(), self.own.telling(told):
            output, slope = run()
            found = torch.autograd.grad(output, [self.anchor, *vectors.values()], slope, allow_unused=True)
        for name, gradient in zip(vectors, found[1:], strict=True):
            part, here = layout.parts[name], bounds[name]
            if gradient is not None and isinstance(part, TunedVector):
                total[here] += part.gradient(latents[here], gradient)
        return total


@contextmanager
def free(vectors: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let some parameters require gradients for a while."""
    for vector in vectors:
        vector.requires_grad_(True)
    try:
        yield
    finally:
        for vector in vectors:
            vector.requires_grad_(False)


class ThreadState:
    """What the running thread does with gradients, and which hidden states a model is to go on from.

    On a CPU a backward pass runs in the thread that asked for it. On a GPU it does not, and there is one thread of work.
    """

    def __init__(self, device: torch.device) -> None:
        self._own: Any = threading.local() if device.type == "cpu" else _Plain()

    @property
    def hidden(self) -> torch.Tensor | None:
        """[batch, length, width] where a model is to go on from them, else None."""
        return getattr(self._own, "hidden", None)

    def told(self, module: str, gradient: torch.Tensor) -> None:
        """Hand on the gradient of a weight."""
        self._own.told(module, gradient)

    @contextmanager
    def telling(self, told: Told) -> Iterator[None]:
        """Let `told` be told of gradients."""
        self._own.told = told
        try:
            yield
        finally:
            del self._own.told

    @contextmanager
    def going_on_from(self, hidden: torch.Tensor) -> Iterator[None]:
        """Set `hidden`."""
        self._own.hidden = hidden
        try:
            yield
        finally:
            self._own.hidden = None


class _Plain:
    pass


def _ignore(_: torch.Tensor) -> None:
    pass
