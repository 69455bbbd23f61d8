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
EffortChoice = Annotated[
    Effort | None,
    typer.Option(
        help="none: no data. diagonal, fast, default: calibrated, each slower and better by its own measure. "
        "Left out: default with --dataset, else none. Without --dataset, text that comes with Python is used.",
        show_default=False,
    ),
]
