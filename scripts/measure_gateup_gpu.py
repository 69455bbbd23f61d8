"""Gate, up, SiLU and down in block-scaled FP8 on the GPU that is here: is the kernel right, and how long does everything take?

    python scripts/measure_gateup_gpu.py [--quick] [--shapes 17408x5120 ...] [--tokens 1 8 16] > docs/results/gateup_h200.json
    python scripts/measure_gateup_gpu.py --parts configs --tokens 1 8 16 --quick > configs.json

A shape is I x K: gate and up are I x K, down is K x I. Parts run in processes of their own, one after the other, so that one that fails
or hangs costs only itself; what it found until then is kept. Times of the first shape are taken in `--rounds` processes. JSON goes to
stdout, progress to stderr.

  check     the kernel against float64 for awkward shapes, both dtypes, default and other configs; ten launches with identical bits
  kernel    gate + up + SiLU, down and the whole FFN step with the kernel, in its default config
  arms      the same with cuBLASLt, 8-bit activations: two calls, one fused call, two graph branches
  equality  bytes of one fused cuBLASLt product against those of two
  configs   the kernel in many configs (only when asked for)
  parts     the kernel with parts left out: what a part costs is what its absence saves (only when asked for)
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from w3pack.bench.kernels import load_all, spills
from w3pack.bench.partials import borrowed
from w3pack.bench.provenance import provenance
from w3pack.bench.timing import Call, copies_for, graph_time, l2_bytes
from w3pack.errors import UnsupportedError, W3PackError
from w3pack.jit import KernelText, Store, kernels_folder, load
from w3pack.ops import device as devices
from w3pack.ops import gateup_arms, gateup_between, gateup_cublaslt, gateup_probe
from w3pack.ops.gateup_config import GateUpConfig, GateUpDesc, make_plan, plan_of
from w3pack.ops.gateup_launch import GateUpDecoder, Matrix

PARTS = ("check", "kernel", "arms", "equality", "configs", "parts")
#: Seconds that a part may take.
LIMITS = {"check": 60, "kernel": 60, "arms": 80, "equality": 40, "configs": 120, "parts": 60}
#: Parts of a run that names none.
USUAL = ("kernel", "arms", "equality", "check")
HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
#: I x K of models that have such MLPs.
SHAPES = (
    "17408x5120",
    "768x2048",
    "6144x2048",
    "12288x4096",
    "14336x4096",
    "18944x3584",
    "2048x7168",
    "28672x8192",
)
#: I x K where sums over columns may be split otherwise for I rows than for 2 I.
EQUAL_SHAPES = ("6144x6144", "12288x6144", "18432x7168", "14336x8192", "29568x8192")
EQUAL_TOKENS = (5, 8, 16)
#: rows, columns: partial scale blocks, partial row blocks, one row, more and fewer units than multiprocessors.
AWKWARD = (
    (1, 16),
    (5, 128),
    (64, 208),
    (130, 1040),
    (300, 3600),
    (1000, 2064),
    (10944, 2048),
    (768, 2048),
    (2048, 7168),
    (17408, 5120),
)


def say(*words: object) -> None:
    """Progress."""
    print(*words, file=sys.stderr, flush=True)


def found(**entry: Any) -> None:
    """One result, at once: whatever happens next, it is known."""
    print(json.dumps(entry), flush=True)


# ---- operands and truth


@dataclass(frozen=True)
class Block:
    """Random weights of one matrix: E4M3 [rows, columns], float32 scales of 128 x 128."""

    weight: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def random(cls, rows: int, columns: int, seed: int) -> Block:
        """Values over the whole range of E4M3, scales all different; products of normal x are near 1."""
        generator = torch.Generator("cuda").manual_seed(seed)
        values = torch.randn(rows, columns, device="cuda", generator=generator).mul_(120).clamp_(-448, 448)
        grid = (-(-rows // 128), -(-columns // 128))
        scales = (torch.rand(grid, device="cuda", generator=generator) + 0.5) / (120 * columns**0.5)
        return cls(values.to(torch.float8_e4m3fn), scales)

    def copy(self) -> Block:
        """The same elsewhere in memory."""
        return Block(self.weight.clone(), self.scales.clone())

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix, each product formed in float64 and rounded once."""
        rows, columns = self.weight.shape
        grown = self.scales.double().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        return (self.weight.double() * grown).to(dtype)

    @property
    def matrix(self) -> Matrix:
        """What the launcher takes."""
        return Matrix(self.weight, self.scales)


