"""SiLU and product, and activations in E4M3, for the 8-bit arms of a gated MLP: launches of kernels/gateup_between.cu."""

from __future__ import annotations

import torch

from w3pack.jit import KernelText, load
from w3pack.ops import device as devices
from w3pack.ops.gateup_params import pack_between

GROUP = 128
#: cuBLASLt takes multiples of so many rows of activations.
ROWS = 4
_WARPS = 4


def between_text(dtype: torch.dtype, *, paired: bool, quantized: bool) -> KernelText:
    """The kernel for inputs of `dtype`, float16 or bfloat16."""
    return KernelText(
        file="gateup_between.cu",
        entry="gateup_between",
        defines=(
            ("GB_BF16", int(dtype == torch.bfloat16)),
            ("GB_PAIRED", int(paired)),
            ("GB_QUANTIZED", int(quantized)),
        ),
    )


def quantize(first: torch.Tensor, second: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """x, or SiLU(gate) * up, in E4M3 with a scale for each token and 128 columns.

    Args:
        first: x or gate, float16 or bfloat16 [tokens, columns], unit column stride.
        second: up, or None.

    Returns:
        E4M3 [padded tokens, columns] and float32 scales [padded tokens, groups] with strides (1, padded tokens), where tokens
        are padded to a multiple of 4 with rows that hold anything.
    """
    tokens, columns = first.shape
    padded, groups = -(-tokens // ROWS) * ROWS, -(-columns // GROUP)
    values = torch.empty(padded, columns, dtype=torch.float8_e4m3fn, device=first.device)
    scales = torch.empty(groups, padded, dtype=torch.float32, device=first.device)
    _launch(first, second, values, scales)
    return values, scales.t()


def silu_product(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SiLU(gate) * up, both [tokens, columns] with unit column stride, computed in float32 and rounded once."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _launch(gate, up, out, None)
    return out


def _launch(first: torch.Tensor, second: torch.Tensor | None, out: torch.Tensor, scales: torch.Tensor | None) -> None:
    index = first.get_device()
    (tokens, columns), groups = first.shape, -(-first.shape[1] // GROUP)
    kernel = load(between_text(first.dtype, paired=second is not None, quantized=scales is not None), index)
    kernel.launch(
        stream=devices.current_stream(index),
        grid=-(-tokens * groups // _WARPS),
        block=32 * _WARPS,
        shared_bytes=0,
        params=pack_between(
            first=first.data_ptr(),
            second=0 if second is None else second.data_ptr(),
            out=out.data_ptr(),
            scales=0 if scales is None else scales.data_ptr(),
            first_stride=first.stride(0),
            second_stride=0 if second is None else second.stride(0),
            tokens=tokens,
            columns=columns,
            groups=groups,
            padded_tokens=0 if scales is None else scales.shape[1],
        ),
        programmatic=devices.limits(index).bulk,
    )
