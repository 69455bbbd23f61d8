"""Mixed precision: which Linears stay in the source's dtype and which take smaller groups. Pure: no files, no tensors.

Every Linear has a menu of forms, each with its bytes and the loss it is expected to cause; `keep_top` and `fit_bits` pick
one form for each. Losses of different Linears are taken to add up, as they do to first order (HIGGS, arXiv 2411.17525,
calls it the linearity theorem).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from w3pack.errors import UsageError

_SHARE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*%")
_COUNT = re.compile(r"[0-9]+")


@dataclass(frozen=True)
class Form:
    """One way to store a Linear.

    Attributes:
        group_size: of the 3-bit form; None: as in the source.
        nbytes: what it takes, padding included.
        loss: what it is expected to cost, in any unit that is the same for all Linears; 0 as in the source.
    """

    group_size: int | None
    nbytes: int
    loss: float


@dataclass(frozen=True)
class Candidate:
    """A Linear and its menu.

    Attributes:
        module: its name.
        weights: rows x columns.
        forms: 3-bit ones first, then the source's.
    """

    module: str
    weights: int
    forms: tuple[Form, ...]

    @property
    def kept(self) -> Form:
        """The form of the source."""
        return next(form for form in self.forms if form.group_size is None)

    def packed(self, group_size: int) -> Form:
        """The 3-bit form of a group size."""
        return next(form for form in self.forms if form.group_size == group_size)


@dataclass(frozen=True)
class Mix:
    """What differs from Linear to Linear; part of `QuantizeOptions`, and so of what a run is resumed by.

    Attributes:
        asked: the option and its value, such as "--keep-top 5%".
        kept: Linears that stay in the dtype of the source, in the order of the checkpoint.
        group_sizes: Linears whose group size is not the one of the options, and theirs.
    """

    asked: str
    kept: tuple[str, ...] = ()
    group_sizes: tuple[tuple[str, int], ...] = ()

    @cached_property
    def sizes(self) -> dict[str, int]:
        """`group_sizes` to look up."""
        return dict(self.group_sizes)


@dataclass(frozen=True)
class KeepTop:
    """`--keep-top`: a share of the Linears' bytes in the source, 0 to 1, or a number of Linears."""

    share: float | None = None
    count: int | None = None


def parse_keep_top(text: str) -> KeepTop:
    """ "5%": Linears that hold 5 percent of the bytes; "3": three Linears."""
    share, count = _SHARE.fullmatch(text.strip()), _COUNT.fullmatch(text.strip())
    if share is not None and 0 < float(share[1]) < 100:
        return KeepTop(share=float(share[1]) / 100)
    if count is not None and 0 < len(text.strip()) < 10 and int(text) > 0:
        return KeepTop(count=int(text))
    raise UsageError(
        f"expected --keep-top as a share above 0% and below 100%, such as 5%, or a number of Linears, such as 3; got {text[:40]!r}"
    )


def keep_top(candidates: Sequence[Candidate], top: KeepTop, *, group_size: int) -> dict[str, int | None]:
    """Leave the most sensitive Linears as they are in the source.

    A number of Linears takes those of the largest loss. A share goes by loss for each byte of the source: Linears are
    taken in that order, and one that no longer fits into the share is passed over.

    Returns:
        Module -> group size, or None for those left as they are.

    Raises:
        UsageError: nothing fits into the share, or nothing would be left to quantise.
    """
    loss = {one.module: one.packed(group_size).loss for one in candidates}
    chosen: dict[str, int | None] = {one.module: group_size for one in candidates}
    if top.count is not None:
        if top.count >= len(candidates):
            raise UsageError(
                f"expected --keep-top to leave a Linear to quantise, got {top.count} of {len(candidates)}; name fewer"
            )
        for one in sorted(candidates, key=lambda one: -loss[one.module])[: top.count]:
            chosen[one.module] = None
        return chosen
    total = sum(one.kept.nbytes for one in candidates)
    room = (top.share or 0.0) * total
    smallest = min(one.kept.nbytes for one in candidates)
    if smallest > room:
        raise UsageError(
            f"expected --keep-top to have room for a Linear, the smallest of which holds {100 * smallest / total:.2g}% of the bytes, "
            f"got {100 * (top.share or 0.0):g}%; pass a larger share, or a number of Linears"
        )
    for one in sorted(candidates, key=lambda one: -loss[one.module] / one.kept.nbytes):
        if one.kept.nbytes <= room:
            chosen[one.module] = None
            room -= one.kept.nbytes
    return chosen


