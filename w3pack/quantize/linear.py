"""Data-free quantization of one Linear to three bits with a learned map and signed group scales.

    W[n, k] ~ value(qmap[map_of(n), codes[n, k]]) * scales[n, k // group_size]

The fit alternates nearest codes, least-squares scales and a least-squares map (Lloyd 1982, Max 1960, with a scale per
group) on a sample of groups; then searches every group's scale for the rounded map; then rounds the scales and only
then chooses the codes, so that codes answer for what is stored. Three things make it better in a model than a
minimum-error map:

* scales of either sign: an asymmetric map points its longer side at the side of the group that needs it;
* an exact zero in the map;
* errors weighted by size (llama.cpp's data-free heuristic, with another exponent; see `make_batch`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from w3pack.errors import CheckpointError, UnsupportedError, UsageError
from w3pack.quantize.chunks import chunk_bounds, run_chunks
from w3pack.quantize.groups import Batch, GroupMatrix, make_batch
from w3pack.quantize.maps import check_fixed_map, map_values, named_map, round_map
from w3pack.quantize.nearest import Levels, nearest_codes
from w3pack.quantize.search import map_sums, search_scales, solve_map

GROUP_MULTIPLE = 64
SMALLEST_SCALE = 2.0**-24  # the smallest float16 that is not zero
LARGEST_SCALE = 65504.0

# Chosen by KL divergence of SmolLM2-135M to its source on 2 x 4,096 tokens, never by weight error; NF3 is at 1.44 nats.
# Exponent of the importance with the map fitted in the units of the weight (EMPHASIS = 2 + 2 * POWER): 0.5 gives 1.05,
# 0.75 gives 1.07, 1 gives 1.22 and 2 is worse than NF3. Groups with large weights deserve more say in the map than
# that: EMPHASIS 5 to 5.5 gives 0.95 to 1.04 for powers 0.5 to 0.75, 7 gives 1.09, 0 (all groups alike) 1.17.
# Differences of 0.05 are chance: they hang on how a few very large weights happen to round. Qwen2.5-Coder-0.5B
# decided for the larger power.
POWER = 0.75
EMPHASIS = 5.5
SAMPLE_WEIGHTS = 65536
ROUNDS = 6
ROW_ROUNDS = 3
FIT_MULTIPLIERS = (0.7, 0.8, 0.9, 1.0)
FINAL_MULTIPLIERS = (0.7, 0.8, 0.9, 1.0)
POLISH = 1


@dataclass(frozen=True)
class QuantizedLinear:
    """Codes, map and scales of one Linear.

    Attributes:
        codes: uint8 [rows, columns], values 0..7.
        qmap: int8 or float16 [maps, 8], ascending in each row; maps is 1 or rows.
        scales: float16 [rows, ceil(columns / group_size)], finite, either sign; 0 only where the whole group is zero.
        group_size: weights per scale along a row; the last group of a row may be short.
    """

    codes: torch.Tensor
    qmap: torch.Tensor
    scales: torch.Tensor
    group_size: int = 128

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        expected = (rows, -(-columns // self.group_size))
        if tuple(self.scales.shape) != expected:
            raise UsageError(
                f"expected scales of shape {list(expected)} for groups of {self.group_size}; "
                f"got {list(self.scales.shape)}; give the group size that the scales were made with"
            )

    def dequantize(self) -> torch.Tensor:
        """float32 [rows, columns]: map value times scale, both exactly as stored."""
        rows, columns = self.codes.shape
        values = map_values(self.qmap)
        if values.shape[0] == 1:
            picked = values[0][self.codes.to(torch.int64)]
        else:
            picked = torch.gather(values, 1, self.codes.to(torch.int64))
        spread = self.scales.to(torch.float32).repeat_interleave(self.group_size, dim=1)
        return picked * spread[:rows, :columns]


@dataclass(frozen=True)
class QuantizeSettings:
    """How to quantize a Linear.

    Attributes:
        group_size: weights that share a scale; a multiple of 64.
        qmap_dtype: torch.int8 (values q / 127, for int8 tensor cores) or torch.float16.
        qmap_per: "tensor" for one map, "row" for one per output row.
        seed: of the sample of groups that the shared map is fitted on.
    """

    group_size: int = 128
    qmap_dtype: torch.dtype = torch.int8
    qmap_per: str = "tensor"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.group_size < GROUP_MULTIPLE or self.group_size % GROUP_MULTIPLE:
            raise UsageError(
                f"expected a group size that is a multiple of 64; got {self.group_size}; use 64, 128 or 256"
            )
        if self.qmap_dtype not in (torch.int8, torch.float16):
            raise UsageError(f"expected a map dtype of int8 or float16; got {self.qmap_dtype}; pick one of the two")
        if self.qmap_per not in ("tensor", "row"):
            raise UsageError(f'expected one map per "tensor" or per "row"; got {self.qmap_per!r}; pick one of the two')


def quantize_data_free(
    weight: torch.Tensor, settings: QuantizeSettings, *, qmap: torch.Tensor | None = None, workers: int = 1
) -> QuantizedLinear:
    """Quantize a weight matrix without any calibration data.

    The result is bit-identical for any number of workers and of torch threads.

    Args:
        weight: [rows, columns] of any floating dtype, on the CPU or another device; not modified.
        settings: group size, kind of map, seed.
        qmap: a map to keep, [8] or [maps, 8] (see `check_fixed_map`); then only scales and codes are chosen.
        workers: CPU threads; ignored on other devices.

    Returns:
        Codes, map and scales on the weight's device.
    """
    _check(weight, workers)
    # One-byte floats lack padding and indexing in torch.
    source = weight.detach().to(torch.float32) if weight.element_size() == 1 else weight.detach()
    matrix = GroupMatrix.of(source, group_size=settings.group_size)
    threads = workers if weight.device.type == "cpu" else 1
    _refuse_non_finite(matrix, workers=threads)
    if qmap is not None:
        table = check_fixed_map(qmap.detach().to(weight.device), rows=matrix.rows)
    elif settings.qmap_per == "tensor":
        table = _fit_shared_map(matrix, settings, workers=threads)
    else:
        table = _fit_row_maps(matrix, workers=threads)
    stored = round_map(table, settings.qmap_dtype)
    return _scales_and_codes(weight, matrix, stored, workers=threads)


def _check(weight: torch.Tensor, workers: int) -> None:
    if weight.dim() != 2 or weight.numel() == 0:
        raise UsageError(f"expected a weight matrix [rows, columns]; got shape {list(weight.shape)}; reshape it first")
    if not weight.dtype.is_floating_point:
        raise UsageError(f"expected a floating-point weight; got {weight.dtype}; dequantize it first")
    if workers < 1:
        raise UsageError(f"expected at least one worker; got {workers}; use 1 or the number of cores")


def _refuse_non_finite(matrix: GroupMatrix, *, workers: int) -> None:
    def count(first: int, stop: int) -> int:
        groups = matrix.read(first, stop)
        # A product with zero is NaN for NaN and infinity alike: one cheap pass, and a second only where it fails.
        if bool(torch.isfinite((groups * 0.0).sum())):
            return 0
        return int((~torch.isfinite(groups)).sum())

    bad = sum(run_chunks(count, _bounds(matrix), workers=workers))
    if bad:
        raise CheckpointError(
            f"expected finite weights; got {bad} that are NaN or infinite; the source checkpoint is damaged or "
            "overflowed, fetch it again or convert it from a wider dtype"
        )


def _bounds(matrix: GroupMatrix) -> list[tuple[int, int]]:
    return chunk_bounds(matrix.source.shape[0], group_size=matrix.group_size, device=matrix.source.device)


def _candidates(table: torch.Tensor, multipliers: tuple[float, ...]) -> list[tuple[float, Levels]]:
    signed = [sign * multiplier for multiplier in multipliers for sign in (1.0, -1.0)]
    return [(multiplier, Levels.of(table, multiplier=multiplier)) for multiplier in signed]


def _batch(matrix: GroupMatrix, indices: torch.Tensor, groups: torch.Tensor) -> Batch:
    return make_batch(groups, last_of_row=matrix.is_last_of_row(indices), ragged=matrix.ragged, power=POWER)


def _chunk_indices(matrix: GroupMatrix, first: int, stop: int) -> torch.Tensor:
    return torch.arange(first, stop, device=matrix.source.device)


def _fit_shared_map(matrix: GroupMatrix, settings: QuantizeSettings, *, workers: int) -> torch.Tensor:
    """One map for the whole weight, from a random sample of its groups; float32 [1, 8]."""
    device = matrix.source.device
    total = matrix.source.shape[0]
    count = min(total, max(1, SAMPLE_WEIGHTS // matrix.group_size))
    # One group from each of `count` equal stretches, drawn on the CPU so that every device takes the same sample.
    generator = torch.Generator().manual_seed(settings.seed)
    stretch = (
        torch.arange(count, dtype=torch.float64) + torch.rand(count, generator=generator, dtype=torch.float64)
    ) * (total / count)
    chosen = stretch.to(torch.int64).clamp_(max=total - 1).to(device)
    bounds = chunk_bounds(count, group_size=matrix.group_size, device=device)

    def prepare(first: int, stop: int) -> Batch:
        indices = chosen[first:stop]
        return _batch(matrix, indices, matrix.source[indices].to(torch.float32))

    batches = dict(zip(bounds, run_chunks(prepare, bounds, workers=workers), strict=True))
    table = named_map("learned").to(device).unsqueeze(0)
    for _ in range(ROUNDS):
        candidates = _candidates(table, FIT_MULTIPLIERS)

        def sums(
            first: int, stop: int, table: torch.Tensor = table, candidates: list[tuple[float, Levels]] = candidates
        ) -> tuple[torch.Tensor, torch.Tensor]:
            batch = batches[first, stop]
            return map_sums(batch, search_scales(batch, candidates, table, polish=0), table, emphasis=EMPHASIS)

        parts = run_chunks(sums, bounds, workers=workers)
        numerator = torch.cat([part[0] for part in parts]).sum(dim=0, keepdim=True)
        denominator = torch.cat([part[1] for part in parts]).sum(dim=0, keepdim=True)
        table = solve_map(numerator, denominator, table)
    return table


def _fit_row_maps(matrix: GroupMatrix, *, workers: int) -> torch.Tensor:
    """One map per row, from all of its groups; float32 [rows, 8]."""
    tables = named_map("learned").to(matrix.source.device).repeat(matrix.rows, 1)
    for _ in range(ROW_ROUNDS):

        def sums(first: int, stop: int, tables: torch.Tensor = tables) -> tuple[torch.Tensor, torch.Tensor]:
            indices = _chunk_indices(matrix, first, stop)
            batch = _batch(matrix, indices, matrix.read(first, stop))
            table = tables[indices // matrix.groups_per_row]
            scale = search_scales(batch, _candidates(table, FIT_MULTIPLIERS), table, polish=0)
            return map_sums(batch, scale, table, emphasis=EMPHASIS)

        parts = run_chunks(sums, _bounds(matrix), workers=workers)
        shape = (matrix.rows, matrix.groups_per_row, -1)
        numerator = torch.cat([part[0] for part in parts]).view(shape).sum(dim=1)
        denominator = torch.cat([part[1] for part in parts]).view(shape).sum(dim=1)
        tables = solve_map(numerator, denominator, tables)
    return tables


def _scales_and_codes(
    weight: torch.Tensor, matrix: GroupMatrix, stored: torch.Tensor, *, workers: int
) -> QuantizedLinear:
    """Search every scale for the stored map, round it, then choose the codes nearest under what is stored."""
    rows, columns = weight.shape
    table = map_values(stored)
    shared = _candidates(table, FINAL_MULTIPLIERS) if table.shape[0] == 1 else None
    codes = torch.empty(matrix.source.shape, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(matrix.source.shape[0], dtype=torch.float16, device=weight.device)

    def work(first: int, stop: int) -> float:
        groups = matrix.read(first, stop)
        indices = _chunk_indices(matrix, first, stop)
        batch = _batch(matrix, indices, groups)
        local = table if shared else table[indices // matrix.groups_per_row]
        scale = batch.peak * search_scales(batch, shared or _candidates(local, FINAL_MULTIPLIERS), local, polish=POLISH)
        half = scale.to(torch.float16)
        floor = torch.copysign(torch.full_like(half, SMALLEST_SCALE), scale)
        half = torch.where(half == 0, floor, half)
        half = torch.where(batch.peak == 0, torch.zeros_like(half), half)
        # The divisor of an all-zero group does not matter as long as it is not zero.
        divisor = torch.where(batch.peak == 0, torch.ones_like(scale), half.to(torch.float32))
        codes[first:stop] = nearest_codes(groups / divisor.unsqueeze(1), Levels.of(local)).to(torch.uint8)
        scales[first:stop] = half
        return float(scale.abs().max())

    largest = max(run_chunks(work, _bounds(matrix), workers=workers))
    if largest > LARGEST_SCALE:
        raise UnsupportedError(
            f"expected group scales of at most {LARGEST_SCALE:g}, the largest float16; got {largest:g}; "
            "divide the weight by a power of two and fold it into the next operation"
        )
    return QuantizedLinear(
        codes=codes.view(rows, -1)[:, :columns].contiguous(),
        qmap=stored,
        scales=scales.view(rows, -1),
        group_size=matrix.group_size,
    )
