"""More tokens than a decode kernel takes: the operator's two ways, each called by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from w3pack.bench.operands import X_DTYPES, Weights
from w3pack.bench.shapes import Case
from w3pack.ops import w3_cuda, w3_prefill_launch
from w3pack.ops.w3_config import DeviceLimits
from w3pack.ops.w3_linear import form_of
from w3pack.ops.w3_prefill import PrefillPlan, prefill_plan, takes

Call = Callable[[int], object]


def plan_for(case: Case, limits: DeviceLimits) -> PrefillPlan | None:
    """The prefill kernel's plan for a case; None where there is no such kernel."""
    desc = case.desc(limits)
    return prefill_plan(desc) if takes(desc) else None


def mainloop_call(plan: PrefillPlan, sets: Sequence[Weights], x: torch.Tensor, ys: Sequence[torch.Tensor]) -> Call:
    """fn(i): the prefill kernel over operand set i, into output i."""

    def call(i: int) -> None:
        w = sets[i]
        w3_prefill_launch.run_prefill(plan, x, w.codes, w.scales, w.qmap, None, ys[i])

    return call


def other_call(case: Case, sets: Sequence[Weights], x: torch.Tensor, ys: Sequence[torch.Tensor]) -> Call:
    """fn(i): what the operator does without the prefill kernel."""
    w = sets[0]
    form = form_of(
        X_DTYPES[case.x_dtype],
        w.codes,
        w.scales,
        w.qmap,
        rows=case.rows,
        columns=case.columns,
        group_size=case.group_size,
    )

    def call(i: int) -> None:
        w = sets[i]
        w3_cuda.without_mainloop(form, x, w.codes, w.scales, w.qmap, None, ys[i])

    return call


def chosen(case: Case, weights: Weights) -> bool:
    """Whether the operator takes the prefill kernel for a case."""
    if not weights.codes.is_cuda:
        return False
    form = form_of(
        X_DTYPES[case.x_dtype],
        weights.codes,
        weights.scales,
        weights.qmap,
        rows=case.rows,
        columns=case.columns,
        group_size=case.group_size,
    )
    return case.tokens in form.mainloop
