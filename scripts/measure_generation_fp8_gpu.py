"""Tokens a second of a random FP8 model of Qwen3-8B's shape, gate and up apart and fused, in one run.

    python scripts/measure_generation_fp8_gpu.py > docs/results/generation_fp8_h200.json
    python scripts/measure_generation_fp8_gpu.py --layers 4 --batch 1          # a quick look
    python scripts/measure_generation_fp8_gpu.py --small --layers 2            # the script itself, without a GPU

Weights are made on the GPU, E4M3 in blocks of 128 x 128 as Qwen3-8B-FP8 has them, and fused by what `w3pack fuse-gateup` calls.

    stock           the checkpoint as transformers itself loads it; it runs where transformers has its FP8 kernels, which it downloads
    unfused         the checkpoint with every FP8 matrix as an Fp8Linear: two products for gate and up, then torch's SiLU and product
    fused           the fused checkpoint by `from_pretrained`, then `prepare`: gate, up, SiLU and product are one launch
    separate-w8a8   the same model with prepare(gateup="separate"): activations in 8 bits, two cuBLASLt products
    fused-w8a8      the same model with prepare(gateup="fused"): one cuBLASLt product

All models decode greedily with a static cache, each step a replay of one CUDA graph. `unfused` and `fused` run the same kernel. Logits
are compared bit for bit, for as many tokens as there are batches and for a prompt: `fused` rounds once where `unfused` rounds after each
product, so these differ by rounding; the halves of the fused tensor, multiplied one by one, must have the bits of `unfused`, and
`fused-w8a8` those of `separate-w8a8`. JSON goes to stdout, seconds for each phase to stderr.

--folder keeps the checkpoints, and a later run takes those that it finds there; --models leaves models out.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from generation_bench import (
    INDEX,
    LAYER,
    PROMPT,
    Runs,
    allocated,
    arguments,
    at_most,
    clean,
    document_of,
    load,
    logits,
    make,
    measure,
    phase,
    runs_of,
    speeds,
)
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from w3pack.checkpoint.safetensors_source import SafetensorsSource
from w3pack.integrations.hf_fused import fusable_for
from w3pack.ops import workspace
from w3pack.pipeline.fuse_gateup import prepare_fuse, run_fuse
from w3pack.pipeline.fuse_plan import FuseOptions
from w3pack.runtime.build import place
from w3pack.runtime.fp8_linear import Fp8Linear, Fp8Module
from w3pack.runtime.gateup import FusedGateUp

#: Model -> options of `prepare`. What another run left on disk decides nothing here.
WAYS: dict[str, dict[str, Any]] = {
    "stock": {},
    "unfused": {},
    "fused": {"gateup": "auto", "probe": "memory"},
    "separate-w8a8": {"gateup": "separate"},
    "fused-w8a8": {"gateup": "fused"},
}
BLOCK = 128
SCALES = "_scale_inv"
QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["lm_head"],
}
#: Standard deviation of random weights in E4M3, whose largest number is 448.
SPREAD = 100.0


def qwen_config(layers: int, *, small: bool = False) -> Qwen3Config:
    """Qwen3-8B with `layers` layers; `small` shrinks every side, to try the script without a GPU."""
    if small:
        sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 512, "head_dim": 32}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    else:
        sizes = {"hidden_size": 4096, "intermediate_size": 12288, "vocab_size": 151936, "head_dim": 128}
        heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    return Qwen3Config(
        **sizes,
        **heads,
        num_hidden_layers=layers,
        max_position_embeddings=40960,
        rope_theta=1000000.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        dtype="bfloat16",
        architectures=["Qwen3ForCausalLM"],
        quantization_config=QUANTIZATION,
    )


def in_fp8(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Matrices of decoder layers as random E4M3 with random block scales, no two alike; all else as it is."""
    if weight.dim() != 2 or not LAYER.fullmatch(name):
        return {name: weight}
    unit = weight.float() / weight.float().std()
    grid = (-(-weight.shape[0] // BLOCK), -(-weight.shape[1] // BLOCK))
    scales = torch.rand(grid, device=weight.device).add_(0.5).mul_(float(weight.float().std()) / SPREAD)
    return {name: unit.mul_(SPREAD).clamp_(-448, 448).to(torch.float8_e4m3fn), name + SCALES: scales}


def fuse(source: Path, fused: Path) -> dict[str, Any]:
    """What `w3pack fuse-gateup` does; its report without the place."""
    opened = SafetensorsSource(source)
    report = run_fuse(prepare_fuse(opened, FuseOptions(), fusable=fusable_for(opened)), fused)
    return {name: value for name, value in report.to_dict().items() if name not in ("output", "seconds")}


def load_unfused(folder: Path, device: torch.device) -> Any:
    """The FP8 checkpoint with each of its FP8 matrices, gate and up too, as an Fp8Linear of its own."""
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    files: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    for name in (name.removesuffix(f".weight{SCALES}") for name in files if name.endswith(SCALES)):
        linear = model.get_submodule(name)
        made = Fp8Linear(linear.out_features, linear.in_features, block=(BLOCK, BLOCK), device="meta")
        place(model, name, made)
    for file in sorted(set(files.values())):
        model.load_state_dict(load_file(folder / file, device=str(device)), assign=True, strict=False)
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config=config).to(device)  # its buffers are in no file
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            raise SystemExit(f"expected every tensor in {folder}, got none for {name}; delete the folder")
    for name, module in model.named_modules():
        if isinstance(module, Fp8Module):
            module.check(name)
    return model.eval()


def tensor_bytes(model: Any) -> int:
    """Bytes of all parameters and buffers, those that share memory counted once."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def warm(device: torch.device) -> None:
    """Let cuBLAS take the workspace that it keeps for the process: it is no model's."""
    if device.type == "cuda":
        square = torch.zeros(256, 256, dtype=torch.bfloat16, device=device)
        (square @ square).sum().item()


class Bench:
    """Loads models one after the other, measures each in its ways, and keeps their logits."""

    def __init__(self, runs: Runs, device: torch.device) -> None:
        self.runs, self.device = runs, device
        self.results: dict[str, Any] = {}
        self.logits: dict[str, dict[str, torch.Tensor]] = {}
        warm(device)

    def model(self, names: Sequence[str], load_one: Callable[[], Any]) -> None:
        """Load a model, and measure it in each of these ways."""
        if not names:
            return
        clean(self.device)
        before, room = allocated(self.device), self._room()
        with phase(f"load {names[0]}"):
            model = load_one()
        loaded = {
            "tensor_bytes": tensor_bytes(model),
            "bytes_loaded": allocated(self.device) - before,
            "bytes_at_most_loading": at_most(self.device) - before,
            "fp8_parameters": sum(p.numel() for p in model.parameters() if p.dtype == torch.float8_e4m3fn),
        }
        for name in names:
            self.results[name] = loaded
            found = measure(name, model, self.runs, before=before, **WAYS[name])
            # the workspace is the process's: the first model does not pay for the others
            found["bytes_held"] -= max(0, found["workspace_bytes"] - room)
            self.results[name] = {**loaded, **found}
            self.logits[name] = self._logits(model)
            if name == "fused":
                with one_by_one(model):
                    self.logits["halves of fused"] = self._logits(model)

    def stock(self, load_one: Callable[[], Any]) -> None:
        """The same, for a model that may not run here; then it is said why."""
        try:
            self.model(["stock"], load_one)
        except Exception as error:  # noqa: BLE001 - transformers, its kernels or their download may fail in any way
            lines = str(error).strip().splitlines() or [""]
            why = f"{type(error).__name__}: {lines[0][:300]}".rstrip(": ")
            self.results["stock"] = {**self.results.get("stock", {}), "why_not": why, "graph": {}, "compiled": {}}

    def _logits(self, model: Any) -> dict[str, torch.Tensor]:
        shapes = [*((batch, 1) for batch in self.runs.batches), (1, PROMPT)]
        return {f"{batch} x {tokens}": logits(model, batch, tokens).cpu() for batch, tokens in shapes}

    def _room(self) -> int:
        return workspace.nbytes(self.device.index or 0) if self.device.type == "cuda" else 0

    def compare(self, name: str, base: str) -> dict[str, Any]:
        """Whether two models' logits have the same bits, and how far they are apart, for each shape of a call."""
        found = {}
        for shape, one in self.logits[name].items():
            other = self.logits[base][shape]
            apart = float((one.double() - other.double()).norm() / other.double().norm())
            found[shape] = {"equal": torch.equal(one.view(torch.int16), other.view(torch.int16)), "relative": apart}
        return {"model": name, "against": base, "calls": found}


@contextmanager
def one_by_one(model: Any) -> Iterator[None]:
    """Let fused pairs multiply their halves by two calls, and torch do the rest, as an unfused model does."""
    pairs = [module for module in model.modules() if isinstance(module, FusedGateUp) and module.silu]
    for pair in pairs:
        pair.silu = False
    yield
    for pair in pairs:
        pair.silu = True


def memory(results: dict[str, Any], base: str = "unfused") -> dict[str, Any]:
    """Bytes against the unfused model's, those that are not 0. The two w8a8 ways are the fused model again."""
    kinds = ("tensor_bytes", "bytes_loaded", "bytes_at_most_loading", "bytes_held", "bytes_at_most")
    wanted = [name for name in ("stock", "fused") if name in results and base in results]
    return {
        name: {
            kind: round(results[name][kind] / results[base][kind], 6)
            for kind in kinds
            if results[base][kind] and kind in results[name]
        }
        for name in wanted
    }


def main() -> int:
    """The command line."""
    options = arguments("Tokens a second in FP8, unfused and fused.", tuple(WAYS), layers=36).parse_args()
    device, wanted = torch.device(options.device), [name for name in WAYS if name in options.models]
    fusing = None
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        name = f"{'small' if options.small else 'qwen3'}-fp8-{options.layers}"
        source, fused = folder / f"{name}-source", folder / f"{name}-fused"
        if not (source / INDEX).exists():
            with phase("make"):
                torch.manual_seed(0)
                make(qwen_config(options.layers, small=options.small), source, device, tensors_of=in_fp8)
        if not (fused / "config.json").exists():
            with phase("fuse"):
                fusing = fuse(source, fused)
        bench = Bench(runs_of(options), device)
        if "stock" in wanted:
            bench.stock(lambda: load(source, device))
        bench.model([name for name in wanted if name == "unfused"], lambda: load_unfused(source, device))
        bench.model([name for name in wanted if name not in ("stock", "unfused")], lambda: load(fused, device))
    pairs = (("fused", "unfused"), ("halves of fused", "unfused"), ("fused-w8a8", "separate-w8a8"))
    document = document_of(
        device,
        options,
        fusing=fusing,
        models=bench.results,
        speed_against_unfused=speeds(bench.results, "unfused"),
        memory_against_unfused=memory(bench.results),
        logits=[bench.compare(*pair) for pair in pairs if set(pair) <= set(bench.logits)],
    )
    print(json.dumps(document, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
