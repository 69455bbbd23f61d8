"""`torch.ops.w3pack.gate_up_linear`: SiLU(x W_gate^T) * (x W_up^T), and `torch.ops.w3pack.fp8_linear`: x W^T + bias, W in
block-scaled E4M3.

One schema serves a fused tensor, whose halves are views, and two tensors. On CUDA with x in float16 or bfloat16 the arm that was chosen
for the shape computes gate and up (gateup_arms.py; the kernel unless `prepare` chose another), and the kernel a single matrix;
everywhere else the matrix is dequantised and torch multiplies. Differentiable in x, not in the weights.
"""

from __future__ import annotations

from typing import Any

import torch

from w3pack.errors import UnsupportedError
from w3pack.ops import gateup_arms, gateup_cuda, gateup_dense
from w3pack.ops.gateup_launch import Matrix
from w3pack.pack.gateup import split_rows

_BLOCKS = "int block_rows, int block_columns"
_PAIR = f"Tensor gate, Tensor gate_scales, Tensor up, Tensor up_scales, {_BLOCKS}"
_SCHEMAS = (
    f"gate_up_linear(Tensor x, {_PAIR}) -> Tensor",
    f"gate_up_linear_backward(Tensor gradient, Tensor x, {_PAIR}) -> Tensor",
    f"fp8_linear(Tensor x, Tensor weight, Tensor scales, Tensor? bias, {_BLOCKS}) -> Tensor",
    f"fp8_linear_backward(Tensor gradient, Tensor weight, Tensor scales, {_BLOCKS}) -> Tensor",
)
_library = torch.library.Library("w3pack", "FRAGMENT")
for _schema in _SCHEMAS:
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def _check(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> None:
    if weight.dim() != 2 or weight.dtype != torch.float8_e4m3fn:
        raise UnsupportedError(
            f"expected a float8_e4m3fn matrix, got {weight.dtype} {list(weight.shape)}; pass it as the checkpoint stores it"
        )
    rows, columns = weight.shape
    if x.dim() < 1 or x.shape[-1] != columns or not x.is_floating_point():
        raise UnsupportedError(
            f"expected a float x of shape [..., {columns}], got {x.dtype} {list(x.shape)}; reshape or cast it"
        )
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    if tuple(scales.shape) != grid:
        raise UnsupportedError(
            f"expected a scale grid of {grid} for {rows} x {columns} in blocks of {block}, got {tuple(scales.shape)}; "
            "take the block size from the checkpoint's config"
        )


def _check_pair(
    x: torch.Tensor,
    gate: torch.Tensor,
    gate_scales: torch.Tensor,
    up: torch.Tensor,
    up_scales: torch.Tensor,
    block: tuple[int, int],
) -> None:
    _check(x, gate, gate_scales, block)
    _check(x, up, up_scales, block)
    if gate.shape != up.shape:
        raise UnsupportedError(
            f"expected gate and up of one shape, got {list(gate.shape)} and {list(up.shape)}; pass the two halves of one MLP"
        )


def _check_bias(bias: torch.Tensor | None, rows: int) -> None:
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != rows):
        raise UnsupportedError(f"expected a bias of shape [{rows}], got {list(bias.shape)}; pass one number per row")


def _check_devices(x: torch.Tensor, *others: torch.Tensor | None) -> None:
    for other in others:
        if other is not None and other.get_device() != x.get_device():
            raise UnsupportedError(
                f"expected weights and scales on the device of x, got {other.device} beside {x.device}; move the module or x"
            )


def _gate_up(
    x: torch.Tensor,
    gate: torch.Tensor,
    gate_scales: torch.Tensor,
    up: torch.Tensor,
    up_scales: torch.Tensor,
    block_rows: int,
    block_columns: int,
) -> torch.Tensor:
    block = (block_rows, block_columns)
    _check_pair(x, gate, gate_scales, up, up_scales, block)
    return gateup_dense.gate_up(x, gate, gate_scales, up, up_scales, block=block)


def _gate_up_cuda(
    x: torch.Tensor,
    gate: torch.Tensor,
    gate_scales: torch.Tensor,
    up: torch.Tensor,
    up_scales: torch.Tensor,
    block_rows: int,
    block_columns: int,
) -> torch.Tensor:
    _check_devices(x, gate, gate_scales, up, up_scales)
    block = (block_rows, block_columns)
    _check_pair(x, gate, gate_scales, up, up_scales, block)
    gate_scales, up_scales = gateup_cuda.widened(gate_scales), gateup_cuda.widened(up_scales)
    takes = gateup_cuda.takes(gate, gate_scales, block) and gateup_cuda.takes(up, up_scales, block)
    if x.dtype not in gateup_cuda.X_DTYPES or not takes:
        return gateup_dense.gate_up(x, gate, gate_scales, up, up_scales, block=block)
    return gateup_arms.gate_up(x, Matrix(gate, gate_scales), Matrix(up, up_scales))


def _gate_up_fake(
    x: torch.Tensor,
    gate: torch.Tensor,
    gate_scales: torch.Tensor,
    up: torch.Tensor,
    up_scales: torch.Tensor,
    block_rows: int,
    block_columns: int,
) -> torch.Tensor:
    _check_pair(x, gate, gate_scales, up, up_scales, (block_rows, block_columns))
    return x.new_empty((*x.shape[:-1], gate.shape[0]))


def _gate_up_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor,
    gate_scales: torch.Tensor,
    up: torch.Tensor,
    up_scales: torch.Tensor,
    block_rows: int,
    block_columns: int,
) -> torch.Tensor:
    return gateup_dense.gate_up_backward(
        gradient, x, gate, gate_scales, up, up_scales, block=(block_rows, block_columns)
    )


