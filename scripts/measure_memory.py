"""Peak memory of `w3pack quantize` on a synthetic sharded checkpoint, by /usr/bin/time -v.

    python scripts/measure_memory.py [--layers 9] [--folder SCRATCH] [--json OUT.json]

Writes a Llama-shaped float32 checkpoint of random weights (hidden 4096, intermediate 14336; 0.87 GB for each layer, 1 GB of
embeddings) shard by shard, quantises it in a child process and records its maximum resident set size and its time.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

import w3pack
from w3pack.checkpoint.source import TensorInfo
from w3pack.checkpoint.tensor_file import ShardWriter

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, VOCAB = 4096, 14336, 32, 8, 32000


def layer_tensors(layer: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of one decoder layer."""
    prefix, kv = f"model.layers.{layer}.", HIDDEN * KV_HEADS // HEADS
    return {
        prefix + "input_layernorm.weight": (HIDDEN,),
        prefix + "post_attention_layernorm.weight": (HIDDEN,),
        prefix + "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        prefix + "self_attn.k_proj.weight": (kv, HIDDEN),
        prefix + "self_attn.v_proj.weight": (kv, HIDDEN),
        prefix + "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        prefix + "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
        prefix + "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
        prefix + "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
    }


def write_checkpoint(folder: Path, layers: int) -> int:
    """Write the checkpoint; returns its bytes."""
    folder.mkdir(parents=True)
    shards = [{"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}]
    shards += [layer_tensors(layer) for layer in range(layers)]
    shards += [{"lm_head.weight": (VOCAB, HIDDEN)}]
    weight_map, total = {}, 0
    for number, shapes in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        infos = [
            TensorInfo(name=n, dtype="F32", shape=s, nbytes=4 * s[0] * (s[1] if len(s) > 1 else 1), file=file)
            for n, s in shapes.items()
        ]
        with ShardWriter(folder / file, infos) as writer:
            for info in infos:
                writer.write(info.name, torch.randn(info.shape) * 0.02)
                weight_map[info.name] = file
                total += info.nbytes
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
    )
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "num_hidden_layers": layers, "vocab_size": VOCAB,
        "torch_dtype": "float32", "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return total


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("w3pack-out/memory"))
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--json", type=Path, default=Path("docs/results/memory.json"))
    arguments = parser.parse_args()
    source, output = arguments.folder / "synthetic", arguments.folder / "synthetic-w3"
    shutil.rmtree(source, ignore_errors=True)
    shutil.rmtree(output, ignore_errors=True)
    total = write_checkpoint(source, arguments.layers)
    command = [sys.executable, "-m", "w3pack", "quantize", str(source), "-o", str(output), "--device", "cpu", "--json"]
    done = subprocess.run(["/usr/bin/time", "-v", *command], capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    peak = 1024 * int(re.search(r"Maximum resident set size \(kbytes\): (\d+)", done.stderr)[1])  # type: ignore[index]
    largest = 4 * VOCAB * HIDDEN
    result = {
        "command": f"python scripts/measure_memory.py --layers {arguments.layers}",
        "w3pack": w3pack.__version__,
        "torch": torch.__version__,
        "cpu": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "checkpoint_bytes": total,
        "largest_tensor_bytes": largest,
        "peak_rss_bytes": peak,
        "bound_bytes": (1 << 30) + 6 * largest,
        "weights": report["weights"],
        "seconds": report["seconds"],
        "weights_per_second": report["weights_per_second"],
    }
    arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    shutil.rmtree(source)
    shutil.rmtree(output)


if __name__ == "__main__":
    main()
