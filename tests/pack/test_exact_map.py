"""Tables of eight numbers become float16 maps that mean exactly the same, or are refused."""

from __future__ import annotations

import pytest
import torch

from w3pack.errors import CheckpointError, UnsupportedError
from w3pack.pack.exact_map import exact_map, sort_table


def products(table: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float64 [rows, groups, 8]."""
    return table.double()[:, None, :] * scales.double()[:, :, None]


@pytest.mark.parametrize("maps", [1, 40])
@pytest.mark.parametrize("columns", [9, 70000])
def test_sorting_changes_no_weight(maps: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(maps)
    table = torch.randn(maps, 8, generator=generator)
    table[0] = torch.tensor([3, 1, 2, 1, 0.0, -0.0, 5, -4])  # ties and both zeros
    codes = torch.randint(0, 8, (40, columns), generator=generator).to(torch.uint8)
    renamed, ascending = sort_table(codes, table)
    assert bool((ascending[:, 1:] >= ascending[:, :-1]).all())
    assert renamed.dtype == torch.uint8
    rows = table.expand(40, 8), ascending.expand(40, 8)
    assert torch.equal(rows[0].gather(1, codes.long()), rows[1].gather(1, renamed.long()))


def test_sorted_table_is_left_alone() -> None:
    codes, table = torch.zeros(2, 2, dtype=torch.uint8), torch.arange(8.0)[None]
    assert sort_table(codes, table) == (codes, table)


@pytest.mark.parametrize("factor", [1.0, 4.0, 3.0, 1000.0, 0.01, 2.0**-14])
@pytest.mark.parametrize("maps", [1, 6])
def test_a_power_of_two_moves_to_the_scales(factor: float, maps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    table = (torch.randn(maps, 8, generator=generator).sort(dim=1).values * factor).half().float()
    scales = (torch.randn(6, 3, generator=generator) / 20).half().float()
    qmap, half = exact_map(table, scales, name="m")
    assert qmap.dtype == half.dtype == torch.float16
    assert torch.equal(products(qmap, half), products(table, scales))
    assert bool((qmap.abs().amax(dim=1) <= 1).all())
    if factor >= 1:  # the scales have room
        assert bool((qmap.abs().amax(dim=1) > 0.5).all())


def test_largest_magnitude_of_a_power_of_two_becomes_one() -> None:
    qmap, half = exact_map(torch.arange(-4.0, 4.0)[None], torch.full((1, 1), 0.3).half().float(), name="m")
    assert qmap.tolist() == [[-1, -0.75, -0.5, -0.25, 0, 0.25, 0.5, 0.75]]
    assert half.item() == 4 * torch.tensor(0.3).half().item()


def test_small_scales_keep_a_small_table() -> None:
    """Moving the power of two would push the scale below float16."""
    table = torch.linspace(-0.07, 0.07, 8).half().float()[None]
    scales = torch.tensor([[3 * 2.0**-24]])
    qmap, half = exact_map(table, scales, name="m")
    assert torch.equal(products(qmap, half), products(table, scales))
    assert torch.equal(qmap.float(), table)


def test_zeros() -> None:
    qmap, half = exact_map(torch.zeros(1, 8), torch.zeros(2, 1), name="m")
    assert not qmap.any()
    assert not half.any()


@pytest.mark.parametrize(
    ("table", "scale", "error", "says"),
    [
        (torch.arange(-4.0, 4.0), 20000.0, UnsupportedError, "scales up to 80000"),
        (torch.arange(-4.0, 4.0), 0.1, UnsupportedError, "finer"),
        (torch.linspace(-1, 1, 8), 1.0, UnsupportedError, "finer"),
        (torch.tensor([*range(7), float("inf")]), 1.0, CheckpointError, "table entries"),
        (torch.arange(8.0), float("nan"), CheckpointError, "scales"),
    ],
)
def test_what_float16_cannot_hold(table: torch.Tensor, scale: float, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        exact_map(table[None], torch.full((1, 1), scale), name="some.module")
    assert "some.module" in str(caught.value)


def test_rounding_only_where_it_is_allowed() -> None:
    table = torch.linspace(-0.031, 0.03, 8)[None]
    qmap, half = exact_map(table, torch.ones(1, 1), name="m", rounded=True)
    error = (products(qmap, half) - products(table, torch.ones(1, 1))).abs().max()
    assert 0 < error < 0.031 * 2.0**-11
