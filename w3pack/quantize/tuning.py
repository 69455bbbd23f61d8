"""The loop of the last stage: Adam with cosine decay over the latents of many parts, keeping the best by held-out loss.

What is learned lies in one flat vector, in the order of the parts, so that the state of a run is a few tensors that can be
written down and read back (`State.tensors`). Adam (arXiv 1412.6980) with beta2 0.95: there are few steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from w3pack.errors import CheckpointError

BETAS = (0.9, 0.95)
EPSILON = 1e-10
WARM_UP = 0.05  # part of the steps in which the rate rises to its peak
FINAL_RATE = 0.05  # part of the peak that the cosine ends at


class Part(Protocol):
    """Something with latents, such as a `TunedLinear` (w3pack.quantize.tuned_linear)."""

    @property
    def size(self) -> int:
        """Latents."""
        ...

    def initial(self) -> torch.Tensor:
        """Latents to start from, float32 [size]."""
        ...

    def rates(self) -> torch.Tensor:
        """Peak learning rate of each latent, float32 [size]."""
        ...

    def project(self, latents: torch.Tensor) -> None:
        """Bring latents back, in place, to what is legal."""
        ...


@dataclass
class State:
    """A run between two steps.

    Attributes:
        step: steps done.
        latents, first, second: float32 [n]: what is learned, and Adam's moments.
        best: float32 [n], the latents of the smallest held-out loss so far.
        start_loss, best_loss: held-out losses of the start and of `best`.
    """

    step: int
    latents: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    best: torch.Tensor
    start_loss: float
    best_loss: float

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything, to be written down."""
        figures = torch.tensor([self.step, self.start_loss, self.best_loss], dtype=torch.float64)
        vectors = {name: getattr(self, name).cpu() for name in _VECTORS}
        return {**vectors, "figures": figures}

    @staticmethod
    def of(tensors: Mapping[str, torch.Tensor], *, device: torch.device | str = "cpu") -> State:
        """Inverse of `tensors`."""
        step, start_loss, best_loss = tensors["figures"].tolist()
        vectors = {name: tensors[name].to(device, copy=True) for name in _VECTORS}
        return State(step=int(step), start_loss=start_loss, best_loss=best_loss, **vectors)


_VECTORS = ("latents", "first", "second", "best")


@dataclass(frozen=True)
class Layout:
    """Where the latents of each part lie in the flat vector."""

    parts: Mapping[str, Part]

    def bounds(self) -> dict[str, slice]:
        """Name -> its range."""
        found: dict[str, slice] = {}
        first = 0
        for name, part in self.parts.items():
            found[name] = slice(first, first + part.size)
            first += part.size
        return found

    def initial(self) -> torch.Tensor:
        """float32 [n]."""
        return torch.cat([part.initial() for part in self.parts.values()])

    def rates(self) -> torch.Tensor:
        """float32 [n]."""
        return torch.cat([part.rates() for part in self.parts.values()])

    def project(self, latents: torch.Tensor) -> None:
        """In place."""
        for name, here in self.bounds().items():
            self.parts[name].project(latents[here])


def rate_at(step: int, steps: int) -> float:
    """Part of the peak rate at a step, 0..steps-1: a linear rise, then half a cosine down to a twentieth."""
    rise = max(1, round(WARM_UP * steps))
    if step < rise:
        return (step + 1) / rise
    done = (step - rise) / max(1, steps - rise)
    return FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * done))


def tune(
    parts: Mapping[str, Part],
    *,
    steps: int,
    gradient: Callable[[int, torch.Tensor], torch.Tensor],
    held_out: Callable[[torch.Tensor], float],
    check_every: int,
    state: State | None = None,
    checked: Callable[[State], None] | None = None,
) -> State:
    """Lower a loss over the parts' latents; what comes back is never worse on the held-out data than the start.

    Args:
        parts: what is learned.
        steps: of Adam.
        gradient: of the training loss at some latents, float32 [n] -> float32 [n]; also given the number of the step.
        held_out: loss at some latents on data that the gradients do not see.
        check_every: steps between two looks at the held-out loss; the last step is followed by one too.
        state: to continue from; None starts anew.
        checked: told of the state after each look.

    Returns:
        The last state; its `best` is the result.

    Raises:
        CheckpointError: a state of other parts.
    """
    layout = Layout(parts)
    initial, rates = layout.initial(), layout.rates()
    if state is None:
        loss = held_out(initial)
        state = State(
            step=0, latents=initial.clone(), first=torch.zeros_like(initial), second=torch.zeros_like(initial),
            best=initial.clone(), start_loss=loss, best_loss=loss,
        )  # fmt: skip
    if state.latents.shape != initial.shape:
        raise CheckpointError(
            f"expected {initial.numel()} latents in the saved state, got {state.latents.numel()}; "
            "pass --overwrite to start anew"
        )
    while state.step < steps:
        slope = gradient(state.step, state.latents)
        step = state.step + 1
        if bool(torch.isfinite(slope).all()):  # a step that overflowed teaches nothing
            state.first.lerp_(slope, 1 - BETAS[0])
            state.second.mul_(BETAS[1]).addcmul_(slope, slope, value=1 - BETAS[1])
            mean = state.first / (1 - BETAS[0] ** step)
            spread = (state.second / (1 - BETAS[1] ** step)).sqrt_().add_(EPSILON)
            state.latents.addcdiv_(mean.mul_(rates), spread, value=-rate_at(state.step, steps))
            layout.project(state.latents)
        state.step = step
        if step % check_every == 0 or step == steps:
            loss = held_out(state.latents)
            if loss < state.best_loss:
                state.best_loss = loss
                state.best.copy_(state.latents)
            if checked is not None:
                checked(state)
    return state
