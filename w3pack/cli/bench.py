"""`w3pack bench`"""

from __future__ import annotations

from typing import Annotated

import typer

from w3pack.cli import render_gpu
from w3pack.cli.progress import bar
from w3pack.cli.values import Layout, MapKind, QmapDtype, XDtype, command_line

_LAYOUTS, _QMAPS, _X = list(Layout), list(QmapDtype), [XDtype.float16]


def command(
    model: Annotated[list[str] | None, typer.Option(help="A model's Linears, such as llama-3-8b. Repeatable.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="ROWSxCOLUMNS, such as 4096x14336. Repeatable.")] = None,
    tokens: Annotated[str, typer.Option(help="Token counts; above 64, the operator against torch.")] = "1,8,16",
    layout: Annotated[list[Layout], typer.Option(help="Code layouts.")] = _LAYOUTS,
    qmap: Annotated[list[QmapDtype], typer.Option(help="Map dtypes.")] = _QMAPS,
    dtype: Annotated[list[XDtype], typer.Option(help="Activation dtypes.")] = _X,
    maps: Annotated[
        MapKind, typer.Option("--map", help="One map for the Linear, each row tile, or each row.")
    ] = MapKind.linear,
    group_size: Annotated[int, typer.Option(help="Columns that share a scale.")] = 128,
    device: Annotated[int, typer.Option(min=0, help="CUDA device.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Everything, with provenance, as JSON on stdout.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No progress bar.")] = False,
) -> None:
    """Time packed Linears on this GPU, beside torch and the reading ceiling, with their errors.

    Example: `w3pack bench --model llama-3-8b --tokens 1,8,16 --layout dense --qmap int8`
    """
    from w3pack.bench.shapes import cases, parse_tokens, select
    from w3pack.bench.suite import run

    chosen = cases(
        select(model or [], shape or []),
        tokens=parse_tokens(tokens),
        layouts=[one.value for one in layout],
        qmap_dtypes=[one.value for one in qmap],
        x_dtypes=[one.value for one in dtype],
        map_kind=maps.value,
        group_size=group_size,
    )
    with bar(total=len(chosen), unit="case", quiet=quiet or json) as advance:
        result = run(
            chosen,
            device_index=device,
            command=command_line(),
            progress=lambda name: advance(name, 1),
        )
    render_gpu.benchmark(result, as_json=json)
