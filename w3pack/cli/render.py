"""Reports as tables for people or JSON for programs, on stdout."""

from __future__ import annotations

import json as json_module
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from w3pack.cli import render_mixed

if TYPE_CHECKING:  # these import torch, and `w3pack --help` need not wait for it
    from w3pack.pipeline.calibrate import Calibration
    from w3pack.pipeline.plan import PlannedTensor
    from w3pack.pipeline.quantize_model import Job
    from w3pack.pipeline.report import Report
    from w3pack.pipeline.verify_checkpoint import Verification


def _console() -> Console:
    console = Console(highlight=False, soft_wrap=False)
    return console if console.is_terminal else Console(highlight=False, width=120)


def _json(value: Any) -> None:
    typer.echo(json_module.dumps(value, indent=2, ensure_ascii=False))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    return table


def _plain(text: object) -> str:
    """Text from a file as it may go to a terminal: no markup, no control characters."""
    return escape("".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in str(text)))


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.1f} MB" if nbytes < 1e10 else f"{nbytes / 1e9:,.2f} GB"


def plan(
    job: Job, output: Path, *, layers: bool, as_json: bool, calibration: Calibration | None = None, workers: int = 1
) -> None:
    """The plan of a run: every tensor (alike ones of several layers in one line unless `layers`), then the sums."""
    from w3pack.checkpoint.staging import free_bytes
    from w3pack.pipeline.calibrate import memory_bytes
    from w3pack.pipeline.sensitivity import memory_bytes as measuring_bytes

    memory = memory_bytes(job, calibration, workers=workers) if calibration else job.plan.memory_bytes
    if job.sensitivity is not None and job.sensitivity["tokens"] and calibration is not None:
        measured, forms = job.sensitivity["tokens"], max(map(len, job.sensitivity["modules"].values()))
        length = calibration.facts["length"]
        memory = max(memory, measuring_bytes(job, tokens=measured, length=length, forms=forms, workers=workers))
    planned, free = job.plan, free_bytes(output)
    needed = planned.output_bytes + job.copied_bytes
    if as_json:
        _json(
            {
                "tensors": [_planned(tensor) for tensor in planned.tensors],
                "shards": {
                    file: sum(o.nbytes for t in tensors for o in t.outputs) + (0 if number else planned.guard.nbytes)
                    for number, (file, tensors) in enumerate(planned.shards.items())
                },
                "weights": planned.weights,
                "bits_per_weight": planned.bits_per_weight,
                "coverage": planned.coverage,
                "source_bytes": planned.source_bytes,
                "output_bytes": needed,
                "memory_bytes": memory,
                "calibration": {"effort": calibration.effort, **calibration.facts} if calibration else None,
                "sensitivity": job.sensitivity,
                "free_bytes": free,
                "copied_files": sorted(job.source.companion_files()),
                "notes": list(planned.notes),
            }
        )
        return
    table = _table("tensor", "times", "dtype", "shape", "action", "bits", "why")
    rows = Counter(
        (
            tensor.source.name if layers else re.sub(r"\.\d+(?=\.)", ".*", tensor.source.name),
            tensor.source.dtype,
            " x ".join(map(str, tensor.source.shape)),
            tensor.action,
            f"{tensor.spec.bits_per_weight:.3f}" if tensor.spec else "",
            tensor.reason,
        )
        for tensor in sorted(planned.tensors, key=lambda tensor: _natural(tensor.source.name))
    )
    for (name, dtype, shape, action, bits, why), times in rows.items():
        table.add_row(_plain(name), str(times), dtype, shape, action, bits, _plain(why))
    console = _console()
    console.print(table)
    _facts(
        console,
        ("Linears to quantise", f"{len(planned.quantized)} ({planned.weights:,} weights)"),
        ("Bits per weight", f"{planned.bits_per_weight:.3f} with scales, maps and padding"),
        ("Coverage", f"{planned.coverage:.1%} of the decoder's matrix weights"),
        ("Size", f"{_megabytes(planned.source_bytes)} -> {_megabytes(needed)} in {len(planned.shards)} file(s)"),
        ("Peak memory", f"at most {_megabytes(memory)}"),
        ("Free at output", f"{_megabytes(free)}{'' if free > needed else ': NOT ENOUGH'}"),
        *(_calibration_facts({"effort": calibration.effort, **calibration.facts}) if calibration else ()),
        *render_mixed.facts(job.sensitivity),
        notes=[*planned.notes, *(calibration.notes if calibration else ())],
    )


