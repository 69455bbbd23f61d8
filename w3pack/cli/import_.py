"""`w3pack import`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from w3pack.cli import render
from w3pack.cli.progress import bar, quiet_libraries
from w3pack.cli.values import Layout, parse_bytes


def command(
    checkpoint: Annotated[str, typer.Argument(help="Hub id or folder: FLUTE, GPTQ, AutoRound or SqueezeLLM, 3 bits.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write.")],
    layout: Annotated[Layout, typer.Option(help="dense: 3.0 bits a code; nibble: 4.")] = Layout.dense,
    max_shard_size: Annotated[str, typer.Option(help="Largest output file.")] = "5GB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a w3pack checkpoint at the output.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue unfinished work.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Report as JSON on stdout.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No progress bar.")] = False,
) -> None:
    """Turn a checkpoint of another 3-bit format into one of w3pack's, bit for bit.

    Example: `w3pack import llama-3bit-gptq -o llama-w3`
    """
    quiet_libraries()
    from w3pack.checkpoint.import_source import open_import
    from w3pack.integrations.loadable import loadable_for
    from w3pack.pipeline.import_checkpoint import prepare_import, run_import

    source = open_import(checkpoint)
    job = prepare_import(
        source,
        layout=layout.value,
        max_shard_bytes=parse_bytes(max_shard_size),
        loadable=loadable_for(source),
    )
    with bar(total=job.plan.weights, unit="w", quiet=quiet or json) as progress:
        report = run_import(job, output, overwrite=overwrite, resume=resume, progress=progress)
    render.report(report, as_json=json)
