"""The part of docs/results.md on gate and up in FP8, from gateup_h200.json (`scripts/measure_gateup_gpu.py`)."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

Document = dict[str, Any]
Table = Callable[[list[str], list[list[str]]], str]
#: What was timed -> column of the table, in its order.
GATE_UP = {
    "kernel gate+up+SiLU": "kernel",
    "cuBLASLt two calls: gate+up+SiLU": "two calls",
    "cuBLASLt fused: gate+up+SiLU": "fused",
    "cuBLASLt two branches: gate+up+SiLU": "two branches",
}
FFN = {
    "kernel FFN": "kernel",
    "cuBLASLt two calls: FFN": "two calls",
    "cuBLASLt fused: FFN": "fused",
    "cuBLASLt two branches: FFN": "two branches",
}
DTYPES = {"float16": "fp16", "bfloat16": "bf16"}


def entries(document: Document) -> list[Document]:
    """Results of all parts."""
    return [entry for part in document["parts"].values() for entry in part["entries"]]


def times(document: Document) -> dict[tuple[str, str, int, str], list[float]]:
    """(what, shape, tokens, dtype) -> microseconds in each process that timed it."""
    found: dict[tuple[str, str, int, str], list[float]] = {}
    for entry in entries(document):
        if "timed" in entry and not entry["timed"].startswith(("config", "parts")):
            key = (entry["timed"], entry["shape"], entry["tokens"], entry["dtype"])
            found.setdefault(key, []).append(entry["us"])
    return found


def section(document: Document, table: Table) -> str:
    """Every table of the page."""
    source = document["provenance"]
    parts = [
        f"## Gate and up in FP8 ({source['device']})\n",
        "Microseconds for each call in a replayed CUDA graph, cold weights, median; a shape is I x K: gate and up are I x K, down is K x I. "
        "`kernel` keeps activations in 16 bits; the others round them to E4M3, with torch's cuBLASLt product: two calls, one over the "
        "fused tensor, two branches of the graph. Their activations are bfloat16. FFN is everything from the input of gate to the output "
        f"of down. Driver {source['driver']}, torch {source['torch']}, CUDA {source['cuda']}, commit "
        f"{source['commit'] or 'not recorded'}{' with changes' if source['dirty'] else ''}.\n",
    ]
    found = times(document)
    for title, kinds in (("Gate, up, SiLU", GATE_UP), ("FFN", FFN)):
        parts.append(f"### {title}\n")
        parts.append(timings(found, kinds, table))
    parts += [checks(document), equality(document, table), spread(found), f"`{source['command']}`\n"]
    return "\n".join(filter(None, parts))


def timings(found: dict[tuple[str, str, int, str], list[float]], kinds: dict[str, str], table: Table) -> str:
    """A row for each shape and number of tokens."""
    kernel, *others = kinds
    rows = []
    for shape, tokens in dict.fromkeys((shape, tokens) for what, shape, tokens, _ in found if what in kinds):
        row = [shape, str(tokens)]
        for what, dtype in [(kernel, "float16"), (kernel, "bfloat16"), *((other, "bfloat16") for other in others)]:
            samples = found.get((what, shape, tokens, dtype))
            row.append(f"{statistics.median(samples):.1f}" if samples else "-")
        rows.append(row)
    columns = [f"kernel, {name}" for name in DTYPES.values()] + [kinds[other] for other in others]
    return table(["I x K", "tokens", *columns], rows)


def spread(found: dict[tuple[str, str, int, str], list[float]]) -> str:
    """How far medians of several processes lie apart."""
    apart = [max(samples) / min(samples) - 1 for samples in found.values() if len(samples) > 1]
    if not apart:
        return ""
    return (
        f"{len(apart)} of these times are medians over {max(map(len, found.values()))} processes, which lie at most "
        f"{100 * max(apart):.1f} % apart.\n"
    )


def checks(document: Document) -> str:
    """Errors against float64."""
    lines = []
    for entry in entries(document):
        for name, worst in entry.get("check", {}).get("worst", {}).items():
            lines.append(f"{name} {worst['error']:.1e} (torch {worst['torch_error']:.1e})")
    cases = [entry["check"] for entry in entries(document) if "check" in entry]
    if not cases:
        return ""
    total, bad = sum(case["cases"] for case in cases), sum(case["bad"] for case in cases)
    return (
        f"The kernel against float64, {total} calls of awkward shapes, each ten times with equal bits, {bad} of them wrong. Largest "
        f"relative error (Frobenius), beside 16-bit torch on the dequantised matrix: {'; '.join(lines)}.\n"
    )


def equality(document: Document, table: Table) -> str:
    """Whether a fused product has the bytes of two."""
    found = [entry for entry in entries(document) if "equality" in entry]
    if not found:
        return ""
    rows = [
        [entry["shape"], str(entry["tokens"]), DTYPES[entry["dtype"]], entry["equality"], entry["why"] or ""]
        for entry in found
        if entry["equality"] != "equal"
    ]
    equal = len(found) - len(rows)
    text = (
        f"### Bytes of the fused cuBLASLt product\n\nOf {len(found)} shapes, numbers of tokens and dtypes, {equal} have the bytes of two "
        "products, padded rows included."
    )
    if rows:
        text += " In the others the arm declines:\n\n" + table(["I x K", "tokens", "dtype", "", "why"], rows)
    return text + "\n"


def summary(document: Document) -> str:
    """A sentence for README.md, of the first shape."""
    found = times(document)
    shape = next((shape for what, shape, _, _ in found if what in GATE_UP), None)
    tokens = sorted({tokens for _, where, tokens, _ in found if where == shape})
    parts = []
    for what, name in (("kernel gate+up+SiLU", "gate, up and SiLU"), ("kernel FFN", "the whole MLP")):
        values = [
            statistics.median(found[key])
            for key in ((what, shape, count, "float16") for count in tokens)
            if key in found
        ]
        others = [
            statistics.median(found[key])
            for key in ((what.replace("kernel", "cuBLASLt two calls:"), shape, count, "bfloat16") for count in tokens)
            if key in found
        ]
        if values and others:
            parts.append(
                f"{name} take {min(values):.0f} to {max(values):.0f} µs" if name.startswith("gate")
                else f"{name} takes {min(values):.0f} to {max(values):.0f} µs"
            )  # fmt: skip
            parts[-1] += f" (two cuBLASLt calls with 8-bit activations: {min(others):.0f} to {max(others):.0f})"
    if not parts:
        return ""
    return (
        f"A fused FP8 pair of {shape} (I x K) with {tokens[0]} to {tokens[-1]} tokens in float16 on one "
        f"{document['provenance']['device']}, in a replayed CUDA graph: {'; '.join(parts)}.\n\n"
    )
