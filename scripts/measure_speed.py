"""Weights each second of the whole `w3pack quantize` command on this CPU, files in and files out.

python scripts/measure_speed.py [--source GGUF_OR_FOLDER] [--json OUT.json]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from fetch import fetch_model

import w3pack


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="default: SmolLM2-135M, fetched")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path("docs/results/quantise_cpu.json"))
    arguments = parser.parse_args()
    arguments.source = arguments.source or fetch_model("smollm2-135m")
    reports = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.runs):
            command = [sys.executable, "-m", "w3pack", "quantize", str(arguments.source), "-o", f"{folder}/out"]
            done = subprocess.run(
                [*command, "--overwrite", "--device", "cpu", "--json"], capture_output=True, text=True, check=True
            )
            reports.append(json.loads(done.stdout))
    seconds = statistics.median(report["seconds"] for report in reports)
    result = {
        "command": "python scripts/measure_speed.py",
        "source": arguments.source.name,
        "w3pack": w3pack.__version__,
        "torch": torch.__version__,
        "cpu": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "weights": reports[0]["weights"],
        "seconds": seconds,
        "all_seconds": [report["seconds"] for report in reports],
        "weights_per_second": reports[0]["weights"] / seconds,
    }
    arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
