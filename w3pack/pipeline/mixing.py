"""`--sensitivity`, `--keep-top` and `--target-bits`: a planned job -> the same job, measured, and planned Linear by Linear."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from w3pack.checkpoint.tensor_file import DTYPES
from w3pack.errors import UsageError
from w3pack.format import names
from w3pack.pipeline.mixed import Candidate, Form, fit_bits, keep_top, mix_of, parse_keep_top
from w3pack.pipeline.plan import Loadable, PlannedTensor, make_plan
from w3pack.pipeline.selection import FP8
from w3pack.pipeline.sensitivity import Gradients, Sensitivity, measure, modules_of

if TYPE_CHECKING:
    from w3pack.pipeline.quantize_model import Job, Progress

#: Group sizes that `--target-bits` chooses from, beside the one of the options.
GROUP_SIZES = (64, 128)
_MOST_BITS = 16.0
#: Opens a progress bar for a number of weights.
Bar = Callable[[int], AbstractContextManager["Progress"]]


@dataclass(frozen=True)
class MixRequest:
    """What was asked for.

    Attributes:
        sensitivity: measure and report, whether or not anything is mixed.
        keep_top: "5%" or "3", see `parse_keep_top`.
        target_bits: upper bound of the mean over the Linears.
    """

    sensitivity: bool = False
    keep_top: str | None = None
    target_bits: float | None = None

    def __post_init__(self) -> None:
        """UsageError for values that cannot be meant."""
        if self.keep_top is not None and self.target_bits is not None:
            raise UsageError("expected either --keep-top or --target-bits, got both; leave one of them out")
        if self.keep_top is not None:
            parse_keep_top(self.keep_top)
        bits = self.target_bits
        if bits is not None and not (math.isfinite(bits) and 3 < bits < _MOST_BITS):
            raise UsageError(f"expected --target-bits above 3 and below {_MOST_BITS:g}, got {bits:g}; try 3.5")

    def __bool__(self) -> bool:
        return self.sensitivity or self.keep_top is not None or self.target_bits is not None


def mix_job(
    job: Job,
    request: MixRequest,
    *,
    gradients: Gradients | None,
    workers: int | None,
    device: str,
    bar: Bar | None = None,
) -> Job:
    """Measure the Linears of a job and choose what each becomes.

    Args:
        job: from `prepare_job`.
        gradients: what to measure with on text; None takes the proxy.
        workers: threads; the result does not depend on it. None: as many as torch uses.

    Raises:
        UsageError: values that cannot be met.
    """
    if not request:
        return job
    modules = modules_of(job)
    if not modules:
        raise UsageError(
            "expected Linears in the decoder's blocks to measure, got none; leave --sensitivity, --keep-top and --target-bits out"
        )
    threads = workers or torch.get_num_threads()
    group_size = job.options.group_size
    sizes = tuple(sorted({*GROUP_SIZES, group_size})) if request.target_bits is not None else (group_size,)
    opened = bar(sum(job.plan.modules[module].weights for module in modules)) if bar is not None else None
    if opened is None:
        found = measure(job, sizes, gradients, workers=threads, device=device)
    else:
        with opened as progress:
            found = measure(job, sizes, gradients, workers=threads, device=device, progress=progress)
    candidates = _candidates(job, sizes, found)
    fixed = [spec for module, spec in job.plan.modules.items() if module not in found.losses]
    if request.keep_top is not None:
        asked = f"--keep-top {request.keep_top.strip()}"
        chosen = keep_top(candidates, parse_keep_top(request.keep_top), group_size=group_size)
    elif request.target_bits is not None:
        asked = f"--target-bits {request.target_bits:g}"
        chosen = fit_bits(
            candidates,
            request.target_bits,
            fixed_bytes=sum(spec.nbytes for spec in fixed),
            fixed_weights=sum(spec.weights for spec in fixed),
        )
    else:
        return replace(job, sensitivity=_facts(found, candidates, group_size=group_size))
    options = replace(job.options, mix=mix_of(chosen, asked=asked, group_size=group_size))
    mixed = _mixed_facts(candidates, chosen, asked=asked, group_size=group_size)
    return replace(
        job,
        options=options,
        plan=make_plan(job.source, options, loadable=_as_planned(job)),
        sensitivity={**_facts(found, candidates, group_size=group_size), "mixed": mixed},
    )


def _as_planned(job: Job) -> Loadable:
    """What the model class said when the job was planned."""
    reasons = {tensor.source.name: tensor.reason for tensor in job.plan.tensors}

    def loadable(modules: Collection[str]) -> Mapping[str, str]:
        refused = (module for module in modules if module not in job.plan.modules)
        return {module: reasons[names.tensor(module, "weight")] for module in refused}

    return loadable


def kept_bytes(tensor: PlannedTensor) -> int:
    """What a Linear takes in the dtype of the source; FP8 would become bfloat16."""
    dtype = "BF16" if tensor.source.dtype in FP8 else tensor.source.dtype
    return DTYPES[dtype].itemsize * math.prod(tensor.source.shape)


def _candidates(job: Job, sizes: Sequence[int], found: Sensitivity) -> list[Candidate]:
    candidates = []
    for tensor in job.plan.quantized:
        spec = tensor.spec
        if spec is None or tensor.module not in found.losses:
            continue
        losses = found.losses[tensor.module]
        packed = [Form(size, replace(spec, group_size=size).nbytes, losses[size]) for size in sizes]
        forms = (*packed, Form(None, kept_bytes(tensor), 0.0))
        candidates.append(Candidate(module=tensor.module, weights=spec.weights, forms=forms))
    return candidates


def _facts(found: Sensitivity, candidates: Sequence[Candidate], *, group_size: int) -> dict[str, Any]:
    """For report and manifest: the measure, and the Linears from the most to the least sensitive."""
    return {
        "unit": found.unit,
        "tokens": found.tokens,
        "group_size": group_size,
        "most_sensitive_first": [
            one.module for one in sorted(candidates, key=lambda one: -one.packed(group_size).loss)
        ],
        "modules": {
            one.module: {
                str(size): {"loss": loss, "relative_loss": found.errors[one.module][size]}
                for size, loss in found.losses[one.module].items()
            }
            for one in candidates
        },
        "mixed": None,
    }


def _mixed_facts(
    candidates: Sequence[Candidate], chosen: Mapping[str, int | None], *, asked: str, group_size: int
) -> dict[str, Any]:
    """What mixing costs in bytes and is expected to buy, beside all Linears at the group size of the options."""
    forms = [next(form for form in one.forms if form.group_size == chosen[one.module]) for one in candidates]
    alike = [one.packed(group_size) for one in candidates]
    weights = sum(one.weights for one in candidates)
    return {
        "asked": asked,
        "kept": [module for module, size in chosen.items() if size is None],
        "group_sizes": {str(size): list(chosen.values()).count(size) for size in sorted({s for s in chosen.values() if s})},
        "weights_kept": sum(one.weights for one in candidates if chosen[one.module] is None),
        "bytes": sum(form.nbytes for form in forms),
        "bytes_without": sum(form.nbytes for form in alike),
        "bits_per_weight": 8 * sum(form.nbytes for form in forms) / weights,
        "bits_per_weight_without": 8 * sum(form.nbytes for form in alike) / weights,
        "loss": math.fsum(form.loss for form in forms),
        "loss_without": math.fsum(form.loss for form in alike),
    }  # fmt: skip
