"""The diagonal fit minimizes what it says and keeps what the format promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from w3pack.errors import UnsupportedError, UsageError
from w3pack.quantize import QuantizedLinear, QuantizeSettings, named_map, quantize_data_free
from w3pack.quantize.diagonal import quantize_diagonal

Make = Callable[..., Any]


def weighted_error(result: QuantizedLinear, weight: torch.Tensor, importance: torch.Tensor) -> float:
    error = (result.dequantize() - weight).to(torch.float64)
    return float((error.square() * importance).sum() / (weight.to(torch.float64).square() * importance).sum())


def same(left: QuantizedLinear, right: QuantizedLinear) -> bool:
    return all(torch.equal(getattr(left, part), getattr(right, part)) for part in ("codes", "qmap", "scales"))


@pytest.mark.parametrize("columns", [192, 576])
@pytest.mark.parametrize("per", ["tensor", "row"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float16])
def test_codes_are_nearest_for_what_is_stored(make_layer: Make, columns: int, per: str, dtype: torch.dtype) -> None:
    layer = make_layer(24, columns, massive=100.0)
    result = quantize_diagonal(layer.weight, layer.moment.diagonal(), QuantizeSettings(qmap_dtype=dtype, qmap_per=per))
    assert result.qmap.shape == (1 if per == "tensor" else 24, 8)
    assert result.qmap.dtype == dtype
    values = result.qmap.to(torch.float64) / (127 if dtype == torch.int8 else 1)
    assert bool((values == 0).any(dim=1).all())
    assert bool((values.abs().amax(dim=1) == 1).all())
    spread = result.scales.to(torch.float64).repeat_interleave(128, dim=1)[:, :columns]
    every = (values.expand(24, 8)[:, None] * spread[:, :, None] - layer.weight.to(torch.float64)[:, :, None]).abs()
    chosen = every.gather(2, result.codes.to(torch.int64)[:, :, None])[:, :, 0]
    assert bool((chosen <= every.amin(dim=2) + 1e-6 * spread.abs()).all())


@pytest.mark.parametrize("per", ["tensor", "row"])
@pytest.mark.parametrize("group_size", [64, 128, 256, 640])
def test_beats_the_data_free_fit_in_its_own_measure(make_layer: Make, per: str, group_size: int) -> None:
    layer = make_layer(32, 576, massive=30.0)
    importance = layer.moment.diagonal()
    settings = QuantizeSettings(group_size=group_size, qmap_per=per)
    fitted = weighted_error(quantize_diagonal(layer.weight, importance, settings), layer.weight, importance)
    assert fitted < 0.9 * weighted_error(quantize_data_free(layer.weight, settings), layer.weight, importance)


def test_all_codes_and_both_signs_occur(make_layer: Make) -> None:
    layer = make_layer(48, 576)
    result = quantize_diagonal(layer.weight, layer.moment.diagonal(), QuantizeSettings())
    assert set(result.codes.unique().tolist()) == set(range(8))
    assert bool((result.scales < 0).any())
    assert bool((result.scales > 0).any())


def test_a_common_factor_of_the_importance_does_not_matter(make_layer: Make) -> None:
    layer = make_layer(16, 256, massive=1e3)
    importance = layer.moment.diagonal()
    plain = quantize_diagonal(layer.weight, importance, QuantizeSettings())
    for power in (-60, 60):
        assert same(plain, quantize_diagonal(layer.weight, importance * 2.0**power, QuantizeSettings()))


def test_a_massive_channel_gets_the_scale_it_needs(make_layer: Make) -> None:
    layer = make_layer(32, 128, massive=3e3)
    importance = layer.moment.diagonal()
    assert float(importance.max() / importance.median()) > 1e5
    result = quantize_diagonal(layer.weight, importance, QuantizeSettings())
    channel = int(importance.argmax())
    error = (result.dequantize() - layer.weight)[:, channel].square().sum() / layer.weight[:, channel].square().sum()
    assert float(error) < 5e-3  # a scale per row is free to put one weight near a map entry
    assert weighted_error(result, layer.weight, importance) < 5e-3


def test_dead_inputs_count_like_ordinary_ones(make_layer: Make) -> None:
    layer = make_layer(16, 256, dead=40)
    importance = layer.moment.diagonal()
    result = quantize_diagonal(layer.weight, importance, QuantizeSettings())
    dead = importance == 0
    assert int(dead.sum()) == 40
    error = (result.dequantize() - layer.weight)[:, dead].square().sum() / layer.weight[:, dead].square().sum()
    assert float(error) < 0.1
    nothing = quantize_diagonal(layer.weight, torch.zeros(256), QuantizeSettings())
    assert same(nothing, quantize_diagonal(layer.weight, torch.ones(256), QuantizeSettings()))


@pytest.mark.parametrize("per", ["tensor", "row"])
def test_a_free_map_has_no_zero_and_beats_its_start(make_layer: Make, per: str) -> None:
    layer = make_layer(32, 512)
    importance = layer.moment.diagonal()
    settings = QuantizeSettings(qmap_per=per, qmap_dtype=torch.float16)
    free = quantize_diagonal(layer.weight, importance, settings, exact_zero=False)
    start = quantize_diagonal(layer.weight, importance, settings, qmap=named_map("gaussian"))
    assert not bool((free.qmap == 0).any())
    assert bool((free.qmap.abs().amax(dim=1) == 1).all())
    assert weighted_error(free, layer.weight, importance) < weighted_error(start, layer.weight, importance)


@pytest.mark.parametrize("name", ["nf3", "gaussian"])
def test_a_fixed_map_is_kept(make_layer: Make, name: str) -> None:
    layer = make_layer(16, 192)
    qmap = named_map(name).to(torch.float16)
    result = quantize_diagonal(
        layer.weight, layer.moment.diagonal(), QuantizeSettings(qmap_dtype=torch.float16), qmap=qmap
    )
    assert torch.equal(result.qmap[0], qmap)
    assert weighted_error(result, layer.weight, layer.moment.diagonal()) < 0.06


@pytest.mark.parametrize("per", ["tensor", "row"])
def test_workers_do_not_matter(make_layer: Make, per: str) -> None:
    layer = make_layer(500, 576, tokens=64)
    importance = layer.moment.diagonal()
    copies = layer.weight.clone(), importance.clone()
    settings = QuantizeSettings(qmap_per=per)
    results = [quantize_diagonal(layer.weight, importance, settings, workers=n) for n in (1, 1, 2, 3)]
    assert all(same(results[0], other) for other in results[1:])
    assert torch.equal(copies[0], layer.weight)
    assert torch.equal(copies[1], importance)


def test_zero_groups_stay_zero_and_tiny_ones_are_floored(make_layer: Make) -> None:
    layer = make_layer(4, 320)
    weight = layer.weight.clone()
    weight[1] = 0.0
    weight[2, :128] = 0.0
    weight[3, 256:] = 1e-9
    result = quantize_diagonal(weight, layer.moment.diagonal(), QuantizeSettings())
    assert result.scales[1].tolist() == [0.0, 0.0, 0.0]
    assert float(result.scales[2, 0]) == 0.0
    assert abs(float(result.scales[3, 2])) == 2.0**-24
    assert bool(torch.isfinite(result.dequantize()).all())


def test_refusals(make_layer: Make) -> None:
    weight = make_layer(4, 128).weight
    with pytest.raises(UsageError, match="float32"):
        quantize_diagonal(weight.half(), torch.ones(128), QuantizeSettings())
    with pytest.raises(UsageError, match=r"\[128\]"):
        quantize_diagonal(weight, torch.ones(127), QuantizeSettings())
    with pytest.raises(UnsupportedError, match="float16"):
        quantize_diagonal(weight * 1e9, torch.ones(128), QuantizeSettings())
