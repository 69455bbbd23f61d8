"""Quantise a decoder block by block, each Linear for the inputs that it will see.

    for each block: load it -> note its outputs on one batch
        for each input of its Linears, in the order of computation:
            second moment of that input, with everything before it quantised already
            quantise the Linears that are fed with it, and put the dequantised weights in their place
        write the packed Linears of the block                                   <- resumable after each block
        outputs of the quantised block become the inputs of the next

The diagonal alone is another matter: no feedback makes good in one Linear what those before it have done, and noise in the
inputs blurs what the diagonal says. With effort "diagonal" every block sees what the source's blocks have left, which takes
a single pass over the samples and left less divergence (SmolLM2-135M: 0.63 against 0.70 nats).

The model itself is behind `Walk` (w3pack.pipeline.decoder), which `w3pack.integrations.decoder_walk` implements for transformers' modules.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from w3pack.checkpoint.source import TensorInfo
from w3pack.checkpoint.staging import Staging, free_bytes
from w3pack.checkpoint.tensor_file import DTYPE_NAMES, digest, read_header, read_tensor
from w3pack.errors import CheckpointError, ResourceError, UnsupportedError
from w3pack.format import names
from w3pack.format.linear import LinearSpec
from w3pack.pipeline.decoder import Block, Diagonal, Input, Moment, Walk
from w3pack.pipeline.guiding import apart, guide
from w3pack.pipeline.one_linear import Packed, dequantized, measure_error, moved, pack, settings_for
from w3pack.pipeline.plan import BASE_MEMORY
from w3pack.pipeline.selection import block_of
from w3pack.pipeline.sensitivity import Gradients
from w3pack.pipeline.tune import Tuning, block_facts, tune_block, tune_model, tuned
from w3pack.quantize import QuantizedLinear, quantize_data_free
from w3pack.quantize.calibrated import Effort as Solver
from w3pack.quantize.calibrated import quantize_calibrated
from w3pack.quantize.gptq import DAMPING, Factor, factorize
from w3pack.quantize.moments import SecondMoment

if TYPE_CHECKING:  # it imports this module
    from w3pack.pipeline.quantize_model import Job, Progress

Effort = Literal["diagonal", "fast", "default", "best"]

_SPARE_BYTES = 64 << 20
# For the estimate of memory: tokens of a batch, activations of a block alive at once, matrices of columns x columns and
# copies of a weight that the solver makes.
_BATCH_TOKENS = 2048
_ACTIVATIONS = 6
_FACTORS = 6
_COPIES = 8
_TOKENIZING = 800 << 20  # the tokenizer at work, and what allocators of several threads keep
_ENOUGH_TOKENS = 65536  # for the usual damping; it falls with the root of their number
_SMALLEST_DAMPING = 0.01


@dataclass(frozen=True)
class Calibration:
    """What `run` needs beside a job to calibrate it.

    Attributes:
        effort: see `w3pack.quantize.calibrated`; "best" is "default" with `tuning` after it.
        facts: for the manifest, and deciding the bytes: texts, their digests, tokens.
        open: starts the walk; its scratch files go into the folder given.
        notes: sentences for the report.
        gradients: what sensitivities are measured with; None where nobody will ask.
        guide: gradients of the whole text, by which its tokens count; None where all count alike.
        tuning: the stage after all blocks; None for no such stage.
    """

    effort: Effort
    facts: Mapping[str, Any]
    open: Callable[[Job, Path, str, int], AbstractContextManager[Walk]]
    notes: tuple[str, ...] = ()
    gradients: Gradients | None = None
    guide: Gradients | None = None
    tuning: Tuning | None = None

    @property
    def solver(self) -> Solver:
        """What is done to each Linear."""
        return "default" if self.effort == "best" else self.effort

    @property
    def rounds(self) -> int:
        """How many times the model's weights progress is told of."""
        return 1 if self.tuning is None else 2

    def fingerprint(self) -> str:
        """The same exactly when effort and data are."""
        tuning = "" if self.tuning is None else f" {self.tuning.fingerprint()}"
        guided = "" if self.guide is None else " guided"
        return f"{self.effort} {sorted(self.facts.items())!r}{tuning}{guided}"


def work_file(number: int) -> str:
    """Name of the file, beside the unfinished shards, that holds the packed Linears of a block."""
    return f".w3pack-block-{number:05d}"


