"""Which arm a pair of matrices is fastest with, found out by running them; what was found is kept for the process.

An arm is measured if it may be taken at all. `fused` declines where its bytes are not those of `separate`: cuBLASLt may split sums over
columns for one number of rows and not for another, and then a fused checkpoint would answer otherwise than the one that it came from.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from w3pack.errors import W3PackError
from w3pack.ops import gateup_arms, gateup_cuda
from w3pack.ops.gateup_arms import ARMS, ROUNDING, Arm
from w3pack.ops.gateup_launch import Matrix

Wanted = Literal["auto", "kernel", "fused", "separate", "dequantize"]
WANTED: tuple[Wanted, ...] = get_args(Wanted)
#: Calls that are timed together, and how often.
_CALLS, _TIMES = 8, 5
#: Clock cycles that the device is kept busy while the host queues the calls.
_HEAD_START = 4_000_000
#: An arm must be so much faster than one that comes before it.
_BETTER = 0.97


@dataclass(frozen=True)
class ArmChoice:
    """What was found for one shape and number of tokens.

    Attributes:
        rows, columns: of gate and of up.
        tokens: rounded up to a multiple of 4.
        arm: what calls take from now on.
        microseconds: of each arm that was timed.
        declined: arms that cannot be taken, and why.
    """

    rows: int
    columns: int
    tokens: int
    x_dtype: str
    arm: Arm
    microseconds: tuple[tuple[Arm, float], ...] = ()
    declined: tuple[tuple[Arm, str], ...] = ()

    def __str__(self) -> str:
        """One line."""
        times = ", ".join(f"{arm} {time:.1f} us" for arm, time in self.microseconds)
        refused = "; ".join(f"{arm} declined: {why}" for arm, why in self.declined)
        about = "; ".join(filter(None, (times, refused)))
        return f"{self.rows} x {self.columns}, {self.tokens} tokens, {self.x_dtype}: {self.arm}" + (
            f" ({about})" if about else ""
        )


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
    gate: Matrix, up: Matrix, tokens: int, x_dtype: torch.dtype, *, wanted: Wanted = "auto", w8a8: bool = False
) -> ArmChoice:
    """Choose for pairs of this shape, tell the op, and keep the answer. The device must not be capturing.

    Raises:
        CompileError, LaunchError: a kernel does not build or run.
    """
    rows, columns = gate.weight.shape
    index, count = gate.weight.get_device(), gateup_arms.padded(tokens)
    key = (rows, columns, x_dtype, index, count, wanted, w8a8)
    found = _FOUND.get(key)
    if found is None:
        with torch.cuda.device(index):
            found = _probe(gate, up, count, x_dtype, allowed(wanted, w8a8=w8a8), compare=wanted == "auto")
        _FOUND[key] = found
    gateup_arms.choose(rows, columns, x_dtype, index, tokens, found.arm)
    return found


def forget() -> None:
    """As if nothing had been measured or chosen."""
    _FOUND.clear()
    gateup_arms.forget()


def _probe(
    gate: Matrix, up: Matrix, tokens: int, x_dtype: torch.dtype, arms: tuple[Arm, ...], *, compare: bool
) -> ArmChoice:
    rows, columns = gate.weight.shape
    name = str(x_dtype).removeprefix("torch.")
    declined: dict[Arm, str] = {}
    for arm in arms:
        why = gateup_arms.why_not(arm, gate, up)
        if arm == "kernel":
            form = gateup_cuda.form_of(
                rows, columns, paired=True, x_dtype=x_dtype, device_index=gate.weight.get_device()
            )
            why = form.why or (None if form.portions(tokens) else f"{tokens} tokens are many")
        if why:
            declined[arm] = why
    x = torch.randn(tokens, columns, device=gate.weight.device, dtype=torch.float32).to(x_dtype)
    if "fused" in arms and "fused" not in declined:
        why = unequal(gate, up, x)
        if why:
            declined["fused"] = why
    left = tuple(arm for arm in arms if arm not in declined)
    times: dict[Arm, float] = {}
    for arm in left if compare and len(left) > 1 else ():
        try:
            times[arm] = microseconds(lambda arm=arm: gateup_arms.RUN[arm](x, gate, up))  # type: ignore[misc]
        except (RuntimeError, W3PackError) as error:
            if arm not in ROUNDING:
                raise
            declined[arm] = _first_line(error)
    chosen = pick(left, times) if times else left[0] if left else "kernel"
    return ArmChoice(rows, columns, tokens, name, chosen, tuple(times.items()), tuple(declined.items()))


def unequal(gate: Matrix, up: Matrix, x: torch.Tensor) -> str | None:
    """None when one product over both matrices has the bytes of two, padded rows included; otherwise what differs."""
    try:
        together = gateup_arms.fused_products(x, gate, up)
        apart = gateup_arms.separate_products(x, gate, up)
    except (RuntimeError, W3PackError) as error:
        return _first_line(error)
    differing = sum(
        int((one.contiguous().view(torch.int16) != other.view(torch.int16)).sum())
        for one, other in zip(together, apart, strict=True)
    )
    return f"{differing} of {2 * apart[0].numel()} numbers differ from two products" if differing else None


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