@dataclass(frozen=True)
class _Step:
    """From one form of a Linear to the next larger one worth taking."""

    candidate: int
    form: Form
    nbytes: int
    gain: float

    @property
    def order(self) -> tuple[float, int]:
        return -self.gain / self.nbytes, self.candidate


def fit_bits(
    candidates: Sequence[Candidate], bits: float, *, fixed_bytes: int = 0, fixed_weights: int = 0
) -> dict[str, int | None]:
    """Spend at most `bits` for each weight, where a byte buys the most.

    A multiple-choice knapsack, solved greedily: every Linear starts with its smallest form, and the steps along the lower
    convex hulls of (bytes, loss) are taken in the order of gain for each byte as long as they fit; then whatever still
    fits. The loss is above the least possible by at most the gain of one step (Sinha and Zoltners 1979).

    Args:
        candidates: menus.
        bits: upper bound of 8 * bytes / weights over candidates and what is fixed.
        fixed_bytes, fixed_weights: Linears whose form is given.

    Returns:
        Module -> group size, or None for those left as they are.

    Raises:
        UsageError: not even the smallest forms fit.
    """
    weights = fixed_weights + sum(one.weights for one in candidates)
    hulls = [_hull(one.forms) for one in candidates]
    least = fixed_bytes + sum(hull[0].nbytes for hull in hulls)
    left = int(bits * weights / 8) - least
    if left < 0:
        raise UsageError(
            f"expected --target-bits of at least {_up(8 * least / weights)}, which the smallest forms take, got {bits:g}; "
            "raise it, or try a larger --group-size"
        )
    chosen = [hull[0] for hull in hulls]
    stuck: set[int] = set()
    for step in sorted(_steps(hulls), key=lambda step: step.order):
        if step.candidate not in stuck and step.nbytes <= left:
            chosen[step.candidate] = step.form
            left -= step.nbytes
        else:
            stuck.add(step.candidate)  # its later steps start from the one that did not fit
    while True:
        more = [
            _Step(number, form, form.nbytes - chosen[number].nbytes, chosen[number].loss - form.loss)
            for number, one in enumerate(candidates)
            for form in one.forms
            if chosen[number].nbytes < form.nbytes <= chosen[number].nbytes + left and form.loss < chosen[number].loss
        ]
        if not more:
            return {one.module: form.group_size for one, form in zip(candidates, chosen, strict=True)}
        step = min(more, key=lambda step: (-step.gain, step.candidate))
        chosen[step.candidate] = step.form
        left -= step.nbytes


def _up(bits: float) -> str:
    """Rounded up to three digits after the point, so that the figure can be passed back."""
    return f"{-(-bits * 1000 // 1) / 1000:.3f}"


def _hull(forms: Sequence[Form]) -> list[Form]:
    """The forms on the lower convex hull of (bytes, loss), smallest first, each of less loss than the one before."""
    hull: list[Form] = []
    for form in sorted(forms, key=lambda form: (form.nbytes, form.loss)):
        if hull and form.loss >= hull[-1].loss:
            continue
        while len(hull) > 1 and _slope(hull[-2], form) >= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(form)
    return hull


def _slope(first: Form, second: Form) -> float:
    return (first.loss - second.loss) / (second.nbytes - first.nbytes)


def _steps(hulls: Sequence[Sequence[Form]]) -> list[_Step]:
    return [
        _Step(number, after, after.nbytes - before.nbytes, before.loss - after.loss)
        for number, hull in enumerate(hulls)
        for before, after in pairwise(hull)
    ]


def mix_of(chosen: Mapping[str, int | None], *, asked: str, group_size: int) -> Mix:
    """The part of a choice that departs from the options.

    Raises:
        UsageError: nothing would be quantised.
    """
    kept = tuple(module for module, size in chosen.items() if size is None)
    if len(kept) == len(chosen):
        raise UsageError(f"expected {asked} to leave a Linear to quantise, got none; lower it")
    return Mix(
        asked=asked,
        kept=kept,
        group_sizes=tuple((module, size) for module, size in chosen.items() if size is not None and size != group_size),
    )
