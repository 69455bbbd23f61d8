"""Error feedback: choose the codes column by column and let later columns make good the error of earlier ones.

GPTQ (arXiv 2210.17323), on a grid that is a map times a signed scale. Maps and scales are fixed, and rounded as they will
be stored, before the first code is chosen ("static groups"): so the order of the columns is free, and no index of groups
has to be stored. Columns go in falling order of H_kk ("activation order"): late columns, which absorb the errors, are the
ones that matter least. Without it three bits lose a sixth more divergence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from w3pack.errors import UnsupportedError, UsageError
from w3pack.quantize.block_steps import FeedSteps
from w3pack.quantize.chunks import one_torch_thread, run_chunks
from w3pack.quantize.linear import QuantizedLinear
from w3pack.quantize.maps import map_values
from w3pack.quantize.moments import check_moment, damped, full_precision
from w3pack.quantize.sweep import BLOCK, Picker, check_problem, reciprocal, row_bounds, row_losses, select_rows

DAMPING = 0.1
ATTEMPTS = 5  # dampings of 0.1, 0.3, 0.9, ...
SMALLEST_DAMPING = 1e-4  # what a retry starts from where none was asked for


@dataclass(frozen=True)
class Factor:
    """A damped second moment and the factor of its inverse; made once for all Linears that share an input.

    Attributes:
        undamped: float32 [K, K], as it was given.
        moment: float32 [K, K], damped.
        order: int64 [K], columns in the order of the sweep.
        upper: float32 [K, K], upper triangular U with inverse(moment[order][:, order]) = U^T U.
        damping: what it took to factorize.
    """

    undamped: torch.Tensor
    moment: torch.Tensor
    order: torch.Tensor
    upper: torch.Tensor
    damping: float


def factorize(moment: torch.Tensor, *, damping: float = DAMPING) -> Factor:
    """Damp H, order its columns and factorize its inverse.

    H reversed in both axes has the Cholesky factor L; L reversed back is an upper R with H = R R^T, so U is the inverse of
    R: one factorization and one triangular inverse, no inverse of H. float32, and float64 where that fails; each failure
    of both triples the damping.

    Args:
        moment: floating [K, K], symmetric positive semidefinite.
        damping: part of the diagonal that is added to it (see `damped`).
    """
    if moment.dim() != 2:
        raise UsageError(f"expected a second moment [K, K]; got {list(moment.shape)}; a diagonal allows no feedback")
    matrix = check_moment(moment, columns=moment.shape[0])
    for _ in range(ATTEMPTS):
        heavy = damped(matrix, damping)
        order = heavy.diagonal().argsort(descending=True, stable=True)
        backwards = order.flip(0)
        reversed_moment = heavy[backwards][:, backwards]
        for dtype in (torch.float32, torch.float64):
            upper = _inverse_factor(reversed_moment.to(dtype))
            if upper is not None:
                return Factor(undamped=matrix, moment=heavy, order=order, upper=upper, damping=damping)
        damping = max(3 * damping, SMALLEST_DAMPING)
    raise UnsupportedError(
        f"expected a positive semidefinite second moment; got one that cannot be factorized at a damping of {damping:g}; "
        "collect it again from activations"
    )


def _inverse_factor(reversed_moment: torch.Tensor) -> torch.Tensor | None:
    """U for H in reversed order, float32, or None where H is not positive definite in this precision."""
    with full_precision(), one_torch_thread():
        lower, info = torch.linalg.cholesky_ex(reversed_moment)
        if int(info) != 0:
            return None
        root = lower.flip(0, 1)  # upper R with H = R R^T
        identity = torch.eye(root.shape[0], dtype=root.dtype, device=root.device)
        upper = torch.linalg.solve_triangular(root, identity, upper=True).to(torch.float32)
    return upper if bool(torch.isfinite(upper).all()) and bool((upper.diagonal() > 0).all()) else None


def feed_errors_forward(
    weight: torch.Tensor, start: QuantizedLinear, factor: Factor, *, workers: int = 1
) -> QuantizedLinear:
    """New codes for given maps and scales by error feedback, row by row no worse than the codes given.

    For each column i in the order of the factor: take the nearest code, e = (w_i - value * scale) / U_ii, and subtract
    e U_ij from every later column j. Bit-identical for any number of workers. A row whose loss under the damped moment
    would rise keeps its codes.

    Args:
        weight: float32 [rows, columns]; not modified.
        start: maps, scales and the codes to beat.
        factor: of the second moment of the inputs.
        workers: CPU threads; ignored on other devices.

    Returns:
        The same maps and scales with new codes.
    """
    check_problem(weight, start)
    if factor.order.shape[0] != weight.shape[1]:
        raise UsageError(
            f"expected a factor of {weight.shape[1]} columns; got {factor.order.shape[0]}; use the moment of this input"
        )
    codes = torch.empty_like(start.codes)
    sweep = _sweep if weight.device.type == "cpu" or start.qmap.shape[0] > 1 else _sweep_in_blocks

    def work(first: int, stop: int) -> None:
        before = select_rows(start, first, stop)
        after = QuantizedLinear(
            codes=sweep(weight[first:stop], before, factor),
            qmap=before.qmap,
            scales=before.scales,
            group_size=before.group_size,
        )
        old = row_losses(weight[first:stop], before, factor.moment)
        new = row_losses(weight[first:stop], after, factor.moment)
        codes[first:stop] = torch.where((new < old).unsqueeze(1), after.codes, before.codes)

    threads = workers if weight.device.type == "cpu" else 1
    with full_precision():
        run_chunks(work, row_bounds(0, weight.shape[0], device=weight.device), workers=threads)
    return QuantizedLinear(codes=codes, qmap=start.qmap, scales=start.scales, group_size=start.group_size)


def _sweep(weight: torch.Tensor, start: QuantizedLinear, factor: Factor) -> torch.Tensor:
    """Codes of n rows, uint8 [n, columns]."""
    rows, columns = weight.shape
    upper = factor.upper
    remaining = weight.t()[factor.order]  # [columns, rows], in the order of the sweep
    groups: list[int] = (factor.order // start.group_size).tolist()
    pivots: list[float] = upper.diagonal().tolist()
    scales = start.scales.t().to(torch.float32).contiguous()  # [groups, rows]
    inverse = reciprocal(scales)
    picker = Picker(map_values(start.qmap), rows=rows)
    counts = torch.empty(columns, rows, dtype=torch.uint8, device=weight.device)
    for first in range(0, columns, BLOCK):
        stop = min(first + BLOCK, columns)
        mutual = upper[first:stop, first:stop].t().contiguous()  # row j: what earlier columns of the block do to j
        errors = torch.empty(stop - first, rows, dtype=torch.float32, device=weight.device)
        picked = torch.empty_like(errors)
        for j, column in enumerate(range(first, stop)):
            w = remaining[column]
            if j:
                w = torch.addmv(w, errors[:j].t(), mutual[j, :j], alpha=-1.0)
            count, value = picker.pick(w * inverse[groups[column]])
            picked[j] = count
            torch.sub(w, value.mul_(scales[groups[column]]), out=errors[j]).mul_(1.0 / pivots[column])
        counts[first:stop] = picked.to(torch.uint8)
        remaining[stop:].addmm_(upper[first:stop, stop:].t(), errors, alpha=-1.0)
    codes = torch.empty_like(counts)
    codes[factor.order] = counts - 1
    return codes.t().contiguous()


def _sweep_in_blocks(weight: torch.Tensor, start: QuantizedLinear, factor: Factor) -> torch.Tensor:
    """`_sweep` for devices, where each operation costs a launch; one map for all rows."""
    rows, columns = weight.shape
    upper, order = factor.upper, factor.order
    remaining = weight.t()[order]  # [columns, rows], in the order of the sweep
    groups = order // start.group_size
    scales = start.scales.t().to(torch.float32).contiguous()  # [groups, rows]
    inverse = reciprocal(scales)
    table = map_values(start.qmap)
    codes = torch.empty(columns, rows, dtype=torch.uint8, device=weight.device)
    steps: FeedSteps | None = None
    for first in range(0, columns, BLOCK):
        stop = min(first + BLOCK, columns)
        if steps is None or steps.width != stop - first:
            steps = FeedSteps(table, width=stop - first, rows=rows)
        here = groups[first:stop]
        errors = steps.run(remaining[first:stop], scales[here], inverse[here], upper[first:stop, first:stop])
        codes[order[first:stop]] = steps.codes.to(torch.uint8)
        remaining[stop:].addmm_(upper[first:stop, stop:].t(), errors, alpha=-1.0)
    return codes.t().contiguous()
