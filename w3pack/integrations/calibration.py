"""Everything that `w3pack.pipeline.quantize_model.run` needs to calibrate a transformers model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from w3pack.errors import UsageError
from w3pack.integrations.backward_walk import BackwardWalk
from w3pack.integrations.calibration_text import apart_from, calibration_text, tokenizer_of
from w3pack.integrations.decoder_walk import DecoderWalk
from w3pack.integrations.whole_model import WholeModel, free_bytes, memory_bytes
from w3pack.pipeline.calibrate import Calibration, Effort
from w3pack.pipeline.sensitivity import Gradients
from w3pack.pipeline.tune import Tuning

#: Tokens of the calibration text on which sensitivities are measured, in whole windows, at least one.
SENSITIVITY_TOKENS = 8192
#: The last stage learns from this many times the calibration windows, in steps of so many tokens.
TUNING_SHARE = 3
STEP_TOKENS = 2048
#: Windows that decide which of its states is the best.
HELD_OUT = 8


def prepare_calibration(
    job: Any,
    *,
    effort: Effort | Literal["none"] | None,
    datasets: Sequence[str] = (),
    samples: int = 128,
    length: int = 512,
    guided: bool = False,
    tokenizer: Any = None,
    in_memory: bool | None = None,
    tuning_share: float = TUNING_SHARE,
) -> Calibration | None:
    """Read and cut the text; None where nothing is to be calibrated.

    Args:
        job: from `prepare_job`.
        effort: None: "default" where there are data sets, else "none".
        datasets: see `calibration_text`.
        samples: number of windows.
        length: tokens of a window.
        guided: let tokens count by gradients, see `w3pack.quantize.guidance`.
        tokenizer: None: the source's own.
        in_memory: see `DecoderWalk`.
        tuning_share: how many times `samples` windows the last stage of "best" learns from.
    """
    if effort == "none" and datasets:
        raise UsageError("expected either --dataset or --effort none, got both; leave one of them out")
    if effort == "none" or (effort is None and not datasets):
        if guided:
            raise UsageError("expected --guided with a calibrated effort, got none; add --dataset, or leave it out")
        return None
    tokenizer = tokenizer or tokenizer_of(job.source)
    seed = job.options.seed
    found = calibration_text(datasets, tokenizer, samples=samples, length=length, seed=seed)
    tuning = None
    if effort == "best":
        wanted = max(0, round((tuning_share - 1) * samples)) + HELD_OUT
        more = calibration_text(datasets, tokenizer, samples=samples + wanted, length=length, seed=seed).windows
        order = torch.randperm(len(more), generator=torch.Generator().manual_seed(seed))
        further = apart_from(more[order], found.windows)[:wanted]
        tuning = prepare_tuning(found.windows, further, seed=seed, share=tuning_share, in_memory=in_memory)

    def backward_on(windows: torch.Tensor) -> Gradients:
        @contextmanager
        def start_backward(job: Any, scratch: Path, device: str, workers: int) -> Iterator[BackwardWalk]:
            walk = BackwardWalk(
                job.source,
                job.plan,
                windows,
                scratch=scratch,
                device=device,
                workers=workers,
                seed=job.options.seed,
                in_memory=in_memory,
            )
            try:
                yield walk
            finally:
                walk.close()

        return Gradients(facts={**found.facts, "measured": len(windows)}, open=start_backward)

    measured = _spread(found.windows, most=max(1, SENSITIVITY_TOKENS // found.windows.shape[1]))

    return Calibration(
        effort=effort or "default",
        facts=found.facts,
        open=walk_over(found.windows, in_memory=in_memory),
        notes=found.notes,
        gradients=backward_on(measured),
        guide=backward_on(found.windows) if guided else None,
        tuning=tuning,
    )


def walk_over(
    windows: torch.Tensor, *, in_memory: bool | None, follow: bool = False
) -> Callable[[Any, Path, str, int], AbstractContextManager[DecoderWalk]]:
    """What opens a walk over some windows, given job, folder for scratch files, device and threads; see `DecoderWalk`."""

    def start(job: Any, scratch: Path, device: str, workers: int) -> AbstractContextManager[DecoderWalk]:
        return closing(
            DecoderWalk(
                job.source,
                job.plan,
                windows,
                scratch=scratch,
                device=device,
                workers=workers,
                in_memory=in_memory,
                follow=follow,
            )
        )

    return start


def prepare_tuning(
    calibrated: torch.Tensor,
    further: torch.Tensor,
    *,
    seed: int,
    share: float = TUNING_SHARE,
    in_memory: bool | None = None,
) -> Tuning:
    """Which windows the last stage learns from, and which decide.

    It learns from `share` times as many as the Linears are calibrated on: from these, and from further ones while the texts
    have any, each once; then all of them again. Windows that decide are apart from both; where the texts have none left,
    an eighth of the calibration windows is set aside for it.

    Args:
        calibrated: int64 [samples, length], what the Linears are calibrated on.
        further: int64 [n, length], apart from these.
        seed: of the order of the windows.
        in_memory: see `DecoderWalk`.
    """
    windows = torch.cat([calibrated, further])
    count, length = windows.shape
    apart = min(HELD_OUT, len(further), count - 1)
    held_out = list(range(count - apart, count))
    if not held_out:
        held_out = list(range(count - max(1, count // 8), count))
    pool = torch.arange(max(1, count - len(held_out)))
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    wanted = max(1, round(share * len(calibrated)))
    while len(order) < wanted:
        order += pool[torch.randperm(len(pool), generator=generator)].tolist()
    order = order[:wanted]
    facts = {
        "windows": len(order),
        "different_windows": len(set(order)),
        "held_out_windows": len(held_out),
        "tokens": len(order) * length,
        "sha256": hashlib.sha256(windows.numpy().astype("<i8").tobytes()).hexdigest(),
    }

    @contextmanager
    def start(job: Any, scratch: Path, device: str, workers: int) -> Iterator[WholeModel]:
        model = WholeModel(job.source, job.plan, windows, scratch=scratch, device=device, workers=workers)
        try:
            yield model
        finally:
            model.close()

    def needed(job: Any, workers: int, device: str) -> int:
        found = job.source.config.get("text_config")
        config = found if isinstance(found, dict) else job.source.config
        width = int(config.get("hidden_size") or 0)
        vocabulary = int(config.get("vocab_size") or 0)
        return memory_bytes(
            job.plan,
            tokens=windows.numel(),
            length=length,
            width=width,
            vocabulary=vocabulary,
            workers=workers,
            device=device,
        )

    return Tuning(
        facts=facts,
        order=tuple(order),
        held_out=tuple(held_out),
        batch=max(1, STEP_TOKENS // length),
        open=start,
        follow=walk_over(calibrated, in_memory=in_memory, follow=True),
        seed=seed,
        needed=needed,
        free=free_bytes,
    )


def _spread(windows: torch.Tensor, *, most: int) -> torch.Tensor:
    """At most `most` windows from all over [samples, length]."""
    count = min(most, len(windows))
    return windows[torch.arange(count) * len(windows) // count]
