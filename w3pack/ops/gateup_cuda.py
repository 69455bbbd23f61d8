"""The FP8 ops on CUDA: what all calls of one shape share, and the call itself.

A `Fp8Form` is what all matrices (or pairs) of one shape and x dtype share on a device; it is made at the first call and keeps a decoder
for each number of tokens. A call of up to `DENSE_AFTER` tokens is decoded in portions of `MAX_TOKENS`, a longer one dequantises.
"""

from __future__ import annotations

import logging

import torch

from w3pack.errors import UnsupportedError
from w3pack.jit import KernelText, ToolchainError
from w3pack.ops import device as devices
from w3pack.ops.gateup_config import ALIGNMENT, BLOCK, MAX_TOKENS, GateUpDesc, GateUpPlan, plan_of, why_not
from w3pack.ops.gateup_launch import GateUpDecoder, Matrix
from w3pack.ops.w3_config import XDtype

_LOG = logging.getLogger(__name__)
X_DTYPES: dict[torch.dtype, XDtype] = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
#: A portion costs a little more than reading the weights once, dequantising about nine times that.
DENSE_AFTER = 8 * MAX_TOKENS
_WARNED: set[str] = set()
_FORMS: dict[tuple[object, ...], Fp8Form] = {}


class Fp8Form:
    """Matrices of `rows` x `columns`, or pairs of them, with x of one dtype on one device.

    `why` says why there is no kernel, "" where there is one.
    """

    def __init__(self, rows: int, columns: int, *, paired: bool, x_dtype: XDtype, device_index: int) -> None:
        """Nothing is built or loaded yet."""
        self.rows, self.columns, self.paired, self.x_dtype = rows, columns, paired, x_dtype
        self.device_index = device_index
        self._decoders: list[GateUpDecoder | None] = [None] * (MAX_TOKENS + 1)
        try:
            self._limits = devices.limits(device_index)
            self.why = why_not(self._desc(1)) or ""
        except UnsupportedError as error:
            self.why = str(error)

    def portions(self, tokens: int) -> list[int]:
        """Tokens of the launches that a call consists of; none when it dequantises."""
        if self.why or tokens > DENSE_AFTER:
            return []
        whole, rest = divmod(tokens, MAX_TOKENS)
        return [MAX_TOKENS] * whole + ([rest] if rest else [])

    def plan(self, tokens: int) -> GateUpPlan:
        """The plan for 1 to `MAX_TOKENS` tokens; UnsupportedError where there is no kernel."""
        return plan_of(self._desc(tokens))

    def decoder(self, tokens: int) -> GateUpDecoder:
        """The loaded decoder for 1 to `MAX_TOKENS` tokens; errors as `GateUpDecoder`."""
        found = self._decoders[tokens]
        if found is None:
            found = self._decoders[tokens] = GateUpDecoder(self.plan(tokens), device_index=self.device_index)
        return found

    def texts(self, tokens: int) -> set[KernelText]:
        """Every kernel that a call of so many tokens launches."""
        return {self.plan(portion).text for portion in set(self.portions(tokens))}

    def give_up(self, error: Exception) -> None:
        """Dequantise from now on, and say so once for each reason."""
        self.why = str(error)
        if self.why not in _WARNED:
            _WARNED.add(self.why)
            _LOG.warning("%s; until then FP8 weights are dequantised for every call, which is slow", error)

    def _desc(self, tokens: int) -> GateUpDesc:
        return GateUpDesc(tokens, self.rows, self.columns, self.paired, self.x_dtype, self._limits)


def form_of(rows: int, columns: int, *, paired: bool, x_dtype: torch.dtype, device_index: int) -> Fp8Form:
    """The form of these matrices, float16 or bfloat16 x: the same object each time."""
    key = (rows, columns, paired, x_dtype, device_index)
    form = _FORMS.get(key)
    if form is None:
        made = Fp8Form(rows, columns, paired=paired, x_dtype=X_DTYPES[x_dtype], device_index=device_index)
        form = _FORMS.setdefault(key, made)
    return form


def takes(weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> bool:
    """Whether the kernel can read a matrix where it lies."""
    return (
        block == (BLOCK, BLOCK)
        and weight.dtype == torch.float8_e4m3fn
        and weight.is_contiguous()
        and weight.data_ptr() % ALIGNMENT == 0
        and scales.is_contiguous()
        and scales.dtype == torch.float32
    )


def widened(scales: torch.Tensor) -> torch.Tensor:
    """Scales of any dtype as float32, exactly; uint8 holds e8m0 bytes."""
    if scales.dtype == torch.float32:
        return scales
    return (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).to(torch.float32)


def flat(x: torch.Tensor) -> torch.Tensor:
    """x as [tokens, columns] that the copy engine can read: copied only where it must be."""
    x = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    far = x.shape[0] > 1 and x.stride(0) % 8 != 0
    if x.stride(1) != 1 or far:
        x = x.contiguous()
    return x.clone() if x.data_ptr() % ALIGNMENT else x


def run(form: Fp8Form, x: torch.Tensor, first: Matrix, second: Matrix) -> torch.Tensor | None:
    """The kernel's product, or None where there is none for so many tokens.

    Args:
        form: of the matrices, x's dtype and device.
        x: float16 or bfloat16 [..., columns], any strides.
        first, second: gate and up, or one matrix twice; the kernel `takes` them.

    Returns:
        [..., rows] in x's dtype.

    Raises:
        UsageError: a CUDA graph is being captured and a kernel is not loaded yet; call prepare first.
        CompileError, LaunchError: a kernel does not build or run.
    """
    tokens = x.numel() // form.columns
    if form.why or tokens > DENSE_AFTER:
        return None
    if torch.cuda.current_device() != form.device_index:
        with torch.cuda.device(form.device_index):
            return run(form, x, first, second)
    y = x.new_empty((*x.shape[:-1], form.rows))
    if tokens == 0:
        return y
    x, out = flat(x), y.view(tokens, form.rows)
    try:
        for begin in range(0, tokens, MAX_TOKENS):
            part = x[begin : begin + MAX_TOKENS]
            form.decoder(part.shape[0]).run(part, first, second, out[begin : begin + MAX_TOKENS])
    except ToolchainError as error:
        form.give_up(error)
        return None
    return y
