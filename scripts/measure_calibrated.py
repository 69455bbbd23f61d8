"""The ladder of calibrated quantisation on a real model: what each stage of `w3pack quantize` is worth, in KL to the source.

    python scripts/measure_calibrated.py --model GGUF --calibrate FILE... --text FILE... --work FOLDER --json OUT.json

Each --calibrate is files joined to one text, and so is each --text; repeat either. Texts to calibrate on must have nothing
in common with those to evaluate on. `python scripts/measure_calibrated.py --smollm2` sets all of these: SmolLM2-135M,
calibrated on State of the Union addresses before 1990 and Python's help topics, evaluated on those from 1990 on and on
Moby-Dick; `--gemma3` and `--qwen-coder` are Gemma-3-270M and Qwen2.5-Coder-0.5B, the latter with Python sources as well.

The model is quantised by the same functions as the command line calls, into FOLDER, and loaded from there; figures are taken
by `w3pack.pipeline.evaluate`, source and results in bfloat16. A row is written as soon as it is there. Rows in OUT.json and
results in FOLDER are not made again, so an interrupted run continues. `best` begins with what `default` has found, which is
its own first stage to the last bit; its time is the sum.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import hashlib
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import fetch
import measure_quality
import torch
import transformers

from w3pack.errors import W3PackError
from w3pack.format import names
from w3pack.integrations.calibration import TUNING_SHARE, prepare_calibration
from w3pack.integrations.loadable import loadable_for
from w3pack.integrations.sources import open_source
from w3pack.pipeline import calibrate
from w3pack.pipeline.evaluate import evaluate, reference_log_probabilities
from w3pack.pipeline.packed import open_packed
from w3pack.pipeline.plan import QuantizeOptions
from w3pack.pipeline.quantize_model import prepare_job, run

EFFORTS = ("none", "diagonal", "fast", "default", "best")
LABELS = {"none": "w3pack data-free"}


def plain_methods(group_sizes: list[int]) -> list[measure_quality.Method]:
    """Round-to-nearest and NF3, the baselines that all ratios are taken to."""
    found = [
        measure_quality.Method(
            "rtn3 asymmetric min-max g128", lambda weight: measure_quality.rtn(weight, group_size=128)
        )
    ]
    for size in sorted({128, *group_sizes}, reverse=True):
        found.append(
            measure_quality.Method(
                f"nf3 absmax g{size}",
                lambda weight, size=size: measure_quality.nf3(weight, group_size=size),  # type: ignore[misc]
            )
        )
    return found


def joined(files: list[Path]) -> str:
    """Several files as one text."""
    return "\n\n".join(file.read_text(encoding="utf-8") for file in files)


#: Standard-library sources that only evaluation sees, and those that only calibration sees.
JUDGED_CODE = ("argparse.py", "dataclasses.py", "textwrap.py")
LEARNT_CODE = (
    "ast.py",
    "calendar.py",
    "configparser.py",
    "csv.py",
    "difflib.py",
    "inspect.py",
    "tarfile.py",
    "typing.py",
)


def english() -> dict[str, Any]:
    """Public-domain texts: what the language models are calibrated on, and what they are judged by."""
    addresses = sorted(fetch.fetch_texts("sotu").glob("*.txt"))
    chapters = sorted(fetch.fetch_texts("moby-dick").glob("chapter_*.txt"))
    from pydoc_data.topics import topics

    return {
        "calibrate": {
            "State of the Union before 1990": joined([f for f in addresses if int(f.name[:4]) < 1990]),
            "Python's help topics": "\n\n".join(topics[name] for name in sorted(topics)),
        },
        "text": {
            "State of the Union 1990 on": joined([f for f in addresses if int(f.name[:4]) >= 1990]),
            "Moby-Dick": joined(chapters),
        },
    }


def smollm2() -> dict[str, Any]:
    """Model and texts of the published ladder."""
    return {"model": fetch.fetch_model("smollm2-135m"), **english()}


def gemma3() -> dict[str, Any]:
    """Gemma-3-270M, a base model, with the same texts."""
    return {"model": fetch.fetch_model("gemma3-270m"), **english()}


def qwen_coder() -> dict[str, Any]:
    """A coder model: calibrated on code too, judged by code first."""
    texts = english()
    library = Path(argparse.__file__).parent
    texts["calibrate"]["Python sources"] = joined([library / name for name in LEARNT_CODE])
    return {
        "model": fetch.fetch_model("qwen2.5-coder-0.5b"),
        "calibrate": texts["calibrate"],
        "text": {"other Python sources": joined([library / name for name in JUDGED_CODE]), **texts["text"]},
    }


PRESETS = {"smollm2": smollm2, "gemma3": gemma3, "qwen-coder": qwen_coder}


def rank(method: str) -> tuple[int, int]:
    """Place of a row: baselines first, then each group size in the order of effort."""
    kinds = ("source", "rtn3", "nf3", *(LABELS.get(effort, f"w3pack {effort}") for effort in EFFORTS))
    size = 0 if method == "source" or method.startswith(("rtn3", "nf3")) else -int(method.rpartition("g")[2])
    return (-1000 if size == 0 else size, next(n for n, kind in enumerate(kinds) if method.startswith(kind)))


def label_of(files: list[Path]) -> str:
    """How a text is called in the tables."""
    return files[0].name if len(files) == 1 else f"{files[0].name} ... {files[-1].name}"


@contextmanager
def blocks_from(folder: Path) -> Iterator[None]:
    """Let calibration take the Linears of each block from a finished result with the same settings."""
    packed = open_packed(folder)

    def take(job: Any, effort: str, staging: Any, walk: Any, block: Any, number: int, *, told: Any, **_: Any) -> None:
        found: dict[str, Any] = {}
        record: dict[str, Any] = {"tensors": {}, "modules": {}, "block": {"error": None}}
        for module in walk.blocks[number]:
            spec, entry = job.plan.modules[module], packed.manifest["modules"][module]
            found[module] = {part: packed.read(module, part) for part in names.PACKED}
            error = calibrate.measure_error(walk.weight(module), found[module], spec=spec)
            record["modules"][module] = {
                "error": {"squared_error": error.squared_error, "squared_weight": error.squared_weight},
                "calibration": entry["calibration"],
            }
            if told is not None:
                told(module, spec.weights)
        calibrate._write_block(staging, calibrate.work_file(number), found, record)

    original = calibrate._quantize_block
    calibrate._quantize_block = take  # type: ignore[assignment]
    try:
        yield
    finally:
        calibrate._quantize_block = original


def quantise(
    arguments: argparse.Namespace, texts: list[Path], *, effort: str, group_size: int, output: Path
) -> dict[str, Any]:
    """Run the pipeline unless its result is there; seconds, processor seconds and what it says of itself."""
    place = output.with_suffix(".json")
    if place.exists():
        found: dict[str, Any] = json.loads(place.read_text())
        return found
    first = output.with_name(f"default-g{group_size}")
    reuse = effort == "best" and first.with_suffix(".json").exists()
    before = json.loads(first.with_suffix(".json").read_text()) if reuse else {"seconds": 0.0, "cpu_seconds": 0.0}
    wall, processor = time.perf_counter(), time.process_time()
    with open_source(str(arguments.model)) as source, blocks_from(first) if reuse else nullcontext():
        job = prepare_job(source, QuantizeOptions(group_size=group_size, seed=0), loadable=loadable_for(source))
        calibration = prepare_calibration(
            job,
            effort=effort,  # type: ignore[arg-type]
            datasets=[] if effort == "none" else [str(text) for text in texts],
            samples=arguments.samples,
            length=arguments.window,
            tuning_share=arguments.tuning_share,
        )
        began = time.perf_counter()

        def tell(name: str, amount: int) -> None:
            if name.startswith("tuning"):
                print(f"  {time.perf_counter() - began:6.0f} s  {name}", file=sys.stderr, flush=True)

        report = run(job, output, workers=arguments.workers, calibration=calibration, progress=tell, overwrite=True)
    calibrated = report.calibration or {}
    found = {
        "bits_per_weight": round(report.bits_per_weight, 4),
        "weights": report.weights,
        # none where an earlier stage was interrupted, and its time lost
        "seconds": None if before["seconds"] is None else round(before["seconds"] + time.perf_counter() - wall, 1),
        "cpu_seconds": round(before["cpu_seconds"] + time.process_time() - processor, 1),
        "tuning": {k: v for k, v in calibrated.get("tuning", {}).items() if k != "vectors"} or None,
        "samples": calibrated.get("samples"),
    }
    place.write_text(json.dumps(found, indent=1) + "\n")
    return found


def measure(
    arguments: argparse.Namespace, calibration: list[Path], report: dict[str, Any], windows: dict[str, torch.Tensor]
) -> None:
    """Fill `report["results"]`, row by row."""
    model, _ = measure_quality.load(arguments.model)
    model.to(torch.bfloat16)
    rows = {row["method"]: row for row in report["results"]}

    def logits_of(model: Any) -> Any:
        return lambda ids: model(ids, use_cache=False).logits

    reference = {
        text: reference_log_probabilities(logits_of(model), ids, dtype=torch.float16) for text, ids in windows.items()
    }

    def judge(method: str, judged: Any, **facts: Any) -> None:
        quality = {
            text: dataclasses.asdict(evaluate(logits_of(judged), ids, reference=reference[text]))
            for text, ids in windows.items()
        }
        rows[method] = {"method": method, **facts, "texts": quality}
        report["results"] = [rows[name] for name in order if name in rows]
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(measure_quality.summary(rows[method]), flush=True)

    pipeline = [(effort, size) for size in arguments.group_sizes for effort in arguments.efforts]
    plain = plain_methods(arguments.group_sizes)
    named = {f"{LABELS.get(effort, f'w3pack {effort}')} g{size}": (effort, size) for effort, size in pipeline}
    order = list(dict.fromkeys(["source", *(method.name for method in plain), *rows, *named]))
    order.sort(key=rank)
    if "source" not in rows:
        judge("source", model, bits_per_weight=None)
    linears = measure_quality.decoder_linears(model)
    if not arguments.skip_plain:
        originals = {name: linear.weight.detach().clone() for name, linear in linears.items()}
        weights = sum(weight.numel() for weight in originals.values())
        for method in plain:
            if method.name in rows:
                continue
            size = 0.0
            for name, linear in linears.items():
                back, stored = method.run(originals[name].float())
                linear.weight.data.copy_(back)
                size += stored
            judge(method.name, model, bits_per_weight=round(8 * size / weights, 4))
        del originals
    del model, linears
    gc.collect()
    for method, (effort, size) in named.items():
        if method in rows:
            continue
        output = arguments.work / f"{effort}-g{size}"
        facts = quantise(arguments, calibration, effort=effort, group_size=size, output=output)
        packed = transformers.AutoModelForCausalLM.from_pretrained(output, dtype=torch.bfloat16).eval()
        judge(
            method,
            packed,
            bits_per_weight=facts["bits_per_weight"],
            weights=facts["weights"],
            quantize_seconds=facts["seconds"],
            quantize_cpu_seconds=facts["cpu_seconds"],
            tuning=facts["tuning"],
        )
        del packed
        gc.collect()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for preset, make in PRESETS.items():
        parser.add_argument(f"--{preset}", dest="preset", action="store_const", const=preset, help=make.__doc__)
    parser.add_argument("--model", type=Path, help="a .gguf file or a checkpoint folder")
    parser.add_argument("--calibrate", type=Path, nargs="+", action="append", default=[], help="UTF-8 files")
    parser.add_argument("--text", type=Path, nargs="+", action="append", default=[], help="UTF-8 files to evaluate on")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of each text to evaluate on")
    parser.add_argument("--window", type=int, default=512, help="tokens of a window, of both kinds")
    parser.add_argument("--samples", type=int, default=128, help="calibration windows")
    parser.add_argument(
        "--tuning-share",
        type=float,
        default=TUNING_SHARE,
        help="windows that `best` learns from, in units of --samples",
    )
    parser.add_argument("--group-sizes", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--efforts", nargs="+", choices=EFFORTS, default=list(EFFORTS))
    parser.add_argument(
        "--skip-plain", action="store_true", help="leave the rows of round-to-nearest and NF3 for later"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()) / "w3pack-ladder", help="for the results"
    )
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    if arguments.preset:
        chosen = PRESETS[arguments.preset]()
        arguments.model = chosen["model"]
    else:
        chosen = {
            kind: {label_of(files): joined(files) for files in getattr(arguments, kind)}
            for kind in ("calibrate", "text")
        }
    if not (arguments.model and chosen["calibrate"] and chosen["text"]):
        parser.error("--model, --calibrate and --text are needed without --smollm2, --gemma3 or --qwen-coder")
    try:
        calibration: list[Path] = []
        for name, text in chosen["calibrate"].items():
            file = arguments.work / f"calibrate-{''.join(sign if sign.isalnum() else '-' for sign in name)}.txt"
            file.write_text(text, encoding="utf-8")
            calibration.append(file)
        tokenizer = measure_quality.load_tokenizer(arguments.model)
        windows: dict[str, torch.Tensor] = {}
        facts: dict[str, Any] = {}
        for name, text in chosen["text"].items():
            windows[name] = measure_quality.framed_windows(
                tokenizer, text[: arguments.tokens * 16], window=arguments.window, tokens=arguments.tokens
            )
            facts[name] = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "windows": len(windows[name])}
        report = provenance(arguments, chosen["calibrate"], facts)
        if arguments.json.exists():
            report["results"] = json.loads(arguments.json.read_text())["results"]
        measure(arguments, calibration, report, windows)
    except W3PackError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def provenance(arguments: argparse.Namespace, calibration: dict[str, str], texts: dict[str, Any]) -> dict[str, Any]:
    """The report without its results."""
    options = (
        [f"--{arguments.preset}"]
        if arguments.preset
        else ["--model", arguments.model.name, "--calibrate ... --text ..."]
    )
    options += ["--tuning-share", f"{arguments.tuning_share:g}"] if arguments.tuning_share != TUNING_SHARE else []
    return {
        "what": "calibrated 3-bit quantization of every decoder Linear; KL(source || model) in nats per token",
        "model": {"file": arguments.model.name, "sha256": measure_quality.sha256(arguments.model)},
        "calibration": {
            "texts": {name: hashlib.sha256(text.encode()).hexdigest() for name, text in calibration.items()},
            "samples": arguments.samples,
            "length": arguments.window,
        },
        "texts": texts,
        "window": arguments.window,
        "compute": "bfloat16",
        "results": [],
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "cpu": {
            "model": measure_quality.processor(),
            "cores": os.cpu_count(),
            "workers": arguments.workers,
            "load_average": os.getloadavg(),
        },
        "command": ["python", "scripts/measure_calibrated.py", *options, "--json", arguments.json.name],
    }


if __name__ == "__main__":
    sys.exit(main())
