"""The part of docs/results.md on generating in FP8 with a GPU, from what scripts/measure_generation_fp8_gpu.py wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from render_generation import STEPS

Table = Callable[[Sequence[str], Sequence[Sequence[str]]], str]
NAMES = {
    "stock": "transformers' own FP8",
    "unfused": "unfused",
    "fused": "fused",
    "separate-w8a8": "fused tensor, two products, 8-bit activations",
    "fused-w8a8": "fused tensor, one product, 8-bit activations",
    "halves of fused": "fused tensor, each half by a call of its own",
}
KINDS = {
    "tensor_bytes": "parameters and buffers",
    "bytes_loaded": "after loading",
    "bytes_at_most_loading": "at most while loading",
    "bytes_held": "after `prepare`",
    "bytes_at_most": "at most while decoding",
}


def section(document: dict[str, Any], table: Table) -> str:
    """Tokens a second and bytes of every model of a run, and how they compare with the unfused one."""
    source = document["provenance"]
    parts = [
        f"## Generating in FP8 on a GPU ({source['device']})\n",
        f"Random E4M3 weights of Qwen3-8B's shape in blocks of 128 x 128, {document['layers']} layers, fused by `w3pack fuse-gateup` and loaded "
        f"by `from_pretrained`, greedy decoding with a static cache after {document['prompt_tokens']} tokens, {document['steps']} steps, each a "
        "replay of one CUDA graph. `unfused` multiplies every matrix by the kernel that `fused` multiplies pairs by; both keep activations in "
        "16 bits. Memory is what torch had allocated after loading, and at most. "
        f"torch {source['torch']}, driver {source['driver']}.\n",
        table(["model", "step", "batch", "ms a step", "tokens/s", "speed against unfused", "GB held / at most"], rows(document)),
        memory(document),
        bits(document),
        not_run(document),
        f"`{source['command']}`\n",
    ]  # fmt: skip
    return "\n".join(filter(None, parts))


def rows(document: dict[str, Any]) -> list[list[str]]:
    """A row for each model, way to run a step, and batch."""
    found = []
    for way, told in STEPS.items():
        for name, model in document["models"].items():
            for batch, entry in model.get(way, {}).items():
                against = document["speed_against_unfused"].get(name, {}).get(way, {}).get(batch)
                found.append(
                    [
                        NAMES.get(name, name),
                        told,
                        batch,
                        f"{entry['milliseconds_a_step']:.2f}",
                        f"{entry['tokens_a_second']:.0f}",
                        "-" if against is None else f"{against:.3f}",
                        f"{model['bytes_held'] / 1e9:.2f} / {model['bytes_at_most'] / 1e9:.2f}",
                    ]
                )
    return found


def memory(document: dict[str, Any]) -> str:
    """How the fused model's bytes compare."""
    found = document["memory_against_unfused"].get("fused", {})
    ratios = ", ".join(f"{100 * (found[kind] - 1):+.3f} % {told}" for kind, told in KINDS.items() if kind in found)
    return f"Memory of the fused model against the unfused one: {ratios}.\n" if ratios else ""


def bits(document: dict[str, Any]) -> str:
    """Whose logits agree in every bit."""
    lines = []
    for entry in document["logits"]:
        calls = entry["calls"]
        equal = [shape for shape, call in calls.items() if call["equal"]]
        line = (
            f"- {NAMES.get(entry['model'], entry['model'])}, against {NAMES.get(entry['against'], entry['against'])}: "
        )
        if len(equal) == len(calls):
            line += "equal in every bit"
        else:
            apart = max(call["relative"] for call in calls.values())
            line += f"equal in every bit for {', '.join(equal)}, " if equal else "other bits, "
            line += f"at most {apart:.1e} apart (relative)"
        lines.append(line)
    if not lines:
        return ""
    shapes = ", ".join(document["logits"][0]["calls"])
    return f"Logits, for calls of {shapes} (batch x tokens):\n\n" + "\n".join(lines) + "\n"


def not_run(document: dict[str, Any]) -> str:
    """Models that could not run, and why."""
    lines = [
        f"{NAMES.get(name, name)} did not run: {model['why_not']}."
        for name, model in document["models"].items()
        if "why_not" in model
    ]
    return "\n".join(lines) + "\n" if lines else ""
