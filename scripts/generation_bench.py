"""What the scripts that measure generating share: random checkpoints, decoding, memory, and logits.

Weights are made on the device and written layer by layer, no model is built. Models decode greedily with a static cache, each step a
replay of one CUDA graph where there is a GPU. Memory is what torch has allocated.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.cache_utils import StaticCache

from w3pack.bench.provenance import provenance
from w3pack.runtime.prepare import prepare

PROMPT = 32
WARM_UP = 3
#: Steps timed together: replays follow each other without waiting, as they do where nobody looks at each token.
STEPS = 8
INDEX = "model.safetensors.index.json"
LAYER = re.compile(r"(model\.layers\.)(\d+)(\..*)")
SECONDS: dict[str, float] = {}
#: Makes the tensors of one parameter: its name, its random float weights -> tensors by name.
Make = Callable[[str, torch.Tensor], dict[str, torch.Tensor]]


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Say how long something took."""
    begin = time.perf_counter()
    yield
    SECONDS[name] = round(time.perf_counter() - begin, 1)
    print(f"{name}: {SECONDS[name]} s", file=sys.stderr, flush=True)


def layer_of(name: str) -> int:
    """The number of a tensor's decoder layer; -1 for what lies outside of them."""
    found = LAYER.fullmatch(name)
    return int(found[2]) if found else -1


def shard_name(layer: int) -> str:
    """The file of a layer, or of what lies outside of them."""
    return "model-outside.safetensors" if layer < 0 else f"model-layer-{layer:03}.safetensors"


def write_index(folder: Path, sizes: dict[str, tuple[str, int]]) -> None:
    """The index of a checkpoint: tensor -> (file, bytes). Written last: a folder that has it is complete."""
    document = {
        "metadata": {"total_size": sum(nbytes for _, nbytes in sizes.values())},
        "weight_map": {name: file for name, (file, _) in sizes.items()},
    }
    (folder / INDEX).write_text(json.dumps(document))


