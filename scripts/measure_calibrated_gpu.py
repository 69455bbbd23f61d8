"""How long `w3pack quantize --dataset` takes on a GPU, stage by stage, for a random model of Llama-3-8B's shape.

    python scripts/measure_calibrated_gpu.py --json docs/results/quantise_h200.json
    python scripts/measure_calibrated_gpu.py --layers 2 --efforts fast default best --json quick.json   # a quick look
    python scripts/measure_calibrated_gpu.py --layers 2 --small --samples 8 --json small.json           # without a GPU

Weights are made on the device (`generation_bench.make`), a tokenizer is trained on Python's help topics, and the same text is
calibrated on. The checkpoint is quantised by the functions that the command line calls, each effort from the start. How well
a random model is quantised says nothing of real ones; how long it takes does not depend on the values.

Time is counted to the stage it is spent in, the device having finished; what a stage calls counts there only. The JSON is
written after each block, and stderr has a line for it: a run that is cut off says how far it came. --folder keeps the
checkpoint for a later run.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import platform
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from generation_bench import INDEX, SECONDS, at_most, clean, make, phase
from measure_generation_gpu import llama_config
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from w3pack.bench.provenance import provenance
from w3pack.errors import W3PackError
from w3pack.integrations.block_weights import WeightlessModel
from w3pack.integrations.calibration import prepare_calibration
from w3pack.integrations.decoder_walk import DecoderWalk
from w3pack.integrations.loadable import loadable_for
from w3pack.integrations.sources import open_source
from w3pack.integrations.watched_block import WatchedBlock
from w3pack.integrations.whole_model import WholeModel
from w3pack.pipeline import calibrate, quantize_model
from w3pack.pipeline.plan import QuantizeOptions
from w3pack.pipeline.quantize_model import prepare_job, run
from w3pack.pipeline.texts import default_text
from w3pack.quantize import calibrated

EFFORTS = ("diagonal", "fast", "default", "best")
TOKENS = 4096  # of the tokenizer
TEXT = "text.txt"
GROUP = 128
#: Where time is counted: owner, attribute -> stage.
STAGES: tuple[tuple[Any, str, str], ...] = (
    (DecoderWalk, "_embed", "embeddings"),
    (WeightlessModel, "fill", "read a block"),
    (DecoderWalk, "weight", "read a weight"),
    (WatchedBlock, "stages", "first batch"),
    (WatchedBlock, "moments", "moments"),
    (WatchedBlock, "advance", "advance"),
    (WatchedBlock, "error", "block error"),
    (calibrate, "factorize", "factorize"),
    (calibrate, "solve", "other losses"),
    (calibrated, "quantize_data_free", "data-free"),
    (calibrated, "quantize_diagonal", "diagonal"),
    (calibrated, "feed_errors_forward", "gptq"),
    (calibrated, "refine", "lnq"),
    (calibrate, "pack", "pack"),
    (calibrate, "measure_error", "weight errors"),
    (calibrate, "dequantized", "dequantize"),
    (calibrate, "tune_model", "tuning"),
    (calibrate, "tune_block", "tuning"),
    (WholeModel, "__init__", "load the whole model"),
    (quantize_model, "_write_shards", "write the result"),
)
START = time.perf_counter()


def say(text: str) -> None:
    """A line with the time since the start."""
    print(f"{time.perf_counter() - START:7.1f} s  {text}", file=sys.stderr, flush=True)


class Clock:
    """Seconds of each stage, without those of stages within."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device
        self._within: list[float] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time spent here."""
        begin = self._now()
        self._within.append(0.0)
        try:
            yield
        finally:
            took = self._now() - begin
            own = took - self._within.pop()
            self.seconds[name] = self.seconds.get(name, 0.0) + own
            if self._within:
                self._within[-1] += took

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def counted(self, work: Callable[..., Any], name: str) -> Callable[..., Any]:
        """The same work, its time counted."""

        @functools.wraps(work)
        def counted(*args: Any, **kwargs: Any) -> Any:
            with self.stage(name):
                return work(*args, **kwargs)

        return counted


def english() -> str:
    """Python's help topics, or where they are left out its sources."""
    try:
        return default_text(1 << 30).text
    except W3PackError:
        sources = sorted(Path(argparse.__file__).parent.glob("*.py"))
        return "\n\n".join(file.read_text(encoding="utf-8", errors="replace") for file in sources)


def make_source(options: argparse.Namespace, folder: Path, device: torch.device) -> Path:
    """A random checkpoint with a tokenizer and a text, unless it is there."""
    source = folder / f"{'small' if options.small else 'llama'}-{options.layers}-calibrated-source"
    config = llama_config(options.layers, small=options.small)
    if not (source / INDEX).exists():
        with phase("make"):
            make(config, source, device)
    with phase("tokenizer"):
        text = english()
        (folder / TEXT).write_text(text, encoding="utf-8")
        trained = ByteLevelBPETokenizer()
        trained.train_from_iterator(text.splitlines(), vocab_size=min(TOKENS, config.vocab_size), show_progress=False)
        PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer).save_pretrained(source)
    return source


