"""`w3pack tune`"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from w3pack.cli import render_gpu
from w3pack.cli.progress import bar
from w3pack.cli.values import Layout, MapKind, QmapDtype, XDtype, command_line

_LAYOUTS, _QMAPS, _X = list(Layout), list(QmapDtype), [XDtype.float16]


def command(
    model: Annotated[list[str] | None, typer.Option(help="A model's Linears, such as llama-3-8b. Repeatable.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="ROWSxCOLUMNS, such as 4096x14336. Repeatable.")] = None,
    tokens: Annotated[str, typer.Option(help="Token counts: up to 64, or with --prefill above 64.")] = "1,8,16,32,64",
    prefill: Annotated[bool, typer.Option("--prefill", help="Find where the prefill kernel is faster.")] = False,
    layout: Annotated[list[Layout], typer.Option(help="Code layouts.")] = _LAYOUTS,
    qmap: Annotated[list[QmapDtype], typer.Option(help="Map dtypes.")] = _QMAPS,
    dtype: Annotated[list[XDtype], typer.Option(help="Activation dtypes; the choice for one stands for both.")] = _X,
    maps: Annotated[
        MapKind, typer.Option("--map", help="One map for the Linear, each row tile, or each row.")
    ] = MapKind.linear,
    group_size: Annotated[int, typer.Option(help="Columns that share a scale.")] = 128,
    candidates: Annotated[int, typer.Option(min=1, help="Configs to try for each case, at most.")] = 40,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The table; else the package's own.")] = None,
    device: Annotated[int, typer.Option(min=0, help="CUDA device.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Result as JSON on stdout.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No progress bar.")] = False,
) -> None:
    """Try kernel configs on this GPU and keep the fastest sound one of each Linear in the device's table.

    Example: `w3pack tune --model llama-3-8b --tokens 1,8,16 --output table.json`
    """
    from w3pack.bench.prefill_tuner import tune_prefill
    from w3pack.bench.shapes import cases, parse_tokens, select
    from w3pack.bench.tuner import tune

    chosen = cases(
        select(model or [], shape or []),
        tokens=parse_tokens(tokens),
        layouts=[one.value for one in layout],
        qmap_dtypes=[one.value for one in qmap],
        x_dtypes=[one.value for one in dtype],
        map_kind=maps.value,
        group_size=group_size,
    )
    tuner = partial(tune_prefill) if prefill else partial(tune, limit=candidates)
    with bar(total=len(chosen), unit="case", quiet=quiet or json) as advance:
        result = tuner(
            chosen,
            device_index=device,
            output=output,
            command=command_line(),
            progress=lambda name: advance(name, 1),
        )
    (render_gpu.prefill_tuning if prefill else render_gpu.tuning)(result, as_json=json)
