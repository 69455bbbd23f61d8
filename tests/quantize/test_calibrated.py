"""The calibrated solver climbs the ladder, keeps its promises in every corner of the format, and repeats itself."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from w3pack.errors import CheckpointError, UnsupportedError, UsageError
from w3pack.quantize import QuantizedLinear, QuantizeSettings, map_names, named_map, quantize_data_free
from w3pack.quantize import sweep as sweep_module
from w3pack.quantize.calibrated import CalibratedLinear, quantize_calibrated
from w3pack.quantize.gptq import factorize
from w3pack.quantize.lnq import refine
from w3pack.quantize.moments import SecondMoment, damped
from w3pack.quantize.sweep import row_losses

Make = Callable[..., Any]


def nf3(weight: torch.Tensor, *, group_size: int) -> torch.Tensor:
    """NF3 with the group's largest magnitude as its scale, the plain method that every other must beat."""
    table = named_map("nf3")
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % group_size))
    groups = padded.view(weight.shape[0], -1, group_size)
    scale = groups.abs().amax(dim=2, keepdim=True).clamp_min(1e-30)
    back = table[torch.bucketize(groups / scale, (table[1:] + table[:-1]) / 2)] * scale
    return back.view(weight.shape[0], -1)[:, : weight.shape[1]]


def same(left: CalibratedLinear, right: CalibratedLinear) -> bool:
    parts = ("codes", "qmap", "scales")
    return left.stages == right.stages and all(
        torch.equal(getattr(left.linear, part), getattr(right.linear, part)) for part in parts
    )


@pytest.mark.parametrize("massive", [1.0, 30.0])
@pytest.mark.parametrize("group_size", [64, 128])
def test_ladder(make_layer: Make, massive: float, group_size: int) -> None:
    layer = make_layer(96, 576, tokens=2048, massive=massive)
    kind = QuantizeSettings(group_size=group_size)
    losses = [layer.loss(nf3(layer.weight, group_size=group_size))]
    losses.append(layer.loss(quantize_data_free(layer.weight, kind).dequantize()))
    for effort in ("diagonal", "fast", "default"):
        result = quantize_calibrated(layer.weight, layer.moment, kind, effort=effort)
        losses.append(layer.loss(result.linear.dequantize()))
        assert result.loss == pytest.approx(losses[-1], rel=1e-3)
        assert result.damping == (0.0 if effort == "diagonal" else 0.1)
    assert losses == sorted(losses, reverse=True), losses
    assert losses[2] < 0.95 * losses[1]
    assert losses[3] < 0.6 * losses[2]
    assert losses[4] < losses[3]
    stages = result.stages
    assert [stage.name for stage in stages] == ["data-free", "diagonal", "gptq", "lnq"]
    assert [stage.after for stage in stages] == pytest.approx(losses[1:], rel=1e-3)
    assert stages[0].before == 1.0
    assert all(earlier.after == later.before for earlier, later in pairwise(stages))


