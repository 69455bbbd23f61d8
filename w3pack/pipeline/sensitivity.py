"""How much the error of each Linear costs, measured before anything is written.

With calibration text, for each Linear and each form that it may take: the KL divergence, in nats for each token, that its
error is expected to add to the model's answers,

    loss = 1 / (2 * tokens) * sum over tokens t and rows n of (g[t, n] * e[t, n])^2

where e = (W' - W) x is the error of the output and g the gradient, by that output, of -log p of tokens drawn from the
source's own distribution. That is the second-order expansion of the divergence at the source, less the products of
errors of different tokens and rows, whose signs are taken to be random. W' is found with the diagonal of the inputs'
second moment; finer solvers lower the errors of all Linears.

Without text the measure is a proxy that knows weights only: the squared error relative to the squared weights, every Linear
counting alike. To first order the loss of a model is a sum of these figures, each times a factor of its layer (HIGGS, arXiv
2411.17525); the factors need data, so the proxy sets them all to 1.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from w3pack import __version__
from w3pack.errors import ResourceError
from w3pack.jit.store import cache_folder
from w3pack.pipeline.decoder import BackwardWalk, Diagonal
from w3pack.pipeline.one_linear import (
    check_finite,
    measure_error,
    pack,
    quantize_weight,
    read_float,
    settings_for,
)
from w3pack.pipeline.plan import BASE_MEMORY
from w3pack.pipeline.selection import block_of
from w3pack.quantize import quantize_data_free
from w3pack.quantize.diagonal import quantize_diagonal

if TYPE_CHECKING:
    from w3pack.pipeline.quantize_model import Job, Progress

_LOG = logging.getLogger(__name__)
# For the estimate of memory: tokens of a batch, activations of a block that a backward pass keeps, copies of the answers.
_BATCH_TOKENS = 2048
_ACTIVATIONS = 20
_ANSWERS = 5
Unit = Literal["nats per token", "relative squared error of the weights"]


@dataclass(frozen=True)
class Gradients:
    """What the measurement on text needs beside a job.

    Attributes:
        facts: deciding the figures: digest of the windows and their numbers.
        open: starts the walk on a device with a number of threads; its scratch files go into the folder given.
    """

    facts: Mapping[str, Any]
    open: Callable[[Job, Path, str, int], AbstractContextManager[BackwardWalk]]


@dataclass(frozen=True)
class Sensitivity:
    """What was measured of each Linear.

    Attributes:
        unit: of the losses.
        tokens: of the text; 0 for the proxy.
        losses: module -> group size -> expected loss.
        errors: module -> group size -> relative squared error of its outputs, E |W' x - W x|^2 / E |W x|^2, or for the
            proxy of its weights.
    """

    unit: Unit
    tokens: int
    losses: Mapping[str, Mapping[int, float]]
    errors: Mapping[str, Mapping[int, float]]

    def to_dict(self) -> dict[str, Any]:
        """JSON form; keys become text."""
        return asdict(self)

    @staticmethod
    def from_dict(entry: Mapping[str, Any]) -> Sensitivity:
        """Inverse of `to_dict`."""

        def table(value: Mapping[str, Mapping[str, float]]) -> dict[str, dict[int, float]]:
            return {name: {int(size): float(loss) for size, loss in row.items()} for name, row in value.items()}

        return Sensitivity(
            unit=entry["unit"],
            tokens=int(entry["tokens"]),
            losses=table(entry["losses"]),
            errors=table(entry["errors"]),
        )


def modules_of(job: Job) -> tuple[str, ...]:
    """The Linears that are measured: those to quantise inside the decoder's blocks."""
    return tuple(tensor.module for tensor in job.plan.quantized if block_of(tensor.source.name))


def measure(
    job: Job,
    sizes: Sequence[int],
    gradients: Gradients | None,
    *,
    workers: int,
    device: str,
    progress: Progress | None = None,
) -> Sensitivity:
    """The loss of each Linear in 3-bit form of each of the group sizes.

    A figure that was found before for the same source, options and text is taken from w3pack's cache folder, so that
    neither a run after `--dry-run` nor a resumed one measures again; what is found is the same either way.

    Args:
        sizes: group sizes, ascending.
        gradients: None takes the proxy.
        workers: threads; the result does not depend on it.
        progress: told of each Linear.
    """
    place = _cached_file(job, sizes, gradients, device)
    cached = _read(place)
    if cached is not None and set(cached.losses) == set(modules_of(job)):
        return cached
    if gradients is None:
        found = _from_weights(job, sizes, workers=workers, device=device, progress=progress)
    else:
        with (
            tempfile.TemporaryDirectory(prefix="w3pack-sensitivity-") as scratch,
            gradients.open(job, Path(scratch), device, workers) as walk,
        ):
            found = _from_answers(job, sizes, walk, workers=workers, device=device, progress=progress)
    _write(place, found)
    return found


def memory_bytes(job: Job, *, tokens: int, length: int, forms: int, workers: int) -> int:
    """Upper estimate of peak memory of a measurement on text, on a CPU: a block in float32, its changes in each form, what
    a backward pass through it keeps of a batch, and the answers of a window. Hidden states go to the disk where they are
    many.

    Args:
        tokens, length: of the text, and of a window.
        forms: group sizes.
    """
    blocks: dict[str, int] = {}
    for tensor in job.plan.tensors:
        block = block_of(tensor.source.name)
        blocks[block] = blocks.get(block, 0) + 4 * math.prod(tensor.source.shape)
    outside = [math.prod(t.source.shape) for t in job.plan.tensors if not block_of(t.source.name)]
    rows = max((t.source.shape[0] for t in job.plan.tensors if not block_of(t.source.name)), default=0)
    widest = max(max(spec.rows, spec.columns) for spec in job.plan.modules.values())
    weights = max((size for block, size in blocks.items() if block), default=0) * (2 + forms)
    batch = 4 * min(max(_BATCH_TOKENS, length), tokens) * widest * _ACTIVATIONS * workers
    answers = 4 * max(outside, default=0) + 4 * length * rows * _ANSWERS * workers
    return BASE_MEMORY + max(weights + batch, answers)


