"""Does everything that w3pack does run on a CUDA device, with the same results as on the CPU? Prints one JSON object.

    python scripts/check_gpu.py [--json OUT.json]

Quantises a random Llama-shaped checkpoint on the GPU, loads it with from_pretrained on the GPU, compares logits with the CPU,
generates, and times the quantiser. Uses no network.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig

import w3pack
from w3pack.checkpoint.safetensors_source import SafetensorsSource
from w3pack.integrations.loadable import loadable_for
from w3pack.pipeline.plan import QuantizeOptions
from w3pack.pipeline.quantize_model import prepare_job, run


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=8192,
    )
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        source, packed = Path(scratch) / "source", Path(scratch) / "packed"
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(source)
        seconds = []
        for _ in range(2):  # the first run warms the device up
            opened = SafetensorsSource(source)
            job = prepare_job(opened, QuantizeOptions(), loadable=loadable_for(opened))
            started = time.perf_counter()
            report = run(job, packed, device="cuda", overwrite=packed.exists())
            seconds.append(time.perf_counter() - started)
        on_gpu = AutoModelForCausalLM.from_pretrained(packed, dtype=torch.float32, device_map="cuda")
        on_cpu = AutoModelForCausalLM.from_pretrained(packed, dtype=torch.float32)
        ids = torch.randint(0, config.vocab_size, (2, 48))
        with torch.inference_mode():
            gpu, cpu = on_gpu(ids.cuda()).logits.cpu(), on_cpu(ids).logits
            tokens = on_gpu.generate(ids.cuda(), max_new_tokens=8, do_sample=False)
            compiled = torch.compile(on_gpu.model.layers[0].mlp, fullgraph=True)(torch.randn(1, 3, 2048, device="cuda"))
        result = {
            "command": "python scripts/check_gpu.py",
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "w3pack": w3pack.__version__,
            "weights": report.weights,
            "relative_error": report.kinds[0].relative_error,
            "quantise_seconds": seconds[-1],
            "quantise_weights_per_second": report.weights / seconds[-1],
            "relative_logit_difference_to_cpu": float((gpu - cpu).norm() / cpu.norm()),
            "generated_shape": list(tokens.shape),
            "compiled_shape": list(compiled.shape),
        }
    print(json.dumps(result, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
