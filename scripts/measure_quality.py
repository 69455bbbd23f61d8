"""How much a model loses at three bits without calibration data: this package against round-to-nearest and NF3.

    python scripts/measure_quality.py --model FOLDER_OR_GGUF --text FILE... --tokens 8192 --json OUT.json

Every Linear of the decoder (not the head, not the embedding) is quantized and dequantized in memory, then perplexity,
KL(source || model) and top-1 agreement are taken on windows of each text. Needs transformers, and gguf for a .gguf
file. A --text may list several files, which are joined; repeat it for further texts.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import hashlib
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from w3pack.errors import UsageError, W3PackError
from w3pack.integrations.passages import prefix_ids
from w3pack.pipeline.evaluate import evaluate, reference_log_probabilities, token_windows
from w3pack.quantize import QuantizeSettings, named_map, quantize_data_free

ROW_TILE = 64  # rows are padded to this in the format


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to quantize and dequantize one weight: returns the weight and the bytes it would take."""

    name: str
    run: Callable[[torch.Tensor], tuple[torch.Tensor, float]]


def padded_groups(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    """float32 [rows, groups, group_size], zeros after the last column."""
    columns = weight.shape[1]
    padded = torch.nn.functional.pad(weight.to(torch.float32), (0, -columns % group_size))
    return padded.view(weight.shape[0], -1, group_size)


def stored_bytes(shape: torch.Size, *, group_size: int, bytes_per_group: float, map_bytes: int) -> float:
    """Bytes of 3-bit codes, group parameters and maps with the format's padding of rows and columns."""
    rows = math.ceil(shape[0] / ROW_TILE) * ROW_TILE
    groups = math.ceil(shape[1] / group_size)
    return rows * groups * (group_size * 3 / 8 + bytes_per_group) + map_bytes


def rtn(weight: torch.Tensor, *, group_size: int) -> tuple[torch.Tensor, float]:
    """Round to nearest on eight even steps from the group's minimum to its maximum; float16 step, 3-bit zero point."""
    groups = padded_groups(weight, group_size)
    low = groups.amin(dim=2, keepdim=True).clamp_max(0.0)
    high = groups.amax(dim=2, keepdim=True).clamp_min(0.0)
    step = ((high - low) / 7).to(torch.float16).to(torch.float32).clamp_min(2.0**-24)
    zero = torch.round(-low / step).clamp_(0, 7)
    back = (torch.round(groups / step + zero).clamp_(0, 7) - zero) * step
    size = stored_bytes(weight.shape, group_size=group_size, bytes_per_group=2 + 3 / 8, map_bytes=0)
    return back.view(weight.shape[0], -1)[:, : weight.shape[1]], size


def nf3(weight: torch.Tensor, *, group_size: int) -> tuple[torch.Tensor, float]:
    """The NF3 map with the group's largest magnitude, in float16, as its scale (QLoRA's rule at three bits)."""
    groups = padded_groups(weight, group_size)
    table = named_map("nf3")
    scale = groups.abs().amax(dim=2, keepdim=True).to(torch.float16).to(torch.float32).clamp_min(2.0**-24)
    middles = (table[1:] + table[:-1]) / 2
    back = table[torch.bucketize(groups / scale, middles)] * scale
    size = stored_bytes(weight.shape, group_size=group_size, bytes_per_group=2, map_bytes=16)
    return back.view(weight.shape[0], -1)[:, : weight.shape[1]], size


def ours(weight: torch.Tensor, *, settings: QuantizeSettings, workers: int) -> tuple[torch.Tensor, float]:
    """This package's data-free mode."""
    result = quantize_data_free(weight, settings, workers=workers)
    maps = 1 if result.qmap.shape[0] == 1 else math.ceil(weight.shape[0] / ROW_TILE) * ROW_TILE
    map_bytes = maps * 8 * result.qmap.element_size()
    size = stored_bytes(weight.shape, group_size=settings.group_size, bytes_per_group=2, map_bytes=map_bytes)
    return result.dequantize(), size


def methods(workers: int) -> list[Method]:
    """The table's rows, in order."""
    rows = [
        Method("rtn3 asymmetric min-max g128", lambda weight: rtn(weight, group_size=128)),
        Method("nf3 absmax g128", lambda weight: nf3(weight, group_size=128)),
        Method("nf3 absmax g64", lambda weight: nf3(weight, group_size=64)),
    ]
    for per in ("tensor", "row"):
        for group_size in (128, 64):
            settings = QuantizeSettings(group_size=group_size, qmap_per=per)
            rows.append(
                Method(
                    f"w3pack data-free g{group_size}, map per {per}",
                    lambda weight, settings=settings: ours(weight, settings=settings, workers=workers),  # type: ignore[misc]
                )
            )
    return rows


def sha256(path: Path) -> str:
    """Digest of a file, or of the weight files of a folder in the order of their names."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def load(path: Path) -> tuple[Any, Any]:
    """Model in float32 and tokenizer from a checkpoint folder or a GGUF file (weights dequantized)."""
    if not path.exists():
        raise UsageError(
            f"expected a checkpoint folder or a .gguf file; got {path}, which is not there; check the path"
        )
    auto_model: Any = transformers.AutoModelForCausalLM
    if path.is_dir():
        return auto_model.from_pretrained(path, dtype=torch.float32).eval(), load_tokenizer(path)
    config: Any = transformers.GgufConfig(dequantize=True)
    model = auto_model.from_pretrained(
        path.parent, gguf_file=path.name, quantization_config=config, dtype=torch.float32
    ).eval()
    return model, load_tokenizer(path)


def load_tokenizer(path: Path) -> Any:
    """Tokenizer of a checkpoint folder or a GGUF file."""
    auto_tokenizer: Any = transformers.AutoTokenizer
    if path.is_dir():
        return auto_tokenizer.from_pretrained(path)
    return with_single_digits(auto_tokenizer.from_pretrained(path.parent, gguf_file=path.name), path)


def with_single_digits(tokenizer: Any, path: Path) -> Any:
    """Split numbers into digits where the file's pre-tokenizer ("smollm") does and the conversion forgets it."""
    from gguf import GGUFReader

    field = GGUFReader(path).get_field("tokenizer.ggml.pre")
    kind = field.contents() if field is not None else None
    if kind == "smollm":
        from tokenizers import pre_tokenizers

        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return tokenizer


def decoder_linears(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """Every Linear but the head, by name."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    return {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m is not head}


def measure(
    model: Any, windows: dict[str, torch.Tensor], *, compute: torch.dtype, workers: int
) -> Iterator[dict[str, Any]]:
    """The source and every method on every text; weights are quantized in float32 whatever the model runs in."""
    linears = decoder_linears(model)
    source = {name: linear.weight.detach().clone() for name, linear in linears.items()}
    weights = sum(weight.numel() for weight in source.values())
    model.to(compute)

    def logits(ids: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = model(ids, use_cache=False).logits
        return output

    reference = {text: reference_log_probabilities(logits, ids, dtype=torch.float16) for text, ids in windows.items()}
    for method in [None, *methods(workers)]:
        started = time.perf_counter()
        size = 0.0
        if method is not None:
            for name, linear in linears.items():
                back, stored = method.run(source[name])
                linear.weight.data.copy_(back)
                size += stored
        quantized = time.perf_counter()
        quality = {
            text: dataclasses.asdict(evaluate(logits, ids, reference=reference[text])) for text, ids in windows.items()
        }
        yield {
            "method": method.name if method else "source",
            "bits_per_weight": round(8 * size / weights, 4) if method else None,
            "weights": weights,
            "quantize_seconds": round(quantized - started, 2) if method else None,
            "evaluate_seconds": round(time.perf_counter() - quantized, 1),
            "texts": quality,
        }
        gc.collect()


def summary(row: dict[str, Any]) -> str:
    """One line of the table."""
    cells = [
        f"{text}: ppl {q['perplexity']:.2f} kl {q['kl_mean']:.4f} p99 {q['kl_p99']:.2f} top1 {q['top1_agreement']:.3f}"
        for text, q in row["texts"].items()
    ]
    return f"{row['method']:36s} {row['bits_per_weight'] or 0:.3f} bits  " + " | ".join(cells)


def processor() -> str:
    """The processor's name, as far as the system tells."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def framed_windows(tokenizer: Any, text: str, *, window: int, tokens: int) -> torch.Tensor:
    """int64 [windows, window], each after what the tokenizer puts before a text: without its bos Gemma is lost."""
    prefix = prefix_ids(tokenizer)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    body = token_windows(ids, window=window - len(prefix), tokens=tokens)
    return torch.cat([torch.tensor(prefix, dtype=torch.int64).expand(len(body), len(prefix)), body], dim=1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder or .gguf file")
    parser.add_argument(
        "--text", type=Path, nargs="+", required=True, action="append", help="UTF-8 files joined to one text; repeat"
    )
    parser.add_argument("--tokens", type=int, default=8192, help="tokens per text")
    parser.add_argument("--window", type=int, default=512, help="tokens per window")
    parser.add_argument(
        "--compute", choices=("float32", "bfloat16"), default="float32", help="dtype the model runs in, source included"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="threads of the quantizer")
    parser.add_argument("--json", type=Path, required=True, help="where the figures go")
    arguments = parser.parse_args()
    try:
        model, tokenizer = load(arguments.model)
        windows: dict[str, torch.Tensor] = {}
        texts: dict[str, Any] = {}
        for files in arguments.text:
            text = "\n\n".join(file.read_text(encoding="utf-8") for file in files)
            label = files[0].name if len(files) == 1 else f"{files[0].name}+{len(files) - 1}"
            # 16 characters a token is beyond any tokenizer's average; tokenizing more would only take time.
            windows[label] = framed_windows(
                tokenizer, text[: arguments.tokens * 16], window=arguments.window, tokens=arguments.tokens
            )
            texts[label] = {
                "files": [file.name for file in files],
                "sha256": hashlib.sha256(text.encode()).hexdigest(),
                "windows": windows[label].shape[0],
            }
        report = provenance(arguments, model=model, texts=texts)
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        for row in measure(model, windows, compute=getattr(torch, arguments.compute), workers=arguments.workers):
            print(summary(row), flush=True)
            report["results"].append(row)
            # Written after every method, so that an interrupted run keeps what it has.
            arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except W3PackError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def provenance(arguments: argparse.Namespace, *, model: Any, texts: dict[str, Any]) -> dict[str, Any]:
    """The report without its results; files by their base names."""
    command = ["python", "scripts/measure_quality.py", "--model", arguments.model.name]
    for files in arguments.text:
        command += ["--text", *(file.name for file in files)]
    command += [
        "--tokens",
        str(arguments.tokens),
        "--window",
        str(arguments.window),
        "--compute",
        arguments.compute,
        "--json",
        arguments.json.name,
    ]
    return {
        "what": "data-free 3-bit quantization of every decoder Linear; KL(source || model) in nats per token",
        "model": {"file": arguments.model.name, "sha256": sha256(arguments.model), "class": type(model).__name__},
        "texts": texts,
        "window": arguments.window,
        "compute": arguments.compute,
        "results": [],
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "cpu": {
            "model": processor(),
            "cores": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "load_average": os.getloadavg(),
        },
        "command": command,
    }


if __name__ == "__main__":
    sys.exit(main())
