"""`w3pack doctor`"""

from __future__ import annotations

from typing import Annotated

import typer

from w3pack.cli import render_gpu
from w3pack.cli.progress import quiet_libraries
from w3pack.errors import W3PackError


def command(json: Annotated[bool, typer.Option("--json", help="Findings as JSON on stdout.")] = False) -> None:
    """Say what this machine runs packed Linears with, and try it: GPUs, CUDA, compiler, cache, kernels.

    Exit code 0: all that this machine needs is there (without a GPU, the CPU path); 1: something is not, with the remedy.

    Example: `w3pack doctor`
    """
    quiet_libraries()
    from w3pack.bench.doctor import diagnose

    found = diagnose()
    render_gpu.diagnosis(found.to_dict(), as_json=json)
    if not found.ok:
        more = len(found.problems) - 1
        raise W3PackError(found.problems[0] + (f" ({more} more in the report)" if more else ""))
