"""Refine map and codes together: least squares for the map, coordinate descent for the codes, in turn.

LNQ, the layer-wise part of GuidedQuant (arXiv 2505.07004), on a grid that is a map times signed group scales. Everything
is held rounded as it will be stored, each step is judged by the loss it really leaves, and one that would raise it is
taken back: row by row where rows are independent, as a whole where they share a map.

With E = What - W and R = E H the loss is sum(E * R). Its gradient by a map entry is 2 g, g_q = the sum of R * S over the
weights coded q, and its second derivative 2 M, M_qr = sum over rows of U_q H U_r^T with U_q = S where the code is q, else
0. One system of eight gives the exact minimum: c - M^-1 g. Working with the change of c instead of c itself keeps the small
loss from drowning in the float32 rounding of W H W^T.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from w3pack.errors import UsageError
from w3pack.quantize.block_steps import DescentSteps
from w3pack.quantize.chunks import run_chunks
from w3pack.quantize.diagonal import stored_scales
from w3pack.quantize.linear import QuantizedLinear
from w3pack.quantize.map_system import SHARED_RIDGE, move_map, row_gradients, row_systems, sample_rows
from w3pack.quantize.maps import map_values, round_map
from w3pack.quantize.moments import check_moment, full_precision
from w3pack.quantize.scale_system import refit_scales
from w3pack.quantize.sweep import BLOCK, Picker, check_problem, reciprocal, row_bounds, spread, values_of

ALTERNATIONS = 2
SWEEPS = 2


@dataclass(frozen=True)
class Refined:
    """What the alternation found.

    Attributes:
        linear: the refined weight; the start itself where nothing was better.
        losses: absolute loss at the start and after each step, never rising.
        accepted: how many map steps lowered the loss.
    """

    linear: QuantizedLinear
    losses: tuple[float, ...]
    accepted: int


def refine(
    weight: torch.Tensor,
    start: QuantizedLinear,
    moments: torch.Tensor | Sequence[torch.Tensor],
    *,
    weights: Sequence[float] | None = None,
    alternations: int = ALTERNATIONS,
    sweeps: int = SWEEPS,
    fit_map: bool = True,
    fit_scales: bool = False,
    workers: int = 1,
) -> Refined:
    """Alternate map, scales and codes from a quantized start.

    Entries of the map that are exactly 0 stay 0. Bit-identical for any number of workers.

    Args:
        weight: float32 [rows, columns]; not modified.
        start: codes, map or maps, and scales to begin with.
        moments: float32 [columns, columns], damped, of the inputs; or several, the i-th for the i-th of equal ranges of
            rows (guided: the tokens of each weighted by the gradients of its outputs). rows must divide evenly.
        weights: a factor for each of several moments in the sum that a shared map minimizes; 1 if left out.
        alternations: rounds of map, scales, codes.
        sweeps: passes of coordinate descent over all columns in a round.
        fit_map: change the map; off for an imported one.
        fit_scales: change the scales too. It lowers this loss by a per cent and did nothing for models.
        workers: CPU threads; ignored on other devices.
    """
    check_problem(weight, start)
    if alternations < 0 or sweeps < 0:
        raise UsageError(f"expected counts of at least 0; got {alternations} and {sweeps}; use 2 and 2")
    matrices = _checked_moments(weight, moments, weights)
    with full_precision():
        refinement = _Refinement(weight, start, matrices, workers=workers)
        losses = [refinement.loss()]
        accepted = 0
        for _ in range(alternations):
            if fit_map:
                accepted += refinement.step_map()
                losses.append(refinement.loss())
            if fit_scales:
                refinement.step_scales()
                losses.append(refinement.loss())
            if sweeps:
                refinement.step_codes(sweeps)
                losses.append(refinement.loss())
        return Refined(linear=refinement.linear(), losses=tuple(losses), accepted=accepted)


def _checked_moments(
    weight: torch.Tensor, moments: torch.Tensor | Sequence[torch.Tensor], weights: Sequence[float] | None
) -> list[torch.Tensor]:
    rows, columns = weight.shape
    given = [moments] if isinstance(moments, torch.Tensor) else list(moments)
    factors = [1.0] * len(given) if weights is None else list(weights)
    if not given or rows % len(given) or len(factors) != len(given):
        raise UsageError(
            f"expected one moment, or as many as divide {rows} rows with a weight each; got {len(given)} and "
            f"{len(factors)} weights; pass one per equal range of rows"
        )
    if not all(0 < factor < float("inf") for factor in factors):
        raise UsageError(f"expected positive weights of the moments; got {factors}; leave out what does not count")
    if any(moment.dim() != 2 for moment in given):
        raise UsageError("expected moments [columns, columns]; got a diagonal; only the diagonal fit takes one")
    checked = [check_moment(moment.to(weight.device), columns=columns) for moment in given]
    if any(bool((moment.diagonal() <= 0).any()) for moment in checked):
        raise UsageError("expected moments with a positive diagonal; got dead inputs; damp the moment first")
    return [moment if factor == 1.0 else moment * factor for moment, factor in zip(checked, factors, strict=True)]


@dataclass
class _Piece:
    """Some rows, transposed; what the solver knows of them.

    Attributes:
        first, stop: the rows.
        moment: their H, float32 [columns, columns].
        weight: float32 [columns, n].
        codes: uint8 [columns, n].
        scales: float32 [groups, n], values that float16 holds.
        residual: R = H E, float32 [columns, n].
        loss: float64 [n].
    """

    first: int
    stop: int
    moment: torch.Tensor
    weight: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor
    residual: torch.Tensor
    loss: torch.Tensor


class _Refinement:
    """The state of `refine`."""

    def __init__(
        self, weight: torch.Tensor, start: QuantizedLinear, moments: list[torch.Tensor], *, workers: int
    ) -> None:
        self.start = start
        self.stored = start.qmap
        self.group_size = start.group_size
        self.columns = weight.shape[1]
        self.workers = workers if weight.device.type == "cpu" else 1
        each = weight.shape[0] // len(moments)
        of_row = [
            (bound, moment)
            for i, moment in enumerate(moments)
            for bound in row_bounds(i * each, (i + 1) * each, device=weight.device)
        ]
        self.moments = dict(of_row)
        self.bounds = [bound for bound, _ in of_row]

        def prepare(first: int, stop: int) -> _Piece:
            moment, rows = self.moments[first, stop], weight[first:stop].t().contiguous()
            codes = start.codes[first:stop].t().contiguous()
            scales = start.scales[first:stop].t().to(torch.float32).contiguous()
            table = self.stored if self.stored.shape[0] == 1 else self.stored[first:stop]
            residual, loss = self.judge(rows, moment, codes, scales, map_values(table))
            return _Piece(first, stop, moment, rows, codes, scales, residual, loss)

        self.pieces = dict(zip(self.bounds, run_chunks(prepare, self.bounds, workers=self.workers), strict=True))

    def each(self, work: Callable[[_Piece], None]) -> None:
        """Run on every piece, on any number of threads."""
        run_chunks(lambda first, stop: work(self.pieces[first, stop]), self.bounds, workers=self.workers)

    def table(self, piece: _Piece, stored: torch.Tensor | None = None) -> torch.Tensor:
        """float32 [1 or n, 8] for the rows of a piece."""
        values = map_values(self.stored if stored is None else stored)
        return values if values.shape[0] == 1 else values[piece.first : piece.stop]

    def approximation(self, codes: torch.Tensor, scales: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """What, float32 [columns, n]."""
        return values_of(codes, table).mul_(spread(scales, group_size=self.group_size, columns=self.columns))

    def judge(
        self,
        weight: torch.Tensor,
        moment: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        table: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """R = H E and the loss of each row."""
        error = self.approximation(codes, scales, table).sub_(weight)
        residual = moment @ error
        return residual, (residual * error).sum(dim=0, dtype=torch.float64)

    def loss(self) -> float:
        return sum(float(piece.loss.sum()) for piece in self.pieces.values())

    def step_map(self) -> int:
        """One least-squares map, or one for each row; 1 if any was taken."""
        shared = self.stored.shape[0] == 1
        rows = None if not shared else sample_rows(self.start.codes.shape[0])

        def system(first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
            piece = self.pieces[first, stop]
            large = spread(piece.scales, group_size=self.group_size, columns=self.columns)
            gradient = row_gradients(piece.residual, large, piece.codes)  # [n, 8]
            chosen = None if rows is None else rows[(rows >= first) & (rows < stop)] - first
            second = row_systems(large, piece.codes, piece.moment, chosen, total=shared)
            return (gradient.sum(dim=0, keepdim=True) if shared else gradient), second

        parts = run_chunks(system, self.bounds, workers=self.workers)
        if shared and rows is not None:
            gradient = torch.stack([part[0] for part in parts]).sum(dim=0)
            second = torch.stack([part[1] for part in parts]).sum(dim=0) * (self.start.codes.shape[0] / len(rows))
        else:
            gradient, second = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
        moved = move_map(map_values(self.stored), gradient, second, ridge=SHARED_RIDGE if shared else None)
        stored = round_map(moved.table, self.stored.dtype)
        taken = torch.zeros(self.stored.shape[0], dtype=torch.bool, device=stored.device)
        trials: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}

        def attempt(first: int, stop: int) -> None:
            piece = self.pieces[first, stop]
            here = slice(None) if shared else slice(first, stop)
            scales = stored_scales(piece.scales * moved.factor[here]).to(torch.float32)
            if shared:
                codes = moved.rank[0][piece.codes.to(torch.int64)]
            else:
                codes = torch.gather(moved.rank[here].t(), 0, piece.codes.to(torch.int64))
            residual, loss = self.judge(piece.weight, piece.moment, codes, scales, self.table(piece, stored))
            trials[first, stop] = (codes, scales, residual, loss)

        run_chunks(attempt, self.bounds, workers=self.workers)
        if shared:
            taken[0] = sum(float(trials[bound][3].sum()) for bound in self.bounds) < self.loss()
        for bound in self.bounds:
            piece = self.pieces[bound]
            codes, scales, residual, loss = trials.pop(bound)
            keep = taken.expand(bound[1] - bound[0]) if shared else loss < piece.loss
            if not shared:
                taken[bound[0] : bound[1]] = keep
            self.adopt(piece, keep, codes=codes, scales=scales, residual=residual, loss=loss)
        self.stored = torch.where(taken.unsqueeze(1), stored, self.stored)
        return int(taken.any())

    def adopt(
        self,
        piece: _Piece,
        keep: torch.Tensor,
        *,
        codes: torch.Tensor,
        scales: torch.Tensor,
        residual: torch.Tensor,
        loss: torch.Tensor,
    ) -> None:
        """Take the rows of a trial for which `keep`, bool [n], is true."""
        piece.codes = torch.where(keep, codes, piece.codes)
        piece.scales = torch.where(keep, scales, piece.scales)
        piece.residual = torch.where(keep, residual, piece.residual)
        piece.loss = torch.where(keep, loss, piece.loss)

    def step_scales(self) -> None:
        """Least-squares scales, row by row."""

        def work(piece: _Piece) -> None:
            values = values_of(piece.codes, self.table(piece))
            fitted = refit_scales(piece.scales, values, piece.residual, piece.moment, group_size=self.group_size)
            scales = stored_scales(fitted).to(torch.float32)
            residual, loss = self.judge(piece.weight, piece.moment, piece.codes, scales, self.table(piece))
            self.adopt(piece, loss < piece.loss, codes=piece.codes, scales=scales, residual=residual, loss=loss)

        self.each(work)

    def step_codes(self, sweeps: int) -> None:
        """Coordinate descent over the codes, row by row."""

        def work(piece: _Piece) -> None:
            table = self.table(piece)
            one_group = table.shape[0] == 1 and self.group_size % BLOCK == 0
            descend = self.descend_in_blocks if one_group and table.device.type != "cpu" else self.descend
            codes = descend(piece, table, sweeps)
            residual, loss = self.judge(piece.weight, piece.moment, codes, piece.scales, table)
            self.adopt(piece, loss < piece.loss, codes=codes, scales=piece.scales, residual=residual, loss=loss)

        self.each(work)

    def descend(self, piece: _Piece, table: torch.Tensor, sweeps: int) -> torch.Tensor:
        """Codes uint8 [columns, n] after some cyclic sweeps.

        With the other columns fixed the loss is a parabola in What_k with its lowest point at What_k - R_k / H_kk, so the
        nearest code to that point is the best one. A change d adds d H_k to R: at once inside a block, and in one
        product to all columns after it.
        """
        columns, rows = piece.codes.shape
        current = self.approximation(piece.codes, piece.scales, table)
        residual = piece.residual.clone()
        inverse = reciprocal(piece.scales)
        curvature: list[float] = piece.moment.diagonal().tolist()
        picker = Picker(table, rows=rows)
        codes = piece.codes.clone()
        for _ in range(sweeps):
            for first in range(0, columns, BLOCK):
                stop = min(first + BLOCK, columns)
                mutual = piece.moment[first:stop, first:stop].contiguous()
                change = torch.empty(stop - first, rows, dtype=torch.float32, device=codes.device)
                picked = torch.empty_like(change)
                for j, column in enumerate(range(first, stop)):
                    group = column // self.group_size
                    slope = residual[column]
                    if j:
                        slope = torch.addmv(slope, change[:j].t(), mutual[j, :j])
                    target = torch.add(current[column], slope, alpha=-1.0 / curvature[column])
                    count, value = picker.pick(target.mul_(inverse[group]))
                    picked[j] = count
                    value.mul_(piece.scales[group])
                    torch.sub(value, current[column], out=change[j])
                    current[column] = value
                codes[first:stop] = picked.to(torch.uint8).sub_(1)
                residual.addmm_(piece.moment[:, first:stop], change)
        return codes

    def descend_in_blocks(self, piece: _Piece, table: torch.Tensor, sweeps: int) -> torch.Tensor:
        """`descend` for devices, where each operation costs a launch; one map for all rows, whole blocks in a group."""
        columns, rows = piece.codes.shape
        values, residual, codes = values_of(piece.codes, table), piece.residual.clone(), piece.codes.clone()
        inverse = reciprocal(piece.scales)
        whole = DescentSteps(table, width=min(BLOCK, columns), rows=rows)
        last = DescentSteps(table, width=columns % BLOCK, rows=rows) if columns > BLOCK and columns % BLOCK else whole
        for first in (first for _ in range(sweeps) for first in range(0, columns, BLOCK)):
            stop, group = min(first + BLOCK, columns), first // self.group_size
            here, steps = slice(first, stop), whole if stop - first == whole.width else last
            change = steps.run(values[here], residual[here], inverse[group], piece.moment[here, here])
            values[here], codes[here] = steps.values, steps.codes.to(torch.uint8)
            residual.addmm_(piece.moment[:, here], change * piece.scales[group])
        return codes

    def linear(self) -> QuantizedLinear:
        """The result, in the layout of the start."""
        codes = torch.cat([piece.codes.t() for piece in self.pieces.values()])
        scales = torch.cat([piece.scales.t() for piece in self.pieces.values()]).to(torch.float16)
        return QuantizedLinear(codes=codes, qmap=self.stored, scales=scales, group_size=self.group_size)
