"""Where a decode kernel's time goes, on the GPU that is here: with parts of it left out, and what single instructions cost.

    python scripts/measure_kernel.py parts --shape 28672x8192 --tokens 8 > docs/results/kernel_parts_h200.json
    python scripts/measure_kernel.py instructions > docs/results/instructions_h200.json

`parts` times the chosen config of a shape, then copies of the kernel without its products, without the sums over thread blocks,
without reading weights, without waiting for activations: what a part costs is what its absence saves. Results of the copies are
wrong, of course. `instructions` times loops of independent instructions, in cycles for each warp's instruction on one scheduler.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from w3pack.bench.operands import random_weights, random_x
from w3pack.bench.provenance import provenance
from w3pack.bench.shapes import Case, parse_shape
from w3pack.bench.timing import copies_for, graph_time, l2_bytes
from w3pack.jit import KernelText, Store, kernels_folder, load
from w3pack.ops.device import device_name, limits
from w3pack.ops.w3_decide import plan_of
from w3pack.ops.w3_launch import Decoder
from w3pack.ops.w3_table import table_of

#: For each part: file, text, and what stands in its place when the part is left out.
EDITS: dict[str, list[tuple[str, str, str]]] = {
    "products": [
        (
            "w3_multiply.cuh",
            "  constexpr int kTogether = kTokenTiles <= 2",
            "  acc.value[0][0][0] += __uint_as_float(load_shared(slot.codes + lane * 16).x);\n  release();\n  return;\n"
            "  constexpr int kTogether = kTokenTiles <= 2",
        ),
        (
            "w3_multiply.cuh",
            "  StepWords words;\n  words.load(slot.codes, lane, 0);",
            "  acc.value[0][0][0] += __uint_as_float(load_shared(slot.codes + lane * 16).x);\n  release();\n  return;\n"
            "  StepWords words;\n  words.load(slot.codes, lane, 0);",
        ),
    ],
    "sums": [("w3_decode.cu", "    finish(p, walk", "    if (acc.value[0][0][0] == 1.2345f) finish(p, walk")],
    "weights": [
        (
            "w3_feed.cuh",
            "barrier_expect(full, (kRowWarps - feeder + kWeightFeeders - 1) / kWeightFeeders * (code_bytes + scale_bytes));",
            "barrier_arrive(full);",
        ),
        (
            "w3_feed.cuh",
            "          copy_bulk(to + i * kWeightFeeders * kSlotRowBytes, codes[i], code_bytes, full);\n",
            "",
        ),
        (
            "w3_feed.cuh",
            "          copy_bulk(to + i * kWeightFeeders * kSlotRowBytes + kSlotCodeBytes, "
            "scales[i] + first_group * 128, scale_bytes, full);\n",
            "",
        ),
    ],
    "activations": [("w3_decode.cu", "while (x_ready <= step + to_turn && x_ready < order.count)", "while (false)")],
}
#: What is left out together.
VARIANTS = ((), ("products",), ("sums",), ("weights",), ("activations",), ("products", "sums"), ("weights", "sums"))

INSTRUCTIONS = r"""
typedef unsigned int u32;
struct alignas(16) Params { u32* out; long long* cycles; int rounds; u32 factor; };
#define PRMT(d) asm volatile("prmt.b32 %0, %0, %1, %2;" : "+r"(d) : "r"(a), "r"(b));
#define SHIFT(d) asm volatile("shr.u32 %0, %0, 3;" : "+r"(d));
#define LOGIC(d) asm volatile("lop3.b32 %0, %0, %1, %2, 0xEA;" : "+r"(d) : "r"(a), "r"(b));
#define HIGH(d) asm volatile("mul.hi.u32 %0, %0, %1;" : "+r"(d) : "r"(f));
#define CONVERT(d) asm volatile("{ .reg .f32 x; cvt.rn.f32.s32 x, %0; mov.b32 %0, x; }" : "+r"(d));
#define MULTIPLY_ADD(d) asm volatile("{ .reg .f32 x; mov.b32 x, %0; fma.rn.f32 x, x, x, x; mov.b32 %0, x; }" : "+r"(d));
#define MMA(v) asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%4,%5}, {%4,%5}, {%0,%1,%2,%3};" \
  : "+r"(v[0]), "+r"(v[1]), "+r"(v[2]), "+r"(v[3]) : "r"(a), "r"(b));
