"""`prepare`: build and load every kernel that a model will launch, before it is timed, captured or served."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import nn

from w3pack.errors import UsageError
from w3pack.jit import KernelText, ToolchainError, load
from w3pack.ops import workspace
from w3pack.ops.gateup_choices import ArmChoice
from w3pack.ops.gateup_probe import PROBES, WANTED, Probe, Wanted
from w3pack.ops.w3_cuda import X_DTYPES, Form
from w3pack.ops.w3_linear import form_of
from w3pack.runtime.fp8_linear import Fp8Module
from w3pack.runtime.linear import W3Linear
from w3pack.runtime.merge import Merging, merge_linears, merged_of
from w3pack.runtime.prepare_fp8 import Fp8Work

_STORED: dict[type[nn.Module], tuple[str, ...]] = {
    W3Linear: ("codes", "scales", "qmap"),
    Fp8Module: ("weight", "weight_scale_inv"),
}
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
    #: What each fused FP8 pair computes gate and up with, for each number of tokens.
    gateup: tuple[ArmChoice, ...] = ()
    #: Packed Linears that compute one product together, and why others do not.
    merging: Merging = field(default_factory=Merging)

    def __str__(self) -> str:
        """A line, one for each choice, and one for each kind of merged Linears."""
        first = f"{self.kernels} kernels, {self.built} built, {self.seconds:.1f} s"
        return "\n".join([first, *map(str, self.gateup), *str(self.merging).splitlines()])


def prepare(
    model: nn.Module,
    batch_sizes: Sequence[int] = (1,),
    *,
    dtype: torch.dtype | None = None,
    captures: int = 8,
    gateup: Wanted = "auto",
    w8a8: bool = False,
    probe: Probe = "auto",
    merge: bool | None = None,
) -> Prepared:
    """Merge packed Linears that read the same tensor, build and load the kernels of every packed or FP8 module on a CUDA device, set
    workspace aside, and choose how fused FP8 pairs compute gate and up. On a CPU nothing is to be done, unless `merge` is True.

    Call it before a CUDA graph is captured (merging moves tensors that an older graph reads), and again after moving the model. Where
    CUDA kernels cannot be built or loaded at all, one warning says so, and calls use the reference.

    Args:
        model: any module that holds W3Linears or FP8 modules, or is one.
        batch_sizes: numbers of tokens that will come in one call (batch times sequence length).
        dtype: of the activations, float16 or bfloat16; without it the model's own, or both where that is neither.
        captures: how many CUDA graphs may be captured before the next eager call.
        gateup: "auto" times what there is for each shape and number of tokens; or the name of an arm (gateup_arms.py).
        w8a8: whether "auto" may choose arms that round activations to 8 bits, an error of about 3 percent of the MLP's inner product.
        probe: where times for "auto" come from. "auto" takes those that an earlier process kept in the cache folder, else measures and
            keeps them; "fresh" measures anew and keeps them; "memory" neither reads nor writes what is kept.
        merge: whether q, k and v, gate and up, and other Linears that read the same tensor compute one product (merge.py). Without
            it they do on CUDA devices, as in serving engines: it takes no memory and changes results only by rounding, and
            `unmerge` undoes it. True merges on CPUs too, where nothing is gained; False merges nothing and parts nothing.

    Raises:
        UsageError: a batch size below 1, another dtype, or no such arm or probe.
        CompileError, LaunchError: a kernel does not build, or the driver refuses it.
    """
    started = time.perf_counter()
    if any(size < 1 for size in batch_sizes):
        raise UsageError(f"expected batch sizes of at least 1, got {list(batch_sizes)}; give numbers of tokens")
    if dtype is not None and dtype not in X_DTYPES:
        raise UsageError(f"expected activations of float16 or bfloat16, got {dtype}; other dtypes need no preparation")
    if gateup not in WANTED:
        raise UsageError(f"expected gateup to be one of {', '.join(WANTED)}, got {gateup!r}; name one of them")
    if probe not in PROBES:
        raise UsageError(f"expected probe to be one of {', '.join(PROBES)}, got {probe!r}; name one of them")
    merging = _merged(model, merge)
    layers = [
        module
        for module in model.modules()
        if isinstance(module, W3Linear) and not module.is_member and module.codes.is_cuda
    ]
    dtypes = [dtype] if dtype else _activation_dtypes(model)
    fp8 = Fp8Work(model, dtypes, batch_sizes, wanted=gateup, w8a8=w8a8, probe=probe)
    if not layers and not fp8.modules:
        seconds = time.perf_counter() - started
        return Prepared(kernels=0, built=0, seconds=seconds, workspace_bytes=0, merging=merging)
    forms = {_form(layer, x_dtype): None for layer in layers for x_dtype in dtypes}
    usable = [form for form in forms if form.available]
    work = {(text, form.device_index): None for form in usable for size in batch_sizes for text in form.texts(size)}
    work |= dict.fromkeys(fp8.texts())
    built = 0
    try:
        built = _load_all(work)
        for form in usable:
            _warm(form, batch_sizes, captures)
        fp8.warm(captures)
    except ToolchainError as error:
        for form in usable:
            form.give_up(error)
        fp8.give_up(error)
    devices = {form.device_index for form in usable} | fp8.devices
    return Prepared(
        kernels=len(work),
        built=built,
        gateup=fp8.decide(),
        merging=merging,
        seconds=time.perf_counter() - started,
        workspace_bytes=sum(workspace.nbytes(index) for index in devices),
    )


def _merged(model: nn.Module, wanted: bool | None) -> Merging:
    on_gpu = any(isinstance(module, W3Linear) and module.codes.is_cuda for module in model.modules())
    if wanted or (wanted is None and on_gpu):
        merging = merge_linears(model)
        if on_gpu and merging.groups:
            torch.cuda.empty_cache()  # what the members held lies between other tensors
        return merging
    return Merging(groups=merged_of(model))


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
        id(getattr(module, name))
        for module in model.modules()
        for kind, names in _STORED.items()
        if isinstance(module, kind)
        for name in names
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
