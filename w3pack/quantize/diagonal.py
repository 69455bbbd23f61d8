"""Map and scales for errors weighted by the mean square of each input: sum over n, k of h_k (What - W)[n, k]^2.

The same alternation as the data-free fit (Lloyd 1982, Max 1960; signed group scales), with h_k = E[x_k^2] in place of a
guess. It is what llama.cpp does with an importance matrix, and SqueezeLLM (arXiv 2306.07629) with a Fisher diagonal and a
map per row. Unlike there, the map keeps an exact zero unless told otherwise: maps without one are lower in this error and
can be far worse in a model, because many small weights beside a large one turn into noise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from w3pack.errors import UnsupportedError, UsageError
from w3pack.quantize.chunks import chunk_bounds, run_chunks
from w3pack.quantize.groups import TINY, Batch, GroupMatrix
from w3pack.quantize.linear import LARGEST_SCALE, SMALLEST_SCALE, QuantizedLinear, QuantizeSettings
from w3pack.quantize.maps import check_fixed_map, map_values, named_map, round_map
from w3pack.quantize.moments import check_moment, damped, diagonal_of
from w3pack.quantize.nearest import Levels, nearest_codes, nearest_values
from w3pack.quantize.search import map_sums, search_scales, solve_map

# A few inputs can carry nearly all of the energy, so the sample is larger than the data-free one. Chosen on five Linears of
# SmolLM2-135M by the loss on text that was not calibrated on: 6 rounds leave 2 to 4 per cent more than 12 after error
# feedback; 20 rounds, a sample twice as large or multipliers of 0.7 and 0.9 besides leave the same and take longer.
SAMPLE_WEIGHTS = 131072
ROUNDS = 12
ROW_ROUNDS = 6
FIT_MULTIPLIERS = (0.8, 1.0)
FINAL_MULTIPLIERS = (0.6, 0.7, 0.8, 0.9, 1.0)
CLIPPING_MULTIPLIERS = (0.15, 0.3, 0.45)
CLIPPING_GAIN = 0.4  # part of the error that must go for a scale which clips the group's largest weights
POLISH = 2
EMPHASIS = 2.0  # groups count in the units of the weight: exactly the objective
SMALLEST_IMPORTANCE = 1e-10  # of the largest


def quantize_diagonal(
    weight: torch.Tensor,
    importance: torch.Tensor,
    settings: QuantizeSettings,
    *,
    qmap: torch.Tensor | None = None,
    exact_zero: bool = True,
    workers: int = 1,
) -> QuantizedLinear:
    """Quantize a weight matrix given one number per input.

    Dead inputs (importance 0) count like the median of the live ones. Bit-identical for any number of workers.

    Args:
        weight: float32 [rows, columns], finite; not modified.
        importance: floating [columns], E[x_k^2] up to a common factor.
        settings: group size, kind of map, seed of the sample.
        qmap: a map to keep, [8] or [maps, 8] (see `check_fixed_map`); then only scales and codes are chosen.
        exact_zero: keep one entry of a learned map at exactly 0.
        workers: CPU threads; ignored on other devices.

    Returns:
        Codes, map and scales on the weight's device.
    """
    if weight.dim() != 2 or weight.numel() == 0 or weight.dtype != torch.float32:
        raise UsageError(
            f"expected a float32 weight matrix [rows, columns]; got {weight.dtype} {list(weight.shape)}; convert it"
        )
    fit = _Fit(weight, importance, settings, exact_zero=exact_zero, workers=workers)
    if qmap is not None:
        table = check_fixed_map(qmap.detach().to(weight.device), rows=weight.shape[0])
    elif settings.qmap_per == "tensor":
        table = fit.shared_map(settings.seed)
    else:
        table = fit.row_maps()
    return fit.scales_and_codes(round_map(table, settings.qmap_dtype))


class _Fit:
    """One weight with the importance of its columns."""

    def __init__(
        self,
        weight: torch.Tensor,
        importance: torch.Tensor,
        settings: QuantizeSettings,
        *,
        exact_zero: bool,
        workers: int,
    ) -> None:
        columns = weight.shape[1]
        h = damped(diagonal_of(check_moment(importance.to(weight.device), columns=columns)), 0.0)
        h = (h / h.max()).clamp_min(SMALLEST_IMPORTANCE)
        self.matrix = GroupMatrix.of(weight.detach(), group_size=settings.group_size)
        padding = self.matrix.groups_per_row * settings.group_size - columns
        # [groups_per_row, group_size]; padding counts nothing
        self.importance = torch.nn.functional.pad(h, (0, padding)).view(self.matrix.groups_per_row, -1)
        self.columns = columns
        self.exact_zero = exact_zero
        self.workers = workers if weight.device.type == "cpu" else 1
        self.bounds = chunk_bounds(
            self.matrix.source.shape[0], group_size=settings.group_size, device=self.matrix.source.device
        )

    def batch(self, indices: torch.Tensor, groups: torch.Tensor) -> Batch:
        peak = groups.abs().amax(dim=1)
        unit = groups / peak.clamp_min(TINY).unsqueeze(1)
        importance = self.importance[indices % self.matrix.groups_per_row]
        return Batch(unit=unit, peak=peak, importance=importance, weighted=importance * unit)

    def chunk(self, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor, Batch]:
        """Indices, groups and batch of groups first..stop-1."""
        indices = torch.arange(first, stop, device=self.matrix.source.device)
        groups = self.matrix.read(first, stop)
        return indices, groups, self.batch(indices, groups)

    def start(self) -> torch.Tensor:
        name = "learned" if self.exact_zero else "gaussian"
        return named_map(name).to(self.matrix.source.device)

    def solve(self, numerator: torch.Tensor, denominator: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        if self.exact_zero:
            return solve_map(numerator, denominator, old)
        entries = torch.where(denominator > 0, numerator / denominator.clamp_min(1e-300), old.to(torch.float64))
        entries = entries.sort(dim=1).values
        largest = entries.abs().amax(dim=1, keepdim=True)
        return torch.where(largest > TINY, entries / largest.clamp_min(TINY), old.to(torch.float64)).to(torch.float32)

    def shared_map(self, seed: int) -> torch.Tensor:
        """One map from a sample with one random group out of each of equal stretches; float32 [1, 8]."""
        source = self.matrix.source
        total = source.shape[0]
        count = min(total, max(1, SAMPLE_WEIGHTS // self.matrix.group_size))
        generator = torch.Generator().manual_seed(seed)
        jitter = torch.rand(count, generator=generator, dtype=torch.float64)
        places = (torch.arange(count, dtype=torch.float64) + jitter) * (total / count)
        chosen = places.to(torch.int64).clamp_(max=total - 1).to(source.device)
        bounds = chunk_bounds(count, group_size=self.matrix.group_size, device=source.device)

        def prepare(first: int, stop: int) -> Batch:
            indices = chosen[first:stop]
            return self.batch(indices, source[indices].to(torch.float32))

        batches = dict(zip(bounds, run_chunks(prepare, bounds, workers=self.workers), strict=True))
        table = self.start().unsqueeze(0)
        for _ in range(ROUNDS):
            pairs = signed_candidates(table, FIT_MULTIPLIERS)

            def sums(
                first: int, stop: int, table: torch.Tensor = table, pairs: Sequence[tuple[float, Levels]] = pairs
            ) -> tuple[torch.Tensor, torch.Tensor]:
                batch = batches[first, stop]
                return map_sums(batch, search_scales(batch, pairs, table, polish=0), table, emphasis=EMPHASIS)

            parts = run_chunks(sums, bounds, workers=self.workers)
            numerator = torch.cat([part[0] for part in parts]).sum(dim=0, keepdim=True)
            denominator = torch.cat([part[1] for part in parts]).sum(dim=0, keepdim=True)
            table = self.solve(numerator, denominator, table)
        return table

    def row_maps(self) -> torch.Tensor:
        """One map per row from all of its groups; float32 [rows, 8]."""
        per_row = self.matrix.groups_per_row
        tables = self.start().repeat(self.matrix.rows, 1)
        for _ in range(ROW_ROUNDS):

            def sums(first: int, stop: int, tables: torch.Tensor = tables) -> tuple[torch.Tensor, torch.Tensor]:
                indices, _, batch = self.chunk(first, stop)
                table = tables[indices // per_row]
                scale = search_scales(batch, signed_candidates(table, FIT_MULTIPLIERS), table, polish=0)
                return map_sums(batch, scale, table, emphasis=EMPHASIS)

            parts = run_chunks(sums, self.bounds, workers=self.workers)
            numerator = torch.cat([part[0] for part in parts]).view(self.matrix.rows, per_row, -1).sum(dim=1)
            denominator = torch.cat([part[1] for part in parts]).view(self.matrix.rows, per_row, -1).sum(dim=1)
            tables = self.solve(numerator, denominator, tables)
        return tables

    def scales_and_codes(self, stored: torch.Tensor) -> QuantizedLinear:
        """Search every scale for the stored map, round it, then take the codes nearest under what is stored."""
        source = self.matrix.source
        table = map_values(stored)
        shared = _final_candidates(table) if table.shape[0] == 1 else None
        codes = torch.empty(source.shape, dtype=torch.uint8, device=source.device)
        scales = torch.empty(source.shape[0], dtype=torch.float16, device=source.device)

        def work(first: int, stop: int) -> float:
            indices, groups, batch = self.chunk(first, stop)
            local = table if shared else table[indices // self.matrix.groups_per_row]
            pairs, clipping = shared or _final_candidates(local)
            unit_scale = search_scales(batch, pairs, local, polish=POLISH)
            clipped = search_scales(batch, clipping, local, polish=POLISH)
            levels = Levels.of(local)
            worth = _error(batch, clipped, levels) < CLIPPING_GAIN * _error(batch, unit_scale, levels)
            scale = batch.peak * torch.where(worth, clipped, unit_scale)
            half = stored_scales(torch.where(batch.peak == 0, 0.0, scale))
            divisor = torch.where(half == 0, 1.0, half.to(torch.float32))
            codes[first:stop] = nearest_codes(groups / divisor.unsqueeze(1), Levels.of(local)).to(torch.uint8)
            scales[first:stop] = half
            return float(scale.abs().max())

        check_scale_range(max(run_chunks(work, self.bounds, workers=self.workers)))
        rows = self.matrix.rows
        return QuantizedLinear(
            codes=codes.view(rows, -1)[:, : self.columns].contiguous(),
            qmap=stored,
            scales=scales.view(rows, -1),
            group_size=self.matrix.group_size,
        )


def _final_candidates(table: torch.Tensor) -> tuple[list[tuple[float, Levels]], list[tuple[float, Levels]]]:
    """Ordinary candidates, and the small ones that need a reason.

    A weight of a massive channel that is small within its group is coded 0 by every ordinary scale, and its error is all
    that counts: one down_proj of SmolLM2 loses seventeen times less with scales that fit it. Where no channel stands out,
    a small scale gains a little here and loses more later, because error feedback needs the room.
    """
    return signed_candidates(table, FINAL_MULTIPLIERS), signed_candidates(table, CLIPPING_MULTIPLIERS)


def _error(batch: Batch, scale: torch.Tensor, levels: Levels) -> torch.Tensor:
    """Weighted squared error of nearest codes; float32 [groups], in units of the groups' peaks."""
    divided = batch.unit / scale.unsqueeze(1)
    error = nearest_values(divided, levels).sub_(divided).mul_(scale.unsqueeze(1))
    return error.square_().mul_(batch.importance).sum(dim=1)


def signed_candidates(table: torch.Tensor, multipliers: tuple[float, ...]) -> list[tuple[float, Levels]]:
    """Every multiplier with both signs, and the map's levels for it."""
    signed = [sign * multiplier for multiplier in multipliers for sign in (1.0, -1.0)]
    return [(multiplier, Levels.of(table, multiplier=multiplier)) for multiplier in signed]


def stored_scales(scales: torch.Tensor) -> torch.Tensor:
    """Scales as the file holds them: float16, zero only where they were zero, else at least 2^-24 in magnitude."""
    half = scales.to(torch.float16)
    floor = torch.copysign(torch.full_like(half, SMALLEST_SCALE), scales)
    return torch.where((half == 0) & (scales != 0), floor, half)


def check_scale_range(largest: float) -> None:
    """UnsupportedError where the largest magnitude of a scale is beyond float16."""
    if not largest <= LARGEST_SCALE:
        raise UnsupportedError(
            f"expected group scales of at most {LARGEST_SCALE:g}, the largest float16; got {largest:g}; "
            "divide the weight by a power of two and fold it into the next operation"
        )
