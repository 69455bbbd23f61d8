"""`torch.ops.w3pack.w3_linear`: x W^T + bias with W in W3 form.

One schema for every device. On CUDA with x in float16 or bfloat16 the kernels compute it (w3_cuda.py); everywhere else the
reference does: unpack once for the call, then torch's own matmul. Differentiable in x (adapters and prompts can be trained on
top of frozen codes), not in the weights.
"""

from __future__ import annotations

from typing import Any

import torch

from w3pack.errors import UnsupportedError
from w3pack.format.layout import VECTORS, Layout
from w3pack.format.linear import LinearSpec
from w3pack.ops import w3_cuda
from w3pack.reference import w3

_SCHEMA = (
    "w3_linear(Tensor x, Tensor codes, Tensor scales, Tensor qmap, Tensor? bias, "
    "int rows, int columns, int group_size) -> Tensor"
)
_BACKWARD_SCHEMA = (
    "w3_linear_backward(Tensor gradient, Tensor codes, Tensor scales, Tensor qmap, "
    "int rows, int columns, int group_size) -> Tensor"
)
_library = torch.library.Library("w3pack", "FRAGMENT")
_FORMS: dict[tuple[object, ...], w3_cuda.Form] = {}
for _schema in (_SCHEMA, _BACKWARD_SCHEMA):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def describe(
    codes: torch.Tensor, scales: torch.Tensor, qmap: torch.Tensor, *, rows: int, columns: int, group_size: int
) -> LinearSpec:
    """The spec that the op's arguments stand for; the layout is read off the number of vectors.

    Raises:
        UnsupportedError: shapes or dtypes that do not belong together.
    """
    layouts: dict[int, Layout] = {count: layout for layout, count in VECTORS.items()}
    if codes.dim() != 5 or codes.shape[2] not in layouts or codes.dtype != torch.int32:
        raise UnsupportedError(
            f"expected int32 code words with 3 or 4 vectors a tile, got {codes.dtype} {tuple(codes.shape)}; "
            "pass them as pack_codes makes them"
        )
    if qmap.dim() != 2 or qmap.dtype not in (torch.int8, torch.float16):
        raise UnsupportedError(
            f"expected an int8 or float16 map [maps, 8], got {qmap.dtype} {tuple(qmap.shape)}; pass it as it is stored"
        )
    spec = LinearSpec(
        rows=rows,
        columns=columns,
        group_size=group_size,
        layout=layouts[codes.shape[2]],
        maps=qmap.shape[0],
        qmap_dtype="int8" if qmap.dtype == torch.int8 else "float16",
        bias=False,
    )
    for name, tensor, shape in (
        ("codes", codes, spec.codes_shape),
        ("scales", scales, spec.scales_shape),
        ("qmap", qmap, spec.qmap_shape),
    ):
        if tuple(tensor.shape) != shape:
            raise UnsupportedError(
                f"expected {name} of shape {shape} for {rows} x {columns}, got {tuple(tensor.shape)}; pass the sizes it was packed with"
            )
    if scales.dtype != torch.float16:
        raise UnsupportedError(f"expected float16 scales, got {scales.dtype}; pass them as they are stored")
    return spec


def check_input(x: torch.Tensor, columns: int) -> None:
    """UnsupportedError unless x is floating [..., columns]."""
    if x.dim() < 1 or x.shape[-1] != columns or not x.is_floating_point():
        raise UnsupportedError(
            f"expected a float x of shape [..., {columns}], got {x.dtype} {tuple(x.shape)}; reshape or cast it"
        )


def _check_bias(bias: torch.Tensor | None, rows: int) -> None:
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != rows):
        raise UnsupportedError(f"expected a bias of shape [{rows}], got {list(bias.shape)}; pass one number per row")


def _run(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    qmap: torch.Tensor,
    bias: torch.Tensor | None,
    rows: int,
    columns: int,
    group_size: int,
) -> torch.Tensor:
    check_input(x, columns)
    _check_bias(bias, rows)
    spec = describe(codes, scales, qmap, rows=rows, columns=columns, group_size=group_size)
    return w3.linear(x, codes, scales, qmap, bias, spec=spec)


