"""`w3pack quantize`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from w3pack.cli import calibration_options as calibrated
from w3pack.cli import quantize_options as shape
from w3pack.cli import render
from w3pack.cli.progress import bar, quiet_libraries
from w3pack.cli.values import Layout, QmapPer, parse_bytes, pick_device


def command(
    model: Annotated[str, typer.Argument(help="Hub id, checkpoint folder, or one .gguf file.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write.")],
    group_size: Annotated[int, typer.Option(help="Weights that share a scale: 64, 128, 256, ...")] = 128,
    layout: Annotated[Layout, typer.Option(help="dense: 3.0 bits a code; nibble: 4.")] = Layout.dense,
    qmap: shape.Qmap = None,
    qmap_dtype: shape.QmapType = None,
    qmap_per: Annotated[QmapPer, typer.Option(help="One map for each Linear, or for each row.")] = QmapPer.tensor,
    dataset: calibrated.Datasets = [],  # noqa: B006
    nsamples: calibrated.Samples = 128,
    seqlen: calibrated.Length = 512,
    effort: calibrated.EffortChoice = None,
    guided: calibrated.Guided = False,
    sensitivity: calibrated.Sensitivity = False,
    keep_top: calibrated.KeepTop = None,
    target_bits: calibrated.TargetBits = None,
    skip: shape.Names = [],  # noqa: B006 - typer copies it
    only: shape.Names = [],  # noqa: B006
    lm_head: Annotated[bool, typer.Option("--lm-head", help="Quantise the lm_head too.")] = False,
    min_coverage: shape.Coverage = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest output file.")] = "5GB",
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the samples of weights and of text.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    workers: Annotated[int | None, typer.Option(min=1, help="Threads; the bytes do not depend on it.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    layers: shape.Layers = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a w3pack checkpoint at the output.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue unfinished work.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Report as JSON on stdout.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No progress bar.")] = False,
) -> None:
    """Quantise a model to 3 bits, without data or calibrated on text.

    Example: `w3pack quantize Qwen/Qwen3-0.6B -o qwen3-w3 --dataset text.jsonl --keep-top 5%`
    """
    quiet_libraries()
    from w3pack.integrations.calibration import prepare_calibration
    from w3pack.integrations.loadable import loadable_for
    from w3pack.integrations.sources import open_source
    from w3pack.pipeline.mixing import MixRequest, mix_job
    from w3pack.pipeline.plan import QuantizeOptions
    from w3pack.pipeline.quantize_model import prepare_job, run

    request = MixRequest(sensitivity=sensitivity, keep_top=keep_top, target_bits=target_bits)
    options = QuantizeOptions(
        group_size=group_size, layout=layout.value, qmap=qmap, qmap_dtype=qmap_dtype.value if qmap_dtype else None,
        qmap_per=qmap_per.value, skip=tuple(skip), only=tuple(only), lm_head=lm_head, min_coverage=min_coverage,
        max_shard_bytes=parse_bytes(max_shard_size), seed=seed,
    )  # fmt: skip
    with open_source(model) as source:
        job = prepare_job(source, options, loadable=loadable_for(source))
        calibration = prepare_calibration(
            job, effort=effort.value if effort else None, datasets=dataset, samples=nsamples, length=seqlen, guided=guided,
        )  # fmt: skip
        job = mix_job(
            job, request, gradients=calibration.gradients if calibration else None, workers=workers,
            device=pick_device(device), bar=lambda total: bar(total=total, unit="w", quiet=quiet or json),
        )  # fmt: skip
        if dry_run:
            render.plan(job, output, layers=layers, as_json=json, calibration=calibration, workers=workers or 1)
            return
        total = job.plan.weights * (calibration.rounds if calibration else 1)
        with bar(total=total, unit="w", quiet=quiet or json) as progress:
            report = run(
                job, output, overwrite=overwrite, resume=resume, workers=workers, device=pick_device(device),
                progress=progress, calibration=calibration,
            )  # fmt: skip
    render.report(report, as_json=json, layers=layers)