def calibrate(
    job: Job, calibration: Calibration, staging: Staging, *, workers: int, device: str, progress: Progress | None
) -> dict[str, Any]:
    """Quantise every Linear of the decoder's blocks into work files of `staging`.

    Returns:
        For the manifest: facts of data and walk, the error of each block, and the Linears from the most to the least
        sensitive.
    """
    _check_space(job, staging)
    tuning, whole = calibration.tuning, False
    if tuning is not None:
        whole = tuning.is_whole(job, staging, workers=workers, device=device)
    blockwise = None if whole else tuning
    start = calibration.open if blockwise is None else blockwise.follow
    says = None if calibration.guide is None else guide(job, calibration.guide, staging, workers=workers, device=device)
    aside = _keeps_aside(calibration.solver, blockwise)
    with start(job, staging.folder, device, workers) as walk:
        for number, modules in enumerate(walk.blocks):
            if all(work_file(later) in staging.work for later in range(number, len(walk.blocks))):
                break
            with walk.block(number) as block:
                file = work_file(number)
                found = file in staging.work
                if blockwise is not None:
                    block.follow()
                if found:
                    for module in modules:
                        spec = job.plan.modules[module]
                        if not aside:
                            stored = moved(read_work(staging, file, module), device)
                            block.set_weight(module, dequantized(stored, spec))
                        if progress is not None:
                            progress(module, spec.weights * (1 if blockwise is None else 2))
                else:
                    _quantize_block(
                        job,
                        calibration.solver,
                        staging,
                        walk,
                        block,
                        number,
                        says=says,
                        tuning=blockwise,
                        workers=workers,
                        device=device,
                        told=progress,
                    )
                if number + 1 < len(walk.blocks) and (found or not aside):
                    block.advance()
        facts = {"effort": calibration.effort, **calibration.facts, **walk.facts}
        facts |= {} if says is None else {"guided": len(says)}
    if tuning is not None and whole:
        files = work_files(staging.work)
        tune_model(
            job,
            tuning,
            {module: read_work(staging, file, module) for module, file in files.items()},
            {module: staging.work[file]["modules"][module] for module, file in files.items()},
            staging,
            workers=workers,
            device=device,
            progress=progress,
        )
    done = tuned(staging)
    gains = block_facts(staging.work) if done is None else done["tuning"]
    return {**facts, **_summary(staging.work), **({} if gains is None else {"tuning": gains})}


def memory_bytes(job: Job, calibration: Calibration, *, workers: int) -> int:
    """Upper estimate of peak memory on a CPU: one block in float32, all hidden states, inputs of two Linears, the moments of
    one pass and what the solver makes of the largest Linear. Hidden states that are too large for memory go to the disk
    instead, and inputs that are too large for it are not kept."""
    blocks: dict[str, int] = {}
    for tensor in job.plan.tensors:
        blocks[block_of(tensor.source.name)] = blocks.get(block_of(tensor.source.name), 0) + 4 * math.prod(
            tensor.source.shape
        )
    outside = max((4 * math.prod(t.source.shape) for t in job.plan.tensors if not block_of(t.source.name)), default=0)
    specs = job.plan.modules.values()
    columns = max(spec.columns for spec in specs)
    widest = max(max(spec.columns, spec.rows) for spec in specs)
    text = job.source.config.get("text_config")
    config = text if isinstance(text, dict) else job.source.config
    hidden: int = 4 * int(calibration.facts["tokens"]) * int(config.get("hidden_size") or columns)
    kept = 0 if calibration.solver == "diagonal" else hidden + 4 * int(calibration.facts["tokens"]) * columns
    batch = 4 * max(_BATCH_TOKENS, int(calibration.facts["length"])) * widest * _ACTIVATIONS * workers
    moments = 4 * columns**2 * (1 + workers + _FACTORS)
    solver = 4 * _COPIES * max(spec.rows * spec.columns for spec in specs)
    block = max((size for name, size in blocks.items() if name), default=0)
    blockwise = (
        BASE_MEMORY
        + _TOKENIZING
        + hidden
        + kept
        + max(2 * outside, block + max(moments, MOMENT_BYTES if _has_experts(job) else 0) + batch + solver)
    )
    tuning = calibration.tuning
    if tuning is None:
        return blockwise
    if tuning.fits(job, workers=workers, device="cpu"):
        return max(blockwise, tuning.needed(job, workers, "cpu"))
    return blockwise + hidden + block  # what the source's blocks leave, and weights as they are multiplied with


def _has_experts(job: Job) -> bool:
    return any(names.expert_of(module) is not None for module in job.plan.modules)


