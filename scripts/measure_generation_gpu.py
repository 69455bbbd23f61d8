"""Tokens a second of a random model of Llama-3-8B's shape, in bf16, packed, and packed with merged Linears, in one run.

    python scripts/measure_generation_gpu.py > docs/results/generation_h200.json
    python scripts/measure_generation_gpu.py --compile > docs/results/generation_compiled_h200.json
    python scripts/measure_generation_gpu.py --layers 4 --batch 1          # a quick look
    python scripts/measure_generation_gpu.py --small --compile --layers 2  # the script itself, without a GPU

The weights are made on the GPU and written layer by layer, quantised (without data: speed does not depend on the values) and loaded
by `from_pretrained`. All models then decode greedily with a static cache, each step a replay of one CUDA graph; with --compile, the
captured step goes through torch.compile first, for all models alike. `separate` computes q, k, v, gate and up one by one, `merged`
is what `prepare` makes of it. Memory is what torch had allocated after loading, and at most while decoding. JSON goes to stdout,
seconds for each phase to stderr.

To spend less time: --folder keeps the checkpoints, and a later run takes those that it finds there; --models leaves models out;
--quantise-layers quantises only the first layers and repeats their tensors in the others.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.cache_utils import StaticCache

from w3pack.bench.provenance import provenance
from w3pack.integrations.loadable import loadable_for
from w3pack.integrations.sources import open_source
from w3pack.pipeline.plan import QuantizeOptions
from w3pack.pipeline.quantize_model import prepare_job, run
from w3pack.runtime.prepare import prepare

MODELS = ("bf16", "separate", "merged")
PROMPT = 32
WARM_UP = 3
#: Steps timed together: replays follow each other without waiting, as they do where nobody looks at each token.
STEPS = 8
INDEX = "model.safetensors.index.json"
LAYER = re.compile(r"(model\.layers\.)(\d+)(\..*)")
SECONDS: dict[str, float] = {}


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Say how long something took."""
    begin = time.perf_counter()
    yield
    SECONDS[name] = round(time.perf_counter() - begin, 1)
    print(f"{name}: {SECONDS[name]} s", file=sys.stderr, flush=True)


def llama_config(layers: int, *, small: bool = False) -> LlamaConfig:
    """Llama-3-8B with `layers` layers; `small` shrinks every side, to try the script without a GPU."""
    if small:
        sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 256}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    else:
        sizes = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256}
        heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    return LlamaConfig(
        **sizes,
        **heads,
        num_hidden_layers=layers,
        max_position_embeddings=8192,
        rope_theta=500000.0,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )


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


def make(config: LlamaConfig, folder: Path, device: torch.device) -> None:
    """Random bf16 weights, a file for each layer; no model is built."""
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
                tensors[name] = (made.mul_(0.1).add_(1) if norm else made.mul_(config.initializer_range)).cpu()
                sizes[name] = (shard_name(layer), tensors[name].nbytes)
            writes.append(pool.submit(save_file, tensors, folder / shard_name(layer), {"format": "pt"}))
            while sum(not write.done() for write in writes) > 2:  # a few layers wait in memory, not all
                time.sleep(0.01)
        for write in writes:
            write.result()
    config.save_pretrained(folder)
    write_index(folder, sizes)


def first_layers(source: Path, folder: Path, layers: int) -> Path:
    """A checkpoint of the first layers of another, with links to its files."""
    folder.mkdir(parents=True, exist_ok=True)
    index = json.loads((source / INDEX).read_text())["weight_map"]
    kept = {name: (file, 0) for name, file in index.items() if layer_of(name) < layers}
    for file in {file for file, _ in kept.values()}:
        (folder / file).unlink(missing_ok=True)
        (folder / file).symlink_to((source / file).resolve())
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    write_index(folder, kept)
    return folder


def repeat_layers(packed: Path, folder: Path, *, have: int, layers: int) -> None:
    """The packed checkpoint of `have` layers, with tensors that repeat until there are `layers`."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes: dict[str, tuple[str, int]] = {}
    stored = {name: tensor for file in packed.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for layer in range(-1, layers):
        tensors = {
            LAYER.sub(rf"\g<1>{layer}\g<3>", name): tensor
            for name, tensor in stored.items()
            if layer_of(name) == (layer % have if layer >= 0 else layer)
            and (layer < have or not name.endswith(".weight") or tensor.dtype != torch.uint8)  # one guard is enough
        }
        save_file(tensors, folder / shard_name(layer), {"format": "pt"})
        sizes |= {name: (shard_name(layer), tensor.nbytes) for name, tensor in tensors.items()}
    config = json.loads((packed / "config.json").read_text())
    modules = config["quantization_config"]["modules"]
    config["num_hidden_layers"] = layers
    config["quantization_config"]["modules"] = {
        LAYER.sub(rf"\g<1>{layer}\g<3>", name): entry
        for name, entry in modules.items()
        for layer in (range(layer_of(name), layers, have) if layer_of(name) >= 0 else (-1,))
    }
    (folder / "config.json").write_text(json.dumps(config))
    write_index(folder, sizes)


def quantise(source: Path, packed: Path, device: torch.device, *, layers: int, some: int) -> None:
    """Quantise all layers, or the first `some` and repeat them."""
    part = source if some >= layers else first_layers(source, source.with_name(f"{source.name}-first-{some}"), some)
    output = packed if some >= layers else packed.with_name(f"{packed.name}-first")
    if not (output / "config.json").exists():
        with open_source(str(part)) as opened:
            job = prepare_job(opened, QuantizeOptions(), loadable=loadable_for(opened))
            run(job, output, device=str(device))
    if output != packed:
        repeat_layers(output, packed, have=some, layers=layers)


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


def load(folder: Path, device: torch.device) -> Any:
    """A checkpoint on the device."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map=str(device)).eval()


