"""The eight-by-eight systems that give the best map for fixed codes and scales (see `w3pack.quantize.lnq`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from w3pack.quantize.maps import ENTRIES

SHARED_RIDGE = 1e-5  # of the mean diagonal; entries that no weight uses stay where they are
ROW_RIDGE = 1e-4  # rows have few weights for eight numbers
SAMPLE_ROWS = 256  # for the second derivative of a shared map; the gradient is summed over all rows
PIECE_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class MovedMap:
    """A map after a step, in canonical form.

    Attributes:
        table: float32 [maps, 8], ascending, largest magnitude 1.
        factor: float32 [maps], by which scales must grow because the map was divided by it.
        rank: uint8 [maps, 8], new code of each old one.
    """

    table: torch.Tensor
    factor: torch.Tensor
    rank: torch.Tensor


def sample_rows(rows: int) -> torch.Tensor:
    """At most 256 row numbers, evenly spaced, int64 on the CPU."""
    count = min(rows, SAMPLE_ROWS)
    return torch.arange(count) * rows // count


def row_gradients(residual: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """g of every row: the sum of R * S over the weights with each code.

    Args:
        residual: R, float32 [columns, n].
        scales: float32 [columns, n].
        codes: uint8 [columns, n].

    Returns:
        float64 [n, 8].
    """
    product = residual * scales
    return torch.stack([(product * (codes == q)).sum(dim=0, dtype=torch.float64) for q in range(ENTRIES)], dim=1)


def row_systems(
    scales: torch.Tensor, codes: torch.Tensor, moment: torch.Tensor, rows: torch.Tensor | None, *, total: bool
) -> torch.Tensor:
    """M of some rows, or its sum over them.

    Args:
        scales: float32 [columns, n].
        codes: uint8 [columns, n].
        moment: float32 [columns, columns].
        rows: int64, which of the n; None for all.
        total: sum over the rows.

    Returns:
        float64 [rows, 8, 8], or [1, 8, 8] if `total`.
    """
    chosen = torch.arange(codes.shape[1]) if rows is None else rows
    step = max(1, PIECE_ELEMENTS // (ENTRIES * codes.shape[0]))
    entries = torch.arange(ENTRIES, dtype=torch.uint8, device=codes.device).view(1, -1, 1)
    parts = []
    for first in range(0, chosen.shape[0], step):
        some = chosen[first : first + step].to(codes.device)
        s, q = scales[:, some].t().unsqueeze(1), codes[:, some].t().unsqueeze(1)  # [m, 1, columns]
        u = torch.where(q == entries, s, 0.0)  # [m, 8, columns]
        m = torch.bmm((u.flatten(0, 1) @ moment).view_as(u), u.transpose(1, 2)).to(torch.float64)
        parts.append(m.sum(dim=0, keepdim=True) if total else m)
    if not parts:
        return torch.zeros(1 if total else 0, ENTRIES, ENTRIES, dtype=torch.float64, device=codes.device)
    return torch.stack(parts).sum(dim=0) if total else torch.cat(parts)


def move_map(
    table: torch.Tensor, gradient: torch.Tensor, second: torch.Tensor, *, ridge: float | None = None
) -> MovedMap:
    """The least-squares step c - (M + ridge)^-1 g, sorted and divided by its largest magnitude.

    Entries that are exactly 0 are held there, and left out of the system. Everything is float64 on the CPU's or the
    device's own solver; eight unknowns leave no doubt about the order of sums.

    Args:
        table: float32 [maps, 8].
        gradient: float64 [maps, 8].
        second: float64 [maps, 8, 8].
        ridge: towards the old map, as a part of the mean diagonal; for maps of single rows if left out.
    """
    weight = ROW_RIDGE if ridge is None else ridge
    free = (table != 0).to(torch.float64)
    system = (second + second.transpose(1, 2)) * 0.5 * free.unsqueeze(1) * free.unsqueeze(2)
    mean = system.diagonal(dim1=1, dim2=2).mean(dim=1, keepdim=True).clamp_min(1e-300)
    system = system + torch.diag_embed(weight * mean + (1.0 - free) * mean)
    step = torch.linalg.solve(system, gradient * free)
    wide = table.to(torch.float64) - torch.where(torch.isfinite(step), step, 0.0)
    ordered = wide.sort(dim=1, stable=True)
    largest = wide.abs().amax(dim=1, keepdim=True)
    largest = torch.where(largest > 0, largest, 1.0)
    return MovedMap(
        table=(ordered.values / largest).to(torch.float32),
        factor=largest.squeeze(1).to(torch.float32),
        rank=ordered.indices.argsort(dim=1).to(torch.uint8),
    )
