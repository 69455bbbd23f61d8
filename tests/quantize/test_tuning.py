"""The loop of the last stage: never worse than the start, the same every time, and the same when cut in two."""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from w3pack.errors import CheckpointError
from w3pack.quantize import QuantizeSettings, quantize_data_free
from w3pack.quantize.tuned_linear import TunedLinear, TunedVector
from w3pack.quantize.tuning import Layout, State, rate_at, tune


class Problem:
    """Outputs of a quantised matrix with gains behind it, against those of the source: mean squares over two halves of the inputs."""

    def __init__(self, *, seed: int = 0, noise: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.randn(24, 192, generator=generator)
        self.x = torch.randn(1024, 192, generator=generator) * torch.rand(192, generator=generator).square()
        self.linear = TunedLinear(quantize_data_free(self.weight, QuantizeSettings(group_size=64)))
        self.gains = TunedVector(torch.ones(24))
        self.parts = {"linear": self.linear, "gains": self.gains}
        self.layout = Layout(self.parts)
        self.noise = noise
        self.generator = generator

    def outputs(self, latents: torch.Tensor, x: torch.Tensor, *, grad: bool = False) -> tuple[torch.Tensor, ...]:
        bounds = self.layout.bounds()
        weight = self.linear.stored(latents[bounds["linear"]]).dequantize().requires_grad_(grad)
        gains = self.gains.stored(latents[bounds["gains"]]).requires_grad_(grad)
        return (x @ weight.t()) * gains, weight, gains

    def held_out(self, latents: torch.Tensor) -> float:
        x = self.x[512:].double()
        y = (
            x @ self.linear.stored(latents[self.layout.bounds()["linear"]]).dequantize().double().t()
        ) * self.gains.stored(latents[self.layout.bounds()["gains"]]).double()
        return float((y - x @ self.weight.double().t()).square().mean())

    def gradient(self, step: int, latents: torch.Tensor) -> torch.Tensor:
        x = self.x[:512]
        y, weight, gains = self.outputs(latents, x, grad=True)
        loss = (y - x @ self.weight.t()).square().mean()
        by_weight, by_gains = torch.autograd.grad(loss, [weight, gains])
        bounds = self.layout.bounds()
        found = torch.zeros_like(latents)
        found[bounds["linear"]] = self.linear.gradient(latents[bounds["linear"]], weight.detach(), by_weight)
        found[bounds["gains"]] = self.gains.gradient(latents[bounds["gains"]], by_gains)
        return found + self.noise * torch.randn(found.shape, generator=self.generator)

    def run(self, steps: int = 60, *, state: State | None = None, seen: list[State] | None = None) -> State:
        return tune(
            self.parts, steps=steps, gradient=self.gradient, held_out=self.held_out, check_every=10, state=state,
            checked=None if seen is None else lambda now: seen.append(copy.deepcopy(now)),
        )  # fmt: skip


def test_it_lowers_the_loss_and_says_by_how_much() -> None:
    problem, seen = Problem(), []
    last = problem.run(seen=seen)
    assert last.start_loss == problem.held_out(problem.layout.initial())
    assert last.best_loss == problem.held_out(last.best)
    assert last.best_loss < 0.95 * last.start_loss
    assert all(later.best_loss <= sooner.best_loss for sooner, later in pairwise(seen))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([0.0, 1.0, 1e4, math.nan]))
def test_it_never_raises_the_held_out_loss(seed: int, noise: float) -> None:
    problem = Problem(seed=seed % 97, noise=noise)
    last = problem.run(12)
    assert problem.held_out(last.best) <= problem.held_out(problem.layout.initial())
    assert bool(torch.isfinite(last.best).all())


def test_same_bits_twice_and_when_cut() -> None:
    seen: list[State] = []
    whole = Problem().run(seen=seen)
    for middle in (None, seen[1], State.of(seen[3].tensors())):
        again = Problem().run(state=copy.deepcopy(middle))
        for name, tensor in whole.tensors().items():
            assert torch.equal(tensor, again.tensors()[name])


def test_a_state_of_another_model_is_refused() -> None:
    state = Problem().run(1)
    state.latents = state.latents[1:]
    with pytest.raises(CheckpointError, match="latents in the saved state"):
        Problem().run(2, state=state)


def test_rates_rise_then_fall() -> None:
    rates = [rate_at(step, 200) for step in range(200)]
    assert rates.index(max(rates)) in (9, 10)
    assert max(rates) == 1
    assert all(later > sooner for sooner, later in pairwise(rates[:10]))
    assert all(later <= sooner for sooner, later in pairwise(rates[10:]))
    assert rates[-1] < 0.06
    assert rate_at(0, 1) == 1
