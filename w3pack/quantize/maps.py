"""The eight-entry maps: named ones, and rounding a map to what a file can store.

A map is eight numbers in ascending order whose largest magnitude is 1. An `int8` map stores q = round(127 * entry) and
means q / 127; a `float16` map stores the entries themselves (format section 1).
"""

from __future__ import annotations

import math

import torch

from w3pack.errors import UsageError

ENTRIES = 8
INT8_UNIT = 127

# NF3: the quantile construction of NF4 (QLoRA, arXiv 2305.14314, appendix E) at three bits. Four quantiles of the
# normal distribution on the negative side and five on the positive side share the exact zero; the ends are -1 and 1.
_NF3 = (
    -1.0,
    -0.5350227355957031,
    -0.2469314038753510,
    0.0,
    0.1833375245332718,
    0.3819939494132996,
    0.6229856610298157,
    1.0,
)

# Lloyd-Max levels of the unit normal distribution for eight levels (Max 1960; HIGGS p = 1, arXiv 2411.17525).
_GAUSSIAN_SIGMA = (0.2451, 0.7560, 1.3439, 2.1519)


def _gaussian() -> tuple[float, ...]:
    positive = tuple(level / _GAUSSIAN_SIGMA[-1] for level in _GAUSSIAN_SIGMA)
    return tuple(-level for level in reversed(positive)) + positive


# The mean of the maps that `quantize_data_free` learns on small language models; the start of every fit.
_LEARNED = (-0.78, -0.5, -0.23, 0.0, 0.22, 0.46, 0.71, 1.0)

_NAMED: dict[str, tuple[float, ...]] = {
    "nf3": _NF3,
    "gaussian": _gaussian(),
    "learned": _LEARNED,
    "uniform": tuple((code - 4) / 4 for code in range(ENTRIES)),
    "uniform-symmetric": tuple((2 * code - 7) / 7 for code in range(ENTRIES)),
}


def map_names() -> tuple[str, ...]:
    """The names that `named_map` knows, sorted."""
    return tuple(sorted(_NAMED))


def named_map(name: str) -> torch.Tensor:
    """A well-known map by name.

    Args:
        name: "nf3" (normal quantiles with an exact zero, after NF4), "gaussian" (Lloyd-Max levels of the normal
            distribution, no zero), "uniform" (-4..3 over 4, the grid of GGUF Q3_K, exact zero), "uniform-symmetric"
            (odd multiples of 1/7, no zero) or "learned" (typical result of the data-free fit).

    Returns:
        float32 [8], ascending, largest magnitude 1.
    """
    if name not in _NAMED:
        raise UsageError(
            f"expected the name of a map, one of {', '.join(map_names())}; got {name!r}; pick one of these"
        )
    return torch.tensor(_NAMED[name], dtype=torch.float32)


def map_values(qmap: torch.Tensor) -> torch.Tensor:
    """The real numbers that a stored map stands for.

    Args:
        qmap: int8 or float16 [maps, 8].

    Returns:
        float32 [maps, 8]: q / 127 for int8, q for float16.
    """
    values = qmap.to(torch.float32)
    return values / INT8_UNIT if qmap.dtype == torch.int8 else values


def round_map(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A map as it is stored: rounded to nearest, never re-scaled.

    Args:
        values: floating point [maps, 8] with magnitudes of at most 1.
        dtype: torch.int8 or torch.float16.

    Returns:
        `dtype` [maps, 8].
    """
    if dtype == torch.int8:
        return torch.round(values * INT8_UNIT).clamp_(-INT8_UNIT, INT8_UNIT).to(torch.int8)
    return values.to(torch.float16)


def check_fixed_map(qmap: torch.Tensor, *, rows: int) -> torch.Tensor:
    """A caller's map in canonical form, or an error that says what is wrong with it.

    Args:
        qmap: [8] or [maps, 8] with maps 1 or `rows`; int8 (meaning q / 127) or any floating dtype; ascending in each
            row; magnitudes of at most 1.
        rows: number of rows of the weight.

    Returns:
        float32 [maps, 8] of real numbers.
    """
    shape = tuple(qmap.shape)
    table = qmap.reshape(1, -1) if qmap.dim() == 1 else qmap
    if table.dim() != 2 or table.shape[1] != ENTRIES or table.shape[0] not in (1, rows):
        raise UsageError(
            f"expected a map of shape [8], [1, 8] or [{rows}, 8]; got {list(shape)}; give one map or one per row"
        )
    if not (table.dtype == torch.int8 or table.dtype.is_floating_point):
        raise UsageError(f"expected a map of dtype int8 or a floating dtype; got {table.dtype}; convert it first")
    values = map_values(table)
    if not bool(torch.isfinite(values).all()):
        raise UsageError("expected finite map entries; got NaN or infinity; check where the map comes from")
    if not bool((values[:, 1:] >= values[:, :-1]).all()):
        raise UsageError(
            "expected map entries in ascending order; got another order; sort the map and permute its codes"
        )
    largest = float(values.abs().max())
    if not math.isfinite(largest) or largest > 1.0:
        raise UsageError(
            f"expected map entries between -1 and 1; got {largest:g}; divide the map and multiply the scales"
        )
    return values
