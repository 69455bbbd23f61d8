"""Every kind of decode and prefill kernel on small shapes, to be run under compute-sanitizer; says ok, or which result is wrong.

compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 python scripts/sanitize_kernels.py
compute-sanitizer --tool racecheck --error-exitcode 1 python scripts/sanitize_kernels.py --checked --case 0

(CUDA's own bindings ask drivers for functions that they may not have; memcheck would count each as an error.)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from w3pack.bench.operands import Weights, random_weights, random_x, relative_error
from w3pack.bench.shapes import Case
from w3pack.bench.suite import texts
from w3pack.errors import UnsupportedError
from w3pack.jit import load
from w3pack.ops.device import limits
from w3pack.ops.w3_config import BESIDE_TOKENS, KEPT, OWN, STREAMED, W3Config, W3Plan, make_plan
from w3pack.ops.w3_decide import plan_of
from w3pack.ops.w3_launch import run_decode
from w3pack.ops.w3_linear import w3_linear
from w3pack.ops.w3_prefill import PrefillPlan, config_of, takes
from w3pack.ops.w3_prefill import make_plan as make_prefill_plan
from w3pack.ops.w3_prefill_launch import run_prefill

#: Few blocks, so that each walks over several row blocks and hands sums on.
BLOCKS = 5
CASES = (
    Case(320, 1088, 3, group_size=64),
    Case(448, 1024, 8, layout="nibble", qmap_dtype="float16"),
    Case(448, 1024, 16, x_dtype="bfloat16"),
    Case(448, 1024, 40),
)
#: Of the dense product and the prefill kernel.
MANY = 200
#: Tokens of a tile, blocks of a cluster, whether warpgroups share a row tile.
PREFILL = ((64, 1, False), (128, 2, False), (64, 1, True), (128, 2, True))
ALLOWED = {"float16": 3e-3, "bfloat16": 1e-2}


def configs(case: Case) -> Iterator[W3Config]:
    """One of each kind that the device has: where activations lie, who shares a row tile, which matrix instructions."""
    device = limits(0)
    tiles = next(n for n in (1, 2, 4, 8) if 8 * n >= case.tokens)
    for ring in (OWN, KEPT, STREAMED, 4) if device.bulk else (OWN,):
        for row_warps, warpgroups, cluster in ((4, False, 1), (4, True, 1), (1, False, 1), (1, False, 2)):
            if (warpgroups and device.arch != "sm_90a") or (ring == OWN and case.tokens > 16):
                continue
            if cluster > 1 and not device.bulk:
                continue
            beside = case.tokens <= BESIDE_TOKENS and case.qmap_dtype == "int8" and row_warps == 4
            split = 1 if ring > 0 or tiles > 2 else 2
            yield W3Config(
                token_tiles=min(tiles, 2),
                row_warps=row_warps,
                split_warps=split,
                token_warps=max(1, tiles // 2),
                slots=4,
                ring=ring,
                blocks=BLOCKS,
                cluster=cluster,
                slot_steps=1 if device.bulk else split,
                warpgroups=warpgroups,
                beside=beside,
            )


def checked(plan: W3Plan) -> W3Plan:
    """The plan with a kernel in which every lane arrives at barriers by itself, so that racecheck sees it."""
    return replace(plan, decode=replace(plan.decode, defines=(*plan.decode.defines, ("W3_CHECKED", 1))))


def plans(case: Case) -> list[W3Plan]:
    """The chosen plan, and one of each kind that fits."""
    desc = case.desc(limits(0))
    found = [plan_of(desc, None)]
    for config in configs(case):
        try:
            found.append(make_plan(desc, config))
        except UnsupportedError:
            continue
    return found


def prefill_plans(case: Case, *, check: bool) -> list[PrefillPlan]:
    """Each kind of prefill kernel, where the device has them, on fewer blocks than there are tiles."""
    desc = case.desc(replace(limits(0), multiprocessors=2))
    if not takes(desc):
        return []
    found = [make_prefill_plan(desc, config_of(desc, tokens=t, cluster=c, split=s)) for t, c, s in PREFILL]
    if check:
        found = [
            replace(plan, text=replace(plan.text, defines=(*plan.text.defines, ("W3_CHECKED", 1)))) for plan in found
        ]
    return found


def wrong(case: Case, weights: Weights, y: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether y is further from float64 than rounding explains."""
    return not relative_error(y, weights.exact(x)) <= ALLOWED[case.x_dtype]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", type=int, choices=range(len(CASES)), action="append", help="all by default")
    parser.add_argument(
        "--checked", action="store_true", help="every lane arrives at barriers by itself, for racecheck"
    )
    parser.add_argument("--verbose", action="store_true", help="name each kernel before it runs")
    options = parser.parse_args()
    cases = [case for number, case in enumerate(CASES) if not options.case or number in options.case]
    if not torch.cuda.is_available():
        print("expected a CUDA device, got none; run this on a machine with a GPU", file=sys.stderr)
        return 3
    device = torch.device("cuda", 0)
    work = [(case, checked(plan) if options.checked else plan) for case in cases for plan in plans(case)]
    prefill = {case: prefill_plans(replace(case, tokens=MANY), check=options.checked) for case in cases}
    every = {text for _, plan in work for text in texts(plan)} | {p.text for found in prefill.values() for p in found}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda text: load(text, 0), every))
    faults = 0
    for case in cases:
        weights, x = random_weights(case.spec, device=device), random_x(case, device=device)
        for plan in (plan for of, plan in work if of is case):
            if options.verbose:
                print(case, plan.config, flush=True)
            y = torch.full((case.tokens, case.rows), float("nan"), dtype=x.dtype, device=device)
            for _ in range(2):
                run_decode(plan, x, weights.codes, weights.scales, weights.qmap, None, y)
            if wrong(case, weights, y, x):
                faults += 1
                print(f"wrong: {case} {plan.config}")
        many = random_x(replace(case, tokens=MANY), device=device)
        for prefill_plan in prefill[case]:
            if options.verbose:
                print(case, prefill_plan.config, flush=True)
            y = torch.full((MANY, case.rows), float("nan"), dtype=x.dtype, device=device)
            for _ in range(2):
                run_prefill(prefill_plan, many, weights.codes, weights.scales, weights.qmap, None, y)
            if wrong(case, weights, y, many):
                faults += 1
                print(f"wrong: {case} {prefill_plan.config}")
        found = w3_linear(
            many,
            weights.codes,
            weights.scales,
            weights.qmap,
            None,
            rows=case.rows,
            columns=case.columns,
            group_size=case.group_size,
        )
        if wrong(case, weights, found, many):
            faults += 1
            print(f"wrong: {case} with {MANY} tokens")
    number = sum(len(found) for found in prefill.values())
    print(
        f"{len(work)} decode kernels, {number} prefill kernels and {len(cases)} dense products: {faults or 'none'} wrong"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
