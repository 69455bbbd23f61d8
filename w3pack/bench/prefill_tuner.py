"""For which numbers of tokens the prefill kernel beats what the operator does without it: exact first, fast second.

For each shape all its cases are timed both ways. A number of tokens counts if the kernel is faster and sound in every form; the
longest run of neighbouring numbers that count is written to the device's table (`mainloop_tokens`), or, where there is none, the
shape's entry is taken out of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from w3pack.bench.operands import X_DTYPES, random_x, relative_error
from w3pack.bench.partials import borrowed
from w3pack.bench.prefill import mainloop_call, other_call, plan_for
from w3pack.bench.provenance import need_gpu, provenance
from w3pack.bench.shapes import Case
from w3pack.bench.suite import Bench, counts
from w3pack.bench.table import table_at, write_table
from w3pack.bench.timing import graph_time
from w3pack.errors import UnsupportedError
from w3pack.ops.device import device_name, limits
from w3pack.ops.w3_prefill import PrefillPlan
from w3pack.ops.w3_table import Table, table_path

#: Launches that must agree in every bit.
REPEATS = 8
#: Times torch's own error on the dequantised matrix that the kernel may err, and the slack for outputs that are nearly exact.
ERROR_FACTOR, ERROR_SLACK = 1.05, 1e-5
#: It must be faster by this factor: a table is not to follow noise.
MARGIN = 0.98


@dataclass(frozen=True)
class Compared:
    """One case both ways, in microseconds; `fault` says why the kernel does not count."""

    case: Case
    plan: PrefillPlan
    microseconds: float | None
    microseconds_without: float
    relative_error: float
    fault: str | None

    @property
    def wins(self) -> bool:
        """Whether the kernel is sound and faster."""
        return self.microseconds is not None and self.microseconds < MARGIN * self.microseconds_without

    def to_dict(self) -> dict[str, Any]:
        """The case, both times, the config and the fault."""
        return {
            **self.case.to_dict(),
            "config": asdict(self.plan.config),
            "microseconds": self.microseconds and round(self.microseconds, 3),
            "microseconds_without": round(self.microseconds_without, 3),
            "relative_error": float(f"{self.relative_error:.4g}"),
            "fault": self.fault,
        }


def tune_prefill(
    cases: Sequence[Case],
    *,
    device_index: int = 0,
    output: Path | None = None,
    command: str = "",
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Compare every case and write the table after each shape.

    Args:
        cases: as `shapes.cases` orders them.
        device_index: CUDA device.
        output: the table; None is the one that the operator reads for this device.
        command: the command line, for the record.
        progress: told of each case as it is done.

    Returns:
        {"table": path, "provenance": ..., "compared": [cases with both times], "mainloop_tokens": {shape: [first, last]}}.

    Raises:
        UnsupportedError: no GPU, or one without the kernel.
        ResourceError: the table cannot be written; found out before anything is tried.
    """
    need_gpu("tuning", device_index)
    with torch.cuda.device(device_index):
        name = device_name(device_index)
        bench = Bench(device_index, limits(device_index))
        path = output or table_path(name)
        source = provenance(device_index, command)
        write_table(path, table_at(path, device=name, limits=bench.limits), provenance=source)
        compared: list[Compared] = []
        found: dict[str, list[int]] = {}
        for (rows, columns), group in itertools.groupby(cases, key=lambda case: (case.rows, case.columns)):
            here = []
            for case in group:
                here.append(compare(bench, case))
                if progress is not None:
                    progress(str(case))
            compared += here
            ends = winning_tokens(here)
            table = table_at(path, device=name, limits=bench.limits)
            write_table(path, with_mainloop(table, rows, columns, ends), provenance=source)
            if ends is not None:
                found[f"{rows}x{columns}"] = list(ends)
        return {
            "table": str(path),
            "provenance": source,
            "compared": [one.to_dict() for one in compared],
            "mainloop_tokens": found,
        }


def compare(bench: Bench, case: Case) -> Compared:
    """Check and time one case both ways.

    Raises:
        UnsupportedError: there is no prefill kernel for it.
    """
    plan = plan_for(case, bench.limits)
    if plan is None:
        raise UnsupportedError(f"expected a case that the prefill kernel takes, got {case}; leave it out")
    weights, x = bench.weights(case), random_x(case, device=bench.device)
    sets = weights.copies(bench.copies(case.spec.nbytes))
    ys = [torch.full((case.tokens, case.rows), float("nan"), dtype=x.dtype, device=x.device) for _ in sets]
    call, other = mainloop_call(plan, sets, x, ys), other_call(case, sets, x, ys)
    call(0)
    first = ys[0].clone()
    matrix = weights.dense(X_DTYPES[case.x_dtype])
    truth = weights.exact(x)
    error = relative_error(first, truth)
    allowed = ERROR_FACTOR * relative_error(torch.nn.functional.linear(x, matrix), truth) + ERROR_SLACK
    del matrix, truth
    fault = None if error <= allowed else "errs too much"  # also for NaN
    for _ in range(REPEATS):
        call(0)
        if not torch.equal(ys[0], first):
            fault = fault or "launches differ"
    time = None if fault else graph_time(call, copies=len(sets), **counts(case)).median_us
    with borrowed(bench.device_index):
        without = graph_time(other, copies=len(sets), **counts(case)).median_us
    return Compared(case, plan, time, without, error, fault)


def winning_tokens(compared: Iterable[Compared]) -> tuple[int, int] | None:
    """First and last of the longest run of measured numbers of tokens at which the kernel wins in every form."""
    wins: dict[int, bool] = {}
    for one in compared:
        wins[one.case.tokens] = wins.get(one.case.tokens, True) and one.wins
    runs = [
        [tokens for tokens, _ in run]
        for won, run in itertools.groupby(sorted(wins.items()), key=lambda item: item[1])
        if won
    ]
    longest = max(runs, key=len, default=None)
    return None if longest is None else (longest[0], longest[-1])


def with_mainloop(table: Table, rows: int, columns: int, ends: tuple[int, int] | None) -> Table:
    """`table` with the entry of one shape replaced, or taken out for None; sorted."""
    others = [entry for entry in table.mainloop_tokens if entry[:2] != (rows, columns)]
    return replace(table, mainloop_tokens=tuple(sorted([*others, *([(rows, columns, *ends)] if ends else [])])))
