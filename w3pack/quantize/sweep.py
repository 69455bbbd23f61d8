"""What the column-by-column solvers share: one column of many rows at a time, stored transposed.

Both error feedback and coordinate descent choose the codes of one column, then tell other columns. Matrices are held as
[columns, rows], so that a column of the weight is contiguous, and rows are cut into pieces that depend on shape and
device only: rows never influence each other, so pieces may run on any number of threads with one result.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from w3pack.errors import UsageError
from w3pack.quantize.chunks import run_chunks
from w3pack.quantize.linear import QuantizedLinear
from w3pack.quantize.maps import ENTRIES

BLOCK = 64  # columns whose mutual influence is applied one by one; the rest follows in one product a block
CPU_ROWS = 2048  # a column step costs 20 us beside its arithmetic, so pieces are as large as memory likes
DEVICE_ROWS = 1 << 16


def row_bounds(first: int, stop: int, *, device: torch.device) -> list[tuple[int, int]]:
    """Half-open ranges of rows, nearly equal, one per piece of work, in order."""
    most = CPU_ROWS if device.type == "cpu" else DEVICE_ROWS
    pieces = -(-(stop - first) // most)
    cuts = [first + (stop - first) * piece // pieces for piece in range(pieces + 1)]
    return list(pairwise(cuts))


class Picker:
    """Nearest map entry for one column of n rows, in three operations whatever the map.

    An entry's index is the number of thresholds below the weight, less one, when -infinity counts as the first
    threshold; its value is the sum of the steps taken on the way. With one map for all rows both are one product.

    Args:
        table: float32 [1, 8] or [n, 8], ascending.
        rows: n.
    """

    def __init__(self, table: torch.Tensor, *, rows: int) -> None:
        entries = table.t()  # [8, 1 or n]
        middles = (entries[1:] + entries[:-1]) / 2
        self._thresholds = torch.cat([torch.full_like(entries[:1], -torch.inf), middles]).contiguous()
        self._steps = torch.cat([entries[:1], entries.diff(dim=0)]).contiguous()
        self._shared = table.shape[0] == 1
        self._above = torch.empty(ENTRIES, rows, dtype=torch.float32, device=table.device)
        if self._shared:
            self._sums = torch.stack([torch.ones_like(self._steps[:, 0]), self._steps[:, 0]])  # [2, 8]

    def pick(self, unit: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Index plus one (1..8) and value of the entry nearest to each of float32 [n]; float32 [n] each."""
        above = torch.gt(unit, self._thresholds, out=self._above)
        if self._shared:
            counts, values = (self._sums @ above).unbind(0)
            return counts, values
        return above.sum(dim=0), (above * self._steps).sum(dim=0)


def values_of(codes: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Map values of transposed codes.

    Args:
        codes: uint8 [columns, n].
        table: float32 [1 or n, 8].

    Returns:
        float32 [columns, n].
    """
    if table.shape[0] == 1:
        return table[0][codes.to(torch.int64)]
    return torch.gather(table.t(), 0, codes.to(torch.int64))


def spread(scales: torch.Tensor, *, group_size: int, columns: int) -> torch.Tensor:
    """float32 [columns, n] from scales [groups, n]: each column's scale."""
    return scales.repeat_interleave(group_size, dim=0)[:columns]


def reciprocal(scales: torch.Tensor) -> torch.Tensor:
    """1 / scale, and 0 where the scale is 0: there every code stands for 0 and the one nearest to 0 is taken."""
    return torch.where(scales == 0, 0.0, 1.0 / scales)


def row_losses(
    weight: torch.Tensor, linear: QuantizedLinear | None, moment: torch.Tensor, *, workers: int = 1
) -> torch.Tensor:
    """(What - W)_n H (What - W)_n^T of every row; bit-identical for any number of workers.

    Args:
        weight: float32 [rows, columns].
        linear: the quantized weight; None for What = 0.
        moment: float32 [columns, columns], or [columns] for a diagonal H.
        workers: CPU threads; ignored on other devices.

    Returns:
        float64 [rows].
    """
    out = torch.empty(weight.shape[0], dtype=torch.float64, device=weight.device)

    def work(first: int, stop: int) -> None:
        error = weight[first:stop]
        if linear is not None:
            error = select_rows(linear, first, stop).dequantize().sub_(error)
        weighed = error * moment if moment.dim() == 1 else error @ moment
        out[first:stop] = weighed.mul_(error).sum(dim=1, dtype=torch.float64)

    threads = workers if weight.device.type == "cpu" else 1
    run_chunks(work, row_bounds(0, weight.shape[0], device=weight.device), workers=threads)
    return out


def select_rows(linear: QuantizedLinear, first: int, stop: int) -> QuantizedLinear:
    """Rows first..stop-1, with their own maps if there is one per row."""
    return QuantizedLinear(
        codes=linear.codes[first:stop],
        qmap=linear.qmap if linear.qmap.shape[0] == 1 else linear.qmap[first:stop],
        scales=linear.scales[first:stop],
        group_size=linear.group_size,
    )


def check_problem(weight: torch.Tensor, start: QuantizedLinear) -> None:
    """UsageError unless a float32 weight and its quantized start belong together."""
    if weight.dim() != 2 or weight.numel() == 0 or weight.dtype != torch.float32:
        raise UsageError(
            f"expected a float32 weight matrix [rows, columns]; got {weight.dtype} {list(weight.shape)}; convert it"
        )
    if start.codes.shape != weight.shape:
        raise UsageError(
            f"expected a start of shape {list(weight.shape)}; got {list(start.codes.shape)}; quantize this weight first"
        )
