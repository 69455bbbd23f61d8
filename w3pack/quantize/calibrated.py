"""Quantize one Linear given the second moment of its inputs: the stages in order, with what each leaves of the error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from w3pack.errors import UsageError
from w3pack.quantize.diagonal import quantize_diagonal
from w3pack.quantize.gptq import DAMPING, Factor, factorize, feed_errors_forward
from w3pack.quantize.linear import QuantizedLinear, QuantizeSettings, quantize_data_free
from w3pack.quantize.lnq import ALTERNATIONS, SWEEPS, refine
from w3pack.quantize.moments import SecondMoment, check_moment, damped, diagonal_of, full_precision
from w3pack.quantize.sweep import row_losses, select_rows

Effort = Literal["diagonal", "fast", "default"]
Moment = SecondMoment | torch.Tensor | Factor


@dataclass(frozen=True)
class Stage:
    """One stage and the relative loss of the layer around it: E |What x - W x|^2 / E |W x|^2, without damping.

    Attributes:
        name: "data-free", "diagonal", "gptq" or "lnq".
        before: 1 ahead of the first stage, where nothing is approximated yet.
        after: what the next stage begins with.
    """

    name: str
    before: float
    after: float


@dataclass(frozen=True)
class CalibratedLinear:
    """A quantized Linear and its history.

    Attributes:
        linear: codes, map and scales.
        stages: in the order they ran. The first is the data-free result, for comparison only.
        damping: part of the diagonal that was added to H, 0 where only the diagonal was used.
    """

    linear: QuantizedLinear
    stages: tuple[Stage, ...]
    damping: float

    @property
    def loss(self) -> float:
        """The relative loss that is left."""
        return self.stages[-1].after


def quantize_calibrated(
    weight: torch.Tensor,
    moment: Moment | Sequence[Moment],
    settings: QuantizeSettings,
    *,
    effort: Effort = "default",
    qmap: torch.Tensor | None = None,
    exact_zero: bool = True,
    damping: float = DAMPING,
    alternations: int = ALTERNATIONS,
    sweeps: int = SWEEPS,
    fit_scales: bool = False,
    moment_weights: Sequence[float] | None = None,
    workers: int = 1,
) -> CalibratedLinear:
    """Quantize a weight so that its outputs, not its entries, change little.

    "diagonal" learns map and signed scales with the mean square of each input as weight; "fast" then chooses the codes by
    error feedback over the full moment; "default" then alternates a least-squares map with coordinate descent over the
    codes. A stage never raises its own objective: the diagonal one for the first, the damped moment for the others.
    Bit-identical for any number of workers and torch threads.

    Args:
        weight: float32 [rows, columns], finite; not modified.
        moment: of the inputs: a SecondMoment, E[x x^T] [columns, columns], or for "diagonal" also E[x_k^2] [columns], as
            an importance matrix of llama.cpp gives it. Linears that share an input may share a `Factor` (`factorize`),
            which saves factorizing again; `damping` is then the factor's. Guided: a sequence, the i-th for the i-th of
            equal ranges of rows, whose number it must divide.
        settings: group size, kind of map, seed.
        effort: how far to go.
        qmap: a map to keep, [8] or [maps, 8]; then only scales and codes are chosen.
        exact_zero: keep one entry of a learned map at exactly 0 (see `w3pack.quantize.diagonal`).
        damping: part of the diagonal of H to add to it; 0.1 for tens of thousands of tokens, 0.01 for millions.
        alternations: of map and codes in "default".
        sweeps: of coordinate descent in each alternation.
        fit_scales: refit the scales in each alternation too; slower, and found useless for models.
        moment_weights: for several moments, the factor of each in what a shared map minimizes.
        workers: CPU threads; ignored on other devices.
    """
    if effort not in get_args(Effort):
        raise UsageError(f"expected an effort out of {', '.join(get_args(Effort))}; got {effort!r}; pick one of these")
    if weight.dim() != 2 or weight.numel() == 0 or weight.dtype != torch.float32:
        raise UsageError(
            f"expected a float32 weight matrix [rows, columns]; got {weight.dtype} {list(weight.shape)}; convert it"
        )
    problem = _Problem.of(weight.detach(), moment, moment_weights)
    if effort != "diagonal" and problem.is_diagonal:
        raise UsageError(
            f'expected a full second moment [columns, columns] for effort "{effort}"; got its diagonal; '
            'use effort "diagonal" or collect the moment from activations'
        )
    track = _Track(problem, workers=workers)
    data_free = quantize_data_free(problem.weight, settings, qmap=qmap, workers=workers)
    track.add("data-free", data_free)
    linear = _learn_map_and_scales(problem, data_free, settings, qmap=qmap, exact_zero=exact_zero, workers=workers)
    track.add("diagonal", linear)
    if effort == "diagonal":
        return CalibratedLinear(linear=linear, stages=tuple(track.stages), damping=0.0)
    factors = problem.factors(damping)
    linear = _feed_rows(problem, linear, factors, workers=workers)
    track.add("gptq", linear)
    if effort == "default":
        refined = refine(
            problem.weight,
            linear,
            [factor.moment for factor in factors],
            weights=problem.weights,
            alternations=alternations,
            sweeps=sweeps,
            fit_map=qmap is None,
            fit_scales=fit_scales,
            workers=workers,
        )
        linear = refined.linear
        track.add("lnq", linear)
    return CalibratedLinear(
        linear=linear, stages=tuple(track.stages), damping=max(factor.damping for factor in factors)
    )


@dataclass(frozen=True)
class _Problem:
    """A weight with the moment of each of equal ranges of rows.

    Attributes:
        weight: float32 [rows, columns].
        moments: float32 [columns, columns] or [columns], one per range.
        given: the caller's factors, None where there is none.
        weights: of the moments in the sum over ranges.
    """

    weight: torch.Tensor
    moments: tuple[torch.Tensor, ...]
    given: tuple[Factor | None, ...]
    weights: tuple[float, ...]

    @staticmethod
    def of(weight: torch.Tensor, moment: Moment | Sequence[Moment], weights: Sequence[float] | None) -> _Problem:
        single = isinstance(moment, SecondMoment | torch.Tensor | Factor)
        several: list[Moment] = [moment] if single else list(moment)  # type: ignore[list-item, arg-type]
        rows, columns = weight.shape
        factors = (1.0,) * len(several) if weights is None else tuple(float(factor) for factor in weights)
        if not several or rows % len(several) or len(factors) != len(several):
            raise UsageError(
                f"expected one moment, or as many as divide {rows} rows with a weight each; got {len(several)} and "
                f"{len(factors)} weights; pass one per equal range of rows"
            )
        matrices = []
        for one in several:
            matrix = one.matrix() if isinstance(one, SecondMoment) else one.undamped if isinstance(one, Factor) else one
            matrices.append(check_moment(matrix.to(weight.device), columns=columns))
        if len({matrix.dim() for matrix in matrices}) != 1:
            raise UsageError("expected moments of one kind; got full ones and diagonals; pass either")
        given = tuple(one if isinstance(one, Factor) else None for one in several)
        return _Problem(weight=weight, moments=tuple(matrices), given=given, weights=factors)

    @property
    def is_diagonal(self) -> bool:
        return self.moments[0].dim() == 1

    def ranges(self) -> list[tuple[int, int]]:
        """The rows of each moment."""
        each = self.weight.shape[0] // len(self.moments)
        return [(i * each, (i + 1) * each) for i in range(len(self.moments))]

    def importance(self) -> torch.Tensor:
        """One number per input for all rows: float32 [columns]."""
        diagonals = [diagonal_of(damped(matrix, 0.0)) for matrix in self.moments]
        total = diagonals[0] * self.weights[0]
        for diagonal, factor in zip(diagonals[1:], self.weights[1:], strict=True):
            total = total + diagonal * factor
        return total

    def factors(self, damping: float) -> list[Factor]:
        """A factor per moment, the caller's where there is one."""
        pairs = zip(self.given, self.moments, strict=True)
        return [factorize(moment, damping=damping) if given is None else given for given, moment in pairs]

    def loss(self, linear: QuantizedLinear | None, *, workers: int) -> float:
        """Weighted loss under the moments as given; of approximating the weight by 0 where `linear` is None."""
        total = 0.0
        for (first, stop), moment, factor in zip(self.ranges(), self.moments, self.weights, strict=True):
            part = None if linear is None else select_rows(linear, first, stop)
            with full_precision():
                total += factor * float(row_losses(self.weight[first:stop], part, moment, workers=workers).sum())
        return total