def as_made(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A parameter as it is."""
    return {name: weight}


def make(config: Any, folder: Path, device: torch.device, *, tensors_of: Make = as_made) -> None:
    """Random bf16 weights, or what `tensors_of` makes of them, a file for each layer; no model is built."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    shapes = {name: tensor.shape for name, tensor in skeleton.state_dict().items()}
    generator = torch.Generator(device).manual_seed(0)
    sizes: dict[str, tuple[str, int]] = {}
    with ThreadPoolExecutor(2) as pool:
        writes = []
        for layer in range(-1, config.num_hidden_layers):
            tensors = {}
            for name in (name for name in shapes if layer_of(name) == layer):
                made = torch.randn(shapes[name], generator=generator, device=device, dtype=torch.bfloat16)
                norm = len(shapes[name]) == 1
                made = made.mul_(0.1).add_(1) if norm else made.mul_(config.initializer_range)
                tensors |= {part: tensor.cpu() for part, tensor in tensors_of(name, made).items()}
            sizes |= {name: (shard_name(layer), tensor.nbytes) for name, tensor in tensors.items()}
            writes.append(pool.submit(save_file, tensors, folder / shard_name(layer), {"format": "pt"}))
            while sum(not write.done() for write in writes) > 2:  # a few layers wait in memory, not all
                time.sleep(0.01)
        for write in writes:
            write.result()
    config.save_pretrained(folder)
    write_index(folder, sizes)


def decode(model: Any, batch: int, tokens: int, *, compiled: bool) -> dict[str, float]:
    """Greedy decoding of `batch` sequences: milliseconds a step and tokens a second; a CUDA graph where there is a GPU."""
    device = model.device
    on_gpu = device.type == "cuda"
    cache = StaticCache(config=model.config, max_cache_len=PROMPT + WARM_UP + 2 + tokens)
    prompt = torch.randint(0, model.config.vocab_size, (batch, PROMPT), device=device)
    token = torch.zeros(batch, 1, dtype=torch.long, device=device)
    position = torch.full((batch, 1), PROMPT, dtype=torch.long, device=device)

    def next_token(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        logits = model(ids, past_key_values=cache, position_ids=positions, logits_to_keep=1).logits
        return logits[:, -1].argmax(dim=-1, keepdim=True)

    chosen: Callable[..., torch.Tensor] = next_token
    if compiled:
        torch._dynamo.reset()
        chosen = torch.compile(next_token, fullgraph=True, dynamic=False)

    def step() -> None:
        token.copy_(chosen(token, position))
        position.add_(1)

    with torch.no_grad():
        token.copy_(next_token(prompt, torch.arange(PROMPT, device=device).expand(batch, -1)))
        replay: Callable[[], None] = step
        begin = time.perf_counter()
        if on_gpu:
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    step()
            torch.cuda.current_stream(device).wait_stream(stream)
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            replay = graph.replay
        replay()
        warm = time.perf_counter() - begin
        times = []
        for first in range(0, tokens, STEPS):
            steps = min(STEPS, tokens - first)
            begin = time.perf_counter()
            for _ in range(steps):
                replay()
            if on_gpu:
                torch.cuda.synchronize(device)
            times.append((time.perf_counter() - begin) / steps)
    seconds = statistics.median(times)
    return {
        "milliseconds_a_step": round(1e3 * seconds, 4),
        "tokens_a_second": round(batch / seconds, 1),
        "slowest_over_median": round(max(times) / seconds, 3),
        "seconds_before": round(warm, 1),
    }


@dataclass(frozen=True)
class Runs:
    """What is decoded: batches, those of them that are compiled too, and tokens."""

    batches: Sequence[int]
    compiled: Sequence[int]
    tokens: int


def allocated(device: torch.device) -> int:
    """Bytes that torch has allocated on a GPU."""
    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else 0


def at_most(device: torch.device) -> int:
    """Bytes that torch had allocated on a GPU at most since `clean`."""
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else 0


def load(folder: Path, device: torch.device) -> Any:
    """A checkpoint on the device."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map=str(device)).eval()


def clean(device: torch.device) -> None:
    """Let go of what nobody holds, and forget the peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def measure(name: str, model: Any, runs: Runs, *, before: int, **options: Any) -> dict[str, Any]:
    """Decode with a model that is loaded; `before` is what was allocated when it was not, `options` are of `prepare`."""
    device = model.device
    with phase(f"prepare {name}"):
        report = prepare(model, tuple(sorted({*runs.batches, *(PROMPT * b for b in runs.batches)})), **options)
    clean(device)
    held = allocated(device) - before
    found: dict[str, Any] = {
        "bytes_held": held,
        "workspace_bytes": report.workspace_bytes,
        "prepared": str(report).splitlines(),
        "graph": {},
        "compiled": {},
    }
    for kind, batches in (("graph", runs.batches), ("compiled", runs.compiled)):
        for batch in batches:
            with phase(f"decode {name}, {kind}, batch {batch}"):
                found[kind][str(batch)] = decode(model, batch, runs.tokens, compiled=kind == "compiled")
                peak = at_most(device) - before if device.type == "cuda" else 0
                found["bytes_at_most"] = max(found.get("bytes_at_most", 0), peak)
    return found


@torch.no_grad()
def logits(model: Any, batch: int = 1, tokens: int = PROMPT) -> torch.Tensor:
    """Logits of the last token of fixed prompts, no two of them equal."""
    prompt = torch.arange(batch * tokens, device=model.device).view(batch, tokens) % model.config.vocab_size
    found: torch.Tensor = model(prompt, logits_to_keep=1).logits
    return found


def speeds(results: dict[str, Any], base: str) -> dict[str, Any]:
    """Tokens a second against one model that was run in the same way."""
    return {
        name: {
            kind: {
                batch: round(entry["tokens_a_second"] / results[base][kind][batch]["tokens_a_second"], 3)
                for batch, entry in results[name].get(kind, {}).items()
            }
            for kind in ("graph", "compiled")
        }
        for name in results
        if name != base and base in results
    }


def arguments(description: str, models: Sequence[str], *, layers: int) -> argparse.ArgumentParser:
    """The command line, which a script may add to."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--compile", type=int, nargs="*", metavar="BATCH", help="compile too: these batches, or all")
    parser.add_argument("--models", nargs="+", choices=models, default=models)
    parser.add_argument("--folder", type=Path, help="where checkpoints are kept, and found by a later run")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script")
    return parser


def runs_of(options: argparse.Namespace) -> Runs:
    """What a command line asks for."""
    compiled = [] if options.compile is None else options.compile or options.batch
    return Runs(options.batch, compiled, options.tokens)


def document_of(device: torch.device, options: argparse.Namespace, **found: Any) -> dict[str, Any]:
    """The JSON of a run."""
    return {
        "provenance": provenance(0, " ".join(["python", *sys.argv])) if device.type == "cuda" else None,
        "layers": options.layers,
        "prompt_tokens": PROMPT,
        "steps": options.tokens,
        "seconds": SECONDS,
        **found,
    }
