"""`w3pack inspect`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from w3pack.cli import render, render_fuse


def command(
    checkpoint: Annotated[Path, typer.Argument(help="A folder that w3pack wrote.")],
    layers: Annotated[bool, typer.Option("--layers", help="List every Linear, not only the kinds.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Everything, as JSON on stdout.")] = False,
) -> None:
    """Show what is in a checkpoint that w3pack wrote: layers, maps, errors, sizes, permitted tensor-parallel degrees.

    Example: `w3pack inspect qwen3-w3 --json`
    """
    from w3pack.pipeline.fused import holds_fused, inspect_fused
    from w3pack.pipeline.inspect_checkpoint import inspect_checkpoint

    if holds_fused(checkpoint):
        render_fuse.inspection(inspect_fused(checkpoint), as_json=json)
        return
    render.inspection(inspect_checkpoint(checkpoint), layers=layers, as_json=json)
