"""The steps of one block of columns with one map for all rows, for devices: few launches a column, none that waits.

The same choices as those of `w3pack.quantize.gptq` and `lnq` column by column, which stay as they are for CPUs and maps of
single rows; sums are added in another order, so a tie may fall to the other side. All tensors are [columns, rows] and are
made once: a block is copied in, run (`w3pack.quantize.replay`), and read.
"""

from __future__ import annotations

import torch

from w3pack.quantize.replay import Replayed


class _Steps:
    """Tensors of one block.

    Args:
        table: float32 [1, 8], ascending.
        width: columns of the block.
        rows: of all columns.
    """

    def __init__(self, table: torch.Tensor, *, width: int, rows: int) -> None:
        self._table = table[0].contiguous()
        self._thresholds = (self._table[1:] + self._table[:-1]) / 2
        self._mutual = torch.empty(width, width, dtype=torch.float32, device=table.device)
        self.codes = torch.empty(width, rows, dtype=torch.int32, device=table.device)
        self.width = width
        self._replayed = Replayed(table.device)

    def _empty(self) -> torch.Tensor:
        return torch.empty(self.codes.shape, dtype=torch.float32, device=self.codes.device)

    def _pick(self, unit: torch.Tensor, j: int, into: torch.Tensor) -> None:
        """Code j and value of the entry nearest to each of float32 [rows]; halfway the lower one."""
        torch.bucketize(unit, self._thresholds, out_int32=True, out=self.codes[j])
        torch.index_select(self._table, 0, self.codes[j], out=into)


class FeedSteps(_Steps):
    """Error feedback: each column takes its nearest codes, and what is left of it goes to the columns after it."""

    def __init__(self, table: torch.Tensor, *, width: int, rows: int) -> None:
        super().__init__(table, width=width, rows=rows)
        self._weight, self._scales, self._inverse = self._empty(), self._empty(), self._empty()
        self._left = self._empty()
        self._unit, self._value = torch.empty_like(self._left[0]), torch.empty_like(self._left[0])

    def _work(self) -> None:
        for j, (w, scale, inverse) in enumerate(zip(self._weight, self._scales, self._inverse, strict=True)):
            if j:
                w.addmv_(self._left[:j].t(), self._mutual[j, :j], alpha=-1.0)
            torch.mul(w, inverse, out=self._unit)
            self._pick(self._unit, j, self._value)
            torch.addcmul(w, self._value, scale, value=-1.0, out=self._left[j])

    def run(
        self, weight: torch.Tensor, scales: torch.Tensor, inverse: torch.Tensor, upper: torch.Tensor
    ) -> torch.Tensor:
        """Fill `codes`.

        Args:
            weight: float32 [width, rows], what is left of the block.
            scales, inverse: float32 [width, rows], of each weight, and `reciprocal`.
            upper: float32 [width, width], U of the block.

        Returns:
            float32 [width, rows]: (w_i - value * scale) / U_ii; valid until the next run.
        """
        pivots = upper.diagonal().unsqueeze(1)
        self._weight.copy_(weight)
        self._scales.copy_(scales)
        self._inverse.copy_(inverse)
        self._mutual.copy_((upper / pivots).t())  # row j: what is left of earlier columns does to j
        self._replayed(self._work)
        return self._left / pivots


class DescentSteps(_Steps):
    """Coordinate descent, in units of the scales: a block lies in one group of each row, which has one scale."""

    def __init__(self, table: torch.Tensor, *, width: int, rows: int) -> None:
        super().__init__(table, width=width, rows=rows)
        self._target, self._old, self.values, self._change = (self._empty() for _ in range(4))

    def _work(self) -> None:
        for j, (target, old, value) in enumerate(zip(self._target, self._old, self.values, strict=True)):
            if j:
                target.addmv_(self._change[:j].t(), self._mutual[j, :j], alpha=-1.0)
            self._pick(target, j, value)
            torch.sub(value, old, out=self._change[j])

    def run(
        self, values: torch.Tensor, slope: torch.Tensor, inverse: torch.Tensor, moment: torch.Tensor
    ) -> torch.Tensor:
        """Fill `codes` and `values`.

        Args:
            values: float32 [width, rows], map values now.
            slope: float32 [width, rows], R = H E of the block.
            inverse: float32 [rows], `reciprocal` of the scales.
            moment: float32 [width, width], H of the block.

        Returns:
            float32 [width, rows]: the changes of map values; valid until the next run.
        """
        curvature = moment.diagonal().unsqueeze(1)
        self._old.copy_(values)
        torch.addcmul(values, slope / curvature, inverse, value=-1.0, out=self._target)
        self._mutual.copy_(moment / curvature)
        self._replayed(self._work)
        return self._change
