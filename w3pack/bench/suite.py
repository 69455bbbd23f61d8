"""The benchmark: each case's time, beside torch's and the reading ceiling's in the same run, and its error against float64.

    document = run(cases, device_index=0, command="w3pack bench ...")      # JSON-ready, with provenance

Up to 64 tokens (`MAX_TOKENS`) the decode kernel is timed through the plan that the operator would choose; above that the
operator itself, as the ratio to torch, and the way without the prefill kernel where the operator takes that. Nothing here asserts:
figures are for people to judge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from w3pack.bench.ceiling import Ceiling, empty_kernel, read_ceiling
from w3pack.bench.kernels import load_all
from w3pack.bench.operands import X_DTYPES, Weights, random_weights, random_x, relative_error
from w3pack.bench.partials import borrowed
from w3pack.bench.prefill import chosen, other_call
from w3pack.bench.provenance import need_gpu, provenance
from w3pack.bench.shapes import Case
from w3pack.bench.timing import Timing, bench_like_do_bench, copies_for, graph_time, l2_bytes
from w3pack.errors import W3PackError
from w3pack.jit import KernelText
from w3pack.ops import w3_launch
from w3pack.ops.device import device_name, limits
from w3pack.ops.w3_config import MAX_TOKENS, DeviceLimits, W3Plan
from w3pack.ops.w3_decide import plan_of
from w3pack.ops.w3_linear import w3_linear
from w3pack.ops.w3_table import table_of

FORMAT = 1
_PREFILL_REPEATS = 8

Progress = Callable[[str], None]


@dataclass
class Bench:
    """What cases share: the device, and the operands and times that neighbours have in common."""

    device_index: int
    limits: DeviceLimits
    _weights: tuple[object, Weights] | None = None
    _torch: dict[object, Timing] = field(default_factory=dict)
    _ceilings: dict[int, Ceiling] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """The device as torch names it."""
        return torch.device("cuda", self.device_index)

    def weights(self, case: Case) -> Weights:
        """The case's Linear; the last one is kept."""
        key = case.spec
        if self._weights is None or self._weights[0] != key:
            self._weights = None
            self._weights = (key, random_weights(key, device=self.device))
        return self._weights[1]

    def copies(self, nbytes: int) -> int:
        """Operand sets of that size to rotate over."""
        return copies_for(nbytes, l2_bytes=l2_bytes(self.device_index))

    def ceiling(self, nbytes: int) -> Ceiling:
        """The reading ceiling over as many bytes."""
        if nbytes not in self._ceilings:
            self._ceilings[nbytes] = read_ceiling(nbytes, self.device_index, self.limits)
        return self._ceilings[nbytes]

    def torch_time(self, case: Case, x: torch.Tensor, matrix: torch.Tensor) -> Timing:
        """torch's own linear over the unpacked matrix, cold as well."""
        key = (case.rows, case.columns, case.tokens, case.x_dtype)
        if key not in self._torch:
            count = self.copies(matrix.nbytes)
            matrices = [matrix, *(matrix.clone() for _ in range(count - 1))]
            self._torch[key] = graph_time(
                lambda i: torch.nn.functional.linear(x, matrices[i]), copies=count, **counts(case)
            )
        return self._torch[key]


def run(
    cases: Sequence[Case], *, device_index: int = 0, command: str = "", progress: Progress | None = None
) -> dict[str, Any]:
    """Measure all cases on one device.

    Args:
        cases: as `shapes.cases` orders them, so that neighbours share operands.
        device_index: CUDA device.
        command: the command line, for the record.
        progress: told of each case as it is done.

    Returns:
        {"format", "provenance", "empty_kernel_microseconds", "ceiling_kind", "entries": [...], "prefill": [...]}; times
        in microseconds.

    Raises:
        UnsupportedError: no GPU, or one without kernels.
    """
    need_gpu("a benchmark", device_index)
    with torch.cuda.device(device_index):
        bench = Bench(device_index, limits(device_index))
        table = table_of(device_name(device_index), limits(device_index).arch)
        plans = {case: plan_of(case.desc(bench.limits), table) for case in cases if case.tokens <= MAX_TOKENS}
        _build(plans.values(), device_index)
        entries, prefill = [], []
        # many tokens last: clocks fall under them, and take their time to come back
        for case in sorted(cases, key=lambda case: case not in plans):
            if case in plans:
                entries.append(decode_entry(bench, case, plans[case]))
            else:
                prefill.append(prefill_entry(bench, case))
            if progress is not None:
                progress(str(case))
        return {
            "format": FORMAT,
            "provenance": provenance(device_index, command),
            "empty_kernel_microseconds": _micro(empty_kernel(device_index, bench.limits).median_us),
            "ceiling_kind": next((ceiling.kind for ceiling in bench._ceilings.values()), None),
            "entries": entries,
            "prefill": prefill,
        }


