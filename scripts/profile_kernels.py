"""What the decode kernels are waiting for: Nsight Compute's counters for some shapes and numbers of tokens, as JSON.

    python scripts/profile_kernels.py [--shape 28672x8192 ...] [--tokens 8,16] [--json OUT.json]

Needs `ncu` and the right to read counters. Kernels run one by one here, from a cold L2 cache, at the clocks that the GPU has by itself;
in a stream of launches the beginning of each lies under the end of the one before, so durations are a little longer than those of
`w3pack bench`, which are the ones to compare.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from w3pack.bench.operands import random_weights, random_x
from w3pack.bench.provenance import need_gpu, provenance
from w3pack.bench.shapes import Case, parse_tokens, select
from w3pack.errors import W3PackError
from w3pack.ops.device import device_name, limits
from w3pack.ops.w3_decide import plan_of
from w3pack.ops.w3_linear import w3_linear
from w3pack.ops.w3_table import table_of

SECTIONS = (
    "SpeedOfLight",
    "ComputeWorkloadAnalysis",
    "MemoryWorkloadAnalysis",
    "SchedulerStats",
    "WarpStateStats",
    "LaunchStats",
)
#: Of the counters in these sections: what is kept, under which name, and what its figure is multiplied by.
KEPT: dict[str, tuple[str, float]] = {
    "gpu__time_duration.sum": ("microseconds", 1e-3),
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": ("dram_percent", 1),
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": ("dram_percent", 1),
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": ("l2_percent", 1),
    "l1tex__throughput.avg.pct_of_peak_sustained_active": ("l1_percent", 1),
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": ("sm_percent", 1),
    "smsp__issue_active.avg.pct_of_peak_sustained_active": ("issued_percent_of_cycles", 1),
    "smsp__issue_active.avg.per_cycle_active": ("issued_a_cycle", 1),
    "smsp__warps_eligible.avg.per_cycle_active": ("eligible_warps", 1),
    "smsp__warps_active.avg.per_cycle_active": ("warps", 1),
    "launch__registers_per_thread": ("registers", 1),
    "launch__grid_size": ("blocks", 1),
    "launch__block_size": ("threads", 1),
}
PIPE = re.compile(r"sm__inst_executed_pipe_(\w+)\.avg\.pct_of_peak_sustained_active")
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")


def run_child(cases: list[Case]) -> None:
    """One launch of each case under the profiler, after others that are not counted."""
    device = torch.device("cuda", 0)
    for number, case in enumerate(cases):
        weights, x = random_weights(case.spec, device=device, seed=number), random_x(case, device=device)

        def call(weights: Any = weights, x: torch.Tensor = x, case: Case = case) -> None:
            w3_linear(
                x,
                weights.codes,
                weights.scales,
                weights.qmap,
                None,
                rows=case.rows,
                columns=case.columns,
                group_size=case.group_size,
            )

        for _ in range(3):
            call()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        call()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


def figures(row: dict[str, str]) -> dict[str, Any]:
    """What is kept of a launch; pipes and stalls sorted, the largest first."""
    found: dict[str, Any] = {"kernel": row["Kernel Name"].split("(")[0]}
    pipes: dict[str, float] = {}
    stalls: dict[str, float] = {}
    for name, text in row.items():
        try:
            value = float(text.replace(",", ""))
        except (ValueError, AttributeError):
            continue
        if name in KEPT:
            label, factor = KEPT[name]
            found[label] = round(value * factor, 3)
        elif pipe := PIPE.fullmatch(name):
            pipes[pipe[1]] = round(value, 2)
        elif stall := STALL.fullmatch(name):
            stalls[stall[1]] = round(value, 3)
    largest = lambda counted: dict(sorted(counted.items(), key=lambda item: -item[1])[:8])  # noqa: E731
    return {
        **found,
        "pipes_percent": largest(pipes),
        "stalled_warps_per_issue": largest(stalls),
    }


def profile(cases: list[Case], command: list[str]) -> list[dict[str, Any]]:
    """Run this script under ncu, and read what it writes."""
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "ncu.csv"
        options = [
            "--csv",
            "--page",
            "raw",
            "--print-units",
            "base",
            "--profile-from-start",
            "off",
            "--clock-control",
            "none",
        ]
        sections = [word for section in SECTIONS for word in ("--section", section)]
        full = ["ncu", *options, *sections, "--log-file", str(log), sys.executable, *command, "--child"]
        ran = subprocess.run(full, capture_output=True, text=True, check=False)
        lines = log.read_text().splitlines() if log.exists() else []
    begin = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), None)
    if ran.returncode or begin is None:
        raise W3PackError(
            f"expected counters from ncu, got exit status {ran.returncode} and {ran.stderr[-400:] or lines[-3:]}; "
            "is it installed, and may this user read counters?"
        )
    rows = list(csv.DictReader(lines[begin:]))[1:]  # the first holds units
    launches = [figures(row) for row in rows if "w3_" in row["Kernel Name"]]
    found: list[dict[str, Any]] = []
    for launch in launches:  # in the order of cases; one may have a staging kernel before its decode kernel
        if not found or "decode" in found[-1]["launches"][-1]["kernel"]:
            found.append({"launches": []})
        found[-1]["launches"].append(launch)
    device = limits(0)
    table = table_of(device_name(0), device.arch)
    return [
        {
            "shape": f"{case.rows}x{case.columns}",
            "tokens": case.tokens,
            "config": asdict(plan_of(case.desc(device), table).config),
            **entry,
        }
        for case, entry in zip(cases, found, strict=True)
    ]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Counters of the decode kernels.")
    parser.add_argument("--shape", nargs="+", default=["28672x8192", "8192x8192", "4096x14336", "4096x4096"])
    parser.add_argument("--tokens", default="1,8,16,64")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        need_gpu("profiling", 0)
        shapes = select([], options.shape)
        cases = [Case(s.rows, s.columns, count) for s, count in itertools.product(shapes, parse_tokens(options.tokens))]
        if options.child:
            run_child(cases)
            return 0
        document = {
            "provenance": provenance(0, " ".join(["python", *sys.argv])),
            "cases": profile(cases, [__file__, "--shape", *options.shape, "--tokens", options.tokens]),
        }
    except W3PackError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    text = json.dumps(document, indent=1) + "\n"
    if options.json:
        options.json.write_text(text)
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