def clean(device: torch.device) -> None:
    """Let go of what nobody holds, and forget the peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def measure(name: str, model: Any, runs: Runs, *, before: int) -> dict[str, Any]:
    """Decode with a model that is loaded; `before` is what was allocated when it was not."""
    device = model.device
    merge = None if device.type == "cuda" and name == "merged" else name == "merged"
    with phase(f"prepare {name}"):
        report = prepare(model, tuple(sorted({*runs.batches, *(PROMPT * b for b in runs.batches)})), merge=merge)
    clean(device)
    held = allocated(device) - before
    found: dict[str, Any] = {"bytes_held": held, "prepared": str(report).splitlines(), "graph": {}, "compiled": {}}
    for kind, batches in (("graph", runs.batches), ("compiled", runs.compiled)):
        for batch in batches:
            with phase(f"decode {name}, {kind}, batch {batch}"):
                found[kind][str(batch)] = decode(model, batch, runs.tokens, compiled=kind == "compiled")
                clean_peak = int(torch.cuda.max_memory_allocated(device)) - before if device.type == "cuda" else 0
                found["bytes_at_most"] = max(found.get("bytes_at_most", 0), clean_peak)
    return found


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """float64 logits of one fixed prompt's last token."""
    prompt = torch.arange(PROMPT, device=model.device)[None] % model.config.vocab_size
    return model(prompt, logits_to_keep=1).logits.double()


def measure_all(models: Sequence[str], source: Path, packed: Path, runs: Runs, device: torch.device) -> dict[str, Any]:
    """Measure each of `models`, one model in memory at a time."""
    results: dict[str, Any] = {}
    if "bf16" in models:
        clean(device)
        before = allocated(device)
        with phase("load bf16"):
            model = load(source, device)
        results["bf16"] = measure("bf16", model, runs, before=before)
        del model
    ours = [name for name in ("separate", "merged") if name in models]
    if ours:
        clean(device)
        before = allocated(device)
        with phase("load packed"):
            model = load(packed, device)
        seen = []
        for name in ours:  # merged comes last: it changes the model
            results[name] = measure(name, model, runs, before=before)
            seen.append(logits(model))
        if len(seen) == 2:
            results["merged"]["logits_against_separate"] = float((seen[1] - seen[0]).norm() / seen[0].norm())
    return results


def speeds(results: dict[str, Any]) -> dict[str, Any]:
    """Tokens a second against bf16 run in the same way."""
    return {
        name: {
            kind: {
                batch: round(entry["tokens_a_second"] / results["bf16"][kind][batch]["tokens_a_second"], 3)
                for batch, entry in results[name][kind].items()
            }
            for kind in ("graph", "compiled")
        }
        for name in results
        if name != "bf16" and "bf16" in results
    }


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Tokens a second, bf16 and packed.")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--compile", type=int, nargs="*", metavar="BATCH", help="compile too: these batches, or all")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--quantise-layers", type=int, help="quantise only so many layers and repeat them")
    parser.add_argument("--folder", type=Path, help="where checkpoints are kept, and found by a later run")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script")
    options = parser.parse_args()
    device = torch.device(options.device)
    compiled = [] if options.compile is None else options.compile or options.batch
    runs = Runs(options.batch, compiled, options.tokens)
    some = min(options.quantise_layers or options.layers, options.layers)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        name = f"{'small' if options.small else 'llama'}-{options.layers}"
        source, packed = folder / f"{name}-source", folder / f"{name}-packed-{some}"
        if not (source / INDEX).exists():
            with phase("make"):
                make(llama_config(options.layers, small=options.small), source, device)
        if not (packed / "config.json").exists() and set(options.models) != {"bf16"}:
            with phase("quantise"):
                quantise(source, packed, device, layers=options.layers, some=some)
        results = measure_all(options.models, source, packed, runs, device)
    document = {
        "provenance": provenance(0, " ".join(["python", *sys.argv])) if device.type == "cuda" else None,
        "layers": options.layers,
        "quantised_layers": some,
        "prompt_tokens": PROMPT,
        "steps": options.tokens,
        "seconds": SECONDS,
        "models": results,
        "speed_against_bf16": speeds(results),
    }
    print(json.dumps(document, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