def _check_space(job: Job, staging: Staging) -> None:
    """The packed blocks lie on the disk twice for a while; the rest is checked by the run itself."""
    packed = sum(spec.nbytes for spec in job.plan.modules.values())
    missing = packed + job.plan.output_bytes + job.copied_bytes + _SPARE_BYTES
    free = free_bytes(staging.folder)
    if not staging.work and free < missing:
        raise ResourceError(
            f"expected {missing / 1e9:.2f} GB free at {staging.output.parent} for a calibrated run, got {free / 1e9:.2f} GB; "
            "free space or choose another place with -o"
        )


def _quantize_block(
    job: Job,
    effort: Solver,
    staging: Staging,
    walk: Walk,
    block: Block,
    number: int,
    *,
    says: Mapping[str, torch.Tensor] | None,
    tuning: Tuning | None,
    workers: int,
    device: str,
    told: Progress | None,
) -> None:
    packed: dict[str, Packed] = {}
    record: dict[str, Any] = {"tensors": {}, "modules": {}}

    def make(columns: int) -> Moment:
        if effort == "diagonal":
            return Diagonal(columns, device=device)
        return SecondMoment(columns, device=device, dtype=torch.float32)

    def settle(module: str, moment: torch.Tensor | Factor | None, tokens: int) -> None:
        weight, spec = walk.weight(module), job.plan.modules[module]
        result, story = solve(
            weight,
            moment,
            spec=spec,
            module=module,
            effort=effort,
            qmap=job.qmaps.of(module),
            seed=job.options.seed,
            workers=workers,
        )
        stored = pack(result, spec)
        packed[module] = moved(stored, "cpu")
        error = measure_error(weight, stored, spec=spec)
        record["modules"][module] = {
            "error": {"squared_error": error.squared_error, "squared_weight": error.squared_weight},
            "calibration": {**story, "tokens": tokens},
        }
        block.set_weight(module, dequantized(stored, spec))
        if told is not None:
            told(module, spec.weights)

    aside = _keeps_aside(effort, tuning)
    stages = block.stages()
    for stage in (tuple(itertools.chain(*stages)),) if aside else stages:
        for inputs in passes(
            stage if says is None else apart(stage, says), budget=None if effort == "diagonal" else MOMENT_BYTES
        ):
            moments, pools = block.moments(inputs, make, says, advance=aside)
            for one in inputs:
                pool = pools.get(one.pool) if one.pool is not None else None
                tokens = moments[one].tokens
                found = expert_moment(moments[one], pool, columns=one.columns)
                usable: torch.Tensor | Factor | None = found
                if found is not None and found.dim() == 2:
                    usable = factorize(found, damping=damping_for(tokens if pool is None else pool.tokens))
                for module in one.modules:
                    settle(module, usable, tokens)
            del moments, pools
    record["block"] = {"error": block.error()}
    if tuning is not None and packed:
        packed, record["block"]["tuning"] = tune_block(job, tuning, block, packed, device=device)
        for module, stored in packed.items():
            spec = job.plan.modules[module]
            error = measure_error(walk.weight(module), stored, spec=spec)
            record["modules"][module] |= {
                "error": {"squared_error": error.squared_error, "squared_weight": error.squared_weight},
                "tuned": True,
            }
            block.set_weight(module, dequantized(moved(stored, device), spec))
            if told is not None:
                told(f"tuned {module}", spec.weights)
        record["block"]["error"] = block.error()
    _write_block(staging, work_file(number), packed, record)


def _keeps_aside(effort: Solver, tuning: Tuning | None) -> bool:
    """Whether blocks see what the source's blocks have left instead of what the quantised ones have."""
    return effort == "diagonal" and tuning is None


#: Second moments collected in one pass over the samples; experts that need more take several passes.
MOMENT_BYTES = 2 << 30


def passes(stage: tuple[Input, ...], *, budget: int | None) -> Iterable[tuple[Input, ...]]:
    """Cut a stage into parts whose second moments fit into `budget` bytes (at least one input each)."""
    part: list[Input] = []
    filled = 0
    for one in stage:
        size = 4 * one.columns**2
        if part and budget is not None and filled + size > budget:
            yield tuple(part)
            part, filled = [], 0
        part.append(one)
        filled += size
    if part:
        yield tuple(part)


def damping_for(tokens: int) -> float:
    """Part of the diagonal to add to a second moment: 0.1 for 65,536 tokens or fewer, 0.025 for a million."""
    return max(_SMALLEST_DAMPING, DAMPING * min(1.0, math.sqrt(_ENOUGH_TOKENS / max(tokens, 1))))