@pytest.mark.parametrize("columns", [128, 576])
@pytest.mark.parametrize("group_size", [64, 128, 256, 640])
@pytest.mark.parametrize("per", ["tensor", "row"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float16])
def test_every_form_of_the_format(
    make_layer: Make, columns: int, group_size: int, per: str, dtype: torch.dtype
) -> None:
    layer = make_layer(20, columns, tokens=700)
    kind = QuantizeSettings(group_size=group_size, qmap_dtype=dtype, qmap_per=per)
    linear = quantize_calibrated(layer.weight, layer.moment, kind).linear
    assert linear.codes.shape == (20, columns)
    assert linear.codes.dtype == torch.uint8
    assert set(linear.codes.unique().tolist()) == set(range(8))
    assert linear.scales.shape == (20, -(-columns // group_size))
    assert linear.scales.dtype == torch.float16
    assert bool((linear.scales != 0).all())
    assert bool((linear.scales < 0).any())
    assert bool((linear.scales > 0).any())
    assert linear.qmap.shape == (1 if per == "tensor" else 20, 8)
    assert linear.qmap.dtype == dtype
    assert bool((linear.qmap.to(torch.float32).diff(dim=1) >= 0).all())
    assert bool((linear.qmap == 0).any(dim=1).all())
    assert bool((linear.qmap.to(torch.float32).abs().amax(dim=1) == (127 if dtype == torch.int8 else 1)).all())
    assert layer.loss(linear.dequantize()) < 0.5 * layer.loss(quantize_data_free(layer.weight, kind).dequantize())


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_stage_raises_its_own_objective(make_layer: Make, data: st.DataObject) -> None:
    layer = make_layer(
        data.draw(st.integers(1, 12)),
        data.draw(st.sampled_from([1, 7, 64, 130])) + 3,
        tokens=data.draw(st.sampled_from([1, 40, 400])),
        seed=data.draw(st.integers(0, 1000)),
        massive=data.draw(st.sampled_from([1.0, 1e3])),
        dead=data.draw(st.sampled_from([0, 3])),
    )
    kind = QuantizeSettings(
        group_size=data.draw(st.sampled_from([64, 128])), qmap_per=data.draw(st.sampled_from(["tensor", "row"]))
    )
    damping = data.draw(st.sampled_from([0.1, 1.0]))
    results = [
        quantize_calibrated(layer.weight, layer.moment, kind, effort=effort, damping=damping)
        for effort in ("diagonal", "fast", "default")
    ]

    def objective(linear: QuantizedLinear, moment: torch.Tensor) -> float:
        return float(row_losses(layer.weight, linear, moment).sum())

    importance = damped(layer.moment.diagonal(), 0.0)
    free = quantize_data_free(layer.weight, kind)
    slack = 1 + 1e-5
    assert objective(results[0].linear, importance) <= slack * objective(free, importance) + 1e-12
    heavy = damped(layer.moment, results[1].damping)
    left = [objective(result.linear, heavy) for result in results]
    assert left[1] <= slack * left[0] + 1e-12
    assert left[2] <= slack * left[1] + 1e-12


@pytest.mark.parametrize("per", ["tensor", "row"])
def test_same_bits_for_any_workers_and_threads(make_layer: Make, per: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_module, "CPU_ROWS", 24)
    layer = make_layer(60, 160)
    copy = layer.weight.clone()
    kind = QuantizeSettings(qmap_per=per)
    before = torch.get_num_threads()
    moment = layer.moment
    results = []
    try:
        for threads, workers in ((1, 1), (1, 1), (2, 1), (1, 2), (2, 3)):
            torch.set_num_threads(threads)
            results.append(quantize_calibrated(layer.weight, moment, kind, workers=workers))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert all(same(results[0], other) for other in results[1:])
    assert torch.equal(copy, layer.weight)


@pytest.mark.parametrize("name", map_names())
@pytest.mark.parametrize("maps", [1, 20])
def test_an_imported_map_is_kept_and_the_rest_still_helps(make_layer: Make, name: str, maps: int) -> None:
    layer = make_layer(20, 192)
    qmap = named_map(name).to(torch.float16).repeat(maps, 1)
    kind = QuantizeSettings(qmap_dtype=torch.float16)
    result = quantize_calibrated(layer.weight, layer.moment, kind, qmap=qmap)
    assert torch.equal(result.linear.qmap, qmap)
    assert result.loss < 0.6 * result.stages[1].after
    refitted = quantize_calibrated(layer.weight, layer.moment, kind, qmap=qmap, fit_scales=True)
    assert torch.equal(refitted.linear.qmap, qmap)


def test_a_free_map_has_no_zero(make_layer: Make) -> None:
    layer = make_layer(20, 192)
    result = quantize_calibrated(layer.weight, layer.moment, QuantizeSettings(), exact_zero=False)
    assert not bool((result.linear.qmap == 0).any())


def test_massive_activations_keep_their_columns(make_layer: Make) -> None:
    layer = make_layer(48, 384, massive=3e3)
    diagonal = layer.moment.diagonal()
    assert float(diagonal.max() / diagonal.median()) > 1e5
    result = quantize_calibrated(layer.weight, layer.moment, QuantizeSettings())
    assert result.loss < 0.02 * result.stages[0].after
    column = int(diagonal.argmax())
    error = (result.linear.dequantize() - layer.weight)[:, column].square().sum()
    assert float(error / layer.weight[:, column].square().sum()) < 1e-3


def test_singular_moments_and_dead_inputs(make_layer: Make) -> None:
    seen, unseen = make_layer(32, 256, tokens=60, dead=20), make_layer(32, 256, tokens=2000)
    result = quantize_calibrated(seen.weight, seen.moment, QuantizeSettings())
    assert bool(torch.isfinite(result.linear.dequantize()).all())
    assert result.loss < 0.5 * result.stages[1].after
    dead = seen.moment.diagonal() == 0
    weight, back = seen.weight[:, dead], result.linear.dequantize()[:, dead]
    assert float((back - weight).square().sum() / weight.square().sum()) < 0.2  # other tokens may yet need them
    assert unseen.loss(result.linear.dequantize()) < 0.2
    nothing = quantize_calibrated(seen.weight, torch.zeros(256, 256), QuantizeSettings())
    assert nothing.loss == 0.0
    assert float((nothing.linear.dequantize() - seen.weight).square().sum() / seen.weight.square().sum()) < 0.05


def test_zero_weights() -> None:
    result = quantize_calibrated(torch.zeros(4, 128), torch.eye(128), QuantizeSettings())
    assert torch.equal(result.linear.dequantize(), torch.zeros(4, 128))
    assert result.loss == 0.0


def test_accumulators_diagonals_and_shared_factors(make_layer: Make) -> None:
    layer = make_layer(20, 192)
    moment = SecondMoment(192)
    moment.add(layer.inputs)
    kind = QuantizeSettings()
    expected = quantize_calibrated(layer.weight, moment.matrix(), kind)
    assert same(expected, quantize_calibrated(layer.weight, moment, kind))
    assert same(expected, quantize_calibrated(layer.weight, factorize(moment.matrix()), kind))
    from_diagonal = quantize_calibrated(layer.weight, moment.diagonal(), kind, effort="diagonal")
    full = quantize_calibrated(layer.weight, moment, kind, effort="diagonal")
    assert torch.equal(from_diagonal.linear.codes, full.linear.codes)
    assert from_diagonal.loss > 0


def test_weights_of_moments_reach_the_alternation(make_layer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(8, 128)
    seen: list[Any] = []

    def spy(*arguments: Any, **options: Any) -> Any:
        seen.append(options["weights"])
        return refine(*arguments, **options)

    monkeypatch.setattr("w3pack.quantize.calibrated.refine", spy)
    moments = [layer.moment, layer.moment]
    quantize_calibrated(layer.weight, moments, QuantizeSettings(), moment_weights=[3.0, 1.0])
    assert seen == [(3.0, 1.0)]


def test_guided_moments_serve_their_own_rows(make_layer: Make) -> None:
    left, right = make_layer(24, 192, seed=1), make_layer(24, 192, seed=2)
    weight = torch.cat([left.weight, right.weight])
    kind = QuantizeSettings()
    guided = quantize_calibrated(weight, [left.moment, right.moment], kind).linear.dequantize()
    mixed = quantize_calibrated(weight, (left.moment + right.moment) / 2, kind).linear.dequantize()
    assert left.loss(guided[:24]) < left.loss(mixed[:24])
    assert right.loss(guided[24:]) < right.loss(mixed[24:])
    tilted = quantize_calibrated(weight, [left.moment, right.moment], kind, moment_weights=[1e6, 1.0])
    assert tilted.loss == pytest.approx(left.loss(tilted.linear.dequantize()[:24]), rel=1e-2)
    diagonals = [left.moment.diagonal(), right.moment.diagonal()]
    assert quantize_calibrated(weight, diagonals, kind, effort="diagonal").damping == 0.0


def test_refusals(make_layer: Make) -> None:
    layer = make_layer(4, 128)
    kind = QuantizeSettings()
    moment = layer.moment
    with pytest.raises(UsageError, match="slow"):
        quantize_calibrated(layer.weight, moment, kind, effort="slow")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="full second moment"):
        quantize_calibrated(layer.weight, moment.diagonal(), kind)
    with pytest.raises(UsageError, match=r"\[128, 128\]"):
        quantize_calibrated(layer.weight, moment[:64, :64], kind)
    with pytest.raises(UsageError, match="float32"):
        quantize_calibrated(layer.weight.half(), moment, kind)
    with pytest.raises(UsageError, match="divide 4 rows"):
        quantize_calibrated(layer.weight, [moment] * 3, kind)
    with pytest.raises(UsageError, match="one kind"):
        quantize_calibrated(layer.weight, [moment, moment.diagonal()], kind)
    with pytest.raises(UsageError, match="none"):
        quantize_calibrated(layer.weight, SecondMoment(128), kind)
    with pytest.raises(UsageError, match="worker"):
        quantize_calibrated(layer.weight, moment, kind, workers=0)
    with pytest.raises(UsageError, match="damping"):
        quantize_calibrated(layer.weight, moment, kind, damping=-1.0)
    with pytest.raises(UnsupportedError, match="finite"):
        quantize_calibrated(layer.weight, moment * float("nan"), kind)
    broken = layer.weight.clone()
    broken[1, 2] = float("nan")
    with pytest.raises(CheckpointError, match="finite"):
        quantize_calibrated(broken, moment, kind)
    with pytest.raises(UsageError, match="ascending"):
        quantize_calibrated(layer.weight, moment, kind, qmap=named_map("nf3").flip(0))
