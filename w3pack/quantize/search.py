"""Scales for a given map, and a map for given scales: the two halves of the alternation.

Both minimize sum(importance * (w - scale * value)^2) over groups that are divided by their largest magnitude, so
candidate scales are plain numbers and overflow cannot happen. For fixed codes the best scale of a group is the weighted
projection A / B with A = sum(importance * w * value) and B = sum(importance * value^2), and the error it leaves is
sum(importance * w^2) - A^2 / B: a candidate is judged by A^2 / B alone, after its own least-squares refit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from w3pack.quantize.groups import TINY, Batch
from w3pack.quantize.maps import ENTRIES
from w3pack.quantize.nearest import Levels, comparisons, nearest_values


def projection(batch: Batch, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A / B and A^2 / B of the module's docstring for values [groups, group_size], which are overwritten; float32 [groups] each."""
    along = (batch.weighted * values).sum(dim=1)
    power = values.mul_(values).mul_(batch.importance).sum(dim=1).clamp_min_(TINY)
    ratio = along / power
    return ratio, ratio * along


def search_scales(
    batch: Batch, candidates: Sequence[tuple[float, Levels]], table: torch.Tensor, *, polish: int
) -> torch.Tensor:
    """The best scale of every group among refitted candidates of both signs.

    Args:
        batch: n groups.
        candidates: (multiplier, levels of multiplier * map) pairs; a negative multiplier mirrors the map.
        table: float32 [1 or n, 8], the map itself.
        polish: number of further nearest-code-and-refit rounds from the winner.

    Returns:
        float32 [n], in units of the group's largest magnitude; never zero.
    """
    best = torch.full_like(batch.peak, -1.0)
    scale = torch.ones_like(batch.peak)
    for multiplier, levels in candidates:
        ratio, gain = projection(batch, nearest_values(batch.unit, levels))
        better = gain > best
        best = torch.where(better, gain, best)
        scale = torch.where(better, ratio * multiplier, scale)
    scale = nonzero(scale)
    levels = Levels.of(table)
    for _ in range(polish):
        ratio, gain = projection(batch, nearest_values(batch.unit / scale.unsqueeze(1), levels))
        # unit ~ ratio * value, where ratio already is the refitted scale; keep the old one unless the error falls.
        better = gain > best
        best = torch.where(better, gain, best)
        scale = nonzero(torch.where(better, ratio, scale))
    return scale


def nonzero(scale: torch.Tensor) -> torch.Tensor:
    """Replace scales too small to divide by (all values zero) with 1."""
    return torch.where(scale.abs() > TINY, scale, torch.ones_like(scale))


def map_sums(
    batch: Batch, scale: torch.Tensor, table: torch.Tensor, *, emphasis: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Numerator and denominator of the least-squares map, group by group.

    For fixed codes and scales the best entry q is sum(importance * scale * w) / sum(importance * scale^2) over the
    weights coded q. Sums over "code above i" need one comparison each; differences of neighbours are the sums per code.

    Args:
        batch: n groups.
        scale: float32 [n], from `search_scales`.
        table: float32 [1 or n, 8].
        emphasis: groups count as peak^emphasis; 2 + 2 * power is the objective in the units of the weight, more lets
            groups with outliers shape the map, 0 treats all groups alike.

    Returns:
        float64 [n, 8] twice.
    """
    levels = Levels.of(table)
    unit = batch.unit / scale.unsqueeze(1)
    first = [batch.weighted.sum(dim=1)]
    second = [batch.importance.sum(dim=1)]
    for above in comparisons(unit, levels):
        first.append((above * batch.weighted).sum(dim=1))
        second.append(above.mul_(batch.importance).sum(dim=1))
    importance = batch.peak.to(torch.float64).pow(emphasis) if emphasis else (batch.peak > 0).to(torch.float64)
    wide = scale.to(torch.float64)
    numerator = _differences(first) * (importance * wide).unsqueeze(1)
    denominator = _differences(second) * (importance * wide * wide).unsqueeze(1)
    return numerator, denominator


def _differences(cumulative: list[torch.Tensor]) -> torch.Tensor:
    """Sums per code [groups, 8] from sums over "code >= i", in float64."""
    stacked = torch.stack(cumulative, dim=1).to(torch.float64)
    stacked[:, : ENTRIES - 1] -= stacked[:, 1:].clone()
    return stacked


def solve_map(numerator: torch.Tensor, denominator: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """The map that the sums ask for: ascending, one entry exactly zero, largest magnitude 1.

    The zero is not the least-squares answer but what keeps models alive: without it the many small weights beside a
    large one become noise on its massive activation. An entry that no weight uses keeps its old value.

    Args:
        numerator: float64 [maps, 8].
        denominator: float64 [maps, 8].
        old: float32 [maps, 8].

    Returns:
        float32 [maps, 8].
    """
    entries = torch.where(denominator > 0, numerator / denominator.clamp_min(1e-300), old.to(torch.float64))
    entries = entries.sort(dim=1).values
    entries.scatter_(1, entries.abs().argmin(dim=1, keepdim=True), 0.0)
    largest = entries.abs().amax(dim=1, keepdim=True)
    return torch.where(largest > TINY, entries / largest.clamp_min(TINY), old.to(torch.float64)).to(torch.float32)