extern "C" __global__ void __launch_bounds__(512) instructions(const __grid_constant__ Params p) {
  u32 d[8], m[8][4], a = threadIdx.x * 77, b = threadIdx.x * 3 + 1, f = p.factor;
  for (int i = 0; i < 8; ++i) { d[i] = threadIdx.x + i; for (int e = 0; e < 4; ++e) m[i][e] = i + e; }
  __syncthreads();
  const long long begin = clock64();
#pragma unroll 1
  for (int round = 0; round < p.rounds; ++round)
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      FIRST
      SECOND
    }
  const long long end = clock64();
  u32 sum = 0;
  for (int i = 0; i < 8; ++i) sum += d[i] + m[i][0] + m[i][1] + m[i][2] + m[i][3];
  p.out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
  if (threadIdx.x == 0) p.cycles[blockIdx.x] = end - begin;
}
"""
MIXES = {
    "prmt": ("PRMT(d[i])", ""),
    "shift": ("SHIFT(d[i])", ""),
    "lop3": ("LOGIC(d[i])", ""),
    "mul.hi": ("HIGH(d[i])", ""),
    "int to float": ("CONVERT(d[i])", ""),
    "fma": ("MULTIPLY_ADD(d[i])", ""),
    "mma s8": ("MMA(m[i])", ""),
    "prmt + mul.hi": ("PRMT(d[i])", "HIGH(d[(i + 4) % 8])"),
    "prmt + fma": ("PRMT(d[i])", "MULTIPLY_ADD(d[(i + 4) % 8])"),
    "mma s8 + 2 prmt": ("MMA(m[i])", "PRMT(d[i]) PRMT(d[(i + 4) % 8])"),
    "mma s8 + 4 prmt": ("MMA(m[i])", "PRMT(d[i]) PRMT(d[(i + 2) % 8]) PRMT(d[(i + 4) % 8]) PRMT(d[(i + 6) % 8])"),
    "mma s8 + 4 fma": (
        "MMA(m[i])",
        "MULTIPLY_ADD(d[i]) MULTIPLY_ADD(d[(i + 2) % 8]) MULTIPLY_ADD(d[(i + 4) % 8]) MULTIPLY_ADD(d[(i + 6) % 8])",
    ),
}


def edited_kernels(left_out: tuple[str, ...], folder: Path) -> Path:
    """A copy of the kernels without some parts; ValueError when a text to be replaced is not there any more."""
    copy = folder / ("without_" + "_".join(left_out) if left_out else "whole")
    shutil.copytree(kernels_folder(), copy)
    for part in left_out:
        for name, old, new in EDITS[part]:
            text = (copy / name).read_text()
            if old not in text:
                raise ValueError(f"expected {old!r} in {name}, for leaving out {part}; adapt EDITS to the kernels")
            (copy / name).write_text(text.replace(old, new))
    return copy


def parts(shape: str, tokens: int) -> dict[str, object]:
    """Microseconds of every variant for one shape."""
    size = parse_shape(shape)
    case = Case(size.rows, size.columns, tokens)
    desc = case.desc(limits(0))
    plan = plan_of(desc, table_of(device_name(0), desc.device.arch))
    device = torch.device("cuda", 0)
    weights = random_weights(case.spec, device=device)
    sets = weights.copies(copies_for(case.spec.nbytes, l2_bytes=l2_bytes(0)))
    x = random_x(case, device=device)
    y = torch.empty(tokens, size.rows, device=device, dtype=x.dtype)
    result: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for left_out in VARIANTS:
            decoder = Decoder(plan, maps=1, device_index=0)
            store = Store(kernels=edited_kernels(left_out, Path(folder)))
            decoder._decode = load(plan.decode, 0, store=store)

            def call(copy: int, decoder: Decoder = decoder) -> None:
                chosen = sets[copy]
                decoder.run(x, chosen.codes, chosen.scales, chosen.qmap, None, y)

            timing = graph_time(call, copies=len(sets))
            result[" and ".join(left_out) or "nothing"] = round(timing.median_us, 2)
    return {"shape": shape, "tokens": tokens, "config": repr(plan.config), "microseconds_without": result}


def instructions() -> Iterator[dict[str, object]]:
    """Cycles for each pass of a mix on one scheduler, for 1, 2, 3 and 4 warps on it."""
    rounds = 512
    out = torch.zeros(1 << 20, dtype=torch.int32, device="cuda")
    cycles = torch.zeros(1024, dtype=torch.int64, device="cuda")
    for name, (first, second) in MIXES.items():
        with tempfile.TemporaryDirectory() as folder:
            source = INSTRUCTIONS.replace("FIRST", first + ";").replace("SECOND", second + ";")
            (Path(folder) / "instructions.cu").write_text(source)
            kernel = load(KernelText("instructions.cu", "instructions"), 0, store=Store(kernels=Path(folder)))
            row: dict[str, object] = {"mix": name}
            for warps in (1, 2, 3, 4):
                found = []
                for _ in range(5):
                    kernel.launch(
                        stream=torch.cuda.current_stream().cuda_stream,
                        grid=limits(0).multiprocessors,
                        block=128 * warps,
                        shared_bytes=0,
                        params=struct.pack("<QQiI8x", out.data_ptr(), cycles.data_ptr(), rounds, 1 << 29),
                    )
                    found.append(int(cycles[0]) / (8 * rounds * warps))
                row[f"cycles_with_{warps}_warps"] = round(statistics.median(found), 2)
            yield row


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Where a decode kernel's time goes.")
    parser.add_argument("what", choices=["parts", "instructions"])
    parser.add_argument("--shape", nargs="+", default=["28672x8192", "4096x4096"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[8, 16])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("expected a CUDA device, got none; run this on a machine with a GPU", file=sys.stderr)
        return 3
    entries = (
        list(instructions())
        if options.what == "instructions"
        else [parts(shape, tokens) for shape in options.shape for tokens in options.tokens]
    )
    document = {"provenance": provenance(0, " ".join(["python", *sys.argv])), "entries": entries}
    print(json.dumps(document, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
