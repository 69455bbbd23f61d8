"""The ways to compute SiLU(x W_gate^T) * (x W_up^T) on CUDA, and which of them a call takes.

    kernel      one launch, 16-bit activations (kernels/gateup_decode.cu)
    fused       activations in E4M3, one cuBLASLt product over the fused tensor, SiLU and product
    separate    activations in E4M3, two cuBLASLt products, SiLU and product
    dequantize  both matrices in x's dtype, torch's matmul

`kernel` and `dequantize` keep x as it is. `fused` and `separate` round it to 8 bits, an error of about 3 percent of the output: they are
taken only where somebody asked for them. A choice holds for a shape, an x dtype and a number of tokens, rounded up to a multiple of 4, in
this process; without one a call takes the kernel where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch

from w3pack.ops import gateup_between, gateup_cublaslt, gateup_cuda, gateup_dense
from w3pack.ops.gateup_config import BLOCK
from w3pack.ops.gateup_launch import Matrix

Arm = Literal["kernel", "fused", "separate", "dequantize"]
ARMS: tuple[Arm, ...] = get_args(Arm)
#: Arms that round activations to 8 bits.
ROUNDING: frozenset[Arm] = frozenset({"fused", "separate"})
_BLOCK = (BLOCK, BLOCK)
#: (rows, columns, x dtype, device, padded tokens) -> arm.
_CHOSEN: dict[tuple[int, int, torch.dtype, int, int], Arm] = {}


def padded(tokens: int) -> int:
    """Tokens of a call as choices count them."""
    return -(-tokens // gateup_between.ROWS) * gateup_between.ROWS


def choose(rows: int, columns: int, x_dtype: torch.dtype, device_index: int, tokens: int, arm: Arm) -> None:
    """From now on calls of this kind take `arm`."""
    _CHOSEN[rows, columns, x_dtype, device_index, padded(tokens)] = arm


def chosen(rows: int, columns: int, x_dtype: torch.dtype, device_index: int, tokens: int) -> Arm:
    """What such a call takes."""
    return _CHOSEN.get((rows, columns, x_dtype, device_index, padded(tokens)), "kernel")


def forget() -> None:
    """As if nothing had been chosen."""
    _CHOSEN.clear()


def gate_up(x: torch.Tensor, gate: Matrix, up: Matrix) -> torch.Tensor:
    """The op on CUDA, for matrices that the kernel can read where they lie.

    Args:
        x: float16 or bfloat16 [..., columns], any strides.
        gate, up: E4M3 [rows, columns].

    Returns:
        [..., rows] in x's dtype.
    """
    rows, columns = gate.weight.shape
    tokens = x.numel() // columns
    arm = chosen(rows, columns, x.dtype, x.get_device(), tokens) if _CHOSEN else "kernel"
    if tokens == 0:
        return x.new_empty((*x.shape[:-1], rows))
    if arm in ROUNDING and why_not(arm, gate, up) is not None:
        arm = "kernel"
    return RUN[arm](x, gate, up)


def why_not(arm: Arm, gate: Matrix, up: Matrix) -> str | None:
    """None when an arm can take these matrices; otherwise the reason. Tokens, and whether it is exact, are not looked at."""
    if arm not in ROUNDING:
        return None
    rows, columns = gate.weight.shape
    if arm == "fused" and _fused(gate, up) is None:
        return "gate and up do not follow each other in memory"
    return gateup_cublaslt.why_not(rows, columns)


def kernel(x: torch.Tensor, gate: Matrix, up: Matrix) -> torch.Tensor:
    """The kernel; where there is none for these matrices or so many tokens, `dequantize`."""
    rows, columns = gate.weight.shape
    form = gateup_cuda.form_of(rows, columns, paired=True, x_dtype=x.dtype, device_index=x.get_device())
    y = gateup_cuda.run(form, x, gate, up)
    return dequantize(x, gate, up) if y is None else y


def dequantize(x: torch.Tensor, gate: Matrix, up: Matrix) -> torch.Tensor:
    """Both matrices in x's dtype."""
    return gateup_dense.gate_up(x, gate.weight, gate.scales, up.weight, up.scales, block=_BLOCK)


def fused_products(x: torch.Tensor, gate: Matrix, up: Matrix) -> tuple[torch.Tensor, torch.Tensor]:
    """x W_gate^T and x W_up^T [padded tokens, rows] from one product, views on its output."""
    rows = gate.weight.shape[0]
    whole = _fused(gate, up)
    assert whole is not None
    values, scales = gateup_between.quantize(x)
    both = torch.empty(values.shape[0], 2 * rows, dtype=x.dtype, device=x.device)
    gateup_cublaslt.product(values, scales, whole.weight, gateup_cublaslt.block_scales(whole.scales), both)
    return both[:, :rows], both[:, rows:]


def separate_products(x: torch.Tensor, gate: Matrix, up: Matrix) -> tuple[torch.Tensor, torch.Tensor]:
    """The same from two products."""
    values, scales = gateup_between.quantize(x)
    outputs = []
    for matrix in (gate, up):
        out = torch.empty(values.shape[0], matrix.weight.shape[0], dtype=x.dtype, device=x.device)
        gateup_cublaslt.product(values, scales, matrix.weight, gateup_cublaslt.block_scales(matrix.scales), out)
        outputs.append(out)
    return outputs[0], outputs[1]


def _with_silu(
    products: Callable[[torch.Tensor, Matrix, Matrix], tuple[torch.Tensor, torch.Tensor]],
) -> Callable[[torch.Tensor, Matrix, Matrix], torch.Tensor]:
    def run(x: torch.Tensor, gate: Matrix, up: Matrix) -> torch.Tensor:
        rows = gate.weight.shape[0]
        with torch.cuda.device(x.device):
            tokens = gateup_cuda.flat(x)
            of_gate, of_up = products(tokens, gate, up)
            y = gateup_between.silu_product(of_gate[: tokens.shape[0]], of_up[: tokens.shape[0]])
        return y.view(*x.shape[:-1], rows)

    return run


fused = _with_silu(fused_products)
separate = _with_silu(separate_products)
RUN: dict[Arm, Callable[[torch.Tensor, Matrix, Matrix], torch.Tensor]] = {
    "kernel": kernel,
    "fused": fused,
    "separate": separate,
    "dequantize": dequantize,
}


def _fused(gate: Matrix, up: Matrix) -> Matrix | None:
    """One matrix [2 * rows, columns] where both halves follow each other, weights and scales, else None."""
    parts = []
    for first, second in ((gate.weight, up.weight), (gate.scales, up.scales)):
        rows, columns = first.shape
        same = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        if not same or second.storage_offset() != first.storage_offset() + first.numel():
            return None
        parts.append(first.as_strided((2 * rows, columns), (columns, 1)))
    return Matrix(*parts)
