"""The last stage of `--effort best`: learn maps, scales, norms and biases by what the source answers.

Where the whole model fits in memory:

    the source answers every window -> its last hidden states are kept
    the calibrated Linears take the place of the source's
    for each step: a few windows -> gradient of KL(source || model) by scales, map entries and vectors -> Adam
        every so often: the same loss on windows apart from these; the best so far is kept      <- resumable from here
    write scales and maps of every Linear, and the vectors that moved

Where it does not, `tune_block` follows the calibration of each block, and maps and scales are learned by what the source's
block answers, with the source's blocks before it. Codes stay as they are. Model and block are behind `Learner`
(w3pack.pipeline.decoder), which `w3pack.integrations.whole_model` and `tuned_block` implement for transformers'.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from w3pack.checkpoint.source import TensorInfo
from w3pack.checkpoint.staging import Staging
from w3pack.checkpoint.tensor_file import DTYPE_NAMES, digest, read_header, read_tensor
from w3pack.errors import CheckpointError, ResourceError
from w3pack.format import names
from w3pack.pack.words import pack_scales, pad_qmap, unpack_codes, unpack_scales
from w3pack.pipeline.decoder import Block, Learner, Walk, WholeModel
from w3pack.pipeline.one_linear import Packed, measure_error
from w3pack.quantize import QuantizedLinear
from w3pack.quantize.tuned_linear import TunedLinear, TunedVector
from w3pack.quantize.tuning import Layout, Part, State, tune

_LOG = logging.getLogger(__name__)

if TYPE_CHECKING:  # it imports this module
    from w3pack.pipeline.quantize_model import Job, Progress

#: Name of the work file of what was learned, and of the state between two looks at the held-out loss.
TUNED_FILE = ".w3pack-tuned"
STATE_FILE = ".w3pack-tuning"
_CHECKS = 6
# Of a block: passes over its batches, batches of a step, and the part that is held out.
_EPOCHS = 2
_BATCHES_OF_A_STEP = 2
_HELD_OUT_PART = 16
_FREE_SHARE = 0.8


@dataclass(frozen=True)
class Tuning:
    """What the stage needs.

    Attributes:
        facts: for the manifest: windows, digest.
        order: numbers of the windows to learn from, in the order in which they are used; each step takes the next `batch`.
        held_out: numbers of the windows that decide which state is the best.
        batch: windows of a step.
        open: loads the model; scratch files go into the folder given.
        follow: starts a walk whose blocks can be learners, for models that do not fit in memory.
        seed: of the order of the batches of a block.
        needed: upper estimate of memory in bytes, given the job, the number of threads and the device.
        free: memory that can be had, in bytes, on a device; 0 where the system does not say.
    """

    facts: Mapping[str, Any]
    order: tuple[int, ...]
    held_out: tuple[int, ...]
    batch: int
    open: Callable[[Job, Path, str, int], AbstractContextManager[WholeModel]]
    follow: Callable[[Job, Path, str, int], AbstractContextManager[Walk]]
    needed: Callable[[Job, int, str], int]
    free: Callable[[str], int]
    seed: int = 0

    def fingerprint(self) -> str:
        """The same exactly when windows and steps are."""
        return f"{sorted(self.facts.items())!r} {self.order} {self.held_out} {self.batch}"

    @property
    def steps(self) -> int:
        """Of Adam."""
        return -(-len(self.order) // self.batch)

    def fits(self, job: Job, *, workers: int, device: str) -> bool:
        """Whether the whole model does in four fifths of the free memory, or the system does not say."""
        needed, free = self.needed(job, workers, device), self.free(device)
        _LOG.info("tuning the whole model needs %.1f GB, %.1f GB are free on %s", needed / 1e9, free / 1e9, device)
        return not free or needed <= _FREE_SHARE * free

    def is_whole(self, job: Job, staging: Staging, *, workers: int, device: str) -> bool:
        """Whether the whole model is tuned at once: as unfinished work has begun, else if it fits.

        Raises:
            ResourceError: it was begun so and does not fit now.
        """
        begun = [record["block"] for record in staging.work.values() if "block" in record]
        if any("tuning" in block for block in begun):
            return False
        fits = self.fits(job, workers=workers, device=device)
        if begun and not fits:
            needed, free = self.needed(job, workers, device), self.free(device)
            raise ResourceError(
                f"expected {needed / 1e9:.1f} GB of memory to go on tuning the whole model at once, got {free / 1e9:.1f} GB "
                f"free on {device}, of which {_FREE_SHARE:.0%} may be used; free memory or lower --workers, or pass --overwrite "
                "to start anew block by block"
            )
        return fits


def tune_model(
    job: Job,
    tuning: Tuning,
    packed: Mapping[str, Packed],
    stories: Mapping[str, Mapping[str, Any]],
    staging: Staging,
    *,
    workers: int,
    device: str,
    progress: Progress | None,
) -> None:
    """Write the work file of tuned scales, maps and vectors, unless it is there.

    Args:
        packed: the calibrated Linears of the decoder's blocks.
        stories: their entries in the journal.
        progress: told of as many weights, in parts, as `packed` holds.
    """
    weights = sum(job.plan.modules[module].weights for module in packed)
    if TUNED_FILE in staging.work:
        if progress is not None:
            progress("tuned", weights)
        return
    with tuning.open(job, staging.folder, device, workers) as model:
        parts = _parts(job, model, packed, device=device)
        layout = Layout(parts)
        state = _read_state(staging, device)
        told = 0

        def count(step: int, loss: float) -> None:
            nonlocal told
            now = weights * step // tuning.steps
            if progress is not None:
                progress(f"tuning, KL {loss:.4f}", now - told)
            told = now

        def gradient(step: int, latents: torch.Tensor) -> torch.Tensor:
            model.put(layout, latents)
            first = step * tuning.batch
            return model.gradient(layout, latents, tuning.order[first : first + tuning.batch])

        def held_out(latents: torch.Tensor) -> float:
            model.put(layout, latents)
            return model.loss(tuning.held_out)

        def checked(state: State) -> None:
            count(state.step, state.best_loss)
            _write_state(staging, state)

        last = tune(
            parts,
            steps=tuning.steps,
            gradient=gradient,
            held_out=held_out,
            check_every=max(1, tuning.steps // _CHECKS),
            state=state,
            checked=checked,
        )
        count(tuning.steps, last.best_loss)
        _write_result(job, tuning, model, layout, last, packed, stories, staging)


def tune_block(
    job: Job, tuning: Tuning, block: Block, packed: Mapping[str, Packed], *, device: str
) -> tuple[dict[str, Packed], dict[str, float]]:
    """Learn maps and scales of a quantised block by what the source's block has answered.

    Args:
        packed: its calibrated Linears.

    Returns:
        All of its Linears as they are stored now, and the held-out loss before and after.
    """
    with block.learner() as learner:
        count = learner.batches
        apart = max(1, count // _HELD_OUT_PART)
        held_out = range(count - apart, count)
        pool = torch.arange(max(1, count - apart))
        generator = torch.Generator().manual_seed(tuning.seed)
        order: list[int] = []
        for _ in range(_EPOCHS):
            order += pool[torch.randperm(len(pool), generator=generator)].tolist()
        steps = -(-len(order) // _BATCHES_OF_A_STEP)
        parts = _parts(job, learner, packed, device=device)
        layout = Layout(parts)

        def gradient(step: int, latents: torch.Tensor) -> torch.Tensor:
            learner.put(layout, latents)
            first = step * _BATCHES_OF_A_STEP
            return learner.gradient(layout, latents, order[first : first + _BATCHES_OF_A_STEP])

        def loss(latents: torch.Tensor) -> float:
            learner.put(layout, latents)
            return learner.loss(held_out)

        last = tune(parts, steps=steps, gradient=gradient, held_out=loss, check_every=max(1, steps // _CHECKS))
        moved = _packed_again(job, layout, last.best)
    found = {module: {**stored, **moved.get(module, {})} for module, stored in packed.items()}
    return found, {"before": last.start_loss, "after": last.best_loss}


def _packed_again(job: Job, layout: Layout, latents: torch.Tensor) -> dict[str, Packed]:
    """Scales and maps of every Linear as they are stored."""
    found: dict[str, Packed] = {}
    for name, here in layout.bounds().items():
        part = layout.parts[name]
        if isinstance(part, TunedLinear):
            spec, now = job.plan.modules[name], part.stored(latents[here])
            found[name] = {
                names.SCALES: pack_scales(now.scales.cpu(), spec),
                names.QMAP: pad_qmap(now.qmap.cpu(), spec),
            }
    return found


def _parts(job: Job, model: Learner, packed: Mapping[str, Packed], *, device: str) -> dict[str, Part]:
    parts: dict[str, Part] = {}
    for module in model.modules:
        if module not in packed:
            continue
        spec, stored = job.plan.modules[module], packed[module]
        qmap = stored[names.QMAP]
        start = QuantizedLinear(
            codes=unpack_codes(stored[names.CODES], spec).to(device),
            qmap=(qmap if spec.maps == 1 else qmap[: spec.rows]).to(device),
            scales=unpack_scales(stored[names.SCALES], spec).to(device),
            group_size=spec.group_size,
        )
        parts[module] = TunedLinear(start, fit_map=job.qmaps.of(module) is None)
    parts.update({name: TunedVector(value) for name, value in model.vectors.items()})
    return parts


def _write_result(
    job: Job,
    tuning: Tuning,
    model: WholeModel,
    layout: Layout,
    state: State,
    packed: Mapping[str, Packed],
    stories: Mapping[str, Mapping[str, Any]],
    staging: Staging,
) -> None:
    tensors: dict[str, torch.Tensor] = {}
    modules: dict[str, Any] = {}
    vectors: list[str] = []
    for name, found in _packed_again(job, layout, state.best).items():
        tensors.update({names.tensor(name, key): data for key, data in found.items()})
        error = measure_error(model.weight(name), {**packed[name], **found}, spec=job.plan.modules[name])
        modules[name] = {
            **stories[name],
            "error": {"squared_error": error.squared_error, "squared_weight": error.squared_weight},
            "tuned": True,
        }
    for name, here in layout.bounds().items():
        part = layout.parts[name]
        if isinstance(part, TunedVector):
            tensors[name] = part.stored(state.best[here]).cpu()
            vectors.append(name)
    facts = {
        "kind": "end to end",
        **tuning.facts,
        **model.facts,
        "steps": tuning.steps,
        "windows_of_a_step": tuning.batch,
        "loss": "KL(source || model) in nats per token on held-out calibration windows",
        "before": state.start_loss,
        "after": state.best_loss,
        "vectors": vectors,
    }
    _write(staging, TUNED_FILE, tensors, {"modules": modules, "tuning": facts})


def _read_state(staging: Staging, device: str) -> State | None:
    if STATE_FILE not in staging.work:
        return None
    path = staging.folder / STATE_FILE
    return State.of({name: read_tensor(path, stored) for name, stored in read_header(path).items()}, device=device)


def _write_state(staging: Staging, state: State) -> None:
    # no digest: between the renaming of the file and the journal's entry the process may end, and both are complete
    _write(staging, STATE_FILE, state.tensors(), {"modules": {}})


def _write(staging: Staging, file: str, tensors: Mapping[str, torch.Tensor], record: dict[str, Any]) -> None:
    infos = [
        TensorInfo(name=name, dtype=DTYPE_NAMES[data.dtype], shape=tuple(data.shape), nbytes=data.nbytes, file=file)
        for name, data in tensors.items()
    ]
    entries: dict[str, Any] = {}
    with staging.open_shard(file, infos) as writer:
        for name, data in tensors.items():
            writer.write(name, data)
            entries[name] = {"sha256": digest(data)}
    staging.finish_work(file, {**record, "tensors": entries})


def block_facts(work: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the manifest says of the tuning of all blocks; None where they were not tuned."""
    gains = [work[file]["block"].get("tuning") for file in sorted(work) if "block" in work[file]]
    found = [gain for gain in gains if gain is not None]
    if not found:
        return None
    return {
        "kind": "block by block",
        "loss": "relative squared error of each block's outputs on held-out calibration windows, mean over blocks",
        "before": sum(gain["before"] for gain in found) / len(found),
        "after": sum(gain["after"] for gain in found) / len(found),
        "blocks": found,
    }


def tuned(staging: Staging) -> Mapping[str, Any] | None:
    """The record of the tuned work file: entries of the Linears, and facts; None where nothing was tuned."""
    found: Mapping[str, Any] | None = staging.work.get(TUNED_FILE)
    return found


def read_tuned(staging: Staging, name: str) -> torch.Tensor | None:
    """A tuned tensor by its name in the checkpoint; None where it was not tuned.

    Raises:
        CheckpointError: it is not what was written.
    """
    record = tuned(staging)
    if record is None or name not in record["tensors"]:
        return None
    path = staging.folder / TUNED_FILE
    data = read_tensor(path, read_header(path)[name])
    if digest(data) != record["tensors"][name]["sha256"]:
        raise CheckpointError(
            f"expected {name} in {path} as it was written, got other bytes; pass --overwrite to start anew"
        )
    return data
