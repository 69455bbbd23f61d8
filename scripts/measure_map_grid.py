"""What maps on the int8 grid lose against float16 maps, calibrated otherwise alike.

    python scripts/measure_map_grid.py --model FOLDER_OR_GGUF --calibrate FILE... --text FILE... --json OUT.json

For each seed the model is quantized twice with the pipeline of `w3pack quantize`: with free float16 maps and with maps on
the int8 grid. A third model is the first with its maps rounded to the grid, codes and scales kept: it differs by nothing
but the grid, while two runs of the pipeline also differ in how errors happen to fall. KL(source || model) is taken on
windows of each text. Files of one --text or --calibrate are joined; repeat --text for further texts.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import measure_quality
import torch
import transformers
from render_results import kl_ratio

from w3pack.errors import W3PackError
from w3pack.format import names
from w3pack.integrations.calibration import prepare_calibration
from w3pack.integrations.loadable import loadable_for
from w3pack.integrations.sources import open_source
from w3pack.pipeline.evaluate import evaluate, reference_log_probabilities
from w3pack.pipeline.packed import open_packed
from w3pack.pipeline.plan import QuantizeOptions
from w3pack.pipeline.quantize_model import prepare_job, run
from w3pack.quantize.maps import round_map
from w3pack.reference import w3

CHARACTERS_PER_TOKEN = 16
#: A float16 map, the same map rounded to the grid with codes and scales kept, and a map learned on the grid.
FREE, ROUNDED, GRID = "float16", "float16 rounded to int8", "int8"


def quantize(arguments: argparse.Namespace, text: Path, output: Path, *, seed: int, dtype: Any) -> float:
    """Write the packed model to `output`; returns the seconds it took."""
    started = time.perf_counter()
    options = QuantizeOptions(group_size=arguments.group_size, qmap_dtype=dtype, seed=seed)
    with open_source(str(arguments.model)) as source:
        job = prepare_job(source, options, loadable=loadable_for(source))
        calibration = prepare_calibration(
            job, effort=arguments.effort, datasets=[str(text)], samples=arguments.nsamples, length=arguments.window
        )
        run(job, output, workers=arguments.workers, calibration=calibration)
    return time.perf_counter() - started


def put(model: Any, folder: Path, *, rounded: bool) -> None:
    """Give the model the dequantized weights of a packed one, its maps rounded to the int8 grid where `rounded`."""
    packed = open_packed(folder)
    for module, spec in packed.config.modules.items():
        parts = {part: packed.read(module, part) for part in names.PACKED}
        if rounded:
            parts[names.QMAP] = round_map(parts[names.QMAP].float(), torch.int8)
            spec = dataclasses.replace(spec, qmap_dtype="int8")
        weight = w3.dequantize(
            parts[names.CODES], parts[names.SCALES], parts[names.QMAP], spec=spec, dtype=torch.float32
        )
        model.get_submodule(module).weight.data.copy_(weight)


def measure(arguments: argparse.Namespace, model: Any, windows: dict[str, torch.Tensor]) -> Iterator[dict[str, Any]]:
    """A row for each seed and kind of map."""

    def logits(ids: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = model(ids, use_cache=False).logits
        return output

    reference = {text: reference_log_probabilities(logits, ids) for text, ids in windows.items()}
    with tempfile.TemporaryDirectory(prefix="w3pack-map-grid-") as scratch:
        text = Path(scratch) / "calibration.txt"
        text.write_text(joined(arguments.calibrate), encoding="utf-8")
        for seed in arguments.seeds:
            for dtype, kinds in (("float16", (FREE, ROUNDED)), ("int8", (GRID,))):
                folder = Path(scratch) / f"{dtype}-{seed}"
                seconds = quantize(arguments, text, folder, seed=seed, dtype=dtype)
                for kind in kinds:
                    put(model, folder, rounded=kind == ROUNDED)
                    quality = {
                        name: dataclasses.asdict(evaluate(logits, ids, reference=reference[name]))
                        for name, ids in windows.items()
                    }
                    yield {"map": kind, "seed": seed, "quantize_seconds": round(seconds, 1), "texts": quality}


def joined(files: list[Path]) -> str:
    """The texts of some files as one."""
    return "\n\n".join(file.read_text(encoding="utf-8") for file in files)


def described(files: list[Path]) -> dict[str, Any]:
    """First and last name, number and digest of some files."""
    return {
        "files": [files[0].name, files[-1].name],
        "count": len(files),
        "sha256": hashlib.sha256(joined(files).encode()).hexdigest(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder or .gguf file")
    parser.add_argument("--calibrate", type=Path, nargs="+", required=True, help="UTF-8 files joined to one text")
    parser.add_argument("--text", type=Path, nargs="+", required=True, action="append", help="what KL is taken on")
    parser.add_argument("--effort", choices=("diagonal", "fast", "default"), default="fast")
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--nsamples", type=int, default=64, help="calibration windows")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of calibration windows and weights")
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
            text = joined(files)[: arguments.tokens * CHARACTERS_PER_TOKEN]
            windows[label] = measure_quality.framed_windows(
                tokenizer, text, window=arguments.window, tokens=arguments.tokens
            )
            texts[label] = described(files)
        report: dict[str, Any] = {
            "what": "KL(source || model) in nats per token of maps on the int8 grid and of free float16 maps",
            "model": {"file": arguments.model.name, "sha256": measure_quality.sha256(arguments.model)},
            "effort": arguments.effort,
            "group_size": arguments.group_size,
            "calibration": {**described(arguments.calibrate), "windows": arguments.nsamples},
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
            print(
                row["seed"], row["map"], {name: round(q["kl_mean"], 5) for name, q in row["texts"].items()}, flush=True
            )
    except W3PackError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for label in texts:
        for kind in (ROUNDED, GRID):
            mean, error = kl_ratio(report["results"], kind, FREE, text=label)
            spread = "" if error is None else f" +- {error:.2%}"
            print(f"{label}: KL of {kind} maps {mean:+.2%}{spread} against float16 maps")
    return 0


def command(arguments: argparse.Namespace) -> str:
    """The command line, files by their base names."""
    words = ["python scripts/measure_map_grid.py --model", arguments.model.name]
    for option, files in [("--calibrate", arguments.calibrate), *(("--text", files) for files in arguments.text)]:
        words += [option, files[0].name] if len(files) == 1 else [option, files[0].name, "...", files[-1].name]
    words += [f"--effort {arguments.effort} --group-size {arguments.group_size} --nsamples {arguments.nsamples}"]
    words += [f"--seeds {' '.join(map(str, arguments.seeds))} --tokens {arguments.tokens} --window {arguments.window}"]
    return " ".join([*words, "--json", arguments.json.name])


if __name__ == "__main__":
    sys.exit(main())
