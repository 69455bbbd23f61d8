"""The GPU part of docs/results.md and README.md, from w3_h200.json (`w3pack bench --json`) and published_h200.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Document = dict[str, Any]
Table = Callable[[list[str], list[list[str]]], str]
Form = tuple[str, str, str, str]

MOST_PUBLISHED_FOR_EIGHT = 16


def form_of(entry: Document) -> Form:
    """What entries of one table have in common."""
    return entry["layout"], entry["qmap_dtype"], entry["x_dtype"], entry["map_kind"]


def name_of(form: Form) -> str:
    """A form in words."""
    layout, qmap_dtype, x_dtype, map_kind = form
    maps = {"linear": "one map", "tile": "a map for each row tile", "row": "a map for each row"}[map_kind]
    return f"{layout} layout, {qmap_dtype} map, {x_dtype} activations, {maps}"


def forms(document: Document) -> dict[Form, list[Document]]:
    """Entries by form, both in the order of the file."""
    found: dict[Form, list[Document]] = {}
    for entry in document["entries"]:
        found.setdefault(form_of(entry), []).append(entry)
    return found


def published_row(published: Document | None, entry: Document) -> Document:
    """The published figures for the same shape and, up to 16 tokens, for 8 tokens; empty where there are none."""
    tokens = 8 if entry["tokens"] <= MOST_PUBLISHED_FOR_EIGHT else entry["tokens"]
    wanted = {"rows": entry["rows"], "columns": entry["columns"], "tokens": tokens}
    rows = published["rows"] if published else []
    return next((row for row in rows if wanted.items() <= row.items()), {})


def section(document: Document, published: Document | None, table: Table) -> str:
    """Every table of the page."""
    source = document["provenance"]
    clocks = source["clocks"]
    kernels = published["kernels"] if published else {}
    parts = [
        f"## Packed Linears on a GPU ({source['device']})\n",
        f"Microseconds for each call in a replayed CUDA graph, cold weights, median; torch and the reading ceiling (the same "
        f"bytes, read and nothing else: {document['ceiling_kind']}) in the same run; an empty kernel takes "
        f"{document['empty_kernel_microseconds']:.2f} us. Errors are relative (Frobenius) to float64, output rounding "
        f"included. Driver {source['driver']}, torch {source['torch']}, CUDA {source['cuda']}, NVRTC {source['nvrtc']}, "
        f"{clocks['sm_mhz']} of {clocks['sm_max_mhz']} MHz, commit {source['commit'] or 'not recorded'}"
        f"{' with changes' if source['dirty'] else ''}.\n",
    ]
    if published:
        parts.append(f"Columns in brackets: {published['note']}\n")
    columns = ["rows x columns", "tokens", "µs", "of ceiling", "torch µs", "x torch", "error", "torch's error"]
    for form, entries in forms(document).items():
        rows = []
        for entry in entries:
            other = published_row(published, entry)
            rows.append(
                [
                    f"{entry['rows']} x {entry['columns']}",
                    str(entry["tokens"]),
                    f"{entry['microseconds']:.1f}",
                    f"{100 * entry['share_of_ceiling']:.0f} %",
                    f"{entry['torch_microseconds']:.1f}",
                    f"{entry['speed_against_torch']:.2f}",
                    f"{entry['relative_error']:.1e}",
                    f"{entry['torch_relative_error']:.1e}",
                    *(f"{other[name]:g}" if name in other else "-" for name in kernels),
                ]
            )
        parts.append(f"### {name_of(form)}\n")
        parts.append(table(columns + [f"({name})" for name in kernels.values()], rows))
    if document["prefill"]:
        parts.append("### More tokens than a decode kernel takes\n")
        parts.append(prefill(document["prefill"], table))
    parts.append(f"`{source['command']}`\n")
    return "\n".join(parts)


def against_float16(bfloat16: Document, float16: Document, table: Table) -> str:
    """The same calls with bfloat16 activations, from a run right after the other one."""
    key = ("rows", "columns", "tokens", "layout", "qmap_dtype", "map_kind")
    others = {tuple(entry[name] for name in key): entry for entry in float16["entries"]}
    rows = []
    for entry in bfloat16["entries"]:
        other = others.get(tuple(entry[name] for name in key))
        rows.append(
            [
                f"{entry['rows']} x {entry['columns']}",
                str(entry["tokens"]),
                f"{entry['microseconds']:.1f}",
                "-" if other is None else f"{other['microseconds']:.1f}",
                "-" if other is None else f"{entry['microseconds'] / other['microseconds']:.3f}",
                f"{entry['relative_error']:.1e}",
                f"{entry['torch_relative_error']:.1e}",
            ]
        )
    first = bfloat16["entries"][0]
    return (
        f"### bfloat16 activations beside float16 ones ({first['layout']} layout, {first['qmap_dtype']} map)\n\n"
        "Two runs, one after the other; clocks differ between them.\n\n"
        + table(["rows x columns", "tokens", "bfloat16 µs", "float16 µs", "ratio", "error", "torch's error"], rows)
        + f"\n`{bfloat16['provenance']['command']}`\n"
    )


def prefill(entries: list[Document], table: Table) -> str:
    """The operator against torch over the unpacked matrix."""
    rows = [
        [
            f"{entry['rows']} x {entry['columns']}",
            str(entry["tokens"]),
            f"{entry['layout']} {entry['qmap_dtype']} {entry['x_dtype']}",
            f"{entry['microseconds']:.0f}",
            f"{entry['torch_microseconds']:.0f}",
            f"{entry['microseconds'] / entry['torch_microseconds']:.2f}",
            "-"
            if entry.get("mainloop_microseconds") is None
            else f"{entry['without_mainloop_microseconds'] / entry['torch_microseconds']:.2f}",
        ]
        for entry in entries
    ]
    return table(
        ["rows x columns", "tokens", "form", "µs", "torch µs", "time / torch's", "dequantised / torch's"], rows
    )


def summary(document: Document, table: Table, *, tokens: int = 8) -> str:
    """A line for each form: how fast against torch, how near to the ceiling, over all shapes."""
    rows = []
    for form, entries in forms(document).items():
        chosen = [entry for entry in entries if entry["tokens"] == tokens]
        if chosen:
            speeds = [entry["speed_against_torch"] for entry in chosen]
            shares = [100 * entry["share_of_ceiling"] for entry in chosen]
            rows.append(
                [
                    name_of(form),
                    f"{min(speeds):.1f} to {max(speeds):.1f} times",
                    f"{min(shares):.0f} to {max(shares):.0f} %",
                ]
            )
    if not rows:
        return ""
    sizes = {(entry["rows"], entry["columns"]) for entry in document["entries"]}
    return (
        f"A packed Linear with {tokens} tokens on one {document['provenance']['device']}, over {len(sizes)} shapes, in a "
        "replayed CUDA graph:\n\n"
        + table(["form", "speed against 16-bit torch", "of the speed at which its bytes can be read"], rows)
        + "\n"
    )


def counters(document: Document, table: Table) -> str:
    """What `profile_kernels.py` saw of the decode kernels."""
    rows = []
    for case in document["cases"]:
        kernel = case["launches"][-1]
        stalls, pipes = kernel["stalled_warps_per_issue"], kernel["pipes_percent"]
        waits = [(name, value) for name, value in stalls.items() if name not in ("selected", "not_selected")][:3]
        tensor = max((value for name, value in pipes.items() if name.startswith("tensor")), default=0.0)
        rows.append(
            [
                case["shape"].replace("x", " x "),
                str(case["tokens"]),
                f"{kernel['microseconds']:.1f}",
                f"{kernel['dram_percent']:.0f} %",
                f"{kernel['l2_percent']:.0f} %",
                f"{kernel['issued_percent_of_cycles']:.0f} %",
                f"{pipes['alu']:.0f} %",
                f"{tensor:.0f} %",
                ", ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in waits),
            ]
        )
    return (
        "### What the decode kernels wait for (dense layout, int8 map)\n\n"
        "Nsight Compute, each launch by itself and from a cold L2 cache, so that nothing of it lies under the launch before: times are "
        "longer than those above. Shares are of the peak; of the integer and logic pipe (ALU: permutes, shifts, selects, conversions) "
        "and the tensor pipe, of the cycles in which a multiprocessor was busy; waits are warps that wait for each instruction "
        "issued.\n\n"
        + table(
            ["rows x columns", "tokens", "µs", "DRAM", "L2", "issued", "ALU pipe", "tensor pipe", "longest waits"], rows
        )
        + f"\n`{document['provenance']['command']}`\n"
    )


def calibration(document: Document, table: Table) -> str:
    """How long calibration takes on a GPU (`measure_calibrated_gpu.py`)."""
    rows = []
    for effort, found in document["efforts"].items():
        slowest = sorted(found["stages"].items(), key=lambda stage: -stage[1])[:4]
        rows.append(
            [
                f"`{effort}`",
                f"{found['seconds']:.1f}",
                ", ".join(f"{block['seconds']:.1f}" for block in found["blocks"]),
                f"{found['seconds_outside_blocks']:.1f}",
                f"{found['gpu_bytes_at_most'] / 1e9:.1f}",
                f"{found['rss_bytes_at_most'] / 1e9:.1f}",
                ", ".join(f"{name} {seconds:.1f}" for name, seconds in slowest),
            ]
        )
    source = document["provenance"]
    return (
        f"## Calibration on a GPU ({source['device']})\n\n"
        f"Random weights of Llama-3-8B's shape, {document['layers']} layers, {document['samples']} windows of {document['window']} tokens, group "
        f"size {document['group_size']}; seconds, with reading and writing files. torch {source['torch']}, {document['cpu_cores']} "
        "processor cores.\n\n"
        + table(
            [
                "effort",
                "in all",
                "each block",
                "outside of blocks",
                "GPU GB at most",
                "host GB at most",
                "longest stages",
            ],
            rows,
        )
        + f"\n`{source['command']}`\n"
    )
