"""`w3pack verify`"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from w3pack.cli import render
from w3pack.cli.progress import bar, quiet_libraries


def command(
    checkpoint: Annotated[Path, typer.Argument(help="A folder that w3pack wrote.")],
    against: Annotated[str | None, typer.Option(help="The source it was made from: measure every layer again.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Result as JSON on stdout.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No progress bar.")] = False,
) -> None:
    """Check structure, digests and values of a packed checkpoint, and its errors against the source.

    Exit code 4: incomplete or damaged structure; 6: readable, but not what the manifest or the source says.

    Example: `w3pack verify qwen3-w3 --against Qwen/Qwen3-0.6B`
    """
    quiet_libraries()
    from w3pack.integrations.sources import open_source
    from w3pack.pipeline.fused import holds_fused, open_fused, verify_fused
    from w3pack.pipeline.packed import PackedCheckpoint, open_packed
    from w3pack.pipeline.verify_checkpoint import verify_checkpoint

    fused = holds_fused(checkpoint)
    verify = verify_fused if fused else verify_checkpoint
    with ExitStack() as stack:
        packed = open_fused(checkpoint) if fused else open_packed(checkpoint)
        layers = len(packed.config.modules) if against and isinstance(packed, PackedCheckpoint) else 0
        total = len(packed.source.tensors) + layers
        source = stack.enter_context(open_source(against)) if against else None
        advance = stack.enter_context(bar(total=total, unit="tensor", quiet=quiet or json))
        result = verify(checkpoint, against=source, progress=lambda name: advance(name, 1))
    render.verification(result, as_json=json)