def form_of(
    x_dtype: torch.dtype,
    codes: torch.Tensor,
    scales: torch.Tensor,
    qmap: torch.Tensor,
    *,
    rows: int,
    columns: int,
    group_size: int,
) -> w3_cuda.Form:
    """What all calls with these shapes and dtypes share on a CUDA device: made, and the shapes checked, the first time.

    Args:
        x_dtype: float16 or bfloat16.
        codes, scales, qmap: on one CUDA device.

    Raises:
        UnsupportedError: shapes or dtypes that do not belong together.
    """
    # one tuple of small things: this is looked up in every call
    key = (rows, columns, group_size, x_dtype, codes.get_device(), codes.shape, scales.shape, qmap.shape)
    key_dtypes = (codes.dtype, scales.dtype, qmap.dtype)
    form = _FORMS.get((key, key_dtypes))
    if form is None:
        spec = describe(codes, scales, qmap, rows=rows, columns=columns, group_size=group_size)
        form = w3_cuda.Form(spec, w3_cuda.X_DTYPES[x_dtype], codes.get_device())
        form = _FORMS.setdefault((key, key_dtypes), form)
    return form


def _run_cuda(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    qmap: torch.Tensor,
    bias: torch.Tensor | None,
    rows: int,
    columns: int,
    group_size: int,
) -> torch.Tensor:
    w3_cuda.check_devices(x, codes, scales, qmap, bias)
    if x.dtype not in w3_cuda.X_DTYPES:
        return _run(x, codes, scales, qmap, bias, rows, columns, group_size)
    check_input(x, columns)
    _check_bias(bias, rows)
    form = form_of(x.dtype, codes, scales, qmap, rows=rows, columns=columns, group_size=group_size)
    return w3_cuda.linear(form, x, codes, scales, qmap, bias)


def _fake(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    qmap: torch.Tensor,
    bias: torch.Tensor | None,
    rows: int,
    columns: int,
    group_size: int,
) -> torch.Tensor:
    check_input(x, columns)
    _check_bias(bias, rows)
    return x.new_empty((*x.shape[:-1], rows))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, codes, scales, qmap, _, *sizes = inputs
    ctx.save_for_backward(codes, scales, qmap)
    ctx.sizes = sizes


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    codes, scales, qmap = ctx.saved_tensors
    rows, columns, group_size = ctx.sizes
    # an op of its own, so that tracing a training step never looks into the decoder
    of_x = torch.ops.w3pack.w3_linear_backward(gradient, codes, scales, qmap, rows, columns, group_size)
    of_bias = gradient.reshape(-1, rows).sum(dim=0) if ctx.needs_input_grad[4] else None
    return of_x, None, None, None, of_bias, None, None, None


def _run_backward(
    gradient: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    qmap: torch.Tensor,
    rows: int,
    columns: int,
    group_size: int,
) -> torch.Tensor:
    spec = describe(codes, scales, qmap, rows=rows, columns=columns, group_size=group_size)
    return gradient @ w3.dequantize(codes, scales, qmap, spec=spec, dtype=gradient.dtype)


def _run_backward_cuda(
    gradient: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    qmap: torch.Tensor,
    rows: int,
    columns: int,
    group_size: int,
) -> torch.Tensor:
    w3_cuda.check_devices(gradient, codes, scales, qmap)
    if gradient.dtype not in w3_cuda.X_DTYPES:
        return _run_backward(gradient, codes, scales, qmap, rows, columns, group_size)
    form = form_of(gradient.dtype, codes, scales, qmap, rows=rows, columns=columns, group_size=group_size)
    return gradient @ w3_cuda.dequantize(form, codes, scales, qmap)


def _fake_backward(
    gradient: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    qmap: torch.Tensor,
    rows: int,
    columns: int,
    group_size: int,
) -> torch.Tensor:
    return gradient.new_empty((*gradient.shape[:-1], columns))


_library.impl("w3_linear", _run, "CompositeExplicitAutograd")
_library.impl("w3_linear", _run_cuda, "CUDA")
_library.impl("w3_linear_backward", _run_backward, "CompositeExplicitAutograd")
_library.impl("w3_linear_backward", _run_backward_cuda, "CUDA")
torch.library.register_fake("w3pack::w3_linear", _fake, lib=_library)
torch.library.register_fake("w3pack::w3_linear_backward", _fake_backward, lib=_library)
torch.library.register_autograd("w3pack::w3_linear", _backward, setup_context=_save_for_backward, lib=_library)


def w3_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    qmap: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    rows: int,
    columns: int,
    group_size: int,
) -> torch.Tensor:
    """Call the op.

    Args:
        x: floating [..., columns], any leading shape, also empty.
        codes: int32 [rows/64, columns/64, 3 or 4, 32, 4] (padded), dense or nibble layout.
        scales: float16 [rows/64, columns/group_size, 8, 8].
        qmap: int8 or float16 [maps, 8].
        bias: [rows] or None.
        rows, columns: logical out_features and in_features.
        group_size: columns that share a scale, a multiple of 64.

    Returns:
        [..., rows] in x's dtype.
    """
    result: torch.Tensor = torch.ops.w3pack.w3_linear(x, codes, scales, qmap, bias, rows, columns, group_size)
    return result
