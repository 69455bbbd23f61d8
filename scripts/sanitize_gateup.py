"""The FP8 gate/up kernels on small shapes, to be run under compute-sanitizer; says ok, or which result is wrong.

compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 python scripts/sanitize_gateup.py
compute-sanitizer --tool racecheck --error-exitcode 1 python scripts/sanitize_gateup.py --checked --case 0 --verbose

(CUDA's own bindings ask drivers for functions that they may not have; memcheck would count each as an error.)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch.nn import functional

from w3pack.bench.operands import X_DTYPES, relative_error
from w3pack.jit import load
from w3pack.ops.device import limits
from w3pack.ops.gateup_between import between_text, quantize, silu_product
from w3pack.ops.gateup_config import BLOCK, GateUpDesc, GateUpPlan, make_plan, plan_of, why_not
from w3pack.ops.gateup_launch import GateUpDecoder, Matrix
from w3pack.ops.w3_config import DeviceLimits
from w3pack.reference.fp8_gateup import dequantize

#: Few blocks, so that each uses its slots more than once and hands sums on; some row blocks are shared by three.
BLOCKS = 7
#: So many rows get the kernels of large matrices.
MANY_ROWS = 28672
#: rows, columns, tokens: whole scale blocks, and partial ones both ways; each number of token tiles.
CASES = ((300, 2320, 1), (512, 2304, 8), (300, 2320, 16), (512, 2304, 32))
#: tokens, columns of what stands between products: some rows unaligned for wide loads and stores, a partial group, padded tokens.
BETWEEN = (5, 1042)
#: Kernels between products, by (paired, quantized).
BETWEEN_KINDS = {
    (False, True): "E4M3 of x",
    (True, False): "SiLU and product",
    (True, True): "E4M3 of SiLU and product",
}
#: Exact sums, rounded once, err at most by 2^-11 and 2^-8 of each.
ALLOWED = {"float16": 1e-3, "bfloat16": 5e-3}


def descs(cases: list[tuple[int, int, int]], device: DeviceLimits) -> list[GateUpDesc]:
    """Pairs and single matrices, both dtypes of x; those that the device has a kernel for."""
    found = [
        GateUpDesc(tokens, rows, columns, paired, x_dtype, device)
        for rows, columns, tokens in cases
        for x_dtype in X_DTYPES
        for paired in (True, False)
    ]
    return [desc for desc in found if why_not(desc) is None]


def plans(desc: GateUpDesc, *, checked: bool) -> Iterator[GateUpPlan]:
    """With the kernel of small and that of large matrices; `checked`: every lane arrives at barriers by itself."""
    configs = [plan_of(replace(desc, rows=rows)).config for rows in (desc.rows, MANY_ROWS)]
    for config in dict.fromkeys(replace(config, blocks=BLOCKS) for config in configs):
        plan = make_plan(desc, config)
        defines = (*plan.text.defines, ("GU_CHECKED", 1)) if checked else plan.text.defines
        yield replace(plan, text=replace(plan.text, defines=defines))


def random_matrix(rows: int, columns: int, *, device: torch.device, seed: int) -> Matrix:
    """Values over the whole range of E4M3, scales all different; products of normal x are near 1."""
    generator = torch.Generator(device=device).manual_seed(seed)
    values = torch.randn(rows, columns, device=device, generator=generator).mul_(120).clamp_(-448, 448)
    grid = (-(-rows // BLOCK), -(-columns // BLOCK))
    scales = (torch.rand(grid, device=device, generator=generator) + 0.5) / (120 * columns**0.5)
    return Matrix(values.to(torch.float8_e4m3fn), scales)


def random_x(tokens: int, columns: int, dtype: torch.dtype, *, device: torch.device) -> torch.Tensor:
    """Normal numbers, some columns larger, as models have them."""
    generator = torch.Generator(device=device).manual_seed(1)
    x = torch.randn(tokens, columns, device=device, generator=generator)
    x[:, :: max(1, columns // 7)] *= 8
    return x.to(dtype)


def exact(desc: GateUpDesc, x: torch.Tensor, gate: Matrix, up: Matrix) -> torch.Tensor:
    """The op in float64; of a single matrix `gate` alone."""
    products = [
        x.double() @ dequantize(part.weight, part.scales, block=(BLOCK, BLOCK), dtype=torch.float64).t()
        for part in ((gate, up) if desc.paired else (gate,))
    ]
    return functional.silu(products[0]) * products[1] if desc.paired else products[0]


def quantized_wrong(values: torch.Tensor, scales: torch.Tensor, truth: torch.Tensor) -> bool:
    """Whether a scale is not the largest of its group by 448, or a value is further from `truth` than half a step of E4M3."""
    tokens, columns = truth.shape
    peak = functional.pad(truth.abs(), (0, -columns % BLOCK)).view(tokens, -1, BLOCK).amax(dim=-1)
    wanted = torch.where(peak > 0, peak / 448, torch.ones_like(peak))
    found = scales[:tokens].double()
    grown = found.repeat_interleave(BLOCK, dim=1)[:, :columns]
    half_step = torch.maximum(truth.abs() / 16, grown / 1024)
    error = (values[:tokens].double() * grown - truth).abs()
    # a value in the middle of two may go either way
    return not (bool(((found - wanted).abs() <= 1e-5 * wanted).all()) and bool((error <= 1.01 * half_step).all()))


def between_faults(x_dtype: str, dtype: torch.dtype, *, device: torch.device, verbose: bool) -> list[str]:
    """Runs the kernels between products on halves of one tensor, as a fused product leaves them; names those that are wrong."""
    tokens, columns = BETWEEN
    both = random_x(tokens, 2 * columns, dtype, device=device)
    both[2, 256:384] = 0
    first, second = both[:, :columns], both[:, columns:]
    product = functional.silu(first.double()) * second.double()
    faults = []
    for (paired, quantized), name in BETWEEN_KINDS.items():
        if verbose:
            print(name, x_dtype, flush=True)
        if quantized:
            wrong = quantized_wrong(*quantize(first, second if paired else None), product if paired else first.double())
        else:
            wrong = not relative_error(silu_product(first, second), product) <= ALLOWED[x_dtype]
        if wrong:
            faults.append(f"{name} {x_dtype}")
    return faults


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
    work = [(desc, list(plans(desc, checked=options.checked))) for desc in descs(cases, limits(0))]
    texts = {plan.text for _, group in work for plan in group}
    texts |= {
        between_text(dtype, paired=paired, quantized=quantized)
        for dtype in X_DTYPES.values()
        for paired, quantized in BETWEEN_KINDS
    }
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda text: load(text, 0), texts))
    faults = []
    for desc, group in work:
        x = random_x(desc.tokens, desc.columns, X_DTYPES[desc.x_dtype], device=device)
        gate, up = (random_matrix(desc.rows, desc.columns, device=device, seed=seed) for seed in (2, 3))
        truth = exact(desc, x, gate, up)
        name = f"{desc.rows}x{desc.columns} m{desc.tokens} {'pair' if desc.paired else 'single'} {desc.x_dtype}"
        for plan in group:
            if options.verbose:
                print(name, plan.config, flush=True)
            y = torch.full((desc.tokens, desc.rows), float("nan"), dtype=x.dtype, device=device)
            decoder = GateUpDecoder(plan, device_index=0)
            for _ in range(2):
                decoder.run(x, gate, up if desc.paired else gate, y)
            if not relative_error(y, truth) <= ALLOWED[desc.x_dtype]:
                faults.append(f"{name} {plan.config}")
    for x_dtype, dtype in X_DTYPES.items():
        faults += between_faults(x_dtype, dtype, device=device, verbose=options.verbose)
    for fault in faults:
        print(f"wrong: {fault}")
    decodes, others = sum(len(group) for _, group in work), len(BETWEEN_KINDS) * len(X_DTYPES)
    print(f"{decodes} gate/up kernels and {others} between products: {len(faults) or 'none'} wrong")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
