"""`prepare`: build and load every kernel that a model will launch, before it is timed, captured or served."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import nn

from w3pack.errors import UsageError
from w3pack.jit import KernelText, ToolchainError, load
from w3pack.ops import workspace
from w3pack.ops.w3_cuda import X_DTYPES, Form
from w3pack.ops.w3_linear import form_of
from w3pack.runtime.linear import W3Linear

_STORED = {"codes", "scales", "qmap"}
_Work = tuple[KernelText, int]
_SEEN: set[_Work] = set()


@dataclass(frozen=True)
class Prepared:
    """What `prepare` found to do."""

    #: Kernels that the model launches, over all devices.
    kernels: int
    #: Of these, compiled just now; the others were loaded already, or came from the store.
    built: int
    seconds: float
    #: Bytes of workspace on all devices that the model lies on.
    workspace_bytes: int


def prepare(
    model: nn.Module,
    batch_sizes: Sequence[int] = (1,),
    *,
    dtype: torch.dtype | None = None,
    captures: int = 8,
) -> Prepared:
    """Build and load the kernels of every W3Linear on a CUDA device, and set workspace aside. On a CPU nothing is to be done.

    Call it before a CUDA graph is captured, and again after moving the model. Where CUDA kernels cannot be built or loaded at
    all, one warning says so, and calls use the reference.

    Args:
        model: any module that holds W3Linears, or is one.
        batch_sizes: numbers of tokens that will come in one call (batch times sequence length).
        dtype: of the activations, float16 or bfloat16; without it the model's own, or both where that is neither.
        captures: how many CUDA graphs may be captured before the next eager call.

    Raises:
        UsageError: a batch size below 1, or another dtype.
        CompileError, LaunchError: a kernel does not build, or the driver refuses it.
    """
    started = time.perf_counter()
    if any(size < 1 for size in batch_sizes):
        raise UsageError(f"expected batch sizes of at least 1, got {list(batch_sizes)}; give numbers of tokens")
    if dtype is not None and dtype not in X_DTYPES:
        raise UsageError(f"expected activations of float16 or bfloat16, got {dtype}; other dtypes need no preparation")
    layers = [module for module in model.modules() if isinstance(module, W3Linear) and module.codes.is_cuda]
    if not layers:
        return Prepared(kernels=0, built=0, seconds=time.perf_counter() - started, workspace_bytes=0)
    dtypes = [dtype] if dtype else _activation_dtypes(model)
    forms = {_form(layer, x_dtype): None for layer in layers for x_dtype in dtypes}
    usable = [form for form in forms if form.available]
    work = {(text, form.device_index): None for form in usable for size in batch_sizes for text in form.texts(size)}
    built = 0
    try:
        built = _load_all(work)
        for form in usable:
            _warm(form, batch_sizes, captures)
    except ToolchainError as error:
        for form in usable:
            form.give_up(error)
    return Prepared(
        kernels=len(work),
        built=built,
        seconds=time.perf_counter() - started,
        workspace_bytes=sum(workspace.nbytes(index) for index in {form.device_index for form in usable}),
    )


def _form(layer: W3Linear, x_dtype: torch.dtype) -> Form:
    spec = layer.spec
    return form_of(
        x_dtype,
        layer.codes,
        layer.scales,
        layer.qmap,
        rows=spec.rows,
        columns=spec.columns,
        group_size=spec.group_size,
    )


def _activation_dtypes(model: nn.Module) -> list[torch.dtype]:
    """The dtype of the first float parameter that is no part of a packed weight, if kernels take it; else both."""
    stored = {
        id(getattr(module, name)) for module in model.modules() if isinstance(module, W3Linear) for name in _STORED
    }
    for parameter in model.parameters():
        if id(parameter) not in stored and parameter.is_floating_point():
            return [parameter.dtype] if parameter.dtype in X_DTYPES else list(X_DTYPES)
    return list(X_DTYPES)


def _load_all(work: Iterable[_Work]) -> int:
    """Load side by side; how many had to be compiled for it."""
    work = list(work)

    def load_one(item: _Work) -> bool:
        return load(*item).origin == "compiled"

    with ThreadPoolExecutor(min(len(work), os.cpu_count() or 1) or 1) as pool:
        compiled = list(pool.map(load_one, work))
    fresh = [item for item, built in zip(work, compiled, strict=True) if built and item not in _SEEN]
    _SEEN.update(work)
    return len(fresh)


def _warm(form: Form, batch_sizes: Sequence[int], captures: int) -> None:
    for size in batch_sizes:
        portions = form.portions(size)
        if not portions:
            form.dequantizer()
        for portion in set(portions):
            plan = form.decoder(portion).plan
            workspace.provide(form.device_index, plan.partial_bytes, captures)
