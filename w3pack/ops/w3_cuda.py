"""`w3_linear` on CUDA: which kernels a Linear's calls use, and the call itself.

A `Form` is what all Linears of one shape, form and x dtype share on a device; it is made at the first call and keeps a
decoder for each number of tokens. A call of up to `dense_from` tokens is decoded in portions of 64, a longer one dequantises;
for numbers of tokens at which it was measured to be faster than either, the prefill kernel takes the call.
"""

from __future__ import annotations

import logging

import torch

from w3pack.errors import UnsupportedError
from w3pack.format.linear import LinearSpec
from w3pack.jit import KernelText, ToolchainError
from w3pack.ops import device as devices
from w3pack.ops.w3_config import MAX_TOKENS, W3Desc, W3Plan, XDtype
from w3pack.ops.w3_decide import dense_from, plan_of
from w3pack.ops.w3_dense import Dequantizer, dequantize_text
from w3pack.ops.w3_launch import Decoder
from w3pack.ops.w3_prefill import mainloop_tokens
from w3pack.ops.w3_prefill_launch import Prefiller, mappable
from w3pack.ops.w3_table import table_of
from w3pack.reference import w3

_LOG = logging.getLogger(__name__)
X_DTYPES: dict[torch.dtype, XDtype] = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
_WARNED: set[str] = set()


class Form:
    """Linears of one spec with x of one dtype on one device. `available` turns False where there can be no kernels."""

    def __init__(self, spec: LinearSpec, x_dtype: XDtype, device_index: int) -> None:
        """Decide from how many tokens on calls are dense; nothing is built or loaded yet."""
        self.spec = spec
        self.x_dtype: XDtype = x_dtype
        self.device_index = device_index
        self.available = True
        self.dense_from = 0
        self.mainloop = range(0)
        self._decoders: list[Decoder | None] = [None] * (MAX_TOKENS + 1)
        self._dequantizer: Dequantizer | None = None
        self._prefiller: Prefiller | None = None
        try:
            self._limits = devices.limits(device_index)
        except UnsupportedError as error:
            self.give_up(error)
            return
        self._table = table_of(devices.device_name(device_index), self._limits.arch)
        self.dense_from = dense_from(self._desc(MAX_TOKENS), self._table)
        self.mainloop = mainloop_tokens(self._desc(MAX_TOKENS), self._table)

    def portions(self, tokens: int) -> list[int]:
        """Tokens of the decode launches that a call consists of where the prefill kernel does not take it; none when it is dense."""
        if tokens >= self.dense_from:
            return []
        whole, rest = divmod(tokens, MAX_TOKENS)
        return [MAX_TOKENS] * whole + ([rest] if rest else [])

    def plan(self, tokens: int) -> W3Plan:
        """The plan for 1..64 tokens; UnsupportedError where the form is always dense."""
        return plan_of(self._desc(tokens), self._table)

    def decoder(self, tokens: int) -> Decoder:
        """The loaded decoder for 1..64 tokens; errors as `Decoder`."""
        found = self._decoders[tokens]
        if found is None:
            found = Decoder(self.plan(tokens), maps=self.spec.maps, device_index=self.device_index)
            self._decoders[tokens] = found
        return found

    def dequantizer(self) -> Dequantizer:
        """The loaded dequantising kernel; errors as `Decoder`."""
        if self._dequantizer is None:
            self._dequantizer = Dequantizer(self.spec, self.x_dtype, self.device_index)
        return self._dequantizer

    def prefiller(self) -> Prefiller:
        """The prefill kernels; nothing is loaded before a call."""
        if self._prefiller is None:
            self._prefiller = Prefiller(self.spec, self.x_dtype, self.device_index)
        return self._prefiller

    def texts(self, tokens: int) -> set[KernelText]:
        """Every kernel that a call of so many tokens can launch; the prefill kernel does not take every x."""
        portions = self.portions(tokens)
        prefill = {self.prefiller().plan(tokens).text} if tokens in self.mainloop else set()
        if not portions:
            return {dequantize_text(self.spec, self.x_dtype), *prefill}
        plans = [self.plan(portion) for portion in set(portions)]
        return {text for plan in plans for text in (plan.decode, plan.stage) if text is not None} | prefill

    def give_up(self, error: Exception) -> None:
        """Use the reference from now on, and say so once for each reason."""
        self.available = False
        if str(error) not in _WARNED:
            _WARNED.add(str(error))
            _LOG.warning("%s; until then w3_linear unpacks its weights for every call, which is slow", error)

    def _desc(self, tokens: int) -> W3Desc:
        return W3Desc.of(self.spec, tokens=tokens, x_dtype=self.x_dtype, device=self._limits)


