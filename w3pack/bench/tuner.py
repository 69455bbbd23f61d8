"""Find the fastest config of the decode kernel for each call by trying: exact first, fast second.

A candidate counts only if its kernels build without spills, repeated launches give the same bits, its error against float64
is at most twice torch's, and the workspace of partial sums is clean afterwards. Only then is it timed, behind a small kernel
that makes x, as in a model: there a kernel of ours that only prepares x does not hide under the product before. The config
that the operator would choose without a new table is always among the candidates.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from w3pack.bench import partials
from w3pack.bench.candidates import candidates
from w3pack.bench.kernels import load_all, spills
from w3pack.bench.operands import X_DTYPES, Weights, random_x, relative_error
from w3pack.bench.provenance import need_gpu, provenance
from w3pack.bench.shapes import Case
from w3pack.bench.suite import Bench, launcher, texts
from w3pack.bench.table import merged, table_at, write_table
from w3pack.bench.timing import graph_time
from w3pack.errors import UnsupportedError, UsageError, W3PackError
from w3pack.ops.device import device_name, limits
from w3pack.ops.w3_config import MAX_TOKENS, W3Config, W3Plan, make_plan
from w3pack.ops.w3_decide import plan_of
from w3pack.ops.w3_table import Entry, table_of, table_path

#: Launches that must agree in every bit.
REPEATS = 8
#: Times torch's own error that a candidate may err (and the slack for outputs that are nearly exact).
ERROR_FACTOR, ERROR_SLACK = 2.0, 1e-5
FINALISTS = 4
#: Candidates that are built for each that is to be run.
BUILT_FOR_ONE = 2


@dataclass(frozen=True)
class Tuned:
    """What one call came to; times in microseconds, calls alone, `before` with the config that was chosen until now."""

    case: Case
    scale_sets: int
    config: W3Config
    microseconds: float
    before: float | None
    tried: int
    refused: dict[str, int]

    def entry(self, *, for_any_x: bool) -> Entry:
        """The entry of the table; `for_any_x` lets it stand for both dtypes of x."""
        case = self.case
        return Entry(
            rows=case.rows,
            columns=case.columns,
            tokens=case.tokens,
            layout=case.layout,
            qmap_dtype=case.qmap_dtype,
            map_kind=case.map_kind,
            scale_sets=self.scale_sets,
            x_dtype=None if for_any_x else case.x_dtype,
            config=self.config,
            microseconds=round(self.microseconds, 3),
        )

    def to_dict(self) -> dict[str, Any]:
        """The case, the choice and what was found on the way."""
        return {
            **self.case.to_dict(),
            "scale_sets": self.scale_sets,
            "config": asdict(self.config),
            "microseconds": round(self.microseconds, 3),
            "microseconds_before": None if self.before is None else round(self.before, 3),
            "tried": self.tried,
            "refused": self.refused,
        }


def tune(
    cases: Sequence[Case],
    *,
    device_index: int = 0,
    output: Path | None = None,
    limit: int = 40,
    command: str = "",
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Tune every case and write the table after each one.

    Args:
        cases: of at most `MAX_TOKENS` tokens, as `shapes.cases` orders them; if all have the same dtype of x, the entries
            stand for both dtypes.
        device_index: CUDA device.
        output: the table; None is the one that the operator reads for this device.
        limit: candidates that are run for each case, beside the present choice; more are built, since many spill.
        command: the command line, for the record.
        progress: told of each case as it is done.

    Returns:
        {"table": path, "provenance": ..., "tuned": [entries with what was found], "failed": [sentences]}.

    Raises:
        UsageError: a case of more tokens.
        UnsupportedError: no GPU, or one without kernels.
        ResourceError: the table cannot be written; found out before anything is tried.
    """
    if over := [case.tokens for case in cases if case.tokens > MAX_TOKENS]:
        raise UsageError(f"expected at most {MAX_TOKENS} tokens to tune for, got {max(over)}; pass fewer with --tokens")
    need_gpu("tuning", device_index)
    with torch.cuda.device(device_index):
        name = device_name(device_index)
        bench = Bench(device_index, limits(device_index))
        path = output or table_path(name)
        source = provenance(device_index, command)
        any_x = len({case.x_dtype for case in cases}) == 1
        write_table(path, table_at(path, device=name, limits=bench.limits), provenance=source)
        tuned, failed = [], []
        for case in cases:
            try:
                found = tune_case(bench, case, limit=limit)
            except UnsupportedError as error:
                failed.append(f"{case}: {error}")
            else:
                tuned.append(found)
                table = merged(table_at(path, device=name, limits=bench.limits), [found.entry(for_any_x=any_x)])
                write_table(path, table, provenance=source)
            if progress is not None:
                progress(str(case))
        return {
            "table": str(path),
            "provenance": source,
            "tuned": [one.to_dict() for one in tuned],
            "failed": failed,
        }


