"""`w3pack fuse-gateup`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from w3pack.cli import render_fuse
from w3pack.cli.progress import bar, quiet_libraries
from w3pack.errors import UsageError


def command(
    checkpoint: Annotated[str, typer.Argument(help="Hub id or folder: FP8 with block scales, or floats.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write.")],
    quantize: Annotated[
        bool, typer.Option("--quantize", help="Round gate and up matrices that are floats to FP8 first.")
    ] = False,
    keep_names: Annotated[
        bool, typer.Option("--keep-names", help="Leave names as they are; put gate and up side by side in the file.")
    ] = False,
    split: Annotated[bool, typer.Option("--split", help="Undo it: give back the source's tensors and files.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a w3pack checkpoint at the output.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue unfinished work.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Report as JSON on stdout.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No progress bar.")] = False,
) -> None:
    """Store gate and up of every FP8 MLP as one tensor, bit for bit, or undo that.

    Example: `w3pack fuse-gateup qwen3-fp8 -o qwen3-fused`
    """
    quiet_libraries()
    from w3pack.checkpoint.resolve import resolve
    from w3pack.checkpoint.safetensors_source import SafetensorsSource
    from w3pack.integrations.hf_fused import fusable_for
    from w3pack.pipeline.fuse_gateup import prepare_fuse, run_fuse
    from w3pack.pipeline.fuse_plan import FuseOptions
    from w3pack.pipeline.split_gateup import prepare_split, run_split

    if split and (quantize or keep_names):
        raise UsageError("expected --split alone, got --quantize or --keep-names with it; leave them out")
    path = resolve(checkpoint)
    if split:
        undo = prepare_split(path, location=checkpoint)
        if dry_run:
            render_fuse.split_plan(undo, as_json=json)
            return
        with bar(total=undo.output_bytes, unit="B", quiet=quiet or json) as progress:
            undone = run_split(undo, output, overwrite=overwrite, resume=resume, progress=progress)
        render_fuse.split_report(undone, as_json=json)
        return
    options = FuseOptions(quantize=quantize, keep_names=keep_names)
    source = SafetensorsSource(path, location=checkpoint)
    job = prepare_fuse(source, options, fusable=fusable_for(source))
    if dry_run:
        render_fuse.plan(job, output, as_json=json)
        return
    with bar(total=job.plan.output_bytes, unit="B", quiet=quiet or json) as progress:
        report = run_fuse(job, output, overwrite=overwrite, resume=resume, progress=progress)
    render_fuse.report(report, as_json=json)