def check_devices(x: torch.Tensor, *others: torch.Tensor | None) -> int:
    """The device that all tensors lie on.

    Raises:
        UnsupportedError: they lie on several.
    """
    index = x.get_device()
    for other in others:
        if other is not None and other.get_device() != index:
            raise UnsupportedError(
                f"expected codes, scales, map and bias on the device of x, got {other.device} beside {x.device}; "
                "move the module or x"
            )
    return index


def linear(
    form: Form,
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    qmap: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """y = x W^T + bias for tensors that the op has checked.

    Args:
        form: of the Linear, x's dtype and device.
        x: float16 or bfloat16 [..., columns], any strides.
        codes, scales, qmap: any strides.
        bias: [rows] or None, any dtype.

    Returns:
        [..., rows] in x's dtype.

    Raises:
        UsageError: a CUDA graph is being captured and a kernel is not loaded yet; call prepare first.
        CompileError, LaunchError: a kernel does not build or run.
    """
    if not form.available:
        return w3.linear(x, codes, scales, qmap, bias, spec=form.spec)
    if torch.cuda.current_device() != form.device_index:
        with torch.cuda.device(form.device_index):
            return linear(form, x, codes, scales, qmap, bias)
    rows, columns = form.spec.rows, form.spec.columns
    y = x.new_empty((*x.shape[:-1], rows))
    x = x if x.dim() == 2 else x.reshape(-1, columns)
    if x.stride(1) != 1:
        x = x.contiguous()
    tokens = x.shape[0]
    if tokens == 0:
        return y
    codes, scales, qmap = aligned(codes), aligned(scales), aligned(qmap)
    if bias is not None and (bias.dtype != x.dtype or not bias.is_contiguous()):
        bias = bias.to(x.dtype).contiguous()
    try:
        if tokens in form.mainloop and mappable(x):
            form.prefiller().linear(x, codes, scales, qmap, bias, y.view(tokens, rows))
        else:
            without_mainloop(form, x, codes, scales, qmap, bias, y.view(tokens, rows))
    except ToolchainError as error:
        form.give_up(error)
        return w3.linear(x, codes, scales, qmap, bias, spec=form.spec).view_as(y)
    return y


def without_mainloop(
    form: Form,
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    qmap: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
) -> None:
    """Write y [tokens, rows] by decode kernels or by dequantising, with tensors as `Decoder.run` takes them, any tokens.

    The operator's way where the prefill kernel does not take a call, and what that kernel is measured against.
    """
    tokens = x.shape[0]
    if tokens >= form.dense_from:
        form.dequantizer().linear(x, codes, scales, qmap, bias, y)
    elif tokens <= MAX_TOKENS:
        form.decoder(tokens).run(x, codes, scales, qmap, bias, y)
    else:
        for first in range(0, tokens, MAX_TOKENS):
            part = x[first : first + MAX_TOKENS]
            form.decoder(part.shape[0]).run(part, codes, scales, qmap, bias, y[first : first + MAX_TOKENS])


def dequantize(form: Form, codes: torch.Tensor, scales: torch.Tensor, qmap: torch.Tensor) -> torch.Tensor:
    """The weight matrix [rows, columns] in the form's x dtype, bit for bit the reference's; errors as `linear`."""
    if form.available:
        try:
            with torch.cuda.device(form.device_index):
                return form.dequantizer().weight(aligned(codes), aligned(scales), aligned(qmap))
        except ToolchainError as error:
            form.give_up(error)
    dtype = torch.bfloat16 if form.x_dtype == "bfloat16" else torch.float16
    return w3.dequantize(codes, scales, qmap, spec=form.spec, dtype=dtype)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied only where it is not contiguous or does not begin at a multiple of 16 bytes."""
    if not tensor.is_contiguous():
        return tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor
