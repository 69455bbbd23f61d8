"""Least-squares group scales of each row for fixed codes and map (see `w3pack.quantize.lnq`)."""

from __future__ import annotations

import torch

RIDGE = 1e-3  # of each diagonal entry, towards the old scale
PIECE_ELEMENTS = 1 << 24


def refit_scales(
    scales: torch.Tensor, values: torch.Tensor, residual: torch.Tensor, moment: torch.Tensor, *, group_size: int
) -> torch.Tensor:
    """One system of groups x groups per row: A_gg' = V_g H_gg' V_g'^T and b_g = V_g R_g give scales - (A + ridge)^-1 b.

    A scale that would change its sign keeps its old value; one that is 0 stays 0.

    Args:
        scales: float32 [groups, n].
        values: V, map values of the codes, float32 [columns, n].
        residual: R = H E, float32 [columns, n].
        moment: float32 [columns, columns].
        group_size: columns per scale; the last group may be short.

    Returns:
        float32 [groups, n].
    """
    groups, rows = scales.shape
    out = torch.empty_like(scales)
    step = max(1, PIECE_ELEMENTS // max(1, moment.shape[0]))
    for first in range(0, rows, step):
        v, s = values[:, first : first + step], scales[:, first : first + step]
        gradient = _group_sums(v * residual[:, first : first + step], group_size)  # [groups, m]
        system = torch.empty(s.shape[1], groups, groups, dtype=torch.float64, device=s.device)
        for g in range(groups):
            part = slice(g * group_size, (g + 1) * group_size)
            system[:, g] = _group_sums((moment[:, part] @ v[part]).mul_(v), group_size).t()
        alive = (s != 0).t().to(torch.float64)  # [m, groups]
        system *= alive.unsqueeze(1) * alive.unsqueeze(2)
        diagonal = system.diagonal(dim1=1, dim2=2)
        usable = (diagonal > 0).to(torch.float64)
        system = system + torch.diag_embed(RIDGE * diagonal + (1.0 - usable))
        change = torch.linalg.solve(system, gradient.t() * alive * usable).t()
        fitted = s.to(torch.float64) - change
        keep = torch.isfinite(fitted) & (fitted * s > 0)
        out[:, first : first + step] = torch.where(keep, fitted, s.to(torch.float64)).to(torch.float32)
    return out


def _group_sums(matrix: torch.Tensor, group_size: int) -> torch.Tensor:
    """float64 [groups, m] of float32 [columns, m]."""
    return torch.stack([part.sum(dim=0, dtype=torch.float64) for part in matrix.split(group_size)])