class _Track:
    """Relative losses, stage by stage."""

    def __init__(self, problem: _Problem, *, workers: int) -> None:
        self.problem = problem
        self.workers = workers
        self.whole = problem.loss(None, workers=workers)
        self.stages: list[Stage] = []

    def add(self, name: str, linear: QuantizedLinear) -> None:
        loss = self.problem.loss(linear, workers=self.workers)
        after = loss / self.whole if self.whole > 0 else 0.0
        self.stages.append(Stage(name=name, before=self.stages[-1].after if self.stages else 1.0, after=after))


def _learn_map_and_scales(
    problem: _Problem,
    data_free: QuantizedLinear,
    settings: QuantizeSettings,
    *,
    qmap: torch.Tensor | None,
    exact_zero: bool,
    workers: int,
) -> QuantizedLinear:
    """The diagonal fit, or the data-free result in the rare case that it is better by the diagonal's own measure."""
    importance = problem.importance()
    fitted = quantize_diagonal(problem.weight, importance, settings, qmap=qmap, exact_zero=exact_zero, workers=workers)
    old, new = (
        float(row_losses(problem.weight, linear, importance, workers=workers).sum()) for linear in (data_free, fitted)
    )
    return data_free if exact_zero and old < new else fitted


def _feed_rows(
    problem: _Problem, linear: QuantizedLinear, factors: Sequence[Factor], *, workers: int
) -> QuantizedLinear:
    """Error feedback, each range of rows with its own factor."""
    parts = [
        feed_errors_forward(problem.weight[first:stop], select_rows(linear, first, stop), factor, workers=workers).codes
        for (first, stop), factor in zip(problem.ranges(), factors, strict=True)
    ]
    return QuantizedLinear(codes=torch.cat(parts), qmap=linear.qmap, scales=linear.scales, group_size=linear.group_size)
