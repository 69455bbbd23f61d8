"""Seconds for each generated token on this CPU: the packed model beside the same source in bfloat16, in one run.

    python scripts/measure_generation.py [--source GGUF_OR_FOLDER] [--packed FOLDER] [--json OUT.json]

The source is loaded by stock transformers in bfloat16; each model continues the same prompt greedily, turn about, and the
median time of a token after the first is reported, with unpacked matrices kept (the default) and with none kept.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from fetch import fetch_model
from transformers import AutoModelForCausalLM

import w3pack
from w3pack.runtime import dense_cache
from w3pack.runtime.linear import W3Linear


def load_source(path: Path) -> Any:
    """The source in bfloat16; a GGUF file dequantised by transformers."""
    if path.suffix != ".gguf":
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    extra = {}
    if hasattr(transformers, "GgufConfig"):
        extra["quantization_config"] = transformers.GgufConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16, **extra)


def token_seconds(model: Any, ids: torch.Tensor, new_tokens: int) -> list[float]:
    """Seconds of each decode step, greedy, with a key-value cache."""
    times = []
    with torch.inference_mode():
        out = model(ids, use_cache=True)
        for _ in range(new_tokens):
            step = out.logits[:, -1:].argmax(-1)
            started = time.perf_counter()
            out = model(step, past_key_values=out.past_key_values, use_cache=True)
            times.append(time.perf_counter() - started)
    return times


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="default: SmolLM2-135M, fetched")
    parser.add_argument(
        "--packed", type=Path, default=Path("w3pack-out/smollm2-135m-w3"), help="default: the quickstart's"
    )
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--json", type=Path, default=Path("docs/results/generation_cpu.json"))
    arguments = parser.parse_args()
    arguments.source = arguments.source or fetch_model("smollm2-135m")
    ids = torch.arange(100, 132).view(1, -1)
    stock, packed = (
        load_source(arguments.source),
        AutoModelForCausalLM.from_pretrained(arguments.packed, dtype=torch.bfloat16),
    )
    runs: dict[str, list[float]] = {"bf16": [], "w3": [], "w3, nothing kept": []}
    for _ in range(3):
        runs["bf16"] += token_seconds(stock, ids, arguments.tokens)
        dense_cache.set_budget(None)
        token_seconds(packed, ids, 1)
        runs["w3"] += token_seconds(packed, ids, arguments.tokens)
        dense_cache.set_budget(0)
        for module in packed.modules():
            if isinstance(module, W3Linear):
                module.drop_dense()
        runs["w3, nothing kept"] += token_seconds(packed, ids, 4)
    medians = {name: statistics.median(times) for name, times in runs.items()}
    result = {
        "command": "python scripts/measure_generation.py",
        "source": arguments.source.name,
        "w3pack": w3pack.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "milliseconds_per_token": {name: 1000 * value for name, value in medians.items()},
        "ratio_to_bf16": {name: value / medians["bf16"] for name, value in medians.items()},
    }
    arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