def _build(plans: Iterable[W3Plan], device_index: int) -> None:
    """Load every kernel, side by side; the first that fails ends the run."""
    for kernel in load_all([text for plan in plans for text in texts(plan)], device_index).values():
        if isinstance(kernel, W3PackError):
            raise kernel


def texts(plan: W3Plan) -> tuple[KernelText, ...]:
    """The kernels of a plan."""
    return (plan.decode,) if plan.stage is None else (plan.decode, plan.stage)


def counts(case: Case) -> dict[str, int]:
    """Fewer repetitions where one call takes long."""
    return {"repeats": _PREFILL_REPEATS, "outer": 11} if case.tokens > MAX_TOKENS else {}


def launcher(
    plan: W3Plan, weights: Sequence[Weights], x: torch.Tensor, ys: Sequence[torch.Tensor]
) -> Callable[[int], None]:
    """fn(i): the plan's kernels over operand set i, into output i."""

    def call(i: int) -> None:
        w = weights[i]
        w3_launch.run_decode(plan, x, w.codes, w.scales, w.qmap, None, ys[i])

    return call


def decode_entry(bench: Bench, case: Case, plan: W3Plan) -> dict[str, Any]:
    """The decode kernel on one case."""
    weights, x = bench.weights(case), random_x(case, device=bench.device)
    nbytes = case.spec.nbytes
    count = bench.copies(nbytes)
    sets = weights.copies(count)
    ys = [torch.full((case.tokens, case.rows), float("nan"), dtype=x.dtype, device=x.device) for _ in sets]
    call = launcher(plan, sets, x, ys)
    with borrowed(bench.device_index):
        timing = graph_time(call, copies=count)
    eager = bench_like_do_bench(call, copies=count)
    ceiling = bench.ceiling(nbytes).timing
    return {
        **case.to_dict(),
        **_timed(timing),
        "do_bench_microseconds": _micro(eager.median_us),
        "bytes": nbytes,
        "ceiling_microseconds": _micro(ceiling.median_us),
        "share_of_ceiling": round(ceiling.median_us / timing.median_us, 4),
        **_beside_torch(bench, case, weights, x, ys[0], timing),
        "config": asdict(plan.config),
    }


def prefill_entry(bench: Bench, case: Case) -> dict[str, Any]:
    """The operator on more tokens than a decode kernel takes."""
    weights, x = bench.weights(case), random_x(case, device=bench.device)
    count = bench.copies(case.spec.nbytes)
    sets = weights.copies(count)

    def call(i: int) -> torch.Tensor:
        w = sets[i]
        return w3_linear(
            x, w.codes, w.scales, w.qmap, None, rows=case.rows, columns=case.columns, group_size=case.group_size
        )

    with borrowed(bench.device_index):
        timing = graph_time(call, copies=count, **counts(case))
    return {
        **case.to_dict(),
        **_timed(timing),
        **_beside_torch(bench, case, weights, x, call(0), timing),
        **_both_ways(bench, case, sets, x, timing),
    }


def _both_ways(
    bench: Bench, case: Case, sets: Sequence[Weights], x: torch.Tensor, operator: Timing
) -> dict[str, float | str | None]:
    """Times with the prefill kernel and without it. Where the table does not choose the kernel, it is not run: None."""
    if not chosen(case, sets[0]):
        without = _micro(operator.median_us)
        return {"way": "dequantise", "mainloop_microseconds": None, "without_mainloop_microseconds": without}
    ys = [torch.empty(case.tokens, case.rows, dtype=x.dtype, device=x.device) for _ in sets]
    with borrowed(bench.device_index):
        timing = graph_time(other_call(case, sets, x, ys), copies=len(sets), **counts(case))
    return {
        "way": "mainloop",
        "mainloop_microseconds": _micro(operator.median_us),
        "without_mainloop_microseconds": _micro(timing.median_us),
    }


def _timed(timing: Timing) -> dict[str, float]:
    return {
        "microseconds": _micro(timing.median_us),
        "low": _micro(timing.low_us),
        "high": _micro(timing.high_us),
        "spread": round(timing.spread, 4),
    }


def _beside_torch(
    bench: Bench, case: Case, weights: Weights, x: torch.Tensor, y: torch.Tensor, timing: Timing
) -> dict[str, float]:
    """torch's time, the ratio to it, and both errors against float64."""
    matrix = weights.dense(X_DTYPES[case.x_dtype])
    truth = weights.exact(x)
    torch_time = bench.torch_time(case, x, matrix)
    return {
        "torch_microseconds": _micro(torch_time.median_us),
        "speed_against_torch": round(torch_time.median_us / timing.median_us, 4),
        "relative_error": float(f"{relative_error(y, truth):.4g}"),
        "torch_relative_error": float(f"{relative_error(torch.nn.functional.linear(x, matrix), truth):.4g}"),
    }


def _micro(value: float) -> float:
    return round(value, 3)
