"""What `w3pack fuse-gateup` prints: tables for people or JSON for programs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from w3pack.cli.render import _console, _facts, _json, _megabytes, _plain, _table

if TYPE_CHECKING:  # these import torch, and `w3pack --help` need not wait for it
    from rich.console import Console

    from w3pack.pipeline.fuse_gateup import FuseJob, FuseReport
    from w3pack.pipeline.split_gateup import SplitJob, SplitReport


def _alike(name: str) -> str:
    return re.sub(r"\.\d+(?=\.)", ".*", name)


def _declined(console: Console, declined: Mapping[str, str]) -> None:
    if not declined:
        return
    table = _table("left alone", "times", "why")
    for (name, why), times in Counter((_alike(name), why) for name, why in declined.items()).items():
        table.add_row(_plain(name), str(times), _plain(why))
    console.print(table)


def plan(job: FuseJob, output: Path, *, as_json: bool) -> None:
    """The plan of a run: every pair (alike ones of several layers in one line), what is left alone, then the sums."""
    from w3pack.checkpoint.staging import free_bytes
    from w3pack.pipeline.fuse_gateup import report_of

    planned, free = job.plan, free_bytes(output)
    needed = planned.output_bytes + job.copied_bytes
    if as_json:
        figures = report_of(job, output, records={}, seconds=0.0).to_dict()
        _json(
            {
                **{key: value for key, value in figures.items() if key not in ("seconds", "worst_relative_error")},
                "pairs": {
                    name: {"rows": pair.spec.rows, "columns": pair.spec.columns, "quantize": pair.quantized}
                    for name, pair in planned.pairs.items()
                },
                "shards": {
                    file: sum(o.nbytes for p in pieces for o in p.outputs) for file, pieces in planned.shards.items()
                },
                "memory_bytes": planned.memory_bytes,
                "free_bytes": free,
            }
        )
        return
    console = _console()
    table = _table("pair", "times", "rows x columns of each half", "action")
    rows = Counter(
        (
            _alike(name),
            f"{pair.spec.rows} x {pair.spec.columns}",
            ("quantize, " if pair.quantized else "") + ("side by side" if job.options.keep_names else "fuse"),
        )
        for name, pair in planned.pairs.items()
    )
    for (name, shape, action), times in rows.items():
        table.add_row(_plain(name), str(times), shape, action)
    console.print(table)
    _declined(console, planned.declined)
    _facts(
        console,
        (
            "Pairs",
            f"{len(planned.pairs)}, {len(planned.declined)} left alone, {len(planned.fused_already)} fused already",
        ),
        ("Size", f"{_megabytes(planned.source_bytes)} -> {_megabytes(needed)} in {len(planned.shards)} file(s)"),
        ("Peak memory", f"at most {_megabytes(planned.memory_bytes)}"),
        ("Free at output", f"{_megabytes(free)}{'' if free > needed else ': NOT ENOUGH'}"),
        notes=planned.notes,
    )


def report(done: FuseReport, *, as_json: bool) -> None:
    """The figures of a finished run."""
    if as_json:
        _json(done.to_dict())
        return
    console = _console()
    _declined(console, done.declined)
    worst = done.worst_relative_error
    _facts(
        console,
        ("Written", done.output),
        ("Pairs", f"{done.pairs}, {len(done.declined)} left alone, {done.fused_already} fused already"),
        ("Size", f"{_megabytes(done.source_bytes)} -> {_megabytes(done.output_bytes)}"),
        (
            "In memory",
            f"{done.weight_bytes_delta:+,} bytes of weights, {done.scale_bytes_delta:+,} bytes of scales against unfused FP8; "
            f"{_megabytes(done.load_transient_bytes)} for a moment while loading",
        ),
        *((("Quantised", f"{done.quantized} pairs, relative error at most {worst:.4f}"),) if worst is not None else ()),
        ("Time", f"{done.seconds:.1f} s"),
        notes=done.notes,
    )


def split_plan(job: SplitJob, *, as_json: bool) -> None:
    """What a split would write."""
    if as_json:
        sizes = {file: sum(tensor.info.nbytes for tensor in tensors) for file, tensors in job.shards.items()}
        _json({"pairs": job.pairs, "output_bytes": job.output_bytes, "shards": sizes})
        return
    size = f"{_megabytes(job.output_bytes)} in {len(job.shards)} file(s)"
    _facts(_console(), ("Pairs to split", str(job.pairs)), ("Size", size))


def split_report(done: SplitReport, *, as_json: bool) -> None:
    """What a split wrote."""
    if as_json:
        _json(done.to_dict())
        return
    size = f"{_megabytes(done.output_bytes)}, {done.tensors} tensors in {done.files} file(s)"
    _facts(
        _console(),
        ("Written", done.output),
        ("Pairs split", str(done.pairs)),
        ("Size", size),
        ("Time", f"{done.seconds:.1f} s"),
    )


def inspection(found: dict[str, Any], *, as_json: bool) -> None:
    """What `inspect` found in a checkpoint of fused pairs."""
    if as_json:
        _json(found)
        return
    console = _console()
    table = _table("kind", "pairs", "weights", "bytes")
    for kind, row in found["kinds"].items():
        table.add_row(_plain(kind), str(row["pairs"]), f"{row['weights']:,}", f"{row['bytes']:,}")
    console.print(table)
    _declined(console, found["declined"])
    _facts(
        console,
        ("Made by", found["producer"]),
        ("Form", f"FP8 gate/up pairs, scales for blocks of {' x '.join(map(str, found['weight_block_size']))}"),
        ("Size", f"{_megabytes(found['bytes'])}, of it {_megabytes(found['pair_bytes'])} fused pairs"),
        ("Other FP8 Linears", str(len(found["fp8_modules"]))),
        notes=found["source"].get("notes", []) if isinstance(found["source"], dict) else [],
    )
