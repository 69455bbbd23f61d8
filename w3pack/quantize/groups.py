"""The groups of a weight, scaled to unit size, with the weights of their squared errors.

The weight matrix [rows, columns] is read as [rows * groups_per_row, group_size]; a ragged last group is padded with
zeros that carry no weight in any sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

TINY = 1e-30


@dataclass(frozen=True)
class GroupMatrix:
    """A weight seen group by group.

    Attributes:
        source: [rows * groups_per_row, group_size] in the weight's own dtype; a view unless the last group is ragged.
        rows: rows of the weight.
        groups_per_row: ceil(columns / group_size).
        ragged: weights in the last group of a row when it is short, else 0.
    """

    source: torch.Tensor
    rows: int
    groups_per_row: int
    ragged: int

    @staticmethod
    def of(weight: torch.Tensor, *, group_size: int) -> GroupMatrix:
        rows, columns = weight.shape
        per_row = -(-columns // group_size)
        ragged = columns % group_size
        whole = torch.nn.functional.pad(weight, (0, per_row * group_size - columns)) if ragged else weight.contiguous()
        return GroupMatrix(whole.view(rows * per_row, group_size), rows=rows, groups_per_row=per_row, ragged=ragged)

    @property
    def group_size(self) -> int:
        return self.source.shape[1]

    def read(self, first: int, stop: int) -> torch.Tensor:
        """Groups first..stop-1 as float32 [stop - first, group_size]."""
        return self.source[first:stop].to(torch.float32)

    def is_last_of_row(self, indices: torch.Tensor) -> torch.Tensor:
        """bool, same shape as `indices`: whether each group is the last one of its row."""
        return indices % self.groups_per_row == self.groups_per_row - 1


@dataclass(frozen=True)
class Batch:
    """Some groups as the fits see them: each divided by its largest magnitude.

    Attributes:
        unit: float32 [groups, group_size], in -1..1.
        peak: float32 [groups], the largest magnitude of each group; 0 where all weights are zero.
        importance: float32 [groups, group_size], weight of each squared error, 0 at padding.
        weighted: importance * unit.
    """

    unit: torch.Tensor
    peak: torch.Tensor
    importance: torch.Tensor
    weighted: torch.Tensor


def make_batch(groups: torch.Tensor, *, last_of_row: torch.Tensor, ragged: int, power: float) -> Batch:
    """Scale groups to unit size and weigh their errors.

    Without any data, the importance of a weight w in a group of mean square s^2 is (s^2 + w^2)^power. llama.cpp uses
    the form with power 1 when it has no importance matrix; `power` was chosen by the divergence of real models (see
    `w3pack.quantize.linear`). Large weights matter more than their number says because training puts them where the
    activations are large.

    Args:
        groups: float32 [groups, group_size], padded with zeros.
        last_of_row: bool [groups]; only read when `ragged`.
        ragged: number of real weights in the last group of a row, 0 when it is full.
        power: exponent of the heuristic.
    """
    peak = groups.abs().amax(dim=1)
    unit = groups / peak.clamp_min(TINY).unsqueeze(1)
    squares = unit * unit
    mean_square = squares.mean(dim=1, keepdim=True)
    if ragged:
        fill = torch.where(last_of_row, groups.shape[1] / ragged, 1.0).to(torch.float32)
        mean_square = mean_square * fill.unsqueeze(1)
    importance = squares.add_(mean_square)
    if power != 1.0:
        importance = importance.sqrt_() if power == 0.5 else importance.pow_(power)
    if ragged:
        importance[:, ragged:] *= (~last_of_row).unsqueeze(1)
    return Batch(unit=unit, peak=peak, importance=importance, weighted=importance * unit)
