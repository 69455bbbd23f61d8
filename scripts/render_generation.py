"""The part of docs/results.md on generating with a GPU, from what scripts/measure_generation_gpu.py wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Table = Callable[[Sequence[str], Sequence[Sequence[str]]], str]
NAMES = {"bf16": "bf16", "separate": "packed", "merged": "packed, merged Linears"}
STEPS = {"graph": "captured", "compiled": "compiled and captured"}


def section(document: dict[str, Any], table: Table) -> str:
    """Tokens a second and bytes of every model of a run, and how they compare with bf16."""
    rows = []
    for way, told in STEPS.items():
        for name, model in document["models"].items():
            for batch, found in model[way].items():
                against = document["speed_against_bf16"].get(name, {}).get(way, {}).get(batch)
                rows.append(
                    [
                        NAMES.get(name, name),
                        told,
                        batch,
                        f"{found['milliseconds_a_step']:.2f}",
                        f"{found['tokens_a_second']:.0f}",
                        "-" if against is None else f"{against:.2f}",
                        f"{model['bytes_held'] / 1e9:.2f} / {model['bytes_at_most'] / 1e9:.2f}",
                    ]
                )
    source = document["provenance"]
    some, layers = document["quantised_layers"], document["layers"]
    repeated = f" Only {some} layers were quantised, and their tensors repeated in the others." if some < layers else ""
    return (
        f"## Generating on a GPU ({source['device']})\n\n"
        f"Random weights of Llama-3-8B's shape, {layers} layers, quantised and loaded by `from_pretrained` in this run, greedy decoding with a "
        f"static cache after {document['prompt_tokens']} tokens, {document['steps']} steps, each a replay of one CUDA graph.{repeated} "
        "Memory is what torch had allocated after loading, and at most. "
        f"torch {source['torch']}, driver {source['driver']}.\n\n"
        + table(
            ["model", "step", "batch", "ms a step", "tokens/s", "speed against bf16", "GB held / at most"],
            rows,
        )
        + f"\n`{source['command']}`\n"
    )


def summary(document: dict[str, Any]) -> str:
    """A sentence for README.md: the fastest way of one sequence, and memory."""
    base, merged = document["models"]["bf16"], document["models"]["merged"]
    way = "compiled" if "1" in merged["compiled"] else "graph"
    before, after = base[way]["1"], merged[way]["1"]
    how = "`torch.compile` and a CUDA graph" if way == "compiled" else "a CUDA graph"
    return (
        f"A model of Llama-3-8B's shape on one {document['provenance']['device']}, one sequence, {how}, transformers' own model code: "
        f"{after['tokens_a_second']:.0f} tokens/s, {document['speed_against_bf16']['merged'][way]['1']:.2f} times the "
        f"{before['tokens_a_second']:.0f} of bf16, in {merged['bytes_held'] / 1e9:.1f} instead of {base['bytes_held'] / 1e9:.1f} GB.\n\n"
    )