def tune_case(bench: Bench, case: Case, *, limit: int = 40) -> Tuned:
    """The fastest sound config for one case.

    Raises:
        UnsupportedError: no candidate is sound.
    """
    desc = case.desc(bench.limits)
    chosen = plan_of(desc, table_of(device_name(bench.device_index), desc.device.arch)).config
    configs = list(dict.fromkeys([chosen, *candidates(desc, limit=BUILT_FOR_ONE * limit)]))
    plans = {config: make_plan(desc, config) for config in configs}
    refused: Counter[str] = Counter()
    plans = dict(list(_built(plans, bench.device_index, refused).items())[: limit + 1])
    trial = Trial.of(bench, case)
    sound: dict[W3Config, W3Plan] = {}
    for config, plan in plans.items():
        fault = trial.fault(plan)
        if fault is None:
            sound[config] = plan
        else:
            refused[fault] += 1
    if not sound:
        raise UnsupportedError(
            f"expected a sound config among {len(configs)}, got none ({dict(refused)}); raise --candidates"
        )
    first = {config: trial.microseconds(plan, quick=True) for config, plan in sound.items()}
    finalists = sorted(first, key=lambda config: first[config])[:FINALISTS]
    if chosen in sound and chosen not in finalists:
        finalists.append(chosen)
    final = {config: trial.microseconds(sound[config], quick=False) for config in finalists}
    best = min(final, key=lambda config: final[config])
    alone = {config: trial.microseconds(sound[config], quick=False, alone=True) for config in {best, chosen} & {*final}}
    if math.isinf(alone[best]):
        raise UnsupportedError(
            f"expected a config that leaves no partial sums in a graph, got none for {case}; report it"
        )
    before = alone.get(chosen, math.inf)
    return Tuned(
        case=case,
        scale_sets=desc.scale_sets,
        config=best,
        microseconds=alone[best],
        before=before if math.isfinite(before) else None,
        tried=len(plans),
        refused=dict(refused),
    )


def _built(plans: dict[W3Config, W3Plan], device_index: int, refused: Counter[str]) -> dict[W3Config, W3Plan]:
    """Those whose kernels build and do not spill."""
    kernels = load_all([text for plan in plans.values() for text in texts(plan)], device_index)
    sound = {}
    for config, plan in plans.items():
        found = [kernels[text] for text in texts(plan)]
        if any(isinstance(kernel, W3PackError) for kernel in found):
            refused["does not build"] += 1
        elif any(not isinstance(kernel, W3PackError) and spills(kernel) for kernel in found):
            refused["spills"] += 1
        else:
            sound[config] = plan
    return sound


@dataclass(frozen=True)
class Trial:
    """Operands of one case, `x` made anew from `source` before each call, and what a candidate must reach."""

    sets: Sequence[Weights]
    source: torch.Tensor
    x: torch.Tensor
    ys: Sequence[torch.Tensor]
    truth: torch.Tensor
    error_allowed: float
    device_index: int

    @classmethod
    def of(cls, bench: Bench, case: Case) -> Trial:
        """Operands that together exceed the L2 cache, and torch's error on the first of them."""
        weights, x = bench.weights(case), random_x(case, device=bench.device)
        truth = weights.exact(x)
        plain = torch.nn.functional.linear(x, weights.dense(X_DTYPES[case.x_dtype]))
        sets = weights.copies(bench.copies(case.spec.nbytes))
        return cls(
            sets=sets,
            source=x.clone(),
            x=x,
            ys=[torch.empty(case.tokens, case.rows, dtype=x.dtype, device=x.device) for _ in sets],
            truth=truth,
            error_allowed=ERROR_FACTOR * relative_error(plain, truth) + ERROR_SLACK,
            device_index=bench.device_index,
        )

    def fault(self, plan: W3Plan) -> str | None:
        """Why the plan is not sound, in a few words; None if it is."""
        found = self._wrong_bits(plan)
        # asked in any case, so that the next candidate finds the workspace clean
        is_clean = partials.clean(self.device_index, plan.partial_bytes)
        return found or (None if is_clean else "leaves partial sums behind")

    def _wrong_bits(self, plan: W3Plan) -> str | None:
        call = launcher(plan, self.sets, self.x, self.ys)
        first: torch.Tensor | None = None
        try:
            for _ in range(REPEATS):
                self.ys[0].fill_(float("nan"))
                call(0)
                bits = self.ys[0].view(torch.int16)
                if first is None:
                    first = bits.clone()
                elif not torch.equal(first, bits):
                    return "bits differ between launches"
        except W3PackError:
            return "does not launch"
        if not relative_error(self.ys[0], self.truth) <= self.error_allowed:  # also for NaN
            return "errs too much"
        return None

    def microseconds(self, plan: W3Plan, *, quick: bool, alone: bool = False) -> float:
        """Median time of a call, cold, in a graph, with what makes x or `alone`; infinite if it leaves partial sums behind there."""
        product = launcher(plan, self.sets, self.x, self.ys)

        def call(i: int) -> None:
            if not alone:
                torch.mul(self.source, 1, out=self.x)
            product(i)

        with partials.borrowed(self.device_index) as captures:
            if quick:
                timing = graph_time(call, copies=len(self.sets), repeats=32, outer=7, warm_up_seconds=0.005)
            else:
                timing = graph_time(call, copies=len(self.sets))
        return timing.median_us if captures.clean else math.inf
