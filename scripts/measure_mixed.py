"""What mixed precision and guidance by gradients buy: one model quantized in several ways, and its KL to the source.

    python scripts/measure_mixed.py --model FOLDER_OR_GGUF --calibrate FILE... --text FILE... --json OUT.json

Each row is what `w3pack quantize` writes with the options it is named after. KL(source || model) is taken on windows of each
text, which is none of the calibration text. Files of one --text or --calibrate are joined; repeat --text for further texts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import measure_map_grid as grid
import measure_quality
import torch
import transformers

from w3pack.errors import W3PackError
from w3pack.integrations.calibration import prepare_calibration
from w3pack.integrations.loadable import loadable_for
from w3pack.integrations.sources import open_source
from w3pack.pipeline.evaluate import evaluate, reference_log_probabilities
from w3pack.pipeline.mixing import MixRequest, kept_bytes, mix_job
from w3pack.pipeline.plan import QuantizeOptions
from w3pack.pipeline.quantize_model import prepare_job, run


@dataclasses.dataclass(frozen=True)
class Way:
    """Options of `w3pack quantize`."""

    effort: str
    request: MixRequest
    guided: bool = False

    @property
    def name(self) -> str:
        """As one would type it."""
        words = [f"--effort {self.effort}"]
        words += ["--guided"] if self.guided else []
        words += [f"--keep-top {self.request.keep_top}"] if self.request.keep_top is not None else []
        words += [f"--target-bits {self.request.target_bits:g}"] if self.request.target_bits is not None else []
        return " ".join(words)


def ways(effort: str, *, share: str, bits: float) -> list[Way]:
    """The rows, in order."""
    plain, top, mean = MixRequest(sensitivity=True), MixRequest(keep_top=share), MixRequest(target_bits=bits)
    return [
        Way(effort, plain),
        Way(effort, top),
        Way(effort, mean),
        Way(effort, plain, guided=True),
        Way("none", plain),
        Way("none", top),
    ]


def quantize(arguments: argparse.Namespace, way: Way, text: Path, output: Path) -> dict[str, Any]:
    """Write the packed model to `output`; the row without its quality."""
    started = time.perf_counter()
    options = QuantizeOptions(group_size=arguments.group_size, seed=arguments.seed)
    with open_source(str(arguments.model)) as source:
        job = prepare_job(source, options, loadable=loadable_for(source))
        original = {tensor.module: kept_bytes(tensor) for tensor in job.plan.quantized}
        weights = job.plan.weights
        calibration = prepare_calibration(
            job,
            effort=way.effort,  # type: ignore[arg-type]
            datasets=[] if way.effort == "none" else [str(text)],
            samples=arguments.nsamples,
            length=arguments.window,
            guided=way.guided,
        )
        gradients = calibration.gradients if calibration else None
        job = mix_job(job, way.request, gradients=gradients, workers=arguments.workers, device="cpu")
        measured = time.perf_counter()
        report = run(job, output, workers=arguments.workers, calibration=calibration)
    specs = job.plan.modules
    nbytes = sum(spec.nbytes for spec in specs.values())
    nbytes += sum(size for module, size in original.items() if module not in specs)
    return {
        "options": way.name,
        "bits_per_weight": 8 * nbytes / weights,
        "bytes": nbytes,
        "kept": len(original) - len(specs),
        "group_sizes": {str(size): sum(s.group_size == size for s in specs.values()) for size in (64, 128)},
        "expected_loss": sum(row.expected_loss or 0.0 for row in report.linears),
        "unit": job.sensitivity["unit"] if job.sensitivity else None,
        "most_sensitive": list(job.sensitivity["most_sensitive_first"][:5]) if job.sensitivity else [],
        "measure_seconds": round(measured - started, 1),
        "quantize_seconds": round(time.perf_counter() - measured, 1),
    }


def measure(arguments: argparse.Namespace, model: Any, windows: dict[str, torch.Tensor]) -> Iterator[dict[str, Any]]:
    """A row for each way."""

    def logits(ids: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = model(ids, use_cache=False).logits
        return output

    reference = {text: reference_log_probabilities(logits, ids) for text, ids in windows.items()}
    original = {name: module.weight.detach().clone() for name, module in measure_quality.decoder_linears(model).items()}
    with tempfile.TemporaryDirectory(prefix="w3pack-mixed-") as scratch:
        os.environ["W3PACK_CACHE_DIR"] = scratch  # sensitivities are measured once for each menu, and here
        text = Path(scratch) / "calibration.txt"
        text.write_text(grid.joined(arguments.calibrate), encoding="utf-8")
        for number, way in enumerate(ways(arguments.effort, share=arguments.keep_top, bits=arguments.target_bits)):
            folder = Path(scratch) / str(number)
            row = quantize(arguments, way, text, folder)
            for name, weight in original.items():
                model.get_submodule(name).weight.data.copy_(weight)
            grid.put(model, folder, rounded=False)
            row["texts"] = {
                name: dataclasses.asdict(evaluate(logits, ids, reference=reference[name]))
                for name, ids in windows.items()
            }
            yield row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder or .gguf file")
    parser.add_argument("--calibrate", type=Path, nargs="+", required=True, help="UTF-8 files joined to one text")
    parser.add_argument("--text", type=Path, nargs="+", required=True, action="append", help="what KL is taken on")
    parser.add_argument("--effort", choices=("diagonal", "fast", "default"), default="fast")
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--keep-top", default="2%")
    parser.add_argument("--target-bits", type=float, default=3.5)
    parser.add_argument("--nsamples", type=int, default=32, help="calibration windows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens per text")
    parser.add_argument("--window", type=int, default=512, help="tokens per window")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="threads")
    parser.add_argument("--json", type=Path, required=True, help="where the figures go")
    arguments = parser.parse_args()
    try:
        model, tokenizer = measure_quality.load(arguments.model)
        windows, texts = {}, {}
        for files in arguments.text:
            label = files[0].name if len(files) == 1 else f"{files[0].name} ... {files[-1].name}"
            text = grid.joined(files)[: arguments.tokens * grid.CHARACTERS_PER_TOKEN]
            windows[label] = measure_quality.framed_windows(
                tokenizer, text, window=arguments.window, tokens=arguments.tokens
            )
            texts[label] = grid.described(files)
        report: dict[str, Any] = {
            "what": "KL(source || model) in nats per token of models of mixed precision and of guided calibration",
            "model": {"file": arguments.model.name, "sha256": measure_quality.sha256(arguments.model)},
            "group_size": arguments.group_size,
            "calibration": {**grid.described(arguments.calibrate), "windows": arguments.nsamples},
            "texts": texts,
            "tokens": arguments.tokens,
            "window": arguments.window,
            "results": [],
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "cpu": {"model": measure_quality.processor(), "cores": os.cpu_count(), "python": platform.python_version()},
            "command": command(arguments),
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        for row in measure(arguments, model, windows):
            report["results"].append(row)
            arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            kl = {name: round(quality["kl_mean"], 4) for name, quality in row["texts"].items()}
            print(
                f"{row['options']:40s} {row['bits_per_weight']:.3f} bits  expected {row['expected_loss']:.4f}  {kl}",
                flush=True,
            )
    except W3PackError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def command(arguments: argparse.Namespace) -> str:
    """The command line, files by their base names."""
    words = ["python scripts/measure_mixed.py --model", arguments.model.name]
    for option, files in [("--calibrate", arguments.calibrate), *(("--text", files) for files in arguments.text)]:
        words += [option, files[0].name] if len(files) == 1 else [option, files[0].name, "...", files[-1].name]
    words += [f"--effort {arguments.effort} --group-size {arguments.group_size} --keep-top {arguments.keep_top}"]
    words += [f"--target-bits {arguments.target_bits:g} --nsamples {arguments.nsamples} --seed {arguments.seed}"]
    words += [f"--tokens {arguments.tokens} --window {arguments.window}"]
    return " ".join([*words, "--json", arguments.json.name])


if __name__ == "__main__":
    sys.exit(main())
