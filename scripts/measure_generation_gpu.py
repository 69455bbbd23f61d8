"""Tokens a second of a random model of Llama-3-8B's shape, bf16 and packed, on the GPU that is here, in one run.

    python scripts/measure_generation_gpu.py > docs/results/generation_h200.json
    python scripts/measure_generation_gpu.py --layers 4 --batch 1      # a quick look

The model is made on the GPU, saved, quantised (without data: speed does not depend on the values) and loaded by
`from_pretrained`; both models then decode greedily with a static cache, each step a replay of one CUDA graph. Memory is what
torch had allocated after loading, and at most while decoding.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.cache_utils import StaticCache

from w3pack.bench.provenance import provenance
from w3pack.integrations.loadable import loadable_for
from w3pack.integrations.sources import open_source
from w3pack.pipeline.plan import QuantizeOptions
from w3pack.pipeline.quantize_model import prepare_job, run
from w3pack.runtime.prepare import prepare

PROMPT = 32
WARM_UP = 3


def llama_config(layers: int, *, small: bool = False) -> LlamaConfig:
    """Llama-3-8B with `layers` layers; `small` shrinks every side, to try the script without a GPU."""
    if small:
        sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 256}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    else:
        sizes = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256}
        heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    return LlamaConfig(
        **sizes, **heads, num_hidden_layers=layers, max_position_embeddings=8192, rope_theta=500000.0, dtype="bfloat16"
    )


def make(config: LlamaConfig, folder: Path, device: torch.device) -> None:
    """Random weights, saved as bf16 safetensors."""
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def decode(model: Any, batch: int, tokens: int) -> dict[str, float]:
    """Greedy decoding of `batch` sequences: milliseconds a step and tokens a second; a CUDA graph where there is a GPU."""
    device = model.device
    cache = StaticCache(config=model.config, max_cache_len=PROMPT + WARM_UP + tokens + 8)
    prompt = torch.randint(0, model.config.vocab_size, (batch, PROMPT), device=device)
    token = torch.zeros(batch, 1, dtype=torch.long, device=device)
    position = torch.full((batch, 1), PROMPT, dtype=torch.long, device=device)

    def forward(ids: torch.Tensor, positions: torch.Tensor) -> None:
        logits = model(ids, past_key_values=cache, position_ids=positions, logits_to_keep=1).logits
        token.copy_(logits[:, -1].argmax(dim=-1, keepdim=True))

    def step() -> None:
        forward(token, position)
        position.add_(1)

    with torch.inference_mode():
        forward(prompt, torch.arange(PROMPT, device=device).expand(batch, -1))
        replay = step
        if device.type == "cuda":
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    step()
            torch.cuda.current_stream(device).wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            replay = graph.replay
        times = []
        for _ in range(tokens):
            begin = time.perf_counter()
            replay()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - begin)
    seconds = statistics.median(times)
    return {"milliseconds_a_step": round(1e3 * seconds, 4), "tokens_a_second": round(batch / seconds, 1)}


def measure(folder: Path, batches: list[int], tokens: int, device: torch.device) -> dict[str, Any]:
    """Load a checkpoint and decode with it."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map=str(device))
    loaded = torch.cuda.memory_allocated(device) - before if on_gpu else 0
    report = prepare(model, tuple(batches))
    runs = {str(batch): decode(model, batch, tokens) for batch in batches}
    peak = torch.cuda.max_memory_allocated(device) - before if on_gpu else 0
    return {"bytes_loaded": loaded, "bytes_at_most": peak, "kernels": report.kernels, "batches": runs}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Tokens a second, bf16 and packed.")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script")
    options = parser.parse_args()
    device = torch.device(options.device)
    with tempfile.TemporaryDirectory() as scratch:
        source, packed = Path(scratch) / "source", Path(scratch) / "packed"
        make(llama_config(options.layers, small=options.small), source, device)
        begin = time.perf_counter()
        with open_source(str(source)) as opened:
            job = prepare_job(opened, QuantizeOptions(), loadable=loadable_for(opened))
            report = run(job, packed, device=str(device))
        seconds = time.perf_counter() - begin
        plain = measure(source, options.batch, options.tokens, device)
        ours = measure(packed, options.batch, options.tokens, device)
    speed = {
        batch: round(ours["batches"][batch]["tokens_a_second"] / plain["batches"][batch]["tokens_a_second"], 3)
        for batch in plain["batches"]
    }
    document = {
        "provenance": provenance(0, " ".join(["python", *sys.argv])) if device.type == "cuda" else None,
        "layers": options.layers,
        "quantise_seconds": round(seconds, 1),
        "weights": job.plan.weights,
        "bits_per_weight": getattr(report, "bits_per_weight", None),
        "bf16": plain,
        "w3pack": ours,
        "speed_against_bf16": speed,
    }
    print(json.dumps(document, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
