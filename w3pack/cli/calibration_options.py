"""The options of a command that say whether and on what to calibrate."""

from __future__ import annotations

from typing import Annotated

import typer

from w3pack.cli.values import Effort

Datasets = Annotated[
    list[str],
    typer.Option(help="Text to calibrate on: .txt, .jsonl, .parquet or a hub id. May be repeated.", show_default=False),
]
Samples = Annotated[int, typer.Option(min=1, help="Calibration windows.")]
Length = Annotated[int, typer.Option(min=2, help="Tokens of a calibration window.")]
Guided = Annotated[
    bool,
    typer.Option("--guided", help="Calibrate with tokens weighted by gradients (GuidedQuant): three times the passes."),
]
Sensitivity = Annotated[
    bool, typer.Option("--sensitivity", help="Measure and report how much the error of each Linear costs the model.")
]
KeepTop = Annotated[
    str | None,
    typer.Option(
        metavar="SHARE%|COUNT",
        help="Leave the most sensitive Linears 16 bit. 5%: as many as hold 5 percent of the Linears' bytes. 3: three.",
        show_default=False,
    ),
]
TargetBits = Annotated[
    float | None,
    typer.Option(
        help="Mean bits of a Linear's weight: choose for each of them groups of 64 or 128, or 16 bit.",
        show_default=False,
    ),
]
EffortChoice = Annotated[
    Effort | None,
    typer.Option(
        help="none: no data. diagonal, fast, default: calibrated, each slower and better by its own measure. "
        "best: default, then scales, maps and norms are tuned by the source's answers. "
        "Left out: default with --dataset, else none. Without --dataset, text that comes with Python is used.",
        show_default=False,
    ),
]
