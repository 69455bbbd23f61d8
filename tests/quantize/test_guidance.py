"""Tokens weighted by gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from w3pack.errors import UnsupportedError, UsageError
from w3pack.quantize import QuantizeSettings
from w3pack.quantize.calibrated import quantize_calibrated
from w3pack.quantize.guidance import even_out, token_weights
from w3pack.quantize.moments import SecondMoment


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.sampled_from([1, 2, 3, 6]), st.integers(0, 1000))
def test_layer_loss_under_the_guided_moment_is_the_change_of_the_loss(tokens: int, groups: int, seed: int) -> None:
    """Exactly where squared gradients are alike within a group, in float64 by loops."""
    rows, columns = 6, 5
    levels = random(groups, tokens, seed=seed).abs() + 0.1
    signs = random(tokens, rows, seed=seed + 1).sign()
    gradients = levels.repeat_interleave(rows // groups, dim=0).t() * signs
    x, change = random(tokens, columns, seed=seed + 2), random(rows, columns, seed=seed + 3)
    weights = token_weights(gradients, groups=groups)
    assert weights.shape == (groups, tokens)
    guided = 0.0
    for group in range(groups):
        moment = SecondMoment(columns)
        moment.add(x, weights=weights[group])
        for row in change.split(rows // groups)[group].double():
            guided += tokens * float(row @ moment.matrix().double() @ row)
    wanted = sum(
        (float(gradients[t, n]) * float(change[n].double() @ x[t].double())) ** 2
        for t in range(tokens)
        for n in range(rows)
    )
    assert guided == pytest.approx(wanted, rel=1e-4)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 50), st.integers(1, 7), st.integers(0, 1000))
def test_groups_average_to_the_whole_and_scale_goes_with_the_square(tokens: int, width: int, seed: int) -> None:
    gradients = random(tokens, 4 * width, seed=seed)
    assert torch.allclose(token_weights(gradients, groups=4).mean(dim=0), token_weights(gradients)[0], rtol=1e-5)
    assert torch.allclose(token_weights(gradients * 3), 9 * token_weights(gradients), rtol=1e-5)
    assert bool((token_weights(gradients) >= 0).all())
    assert float(even_out(token_weights(gradients)).mean()) == pytest.approx(1.0, rel=1e-5)


def test_nothing_learned_is_no_preference() -> None:
    assert torch.equal(even_out(torch.zeros(2, 3)), torch.ones(2, 3))
    assert torch.equal(token_weights(torch.zeros(5, 4)), torch.zeros(1, 5))


def test_solver_heeds_the_tokens_that_count() -> None:
    """Half of the tokens count; the loss on these is less than where all count alike."""
    weight, x = random(64, 128, seed=1), random(400, 128, seed=2)
    x = x @ random(128, 128, seed=3) * 0.1
    x[:200] *= random(128, seed=4).exp()
    gradients = torch.zeros(400, 64)
    gradients[:200] = random(200, 64, seed=5)
    plain, guided = SecondMoment(128), SecondMoment(128)
    plain.add(x)
    guided.add(x, weights=token_weights(gradients)[0])

    def loss(moment: SecondMoment) -> float:
        found = quantize_calibrated(weight, moment, QuantizeSettings(), effort="fast").linear.dequantize()
        return float((((found - weight) @ x.t()).t() * gradients).square().sum())

    assert loss(guided) < 0.95 * loss(plain)


def test_what_cannot_be_weighted_is_refused() -> None:
    for gradients, groups in ((torch.ones(3), 1), (torch.ones(3, 4, dtype=torch.int64), 1), (torch.ones(3, 4), 3)):
        with pytest.raises(UsageError):
            token_weights(gradients, groups=groups)
    for value in (float("nan"), float("inf"), 1e30):
        with pytest.raises(UnsupportedError, match="finite gradients"):
            token_weights(torch.full((2, 2), value))
