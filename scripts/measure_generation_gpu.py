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

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from generation_bench import (
    INDEX,
    LAYER,
    Runs,
    allocated,
    arguments,
    clean,
    document_of,
    layer_of,
    load,
    logits,
    make,
    measure,
    phase,
    runs_of,
    shard_name,
    speeds,
    write_index,
)
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from w3pack.integrations.loadable import loadable_for
from w3pack.integrations.sources import open_source
from w3pack.pipeline.plan import QuantizeOptions
from w3pack.pipeline.quantize_model import prepare_job, run

MODELS = ("bf16", "separate", "merged")


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


def measure_all(models: Sequence[str], source: Path, packed: Path, runs: Runs, device: torch.device) -> dict[str, Any]:
    """Measure each of `models`, one model in memory at a time."""
    results: dict[str, Any] = {}
    if "bf16" in models:
        clean(device)
        before = allocated(device)
        with phase("load bf16"):
            model = load(source, device)
        results["bf16"] = measure("bf16", model, runs, before=before, merge=False)
        del model
    ours = [name for name in ("separate", "merged") if name in models]
    if ours:
        clean(device)
        before = allocated(device)
        with phase("load packed"):
            model = load(packed, device)
        seen = []
        for name in ours:  # merged comes last: it changes the model
            merge = None if device.type == "cuda" and name == "merged" else name == "merged"
            results[name] = measure(name, model, runs, before=before, merge=merge)
            seen.append(logits(model).double())
        if len(seen) == 2:
            results["merged"]["logits_against_separate"] = float((seen[1] - seen[0]).norm() / seen[0].norm())
    return results


def main() -> int:
    """The command line."""
    parser = arguments("Tokens a second, bf16 and packed.", MODELS, layers=32)
    parser.add_argument("--quantise-layers", type=int, help="quantise only so many layers and repeat them")
    options = parser.parse_args()
    device, runs = torch.device(options.device), runs_of(options)
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
    document = document_of(
        device,
        options,
        quantised_layers=some,
        models=results,
        speed_against_bf16=speeds(results, "bf16"),
    )
    print(json.dumps(document, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
