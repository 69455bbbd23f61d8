"""Everything that `w3pack.pipeline.quantize_model.run` needs to calibrate a transformers model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from w3pack.errors import UsageError
from w3pack.integrations.calibration_text import calibration_text, tokenizer_of
from w3pack.integrations.decoder_walk import DecoderWalk
from w3pack.pipeline.calibrate import Calibration, Effort


def prepare_calibration(
    job: Any,
    *,
    effort: Effort | Literal["none"] | None,
    datasets: Sequence[str] = (),
    samples: int = 128,
    length: int = 512,
    tokenizer: Any = None,
    in_memory: bool | None = None,
) -> Calibration | None:
    """Read and cut the text; None where nothing is to be calibrated.

    Args:
        job: from `prepare_job`.
        effort: None: "default" where there are data sets, else "none".
        datasets: see `calibration_text`.
        samples: number of windows.
        length: tokens of a window.
        tokenizer: None: the source's own.
        in_memory: see `DecoderWalk`.
    """
    if effort == "none" and datasets:
        raise UsageError("expected either --dataset or --effort none, got both; leave one of them out")
    if effort == "none" or (effort is None and not datasets):
        return None
    found = calibration_text(
        datasets, tokenizer or tokenizer_of(job.source), samples=samples, length=length, seed=job.options.seed
    )

    @contextmanager
    def start(job: Any, scratch: Path, device: str, workers: int) -> Iterator[DecoderWalk]:
        walk = DecoderWalk(
            job.source,
            job.plan,
            found.windows,
            scratch=scratch,
            device=device,
            workers=workers,
            in_memory=in_memory,
        )
        try:
            yield walk
        finally:
            walk.close()

    return Calibration(effort=effort or "default", facts=found.facts, open=start, notes=found.notes)