def _from_weights(
    job: Job, sizes: Sequence[int], *, workers: int, device: str, progress: Progress | None
) -> Sensitivity:
    errors: dict[str, dict[int, float]] = {}
    for tensor in job.plan.quantized:
        if tensor.spec is None or not block_of(tensor.source.name):
            continue
        weight = read_float(job.source, tensor, block=job.plan.block)
        errors[tensor.module] = {}
        for size in sizes:
            spec = replace(tensor.spec, group_size=size)
            result = quantize_weight(
                weight.to(device),
                spec,
                module=tensor.module,
                qmap=job.qmaps.of(tensor.module),
                seed=job.options.seed,
                workers=workers,
            )
            errors[tensor.module][size] = measure_error(weight, pack(result, spec), spec=spec).relative ** 2
        if progress is not None:
            progress(tensor.module, tensor.spec.weights)
    return Sensitivity(unit="relative squared error of the weights", tokens=0, losses=errors, errors=errors)


def _from_answers(
    job: Job, sizes: Sequence[int], walk: BackwardWalk, *, workers: int, device: str, progress: Progress | None
) -> Sensitivity:
    moments = walk.forward(lambda columns: Diagonal(columns, device=device))
    weights = {module: spec.weights for module, spec in job.plan.modules.items()}
    losses: dict[str, dict[int, float]] = {}
    errors: dict[str, dict[int, float]] = {}
    tokens = walk.tokens
    for number in reversed(range(len(walk.blocks))):
        sources: dict[str, torch.Tensor] = {}
        changes: dict[str, list[torch.Tensor]] = {}
        for module in walk.blocks[number]:
            weight = walk.weight(module).to(device)
            moment = moments[module].diagonal() if moments[module].tokens else None
            sources[module] = weight
            changes[module] = [_changed(job, module, weight, moment, size, workers=workers) - weight for size in sizes]
            if progress is not None:
                progress(module, weights[module])

        def judge(
            module: str,
            inputs: torch.Tensor,
            gradients: torch.Tensor,
            sources: Mapping[str, torch.Tensor] = sources,
            changes: Mapping[str, Sequence[torch.Tensor]] = changes,
        ) -> torch.Tensor:
            return _judged(inputs, gradients, sources[module], changes[module])

        said = walk.backward(number, judge)
        for module in walk.blocks[number]:
            rows = sum(said[module], torch.zeros(1 + 2 * len(sizes), dtype=torch.float64))
            whole, rest = float(rows[0]), rows[1:].tolist()
            losses[module] = {size: rest[2 * i] / (2 * tokens) for i, size in enumerate(sizes)}
            errors[module] = {size: rest[2 * i + 1] / whole if whole else 0.0 for i, size in enumerate(sizes)}
    order = modules_of(job)
    return Sensitivity(
        unit="nats per token",
        tokens=tokens,
        losses={module: losses[module] for module in order},
        errors={module: errors[module] for module in order},
    )


def _judged(
    inputs: torch.Tensor, gradients: torch.Tensor, source: torch.Tensor, changes: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Sums over tokens and rows: |W x|^2, then for each change (g e)^2 and e^2. float64 [1 + 2 * changes], on the CPU."""
    x, g = inputs.to(torch.float32), gradients.to(torch.float32)
    sums = [(x @ source.t()).square_().sum(dtype=torch.float64)]
    for change in changes:
        error = x @ change.t()  # [tokens, rows]
        sums += [(error * g).square_().sum(dtype=torch.float64), error.square_().sum(dtype=torch.float64)]
    return torch.stack(sums).cpu()


def _changed(
    job: Job, module: str, weight: torch.Tensor, moment: torch.Tensor | None, size: int, *, workers: int
) -> torch.Tensor:
    """What a Linear becomes: float32 [rows, columns]; without a moment, of an expert that no token reached, data-free."""
    check_finite(weight, module)
    settings = settings_for(replace(job.plan.modules[module], group_size=size), seed=job.options.seed)
    qmap = job.qmaps.of(module)
    if moment is None:
        found = quantize_data_free(weight, settings, qmap=qmap, workers=workers)
    else:
        found = quantize_diagonal(weight, moment.to(weight.device), settings, qmap=qmap, workers=workers)
    return found.dequantize()


def _cached_file(job: Job, sizes: Sequence[int], gradients: Gradients | None, device: str) -> Path | None:
    told = (
        __version__,
        torch.__version__,
        job.source.fingerprint(),
        repr(job.options),
        job.qmaps.fingerprint(),
        modules_of(job),
        tuple(sizes),
        None if gradients is None else sorted(gradients.facts.items()),
        device.partition(":")[0],
    )
    try:
        return cache_folder() / "sensitivity" / f"{hashlib.sha256(repr(told).encode()).hexdigest()}.json"
    except ResourceError:
        return None


def _read(place: Path | None) -> Sensitivity | None:
    if place is None:
        return None
    try:
        return Sensitivity.from_dict(json.loads(place.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _write(place: Path | None, found: Sensitivity) -> None:
    """Keep it for the next run; a folder that cannot be written is only logged."""
    if place is None:
        return
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=place.parent, suffix=".part", delete=False) as file:
            file.write(json.dumps(found.to_dict()))
        os.replace(file.name, place)
    except OSError as error:
        _LOG.info("sensitivities are not kept: %s", error)
