"""The longer options of `w3pack quantize`; those of calibration are in `calibration_options`."""

from __future__ import annotations

from typing import Annotated

import typer

from w3pack.cli.values import QmapDtype

Names = Annotated[list[str], typer.Option(help="Whole module name, or re:REGEX. May be repeated.", show_default=False)]
Qmap = Annotated[str | None, typer.Option(help="Fixed map: a name such as nf3, or a JSON file. Default: learn.")]
QmapType = Annotated[QmapDtype | None, typer.Option(help="Default int8, or float16 if a fixed map needs it.")]
Coverage = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1,
        help="Fail below this share of the decoder. Default 0.9; 0 where --skip, --only, --keep-top or --target-bits choose.",
    ),
]
Layers = Annotated[
    bool,
    typer.Option("--layers", help="A line for every tensor of the plan, or after a run for every Linear and block."),
]