def expert_moment(own: Moment, pool: Moment | None, *, columns: int) -> torch.Tensor | None:
    """The moment to quantise with.

    A second moment of fewer tokens than columns is singular. One of an expert shrinks by as much as it lacks towards that
    of all experts of its layer; of an expert that saw no token at all only the layer's diagonal is used.

    Returns:
        float32 [columns, columns] or [columns]; None where nothing ever came.
    """
    if own.tokens == 0:
        return pool.diagonal() if pool is not None and pool.tokens else None
    if pool is None or own.tokens >= columns:
        return own.matrix()
    share = own.tokens / columns
    return own.matrix().mul_(share).add_(pool.matrix(), alpha=1 - share)


def solve(
    weight: torch.Tensor,
    moment: torch.Tensor | Factor | None,
    *,
    spec: LinearSpec,
    module: str,
    effort: Solver,
    qmap: torch.Tensor | None,
    seed: int,
    workers: int,
) -> tuple[QuantizedLinear, dict[str, Any]]:
    """Codes, map and scales of one Linear on its device, and how they were found.

    Args:
        weight: float32 [rows, columns], any device.
        moment: of its inputs; [columns] for the diagonal alone; None falls back to the data-free solver.
        module: name for messages.
        qmap: float32 [8] to keep, or None to learn one.
    """
    settings = settings_for(spec, seed=seed)
    story: dict[str, Any]
    try:
        if moment is None:
            result = quantize_data_free(weight, settings, qmap=qmap, workers=workers)
            story = {"effort": "none", "loss": None, "data_free_loss": None}
        else:
            used = "diagonal" if isinstance(moment, torch.Tensor) and moment.dim() == 1 else effort
            found = quantize_calibrated(weight, moment, settings, effort=used, qmap=qmap, workers=workers)
            result = found.linear
            by_name = {stage.name: stage.after for stage in found.stages}
            story = {"effort": used, "loss": found.loss, "data_free_loss": found.stages[0].after}
            story["diagonal_loss"] = by_name.get("diagonal", found.loss)
    except (CheckpointError, UnsupportedError) as error:
        raise type(error)(f"{module}: {error}") from error
    return result, story


def _write_block(staging: Staging, file: str, packed: Mapping[str, Packed], record: dict[str, Any]) -> None:
    tensors = {names.tensor(module, part): data for module, parts in packed.items() for part, data in parts.items()}
    infos = [
        TensorInfo(name=name, dtype=DTYPE_NAMES[data.dtype], shape=tuple(data.shape), nbytes=data.nbytes, file=file)
        for name, data in tensors.items()
    ]
    with staging.open_shard(file, infos) as writer:
        for name, data in tensors.items():
            writer.write(name, data)
            record["tensors"][name] = {"sha256": digest(data)}
    staging.finish_work(file, record)


def work_files(work: Mapping[str, Any]) -> dict[str, str]:
    """Module -> the work file of its block."""
    return {module: file for file, record in work.items() if "block" in record for module in record["modules"]}


def read_work(staging: Staging, file: str, module: str) -> Packed:
    """The packed tensors of a Linear from the file of its block.

    Raises:
        CheckpointError: they are not what was written.
    """
    path = staging.folder / file
    header = read_header(path)
    found: Packed = {}
    for part in names.PACKED:
        name = names.tensor(module, part)
        found[part] = read_tensor(path, header[name])
        if digest(found[part]) != staging.work[file]["tensors"][name]["sha256"]:
            raise CheckpointError(
                f"expected {name} in {path} as it was written, got other bytes; pass --overwrite to start anew"
            )
    return found


def _summary(work: Mapping[str, Any]) -> dict[str, Any]:
    """Errors of blocks, the order of sensitivity, and what fell back, from the records of all blocks."""
    blocks = [work[file] for file in sorted(work) if "block" in work[file]]
    modules = {name: entry for record in blocks for name, entry in record["modules"].items()}
    losses = {name: entry["calibration"]["loss"] for name, entry in modules.items()}
    ranked = sorted((name for name in losses if losses[name] is not None), key=lambda name: -losses[name])
    return {
        "block_errors": [record["block"]["error"] for record in blocks],
        "most_sensitive_first": ranked,
        "losses": {
            name: (entry["calibration"]["data_free_loss"], losses[name])
            for name, entry in modules.items()
            if losses[name] is not None
        },
        "without_tokens": [name for name, entry in modules.items() if entry["calibration"]["tokens"] == 0],
    }