class Document:
    """The JSON, written again whenever there is more to say."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self._place: Path = options.json
        self.efforts: dict[str, dict[str, Any]] = {}
        self._facts = {
            "provenance": provenance(0, " ".join(["python", *sys.argv])) if device.type == "cuda" else None,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "cpu_cores": os.cpu_count(),
            "layers": options.layers,
            "samples": options.samples,
            "window": options.window,
            "group_size": GROUP,
        }

    def write(self) -> None:
        """What is known."""
        document = {**self._facts, "seconds_before": SECONDS, "efforts": self.efforts}
        partial = self._place.with_suffix(".part")
        partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        partial.replace(self._place)


def quantise(
    source: Path, output: Path, effort: str, options: argparse.Namespace, device: torch.device, document: Document
) -> None:
    """Quantise as the command line does, and enter what is found under the effort."""
    clean(device)
    clock, begin = Clock(device), time.perf_counter()
    found = document.efforts[effort] = {"finished": False}
    blocks: list[dict[str, float]] = []
    finished = [begin]  # the walk's start, then each block's end
    write_block = calibrate._write_block

    def enter(**facts: Any) -> None:
        found.update(
            seconds=round(time.perf_counter() - begin, 2),
            stages={name: round(seconds, 3) for name, seconds in clock.seconds.items()},
            blocks=blocks,
            gpu_bytes_at_most=at_most(device),
            rss_bytes_at_most=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            **facts,
        )
        document.write()

    def block_written(staging: Any, file: str, packed: Any, record: dict[str, Any]) -> None:
        with clock.stage("write a block"):
            write_block(staging, file, packed, record)
        error = record["block"]["error"]
        finished.append(time.perf_counter())
        blocks.append({"seconds": round(finished[-1] - finished[-2], 3), "error": error})
        say(
            f"{effort}: block {len(blocks)} of {options.layers} in {blocks[-1]['seconds']:.2f} s, "
            f"error {error:.4f}, at most {at_most(device) / 1e9:.1f} GB"
        )
        enter()

    def tell(name: str, amount: int) -> None:
        if name.startswith("tuning"):
            say(f"{effort}: {name}")
            enter()

    with ExitStack() as patches:
        for owner, name, stage in STAGES:
            patches.enter_context(mock.patch.object(owner, name, clock.counted(getattr(owner, name), stage)))
        patches.enter_context(mock.patch.object(calibrate, "_write_block", block_written))
        with open_source(str(source)) as opened:
            with clock.stage("plan"):
                job = prepare_job(opened, QuantizeOptions(group_size=GROUP), loadable=loadable_for(opened))
            with clock.stage("text"):
                calibration = prepare_calibration(
                    job,
                    effort=effort,  # type: ignore[arg-type]
                    datasets=[str(source.parent / TEXT)],
                    samples=options.samples,
                    length=options.window,
                )
            say(f"{effort}: the text is cut")
            finished[0] = time.perf_counter()
            report = run(job, output, device=str(device), calibration=calibration, progress=tell, overwrite=True)
    enter()
    told = report.calibration or {}
    a_block = statistics.median(block["seconds"] for block in blocks)
    outside = found["seconds"] - sum(block["seconds"] for block in blocks)
    tuning = {name: value for name, value in told.get("tuning", {}).items() if name not in ("vectors", "blocks")}
    enter(
        finished=True,
        seconds_a_block=a_block,
        seconds_outside_blocks=round(outside, 2),
        bits_per_weight=round(report.bits_per_weight, 4),
        weights=report.weights,
        output_bytes=report.output_bytes,
        mean_block_error=statistics.mean(block["error"] for block in blocks),
        tokens=told.get("tokens"),
        activations=told.get("activations"),
        tuning=tuning or None,
        notes=list(report.notes),
    )
    say(f"{effort}: {found['seconds']} s in all, {a_block:.2f} s a block, {outside:.1f} s outside of blocks")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--efforts", nargs="+", choices=EFFORTS, default=["default"])
    parser.add_argument("--samples", type=int, default=128, help="calibration windows")
    parser.add_argument("--window", type=int, default=512, help="tokens of a window")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is kept, and found by a later run")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    logging.getLogger("w3pack").setLevel(logging.INFO)
    device = torch.device(options.device)
    document = Document(options, device)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        source = make_source(options, folder, device)
        say("the checkpoint is there")
        for effort in options.efforts:
            output = folder / f"{source.name}-{effort}"
            quantise(source, output, effort, options, device, document)
            shutil.rmtree(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
