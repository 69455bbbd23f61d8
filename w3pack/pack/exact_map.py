"""Any table of eight numbers -> a float16 map and scales that mean exactly the same (w3pack/format/SPEC.md, section 1).

A map is ascending, with magnitudes of at most 1. So a table is sorted and its codes are renamed; then a power of two moves
from the table to the scales, which changes no product. What float16 cannot hold exactly after that is refused.
"""

from __future__ import annotations

import torch

from w3pack.errors import CheckpointError, UnsupportedError

_CODES_AT_ONCE = 1 << 20


def sort_table(codes: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Put each table in ascending order and rename the codes to match; equal entries keep their order.

    Args:
        codes: uint8 [rows, columns], values 0..7.
        table: float32 [1 or rows, 8].

    Returns:
        (codes, table) of the same shapes with the same products.
    """
    if bool((table[:, 1:] >= table[:, :-1]).all()):
        return codes, table
    order = table.argsort(dim=1, stable=True)
    renamed = order.argsort(dim=1).to(torch.uint8)  # old code -> new code
    result = torch.empty_like(codes)
    step = max(1, _CODES_AT_ONCE // codes.shape[1])
    for first in range(0, codes.shape[0], step):
        part = slice(first, first + step)
        index = codes[part].to(torch.int64)
        result[part] = renamed[0][index] if table.shape[0] == 1 else renamed[part].gather(1, index)
    return result, table.gather(1, order)


def exact_map(
    table: torch.Tensor, scales: torch.Tensor, *, name: str, rounded: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The float16 map and scales that have the same products as `table` and `scales`.

    The largest magnitude of each map comes to lie above 1/2 and at 1 at most where the scales have room for that, and is
    lowered to 1 at most in any case.

    Args:
        table: float32 [1 or rows, 8], ascending in each row.
        scales: float32 [rows, groups].
        name: module, for messages.
        rounded: whether entries may be rounded to float16, after the power of two has been taken out.

    Returns:
        (float16 [1 or rows, 8], float16 [rows, groups]).

    Raises:
        CheckpointError: NaN or infinite entries or scales.
        UnsupportedError: float16 cannot hold them.
    """
    for what, values in (("table entries", table), ("scales", scales)):
        if not bool(torch.isfinite(values).all()):
            raise CheckpointError(
                f"expected finite {what} in {name}, got NaN or infinity; the checkpoint is damaged, download it again"
            )
    fraction, exponent = torch.frexp(table.abs().amax(dim=1, keepdim=True))  # fraction in [1/2, 1), 0 for zeros
    powers = torch.where(fraction == 0.5, exponent - 1, exponent)  # [1 or rows, 1]
    for shift in (powers, powers.clamp(min=0)):
        wanted, factors = torch.ldexp(table, -shift), torch.ldexp(scales, shift)
        qmap, half = wanted.to(torch.float16), factors.to(torch.float16)
        kept = rounded or torch.equal(qmap.float(), wanted)
        if kept and torch.equal(half.float(), factors):
            return qmap, half
    largest = float(factors.abs().max())
    what = f"scales up to {largest:g}" if largest > torch.finfo(torch.float16).max else "finer numbers"
    raise UnsupportedError(
        f"expected a table and scales of {name} that float16 holds exactly, got {what}; "
        "run `w3pack quantize` on the unquantised model"
    )
