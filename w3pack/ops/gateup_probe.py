"""Which arm a pair of matrices is fastest with, found out by running them; what was found is kept (gateup_choices.py).

An arm is measured if it may be taken at all. `fused` declines where its bytes are not those of `separate`: cuBLASLt may split sums over
columns for one number of rows and not for another, and then a fused checkpoint would answer otherwise than the one that it came from.
Times come from disk where an earlier process measured them. `fused` does not: bytes are compared by every process before it is taken, since
they may also depend on where the tensors lie, and on the weights.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal, get_args

import torch

from w3pack.errors import W3PackError
from w3pack.ops import gateup_arms, gateup_choices, gateup_cuda
from w3pack.ops.gateup_arms import ARMS, ROUNDING, Arm
from w3pack.ops.gateup_choices import ArmChoice, Question
from w3pack.ops.gateup_launch import Matrix

Wanted = Literal["auto", "kernel", "fused", "separate", "dequantize"]
WANTED: tuple[Wanted, ...] = get_args(Wanted)
#: auto: what is on disk, else measured and kept there; fresh: measured anew and kept; memory: the disk is left alone.
Probe = Literal["auto", "fresh", "memory"]
PROBES: tuple[Probe, ...] = get_args(Probe)
#: Calls that are timed together, and how often.
_CALLS, _TIMES = 8, 5
#: Clock cycles that the device is kept busy while the host queues the calls.
_HEAD_START = 4_000_000
#: An arm must be so much faster than one that comes before it.
_BETTER = 0.97


_FOUND: dict[tuple[object, ...], ArmChoice] = {}


def allowed(wanted: Wanted, *, w8a8: bool) -> tuple[Arm, ...]:
    """Arms that may be taken, the preferred first. `auto` keeps activations as they are unless `w8a8` says that 8 bits will do.

    An arm that was named may decline; `separate`, the kernel, and dequantising in the end, stand in.
    """
    if wanted == "auto":
        return tuple(arm for arm in ARMS if w8a8 or arm not in ROUNDING)
    if wanted == "fused":
        return ("fused", "separate")
    return (wanted,)


def pick(arms: tuple[Arm, ...], times: Mapping[Arm, float]) -> Arm:
    """The fastest of the arms that were timed; one that comes first wins unless another is clearly faster."""
    best: Arm | None = None
    for arm in arms:
        if arm in times and (best is None or times[arm] < _BETTER * times[best]):
            best = arm
    return best or "kernel"  # which dequantises where there is no kernel


def decide(
    gate: Matrix,
    up: Matrix,
    tokens: int,
    x_dtype: torch.dtype,
    *,
    wanted: Wanted = "auto",
    w8a8: bool = False,
    probe: Probe = "auto",
) -> ArmChoice:
    """Choose for pairs of this shape, tell the op, and keep the answer. The device must not be capturing.

    Raises:
        CompileError, LaunchError: a kernel does not build or run.
    """
    rows, columns = gate.weight.shape
    index, count = gate.weight.get_device(), gateup_arms.padded(tokens)
    key = (rows, columns, x_dtype, index, count, wanted, w8a8)
    found = _FOUND.get(key)
    if found is None or probe == "fresh" or (probe == "memory" and found.from_disk):
        with torch.cuda.device(index):
            arms = allowed(wanted, w8a8=w8a8)
            found = _probe(gate, up, count, x_dtype, arms, compare=wanted == "auto", probe=probe)
        _FOUND[key] = found
    gateup_arms.choose(rows, columns, x_dtype, index, tokens, found.arm)
    return found


def forget() -> None:
    """As if nothing had been measured or chosen."""
    _FOUND.clear()
    gateup_arms.forget()


def _probe(
    gate: Matrix,
    up: Matrix,
    tokens: int,
    x_dtype: torch.dtype,
    arms: tuple[Arm, ...],
    *,
    compare: bool,
    probe: Probe,
) -> ArmChoice:
    rows, columns = gate.weight.shape
    index, name = gate.weight.get_device(), str(x_dtype).removeprefix("torch.")
    form = gateup_cuda.form_of(rows, columns, paired=True, x_dtype=x_dtype, device_index=index)
    declined: dict[Arm, str] = {}
    for arm in arms:
        why = gateup_arms.why_not(arm, gate, up)
        if arm == "kernel":
            why = form.why or (None if form.portions(tokens) else f"{tokens} tokens are many")
        if why:
            declined[arm] = why
    left = tuple(arm for arm in arms if arm not in declined)
    x = torch.randn(tokens, columns, device=gate.weight.device, dtype=torch.float32).to(x_dtype)
    if not compare or len(left) < 2:
        equal, why = _compared(gate, up, x) if "fused" in left else (None, None)
        if why:
            declined["fused"] = why
        chosen: Arm = next((arm for arm in left if arm not in declined), "kernel")
        return ArmChoice(rows, columns, tokens, name, chosen, declined=tuple(declined.items()), equal=equal)
    plans = gateup_choices.digest_of([form.plan(portion) for portion in form.portions(tokens) if "kernel" in left])
    question = Question(rows, columns, tokens, name, left, plans)
    known = gateup_choices.find(question, index) if probe == "auto" else None
    if known is not None and known.arm == "fused" and _compared(gate, up, x)[1] is not None:
        known = None
    if known is None:
        known = _measured(gate, up, x, question)
        if probe != "memory":
            gateup_choices.keep(question, known, index)
    return replace(known, declined=(*declined.items(), *known.declined))


def _measured(gate: Matrix, up: Matrix, x: torch.Tensor, question: Question) -> ArmChoice:
    """Time the arms of a question; `declined` has those that turn out not to run, or to compute something else."""
    declined: dict[Arm, str] = {}
    equal, why = _compared(gate, up, x) if "fused" in question.arms else (None, None)
    if why:
        declined["fused"] = why
    times: dict[Arm, float] = {}
    for arm in (arm for arm in question.arms if arm not in declined):
        try:
            times[arm] = microseconds(lambda arm=arm: gateup_arms.RUN[arm](x, gate, up))  # type: ignore[misc]
        except (RuntimeError, W3PackError) as error:
            if arm not in ROUNDING:
                raise
            declined[arm] = _first_line(error)
    return ArmChoice(
        question.rows,
        question.columns,
        question.tokens,
        question.x_dtype,
        pick(question.arms, times),
        tuple(times.items()),
        tuple(declined.items()),
        equal,
    )


def unequal(gate: Matrix, up: Matrix, x: torch.Tensor) -> str | None:
    """None when one product over both matrices has the bytes of two, padded rows included; otherwise what differs."""
    return _compared(gate, up, x)[1]


def _compared(gate: Matrix, up: Matrix, x: torch.Tensor) -> tuple[bool | None, str | None]:
    """(whether bytes are equal, None where a product does not run; None, or why `fused` declines)."""
    try:
        together = gateup_arms.fused_products(x, gate, up)
        apart = gateup_arms.separate_products(x, gate, up)
    except (RuntimeError, W3PackError) as error:
        return None, _first_line(error)
    differing = sum(
        int((one.contiguous().view(torch.int16) != other.view(torch.int16)).sum())
        for one, other in zip(together, apart, strict=True)
    )
    if differing:
        return False, f"{differing} of {2 * apart[0].numel()} numbers differ from two products"
    return True, None


def microseconds(call: Callable[[], object]) -> float:
    """GPU time of a call: several in a row, queued while the device is busy, so that the host's time does not show."""
    call()
    samples = []
    for _ in range(_TIMES):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_HEAD_START)
        begin.record()
        for _ in range(_CALLS):
            call()
        end.record()
        end.synchronize()
        samples.append(1000 * float(begin.elapsed_time(end)) / _CALLS)
    return statistics.median(samples)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
