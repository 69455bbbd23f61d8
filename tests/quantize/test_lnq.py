"""The alternation solves its systems exactly, ends where no single code can be better, and never goes uphill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from w3pack.errors import UsageError
from w3pack.quantize import QuantizedLinear, QuantizeSettings, named_map
from w3pack.quantize import map_system as map_system_module
from w3pack.quantize import sweep as sweep_module
from w3pack.quantize.diagonal import quantize_diagonal
from w3pack.quantize.lnq import Refined, refine
from w3pack.quantize.map_system import MovedMap, move_map, row_gradients, row_systems, sample_rows
from w3pack.quantize.moments import damped
from w3pack.quantize.scale_system import refit_scales

Make = Callable[..., Any]


def start_of(layer: Any, settings: QuantizeSettings, *, qmap: torch.Tensor | None = None) -> QuantizedLinear:
    return quantize_diagonal(layer.weight, layer.moment.diagonal(), settings, qmap=qmap)


def table_of(linear: QuantizedLinear) -> torch.Tensor:
    """float64 [rows, 8]."""
    values = linear.qmap.to(torch.float64) / (127 if linear.qmap.dtype == torch.int8 else 1)
    return values.expand(linear.codes.shape[0], 8)


def spread_of(linear: QuantizedLinear) -> torch.Tensor:
    """float64 [rows, columns]: the scale of every weight."""
    wide = linear.scales.to(torch.float64).repeat_interleave(linear.group_size, dim=1)
    return wide[:, : linear.codes.shape[1]]


def wide_loss(weight: torch.Tensor, linear: QuantizedLinear, moment: torch.Tensor) -> torch.Tensor:
    """float64 [rows]."""
    error = table_of(linear).gather(1, linear.codes.to(torch.int64)) * spread_of(linear) - weight.to(torch.float64)
    return ((error @ moment.to(torch.float64)) * error).sum(dim=1)


def root_of(moment: torch.Tensor) -> torch.Tensor:
    """L with H = L L^T in float64."""
    return torch.linalg.cholesky(moment.to(torch.float64))


@pytest.mark.parametrize("shared", [True, False])
def test_map_systems_match_least_squares(make_layer: Make, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(map_system_module, "PIECE_ELEMENTS", 4096)  # several pieces
    layer = make_layer(12, 160, massive=50.0)
    start = start_of(layer, QuantizeSettings(group_size=64, qmap_per="tensor" if shared else "row"))
    heavy = damped(layer.moment, 0.1)
    scales = spread_of(start).t().to(torch.float32).contiguous()
    codes = start.codes.t().contiguous()
    error = (start.dequantize() - layer.weight).t()
    gradient = row_gradients(heavy @ error, scales, codes)
    second = row_systems(scales, codes, heavy, None, total=shared)
    table = start.qmap.to(torch.float32) / 127
    moved = move_map(table, gradient.sum(dim=0, keepdim=True) if shared else gradient, second, ridge=1e-12)
    root = root_of(heavy)
    for rows, i in [(slice(None), 0)] if shared else [(slice(n, n + 1), n) for n in range(12)]:
        free = [q for q in range(8) if float(table[i, q]) != 0 and bool((start.codes[rows] == q).any())]
        held = [q for q in range(8) if q not in free]
        masks = [(start.codes[rows] == q) * spread_of(start)[rows] for q in range(8)]
        design = torch.stack([(masks[q] @ root).flatten() for q in free], dim=1)  # [rows * columns, free]
        fixed = sum((float(table[i, q]) * masks[q] for q in held), torch.zeros_like(masks[0]))
        target = ((layer.weight[rows].to(torch.float64) - fixed) @ root).flatten().unsqueeze(1)
        solution = torch.linalg.lstsq(design, target).solution.squeeze(1)
        got = (moved.table[i] * moved.factor[i])[moved.rank[i].to(torch.int64)].to(torch.float64)
        torch.testing.assert_close(got[free], solution, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(got[held], table[i, held].to(torch.float64), rtol=1e-6, atol=1e-7)


def test_a_moved_map_is_canonical() -> None:
    table = torch.tensor([[-0.9, -0.5, -0.2, 0.0, 0.2, 0.4, 0.7, 1.0]])
    gradient = torch.tensor([[0.0, -0.45, 0.0, 5.0, 0.0, 0.0, 0.0, -1.0]], dtype=torch.float64)
    moved = move_map(table, gradient, torch.eye(8, dtype=torch.float64).unsqueeze(0), ridge=0.0)
    assert float(moved.factor[0]) == 2.0
    torch.testing.assert_close(
        moved.table, torch.tensor([[-0.45, -0.1, -0.025, 0.0, 0.1, 0.2, 0.35, 1.0]])
    )  # the second entry has overtaken the third
    assert moved.rank.tolist() == [[0, 2, 1, 3, 4, 5, 6, 7]]
    unused = move_map(table, gradient, torch.zeros(1, 8, 8, dtype=torch.float64))
    assert bool(torch.isfinite(unused.table).all())


def test_sampled_rows_are_spread_and_all_when_few() -> None:
    assert sample_rows(7).tolist() == list(range(7))
    many = sample_rows(5000)
    assert len(set(many.tolist())) == map_system_module.SAMPLE_ROWS
    assert bool((many.diff() >= 9).all())


def test_scale_systems_match_least_squares(make_layer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("w3pack.quantize.scale_system.RIDGE", 1e-12)
    layer = make_layer(6, 150)
    start = start_of(layer, QuantizeSettings(group_size=64))
    heavy = damped(layer.moment, 0.1)
    values = table_of(start).gather(1, start.codes.to(torch.int64))
    error = (start.dequantize() - layer.weight).t()
    fitted = refit_scales(
        start.scales.t().to(torch.float32),
        values.t().to(torch.float32).contiguous(),
        heavy @ error,
        heavy,
        group_size=64,
    )
    root = root_of(heavy)
    for n in range(6):
        parts = [
            torch.zeros(150, dtype=torch.float64).index_copy(0, r, values[n, r]) for r in torch.arange(150).split(64)
        ]
        design = (torch.stack(parts) @ root).t()
        solution = torch.linalg.lstsq(design, (layer.weight[n].to(torch.float64) @ root).unsqueeze(1)).solution
        torch.testing.assert_close(fitted[:, n].to(torch.float64), solution.squeeze(1), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("per", ["tensor", "row"])
@pytest.mark.parametrize("massive", [1.0, 1000.0])
def test_converged_codes_cannot_be_improved_one_at_a_time(make_layer: Make, per: str, massive: float) -> None:
    layer = make_layer(10, 150, massive=massive)
    start = start_of(layer, QuantizeSettings(group_size=64, qmap_per=per))
    heavy = damped(layer.moment, 0.1)
    result = refine(layer.weight, start, heavy, alternations=1, sweeps=60, fit_map=False).linear
    wide = heavy.to(torch.float64)
    table, spread = table_of(result), spread_of(result)
    now = table.gather(1, result.codes.to(torch.int64)) * spread
    residual = (now - layer.weight.to(torch.float64)) @ wide
    change = table[:, None, :] * spread[:, :, None] - now[:, :, None]  # [rows, columns, 8]
    rise = change.square() * wide.diagonal()[None, :, None] + 2 * change * residual[:, :, None]
    loss = wide_loss(layer.weight, result, heavy)
    assert bool((rise >= -1e-5 * loss[:, None, None]).all())
    assert float(loss.sum()) < float(wide_loss(layer.weight, start, heavy).sum())


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_never_uphill(make_layer: Make, data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 12))
    columns = data.draw(st.sampled_from([64, 65, 130, 192]))
    layer = make_layer(
        rows,
        columns,
        tokens=data.draw(st.sampled_from([5, 300])),
        seed=data.draw(st.integers(0, 1000)),
        massive=data.draw(st.sampled_from([1.0, 1e3])),
        dead=data.draw(st.sampled_from([0, 9])),
    )
    kind = QuantizeSettings(
        group_size=data.draw(st.sampled_from([64, 128, 256])),
        qmap_dtype=data.draw(st.sampled_from([torch.int8, torch.float16])),
        qmap_per=data.draw(st.sampled_from(["tensor", "row"])),
    )
    heavy = damped(layer.moment, data.draw(st.sampled_from([0.01, 0.1])))
    start = start_of(layer, kind)
    result = refine(layer.weight, start, heavy, fit_scales=data.draw(st.booleans()))
    assert all(after <= before for before, after in zip(result.losses, result.losses[1:], strict=False))
    before, after = wide_loss(layer.weight, start, heavy), wide_loss(layer.weight, result.linear, heavy)
    assert bool((after <= before * (1 + 1e-4) + 1e-12).all()) or kind.qmap_per == "tensor"
    assert float(after.sum()) <= float(before.sum()) * (1 + 1e-4) + 1e-12
    assert result.losses[-1] == pytest.approx(float(after.sum()), rel=1e-3, abs=1e-9)
    assert bool((result.linear.qmap.diff(dim=1) >= 0).all())
    assert bool((result.linear.qmap == 0).any(dim=1).all())
    assert bool(torch.isfinite(result.linear.scales).all())
    assert torch.equal(result.linear.scales == 0, start.scales == 0)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16])
@pytest.mark.parametrize("per", ["tensor", "row"])
def test_map_steps_help_where_the_map_is_poor(make_layer: Make, per: str, dtype: torch.dtype) -> None:
    layer = make_layer(24, 256)
    poor = torch.tensor([-1.0, -0.9, -0.8, 0.0, 0.1, 0.8, 0.9, 1.0])
    qmap = poor if per == "tensor" else poor.repeat(24, 1)
    start = start_of(layer, QuantizeSettings(qmap_dtype=dtype), qmap=qmap)
    heavy = damped(layer.moment, 0.1)
    moved = refine(layer.weight, start, heavy)
    kept = refine(layer.weight, start, heavy, fit_map=False)
    assert moved.accepted == 2
    assert kept.accepted == 0
    assert torch.equal(kept.linear.qmap, start.qmap)
    assert not torch.equal(moved.linear.qmap, start.qmap)
    assert moved.linear.qmap.dtype == dtype
    assert moved.losses[-1] < 0.8 * kept.losses[-1]
    top = 127 if dtype == torch.int8 else 1
    assert bool((moved.linear.qmap.to(torch.float32).abs().amax(dim=1) == top).all())


@pytest.mark.parametrize("per", ["tensor", "row"])
def test_steps_that_raise_the_loss_are_taken_back(make_layer: Make, per: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(12, 128)
    start = start_of(layer, QuantizeSettings(qmap_per=per))
    uphill = torch.zeros(8)
    uphill[6] = 0.2

    def bad_map(table: torch.Tensor, *_: object, **__: object) -> MovedMap:
        maps = table.shape[0]
        spoilt = (table + uphill).clamp(-1, 1).sort(dim=1).values
        return MovedMap(spoilt, torch.full((maps,), 1.5), torch.arange(8, dtype=torch.uint8).repeat(maps, 1))

    monkeypatch.setattr("w3pack.quantize.lnq.move_map", bad_map)
    monkeypatch.setattr("w3pack.quantize.lnq.refit_scales", lambda scales, *_, **__: scales * 1.5)
    result = refine(layer.weight, start, damped(layer.moment, 0.1), fit_scales=True, sweeps=0)
    assert result.accepted == 0
    assert result.losses == (result.losses[0],) * 5
    assert torch.equal(result.linear.qmap, start.qmap)
    assert torch.equal(result.linear.scales, start.scales)
    assert torch.equal(result.linear.codes, start.codes)


@pytest.mark.parametrize("per", ["tensor", "row"])
def test_entries_that_overtake_each_other_take_their_codes_along(make_layer: Make, per: str) -> None:
    layer = make_layer(12, 256)
    start = start_of(layer, QuantizeSettings(qmap_per=per, qmap_dtype=torch.float16))
    order = torch.tensor([0, 1, 2, 3, 4, 6, 5, 7], dtype=torch.uint8)
    crossed = QuantizedLinear(order[start.codes.to(torch.int64)], start.qmap, start.scales)
    heavy = damped(layer.moment, 0.1)
    plain = refine(layer.weight, start, heavy, sweeps=0, alternations=1)
    undone = refine(layer.weight, crossed, heavy, sweeps=0, alternations=1)
    assert undone.losses[0] > 1.5 * plain.losses[0]
    assert undone.losses[1] == pytest.approx(plain.losses[1], rel=1e-2)
    assert float((undone.linear.codes == start.codes).float().mean()) > 0.99


def test_a_sample_of_rows_gives_nearly_the_same_map(make_layer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(160, 256)
    poor = torch.tensor([-1.0, -0.9, -0.8, 0.0, 0.1, 0.8, 0.9, 1.0])
    start = start_of(layer, QuantizeSettings(qmap_dtype=torch.float16), qmap=poor)
    heavy = damped(layer.moment, 0.1)
    exact = refine(layer.weight, start, heavy, sweeps=0, alternations=1).losses
    monkeypatch.setattr(map_system_module, "SAMPLE_ROWS", 20)
    sampled = refine(layer.weight, start, heavy, sweeps=0, alternations=1).losses
    assert exact[0] - sampled[1] > 0.9 * (exact[0] - exact[1]) > 0


def test_scale_steps_lower_the_loss(make_layer: Make) -> None:
    layer = make_layer(24, 256)
    start = start_of(layer, QuantizeSettings(group_size=64))
    heavy = damped(layer.moment, 0.1)
    with_scales = refine(layer.weight, start, heavy, fit_scales=True, sweeps=0, fit_map=False, alternations=1)
    assert with_scales.losses[-1] < with_scales.losses[0]
    assert torch.equal(with_scales.linear.codes, start.codes)
    assert torch.equal(with_scales.linear.scales > 0, start.scales > 0)


def test_guided_ranges_of_rows_have_their_own_moment(make_layer: Make) -> None:
    left, right = make_layer(16, 128, seed=1), make_layer(16, 128, seed=2)
    weight = torch.cat([left.weight, right.weight])
    moments = [damped(left.moment, 0.1), damped(right.moment, 0.1)]
    start = quantize_diagonal(weight, left.moment.diagonal() + right.moment.diagonal(), QuantizeSettings())
    both = refine(weight, start, moments, fit_map=False)
    for rows, moment in ((slice(0, 16), moments[0]), (slice(16, 32), moments[1])):
        part = QuantizedLinear(start.codes[rows], start.qmap, start.scales[rows])
        assert torch.equal(refine(weight[rows], part, moment, fit_map=False).linear.codes, both.linear.codes[rows])
    same = refine(weight, start, [moments[0], moments[0]])
    assert same.losses[-1] == pytest.approx(refine(weight, start, moments[0]).losses[-1], rel=1e-3)
    even, heavy = refine(weight, start, moments), refine(weight, start, moments, weights=[1000.0, 1.0])
    assert heavy.losses[0] > 100 * even.losses[0]
    first = wide_loss(
        weight[:16], QuantizedLinear(heavy.linear.codes[:16], heavy.linear.qmap, heavy.linear.scales[:16]), moments[0]
    )
    assert float(first.sum()) <= float(
        wide_loss(weight[:16], QuantizedLinear(start.codes[:16], start.qmap, start.scales[:16]), moments[0]).sum()
    )


@pytest.mark.parametrize("per", ["tensor", "row"])
def test_workers_do_not_matter(make_layer: Make, per: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_module, "CPU_ROWS", 24)
    layer = make_layer(100, 192)
    start = start_of(layer, QuantizeSettings(qmap_per=per))
    copy = start.codes.clone()
    heavy = damped(layer.moment, 0.1)
    results = [refine(layer.weight, start, heavy, fit_scales=True, workers=n) for n in (1, 1, 2, 3)]
    for other in results[1:]:
        assert same(results[0], other)
    assert torch.equal(start.codes, copy)


def same(left: Refined, right: Refined) -> bool:
    parts = ("codes", "qmap", "scales")
    return left.losses == right.losses and all(
        torch.equal(getattr(left.linear, part), getattr(right.linear, part)) for part in parts
    )


def test_zero_rows_and_unused_codes(make_layer: Make) -> None:
    layer = make_layer(6, 128)
    weight = layer.weight.clone()
    weight[1] = 0.0
    weight[2] = torch.sign(weight[2]) * 0.02  # two values only: a map per row has six unused entries
    start = quantize_diagonal(weight, layer.moment.diagonal(), QuantizeSettings(qmap_per="row"))
    result = refine(weight, start, damped(layer.moment, 0.1), fit_scales=True)
    back = result.linear.dequantize()
    assert bool(torch.isfinite(back).all())
    assert torch.equal(back[1], torch.zeros(128))
    assert float((back[2] - weight[2]).abs().max()) < 1e-4


def test_refusals(make_layer: Make) -> None:
    layer = make_layer(6, 128)
    start = start_of(layer, QuantizeSettings(), qmap=named_map("nf3"))
    heavy = damped(layer.moment, 0.1)
    for moments, weights in (([heavy] * 4, None), ([], None), ([heavy] * 2, [1.0])):
        with pytest.raises(UsageError, match="divide 6 rows"):
            refine(layer.weight, start, moments, weights=weights)
    with pytest.raises(UsageError, match="positive weights"):
        refine(layer.weight, start, [heavy] * 2, weights=[1.0, 0.0])
    with pytest.raises(UsageError, match="diagonal"):
        refine(layer.weight, start, layer.moment.diagonal())
    with pytest.raises(UsageError, match="dead"):
        refine(layer.weight, start, torch.zeros(128, 128))
    with pytest.raises(UsageError, match="at least 0"):
        refine(layer.weight, start, heavy, sweeps=-1)
    with pytest.raises(UsageError, match="start"):
        refine(layer.weight[:3], start, heavy)
