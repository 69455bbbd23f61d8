"""Every FP8 kernel that is to be built and looked at for an architecture, though no such device is here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import get_args

import torch

from w3pack.jit import KernelText
from w3pack.ops.gateup_between import between_text
from w3pack.ops.gateup_config import GateUpDesc, plan_of
from w3pack.ops.w3_config import DeviceLimits, XDtype

_X_DTYPES: tuple[XDtype, ...] = get_args(XDtype)
#: Rows x columns of matrices that get different row blocks, from small to large; all again with a partial scale block.
_SHAPES = tuple(
    (rows, columns + partial)
    for partial in (0, 16)
    for rows, columns in ((768, 2048), (2048, 6144), (6144, 2048), (28672, 8192))
)
_BETWEEN = ((False, True), (True, False), (True, True))


def gateup_texts(device: DeviceLimits, *, fp8: bool) -> Iterator[KernelText]:
    """Kernels that FP8 calls on a device can need; `fp8` says whether it converts to and from E4M3 (sm_89 and later)."""
    if not fp8:
        return
    for dtype, (paired, quantized) in itertools.product((torch.float16, torch.bfloat16), _BETWEEN):
        yield between_text(dtype, paired=paired, quantized=quantized)
    everything = itertools.product(_SHAPES, (8, 16, 32), (True, False), _X_DTYPES)
    for (rows, columns), tokens, paired, x_dtype in everything if device.bulk else ():
        yield plan_of(GateUpDesc(tokens, rows, columns, paired, x_dtype, device)).text
