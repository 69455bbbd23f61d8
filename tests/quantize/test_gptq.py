"""Error feedback against a literal elimination in float64, and what it promises of rows, damping and order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from w3pack.errors import UnsupportedError, UsageError
from w3pack.quantize import QuantizedLinear, QuantizeSettings, named_map
from w3pack.quantize import sweep as sweep_module
from w3pack.quantize.diagonal import quantize_diagonal
from w3pack.quantize.gptq import factorize, feed_errors_forward
from w3pack.quantize.moments import damped
from w3pack.quantize.sweep import row_losses

Make = Callable[..., Any]


def start_of(layer: Any, settings: QuantizeSettings, *, qmap: torch.Tensor | None = None) -> QuantizedLinear:
    return quantize_diagonal(layer.weight, layer.moment.diagonal(), settings, qmap=qmap)


def literal(weight: torch.Tensor, start: QuantizedLinear, moment: torch.Tensor, order: list[int]) -> torch.Tensor:
    """The method as published before any reformulation: quantize a column, move the others, eliminate it from H^-1."""
    inverse = torch.linalg.inv(moment.to(torch.float64))
    table = start.qmap.to(torch.float64) / (127 if start.qmap.dtype == torch.int8 else 1)
    codes = torch.empty_like(start.codes)
    for n in range(weight.shape[0]):
        w, left = weight[n].to(torch.float64).clone(), inverse.clone()
        entries = table[n if table.shape[0] > 1 else 0]
        for k in order:
            grid = entries * start.scales[n, k // start.group_size].to(torch.float64)
            code = int((grid - w[k]).abs().argmin())
            codes[n, k] = code
            w -= (w[k] - grid[code]) / left[k, k] * left[k]
            left -= torch.outer(left[:, k], left[k]) / left[k, k]
            left[k], left[:, k] = 0.0, 0.0
    return codes


@pytest.mark.parametrize("columns", [64, 150])
@pytest.mark.parametrize("per", ["tensor", "row"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float16])
@pytest.mark.parametrize("massive", [1.0, 300.0])
def test_matches_the_literal_elimination(
    make_layer: Make, columns: int, per: str, dtype: torch.dtype, massive: float
) -> None:
    layer = make_layer(8, columns, massive=massive, seed=columns)
    start = start_of(layer, QuantizeSettings(group_size=64, qmap_dtype=dtype, qmap_per=per))
    factor = factorize(layer.moment, damping=0.1)
    expected = literal(layer.weight, start, factor.moment, factor.order.tolist())
    result = feed_errors_forward(layer.weight, start, factor)
    reference = QuantizedLinear(expected, start.qmap, start.scales, start.group_size)
    better = row_losses(layer.weight, reference, factor.moment) < row_losses(layer.weight, start, factor.moment)
    assert torch.equal(result.codes, torch.where(better.unsqueeze(1), expected, start.codes))
    assert int(better.sum()) >= 7
    assert torch.equal(result.scales, start.scales)
    assert torch.equal(result.qmap, start.qmap)


def test_the_factor_is_that_of_the_inverse_in_falling_order(make_layer: Make) -> None:
    layer = make_layer(2, 96, massive=1e3)
    factor = factorize(layer.moment, damping=0.05)
    heavy = damped(layer.moment, 0.05)
    assert torch.equal(factor.moment, heavy)
    assert bool((heavy.diagonal()[factor.order].diff() <= 0).all())
    assert sorted(factor.order.tolist()) == list(range(96))
    assert bool((factor.upper.tril(-1) == 0).all())
    ordered = heavy[factor.order][:, factor.order].to(torch.float64)
    wide = factor.upper.to(torch.float64)
    torch.testing.assert_close(wide @ ordered @ wide.t(), torch.eye(96, dtype=torch.float64), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("per", ["tensor", "row"])
def test_no_row_gets_worse_and_most_get_much_better(make_layer: Make, per: str) -> None:
    layer = make_layer(64, 576)
    start = start_of(layer, QuantizeSettings(qmap_per=per))
    factor = factorize(layer.moment)
    result = feed_errors_forward(layer.weight, start, factor)
    before = row_losses(layer.weight, start, factor.moment)
    after = row_losses(layer.weight, result, factor.moment)
    assert bool((after <= before).all())
    assert float(after.sum()) < 0.7 * float(before.sum())
    assert layer.loss(result.dequantize()) < 0.7 * layer.loss(start.dequantize())


def test_a_row_that_feedback_would_spoil_keeps_its_codes(make_layer: Make) -> None:
    layer = make_layer(200, 6)
    start = start_of(layer, QuantizeSettings())
    factor = factorize(layer.moment)
    before = row_losses(layer.weight, start, factor.moment)
    greedy = literal(layer.weight, start, factor.moment, factor.order.tolist())
    unguarded = QuantizedLinear(greedy, start.qmap, start.scales, start.group_size)
    spoilt = row_losses(layer.weight, unguarded, factor.moment) > 1.01 * before
    assert bool(spoilt.any())
    result = feed_errors_forward(layer.weight, start, factor)
    assert torch.equal(result.codes[spoilt], start.codes[spoilt])
    assert bool((row_losses(layer.weight, result, factor.moment) <= before).all())


def test_uncorrelated_inputs_leave_the_nearest_codes(make_layer: Make) -> None:
    layer = make_layer(8, 128)
    start = start_of(layer, QuantizeSettings())
    result = feed_errors_forward(layer.weight, start, factorize(torch.diag(layer.moment.diagonal())))
    assert torch.equal(result.codes, start.codes)


def test_order_of_activations_helps(make_layer: Make) -> None:
    layer = make_layer(24, 96, massive=30.0)
    start = start_of(layer, QuantizeSettings())
    factor = factorize(layer.moment)
    ordered = feed_errors_forward(layer.weight, start, factor)
    backwards = literal(layer.weight, start, factor.moment, factor.order.flip(0).tolist())
    worse = QuantizedLinear(backwards, start.qmap, start.scales, start.group_size)
    assert layer.loss(ordered.dequantize()) < layer.loss(worse.dequantize())


def test_fewer_tokens_than_columns(make_layer: Make) -> None:
    layer = make_layer(16, 256, tokens=40, dead=10)
    for damping in (0.1, 0.01, 0.0):
        factor = factorize(layer.moment, damping=damping)
        assert factor.damping >= damping
        assert bool(torch.isfinite(factor.upper).all())
        start = start_of(layer, QuantizeSettings())
        result = feed_errors_forward(layer.weight, start, factor)
        assert layer.loss(result.dequantize()) < layer.loss(start.dequantize())


def test_an_indefinite_moment_is_damped_more_or_refused() -> None:
    crooked = torch.tensor([[1.0, 1.2], [1.2, 1.0]])
    factor = factorize(crooked, damping=0.1)
    assert factor.damping == pytest.approx(0.3)
    with pytest.raises(UnsupportedError, match="semidefinite"):
        factorize(torch.tensor([[1.0, 100.0], [100.0, 1.0]]))


def test_zero_groups_and_dead_rows(make_layer: Make) -> None:
    layer = make_layer(6, 256)
    weight = layer.weight.clone()
    weight[1] = 0.0
    weight[2, 128:] = 0.0
    start = quantize_diagonal(weight, layer.moment.diagonal(), QuantizeSettings())
    result = feed_errors_forward(weight, start, factorize(layer.moment))
    back = result.dequantize()
    assert bool(torch.isfinite(back).all())
    assert torch.equal(back[1], torch.zeros(256))
    assert torch.equal(back[2, 128:], torch.zeros(128))


@pytest.mark.parametrize("per", ["tensor", "row"])
def test_workers_do_not_matter(make_layer: Make, per: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_module, "CPU_ROWS", 24)
    layer = make_layer(100, 192)
    start = start_of(layer, QuantizeSettings(qmap_per=per))
    factor = factorize(layer.moment)
    results = [feed_errors_forward(layer.weight, start, factor, workers=n).codes for n in (1, 1, 2, 3)]
    assert all(torch.equal(results[0], other) for other in results[1:])
    monkeypatch.undo()
    whole = feed_errors_forward(layer.weight, start, factor).codes
    assert float((whole == results[0]).float().mean()) > 0.99  # pieces change the sums only by their rounding


def test_all_codes_occur_on_a_fixed_map(make_layer: Make) -> None:
    layer = make_layer(32, 576)
    start = start_of(layer, QuantizeSettings(), qmap=named_map("nf3"))
    result = feed_errors_forward(layer.weight, start, factorize(layer.moment))
    assert set(result.codes.unique().tolist()) == set(range(8))


def test_refusals(make_layer: Make) -> None:
    layer = make_layer(4, 128)
    start = start_of(layer, QuantizeSettings())
    factor = factorize(layer.moment)
    with pytest.raises(UsageError, match="diagonal"):
        factorize(layer.moment.diagonal())
    with pytest.raises(UsageError, match="shape"):
        factorize(layer.moment[:100])
    with pytest.raises(UsageError, match="columns"):
        feed_errors_forward(layer.weight, start, factorize(layer.moment[:64, :64]))
    with pytest.raises(UsageError, match="float32"):
        feed_errors_forward(layer.weight.double(), start, factor)
    with pytest.raises(UsageError, match="start"):
        feed_errors_forward(layer.weight[:2], start, factor)