def random_x(tokens: int, columns: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    """Normal numbers, some columns larger, as models have them."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tokens, columns, device="cuda", generator=generator)
    x[:, :: max(1, columns // 7)] *= 8
    return x.to(dtype)


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SiLU(gate) * up."""
    return torch.nn.functional.silu(gate) * up


def relative(value: torch.Tensor, truth: torch.Tensor) -> float:
    """Frobenius error."""
    return float((value.double() - truth).norm() / truth.norm())


# ---- configs


def desc_of(rows: int, columns: int, tokens: int, *, paired: bool, dtype: str) -> GateUpDesc:
    """A call on the device that is here."""
    return GateUpDesc(
        tokens, rows, columns, paired, "bfloat16" if dtype == "bfloat16" else "float16", devices.limits(0)
    )


def configs_for(desc: GateUpDesc) -> list[GateUpConfig]:
    """Many ways to divide the work, those that fit."""
    tiles = 1 if desc.tokens <= 8 else 2 if desc.tokens <= 16 else 4
    # half rows, piece, slots, row warps, split warps, unroll
    table = [
        (256, 128, 3, 8, 1, 1),
        (256, 128, 2, 8, 1, 1),
        (128, 256, 3, 8, 1, 1),
        (128, 256, 2, 8, 1, 1),
        (128, 256, 3, 4, 2, 1),
        (128, 256, 3, 8, 1, 2),
        (128, 128, 6, 8, 1, 1),
        (128, 128, 6, 4, 1, 1),
        (64, 256, 4, 4, 2, 1),
        (64, 256, 4, 4, 2, 2),
        (64, 256, 5, 4, 2, 1),
        (64, 256, 3, 4, 2, 1),
        (64, 256, 5, 8, 1, 1),
        (64, 256, 4, 8, 2, 1),
        (64, 512, 2, 4, 2, 1),
        (64, 512, 3, 4, 2, 1),
        (64, 512, 2, 4, 4, 1),
        (64, 128, 6, 8, 1, 1),
        (32, 256, 6, 4, 2, 1),
        (32, 256, 4, 4, 2, 1),
        (32, 512, 4, 4, 2, 1),
        (32, 512, 3, 2, 4, 1),
        (32, 512, 3, 4, 4, 1),
        (16, 512, 4, 2, 4, 1),
        (16, 256, 6, 2, 2, 1),
    ]
    chosen = []
    for half, piece, slots, rows, split, unroll in table:
        try:
            plan = make_plan(desc, GateUpConfig(tiles, half, piece, slots, rows, split, unroll))
        except UnsupportedError:
            continue
        chosen.append(plan.config)
    return list(dict.fromkeys(chosen))


def build(texts: Iterable[KernelText]) -> set[KernelText]:
    """Build and load side by side; those that fail or spill are told of. Returns the sound ones."""
    begin = time.perf_counter()
    sound = set()
    loaded = load_all(texts, 0)
    for text, kernel in loaded.items():
        if isinstance(kernel, W3PackError):
            found(fault=str(kernel))
        elif spills(kernel):
            found(spills=str(text), bytes=kernel.compiled.spill_bytes)
        else:
            sound.add(text)
    say(f"{len(loaded)} kernels in {time.perf_counter() - begin:.1f} s")
    return sound


def tried(what: str, action: Callable[[], Any], **about: Any) -> Any:
    """Run; a failure is a result too, unless the device is lost."""
    try:
        return action()
    except (RuntimeError, ValueError, W3PackError) as error:
        found(failed=what, error=f"{type(error).__name__}: {str(error)[:600]}", **about)
        say("FAILED", what, about, str(error)[:200])
        torch.cuda.synchronize()  # raises when nothing more can come of it
        return None


# ---- check


def check(options: argparse.Namespace) -> None:
    """Errors against float64 beside torch's own, and whether ten launches agree in every bit."""
    tokens_list = (1, 5, 8, 9, 16) if options.quick else (1, 2, 5, 8, 9, 15, 16, 17, 32)
    shapes = AWKWARD[:-1] if options.quick else AWKWARD
    jobs = [
        (rows, columns, tokens, paired, dtype)
        for (rows, columns), paired, dtype, tokens in itertools.product(shapes, (True, False), HALVES, tokens_list)
    ]
    plans = {job: plan_of(desc_of(*job[:3], paired=job[3], dtype=job[4])) for job in jobs}
    forced = {}
    for (rows, columns), paired, dtype, tokens in itertools.product(
        ((300, 3600),) if options.quick else ((300, 3600), (2048, 7168)), (True, False), HALVES, (5, 16)
    ):
        desc = desc_of(rows, columns, tokens, paired=paired, dtype=dtype)
        for number, config in enumerate(configs_for(desc)):
            forced[rows, columns, tokens, paired, dtype, number] = make_plan(desc, config)
    sound = build({plan.text for plan in [*plans.values(), *forced.values()]})
    forced = {key: plan for key, plan in forced.items() if plan.text in sound}
    worst: dict[str, Any] = {}
    bad = 0
    for key, plan in [*forced.items(), *plans.items()]:
        desc = plan.desc
        result = tried("check", functools.partial(checked, plan), desc=repr(desc), config=repr(plan.config))
        if result is None:
            bad += 1
            continue
        name = f"{desc.x_dtype} {'pair' if desc.paired else 'single'}"
        limit = 2e-3 if desc.x_dtype == "float16" else 1.2e-2
        few = 4e-3 if desc.rows * desc.tokens < 1000 else 0.0
        wrong = (
            not result["same_bits"]
            or not result["error"] <= limit + few
            or not result["error"] <= 1.2 * result["torch_error"] + few + 1e-5
        )
        if wrong:
            bad += 1
            found(wrong=list(map(str, key)), config=repr(plan.config), **result)
            say("WRONG", key, result)
        if result["error"] > worst.get(name, {"error": -1})["error"]:
            worst[name] = {**result, "shape": list(map(str, key))}
    found(check={"cases": len(plans) + len(forced), "bad": bad, "worst": worst})
    say("checked", len(plans) + len(forced), "bad", bad, worst)


_BLOCKS: dict[tuple[int, int, int], Block] = {}


def block(rows: int, columns: int, seed: int) -> Block:
    """The same random matrix each time."""
    key = (rows, columns, seed)
    if key not in _BLOCKS:
        _BLOCKS[key] = Block.random(rows, columns, seed)
    return _BLOCKS[key]


def checked(plan: Any) -> dict[str, Any]:
    """One plan against float64 and torch."""
    desc = plan.desc
    dtype = HALVES[desc.x_dtype]
    x = random_x(desc.tokens, desc.columns, dtype, seed=desc.tokens)
    first = block(desc.rows, desc.columns, 1)
    second = block(desc.rows, desc.columns, 2) if desc.paired else first
    decoder = GateUpDecoder(plan, device_index=0)
    y = torch.full((desc.tokens + 1, desc.rows), 7.0, dtype=dtype, device="cuda")
    outputs = []
    for _ in range(10):
        y.fill_(7.0)
        decoder.run(x, first.matrix, second.matrix, y[: desc.tokens])
        outputs.append(y.clone())
    torch.cuda.synchronize()
    same = all(torch.equal(outputs[0].view(torch.int16), other.view(torch.int16)) for other in outputs[1:])
    outside = bool((y[desc.tokens :] == 7.0).all())
    truth, plain = x.double() @ first.dense(torch.float64).t(), x @ first.dense(dtype).t()
    if desc.paired:
        truth = gated(truth, x.double() @ second.dense(torch.float64).t())
        plain = gated(plain, x @ second.dense(dtype).t())
    value = y[: desc.tokens]
    return {
        "error": relative(value, truth),
        "torch_error": relative(plain, truth),
        "largest": float((value.double() - truth).abs().max() / truth.abs().max()),
        "same_bits": same and outside,
    }


# ---- times


@dataclass(frozen=True)
class Shape:
    """I x K."""

    intermediate: int
    hidden: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """From "17408x5120"."""
        intermediate, _, hidden = text.partition("x")
        return cls(int(intermediate), int(hidden))

    def __str__(self) -> str:
        return f"{self.intermediate}x{self.hidden}"


class Layer:
    """The weights of one MLP: gate and up in one tensor, and down."""

    def __init__(self, shape: Shape) -> None:
        rows, columns = shape.intermediate, shape.hidden
        gate, up = Block.random(rows, columns, 1), Block.random(rows, columns, 2)
        self.weight = torch.cat([gate.weight.view(torch.uint8), up.weight.view(torch.uint8)]).view(torch.float8_e4m3fn)
        self.scales = torch.cat([gate.scales, up.scales])
        self.down = Block.random(columns, rows, 3)
        self.rows = rows
        self.whole_scales = gateup_cublaslt.block_scales(self.scales)
        half = self.scales.shape[0] // 2
        self.half_scales = [gateup_cublaslt.block_scales(part) for part in (self.scales[:half], self.scales[half:])]
        self.down_scales = gateup_cublaslt.block_scales(self.down.scales)

    def copy(self) -> Layer:
        """The same elsewhere in memory."""
        other = object.__new__(Layer)
        other.__dict__ = {
            name: [part.clone() for part in value]
            if isinstance(value, list)
            else value.copy()
            if isinstance(value, Block)
            else value
            if isinstance(value, int)
            else value.clone()
            for name, value in self.__dict__.items()
        }
        return other

    @property
    def halves(self) -> tuple[Matrix, Matrix]:
        """Gate and up as views."""
        grid = self.scales.shape[0] // 2
        return (
            Matrix(self.weight[: self.rows], self.scales[:grid]),
            Matrix(self.weight[self.rows :], self.scales[grid:]),
        )


def layers_of(shape: Shape, *, down_only: bool = False) -> list[Layer]:
    """As many layers as it takes for the cache to forget one."""
    first = Layer(shape)
    nbytes = shape.intermediate * shape.hidden * (1 if down_only else 2)
    return [first, *(first.copy() for _ in range(copies_for(nbytes, l2_bytes=l2_bytes(0)) - 1))]


def timed(what: str, call: Call, copies: int, **about: Any) -> float | None:
    """Time and tell."""

    def measure() -> float:
        with borrowed(0) as captures:
            timing = graph_time(call, copies=copies, repeats=48, outer=11)
        found(
            clean=captures.clean,
            timed=what,
            us=round(timing.median_us, 2),
            low=round(timing.low_us, 2),
            high=round(timing.high_us, 2),
            **about,
        )
        say(f"{what:34s} {timing.median_us:8.2f} us  {about}")
        return timing.median_us

    result: float | None = tried(what, measure, **about)
    return result


def shapes_of(options: argparse.Namespace) -> list[Shape]:
    """Those that were asked for."""
    return [Shape.parse(text) for text in options.shapes]


def kernel(options: argparse.Namespace) -> None:
    """The kernel in its default config, and the FFN step of two of them."""
    shapes = shapes_of(options)[: 1 if options.first_only else None]
    kinds = [(shape, tokens, dtype) for shape in shapes for tokens in options.tokens for dtype in HALVES]
    build({plan.text for shape, tokens, dtype in kinds for plan in both_plans(shape, tokens, dtype)})
    for shape in shapes:
        layers = layers_of(shape, down_only=True)
        for tokens, dtype in itertools.product(options.tokens, HALVES):
            about = {"shape": str(shape), "tokens": tokens, "dtype": dtype}
            tried("kernel", functools.partial(kernel_times, shape, tokens, dtype, layers, about), **about)
        del layers
        torch.cuda.empty_cache()


def both_plans(shape: Shape, tokens: int, dtype: str) -> tuple[Any, Any]:
    """Gate and up, and down."""
    pair = desc_of(shape.intermediate, shape.hidden, tokens, paired=True, dtype=dtype)
    down = desc_of(shape.hidden, shape.intermediate, tokens, paired=False, dtype=dtype)
    return plan_of(pair), plan_of(down)


def kernel_times(shape: Shape, tokens: int, dtype: str, layers: list[Layer], about: dict[str, Any]) -> None:
    """Gate + up + SiLU, down, both."""
    pair, down = (GateUpDecoder(plan, device_index=0) for plan in both_plans(shape, tokens, dtype))
    x = random_x(tokens, shape.hidden, HALVES[dtype])
    h = torch.empty(tokens, shape.intermediate, dtype=x.dtype, device="cuda")
    y = torch.empty(tokens, shape.hidden, dtype=x.dtype, device="cuda")
    halves = [layer.halves for layer in layers]
    downs = [layer.down.matrix for layer in layers]

    def first(i: int) -> None:
        pair.run(x, *halves[i], h)

    def second(i: int) -> None:
        down.run(h, downs[i], downs[i], y)

    def step(i: int) -> None:
        first(i)
        second(i)

    first(0)
    timed("kernel gate+up+SiLU", first, len(layers), config=repr(pair.plan.config), **about)
    timed("kernel down", second, len(layers), config=repr(down.plan.config), **about)
    timed("kernel FFN", step, len(layers), **about)


def configs(options: argparse.Namespace) -> None:
    """The kernel in many configs."""
    dtypes = ("float16",) if options.quick else tuple(HALVES)
    wanted = []
    for shape, tokens, dtype, paired in itertools.product(shapes_of(options), options.tokens, dtypes, (True, False)):
        rows, columns = (shape.intermediate, shape.hidden) if paired else (shape.hidden, shape.intermediate)
        desc = desc_of(rows, columns, tokens, paired=paired, dtype=dtype)
        wanted += [(shape, make_plan(desc, config)) for config in configs_for(desc)]
    sound = build({plan.text for _, plan in wanted})
    for shape in shapes_of(options):
        layers = layers_of(shape, down_only=True)
        for chosen, plan in wanted:
            if chosen == shape and plan.text in sound:
                tried("config", functools.partial(one_config, plan, layers, shape))
        del layers
        torch.cuda.empty_cache()


def one_config(plan: Any, layers: list[Layer], shape: Shape) -> None:
    """Time one config."""
    desc = plan.desc
    decoder = GateUpDecoder(plan, device_index=0)
    x = random_x(desc.tokens, desc.columns, HALVES[desc.x_dtype])
    y = torch.empty(desc.tokens, desc.rows, dtype=x.dtype, device="cuda")
    operands = [layer.halves if desc.paired else (layer.down.matrix,) * 2 for layer in layers]
    what = "config gate+up+SiLU" if desc.paired else "config down"
    timed(
        what,
        lambda i: decoder.run(x, *operands[i], y),
        len(layers),
        shape=str(shape),
        tokens=desc.tokens,
        dtype=desc.x_dtype,
        config=repr(plan.config),
        shared=plan.shared_bytes,
    )


#: For each part of the kernel: file, text, and what stands in its place when the part is left out.
EDITS: dict[str, list[tuple[str, str, str]]] = {
    "products": [
        (
            "gateup_decode.cu",
            "        multiply_part(map",
            "        if (acc.value[0][0][0] == 1.2345f) multiply_part(map",
        )
    ],
    "sums": [("gateup_decode.cu", "    finish(p, walk", "    if (acc.value[0][0][0] == 1.2345f) finish(p, walk")],
    "tokens but one": [
        ("gateup_feed.cuh", "kBf16 ? 0 : p.tokens * token_bytes(p, piece)", "kBf16 ? 0 : token_bytes(p, piece)"),
        ("gateup_feed.cuh", "barrier_expect(barrier, p.tokens * bytes)", "barrier_expect(barrier, bytes)"),
        ("gateup_feed.cuh", "token < p.tokens; ++token", "token < 1; ++token"),
    ],
    "scales": [
        ("gateup_decode.cu", "load_constant(rows[0] + block)", "1.0f"),
        ("gateup_decode.cu", "load_constant(rows[1] + block)", "1.0f"),
    ],
}
VARIANTS = (
    (),
    ("products",),
    ("sums",),
    ("tokens but one",),
    ("scales",),
    ("products", "sums"),
    ("tokens but one", "sums"),
)


def edited_kernels(left_out: tuple[str, ...], folder: Path) -> Path:
    """A copy of the kernels without some parts."""
    copy = folder / ("without_" + "_".join(left_out).replace(" ", "_") if left_out else "whole")
    shutil.copytree(kernels_folder(), copy)
    for part in left_out:
        for name, old, new in EDITS[part]:
            text = (copy / name).read_text()
            if old not in text:
                raise ValueError(f"expected {old!r} in {name}, for leaving out {part}; adapt EDITS to the kernels")
            (copy / name).write_text(text.replace(old, new))
    return copy


def parts(options: argparse.Namespace) -> None:
    """The kernel with parts left out. Results are wrong, of course."""
    shape = shapes_of(options)[0]
    layers = layers_of(shape, down_only=True)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        stores = {left_out: Store(kernels=edited_kernels(left_out, Path(folder))) for left_out in VARIANTS}
        cases = list(itertools.product(HALVES, options.tokens, (0, 1), VARIANTS))
        plans = {case: both_plans(shape, case[1], case[0])[case[2]] for case in cases}
        list(pool.map(lambda case: load(plans[case].text, 0, store=stores[case[3]]), cases))
        for case in cases:
            dtype, tokens, single, left_out = case
            decoder = GateUpDecoder(plans[case], device_index=0)
            decoder._kernel = load(plans[case].text, 0, store=stores[left_out])
            x = random_x(tokens, plans[case].desc.columns, HALVES[dtype])
            y = torch.empty(tokens, plans[case].desc.rows, dtype=x.dtype, device="cuda")
            operands = [(layer.down.matrix,) * 2 if single else layer.halves for layer in layers]
            what = f"parts {'down' if single else 'gate+up+SiLU'} without {' and '.join(left_out) or 'nothing'}"
            call = functools.partial(run_with, decoder, x, operands, y)
            timed(what, call, len(layers), shape=str(shape), tokens=tokens, dtype=dtype)


def run_with(
    decoder: GateUpDecoder, x: torch.Tensor, operands: Sequence[tuple[Matrix, ...]], y: torch.Tensor, i: int
) -> None:
    """One call with operand set i."""
    first, second = operands[i]
    decoder.run(x, first, second, y)


def arms(options: argparse.Namespace) -> None:
    """cuBLASLt: two calls, one fused, two branches; bytes; the FFN step."""
    build(
        {
            gateup_between.between_text(dtype, paired=paired, quantized=quantized)
            for dtype in HALVES.values()
            for paired, quantized in ((False, True), (True, False), (True, True))
        }
    )
    for number, shape in enumerate(shapes_of(options)):
        if number and options.first_only:
            break
        layers = layers_of(shape, down_only=True)
        for tokens in options.tokens:
            about = {"shape": str(shape), "tokens": tokens, "dtype": "bfloat16"}
            tried("arms", functools.partial(arm_times, shape, tokens, layers, about), **about)
        del layers
        torch.cuda.empty_cache()


def arm_times(shape: Shape, tokens: int, layers: list[Layer], about: dict[str, Any]) -> None:
    """All arms of one shape and number of tokens, bfloat16."""
    x = random_x(tokens, shape.hidden, torch.bfloat16)
    padded, rows = -(-tokens // 4) * 4, shape.intermediate
    both = torch.empty(padded, 2 * rows, dtype=x.dtype, device="cuda")
    gate, up = (torch.empty(padded, rows, dtype=x.dtype, device="cuda") for _ in range(2))
    y = torch.empty(padded, shape.hidden, dtype=x.dtype, device="cuda")
    side = torch.cuda.Stream()

    def fused(i: int, quantized: tuple[torch.Tensor, torch.Tensor]) -> None:
        gateup_cublaslt.product(*quantized, layers[i].weight, layers[i].whole_scales, both)

    def separate(i: int, quantized: tuple[torch.Tensor, torch.Tensor]) -> None:
        layer = layers[i]
        gateup_cublaslt.product(*quantized, layer.weight[:rows], layer.half_scales[0], gate)
        gateup_cublaslt.product(*quantized, layer.weight[rows:], layer.half_scales[1], up)

    def branches(i: int, quantized: tuple[torch.Tensor, torch.Tensor]) -> None:
        layer, main = layers[i], torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            gateup_cublaslt.product(*quantized, layer.weight[rows:], layer.half_scales[1], up)
        gateup_cublaslt.product(*quantized, layer.weight[:rows], layer.half_scales[0], gate)
        main.wait_stream(side)

    quantized = gateup_between.quantize(x)
    fused(0, quantized)
    separate(0, quantized)
    torch.cuda.synchronize()
    different = [int((both[:, part].view(torch.int16) != one.view(torch.int16)).sum())
                 for part, one in ((slice(0, rows), gate), (slice(rows, None), up))]  # fmt: skip
    first, second = layers[0].halves
    truth = gated(
        x.double() @ Block(first.weight, first.scales).dense(torch.float64).t(),
        x.double() @ Block(second.weight, second.scales).dense(torch.float64).t(),
    )
    error = relative(gateup_between.silu_product(gate, up)[:tokens], truth)
    found(fused_against_separate=different, elements=2 * padded * rows, error=error, **about)
    say("bytes that differ between fused and separate:", different, "error", error, about)
    ways = {
        "two calls": (separate, lambda: (gate, up)),
        "fused": (fused, lambda: (both[:, :rows], both[:, rows:])),
        "two branches": (branches, lambda: (gate, up)),
    }
    for name, (products, halves) in ways.items():

        def only(i: int, products: Any = products) -> None:
            products(i, quantized)

        def gate_up(i: int, products: Any = products, halves: Any = halves) -> None:
            products(i, quantized)
            gateup_between.silu_product(*halves())

        def step(i: int, products: Any = products, halves: Any = halves) -> None:
            products(i, gateup_between.quantize(x))
            gateup_cublaslt.product(
                *gateup_between.quantize(*halves()), layers[i].down.weight, layers[i].down_scales, y
            )

        timed(f"cuBLASLt {name}: gate+up", only, len(layers), **about)
        timed(f"cuBLASLt {name}: gate+up+SiLU", gate_up, len(layers), **about)
        timed(f"cuBLASLt {name}: FFN", step, len(layers), **about)


def equality(options: argparse.Namespace) -> None:
    """Bytes of a fused cuBLASLt product against those of two, padded rows included."""
    build({gateup_between.between_text(dtype, paired=False, quantized=True) for dtype in HALVES.values()})
    shapes = dict.fromkeys([*shapes_of(options), *map(Shape.parse, EQUAL_SHAPES)])
    for shape in shapes:
        first, second = (Block.random(shape.intermediate, shape.hidden, seed) for seed in (1, 2))
        weight = torch.cat([part.weight.view(torch.uint8) for part in (first, second)]).view(torch.float8_e4m3fn)
        scales = torch.cat([first.scales, second.scales])
        rows, grid = shape.intermediate, first.scales.shape[0]
        halves = Matrix(weight[:rows], scales[:grid]), Matrix(weight[rows:], scales[grid:])
        for tokens, dtype in itertools.product(EQUAL_TOKENS, HALVES):
            about = {"shape": str(shape), "tokens": tokens, "dtype": dtype}
            x = random_x(gateup_arms.padded(tokens), shape.hidden, HALVES[dtype])
            why = gateup_arms.why_not("fused", *halves) or gateup_probe.unequal(*halves, x)
            elements = 2 * x.shape[0] * rows
            found(equality="declined" if why else "equal", why=why, elements=elements, **about)
            say("equality", about, why or "equal")
        del weight, halves, first, second
        torch.cuda.empty_cache()


# ---- the command line


def run_part(part: str, argv: list[str], limit: float) -> tuple[list[dict[str, Any]], str]:
    """Run a part in a process of its own; what it found, and how it ended."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, __file__, *argv, "--part", part], stdout=subprocess.PIPE, stderr=None, text=True
    )
    timer = threading.Timer(limit, process.kill)
    timer.start()
    assert process.stdout is not None
    entries = list(lines(process.stdout))
    code = process.wait()
    timer.cancel()
    ended = "done" if code == 0 else f"stopped with {code} after {time.perf_counter() - begin:.0f} s"
    say(f"== {part}: {ended}, {time.perf_counter() - begin:.0f} s")
    return entries, ended


def lines(stream: Iterable[str]) -> Iterator[dict[str, Any]]:
    """JSON lines; others are passed over."""
    for line in stream:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(entry, dict):
            yield entry


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Gate, up, SiLU and down in FP8: errors and times.")
    parser.add_argument("--quick", action="store_true", help="one shape, fewer cases, one round")
    parser.add_argument("--shapes", nargs="+", metavar="IxK")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 16])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(USUAL))
    parser.add_argument("--rounds", type=int, default=3, help="processes that time the first shape")
    parser.add_argument("--limit", type=float, help="seconds for each part")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--first-only", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("expected a CUDA device, got none; run this on a machine with a GPU", file=sys.stderr)
        return 3
    if options.shapes is None:
        options.shapes = list(SHAPES[:1] if options.quick else SHAPES)
    if options.part:
        run = {
            "check": check,
            "kernel": kernel,
            "arms": arms,
            "equality": equality,
            "configs": configs,
            "parts": parts,
        }[options.part]
        run(options)
        return 0
    rounds = 1 if options.quick else max(1, options.rounds)
    document: dict[str, Any] = {"provenance": provenance(0, " ".join(["python", *sys.argv])), "parts": {}}
    for part in options.parts:
        entries, ended = run_part(part, sys.argv[1:], options.limit or LIMITS[part])
        for number in range(1, rounds) if part in ("kernel", "arms") else ():
            more, also = run_part(part, [*sys.argv[1:], "--first-only"], options.limit or LIMITS[part])
            entries += [{**entry, "round": number} for entry in more]
            ended = ended if also == "done" else also
        document["parts"][part] = {"ended": ended, "entries": entries}
    print(json.dumps(document, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
