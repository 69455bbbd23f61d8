"""The prefill kernel on this GPU, config by config: right first, then how fast beside torch and the operator's other way.

    python scripts/measure_prefill.py check                       # small awkward cases, every tile and cluster; seconds
    python scripts/measure_prefill.py time [--shape 28672x8192 ...] [--tokens 128,512] [--json OUT.json]

`check` prints one line for a case that is wrong and a count at the end; begin with it. `time` prints, for each shape and number of
tokens, torch's time, that without the kernel, and every config's, the one that the operator would take marked.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from w3pack.bench.operands import X_DTYPES, Weights, random_weights, random_x, relative_error
from w3pack.bench.partials import borrowed
from w3pack.bench.prefill import mainloop_call, other_call
from w3pack.bench.provenance import need_gpu, provenance
from w3pack.bench.shapes import Case, parse_tokens, select
from w3pack.bench.suite import Bench
from w3pack.bench.timing import graph_time
from w3pack.errors import W3PackError
from w3pack.ops.device import limits
from w3pack.ops.w3_prefill import DIVISIONS, PrefillConfig, config_of, configs, make_plan, prefill_plan
from w3pack.ops.w3_prefill_launch import run_prefill

_REPEATS = {"repeats": 8, "outer": 11}


def check_cases() -> Iterator[tuple[Case, PrefillConfig]]:
    """From the simplest on: one tile and one step, more steps, more tiles, clusters, then forms and edges."""
    device = limits(0)
    simple = [(128, 64, 64), (128, 128, 64), (128, 1024, 64), (256, 1024, 128), (512, 4096, 513), (4096, 2048, 1000)]
    few = [division for division in DIVISIONS if division[0] in (64, 256)]
    for (rows, columns, tokens), (tile, cluster, split) in itertools.product(simple, few):
        case = Case(rows, columns, tokens)
        if not split or columns > 64:
            yield case, config_of(case.desc(device), tokens=tile, cluster=cluster, split=split)
    for tile, cluster, split in DIVISIONS:
        case = Case(1000, 3000, 257)
        yield case, config_of(case.desc(device), tokens=tile, cluster=cluster, split=split)
    forms = itertools.product(
        ("dense", "nibble"), ("int8", "float16"), ("linear", "tile", "row"), X_DTYPES, (64, 128, 3008)
    )
    for number, (layout, qmap_dtype, maps, x_dtype, group) in enumerate(forms):
        case = Case(130 + 61 * (number % 5), 3000, 65 + 31 * (number % 7), group, layout, qmap_dtype, maps, x_dtype)  # type: ignore[arg-type]
        tile, cluster, split = DIVISIONS[number % len(DIVISIONS)]
        yield case, config_of(case.desc(device), tokens=tile, cluster=cluster, split=split)


def check() -> int:
    """Every case against float64, NaN in and after y, ten launches alike."""
    device = torch.device("cuda", 0)
    wrong = 0
    for number, (case, config) in enumerate(check_cases()):
        weights, x = random_weights(case.spec, device=device, seed=number), random_x(case, device=device)
        plan = make_plan(case.desc(limits(0)), config)
        room = torch.full((case.tokens + 1, case.rows), float("nan"), dtype=x.dtype, device=device)
        y = room[:-1]
        run_prefill(plan, x, weights.codes, weights.scales, weights.qmap, None, y)
        torch.cuda.synchronize()
        first = y.clone()
        truth = weights.exact(x)
        error = relative_error(first, truth)
        torchs = relative_error(torch.nn.functional.linear(x, weights.dense(x.dtype)), truth)
        differ = 0
        for _ in range(10):
            run_prefill(plan, x, weights.codes, weights.scales, weights.qmap, None, y)
            differ += not torch.equal(y, first)
        sound = error <= 1.05 * torchs + 1e-5 and not differ and bool(room[-1].isnan().all())
        if not sound:
            wrong += 1
            bad = (first.double() - truth).abs() > 1e-2 * truth.abs().max()
            print(
                f"WRONG {case} g{case.group_size} {case.map_kind} {config}: error {error:.3g}, torch {torchs:.3g}, ",
                end="",
            )
            where = bad.nonzero()
            print(
                f"{len(where)} of {bad.numel()} off, first (token, row) {where[:3].tolist()}, {differ} launches differ"
            )
    print(f"{number + 1 - wrong} of {number + 1} right")
    return 1 if wrong else 0


def time(shapes: Sequence[str], tokens: Sequence[int]) -> list[dict[str, Any]]:
    """Times of every config, in microseconds."""
    bench = Bench(0, limits(0))
    rows = []
    for shape, count in itertools.product(select([], shapes), tokens):
        case = Case(shape.rows, shape.columns, count)
        weights, x = bench.weights(case), random_x(case, device=bench.device)
        sets = weights.copies(bench.copies(case.spec.nbytes))
        ys = [torch.empty(count, case.rows, dtype=x.dtype, device=x.device) for _ in sets]
        torch_us = bench.torch_time(case, x, weights.dense(x.dtype)).median_us
        with borrowed(0):
            without = graph_time(other_call(case, sets, x, ys), copies=len(sets), **_REPEATS).median_us
        desc = case.desc(bench.limits)
        chosen = prefill_plan(desc).config
        found = {config: _time(desc, config, sets, x, ys) for config in configs(desc)}
        print(f"{case}: torch {torch_us:.1f}, without {without:.1f} ({without / torch_us:.2f})", flush=True)
        for config, us in sorted(found.items(), key=lambda item: item[1]):
            mark = "  <- chosen" if config == chosen else ""
            rows_of = "64 rows" if config.split else "128 rows"
            print(
                f"    {rows_of} x {config.tokens} tokens, cluster {config.cluster}: {us:8.1f} ({us / torch_us:.2f}){mark}"
            )
        entries = [{"config": asdict(config), "microseconds": us} for config, us in found.items()]
        rows.append(
            {**case.to_dict(), "torch": torch_us, "without": without, "configs": entries, "chosen": asdict(chosen)}
        )
    return rows


def _time(
    desc: Any, config: PrefillConfig, sets: Sequence[Weights], x: torch.Tensor, ys: Sequence[torch.Tensor]
) -> float:
    call = mainloop_call(make_plan(desc, config), sets, x, ys)
    return graph_time(call, copies=len(sets), **_REPEATS).median_us


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="The prefill kernel, config by config.")
    parser.add_argument("what", choices=("check", "time"))
    parser.add_argument("--shape", nargs="+", default=["28672x8192", "8192x8192", "4096x4096", "5120x17408"])
    parser.add_argument("--tokens", default="128,512")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    try:
        need_gpu("measuring", 0)
    except W3PackError as error:
        print(error, file=sys.stderr)
        return 1
    with torch.cuda.device(0):
        if options.what == "check":
            return check()
        rows = time(options.shape, parse_tokens(options.tokens))
        if options.json:
            source = provenance(0, " ".join(["python", *sys.argv]))
            options.json.write_text(json.dumps({"provenance": source, "cases": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