def _gate_up_backward_fake(gradient: torch.Tensor, x: torch.Tensor, *others: Any) -> torch.Tensor:
    return gradient.new_empty(x.shape)


def _linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    block_rows: int,
    block_columns: int,
) -> torch.Tensor:
    block = (block_rows, block_columns)
    _check(x, weight, scales, block)
    _check_bias(bias, weight.shape[0])
    return gateup_dense.linear(x, weight, scales, bias, block=block)


def _linear_cuda(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    block_rows: int,
    block_columns: int,
) -> torch.Tensor:
    _check_devices(x, weight, scales, bias)
    block = (block_rows, block_columns)
    _check(x, weight, scales, block)
    _check_bias(bias, weight.shape[0])
    scales = gateup_cuda.widened(scales)
    if x.dtype in gateup_cuda.X_DTYPES and gateup_cuda.takes(weight, scales, block):
        rows, columns = weight.shape
        form = gateup_cuda.form_of(rows, columns, paired=False, x_dtype=x.dtype, device_index=x.get_device())
        matrix = Matrix(weight, scales)
        y = gateup_cuda.run(form, x, matrix, matrix)
        if y is not None:
            return y if bias is None else y.add_(bias.to(y.dtype))
    return gateup_dense.linear(x, weight, scales, bias, block=block)


def _linear_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    block_rows: int,
    block_columns: int,
) -> torch.Tensor:
    _check(x, weight, scales, (block_rows, block_columns))
    _check_bias(bias, weight.shape[0])
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _linear_backward(
    gradient: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, block_rows: int, block_columns: int
) -> torch.Tensor:
    return gateup_dense.linear_backward(gradient, weight, scales, block=(block_rows, block_columns))


def _linear_backward_fake(gradient: torch.Tensor, weight: torch.Tensor, *others: Any) -> torch.Tensor:
    return gradient.new_empty((*gradient.shape[:-1], weight.shape[1]))


def _save_pair(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.block = inputs[5:]


def _pair_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    # an op of its own, so that tracing a training step never looks into the dequantiser
    of_x = torch.ops.w3pack.gate_up_linear_backward(gradient, *ctx.saved_tensors, *ctx.block)
    return of_x, None, None, None, None, None, None


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[1:3])
    ctx.block = inputs[4:]


def _linear_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    of_x = torch.ops.w3pack.fp8_linear_backward(gradient, *ctx.saved_tensors, *ctx.block)
    of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(dim=0) if ctx.needs_input_grad[3] else None
    return of_x, None, None, of_bias, None, None


_library.impl("gate_up_linear", _gate_up, "CompositeExplicitAutograd")
_library.impl("gate_up_linear", _gate_up_cuda, "CUDA")
_library.impl("gate_up_linear_backward", _gate_up_backward, "CompositeExplicitAutograd")
_library.impl("fp8_linear", _linear, "CompositeExplicitAutograd")
_library.impl("fp8_linear", _linear_cuda, "CUDA")
_library.impl("fp8_linear_backward", _linear_backward, "CompositeExplicitAutograd")
torch.library.register_fake("w3pack::gate_up_linear", _gate_up_fake, lib=_library)
torch.library.register_fake("w3pack::gate_up_linear_backward", _gate_up_backward_fake, lib=_library)
torch.library.register_fake("w3pack::fp8_linear", _linear_fake, lib=_library)
torch.library.register_fake("w3pack::fp8_linear_backward", _linear_backward_fake, lib=_library)
torch.library.register_autograd("w3pack::gate_up_linear", _pair_gradient, setup_context=_save_pair, lib=_library)
torch.library.register_autograd("w3pack::fp8_linear", _linear_gradient, setup_context=_save_linear, lib=_library)


def gate_up_linear(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, *, block: tuple[int, int]
) -> torch.Tensor:
    """Call the op for a fused tensor.

    Args:
        x: floating [..., K], any leading shape, also empty.
        weight: float8_e4m3fn [2*I, K], gate rows first.
        scales: [2*ceil(I/R), ceil(K/C)], the two grids one after the other, any dtype that checkpoints have.
        block: (R, C).

    Returns:
        [..., I] in x's dtype.
    """
    (gate, up), (gate_scales, up_scales) = split_rows(weight), split_rows(scales)
    return gate_up_linear_of(x, gate, gate_scales, up, up_scales, block=block)


def gate_up_linear_of(
    x: torch.Tensor,
    gate: torch.Tensor,
    gate_scales: torch.Tensor,
    up: torch.Tensor,
    up_scales: torch.Tensor,
    *,
    block: tuple[int, int],
) -> torch.Tensor:
    """Call the op for two matrices [I, K], wherever they lie."""
    result: torch.Tensor = torch.ops.w3pack.gate_up_linear(x, gate, gate_scales, up, up_scales, *block)
    return result


def fp8_linear(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, *, block: tuple[int, int]
) -> torch.Tensor:
    """Call the op.

    Args:
        x: floating [..., columns], any leading shape, also empty.
        weight: float8_e4m3fn [rows, columns].
        scales: [ceil(rows/R), ceil(columns/C)], any dtype that checkpoints have.
        bias: [rows] or None.
        block: (R, C).

    Returns:
        [..., rows] in x's dtype.
    """
    result: torch.Tensor = torch.ops.w3pack.fp8_linear(x, weight, scales, bias, *block)
    return result