def _calibration_facts(facts: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    texts = ", ".join(str(text["name"]) for text in facts["texts"])
    return (("Calibration", f"effort {facts['effort']}, {facts['samples']} x {facts['length']} tokens of {texts}"),)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key by which layer 2 comes before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _planned(tensor: PlannedTensor) -> dict[str, Any]:
    return {
        "name": tensor.source.name,
        "dtype": tensor.source.dtype,
        "shape": list(tensor.source.shape),
        "action": tensor.action,
        "why": tensor.reason,
        "output_bytes": sum(info.nbytes for info in tensor.outputs),
        "bits_per_weight": tensor.spec.bits_per_weight if tensor.spec else None,
    }


def _facts(console: Console, *facts: tuple[str, str], notes: tuple[str, ...] | list[str] = ()) -> None:
    console.print()
    for name, value in facts:
        console.print(f"{name + ':':<22}{_plain(value)}", soft_wrap=True)
    for note in notes:
        console.print(f"{'Note:':<22}{_plain(note)}", soft_wrap=True)


def report(done: Report, *, as_json: bool, layers: bool = False) -> None:
    """The figures of a finished run; with `layers`, of each Linear and block first."""
    if as_json:
        _json(done.to_dict())
        return
    table = _table("kind", "Linears", "weights", "relative error", "SNR dB", "bits/weight")
    for row in done.kinds:
        snr = f"{row.snr_db:.2f}" if row.snr_db is not None else "-"
        table.add_row(
            _plain(row.kind),
            str(row.modules),
            f"{row.weights:,}",
            f"{row.relative_error:.4f}",
            snr,
            f"{row.bits_per_weight:.3f}",
        )
    console = _console()
    if layers:
        render_mixed.layers(console, done)
    console.print(table)
    _facts(
        console,
        ("Written", done.output),
        ("Bits per weight", f"{done.bits_per_weight:.3f} with scales, maps and padding"),
        ("Coverage", f"{done.coverage:.1%} of the decoder's matrix weights"),
        (
            "Size",
            f"{_megabytes(done.source_bytes)} -> {_megabytes(done.output_bytes)}, of it {_megabytes(done.bits_per_weight * done.weights / 8)} packed",
        ),
        ("Worst layer", f"{done.worst[0][0]} (relative error {done.worst[0][1]:.4f})"),
        *(_calibrated(done.calibration) if done.calibration else ()),
        *render_mixed.facts(done.sensitivity),
        *render_mixed.total(done),
        ("Time", f"{done.seconds:.1f} s, {done.weights_per_second / 1e6:.1f} million weights/s"),
        notes=done.notes,
    )


def _calibrated(facts: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """What calibration was and found."""
    lines = list(_calibration_facts(facts))
    worst = facts["most_sensitive_first"][:3]
    if worst:
        losses = ", ".join(
            f"{name} ({facts['losses'][name][0]:.4f} -> {facts['losses'][name][1]:.4f})" for name in worst
        )
        lines.append(("Largest losses", f"{losses}: relative loss of the outputs without data -> calibrated"))
    if "tuning" in facts:
        lines.append(("Tuned", _tuning(facts["tuning"])))
    errors = [error for error in facts["block_errors"] if error is not None]
    if errors:
        lines.append(("Blocks", f"outputs off by {min(errors):.3f} to {max(errors):.3f} of what each block adds"))
    if facts["without_tokens"]:
        lines.append(
            ("Without tokens", f"{len(facts['without_tokens'])} Linears, such as {facts['without_tokens'][0]}")
        )
    return tuple(lines)


def _tuning(facts: dict[str, Any]) -> str:
    """What the last stage gained."""
    before, after = facts["before"], facts["after"]
    gain = f"{before:.4f} -> {after:.4f} ({after / before - 1:+.0%})" if before else f"{before:.4f} -> {after:.4f}"
    if facts["kind"] == "block by block":
        return f"block by block, since the whole model does not fit in memory: relative squared error of outputs {gain}"
    return (
        f"end to end: KL to the source {gain} nats a token on {facts['held_out_windows']} windows held out, "
        f"{facts['steps']} steps over {facts['tokens']:,} tokens"
    )


def inspection(found: dict[str, Any], *, layers: bool, as_json: bool) -> None:
    """What `inspect` found."""
    if as_json:
        _json(found)
        return
    console = _console()
    table = _table("kind", "Linears", "weights", "bytes", "worst error")
    for kind, row in found["kinds"].items():
        worst = row["worst_relative_error"]
        table.add_row(
            _plain(kind),
            str(row["modules"]),
            f"{row['weights']:,}",
            f"{row['bytes']:,}",
            "-" if worst is None else f"{worst:.4f}",
        )
    console.print(table)
    if layers:
        detail = _table("Linear", "rows x columns", "layout", "maps", "first map", "error")
        for name, entry in sorted(found["modules"].items(), key=lambda item: _natural(item[0])):
            error = entry["relative_error"]
            detail.add_row(
                _plain(name),
                f"{entry['rows']} x {entry['columns']}",
                f"{entry['layout']} g{entry['group_size']}",
                f"{entry['maps']} {entry['qmap_dtype']}",
                " ".join(f"{value:.4g}" for value in entry["first_map"]),
                "-" if error is None else f"{error:.4f}",
            )
        console.print()
        console.print(detail)
    kept = Counter(str(why).removeprefix("copy: ") for why in found["kept"].values())
    coverage = found["coverage"]
    _facts(
        console,
        ("Made by", found["producer"]),
        ("Bits per weight", f"{found['bits_per_weight']:.3f} with scales, maps and padding"),
        ("Size", f"{_megabytes(found['bytes'])}, of it {_megabytes(found['packed_bytes'])} packed"),
        ("Coverage", "not recorded" if coverage is None else f"{coverage:.1%} of the decoder's matrix weights"),
        *render_mixed.facts(found["sensitivity"]),
        (
            "Tensor parallel",
            ", ".join(map(str, found["tensor_parallel_degrees"])) + " (degrees that cut whole tiles and groups)",
        ),
        (
            "Kept as they were",
            ", ".join(f"{count} tensors ({why})" for why, count in kept.most_common()) or "not recorded",
        ),
        notes=found["source"].get("notes", []) if isinstance(found["source"], dict) else [],
    )


def verification(result: Verification, *, as_json: bool) -> None:
    """What `verify` checked."""
    if as_json:
        _json({"ok": True, **result.to_dict()})
        return
    console = _console()
    if result.errors:
        table = _table("Linear", "relative error")
        for name, error in sorted(result.errors.items(), key=lambda item: _natural(item[0])):
            table.add_row(_plain(name), f"{error:.4f}")
        console.print(table)
    console.print(
        f"OK: {result.modules} packed modules, {result.tensors} tensors, {result.digests} digests"
        f"{', every layer measured against the source' if result.errors else ''}"
    )
    for note in result.notes:
        console.print(f"Note: {_plain(note)}")
